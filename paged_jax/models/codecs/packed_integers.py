"""Shared part of the formats with words of 4-bit or 8-bit integers: AWQ, GPTQ and others.

A word of 32 bits contains unsigned values, with the first value in the lowest bits. With 4 bits it
contains 8 values::

    compressed-tensors, MLX   [out, in / 8]    a word holds 8 inputs of an output
    GPTQ                      [in / 8, out]    a word holds 8 inputs of an output
    AWQ                       [in, out / 8]    a word holds 8 outputs of an input, in another order

A weight is ``(value - zero point) * scale``. In memory, it becomes ``(value - centre) * scale +
minimum``, where the minimum is ``(centre - zero point) * scale`` and the centre is 8 or 128. With
16-bit scales, both products are exact in float32, so the sum equals the original weight.
"""

import math

import numpy as np

from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.codecs.bit_fields import unpack_words
from paged_jax.models.loading.stored_tensors import StoredTensor


def integer_format(
    bits: int, group_size: int | None, scale_dtype: str, *, has_zeros: bool
) -> WeightFormat:
    """Return the format of integers with a zero point for each scale, or without zero points."""
    code = "int4" if bits == 4 else "int8"
    return WeightFormat(code, group_size, scale_dtype, "float32" if has_zeros else None)


def values_of_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the values in words ``[rows, n]`` as `StoredRows` holds them.

    4-bit values stay two to a byte, and 8-bit values become signed. To save memory, this overwrites
    the words.
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    return data if bits == 4 else np.bitwise_xor(data, 0x80, out=data).view(np.int8)


def read_zeros(part: StoredTensor, bits: int, rows: slice, num_rows: int, axis: int) -> np.ndarray:
    """Read the stored zero points of rows. A word holds those of several consecutive rows.

    Args:
      part: words, in which dimension `axis` counts the rows and the other the groups.
      bits: bits of a zero point.
      rows: slice of the rows.
      num_rows: number of rows of the matrix.
      axis: dimension of the rows, 0 or 1.

    Returns:
      uint8 ``[rows, groups]``.
    """
    start, stop, _ = rows.indices(num_rows)
    per_word = 32 // bits
    first = start // per_word
    words = part.read_raw((slice(None),) * axis + (slice(first, math.ceil(stop / per_word)),))
    zeros = unpack_words(words if axis else words.T, bits).T
    return zeros[start - first * per_word : stop - first * per_word]
