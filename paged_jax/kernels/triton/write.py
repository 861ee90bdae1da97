"""Kernels that change the KV pools on NVIDIA GPUs: writes of K and V, and copies of blocks.

The kernels view a pool as rows, ``[L * P * K * C, D]``: one row for each token and KV head.

`write`: a program instance writes `_TILE` elements of K and of V, which are a few rows of each::

    k, v [N * K, D]                   pools [L * P * K * C, D]

    row 0  token 0, head 0       -->  row ((layer * P + blocks[0]) * K + 0) * C + offsets[0]
    row 1  token 0, head 1       -->  row ((layer * P + blocks[0]) * K + 1) * C + offsets[0]
    ...                               ...
    `- program instance 0 -'          (nothing if the layer, block or offset is out of range)

`rope_write`: a program instance processes one head of a tile of tokens. It reads the head in two
halves, because element i of the first half is rotated together with element i of the second half::

    qkv [N, K, G + 2, D], heads of each KV head:
            0 .. G - 1      G               G + 1
            queries         key             value
            norm, rotate    norm, rotate
            |               |               |
            v               v               v
         q [N, H, D]        rows of the pools

XLA would use four kernels per layer for these operations, three of which read `qkv`. In a decode
step, the kernels are so small that launching them would take most of the time.

`copy_blocks`: program instance (i, l) copies the i-th pair of a source and a target block in layer
l. A block is a contiguous range of ``K * C * D`` elements. Usually most of the pairs are unused.

The pools are aliased with the outputs. If they are donated, the rest of the pools is not read,
written or copied. For quantised pools, each program instance also computes the scales of its rows.

Pallas computes addresses in signed 32-bit integers, unless the array exceeds 2**32 bytes (jax
0.10.2 to 0.12, `_compute_offsets_from_indices` in `jax/_src/pallas/triton/lowering.py`). This
overflows in an array of 2 to 4 GiB with 1-byte elements. Pools of 1-byte elements are therefore
bitcast to 16-bit words of two neighbouring elements. XLA makes no copy for this.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.kv_split import divide, remainder
from paged_jax.kernels.op_args import CopyArgs, Options, RopeWriteArgs, WriteArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton.pallas import pallas_call, plgpu

# A program instance writes `_TILE` elements. In a `write`, it writes this number of elements of K
# and of V each, for example 16 rows of 128 elements. A decode step of 128 sequences with 8 heads
# then has 64 program instances, with 4 loads of 16 bytes in flight per thread. In a `rope_write`,
# these are elements of `qkv`, for example one head of 128 elements for 16 tokens. A decode step of
# 64 sequences with 32 + 2 * 8 heads then has 192 program instances.
_TILE = 2048
_WRITE_WARPS = 4
# A program instance of `copy_blocks` moves this number of 32-bit words at a time, 32 words per
# thread. For example, a block of 16 tokens and 8 heads of 128 bfloat16 elements has this size.
_COPY_TILE = 8192
_COPY_WARPS = 8


def refusal(problem: Problem) -> str | None:
    """Return why these kernels do not support a write or copy, or None if they do."""
    if (reason := problem.separate_values_refusal) is not None:
        return reason
    itemsize = jnp.dtype(problem.pool_dtype).itemsize
    block_bytes = problem["K"] * problem["C"] * problem.lanes * itemsize
    if problem.op == "copy_blocks" and block_bytes % 4:
        return f"blocks must have a multiple of 4 bytes, got {block_bytes}"
    if problem.op == "rope_write" and itemsize == 1 and problem["D"] % 4:
        return f"half a head must have an even number of bytes, got a head of {problem['D']}"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def write(args: WriteArgs, interpret: Interpret = False) -> Pools:
    """Write K and V of N tokens to one layer, in one launch; return the new pools."""
    pools, k, v, blocks, offsets, layer = args
    N, K, D = k.shape
    new = [x.reshape(N * K, -1) for x in (k, v) if x is not None]
    lanes = pl.next_power_of_2(D)
    rows = max(min(_TILE // lanes, pl.next_power_of_2(N * K)), 1)
    kernel = functools.partial(
        _write_kernel,
        num_halves=len(new),
        pool_shape=pools.k.shape,
        pool_dtype=pools.k.dtype,
        rows=rows,
        lanes=lanes,
    )
    written = call_in_place(
        kernel,
        "paged_write",
        jax.tree.map(_as_rows, pools),
        (jnp.reshape(layer, 1), blocks, offsets, *new),
        grid=(pl.cdiv(N * K, rows),),
        num_warps=_WRITE_WARPS,
        interpret=interpret,
    )
    return jax.tree.map(_from_words, written, pools)


def _write_kernel(layer_ref, blocks_ref, offsets_ref, *refs, num_halves, pool_shape, pool_dtype,
                  rows, lanes):  # fmt: skip
    # `refs` begins with the refs of the new K and V, or only of the new K if `num_halves` is 1.
    new_refs, pool_refs = refs[:num_halves], refs[num_halves:]
    num_new, D = new_refs[0].shape
    pool_refs = pool_refs[len(pool_refs) // 2 :]  # the outputs
    pool_refs, scale_refs = pool_refs[:num_halves], pool_refs[num_halves:]

    new = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    token, head = divide(new, pool_shape[2]), remainder(new, pool_shape[2])
    is_new = new < num_new
    row, is_kept = _find_rows(layer_ref, blocks_ref, offsets_ref, token, head, is_new, pool_shape)

    lane = jnp.arange(lanes, dtype=jnp.int32)[None]
    mask = is_new[:, None] & (lane < D)
    # Load K and V before storing either of them, so that the loads overlap.
    loaded = [plgpu.load(ref.at[new[:, None], lane], mask=mask, other=0.0) for ref in new_refs]
    scales = scale_refs or [None] * num_halves
    for pool_ref, scale_ref, values in zip(pool_refs, scales, loaded, strict=True):
        _store_rows(pool_ref, scale_ref, row, is_kept, [values], D, pool_dtype)


def _find_rows(
    layer_ref: Any,
    blocks_ref: Any,
    offsets_ref: Any,
    token: jax.Array,
    head: jax.Array,
    is_new: jax.Array,
    pool_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Return the row of the pool that each new row goes to, i32 ``[R]``, and whether it is written.

    The refs hold arrays of `WriteArgs`. `token` and `head`, i32 ``[R]`` or scalars, are the token
    and the KV head of each new row. `is_new`, bool ``[R]``, is False for padding rows.
    """
    L, P, K, C, _ = pool_shape
    layer = layer_ref[0]
    block = plgpu.load(blocks_ref.at[token], mask=is_new, other=-1)
    offset = plgpu.load(offsets_ref.at[token], mask=is_new, other=-1)
    is_kept = (block >= 0) & (block < P) & (offset >= 0) & (offset < C)
    is_kept &= (layer >= 0) & (layer < L)
    # If a row must not be written, set its index to a value past the end. A mask alone is not
    # enough: for a masked row, the interpreter writes the old value back to the index of the row,
    # which could undo another write.
    row = jnp.where(is_kept, ((layer * P + block) * K + head) * C + offset, L * P * K * C)
    return row, is_kept


