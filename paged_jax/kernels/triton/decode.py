"""Decode attention on NVIDIA GPUs: Pallas through the Triton backend.

Flash-decoding (Dao et al., 2023) over the paged pool. One program attends with the query heads of
one group, which share one read of K and V, to one part of one sequence::

                     split 0            split 1            split 2
    sequence b   |step step step|  |step step step|  |step step|        visible tokens, in steps
                        |                  |               |
    programs     (head, 0, b)       (head, 1, b)     (head, 2, b)       G rows of one dot each
                        |                  |               |
                 partial out, lse   partial out, lse  partial out, lse  float32
                        \\_________________ | ______________/
    merge                       (query head, b)                         out, lse

The visible tokens of each sequence (its real length, or its window) are divided evenly over the
splits, in whole steps; a part without tokens reads nothing. With one split there are no partial
results and no merge: one launch.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import AttentionArgs, Interpret, Options
from paged_jax.kernels.quantisation import is_quantised
from paged_jax.kernels.triton import tiles, tuning
from paged_jax.kernels.triton.instructions import Instructions, choose_instructions
from paged_jax.kernels.triton.pallas import pallas_call, plgpu

# For choosing the number of splits. Times are in loop steps of a program that shares the memory
# with as many others as are resident; they are estimates, not measurements.
_PROGRAMS_PER_CORE = 2
_START_STEPS = 2.0  # to launch a part, read its first block ids and fill the pipeline
_MERGE_STEPS = 2.0  # to launch the merge and run it
_MAX_SPLITS = 128  # what one program of the merge holds in registers


def decode(
    args: AttentionArgs,
    options: Options,
    *,
    interpret: Interpret = False,
    params: tuning.DecodeParams | None = None,
    num_splits: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One query for each sequence, in one launch or two.

    Args:
      args, options: the call, as `paged_jax.kernels.backend` says.
      interpret: how to interpret the kernel, if at all.
      params: launch parameters; those of `tuning` for this device and shape if None.
      num_splits: parts to divide each sequence into; `choose_num_splits` if None.
    """
    q, pools, block_tables = args[:3]
    B, H, D = q.shape
    K, C = pools.k.shape[2:4]
    device = tuning.device()
    if params is None:
        params = tuning.decode_params(
            device.kind,
            head_dim=D,
            group=H // K,
            block_size=C,
            q_dtype=q.dtype,
            pool_dtype=pools.k.dtype,
        )
    if num_splits is None:
        capacity = min(block_tables.shape[1] * C, options.sliding_window or math.inf)
        max_steps = math.ceil(capacity / params.step_tokens)
        num_splits = choose_num_splits(B, K, max_steps, device.num_cores)
    return _decode(args, options, params, num_splits, interpret)


