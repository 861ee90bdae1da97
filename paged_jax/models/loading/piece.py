"""A tensor of Hugging Face, or some of its rows, and where in a parameter they lie."""

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of Hugging Face, or rows of it, and the box of a parameter that they are.

    ``parameter[piece.box]`` is ``piece.to_parameter(tensor)``: as a rule the tensor's numbers in
    the same order, reshaped to `extent`, as rows may be counted by several indices.

    Attributes:
      tensor: the tensor's name.
      shape: its shape.
      extent: the shape of the box. There may be dimensions of one.
      offset: index of its first number in the parameter.
      first_row: the first row of the tensor that is in the box, where others are elsewhere.
      order: which row each row of a head (or whatever the last axis that counts rows counts) is in
        the tensor; None if they lie in the same order.
      axes: where the tensor lies transposed, the order of its axes, the first of them staying.
      split: with `axes`, its shape with some axes counted by two indices; by default `shape`.
    """

    tensor: str
    shape: tuple[int, ...]
    extent: tuple[int, ...]
    offset: tuple[int, ...]
    first_row: int = 0
    order: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    split: tuple[int, ...] | None = None

    @property
    def end(self) -> tuple[int, ...]:
        """The first index past the box."""
        return tuple(map(sum, zip(self.offset, self.extent, strict=True)))

    @property
    def box(self) -> tuple[slice, ...]:
        """The part of the parameter that is the tensor."""
        return tuple(map(slice, self.offset, self.end))

    @property
    def num_row_axes(self) -> int:
        """Axes of the box that count rows of the tensor."""
        return len(self.extent) - len(self.shape) + 1

    @property
    def rows(self) -> np.ndarray:
        """The row of the tensor at each index of the first `num_row_axes` axes of the box."""
        shape = self.extent[: self.num_row_axes]
        rows = self.first_row + np.arange(math.prod(shape)).reshape(shape)
        return rows if self.order is None else rows[..., self.order]

    def to_parameter(self, tensor: Any) -> Any:
        """The box that a tensor ``[*shape]`` is, ``[*extent]``; of NumPy or JAX."""
        if self.axes is not None:
            return (
                tensor.reshape(self.split or self.shape).transpose(self.axes).reshape(self.extent)
            )
        num_rows = math.prod(self.extent[: self.num_row_axes])
        box = tensor[self.first_row : self.first_row + num_rows].reshape(self.extent)
        if self.order is None:
            return box
        return box[(slice(None),) * (self.num_row_axes - 1) + (np.array(self.order),)]

    def to_rows(self, box: Any) -> Any:
        """The tensor's rows that a box ``[*extent]`` is, the inverse of `to_parameter`."""
        if self.axes is not None:
            split = self.split or self.shape
            box = box.reshape(tuple(split[axis] for axis in self.axes))
            return box.transpose(tuple(np.argsort(self.axes).tolist())).reshape(self.shape)
        if self.order is not None:
            inverse = np.argsort(self.order)
            box = box[(slice(None),) * (self.num_row_axes - 1) + (inverse,)]
        return box.reshape(-1, *self.shape[1:])


def make_piece(
    tensor: str,
    shape: tuple[int, ...],
    extent: tuple[int, ...] | None = None,
    offset: tuple[int, ...] | None = None,
    *,
    first_row: int = 0,
    order: tuple[int, ...] | None = None,
) -> Piece:
    """A piece that lies as the tensor does, at `offset`, by default the whole of a parameter."""
    extent = extent or shape
    return Piece(
        tensor, shape, extent, offset or (0,) * len(extent), first_row=first_row, order=order
    )