def _store_rows(
    pool_ref: Any,
    scale_ref: Any,
    row: jax.Array,
    is_kept: jax.Array,
    parts: Sequence[jax.Array],
    head_dim: int,
    pool_dtype: Any,
) -> None:
    """Store rows in a pool, rounded to its dtype.

    Args:
      pool_ref: ref of a pool, reshaped by `_as_rows`.
      scale_ref: ref of the scales, f32 ``[L * P * K * C]``; None if the pool is not quantised.
      row: i32 ``[R]``, from `_find_rows`.
      is_kept: bool ``[R]``, from `_find_rows`.
      parts: the rows, floating point ``[R, lanes]``: a single array with all D elements, or several
        arrays that each have an equal share of the elements. Lanes after the last element are 0.
      head_dim: head dimension (D).
      pool_dtype: dtype of the pool before `_as_rows`.
    """
    part_dim, lanes = head_dim // len(parts), parts[0].shape[1]
    if scale_ref is not None:
        parts, scale = KVDtype.of(pool_dtype).quantise_parts(parts)
        plgpu.store(scale_ref.at[row], scale, mask=is_kept)
        parts = [_as_pairs(part) for part in parts]
    for i, part in enumerate(parts):
        # If the pool is quantised, `_as_pairs` has combined pairs of elements into words, so `part`
        # has half as many columns as before.
        width = part.shape[1]
        num_words = part_dim * width // lanes
        word = jnp.arange(width, dtype=jnp.int32)[None]
        mask = is_kept[:, None] & (word < num_words)
        place = pool_ref.at[row[:, None], i * num_words + word]
        plgpu.store(place, part.astype(pool_ref.dtype), mask=mask)


