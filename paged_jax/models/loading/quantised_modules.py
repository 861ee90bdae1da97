"""Base class for reading quantised matrices that are stored as several tensors.

A subclass reads the values of some rows as the file stores them, and the scales and minima for
groups of their inputs. The base class converts them to `WeightArrays`::

    in the file                           in `WeightArrays`
    values of columns, in any order       columns sorted by group, 4-bit values packed again
    scales of groups of `group_size`      scales of groups that divide the inputs evenly
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import CODES, WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import PACKED_BYTES, PACKED_INPUTS, pack
from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.stored_tensors import QuantisedTensor, StoredTensor, is_finite
from paged_jax.models.quantisation import Scheme

FLOATS = ("F32", "BF16", "F16")
# Smallest group size that the kernels support. Matrices with smaller groups are converted to
# floats.
_MIN_GROUP = 16
_LOOKED_UP = 1 << 16  # number of values that `look_up` processes at a time
# For each code, the factor that turns its numbers into integers. If a matrix cannot be packed,
# these integers are stored as int8.
_INTEGER_FACTORS = {"int4": 1, "uint4": 1, "e2m1": 2}


class GroupScales(NamedTuple):
    """Scales and minima of some rows, one for each group of inputs in the file.

    Attributes:
      scales: floats ``[rows, groups]``.
      mins: floats ``[rows, groups]``; None if the format has no minima.
    """

    scales: np.ndarray
    mins: np.ndarray | None = None


class GroupLayout(NamedTuple):
    """Conversion of a matrix's input order and groups from a file to `WeightArrays`.

    Attributes:
      stored: for each input, the index of its group in the file.
      order: for each column in `WeightArrays`, the index of its input in the file; None if the
        columns are in the order of the inputs.
      group_size: number of inputs per group in `WeightArrays`.
      groups: for each group in `WeightArrays`, the index of the group in the file.
    """

    stored: np.ndarray
    order: np.ndarray | None
    group_size: int
    groups: np.ndarray

    @classmethod
    def of(cls, stored: np.ndarray) -> "GroupLayout":
        """Return the layout with the largest possible groups in `WeightArrays`.

        These groups all have the same size, and each consists of inputs from only one group of
        the file. For each input, `stored` contains the index of its group in the file.
        """
        is_sorted = bool((np.diff(stored) >= 0).all())
        order = None if is_sorted else np.argsort(stored, kind="stable").astype(np.int32)
        kept = stored if order is None else stored[order]
        starts = np.flatnonzero(np.diff(kept)) + 1
        size = math.gcd(len(stored), *starts.tolist())
        return cls(stored, order, size, kept[::size])

    def by_group(self, values: np.ndarray) -> np.ndarray:
        """Return a view ``[rows, groups, group_size]`` of values ``[rows, in]``.

        If the inputs are reordered, return the values unchanged.
        """
        return (
            values if self.order is not None else values.reshape(len(values), -1, self.group_size)
        )

    def spread(self, groups: np.ndarray) -> np.ndarray:
        """Arrange one number per group in a shape that broadcasts with the result of `by_group`.

        Args:
          groups: ``[rows, groups]``, one number for each group in the file.

        Returns:
          float32 ``[rows, groups, 1]``, one number for each group in `WeightArrays`. If the inputs
          are reordered, ``[rows, in]``, one number for each input.
        """
        groups = groups.astype(np.float32)
        return groups[:, self.groups, None] if self.order is None else groups[:, self.stored]

    def multiply(self, numbers: np.ndarray, groups: "GroupScales") -> np.ndarray:
        """Multiply float32 numbers ``[rows, in]`` by their groups' scales, and add the minima.

        The result overwrites `numbers`, and is returned.
        """
        grouped = self.by_group(numbers)
        grouped *= self.spread(groups.scales)
        if groups.mins is not None:
            grouped += self.spread(groups.mins)
        return numbers


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleMatrix(QuantisedTensor):
    """Quantised matrix ``[out, in]`` that is stored as several tensors of a module.

    Attributes:
      parts: the tensors, by name without the name of the module, such as ``".weight_scale"``.
      scheme: format of the matrix in the quantisation config.
    """

    parts: Mapping[str, StoredTensor]
    scheme: Scheme

    # Name endings of the module's tensors. The module must have the tensors in `required`, and may
    # have the tensors in `optional`. The first required tensor holds the values, and the tensor
    # `scales` holds the scales. The name of the matrix is the module's name followed by `result`.
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    scales: ClassVar[str] = ".weight_scale"
    result: ClassVar[str] = ".weight"
    # Code of the stored values, see `WeightFormat`.
    code: ClassVar[str]
    # Dtype of the scales that `_read_groups` returns. None means the dtype in the file, which is
    # usually `usual_scale_dtype`.
    scale_dtype: ClassVar[str | None] = None
    usual_scale_dtype: ClassVar[str] = "bfloat16"

    @classmethod
    def combine(
        cls, module: str, parts: Mapping[str, StoredTensor], scheme: Scheme
    ) -> "QuantisedTensor":
        """Combine the tensors of a module into one quantised matrix.

        Raises:
          WeightsError: a tensor is missing, not part of this format, or does not fit the others.
        """
        name = module + cls.result
        for end in cls.required:
            if end not in parts:
                raise WeightsError(
                    f"load_weights: {module + end} is missing, but {scheme.reader} requires it."
                )
        for end in parts:
            if end not in cls.required + cls.optional:
                raise WeightsError(
                    f"load_weights: {parts[end].name} must not exist, because the quantisation "
                    f"config states that {module} has the format {scheme.reader}."
                )
        first = parts[cls.required[0]]
        matrix = cls(first.path, name, (), scheme.reader, parts, scheme)
        matrix = dataclasses.replace(matrix, shape=matrix._find_shape())
        matrix._check()
        return matrix

    @classmethod
    def code_of(cls, scheme: Scheme) -> str:
        """Return the code of the stored values for this scheme, see `WeightFormat.code`."""
        return cls.code

    def _find_shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix; by default it is the shape of the stored values."""
        return matrix_shape(self.parts[self.required[0]])

    def _check(self) -> None:
        """Check the dtypes and shapes of the tensors."""
        raise NotImplementedError

    @property
    def _code(self) -> str:
        return self.code_of(self.scheme)

    @property
    def _group_size(self) -> int:
        """Number of inputs per group in the file, except the last group, which may be smaller."""
        return self.scheme.block[1] or self.shape[1]

    @property
    def _scale_dtype(self) -> str:
        return self.scale_dtype or float_dtype(self.parts[self.scales])

    @property
    def _min_dtype(self) -> str | None:
        """Dtype of the minima that `_read_groups` returns; None if it returns no minima."""
        return None

    def _read_values(self, rows: slice) -> np.ndarray:
        """Read the values of rows, ``[rows, in]``. 4-bit values take one byte each."""
        pairs = self._read_pairs(rows)
        if pairs is None:
            return self.parts[self.required[0]].read_raw((rows,))
        return low_nibbles_first(pairs)

    def _read_pairs(self, rows: slice) -> np.ndarray | None:
        """Read 4-bit values without unpacking them, uint8 ``[rows, in / 2]``.

        A byte holds two neighbouring inputs, the first in the low bits. If the file does not store
        values in this way, the result is None.
        """
        return None

    def _read_groups(self, rows: slice) -> GroupScales:
        """Read the scales and minima of rows, one for each quantisation group in the file."""
        raise NotImplementedError

    def _group_index(self) -> np.ndarray:
        """Return each input's group in the file; by default, groups are consecutive inputs."""
        return np.arange(self.shape[1]) // self._group_size

    @functools.cached_property
    def _layout(self) -> GroupLayout:
        return GroupLayout.of(self._group_index())

    @functools.cached_property
    def format(self) -> WeightFormat:
        """Format of the arrays that `read_arrays` returns; float32 if no quantised format fits."""
        layout, num_inputs = self._layout, self.shape[1]
        code, scale_dtype = self._code, self._scale_dtype
        if code in CODES and num_inputs % PACKED_INPUTS:
            # Store values that cannot be packed as integers of 8 bits.
            code = "int8" if code in _INTEGER_FACTORS else "float32"
            if _INTEGER_FACTORS.get(self._code, 1) != 1:
                scale_dtype = "float32"
        if layout.group_size < min(_MIN_GROUP, num_inputs):
            code = "float32"
        if code == "float32":
            return WeightFormat(code)
        size = None if layout.group_size == num_inputs else layout.group_size
        return WeightFormat(code, size, scale_dtype, self._min_dtype, layout.order is not None)

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read rows in the matrix's `format`, see `StoredTensor.read_arrays`."""
        format, layout = self.format, self._layout
        if not format.is_quantised:
            return WeightArrays(self._dequantise(rows))
        scales, mins = self._finite_groups(rows)
        scales = scales[:, layout.groups]
        is_paired = format.is_packed and layout.order is None
        pairs = self._read_pairs(rows) if is_paired else None
        values = self._read_values(rows) if pairs is None else pack_pairs(pairs)
        if layout.order is not None:
            values = values[:, layout.order]
        if format.is_packed:
            values = pack(values) if pairs is None else values
        elif format.code != self._code:
            factor = _INTEGER_FACTORS[self._code]
            values = (CODES[self._code] * factor).astype(np.int8)[values]
            if factor != 1:
                scales = scales.astype(np.float32) / factor
        mins = None if mins is None else mins[:, layout.groups]
        return WeightArrays(values, scales, mins, layout.order)

    def _finite_groups(self, rows: slice) -> GroupScales:
        with np.errstate(over="ignore", invalid="ignore"):
            groups = self._read_groups(rows)
        for array in groups:
            if array is not None and not is_finite(array):
                raise WeightsError(f"load_weights: the scales of {self.name} must be finite.")
        return groups

    def _dequantise(self, rows: slice) -> np.ndarray:
        values, groups = self._read_values(rows), self._finite_groups(rows)
        if self._code in CODES and self._code not in ("int4", "uint4"):
            numbers = look_up(CODES[self._code], values)
        else:
            numbers = values.astype(np.float32)
            numbers -= 8 if self._code == "int4" else 0
        return self._layout.multiply(numbers, groups)

    def _check_part(self, end: str, dtypes: Iterable[str], *shapes: tuple[Any, ...]) -> None:
        """Check that the tensor with the name ending `end` has an allowed dtype and shape."""
        part, dtypes = self.parts[end], (*dtypes,)
        if part.dtype not in dtypes or part.shape not in shapes:
            wanted = " or ".join(str([*shape]) for shape in dict.fromkeys(shapes))
            raise WeightsError(
                f"load_weights: {part.name} must be {' or '.join(dtypes)} {wanted}, got "
                f"{part.dtype} {[*part.shape]}."
            )

    def _check_groups(self) -> int:
        """Check that all groups have the same size, and return the number of groups."""
        num_inputs, size = self.shape[1], self._group_size
        if num_inputs % size:
            raise WeightsError(
                f"load_weights: the group size of {self.name} must divide its number of inputs, "
                f"{num_inputs}, got {size}."
            )
        return num_inputs // size


