"""Decode attention on NVIDIA GPUs: Pallas through the Triton backend.

Flash-decoding (Dao et al., 2023) over the paged pool. One program attends with the query heads of
one group, which share one read of K and V, to one part of one sequence::

    sequence a   |step step step|  |step step step|    b   |step step|     visible tokens, in steps
                        |                 |                     |
    programs        (head, 0)         (head, 1)             (head, 2)      G rows of one dot each
                        |                 |                     |
                 partial out, lse  partial out, lse             |          float32, [N, H, D]
                        \\________________/                      |
    merged by the program          |                            |
    of a that is done last     out, lse                     out, lse       [B, H, D]

A large group is cut into slices that fit the registers of a program. An example is the group of a
shared prefix, with the query heads of all sequences. Each slice reads K and V again, mostly from
the cache.

The parts follow from the real lengths, so that all programs read about as much: see `split`, and
`merge` for how the last program of a sequence knows that it is. A sequence of one part needs none
of this, and where no sequence is divided nobody counts.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import AttentionArgs, Half, Interpret, Options
from paged_jax.kernels.pool_format import is_quantised
from paged_jax.kernels.triton import tiles, tuning
from paged_jax.kernels.triton.pallas import Instructions, choose_instructions, pallas_call, plgpu
from paged_jax.kernels.triton.split_kv import (
    KVPart,
    KVSplit,
    choose_num_parts,
    find_part,
    is_last_part,
    load_lengths,
    merge_parts,
    take_part,
)


def decode(
    args: AttentionArgs,
    options: Options,
    *,
    interpret: Interpret = False,
    params: tuning.DecodeParams | None = None,
    num_parts: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One query for each sequence, in one launch.

    Args:
      args, options: the call, as `paged_jax.kernels.backend` says.
      interpret: how to interpret the kernel, if at all.
      params: launch parameters; those of `tuning` for this device and shape if None.
      num_parts: parts to divide the batch into, about, or 0 not to divide any sequence;
        `choose_num_parts` if None.
    """
    q, pools, block_tables = args[:3]
    B, H, D = q.shape
    K, C = pools.num_kv_heads, pools.block_size
    device = tuning.device()
    shape = tuning.Shape(D, H // K, C, q.dtype.name, pools.dtype.name)
    group = _Group(H // K, tuning.slice_size(shape))
    shape = shape._replace(group=group.slice_size)
    if params is None:
        params = tuning.decode_params(device.kind, **shape._asdict())
    capacity = block_tables.shape[1] * C
    split = KVSplit(B, 0, params.step_tokens, capacity, options.sliding_window)
    if num_parts is None:
        resident = device.num_cores * tuning.programs_per_core(shape, params, device)
        num_parts = choose_num_parts(B, K * group.num_slices, split.max_steps, resident)
    return _decode(args, options, params, split._replace(num_parts=num_parts), group, interpret)


class _Group(NamedTuple):
    """Group of query heads that read one KV head, cut into slices with a program for each.

    Attributes:
      size: number of query heads in the group (G).
      slice_size: maximum number of heads in a slice; the last slice may have fewer.
    """

    size: int
    slice_size: int

    @property
    def num_slices(self) -> int:
        """Number of slices of the group."""
        return pl.cdiv(self.size, self.slice_size)


@functools.partial(jax.jit, static_argnames=("options", "params", "split", "group", "interpret"))
def _decode(
    args: AttentionArgs,
    options: Options,
    params: tuning.DecodeParams,
    split: KVSplit,
    group: _Group,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    q, pools, block_tables, context_lens, _, sinks, layer = args
    B, H, D = q.shape
    num_slices, N = pools.num_kv_heads * group.num_slices, split.num_programs
    words = pools.map(tiles.as_words)
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    results = [((B, H, D), q.dtype), ((B, H), jnp.float32)]
    counts, aliases = None, {}
    if split.num_parts:
        counts, aliases = _zeros(args, num_slices), {0: len(results)}
        results += [(counts.shape, counts.dtype), ((N, H, D), jnp.float32), ((N, H), jnp.float32)]
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


def _zeros(args: AttentionArgs, num_slices: int) -> jax.Array:
    """Return zeroed counters, i32 ``[B, num_slices]``, for the parts of each sequence and slice.

    Not simply zeros: those of all layers would be one for XLA, of which each layer then has a copy
    made, in a launch of its own. Zeros that XLA takes for different ones, because they depend on
    the layer, all come out of one kernel. (A length below 0 is one of 0, which has no parts.) They
    depend on the tables, too: XLA makes one kernel of those that read the same array, unless that
    is a single number, as is the length of one sequence.
    """
    number = -1 - jnp.asarray(args.layer, jnp.int32)
    is_one = (args.context_lens == number) & (args.block_tables[:, 0] == number)
    return jnp.broadcast_to(is_one[:, None], (is_one.size, num_slices)).astype(jnp.int32)


class _Source(NamedTuple):
    """One KV head of the pools, of which a program reads a part: refs and scalars.

    Attributes:
      pools: refs, as `tiles.as_words` has made them.
      pool_dtype: type of the numbers in their words.
      head_dim: D.
      tables_ref: i32 ``[B, M]``.
      head, layer: indices of what is read.
      group: the query heads that read the KV head.
      slice_index: index of this program's slice in the group.
    """

    pools: Any
    pool_dtype: Any
    head_dim: int
    tables_ref: Any
    head: jax.Array
    layer: jax.Array
    group: _Group
    slice_index: jax.Array | int

    def query_heads(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the query head of each row of a tile, and whether the row is in the slice."""
        group = self.group
        place = self.slice_index * group.slice_size + rows
        is_row = rows < group.slice_size
        if group.size % group.slice_size:
            is_row &= place < group.size
        return self.head * group.size + place, is_row


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
    group: _Group,
    instructions: Instructions,
) -> None:
    place, program = pl.program_id(0), pl.program_id(1)
    head, slice_index = place, 0
    if group.num_slices > 1:
        head, slice_index = (f(place, group.num_slices) for f in (tiles.divide, tiles.remainder))
    source = _Source(
        pools, pool_dtype, q_ref.shape[2], tables_ref, head, layer_ref[0], group, slice_index
    )
    attend = functools.partial(
        _attend, q_ref, sinks_ref, source, options=options, instructions=instructions
    )
    if not split.num_parts:
        part = take_part(split, program, 0, 1, lens_ref[program])
        _store(result_refs, program, source, *attend(part, split))
        return
    part = find_part(split, load_lengths(split, lens_ref), program)
    refs, counts_ref, partial_refs = result_refs[:2], result_refs[2], result_refs[3:]

    @pl.when(part.is_there)
    def _():
        results, is_whole = attend(part, split), part.count == 1
        _store(refs, part.sequence, source, *results, is_whole)
        _store(partial_refs, program, source, *results, ~is_whole)

    @pl.when(part.is_there & (part.count > 1))
    def _():
        @pl.when(is_last_part(counts_ref, (part.sequence, place), part.count, instructions))
        def _():
            rows = jnp.arange(tiles.num_rows(group.slice_size), dtype=jnp.int32)
            heads, is_row = source.query_heads(rows)
            start, dtype = program - part.index, tiles.operand_dtype(q_ref.dtype, pool_dtype)
            out, lse = merge_parts(partial_refs, heads, is_row, start, part.count, dtype)
            _store(refs, part.sequence, source, (out,), lse)


def _attend(
    q_ref: Any,
    sinks_ref: Any,
    source: _Source,
    part: KVPart,
    split: KVSplit,
    *,
    options: Options,
    instructions: Instructions,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The result of a group over a part, as f32 ``[R, lanes]`` for each tuple of lanes, and lse."""
    dtype = tiles.operand_dtype(q_ref.dtype, source.pool_dtype)
    num_rows, num_copies = _choose_rows(source.group.slice_size, dtype)
    rows = jnp.arange(num_copies * num_rows, dtype=jnp.int32)
    heads, is_row = source.query_heads(tiles.remainder(rows, num_rows))
    lanes = _lanes(source.head_dim, num_arrays=2 if is_quantised(source.pool_dtype) else 1)
    q = tuple(
        plgpu.load(
            q_ref.at[part.sequence, heads[:, None], lane[None]],
            mask=is_row[:, None] & (lane < source.head_dim)[None],
            other=0,
        )
        for lane in lanes
    )
    sinks = None
    if sinks_ref is not None:
        # They count once: in the first part.
        sinks = plgpu.load(sinks_ref.at[heads], mask=is_row & (part.index == 0), other=-jnp.inf)
    is_rest = None if num_copies == 1 else rows >= num_rows
    softmax = _fold_part(q, sinks, is_rest, part, source, options, split, instructions)
    return _join_copies(*tiles.finish(softmax, options), num_copies)


def _store(
    refs: Sequence[Any],
    place: jax.Array,
    source: _Source,
    out: tuple[jax.Array, ...],
    lse: jax.Array,
    is_written: jax.Array | bool = True,
) -> None:
    """Write the result of a group into one row of ``[:, H, D]`` and ``[:, H]``."""
    out_ref, lse_ref = refs
    D = out_ref.shape[2]
    heads, is_row = source.query_heads(jnp.arange(lse.size, dtype=jnp.int32))
    is_row = is_row & is_written
    for lane, array in zip(_lanes(D, len(out)), out, strict=True):
        plgpu.store(
            out_ref.at[place, heads[:, None], lane[None]],
            array.astype(out_ref.dtype),
            mask=is_row[:, None] & (lane < D)[None],
        )
    plgpu.store(lse_ref.at[place, heads], lse, mask=is_row)


# An mma instruction of half precision multiplies 16 rows, whatever they hold.
_MMA_ROWS = 16


def _choose_rows(group: int, dtype: Any) -> tuple[int, int]:
    """Rows of a tile for the query heads of a group, and how many copies of them.

    A weight of half precision keeps 8 or 11 bits. What rounding takes from it is weighed too: by a
    second product, for which values are converted, or read, once more; or by rows of the same
    product that would else be padding. Then the copies differ in their weights and add up.
    """
    num_rows = tiles.num_rows(group)
    if dtype == jnp.float32 or 2 * num_rows > _MMA_ROWS:
        return num_rows, 1
    # Fewer would be padded, by registers that are copied for each product.
    return _MMA_ROWS // 2, 2


def _join_copies(
    out: tuple[jax.Array, ...], lse: jax.Array, num_copies: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The results of all rows as those of one copy: what the copies differ in adds up."""
    if num_copies == 1:
        return out, lse
    out = tuple(array.reshape(num_copies, -1, array.shape[1]).sum(axis=0) for array in out)
    return out, lse.reshape(num_copies, -1).max(axis=0)


def _lanes(head_dim: int, num_arrays: int) -> tuple[jax.Array, ...]:
    """The lanes of a head that each array of a tile holds: all, or every other one."""
    index = jnp.arange(tiles.num_lanes(head_dim // num_arrays), dtype=jnp.int32)
    return tuple(index * num_arrays + turn for turn in range(num_arrays))


def _fold_part(
    q: tuple[jax.Array, ...],
    sinks: jax.Array | None,
    is_rest: jax.Array | None,
    part: KVPart,
    source: _Source,
    options: Options,
    split: KVSplit,
    instructions: Instructions,
) -> tiles.Softmax:
    """The softmax of the rows of `q`, which are not scaled, over the tokens of a part.

    Args:
      sinks: None, or ``[R]``, as `tiles.start_softmax`.
      is_rest: None, or bool ``[R]``: rows that weigh what rounding takes from those of the others.
    """
    dtype = tiles.operand_dtype(q[0].dtype, source.pool_dtype)
    q, unit = tiles.fit_queries(q, dtype)
    weigh = tiles.weigh_exactly
    if is_rest is not None:
        weigh = functools.partial(tiles.weigh_by_copies, is_rest)
    softmax = tiles.start_softmax(
        q[0].shape[0],
        tuple(array.shape[1] for array in q),
        sinks,
        has_scales=source.pools.v_scale is not None,
    )

    offsets = jnp.arange(split.step_tokens, dtype=jnp.int32)

    def tokens_of(step):
        index = step * split.step_tokens + offsets
        return part.first + index, part.first + index < part.length

    def block_ids_of(step):
        block_size = source.pools.block_size
        return tiles.load_block_ids(source.tables_ref, part.sequence, *tokens_of(step), block_size)

    def fold_step(step, carry):
        softmax, block_ids = carry
        next_block_ids = block_ids_of(step + 1)
        positions, is_seen = tokens_of(step)
        place = (source.layer, block_ids, source.head, positions, is_seen)
        k, v = (_load_heads(half, place, source, dtype, instructions) for half in ("k", "v"))
        k_scale = tiles.load_scales(source.pools.k_scale, *place)
        v_scale = tiles.load_scales(source.pools.v_scale, *place)
        scores, factor = tiles.score(q, unit, k, k_scale, is_seen[None], options)
        softmax = tiles.fold(softmax, scores, factor, v, v_scale, weigh, instructions)
        return softmax, next_block_ids

    carry = (softmax, block_ids_of(part.begin))
    return lax.fori_loop(part.begin, part.end, fold_step, carry)[0]


def _load_heads(
    half: Half,
    place: tuple[Any, Any, Any, Any, Any],
    source: _Source,
    dtype: Any,
    instructions: Instructions,
) -> tuple[jax.Array, ...]:
    """A tile of K or of V: one array, or its even and odd lanes if the pool is one of words."""
    if is_quantised(source.pool_dtype):
        words = tiles.load_heads(source.pools, half, *place, source.head_dim // 2)
        return tuple(x.astype(dtype) for x in instructions.split_words(words, source.pool_dtype))
    return (tiles.load_heads(source.pools, half, *place, source.head_dim).astype(dtype),)
