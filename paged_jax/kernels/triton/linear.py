"""Matrix multiplications on NVIDIA GPUs: by quantised weights, and by the weights of experts.

`quantised_linear`: a program instance multiplies a tile of rows of `x` by some outputs of the
weight, over all inputs or over a part of them. In a loop, it loads a tile of the weight in its
stored format, converts the tile in registers to the dtype of the matmul, and multiplies it on the
tensor cores. The weight is the left operand, which tensor cores read from registers::

    weight [outputs, bytes]          x [rows, inputs]               out [part, rows, outputs]
    + - - - + - - - + - -     low    = = = = x = = = = x = =        for few rows, several program
    | tile  |  next | ..      halves     inputs 0 to 15 of 32       instances share the inputs of
    + - - - + - - - + - -     high   = = = = x = = = = x = =        a tile; XLA adds their parts
                              halves     inputs 16 to 31 of 32

Packed 4-bit values are treated as two tiles: the low halves and the high halves of the bytes. Each
tile is multiplied by the inputs that it belongs to, so the values need no reordering. The kernel is
for few rows, for which the matmul is memory-bound; calls with more rows are refused, and XLA
computes them. A tile has 8 to 64 rows, so that up to 64 rows
share each read of the weight. The number of parts depends only on the weight, not on the number of
rows.

`grouped_linear`: the rows of `x` are sorted by group. Each group is split into tiles of rows, the
last of which may be short. A program instance multiplies one tile by some outputs of the weight of
its group, which may be quantised::

    rows of x            a a a a a | b b | d d d d d d d . .     group c has no rows, . no group
    tiles                0 0 0 0 1   2 2   3 3 3 3 4 4 4         weights of c are not read
    program instances    (tile, outputs)

As in `decode`, each program instance computes its tile from the group sizes, in registers. No list
of tiles is stored in memory. The grid has the maximum number of tiles. Program instances without a
tile end immediately. Consecutive program instances have consecutive tiles. Tiles of the same group
read the same weights, which are then in the L2 cache.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels import gpu_device
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.derivatives import with_plain_gradients
from paged_jax.kernels.kv_split import divide
from paged_jax.kernels.triton import dequantise, pallas, tiles
from paged_jax.kernels.triton.dequantise import TileFormat, WeightTile
from paged_jax.kernels.triton.pallas import pallas_call, plgpu
from paged_jax.kernels.weight_formats import BYTE_CODES, Weight, WeightFormat
from paged_jax.kernels.weight_packing import PACKED_INPUTS
from paged_jax.kernels.xla.linear import linear as plain_linear

# Maximum number of elements of an array. It is limited because the kernel computes offsets in
# int32.
_MAX_ELEMENTS = 2**31 - 1

# Maximum number of rows of `x` in a tile, and in a call. For more rows, XLA is faster, because it
# converts each weight once for all rows, not once for each tile of rows.
_MAX_TILE_ROWS = 64
_MAX_ROWS = 128

# Maximum number of rows of a tile of `grouped_linear`.
_MAX_GROUPED_ROWS = 128

# When `choose_tiling` chooses the number of parts into which the inputs are split, it assumes that
# a program instance computes this number of outputs.
_PART_OUTPUTS = 64
# Maximum number of parts into which the inputs are split.
_MAX_PARTS = 8
# `_PART_INPUTS` is the minimum number of inputs in a part. In all parts except the last, the number
# of inputs is a multiple of `_STEP_INPUTS`.
_PART_INPUTS = 512
_STEP_INPUTS = 256


class MatmulTiling(NamedTuple):
    """Launch parameters of a matmul kernel.

    Attributes:
      rows: number of rows of `x` in a program instance.
      outputs: number of outputs in a program instance.
      inputs: number of inputs that a loop step reads.
      num_warps: number of warps of 32 threads in a program instance.
      num_stages: number of loop steps with loads in flight at the same time.
      parts: number of parts into which the inputs are split between program instances (split-K); 1
        for grouped matmuls.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    parts: int = 1


_INT8_REFUSAL = "it does not round inputs to int8"