def scale_shapes(matrix: ModuleMatrix) -> list[tuple[int, ...]]:
    """Return the possible shapes of the scales of a matrix, given the blocks of its scheme."""
    (num_outputs, num_inputs), (rows, columns) = matrix.shape, matrix.scheme.block
    if rows is None:
        return [(), (1,), (1, 1)]
    return [(math.ceil(num_outputs / rows), math.ceil(num_inputs / (columns or num_inputs)))]


def check_zero_points(
    matrix: ModuleMatrix, dtypes: Iterable[str], *shapes: tuple[int, ...]
) -> None:
    """Check dtype and shape of the zero points of a matrix of compressed-tensors."""
    if ".weight_zero_point" in matrix.parts:
        matrix._check_part(".weight_zero_point", dtypes, *shapes)
    elif matrix.scheme.has_zero_points:
        raise WeightsError(
            f"load_weights: {matrix.name} must have a tensor weight_zero_point, because its "
            "quantisation is not symmetric."
        )


def float_dtype(tensor: StoredTensor) -> str:
    """Return the name of a stored tensor's floating-point dtype, such as ``"bfloat16"``."""
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[tensor.dtype]


def matrix_shape(tensor: StoredTensor) -> tuple[int, int]:
    """Return the shape of a tensor, after checking that it has two dimensions."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise WeightsError(
            f"load_weights: {tensor.name} must have two dimensions that are not 0, got shape "
            f"{[*tensor.shape]}."
        )
    return tensor.shape[0], tensor.shape[1]


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Convert E8M0 scales (8-bit exponents of powers of two) to bfloat16; 255 becomes NaN."""
    exponents = exponents.view(np.uint8)
    factors = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    factors[exponents == 255] = np.nan
    return factors.astype(jnp.bfloat16)


