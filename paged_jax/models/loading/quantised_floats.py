"""Readers of matrices of 8-bit and 4-bit floats: fp8, NVFP4, MXFP4, nf4 and fp4.

format                       bytes                       first value in  one scale per
fp8                          [out, in]                   -               row, block or matrix
nvfp4 of compressed-tensors  [out, in / 2]               low bits        16 inputs
nvfp4 of ModelOpt            [out, in / 2]               low bits        16 inputs
mxfp4 of compressed-tensors  [out, in / 2]               low bits        32 inputs
mxfp4 of MLX                 words of 8 values           low bits        32 inputs
mxfp4 of gpt-oss             [..., out, in / 32, 16]     low bits        32 inputs
bitsandbytes                 [out * in / 2, 1]           high bits       `blocksize` elements
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_jax.arguments import is_int, is_real
from paged_jax.kernels.weight_formats import CODES, WeightArrays, WeightFormat
from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.quantised_modules import (
    FLOATS,
    GroupScales,
    ModuleMatrix,
    float_dtype,
    look_up,
    low_nibbles_first,
    matrix_shape,
    pack_pairs,
    powers_of_two,
    scale_shapes,
    scales_of_rows,
)
from paged_jax.models.loading.stored_tensors import StoredTensor

MXFP4_BLOCK = 32  # numbers per scale
MXFP4_BLOCK_BYTES = MXFP4_BLOCK // 2
_EXPONENTS = ("F8_E8M0", "U8")
_STATES = ("nf4", "fp4")
_MAX_STATE_BYTES = 1 << 16


class Fp8Matrix(ModuleMatrix):
    """Float8_e4m3fn matrix with one scale, with a scale per row, or with a scale per block.

    A weight is a value times its scale, although transformers calls the scales `weight_scale_inv`.
    Blocks at the lower and right edge may be smaller. For example, a matrix with 576 rows has 5
    rows of scales for blocks of 128.
    """

    required = (".weight",)
    optional = (".weight_scale", ".weight_scale_inv")
    code = "float8_e4m3fn"
    usual_scale_dtype = "float32"

    @property
    def _scale(self) -> str:
        found = [end for end in self.optional if end in self.parts]
        if len(found) != 1:
            raise WeightsError(
                f"load_weights: {self.name} must have exactly one of the tensors weight_scale and "
                f"weight_scale_inv, got {len(found)} of them."
            )
        return found[0]

    def _check(self) -> None:
        num_outputs, shapes = self.shape[0], scale_shapes(self)
        self._check_part(".weight", ("F8_E4M3",), self.shape)
        if self.scheme.block[1] is None:
            # The configs do not tell whether there is a scale per row or a single scale.
            shapes += [(num_outputs, 1), (num_outputs,)]
        exponents = _EXPONENTS if self.scheme.exponent_scales else _EXPONENTS[:1]
        self._check_part(self._scale, (*FLOATS, *exponents), *shapes)

    @property
    def _scale_dtype(self) -> str:
        scale = self.parts[self._scale]
        return "bfloat16" if scale.dtype in _EXPONENTS else float_dtype(scale)

    def _read_values(self, rows: slice) -> np.ndarray:
        values = super()._read_values(rows)
        if ((values.view(np.uint8) & 0x7F) == 0x7F).any():
            raise WeightsError(f"load_weights: the values of {self.name} must be finite, got NaN.")
        return values

    def _read_groups(self, rows: slice) -> GroupScales:
        scale = self.parts[self._scale]
        values = scale.read_raw()
        if scale.dtype in _EXPONENTS:
            values = powers_of_two(values)
        return GroupScales(scales_of_rows(values, self.shape[0], self.scheme.block[0], rows))


class Mxfp4Matrix(ModuleMatrix):
    """Matrix in the format ``mxfp4-pack-quantized`` of compressed-tensors.

    Scales are stored as the exponents of powers of two.
    """

    required = (".weight_packed", ".weight_scale")
    code = "e2m1"
    scale_dtype = "bfloat16"

    def _find_shape(self) -> tuple[int, int]:
        values = self.parts[self.required[0]]
        num_outputs, columns = matrix_shape(values)
        return num_outputs, columns * (8 if values.dtype == "U32" else 2)

    def _check(self) -> None:
        values, scale = self.required[:2]
        self._check_part(values, ("U8",), (self.shape[0], self.shape[1] // 2))
        self._check_part(scale, ("U8", "F8_E8M0"), (self.shape[0], self._check_groups()))

    def _read_pairs(self, rows: slice) -> np.ndarray | None:
        return self.parts[self.required[0]].read_raw((rows,)).view(np.uint8)

    def _read_groups(self, rows: slice) -> GroupScales:
        return GroupScales(powers_of_two(self.parts[self.required[1]].read_raw((rows,))))


class MlxMxfp4Matrix(Mxfp4Matrix):
    """Matrix in the mode ``mxfp4`` of MLX, which stores 8 values in a 32-bit word."""

    required = (".weight", ".scales")

    def _check(self) -> None:
        self._check_part(".weight", ("U32",), self.parts[".weight"].shape)
        self._check_part(".scales", ("U8",), (self.shape[0], self._check_groups()))


class Nvfp4Matrix(Mxfp4Matrix):
    """Matrix in the format ``nvfp4-pack-quantized`` of compressed-tensors.

    The scale of a group is its stored scale divided by a global scale.
    """

    required = (".weight_packed", ".weight_scale", ".weight_global_scale")
    _apply = np.divide

    def _check(self) -> None:
        values, scale, factor = self.required
        self._check_part(values, ("U8",), (self.shape[0], self.shape[1] // 2))
        self._check_part(scale, ("F8_E4M3",), (self.shape[0], self._check_groups()))
        self._check_part(factor, ("F32",), (), (1,))

    def _read_groups(self, rows: slice) -> GroupScales:
        scales = self.parts[self.required[1]].read_raw((rows,)).astype(np.float32)
        factor = self.parts[self.required[2]].read_raw().reshape(1, 1)
        return GroupScales(self._apply(scales, factor))

    scale_dtype = "float32"


class ModelOptNvfp4Matrix(Nvfp4Matrix):
    """Matrix in the NVFP4 format of ModelOpt.

    The scale of a group is its stored scale multiplied by a global scale, unlike in `Nvfp4Matrix`.
    """

    required = (".weight", ".weight_scale", ".weight_scale_2")
    _apply = np.multiply


class Mxfp4Experts(ModuleMatrix):
    """Matrices of experts in MXFP4, as gpt-oss stores them. See `expand_mxfp4`.

    The files have two tensors: uint8 blocks ``[..., out, in / 32, 16]`` and uint8 scales
    ``[..., out, in / 32]``. As in an unquantised checkpoint of gpt-oss, `shape` and the result of
    `read` are ``[..., in, out]``. `read` cannot slice the last two dimensions. `read_arrays`
    returns matrices ``[..., out, in]``.
    """

    required = ("_blocks", "_scales")
    result = ""
    code = "e2m1"
    scale_dtype = "bfloat16"

    def _find_shape(self) -> tuple[int, ...]:
        *experts, num_outputs, num_blocks = self.parts["_scales"].shape or (0, 0)
        return *experts, num_blocks * MXFP4_BLOCK, num_outputs

    def _check(self) -> None:
        scales = self.parts["_scales"].shape
        if len(scales) < 2:
            raise WeightsError(
                f"load_weights: {self.parts['_scales'].name} must have at least two dimensions, "
                f"[..., outputs, blocks], got shape {[*scales]}."
            )
        self._check_part("_blocks", ("U8",), (*scales, MXFP4_BLOCK_BYTES))
        self._check_part("_scales", ("U8",), scales)

    @property
    def format(self) -> WeightFormat:
        """Format of `read_arrays`."""
        return WeightFormat("e2m1", MXFP4_BLOCK, "bfloat16")

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read some of the matrices ``[..., out, in]``, see `StoredTensor.read_arrays`."""
        blocks, scales = (self.parts[end].read_raw((rows,)) for end in self.required)
        if (scales == 0xFF).any():
            raise WeightsError(
                f"load_weights: {self.parts['_scales'].name} must be finite, got NaN."
            )
        pairs = blocks.reshape(*scales.shape[:-1], -1)
        return WeightArrays(pack_pairs(pairs), powers_of_two(scales))

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        blocks, scales = (self.parts[end].read_raw(index) for end in self.required)
        return expand_mxfp4(blocks, scales).swapaxes(-1, -2)


