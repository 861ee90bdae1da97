"""Matrix multiplication in plain JAX, for weights stored as ``[out, in]``.

GPUs and TPUs use the same matmul for all shapes. CPUs without the C++ kernels use other forms for
few rows, because XLA's matmul takes up to ten times as long. The numbers in this table are GB/s of
weights read, measured on 2 cores with AVX-512 (jax 0.10.2) for weights of 3072 x 576 and 576 x
1536. "In halves" is `_matmul_in_halves`, and "multiply and sum" is `_multiply_sum`::

    rows    float32: matmul, in halves   bfloat16: matmul, multiply and sum
    1            31      29                    1.5    16
    2..4         15      24                    16
    16           10      15                    10
    64            4.7     5.5                   4.1
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.bits import as_bits, from_bits
from paged_jax.kernels.weight_formats import (
    BYTE_CODES,
    Weight,
    WeightArrays,
    dequantise,
)
from paged_jax.kernels.weight_packing import PACKED_INPUTS

# When inputs are rounded to int8, at most this number of consecutive inputs share a scale
# (`native/source/panels.h`).
_INT8_SEGMENT = 64

# Limits for `_matmul_in_halves`, which uses a batched matmul. XLA's CPU library does not pack the
# weights of a batched matmul, which saves time if there are few rows. With many inputs, its batched
# matmul reads outside of its buffers and may crash the process (jax 0.10.2: from 2048 inputs and 24
# rows, or 4096 inputs and 2 rows; never seen for fewer inputs and up to 32 rows). A test runs
# matmuls at these limits.
_HALVES_MAX_ROWS = 16
_HALVES_MAX_INPUTS = 1536

# Maximum number of elements of a quantised weight that are converted to floats at a time, in a loop
# over tiles. Without the loop, XLA's CPU backend would convert the weights of all layers before it
# multiplies by the weights of the first layer.
_MAX_TILE_ELEMENTS = 1 << 22
_MAX_CPU_TILE_ELEMENTS = 1 << 18
_MAX_GPU_TILE_ELEMENTS = 1 << 25

# Maximum number of rows of a tile in a grouped matmul, and in its gradients.
_MAX_TILE = 64
_MAX_GRADIENT_TILE = 512


def linear(x: jax.Array, w: Weight) -> jax.Array:
    """Multiply the last dimension of `x` by a weight; see `paged_jax.kernels.linear.linear`."""
    if w.rounds_inputs:
        x, w = round_to_int8(x, w)
    arrays, code = w.plain.arrays.merge_outputs(), w.format.code
    if arrays.order is not None:
        x, arrays = x[..., arrays.order], arrays._replace(order=None)
    if arrays.scales is None:
        y = _multiply_floats(x, arrays.values)
    else:
        arrays, x = lax.stop_gradient(arrays), x.astype(w.dtype)
        forms = {
            "cpu": _multiply_on_cpu,
            "cuda": _multiply_on_gpu,
            "rocm": _multiply_on_gpu,
            "default": _multiply_quantised,
        }
        forms = {name: functools.partial(form, code=code) for name, form in forms.items()}
        y = lax.platform_dependent(x, arrays, **forms)
    return y.reshape(*x.shape[:-1], *w.values.shape[:-1])


def round_to_int8(x: jax.Array, w: Weight) -> tuple[jax.Array, Weight]:
    """Round the inputs of a matmul to int8 as the C++ kernels do (`native/source/panels.h`).

    Each segment of a group of inputs has a scale. It is chosen so that the largest magnitude in the
    segment becomes 127. Derivatives ignore the rounding.

    Returns:
      The rounded inputs in float32, reordered by ``w.order``; and the weight to multiply them by,
      without an order.
    """
    x = (x if w.order is None else x[..., w.order]).astype(jnp.float32)
    size = w.format.group_size or x.shape[-1]
    groups = x.reshape(*x.shape[:-1], -1, size)
    segment = size if w.format.is_packed and size % PACKED_INPUTS else _INT8_SEGMENT
    padding = [(0, 0)] * (groups.ndim - 1) + [(0, -size % segment)]
    segments = jnp.pad(groups, padding).reshape(*groups.shape[:-1], -1, segment)
    peak = jnp.max(jnp.abs(segments), axis=-1, keepdims=True)
    codes = jnp.round(segments * jnp.where(peak < 1e-30, 0, 127 / peak))
    rounded = (codes * (peak / 127)).reshape(*groups.shape[:-1], -1)[..., :size].reshape(x.shape)
    exact = dataclasses.replace(
        w, order=None, stack=None, dtype=jnp.dtype(jnp.float32), int8_inputs=False
    )
    return x + lax.stop_gradient(rounded - x), exact


def linear_gradients(
    x: jax.Array, w: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `linear`; see `paged_jax.kernels.linear.linear_gradients`."""
    x_bar = _contract(cotangent, w, (1, 0))
    return x_bar, _contract(cotangent, x.astype(w.dtype), (0, 0))


