"""compressed-tensors: the formats of llm-compressor, with groups of modules in the config.

The config gives each group of modules a format and the settings of its weights::

    float-quantized       fp8, see `fp8.py`
    int-quantized         weight I8 [out, in]
                          weight_scale floats and, for asymmetric matrices, weight_zero_point I8:
                          one element for the matrix, or for each row, group or block
    naive-quantized       one of the above
    pack-quantized        weight_packed I32 [out, in * bits / 32], a word holds consecutive inputs
                          weight_scale floats [out, groups]
                          weight_shape I64 or I32 [2], which contains out and in
                          weight_zero_point, for asymmetric matrices: I8 [out, groups], or I32
                          [out * bits / 32, groups], where a word holds consecutive outputs
                          weight_g_idx I32 [in], the group of each input, in old files with
                          activation order
    nvfp4-pack-quantized  see `nvfp4.py`
    mxfp4-pack-quantized  see `mxfp4.py`

A weight of integers is ``(value - zero point) * scale``. Packed values are unsigned, with 8 (or
128) added.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import unpack
from paged_jax.models.codecs.bit_fields import pack_words
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import KV_CACHE_KEYS, Entries
from paged_jax.models.codecs.fp8 import Fp8Format
from paged_jax.models.codecs.module_matrix import (
    FLOATS,
    SAVE_ADVICE,
    EncodedModule,
    ModuleFormat,
    ModuleMatrix,
    StoredRows,
    float_dtype,
    matrix_shape,
    read_group_index,
    scale_shapes,
    scales_of_rows,
)
from paged_jax.models.codecs.module_names import (
    ModuleRule,
    Quantisation,
    expression,
    whole_name,
)
from paged_jax.models.codecs.mxfp4 import Mxfp4Format
from paged_jax.models.codecs.nvfp4 import Nvfp4Format
from paged_jax.models.codecs.packed_integers import integer_format, read_zeros, values_of_words
from paged_jax.models.errors import SaveError, WeightsError

_HARMLESS = ("quantization_status", "version", "global_compression_ratio", *KV_CACHE_KEYS)
_HARMLESS_OF_WEIGHTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic")
# For each format, the possible numbers of bits.
_BITS = {
    "float-quantized": (8,),
    "int-quantized": (8,),
    "naive-quantized": (8,),
    "pack-quantized": (4, 8),
    "nvfp4-pack-quantized": (4,),
    "mxfp4-pack-quantized": (4,),
}


@dataclass(frozen=True)
class CompressedInt8Format(ModuleFormat):
    """Settings of int8 matrices, one value to a byte.

    Attributes:
      block: number of outputs and of inputs that share one scale; None for all of them.
      has_zeros: whether zero points are stored.
    """

    block: tuple[int | None, int | None] = (1, None)
    has_zeros: bool = False

    name = "int8"
    required = (".weight", ".weight_scale")
    optional = (".weight_zero_point",)
    unused = (".input_scale", ".input_zero_point", ".output_scale")

    @property
    def matrix(self) -> "type[CompressedInt8Matrix]":
        """Class of the matrices."""
        return CompressedInt8Matrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have."""
        return integer_format(8, self.block[1], "bfloat16", has_zeros=self.has_zeros)


class CompressedInt8Matrix(ModuleMatrix):
    """Int8 matrix."""

    settings: CompressedInt8Format

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        shapes = scale_shapes(self.shape, self.settings.block)
        self.check_part(".weight", ("I8",), self.shape)
        self.check_part(".weight_scale", FLOATS, *shapes)
        _check_zeros(self, ("I8",), *shapes)

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        scale_dtype = float_dtype(self.parts[".weight_scale"])
        has_zeros = ".weight_zero_point" in self.parts
        return integer_format(8, self.settings.block[1], scale_dtype, has_zeros=has_zeros)

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        scales = self._rows(".weight_scale", rows)
        zeros = None
        if ".weight_zero_point" in self.parts:
            zeros = self._rows(".weight_zero_point", rows).astype(np.int32)
        return StoredRows(self.parts[".weight"].read_raw((rows,)), scales, zeros=zeros)

    def _rows(self, end: str, rows: slice) -> np.ndarray:
        values = self.parts[end].read_raw()
        return scales_of_rows(values, self.shape[0], self.settings.block[0], rows)


