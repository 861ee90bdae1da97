"""The MLP of a layer: dense, or a mixture of experts (MoE, arXiv 1701.06538).

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

import functools
import operator
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.linear import Matrix, grouped_linear, sum_rows
from paged_jax.kernels.norm_rope import ACTIVATIONS, add_bias
from paged_jax.models.config import LlamaConfig
from paged_jax.models.family import SOFTMAX_ROUTER, Router
from paged_jax.models.matrices import LayerParameters
from paged_jax.models.tensor_parallel import DeviceShard

# Maximum number of comparisons with which `_choose` and `sort_by_expert` compare all pairs instead
# of sorting. It is enough for 64 tokens with 128 experts, or for 64 tokens with 16 chosen experts
# each.
_MAX_COMPARISONS = 1 << 20

# Function of the gate and up projections, both float32 ``[..., F]``, that returns the activation.
GatedActivation = Callable[[jax.Array, jax.Array], jax.Array]


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


def gated_mlp(
    config: LlamaConfig,
    x: jax.Array,
    weights: LayerParameters,
    mean_over_devices: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Run the dense MLP or the shared expert of a layer.

    The normalised input ``x [..., E]`` and the result ``[..., E]`` are float32. If the features are
    divided over devices, `mean_over_devices` returns the mean of its argument over these devices;
    otherwise it is None.
    """
    hidden, factors = weights.linear(x, "gate_up_proj"), config.multipliers
    if config.mlp_bias:
        hidden = add_bias(hidden, weights.vector("gate_up_bias"))
    gate = hidden[..., 0, :]
    gate = gate if factors.mlp_gate == 1 else gate * factors.mlp_gate
    if config.activation_sparsity:
        gate = _keep_largest(gate, config.activation_sparsity[0], mean_over_devices)
    activation = ACTIVATIONS[config.hidden_act](gate)
    hidden = activation * hidden[..., 1, :] if config.gated_mlp else activation
    out = project_out(hidden, weights, "down")
    return out if factors.mlp_out == 1 else out * factors.mlp_out


def project_out(x: jax.Array, weights: LayerParameters, name: str) -> jax.Array:
    """Multiply `x` by the matrix ``{name}_proj``, and add ``{name}_bias`` if the layer has it.

    With tensor parallelism, the caller adds the results of all devices. Therefore, each device adds
    only its share of the bias.
    """
    out, bias = weights.linear(x, f"{name}_proj"), weights.optional(f"{name}_bias")
    if bias is None:
        return out
    shard = weights.layer.shard
    return add_bias(out, bias.astype(jnp.float32) / (1 if shard is None else shard.num_devices))


