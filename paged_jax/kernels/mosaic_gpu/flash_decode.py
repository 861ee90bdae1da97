r"""Decode attention with bulk copies and `mma`, for compute capability 9.0 and 10.x.

A thread block attends with the G query heads of a KV head to a part of a sequence, see
`paged_jax.kernels.kv_split`. Bulk copies (TMA) move whole blocks of K and V to a ring buffer of
tiles in shared memory, some loop steps ahead of the matmuls::

    pools [L, P, K, C, D]                 ring of tiles [stages, T, D]       registers
    table: 7 2 9 4 ...
    blocks 7 2 9 4 of the KV head  --->   tokens 0 .. T - 1        --->      step 0
                                   --->   tokens T .. 2 * T - 1    --->      step 1   ...

The rows of the first matmul are tokens, and the rows of the second matmul are elements of values.
All 16 rows that an `mma` instruction has per warp are therefore used. The columns are the query
heads, padded to R = 8 or 16::

    scores [T, R] = K [T, D] @ queries [D, R]
    out   [U, R] += V^T [U, T] @ weights [T, R]

Each warp computes the scores of some of the tokens, but needs the weights of all tokens for its
rows of the output. The warps therefore exchange the weights through shared memory, and compute the
maximum of the scores together. Half precision keeps only 8 or 11 bits of a weight, so another
matmul adds the products of the rounding errors of the weights with V.

Int8 and e4m3 elements of quantised pools are converted to half precision, which is exact. Keys are
converted in registers. Values are converted through a tile in shared memory, because the GPUs have
no common instruction that transposes 8-bit elements while it loads them. The scores are multiplied
by the scales of the keys. The weights are multiplied by the scales of the values before they are
rounded. Then weights and values are bfloat16, because weights times scales may exceed the range of
float16.

The thread block that finishes a sequence last merges the results of its parts. A group with more
query heads than fit the registers is cut into slices. Each slice has its own thread block, which
reads K and V again.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels import gpu_device
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.kv_split import (
    KVPart,
    KVSplit,
    choose_num_parts,
    find_part,
    take_part,
    zero_counters,
)
from paged_jax.kernels.mosaic_gpu.decode_tiles import (
    MIN_SLICE,
    MMA_COLUMNS,
    MMA_ROWS,
    WIDE,
    DecodeSizes,
    SharedTiles,
    TileCopies,
    cut_lanes,
    load_keys,
    load_queries,
    load_scales,
    load_sinks,
    rows_of,
    shared_tiles,
    widen_values,
)
from paged_jax.kernels.mosaic_gpu.launch import (
    TILE_LANES,
    AttentionInputs,
    GpuInstructions,
    attention_refusal,
    compute_tanh,
    is_narrow,
    launch,
    plgpu,
)
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.problem import Problem

# Initial peak (largest score so far) of the softmax. If it were -inf, ``peak - new_peak`` would be
# NaN before the first token.
_LOWEST = float(np.finfo(np.float32).min)

# The result for 8 query heads: f32 outputs ``[size, 8]``, one array per piece of the head, and the
# log-sum-exp ``[8]``.
_Result = tuple[tuple[jax.Array, ...], jax.Array]


def refusal(problem: Problem) -> str | None:
    """Return why this kernel does not support the decode `problem`, or None if it does."""
    reason = attention_refusal(problem) or problem.separate_values_refusal
    if reason is not None:
        return reason
    G, C, D, U = problem["H"] // problem["K"], problem["C"], problem["D"], problem.value_dim
    if D % TILE_LANES or U % MMA_ROWS:
        return f"keys and values must have a multiple of {TILE_LANES} elements, got {D} and {U}"
    sizes = DecodeSizes.choose(
        problem["B"], problem["M"], G, C, D, U, problem.shares_values, None,
        is_narrow(problem.pool_dtype),
    )  # fmt: skip
    if sizes.slice_size < min(G, MIN_SLICE):
        return (
            f"{G} query heads per KV head cannot be divided into equal slices of {MIN_SLICE} or "
            "more heads that fit the registers"
        )
    if not sizes.num_resident:
        return f"heads of {D} elements do not fit shared memory"
    return None


def decode(
    args: AttentionArgs, options: Options, *, interpret: Interpret = False,
    num_parts: int | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attend with one query per sequence, in one launch; return the output and log-sum-exp.

    The batch is split into about `num_parts` parts: 0 splits no sequence, None chooses the number
    by `choose_num_parts`. `interpret` runs the kernel in JAX's GPU simulator.
    """
    (B, H, D), pools, M = args.q.shape, args.pools, args.block_tables.shape[1]
    U, K = options.output_dim(D), pools.num_kv_heads
    sizes = DecodeSizes.choose(
        B, M, H // K, pools.block_size, D, U, pools.shares_values, options.sliding_window,
        is_narrow(pools.dtype),
    )  # fmt: skip
    if num_parts is None:
        resident = gpu_device.device().num_cores * max(sizes.num_resident, 1)
        num_places = H // sizes.slice_size
        num_parts = choose_num_parts(B, num_places, sizes.split.max_steps, resident)
    sizes = sizes._replace(split=sizes.split._replace(num_parts=num_parts))
    return _decode(args, options, sizes, interpret)