def quantised_refusal(x: jax.Array, w: Weight, *, interpret: Interpret = False) -> str | None:
    """Return why `quantised_linear` does not support these arrays, or None if it does."""
    if (reason := pallas.refusal() or pallas.gpu_refusal()) is not None:
        return reason
    if w.scales is None:
        return "XLA multiplies by weights without scales"
    if w.rounds_inputs:
        return _INT8_REFUSAL
    if w.format.code in BYTE_CODES and w.format.group_size is None and w.mins is None:
        return "XLA fuses the conversion of 8-bit weights with a scale per row into the matmul"
    if (reason := _format_refusal(w)) is not None:
        return reason
    num_rows = math.prod(x.shape[:-1])
    if num_rows > _MAX_ROWS:
        return f"XLA is faster from {_MAX_ROWS + 1} rows on, and there are {num_rows}"
    return None


def grouped_refusal(
    x: jax.Array, w: Weight, sizes: jax.Array, *, interpret: Interpret = False
) -> str | None:
    """Return why `grouped_linear` does not support these arrays, or None if it does."""
    if (reason := pallas.refusal() or pallas.gpu_refusal()) is not None:
        return reason
    if w.rounds_inputs:
        return _INT8_REFUSAL
    if w.scales is not None:
        return _format_refusal(w)
    if w.values.dtype.name not in tiles.FLOATING:
        return f"weights must be {', '.join(tiles.FLOATING)}, got {w.values.dtype}"
    if max(x.size, w.values.size) > _MAX_ELEMENTS:
        return f"x and w must have fewer than 2**31 elements, got {x.size} and {w.values.size}"
    return None


def _format_refusal(w: Weight) -> str | None:
    format = w.format
    if format.layout is not None:
        return "it reads weights in the plain layout only"
    if format.code == "float8_e4m3fn" and gpu_device.device().compute_capability < (8, 9):
        return "it converts float8_e4m3fn on GPUs of compute capability 8.9 and later only"
    if w.values.size > _MAX_ELEMENTS:
        return f"values must have fewer than 2**31 bytes, got {w.values.size}"
    return dequantise.refusal(format, w.shape[-1], w.dtype)


