# pyright: strict
"""Which formats and layouts the weights of a model have in memory."""

from collections.abc import Sequence
from typing import Protocol

from jax.typing import DTypeLike

from paged_jax.kernels.weight_formats import Layout, WeightFormat


class WeightStore(Protocol):
    """Choice of the formats and layouts in which the weights of a model are stored.

    A format determines the arrays of a matrix, and so the memory of the model. A layout only
    permutes their elements. Loading, replacing and returning weights call the `Layout`; models and
    plans know nothing of it.
    """

    def stored_format(self, format: WeightFormat, num_devices: int) -> WeightFormat:
        """Return the format in which matrices of a plain format are stored, without rounding.

        Args:
          format: a format of the files of a model.
          num_devices: number of devices over which the model is divided.
        """
        ...

    def layouts(
        self, matrices: Sequence[tuple[WeightFormat, tuple[int, ...]]], dtype: DTypeLike
    ) -> list[Layout | None]:
        """Return the layout that kernels read fastest for each matrix; None for the plain layout.

        Args:
          matrices: stored format and shape ``[*out, in]`` of each matrix of a model.
          dtype: float dtype of the model.
        """
        ...


class PlainWeights:
    """Weights for XLA and the kernels of GPUs and TPUs: no 5-bit values, and the plain layout."""

    def stored_format(self, format: WeightFormat, num_devices: int) -> WeightFormat:
        """Return the format with values of 4, 8 or more bits, and with float scales."""
        del num_devices
        return format.widened

    def layouts(
        self, matrices: Sequence[tuple[WeightFormat, tuple[int, ...]]], dtype: DTypeLike
    ) -> list[Layout | None]:
        """Return None for each matrix, because XLA reads the plain layout."""
        del dtype
        return [None] * len(matrices)
