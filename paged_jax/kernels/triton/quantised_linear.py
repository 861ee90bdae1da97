"""Matrix multiplication with quantised weights on NVIDIA GPUs, converted in registers.

A program instance multiplies a tile of rows of `x` by some outputs of the weight, over all inputs
or over a part of them. In a loop, it loads a tile of the weight as it is stored, converts it to the
dtype of the matmul, and multiplies it on the tensor cores. The weight is the left operand, which
tensor cores read from registers::

    weight [outputs, bytes]          x [rows, inputs]               out [part, rows, outputs]
    + - - - + - - - + - -     low    = = = = x = = = = x = =        for few rows, several program
    | tile  |  next | ..      halves     inputs 0 to 15 of 32       instances share the inputs of
    + - - - + - - - + - -     high   = = = = x = = = = x = =        a tile; XLA adds their parts
                              halves     inputs 16 to 31 of 32

Packed 4-bit values are two tiles, the low and the high halves of the bytes. Each is multiplied by
the inputs that it belongs to, so that no values change their places.

The kernel is for few rows, which are memory-bound. A tile has 8 to 64 rows, so up to 64 rows share
each byte of the weight. The number of parts depends on the weight alone, not on the rows.
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
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.gradients import with_plain_gradients
from paged_jax.kernels.triton import dequantise, pallas, tiles
from paged_jax.kernels.triton.dequantise import TileFormat, WeightTile
from paged_jax.kernels.triton.pallas import pallas_call, plgpu
from paged_jax.kernels.weight_formats import (
    BYTE_CODES,
    PACKED_INPUTS,
    Weight,
    WeightArrays,
    WeightFormat,
)

# Maximum elements of an array: the kernel computes offsets in int32.
_MAX_ELEMENTS = 2**31 - 1

# Maximum rows of a tile, and of a call. For more rows, XLA is faster: it converts each weight once
# for all rows, not once for each tile of rows.
_MAX_TILE_ROWS = 64
_MAX_ROWS = 128

# Outputs of a program instance. `choose_tiling` assumes this number when it chooses the number of
# parts into which the inputs are split.
_PART_OUTPUTS = 64
# Maximum number of parts into which the inputs are split.
_MAX_PARTS = 8
# Minimum number of inputs of a part, and a divisor of the number of inputs of every part.
_PART_INPUTS = 512
_STEP_INPUTS = 256


class QuantisedTiling(NamedTuple):
    """Launch parameters of the kernel.

    Attributes:
      rows: rows of `x` in a program instance.
      outputs: outputs in a program instance.
      inputs: inputs that a loop step reads.
      parts: number of parts of the inputs.
      num_warps: warps of 32 threads in a program instance.
      num_stages: loop steps whose loads are in flight at the same time.
    """

    rows: int
    outputs: int
    inputs: int
    parts: int
    num_warps: int
    num_stages: int


def refusal(w: Weight) -> str | None:
    """Return why the kernel cannot multiply by a weight, or None if it can."""
    if (why_not := pallas.refusal() or pallas.gpu_refusal()) is not None:
        return why_not
    if w.scales is None:
        return "XLA multiplies by weights without scales"
    if w.format.code in BYTE_CODES and w.format.group_size is None and w.mins is None:
        return "XLA fuses the conversion of 8-bit weights with a scale per row into the matmul"
    return format_refusal(w)


def rows_refusal(x: jax.Array) -> str | None:
    """Return why the kernel does not multiply rows, or None if it does."""
    num_rows = math.prod(x.shape[:-1])
    if num_rows > _MAX_ROWS:
        return f"XLA is faster from {_MAX_ROWS + 1} rows on, and there are {num_rows}"
    return None


def format_refusal(w: Weight) -> str | None:
    """Return why a kernel for quantised weights cannot read a weight, or None if it can."""
    format = w.format
    if format.code == "float8_e4m3fn" and gpu_device.device().compute_capability < (8, 9):
        return "it converts float8_e4m3fn on GPUs of compute capability 8.9 and later only"
    if w.values.size > _MAX_ELEMENTS:
        return f"its offsets are int32, and the weight has {w.values.size} bytes"
    return dequantise.refusal(format, w.shape[-1], w.dtype)


class TileShape(NamedTuple):
    """Sizes of a tile and launch parameters, for a number of rows."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def choose_shape(rows: int, num_inputs: int, format: WeightFormat) -> TileShape:
    """Choose the sizes of a tile by rules that are not measured.

    The rules come from compiled code for compute capability 9.0: registers, shared memory, and
    instructions per byte of the weight. With two warps, Triton uses matmul instructions of single
    warps. With four warps it uses instructions of warp groups. These need more instructions to
    prepare the weight, but fewer for many rows.

    Args:
      rows: rows of `x` in a tile.
      num_inputs: inputs of the weight.
      format: format of the weight.
    """
    step = 128 if format.is_packed else 64  # 64 bytes per row of the weight
    if rows <= 16:
        shape = TileShape(64, step, num_warps=2, num_stages=4)
    elif rows <= _MAX_TILE_ROWS:
        shape = TileShape(128, step, num_warps=4, num_stages=3)
    else:
        shape = TileShape(128, 64, num_warps=8, num_stages=3)  # only experts have more rows
    fitting = max(PACKED_INPUTS, pl.next_power_of_2(num_inputs))
    return shape._replace(inputs=min(shape.inputs, fitting))