def _keep_largest(
    gate: jax.Array,
    sparsity: float,
    mean_over_devices: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Subtract a threshold from the gates ``[..., F]``, and set negative results to 0.

    The threshold is computed from mean and standard deviation of a token's gates. If the gates are
    normally distributed, a fraction `sparsity` of them is below the threshold.
    """
    mean = sum_rows(gate) / gate.shape[-1]
    square = sum_rows(jnp.square(gate)) / gate.shape[-1]
    if mean_over_devices is not None:
        means = mean_over_devices(jnp.concatenate([mean, square], axis=-1))
        mean, square = means[..., :1], means[..., 1:]
    deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), 0))
    return jax.nn.relu(gate - mean - deviation * statistics.NormalDist().inv_cdf(sparsity))


def routed_experts(
    config: LlamaConfig,
    x: jax.Array,
    router_input: jax.Array,
    weights: LayerParameters,
    *,
    is_token: jax.Array | None,
    shard: DeviceShard | None,
) -> jax.Array:
    """Run the router of a layer, and then the chosen experts of each token.

    Args:
      config: configuration of the layer.
      x: float32 ``[..., E]``, normalised input of the experts.
      router_input: float32 ``[..., E]``, normalised input of the router.
      weights: parameters of the layer.
      is_token: bool ``[...]``, False for padding tokens, whose output is 0; None if there is no
        padding.
      shard: this device's share of a tensor-parallel model; None if this device has all experts.

    Returns:
      float32 ``[..., E]``. With `shard`, this is only the sum over the experts of this device. The
      caller must add the results of all devices.
    """
    logits = weights.linear(router_input, "router")
    matrices = weights.matrix("experts_gate_up_proj"), weights.matrix("experts_down_proj")
    biases = (None, None)
    if config.expert_bias:
        logits = add_bias(logits, weights.vector("router_bias"))
        biases = weights.vector("experts_gate_up_bias"), weights.vector("experts_down_bias")
    num_local = matrices[1].shape[0]
    routes = route(
        logits.reshape(-1, logits.shape[-1]),
        config.num_experts_per_tok,
        config.router,
        RouterArrays(*map(weights.optional, ("router_correction_bias", "router_expert_factor"))),
        renormalise=config.norm_topk_prob,
        is_token=None if is_token is None else is_token.reshape(-1),
        local_experts=None if shard is None else (shard.index * num_local, num_local),
    )
    inputs = weights.linear(x, "moe_in_proj") if config.moe_latent_size else x
    if config.moe_latent_size and config.mlp_bias:
        inputs = add_bias(inputs, weights.vector("moe_in_bias"))
    out = apply_experts(
        inputs.reshape(-1, inputs.shape[-1]),
        routes,
        ExpertWeights(*matrices, *biases),
        activation=_gated_activation(config),
        scales_inputs=config.router.scales_inputs,
        backend=weights.backend,
    )
    out = out.reshape(inputs.shape)
    return project_out(out, weights, "moe_out") if config.moe_latent_size else out


def _gated_activation(config: LlamaConfig) -> GatedActivation:
    if not config.gated_mlp:
        return lambda features, _: ACTIVATIONS[config.hidden_act](features)
    if config.swiglu_limit is None:
        return lambda gate, up: ACTIVATIONS[config.hidden_act](gate) * up
    return functools.partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, alpha: float, limit: float) -> jax.Array:
    """Compute the activation of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Args:
      gate: floating point ``[..., F]``. It is first clamped to at most `limit`.
      up: floating point ``[..., F]``. It is first clamped to ``[-limit, limit]``.
      alpha: factor inside the sigmoid.
      limit: bound for clamping `gate` and `up`.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def route(
    logits: jax.Array,
    num_chosen: int,
    router: Router = SOFTMAX_ROUTER,
    arrays: RouterArrays | None = None,
    *,
    renormalise: bool,
    is_token: jax.Array | None = None,
    local_experts: tuple[jax.Array | int, int] | None = None,
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

    Example:
      >>> routes = route(jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]])), 2, renormalise=False)
      >>> routes.experts.tolist(), routes.weights.round(3).tolist()
      ([[1, 2]], [[0.4000000059604645, 0.30000001192092896]])
    """
    X = logits.shape[1]
    first, num_local = (0, X) if local_experts is None else local_experts
    numbers = jnp.arange(X, dtype=jnp.int32) - first
    numbers = jnp.where((numbers >= 0) & (numbers < num_local), numbers, num_local)[None]
    if is_token is not None:
        numbers = jnp.where(is_token[:, None], numbers, num_local)
    bias, scale = arrays or (None, None)
    others = () if scale is None else (scale.astype(jnp.float32)[None],)

    if router.follows_logits:
        experts, top, *others = _choose(logits, num_chosen, numbers, logits, *others)
        weights = _weights_of_logits(logits, top, router, renormalise=renormalise)
    else:
        scores = _scores(logits, router)
        keys = _keys(scores, router, bias)
        experts, weights, *others = _choose(keys, num_chosen, numbers, scores, *others)
        if renormalise:
            weights = weights / (_sum_in_order(weights[..., None]) + router.epsilon)
    if router.factor != 1:
        weights = weights * router.factor
    for factor in others:
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
    logits: jax.Array, top: jax.Array, router: Router, *, renormalise: bool
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
    return shifted / sum_rows(jnp.exp(logits - top[:, :1]))


def _scores(logits: jax.Array, router: Router) -> jax.Array:
    if router.scores == "sigmoid":
        return jax.nn.sigmoid(logits)
    exponentials = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return exponentials / sum_rows(exponentials)


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
    order, places = sort_by_expert(routes.experts)
    numbers = jnp.arange(X, dtype=jnp.int32)[:, None, None]
    sizes = jnp.sum(routes.experts[None] == numbers, axis=(1, 2), dtype=jnp.int32)
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
    of_tokens = jnp.where((routes.experts < X)[..., None], out[places], 0)
    return _sum_in_order(of_tokens if scales_inputs else of_tokens * routes.weights[..., None])


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
    places = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(places[None] == index[:, None], index[None], 0), axis=1)
    return order, places.reshape(experts.shape)


def _sum_in_order(x: jax.Array) -> jax.Array:
    """Sum over the second dimension, in an order that does not depend on the first dimension.

    Results are then the same for all batch sizes.
    """
    return functools.reduce(operator.add, (x[:, i] for i in range(x.shape[1])))
