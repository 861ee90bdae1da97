"""Paged attention in plain JAX, compiled by XLA: the backend of CPUs, and correct anywhere.

A tile of keys and values is gathered from the pool, small enough to still lie in the cache when
the two products read it, and folded into a running softmax (Milakov and Gimelshein, 2018). Loops
have dynamic bounds, so the cost follows the tokens and not the width of the table::

    decode    while tiles are left:   a few sequences x TILE tokens     longest sequences first
    prefill   for every QUERIES-row tile of every chunk:
                  while tiles are left: 1 sequence x TILE tokens       up to the diagonal

No sequence's result depends on another's: rows meet in batched products only, and every row sees
its own tiles in its own order.

The functions are jitted here, so that a model with many layers traces and lowers them once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.backend import Options, Pools, Problem
from paged_jax.kernels.xla.writing import BITS

# Bytes of keys (and as many of values) that a loop step of decode gathers: few enough to lie in a
# core's own cache, enough to make the fixed cost of a step small. From 2 cores with 1 MB each.
STEP_BYTES = 768 * 1024
# Most sequences that share a loop step of decode.
ROWS = 16
# Most tokens of a sequence in a loop step. Longer tiles waste more on short contexts.
TILE = 128
# Query tokens that share a loop step of prefill.
QUERIES = 128

# Finite, so that a row without any token yet gives exp(0) and not NaN; its weights are masked.
_LOWEST = -1e30


class _Softmax(NamedTuple):
    """A softmax-weighted sum in progress, over the tokens folded in so far."""

    peak: jax.Array  # f32 [..., K, R], largest score; R query rows share a KV head
    total: jax.Array  # f32 [..., K, R], sum of exp(score - peak)
    out: jax.Array  # f32 [..., K, R, D], sum of exp(score - peak) * value


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
    """One query per sequence. Shapes as in `paged_jax.kernels.backend`."""
    B, H, D = q.shape
    K, C = pools.k.shape[2:4]
    rows, tile = _decode_step(B, K, D)
    tile_blocks = _tile_blocks(tile, C, block_tables.shape[1])
    tile = tile_blocks * C
    starts = jnp.zeros_like(context_lens)
    if options.sliding_window is not None:
        starts = jnp.maximum(context_lens - options.sliding_window, 0)
    num_tiles = _ceil_div(context_lens, tile) - starts // tile

    # Longest first: the sequences that still have a tile are then always the leading ones.
    padded = _ceil_div(B, rows) * rows
    order = jnp.argsort(-num_tiles) if B > rows else jnp.arange(B, dtype=jnp.int32)
    order = jnp.pad(order, (0, padded - B), constant_values=B)
    starts, ends, num_tiles, tables, q_BKGD = (
        x.at[order].get(mode="fill", fill_value=0)
        for x in (
            starts,
            context_lens,
            num_tiles,
            block_tables,
            (q.astype(jnp.float32) * options.scale).reshape(B, K, H // K, D),
        )
    )

    def step(state):
        index, row, softmax = state

        def take(x):
            return lax.dynamic_slice_in_dim(x, row, rows)

        first_block = (take(starts) // tile + index) * tile_blocks
        positions = first_block[:, None] * C + jnp.arange(tile, dtype=jnp.int32)[None]
        seen = (positions >= take(starts)[:, None]) & (positions < take(ends)[:, None])
        columns = first_block[:, None] + jnp.arange(tile_blocks, dtype=jnp.int32)[None]
        blocks = jnp.take_along_axis(take(tables), columns, axis=1, mode="clip")
        folded = _fold(
            jax.tree.map(take, softmax),
            take(q_BKGD),
            *_gather(pools, layer, blocks, D),
            seen[:, None, None],
            seen[:, None],
            options.soft_cap,
        )
        softmax = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, row, axis=0),
            softmax,
            folded,
        )
        more = (row + rows < padded) & (num_tiles[jnp.minimum(row + rows, padded - 1)] > index)
        return jnp.where(more, index, index + 1), jnp.where(more, row + rows, 0), softmax

    limit = jnp.max(num_tiles)
    zero = jnp.zeros((), limit.dtype)
    empty = _empty(q_BKGD, None if sinks is None else sinks.reshape(1, K, H // K))
    *_, softmax = lax.while_loop(lambda state: state[0] < limit, step, (zero, zero, empty))
    out, lse = _finish(softmax)
    out, lse = out.reshape(padded, H, D), lse.reshape(padded, H)
    if B > rows:
        places = jnp.argsort(order)
        out, lse = out[places], lse[places]
    return out[:B].astype(q.dtype), lse[:B]


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
    """A chunk of queries per sequence. Shapes as in `paged_jax.kernels.backend`."""
    B, T, H, D = q.shape
    K, C = pools.k.shape[2:4]
    G = H // K
    tile_blocks = _tile_blocks(TILE, C, block_tables.shape[1])
    tile = tile_blocks * C
    queries = min(T, QUERIES)
    num_query_tiles = _ceil_div(T, queries)
    padded = num_query_tiles * queries
    q_BKTGD = (
        (q.astype(jnp.float32) * options.scale).reshape(B, T, K, G, D).transpose(0, 2, 1, 3, 4)
    )
    q_BKTGD = jnp.pad(q_BKTGD, ((0, 0), (0, 0), (0, padded - T), (0, 0), (0, 0)))

    def query_tile(index):
        b, first = index // num_query_tiles, index % num_query_tiles * queries
        start = context_lens[b] - query_lens[b] + first  # position of the tile's first query
        num_queries = jnp.clip(query_lens[b] - first, 0, queries)
        offsets = jnp.arange(queries, dtype=jnp.int32)
        query_positions = jnp.where(offsets < num_queries, start + offsets, -1)
        zero = jnp.zeros_like(b)  # a Python integer would be 64 bits wide under jax_enable_x64
        q_KRD = lax.dynamic_slice(
            q_BKTGD, (b, zero, first, zero, zero), (1, K, queries, G, D)
        ).reshape(K, queries * G, D)

        def step(key_tile, softmax):
            positions = key_tile * tile + jnp.arange(tile, dtype=jnp.int32)
            seen = positions[None] <= query_positions[:, None]
            if options.sliding_window is not None:
                seen &= positions[None] > query_positions[:, None] - options.sliding_window
            columns = key_tile * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)
            blocks = jnp.take(block_tables[b], columns, mode="clip")
            return _fold(
                softmax,
                q_KRD,
                *_gather(pools, layer, blocks, D),
                jnp.repeat(seen, G, axis=0)[None],
                (positions < start + num_queries)[None],
                options.soft_cap,
            )

        end = jnp.where(num_queries > 0, start + num_queries, 0)
        begin = 0
        if options.sliding_window is not None:
            begin = jnp.maximum(start - options.sliding_window + 1, 0)
        sinks_KR = None
        if sinks is not None:
            sinks_KR = jnp.tile(sinks.reshape(K, G), (1, queries))
        empty = _empty(q_KRD, sinks_KR)
        softmax = lax.fori_loop(begin // tile, _ceil_div(end, tile), step, empty)
        out, lse = _finish(softmax)
        lse = jnp.where(
            (offsets < num_queries)[None, :, None], lse.reshape(K, queries, G), -jnp.inf
        )
        return out.reshape(K, queries, G, D), lse

    out, lse = lax.map(query_tile, jnp.arange(B * num_query_tiles, dtype=jnp.int32))
    out = out.reshape(B, num_query_tiles, K, queries, G, D).transpose(0, 1, 3, 2, 4, 5)
    lse = lse.reshape(B, num_query_tiles, K, queries, G).transpose(0, 1, 3, 2, 4)
    out, lse = out.reshape(B, padded, H, D), lse.reshape(B, padded, H)
    return out[:, :T].astype(q.dtype), lse[:, :T]


def _decode_step(batch: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """How many sequences, and how many tokens of each, a loop step of decode takes."""
    num_tokens = max(STEP_BYTES // (num_kv_heads * head_dim * 4), TILE // 2)
    most = min(batch, ROWS, num_tokens // (TILE // 2))
    rows = _ceil_div(batch, _ceil_div(batch, most))  # equal shares, so that few rows are padding
    return rows, min(TILE, num_tokens // rows)


def _tile_blocks(tile: int, block_size: int, table_width: int) -> int:
    return min(max(tile // block_size, 1), table_width)


def _ceil_div(a, b):
    return -(-a // b)


def _gather(
    pools: Pools, layer: int | jax.Array, blocks: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Copy the blocks ``i32 [..., M]`` out of the pools: K and V, float32 ``[..., K, M * C, D]``.

    One head of one block is a row of the pool seen as a matrix: gathering rows needs no transpose,
    of the pool or of the result, and XLA copies a row at a time. Ids out of range are clipped; the
    caller masks them.
    """
    L, P, K = pools.k.shape[:3]
    heads = jnp.arange(K, dtype=blocks.dtype).reshape((1,) * (blocks.ndim - 1) + (K, 1))
    rows = (layer * P + jnp.clip(blocks, 0, P - 1))[..., None, :] * K + heads  # [..., K, M]

    def take(pool: jax.Array) -> jax.Array:
        gathered = _take_rows(pool.reshape(L * P * K, -1), rows)
        return gathered.reshape(*rows.shape[:-1], -1, *pool.shape[4:])

    k, v = (take(pool)[..., :head_dim].astype(jnp.float32) for pool in (pools.k, pools.v))
    if pools.k_scale is not None and pools.v_scale is not None:
        k, v = k * take(pools.k_scale)[..., None], v * take(pools.v_scale)[..., None]
    return k, v


