"""Readers of matrices of 4-bit and 8-bit integers, in the formats of several tools.

Int8 values are stored in one byte each, or packed into 32-bit words. A word contains unsigned
values, with the first value in the lowest bits. In the case of 4 bits, it contains 8 values::

    compressed-tensors, MLX   [out, in / 8]    a word holds 8 inputs of an output
    GPTQ                      [in / 8, out]    a word holds 8 inputs of an output
    AWQ                       [in, out / 8]    a word holds 8 outputs of an input, in another order

A weight is ``(value - zero point) * scale``, or ``value * scale + bias`` in MLX. In memory, the
first form becomes ``(value - centre) * scale + minimum``, where the minimum is
``(centre - zero point) * scale`` and the centre is 8 or 128. With 16-bit scales, both products are
exact in float32, so the sum equals the original weight.
"""

import functools
import math
import warnings
from typing import ClassVar

import numpy as np

from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.quantised_modules import (
    FLOATS,
    GroupScales,
    ModuleMatrix,
    check_zero_points,
    float_dtype,
    matrix_shape,
    scale_shapes,
    scales_of_rows,
    unpack_words,
)
from paged_jax.models.loading.stored_tensors import StoredTensor
from paged_jax.models.quantisation import Scheme

# For each of 8 consecutive columns, its position in a word of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Int8Matrix(ModuleMatrix):
    """Int8 matrix of compressed-tensors, with one scale, or with scales per row or group."""

    required = (".weight", ".weight_scale")
    optional = (".weight_zero_point",)
    code = "int8"

    def _check(self) -> None:
        self._check_part(".weight", ("I8",), self.shape)
        self._check_part(".weight_scale", FLOATS, *scale_shapes(self))
        check_zero_points(self, ("I8",), *scale_shapes(self))

    @property
    def _min_dtype(self) -> str | None:
        return "float32" if ".weight_zero_point" in self.parts else None

    def _read_groups(self, rows: slice) -> GroupScales:
        scales = self._rows(".weight_scale", rows)
        if ".weight_zero_point" not in self.parts:
            return GroupScales(scales)
        zeros = self._rows(".weight_zero_point", rows)
        return GroupScales(scales, -zeros.astype(np.float32) * scales.astype(np.float32))

    def _rows(self, end: str, rows: slice) -> np.ndarray:
        values = self.parts[end].read_raw()
        return scales_of_rows(values, self.shape[0], self.scheme.block[0], rows)


class BitsandbytesInt8Matrix(ModuleMatrix):
    """Int8 matrix of bitsandbytes.

    The tensor SCB has a number for each row. A weight is ``value * SCB[row] / 127``.
    """

    required = (".weight", ".SCB")
    optional = (".weight_format",)
    code = "int8"
    scale_dtype = "float32"

    def _check(self) -> None:
        self._check_part(".weight", ("I8",), self.shape)
        self._check_part(".SCB", ("F32",), self.shape[:1])
        if ".weight_format" in self.parts:
            self._check_part(".weight_format", ("U8",), (), (1,))
            if self.parts[".weight_format"].read_raw().any():
                raise WeightsError(
                    f"load_weights: {self.parts['.weight_format'].name} must be 0, which stands "
                    "for the row layout. Save the model again with a newer version of bitsandbytes."
                )

    def _read_groups(self, rows: slice) -> GroupScales:
        return GroupScales(self.parts[".SCB"].read_raw((rows,))[:, None] / np.float32(127))

    def _dequantise(self, rows: slice) -> np.ndarray:
        # bitsandbytes multiplies by SCB, and then divides by 127. Multiplying by SCB / 127 instead
        # could change the last bit.
        self._finite_groups(rows)
        scales = self.parts[".SCB"].read_raw((rows,))[:, None]
        return self._read_values(rows).astype(np.float32) * scales * np.float32(1 / 127)


