"""Orders of the elements of a weight matrix in memory that the C++ kernels read fastest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from paged_jax.kernels.bits import as_bits, from_bits


@dataclass(frozen=True)
class InterleavedRows:
    """Layout of matrices with interleaved rows, for kernels that multiply by many rows at a time.

    `num_rows` consecutive rows form a bundle. The memory of a bundle starts with the first 4
    elements of each row, if elements take a byte. The next 4 elements of each row follow, and so
    on. Larger elements are interleaved one by one::

        array                                  order of its elements in memory
        values or scales of bytes [N, C]       [N / 32, C / 4, 32, 4]
        scales of 2 or 4 bytes [N, groups]     [N / 32, groups, 32]

    The number of rows of each matrix is a multiple of `num_rows`, and the number of bytes of a row
    is a multiple of 4.

    Attributes:
      num_rows: number of consecutive rows that are combined.
    """

    num_rows: int = 32

    def prepare(self, array: Any) -> Any:
        """Interleave the rows of an array, see `weight_formats.Layout`."""
        return self._permute(array, lambda x: x.reshape(-1, self.num_rows, *x.shape[1:]))

    def unprepare(self, array: Any) -> Any:
        """Undo `prepare`."""
        return self._permute(array, self._bundles)

    def take_rows(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Gather rows of an interleaved array, each in its original order."""
        bundles = self._bundles(_runs(as_bits(array)))
        gathered = bundles[rows // self.num_rows, :, rows % self.num_rows]
        return from_bits(gathered.reshape(*rows.shape, array.shape[-1]), array.dtype)

    def _permute(self, array: Any, split: Callable[[Any], Any]) -> Any:
        """Permute the runs of an array, see `_runs`. The elements of a run stay together.

        `split` reshapes the runs ``[N, runs, run]`` to an array with four dimensions. The second
        and the third of these dimensions are then swapped.
        """
        if isinstance(array, np.ndarray) and array.dtype.itemsize == 1:
            # NumPy moves elements of 4 bytes ten times as fast as runs of 4 elements.
            words = np.ascontiguousarray(array).view(np.uint32)
            return np.ascontiguousarray(self._permute(words, split)).view(array.dtype)
        return split(_runs(array)).swapaxes(1, 2).reshape(array.shape)

    def _bundles(self, runs: Any) -> Any:
        """Reshape interleaved runs ``[N, runs, run]`` to ``[N / 32, runs, 32, run]``.

        The dimensions are the bundle, the run in its row, the row in its bundle, and the element.
        """
        return runs.reshape(-1, runs.shape[1], self.num_rows, runs.shape[2])


def _runs(array: Any) -> Any:
    """Divide each row of an array into runs, and return them as ``[N, runs, run]``.

    A run is 4 consecutive elements if elements take a byte, else a single element.
    """
    run = 4 if array.dtype.itemsize == 1 else 1
    return array.reshape(-1, array.shape[-1] // run, run)
