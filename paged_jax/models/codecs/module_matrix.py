"""Matrices that a file stores as several tensors of a module, such as values and scales.

`ModuleFormat` describes the tensors and settings of a format, and opens matrices. A subclass of
`ModuleMatrix` decodes rows: it returns the values as the file stores them, and the scales, minima
and zero points for groups of their inputs. A weight is::

    (number of the value - zero point of the group) * scale of the group + minimum of the group

The base class converts the rows to `WeightArrays`::

    in the file                           in `WeightArrays`
    values of columns, in any order       columns sorted by group, 4-bit values packed again
    scales of groups of any size          scales of groups that divide the inputs evenly
    zero points                           minima, ``-zero point * scale``
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from paged_jax.kernels.weight_formats import CODES, WeightArrays, WeightFormat
from paged_jax.kernels.weight_packing import PACKED_INPUTS, pack
from paged_jax.models.codecs.bit_fields import look_up, low_nibbles_first, pack_pairs
from paged_jax.models.errors import WeightsError
from paged_jax.models.loading.stored_tensors import QuantisedTensor, StoredTensor, is_finite

FLOATS = ("F32", "BF16", "F16")
# Smallest group size that the kernels support. Matrices with smaller groups are converted to
# floats.
_MIN_GROUP = 16
# For each code, the factor that turns its numbers into integers. If a matrix cannot be packed,
# these integers are stored as int8.
_INTEGER_FACTORS = {"int4": 1, "uint4": 1, "e2m1": 2}
SAVE_ADVICE = (
    "Use save_checkpoint, or load the model with dtype='int8', 'fp8' or 'int4-symmetric' and save "
    "that, or with dequantise=True."
)
_ROUTERS = (".gate", ".router", ".shared_expert_gate")


@dataclasses.dataclass(frozen=True)
class ModuleFormat:
    """Format of the tensors of a quantised module.

    The fields of a subclass are the settings from the quantisation config.

    Attributes:
      name: name for error messages.
      required: ends of the names of the tensors that a module must have, the values first.
      optional: ends of the names of tensors that it may have.
      unused: ends of the names of tensors that are ignored: scales of activations, because
        activations are not quantised.
      result: the name of the matrix is the name of the module followed by this string.
      has_embeddings: whether tools also quantise the embeddings and the output head.
    """

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = ()
    result: ClassVar[str] = ".weight"
    has_embeddings: ClassVar[bool] = False

    @property
    def matrix(self) -> "type[CombinedMatrix]":
        """Class of the matrices."""
        raise NotImplementedError

    @property
    def planned(self) -> WeightFormat:
        """Format that matrices usually have, to plan memory before the files are there.

        Configs do not contain the dtype of scales, so it is the one that the tools write.
        """
        raise NotImplementedError

    def selects(self, module: str) -> bool:
        """Return whether tools quantise a module of this name, unless the config excludes it."""
        if module.endswith((".embed_tokens", "lm_head")) and not self.has_embeddings:
            return False
        return not module.endswith(_ROUTERS)

    def open(self, module: str, parts: Mapping[str, StoredTensor]) -> "CombinedMatrix":
        """Return the matrix of a module.

        Args:
          module: name of the module.
          parts: tensors of the module, by the ends of their names, without those in `unused`.

        Raises:
          WeightsError: a tensor is missing, not part of this format, or does not fit the others.
        """
        for end in self.required:
            if end not in parts:
                raise WeightsError(
                    f"load_weights: {module + end} is missing, but {self.name} requires it."
                )
        for end in parts:
            if end not in self.required + self.optional:
                raise WeightsError(
                    f"load_weights: {parts[end].name} must not exist, because the quantisation "
                    f"config states that {module} has the format {self.name}."
                )
        path = parts[self.required[0]].path
        matrix = self.matrix(path, module + self.result, (), self.name, parts, self)
        matrix = dataclasses.replace(matrix, shape=matrix.find_shape())
        matrix.check()
        return matrix

    @classmethod
    def encode(
        cls, name: str, arrays: WeightArrays, format: WeightFormat
    ) -> "EncodedModule | None":
        """Convert a matrix ``[out, in]`` to the tensors of a module. By default, return None.

        Args:
          name: name of the module.
          arrays: arrays of the matrix.
          format: format of the matrix. It is not compact.

        Returns:
          The tensors; None if this format cannot represent matrices in `format`.

        Raises:
          SaveError: this format represents `format`, but not the minima of this matrix.
        """
        return None


class EncodedModule(NamedTuple):
    """Tensors of a quantised module that is written to a file.

    Attributes:
      format: settings of the module.
      tensors: tensors of the module, by the ends of their names.
    """

    format: ModuleFormat
    tensors: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class CombinedMatrix(QuantisedTensor):
    """Quantised matrix, or matrices of experts, stored as several tensors.

    Attributes:
      parts: the tensors, by the ends of their names, such as ``".weight_scale"``.
      settings: format of the tensors.
    """

    parts: Mapping[str, StoredTensor]
    settings: Any

    def find_shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix; by default it is the shape of the stored values."""
        return matrix_shape(self.parts[self.settings.required[0]])

    def check(self) -> None:
        """Check the dtypes and shapes of the tensors.

        Raises:
          WeightsError: a dtype or shape is wrong.
        """
        raise NotImplementedError

    def check_part(self, end: str, dtypes: Iterable[str], *shapes: tuple[Any, ...]) -> None:
        """Check that the tensor with the name ending `end` has an allowed dtype and shape."""
        part, dtypes = self.parts[end], (*dtypes,)
        if part.dtype not in dtypes or part.shape not in shapes:
            expected = " or ".join(str([*shape]) for shape in dict.fromkeys(shapes))
            raise WeightsError(
                f"load_weights: {part.name} must be {' or '.join(dtypes)} {expected}, got "
                f"{part.dtype} {[*part.shape]}."
            )


