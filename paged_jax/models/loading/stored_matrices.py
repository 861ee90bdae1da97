"""Reading of a model's matrices from files, with conversion to their formats.

A matrix keeps the format of its tensors in the files, or is converted while it is read::

    tensor of the file         parameter         how
    floats                     floats            `read_box`
    quantised                  floats            `read_box`, which dequantises
    quantised                  same or wider     `StoredMatrix`: the arrays of the file, converted
    floats or quantised        quantised         `StoredMatrix`: dequantised, then quantised

All functions read only some rows at a time, so they need little memory in addition to the result.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paged_jax.kernels.weight_formats import (
    WeightArrays,
    WeightFormat,
    common_format,
    convert,
)
from paged_jax.models.codecs.dtype_formats import quantise_on_host
from paged_jax.models.loading.formats import Stored, have_same_order, is_quantised
from paged_jax.models.loading.stored_tensors import StoredTensor
from paged_jax.models.matrix_formats import SUFFIXES, matrix_name
from paged_jax.models.tensor_mapping import TensorMapping

# Number of elements per read, which is 8 or 16 MB. This is little memory compared with a model. It
# is large enough to make the cost of opening the file for each read negligible.
READ_ELEMENTS = 1 << 22
# Maximum number of layers to read at the same time, each in parts of `READ_ELEMENTS` elements.
_MAX_THREADS = 4

Index = tuple[slice, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """Quantised matrix of a model, together with the tensors from which it is read.

    Attributes:
      shape: shape ``[*out, in]`` of the matrix.
      format: storage format of the matrix in the model.
      mappings: mappings of the matrix to its tensors.
      stored: tensors of the files by name.
    """

    shape: tuple[int, ...]
    format: WeightFormat
    mappings: list[TensorMapping]
    stored: Stored

    def read_into(self, out: WeightArrays, rows: Index, columns: slice) -> None:
        """Read some rows of the matrix into arrays.

        Args:
          out: arrays to fill.
          rows: slices of all dimensions except the last.
          columns: slice of the last dimension of the values. Scales, minima and order are read in
            all columns.

        Raises:
          WeightsError: a file cannot be read, or a number is not finite.
        """
        starts, stops = _bounds(rows, self.shape[:-1])
        read = self._keep if self.is_kept else self._quantise
        for out_index, index, arrays in read(starts, stops):
            out.values[out_index][index] = arrays.values[..., columns]
            for output, piece in ((out.scales, arrays.scales), (out.mins, arrays.mins)):
                if output is not None:
                    output[out_index][index] = piece
            if out.order is not None:
                out.order[...] = arrays.order
        layout = self.format.layout
        has_all_rows = not any(starts) and stops == self.shape[:-1]
        if layout is not None and has_all_rows:  # otherwise, only the order is read
            for array in (out.values, out.scales, out.mins):
                if array is not None and array.size:
                    array[...] = layout.prepare(array)

    @functools.cached_property
    def is_kept(self) -> bool:
        """Whether the matrix keeps the files' quantised values, without rounding them again."""
        tensors = [self.stored[mapping.tensor] for mapping in self.mappings]
        if not all(map(is_quantised, tensors)):
            return False
        if self.format.has_order and not have_same_order(tensors):
            return False
        formats = [*(tensor.format for tensor in tensors), self.format.plain]
        return common_format(formats, self.shape[-1]) == self.format.plain

    def _keep(self, starts: Shape, stops: Shape) -> Iterator[tuple[Index, Any, WeightArrays]]:
        """Yield quantised arrays of the files, converted to the matrix's format without rounding.

        Yields:
          Triples ``(out_index, index, arrays)``, to be written as
          ``out[out_index][index] = arrays``. The first element of `out` is the element of the
          matrix at `starts`.
        """
        for mapping, part, out_index in _overlaps(self.mappings, starts, stops):
            tensor = self.stored[mapping.tensor]
            read = _read_rows if mapping.axes is None else _read_transposed_rows
            for index, arrays in read(tensor, mapping, part):
                yield out_index, index, convert(arrays, tensor.format, self.format.plain)

    def _quantise(self, starts: Shape, stops: Shape) -> Iterator[tuple[Index, Any, WeightArrays]]:
        """Quantise floats of the files, from `starts` to `stops` in all dimensions but the last.

        Yields:
          Triples ``(out_index, index, arrays)`` as in `_keep`.
        """
        step = max(1, READ_ELEMENTS // math.prod(self.shape[1:]))
        for first in range(starts[0], stops[0], step):
            last = min(first + step, stops[0])
            rows = (slice(first, last), *map(slice, starts[1:], stops[1:]), slice(None))
            floats = read_box(self.stored, self.mappings, self.shape, rows, np.dtype(np.float32))
            out_index = (slice(first - starts[0], last - starts[0]),)
            yield out_index, (), quantise_on_host(floats, self.format)


def _read_rows(
    tensor: StoredTensor, mapping: TensorMapping, part: Index
) -> Iterator[tuple[Any, WeightArrays]]:
    """Read a part of a mapping's box, some rows at a time.

    Yields:
      Pairs ``(index, arrays)``: the index of the rows in the part, and their arrays.
    """
    for rows, index in _runs_of_rows(mapping, part, tensor.shape[-1]):
        yield index, tensor.read_arrays(rows)


def _read_transposed_rows(
    tensor: StoredTensor, mapping: TensorMapping, part: Index
) -> Iterator[tuple[Any, WeightArrays]]:
    """Do the same as `_read_rows` for a mapping with `axes`, one expert at a time.

    The arrays of the tensor are ``[X, out, ...]``, even if its shape is ``[X, in, out]``.
    """
    assert mapping.axes is not None and mapping.axes[0] == 0
    split, (*row_axes, in_axis) = mapping.split_shape or mapping.shape, mapping.axes
    out_axes = [axis for axis in range(len(split)) if axis != in_axis]
    axes = [out_axes.index(axis) for axis in row_axes]
    lead = len(mapping.box_shape) - len(mapping.axes)

    def to_rows(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        array = array.reshape(1, *(split[axis] for axis in out_axes[1:]), array.shape[-1])
        return array.transpose(*axes, len(axes))[0][part[lead + 1 :]]

    for position, expert in enumerate(range(part[lead].start, part[lead].stop)):
        arrays = tensor.read_arrays(slice(expert, expert + 1))
        in_rows = WeightArrays(
            to_rows(arrays.values), to_rows(arrays.scales), to_rows(arrays.mins), arrays.order
        )
        yield (0,) * lead + (position,), in_rows


def read_box(
    stored: Stored,
    mappings: list[TensorMapping],
    shape: Shape,
    index: Index,
    dtype: np.dtype,
) -> np.ndarray:
    """Read a part of a parameter as floats. `index` selects the part.

    `shape` is the shape of the whole parameter, and `dtype` is the dtype of the result.
    """
    starts, stops = _bounds(index, shape)
    out = aligned_empty(tuple(np.subtract(stops, starts).tolist()), dtype)
    for mapping, part, out_index in _overlaps(mappings, starts, stops):
        _read_tensor(stored[mapping.tensor], mapping, part, out[out_index])
    return out


def _read_tensor(
    tensor: StoredTensor, mapping: TensorMapping, part: Index, out: np.ndarray
) -> None:
    """Read the slices `part` of a mapping's box, and write them to `out` as floats."""
    if mapping.axes is not None:
        _read_transposed(tensor, mapping, part, out)
        return
    if not mapping.shape:  # a scalar
        out[...] = tensor.read((), out.dtype)
        return
    columns = part[mapping.num_row_axes :]
    row_elements = math.prod(out.shape[mapping.num_row_axes :])
    for rows, index in _runs_of_rows(mapping, part[: mapping.num_row_axes], row_elements):
        out[index] = tensor.read((rows, *columns), out.dtype)


def _read_transposed(
    tensor: StoredTensor, mapping: TensorMapping, part: Index, out: np.ndarray
) -> None:
    """Do the same as `_read_tensor` for a mapping with `axes`, one expert at a time."""
    assert mapping.axes is not None and mapping.axes[0] == 0
    lead = len(mapping.box_shape) - len(mapping.axes)
    num_experts, *expert_shape = mapping.split_shape or mapping.shape
    # 1, unless the rows of all experts are one dimension of the tensor.
    rows = mapping.shape[0] // num_experts
    expert_mapping = dataclasses.replace(
        mapping,
        shape=(rows, *mapping.shape[1:]),
        split_shape=(1, *expert_shape),
        box_shape=(1, *mapping.box_shape[lead + 1 :]),
    )
    for position, index in enumerate(range(part[lead].start, part[lead].stop)):
        values = tensor.read((slice(index * rows, (index + 1) * rows),), out.dtype)
        out[(0,) * lead + (position,)] = expert_mapping.to_box(values)[0][part[lead + 1 :]]


def _runs_of_rows(
    mapping: TensorMapping, part: Index, row_elements: int
) -> Iterator[tuple[slice, Any]]:
    """Divide a part of a mapping's box into runs of rows that are consecutive in the file.

    Args:
      mapping: a mapping without `axes`.
      part: slices of the first `num_row_axes` dimensions of the box, which count rows.
      row_elements: number of elements to read per row. A run has at most `READ_ELEMENTS` elements.

    Yields:
      The rows of the tensor that form a run, and their index in the part.
    """
    rows = mapping.rows[part]
    # Sort by the row in the file. Otherwise, rows permuted by `row_order` would not form runs.
    order = np.argsort(rows, axis=None)
    rows_in_file = rows.ravel()[order]
    max_rows = max(1, READ_ELEMENTS // row_elements)
    gaps = (np.flatnonzero(np.diff(rows_in_file) != 1) + 1).tolist()
    for begin, end in itertools.pairwise([0, *gaps, len(rows_in_file)]):
        for start in range(begin, end, max_rows):
            stop = min(start + max_rows, end)
            first, last = rows_in_file[[start, stop - 1]].tolist()
            yield slice(first, last + 1), np.unravel_index(order[start:stop], rows.shape)


def _overlaps(
    mappings: list[TensorMapping], starts: Shape, stops: Shape
) -> Iterator[tuple[TensorMapping, Index, Index]]:
    """Find the mappings of a parameter with boxes that overlap a part of the parameter.

    Args:
      mappings: mappings of the parameter.
      starts: first index of the part in each dimension; the last dimension may be omitted.
      stops: index after the end of the part in the same dimensions.

    Yields:
      A mapping, the index of the overlap in its box, and the index of the overlap in the part.
    """
    for mapping in mappings:
        low = tuple(map(max, starts, mapping.box_start))
        high = tuple(map(min, stops, mapping.box_end))
        if all(a < b for a, b in zip(low, high, strict=True)):
            yield mapping, _slices(low, high, mapping.box_start), _slices(low, high, starts)


def _bounds(index: Index, shape: Shape) -> tuple[Shape, Shape]:
    starts, stops, _ = zip(*(s.indices(n) for s, n in zip(index, shape, strict=True)), strict=True)
    return starts, stops


def _slices(low: Shape, high: Shape, origin: Shape) -> Index:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=False))


def aligned_empty(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array that XLA's CPU backend can use without copying it."""
    # XLA's CPU backend copies arrays if their memory is not aligned to 64 bytes.
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


# Field of `WeightArrays` for each suffix of parameter names. The suffix of the values is empty.
_FIELDS: dict[str, str] = dict(zip(("", *SUFFIXES), WeightArrays._fields, strict=True))


class MatrixReader:
    """Reader of the parameters of a model's quantised matrices, or of parts of them.

    The values and scales of a matrix are different parameters, but they are read from the files
    together. This object keeps the scales until `read` is called for them.

    Args:
      matrices: the quantised matrices, by their names in the model with separate layers.
    """

    def __init__(self, matrices: Mapping[str, StoredMatrix]):
        self._matrices = matrices
        self._name = ""
        self._pending: dict[Any, WeightArrays] = {}

    def has(self, name: str) -> bool:
        """Return whether a parameter belongs to a quantised matrix."""
        return self._first(matrix_name(name)) in self._matrices

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read a part of a parameter that belongs to a quantised matrix.

        Args:
          name: name of the parameter, such as ``"layers.0.o_proj_scale"``, or
            ``"layers.o_proj_scale"`` if the layers are stacked.
          index: slices of all dimensions of the parameter.
        """
        matrix = matrix_name(name)
        field = _FIELDS[name.removeprefix(matrix)]
        *rows, columns = index
        if field == "order":
            first = (slice(0, 1),) * (len(self._matrices[self._first(matrix)].shape) - 1)
            return self._read(matrix, (*rows, *first), slice(0, 0)).order[..., columns]
        if field == "values":
            arrays = self._read(matrix, tuple(rows), columns)
            if matrix != self._name:
                self._name, self._pending = matrix, {}
            self._pending[_key(rows)] = arrays._replace(values=None)
            return arrays.values
        arrays = self._pending.get(_key(rows)) if matrix == self._name else None
        arrays = arrays or self._read(matrix, tuple(rows), slice(0, 0))
        return getattr(arrays, field)[..., columns]

    def _first(self, matrix: str) -> str:
        """Return the name of a matrix; for stacked layers, its name in the first layer."""
        scope, _, kind = matrix.rpartition(".")
        return f"layers.0.{kind}" if scope == "layers" else matrix

    def _read(self, matrix: str, rows: Index, columns: slice) -> WeightArrays:
        first = self._matrices[self._first(matrix)]
        if len(rows) < len(first.shape):
            out = _empty(first, (), rows, columns)
            self._matrices[matrix].read_into(out, rows, columns)
            return out
        layers, rows = rows[0], rows[1:]
        kind = matrix.removeprefix("layers.")
        names = [name for name in self._matrices if name.endswith(f".{kind}")]
        layer_indices = range(*layers.indices(len(names)))
        out = _empty(first, (len(layer_indices),), rows, columns)

        def read_layer(position: int) -> None:
            layer_out = WeightArrays(*(None if array is None else array[position] for array in out))
            self._matrices[f"layers.{layer_indices[position]}.{kind}"].read_into(
                layer_out, rows, columns
            )

        if not first.is_kept:  # quantisation uses all cores by itself
            for position in range(len(layer_indices)):
                read_layer(position)
            return out
        # NumPy releases the GIL while it reads and copies.
        num_threads = min(os.cpu_count() or 1, _MAX_THREADS)
        with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(read_layer, range(len(layer_indices))))
        return out


def _empty(
    matrix: StoredMatrix, layers: tuple[int, ...], rows: Index, columns: slice
) -> WeightArrays:
    """Return uninitialised arrays for some rows and columns of a matrix.

    `layers` is empty, or contains the number of stacked layers.
    """
    *outputs, num_inputs = matrix.shape
    sizes = (
        len(range(*row_slice.indices(size))) for row_slice, size in zip(rows, outputs, strict=True)
    )
    shapes = matrix.format.shapes((*sizes, num_inputs))
    (*out, width), dtype = shapes["values"]
    shapes["values"] = (*out, len(range(*columns.indices(width)))), dtype
    arrays = {name: aligned_empty((*layers, *shape), t) for name, (shape, t) in shapes.items()}
    return WeightArrays(**arrays)


def _key(rows: list[slice]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((row_slice.start, row_slice.stop) for row_slice in rows)