@dataclass(frozen=True)
class CompressedPackedFormat(ModuleFormat):
    """Settings of matrices of packed integers.

    Attributes:
      bits: bits per value, 4 or 8.
      block: number of outputs and of inputs that share one scale; None for all of them.
      has_zeros: whether zero points are stored.
    """

    bits: int
    block: tuple[int | None, int | None]
    has_zeros: bool = False

    name = "packed"
    required = (".weight_packed", ".weight_scale", ".weight_shape")
    optional = (".weight_zero_point", ".weight_g_idx")
    unused = CompressedInt8Format.unused

    @property
    def matrix(self) -> "type[CompressedPackedMatrix]":
        """Class of the matrices."""
        return CompressedPackedMatrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have."""
        return integer_format(self.bits, self.block[1], "bfloat16", has_zeros=self.has_zeros)

    @classmethod
    def encode(cls, name: str, arrays: WeightArrays, format: WeightFormat) -> EncodedModule | None:
        """Convert a matrix of 4-bit or 8-bit integers to tensors. Minima become zero points."""
        if format.code not in ("int4", "uint4", "int8"):
            return None
        bits = 8 if format.code == "int8" else 4
        # The file contains unsigned values, which are the signed values plus 2 ** (bits - 1).
        unsigned = unpack(arrays.values) if bits == 4 else arrays.values.view(np.uint8) ^ 0x80
        tensors = {
            ".weight_packed": pack_words(unsigned, bits),
            ".weight_scale": arrays.scales,
            ".weight_shape": np.array(unsigned.shape, np.int64),
        }
        zeros = _zero_points(name, arrays, format, 1 << bits - 1)
        if zeros is not None:
            tensors[".weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T, bits).T)
        settings = cls(bits, (1, format.group_size), has_zeros=zeros is not None)
        return EncodedModule(settings, tensors)


def _zero_points(
    name: str, arrays: WeightArrays, format: WeightFormat, centre: int
) -> np.ndarray | None:
    """Return zero points uint8 ``[out, groups]``; None if all of them are `centre`."""
    scales = arrays.scales.astype(np.float32)
    mins = np.zeros_like(scales) if arrays.mins is None else arrays.mins.astype(np.float32)
    code_of_zero = 0 if format.code == "uint4" else centre
    safe = np.where(scales == 0, 1, scales)
    zeros = np.clip(np.rint(code_of_zero - mins / safe), 0, 2 * centre - 1)
    if not np.array_equal((code_of_zero - zeros) * scales, mins):
        raise SaveError(
            f"save_weights: the minima of {name} must be integer multiples of their scales, "
            f"because compressed-tensors stores minima as zero points. {SAVE_ADVICE}"
        )
    return None if (zeros == centre).all() else zeros.astype(np.uint8)


class CompressedPackedMatrix(ModuleMatrix):
    """Matrix of packed integers."""

    settings: CompressedPackedFormat

    def find_shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        bits, stored = self.settings.bits, self.parts[".weight_shape"]
        rows, words = matrix_shape(self.parts[".weight_packed"])
        if stored.dtype not in ("I64", "I32") or stored.shape != (2,):
            raise WeightsError(
                f"load_weights: {stored.name} must be I64 [2], got {stored.dtype} "
                f"{[*stored.shape]}."
            )
        num_outputs, num_inputs = stored.read_raw().tolist()
        if num_outputs != rows or math.ceil(num_inputs * bits / 32) != words:
            raise WeightsError(
                f"load_weights: {stored.name} must be the shape of a matrix with {bits}-bit values "
                f"that fill words of shape [{rows}, {words}], got {[num_outputs, num_inputs]}."
            )
        return num_outputs, num_inputs

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        num_outputs, has_order = self.shape[0], ".weight_g_idx" in self.parts
        self.check_part(".weight_packed", ("I32",), self.parts[".weight_packed"].shape)
        groups = self._num_groups if has_order else self.check_groups(self.settings.block[1])
        is_tensor = self.settings.block[0] is None
        shapes = [(), (1,), (1, 1)] if is_tensor else [(num_outputs, groups)]
        self.check_part(".weight_scale", FLOATS, *shapes)
        zeros = self.parts.get(".weight_zero_point")
        is_packed = zeros is not None and zeros.dtype == "I32"
        num_rows = math.ceil(num_outputs * self.settings.bits / 32) if is_packed else num_outputs
        _check_zeros(self, ("I32", "I8"), (num_rows, groups))
        if has_order:
            self.check_part(".weight_g_idx", ("I32",), self.shape[1:])

    @property
    def _num_groups(self) -> int:
        return math.ceil(self.shape[1] / (self.settings.block[1] or self.shape[1]))

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        return integer_format(
            self.settings.bits,
            self.settings.block[1],
            float_dtype(self.parts[".weight_scale"]),
            has_zeros=".weight_zero_point" in self.parts,
        )

    def group_of_input(self) -> np.ndarray:
        """Return each input's group in the file."""
        if ".weight_g_idx" in self.parts:
            return read_group_index(self.parts[".weight_g_idx"], self._num_groups)
        return super().group_of_input()

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        bits = self.settings.bits
        scales, zeros = self._read_scales(rows), None
        if ".weight_zero_point" in self.parts:
            zeros = self._read_zeros(rows)
        values = values_of_words(self.parts[".weight_packed"].read_raw((rows,)), bits)
        if bits == 8:
            values = values[:, : self.shape[1]]
        return StoredRows(values, scales, None, zeros, is_paired=bits == 4)

    def _read_scales(self, rows: slice) -> np.ndarray:
        scales = self.parts[".weight_scale"]
        if len(scales.shape) == 2 and self.settings.block[0] is not None:
            return scales.read_raw((rows,))
        start, stop, _ = rows.indices(self.shape[0])
        return np.broadcast_to(scales.read_raw().reshape(1, 1), (stop - start, 1))

    def _read_zeros(self, rows: slice) -> np.ndarray:
        part, bits = self.parts[".weight_zero_point"], self.settings.bits
        if part.dtype == "I8":
            return part.read_raw((rows,)).astype(np.int32)
        zeros = read_zeros(part, bits, rows, self.shape[0], axis=0)
        return zeros.astype(np.int32) - (1 << (bits - 1))