class StoredRows(NamedTuple):
    """Decoded rows of a matrix, in the groups of the file.

    Attributes:
      values: values ``[rows, in]`` of the code, 4-bit values one to a byte; if `is_paired`, 4-bit
        values uint8 ``[rows, in / 2]`` or more columns, two neighbouring inputs to a byte, the
        first in the low bits.
      scales: floats ``[rows, groups]``.
      mins: floats ``[rows, groups]``, or None.
      zeros: zero points, integers or floats ``[rows, groups]``, or None.
      is_paired: whether a byte holds two values.
    """

    values: np.ndarray
    scales: np.ndarray
    mins: np.ndarray | None = None
    zeros: np.ndarray | None = None
    is_paired: bool = False


class ModuleMatrix(CombinedMatrix):
    """Quantised matrix ``[out, in]`` of a module."""

    @property
    def stored(self) -> WeightFormat:
        """Format of the decoded rows. Zero points count as float32 minima.

        The last group of the file may have fewer inputs than `group_size`.
        """
        raise NotImplementedError

    def decode(self, rows: slice) -> StoredRows:
        """Read rows as the file stores them. Scales may be infinite or NaN.

        Raises:
          WeightsError: the file cannot be read, or a value is not finite.
        """
        raise NotImplementedError

    def group_of_input(self) -> np.ndarray:
        """Return each input's group in the file; by default, groups are consecutive inputs."""
        return np.arange(self.shape[1]) // (self.stored.group_size or self.shape[1])

    @functools.cached_property
    def _layout(self) -> "_GroupLayout":
        return _GroupLayout.of(self.group_of_input())

    @functools.cached_property
    def format(self) -> WeightFormat:
        """Format of the arrays that `read_arrays` returns; float32 if no quantised format fits."""
        layout, num_inputs, stored = self._layout, self.shape[1], self.stored
        code, scale_dtype = stored.code, stored.scale_dtype
        if code in CODES and num_inputs % PACKED_INPUTS:
            # Store values that cannot be packed as integers of 8 bits.
            code = "int8" if code in _INTEGER_FACTORS else "float32"
            if _INTEGER_FACTORS.get(stored.code, 1) != 1:
                scale_dtype = "float32"
        if layout.group_size < min(_MIN_GROUP, num_inputs):
            code = "float32"
        if code == "float32":
            return WeightFormat(code)
        size = None if layout.group_size == num_inputs else layout.group_size
        return WeightFormat(code, size, scale_dtype, stored.min_dtype, layout.order is not None)

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read rows in the matrix's `format`, see `StoredTensor.read_arrays`."""
        format, layout, code = self.format, self._layout, self.stored.code
        if not format.is_quantised:
            return WeightArrays(self._dequantise(rows))
        values, scales, mins, zeros, is_paired = self._decode_finite(rows)
        if zeros is not None:
            shift = -zeros.astype(np.float32) * scales.astype(np.float32)
            mins = shift if mins is None else mins.astype(np.float32) + shift
            self._check_finite(mins)
        scales = scales[:, layout.groups]
        if is_paired and format.is_packed and layout.order is None:
            values = pack_pairs(values)
        else:
            values = self._unpaired(values) if is_paired else values
            if layout.order is not None:
                values = values[:, layout.order]
            if format.is_packed:
                values = pack(values)
            elif format.code != code:
                factor = _INTEGER_FACTORS[code]
                values = (CODES[code] * factor).astype(np.int8)[values]
                if factor != 1:
                    scales = scales.astype(np.float32) / factor
        mins = None if mins is None else mins[:, layout.groups]
        return WeightArrays(values, scales, mins, layout.order)

    def _decode_finite(self, rows: slice) -> StoredRows:
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = self.decode(rows)
        self._check_finite(decoded.scales, decoded.mins)
        return decoded

    def _check_finite(self, *arrays: np.ndarray | None) -> None:
        for array in arrays:
            if array is not None and not is_finite(array):
                raise WeightsError(f"load_weights: the scales of {self.name} must be finite.")

    def _unpaired(self, pairs: np.ndarray) -> np.ndarray:
        return low_nibbles_first(pairs)[:, : self.shape[1]]

    def _dequantise(self, rows: slice) -> np.ndarray:
        """Return rows in float32. Subtract zero points first: the order changes the rounding."""
        code, layout = self.stored.code, self._layout
        values, scales, mins, zeros, is_paired = self._decode_finite(rows)
        values = self._unpaired(values) if is_paired else values
        if code in CODES and code not in ("int4", "uint4"):
            weights = look_up(CODES[code], values)
        else:
            weights = values.astype(np.float32)
            weights -= 8 if code == "int4" else 0
        grouped = layout.by_group(weights)
        if zeros is not None:
            grouped -= layout.spread(zeros)
        grouped *= layout.spread(scales)
        if mins is not None:
            grouped += layout.spread(mins)
        return weights

    def check_groups(self, group_size: int | None) -> int:
        """Check that all groups have the same size, and return the number of groups.

        Args:
          group_size: number of inputs in a group; None for one group.
        """
        num_inputs = self.shape[1]
        if num_inputs % (group_size or num_inputs):
            raise WeightsError(
                f"load_weights: the group size of {self.name} must divide its number of inputs, "
                f"{num_inputs}, got {group_size}."
            )
        return num_inputs // (group_size or num_inputs)


class _GroupLayout(NamedTuple):
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
    def of(cls, stored: np.ndarray) -> "_GroupLayout":
        """Return the layout with the largest possible groups in `WeightArrays`.

        These groups all have the same size, and each consists of inputs from only one group of
        the file. For each input, `stored` contains the index of its group in the file.
        """
        is_sorted = bool((np.diff(stored) >= 0).all())
        order = None if is_sorted else np.argsort(stored, kind="stable").astype(np.int32)
        groups = stored if order is None else stored[order]
        starts = np.flatnonzero(np.diff(groups)) + 1
        size = math.gcd(len(stored), *starts.tolist())
        return cls(stored, order, size, groups[::size])

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


def scale_shapes(
    shape: tuple[int, ...], block: tuple[int | None, int | None]
) -> list[tuple[int, ...]]:
    """Return the possible shapes of the scales of a matrix with scales for blocks.

    Args:
      shape: shape of the matrix.
      block: number of outputs and of inputs that share a scale; None for all.
    """
    (num_outputs, num_inputs), (rows, columns) = shape, block
    if rows is None:
        return [(), (1,), (1, 1)]
    return [(math.ceil(num_outputs / rows), math.ceil(num_inputs / (columns or num_inputs)))]


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
