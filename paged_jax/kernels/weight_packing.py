"""Packing of quantised weights: values of 4 and 5 bits, scales of two levels, and order of rows.

`paged_jax.kernels.weight_formats` describes values and scales. The functions accept arrays of NumPy
and of JAX, and return arrays of the same kind. Those annotated with `jax.Array` accept only JAX
arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Packed values are stored in blocks of `PACKED_INPUTS` inputs. A block starts with `PACKED_BYTES`
# bytes, which contain the low 4 bits.
PACKED_INPUTS = 32
PACKED_BYTES = PACKED_INPUTS // 2

# Number of consecutive rows that `interleave` combines.
INTERLEAVED_ROWS = 32

# Scales of two levels have a float32 factor for each section of inputs: the number of inputs in a
# section, and the number of bytes of a factor.
SECTION_INPUTS = 256
FACTOR_BYTES = 4


def pack(values: Any, bits: int = 4) -> Any:
    """Pack values of 4 or 5 bits, uint8 ``[..., in]``, into uint8 ``[..., in * bits / 8]``.

    Example:
      >>> pack(np.arange(32, dtype=np.uint8) % 16)[:3].tolist()  # byte 2 is 2 + 16 * 2
      [0, 17, 34]
    """
    halves = values.reshape(*values.shape[:-1], -1, 2, PACKED_BYTES)
    packed = halves[..., 0, :] & 15 | halves[..., 1, :] << 4
    if bits == 5:
        fifth = (values >> 4).reshape(*packed.shape[:-1], 8, 4) << _places(packed.ndim + 1)
        xp = values.__array_namespace__()
        packed = xp.concatenate([packed, fifth.sum(-2, dtype=np.uint8)], axis=-1)
    return packed.reshape(*values.shape[:-1], values.shape[-1] * bits // 8)


def unpack(packed: Any, bits: int = 4) -> Any:
    """Undo `pack`: return uint8 ``[..., in]`` from packed uint8 ``[..., in * bits / 8]``."""
    xp = packed.__array_namespace__()
    blocks = packed.reshape(*packed.shape[:-1], -1, 4 * bits)
    low = blocks[..., :PACKED_BYTES]
    values = xp.stack([low & 15, low >> 4], axis=-2)
    if bits == 5:
        fifth = blocks[..., None, PACKED_BYTES:] >> _places(blocks.ndim + 1) & 1
        values = values | fifth.reshape(values.shape) << 4
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _places(num_dims: int) -> np.ndarray:
    """Return the bit positions 0 to 7 as uint8 ``[1, ..., 1, 8, 1]`` with `num_dims` dimensions."""
    return np.arange(8, dtype=np.uint8).reshape(*(1,) * (num_dims - 2), 8, 1)


def join_levels(numbers: Any, factors: Any) -> Any:
    """Join the two levels of scales or minima, see `split_levels`.

    Args:
      numbers: int8 ``[..., in / group_size]``.
      factors: float32 ``[..., in / SECTION_INPUTS]``.

    Returns:
      int8 ``[..., columns]``. A section has the numbers of its groups, followed by the bytes of its
      factor.
    """
    xp = numbers.__array_namespace__()
    sections = _in_sections(numbers, factors.shape[-1])
    if isinstance(factors, np.ndarray):
        factor_bytes = factors.astype("<f4")[..., None].view(np.int8)
    else:
        factor_bytes = lax.bitcast_convert_type(factors, jnp.int8)
    joined = xp.concatenate([sections, factor_bytes], axis=-1)
    return joined.reshape(*factors.shape[:-1], factors.shape[-1] * joined.shape[-1])


def split_levels(scales: Any, num_inputs: int) -> tuple[Any, Any]:
    """Undo `join_levels`: return the numbers, and the factor of each section.

    Args:
      scales: int8 ``[..., columns]``.
      num_inputs: number of inputs of the matrix.
    """
    sections = _in_sections(scales, num_inputs // SECTION_INPUTS)
    numbers, factor_bytes = sections[..., :-FACTOR_BYTES], sections[..., -FACTOR_BYTES:]
    if isinstance(scales, np.ndarray):
        factors = np.ascontiguousarray(factor_bytes).view("<f4")[..., 0]
    else:
        factors = lax.bitcast_convert_type(factor_bytes, jnp.float32)
    num_groups = numbers.shape[-2] * numbers.shape[-1]
    return numbers.reshape(*scales.shape[:-1], num_groups), factors


def _in_sections(columns: Any, num_sections: int) -> Any:
    """Reshape ``[..., n]`` to ``[..., num_sections, n / num_sections]``."""
    *rows, count = columns.shape
    return columns.reshape(*rows, num_sections, count // num_sections)


def round_levels(floats: Any, num_inputs: int) -> Any:
    """Round float scales or minima ``[..., groups]`` to two levels, see `join_levels`."""
    xp = floats.__array_namespace__()
    sections = _in_sections(floats, num_inputs // SECTION_INPUTS)
    # The lower bound keeps `127 / largest` finite.
    largest = xp.maximum(xp.abs(sections).max(-1), 127 * jnp.finfo(np.float32).tiny)
    numbers = xp.rint(sections * (127 / largest)[..., None]).astype(np.int8)
    return join_levels(numbers.reshape(floats.shape), largest * np.float32(1 / 127))


def store_scales(floats: Any, dtype: Any, num_inputs: int) -> Any:
    """Convert scales or minima ``[..., groups]`` to `dtype`, where int8 stands for two levels.

    Returns None if `dtype` is None.
    """
    if dtype is None:
        return None
    if dtype == "int8":
        return round_levels(floats.astype(np.float32), num_inputs)
    return floats.astype(jnp.dtype(dtype))


def count_columns(num_groups: int, num_inputs: int, dtype: Any) -> int:
    """Return the number of columns of scales of a dtype for `num_groups` groups."""
    return num_groups + num_inputs // SECTION_INPUTS * FACTOR_BYTES * (dtype == np.int8)


def count_groups(scales: Any, num_inputs: int) -> int:
    """Return the number of groups of a matrix, from its scales."""
    return scales.shape[-1] - count_columns(0, num_inputs, scales.dtype)


def scale_floats(scales: Any, num_inputs: int) -> Any:
    """Return scales or minima as float32 ``[..., groups]``."""
    if scales.dtype != np.int8:
        return scales.astype(np.float32)
    numbers, factors = split_levels(scales, num_inputs)
    sections = _in_sections(numbers, factors.shape[-1])
    return (sections.astype(np.float32) * factors[..., None]).reshape(numbers.shape)


def interleave(array: Any) -> Any:
    """Interleave the rows of matrices, for kernels that multiply by many rows at a time.

    `INTERLEAVED_ROWS` consecutive rows form a bundle. The memory of a bundle starts with the first
    4 elements of each row, if elements take a byte. The next 4 elements of each row follow, and so
    on. Larger elements are interleaved one by one::

        array                                  order of its elements in memory
        values or scales of bytes [N, C]       [N / 32, C / 4, 32, 4]
        scales of 2 or 4 bytes [N, groups]     [N / 32, groups, 32]

    The array keeps its shape. Only `WeightFormat.is_interleaved` tells the two orders apart.

    Args:
      array: values, scales or minima of quantised matrices, ``[*out, columns]``. The number of rows
        of each matrix is a multiple of `INTERLEAVED_ROWS`, and the number of bytes of a row is a
        multiple of 4.
    """
    return _permute(array, lambda runs: runs.reshape(-1, INTERLEAVED_ROWS, *runs.shape[1:]))


def undo_interleave(array: Any) -> Any:
    """Undo `interleave`."""
    return _permute(array, _bundles)


def _permute(array: Any, split: Callable[[Any], Any]) -> Any:
    """Permute the runs of an array, see `_runs`. The elements of a run stay together.

    `split` reshapes the runs ``[N, runs, run]`` to an array with four dimensions. The second and
    the third of these dimensions are then swapped.
    """
    if isinstance(array, np.ndarray) and array.dtype.itemsize == 1:
        # NumPy moves elements of 4 bytes ten times as fast as runs of 4 elements.
        words = np.ascontiguousarray(array).view(np.uint32)
        return np.ascontiguousarray(_permute(words, split)).view(array.dtype)
    return split(_runs(array)).swapaxes(1, 2).reshape(array.shape)


def take_interleaved_rows(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Return rows of an interleaved array ``[N, columns]``, each in its original order.

    `rows` are indices of rows, i32 of any shape. The result is ``[*rows.shape, columns]``.
    """
    bundles = _bundles(_runs(as_bits(array)))
    taken = bundles[rows // INTERLEAVED_ROWS, :, rows % INTERLEAVED_ROWS]
    return from_bits(taken.reshape(*rows.shape, array.shape[-1]), array.dtype)


def _runs(array: Any) -> Any:
    """Divide each row of an array into runs, and return them as ``[N, runs, run]``.

    A run is 4 consecutive elements if elements take a byte, else a single element.
    """
    run = 4 if array.dtype.itemsize == 1 else 1
    return array.reshape(-1, array.shape[-1] // run, run)


def _bundles(runs: Any) -> Any:
    """Reshape interleaved runs ``[N, runs, run]`` to ``[N / 32, runs, 32, run]``.

    The dimensions are the bundle, the run in its row, the row in its bundle, and the element.
    """
    return runs.reshape(-1, runs.shape[1], INTERLEAVED_ROWS, runs.shape[2])


def as_bits(x: jax.Array) -> jax.Array:
    """Bitcast an array of floats of at most 16 bits to unsigned integers.

    Other arrays are returned unchanged. Slice the result instead of the floats: before XLA's CPU
    backend slices such floats, it converts the whole array to wider floats. It slices integers in
    place. The result has no gradient.
    """
    if x.dtype.itemsize > 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """Undo `as_bits`: return the array with its original `dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
