"""Packed values of files: words of 4-bit and 8-bit values, bytes of two values, exponents."""

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_packing import PACKED_BYTES

_LOOKED_UP = 1 << 16  # number of values that `look_up` processes at a time


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Split words ``[..., n]`` into values, lowest bits first: uint8 ``[..., n * 32 / bits]``.

    Example:
      >>> unpack_words(np.array([0x76543210], np.int32), 4).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    values = np.ascontiguousarray(words).view(np.uint8)
    return low_nibbles_first(values) if bits == 4 else values


def low_nibbles_first(packed: np.ndarray) -> np.ndarray:
    """Split bytes ``[..., n]`` into 4-bit values, low bits first: uint8 ``[..., 2 * n]``."""
    values = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=values[..., 0])
    np.right_shift(packed, 4, out=values[..., 1])
    return values.reshape(*packed.shape[:-1], -1)


def pack_pairs(pairs: np.ndarray) -> np.ndarray:
    """Repack bytes that each hold two neighbouring 4-bit values, to the order of `pack`.

    `weight_packing.pack` puts the values i and i + 16 into one byte.

    Example:
      >>> pack_pairs(np.array([0x10, *range(1, 16)], np.uint8))[:3].tolist()
      [128, 1, 145]
    """
    blocks = pairs.reshape(*pairs.shape[:-1], -1, 2, PACKED_BYTES // 2)
    first, second = blocks[..., 0, :], blocks[..., 1, :]
    packed = np.empty((*first.shape, 2), np.uint8)
    np.bitwise_or(first & 0x0F, second << 4, out=packed[..., 0])
    np.bitwise_or(first >> 4, second & 0xF0, out=packed[..., 1])
    return packed.reshape(pairs.shape)


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Convert E8M0 scales (8-bit exponents of powers of two) to bfloat16; 255 becomes NaN."""
    exponents = exponents.view(np.uint8)
    factors = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    factors[exponents == 255] = np.nan
    return factors.astype(jnp.bfloat16)


def look_up(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return ``table[values]``, computed in parts to save memory.

    NumPy converts the indices to int64, which would need 8 bytes per element of `values`.
    """
    out = np.empty(values.shape, table.dtype)
    flat, indices = out.reshape(-1), values.reshape(-1)
    for start in range(0, flat.size, _LOOKED_UP):
        part = slice(start, start + _LOOKED_UP)
        flat[part] = table[indices[part]]
    return out


def pack_words(unsigned: np.ndarray, bits: int) -> np.ndarray:
    """Pack values uint8 ``[rows, n]`` into words int32 ``[rows, ceil(n * bits / 32)]``.

    The first value of a word is in its lowest bits.
    """
    unsigned = np.pad(unsigned, ((0, 0), (0, -unsigned.shape[1] % (32 // bits))))
    if bits == 4:
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return np.ascontiguousarray(unsigned).view("<i4")
