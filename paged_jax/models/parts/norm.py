"""Norms of hidden states, queries and keys."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.norm_rope import layer_norm, rms_norm
from paged_jax.models.parts.part import Parameter, Shape, check_factor, vector

if TYPE_CHECKING:
    from flax import nnx


@dataclasses.dataclass(frozen=True)
class Norm:
    """RMS norm or layer norm.

    The weight ``[E]`` is a parameter with the name of the norm, such as ``input_norm``. A variant
    with other parameters overrides `parameters` and `apply`. The tensor of a parameter
    ``input_norm_bias`` is the bias of the module of ``input_norm``.

    Attributes:
      eps: constant added to the mean square (or variance).
      offset: number added to the weights.
      kind: ``"rms"`` or ``"layer"``.
    """

    eps: float
    offset: float = 0.0
    kind: str = "rms"

    def __post_init__(self) -> None:
        check_factor("Norm", eps=self.eps)
        if self.kind not in ("rms", "layer"):
            raise ValueError(f"Norm: kind must be rms or layer, got {self.kind!r}.")

    def parameters(self, name: str, size: int) -> dict[str, Parameter]:
        """Return the parameters of the norm `name` of vectors with `size` elements, by name."""
        return {name: vector(size, initial=self.initial)}

    def apply(
        self,
        name: str,
        x: jax.Array,
        get_vector: Callable[[str], jax.Array],
        backend: str | None,
    ) -> jax.Array:
        """Normalise float32 ``x [..., E]``.

        Args:
          name: name of the norm.
          x: the vectors.
          get_vector: function that returns a parameter by its name, such as `LayerCall.vector`.
          backend: see `sum_rows`.
        """
        return self(x, get_vector(name), backend)

    def __call__(self, x: jax.Array, weight: jax.Array, backend: str | None) -> jax.Array:
        """Normalise float32 ``x [..., E]`` with a weight ``[E]``. For `backend`, see `sum_rows`."""
        normalise = layer_norm if self.kind == "layer" else rms_norm
        return normalise(x, self.factor(weight), self.eps, backend=backend)

    def factor(self, weight: jax.Array) -> jax.Array:
        """Return the factor of the normalised elements: the weight plus `offset`."""
        return weight.astype(jnp.float32) + self.offset if self.offset else weight

    def initial(self, rngs: "nnx.Rngs", shape: Shape, dtype: DTypeLike) -> jax.Array:
        """Return a weight with which the norm multiplies by 1, see `part.Initial`."""
        del rngs
        return jnp.full(shape, 1 - self.offset, dtype)
