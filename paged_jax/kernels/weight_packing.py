"""Packing of quantised weights: values of 4 and 5 bits, and scales of two levels.

`paged_jax.kernels.weight_formats` describes values and scales. The functions accept arrays of NumPy
and of JAX, and return arrays of the same kind.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

# Packed values are stored in blocks of `PACKED_INPUTS` inputs. A block starts with `PACKED_BYTES`
# bytes, which contain the low 4 bits.
PACKED_INPUTS = 32
PACKED_BYTES = PACKED_INPUTS // 2

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


def join_levels(codes: Any, factors: Any) -> Any:
    """Join the two levels of scales or minima, see `split_levels`.

    Args:
      codes: int8 ``[..., in / group_size]``.
      factors: float32 ``[..., in / SECTION_INPUTS]``.

    Returns:
      int8 ``[..., columns]``. A section has the codes of its groups, followed by the bytes of its
      factor.
    """
    xp = codes.__array_namespace__()
    sections = _in_sections(codes, factors.shape[-1])
    if isinstance(factors, np.ndarray):
        factor_bytes = factors.astype("<f4")[..., None].view(np.int8)
    else:
        factor_bytes = lax.bitcast_convert_type(factors, jnp.int8)
    joined = xp.concatenate([sections, factor_bytes], axis=-1)
    return joined.reshape(*factors.shape[:-1], factors.shape[-1] * joined.shape[-1])


def split_levels(scales: Any, num_inputs: int) -> tuple[Any, Any]:
    """Undo `join_levels`: return the codes, and the factor of each section.

    Args:
      scales: int8 ``[..., columns]``.
      num_inputs: number of inputs of the matrix.
    """
    sections = _in_sections(scales, num_inputs // SECTION_INPUTS)
    codes, factor_bytes = sections[..., :-FACTOR_BYTES], sections[..., -FACTOR_BYTES:]
    if isinstance(scales, np.ndarray):
        factors = np.ascontiguousarray(factor_bytes).view("<f4")[..., 0]
    else:
        factors = lax.bitcast_convert_type(factor_bytes, jnp.float32)
    num_groups = codes.shape[-2] * codes.shape[-1]
    return codes.reshape(*scales.shape[:-1], num_groups), factors


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
    codes = xp.rint(sections * (127 / largest)[..., None]).astype(np.int8)
    return join_levels(codes.reshape(floats.shape), largest * np.float32(1 / 127))


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
    codes, factors = split_levels(scales, num_inputs)
    sections = _in_sections(codes, factors.shape[-1])
    return (sections.astype(np.float32) * factors[..., None]).reshape(codes.shape)
