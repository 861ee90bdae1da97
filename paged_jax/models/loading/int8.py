"""Matrices of floats become int8 while they are loaded, a part of one at a time."""

import math
from collections.abc import Callable

import numpy as np

from paged_jax.models.weight import quantise

_CHUNK_ELEMENTS = 1 << 22  # 16 MB of float32: small beside a model

Index = tuple[slice, ...]


def read_quantised(
    read: Callable[[Index], np.ndarray], shape: tuple[int, ...], index: Index, out: np.ndarray
) -> np.ndarray:
    """Fill `out` with what one device holds of an int8 matrix, or of its scales, and return it.

    Whole rows are read, since their largest number makes the scale, even if the device holds some
    of their columns.

    Args:
      read: gives the floats of a part of the matrix, float32.
      shape: that of the matrix.
      index: which part, of the matrix, or of its scales, which have a dimension less.
      out: an array for it, int8 or float32.
    """
    rows, columns = index[: len(shape) - 1], index[len(shape) - 1 :]
    start, stop, _ = rows[0].indices(shape[0])
    step = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        values, scales = quantise(read((slice(first, last), *rows[1:], slice(None))))
        out[first - start : last - start] = values[..., *columns] if columns else scales
    return out