class IntegerMatrix(ModuleMatrix):
    """Base class of matrices of unsigned integers with a zero point for each scale."""

    # Name endings of the tensor of zero points, and of the tensor with the group of each input.
    zeros: ClassVar[str]
    group_of_input: ClassVar[str] = ""

    @classmethod
    def code_of(cls, scheme: Scheme) -> str:
        """Return the code of the stored values for this scheme, see `WeightFormat.code`."""
        return "int4" if scheme.bits == 4 else "int8"

    @property
    def _centre(self) -> int:
        return 1 << (self.scheme.bits - 1)

    @property
    def _per_word(self) -> int:
        return 32 // self.scheme.bits

    @property
    def _has_zeros(self) -> bool:
        return self.zeros in self.parts

    @property
    def _min_dtype(self) -> str | None:
        return "float32" if self._has_zeros else None

    def _group_index(self) -> np.ndarray:
        if self.group_of_input not in self.parts:
            return super()._group_index()
        num_groups = math.ceil(self.shape[1] / self._group_size)
        return read_group_index(self.parts[self.group_of_input], num_groups)

    def _read_scales(self, rows: slice) -> np.ndarray:
        raise NotImplementedError

    def _read_zeros(self, rows: slice) -> np.ndarray:
        raise NotImplementedError

    def _read_words(self, rows: slice) -> np.ndarray:
        return self.parts[self.required[0]].read_raw((rows,))

    def _read_pairs(self, rows: slice) -> np.ndarray | None:
        return np.ascontiguousarray(self._read_words(rows)).view(np.uint8)

    def _read_unsigned(self, rows: slice) -> np.ndarray:
        return unpack_words(self._read_words(rows), self.scheme.bits)[:, : self.shape[1]]

    def _read_values(self, rows: slice) -> np.ndarray:
        values = self._read_unsigned(rows)
        return values if self.scheme.bits == 4 else (values ^ 0x80).view(np.int8)

    def _read_groups(self, rows: slice) -> GroupScales:
        scales = self._read_scales(rows)
        if not self._has_zeros:
            return GroupScales(scales)
        zeros = self._read_zeros(rows).astype(np.float32)
        return GroupScales(scales, -zeros * scales.astype(np.float32))

    def _dequantise(self, rows: slice) -> np.ndarray:
        if not self._has_zeros:
            return super()._dequantise(rows)
        # Subtract first, like the tools that write these files: the order changes the rounding.
        scales = self._finite_groups(rows).scales
        numbers = self._read_unsigned(rows).astype(np.float32)
        grouped = self._layout.by_group(numbers)
        grouped -= self._layout.spread(self._read_zeros(rows)) + np.float32(self._centre)
        return self._layout.multiply(numbers, GroupScales(scales))


class CompressedIntegerMatrix(IntegerMatrix):
    """Matrix in the format ``pack-quantized`` of compressed-tensors.

    A word of zero points holds the zero points of consecutive outputs. Old files with activation
    ordering also have the tensor `weight_g_idx`, the group of each input.
    """

    required = (".weight_packed", ".weight_scale", ".weight_shape")
    optional = (".weight_zero_point", ".weight_g_idx")
    zeros, group_of_input = ".weight_zero_point", ".weight_g_idx"

    def _find_shape(self) -> tuple[int, int]:
        rows, words = matrix_shape(self.parts[".weight_packed"])
        stored = self.parts[".weight_shape"]
        if stored.dtype not in ("I64", "I32") or stored.shape != (2,):
            raise WeightsError(
                f"load_weights: {stored.name} must be I64 [2], got {stored.dtype} "
                f"{[*stored.shape]}."
            )
        num_outputs, num_inputs = stored.read_raw().tolist()
        if num_outputs != rows or math.ceil(num_inputs * self.scheme.bits / 32) != words:
            raise WeightsError(
                f"load_weights: {stored.name} must be the shape of a matrix with "
                f"{self.scheme.bits}-bit values that fill words of shape [{rows}, {words}], got "
                f"{[num_outputs, num_inputs]}."
            )
        return num_outputs, num_inputs

    def _check(self) -> None:
        num_outputs = self.shape[0]
        self._check_part(".weight_packed", ("I32",), self.parts[".weight_packed"].shape)
        has_order = ".weight_g_idx" in self.parts
        groups = math.ceil(self.shape[1] / self._group_size) if has_order else self._check_groups()
        is_tensor = self.scheme.block[0] is None
        shapes = [(), (1,), (1, 1)] if is_tensor else [(num_outputs, groups)]
        self._check_part(".weight_scale", FLOATS, *shapes)
        is_packed = self._has_zeros and self.parts[self.zeros].dtype == "I32"
        num_rows = math.ceil(num_outputs / self._per_word) if is_packed else num_outputs
        check_zero_points(self, ("I32", "I8"), (num_rows, groups))
        if has_order:
            self._check_part(".weight_g_idx", ("I32",), self.shape[1:])

    def _read_scales(self, rows: slice) -> np.ndarray:
        scales = self.parts[".weight_scale"]
        if len(scales.shape) == 2 and self.scheme.block[0] is not None:
            return scales.read_raw((rows,))
        start, stop, _ = rows.indices(self.shape[0])
        return np.broadcast_to(scales.read_raw().reshape(1, 1), (stop - start, 1))

    def _read_zeros(self, rows: slice) -> np.ndarray:
        part = self.parts[".weight_zero_point"]
        if part.dtype == "I8":
            return part.read_raw((rows,)).astype(np.int32)
        # A word holds the zero points of several consecutive rows, so read all words that overlap
        # the rows.
        start, stop, _ = rows.indices(self.shape[0])
        first = start // self._per_word
        words = part.read_raw((slice(first, math.ceil(stop / self._per_word)),))
        start, stop = (each - first * self._per_word for each in (start, stop))
        zeros = unpack_words(words.T, self.scheme.bits).T[start:stop]
        return zeros.astype(np.int32) - self._centre