def choose_tiling(num_rows: int, w: Weight) -> QuantisedTiling:
    """Choose the launch parameters for the rows of `x` and a weight ``[out, in]``.

    Example:
      >>> w = Weight(jnp.zeros((4096, 2048), jnp.uint8), jnp.zeros((4096, 128)), code="int4")
      >>> choose_tiling(1, w)
      QuantisedTiling(rows=8, outputs=64, inputs=128, parts=8, num_warps=2, num_stages=4)
      >>> choose_tiling(100, w)
      QuantisedTiling(rows=64, outputs=128, inputs=128, parts=8, num_warps=4, num_stages=3)
    """
    num_outputs, num_inputs = w.shape
    generation = gpu_device.device().compute_capability[0]
    rows = max(8, min(pl.next_power_of_2(num_rows), _MAX_TILE_ROWS))
    # Split the inputs into enough parts for four program instances on each SM.
    wanted = 4 * gpu_device.device().num_cores // pl.cdiv(num_outputs, _PART_OUTPUTS)
    parts = max(1, min(wanted, num_inputs // _PART_INPUTS, _MAX_PARTS))
    outputs, inputs, *launch = choose_shape(rows, num_inputs, w.format)
    if generation == 12 and rows > 16:
        outputs //= 2  # the compiler of jax 0.12 would spill registers in the loop
    return QuantisedTiling(rows, outputs, inputs, parts, *launch)


def linear(
    x: jax.Array,
    w: Weight,
    *,
    tiling: QuantisedTiling | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Multiply the last dimension of `x` by a weight, see `paged_jax.kernels.linear`.

    Differentiable in `x`. XLA computes the gradient.
    """
    *shape, num_inputs = x.shape
    *outputs, _ = w.shape
    if w.order is not None:
        x = x[..., w.order]
    arrays = WeightArrays(
        *(None if a is None else a.reshape(-1, a.shape[-1]) for a in w.arrays._replace(order=None))
    )
    matrix = Weight(*arrays, code=w.code, dtype=w.dtype)
    rows = x.astype(w.dtype).reshape(-1, num_inputs)
    multiply = with_plain_gradients(
        lambda operands: _multiply(*operands, tiling, interpret),
        lambda operands: general_backend().linear(*operands),
    )
    return multiply((rows, matrix)).reshape(*shape, *outputs)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def _multiply(
    x: jax.Array, w: Weight, tiling: QuantisedTiling | None, interpret: Interpret
) -> jax.Array:
    (R, K), (N, _) = x.shape, w.shape
    if tiling is None:
        tiling = choose_tiling(R, w)
    format = TileFormat(w.format, K, w.dtype, tiling.inputs, bool(interpret))
    call = pallas_call(
        functools.partial(_kernel, tiling=tiling, format=format),
        out_shape=jax.ShapeDtypeStruct((tiling.parts, R, N), jnp.float32),
        grid=(pl.cdiv(R, tiling.rows), pl.cdiv(N, tiling.outputs), tiling.parts),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="quantised_linear",
    )
    parts = call(x, (dequantise.as_bytes(w.values), w.scales, w.mins))
    # Add slices, because XLA fuses such a sum with the operations that follow.
    return functools.reduce(operator.add, (parts[i] for i in range(tiling.parts)))


def _kernel(
    x_ref: Any,
    w_refs: tuple[Any, Any, Any],
    out_ref: Any,
    *,
    tiling: QuantisedTiling,
    format: TileFormat,
) -> None:
    _, R, N = out_ref.shape
    rows = pl.program_id(0) * tiling.rows + jnp.arange(tiling.rows, dtype=jnp.int32)
    outputs = pl.program_id(1) * tiling.outputs + jnp.arange(tiling.outputs, dtype=jnp.int32)
    part = pl.program_id(2)
    is_row, is_output = rows < R, outputs < N
    # Padding rows read the last output. Their results are not stored.
    tile = WeightTile(w_refs, (), jnp.minimum(outputs, N - 1), format)
    num_steps = pl.cdiv(format.num_inputs, format.step)
    size = pl.cdiv(pl.cdiv(num_steps * format.step, tiling.parts), _STEP_INPUTS)
    size = max(size * _STEP_INPUTS // format.step, 1) if tiling.parts > 1 else num_steps
    begin = part * size
    total = multiply_tile(x_ref, rows, is_row, tile, begin, jnp.minimum(begin + size, num_steps))
    mask = is_output[:, None] & is_row[None]
    plgpu.store(out_ref.at[part, rows[None], outputs[:, None]], total, mask=mask)


def multiply_tile(
    x_ref: Any,
    rows: jax.Array,
    is_row: jax.Array,
    tile: WeightTile,
    begin: jax.Array,
    end: jax.Array,
) -> jax.Array:
    """Multiply rows of `x` by some outputs of a weight, over some of the inputs.

    Args:
      x_ref: ref of `x`, ``[R, K]``, in the dtype of the matmul.
      rows: i32 ``[T]``, the rows.
      is_row: bool ``[T]``, False for rows that are not read, whose results are 0.
      tile: the outputs of the weight.
      begin: first loop step.
      end: end of the loop steps (exclusive).

    Returns:
      f32 ``[N, T]``, a row for each output.
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