def _multiply_floats(x: jax.Array, w: jax.Array) -> jax.Array:
    rows = math.prod(x.shape[:-1])
    if rows == 1 and w.dtype != jnp.float32:
        return lax.platform_dependent(x, w, cpu=_multiply_sum, default=_matmul)
    if w.dtype == jnp.float32 and 1 < rows <= _HALVES_MAX_ROWS and _has_halves(w):
        return lax.platform_dependent(x, w, cpu=_matmul_in_halves, default=_matmul)
    return _matmul(x, w)


def _multiply_quantised(x: jax.Array, w: WeightArrays, code: str) -> jax.Array:
    """Multiply rows by a quantised weight on TPUs, in the dtype of the model (`x.dtype`)."""
    if _has_row_scales(w, code):
        # Cast the values to the dtype of `x`. Every float dtype represents int8 and float8_e4m3fn
        # exactly, and XLA fuses the cast into the matmul.
        return _scale_outputs(_matmul(x, w.values.astype(x.dtype)), w)

    def multiply(x: jax.Array, w: WeightArrays) -> jax.Array:
        return _matmul(x, dequantise(w, code).astype(x.dtype))

    return _multiply_in_tiles(x, w, multiply, _MAX_TILE_ELEMENTS)


def _multiply_on_gpu(x: jax.Array, w: WeightArrays, code: str) -> jax.Array:
    """Multiply rows by a quantised weight on GPUs, in the dtype of the model (`x.dtype`).

    XLA would fuse the conversion of the weight into its matmul, which would then convert it again
    for each tile of rows. The floats of a tile of the weight are therefore written to memory first.
    There is no `lax` loop over the tiles, because its steps would wait for the host.
    """
    if _has_row_scales(w, code):
        return _multiply_quantised(x, w, code)
    num_outputs, num_inputs = w.values.shape[0], x.shape[-1]
    num_tiles = min(num_outputs, -(-num_outputs * num_inputs // _MAX_GPU_TILE_ELEMENTS))
    tile = -(-num_outputs // num_tiles)

    # Use `jax.checkpoint`, so that the backward pass converts each tile again. Otherwise, the
    # floats of all tiles would stay in memory until then.
    @functools.partial(jax.checkpoint, static_argnums=2)
    def multiply(x: jax.Array, w: WeightArrays, start: int) -> jax.Array:
        part = jax.tree.map(lambda array: array[start : start + tile], w)
        return _matmul(x, lax.optimization_barrier(dequantise(part, code).astype(x.dtype)))

    outputs = [multiply(x, w, start) for start in range(0, num_outputs, tile)]
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)


def _multiply_on_cpu(x: jax.Array, w: WeightArrays, code: str) -> jax.Array:
    """Multiply rows by a quantised weight on CPUs, in float32."""
    is_one_row, x = math.prod(x.shape[:-1]) == 1, x.astype(jnp.float32)
    product = _multiply_sum if is_one_row else _matmul
    if is_one_row and code == "int8" and _has_row_scales(w, code):
        return _scale_outputs(_multiply_sum(x, w.values), w)

    def multiply(x: jax.Array, w: WeightArrays) -> jax.Array:
        return product(x, dequantise(w, code))

    return _multiply_in_tiles(x, w, multiply, _MAX_CPU_TILE_ELEMENTS)


def _has_row_scales(w: WeightArrays, code: str) -> bool:
    return w.scales.shape[-1] == 1 and w.mins is None and code in BYTE_CODES


def _scale_outputs(out: jax.Array, w: WeightArrays) -> jax.Array:
    return out * w.scales.astype(jnp.float32).reshape((1,) * (out.ndim - 1) + (-1,))


def _multiply_in_tiles(
    x: jax.Array,
    w: WeightArrays,
    multiply: Callable[[jax.Array, WeightArrays], jax.Array],
    max_elements: int,
) -> jax.Array:
    """Multiply rows by a quantised weight, which is converted to floats tile by tile.

    A large weight is processed in a loop over tiles of its outputs, so that only one tile at a time
    exists as floats. The last tile ends at the last output, and may overlap the tile before it.
    `multiply` converts a tile, and multiplies `x` by it.
    """
    num_outputs, num_inputs = w.values.shape[0], x.shape[-1]
    tile = max(1, max_elements // num_inputs)
    if tile >= num_outputs:
        return multiply(x, w)
    bits = jax.tree.map(as_bits, w)

    @jax.checkpoint  # Let the backward pass convert each tile again instead of keeping all tiles.
    def step(x: jax.Array, start: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda y: lax.dynamic_slice_in_dim(y, start, tile), bits)
        return multiply(x, jax.tree.map(lambda y, z: from_bits(y, z.dtype), part, w))

    num_tiles = -(-num_outputs // tile)
    starts = jnp.minimum(jnp.arange(num_tiles, dtype=jnp.int32) * tile, num_outputs - tile)
    _, tiles = lax.scan(lambda _, start: (None, step(x, start)), None, starts)
    last = tiles[-1][..., num_tiles * tile - num_outputs :]
    return jnp.concatenate([*tiles[:-1], last], axis=-1)


def _has_halves(w: jax.Array) -> bool:
    return w.shape[0] % 2 == 0 and w.shape[1] <= _HALVES_MAX_INPUTS


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return _contract(x.astype(w.dtype), w, (x.ndim - 1, 1))


def _matmul_in_halves(x: jax.Array, w: jax.Array) -> jax.Array:
    """Divide the outputs of a weight into two halves, and multiply by both in a batched matmul.

    The weight is the left operand.
    """
    rows = x.astype(w.dtype).reshape(-1, x.shape[-1])
    halves = w.reshape(2, w.shape[0] // 2, w.shape[1])
    rows = jnp.broadcast_to(rows[None], (2, *rows.shape))
    out = lax.dot_general(halves, rows, (((2,), (2,)), ((0,), (0,))))  # [2, out / 2, rows]
    return out.transpose(2, 0, 1).reshape(*x.shape[:-1], w.shape[0])


def _multiply_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply a single row by a weight, with elementwise products and a sum.

    A matmul would convert the whole weight to float32 first.
    """
    row = x.astype(jnp.float32).reshape(1, -1)
    out = jnp.sum(w.astype(jnp.float32) * row, axis=-1)
    return out.reshape(*x.shape[:-1], w.shape[0])


def grouped_linear(x: jax.Array, w: Weight, group_sizes: jax.Array) -> jax.Array:
    """Multiply rows by the weights of their groups; see `paged_jax.kernels.grouped_linear`.

    `jax.lax.ragged_dot` would be one line, but on CPUs and GPUs XLA multiplies all rows by all
    weights (jax 0.10.2 to 0.12.0). This takes 23 to 370 times as long as the C++ kernel. Instead,
    this is a loop over tiles of rows, as in `triton.grouped_linear`. XLA copies the weight of each
    tile out of the stack. On CPUs, it first converts all bfloat16 weights to float32. A quantised
    weight is converted again for each of its tiles.
    """
    if w.rounds_inputs:
        x, w = round_to_int8(x, w)
    x = _round_inputs(x if w.order is None else x[:, w.order], w)
    return _multiply_groups(x, w, group_sizes, (1, 1))


class GroupTiles(NamedTuple):
    """Tiles of the rows of groups, numbered from the first group to the last.

    Each tile has rows of one group. The last tile of a group may also have rows of later groups.
    """

    size: int  # number of rows in a tile
    begins: jax.Array  # i32 [X], first row of each group
    counts: jax.Array  # i32 [X], number of tiles of each group
    ends: jax.Array  # i32 [X], number of the first tile after each group

    @classmethod
    def divide(cls, group_sizes: jax.Array, size: int) -> "GroupTiles":
        """Divide groups with i32 [X] rows into tiles."""
        begins = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
        counts = -(-group_sizes // size)
        return cls(size, begins, counts, jnp.cumsum(counts, dtype=jnp.int32))

    def find(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the group and the first row of a tile."""
        group = jnp.sum(self.ends <= index, dtype=jnp.int32)
        first = self.begins[group] + (index - self.ends[group] + self.counts[group]) * self.size
        return group, first


def _multiply_groups(
    x: jax.Array, w: Weight, group_sizes: jax.Array, contracted: tuple[int, int]
) -> jax.Array:
    """Multiply the rows of each group by the weight of the group, tile by tile.

    Weights are ``[out, in]``. The matmul of a tile is ``_contract(rows, weight, contracted)``.
    """
    w = w.plain
    R, X, N = x.shape[0], w.shape[0], w.shape[2 - contracted[1]]
    tile = min(R, _MAX_TILE, max(8, math.ceil(2 * R / X)))
    tiles = GroupTiles.divide(group_sizes, tile)

    def multiply(index: jax.Array, out: jax.Array) -> jax.Array:
        group, first = tiles.find(index)
        start = jnp.minimum(first, R - tile)  # the last tile ends at the last row
        weight = floats_of_group(w, group)
        new = _contract(lax.dynamic_slice_in_dim(x, start, tile), weight, contracted)
        old = lax.dynamic_slice_in_dim(out, start, tile)
        rows = start + jnp.arange(tile, dtype=jnp.int32)
        is_mine = (rows >= first) & (rows < tiles.begins[group] + group_sizes[group])
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_mine[:, None], new, old), start, 0)

    out = jnp.zeros((R, N), jnp.float32)
    return lax.fori_loop(0, tiles.ends[-1], multiply, out)


def _round_inputs(x: jax.Array, w: Weight) -> jax.Array:
    """Round rows to the dtype of a weight, or to ``w.dtype`` if the weight is quantised."""
    if w.scales is None:
        return x.astype(w.values.dtype)
    return x.astype(w.dtype).astype(jnp.float32)


def floats_of_group(w: Weight, group: jax.Array) -> jax.Array:
    """Return the weight of one group, ``[out, in]``, as float32 if it is quantised."""
    if w.scales is None:
        return lax.dynamic_index_in_dim(w.values, group, keepdims=False)
    arrays = w.arrays._replace(order=None)

    def take(x: jax.Array) -> jax.Array:
        return from_bits(lax.dynamic_index_in_dim(as_bits(x), group, keepdims=False), x.dtype)

    return dequantise(jax.tree.map(take, arrays), w.format.code)


def grouped_gradients(
    x: jax.Array, w: Weight, group_sizes: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return the gradients of `grouped_linear` with respect to `x` and to the values of `w`.

    `cotangent` is the gradient with respect to the result, float32 ``[R, out]``. The second
    gradient is None if the weight is quantised.
    """
    if w.scales is None:
        return lax.platform_dependent(
            x, w.values, group_sizes, cotangent, tpu=_ragged_gradients, default=_looped_gradients
        )
    dx = _multiply_groups(cotangent, w, group_sizes, (1, 0))
    return (dx if w.order is None else dx[:, jnp.argsort(w.order)]).astype(x.dtype), None


def _ragged_gradients(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients by `lax.ragged_dot_general`, which XLA runs by group on TPUs."""
    _, transpose = jax.vjp(functools.partial(_ragged_dot, group_sizes=group_sizes), x, w)
    rows = jnp.arange(cotangent.shape[0], dtype=jnp.int32)
    is_of_group = (rows < jnp.sum(group_sizes))[:, None]
    return transpose(jnp.where(is_of_group, cotangent, 0))


def _ragged_dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    dimension_numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(
        x.astype(w.dtype),
        w,
        group_sizes,
        dimension_numbers,
        precision=_precision(w),
        preferred_element_type=jnp.float32,
    )


def _looped_gradients(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients group by group, in tiles of rows."""
    R, X = x.shape[0], w.shape[0]
    tile = min(R, _MAX_GRADIENT_TILE, max(8, math.ceil(R / X)))
    begins = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    rounded = x.astype(w.dtype)

    def of_group(dx: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        weight, begin, size = group

        def add(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dx, dw = sums
            first = begin + index * tile
            start = jnp.minimum(first, R - tile)  # the last tile ends at the last row
            rows = start + jnp.arange(tile, dtype=jnp.int32)
            is_mine = ((rows >= first) & (rows < begin + size))[:, None]

            def take(array: jax.Array) -> jax.Array:
                return jnp.where(is_mine, lax.dynamic_slice_in_dim(array, start, tile), 0)

            dy = take(cotangent)
            new = _contract(dy, weight, (1, 0))
            old = lax.dynamic_slice_in_dim(dx, start, tile)
            dx = lax.dynamic_update_slice_in_dim(dx, jnp.where(is_mine, new, old), start, 0)
            return dx, dw + _contract(dy, take(rounded), (0, 0))

        sums = dx, jnp.zeros(weight.shape, jnp.float32)
        dx, dw = lax.fori_loop(0, -(-size // tile), add, sums)
        return dx, dw.astype(w.dtype)

    dx, dw = lax.scan(of_group, jnp.zeros(x.shape, jnp.float32), (w, begins, group_sizes))
    return dx.astype(x.dtype), dw


def _contract(x: jax.Array, w: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Multiply arrays of the same dtype; sum over dimensions ``contracted`` of `x` and `w`."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(x, w, dims, precision=_precision(w), preferred_element_type=jnp.float32)


def _precision(w: jax.Array) -> lax.Precision | None:
    # Use the highest precision for float32. By default, GPUs would round float32 operands to TF32,
    # and TPUs to bfloat16.
    return lax.Precision.HIGHEST if w.dtype == jnp.float32 else None


def sum_rows(x: jax.Array) -> jax.Array:
    """Sum float32 ``[..., N]`` over the last dimension, in the order that XLA chooses."""
    return jnp.sum(x, axis=-1, keepdims=True)