class TransposedMatrix(IntegerMatrix):
    """Base class of matrices stored with the outputs as the last dimension (AWQ and GPTQ)."""

    required = (".qweight", ".qzeros", ".scales")
    scales = ".scales"
    zeros = ".qzeros"
    usual_scale_dtype = "float16"

    def _read_scales(self, rows: slice) -> np.ndarray:
        return np.ascontiguousarray(self.parts[".scales"].read_raw((slice(None), rows)).T)


class AwqMatrix(TransposedMatrix):
    """Matrix in the format ``gemm`` of AutoAWQ. A word holds 8 outputs of an input."""

    def _find_shape(self) -> tuple[int, int]:
        num_inputs, words = matrix_shape(self.parts[".qweight"])
        return words * 8, num_inputs

    def _check(self) -> None:
        num_outputs, num_inputs = self.shape
        groups = self._check_groups()
        self._check_part(".qweight", ("I32",), (num_inputs, num_outputs // 8))
        self._check_part(".qzeros", ("I32",), (groups, num_outputs // 8))
        self._check_part(".scales", FLOATS, (groups, num_outputs))

    def _read_pairs(self, rows: slice) -> np.ndarray | None:
        return None

    def _read_unsigned(self, rows: slice) -> np.ndarray:
        return self._unpack(".qweight", rows)

    def _read_zeros(self, rows: slice) -> np.ndarray:
        return self._unpack(".qzeros", rows).astype(np.int32) - self._centre

    def _unpack(self, end: str, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        first = start // 8
        words = self.parts[end].read_raw((slice(None), slice(first, math.ceil(stop / 8)))).T
        pairs = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
        values = np.empty((words.shape[0], 8, words.shape[1]), np.uint8)
        for output, place in enumerate(_AWQ_ORDER):
            values[:, output] = pairs[..., place // 2] >> 4 * (place % 2) & 15
        return values.reshape(-1, words.shape[1])[start - first * 8 : stop - first * 8]


class GptqMatrix(TransposedMatrix):
    """Matrix in the formats ``gptq`` (version 1) and ``gptq_v2``.

    `g_idx` holds the group of each input. Version 1 stores each zero point minus 1, modulo 16 (4
    bits) or 256 (`Scheme.zero_offset`). Symmetric matrices have the zero point 8, or 128 with 8
    bits. If a checkpoint claims to be version 1, but stores 8 (or 128) everywhere, a tool has
    written it in version 2, and it is read as version 2.
    """

    optional = (".g_idx",)
    group_of_input = ".g_idx"

    def _find_shape(self) -> tuple[int, int]:
        words, num_outputs = matrix_shape(self.parts[".qweight"])
        return num_outputs, words * (32 // self.scheme.bits)

    def _check(self) -> None:
        num_outputs, num_inputs = self.shape
        groups = math.ceil(num_inputs / self._group_size)
        if num_outputs % self._per_word:
            raise WeightsError(
                f"load_weights: the number of outputs of {self.name} must be a multiple of "
                f"{self._per_word}, got {num_outputs}."
            )
        self._check_part(".qweight", ("I32",), (num_inputs // self._per_word, num_outputs))
        self._check_part(".qzeros", ("I32",), (groups, num_outputs // self._per_word))
        self._check_part(".scales", FLOATS, (groups, num_outputs))
        if ".g_idx" in self.parts:
            self._check_part(".g_idx", ("I32",), (num_inputs,))

    @functools.cached_property
    def _zero_offset(self) -> int:
        offset = self.scheme.zero_offset
        if offset and self.scheme.is_symmetric:
            stored = unpack_words(self.parts[".qzeros"].read_raw(), self.scheme.bits)
            if (stored == self._centre).all():
                warnings.warn(
                    f"load_weights: the checkpoint format is gptq, but all zero points are "
                    f"{self._centre} as in gptq_v2. It is read as gptq_v2.",
                    stacklevel=2,
                )
                return 0
        return offset

    @functools.cached_property
    def _has_zeros(self) -> bool:
        return bool((self._zeros(self.parts[".qzeros"].read_raw()) != self._centre).any())

    def _read_words(self, rows: slice) -> np.ndarray:
        return self.parts[".qweight"].read_raw((slice(None), rows)).T

    def _read_zeros(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        first, last = start // self._per_word, math.ceil(stop / self._per_word)
        zeros = self._zeros(self.parts[".qzeros"].read_raw((slice(None), slice(first, last))))
        start -= first * self._per_word
        return zeros[:, start : stop - first * self._per_word].T.astype(np.int32) - self._centre

    def _zeros(self, words: np.ndarray) -> np.ndarray:
        mask = (1 << self.scheme.bits) - 1
        return (unpack_words(words, self.scheme.bits) + np.uint8(self._zero_offset)) & mask


class MlxMatrix(IntegerMatrix):
    """Matrix in the mode ``affine`` of MLX. A weight is ``value * scale + bias``."""

    required = (".weight", ".scales", ".biases")
    scales = ".scales"

    def _find_shape(self) -> tuple[int, int]:
        num_outputs, words = matrix_shape(self.parts[".weight"])
        return num_outputs, words * 32 // self.scheme.bits

    def _check(self) -> None:
        groups = self._check_groups()
        self._check_part(".weight", ("U32",), self.parts[".weight"].shape)
        for end in (".scales", ".biases"):
            self._check_part(end, FLOATS, (self.shape[0], groups))

    @classmethod
    def code_of(cls, scheme: Scheme) -> str:
        """Return the code of the stored values for this scheme, see `WeightFormat.code`."""
        return "uint4" if scheme.bits == 4 else "int8"

    @property
    def _min_dtype(self) -> str | None:
        return float_dtype(self.parts[".biases"]) if self.scheme.bits == 4 else "float32"

    def _read_groups(self, rows: slice) -> GroupScales:
        scales, biases = (self.parts[end].read_raw((rows,)) for end in (".scales", ".biases"))
        if self.scheme.bits == 4:
            return GroupScales(scales, biases)
        # `_read_values` subtracts 128 from values of 8 bits, so add 128 scales here.
        return GroupScales(scales, biases.astype(np.float32) + np.float32(128) * scales)

    def _dequantise(self, rows: slice) -> np.ndarray:
        self._finite_groups(rows)
        scales, biases = (self.parts[end].read_raw((rows,)) for end in (".scales", ".biases"))
        numbers = self._read_unsigned(rows).astype(np.float32)
        return self._layout.multiply(numbers, GroupScales(scales, biases))


def read_group_index(part: StoredTensor, num_groups: int) -> np.ndarray:
    """Read the tensor with the group of each input, and check the group numbers.

    Raises:
      WeightsError: a group number is negative or not less than `num_groups`.
    """
    index = part.read_raw()
    if index.size and not 0 <= index.min() <= index.max() < num_groups:
        raise WeightsError(
            f"load_weights: the group numbers in {part.name} must be in 0..{num_groups - 1}, got "
            f"{index.min()} to {index.max()}."
        )
    return index
