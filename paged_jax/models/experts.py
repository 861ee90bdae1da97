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
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from paged_jax.kernels.linear import Weight, grouped_linear, linear, sum_rows
from paged_jax.models.config import LlamaConfig
from paged_jax.models.mlp import ACTIVATIONS
from paged_jax.models.part import Part

# Up to so many comparisons take the place of a sort: for 64 tokens 128 experts, or 16 choices each.
_MAX_COMPARISONS = 1 << 20


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
    """Which of X experts tokens pass through.

    Attributes:
      experts: i32 ``[N, k]``, of each token distinct ones; X for what passes through none of them.
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
    num_here = weights.down_proj.values.shape[0]
    routes = route(
        logits,
        config.num_experts_per_tok,
        renormalise=config.norm_topk_prob,
        is_token=None if is_token is None else is_token.reshape(-1),
        here=None if part is None else (part.index * num_here, num_here),
    )
    out = apply_experts(rows, routes, weights, activation=_activation(config), backend=backend)
    return out.reshape(x.shape)


def _activation(config: LlamaConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if config.swiglu_limit is None:
        return lambda gate, up: ACTIVATIONS[config.hidden_act](gate) * up
    return functools.partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit)


def route(
    logits: jax.Array,
    num_chosen: int,
    *,
    renormalise: bool,
    is_token: jax.Array | None = None,
    here: tuple[jax.Array | int, int] | None = None,
) -> Routes:
    """Choose the experts with the largest logits, of equal ones the first, and weigh them.

    Of few tokens each expert is compared with all others and its rank is counted, so that XLA can
    fuse what comes before and after; into a sort, which `jax.lax.top_k` is, it fuses nothing.

    Args:
      logits: float32 ``[N, X]``, of each token for each expert.
      num_chosen: k, experts of a token.
      renormalise: whether the weights are a softmax over the chosen, or over all.
      is_token: None, or bool ``[N]``; the other rows pass through no expert.
      here: None, or which expert is the first of those that are here, and how many these are. They
        are counted from 0 then, and what passes through others through none.

    Example:
      >>> routes = route(jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]])), 2, renormalise=False)
      >>> routes.experts.tolist(), routes.weights.round(3).tolist()
      ([[1, 2]], [[0.4000000059604645, 0.30000001192092896]])
    """
    N, X = logits.shape
    first, num_here = (0, X) if here is None else here
    index = jnp.arange(X, dtype=jnp.int32)
    numbers = index - first
    numbers = jnp.where((numbers >= 0) & (numbers < num_here), numbers, num_here)[None]
    if is_token is not None:
        numbers = jnp.where(is_token[:, None], numbers, num_here)

    if N * X * X <= _MAX_COMPARISONS:
        this, other = logits[:, :, None], logits[:, None]
        is_before = (other > this) | ((other == this) & (index[None] < index[:, None])[None])
        ranks = jnp.sum(is_before, axis=2, dtype=jnp.int32)
        is_choice = ranks[:, None] == jnp.arange(num_chosen, dtype=jnp.int32)[None, :, None]
        experts = jnp.sum(jnp.where(is_choice, numbers[:, None], 0), axis=2)
        top = jnp.sum(jnp.where(is_choice, logits[:, None], 0), axis=2)
    else:
        top, choices = lax.top_k(logits, num_chosen)
        experts = jnp.take_along_axis(jnp.broadcast_to(numbers, (N, X)), choices, axis=1)

    shifted = jnp.exp(top - top[:, :1])
    if renormalise:
        total = _sum_in_order(shifted[..., None])
    else:
        total = sum_rows(jnp.exp(logits - top[:, :1]))
    return Routes(experts, shifted / total)


def apply_experts(
    x: jax.Array,
    routes: Routes,
    weights: ExpertWeights,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    backend: str | None = None,
) -> jax.Array:
    """What the chosen experts make of each token, weighed and added up.

    Args:
      x: float32 ``[N, E]``.
      routes: of `route`.
      weights: of X experts.
      activation: from gates and ups float32 ``[..., F]`` to what is projected down.
      backend: see `grouped_linear`.

    Returns:
      float32 ``[N, E]``, 0 for tokens that pass through none of these experts, which cost nothing.
    """
    k = routes.experts.shape[1]
    X = weights.gate_up_proj.values.shape[0]
    order, places = sort_rows(routes.experts)
    numbers = jnp.arange(X, dtype=jnp.int32)[:, None, None]
    sizes = jnp.sum(routes.experts[None] == numbers, axis=(1, 2), dtype=jnp.int32)
    expert = jnp.minimum(routes.experts.reshape(-1)[order], X - 1)

    def product(rows: jax.Array, w: Weight, bias: jax.Array | None) -> jax.Array:
        out = _grouped_product(rows, w, sizes, backend)
        return out if bias is None else out + bias[expert].astype(jnp.float32)

    hidden = product(x[order // k], weights.gate_up_proj, weights.gate_up_bias)
    hidden = activation(hidden[:, 0], hidden[:, 1])
    out = product(hidden, weights.down_proj, weights.down_bias)
    of_tokens = jnp.where((routes.experts < X)[..., None], out[places], 0)
    return _sum_in_order(of_tokens * routes.weights[..., None])


def sort_rows(experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How choices are sorted by expert, those of an expert in their own order.

    Args:
      experts: i32 ``[N, k]``.

    Returns:
      The choices in that order, i32 ``[N k]``, and the place of each in it, i32 ``[N, k]``.

    Few are compared with each other, which for a GPU is two launches in place of five.

    Example:
      >>> [array.tolist() for array in sort_rows(jnp.array([[3, 0], [1, 3], [0, 1]]))]
      [[1, 4, 2, 5, 0, 3], [[4, 0], [2, 5], [1, 3]]]
    """
    index, flat = jnp.arange(experts.size, dtype=jnp.int32), experts.reshape(-1)
    if experts.size**2 > _MAX_COMPARISONS:
        order = jnp.argsort(flat)  # stable
        return order, jnp.zeros_like(index).at[order].set(index).reshape(experts.shape)
    this, other = flat[:, None], flat[None]
    # XLA makes one kernel for GPUs of this and the sum, and two of an "or" of conditions.
    is_before = jnp.where(index[None] < index[:, None], other <= this, other < this)
    places = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(places[None] == index[:, None], index[None], 0), axis=1)
    return order, places.reshape(experts.shape)


def _sum_in_order(x: jax.Array) -> jax.Array:
    """The sum over the second dimension, in an order that does not depend on the first."""
    return functools.reduce(operator.add, (x[:, i] for i in range(x.shape[1])))


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
