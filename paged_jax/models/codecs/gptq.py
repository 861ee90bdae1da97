"""GPTQ: integers of 4 or 8 bits with zero points, of AutoGPTQ and GPTQModel.

    qweight   I32 [in * bits / 32, out]       a word holds consecutive inputs of an output
    qzeros    I32 [groups, out * bits / 32]   a word holds the zero points of consecutive outputs
    scales    floats [groups, out]
    g_idx     I32 [in], optional              group of each input

A weight is ``(value - zero point) * scale``. With activation order (`desc_act`), `g_idx` is not
sorted. Version 1 stores each zero point minus 1, modulo 16 (4 bits) or 256. Version 2 stores it
unchanged. Symmetric matrices have the zero point 8, or 128 with 8 bits. If a symmetric checkpoint
claims to be version 1, but stores 8 (or 128) everywhere, a tool has written it in version 2, and it
is read as version 2.
"""

import functools
import math
import re
import warnings
from dataclasses import dataclass

import numpy as np

from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.codecs.bit_fields import unpack_words
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import Entries
from paged_jax.models.codecs.module_matrix import (
    FLOATS,
    ModuleFormat,
    ModuleMatrix,
    StoredRows,
    float_dtype,
    matrix_shape,
    read_group_index,
)
from paged_jax.models.codecs.module_names import (
    ModuleRule,
    Quantisation,
    all_modules,
    exclude,
    expression,
)
from paged_jax.models.codecs.packed_integers import integer_format, read_zeros, values_of_words
from paged_jax.models.errors import WeightsError

# Entries of AutoGPTQ, GPTQModel, AutoRound and transformers that do not affect the weights.
TOOL_KEYS = (
    "method", "act_group_aware", "adapter_config", "autoround_version", "backend", "batch_size",
    "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent",
    "dataset", "exllama_config", "fuse_max_seq_len", "do_fuse", "iters", "lm_head",
    "max_input_length", "meta", "mock_quantization", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "modules_to_fuse", "mse", "offload_to_disk", "offload_to_disk_path", "pad_token_id",
    "parallel_packing", "quantizer", "static_groups", "tokenizer", "true_sequential", "uri",
    "use_cuda_fp16", "use_exllama", "v2",
)  # fmt: skip


@dataclass(frozen=True)
class GptqFormat(ModuleFormat):
    """Settings of GPTQ matrices.

    Attributes:
      bits: bits per value, 4 or 8.
      group_size: number of inputs that share a scale; None for all.
      is_symmetric: whether the zero points are always the middle of the range.
      version: version of the format, 1 or 2.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    version: int

    name = "gptq"
    required = (".qweight", ".qzeros", ".scales")
    optional = (".g_idx",)

    @property
    def matrix(self) -> "type[GptqMatrix]":
        """Class of the matrices."""
        return GptqMatrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have."""
        return integer_format(
            self.bits, self.group_size, "float16", has_zeros=not self.is_symmetric
        )