def _check_zeros(
    matrix: CompressedInt8Matrix | CompressedPackedMatrix,
    dtypes: tuple[str, ...],
    *shapes: tuple[int, ...],
) -> None:
    """Check the dtype and shape of a matrix's zero points."""
    if ".weight_zero_point" in matrix.parts:
        matrix.check_part(".weight_zero_point", dtypes, *shapes)
    elif matrix.settings.has_zeros:
        raise WeightsError(
            f"load_weights: {matrix.name} must have a tensor weight_zero_point, because its "
            "quantisation is not symmetric."
        )


class CompressedTensorsCodec(Codec):
    """Formats of compressed-tensors."""

    methods = ("compressed-tensors",)
    formats = (CompressedInt8Format, CompressedPackedFormat, Fp8Format, Nvfp4Format, Mxfp4Format)
    key = "compression_config"

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        if config.method != "compressed-tensors":
            return None
        default_format = config.choice(
            "format", choices=(*_BITS, "dense", "mixed-precision"), default="dense"
        )
        for key in ("sparsity_config", "moe_sparsity_config"):
            if sparsity := config.section(key):
                sparsity.choice("format", choices=("dense",), default="dense")
        # Groups for some modules precede groups for all linear layers.
        exact: list[ModuleRule] = []
        linear: list[ModuleRule] = []
        for group in config.sections("config_groups").values():
            format = _read_group(group, default_format)
            for target in group.names("targets"):
                if target == "Linear":
                    linear.append(ModuleRule(target, format))
                else:
                    exact.append(_named(group, target, format))
            group.finish(("input_activations", "output_activations"))
        excluded = [_named(config, name, None) for name in config.names("ignore")]
        config.finish(_HARMLESS)
        return Quantisation(config.where, (*excluded, *exact, *linear))

    def encode(self, name: str, arrays: WeightArrays, format: WeightFormat) -> EncodedModule:
        """Convert a matrix ``[out, in]`` to the tensors of a module.

        Values and scales are written unchanged. Minima are written as zero points, so each minimum
        must be an integer multiple of its scale.

        Args:
          name: name of the module.
          arrays: arrays of the matrix.
          format: format of the matrix. It is not compact.

        Raises:
          SaveError: compressed-tensors cannot represent the matrix.
        """
        for codec in _WRITTEN:
            if (module := codec.encode(name, arrays, format)) is not None:
                return module
        size = "" if format.group_size is None else f" in groups of {format.group_size}"
        raise SaveError(
            f"save_weights: compressed-tensors cannot represent {name}, which has the format "
            f"{format.code}{size}. {SAVE_ADVICE}"
        )

    def check(self, format: WeightFormat) -> None:
        """Check, without the arrays, that matrices in `format` may be representable.

        Raises:
          SaveError: they are not. The message says what to do.
        """
        if format.has_order:
            raise SaveError(
                "save_weights: compressed-tensors does not support matrices with reordered inputs, "
                f"got such a matrix in the format {format.code}. {SAVE_ADVICE}"
            )
        if format.widened.code not in _WRITTEN_CODES:
            raise SaveError(
                f"save_weights: compressed-tensors does not support the format {format.code}. "
                f"{SAVE_ADVICE}"
            )

    def name_of(self, format: ModuleFormat) -> str:
        """Return the name of the format of written modules."""
        return _WRITTEN[type(format)]

    def write_config(
        self, modules: Mapping[str, ModuleFormat], floats: Iterable[str]
    ) -> dict[str, Any]:
        """Return the entry ``quantization_config`` of ``config.json``.

        Args:
          modules: formats of the quantised modules by name.
          floats: names of the modules that are not quantised.
        """
        names: dict[ModuleFormat, list[str]] = {}
        for module, format in modules.items():
            names.setdefault(format, []).append(module)
        groups = {
            f"group_{index}": {
                "format": self.name_of(format),
                "input_activations": None,
                "output_activations": None,
                "targets": names[format] if len(names) > 1 else ["Linear"],
                "weights": _write_weights(format),
            }
            for index, format in enumerate(names)
        }
        kinds = {group["format"] for group in groups.values()}
        return {
            "config_groups": groups,
            "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
            "ignore": sorted({*floats, "lm_head"}),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }


