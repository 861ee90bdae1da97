"""Quantised matrices of a model that is loaded from files: choice of formats, and their arrays."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.models.loading.parameters import ModelSpec
from paged_jax.models.loading.stored_matrices import (
    Index,
    Stored,
    StoredMatrix,
    aligned_empty,
    find_format,
    fit_format,
    is_quantised,
)
from paged_jax.models.loading.tensor_boxes import TensorMapping
from paged_jax.models.matrices import SUFFIXES, matrix_name
from paged_jax.models.matrix_formats import (
    DTYPE_FORMATS,
    MatrixFormats,
    fits,
    is_matrix,
    name_of,
)
from paged_jax.models.tensor_parallel import divides_inputs

# The field of `WeightArrays` for each suffix of parameter names; no suffix for the values.
_FIELDS: dict[str, str] = dict(zip(("", *SUFFIXES), WeightArrays._fields, strict=True))


def choose_formats(
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: DTypeLike,
    stored: Stored,
    mappings: Mapping[str, list[TensorMapping]],
    *,
    dequantise: bool,
    num_devices: int | None = None,
) -> MatrixFormats:
    """Choose the formats of a model that is read from files.

    Quantised matrices keep the format of the files, if all tensors of a matrix have a common
    format, also in their parts on several devices. Otherwise they are expanded to floats, with a
    warning.

    Args:
      spec: the model with matrices of floats, and its placement.
      shapes: shape of each parameter of the model with separate layers.
      dtype: dtype that the user asked for. If it is in `DTYPE_FORMATS`, all matrices are quantised
        again.
      stored: tensors of the files by name.
      mappings: mappings of each of these parameters to its tensors.
      dequantise: whether to expand all matrices to floats.
      num_devices: number of devices that compute the model together; None for the devices of the
        placement of `spec`.
    """
    floats = WeightFormat(name_of(spec.dtype))
    config = dataclasses.replace(spec.config, dtype=floats.code)
    asked = MatrixFormats.of_dtype(dtype, config)
    is_kept = not dequantise and name_of(dtype) not in DTYPE_FORMATS
    formats: dict[str, WeightFormat] = {}
    expanded: dict[str, str] = {}
    for name, shape in shapes.items():
        if not is_matrix(name):
            continue
        format: WeightFormat | str = asked[name]
        if is_kept and any(is_quantised(stored[each.tensor]) for each in mappings[name]):
            format = find_format(stored, mappings[name], shape[-1])
        if isinstance(format, WeightFormat) and format.is_quantised:
            if num_devices is None:
                num_parts = _num_parts(spec, name, shape)
            else:
                num_parts = num_devices if divides_inputs(name) else 1
            if not is_kept and not fits(format, shape[-1] // num_parts):
                format = DTYPE_FORMATS["int8"]
            format = fit_format(format, shape[-1], num_parts)
        if isinstance(format, str):
            expanded[name] = format
            format = floats
        formats[name] = format
    if expanded:
        name, reason = next(iter(expanded.items()))
        others = " and others" if len(expanded) > 1 else ""
        warnings.warn(
            f"load_weights: {name}{others} will be {floats.code}, not quantised: {reason}.",
            stacklevel=3,
        )
    return MatrixFormats.create(formats)


def _num_parts(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> int:
    """Return the number of devices over which the inputs of a matrix are divided."""
    placement = spec.sharding_of(name, shape)
    return 1 if placement is None else shape[-1] // placement.shard_shape(shape)[-1]


class MatrixReader:
    """Arrays of the quantised matrices of a model, for each part of a parameter.

    The values and scales of a matrix are different parameters, but are read together. This object
    keeps the scales until `read` is called for them.

    Args:
      matrices: the matrices by their names in a model with separate layers.
    """

    def __init__(self, matrices: Mapping[str, StoredMatrix]):
        self._matrices = matrices
        self._name = ""
        self._pending: dict[Any, WeightArrays] = {}

    def has(self, name: str) -> bool:
        """Return whether a parameter is an array of a quantised matrix."""
        return self._first(matrix_name(name)) in self._matrices

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read a part of a parameter.

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
        """Return the name of a matrix; if the layers are stacked, its name in the first layer."""
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
        numbers = range(*layers.indices(len(names)))
        out = _empty(first, (len(numbers),), rows, columns)
        for place, layer in enumerate(numbers):
            part = WeightArrays(*(None if each is None else each[place] for each in out))
            self._matrices[f"layers.{layer}.{kind}"].read_into(part, rows, columns)
        return out


def _empty(
    matrix: StoredMatrix, layers: tuple[int, ...], rows: Index, columns: slice
) -> WeightArrays:
    """Return uninitialised arrays for some rows of a matrix, in some layers."""
    *outputs, num_inputs = matrix.shape
    sizes = (len(range(*each.indices(size))) for each, size in zip(rows, outputs, strict=True))
    shapes = matrix.format.shapes((*sizes, num_inputs))
    (*out, width), dtype = shapes["values"]
    shapes["values"] = (*out, len(range(*columns.indices(width)))), dtype
    arrays = {name: aligned_empty((*layers, *shape), t) for name, (shape, t) in shapes.items()}
    return WeightArrays(**arrays)


def _key(rows: list[slice]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((each.start, each.stop) for each in rows)