class BitsandbytesMatrix(ModuleMatrix):
    """Matrix in the formats nf4 or fp4 of bitsandbytes.

    The flattened matrix is divided into blocks of consecutive elements, by default 64, which share
    a scale. If the block size does not divide the number of inputs, a block may contain elements of
    two rows. A group in `WeightArrays` never contains elements of two rows, so groups are smaller
    than blocks in this case. With double quantisation, a scale is stored as an 8-bit index into a
    table. The value in the table is multiplied by a scale that a block of scales shares, and an
    offset is added.
    """

    required = (".weight", ".weight.absmax", ".weight.quant_map")
    optional = (
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *(f".weight.quant_state.bitsandbytes__{name}" for name in _STATES),
    )
    code = "nf4"
    scale_dtype = "float32"

    def _find_shape(self) -> tuple[int, int]:
        shape = self._state["shape"]
        return shape[0], shape[1]

    @functools.cached_property
    def _state(self) -> dict[str, Any]:
        return _read_state(self.name, self.parts)

    def _check(self) -> None:
        size = math.prod(self.shape)
        if size % 2:
            raise WeightsError(
                f"load_weights: {self.name} must have an even number of elements, got shape "
                f"{[*self.shape]}."
            )
        blocks = math.ceil(size / self._state["blocksize"])
        self._check_part(".weight", ("U8",), (size // 2, 1), (1, size // 2))
        self._check_part(".weight.quant_map", ("F32",), (16,))
        nested = self._state.get("nested_blocksize")
        self._check_part(".weight.absmax", ("F32",) if nested is None else ("U8",), (blocks,))
        has_nested = {".weight.nested_absmax", ".weight.nested_quant_map"} <= self.parts.keys()
        if has_nested != (nested is not None):
            raise WeightsError(
                f"load_weights: {self.name} must have the tensors nested_absmax and "
                "nested_quant_map if and only if its quant_state contains nested_blocksize."
            )
        if nested is not None:
            self._check_part(".weight.nested_absmax", ("F32",), (math.ceil(blocks / nested),))
            self._check_part(".weight.nested_quant_map", ("F32",), (256,))

    @functools.cached_property
    def _table(self) -> np.ndarray:
        return self.parts[".weight.quant_map"].read_raw()

    @functools.cached_property
    def _code(self) -> str:
        names = (name for name in _STATES if np.array_equal(CODES[name], self._table))
        return next(names, "float32")

    @property
    def _group_size(self) -> int:
        return math.gcd(self.shape[1], self._state["blocksize"])

    def _read_pairs(self, rows: slice) -> np.ndarray | None:
        start, stop = self._elements(rows)
        stored = self.parts[".weight"]
        if stored.shape[0] == 1:
            stored = dataclasses.replace(stored, shape=(stored.shape[1], 1))
        pairs = stored.read_raw((slice(start // 2, math.ceil(stop / 2)),))
        pairs = pairs << 4 | pairs >> 4  # the file has the first value in the high bits
        return pairs.reshape(-1, self.shape[1] // 2) if self.shape[1] % 2 == 0 else pairs

    def _read_values(self, rows: slice) -> np.ndarray:
        start, stop = self._elements(rows)
        pairs = self._read_pairs(rows)
        assert pairs is not None
        values = low_nibbles_first(pairs.reshape(-1))
        values = values[start % 2 : start % 2 + stop - start].reshape(-1, self.shape[1])
        return values if self._code in CODES else look_up(self._table, values)

    def _read_groups(self, rows: slice) -> GroupScales:
        start, stop = self._elements(rows)
        size, block = self._group_size, self._state["blocksize"]
        blocks = np.arange(start, stop, size) // block
        first, last = (blocks[0], blocks[-1] + 1) if len(blocks) else (0, 0)
        scales = self.parts[".weight.absmax"].read_raw((slice(first, last),))
        if "nested_blocksize" in self._state:
            nested = np.arange(first, last) // self._state["nested_blocksize"]
            table = self.parts[".weight.nested_quant_map"].read_raw()
            factors = self.parts[".weight.nested_absmax"].read_raw()
            scales = table[scales] * factors[nested] + np.float32(self._state["nested_offset"])
        return GroupScales(scales[blocks - first].reshape(-1, self.shape[1] // size))

    def _elements(self, rows: slice) -> tuple[int, int]:
        start, stop, _ = rows.indices(self.shape[0])
        return start * self.shape[1], stop * self.shape[1]


def _read_state(name: str, parts: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Read the ``quant_state`` of a matrix, a JSON object stored as bytes, and check it.

    Raises:
      WeightsError: the object is missing or not valid.
    """
    found = [part for end, part in parts.items() if ".quant_state." in end]
    if len(found) != 1:
        raise WeightsError(
            f"load_weights: {name} must have exactly one quant_state tensor, for "
            f"{' or '.join(_STATES)}, got {len(found)}."
        )
    [stored] = found
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
    if not all(is_int(each) and 0 < each < 1 << 31 for each in sizes) or not is_real(offset):
        raise WeightsError(
            f"load_weights: {stored.name} must have a shape [out, in], positive block sizes and a "
            f"finite nested_offset, got shape {shape}, blocksize {block}, nested_blocksize "
            f"{nested} and nested_offset {offset}."
        )
    return state


def expand_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Convert numbers in MXFP4 to float32, without rounding.

    See the OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3.3 and 5.4.1::

        byte     s e e m | s e e m     two E2M1 numbers, the first in the low bits
        scale    e e e e e e e e       E8M0: 2 ** (e - 127), or NaN if all bits are set

    The result is the E2M1 number (0, 0.5, 1, 1.5, 2, 3, 4, 6 or a negative of them) times the scale
    of its block of 32 numbers. bfloat16 can represent all finite results exactly.

    Args:
      blocks: uint8 ``[..., num_blocks, 16]``, pairs of E2M1 numbers.
      scales: uint8 ``[..., num_blocks]``, E8M0 scale of each block.

    Returns:
      float32 ``[..., 32 * num_blocks]``.

    Example:
      >>> blocks, scales = np.array([[0x72, *[0] * 15]], np.uint8), np.array([128], np.uint8)
      >>> expand_mxfp4(blocks, scales)[:3].tolist()
      [2.0, 12.0, 0.0]
    """
    with np.errstate(over="ignore"):  # `StoredTensor.read` reports infinity
        numbers = look_up(CODES["e2m1"], low_nibbles_first(blocks))
        numbers *= powers_of_two(scales).astype(np.float32)[..., None]
    return numbers.reshape(*scales.shape[:-1], -1)
