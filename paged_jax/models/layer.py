"""A decoder layer as a Flax module: the parameters of its parts, and their forward pass.

The layer does not access a cache: the caller passes in a function `attend` that computes attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from paged_jax.models.layer_attention import Attend, Carry
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.models.matrix_modules import add_matrix, random_matrix
from paged_jax.models.parts.part import LayerCall
from paged_jax.models.tensor_parallel import DeviceShard


class Layer(nnx.Module):
    """A decoder layer, which consists of the parts of a `LayerSpec`.

    The parameters of all parts are attributes of this module. Matrices have the shape
    ``[out, in]``, where `out` may be several dimensions. Projections with the same input are fused
    into one matrix, so that there are fewer and larger multiplications, and activations are read
    once.

    Args:
      spec: the parts of the layer. With `shard`, the parts of one device, see `ModelConfig.divide`.
      hidden_size: width of the residual stream (E).
      dtype: floating-point dtype of the model. Norms and biases have this dtype.
      formats: storage format of each matrix, by the name of the matrix in this layer.
      deviation: standard deviation of initial weights.
      output_deviation: standard deviation of initial projections into the residual stream.
      shard: this device's share of a tensor-parallel model; None without tensor parallelism.
      rngs: random keys for the initial weights.
    """

    def __init__(
        self,
        spec: LayerSpec,
        hidden_size: int,
        *,
        dtype: DTypeLike,
        formats: MatrixFormats,
        deviation: float,
        output_deviation: float,
        shard: DeviceShard | None = None,
        rngs: nnx.Rngs,
    ):
        self.spec = spec
        self.formats = formats
        self.shard = shard
        for name, parameter in spec.parameters(hidden_size).items():
            if parameter.initial is None:
                spread = output_deviation if parameter.is_output else deviation
                values = random_matrix(rngs, parameter.shape, dtype, spread)
                add_matrix(self, name, values, formats[name])
            else:
                own_dtype = jnp.dtype(parameter.dtype or dtype)
                initial = parameter.initial(rngs, parameter.shape, own_dtype)
                setattr(self, name, nnx.Param(initial))

    def __call__(
        self,
        x: jax.Array,
        *,
        index: int | jax.Array,
        attend: Attend[Carry],
        carry: Carry,
        stack: "Layer | None" = None,
        backend: str | None = None,
        int8_inputs: bool = False,
        **inputs: Any,
    ) -> tuple[jax.Array, Carry]:
        """Run the steps of the layer.

        Args:
          x: float32 ``[..., E]``, the residual stream, or ``[..., n, E]`` in models with n residual
            streams.
          index: index of the layer in the model. In a scan over layers, it is traced.
          attend: function that computes the attention of the layer, see `Attend`.
          carry: state that is passed to `attend` and returned by it, such as the K and V pools.
          stack: in a scan over layers, the module that holds the stacked parameters of all layers;
            None otherwise. Some kernels read a layer's weights from the stack, because a slice of
            the stack would be a copy.
          backend: backend of the matrix multiplications, see `linear`.
          int8_inputs: whether they round their inputs to int8, see `Weight`.
          inputs: the other attributes of `LayerCall`: positions, rotations and the like.

        Returns:
          The new residual stream, of the shape of `x`, and the carry that `attend` returned.
        """
        call = LayerCall(self, stack, index, backend, int8_inputs, attend, **inputs)
        for step in self.spec.steps:
            x, carry = step(x, call, carry)
        return x, carry

    @property
    def float_dtype(self) -> np.dtype:
        """Dtype of the floating-point parameters."""
        return getattr(self, self.spec.name_of_dtype).dtype
