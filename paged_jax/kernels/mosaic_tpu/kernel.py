"""The attention kernel for TPUs: tiles, asynchronous copies, and the online softmax.

`paged_jax.kernels.mosaic_tpu` has a drawing of the grid steps and their tiles.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paged_jax.formatting import listed
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.padding import LANES
from paged_jax.kernels.problem import Problem

# Maximum number of 32-bit words of scalar memory for block tables and lengths. A TPU has 2**18
# words.
MAX_SCALARS = (1 << 18) - (1 << 13)

# Bytes of VMEM that a kernel may use. TPUs from v5e to 7x have at least 64 MiB. The compiler's
# default is 16 MiB.
VMEM_BYTES = 48 << 20

# Bytes of a tile of keys. A tile of values has the same size. A tile is copied while another tile
# is computed. A TPU v6e reads such a tile in about half a microsecond (1.6 TB/s), and the latency
# of a copy is about one microsecond.
_TILE_BYTES = 1 << 20
# Maximum number of tokens in a tile of keys. Longer tiles waste more work on short contexts.
_MAX_KEYS = 512
# Maximum number of rows (R) in a tile of queries. The matmuls take R operations for each byte of a
# bfloat16 pool. In the time that it takes to read a byte, a TPU v6e can do 560 operations, and a
# TPU v5e 240. With about this number of rows, the matmuls limit the speed, and more rows would not
# help.
_MAX_ROWS = 512
# Maximum bytes of the float32 outputs of a tile of queries. VMEM also holds keys and values, the
# queries and outputs of two grid steps, and the state of the softmax.
_ACCUMULATOR_BYTES = 2 << 20

# `_UNSEEN` is the score of a masked token, and `_LEAST_PEAK` the initial peak (largest score) of a
# row. The peak is finite, so that exp(_UNSEEN - peak) is 0, not NaN, in a row that has seen no
# token yet.
_UNSEEN = float("-inf")
_LEAST_PEAK = float(np.finfo(np.float32).min)


def dtype_refusal(problem: Problem, *pool_dtypes: str) -> str | None:
    """Return why a kernel does not support the dtypes of a call, or None if it does.

    Queries and pools must be bfloat16 or float32. Pools may also have one of `pool_dtypes`.
    """
    floats = "bfloat16", "float32"
    if jnp.dtype(problem.q_dtype).name not in floats:
        return f"queries must be {listed(*floats)}, got {problem.q_dtype}"
    return problem.pool_dtype_refusal(*floats, *pool_dtypes)


@dataclass(frozen=True)
class AttentionTiling:
    """Static sizes of the kernel.

    Attributes:
      queries: number of tokens in a tile of queries.
      num_query_tiles: number of tiles that cover the T query tokens of a sequence.
      blocks: number of blocks in a tile of keys.
      G: number of query heads in a group.
      C: number of tokens in a block.
      M: number of blocks in a row of the block table.
    """

    queries: int
    num_query_tiles: int
    blocks: int
    G: int
    C: int
    M: int

    @property
    def rows(self) -> int:
        """Number of rows in a tile of queries (R). A row is a pair of a token and a head."""
        return self.queries * self.G

    @property
    def keys(self) -> int:
        """Number of tokens in a tile of keys (N), a multiple of 128."""
        return self.blocks * self.C


def choose_tiling(T: int, G: int, M: int, k_pool: Any) -> AttentionTiling:
    """Choose tiles that fit VMEM, and that are copied in few, large copies.

    T is the number of query tokens of a sequence. See `AttentionTiling` for G and M. Only the shape
    and the dtype of `k_pool` are used.
    """
    *_, K, C, lanes = k_pool.shape
    rows = min(_MAX_ROWS, _ACCUMULATOR_BYTES // (K * lanes * 4))
    # Use a multiple of 16 tokens, because a bfloat16 register has 16 rows.
    queries = min(T, max(rows // G // 16, 1) * 16)
    keys = _TILE_BYTES // (K * lanes * k_pool.dtype.itemsize)
    keys = min(keys, _MAX_KEYS, M * C + LANES - 1) // LANES * LANES
    return AttentionTiling(
        queries=queries,
        num_query_tiles=pl.cdiv(T, queries),
        blocks=max(keys, LANES, C) // C,
        G=G,
        C=C,
        M=M,
    )


class PoolRefs(NamedTuple):
    """Refs of keys, values and scales: of the pools in HBM, or of buffers in VMEM.

    Attributes:
      k: keys: the pool ``[L, P, K, C, lanes]``, or a buffer ``[2, K, N, lanes]``.
      v: values, like `k`; None if each value vector is the beginning of its key vector.
      k_scale: scales of the keys, f32: of all sequences ``[B, K, M * C]``, or a buffer
        ``[2, K, N]``; None if the pools are not quantised.
      v_scale: scales of the values, like `k_scale`; None if there are no scales or no values.
    """

    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


class SoftmaxRefs(NamedTuple):
    """State of the online softmax in VMEM, over the tokens seen so far.

    Attributes:
      peak: f32 ``[K, R, 1]``, the largest score.
      total: f32 ``[K, R, 1]``, sum of ``exp(score - peak)``.
      out: f32 ``[K, R, U]``, sum of ``exp(score - peak) * value``.
    """

    peak: Any
    total: Any
    out: Any


class _Scalars(NamedTuple):
    """Refs of the kernel's arguments in scalar memory.

    Attributes:
      layer: i32 ``[1]``, index of the layer to read.
      block_tables: i32 ``[B * M]``, the block tables of all sequences.
      context_lens: i32 ``[B]``, number of tokens in each sequence.
      query_lens: i32 ``[B]``, number of tokens in each chunk.
    """

    layer: Any
    block_tables: Any
    context_lens: Any
    query_lens: Any


class _Span(NamedTuple):
    """The queries of a grid step, and the tokens that they see.

    Attributes:
      b: row of the sequence in the batch.
      start: position of the first query.
      num_queries: number of queries.
      begin: position of the first token that a query sees.
      end: position after the last token that a query sees.
    """

    b: Any
    start: Any
    num_queries: Any
    begin: Any
    end: Any


class _KeyTile(NamedTuple):
    """A tile of keys.

    Attributes:
      b: row of the sequence in the batch.
      index: index of the tile in its sequence.
      begin: column of the block table with the first block of the tile that a query sees.
      end: column after the last block of the tile that a query sees.
    """

    b: Any
    index: Any
    begin: Any
    end: Any


def attention_kernel(
    layer_ref,
    block_tables_ref,
    context_lens_ref,
    query_lens_ref,
    q_ref,
    sinks_ref,
    sources: PoolRefs,
    out_ref,
    lse_ref,
    buffers: PoolRefs,
    semaphores,
    slot_ref,
    softmax: SoftmaxRefs,
    *,
    tiling: AttentionTiling,
    options: Options,
) -> None:
    """Attend with the queries of a grid step.

    Also start to copy the first tile of keys of the next grid step.

    Args:
      layer_ref: see `_Scalars`.
      block_tables_ref: see `_Scalars`.
      context_lens_ref: see `_Scalars`.
      query_lens_ref: see `_Scalars`.
      q_ref: ``[K, R, D]``, the queries.
      sinks_ref: f32 ``[K, R, 1]``, the sink of each row; None for no sinks.
      sources: the pools in HBM.
      out_ref: ``[K, R, U]``, set to the output.
      lse_ref: f32 ``[K, R]``, set to the log-sum-exp.
      buffers: buffers in VMEM with two slots, one tile of keys each.
      semaphores: ``[2, 4]``, one semaphore for each slot of each of the four buffers.
      slot_ref: i32 ``[1]``, slot of the first tile. Each grid step sets it for the next grid step.
      softmax: state of the softmax.
      tiling: static sizes.
      options: options of the call.
    """
    scalars = _Scalars(layer_ref, block_tables_ref, context_lens_ref, query_lens_ref)
    grid_step, last_grid_step = pl.program_id(0), pl.num_programs(0) - 1
    span = _span(grid_step, scalars, tiling, options)
    next_span = _span(jnp.minimum(grid_step + 1, last_grid_step), scalars, tiling, options)
    first_index = div(span.begin, tiling.keys)
    # Loop over at least one tile, even if it is empty, because the loop also starts to copy the
    # first tile of the next grid step.
    num_tiles = jnp.maximum(_ceil_div(span.end, tiling.keys) - first_index, 1)
    copy_tile = functools.partial(
        _copy_tile,
        scalars=scalars,
        sources=sources,
        buffers=buffers,
        semaphores=semaphores,
        tiling=tiling,
    )

    @pl.when(grid_step == 0)
    def _():
        slot_ref[0] = 0
        copy_tile(_tile(span, first_index, tiling), 0, _start)

    def step(i, slot):
        tile = _tile(span, first_index + i, tiling)
        is_last = i == num_tiles - 1
        next_tile = jax.tree.map(
            functools.partial(jnp.where, is_last),
            _tile(next_span, div(next_span.begin, tiling.keys), tiling),
            _tile(span, first_index + i + 1, tiling),
        )

        @pl.when(~is_last | (grid_step < last_grid_step))
        def _():
            copy_tile(next_tile, 1 - slot, _start)

        @pl.when(tile.begin < tile.end)
        def _():
            copy_tile(tile, slot, _wait)
            _fold(span, tile.index, slot, q_ref, buffers, softmax, tiling, options)

        return 1 - slot

    _begin(softmax, sinks_ref)
    slot_ref[0] = lax.fori_loop(0, num_tiles, step, slot_ref[0])
    _finish(span, softmax, out_ref, lse_ref, tiling)


def _span(grid_step, scalars: _Scalars, tiling: AttentionTiling, options: Options) -> _Span:
    b = div(grid_step, tiling.num_query_tiles)
    first = (grid_step - b * tiling.num_query_tiles) * tiling.queries
    query_len = scalars.query_lens[b]
    num_queries = jnp.clip(query_len - first, 0, tiling.queries)
    start = scalars.context_lens[b] - query_len + first
    end = jnp.where(num_queries > 0, jnp.minimum(start + num_queries, tiling.M * tiling.C), 0)
    begin = jnp.zeros_like(end)
    if options.sliding_window is not None:
        begin = jnp.clip(start - options.sliding_window + 1, 0, end)
    return _Span(b, start, num_queries, begin, end)


def _tile(span: _Span, index, tiling: AttentionTiling) -> _KeyTile:
    first = index * tiling.blocks
    begin = jnp.maximum(div(span.begin, tiling.C), first)
    end = jnp.minimum(_ceil_div(span.end, tiling.C), first + tiling.blocks)
    return _KeyTile(span.b, index, begin, end)


def div(a, b: int):
    """Return ``a // b`` of non-negative numbers.

    Python's operator also handles signs. To lower the sign of a number, Mosaic queries the local
    TPU, even on a machine without a TPU (jax 0.10.2).
    """
    return lax.div(a, np.int32(b))  # With jax_enable_x64, a Python integer would be 64 bits wide.


def _ceil_div(a, b: int):
    return div(a + b - 1, b)


def _start(copy) -> None:
    copy.start()


def _wait(copy) -> None:
    copy.wait()


def _copy_tile(
    tile: _KeyTile,
    slot,
    act: Callable[[Any], None],
    *,
    scalars: _Scalars,
    sources: PoolRefs,
    buffers: PoolRefs,
    semaphores,
    tiling: AttentionTiling,
) -> None:
    """Call `act` for each copy of a key tile from HBM to buffer `slot`.

    `act` starts the copy, or waits for it.
    """
    C, N = tiling.C, tiling.keys
    last_block = sources.k.shape[1] - 1

    def copy_block(block, _):
        entry = scalars.block_tables[tile.b * tiling.M + block]
        place = scalars.layer[0], jnp.clip(entry, 0, last_block)
        tokens = pl.ds(pl.multiple_of((block - tile.index * tiling.blocks) * C, C), C)
        for i in range(2 if buffers.v is not None else 1):
            target = buffers[i].at[slot, :, tokens]
            act(pltpu.make_async_copy(sources[i].at[place], target, semaphores.at[slot, i]))

    lax.fori_loop(tile.begin, tile.end, copy_block, None)
    if sources.k_scale is None:
        return

    @pl.when(tile.begin < tile.end)
    def _():
        tokens = pl.ds(pl.multiple_of(tile.index * N, N), N)
        for i in range(2, 4 if buffers.v is not None else 3):
            scales = sources[i].at[tile.b, :, tokens]
            act(pltpu.make_async_copy(scales, buffers[i].at[slot], semaphores.at[slot, i]))


def _begin(softmax: SoftmaxRefs, sinks_ref) -> None:
    """Initialise the softmax.

    A sink is a part of the sum of weights, but not of the output.
    """
    softmax.out[...] = jnp.zeros_like(softmax.out)
    if sinks_ref is None:
        softmax.peak[...] = jnp.full_like(softmax.peak, _LEAST_PEAK)
        softmax.total[...] = jnp.zeros_like(softmax.total)
        return
    peak = jnp.maximum(sinks_ref[...], _LEAST_PEAK)
    softmax.peak[...] = peak
    softmax.total[...] = jnp.exp(sinks_ref[...] - peak)


def _fold(
    span: _Span,
    index,
    slot,
    q_ref,
    buffers: PoolRefs,
    softmax: SoftmaxRefs,
    tiling: AttentionTiling,
    options: Options,
) -> None:
    """Add key tile `index`, which is in buffer `slot`, to the softmax of each row."""
    K, R, D = q_ref.shape
    first = index * tiling.keys
    positions = first + lax.broadcasted_iota(jnp.int32, (1, tiling.keys), 1)
    is_token = (positions >= span.begin) & (positions < span.end)
    query_positions, is_query = _queries(span, tiling)
    seen_RN = is_token & is_query & (positions <= query_positions)
    if options.sliding_window is not None:
        seen_RN &= positions > query_positions - options.sliding_window

    @pl.when((first < span.begin) | (first + tiling.keys > span.end))
    def _():
        _clear_unseen(span, first, slot, buffers.k if buffers.v is None else buffers.v)

    is_float32 = jnp.float32 in (q_ref.dtype, buffers.k.dtype)
    dtype = jnp.float32 if is_float32 else jnp.bfloat16  # exact for quantised pools

    def fold_head(h, _):
        # Use only the first D lanes. The others are padding, which may be NaN.
        k = buffers.k[slot, h, :, :D].astype(dtype)
        if buffers.v is None:
            v, v_scale = k[:, : softmax.out.shape[2]], buffers.k_scale
        else:
            v, v_scale = buffers.v[slot, h, :, :D].astype(dtype), buffers.v_scale
        scores_RN = options.scale * _dot(q_ref[h].astype(dtype), k, contract=1)
        if buffers.k_scale is not None:
            scores_RN *= buffers.k_scale[slot, pl.ds(h, 1)]
        if options.soft_cap is not None:
            scores_RN = options.soft_cap * jnp.tanh(scores_RN / options.soft_cap)
        scores_RN = jnp.where(seen_RN, scores_RN, _UNSEEN)
        peak = jnp.maximum(softmax.peak[h], jnp.max(scores_RN, axis=1, keepdims=True))
        weights_RN = jnp.exp(scores_RN - peak)
        rescale = jnp.exp(softmax.peak[h] - peak)
        softmax.peak[h] = peak
        softmax.total[h] = softmax.total[h] * rescale + jnp.sum(weights_RN, axis=1, keepdims=True)
        if v_scale is not None:
            weights_RN *= jnp.where(is_token, v_scale[slot, pl.ds(h, 1)], 0)
        softmax.out[h] = softmax.out[h] * rescale + _weighted_sum(weights_RN, v)

    # With few rows, as in a decode, the computation of one head does not use all compute units. The
    # loop is then unrolled, so that the compiler overlaps several heads.
    lax.fori_loop(0, K, fold_head, None, unroll=R <= 16)


def _clear_unseen(span: _Span, first, slot, v_buffer) -> None:
    """Set values that no query sees to 0.

    They may be NaN, and a weight of 0 times NaN is NaN.
    """
    num_heads, num_keys = v_buffer.shape[1:3]
    positions = first + lax.broadcasted_iota(jnp.int32, (num_keys, 1), 0)
    is_token = (positions >= span.begin) & (positions < span.end)

    def clear(h, _):
        v = v_buffer[slot, h]
        v_buffer[slot, h] = jnp.where(is_token, v, 0).astype(v.dtype)

    lax.fori_loop(0, num_heads, clear, None)


def _finish(span: _Span, softmax: SoftmaxRefs, out_ref, lse_ref, tiling: AttentionTiling) -> None:
    """Write the output and the log-sum-exp of a tile of queries."""
    _, is_query = _queries(span, tiling)

    def finish_head(h, _):
        is_empty = (softmax.total[h] == 0) | ~is_query
        total = jnp.where(is_empty, 1, softmax.total[h])
        out_ref[h] = (softmax.out[h] / total).astype(out_ref.dtype)
        lse = jnp.where(is_empty, -jnp.inf, softmax.peak[h] + jnp.log(total))
        lse_ref[h] = lse[:, 0]

    lax.fori_loop(0, out_ref.shape[0], finish_head, None)


def _queries(span: _Span, tiling: AttentionTiling) -> tuple[jax.Array, jax.Array]:
    """Return the position of each row's token, ``[R, 1]``, and whether each row is a query."""
    token = div(lax.broadcasted_iota(jnp.int32, (tiling.rows, 1), 0), tiling.G)
    return span.start + token, token < span.num_queries


def _dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _weighted_sum(weights_RN: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply float32 weights by values ``[N, D]``, without rounding weights to bfloat16."""
    if v.dtype == jnp.float32:
        return _dot(weights_RN, v, contract=0)
    # Represent each weight by two bfloat16 numbers, with 16 bits in total. Both are rows of one
    # matmul, so that the values are loaded only once. Loading them dominates the cost of a matmul
    # with few rows.
    R = weights_RN.shape[0]
    high = weights_RN.astype(jnp.bfloat16)
    low = (weights_RN - high.astype(jnp.float32)).astype(jnp.bfloat16)
    sums = _dot(jnp.concatenate([high, low]), v, contract=0)
    return sums[:R] + sums[R:]
