"""A mixture of experts (MoE, arXiv 1701.06538), and a shared expert beside it.

With experts, a router chooses k experts for each token. The N * k pairs of a token and an expert
are sorted by expert, so that the rows of each expert are consecutive. Weights of experts that no
token chose are not read::

    tokens          0        1        2          x [N, E]
    chosen        b   d    a   b    b   d        k = 2 of X = 4 experts
    rows          a | b  b  b | d  d             [N k, E], sorted by expert
    of tokens     1   0  1  2   0  2

Rows of padding tokens come last, and no expert computes them. With tensor parallelism, this also
applies to rows of experts on other devices.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.arguments import check_positive
from paged_jax.kernels.exact import rounded
from paged_jax.kernels.linear import Matrix, grouped_linear, sum_rows
from paged_jax.kernels.norm_rope import add_bias
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.part import (
    LayerCall,
    Parameter,
    Part,
    check_divisible,
    matrix,
    ones,
    vector,
)
from paged_jax.models.tensor_mapping import (
    ExpertLayout,
    Mappings,
    TensorMapping,
    map_tensor,
    name_bias,
)

# Maximum number of comparisons with which `_choose` and `sort_by_expert` compare all pairs instead
# of sorting. It is enough for 64 tokens with 128 experts, or for 64 tokens with 16 chosen experts
# each.
_MAX_COMPARISONS = 1 << 20

# Function of the gate and up projections, both float32 ``[..., F]``, that returns the activation.
GatedActivation = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Router:
    """Options of a router, which chooses the experts of each token and computes their weights.

    The router computes a score for each expert. A token uses the experts with the highest scores,
    and their scores are the weights of their outputs.

    Attributes:
      scores: ``"softmax"`` of the logits of all experts, or ``"sigmoid"`` of each logit.
      has_correction_bias: whether a float32 bias per expert is added to the scores when experts are
        chosen. The weights are computed from the scores without the bias.
      num_groups: number of groups into which the experts are divided. A group is a range of
        consecutive experts, and all groups have the same size.
      num_chosen_groups: number of groups that are chosen for each token, before its experts are
        chosen from these groups only.
      group_score: score of a group: ``"max"``, the largest score of its experts, or ``"top2"``, the
        sum of the two largest. The correction bias is included.
      epsilon: constant added to the sum of the weights when the weights are divided by this sum.
      factor: factor that multiplies all weights at the end.
      has_expert_scale: whether each weight is also multiplied by a learned scalar of its expert.
      scales_inputs: whether the weights multiply the inputs of the experts instead of their
        outputs.

    Raises:
      UnsupportedConfigError: an option has an unknown value.
      ValueError: a number is out of range.
    """

    scores: str = "softmax"
    has_correction_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "top2"
    epsilon: float = 0.0
    factor: float = 1.0
    has_expert_scale: bool = False
    scales_inputs: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("scores", ("softmax", "sigmoid")), ("group_score", ("max", "top2"))):
            if (value := getattr(self, name)) not in choices:
                raise UnsupportedConfigError(
                    f"Router: {name} must be one of {', '.join(choices)}, got {value!r}."
                )
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(
                "Router: num_chosen_groups must be at least 1 and at most num_groups, got "
                f"num_chosen_groups {self.num_chosen_groups} and num_groups {self.num_groups}."
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"Router: factor must be positive, got {self.factor!r}.")

    @property
    def follows_logits(self) -> bool:
        """Whether the router always chooses the experts with the largest logits."""
        return self.num_chosen_groups == self.num_groups and not self.has_correction_bias


SOFTMAX_ROUTER = Router()  # router of most families


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(Part):
    """X experts, of which a router chooses k for each token, and optionally a shared expert.

    Parameters, in addition to those of the shared expert, which is a `Dense`::

        router                  [X, E]         router_bias           [X]
        router_correction_bias  [X]            router_expert_factor  [X]
        experts_gate_up_proj    [X, 2, F, E]   experts_gate_up_bias  [X, 2, F]; without gates 1
                                               instead of 2 in both
        experts_down_proj       [X, E, F]      experts_down_bias     [X, E]
        moe_in_proj             [r, E]         moe_in_bias           [r]
        moe_out_proj            [E, r]         moe_out_bias          [E]
        shared_expert_gate      [1, E]

    Attributes:
      num_experts: number of experts (X).
      num_chosen: number of experts that are chosen for each token (k).
      features: features of each expert (F).
      latent_size: size of the vectors that experts read and write (r), if they are projections of
        the hidden states; 0 if experts read and write hidden states.
      router: options for choosing and weighting experts.
      renormalises: whether the weights of the chosen experts are divided by their sum.
      activation: function of the gate and up projections of each expert.
      has_bias: whether router and experts have biases.
      has_latent_bias: whether the projections to and from `latent_size` have biases.
      shared: the shared expert, whose output is added; None for none.
      gates_shared: whether the output of the shared expert is multiplied by a gate.
      num_local: number of experts on this device; None for all.
    """

    num_experts: int
    num_chosen: int
    features: int
    latent_size: int = 0
    router: Router = SOFTMAX_ROUTER
    renormalises: bool = False
    activation: Activation = Activation()
    has_bias: bool = False
    has_latent_bias: bool = False
    shared: Dense | None = None
    gates_shared: bool = False
    num_local: int | None = None

    def __post_init__(self) -> None:
        check_positive(
            "Experts",
            num_experts=self.num_experts,
            num_chosen=self.num_chosen,
            features=self.features,
        )
        if self.num_chosen > self.num_experts:
            raise ValueError(
                f"Experts: num_chosen must be at most num_experts, got {self.num_chosen} and "
                f"{self.num_experts}."
            )
        if self.num_experts % self.router.num_groups:
            raise ValueError(
                "Experts: num_experts must be a multiple of the router's num_groups, got "
                f"{self.num_experts} and {self.router.num_groups}."
            )
        if self.latent_size < 0 or self.latent_size and self.has_bias:
            raise ValueError(
                "Experts: latent_size must be at least 0, and 0 if experts have biases, got "
                f"{self.latent_size}."
            )

    tensor_names = {
        "router": "mlp.gate.weight",
        "experts_gate_proj": "mlp.experts.*.gate_proj.weight",
        "experts_up_proj": "mlp.experts.*.up_proj.weight",
        "experts_down_proj": "mlp.experts.*.down_proj.weight",
        "router_correction_bias": "mlp.gate.e_score_correction_bias",
        "router_expert_factor": "mlp.router.per_expert_scale",
        "shared_expert": "mlp.shared_expert",
        "shared_expert_gate": "mlp.shared_expert_gate.weight",
    }
    gguf_names = {
        "router": "ffn_gate_inp.weight",
        "experts_gate_proj": "ffn_gate_exps.weight",
        "experts_up_proj": "ffn_up_exps.weight",
        "experts_down_proj": "ffn_down_exps.weight",
        "router_correction_bias": "exp_probs_b.bias",
        "router_expert_factor": "ffn_down_exps.scale",
        "shared_gate_proj": "ffn_gate_shexp.weight",
        "shared_up_proj": "ffn_up_shexp.weight",
        "shared_down_proj": "ffn_down_shexp.weight",
        "shared_expert_gate": "ffn_gate_inp_shexp.weight",
    }

    def num_features(self, hidden_size: int) -> int:
        """Return the number of activations per token, see `Part.num_features`."""
        shared = 0 if self.shared is None else self.shared.num_features(hidden_size)
        return shared + self.num_chosen * 3 * (self.features + hidden_size)

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Return the parameters by name, with those of the shared expert."""
        E, F, X = self.latent_size or hidden_size, self.features, self.num_experts
        local, halves = self._num_local, self.activation.num_projections
        parameters = {} if self.shared is None else self.shared.parameters(hidden_size)
        parameters["router"] = matrix(X, hidden_size, stays_float=True)
        if self.latent_size:
            parameters["moe_in_proj"] = matrix(E, hidden_size)
            parameters["moe_out_proj"] = matrix(hidden_size, E, is_output=True)
            if self.has_latent_bias:
                parameters["moe_in_bias"] = vector(E)
                parameters["moe_out_bias"] = vector(hidden_size)
        parameters["experts_gate_up_proj"] = matrix(local, halves, F, E, divided=4)
        parameters["experts_down_proj"] = matrix(local, E, F, divided=3, is_output=True)
        if self.shared is not None and self.gates_shared:
            parameters["shared_expert_gate"] = matrix(1, hidden_size, stays_float=True)
        if self.router.has_correction_bias:
            # Always store these biases in float32, because bfloat16 could not distinguish biases of
            # almost equal size.
            parameters["router_correction_bias"] = vector(X, dtype="float32", is_trained=False)
        if self.router.has_expert_scale:
            parameters["router_expert_factor"] = vector(X, initial=ones)
        if self.has_bias:
            parameters["router_bias"] = vector(X)
            parameters["experts_gate_up_bias"] = vector(local, halves, F, divided=3)
            parameters["experts_down_bias"] = vector(local, E, divided=2)
        return parameters

    @property
    def _num_local(self) -> int:
        return self.num_experts if self.num_local is None else self.num_local

    def check_divides(self, function: str, num_devices: int) -> None:
        """Check that the experts can be divided over the devices."""
        check_divisible(function, num_devices, num_experts=self.num_experts)
        if self.shared is not None:
            self.shared.check_divides(function, num_devices)

    def divide(self, num_devices: int) -> Self:
        """Return the part with one device's experts. Its router chooses among all experts."""
        shared = None if self.shared is None else self.shared.divide(num_devices)
        return dataclasses.replace(self, shared=shared, num_local=self.num_experts // num_devices)

    def __call__(self, x: jax.Array, call: LayerCall, carry: Any) -> tuple[jax.Array, Any]:
        """Run the experts, see `Part.__call__`."""
        out = self.run_routed(x, x, call)
        if self.shared is None:
            return out, carry
        shared, _ = self.shared(x, call, carry)
        if not self.gates_shared:
            return out + shared, carry
        shared = shared * jax.nn.sigmoid(call.linear(x, "shared_expert_gate"))
        return out + rounded(shared, call.backend), carry

    def run_routed(self, x: jax.Array, router_input: jax.Array, call: LayerCall) -> jax.Array:
        """Run the router, and then the chosen experts of each token, without the shared expert.

        Args:
          x: float32 ``[..., E]``, normalised input of the experts.
          router_input: float32 ``[..., E]``, normalised input of the router.
          call: parameters of the layer. Padding tokens have the output 0.

        Returns:
          float32 ``[..., E]``. With tensor parallelism, this is only the sum over the experts of
          this device. The caller must add the results of all devices.
        """
        logits = call.linear(router_input, "router")
        matrices = call.matrix("experts_gate_up_proj"), call.matrix("experts_down_proj")
        biases = (None, None)
        if self.has_bias:
            logits = add_bias(logits, call.vector("router_bias"))
            biases = call.vector("experts_gate_up_bias"), call.vector("experts_down_bias")
        num_local = matrices[1].shape[0]
        is_token, shard = call.is_token, call.shard
        routes = route(
            logits.reshape(-1, logits.shape[-1]),
            self.num_chosen,
            self.router,
            RouterArrays(*map(call.optional, ("router_correction_bias", "router_expert_factor"))),
            renormalise=self.renormalises,
            is_token=None if is_token is None else is_token.reshape(-1),
            local_experts=None if shard is None else (shard.index * num_local, num_local),
            backend=call.backend,
        )
        inputs = call.linear(x, "moe_in_proj") if self.latent_size else x
        if self.latent_size and self.has_latent_bias:
            inputs = add_bias(inputs, call.vector("moe_in_bias"))
        out = apply_experts(
            inputs.reshape(-1, inputs.shape[-1]),
            routes,
            ExpertWeights(*matrices, *biases),
            activation=lambda gate, up: self.activation(gate, lambda: up, call),
            scales_inputs=self.router.scales_inputs,
            backend=call.backend,
        )
        out = out.reshape(inputs.shape)
        return call.project_out(out, "moe_out") if self.latent_size else out

    def tensors(
        self, hidden_size: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Return the tensors of each parameter, see `Part.tensors`."""
        E, X = self.latent_size or hidden_size, self.num_experts
        names = {**self.tensor_names, **names}
        mappings: dict[str, Mappings] = {}
        if self.shared is not None:
            dense = {**names, **_name_shared(names)}
            mappings |= self.shared.tensors(hidden_size, dense, layout)
        gate = names["shared_expert_gate"]
        mappings |= {
            "router": (map_tensor(names["router"], (X, hidden_size)),),
            "router_correction_bias": (map_tensor(names["router_correction_bias"], (X,)),),
            "router_expert_factor": (map_tensor(names["router_expert_factor"], (X,)),),
            "shared_expert_gate": (map_tensor(gate, (1, hidden_size)),),
        }
        for name, shape in ("moe_in", (E, hidden_size)), ("moe_out", (hidden_size, E)):
            if weight := names.get(f"{name}_proj"):
                mappings[f"{name}_proj"] = (map_tensor(weight, shape),)
                mappings[f"{name}_bias"] = (map_tensor(name_bias(weight), shape[:1]),)
        if "router_bias" in names:
            mappings["router_bias"] = (map_tensor(names["router_bias"], (X,)),)
        mappings |= self._map_experts(E, names, layout)
        if (
            layout in ("fused", "transposed")
            or layout == "family"
            and "fused_gate_up_proj" in names
        ):
            mappings |= self._map_fused(E, hidden_size, names, is_transposed=layout == "transposed")
        return mappings

    def name_pieces(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Return the tensor names of each expert and of the shared expert."""
        kinds = ("experts_gate_proj", "experts_up_proj", "experts_down_proj")
        # A name without a * is that of a tensor for all experts.
        separate = {name: self.tensor_names[name] for name in kinds if "*" not in names[name]}
        shared = {f"shared_{name}": tensor for name, tensor in _name_shared(names).items()}
        return {**names, **separate, **shared}

    def _map_experts(
        self, E: int, names: Mapping[str, str], layout: ExpertLayout
    ) -> dict[str, Mappings]:
        """Map the parameters of experts to transposed tensors or to tensors of each expert."""
        F, X = self.features, self.num_experts
        if "transposed_gate_up_proj" in names and layout != "separate":
            # In the file, matrices are [in, out]. The columns of all gates come first.
            first, last = names["transposed_gate_up_proj"], names["transposed_down_proj"]
            return _transposed_experts(first, last, (X, E, 2, F))
        if "experts_gate_up_proj" in names and layout != "separate":
            # In the file, matrices are [in, out]. Columns of the gate and the up projection
            # alternate.
            first, last = names["experts_gate_up_proj"], names["experts_down_proj"]
            bias = names["experts_gate_up_bias"]
            return {
                "experts_gate_up_proj": _all_experts(first, (X, E, F, 2), (0, 3, 2, 1), merged=2),
                "experts_gate_up_bias": _all_experts(bias, (X, F, 2), (0, 2, 1), merged=1),
                "experts_down_proj": _all_experts(last, (X, F, E), (0, 2, 1)),
                "experts_down_bias": (map_tensor(names["experts_down_bias"], (X, E)),),
            }
        has_bias = "router_bias" in names
        names = self.tensor_names if has_bias else names
        gate, up, down = (names[f"experts_{kind}_proj"] for kind in ("gate", "up", "down"))
        halves = (gate, up)[-self.activation.num_projections :]
        mappings = {
            "experts_gate_up_proj": _each_expert(X, halves, (F, E)),
            "experts_down_proj": _each_expert(X, down, (E, F)),
        }
        if has_bias:
            gate, up, down = (name.replace("weight", "bias") for name in (gate, up, down))
            mappings |= {
                "experts_gate_up_bias": _each_expert(X, (gate, up), (F,)),
                "experts_down_bias": _each_expert(X, down, (E,)),
            }
        return mappings

    def _map_fused(
        self, E: int, hidden_size: int, names: Mapping[str, str], *, is_transposed: bool
    ) -> dict[str, Mappings]:
        """Map router and experts to files with one tensor for all experts."""
        F, X = self.features, self.num_experts
        router, bias, up = (
            names[name] for name in ("router", "router_correction_bias", "experts_up_proj")
        )
        if "fused_gate_up_proj" not in names:
            router, bias, up = (
                name.replace("block_sparse_moe.", "mlp.") for name in (router, bias, up)
            )
        module = up.partition("*.")[0]  # such as "mlp.experts."
        halves = self.activation.num_projections
        first = "gate_up_proj" if halves == 2 else "up_proj"
        gate_up = names.get("fused_gate_up_proj", f"{module}{first}")
        down = names.get("fused_down_proj", f"{module}down_proj")
        experts = {
            "experts_gate_up_proj": _all_experts(
                gate_up, (X, halves, F, E), (0, 1, 2, 3), merged=1
            ),
            "experts_down_proj": _all_experts(down, (X, E, F), (0, 1, 2)),
        }
        if is_transposed:
            experts = _transposed_experts(gate_up, down, (X, E, halves, F))
        return {
            "router": (map_tensor(router, (X, hidden_size)),),
            "router_correction_bias": (map_tensor(bias, (X,)),),
            **experts,
        }


class ExpertWeights(NamedTuple):
    """Weights of a layer's experts, or of the experts that one device holds.

    Attributes:
      gate_up_proj: ``[X, 2, F, E]``, or ``[X, 1, F, E]`` without gates.
      down_proj: ``[X, E, F]``.
      gate_up_bias: ``[X, 2, F]`` or None.
      down_bias: ``[X, E]`` or None.
    """

    gate_up_proj: Matrix
    down_proj: Matrix
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class RouterArrays(NamedTuple):
    """Parameters of a router in addition to its matrix.

    Attributes:
      correction_bias: float32 ``[X]``, bias that is added to the scores when experts are chosen;
        None for no bias.
      expert_scale: floating point ``[X]``, factor of each expert's weight; None for 1.
    """

    correction_bias: jax.Array | None = None
    expert_scale: jax.Array | None = None


class Routes(NamedTuple):
    """Chosen experts of each token, and their weights.

    Attributes:
      experts: i32 ``[N, k]``, indices of the experts of each token, without repetition. The value
        X, the number of experts on this device, means that no expert of this device is used.
      weights: float32 ``[N, k]``, weight of each chosen expert. It multiplies the output of the
        expert, or the input, see `Router.scales_inputs`.
    """

    experts: jax.Array
    weights: jax.Array


def route(
    logits: jax.Array,
    num_chosen: int,
    router: Router = SOFTMAX_ROUTER,
    arrays: RouterArrays | None = None,
    *,
    renormalise: bool,
    is_token: jax.Array | None = None,
    local_experts: tuple[jax.Array | int, int] | None = None,
    backend: str | None = None,
) -> Routes:
    """Choose the experts of each token, and compute their weights.

    1. Compute the scores of all experts from the logits.
    2. Compute a key for each expert: its score plus the correction bias, or -inf outside of the
       chosen groups. Choose the experts with the largest keys. Among equal keys, the expert with
       the lower index is chosen.
    3. Compute the weights from the scores of the chosen experts.

    If keys and logits have the same order, logits are used as keys. Scores are then computed only
    as far as the weights require it.

    Args:
      logits: float32 ``[N, X]``, output of the router for each token and expert.
      num_chosen: number of experts per token (k).
      router: options of the router; by default a softmax router without groups.
      arrays: additional parameters of the router; None if it has none.
      renormalise: whether the weights are divided by their sum.
      is_token: bool ``[N]``, False for padding tokens, which use no expert; None if there is no
        padding.
      local_experts: if experts are divided over devices, the index of the first expert on this
        device, and the number of experts on it; otherwise None. The returned indices then count
        from this first expert, and experts on other devices become "no expert", see `Routes`.
      backend: see `sum_rows`.

    Example:
      >>> routes = route(jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]])), 2, renormalise=False)
      >>> routes.experts.tolist(), routes.weights.round(3).tolist()
      ([[1, 2]], [[0.4000000059604645, 0.30000001192092896]])
    """
    X = logits.shape[1]
    first, num_local = (0, X) if local_experts is None else local_experts
    local_ids = jnp.arange(X, dtype=jnp.int32) - first
    local_ids = jnp.where((local_ids >= 0) & (local_ids < num_local), local_ids, num_local)[None]
    if is_token is not None:
        local_ids = jnp.where(is_token[:, None], local_ids, num_local)
    bias, scale = arrays or (None, None)
    factors = () if scale is None else (scale.astype(jnp.float32)[None],)

    if router.follows_logits:
        experts, top, *factors = _choose(logits, num_chosen, local_ids, logits, *factors)
        weights = _weights_of_logits(logits, top, router, backend, renormalise=renormalise)
    else:
        scores = _scores(logits, router, backend)
        keys = _keys(scores, router, bias)
        experts, weights, *factors = _choose(keys, num_chosen, local_ids, scores, *factors)
        if renormalise:
            weights = weights / (_sum_in_order(weights[..., None]) + router.epsilon)
    if router.factor != 1:
        weights = weights * router.factor
    for factor in factors:
        weights = weights * factor
    return Routes(experts, weights)


def _choose(keys: jax.Array, num_chosen: int, *values: jax.Array) -> tuple[jax.Array, ...]:
    """Choose the k experts with the largest keys, and gather their elements of other arrays.

    Keys are float32 ``[N, X]``. From each array in `values`, ``[N, X]`` or ``[1, X]``, the elements
    of the chosen experts are gathered: ``[N, k]``, in descending order of the keys.

    For few tokens, the rank of an expert is found by comparing its key with all other keys. XLA can
    fuse this with the surrounding operations, which is not possible for the sort in
    `jax.lax.top_k`.
    """
    N, X = keys.shape
    if N * X * X > _MAX_COMPARISONS:
        _, choices = lax.top_k(keys, num_chosen)
        values = tuple(jnp.broadcast_to(value, (N, X)) for value in values)
        return tuple(jnp.take_along_axis(value, choices, axis=1) for value in values)
    index = jnp.arange(X, dtype=jnp.int32)
    this, other = keys[:, :, None], keys[:, None]
    is_before = (other > this) | ((other == this) & (index[None] < index[:, None])[None])
    ranks = jnp.sum(is_before, axis=2, dtype=jnp.int32)
    is_choice = ranks[:, None] == jnp.arange(num_chosen, dtype=jnp.int32)[None, :, None]
    return tuple(jnp.sum(jnp.where(is_choice, value[:, None], 0), axis=2) for value in values)


def _weights_of_logits(
    logits: jax.Array,
    top: jax.Array,
    router: Router,
    backend: str | None,
    *,
    renormalise: bool,
) -> jax.Array:
    """Return the weights ``[N, k]`` of the chosen experts, which have the largest logits.

    ``logits [N, X]`` are the logits of all experts. ``top [N, k]`` are the logits of the chosen
    experts in descending order. Both are float32.
    """
    if router.scores == "sigmoid":
        weights = jax.nn.sigmoid(top)
        return (
            weights / (_sum_in_order(weights[..., None]) + router.epsilon)
            if renormalise
            else weights
        )
    shifted = jnp.exp(top - top[:, :1])
    if renormalise:
        return shifted / _sum_in_order(shifted[..., None])
    return shifted / sum_rows(jnp.exp(logits - top[:, :1]), backend=backend)


def _scores(logits: jax.Array, router: Router, backend: str | None) -> jax.Array:
    if router.scores == "sigmoid":
        return jax.nn.sigmoid(logits)
    exponentials = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return exponentials / sum_rows(exponentials, backend=backend)


def _keys(scores: jax.Array, router: Router, bias: jax.Array | None) -> jax.Array:
    """Return a key for each token and expert, float32 ``[N, X]``.

    `route` chooses the experts with the largest keys. A key is the score plus the correction bias,
    or -inf for experts outside of the chosen groups.
    """
    keys = scores if bias is None else scores + bias.astype(jnp.float32)[None]
    if router.num_chosen_groups == router.num_groups:
        return keys
    N, X = keys.shape
    grouped = keys.reshape(N, router.num_groups, -1)
    group_scores = jnp.max(grouped, axis=2)
    if router.group_score == "top2":
        is_best = jnp.arange(grouped.shape[2])[None, None] == jnp.argmax(grouped, axis=2)[..., None]
        group_scores += jnp.max(jnp.where(is_best, -jnp.inf, grouped), axis=2)
    groups = jnp.arange(router.num_groups, dtype=jnp.int32)[None]
    [chosen] = _choose(group_scores, router.num_chosen_groups, groups)
    is_chosen = jnp.any(chosen[:, None] == groups[..., None], axis=2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(N, X)


def apply_experts(
    x: jax.Array,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: GatedActivation,
    scales_inputs: bool = False,
    backend: str | None = None,
) -> jax.Array:
    """Run the chosen experts of each token, and return the weighted sum of their outputs.

    Args:
      x: float32 ``[N, E]``, input of each token.
      routes: chosen experts and their weights, the result of `route`.
      weights: weights of the X experts on this device.
      activation: function of the gate and up projections, each float32 ``[rows, F]``. If the
        experts have no gates, both arguments are the same array.
      scales_inputs: whether the weights in `routes` multiply the inputs of the experts instead of
        their outputs.
      backend: see `grouped_linear`.

    Returns:
      float32 ``[N, E]``; 0 for tokens without an expert on this device, for which nothing is
      computed.
    """
    k = routes.experts.shape[1]
    X = weights.gate_up_proj.shape[0]
    order, positions = sort_by_expert(routes.experts)
    expert_ids = jnp.arange(X, dtype=jnp.int32)[:, None, None]
    sizes = jnp.sum(routes.experts[None] == expert_ids, axis=(1, 2), dtype=jnp.int32)
    expert = jnp.minimum(routes.experts.reshape(-1)[order], X - 1)

    def project(rows: jax.Array, w: Matrix, bias: jax.Array | None) -> jax.Array:
        out = grouped_linear(rows, w, sizes, backend=backend)
        return out if bias is None else out + bias[expert].astype(jnp.float32)

    inputs = x[order // k]
    if scales_inputs:
        inputs = inputs * routes.weights.reshape(-1)[order][:, None]
    hidden = project(inputs, weights.gate_up_proj, weights.gate_up_bias)
    hidden = activation(hidden[:, 0], hidden[:, -1])
    out = project(hidden, weights.down_proj, weights.down_bias)
    of_tokens = jnp.where((routes.experts < X)[..., None], out[positions], 0)
    if not scales_inputs:
        of_tokens = rounded(of_tokens * routes.weights[..., None], backend)
    return _sum_in_order(of_tokens)


def sort_by_expert(experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the stable order that sorts the chosen experts by index, and the inverse order.

    A small number of choices is sorted by comparing all pairs. On a GPU, this takes two kernel
    launches instead of five.

    Args:
      experts: i32 ``[N, k]``, chosen experts of each token.

    Returns:
      The indices into the flattened `experts` in sorted order, i32 ``[N k]``, and the position of
      each element of `experts` in this order, i32 ``[N, k]``.

    Example:
      >>> [array.tolist() for array in sort_by_expert(jnp.array([[3, 0], [1, 3], [0, 1]]))]
      [[1, 4, 2, 5, 0, 3], [[4, 0], [2, 5], [1, 3]]]
    """
    index, flat = jnp.arange(experts.size, dtype=jnp.int32), experts.reshape(-1)
    if experts.size**2 > _MAX_COMPARISONS:
        order = jnp.argsort(flat)
        return order, jnp.zeros_like(index).at[order].set(index).reshape(experts.shape)
    this, other = flat[:, None], flat[None]
    # With `where`, XLA fuses condition and sum into one GPU kernel. With `|` it makes two.
    is_before = jnp.where(index[None] < index[:, None], other <= this, other < this)
    positions = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(positions[None] == index[:, None], index[None], 0), axis=1)
    return order, positions.reshape(experts.shape)


def _sum_in_order(x: jax.Array) -> jax.Array:
    """Sum over the second dimension, in an order that does not depend on the first dimension.

    Results are then the same for all batch sizes.
    """
    return functools.reduce(operator.add, (x[:, i] for i in range(x.shape[1])))


def _name_shared(names: Mapping[str, str]) -> dict[str, str]:
    """Return the tensor names of the projections of the shared expert.

    A family that lists ``gate_up_proj`` also names ``down_proj`` in another way.
    """
    kinds = ("gate_proj", "up_proj", "down_proj")
    shared = {name: f"{names['shared_expert']}.{name}.weight" for name in kinds}
    return shared | ({"down_proj": names["down_proj"]} if "gate_up_proj" in names else {})


def _all_experts(
    tensor: str, split: tuple[int, ...], axes: tuple[int, ...], merged: int | None = None
) -> Mappings:
    """Return the mapping of a parameter that is stored as one tensor for all experts.

    Args:
      tensor: name of the tensor.
      split: shape of the tensor. If it holds both the gate and the up projection, a dimension of
        size 2 separates them.
      axes: for each dimension of the parameter, the index of the dimension in `split`.
      merged: index of a dimension of `split` that the file merges with the next dimension; None if
        the file merges no dimensions.
    """
    shape, split_shape = tuple(split[axis] for axis in axes), None
    if merged is not None:
        split, split_shape = (
            (*split[:merged], math.prod(split[merged : merged + 2]), *split[merged + 2 :]),
            split,
        )
    return (
        TensorMapping(tensor, split, shape, (0,) * len(shape), axes=axes, split_shape=split_shape),
    )


def _transposed_experts(gate_up: str, down: str, split: tuple[int, ...]) -> dict[str, Mappings]:
    """Return the mappings of experts to two tensors whose matrices are [in, out].

    `split` is the shape ``[X, E, 2, F]`` of the first tensor, in which all gates come first, with
    its last dimension split. Without gates, 2 is 1.
    """
    X, E, _, F = split
    return {
        "experts_gate_up_proj": _all_experts(gate_up, split, (0, 2, 3, 1), merged=2),
        "experts_down_proj": _all_experts(down, (X, F, E), (0, 2, 1)),
    }


def _each_expert(
    num_experts: int, tensors: str | tuple[str, ...], shape: tuple[int, ...]
) -> Mappings:
    """Return the mappings of a parameter that is stored as separate tensors for each expert.

    `tensors` is the name of an expert's tensor, or the names of several tensors to stack. A ``*``
    in a name stands for the index of the expert. `shape` is the shape of each tensor.
    """
    parts, lead = ((tensors,), (1,)) if isinstance(tensors, str) else (tensors, (1, 1))
    return tuple(
        map_tensor(
            tensor.replace("*", str(expert)),
            shape,
            (*lead, *shape),
            (*(expert, part)[: len(lead)], *[0] * len(shape)),
        )
        for expert in range(num_experts)
        for part, tensor in enumerate(parts)
    )