def _as_pairs(values: jax.Array) -> jax.Array:
    """Combine pairs of bytes ``[R, lanes]`` into 16-bit words ``[R, lanes // 2]``.

    The first byte of a pair is the low byte of the word.
    """
    rows, lanes = values.shape
    bits = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.int32)
    bits = bits.reshape(rows, lanes // 2, 2)
    weight = jnp.where(lax.broadcasted_iota(jnp.int32, bits.shape, 2) == 0, 1, 256)
    return jnp.sum(bits * weight, axis=2).astype(jnp.uint16)


def _as_rows(pool: jax.Array) -> jax.Array:
    """Reshape a pool to rows ``[L * P * K * C, D]``, and scales to ``[L * P * K * C]``.

    1-byte elements are bitcast to 16-bit words.
    """
    rows = pool.reshape(-1, *pool.shape[4:])
    return rows if pool.dtype.itemsize > 1 else tiles.to_words(rows, jnp.uint16)


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def rope_write(
    args: RopeWriteArgs, options: Options, interpret: Interpret = False
) -> tuple[jax.Array, Pools]:
    """Run `paged_rope_write` in one launch; return the rotated queries and the new pools."""
    pools, (N, K, width, D) = args.pools, args.qkv.shape
    num_heads, H, half_lanes = K * width, K * (width - 2), pl.next_power_of_2(D // 2)
    rows = max(min(_TILE // (2 * half_lanes), pl.next_power_of_2(N)), 1)
    kernel = functools.partial(
        _rope_write_kernel,
        pool_shape=pools.k.shape,
        pool_dtype=pools.k.dtype,
        group_size=width - 2,
        rows=rows,
        half_lanes=half_lanes,
        norm_eps=options.norm_eps,
        has_norms=args.norms is not None,
    )
    layer, qkv = jnp.reshape(args.layer, 1), args.qkv.reshape(N * num_heads, D)
    q, written = call_in_place(
        kernel,
        "paged_rope_write",
        jax.tree.map(_as_rows, pools),
        (layer, args.blocks, args.offsets, qkv, args.cos, args.sin, *(args.norms or ())),
        grid=(num_heads * pl.cdiv(N, rows),),
        num_warps=_WRITE_WARPS,
        interpret=interpret,
        out=jax.ShapeDtypeStruct((N * H, D), KVDtype.of(pools.dtype).query_dtype),
    )
    return q.reshape(N, H, D), jax.tree.map(_from_words, written, pools)


def _rope_write_kernel(
    layer_ref, blocks_ref, offsets_ref, qkv_ref, cos_ref, sin_ref, *refs,
    pool_shape, pool_dtype, group_size, rows, half_lanes, norm_eps, has_norms,
):  # fmt: skip
    K, G = pool_shape[2], group_size
    (N, half), num_heads, H = cos_ref.shape, K * (G + 2), K * G
    norm_refs, refs = (refs[:2], refs[2:]) if has_norms else ((None, None), refs)
    num_pools = len(refs) // 2
    q_ref, k_pool_ref, v_pool_ref, *scale_refs = refs[num_pools:]  # the outputs
    k_scale_ref, v_scale_ref = scale_refs or (None, None)

    # Number the program instances so that consecutive ones read consecutive heads of the same tile
    # of tokens.
    head = lax.rem(pl.program_id(0), jnp.int32(num_heads))
    kv_head, head_index = lax.div(head, jnp.int32(G + 2)), lax.rem(head, jnp.int32(G + 2))
    token = lax.div(pl.program_id(0), jnp.int32(num_heads)) * rows
    token += jnp.arange(rows, dtype=jnp.int32)
    is_token = token < N
    lane = jnp.arange(half_lanes, dtype=jnp.int32)[None]
    mask = is_token[:, None] & (lane < half)

    def load(ref: Any, row: jax.Array, start: int = 0) -> jax.Array:
        elements = ref.at[row[:, None], start + lane]
        return plgpu.load(elements, mask=mask, other=0.0).astype(jnp.float32)

    halves = [load(qkv_ref, token * num_heads + head, start) for start in (0, half)]

    def rotated(norm_ref: Any) -> list[jax.Array]:
        first, second = halves
        if norm_ref is not None:
            first, second = _normed(first, second, norm_ref, lane, half, norm_eps)
        cos, sin = load(cos_ref, token), load(sin_ref, token)
        return [first * cos - second * sin, second * cos + first * sin]

    def write(pool_ref: Any, scale_ref: Any, parts: list[jax.Array]) -> None:
        row, is_kept = _find_rows(
            layer_ref, blocks_ref, offsets_ref, token, kv_head, is_token, pool_shape
        )
        _store_rows(pool_ref, scale_ref, row, is_kept, parts, 2 * half, pool_dtype)

    @pl.when(head_index < G)
    def _():
        # Padding rows get an index past the end, for the reason explained in `_find_rows`.
        row = jnp.where(is_token, token * H + kv_head * G + head_index, N * H)
        for start, part in zip((0, half), rotated(norm_refs[0]), strict=True):
            elements = q_ref.at[row[:, None], start + lane]
            plgpu.store(elements, part.astype(q_ref.dtype), mask=mask)

    @pl.when(head_index == G)
    def _():
        write(k_pool_ref, k_scale_ref, rotated(norm_refs[1]))

    @pl.when(head_index == G + 1)
    def _():
        write(v_pool_ref, v_scale_ref, halves)


def _normed(
    first: jax.Array, second: jax.Array, norm_ref: Any, lane: jax.Array, half: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Apply `paged_jax.kernels.norm_rope.rms_norm` to heads that are split into two halves."""
    total = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
    # Multiply by 1 / D, because Triton's division is approximate. XLA also compiles the division by
    # a constant to a multiplication.
    factor = lax.rsqrt(total * np.float32(1 / (2 * half)) + eps)[:, None]
    w_first, w_second = (
        plgpu.load(norm_ref.at[start + lane], mask=lane < half, other=0.0).astype(jnp.float32)
        for start in (0, half)
    )
    return first * factor * w_first, second * factor * w_second


@functools.partial(jax.jit, static_argnames="interpret")
def copy_blocks(args: CopyArgs, interpret: Interpret = False) -> Pools:
    """Copy blocks in all layers and pools, in one launch."""
    pools, sources, targets = args
    L, P = pools.k.shape[:2]
    views = jax.tree.map(lambda pool: tiles.to_words(pool.reshape(L * P, -1), jnp.uint32), pools)
    copied = call_in_place(
        functools.partial(_copy_kernel, num_blocks=P),
        "copy_blocks",
        views,
        (sources, targets),
        grid=(*sources.shape, L),
        num_warps=_COPY_WARPS,
        interpret=interpret,
    )
    return jax.tree.map(_from_words, copied, pools)


def _copy_kernel(sources_ref, targets_ref, *pool_refs, num_blocks):
    pair, layer = pl.program_id(0), pl.program_id(1)
    # No target block is also a source block, so the order of the program instances does not matter.
    source, target = sources_ref[pair], targets_ref[pair]
    is_copy = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)

    @pl.when(is_copy)
    def _():
        for ref in pool_refs[len(pool_refs) // 2 :]:  # the outputs
            _copy_row(ref, layer * num_blocks + source, layer * num_blocks + target)


def _copy_row(ref, source, target):
    num_words = ref.shape[1]
    tile = min(_COPY_TILE, pl.next_power_of_2(num_words))

    def copy_tile(i, carry):
        word = i * tile + jnp.arange(tile, dtype=jnp.int32)
        mask = word < num_words
        words = plgpu.load(ref.at[source, word], mask=mask, other=0)
        plgpu.store(ref.at[target, word], words, mask=mask)
        return carry

    lax.fori_loop(0, pl.cdiv(num_words, tile), copy_tile, None)


def call_in_place(
    kernel: Callable[..., None],
    name: str,
    views: Any,
    arguments: Sequence[jax.Array],
    *,
    grid: tuple[int, ...],
    num_warps: int,
    interpret: Interpret,
    out: Any = None,
) -> Any:
    """Run a kernel that updates the pools in place.

    Args:
      kernel: function of refs, in this order: the arguments, the pools as inputs, the additional
        output (if `out` is given), and the pools as outputs.
      name: name of the kernel.
      views: tree of the pools, reshaped in any way.
      arguments: other inputs of the kernel.
      grid: grid of the launch.
      num_warps: number of warps in a program instance.
      interpret: whether to interpret the kernel.
      out: `jax.ShapeDtypeStruct` of an additional output, or None.

    Returns:
      The new `views`. If `out` is given, a pair of this output and the new `views`.
    """
    leaves, treedef = jax.tree.flatten(views)
    out_shapes = [] if out is None else [out]
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    results = pallas_call(
        kernel,
        out_shape=[*out_shapes, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)],
        grid=grid,
        in_specs=[any_memory] * (len(arguments) + len(leaves)),
        out_specs=[any_memory] * (len(out_shapes) + len(leaves)),
        input_output_aliases={len(arguments) + i: len(out_shapes) + i for i in range(len(leaves))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arguments, *leaves)
    pools = jax.tree.unflatten(treedef, results[len(out_shapes) :])
    return pools if out is None else (results[0], pools)


def _from_words(words: jax.Array, pool: jax.Array) -> jax.Array:
    """Undo `_as_rows` or `tiles.to_words`.

    The result has the dtype and the shape of `pool`.
    """
    return lax.bitcast_convert_type(words, pool.dtype).reshape(pool.shape)
