"""Steps of a layer: how its parts are normalised and added to the residual stream."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from paged_jax.arguments import check_positive
from paged_jax.kernels.exact import rounded
from paged_jax.kernels.norm_rope import ACTIVATIONS, expand
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import (
    LayerCall,
    Parameter,
    Part,
    check_factor,
    matrix,
    multiply,
    ones,
    vector,
)


@dataclasses.dataclass(frozen=True)
class Parallel(Part):
    """Parts that run on the same input. Their outputs are added, with a single all-reduce.

    Attributes:
      parts: the parts, each with parameters of other names.
    """

    parts: tuple[Part, ...]

    @property
    def inner(self) -> tuple[Part, ...]:
        """The parts."""
        return self.parts

    def map_inner(self, function: Callable[[Part], Part]) -> Self:
        """Replace each part."""
        return dataclasses.replace(self, parts=tuple(map(function, self.parts)))

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run the parts, see `Part.__call__`."""
        first, *following = self.parts
        total, carry = first(x, call, carry)
        for part in following:
            out, carry = part(x, call, carry)
            total = total + out
        return total, carry

    def add_bias(self, out: jax.Array, call: LayerCall) -> jax.Array:
        """Add the biases of all parts."""
        for part in self.parts:
            out = part.add_bias(out, call)
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sublayer(Part):
    """A step ``x + multiplier * output_norm(part(input_norm(x)))`` on the residual stream x.

    Attributes:
      part: the part.
      norm: kind of the norms, with its constants.
      input_norm: name of the norm's weight ``[E]``; None for no norm of the input.
      output_norm: name of the norm's weight ``[E]``; None for no norm of the output.
      multiplier: factor of the output.
    """

    part: Part
    norm: Norm
    input_norm: str | None = None
    output_norm: str | None = None
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        check_factor(type(self).__name__, multiplier=self.multiplier)

    tensor_names = {
        "input_norm": "input_layernorm.weight",
        "post_attention_norm": "post_attention_layernorm.weight",
    }
    gguf_names = {
        "input_norm": "attn_norm.weight",
        "attention_out_norm": "post_attention_norm.weight",
        "post_attention_norm": "ffn_norm.weight",
        "mlp_out_norm": "post_ffw_norm.weight",
    }

    @property
    def inner(self) -> tuple[Part, ...]:
        """The part."""
        return (self.part,)

    def map_inner(self, function: Callable[[Part], Part]) -> Self:
        """Replace the part."""
        return dataclasses.replace(self, part=function(self.part))

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters of the norms."""
        return self.norm_parameters(hidden_size, self.input_norm, self.output_norm)

    def norm_parameters(self, hidden_size: int, *names: str | None) -> dict[str, Parameter]:
        """Return the parameters of norms with these names; None is left out."""
        norms = (self.norm.parameters(name, hidden_size) for name in names if name is not None)
        return {name: parameter for norm in norms for name, parameter in norm.items()}

    def all_reduces(self, hidden_size: int, num_devices: int) -> list[int]:
        """Return the sizes of the all-reduces: the sum of the devices' outputs."""
        del num_devices
        return [hidden_size]

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run the step, see `Part.__call__`."""
        normed = self.apply_norm(self.input_norm, x, call)
        out, carry = self.part(normed, call, carry)
        out = self.part.add_bias(call.all_reduce(out), call)
        out = self.apply_norm(self.output_norm, out, call)
        return self.add(x, normed, out, call), carry

    def add(self, x: jax.Array, normed: jax.Array, out: jax.Array, call: LayerCall) -> jax.Array:
        """Add the normalised output to the residual stream."""
        del normed
        return x + rounded(multiply(out, self.multiplier), call.backend)

    def apply_norm(self, name: str | None, x: jax.Array, call: LayerCall) -> jax.Array:
        """Apply the norm with the weight `name`; without a name, return `x`."""
        return x if name is None else self.norm.apply(name, x, call.vector, call.backend)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaurelSublayer(Sublayer):
    """A step with the LAuReL branch of Gemma 3n.

    The branch is the normalised input plus a low-rank projection of this input. The sum of the
    residual stream, the output and the branch is divided by sqrt(2). Parameters::

        laurel_left  [rank, E]    laurel_right  [E, rank]    laurel_norm  [E]

    Attributes:
      rank: rank of the projection.
    """

    rank: int

    tensor_names = {
        **Sublayer.tensor_names,
        "laurel_left": "laurel.linear_left.weight",
        "laurel_right": "laurel.linear_right.weight",
        "laurel_norm": "laurel.post_laurel_norm.weight",
    }

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        E = hidden_size
        return {
            **super().parameters(E),
            "laurel_left": matrix(self.rank, E, stays_float=True),
            "laurel_right": matrix(E, self.rank, is_output=True, stays_float=True),
            **self.norm_parameters(E, "laurel_norm"),
        }

    def add(self, x: jax.Array, normed: jax.Array, out: jax.Array, call: LayerCall) -> jax.Array:
        """Add the normalised output and the branch to the residual stream."""
        x = super().add(x, normed, out, call)
        branch = call.linear(call.linear(normed, "laurel_left"), "laurel_right")
        x = x + normed
        branch = self.apply_norm("laurel_norm", branch, call)
        return rounded((x + branch) * 2**-0.5, call.backend)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparateExperts(Sublayer):
    """A step with experts whose router, inputs and outputs have norms of their own (Gemma 4).

    The part is `Experts` with a shared expert. ``input_norm`` normalises only the input of the
    shared expert. Parameters, in addition to those of `Sublayer`, each ``[E]``::

        router_norm      input of the router      expert_input_norm   input of the experts
        expert_out_norm  output of the experts    shared_out_norm     output of the shared expert
    """

    part: Experts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part.shared is None:
            raise ValueError("SeparateExperts: part must have a shared expert, got none.")

    tensor_names = {
        **Sublayer.tensor_names,
        "router_norm": "router.scale",
        "expert_input_norm": "pre_feedforward_layernorm_2.weight",
        "expert_out_norm": "post_feedforward_layernorm_2.weight",
        "shared_out_norm": "post_feedforward_layernorm_1.weight",
    }
    gguf_names = {
        **Sublayer.gguf_names,
        "router_norm": "ffn_gate_inp.scale",
        "expert_input_norm": "pre_ffw_norm_2.weight",
        "expert_out_norm": "post_ffw_norm_2.weight",
        "shared_out_norm": "post_ffw_norm_1.weight",
    }

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        names = ("router_norm", "expert_input_norm", "expert_out_norm", "shared_out_norm")
        return super().parameters(hidden_size) | self.norm_parameters(hidden_size, *names)

    def all_reduces(self, hidden_size: int, num_devices: int) -> list[int]:
        """Return the sizes of the all-reduces: both outputs are summed separately."""
        del num_devices
        return [2 * hidden_size]

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run experts and shared expert, sum the results of all devices, and normalise them."""
        assert self.part.shared is not None
        normed = self.apply_norm(self.input_norm, x, call)
        router_input = self.apply_norm("router_norm", x, call) * x.shape[-1] ** -0.5
        inputs = self.apply_norm("expert_input_norm", x, call)
        routed = self.part.run_routed(inputs, router_input, call)
        shared, carry = self.part.shared(normed, call, carry)
        out = jnp.concatenate([routed, shared], axis=-1)
        routed, shared = jnp.split(call.all_reduce(out), 2, axis=-1)
        routed = self.apply_norm("expert_out_norm", routed, call)
        out = routed + self.apply_norm("shared_out_norm", shared, call)
        out = self.apply_norm(self.output_norm, out, call)
        return self.add(x, normed, out, call), carry


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerLayerEmbedding(Part):
    """A step that adds this layer's embedding of each token, through a gate (Gemma 3n).

    Parameters::

        per_layer_gate  [d, E]    per_layer_proj  [E, d]    per_layer_out_norm  [E]

    Attributes:
      size: elements of a per-layer embedding (d).
      activation: activation of the gate, a key of `norm_rope.ACTIVATIONS`.
      norm: norm of the projected embedding.
    """

    size: int
    activation: str
    norm: Norm

    def __post_init__(self) -> None:
        check_positive("PerLayerEmbedding", size=self.size)

    tensor_names = {
        "per_layer_gate": "per_layer_input_gate.weight",
        "per_layer_proj": "per_layer_projection.weight",
        "per_layer_out_norm": "post_per_layer_input_norm.weight",
    }
    gguf_names = {
        "per_layer_gate": "inp_gate.weight",
        "per_layer_proj": "proj.weight",
        "per_layer_out_norm": "post_norm.weight",
    }
    can_stack = False

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name."""
        return {
            "per_layer_gate": matrix(self.size, hidden_size, stays_float=True),
            "per_layer_proj": matrix(hidden_size, self.size, is_output=True, stays_float=True),
            **self.norm.parameters("per_layer_out_norm", hidden_size),
        }

    def embed(self, x: jax.Array, call: LayerCall) -> jax.Array:
        """Return the layer's token embeddings, gated by ``x [..., E]`` and projected."""
        assert call.per_layer_input is not None
        gate = call.linear(x, "per_layer_gate")
        out = ACTIVATIONS[self.activation](gate) * call.per_layer_input
        out = call.linear(out, "per_layer_proj")
        return self.norm.apply("per_layer_out_norm", out, call.vector, call.backend)

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Add the embeddings to the residual stream, see `Part.__call__`."""
        return x + self.embed(x, call), carry


@dataclasses.dataclass(frozen=True)
class LayerScalar(Part):
    """A step that multiplies the residual stream by a learned scalar, ``layer_scalar [1]``."""

    tensor_names = {"layer_scalar": "layer_scalar"}
    gguf_names = {"layer_scalar": "layer_output_scale.weight"}

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the scalar."""
        del hidden_size
        return {"layer_scalar": vector(1, initial=ones, is_trained=False)}

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Multiply the residual stream, see `Part.__call__`."""
        return rounded(x * expand(call.vector("layer_scalar"), x.ndim), call.backend), carry
