"""Experts of a layer as shapes, to lower or compile without running them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.linear import Weight
from paged_jax.kernels.weight_formats import WeightFormat
from paged_jax.models.parts.experts import ExpertWeights, apply_experts, route
from tests.support.kernel_cases import H200, lower
from tests.support.weights import weight_shapes


@dataclasses.dataclass(frozen=True)
class ExpertCase:
    """Tokens through the experts of a layer.

    Attributes:
      num_tokens: N.
      num_experts: X.
      num_chosen: k.
      hidden_size: E.
      intermediate_size: F.
      dtype: dtype of the weights, or of the matmuls if they are quantised.
      format: format of quantised weights; None for weights of `dtype`.
    """

    num_tokens: int
    num_experts: int
    num_chosen: int
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"
    format: WeightFormat | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the smaller of the two weights of all experts, as they are stored."""
        shape = self.num_experts, self.hidden_size, self.intermediate_size
        return self._format.num_bytes(shape)

    @property
    def _format(self) -> WeightFormat:
        return self.format or WeightFormat(self.dtype)

    @property
    def num_products(self) -> int:
        """Number of multiplications of all tokens with their chosen experts."""
        return self.num_tokens * self.num_chosen * 3 * self.hidden_size * self.intermediate_size

    @property
    def activation_bytes(self) -> int:
        """Bytes of inputs and outputs of the experts, for each token and chosen expert."""
        row = 2 * self.hidden_size + 3 * self.intermediate_size
        return 4 * self.num_tokens * self.num_chosen * row

    def function(self) -> Callable[..., jax.Array]:
        """Return the function that a layer applies to the logits of its router."""

        def experts(x: jax.Array, logits: jax.Array, gate_up: Weight, down: Weight):
            routes = route(logits, self.num_chosen, renormalise=True)
            weights = ExpertWeights(gate_up, down)
            return apply_experts(x, routes, weights, activation=lambda a, b: jax.nn.silu(a) * b)

        return experts

    def lower(self, platform: str, sharding: Any = None, gpu: GpuInfo = H200) -> jax.stages.Lowered:
        """Lower the experts for ``"cuda"`` or ``"tpu"``."""
        N, X, E, F = (
            self.num_tokens, self.num_experts, self.hidden_size, self.intermediate_size,
        )  # fmt: skip

        def array(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        def weight(*shape: int) -> Weight:
            return weight_shapes(self._format, shape, self.dtype, sharding)

        shapes = array(N, E), array(N, X), weight(X, 2, F, E), weight(X, E, F)
        return lower(self.function(), *shapes, platform=platform, gpu=gpu)
