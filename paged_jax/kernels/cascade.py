"""Decode attention of sequences that begin with the same blocks: those are read once for all.

A shared system prompt, the samples of one prompt and the beams of a search have leading blocks in
common. The queries of all sequences over them are one decode of a single sequence with many query
heads, a product of matrices; what follows is read by each sequence for itself; and the two results
are merged (Juravsky et al., 2024, "Hydragen"; Ye et al., 2024, "Cascade Inference").
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.dims import bind
from paged_jax.kernels.attention import paged_attention
from paged_jax.kernels.checks import as_arrays, as_int32, check_sharding
from paged_jax.kernels.merge import merge_attention

# Tokens whose reading must be spared before the shared blocks get a pass of their own, which costs
# about 0.06 ms. From 2 cores.
_WORTHWHILE = 512


def may_be_worthwhile(batch_size: int, max_blocks: int, block_size: int) -> bool:
    """Whether `num_shared_blocks` can be other than 0 for tables of this size.

    Example:
      >>> may_be_worthwhile(1, 1000, 16), may_be_worthwhile(8, 64, 16)
      (False, True)
    """
    return (batch_size - 1) * max_blocks * block_size >= _WORTHWHILE


def num_shared_blocks(
    block_tables: jax.Array, context_lens: jax.Array, block_size: int
) -> jax.Array:
    """Count the leading full blocks that all sequences have in common.

    Args:
      block_tables: integer ``[B, M]``, as for `paged_attention`.
      context_lens: integer ``[B]``; sequences without tokens have no say.
      block_size: C, tokens in a block.

    Returns:
      i32 ``[]``; 0 where the count is so small that reading them once is not worth it.

    Example:
      >>> tables, lens = jnp.array([[4, 2, 7], [4, 2, 1]]), jnp.array([1000, 1040])
      >>> int(num_shared_blocks(tables, lens, 512))
      1
    """
    B, M = block_tables.shape
    is_used = context_lens > 0
    first = block_tables[jnp.argmax(is_used)][None]
    is_same = jnp.all((block_tables == first) | ~is_used[:, None], axis=0)
    num_full = jnp.min(jnp.where(is_used, context_lens // block_size, M))
    is_shared = is_same & (jnp.arange(M, dtype=jnp.int32) < num_full)
    count = jnp.sum(jnp.cumprod(is_shared.astype(jnp.int32)), dtype=jnp.int32)
    spared = (jnp.sum(is_used, dtype=jnp.int32) - 1) * count * block_size
    return jnp.where(spared >= _WORTHWHILE, count, 0)


def cascade_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    num_shared: jax.Array,
    *,
    layer: int | jax.Array = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    backend: str | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `paged_attention`, reading the first `num_shared` blocks once for all sequences.

    Its result is `paged_attention`'s to rounding: unlike there, the last bits of a row may depend
    on whether the other rows share its blocks. It has no sliding window, which would end at a
    different token for each sequence.

    Args:
      q, k_pool, v_pool, context_lens: as for `paged_attention`.
      block_tables: integer ``[B, M]``, of which the first `num_shared` columns are the same in all
        rows with tokens, full blocks all.
      num_shared: i32 ``[]``, at most what `num_shared_blocks` counts; it may be traced.
      layer, scale, soft_cap, k_scale, v_scale, sinks, backend, interpret: as for `paged_attention`.

    Returns:
      ``[B, H, D]`` in the dtype of `q`, 0 where `context_lens` is 0.

    Raises:
      ValueError, NotImplementedError: as `paged_attention`.

    Example:
      >>> k_pool = v_pool = jnp.ones((1, 4, 2, 8, 16))       # 4 blocks of 8 tokens, 2 KV heads
      >>> tables = jnp.array([[2, 0], [2, 3]])               # block 2 is shared
      >>> out = cascade_attention(jnp.ones((2, 4, 16)), k_pool, v_pool, tables,
      ...                         jnp.array([11, 9]), jnp.int32(1))
      >>> out.shape
      (2, 4, 16)
    """
    letters = {"q": "BHD", "k_pool": "LPKCE", "block_tables": "BM", "context_lens": "B"}
    named = as_arrays(
        "cascade_attention",
        q=q, k_pool=k_pool, block_tables=block_tables, context_lens=context_lens,
    )  # fmt: skip
    sizes = bind("cascade_attention", **{name: (x, letters[name]) for name, x in named.items()})
    check_sharding("cascade_attention", named)
    B, H, D, K, C, M = (sizes[name] for name in "BHDKCM")
    q = named["q"]
    block_tables, context_lens = as_int32(
        "cascade_attention",
        block_tables=named["block_tables"], context_lens=named["context_lens"],
    )  # fmt: skip
    context_lens = jnp.clip(context_lens, 0, M * C)

    def attend(q, tables, lens, sinks=None):
        return paged_attention(
            q,
            k_pool,
            v_pool,
            tables,
            lens,
            layer=layer,
            scale=scale,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            return_lse=True,
            backend=backend,
            interpret=interpret,
        )

    is_used = context_lens > 0
    num_shared = jnp.asarray(num_shared, jnp.int32)
    num_shared_tokens = num_shared * C
    columns = num_shared + jnp.arange(M, dtype=jnp.int32)
    rest = jnp.take(block_tables, columns, axis=1, mode="clip")
    own_out, own_lse = attend(
        q, rest, jnp.where(is_used, context_lens - num_shared_tokens, 0), sinks
    )

    def with_shared(own_out, own_lse):
        # All queries that read a KV head are the query heads of that one head, of one sequence.
        q_1BKGD = q.reshape(1, B, K, H // K, D)
        q_1HD = q_1BKGD.transpose(0, 2, 1, 3, 4).reshape(1, B * H, D)
        table = block_tables[jnp.argmax(is_used)]
        out, lse = attend(q_1HD, table[None], num_shared_tokens[None])
        out = out.reshape(K, B, H // K, D).transpose(1, 0, 2, 3).reshape(B, H, D)
        lse = lse.reshape(K, B, H // K).transpose(1, 0, 2).reshape(B, H)
        out = jnp.where(is_used[:, None, None], out, 0)
        lse = jnp.where(is_used[:, None], lse, -jnp.inf)
        return merge_attention(out, lse, own_out, own_lse)[0]

    # A batch that shares nothing does not pay for the second pass.
    return lax.cond(num_shared > 0, with_shared, lambda out, lse: out, own_out, own_lse)
