"""Positions of the tensors of a checkpoint in the parameters of a model."""

import dataclasses
import math
from typing import TypeVar

import jax
import numpy as np

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
      row_order: permutation of n rows, applied to each n rows of the tensor: of them, row i of the
        box holds row ``row_order[i]``. None if the order is the same.
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
    """Apply a permutation of n rows to each n rows of a box."""
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
