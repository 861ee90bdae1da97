"""The dense MLP."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from paged_jax.arguments import check_positive
from paged_jax.kernels.exact import rounded
from paged_jax.kernels.norm_rope import add_bias
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.part import (
    LayerCall,
    Parameter,
    Part,
    check_divisible,
    matrix,
    vector,
)
from paged_jax.models.tensor_mapping import ExpertLayout, Mappings, map_tensor, name_bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Part):
    """Dense MLP with F features.

    Parameters::

        gate_up_proj  [2, F, E]   gate and up projection; only one if the activation has no gate
        down_proj     [E, F]
        gate_up_bias  [2, F]      down_bias  [E]

    Attributes:
      features: number of features (F).
      activation: function of the gate and the up projection.
      has_bias: whether both projections have biases.
      gate_multiplier, out_multiplier: factors of the gate and of the output, as in muP.
      size_name: name of `features` in error messages.
    """

    features: int
    activation: Activation = Activation()
    has_bias: bool = False
    gate_multiplier: float = 1.0
    out_multiplier: float = 1.0
    size_name: str = "intermediate_size"

    def __post_init__(self) -> None:
        check_positive("Dense", **{self.size_name: self.features})

    tensor_names = {
        "gate_proj": "mlp.gate_proj.weight",
        "up_proj": "mlp.up_proj.weight",
        "down_proj": "mlp.down_proj.weight",
    }
    gguf_names = {
        "gate_proj": "ffn_gate.weight",
        "up_proj": "ffn_up.weight",
        "down_proj": "ffn_down.weight",
    }

    def num_features(self, hidden_size: int) -> int:
        """Return the number of activations per token, see `Part.num_features`."""
        del hidden_size
        return 3 * self.features

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        E, F, halves = hidden_size, self.features, self.activation.num_projections
        parameters = {
            "gate_up_proj": matrix(halves, F, E, divided=2),
            "down_proj": matrix(E, F, divided=1, is_output=True),
        }
        if self.has_bias:
            parameters["gate_up_bias"] = vector(halves, F, divided=1)
            parameters["down_bias"] = vector(E)
        return parameters | self.activation.parameters(F)

    def check_divides(self, function: str, num_devices: int) -> None:
        """Check that the features can be divided over the devices."""
        check_divisible(function, num_devices, **{self.size_name: self.features})

    def divide(self, num_devices: int) -> Self:
        """Return the part with one device's features."""
        return dataclasses.replace(self, features=self.features // num_devices)

    def all_reduces(self, hidden_size: int, num_devices: int) -> list[int]:
        """Return the sizes of the all-reduces of the activation."""
        del hidden_size, num_devices
        return self.activation.all_reduces()

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run the MLP, see `Part.__call__`."""
        hidden = call.linear(x, "gate_up_proj")
        if self.has_bias:
            hidden = add_bias(hidden, call.vector("gate_up_bias"))
        gate = hidden[..., 0, :]
        if self.gate_multiplier != 1:
            gate = rounded(gate * self.gate_multiplier, call.backend)
        features = self.activation(gate, lambda: hidden[..., -1, :], call)
        out = self.project_out(features, call)
        if self.out_multiplier != 1:
            out = rounded(out * self.out_multiplier, call.backend)
        return out, carry

    def project_out(self, features: jax.Array, call: LayerCall) -> jax.Array:
        """Project the features ``[..., F]`` to ``[..., E]``, with this device's share of the bias.

        Variants override it, for example to normalise the features.
        """
        return call.project_out(features, "down")

    def tensors(
        self, hidden_size: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Return the tensors of each parameter, see `Part.tensors`."""
        E, F = hidden_size, self.features
        mappings: dict[str, Mappings] = {}
        halves = ("gate_proj", "up_proj")[-self.activation.num_projections :]
        for kind, in_shape in ("proj", (E,)), ("bias", ()):
            rename = name_bias if kind == "bias" else str
            if "gate_up_proj" in names and layout != "separate":
                fused = rename(names["gate_up_proj"])
                gate_up = (map_tensor(fused, (2 * F, *in_shape), (2, F, *in_shape)),)
            else:
                gate_up = tuple(
                    map_tensor(
                        rename(names[half]),
                        (F, *in_shape),
                        (1, F, *in_shape),
                        (index, 0, 0)[: 2 + len(in_shape)],
                    )
                    for index, half in enumerate(halves)
                )
            mappings[f"gate_up_{kind}"] = gate_up
        mappings["down_bias"] = (map_tensor(name_bias(names["down_proj"]), (E,)),)
        return self.map_others(mappings, E, {**self.activation.tensor_names, **names})
