r"""Decode attention on NVIDIA GPUs.

Flash-decoding (Dao et al., 2023) over the paged pool. A program instance attends to a part of a
sequence. It has the query heads of a KV head, and reads K and V once for all of them::

    sequence a           |step step step|  |step step step|    b   |step step|   visible tokens
                                |                 |                     |
    program instances       (head, 0)         (head, 1)             (head, 2)    G query heads
                                |                 |                     |
                         partial out, lse  partial out, lse             |        float32, [N, H, U]
                                \________________/                      |
    merged by the last             |                            |
    program instance of a       out, lse                     out, lse            [B, H, U]

A group with many query heads is cut into slices that fit the registers of a program instance. For
example, the group of a shared prefix has the query heads of all sequences. Each slice reads K and V
again, mostly from the L2 cache.

`paged_jax.kernels.kv_split` describes how sequences are split into parts and how the results are
merged. If the batch is not split, the kernel has no counters and no partial results.

The last program instance sees the partial results of all others, because the counter is incremented
by an atomic addition with acquire and release semantics on the whole GPU. A single thread of each
program instance executes the addition, between two barriers. All threads have stored their results
before the first barrier. No thread reads results before the second barrier, where Triton passes the
count to all threads (PTX ISA, Memory Consistency Model, "Causality Order").
"""

import functools
from collections.abc import Sequence
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
    divide,
    find_part,
    remainder,
    take_part,
    zero_counters,
)
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.pools import Half
from paged_jax.kernels.triton import tiles, tuning
from paged_jax.kernels.triton.pallas import Instructions, choose_instructions, pallas_call, plgpu


