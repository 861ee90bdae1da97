"""fp8: float8_e4m3fn values with a scale for the matrix, for each row or for each block.

transformers, DeepSeek, Qwen and AutoFP8 write ``quant_method`` "fp8", FBGEMM "fbgemm_fp8".
compressed-tensors and ModelOpt use the same tensors.

    weight                             F8_E4M3 [out, in]
    weight_scale or weight_scale_inv   floats or exponents: [], [out, 1] or [out blocks, in blocks]

A weight is a value times its scale, although transformers calls the scales `weight_scale_inv`.
Blocks at the lower and right edge may be smaller. For example, a matrix with 576 rows has 5 rows of
scales for blocks of 128.
"""

from dataclasses import dataclass

import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.models.codecs.bit_fields import powers_of_two
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import KV_CACHE_KEYS, Entries
from paged_jax.models.codecs.module_matrix import (
    FLOATS,
    EncodedModule,
    ModuleFormat,
    ModuleMatrix,
    StoredRows,
    float_dtype,
    scale_shapes,
    scales_of_rows,
)
from paged_jax.models.codecs.module_names import Quantisation, all_modules, exclude
from paged_jax.models.errors import WeightsError

_EXPONENTS = ("F8_E8M0", "U8")
_BLOCK = 128  # number of rows, and of inputs, in a written block
_HARMLESS = ("dequantize", "modules_to_convert", "activation_scale_ub", *KV_CACHE_KEYS)


@dataclass(frozen=True)
class Fp8Format(ModuleFormat):
    """Settings of fp8 matrices.

    Attributes:
      block: number of outputs and of inputs that share one scale; None for all of them.
      has_exponents: whether each scale may be stored as U8, the exponent of a power of two.
    """

    block: tuple[int | None, int | None] = (1, None)
    has_exponents: bool = False

    name = "fp8"
    required = (".weight",)
    optional = (".weight_scale", ".weight_scale_inv")
    unused = (".input_scale", ".activation_scale", ".input_scale_ub", ".output_scale")

    @property
    def matrix(self) -> "type[Fp8Matrix]":
        """Class of the matrices."""
        return Fp8Matrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have."""
        scale_dtype = "bfloat16" if self.has_exponents else "float32"
        return WeightFormat("float8_e4m3fn", self.block[1], scale_dtype)

    @classmethod
    def encode(cls, name: str, arrays: WeightArrays, format: WeightFormat) -> EncodedModule | None:
        """Convert a matrix to tensors, with a scale for each row or square block."""
        if format.code != "float8_e4m3fn" or format.min_dtype is not None:
            return None
        settings, scales = cls(), arrays.scales
        if format.group_size is not None:
            if (blocks := _find_blocks(arrays.scales, format.group_size)) is None:
                return None
            size, scales = blocks
            settings = cls((size, size))
        tensors = {".weight": arrays.values, ".weight_scale": np.ascontiguousarray(scales)}
        return EncodedModule(settings, tensors)


def _find_blocks(scales: np.ndarray, group_size: int) -> tuple[int, np.ndarray] | None:
    """Group scales by square blocks, if all scales of each block are equal.

    Returns:
      The size of a block, and the scale of each block; None if the scales do not form blocks.
    """
    num_rows, num_groups = scales.shape
    for size in (_BLOCK, group_size):
        step = max(1, size // group_size)
        blocks = scales[::size, ::step]
        repeated = blocks.repeat(size, axis=0)[:num_rows].repeat(step, axis=1)[:, :num_groups]
        if size % group_size == 0 and np.array_equal(repeated, scales):
            return size, blocks
    return None


class Fp8Matrix(ModuleMatrix):
    """Float8_e4m3fn matrix."""

    settings: Fp8Format

    @property
    def _scale(self) -> str:
        ends = [end for end in self.settings.optional if end in self.parts]
        if len(ends) != 1:
            raise WeightsError(
                f"load_weights: {self.name} must have exactly one of the tensors weight_scale and "
                f"weight_scale_inv, got {len(ends)} of them."
            )
        return ends[0]

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        shapes = scale_shapes(self.shape, self.settings.block)
        self.check_part(".weight", ("F8_E4M3",), self.shape)
        if self.settings.block[1] is None:
            # The configs do not tell whether there is a scale per row or a single scale.
            shapes += [(self.shape[0], 1), (self.shape[0],)]
        exponents = _EXPONENTS if self.settings.has_exponents else _EXPONENTS[:1]
        self.check_part(self._scale, (*FLOATS, *exponents), *shapes)

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        scale = self.parts[self._scale]
        scale_dtype = "bfloat16" if scale.dtype in _EXPONENTS else float_dtype(scale)
        return WeightFormat("float8_e4m3fn", self.settings.block[1], scale_dtype)

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        stored = self.parts[self._scale]
        scales = stored.read_raw()
        if stored.dtype in _EXPONENTS:
            scales = powers_of_two(scales)
        values = self.parts[".weight"].read_raw((rows,))
        if ((values.view(np.uint8) & 0x7F) == 0x7F).any():
            raise WeightsError(f"load_weights: the values of {self.name} must be finite, got NaN.")
        return StoredRows(
            values, scales_of_rows(scales, self.shape[0], self.settings.block[0], rows)
        )


class Fp8Codec(Codec):
    """fp8 of transformers, DeepSeek, Qwen, AutoFP8 and FBGEMM."""

    methods = ("fp8", "fbgemm_fp8")
    formats = (Fp8Format,)

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        if config.method == "fp8":
            format, keys = self._read_format(config), ("ignored_layers", "ignore")
        elif config.method == "fbgemm_fp8":
            format, keys = Fp8Format(), ()
        else:
            return None
        excluded = exclude(config, config.names("modules_to_not_convert", *keys))
        config.finish(_HARMLESS)
        return Quantisation(config.where, (*excluded, all_modules(format)))

    def _read_format(self, config: Entries) -> Fp8Format:
        config.choice("fmt", choices=("e4m3", "float8_e4m3fn"), default="e4m3")
        config.choice("activation_scheme", choices=("dynamic", "static"), default="dynamic")
        config.choice("expert_dtype", choices=("fp8",), default="fp8")
        scales = config.choice("scale_fmt", choices=("float", "ue8m0"), default="float")
        has_blocks = config.get("weight_block_size") is not None
        block = config.block("weight_block_size") if has_blocks else (None, None)
        return Fp8Format(block, has_exponents=scales == "ue8m0")