def choose_tiling(num_rows: int, w: Weight) -> MatmulTiling:
    """Choose the launch parameters for `num_rows` rows of `x` and a quantised weight.

    The shape of the weight is ``[out, in]``.

    Example:
      >>> w = Weight(jnp.zeros((4096, 2048), jnp.uint8), jnp.zeros((4096, 128)), code="int4")
      >>> choose_tiling(1, w)
      MatmulTiling(rows=8, outputs=64, inputs=128, num_warps=2, num_stages=4, parts=8)
      >>> choose_tiling(100, w)
      MatmulTiling(rows=64, outputs=128, inputs=128, num_warps=4, num_stages=3, parts=8)
    """
    num_outputs, num_inputs = w.shape
    gpu = gpu_device.device()
    tiling = _quantised_tiling(min(num_rows, _MAX_TILE_ROWS), num_inputs, w.format)
    # Split the inputs into enough parts for four program instances on each SM.
    target_parts = 4 * gpu.num_cores // pl.cdiv(num_outputs, _PART_OUTPUTS)
    parts = max(1, min(target_parts, num_inputs // _PART_INPUTS, _MAX_PARTS))
    if gpu.compute_capability[0] == 12 and tiling.rows > 16:
        # Halve the tile for GPUs of compute capability 12, for which the compiler of jax 0.12 would
        # otherwise spill registers in the loop.
        tiling = tiling._replace(outputs=tiling.outputs // 2)
    return tiling._replace(parts=parts)


def _quantised_tiling(num_rows: int, num_inputs: int, format: WeightFormat) -> MatmulTiling:
    """Choose the tiles for a quantised weight, by rules that were not tuned by measurements.

    The rules are based on code compiled for compute capability 9.0: registers, shared memory, and
    instructions per byte of the weight. With two warps, Triton uses matmul instructions for single
    warps. With four warps, it uses matmul instructions for groups of warps. The preparation of the
    weight then takes more instructions, but matmuls of many rows take fewer.
    """
    rows = max(8, pl.next_power_of_2(num_rows))
    step = 128 if format.is_packed else 64  # 64 bytes per row of the weight
    if rows <= 16:
        tiling = MatmulTiling(rows, 64, step, num_warps=2, num_stages=4)
    elif rows <= _MAX_TILE_ROWS:
        tiling = MatmulTiling(rows, 128, step, num_warps=4, num_stages=3)
    else:
        tiling = MatmulTiling(rows, 128, 64, num_warps=8, num_stages=3)  # only for experts
    fitting = max(PACKED_INPUTS, pl.next_power_of_2(num_inputs))
    return tiling._replace(inputs=min(tiling.inputs, fitting))


def choose_grouped_tiling(num_rows: int, w: Weight) -> MatmulTiling:
    """Choose the launch parameters of `grouped_linear` for weights ``[X, out, in]``.

    `num_rows` is the number of rows of all groups. The rules were not tuned by measurements. With
    few rows per group, the kernel is memory-bound. It then needs small tiles, so that all SMs have
    work, and many loads in flight. With many rows per group, it is compute-bound.
    """
    num_groups, num_outputs, num_inputs = w.shape
    if w.scales is not None:
        rows = min(pl.cdiv(num_rows, num_groups), _MAX_GROUPED_ROWS)
        return _quantised_tiling(rows, num_inputs, w.format)
    dtype = w.values.dtype
    inputs = 128 // dtype.itemsize  # one cache line
    rows_of_group = num_rows / num_groups
    if rows_of_group < 32 or dtype == jnp.float32:
        programs = min(num_rows, num_groups) * num_outputs / 64
        outputs = 64 if programs >= 2 * gpu_device.device().num_cores else 32
        return MatmulTiling(16, outputs, inputs, num_warps=4, num_stages=4)
    if rows_of_group < 128:
        return MatmulTiling(64, 128, inputs, num_warps=4, num_stages=3)
    return MatmulTiling(_MAX_GROUPED_ROWS, 128, inputs, num_warps=8, num_stages=3)


def quantised_linear(
    x: jax.Array,
    w: Weight,
    *,
    tiling: MatmulTiling | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Multiply the last dimension of `x` by a weight, see `paged_jax.kernels.linear`.

    The op is differentiable with respect to `x`. XLA computes the gradient.
    """
    *shape, num_inputs = x.shape
    *outputs, _ = w.shape
    if w.order is not None:
        x = x[..., w.order]
    matrix = Weight(*w.arrays.merge_outputs()._replace(order=None), code=w.code, dtype=w.dtype)
    rows = x.astype(w.dtype).reshape(-1, num_inputs)
    multiply = with_plain_gradients(
        lambda operands: _multiply_parts(*operands, tiling, interpret),
        lambda operands: plain_linear(*operands),
    )
    return multiply((rows, matrix)).reshape(*shape, *outputs)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def _multiply_parts(
    x: jax.Array, w: Weight, tiling: MatmulTiling | None, interpret: Interpret
) -> jax.Array:
    (R, K), (N, _) = x.shape, w.shape
    if tiling is None:
        tiling = choose_tiling(R, w)
    format = TileFormat(w.format, K, w.dtype, tiling.inputs, bool(interpret))
    call = pallas_call(
        functools.partial(_quantised_kernel, tiling=tiling, format=format),
        out_shape=jax.ShapeDtypeStruct((tiling.parts, R, N), jnp.float32),
        grid=(pl.cdiv(R, tiling.rows), pl.cdiv(N, tiling.outputs), tiling.parts),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="quantised_linear",
    )
    parts = call(x, (dequantise.as_bytes(w.values), w.scales, w.mins))
    # Add slices of the array instead of calling `jnp.sum`, because XLA fuses these additions with
    # the operations that follow.
    return functools.reduce(operator.add, (parts[i] for i in range(tiling.parts)))


def _quantised_kernel(
    x_ref: Any,
    w_refs: tuple[Any, Any, Any],
    out_ref: Any,
    *,
    tiling: MatmulTiling,
    format: TileFormat,
) -> None:
    _, R, N = out_ref.shape
    rows = pl.program_id(0) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    outputs = pl.program_id(1) * tiling.outputs + jnp.arange(tiling.outputs, dtype=jnp.int32)
    part = pl.program_id(2)
    is_row, is_output = rows < R, outputs < N
    # Outputs past the last one are padding. They read the weights of the last output, and their
    # results are not stored.
    tile = WeightTile(w_refs, (), jnp.minimum(outputs, N - 1), format)
    num_steps = pl.cdiv(format.num_inputs, format.step)
    size = pl.cdiv(pl.cdiv(num_steps * format.step, tiling.parts), _STEP_INPUTS)
    size = max(size * _STEP_INPUTS // format.step, 1) if tiling.parts > 1 else num_steps
    begin = part * size
    total = multiply_tile(x_ref, rows, is_row, tile, begin, jnp.minimum(begin + size, num_steps))
    mask = is_output[:, None] & is_row[None]
    plgpu.store(out_ref.at[part, rows[None], outputs[:, None]], total, mask=mask)


@functools.partial(jax.jit, static_argnames="interpret")
def grouped_linear(
    x: jax.Array, w: Weight, group_sizes: jax.Array, *, interpret: Interpret = False
) -> jax.Array:
    """Multiply rows by the weights of their groups, see `paged_jax.kernels.grouped_linear`."""
    R, (X, N, K) = x.shape[0], w.shape
    tiling = choose_grouped_tiling(R, w)
    format, dtype, values = None, w.values.dtype, w.values
    if w.scales is not None:
        dtype, values = w.dtype, dequantise.as_bytes(w.values)
        format = TileFormat(w.format, K, dtype, tiling.inputs, bool(interpret))
    if w.order is not None:
        x = x[:, w.order]
    # Maximum number of tiles: each group has at most one tile that is not full. The rows without a
    # group are treated as one more group.
    num_tiles = R // tiling.rows + min(R, X + 1)
    call = pallas_call(
        functools.partial(_grouped_kernel, tiling=tiling, format=format),
        out_shape=jax.ShapeDtypeStruct((R, N), jnp.float32),
        grid=(num_tiles, pl.cdiv(N, tiling.outputs)),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="grouped_linear",
    )
    return call(x.astype(dtype), (values, w.scales, w.mins), group_sizes)


def _grouped_kernel(
    x_ref: Any,
    w_refs: tuple[Any, Any, Any],
    sizes_ref: Any,
    out_ref: Any,
    *,
    tiling: MatmulTiling,
    format: TileFormat | None,
) -> None:
    (R, K), N = x_ref.shape, out_ref.shape[1]
    X = sizes_ref.shape[0]
    groups = jnp.arange(pl.next_power_of_2(X + 1), dtype=jnp.int32)
    sizes = plgpu.load(sizes_ref.at[groups], mask=groups < X, other=0)
    sizes = jnp.where(groups == X, R - jnp.sum(sizes), sizes)
    is_there, group, rows, is_row = find_tile(sizes, pl.program_id(0), tiling.rows)
    outputs = pl.program_id(1) * tiling.outputs + jnp.arange(tiling.outputs, dtype=jnp.int32)
    is_row, is_output = is_row & (rows < R), outputs < N
    num_steps = jnp.where(group < X, jnp.int32(pl.cdiv(K, tiling.inputs)), jnp.int32(0))

    def multiply_floats() -> jax.Array:
        place = group, outputs[:, None]
        masks = is_row[:, None], is_output[:, None]
        arrays = (x_ref, (rows[:, None],), masks[0]), (w_refs[0], place, masks[1])

        def multiply(step: jax.Array, total: jax.Array) -> jax.Array:
            inputs = step * tiling.inputs + jnp.arange(tiling.inputs, dtype=jnp.int32)
            x, w = (_load_inputs(*array, inputs) for array in arrays)
            return total + tiles.dot(x, w.T)

        total = jnp.zeros((tiling.rows, tiling.outputs), jnp.float32)
        return lax.fori_loop(0, num_steps, multiply, total)

    @pl.when(is_there)
    def _():
        if format is None:
            total = multiply_floats()
            place, mask = (rows[:, None], outputs[None]), is_row[:, None] & is_output[None]
        else:
            # Rows without a group have no weight. They load the scales of the last group, but do
            # not use them.
            weight = (jnp.minimum(group, X - 1),)
            tile = WeightTile(w_refs, weight, jnp.minimum(outputs, N - 1), format)
            total = multiply_tile(x_ref, rows, is_row, tile, jnp.int32(0), num_steps)
            place, mask = (rows[None], outputs[:, None]), is_row[None] & is_output[:, None]
        plgpu.store(out_ref.at[place], total, mask=mask)


def _load_inputs(
    ref: Any, place: tuple[jax.Array, ...], mask: jax.Array, inputs: jax.Array
) -> jax.Array:
    if ref.shape[-1] % inputs.size:
        mask = mask & (inputs < ref.shape[-1])[None]
    return plgpu.load(ref.at[(*place, inputs[None])], mask=mask, other=0.0)


def find_tile(
    sizes: jax.Array, tile: jax.Array, tile_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the group and the rows of a tile.

    Args:
      sizes: i32 ``[X]``, number of rows of each group. The rows of `x` are sorted by group.
      tile: i32 ``[]``, index of the tile.
      tile_rows: number of rows in a tile.

    Returns:
      Whether the tile exists; its group; its rows, i32 ``[tile_rows]``; and a mask of the rows that
      belong to the group, bool ``[tile_rows]``.

    Example:
      Group 0 has rows 0 to 2, in tiles 0 and 1. Group 2 has rows 3 and 4, in tile 2. There is no
      tile 3:

      >>> [bool(is_row.sum()) and rows[is_row].tolist() for _, _, rows, is_row in (
      ...     find_tile(jnp.array([3, 0, 2, 0]), jnp.int32(tile), 2) for tile in range(4))]
      [[0, 1], [2], [3, 4], False]
    """
    groups = jnp.arange(sizes.size, dtype=jnp.int32)
    ends = jnp.cumsum(divide(sizes + tile_rows - 1, tile_rows), dtype=jnp.int32)
    is_before = ends <= tile
    group = jnp.sum(is_before, dtype=jnp.int32)
    begin = jnp.sum(jnp.where(is_before, sizes, 0), dtype=jnp.int32)
    end = begin + jnp.sum(jnp.where(groups == group, sizes, 0), dtype=jnp.int32)
    index = tile - jnp.max(jnp.where(is_before, ends, 0))
    rows = begin + index * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)
    return tile < jnp.max(ends), group, rows, rows < end


def multiply_tile(
    x_ref: Any,
    rows: jax.Array,
    is_row: jax.Array,
    tile: WeightTile,
    begin: jax.Array,
    end: jax.Array,
) -> jax.Array:
    """Multiply rows of `x` by a tile of a weight: some of its outputs, some of its inputs.

    Args:
      x_ref: ref of `x`, ``[R, K]``, in the dtype of the matmul.
      rows: i32 ``[T]``, indices of the rows.
      is_row: bool ``[T]``, False for rows that are not read. Their results are 0.
      tile: the outputs of the weight.
      begin: first loop step over the inputs.
      end: end of the loop steps (exclusive).

    Returns:
      The products, f32 ``[N, T]``, with a row for each output.
    """
    format = tile.format
    num_outputs, num_rows = tile.outputs.size, rows.size

    def load_rows(step: jax.Array, half: int) -> jax.Array:
        inputs = step * format.step + format.inputs_of_columns(half)
        mask = is_row[:, None]
        if format.num_inputs % format.step:
            mask = mask & (inputs < format.num_inputs)[None]
        mask = jnp.broadcast_to(mask, (num_rows, inputs.size))
        return plgpu.load(x_ref.at[rows[:, None], inputs[None]], mask=mask, other=0)

    def add(step: jax.Array, carry: Any) -> Any:
        total, scales = carry
        upcoming = tile.load_scales(step + 1) if format.is_prefetched else scales
        if not format.is_prefetched:
            scales = tile.load_scales(step)
        values = tile.load_values(step)
        for half in format.halves:
            elements = tile.convert(values, scales, half)
            total = total + tiles.dot(elements, load_rows(step, half).T)
        return total, upcoming

    total = jnp.zeros((num_outputs, num_rows), jnp.float32)
    scales = tile.load_scales(begin) if format.is_prefetched else ()
    return lax.fori_loop(begin, end, add, (total, scales))[0]