@functools.partial(jax.jit, static_argnames=("options", "params", "num_splits", "interpret"))
def _decode(
    args: AttentionArgs,
    options: Options,
    params: tuning.DecodeParams,
    num_splits: int,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    q, pools, block_tables, context_lens, _, sinks, layer = args
    B, H, D = q.shape
    K = pools.k.shape[2]
    words = pools._replace(k=tiles.as_words(pools.k), v=tiles.as_words(pools.v))
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    parts = () if num_splits == 1 else (num_splits,)
    dtype = q.dtype if num_splits == 1 else jnp.float32
    out, lse = pallas_call(
        functools.partial(
            _attend_kernel,
            options=options,
            pool_dtype=pools.k.dtype,
            step_tokens=params.step_tokens,
            num_splits=num_splits,
            instructions=choose_instructions(interpret),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((B, H, *parts, D), dtype),
            jax.ShapeDtypeStruct((B, H, *parts), jnp.float32),
        ),
        grid=(K, num_splits, B),
        compiler_params=plgpu.CompilerParams(
            num_warps=params.num_warps, num_stages=params.num_stages
        ),
        interpret=interpret,
        name="paged_decode",
    )(q, words, block_tables, context_lens, sinks, layers)
    return (out, lse) if num_splits == 1 else _merge(out, lse, q.dtype, interpret)


def choose_num_splits(batch: int, kv_heads: int, max_steps: int, num_cores: int) -> int:
    """How many parts to divide each sequence into.

    Few enough that starting and merging parts costs little, many enough that all multiprocessors
    read. The kernel is limited by the bytes that it reads, and programs that still have work get
    the bandwidth: a batch takes its work divided over the resident programs, or its longest part,
    whichever is more. That is weighed for a batch of full sequences and for a ragged one.

    Args:
      batch, kv_heads: B and K.
      max_steps: loop steps over the longest sequence that the table holds.
      num_cores: multiprocessors of the device.

    Example:
      >>> choose_num_splits(1, 8, 2048, 132), choose_num_splits(256, 8, 128, 132)
      (34, 1)
    """
    resident = _PROGRAMS_PER_CORE * num_cores
    # One full sequence, and the others a quarter as long.
    ragged = (1 + 0.25 * (batch - 1)) / batch

    def time(splits: int, fill: float) -> float:
        work = batch * kv_heads * (fill * max_steps + splits * _START_STEPS)
        return max(work / resident, math.ceil(max_steps / splits) + _START_STEPS)

    def cost(splits: int) -> float:
        merge = 0.0 if splits == 1 else _MERGE_STEPS
        return (time(splits, 1.0) + time(splits, ragged)) / 2 + merge

    return min(range(1, min(max(max_steps, 1), _MAX_SPLITS) + 1), key=cost)


class _Part(NamedTuple):
    """One KV head of a part of a sequence, which is what a program reads: refs and scalars.

    Attributes:
      pools: refs, as `tiles.as_words` has made them.
      pool_dtype: type of the numbers in their words.
      head_dim: D.
      tables_ref: i32 ``[B, M]``.
      sequence, head, layer: indices of what is read.
      first, length: the first token that the query sees, and the end of the sequence.
      begin, end: loop steps, counted from `first`.
    """

    pools: Any
    pool_dtype: Any
    head_dim: int
    tables_ref: Any
    sequence: jax.Array
    head: jax.Array
    layer: jax.Array
    first: jax.Array
    length: jax.Array
    begin: jax.Array
    end: jax.Array


def _attend_kernel(
    q_ref: Any,
    pools: Any,
    tables_ref: Any,
    lens_ref: Any,
    sinks_ref: Any,
    layer_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    options: Options,
    pool_dtype: Any,
    step_tokens: int,
    num_splits: int,
    instructions: Instructions,
) -> None:
    head, split, sequence = (pl.program_id(axis) for axis in range(3))
    H, D = q_ref.shape[1:]
    G = H // pools.k.shape[2]
    # Bounded by the table: an address past an array is no error on a GPU.
    length = jnp.minimum(lens_ref[sequence], tables_ref.shape[1] * pools.k.shape[3])
    window = options.sliding_window
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    num_steps = tiles.divide(length - first + step_tokens - 1, step_tokens)
    begin, end = (tiles.divide(num_steps * cut, num_splits) for cut in (split, split + 1))
    part = _Part(
        pools, pool_dtype, D, tables_ref, sequence, head, layer_ref[0], first, length, begin, end
    )

    num_rows, num_copies = _choose_rows(G, tiles.operand_dtype(q_ref.dtype, pool_dtype))
    rows = jnp.arange(num_copies * num_rows, dtype=jnp.int32)
    heads, is_row = _heads(head, G, tiles.remainder(rows, num_rows))
    lanes = _lanes(D, num_arrays=2 if is_quantised(pool_dtype) else 1)
    q = tuple(
        plgpu.load(
            q_ref.at[sequence, heads[:, None], lane[None]],
            mask=is_row[:, None] & (lane < D)[None],
            other=0,
        )
        for lane in lanes
    )
    sinks = None
    if sinks_ref is not None:
        # They count once: in the first part.
        sinks = plgpu.load(sinks_ref.at[heads], mask=is_row & (split == 0), other=-jnp.inf)
    is_rest = None if num_copies == 1 else rows >= num_rows
    softmax = _fold_part(q, sinks, is_rest, part, options, step_tokens, instructions)
    out, lse = _join_copies(*tiles.finish(softmax), num_copies)

    heads, is_row = _heads(head, G, jnp.arange(num_rows, dtype=jnp.int32))
    place = () if num_splits == 1 else (split,)
    # The merge does not read the out of a part that has no lse.
    is_written = is_row if num_splits == 1 else is_row & (lse != -jnp.inf)
    for lane, array in zip(lanes, out, strict=True):
        plgpu.store(
            out_ref.at[sequence, heads[:, None], *place, lane[None]],
            array.astype(out_ref.dtype),
            mask=is_written[:, None] & (lane < D)[None],
        )
    plgpu.store(lse_ref.at[sequence, heads, *place], lse, mask=is_row)


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


def _heads(kv_head: jax.Array, group: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The query head of each row of a tile, and whether it is one of the group."""
    return kv_head * group + rows, rows < group


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
    part: _Part,
    options: Options,
    step_tokens: int,
    instructions: Instructions,
) -> tiles.Softmax:
    """The softmax of the rows of `q`, which are not scaled, over the tokens of a part.

    Args:
      sinks: None, or ``[R]``, as `tiles.start_softmax`.
      is_rest: None, or bool ``[R]``: rows that weigh what rounding takes from those of the others.
    """
    dtype = tiles.operand_dtype(q[0].dtype, part.pool_dtype)
    q, unit = tiles.fit_queries(q, dtype)
    weigh = tiles.weigh_exactly
    if is_rest is not None:
        weigh = functools.partial(tiles.weigh_by_copies, is_rest)
    softmax = tiles.start_softmax(
        q[0].shape[0],
        tuple(array.shape[1] for array in q),
        sinks,
        has_scales=is_quantised(part.pool_dtype),
    )

    def tokens_of(step):
        index = step * step_tokens + jnp.arange(step_tokens, dtype=jnp.int32)
        return part.first + index, part.first + index < part.length

    def block_ids_of(step):
        block_size = part.pools.k.shape[3]
        return tiles.load_block_ids(part.tables_ref, part.sequence, *tokens_of(step), block_size)

    def fold_step(step, carry):
        softmax, block_ids = carry
        next_block_ids = block_ids_of(step + 1)
        positions, is_seen = tokens_of(step)
        place = (part.layer, block_ids, part.head, positions, is_seen)
        k, v = (
            _load_heads(pool_ref, place, part, dtype, instructions)
            for pool_ref in (part.pools.k, part.pools.v)
        )
        k_scale = tiles.load_scales(part.pools.k_scale, *place)
        v_scale = tiles.load_scales(part.pools.v_scale, *place)
        scores, factor = tiles.score(q, unit, k, k_scale, is_seen[None], options)
        softmax = tiles.fold(softmax, scores, factor, v, v_scale, weigh, instructions)
        return softmax, next_block_ids

    carry = (softmax, block_ids_of(part.begin))
    return lax.fori_loop(part.begin, part.end, fold_step, carry)[0]


def _load_heads(
    pool_ref: Any,
    place: tuple[Any, Any, Any, Any, Any],
    part: _Part,
    dtype: Any,
    instructions: Instructions,
) -> tuple[jax.Array, ...]:
    """A tile of K or of V: one array, or its even and odd lanes if the pool is one of words."""
    if is_quantised(part.pool_dtype):
        words = tiles.load_heads(pool_ref, *place, part.head_dim // 2)
        return tuple(x.astype(dtype) for x in instructions.split_words(words, part.pool_dtype))
    return (tiles.load_heads(pool_ref, *place, part.head_dim).astype(dtype),)


def _merge(
    partial_out: jax.Array, partial_lse: jax.Array, dtype: Any, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    """Merge partial results f32 ``[B, H, splits, D]`` and their lse ``[B, H, splits]``."""
    B, H, num_splits, D = partial_out.shape
    # About 64 numbers of the tile in the registers of each of a warp's 32 threads.
    num_warps = pl.next_power_of_2(num_splits) * tiles.num_lanes(D) // (32 * 64)
    return pallas_call(
        _merge_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((B, H, D), dtype),
            jax.ShapeDtypeStruct((B, H), jnp.float32),
        ),
        grid=(H, B),
        compiler_params=plgpu.CompilerParams(num_warps=min(max(num_warps, 1), 16), num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(partial_out, partial_lse)


def _merge_kernel(partial_out_ref: Any, partial_lse_ref: Any, out_ref: Any, lse_ref: Any) -> None:
    head, sequence = pl.program_id(0), pl.program_id(1)
    num_splits, D = partial_out_ref.shape[2:]
    splits = jnp.arange(pl.next_power_of_2(num_splits), dtype=jnp.int32)
    lanes = jnp.arange(tiles.num_lanes(D), dtype=jnp.int32)
    lse = plgpu.load(
        partial_lse_ref.at[sequence, head, splits], mask=splits < num_splits, other=-jnp.inf
    )
    is_part = lse != -jnp.inf  # a NaN is a result too
    partial = plgpu.load(
        partial_out_ref.at[sequence, head, splits[:, None], lanes[None]],
        mask=is_part[:, None] & (lanes < D)[None],
        other=0.0,
    )
    peak = jnp.max(lse)
    weights = jnp.where(is_part, jnp.exp(lse - peak), 0.0)
    total = jnp.sum(weights)
    is_empty = total == 0
    out = jnp.sum(partial * weights[:, None], axis=0) / jnp.where(is_empty, 1.0, total)
    plgpu.store(out_ref.at[sequence, head, lanes], out.astype(out_ref.dtype), mask=lanes < D)
    lse_ref[sequence, head] = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
