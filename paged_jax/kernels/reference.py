"""What paged attention means: gather every token of the table, mask, softmax.

Nothing here is fast, and everything is plain. The other backends are tested against it, and it
against float64. JAX differentiates it as it stands.
"""

import functools

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import Options, Pools, Problem
from paged_jax.kernels.quantisation import wider_dtype


def refusal(problem: Problem) -> str | None:
    """Nothing is refused."""
    del problem
    return None


@functools.partial(jax.jit, static_argnames="options")
def decode(
    q: jax.Array,
    pools: Pools,
    block_tables: jax.Array,
    context_lens: jax.Array,
    sinks: jax.Array | None,
    layer: int | jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """One query per sequence: a chunk of one token, its last."""
    query_lens = jnp.minimum(context_lens, 1)
    out, lse = prefill(
        q[:, None], pools, block_tables, context_lens, query_lens, sinks, layer, options
    )
    if sinks is not None:
        # An empty sequence is a query all the same, and its softmax holds the sink; a padding row
        # of a chunk is no query.
        lse = jnp.where(context_lens[:, None, None] > 0, lse, sinks.astype(lse.dtype)[None, None])
    return out[:, 0], lse[:, 0]


@functools.partial(jax.jit, static_argnames="options")
def prefill(
    q: jax.Array,
    pools: Pools,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    sinks: jax.Array | None,
    layer: int | jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """A chunk of queries per sequence, causal."""
    B, T, H, D = q.shape
    K, C = pools.k.shape[2:4]
    dtype = wider_dtype(q.dtype, jnp.float32)
    tokens_T = jnp.arange(T, dtype=jnp.int32)
    is_query_BT = tokens_T[None] < query_lens[:, None]
    query_positions = (context_lens - query_lens)[:, None, None] + tokens_T[None, :, None]
    S = block_tables.shape[1] * C
    key_positions = jnp.arange(S, dtype=jnp.int32)[None, None]
    seen_BTS = is_query_BT[..., None] & (key_positions <= query_positions)
    if options.sliding_window is not None:
        seen_BTS &= key_positions > query_positions - options.sliding_window

    # A token that nobody sees may hold NaN, which neither a weight nor a gradient of zero removes.
    is_seen = seen_BTS.any(axis=1)[:, :, None, None]
    k_BSKD, v_BSKD = (
        jnp.where(is_seen, _gather(pool, scale, layer, block_tables, dtype)[..., :D], 0)
        for pool, scale in ((pools.k, pools.k_scale), (pools.v, pools.v_scale))
    )

    q_BTKGD = q.astype(dtype).reshape(B, T, K, H // K, D)
    scores = options.scale * jnp.einsum("btkgd,bskd->btkgs", q_BTKGD, k_BSKD, precision="highest")
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores_BTHS = jnp.where(seen_BTS[:, :, None], scores.reshape(B, T, H, S), -jnp.inf)
    if sinks is None:
        sinks = jnp.full(H, -jnp.inf, dtype)
    sinks_BTH = jnp.where(is_query_BT[..., None], sinks.astype(dtype)[None, None], -jnp.inf)
    peak = jnp.maximum(jnp.max(scores_BTHS, axis=-1, initial=-jnp.inf), sinks_BTH)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    weights_BTHS = jnp.exp(scores_BTHS - peak[..., None])
    total = jnp.sum(weights_BTHS, axis=-1) + jnp.exp(sinks_BTH - peak)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    weights = (weights_BTHS / total[..., None]).reshape(B, T, K, H // K, S)
    out = jnp.einsum("btkgs,bskd->btkgd", weights, v_BSKD, precision="highest")
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return out.reshape(B, T, H, D).astype(q.dtype), lse


def _gather(
    pool: jax.Array, scale: jax.Array | None, layer: int | jax.Array, tables: jax.Array, dtype
) -> jax.Array:
    """Tokens of every sequence in order, ``[B, M * C, K, D]``; entries out of range give NaN."""
    # Through rows that are in range, since small integers have no NaN to fill with.
    P = pool.shape[1]
    is_block = ((tables >= 0) & (tables < P))[:, :, None, None, None]
    rows = jnp.clip(tables, 0, P - 1)
    values = pool[layer][rows].astype(dtype)
    if scale is not None:
        values *= scale[layer][rows].astype(dtype)[..., None]
    values = jnp.where(is_block, values, jnp.nan)  # [B, M, K, C, D]
    B, M, K, C, D = values.shape
    return values.transpose(0, 1, 3, 2, 4).reshape(B, M * C, K, D)
