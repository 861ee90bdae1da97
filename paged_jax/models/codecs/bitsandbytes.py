"""bitsandbytes: nf4 and fp4 in blocks of the flattened matrix, and int8 with a scale per row.

4 bits::

    weight                                U8 [out * in / 2, 1] or [1, out * in / 2], two elements in
                                          a byte, the first in the high bits
    weight.absmax                         F32 [blocks], or U8 with double quantisation
    weight.quant_map                      F32 [16], the numbers of the values
    weight.quant_state.bitsandbytes__nf4  U8, a JSON object with shape and block size (or __fp4)
    weight.nested_absmax                  F32, only with double quantisation
    weight.nested_quant_map               F32 [256], only with double quantisation

The flattened matrix is divided into blocks of consecutive elements, by default 64, which share a
scale. If the block size does not divide the number of inputs, a block may contain elements of two
rows. With double quantisation, a scale is stored as an 8-bit index into a table. The value in the
table is multiplied by a scale that a block of scales shares, and an offset is added.

8 bits::

    weight          I8 [out, in]
    SCB             F32 [out]
    weight_format   U8, optional, must be 0

A weight is ``value * SCB[row] / 127``.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_jax.arguments import is_int, is_real
from paged_jax.kernels.weight_formats import CODES, WeightFormat
from paged_jax.models.codecs.bit_fields import look_up, low_nibbles_first
from paged_jax.models.codecs.codec import Codec
from paged_jax.models.codecs.config_entries import KV_CACHE_KEYS, Entries
from paged_jax.models.codecs.module_matrix import ModuleFormat, ModuleMatrix, StoredRows
from paged_jax.models.codecs.module_names import Quantisation, all_modules, exclude
from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.stored_tensors import StoredTensor

_STATES = ("nf4", "fp4")
_MAX_STATE_BYTES = 1 << 16
_HARMLESS = (
    "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_threshold", *KV_CACHE_KEYS,
)  # fmt: skip


@dataclass(frozen=True)
class BitsandbytesFormat(ModuleFormat):
    """nf4 or fp4. All settings are in the tensors."""

    name = "bitsandbytes-4"
    required = (".weight", ".weight.absmax", ".weight.quant_map")
    optional = (
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *(f".weight.quant_state.bitsandbytes__{name}" for name in _STATES),
    )

    @property
    def matrix(self) -> "type[BitsandbytesMatrix]":
        """Class of the matrices."""
        return BitsandbytesMatrix

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have: nf4 in blocks of 64, the default."""
        return WeightFormat("nf4", 64, "float32")


