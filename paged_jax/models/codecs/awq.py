"""AWQ: 4-bit integers with zero points, the format ``gemm`` of AutoAWQ.

    qweight   I32 [in, out / 8]       a word holds 8 outputs of an input
    qzeros    I32 [groups, out / 8]   zero points, packed in the same way
    scales    floats [groups, out]

Nibble k of a word, counted from the lowest bits, belongs to the output (0, 2, 4, 6, 1, 3, 5, 7)[k]
of its eight. A weight is ``(value - zero point) * scale``.
"""

import math
from dataclasses import dataclass

import numpy as np

from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import KV_CACHE_KEYS, Entries
from paged_jax.models.codecs.gptq import TOOL_KEYS
from paged_jax.models.codecs.module_matrix import (
    FLOATS,
    ModuleFormat,
    ModuleMatrix,
    StoredRows,
    float_dtype,
    matrix_shape,
)
from paged_jax.models.codecs.module_names import Quantisation, all_modules, exclude
from paged_jax.models.codecs.packed_integers import integer_format

# For each of 8 consecutive outputs, its position in a word.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_CENTRE = 8
# transformers also writes entries of GPTQ, without effect.
_HARMLESS = ("sym", "desc_act", *TOOL_KEYS, *KV_CACHE_KEYS)


@dataclass(frozen=True)
class AwqFormat(ModuleFormat):
    """Settings of AWQ matrices.

    Attributes:
      group_size: number of inputs that share a scale; None for all.
    """

    group_size: int | None = 128

    name = "awq"
    required = (".qweight", ".qzeros", ".scales")

    @property
    def matrix(self) -> "type[AwqMatrix]":
        """Class of the matrices."""
        return AwqMatrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have."""
        return integer_format(4, self.group_size, "float16", has_zeros=True)


class AwqMatrix(ModuleMatrix):
    """Matrix in the format ``gemm`` of AutoAWQ."""

    settings: AwqFormat

    def find_shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        num_inputs, words = matrix_shape(self.parts[".qweight"])
        return words * 8, num_inputs

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        num_outputs, num_inputs = self.shape
        groups = self.check_groups(self.settings.group_size)
        self.check_part(".qweight", ("I32",), (num_inputs, num_outputs // 8))
        self.check_part(".qzeros", ("I32",), (groups, num_outputs // 8))
        self.check_part(".scales", FLOATS, (groups, num_outputs))

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        scale_dtype = float_dtype(self.parts[".scales"])
        return integer_format(4, self.settings.group_size, scale_dtype, has_zeros=True)

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        scales = np.ascontiguousarray(self.parts[".scales"].read_raw((slice(None), rows)).T)
        zeros = self._unpack(".qzeros", rows).astype(np.int32) - _CENTRE
        return StoredRows(self._unpack(".qweight", rows), scales, zeros=zeros)

    def _unpack(self, end: str, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        first = start // 8
        words = self.parts[end].read_raw((slice(None), slice(first, math.ceil(stop / 8)))).T
        pairs = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
        values = np.empty((words.shape[0], 8, words.shape[1]), np.uint8)
        for output, nibble in enumerate(_ORDER):
            values[:, output] = pairs[..., nibble // 2] >> 4 * (nibble % 2) & 15
        return values.reshape(-1, words.shape[1])[start - first * 8 : stop - first * 8]


class AwqCodec(Codec):
    """AWQ of AutoAWQ, transformers and AutoRound."""

    methods = ("awq",)
    formats = (AwqFormat,)
    file = "quant_config.json"

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        if config.method != "awq":
            return None
        config.choice("bits", "w_bit", choices=(4,), default=4)
        config.choice("zero_point", choices=(True,), default=True)
        config.choice("version", "format", choices=("gemm",), default="gemm")
        config.choice("pack_dtype", choices=("int32",), default="int32")
        format = AwqFormat(config.size("group_size", "q_group_size", default=128))
        excluded = exclude(config, config.names("modules_to_not_convert"))
        config.finish(_HARMLESS)
        return Quantisation(config.where, (*excluded, all_modules(format)))
