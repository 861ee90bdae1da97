"""Experts: MLPs of which each token passes through a few, chosen by a router (arXiv 1701.06538).

The tokens' choices are sorted by expert, so that the rows of an expert lie together, and each goes
through the weights of its own; those of experts that nobody chose are not read::

    tokens          0        1        2          x [N, E]
    chosen        b   d    a   b    b   d        k = 2 of X = 4 experts
    rows          a | b  b  b | d  d             [N k, E], sorted
    of tokens     1   0  1  2   0  2

Rows of tokens that are left out, and on one of several devices those of experts that are another's,
come last and belong to nobody.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from paged_jax.kernels import cpu, grouped_linear
from paged_jax.models.config import LlamaConfig
from paged_jax.models.linear import linear
from paged_jax.models.mlp import ACTIVATIONS
from paged_jax.models.part import Part
from paged_jax.models.weight import Weight


class ExpertWeights(NamedTuple):
    """The experts of a layer, or those of them that a device has.

    Attributes:
      gate_up_proj: ``[X, 2, F, E]``, a `Weight` of floats.
      down_proj: ``[X, E, F]``, likewise.
      gate_up_bias: None, or ``[X, 2, F]``.
      down_bias: None, or ``[X, E]``.
    """

    gate_up_proj: Weight
    down_proj: Weight
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class Routes(NamedTuple):
    """Which experts tokens pass through.

    Attributes:
      experts: i32 ``[N, k]``, of each token distinct ones.
      weights: float32 ``[N, k]``, of what they give.
    """

    experts: jax.Array
    weights: jax.Array


def add_experts(
    layer: nnx.Module,
    config: LlamaConfig,
    matrix: Callable[..., None],
    to_residual: Any,
    part: Part | None,
    dtype: Any,
) -> None:
    """Give a layer the weights of its router and its experts.

    Several devices divide all that begins with ``experts_`` along its first dimension, the experts,
    and have the rest whole::

        router                [X, E]          router_bias           [X]
        experts_gate_up_proj  [X, 2, F, E]    experts_gate_up_bias  [X, 2, F]    gate, up
        experts_down_proj     [X, E, F]       experts_down_bias     [X, E]
        shared_expert_gate    [1, E]          of the MLP that all tokens pass through, if any

    Args:
      layer: gets the biases.
      config: sizes and switches.
      matrix: function of a name, a shape and perhaps an initialiser, which adds a parameter.
      to_residual: the initialiser of what projects into the residual stream.
      part: None, or which part of a model the layer is of.
      dtype: type of the matrices.

    Raises:
      ValueError: it is int8.
    """
    if jnp.dtype(dtype) == jnp.int8:
        raise ValueError(
            "Llama: dtype must be float32, bfloat16 or float16 for a model with experts, got int8."
        )
    E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
    num_here = X if part is None else X // part.num_devices
    matrix("router", X, E)
    matrix("experts_gate_up_proj", num_here, 2, F, E)
    matrix("experts_down_proj", num_here, E, F, init=to_residual)
    if config.shared_expert_intermediate_size:
        matrix("shared_expert_gate", 1, E)
    if config.expert_bias:
        shapes = {
            "router": (X,),
            "experts_gate_up": (num_here, 2, F),
            "experts_down": (num_here, E),
        }
        for name, shape in shapes.items():
            setattr(layer, f"{name}_bias", nnx.Param(jnp.zeros(shape, dtype)))


def experts(
    layer: Any,
    weight: Callable[[str], Weight],
    x: jax.Array,
    is_token: jax.Array | None,
    backend: str | None,
) -> jax.Array:
    """Run the experts of a layer, of all or of one of several devices, whose results add up.

    Args:
      layer: has the biases, the config and the part.
      weight: function of a matrix's name.
      x: float32 ``[..., E]``, normed.
      is_token: None, or bool ``[...]``; what other rows give is 0.
      backend: of the products, see `linear`.

    Returns:
      float32 ``[..., E]``.
    """
    config, part = layer.config, layer.part
    rows = x.reshape(-1, x.shape[-1])
    logits = linear(rows, weight("router"), backend=backend)
    biases = (None, None)
    if config.expert_bias:
        logits = logits + layer.router_bias[...].astype(jnp.float32)[None]
        biases = layer.experts_gate_up_bias[...], layer.experts_down_bias[...]
    weights = ExpertWeights(weight("experts_gate_up_proj"), weight("experts_down_proj"), *biases)
    out = apply_experts(
        rows,
        route(logits, config.num_experts_per_tok, renormalise=config.norm_topk_prob),
        weights,
        activation=_activation(config),
        first_expert=0 if part is None else part.index * weights.down_proj.values.shape[0],
        is_token=None if is_token is None else is_token.reshape(-1),
        backend=backend,
    )
    return out.reshape(x.shape)


def _activation(config: LlamaConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if config.swiglu_limit is None:
        return lambda gate, up: ACTIVATIONS[config.hidden_act](gate) * up
    return functools.partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)


def route(logits: jax.Array, num_chosen: int, *, renormalise: bool) -> Routes:
    """Choose the experts with the largest logits, and weigh them by a softmax.

    Args:
      logits: float32 ``[N, X]``, of each token for each expert.
      num_chosen: k, experts of a token.
      renormalise: whether the weights of the chosen add up to 1, which is the softmax over them,
        or are their parts of the softmax over all.

    Example:
      >>> routes = route(jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]])), 2, renormalise=False)
      >>> routes.experts.tolist(), routes.weights.round(3).tolist()
      ([[1, 2]], [[0.4000000059604645, 0.30000001192092896]])
    """
    top, experts = lax.top_k(logits, num_chosen)
    # Added up in an order that does not depend on the number of rows, see `cpu.sum_rows`.
    shifted = jnp.exp(top - top[:, :1])
    if renormalise:
        total = sum(shifted[:, i : i + 1] for i in range(1, num_chosen)) + shifted[:, :1]
    else:
        all_shifted = jnp.exp(logits - top[:, :1])
        is_few = cpu.is_few(logits.shape[0])
        total = cpu.sum_rows(all_shifted) if is_few else all_shifted.sum(-1, keepdims=True)
    return Routes(experts, shifted / total)


def apply_experts(
    x: jax.Array,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    first_expert: jax.Array | int = 0,
    is_token: jax.Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """What the chosen experts make of each token, weighed and added up.

    Args:
      x: float32 ``[N, E]``.
      routes: of `route`.
      weights: of the experts `first_expert` and following.
      activation: from gates and ups float32 ``[..., F]`` to what is projected down.
      first_expert: which expert the first of the weights is. Others than those that are here add
        nothing.
      is_token: None, or bool ``[N]``; the other rows add nothing, cost no expert, and give 0.
      backend: see `grouped_linear`.

    Returns:
      float32 ``[N, E]``.
    """
    N, k = routes.experts.shape
    X = weights.gate_up_proj.values.shape[0]
    owner = routes.experts - first_expert
    is_here = (owner >= 0) & (owner < X)
    if is_token is not None:
        is_here &= is_token[:, None]
    owner = jnp.where(is_here, owner, X).reshape(-1)
    order = jnp.argsort(owner)  # stable
    all_experts = jnp.arange(X, dtype=jnp.int32)[None]
    sizes = jnp.sum(owner[:, None] == all_experts, axis=0, dtype=jnp.int32)
    sorted_owner = jnp.minimum(owner[order], X - 1)

    def product(rows: jax.Array, w: Weight, bias: jax.Array | None) -> jax.Array:
        out = _grouped_product(rows, w, sizes, backend)
        return out if bias is None else out + bias[sorted_owner].astype(jnp.float32)

    hidden = product(x[order // k], weights.gate_up_proj, weights.gate_up_bias)
    hidden = activation(hidden[:, 0], hidden[:, 1])
    out = product(hidden, weights.down_proj, weights.down_bias)

    place = jnp.zeros_like(order).at[order].set(jnp.arange(N * k, dtype=order.dtype))
    of_tokens = jnp.where(is_here[..., None], out[place.reshape(N, k)], 0)
    weighed = of_tokens * routes.weights[..., None]
    # One after the other, so that the order does not depend on N.
    return sum((weighed[:, i] for i in range(1, k)), weighed[:, 0])


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, alpha: float, limit: float) -> jax.Array:
    """The activation of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``, both clamped before.

    Args:
      gate: at most `limit`, else clamped.
      up: within `limit` of 0, else clamped.
      alpha: steepness of the sigmoid.
      limit: of the values.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def _grouped_product(x: jax.Array, w: Weight, sizes: jax.Array, backend: str | None) -> jax.Array:
    """As `linear`, of rows ``[R, in]`` by weights ``[X, *out, in]`` to ``[R, *out]``."""
    X, *out, num_inputs = w.values.shape
    stack = None
    if w.stack is not None:
        values = w.stack.values
        layer = jnp.asarray(w.stack.layer, jnp.int32)
        stack = values.reshape(values.shape[0], X, -1, num_inputs), layer
    y = grouped_linear(x, w.values.reshape(X, -1, num_inputs), sizes, stack=stack, backend=backend)
    return y.reshape(x.shape[0], *out)