def look_up(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return ``table[values]``, computed in parts to save memory.

    NumPy converts the indices to int64, which would need 8 bytes per element of `values`.
    """
    out = np.empty(values.shape, table.dtype)
    flat, indices = out.reshape(-1), values.reshape(-1)
    for start in range(0, flat.size, _LOOKED_UP):
        part = slice(start, start + _LOOKED_UP)
        flat[part] = table[indices[part]]
    return out


def low_nibbles_first(packed: np.ndarray) -> np.ndarray:
    """Split bytes ``[..., n]`` into 4-bit values, low bits first: uint8 ``[..., 2 * n]``."""
    values = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=values[..., 0])
    np.right_shift(packed, 4, out=values[..., 1])
    return values.reshape(*packed.shape[:-1], -1)


def pack_pairs(pairs: np.ndarray) -> np.ndarray:
    """Repack bytes that each hold two neighbouring 4-bit values, to the order of `pack`.

    `weight_packing.pack` puts the values i and i + 16 into one byte.

    Example:
      >>> pack_pairs(np.array([0x10, *range(1, 16)], np.uint8))[:3].tolist()
      [128, 1, 145]
    """
    blocks = pairs.reshape(*pairs.shape[:-1], -1, 2, PACKED_BYTES // 2)
    first, second = blocks[..., 0, :], blocks[..., 1, :]
    packed = np.empty((*first.shape, 2), np.uint8)
    np.bitwise_or(first & 0x0F, second << 4, out=packed[..., 0])
    np.bitwise_or(first >> 4, second & 0xF0, out=packed[..., 1])
    return packed.reshape(pairs.shape)


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Split words ``[..., n]`` into values, lowest bits first: uint8 ``[..., n * 32 / bits]``.

    Example:
      >>> unpack_words(np.array([0x76543210], np.int32), 4).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    values = np.ascontiguousarray(words).view(np.uint8)
    return low_nibbles_first(values) if bits == 4 else values


def scales_of_rows(
    values: np.ndarray, num_outputs: int, block_rows: int | None, rows: slice
) -> np.ndarray:
    """Return the scales ``[rows, groups]`` of some rows.

    Args:
      values: scales of the matrix: a single scale, one scale per row, or ``[blocks, groups]``.
      num_outputs: number of rows of the matrix.
      block_rows: number of consecutive rows that share scales; None if there is a single scale or
        one scale per row.
      rows: slice of the rows.
    """
    index = np.arange(*rows.indices(num_outputs))
    if values.size == 1:
        return np.broadcast_to(values.reshape(1, 1), (len(index), 1))
    if values.ndim == 1:
        values = values[:, None]
    return values[index // (1 if block_rows is None else block_rows)]