class BitsandbytesMatrix(ModuleMatrix):
    """Matrix in the formats nf4 or fp4.

    A group in `WeightArrays` never contains elements of two rows, so groups are smaller than blocks
    if the block size does not divide the number of inputs.
    """

    def find_shape(self) -> tuple[int, int]:
        """Return the shape of the matrix."""
        shape = self._state["shape"]
        return shape[0], shape[1]

    @functools.cached_property
    def _state(self) -> dict[str, Any]:
        return _read_state(self.name, self.parts)

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        size = math.prod(self.shape)
        if size % 2:
            raise WeightsError(
                f"load_weights: {self.name} must have an even number of elements, got shape "
                f"{[*self.shape]}."
            )
        blocks = math.ceil(size / self._state["blocksize"])
        self.check_part(".weight", ("U8",), (size // 2, 1), (1, size // 2))
        self.check_part(".weight.quant_map", ("F32",), (16,))
        nested = self._state.get("nested_blocksize")
        self.check_part(".weight.absmax", ("F32",) if nested is None else ("U8",), (blocks,))
        has_nested = {".weight.nested_absmax", ".weight.nested_quant_map"} <= self.parts.keys()
        if has_nested != (nested is not None):
            raise WeightsError(
                f"load_weights: {self.name} must have the tensors nested_absmax and "
                "nested_quant_map if and only if its quant_state contains nested_blocksize."
            )
        if nested is not None:
            self.check_part(".weight.nested_absmax", ("F32",), (math.ceil(blocks / nested),))
            self.check_part(".weight.nested_quant_map", ("F32",), (256,))

    @functools.cached_property
    def _table(self) -> np.ndarray:
        return self.parts[".weight.quant_map"].read_raw()

    @functools.cached_property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows: floats if the table of the numbers is another one."""
        codes = (name for name in _STATES if np.array_equal(CODES[name], self._table))
        group_size = math.gcd(self.shape[1], self._state["blocksize"])
        return WeightFormat(next(codes, "float32"), group_size, "float32")

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        start, stop, _ = rows.indices(self.shape[0])
        num_inputs, code = self.shape[1], self.stored.code
        start, stop = start * num_inputs, stop * num_inputs
        pairs = self._read_pairs(start // 2, math.ceil(stop / 2))
        scales = self._read_scales(start, stop)
        if num_inputs % 2 == 0 and code in CODES:
            pairs = pairs.reshape(len(scales), num_inputs // 2)
            return StoredRows(pairs, scales, is_paired=True)
        values = low_nibbles_first(pairs.reshape(-1))
        values = values[start % 2 : start % 2 + stop - start].reshape(len(scales), num_inputs)
        return StoredRows(values if code in CODES else look_up(self._table, values), scales)

    def _read_pairs(self, start: int, stop: int) -> np.ndarray:
        stored = self.parts[".weight"]
        if stored.shape[0] == 1:
            stored = dataclasses.replace(stored, shape=(stored.shape[1], 1))
        pairs = stored.read_raw((slice(start, stop),))
        return pairs << 4 | pairs >> 4  # the file has the first value in the high bits

    def _read_scales(self, start: int, stop: int) -> np.ndarray:
        """Read the scales of the elements from `start` to `stop`, ``[rows, groups]``."""
        size, block = self.stored.group_size or self.shape[1], self._state["blocksize"]
        blocks = np.arange(start, stop, size) // block
        first, last = (blocks[0], blocks[-1] + 1) if len(blocks) else (0, 0)
        scales = self.parts[".weight.absmax"].read_raw((slice(first, last),))
        if "nested_blocksize" in self._state:
            nested = np.arange(first, last) // self._state["nested_blocksize"]
            table = self.parts[".weight.nested_quant_map"].read_raw()
            factors = self.parts[".weight.nested_absmax"].read_raw()
            scales = table[scales] * factors[nested] + np.float32(self._state["nested_offset"])
        num_rows = (stop - start) // self.shape[1]
        return scales[blocks - first].reshape(num_rows, self.shape[1] // size)


def _read_state(name: str, parts: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Read the ``quant_state`` of a matrix, a JSON object stored as bytes, and check it.

    Raises:
      WeightsError: the object is missing or not valid.
    """
    states = [part for end, part in parts.items() if ".quant_state." in end]
    if len(states) != 1:
        raise WeightsError(
            f"load_weights: {name} must have exactly one quant_state tensor, for "
            f"{' or '.join(_STATES)}, got {len(states)}."
        )
    [stored] = states
    state: Any = None
    if stored.dtype == "U8" and math.prod(stored.shape) <= _MAX_STATE_BYTES:
        try:
            state = json.loads(stored.read_raw().tobytes())
        except (ValueError, RecursionError):
            pass
    if not isinstance(state, dict):
        raise WeightsError(f"load_weights: {stored.name} must contain a JSON object, stored as U8.")
    shape, block = state.get("shape"), state.get("blocksize")
    nested, offset = state.get("nested_blocksize", 1), state.get("nested_offset", 0.0)
    sizes = [*shape, block, nested] if isinstance(shape, list) and len(shape) == 2 else [0]
    if not all(is_int(size) and 0 < size < 1 << 31 for size in sizes) or not is_real(offset):
        raise WeightsError(
            f"load_weights: {stored.name} must have a shape [out, in], positive block sizes and a "
            f"finite nested_offset, got shape {shape}, blocksize {block}, nested_blocksize "
            f"{nested} and nested_offset {offset}."
        )
    return state


@dataclass(frozen=True)
class BitsandbytesInt8Format(ModuleFormat):
    """int8 of bitsandbytes."""

    name = "bitsandbytes-8"
    required = (".weight", ".SCB")
    optional = (".weight_format",)

    @property
    def matrix(self) -> "type[BitsandbytesInt8Matrix]":
        """Class of the matrices."""
        return BitsandbytesInt8Matrix

    @property
    def planned(self) -> WeightFormat:
        """Format of the matrices."""
        return WeightFormat("int8", None, "float32")


class BitsandbytesInt8Matrix(ModuleMatrix):
    """Int8 matrix of bitsandbytes."""

    settings: BitsandbytesInt8Format

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        self.check_part(".weight", ("I8",), self.shape)
        self.check_part(".SCB", ("F32",), self.shape[:1])
        if ".weight_format" in self.parts:
            self.check_part(".weight_format", ("U8",), (), (1,))
            if self.parts[".weight_format"].read_raw().any():
                raise WeightsError(
                    f"load_weights: {self.parts['.weight_format'].name} must be 0, which stands "
                    "for the row layout. Save the model again with a newer version of bitsandbytes."
                )

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows."""
        return self.settings.planned

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them."""
        scales = self.parts[".SCB"].read_raw((rows,))[:, None] / np.float32(127)
        return StoredRows(self.parts[".weight"].read_raw((rows,)), scales)

    def _dequantise(self, rows: slice) -> np.ndarray:
        # bitsandbytes multiplies by SCB, and then divides by 127. Multiplying by SCB / 127 instead
        # could change the last bit.
        weights = self._decode_finite(rows).values.astype(np.float32)
        weights *= self.parts[".SCB"].read_raw((rows,))[:, None]
        weights *= np.float32(1 / 127)
        return weights


class BitsandbytesCodec(Codec):
    """nf4, fp4 and int8 of bitsandbytes."""

    methods = ("bitsandbytes",)
    formats = (BitsandbytesFormat, BitsandbytesInt8Format)

    def matches(self, config: Entries) -> Quantisation | None:
        """Read a quantisation config, or return None if it belongs to another format."""
        if config.method != "bitsandbytes":
            return None
        flags = (True, False)
        is_4_bits = config.choice("load_in_4bit", "_load_in_4bit", choices=flags, default=False)
        is_8_bits = config.choice("load_in_8bit", "_load_in_8bit", choices=flags, default=False)
        if is_4_bits == is_8_bits:
            raise config.error("load_in_4bit", "must differ from load_in_8bit", is_4_bits)
        config.choice("bnb_4bit_quant_type", choices=("nf4", "fp4"), default="fp4")
        config.choice("bnb_4bit_quant_storage", choices=("uint8", "torch.uint8"), default="uint8")
        excluded = exclude(config, config.names("llm_int8_skip_modules"))
        config.finish(_HARMLESS)
        format = BitsandbytesFormat() if is_4_bits else BitsandbytesInt8Format()
        return Quantisation(config.where, (*excluded, all_modules(format)))
