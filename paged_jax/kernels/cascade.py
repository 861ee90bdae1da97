"""Decode attention of sequences that begin with the same blocks: those are read once for all.

A shared system prompt, the samples of one prompt and the beams of a search have leading blocks in
common. The queries of all sequences over them are one decode of a single sequence with many query
heads, a product of matrices; what follows is read by each sequence for itself; and the two results
are merged (Juravsky et al., 2024, "Hydragen"; Ye et al., 2024, "Cascade Inference").
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.argument_names import names_arguments
from paged_jax.dims import bind
from paged_jax.kernels.attention import paged_attention
from paged_jax.kernels.backend import Pools
from paged_jax.kernels.checks import as_arrays, as_int32, check_sharding, pool_letters
from paged_jax.kernels.merge import merge_attention

# Tokens whose reading must be spared before the shared blocks get a pass of their own, which costs
# about 0.06 ms. From 2 cores.
_WORTHWHILE = 512


def choose_decode_attention(
    block_tables: jax.Array,
    context_lens: jax.Array,
    block_size: int,
    *,
    cascade: bool,
    sliding_window: int | None = None,
    backend: str | None = None,
) -> Callable[..., jax.Array]:
    """Choose how the layers of a decode step attend; shared blocks are counted once for all.

    Args:
      block_tables: integer ``[B, M]``, as for `paged_attention`.
      context_lens: integer ``[B]``.
      block_size: C, tokens in a block.
      cascade: whether blocks that all sequences begin with are read once for all of them, where
        tables of this size can make that worthwhile. Without a sliding window only.
      sliding_window, backend: see `paged_attention`.

    Returns:
      A function of queries ``[B, H, D]``, pools and layer: the attention, ``[B, H, D]``. It takes
      `scale`, `soft_cap` and `sinks` of `paged_attention`.
    """
    attention = functools.partial(paged_attention, sliding_window=sliding_window)
    B, M = block_tables.shape
    if cascade and (B - 1) * M * block_size >= _WORTHWHILE:
        num_shared = num_shared_blocks(block_tables, context_lens, block_size)
        attention = functools.partial(cascade_attention, num_shared=num_shared)

    def attend(q: jax.Array, pools: Pools, layer: int | jax.Array, **scores: Any) -> jax.Array:
        return attention(
            q,
            pools.k,
            pools.v,
            block_tables,
            context_lens,
            layer=layer,
            k_scale=pools.k_scale,
            v_scale=pools.v_scale,
            backend=backend,
            **scores,
        )

    return attend


def num_shared_blocks(
    block_tables: jax.Array, context_lens: jax.Array, block_size: int
) -> jax.Array:
    """Count the leading full blocks that all sequences have in common.

    Args:
      block_tables: integer ``[B, M]``, as for `paged_attention`.
      context_lens: integer ``[B]``; sequences without tokens are left out.
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


@names_arguments
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
      q, k_pool, v_pool, context_lens: see `paged_attention`.
      block_tables: integer ``[B, M]``, of which the first `num_shared` columns are the same in all
        rows with tokens, and all of them full blocks.
      num_shared: i32 ``[]``, at most what `num_shared_blocks` counts; it may be traced.
      layer, scale, soft_cap, k_scale, v_scale, sinks, backend, interpret: see `paged_attention`.

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
    letters = {"q": "BHD", "block_tables": "BM", "context_lens": "B"}
    named = as_arrays(
        "cascade_attention",
        q=q, block_tables=block_tables, context_lens=context_lens, k_pool=k_pool, v_pool=v_pool,
    )  # fmt: skip
    q = named["q"]
    shapes = {name: (named[name], letters[name]) for name in letters}
    pools = Pools(named["k_pool"], named["v_pool"], k_scale, v_scale)
    shapes |= pool_letters(pools, q.shape[-1] if q.ndim else 0)
    sizes = bind("cascade_attention", **shapes)
    check_sharding("cascade_attention", (named, pools))
    block_tables, context_lens = as_int32(
        "cascade_attention",
        block_tables=named["block_tables"], context_lens=named["context_lens"],
    )  # fmt: skip
    C, M = sizes["C"], sizes["M"]
    context_lens = jnp.clip(context_lens, 0, M * C)
    attend = functools.partial(
        _attend,
        pools=pools,
        layer=layer,
        scale=scale,
        soft_cap=soft_cap,
        backend=backend,
        interpret=interpret,
    )

    is_used = context_lens > 0
    num_shared = jnp.asarray(num_shared, jnp.int32)
    num_shared_tokens = num_shared * C
    # Clipped here, because `checkify.index_checks` ignores the mode of `jnp.take`.
    columns = jnp.clip(num_shared + jnp.arange(M, dtype=jnp.int32), 0, M - 1)
    rest = jnp.take(block_tables, columns, axis=1, mode="clip")
    num_own_tokens = jnp.where(is_used, context_lens - num_shared_tokens, 0)
    own_out, own_lse = attend(q, rest, num_own_tokens, sinks=sinks)

    def with_shared(own_out, own_lse):
        table = block_tables[jnp.argmax(is_used)]
        out, lse = _attend_to_shared(attend, q, table, num_shared_tokens, sizes["K"])
        out = jnp.where(is_used[:, None, None], out, 0)
        lse = jnp.where(is_used[:, None], lse, -jnp.inf)
        return merge_attention(out, lse, own_out, own_lse)[0]

    # A batch that shares nothing skips the second pass.
    return lax.cond(num_shared > 0, with_shared, lambda out, lse: out, own_out, own_lse)


def _attend(
    q: jax.Array, tables: jax.Array, lens: jax.Array, *, pools: Pools, **options: Any
) -> tuple[jax.Array, jax.Array]:
    return paged_attention(
        q,
        pools.k,
        pools.v,
        tables,
        lens,
        k_scale=pools.k_scale,
        v_scale=pools.v_scale,
        return_lse=True,
        **options,
    )


def _attend_to_shared(
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    q: jax.Array,
    table: jax.Array,
    num_tokens: jax.Array,
    num_kv_heads: int,
) -> tuple[jax.Array, jax.Array]:
    """Attend with all queries to the first tokens of one table: ``[B, H, D]`` and ``[B, H]``.

    All queries that read a KV head are the query heads of that one head, of one sequence.
    """
    (B, H, D), K = q.shape, num_kv_heads
    q_1BKGD = q.reshape(1, B, K, H // K, D)
    q_1HD = q_1BKGD.transpose(0, 2, 1, 3, 4).reshape(1, B * H, D)
    out, lse = attend(q_1HD, table[None], num_tokens[None])
    out = out.reshape(K, B, H // K, D).transpose(1, 0, 2, 3).reshape(B, H, D)
    return out, lse.reshape(K, B, H // K).transpose(1, 0, 2).reshape(B, H)
