"""Activations of MLPs and experts: functions of the gate and up projections."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from paged_jax.kernels.exact import rounded
from paged_jax.kernels.linear import sum_rows
from paged_jax.kernels.norm_rope import ACTIVATIONS
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.parts.part import LayerCall, Parameter, check_factor

# Function that returns the up projection, float32 ``[..., F]``.
Up = Callable[[], jax.Array]


@dataclasses.dataclass(frozen=True)
class Activation:
    """Activation of a gate: ``function(gate) * up``.

    Subclasses are other functions of the two projections. They may have learned parameters.

    Attributes:
      name: name of the function, a key of `norm_rope.ACTIVATIONS`.

    Raises:
      UnsupportedConfigError: the name is unknown.
    """

    name: str = "silu"

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise UnsupportedConfigError(
                f"LlamaConfig: hidden_act must be one of {', '.join(ACTIVATIONS)}, got "
                f"{self.name!r}."
            )

    @property
    def num_projections(self) -> int:
        """Number of projections of the input: 2, the gate and the up projection, or only 1."""
        return 2

    def parameters(self, features: int) -> dict[str, Parameter]:
        """Return the learned parameters by name.

        Args:
          features: number of features (F) on a device. A parameter with an element for each feature
            is divided over devices along them, see `Parameter.divided`.
        """
        del features
        return {}

    @property
    def tensor_names(self) -> Mapping[str, str]:
        """Tensor name of each learned parameter, without the prefix of the layer."""
        return {}

    def __call__(self, gate: jax.Array, up: Up, call: LayerCall) -> jax.Array:
        """Return the hidden features float32 ``[..., F]``.

        Args:
          gate: float32 ``[..., F]``, the gate, or the only projection if there is one.
          up: function that returns the up projection float32 ``[..., F]``, so that it is sliced
            from the fused projection only where it is used.
          call: parameters of the layer.
        """
        return ACTIVATIONS[self.name](gate) * up()

    def all_reduces(self) -> list[int]:
        """Return the number of values per token in each all-reduce, see `Part.all_reduces`."""
        return []


@dataclasses.dataclass(frozen=True)
class Ungated(Activation):
    """Activation of a single projection, without a gate."""

    @property
    def num_projections(self) -> int:
        """Number of projections of the input."""
        return 1

    def __call__(self, gate: jax.Array, up: Up, call: LayerCall) -> jax.Array:
        """Return the hidden features, see `Activation`."""
        return ACTIVATIONS[self.name](gate)


@dataclasses.dataclass(frozen=True)
class SparseGate(Activation):
    """Activation that sets most gates to 0 (Gemma 3n).

    Attributes:
      sparsity: fraction of the gates that is set to 0 if they have a normal distribution.
    """

    sparsity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sparsity < 1:
            raise ValueError(
                f"SparseGate: sparsity must be at least 0 and less than 1, got {self.sparsity!r}."
            )

    def __call__(self, gate: jax.Array, up: Up, call: LayerCall) -> jax.Array:
        """Return the hidden features, see `Activation`."""
        gate = _keep_largest(gate, self.sparsity, call.mean_over_devices, call.backend)
        return ACTIVATIONS[self.name](gate) * up()

    def all_reduces(self) -> list[int]:
        """Return the sizes of the all-reduces: mean and mean square of a token's gates."""
        return [2]


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU(Activation):
    """Activation of gpt-oss, see `clamped_swiglu`.

    Attributes:
      alpha: factor inside the sigmoid.
      limit: bound for clamping the two projections.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor("ClampedSwiGLU", alpha=self.alpha, limit=self.limit)

    def __call__(self, gate: jax.Array, up: Up, call: LayerCall) -> jax.Array:
        """Return the hidden features, see `Activation`."""
        return clamped_swiglu(gate, up(), alpha=self.alpha, limit=self.limit, backend=call.backend)


def _keep_largest(
    gate: jax.Array,
    sparsity: float,
    mean_over_devices: Callable[[jax.Array], jax.Array] | None,
    backend: str | None,
) -> jax.Array:
    """Subtract a threshold from the gates ``[..., F]``, and set negative results to 0.

    The threshold is computed from mean and standard deviation of a token's gates. If the gates are
    normally distributed, a fraction `sparsity` of them is below the threshold.
    """
    mean = rounded(sum_rows(gate, backend=backend) / gate.shape[-1], backend)
    square = rounded(sum_rows(jnp.square(gate), backend=backend) / gate.shape[-1], backend)
    if mean_over_devices is not None:
        means = mean_over_devices(jnp.concatenate([mean, square], axis=-1))
        mean, square = means[..., :1], means[..., 1:]
    deviation = jnp.sqrt(jnp.maximum(square - rounded(jnp.square(mean), backend), 0))
    above = gate - mean
    threshold = rounded(deviation * statistics.NormalDist().inv_cdf(sparsity), backend)
    return jax.nn.relu(above - threshold)


def clamped_swiglu(
    gate: jax.Array, up: jax.Array, *, alpha: float, limit: float, backend: str | None = None
) -> jax.Array:
    """Compute the activation of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Args:
      gate: floating point ``[..., F]``. It is first clamped to at most `limit`.
      up: floating point ``[..., F]``. It is first clamped to ``[-limit, limit]``.
      alpha: factor inside the sigmoid.
      limit: bound for clamping `gate` and `up`.
      backend: see `rounded`.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(rounded(alpha * gate, backend))