def _take_rows(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    if matrix.dtype not in BITS:
        return _take_rows_as_is(matrix, rows)
    # XLA's CPU backend would convert the whole matrix to float32 first, at every call.
    return lax.platform_dependent(matrix, rows, cpu=_take_rows_as_bits, default=_take_rows_as_is)


def _take_rows_as_is(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    return matrix.at[rows].get(mode="promise_in_bounds")


def _take_rows_as_bits(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    # The barrier ties the cast to the rows of this step of the loop. Else XLA moves it out of the
    # loop, where it is a copy of the whole matrix and no longer part of the gather.
    matrix, rows = lax.optimization_barrier((matrix, rows))
    bits = lax.bitcast_convert_type(matrix, BITS[matrix.dtype])
    return lax.bitcast_convert_type(_take_rows_as_is(bits, rows), matrix.dtype)


def _empty(q: jax.Array, sinks: jax.Array | None) -> _Softmax:
    """A softmax over nothing but the sinks, if any, broadcast to the rows of ``q [..., D]``."""
    rows, out = q.shape[:-1], jnp.zeros(q.shape, jnp.float32)
    if sinks is None:
        peak = jnp.full(rows, _LOWEST, jnp.float32)
        return _Softmax(peak, jnp.zeros(rows, jnp.float32), out)
    peak = jnp.broadcast_to(jnp.maximum(sinks.astype(jnp.float32), _LOWEST), rows)
    return _Softmax(peak, jnp.ones(rows, jnp.float32), out)


def _fold(
    softmax: _Softmax,
    q: jax.Array,  # f32 [..., K, R, D], scaled
    k: jax.Array,  # f32 [..., K, N, D]
    v: jax.Array,  # f32 [..., K, N, D]
    seen: jax.Array,  # bool [..., 1, R or 1, N], does the query see the token?
    valid: jax.Array,  # bool [..., 1, N], is the token seen by anyone? Its value is finite then.
    soft_cap: float | None,
) -> _Softmax:
    scores = jnp.einsum("...rd,...nd->...rn", q, k, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, _LOWEST)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
    rescale = jnp.exp(softmax.peak - peak)
    # A weight of zero would not remove a NaN that lies beyond the sequence's tokens.
    v = jnp.where(valid[..., None], v, 0.0)
    return _Softmax(
        peak,
        softmax.total * rescale + jnp.sum(weights, axis=-1),
        softmax.out * rescale[..., None]
        + jnp.einsum("...rn,...nd->...rd", weights, v, precision="highest"),
    )


def _finish(softmax: _Softmax) -> tuple[jax.Array, jax.Array]:
    is_empty = softmax.total == 0
    total = jnp.where(is_empty, 1.0, softmax.total)
    lse = jnp.where(is_empty, -jnp.inf, softmax.peak + jnp.log(total))
    return softmax.out / total[..., None], lse
