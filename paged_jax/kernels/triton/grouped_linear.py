"""Grouped matrix multiplication on NVIDIA GPUs, for the experts of mixture-of-experts layers.

Rows of `x` are sorted by group, and each group is split into tiles of rows. The last tile of a
group may be short. A program instance multiplies one tile by some rows (outputs) of the weight of
its group::

    rows of x            a a a a a | b b | d d d d d d d . .     group c has no rows, . no group
    tiles                0 0 0 0 1   2 2   3 3 3 3 4 4 4         weights of c are not read
    program instances    (tile, outputs)

A quantised weight is converted in registers, see `quantised_linear`.

As in `decode`, each program instance computes its tile from the group sizes, in registers. No
list of tiles is stored in memory. The grid has the maximum number of tiles; program instances
without a tile end immediately. Consecutive program instances have consecutive tiles. Tiles of the
same group read the same rows of its weight, which are then in the L2 cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels import gpu_device
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.gpu_device import divide
from paged_jax.kernels.triton import dequantise, pallas, quantised_linear, tiles
from paged_jax.kernels.triton.dequantise import TileFormat, WeightTile
from paged_jax.kernels.triton.pallas import pallas_call, plgpu
from paged_jax.kernels.triton.quantised_linear import multiply_tile
from paged_jax.kernels.weight_formats import Weight, WeightFormat

# Maximum elements of an array: the kernel computes offsets in int32.
_MAX_ELEMENTS = 2**31 - 1


class GroupedTiling(NamedTuple):
    """Launch parameters of the kernel.

    Attributes:
      rows: rows of `x` in a program instance.
      outputs: outputs in a program instance.
      inputs: inputs that a loop step reads.
      num_warps: warps of 32 threads in a program instance.
      num_stages: loop steps whose loads are in flight at the same time.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def refusal(x: Any, w: Weight) -> str | None:
    """Return why the kernel cannot multiply such arrays, or None if it can."""
    if (why_not := pallas.refusal() or pallas.gpu_refusal()) is not None:
        return why_not
    if w.scales is not None:
        return quantised_linear.format_refusal(w)
    if w.values.dtype.name not in tiles.FLOATING:
        return f"its weights are {', '.join(tiles.FLOATING)}, not {w.values.dtype}"
    if max(x.size, w.values.size) > _MAX_ELEMENTS:
        return f"its offsets are int32, and the weights have {w.values.size} elements"
    return None


def choose_tiling(num_rows: int, num_groups: int, num_outputs: int, dtype: Any) -> GroupedTiling:
    """Choose the launch parameters, by rules that are not measured.

    With few rows per group the kernel is memory-bound. It then needs small tiles, so that all SMs
    have work, and many loads in flight. With many rows it is compute-bound.

    Args:
      num_rows: rows of `x` (R).
      num_groups: number of groups (X).
      num_outputs: outputs of a weight.
      dtype: dtype of the weights.
    """
    inputs = 128 // jnp.dtype(dtype).itemsize  # one cache line
    rows_of_group = num_rows / num_groups
    if rows_of_group < 32 or dtype == jnp.float32:
        programs = min(num_rows, num_groups) * num_outputs / 64
        outputs = 64 if programs >= 2 * gpu_device.device().num_cores else 32
        return GroupedTiling(16, outputs, inputs, num_warps=4, num_stages=4)
    if rows_of_group < 128:
        return GroupedTiling(64, 128, inputs, num_warps=4, num_stages=3)
    return GroupedTiling(128, 128, inputs, num_warps=8, num_stages=3)


def choose_quantised_tiling(
    num_rows: int, num_groups: int, num_inputs: int, format: WeightFormat
) -> GroupedTiling:
    """Choose the launch parameters for quantised weights, by rules that are not measured.

    Args:
      num_rows: rows of `x` (R).
      num_groups: number of groups (X).
      num_inputs: inputs of a weight.
      format: format of the weights.
    """
    rows = max(8, min(pl.next_power_of_2(pl.cdiv(num_rows, num_groups)), 128))
    shape = quantised_linear.choose_shape(rows, num_inputs, format)
    return GroupedTiling(rows, *shape)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def grouped_linear(
    x: jax.Array,
    w: Weight,
    group_sizes: jax.Array,
    *,
    tiling: GroupedTiling | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Multiply rows by the weights of their groups, see `paged_jax.kernels.grouped_linear`."""
    R, (X, N, K) = x.shape[0], w.shape
    format, dtype = None, w.values.dtype
    if w.scales is None:
        tiling = tiling or choose_tiling(R, X, N, dtype)
    else:
        dtype = w.dtype
        tiling = tiling or choose_quantised_tiling(R, X, K, w.format)
        format = TileFormat(w.format, K, dtype, tiling.inputs, bool(interpret))
    if w.order is not None:
        x = x[:, w.order]
    # Each group has at most one short tile. Rows without a group count as one more group.
    num_tiles = R // tiling.rows + min(R, X + 1)
    call = pallas_call(
        functools.partial(_kernel, tiling=tiling, format=format),
        out_shape=jax.ShapeDtypeStruct((R, N), jnp.float32),
        grid=(num_tiles, pl.cdiv(N, tiling.outputs)),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="grouped_linear",
    )
    values = w.values if format is None else dequantise.as_bytes(w.values)
    return call(x.astype(dtype), (values, w.scales, w.mins), group_sizes)


def _kernel(
    x_ref: Any,
    w_refs: tuple[Any, Any, Any],
    sizes_ref: Any,
    out_ref: Any,
    *,
    tiling: GroupedTiling,
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
            # Rows without a group have no weight: load the scales of the last group without using
            # them.
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
      sizes: i32 ``[X]``, number of rows of each group; rows of `x` are sorted by group.
      tile: i32 ``[]``, index of the tile.
      tile_rows: rows in a tile.

    Returns:
      Whether the tile exists, its group, its rows i32 ``[tile_rows]``, and a bool mask
      ``[tile_rows]`` of the rows that belong to the group.

    Example:
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