class _Outputs(NamedTuple):
    """Refs of the outputs and the partial results of the kernel, see `_decode`."""

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any


@functools.partial(jax.jit, static_argnames=("options", "sizes", "interpret"))
def _decode(
    args: AttentionArgs, options: Options, sizes: DecodeSizes, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    q, pools, block_tables, context_lens, _, sinks, layer = args
    (B, H, _), N = q.shape, sizes.split.num_programs
    num_places, U = H // sizes.slice_size, sizes.value_dim
    num_groups = pl.cdiv(sizes.slice_size, MMA_COLUMNS)
    inputs = AttentionInputs(
        work=_list_parts(sizes.split, context_lens),
        q=q,
        pools=pools,
        block_tables=block_tables,
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        sinks=sinks,
    )
    (out, lse, *_), _ = launch(
        functools.partial(
            _attend_kernel,
            options=options,
            sizes=sizes,
            instructions=GpuInstructions(is_simulated=bool(interpret)),
        ),
        "paged_decode",
        grid={"place": num_places, "program": N},
        arguments=[inputs],
        updated=[zero_counters(args, num_places)],
        outputs=[
            jax.ShapeDtypeStruct((B, H, U), q.dtype),
            jax.ShapeDtypeStruct((B, H), jnp.float32),
            jax.ShapeDtypeStruct((N, num_places, num_groups, U, MMA_COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((N, num_places, num_groups, MMA_COLUMNS), jnp.float32),
        ],
        scratch=[shared_tiles(sizes, num_groups, q.dtype, pools)],
        interpret=interpret,
    )
    return out, lse


def _list_parts(split: KVSplit, context_lens: jax.Array) -> jax.Array:
    """Return the fields of the `KVPart` of each thread block, i32 ``[N, 8]``.

    XLA computes the list once per model step, because all layers have the same lengths.
    """
    programs = jnp.arange(split.num_programs, dtype=jnp.int32)
    if split.num_parts:
        parts = jax.vmap(lambda program: find_part(split, context_lens, program))(programs)
    else:
        parts = jax.vmap(lambda n, length: take_part(split, n, 0, 1, length))(
            programs, context_lens
        )
    return jnp.stack([field.astype(jnp.int32) for field in parts], axis=1)


def _attend_kernel(
    inputs: AttentionInputs,
    counts_ref: Any,
    *refs: Any,
    options: Options,
    sizes: DecodeSizes,
    instructions: GpuInstructions,
) -> None:
    *output_refs, shared = refs
    outputs = _Outputs(*output_refs)
    place, program = lax.axis_index("place"), lax.axis_index("program")
    part = KVPart(*(inputs.work[program, field] for field in range(len(KVPart._fields))))

    @pl.when(part.is_there != 0)
    def _():
        copies = TileCopies(inputs, part, place, sizes, shared)
        copies.start_first()
        results = [
            _finish(softmax, columns, inputs.sinks, copies, options)
            for columns, softmax in enumerate(_fold_part(copies, options, instructions))
        ]
        is_whole = part.count == 1

        @pl.when(is_whole)
        def _():
            _store(outputs, copies, results)

        @pl.when(~is_whole)
        def _():
            _arrange(shared, results)
            instructions.store(shared.sums, outputs.partial_out.at[program, place])
            instructions.store(shared.rows, outputs.partial_lse.at[program, place])
            instructions.count(counts_ref, (part.sequence, place), shared.count, part.index)

            @pl.when(shared.count[0] == part.count - 1)
            def _():
                refs = outputs.partial_out, outputs.partial_lse
                start = program - part.index
                merged = [
                    _merge(refs, start, part.count, (place, columns))
                    for columns in range(len(results))
                ]
                _store(outputs, copies, merged)


class _WeightedSum(NamedTuple):
    """Online softmax and weighted sum of the values over the tokens so far, for 8 query heads.

    Attributes:
      peak: f32 ``[8]``, the largest score so far, times log2(e).
      total: f32 ``[T, 8]``, sums of weights. Their sum over T is the denominator of the softmax.
      out: f32 ``[size, 8]`` for each piece of a value, the weighted sum of the values.
    """

    peak: jax.Array
    total: jax.Array
    out: tuple[jax.Array, ...]


def _fold_part(
    copies: TileCopies, options: Options, instructions: GpuInstructions
) -> tuple[_WeightedSum, ...]:
    """Attend to the tokens of a part; return a weighted sum per group of 8 query heads."""
    sizes, shared, part = copies.sizes, copies.shared, copies.part
    T, num_groups = sizes.step_tokens, shared.rows.shape[0]
    start = _WeightedSum(
        jnp.full((MMA_COLUMNS,), _LOWEST, jnp.float32),
        jnp.zeros((T, MMA_COLUMNS), jnp.float32),
        tuple(jnp.zeros((size, MMA_COLUMNS), jnp.float32) for _, size in sizes.value_lanes),
    )
    plgpu.barrier_wait(shared.is_loaded)
    # The queries of wide heads do not fit the registers, so each loop step loads them again.
    queries = None if sizes.head_dim > WIDE else load_queries(copies)

    def fold(step, carry, *, is_masked):
        softmaxes, blocks = carry
        slot, position = copies.slot(step), part.first + step * T
        is_seen = None
        if is_masked:
            is_seen = functools.partial(_is_seen, position, part=part, options=options)
        plgpu.barrier_wait(shared.is_full.at[slot])
        weighed = []
        key_scales, value_scales = load_scales(shared, slot, is_seen)
        for columns, scores in enumerate(_score(copies, slot, queries, instructions)):
            if key_scales is not None:
                scores = scores * _as_rows(key_scales, scores.shape)
            scores = _scale(scores, options)
            if is_seen is not None:
                scores = jnp.where(is_seen(scores, 0), scores, -jnp.inf)
            softmax, weights = _weigh(softmaxes[columns], scores)
            if value_scales is not None:
                weights = weights * _as_rows(value_scales, weights.shape)
            for turn, x in enumerate(_split_rounding(weights, shared.weights.dtype)):
                rows_of(shared.weights.at[turn], columns)[...] = x
            weighed.append(softmax)
        if sizes.is_narrow:
            widen_values(copies, slot, is_seen)
        plgpu.commit_smem()
        blocks = copies.start_next(step, blocks)
        return tuple(_add_values(copies, slot, weighed, is_seen, instructions)), blocks

    carry = (start,) * num_groups, copies.load_blocks(part.begin + sizes.num_stages)
    # With a sliding window, apply the mask in all loop steps, and otherwise only in the last one.
    masked_begin = part.begin
    if options.sliding_window is None:
        masked_begin = jnp.clip(lax.div(part.length, jnp.int32(T)), part.begin, part.end)
        unmasked = functools.partial(fold, is_masked=False)
        carry = lax.fori_loop(part.begin, masked_begin, unmasked, carry)
    masked = functools.partial(fold, is_masked=True)
    return lax.fori_loop(masked_begin, part.end, masked, carry)[0]


def _score(
    copies: TileCopies,
    slot: jax.Array,
    queries: list[list[jax.Array]] | None,
    instructions: GpuInstructions,
) -> list[jax.Array]:
    """Return products of keys and queries, f32 ``[T, 8]`` for each group of 8 query heads.

    If `queries` is None, the queries are loaded from shared memory.
    """
    shared, T = copies.shared, copies.sizes.step_tokens
    scores = [jnp.zeros((T, MMA_COLUMNS), jnp.float32)] * shared.rows.shape[0]
    queries = load_queries(copies) if queries is None else queries
    for piece, ring in enumerate(shared.k):
        keys = load_keys(ring.at[slot], shared.q[0].dtype)
        for columns, pieces in enumerate(queries):
            scores[columns] = instructions.mma(scores[columns], keys, pieces[piece])
    return scores


def _add_values(
    copies: TileCopies,
    slot: jax.Array,
    softmaxes: list[_WeightedSum],
    is_seen: Callable[[jax.Array, int], jax.Array] | None,
    instructions: GpuInstructions,
) -> list[_WeightedSum]:
    """Add the values of a loop step, weighted by `shared.weights`, to the weighted sums."""
    shared = copies.shared
    weights = [
        [rows_of(shared.weights.at[turn], columns)[...] for turn in range(2)]
        for columns in range(len(softmaxes))
    ]
    outs = [list(softmax.out) for softmax in softmaxes]
    rings = [ring.at[slot] for ring in shared.v or shared.k[: len(outs[0])]]
    for piece, tile in enumerate(shared.values or rings):
        values = tile.transpose((1, 0))[...]
        if is_seen is not None and not copies.sizes.is_narrow:
            # Values of unused tokens may be NaN. Set them to 0, because 0 * NaN is NaN.
            values = jnp.where(is_seen(values, 1), values, jnp.zeros_like(values))
        for out, pair in zip(outs, weights, strict=True):
            for x in pair:
                out[piece] = instructions.mma(out[piece], values, x)
    return [x._replace(out=tuple(out)) for x, out in zip(softmaxes, outs, strict=True)]


def _finish(
    softmax: _WeightedSum, columns: int, sinks_ref: Any, copies: TileCopies, options: Options
) -> _Result:
    """Return the output and the log-sum-exp of a part for 8 query heads, including the sinks."""
    peak, total, out = softmax.peak, jnp.sum(softmax.total, axis=0), softmax.out
    if sinks_ref is not None:
        sinks = load_sinks(columns, sinks_ref, copies)
        new_peak = jnp.maximum(peak, sinks)
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + jnp.exp2(sinks - new_peak)
        out = tuple(x * _as_columns(decay, x.shape) for x in out)
        peak = new_peak
    lse = peak * np.float32(math.log(2)) + jnp.log(total)
    return _divide(out, total, lse, options.value_scale)


def _is_seen(
    start: jax.Array, like: jax.Array, axis: int, part: KVPart, options: Options
) -> jax.Array:
    """Return a mask of the shape of `like`: whether the query sees each token.

    The tokens lie along dimension `axis`. The first token is at position `start`.
    """
    position = plgpu.broadcasted_iota(jnp.int32, like.shape, axis) + start
    is_seen = position < part.length
    if options.sliding_window is not None:
        is_seen &= position >= part.length - options.sliding_window
    return is_seen


def _scale(scores: jax.Array, options: Options) -> jax.Array:
    """Apply the scale and the soft cap to scores, and multiply the result by log2(e)."""
    if options.soft_cap is None:
        return scores * np.float32(options.scale / math.log(2))
    capped = compute_tanh(scores * np.float32(options.scale / options.soft_cap))
    return np.float32(options.soft_cap / math.log(2)) * capped


def _weigh(softmax: _WeightedSum, scores: jax.Array) -> tuple[_WeightedSum, jax.Array]:
    """Add scores to the softmax, rescale `out` to the new peak, and return the weights."""
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=0))
    decay = jnp.exp2(softmax.peak - peak)
    weights = jnp.exp2(scores - _as_columns(peak, scores.shape))
    total = softmax.total * _as_columns(decay, scores.shape) + weights
    out = tuple(x * _as_columns(decay, x.shape) for x in softmax.out)
    return _WeightedSum(peak, total, out), weights


def _as_rows(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat a column ``[x]`` to ``[x, 8]``."""
    return lax.broadcast_in_dim(column, shape, [0])


def _as_columns(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat a row ``[8]`` to ``[x, 8]``."""
    return lax.broadcast_in_dim(row, shape, [1])


def _split_rounding(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round f32 numbers to a dtype; return them, and their rounding errors in the same dtype."""
    rounded = x.astype(dtype)
    return rounded, (x - rounded.astype(jnp.float32)).astype(dtype)


def _divide(
    out: tuple[jax.Array, ...], total: jax.Array, lse: jax.Array, value_scale: float = 1.0
) -> _Result:
    """Divide the output by `total`. If no token was seen, the output is 0 and `lse` is -inf."""
    is_empty = total == 0
    factor = np.float32(value_scale) / jnp.where(is_empty, jnp.ones_like(total), total)
    lse = jnp.where(is_empty, jnp.full_like(lse, -jnp.inf), lse)
    return tuple(x * _as_columns(factor, x.shape) for x in out), lse


def _merge(
    partial_refs: tuple[Any, Any],
    start: jax.Array,
    count: jax.Array,
    place: tuple[jax.Array, int],
) -> _Result:
    """Merge the partial results of a sequence that is split into `count` parts.

    Program instances ``start`` to ``start + count - 1`` have stored them in `partial_refs`. `place`
    contains two indices: the slice of query heads, and the group of 8 query heads in this slice.
    """
    out_ref, lse_ref = partial_refs
    pieces = cut_lanes(0, out_ref.shape[3])

    def fold(turn, carry):
        peak, total, out = carry
        index = start + turn, *place
        lse = plgpu.load(lse_ref.at[index], optimized=False)
        new_peak = jnp.maximum(peak, lse)
        decay, weight = jnp.exp(peak - new_peak), jnp.exp(lse - new_peak)
        out = tuple(
            x * _as_columns(decay, x.shape)
            + plgpu.load(out_ref.at[(*index, pl.ds(*lanes))], optimized=False)
            * _as_columns(weight, x.shape)
            for x, lanes in zip(out, pieces, strict=True)
        )
        return new_peak, total * decay + weight, out

    zeros = jnp.zeros((MMA_COLUMNS,), jnp.float32)
    out = tuple(jnp.zeros((size, MMA_COLUMNS), jnp.float32) for _, size in pieces)
    carry = (jnp.full_like(zeros, _LOWEST), zeros, out)
    peak, total, out = lax.fori_loop(0, count, fold, carry)
    return _divide(out, total, peak + jnp.log(total))


def _arrange(shared: SharedTiles, results: list[_Result]) -> None:
    """Store the results of all query heads in `shared.sums` and `shared.rows`."""
    for columns, (out, lse) in enumerate(results):
        for lanes, x in zip(cut_lanes(0, shared.sums.shape[1]), out, strict=True):
            shared.sums[columns, pl.ds(*lanes)] = x
        shared.rows[columns] = lse
    plgpu.commit_smem()


def _store(outputs: _Outputs, copies: TileCopies, results: list[_Result]) -> None:
    """Store the output and the log-sum-exp of a sequence in GPU memory."""
    shared, size, sequence = copies.shared, copies.sizes.slice_size, copies.part.sequence
    _arrange(shared, results)
    # In this layout, each of the four warps holds two of the 8 rows.
    tiling = plgpu.Tiling(((4, 32), (1,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    for columns in range(len(results)):
        heads = pl.ds(columns * MMA_COLUMNS, MMA_COLUMNS)
        for lanes, piece in zip(copies.sizes.value_lanes, shared.q):  # noqa: B905
            tile = shared.sums.at[columns, pl.ds(*lanes)].transpose((1, 0))
            out = plgpu.load(tile, layout=layout, optimized=False)
            piece[heads] = out.astype(piece.dtype)
    plgpu.commit_smem()
    for lanes, piece in zip(copies.sizes.value_lanes, shared.q):  # noqa: B905
        target = outputs.out.at[sequence, copies.query_heads, pl.ds(*lanes)]
        plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, size)], target)
    for turn in range(size):
        lse = shared.rows[turn // MMA_COLUMNS, turn % MMA_COLUMNS]
        outputs.lse[sequence, copies.first_query_head + turn] = lse
    plgpu.wait_smem_to_gmem(0)
