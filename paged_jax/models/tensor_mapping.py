"""`TensorMapping`: the part of a parameter that a tensor of a checkpoint fills."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, TypeVar

import jax
import numpy as np

# Ways to store experts in files. "family": as in the published files of the family. "fused": one
# tensor for all experts, with the names in the models of transformers 5, see `Family.in_memory`.
# "transposed": as "fused", with the inputs before the outputs (Qwen3-VL). "separate": each expert
# has separate tensors for gate, up and down, and so has the dense MLP.
ExpertLayout = Literal["family", "fused", "transposed", "separate"]

Shape = tuple[int, ...]
Array = TypeVar("Array", np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """Mapping of a Hugging Face tensor, or of some rows of it, to a box of a parameter.

    A box is a rectangular part of the parameter.

    The tensor fills the box: ``parameter[mapping.box]`` equals ``mapping.to_box(tensor)``. Usually
    this is only a reshape, in which the first dimension of the tensor (its rows) becomes several
    dimensions of the box.

    Attributes:
      tensor: name of the Hugging Face tensor.
      shape: shape of the tensor.
      box_shape: shape of the box, with as many dimensions as the parameter.
      box_start: index of the first element of the box in the parameter.
      first_row: first row of the tensor that is in this box. Other boxes may hold the other rows.
      row_order: permutation of n rows that is applied to each group of n rows. Row i of a group in
        the box is row ``row_order[i]`` of this group in the tensor. None if rows are not permuted.
      axes: permutation of the tensor's axes, if the checkpoint stores the tensor transposed; None
        otherwise. The permutation does not move the first axis.
      split_shape: shape to which the tensor is reshaped before its axes are permuted, in which some
        dimensions are split in two; None for `shape`. It is only used with `axes`.
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
        """Slices that select the box in the parameter."""
        return tuple(map(slice, self.box_start, self.box_end))

    @property
    def num_row_axes(self) -> int:
        """Number of leading dimensions of the box into which the tensor's rows are reshaped."""
        return len(self.box_shape) - len(self.shape) + 1

    @property
    def rows(self) -> np.ndarray:
        """Index of the tensor row at each position in the box's first `num_row_axes` dimensions."""
        shape = self.box_shape[: self.num_row_axes]
        rows = self.first_row + np.arange(math.prod(shape)).reshape(shape)
        return _reorder(rows, self.row_order, self.num_row_axes)

    def to_box(self, tensor: Array) -> Array:
        """Convert the tensor ``[*shape]`` to the content of the box ``[*box_shape]``."""
        if self.axes is not None:
            split = tensor.reshape(self.split_shape or self.shape)
            return split.transpose(self.axes).reshape(self.box_shape)
        if not self.shape:  # a scalar
            return tensor.reshape(self.box_shape)
        num_rows = math.prod(self.box_shape[: self.num_row_axes])
        box = tensor[self.first_row : self.first_row + num_rows].reshape(self.box_shape)
        return _reorder(box, self.row_order, self.num_row_axes)

    def to_rows(self, box: Array) -> Array:
        """Convert a box ``[*box_shape]`` to the tensor rows in it, the inverse of `to_box`."""
        if self.axes is not None:
            split = self.split_shape or self.shape
            box = box.reshape(tuple(split[axis] for axis in self.axes))
            return box.transpose(tuple(np.argsort(self.axes).tolist())).reshape(self.shape)
        if self.row_order is not None:
            inverse = tuple(np.argsort(self.row_order).tolist())
            box = _reorder(box, inverse, self.num_row_axes)
        return box.reshape(-1, *self.shape[1:]) if self.shape else box.reshape(())


Mappings = tuple[TensorMapping, ...]


def _reorder(box: Array, order: tuple[int, ...] | None, num_row_axes: int) -> Array:
    """Apply a permutation of n rows to each group of n rows in a box."""
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
    """Create a mapping without `axes`. By default, the tensor fills the whole parameter."""
    box_shape = box_shape or shape
    start = box_start or (0,) * len(box_shape)
    return TensorMapping(tensor, shape, box_shape, start, first_row=first_row, row_order=row_order)


def find_name(names: Mapping[str, str], parameter: str) -> str:
    """Return the name of a parameter's tensor.

    A bias that is not in `names`, such as ``input_norm_bias``, belongs to the module of
    ``input_norm``.
    """
    if parameter not in names and parameter.endswith("_bias"):
        return name_bias(names[parameter.removesuffix("_bias")])
    return names[parameter]


def name_bias(weight: str) -> str:
    """Return the name of a module's bias, given the name of its weight."""
    return weight.removesuffix("weight") + "bias"
