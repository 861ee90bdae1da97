"""What paged attention means: gather every token of the table, mask, softmax.

Nothing here is fast, and everything is plain. The other backends are tested against it, and it
against float64.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def decode(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    **options,
) -> jax.Array:
    """One query per sequence: a chunk of one token, its last."""
    query_lens = jnp.minimum(context_lens, 1)
    return prefill(q[:, None], k_pool, v_pool, block_tables, context_lens, query_lens, **options)[
        :, 0
    ]


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap"))
def prefill(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """A chunk of queries per sequence, causal."""
    B, T, H, D = q.shape
    K = k_pool.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    k_BSKD = _gather(k_pool[layer], block_tables).astype(dtype)
    v_BSKD = _gather(v_pool[layer], block_tables).astype(dtype)
    key_positions = jnp.arange(k_BSKD.shape[1])[None, None]
    query_positions = (context_lens - query_lens)[:, None, None] + jnp.arange(T)[None, :, None]
    seen_BTS = (key_positions <= query_positions) & (key_positions < context_lens[:, None, None])
    seen_BTS &= (jnp.arange(T)[None] < query_lens[:, None])[..., None]
    if sliding_window is not None:
        seen_BTS &= key_positions > query_positions - sliding_window
    # A token that nobody sees may hold NaN, which a weight of zero would not remove.
    v_BSKD = jnp.where(seen_BTS.any(axis=1)[:, :, None, None], v_BSKD, 0)

    q_BTKGD = q.astype(dtype).reshape(B, T, K, H // K, D)
    scores_BKGTS = scale * jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD, precision="highest")
    if soft_cap is not None:
        scores_BKGTS = soft_cap * jnp.tanh(scores_BKGTS / soft_cap)
    seen = seen_BTS[:, None, None]
    scores_BKGTS = jnp.where(seen, scores_BKGTS, -jnp.inf)
    peak = jnp.max(scores_BKGTS, axis=-1, keepdims=True)
    weights = jnp.exp(scores_BKGTS - jnp.where(jnp.isfinite(peak), peak, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v_BSKD, precision="highest")
    return out.reshape(B, T, H, D).astype(q.dtype)


def _gather(pool_PKCD: jax.Array, block_tables: jax.Array) -> jax.Array:
    """Tokens of every sequence in order, ``[B, M * C, K, D]``; entries out of range give NaN."""
    blocks = pool_PKCD.at[block_tables].get(mode="fill", fill_value=jnp.nan)  # [B, M, K, C, D]
    B, M, K, C, D = blocks.shape
    return blocks.transpose(0, 1, 3, 2, 4).reshape(B, M * C, K, D)
