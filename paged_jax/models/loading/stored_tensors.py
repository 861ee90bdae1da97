"""Tensors of weight files, read a part at a time, and their places in the parameters of a model.

`StoredTensor` reads a tensor of a safetensors file. `QuantisedTensor` is the base class of matrices
in a quantised format, which consist of several tensors, such as values and scales. `TensorMapping`
says which part of a parameter a tensor fills.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat, dequantise
from paged_jax.models.loading.parameters import WeightsError

# Dtype of the model for each dtype of a file. Models do not compute in float64.
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float32"}
# Dtype of each name in safetensors. Tensors of other dtypes cannot be read.
_NUMPY_DTYPES = {
    name: jnp.dtype(dtype)
    for name, dtype in {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    }.items()
}  # fmt: skip
_CHECKED = 1 << 16  # floats that `is_finite` checks at a time
_EXPONENT_BITS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
      path: the file.
      name: name of the tensor in the file.
      shape: shape of the tensor.
      dtype: dtype, by its name in safetensors, or the name of a quantised format.
      offset: position of the first byte in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = dataclasses.field(default=0, kw_only=True)

    @property
    def is_floating(self) -> bool:
        """Whether the tensor can be read as floating-point numbers."""
        return self.dtype in FLOAT_DTYPES

    @property
    def format(self) -> WeightFormat:
        """Format of the result of `read_arrays`."""
        return WeightFormat(FLOAT_DTYPES[self.dtype])

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read a part of the tensor in its `format`.

        Args:
          rows: slice of the first dimension.

        Raises:
          WeightsError: the file cannot be read, or a scale or number is not finite.
        """
        return WeightArrays(self.read((rows,), jnp.dtype(self.format.code)))

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Read a part of the tensor as finite floats.

        Args:
          index: slices of the first dimensions.
          dtype: floating-point dtype of the result.

        Raises:
          WeightsError: the file cannot be read, or a number is not finite in `dtype`.
        """
        with np.errstate(over="ignore"):  # infinity is reported below
            values = self._read(index).astype(dtype, copy=False)
        if not is_finite(values):
            raise WeightsError(f"load_weights: {self.name} is not finite as {dtype.name}.")
        return values

    def read_raw(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a part of the tensor in the dtype of the file.

        Args:
          index: slices of the first dimensions.

        Raises:
          WeightsError: the file cannot be read, or the dtype is unknown.
        """
        if (dtype := _NUMPY_DTYPES.get(self.dtype)) is None:
            raise WeightsError(f"load_weights: {self.name} must not be of dtype {self.dtype}.")
        rows, columns = index[:1], index[1:]
        full = self.shape[1 : len(index)]
        if all(
            part.indices(size) == (0, size, 1) for part, size in zip(columns, full, strict=True)
        ):
            return self._read_rows(rows[0] if rows else slice(None), dtype)
        try:
            # Map the file only during this call. Otherwise the mapped pages would count as memory
            # in use, and add up to a second copy of the weights.
            return np.array(np.memmap(self.path, dtype, "r", self.offset, self.shape)[index])
        except (OSError, ValueError) as error:
            raise WeightsError(f"load_weights: cannot read {self.name}: {error}.") from None

    def _read_rows(self, rows: slice, dtype: np.dtype) -> np.ndarray:
        start, stop, shape = 0, 1, self.shape
        if self.shape:
            start, stop, _ = rows.indices(self.shape[0])
            shape = max(stop - start, 0), *self.shape[1:]
        row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        return read_elements(self, start * row_bytes, dtype, math.prod(shape)).reshape(shape)

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.read_raw(index)


def read_elements(tensor: StoredTensor, place: int, dtype: np.dtype, count: int) -> np.ndarray:
    """Read elements of a tensor, from a place in bytes after its first byte.

    The file is read instead of mapped: pages of a mapping count as memory in use, and the process
    ends if a mapped file becomes shorter.

    Raises:
      WeightsError: the file cannot be read, or is too short.
    """
    try:
        values = np.fromfile(tensor.path, dtype, count, offset=tensor.offset + place)
    except OSError as error:
        raise WeightsError(f"load_weights: cannot read {tensor.name}: {error}.") from None
    if values.size != count:
        raise WeightsError(f"load_weights: cannot read {tensor.name}: the file has become shorter.")
    return values


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedTensor(StoredTensor):
    """Rows of several small tensors, concatenated to one tensor.

    Attributes:
      pieces: the tensors.
    """

    pieces: tuple[StoredTensor, ...] = ()

    @classmethod
    def of_pieces(cls, name: str, pieces: tuple[StoredTensor, ...]) -> "JoinedTensor":
        """Return the joined tensor of pieces with equal dtypes and equal shapes of a row."""
        first = pieces[0]
        shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:])
        return cls(first.path, name, shape, first.dtype, pieces)

    def read_raw(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read all pieces, and return a part of the joined tensor."""
        return np.concatenate([piece.read_raw() for piece in self.pieces])[index]


@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedTensor(StoredTensor):
    """A matrix ``[*out, in]`` in a quantised format.

    A subclass defines `format` and `read_arrays`. It also overrides `_dequantise` if the tool that
    defines the format rounds weights differently from `dequantise`.
    """

    @property
    def is_floating(self) -> bool:
        """Whether the tensor can be read as floating-point numbers: always."""
        return True

    @property
    def format(self) -> WeightFormat:
        """Format of the result of `read_arrays`, equal for all parts."""
        raise NotImplementedError

    def read_arrays(self, rows: slice) -> WeightArrays:
        """Read a part of the matrix in its `format`.

        Args:
          rows: slice of the first dimension.

        Raises:
          WeightsError: the file cannot be read, or a scale is not finite.
        """
        raise NotImplementedError

    def _read(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *others = index or (slice(None),)
        return self._dequantise(rows)[(slice(None), *others)]

    def _dequantise(self, rows: slice) -> np.ndarray:
        """Return rows in float32, rounded like the results of the tool that defines the format."""
        return dequantise(self.read_arrays(rows), self.format.code)


class CountedTensors(Mapping[str, StoredTensor]):
    """Tensors by name. The first look-up of each tensor reports its size in bytes.

    Args:
      tensors: the tensors.
      report: function that is called with the number of bytes of a tensor in its format.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], report: Callable[[int], None]):
        self._tensors = tensors
        self._report = report
        self._seen: set[str] = set()

    def __getitem__(self, name: str) -> StoredTensor:
        tensor = self._tensors[name]
        if name not in self._seen:
            self._seen.add(name)
            self._report(tensor.format.num_bytes(tensor.shape))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def find_dtype(tensors: Iterable[StoredTensor]) -> str | None:
    """Return the dtype of the first floating-point tensor, as transformers does, or None."""
    return next((FLOAT_DTYPES[x.dtype] for x in tensors if x.dtype in FLOAT_DTYPES), None)


