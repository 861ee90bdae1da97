"""Access to the weight matrices of a model in a forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.typing import DTypeLike

from paged_jax.kernels.linear import LayerWeights, Matrix, Stack, Weight, linear
from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat
from paged_jax.models.matrix_formats import SUFFIXES

if TYPE_CHECKING:
    from flax import nnx

# Placement of parameters on devices: one sharding for all parameters, or a function of a
# parameter's name and shape. The name is "layers.0.qkv_proj", or "layers.qkv_proj" if the layers
# are stacked. None is the default device.
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding] | None


def get_matrix(
    module: "nnx.Module",
    name: str,
    format: WeightFormat,
    dtype: DTypeLike,
    stack: "nnx.Module | None" = None,
    layer: jax.Array | int | None = None,
    *,
    int8_inputs: bool = False,
) -> Weight:
    """Return a matrix of a module as a `Weight`, with all arrays of its format.

    Args:
      module: module that has the matrix.
      name: name of the matrix in the module.
      format: storage format of the matrix.
      dtype: dtype of the floating-point parameters of the model.
      stack: stacked parameters that contain `module` as a slice, in a scan over layers; or None.
      layer: index of `module` in the stack, i32 ``[]``; None without a stack.
      int8_inputs: whether matmuls round their inputs to int8, see `Weight`.
    """
    weight_stack = None
    if stack is not None and layer is not None:
        # `module` is a slice of the stack. Gradients must flow through the slice, not the stack.
        weight_stack = Stack(lax.stop_gradient(_parameters(stack, name)), layer)
    arrays = _parameters(module, name)
    return Weight.of_format(arrays, format, dtype, weight_stack, int8_inputs=int8_inputs)


def _parameters(module: "nnx.Module", name: str) -> WeightArrays:
    parameters = (getattr(module, name + suffix, None) for suffix in ("", *SUFFIXES))
    return WeightArrays(
        *(None if parameter is None else parameter[...] for parameter in parameters)
    )


@dataclass(frozen=True)
class LayerParameters:
    """Access to the parameters of a layer by name, during a forward pass.

    Attributes:
      layer: module of the layer, with the attributes `formats` and `float_dtype`.
      stack: stacked parameters that contain `layer` as a slice, in a scan over layers; or None.
      index: index of the layer in the model; i32 ``[]`` in a scan over layers.
      backend: backend of the matrix multiplications, see `linear`.
      int8_inputs: whether they round their inputs to int8, see `Weight`.
    """

    layer: Any
    stack: "nnx.Module | None"
    index: jax.Array | int
    backend: str | None
    int8_inputs: bool

    def vector(self, name: str) -> jax.Array:
        """Return a parameter that is not a matrix."""
        return getattr(self.layer, name)[...]

    def optional(self, name: str) -> jax.Array | None:
        """Return a parameter that is not a matrix; None if the layer does not have it."""
        return self.vector(name) if hasattr(self.layer, name) else None

    def matrix(self, name: str) -> Matrix:
        """Return a matrix of the layer.

        In a scan over layers, a matrix that is not stacked is returned as a `LayerWeights`, which
        holds the matrices of all layers and the index of this layer.
        """
        layer, int8_inputs = self.layer, self.int8_inputs

        def find(module: Any, *stack: Any) -> Weight:
            format, dtype = module.formats[name], layer.float_dtype
            return get_matrix(module, name, format, dtype, *stack, int8_inputs=int8_inputs)

        if hasattr(layer, name):
            return find(layer, self.stack, self.index)
        layer_keys = sorted((key for key in vars(layer) if key.isdecimal()), key=int)
        return LayerWeights(tuple(find(getattr(layer, key)) for key in layer_keys), self.index)

    def linear(self, x: jax.Array, name: str) -> jax.Array:
        """Multiply the last dimension of `x` by the matrix with this name, see `linear`."""
        return linear(x, self.matrix(name), backend=self.backend)
