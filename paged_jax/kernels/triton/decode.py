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
from paged_jax.kernels.quantisation import is_quantised, product_dtype
from paged_jax.kernels.triton import tiles, tuning
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
            exp2=tiles.choose_exp2(interpret),
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
    exp2: tiles.Exp2,
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

    rows = jnp.arange(tiles.num_rows(G), dtype=jnp.int32)
    heads, is_row = head * G + rows, rows < G
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
    softmax = tiles.start_softmax(rows.size, tuple(lane.size for lane in lanes), sinks)
    out, lse = tiles.finish(_fold_part(softmax, q, part, options, step_tokens, exp2))

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


def _lanes(head_dim: int, num_arrays: int) -> tuple[jax.Array, ...]:
    """The lanes of a head that each array of a tile holds: all, or every other one."""
    index = jnp.arange(tiles.num_lanes(head_dim // num_arrays), dtype=jnp.int32)
    return tuple(index * num_arrays + turn for turn in range(num_arrays))


def _fold_part(
    softmax: tiles.Softmax,
    q: tuple[jax.Array, ...],
    part: _Part,
    options: Options,
    step_tokens: int,
    exp2: tiles.Exp2,
) -> tiles.Softmax:
    """Fold the tokens of a part into a softmax of the rows of `q`, which are not scaled."""
    q_dtype = q[0].dtype
    k_dtype = product_dtype(q_dtype, part.pool_dtype)
    v_dtype = tiles.value_dtype(q_dtype, part.pool_dtype)
    q = tuple(array.astype(k_dtype) for array in q)

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
        k = _load_heads(part.pools.k, place, part, k_dtype)
        v = _load_heads(part.pools.v, place, part, v_dtype)
        k_scale = tiles.load_scales(part.pools.k_scale, *place)
        v_scale = tiles.load_scales(part.pools.v_scale, *place)
        scores, factor = tiles.score(q, k, k_scale, is_seen[None], options)
        softmax = tiles.fold(softmax, scores, factor, v, v_scale, tiles.weigh_exactly, exp2)
        return softmax, next_block_ids

    carry = (softmax, block_ids_of(part.begin))
    return lax.fori_loop(part.begin, part.end, fold_step, carry)[0]


def _load_heads(
    pool_ref: Any, place: tuple[Any, Any, Any, Any, Any], part: _Part, dtype: Any
) -> tuple[jax.Array, ...]:
    """A tile of K or of V: one array, or its even and odd lanes if the pool is one of words."""
    if is_quantised(part.pool_dtype):
        words = tiles.load_heads(pool_ref, *place, part.head_dim // 2)
        return tiles.split_words(words, part.pool_dtype, dtype)
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
