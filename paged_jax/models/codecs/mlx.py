"""MLX: unsigned integers of 4 or 8 bits with biases (mode ``affine``), or MXFP4.

    weight   U32 [out, in * bits / 32]   a word holds consecutive inputs, the first in the low bits
    scales   floats [out, groups]
    biases   floats [out, groups]

A weight is ``value * scale + bias``. `mxfp4.py` describes the tensors of the mode ``mxfp4``.
Embeddings are quantised, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import Entries
from paged_jax.models.codecs.module_matrix import (
    FLOATS,
    ModuleFormat,
    ModuleMatrix,
    StoredRows,
    float_dtype,
    matrix_shape,
)
from paged_jax.models.codecs.module_names import (
    ModuleRule,
    Quantisation,
    all_modules,
    whole_name,
)
from paged_jax.models.codecs.mxfp4 import MlxMxfp4Format
from paged_jax.models.codecs.packed_integers import values_of_words


@dataclass(frozen=True)
class MlxFormat(ModuleFormat):
    """Settings of affine matrices of MLX.

    Attributes:
      bits: bits per value, 4 or 8.
      group_size: number of inputs that share a scale; None for all.
    """

    bits: int = 4
    group_size: int | None = 64

    name = "mlx"
    required = (".weight", ".scales", ".biases")
    has_embeddings = True

    @property
    def matrix(self) -> "type[MlxMatrix]":
        """Class of the matrices."""
        return MlxMatrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have."""
        return self.in_memory("bfloat16", "bfloat16")

    def in_memory(self, scale_dtype: str, bias_dtype: str) -> WeightFormat:
        """Return the format of matrices with scales and biases of the given dtypes."""
        if self.bits == 4:
            return WeightFormat("uint4", self.group_size, scale_dtype, bias_dtype)
        # Values of 8 bits are shifted by 128, and the shift is part of the minima.
        return WeightFormat("int8", self.group_size, scale_dtype, "float32")


class MlxMatrix(ModuleMatrix):
    """Matrix in the mode ``affine`` of MLX."""

    settings: MlxFormat

    def find_shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        num_outputs, words = matrix_shape(self.parts[".weight"])
        return num_outputs, words * 32 // self.settings.bits

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        groups = self.check_groups(self.settings.group_size)
        self.check_part(".weight", ("U32",), self.parts[".weight"].shape)
        for end in (".scales", ".biases"):
            self.check_part(end, FLOATS, (self.shape[0], groups))

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        return self.settings.in_memory(
            *(float_dtype(self.parts[end]) for end in (".scales", ".biases"))
        )

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        words, scales, biases = (
            self.parts[end].read_raw((rows,)) for end in self.settings.required
        )
        if self.settings.bits == 4:
            return StoredRows(values_of_words(words, 4), scales, biases, is_paired=True)
        zeros = np.full(scales.shape, -128, np.int32)  # values are signed in memory
        return StoredRows(values_of_words(words, 8), scales, biases, zeros)


class MlxCodec(Codec):
    """Quantisation of MLX."""

    methods = ("mlx",)
    formats = (MlxFormat, MlxMxfp4Format)
    key = "quantization"

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        if config.method != "mlx":
            return None
        default_format = _read_format(config, None)
        rules: list[ModuleRule] = []
        for name, value in config.content.items():
            if not isinstance(value, Mapping | bool):
                continue
            format = default_format if value else None
            if isinstance(value, Mapping) and (part := config.section(name)) is not None:
                format = _read_format(part, default_format)
                part.finish()
            config.get(name)
            rules.append(whole_name(name, format))
        config.finish()
        return Quantisation(config.where, (*rules, all_modules(default_format)))


def _read_format(
    config: Entries, default_format: MlxFormat | MlxMxfp4Format | None
) -> MlxFormat | MlxMxfp4Format:
    """Read the settings of all modules, or of one.

    `default_format` has those that may be omitted.
    """
    mode = config.choice("mode", choices=("affine", "mxfp4"), default="affine")
    default_bits = default_format.bits if isinstance(default_format, MlxFormat) else 4
    choices = (4, 8) if mode == "affine" else (4,)
    bits = config.choice("bits", choices=choices, default=default_bits)
    group_size = config.size(
        "group_size", default=(default_format.group_size if default_format else None) or 64
    )
    return MlxFormat(bits, group_size) if mode == "affine" else MlxMxfp4Format(group_size)