def decode(
    args: AttentionArgs,
    options: Options,
    *,
    interpret: Interpret = False,
    params: tuning.DecodeParams | None = None,
    num_parts: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query per sequence, in one launch; return the output and log-sum-exp.

    By default, `tuning.decode_params` chooses the launch parameters. The batch is split into about
    `num_parts` parts: 0 splits no sequence, None chooses the number by `choose_num_parts`.
    """
    B, M = args.block_tables.shape
    gpu, shape = gpu_device.device(), tuning.shape_of(args, options)
    group = _QueryGroup(shape.group, tuning.slice_size(shape))
    shape = shape._replace(group=group.slice_size)
    if params is None:
        params = tuning.decode_params(gpu.kind, shape)
    capacity = M * shape.block_size
    split = KVSplit(B, 0, params.step_tokens, capacity, options.sliding_window)
    if num_parts is None:
        resident = gpu.num_cores * tuning.programs_per_core(shape, params, gpu)
        num_slices = args.pools.num_kv_heads * group.num_slices
        num_parts = choose_num_parts(B, num_slices, split.max_steps, resident)
    return _decode(args, options, params, split._replace(num_parts=num_parts), group, interpret)


class _QueryGroup(NamedTuple):
    """Division of the query heads of a KV head into slices. A program instance has one slice.

    Attributes:
      size: number of query heads in the group (G).
      slice_size: maximum number of query heads in a slice. The last slice may have fewer.
    """

    size: int
    slice_size: int

    @property
    def num_slices(self) -> int:
        """Number of slices of the group."""
        return pl.cdiv(self.size, self.slice_size)


class _GroupSlice(NamedTuple):
    """The query heads of a program instance: a slice of the group of a KV head.

    Attributes:
      group: the group and its division into slices.
      head: the KV head.
      index: index of the slice in the group.
    """

    group: _QueryGroup
    head: jax.Array
    index: jax.Array | int

    def query_heads(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the query head of each row of a tile, and whether the row is in the slice."""
        group = self.group
        head_index = self.index * group.slice_size + rows
        is_row = rows < group.slice_size
        if group.size % group.slice_size:
            is_row &= head_index < group.size
        return self.head * group.size + head_index, is_row


@functools.partial(jax.jit, static_argnames=("options", "params", "split", "group", "interpret"))
def _decode(
    args: AttentionArgs,
    options: Options,
    params: tuning.DecodeParams,
    split: KVSplit,
    group: _QueryGroup,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    q, pools, block_tables, context_lens, _, sinks, layer = args
    B, H, D = q.shape
    U = options.output_dim(D)
    num_slices, N = pools.num_kv_heads * group.num_slices, split.num_programs
    words = pools.map(tiles.as_words)
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    results = [((B, H, U), q.dtype), ((B, H), jnp.float32)]
    counts, aliases = None, {}
    if split.num_parts:
        counts, aliases = zero_counters(args, num_slices), {0: len(results)}
        results += [(counts.shape, counts.dtype), ((N, H, U), jnp.float32), ((N, H), jnp.float32)]
    out, lse, *_ = pallas_call(
        functools.partial(
            _attend_kernel,
            options=options,
            pool_dtype=pools.dtype,
            split=split,
            group=group,
            instructions=choose_instructions(interpret),
        ),
        out_shape=[jax.ShapeDtypeStruct(*result) for result in results],
        grid=(num_slices, N),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(
            num_warps=params.num_warps, num_stages=params.num_stages
        ),
        interpret=interpret,
        name="paged_decode",
    )(counts, q, words, block_tables, context_lens, sinks, layers)
    return out, lse


def _attend_kernel(
    _zeros_ref: Any,
    q_ref: Any,
    pools: Any,
    tables_ref: Any,
    lens_ref: Any,
    sinks_ref: Any,
    layer_ref: Any,
    *result_refs: Any,
    options: Options,
    pool_dtype: Any,
    split: KVSplit,
    group: _QueryGroup,
    instructions: Instructions,
) -> None:
    place, program = pl.program_id(0), pl.program_id(1)
    head, slice_index = place, 0
    if group.num_slices > 1:
        head, slice_index = (f(place, group.num_slices) for f in (divide, remainder))
    group_slice, layer = _GroupSlice(group, head, slice_index), layer_ref[0]
    value_dim = result_refs[0].shape[2] if pools.shares_values else 0
    parts = tiles.parts_of(q_ref.shape[2], value_dim)

    def attend(part: KVPart) -> tuple[tuple[jax.Array, ...], jax.Array]:
        kv = tiles.KVHead(pools, pool_dtype, tables_ref, part.sequence, layer, head, parts)
        return _attend(q_ref, sinks_ref, kv, group_slice, part, split, options, instructions)

    if not split.num_parts:
        part = take_part(split, program, 0, 1, lens_ref[program])
        _store(result_refs, program, group_slice, *attend(part))
        return
    part = find_part(split, load_lengths(split, lens_ref), program)
    refs, counts_ref, partial_refs = result_refs[:2], result_refs[2], result_refs[3:]

    @pl.when(part.is_there)
    def _():
        results, is_whole = attend(part), part.count == 1
        _store(refs, part.sequence, group_slice, *results, is_whole)
        _store(partial_refs, program, group_slice, *results, ~is_whole)

    @pl.when(part.is_there & (part.count > 1))
    def _():
        @pl.when(is_last_part(counts_ref, (part.sequence, place), part.count, instructions))
        def _():
            rows = jnp.arange(tiles.num_rows(group.slice_size), dtype=jnp.int32)
            heads, is_row = group_slice.query_heads(rows)
            start, dtype = program - part.index, tiles.operand_dtype(q_ref.dtype, pool_dtype)
            out, lse = merge_parts(partial_refs, heads, is_row, start, part.count, dtype)
            _store(refs, part.sequence, group_slice, (out,), lse)


def _attend(
    q_ref: Any,
    sinks_ref: Any,
    kv: tiles.KVHead,
    group_slice: _GroupSlice,
    part: KVPart,
    split: KVSplit,
    options: Options,
    instructions: Instructions,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Attend with a slice of query heads to a part of a sequence.

    Returns:
      The output, f32 ``[R, lanes]`` for each array in a tile of values, and the log-sum-exp, f32
      ``[R]``.
    """
    dtype = tiles.operand_dtype(q_ref.dtype, kv.pool_dtype)
    num_rows, num_copies = _choose_rows(group_slice.group.slice_size, dtype)
    rows = jnp.arange(num_copies * num_rows, dtype=jnp.int32)
    heads, is_row = group_slice.query_heads(remainder(rows, num_rows))
    num_arrays = kv.elements_per_lane
    q = tuple(
        plgpu.load(
            q_ref.at[part.sequence, heads[:, None], lane[None]],
            mask=is_row[:, None] & (lane < head_part.end)[None],
            other=0,
        )
        for head_part in kv.parts
        for lane in _lanes(head_part, num_arrays)
    )
    sinks = None
    if sinks_ref is not None:
        # Only the first part of a sequence includes the sink, so that it counts once.
        sinks = plgpu.load(sinks_ref.at[heads], mask=is_row & (part.index == 0), other=-jnp.inf)
    is_rest = None if num_copies == 1 else rows >= num_rows
    softmax = _fold_part(q, num_arrays, sinks, is_rest, part, kv, options, split, instructions)
    return _join_copies(*tiles.finish(softmax, options), num_copies)


def _store(
    refs: Sequence[Any],
    place: jax.Array,
    group_slice: _GroupSlice,
    out: tuple[jax.Array, ...],
    lse: jax.Array,
    is_written: jax.Array | bool = True,
) -> None:
    """Store the output and the log-sum-exp of a slice of query heads.

    `refs` are the refs of the outputs, ``[N, H, U]``, and of the log-sum-exps, ``[N, H]``. Entry
    `place` of their first dimension is written.
    """
    out_ref, lse_ref = refs
    U = out_ref.shape[2]
    heads, is_row = group_slice.query_heads(jnp.arange(lse.size, dtype=jnp.int32))
    is_row = is_row & is_written
    for lane, array in zip(_lanes(tiles.HeadPart(0, U), len(out)), out, strict=True):
        plgpu.store(
            out_ref.at[place, heads[:, None], lane[None]],
            array.astype(out_ref.dtype),
            mask=is_row[:, None] & (lane < U)[None],
        )
    plgpu.store(lse_ref.at[place, heads], lse, mask=is_row)


# An mma instruction in half precision always multiplies 16 rows, even if some of them are padding.
_MMA_ROWS = 16


def _choose_rows(group: int, dtype: Any) -> tuple[int, int]:
    """Choose the number of rows for a group of query heads, and the number of copies of a row.

    Half precision keeps only 8 or 11 bits of a softmax weight. To keep more, the kernel also
    multiplies the rounding errors of the weights by the values, and adds both products. For large
    groups, this is a second matmul, which converts or reads the values again
    (`tiles.weigh_exactly`). Small groups would be padded to 16 rows anyway. For them, a single
    matmul has two copies of each row: one with the rounded weights, and one with their rounding
    errors (`tiles.weigh_by_copies`).
    """
    num_rows = tiles.num_rows(group)
    if dtype == jnp.float32 or 2 * num_rows > _MMA_ROWS:
        return num_rows, 1
    # Use two copies of 8 rows, even for smaller groups. With fewer than 16 rows, each matmul would
    # copy registers to pad them.
    return _MMA_ROWS // 2, 2


def _join_copies(
    out: tuple[jax.Array, ...], lse: jax.Array, num_copies: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Add the outputs of the copies of each row, see `_choose_rows`."""
    if num_copies == 1:
        return out, lse
    out = tuple(array.reshape(num_copies, -1, array.shape[1]).sum(axis=0) for array in out)
    return out, lse.reshape(num_copies, -1).max(axis=0)


def _lanes(part: tiles.HeadPart, num_arrays: int) -> tuple[jax.Array, ...]:
    """Return the indices of the lanes in each array of a tile.

    A single array holds all lanes of the head part. Two arrays hold the even and the odd lanes.
    """
    index = jnp.arange(tiles.num_lanes(part.size // num_arrays), dtype=jnp.int32)
    return tuple(index * num_arrays + (part.start + turn) for turn in range(num_arrays))


def _fold_part(
    q: tuple[jax.Array, ...],
    num_arrays: int,
    sinks: jax.Array | None,
    is_rest: jax.Array | None,
    part: KVPart,
    kv: tiles.KVHead,
    options: Options,
    split: KVSplit,
    instructions: Instructions,
) -> tiles.OnlineSoftmax:
    """Compute the softmax of queries over the tokens of a part.

    `q` has not been multiplied by ``options.scale``. A tile of values has `num_arrays` arrays, with
    the same numbers of lanes as the first `num_arrays` arrays of `q`. `is_rest`, bool ``[R]`` or
    None, is True for the second copy of each row, see `_choose_rows`.
    """
    dtype = tiles.operand_dtype(q[0].dtype, kv.pool_dtype)
    q, unit = tiles.fit_queries(q, dtype)
    weigh = tiles.weigh_exactly
    if is_rest is not None:
        weigh = functools.partial(tiles.weigh_by_copies, is_rest)
    softmax = tiles.start_softmax(
        q[0].shape[0],
        tuple(array.shape[1] for array in q[:num_arrays]),
        sinks,
        has_scales=kv.has_scales,
    )

    offsets = jnp.arange(split.step_tokens, dtype=jnp.int32)

    def tokens_of(step):
        index = step * split.step_tokens + offsets
        return part.first + index, part.first + index < part.length

    def fold_step(step, carry):
        softmax, block_ids = carry
        next_block_ids = kv.load_block_ids(*tokens_of(step + 1))
        positions, is_seen = tokens_of(step)
        tokens = block_ids, positions, is_seen
        k = _load_tile("k", tokens, kv, dtype, instructions)
        if kv.shares_values:
            v, k_scale = k[:num_arrays], kv.load_scales("k", *tokens)
            v_scale = k_scale
        else:
            v = _load_tile("v", tokens, kv, dtype, instructions)
            k_scale, v_scale = (kv.load_scales(half, *tokens) for half in ("k", "v"))
        scores, factor = tiles.score(q, unit, k, k_scale, is_seen[None], options)
        softmax = tiles.fold(softmax, scores, factor, v, v_scale, weigh, instructions)
        return softmax, next_block_ids

    carry = (softmax, kv.load_block_ids(*tokens_of(part.begin)))
    return lax.fori_loop(part.begin, part.end, fold_step, carry)[0]


def _load_tile(
    half: Half,
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    kv: tiles.KVHead,
    dtype: Any,
    instructions: Instructions,
) -> tuple[jax.Array, ...]:
    """Load a tile of K or V, in the dtype of the matmuls.

    Each head part is one array, or two arrays with the even and the odd lanes if the pool is
    quantised.
    """
    arrays = []
    for part in kv.parts:
        tile = kv.load_tile(half, part, *tokens)
        is_split = kv.elements_per_lane > 1
        arrays += instructions.split_words(tile, kv.pool_dtype) if is_split else [tile]
    return tuple(array.astype(dtype) for array in arrays)


# Number of elements of partial outputs that a merge loads at a time: 64 for each of 128 threads,
# for example 16 parts of 4 heads of 128 lanes. A merge loads half as many elements if heads are
# wider than `_WIDE` lanes or if it is in float32, because the sums then take more registers. If a
# merge loaded more elements, only two program instances would fit an SM, not three.
_MERGE_TILE = 8192
_WIDE = 128

# Initial peak (largest log-sum-exp so far) of a merge. With an initial peak of -inf,
# ``peak - new_peak`` would be NaN if no part has seen a token.
_LOWEST = float(np.finfo(np.float32).min)


def load_lengths(split: KVSplit, lens_ref: Any) -> jax.Array:
    """Load the lengths of the sequences from a ref of i32 ``[B]``, for `find_part`.

    The result is padded with zeros to a power of two.
    """
    rows = jnp.arange(pl.next_power_of_2(split.batch), dtype=jnp.int32)
    return plgpu.load(lens_ref.at[rows], mask=rows < split.batch, other=0)


def is_last_part(
    counts_ref: Any,
    place: tuple[jax.Array, ...],
    count: jax.Array,
    instructions: Instructions,
) -> jax.Array:
    """Increment the counter of a sequence; return whether its other parts have all ended.

    The program instance must have stored its partial result before the call.

    Args:
      counts_ref: i32 counters, which are zero when the kernel starts.
      place: indices of the counter: the sequence, and the slice of query heads.
      count: number of parts of the sequence.
      instructions: instructions of the kernel.
    """
    instructions.barrier()
    return plgpu.atomic_add(counts_ref, place, jnp.int32(1)) == count - 1


def merge_parts(
    partial_refs: Any,
    heads: jax.Array,
    is_row: jax.Array,
    start: jax.Array,
    count: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Merge the partial results of the parts of a sequence.

    Args:
      partial_refs: refs of the partial outputs, f32 ``[N, H, U]``, and of their log-sum-exp, f32
        ``[N, H]``. N is the number of program instances per KV head.
      heads: i32 ``[R]``, the query head of each row.
      is_row: bool ``[R]``, False for rows without a query head.
      start: i32 scalar, the first program instance of the sequence.
      count: i32 scalar, number of parts of the sequence.
      dtype: dtype of the operands of the kernel's matmuls.

    Returns:
      The output, f32 ``[R, lanes]``, and the log-sum-exp, f32 ``[R]``.
    """
    out_ref, lse_ref = partial_refs
    U = out_ref.shape[2]
    lanes = jnp.arange(tiles.num_lanes(U), dtype=jnp.int32)
    R = heads.size
    is_large = lanes.size > _WIDE or dtype == jnp.float32
    num_at_once = max((_MERGE_TILE // 2 if is_large else _MERGE_TILE) // (R * lanes.size), 1)
    turns = jnp.arange(num_at_once, dtype=jnp.int32)

    def fold(turn, carry):
        peak, total, out = carry
        index = turn * num_at_once + turns
        programs, is_read = start + index, (index < count)[:, None] & is_row[None]
        lse = plgpu.load(lse_ref.at[programs[:, None], heads[None]], mask=is_read, other=-jnp.inf)
        partial = plgpu.load(
            out_ref.at[programs[:, None, None], heads[None, :, None], lanes[None, None]],
            mask=is_read[:, :, None] & (lanes < U)[None, None],
            other=0.0,
        )
        new_peak = jnp.maximum(peak, jnp.max(lse, axis=0))
        decay, weights = jnp.exp(peak - new_peak), jnp.exp(lse - new_peak[None])
        out = out * decay[:, None] + jnp.sum(partial * weights[:, :, None], axis=0)
        return new_peak, total * decay + jnp.sum(weights, axis=0), out

    zeros = jnp.zeros((R,), jnp.float32)
    carry = (zeros + _LOWEST, zeros, jnp.zeros((R, lanes.size), jnp.float32))
    num_turns = divide(count + num_at_once - 1, num_at_once)
    peak, total, out = lax.fori_loop(0, num_turns, fold, carry)
    is_empty = total == 0
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return out / jnp.where(is_empty, 1.0, total)[:, None], lse
