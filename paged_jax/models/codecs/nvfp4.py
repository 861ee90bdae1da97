"""NVFP4: E2M1 values with an fp8 scale for 16 values, and a second scale for the matrix.

    compressed-tensors   weight_packed U8 [out, in / 2]   weight_scale F8_E4M3 [out, in / 16]
                         weight_global_scale F32 [] or [1]
    ModelOpt             weight, weight_scale and weight_scale_2 of the same dtypes and shapes

A byte holds two neighbouring inputs, the first in the low bits. The scale of a group is its fp8
scale divided by `weight_global_scale`, or multiplied by `weight_scale_2`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import unpack
from paged_jax.models.codecs.bit_fields import pack_words
from paged_jax.models.codecs.module_matrix import (
    EncodedModule,
    ModuleFormat,
    ModuleMatrix,
    StoredRows,
    matrix_shape,
)

_MAX_FP8 = 448.0


@dataclass(frozen=True)
class Nvfp4Format(ModuleFormat):
    """Settings of NVFP4 matrices of compressed-tensors.

    Attributes:
      group_size: number of inputs that share an fp8 scale; None for all.
    """

    group_size: int | None = 16

    name = "nvfp4"
    required = (".weight_packed", ".weight_scale", ".weight_global_scale")
    apply = np.divide  # function of fp8 scales and the second scale
    unused = (".input_global_scale", ".input_scale", ".output_scale")

    @property
    def matrix(self) -> "type[Nvfp4Matrix]":
        """Class of the matrices."""
        return Nvfp4Matrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices have."""
        return WeightFormat("e2m1", self.group_size, "float32")

    @classmethod
    def encode(cls, name: str, arrays: WeightArrays, format: WeightFormat) -> EncodedModule | None:
        """Convert a matrix to tensors, if its scales are fp8 numbers divided by a factor."""
        if (format.code, format.group_size, format.min_dtype) != ("e2m1", 16, None):
            return None
        if (divided := _divide_scales(arrays.scales.astype(np.float32))) is None:
            return None
        scales, factor = divided
        tensors = {
            ".weight_packed": pack_words(unpack(arrays.values), 4).view(np.uint8),
            ".weight_scale": scales,
            ".weight_global_scale": np.array([factor], np.float32),
        }
        return EncodedModule(cls(), tensors)


def _divide_scales(scales: np.ndarray) -> tuple[np.ndarray, np.float32] | None:
    """Find fp8 scales and a factor with ``fp8_scales / factor == scales``; None if impossible.

    In most files, the largest scale of a matrix is stored as the largest fp8 number. But if several
    matrices share a factor, it may be stored as any fp8 number, so the function tries all of them.
    """
    largest = scales.max()
    if largest == 0:
        return scales.astype(jnp.float8_e4m3fn), np.float32(1)
    fp8_values = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    for fp8_value in fp8_values[::-1]:
        factor = fp8_value / largest
        for candidate in (factor, np.nextafter(factor, np.float32(0)),
                          np.nextafter(factor, np.float32(np.inf))):  # fmt: skip
            with np.errstate(over="ignore"):
                stored = np.minimum(scales * candidate, _MAX_FP8).astype(jnp.float8_e4m3fn)
            if np.array_equal(stored.astype(np.float32) / candidate, scales):
                return stored, candidate
    return None


@dataclass(frozen=True)
class ModelOptNvfp4Format(Nvfp4Format):
    """Settings of NVFP4 matrices of ModelOpt."""

    name = "modelopt-nvfp4"
    required = (".weight", ".weight_scale", ".weight_scale_2")
    apply = np.multiply


class Nvfp4Matrix(ModuleMatrix):
    """NVFP4 matrix of compressed-tensors or ModelOpt."""

    settings: Nvfp4Format

    def find_shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        values = self.parts[self.settings.required[0]]
        num_outputs, columns = matrix_shape(values)
        return num_outputs, columns * 2

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        (num_outputs, num_inputs), (values, scale, factor) = self.shape, self.settings.required
        self.check_part(values, ("U8",), (num_outputs, num_inputs // 2))
        groups = self.check_groups(self.settings.group_size)
        self.check_part(scale, ("F8_E4M3",), (num_outputs, groups))
        self.check_part(factor, ("F32",), (), (1,))

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        return self.settings.planned

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        values, scale, factor = (self.parts[end] for end in self.settings.required)
        scales = scale.read_raw((rows,)).astype(np.float32)
        factors = factor.read_raw().reshape(1, 1)
        scales = self.settings.apply(scales, factors)
        return StoredRows(values.read_raw((rows,)), scales, is_paired=True)