class GptqMatrix(ModuleMatrix):
    """Matrix in the formats ``gptq`` (version 1) and ``gptq_v2``."""

    settings: GptqFormat

    def find_shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        words, num_outputs = matrix_shape(self.parts[".qweight"])
        return num_outputs, words * (32 // self.settings.bits)

    @property
    def _num_groups(self) -> int:
        return math.ceil(self.shape[1] / (self.settings.group_size or self.shape[1]))

    @property
    def _centre(self) -> int:
        return 1 << (self.settings.bits - 1)

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        (num_outputs, num_inputs), groups = self.shape, self._num_groups
        per_word = 32 // self.settings.bits
        if num_outputs % per_word:
            raise WeightsError(
                f"load_weights: the number of outputs of {self.name} must be a multiple of "
                f"{per_word}, got {num_outputs}."
            )
        self.check_part(".qweight", ("I32",), (num_inputs // per_word, num_outputs))
        self.check_part(".qzeros", ("I32",), (groups, num_outputs // per_word))
        self.check_part(".scales", FLOATS, (groups, num_outputs))
        if ".g_idx" in self.parts:
            self.check_part(".g_idx", ("I32",), (num_inputs,))

    def group_of_input(self) -> np.ndarray:
        """Return each input's group in the file."""
        if ".g_idx" in self.parts:
            return read_group_index(self.parts[".g_idx"], self._num_groups)
        return np.arange(self.shape[1]) // (self.settings.group_size or self.shape[1])

    @functools.cached_property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows. There are no minima if all zero points are the middle."""
        stored = unpack_words(self.parts[".qzeros"].read_raw(), self.settings.bits)
        has_zeros = bool((self._zeros(stored) != self._centre).any())
        scale_dtype = float_dtype(self.parts[".scales"])
        return integer_format(
            self.settings.bits, self.settings.group_size, scale_dtype, has_zeros=has_zeros
        )

    @functools.cached_property
    def _zero_offset(self) -> int:
        """Number to add to the stored zero points."""
        if self.settings.version == 2:
            return 0
        if self.settings.is_symmetric:
            stored = unpack_words(self.parts[".qzeros"].read_raw(), self.settings.bits)
            if (stored == self._centre).all():
                warnings.warn(
                    f"load_weights: the checkpoint format is gptq, but all zero points are "
                    f"{self._centre} as in gptq_v2. It is read as gptq_v2.",
                    stacklevel=2,
                )
                return 0
        return 1

    def _zeros(self, stored: np.ndarray) -> np.ndarray:
        return (stored + np.uint8(self._zero_offset)) & ((1 << self.settings.bits) - 1)

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        bits, zeros = self.settings.bits, None
        scales = np.ascontiguousarray(self.parts[".scales"].read_raw((slice(None), rows)).T)
        if self.stored.min_dtype is not None:
            stored = read_zeros(self.parts[".qzeros"], bits, rows, self.shape[0], axis=1)
            zeros = self._zeros(stored).astype(np.int32) - self._centre
        words = self.parts[".qweight"].read_raw((slice(None), rows)).T
        return StoredRows(values_of_words(words, bits), scales, None, zeros, is_paired=bits == 4)


class GptqCodec(Codec):
    """GPTQ of AutoGPTQ, GPTQModel and transformers."""

    methods = ("gptq",)
    formats = (GptqFormat,)
    file = "quantize_config.json"

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        if config.method != "gptq":
            return None
        formats = ("gptq", "gptq_v2")
        version = config.choice("checkpoint_format", "format", choices=formats, default="gptq")
        config.choice("pack_dtype", choices=("int32",), default="int32")
        default_format = _read_format(config, GptqFormat(0, 128, True, 1 + formats.index(version)))
        rules: list[ModuleRule] = []
        dynamic = config.section("dynamic")
        for name in dynamic.content if dynamic else ():
            assert dynamic is not None
            regex = re.sub(r"^[+-]:", "", name)
            if name.startswith("-:"):
                rules.append(expression(dynamic, name, regex))
            elif (part := dynamic.section(name)) is not None:
                rules.append(expression(dynamic, name, regex, _read_format(part, default_format)))
                part.finish(TOOL_KEYS)
        excluded = exclude(config, config.names("modules_to_not_convert"))
        config.finish(TOOL_KEYS)
        return Quantisation(config.where, (*excluded, *rules, all_modules(default_format)))


def _read_format(config: Entries, default_format: GptqFormat) -> GptqFormat:
    """Read the settings of all modules, or of some.

    `default_format` has those that may be omitted.
    """
    config.choice("desc_act", choices=(True, False), default=False)
    return GptqFormat(
        bits=config.choice("bits", choices=(4, 8), default=default_format.bits or None),
        group_size=config.size("group_size", default=default_format.group_size or -1),
        is_symmetric=config.choice(
            "sym", choices=(True, False), default=default_format.is_symmetric
        ),
        version=default_format.version,
    )