def is_finite(values: np.ndarray) -> bool:
    """Return whether all floats of an array are finite. They are checked a part at a time."""
    # Compare bits, because NumPy has no fast isfinite for bfloat16.
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.itemsize}")
    mask = bits.dtype.type(_EXPONENT_BITS[values.dtype.name])
    parts = (bits[start : start + _CHECKED] for start in range(0, bits.size, _CHECKED))
    return not any(((part & mask) == mask).any() for part in parts)


Shape = tuple[int, ...]
Array = TypeVar("Array", np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """A Hugging Face tensor, or some of its rows, and the box of a parameter that it fills.

    ``parameter[mapping.box]`` equals ``mapping.to_box(tensor)``. Usually this is only a reshape:
    several dimensions of the box may count the rows (first dimension) of the tensor.

    Attributes:
      tensor: name of the tensor.
      shape: shape of the tensor.
      box_shape: shape of the box. It has the rank of the parameter.
      box_start: index of the first element of the box in the parameter.
      first_row: first row of the tensor in this box. Other boxes may hold the other rows.
      row_order: permutation of n rows, applied to each group of n rows of the tensor: row i of a
        group in the box is row ``row_order[i]`` of the group in the tensor. None if the order is
        the same.
      axes: permutation of the tensor's axes, if the checkpoint stores it transposed; None
        otherwise. The first axis stays first.
      split_shape: with `axes`, shape of the tensor before the permutation, with some dimensions
        split in two; None for `shape`.
    """

    tensor: str
    shape: Shape
    box_shape: Shape
    box_start: Shape
    first_row: int = 0
    row_order: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    split_shape: Shape | None = None

    @property
    def box_end(self) -> Shape:
        """Index after the last element of the box in each dimension."""
        return tuple(map(sum, zip(self.box_start, self.box_shape, strict=True)))

    @property
    def box(self) -> tuple[slice, ...]:
        """Index of the box in the parameter."""
        return tuple(map(slice, self.box_start, self.box_end))

    @property
    def num_row_axes(self) -> int:
        """Number of dimensions of the box that count rows of the tensor."""
        return len(self.box_shape) - len(self.shape) + 1

    @property
    def rows(self) -> np.ndarray:
        """Row of the tensor at each index of the first `num_row_axes` dimensions of the box."""
        shape = self.box_shape[: self.num_row_axes]
        rows = self.first_row + np.arange(math.prod(shape)).reshape(shape)
        return _reorder(rows, self.row_order, self.num_row_axes)

    def to_box(self, tensor: Array) -> Array:
        """Return the content of the box ``[*box_shape]`` from the tensor ``[*shape]``."""
        if self.axes is not None:
            split = tensor.reshape(self.split_shape or self.shape)
            return split.transpose(self.axes).reshape(self.box_shape)
        num_rows = math.prod(self.box_shape[: self.num_row_axes])
        box = tensor[self.first_row : self.first_row + num_rows].reshape(self.box_shape)
        return _reorder(box, self.row_order, self.num_row_axes)

    def to_rows(self, box: Array) -> Array:
        """Return the tensor rows in a box ``[*box_shape]``, the inverse of `to_box`."""
        if self.axes is not None:
            split = self.split_shape or self.shape
            box = box.reshape(tuple(split[axis] for axis in self.axes))
            return box.transpose(tuple(np.argsort(self.axes).tolist())).reshape(self.shape)
        if self.row_order is not None:
            inverse = tuple(np.argsort(self.row_order).tolist())
            box = _reorder(box, inverse, self.num_row_axes)
        return box.reshape(-1, *self.shape[1:])


Mappings = tuple[TensorMapping, ...]


def _reorder(box: Array, order: tuple[int, ...] | None, num_row_axes: int) -> Array:
    """Apply a permutation of n rows to each group of n rows of a box."""
    if order is None:
        return box
    groups = box.reshape(-1, len(order), *box.shape[num_row_axes:])
    return groups[:, np.array(order)].reshape(box.shape)


def map_tensor(
    tensor: str,
    shape: Shape,
    box_shape: Shape | None = None,
    box_start: Shape | None = None,
    *,
    first_row: int = 0,
    row_order: tuple[int, ...] | None = None,
) -> TensorMapping:
    """Return a mapping without transposition. By default the tensor is the whole parameter."""
    box_shape = box_shape or shape
    start = box_start or (0,) * len(box_shape)
    return TensorMapping(tensor, shape, box_shape, start, first_row=first_row, row_order=row_order)