def _named(config: Entries, name: str, format: ModuleFormat | None) -> ModuleRule:
    """Return a rule for a module's name, or for a regular expression that begins with ``re:``."""
    if name.startswith("re:"):
        return expression(config, name, name[3:], format)
    return whole_name(name, format)


def _read_group(group: Entries, default_format: str) -> ModuleFormat | None:
    """Return the format of a group of modules; None if only activations are quantised."""
    weights = group.section("weights")
    if weights is None:
        group.get("format")
        return None
    name = group.choice("format", choices=_BITS, default=default_format)
    kind = weights.choice("type", choices=("int", "float"), default="int")
    bits = weights.choice("num_bits", choices=_BITS[name], default=8)
    block = _read_block(weights)
    weights.choice("actorder", choices=(None, False, True, "weight", "static", "group", "dynamic"))
    has_zeros = not weights.choice("symmetric", choices=(True, False), default=True)
    weights.finish(_HARMLESS_OF_WEIGHTS)
    is_float = name.startswith(("nvfp4", "mxfp4", "float"))
    if name != "naive-quantized" and is_float != (kind == "float"):
        raise weights.error("type", f"must fit the format {name}", kind)
    if name == "pack-quantized":
        return CompressedPackedFormat(bits, block, has_zeros)
    if name == "nvfp4-pack-quantized":
        return Nvfp4Format(block[1])
    if name == "mxfp4-pack-quantized":
        return Mxfp4Format(block[1])
    return Fp8Format(block) if kind == "float" else CompressedInt8Format(block, has_zeros)


def _read_block(weights: Entries) -> tuple[int | None, int | None]:
    """Return the number of outputs and of inputs that share a scale; None for all of them."""
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = weights.choice("strategy", choices=strategies, default="tensor")
    size = weights.size("group_size")
    weights.get("block_structure")  # without effect, except for the strategy "block"
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "block":
        return weights.block("block_structure")
    if size is None:
        raise weights.error("group_size", f"must be positive for strategy {strategy}", size)
    return 1, size


# Formats in which matrices are written, in the order in which they are tried, and their names.
_WRITTEN: Mapping[type[ModuleFormat], str] = {
    CompressedPackedFormat: "pack-quantized",
    Fp8Format: "float-quantized",
    Mxfp4Format: "mxfp4-pack-quantized",
    Nvfp4Format: "nvfp4-pack-quantized",
}
# Codes of matrices that these formats can represent.
_WRITTEN_CODES = ("int4", "uint4", "int8", "float8_e4m3fn", "e2m1")


def _write_weights(format: ModuleFormat) -> dict[str, Any]:
    """Return the entry ``weights`` of a group of modules, the inverse of `_read_group`."""
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": None,
        "symmetric": True,
        "dynamic": False,
    }
    if isinstance(format, Fp8Format):
        size = format.block[1]
        if size is None:
            return weights | {"num_bits": 8, "strategy": "channel"}
        return weights | {"num_bits": 8, "strategy": "block", "block_structure": [*format.block]}
    if isinstance(format, Mxfp4Format):
        return weights | {"group_size": format.group_size, "scale_dtype": "torch.uint8"}
    if isinstance(format, Nvfp4Format):
        weights |= {"strategy": "tensor_group", "group_size": format.group_size}
        return weights | {"scale_dtype": "torch.float8_e4m3fn"}
    assert isinstance(format, CompressedPackedFormat)
    size = format.block[1]
    strategy = "channel" if size is None else "group"
    weights |= {"num_bits": format.bits, "type": "int", "strategy": strategy, "group_size": size}
    return weights | {"symmetric": not format.has_zeros}
