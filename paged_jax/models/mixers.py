"""Forward computation of recurrent layers (mixers).

A mixer replaces attention in a layer. It projects the normalised hidden states, passes a
`Recurrence` to `attend`, which runs it on the states in the cache, and applies a gate to the
output::

    x ---> projections ---> Recurrence: convolution, recurrence over a state ---> gate ---> out_proj
                |                                                                   ^
                +-------------------------------------------------------------------+

`mixer_sizes` lists the parameters.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from paged_jax.kernels.norm_rope import ACTIVATIONS, add_bias, expand, mean_square, rms_norm
from paged_jax.kernels.recurrent import causal_convolution, delta_rule, state_space
from paged_jax.models.layer_attention import Recurrence, States
from paged_jax.models.matrices import LayerParameters
from paged_jax.models.mixer_sizes import (
    GatedDeltaNet,
    KimiDelta,
    Mamba2,
    Mixer,
    Shape,
    ShortConvolution,
)

Arrays = tuple[jax.Array, ...]

# Initial time step of ``mixer_time`` in a new model.
_TIME_STEP = 0.01
# Constant added to the sum of squares of queries and keys of the delta rule.
_L2_EPS = 1e-6


class Mixed(NamedTuple):
    """Result of `mix`: the recurrence of a layer, and the function to apply to its output.

    Attributes:
      recurrence: the recurrence, to be passed to `attend`.
      finish: function that converts the output of the recurrence to the input of
        ``mixer_out_proj``.
    """

    recurrence: Recurrence
    finish: Callable[[jax.Array], jax.Array]


def mix(sizes: Mixer, x: jax.Array, weights: LayerParameters) -> Mixed:
    """Project a layer's normalised inputs ``x [..., E]`` to the inputs of its recurrence.

    The recurrence is returned, but not run: the caller passes it to `attend`.
    """
    return _MIX[type(sizes)](sizes, x, weights)


def initial_vector(name: str, shape: Shape, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Return the initial values of a mixer's parameter that is not a matrix.

    `Layer` initialises the matrices. Their names end with ``_proj``.

    Decay rates are between 1 and 16, as in Mamba-2. The parameters of the decay are always float32,
    whatever the dtype of the model, because their errors accumulate in the state.
    """
    if name == "mixer_decay":
        return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
    if name == "mixer_time":
        return jnp.full(shape, math.log(math.expm1(_TIME_STEP)))
    if name == "mixer_conv":
        return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(dtype)
    return jnp.full(shape, 0 if name.endswith("_bias") else 1, dtype)


def _project(x: jax.Array, weights: LayerParameters) -> jax.Array:
    """Return ``[..., K, rows]``, the result of ``mixer_in_proj`` with its bias, if it has one."""
    projected, bias = weights.linear(x, "mixer_in_proj"), weights.optional("mixer_in_bias")
    return projected if bias is None else add_bias(projected, bias)


def _mix_convolution(sizes: ShortConvolution, x: jax.Array, weights: LayerParameters) -> Mixed:
    b, c, x = jnp.moveaxis(_project(x, weights), -1, 0)
    filters = _float32(weights, "mixer_conv").reshape(sizes.num_channels, sizes.conv_width)

    def advance(inputs: Arrays, states: States, num_tokens: jax.Array) -> tuple[jax.Array, States]:
        [gated], [state] = inputs, states
        bias = _conv_bias(sizes, weights)
        out, state = causal_convolution(gated, state, filters, bias, num_tokens)
        return out, (state,)

    return Mixed(Recurrence((b * x,), advance, sizes.states, takes_rows=True), lambda out: c * out)


def _mix_delta_net(sizes: GatedDeltaNet, x: jax.Array, weights: LayerParameters) -> Mixed:
    K, G, D, U = sizes.heads
    fused = _project(x, weights)
    qkv, z = fused[..., : 2 * D + G * U], fused[..., 2 * D + G * U :]
    gates = weights.linear(x, "mixer_gates_proj")
    beta = jax.nn.sigmoid(gates[..., :G]) * (2 if sizes.has_negative_eigenvalues else 1)
    log_decay = _log_decay(weights, add_bias(gates[..., G:], _float32(weights, "mixer_time")))

    def run(qkv: jax.Array, others: Arrays, state: Any, num_tokens: jax.Array) -> Any:
        B, T = qkv.shape[:2]
        qkv, (beta, log_decay) = qkv.reshape(B, T, K, -1), others
        return delta_rule(
            _normalise(qkv[..., :D]) * D**-0.5,
            _normalise(qkv[..., D : 2 * D]),
            qkv[..., 2 * D :].reshape(B, T, K, G, U),
            log_decay.reshape(B, T, K, G),
            beta.reshape(B, T, K, G),
            state,
            num_tokens,
        )

    gate = jax.nn.silu(z.reshape(*z.shape[:-2], K * G, U))
    recurrence = _convolved(sizes, weights, (qkv, beta, log_decay), run)
    return Mixed(recurrence, lambda out: _gated_norm(out, gate, weights, sizes.norm_eps))


def _mix_kimi_delta(sizes: KimiDelta, x: jax.Array, weights: LayerParameters) -> Mixed:
    K, D = sizes.num_heads, sizes.head_dim
    qkv = _project(x, weights)
    beta = jax.nn.sigmoid(weights.linear(x, "mixer_gates_proj"))
    low = weights.linear(x, "mixer_rank_proj")[..., 0, :]
    steps = weights.linear(low[..., :D], "mixer_decay_proj")
    log_decay = _log_decay(weights, add_bias(steps, _float32(weights, "mixer_time")))
    gate = jax.nn.sigmoid(weights.linear(low[..., D:], "mixer_gate_proj"))

    def run(qkv: jax.Array, others: Arrays, state: Any, num_tokens: jax.Array) -> Any:
        B, T = qkv.shape[:2]
        q, k, v = jnp.moveaxis(qkv.reshape(B, T, K, 3, D), 3, 0)
        beta, log_decay = others
        return delta_rule(
            _normalise(q) * D**-0.5,
            _normalise(k),
            v[..., None, :],
            log_decay.reshape(B, T, K, 1, D),
            beta.reshape(B, T, K, 1),
            state,
            num_tokens,
        )

    recurrence = _convolved(sizes, weights, (qkv, beta, log_decay), run)
    return Mixed(recurrence, lambda out: _gated_norm(out, gate, weights, sizes.norm_eps))


def _mix_mamba(sizes: Mamba2, x: jax.Array, weights: LayerParameters) -> Mixed:
    K, G, D, U = sizes.heads
    fused = _project(x if sizes.in_multiplier == 1 else x * sizes.in_multiplier, weights)
    if (factors := _row_multipliers(sizes)) is not None:
        fused = fused * expand(factors, fused.ndim)
    ends = [G * U, 2 * G * U + 2 * D]
    z, xbc, steps = jnp.split(fused, ends, axis=-1)
    steps = jax.nn.softplus(add_bias(steps, _float32(weights, "mixer_time")))
    steps = jnp.clip(steps, *sizes.time_limits)

    def run(xbc: jax.Array, others: Arrays, state: Any, num_tokens: jax.Array) -> Any:
        B, T = xbc.shape[:2]
        xbc, steps = xbc.reshape(B, T, K, -1), others[0].reshape(B, T, K, G)
        x, b, c = jnp.split(xbc, [G * U, G * U + D], axis=-1)
        x = x.reshape(B, T, K, G, U)
        out, state = state_space(
            x * steps[..., None],
            b,
            c,
            -expand(jnp.exp(_float32(weights, "mixer_decay")), 4) * steps,
            state,
            num_tokens,
        )
        return out + expand(_float32(weights, "mixer_skip")[..., None], 5) * x, state

    def finish(out: jax.Array) -> jax.Array:
        return _gate_and_norm(sizes, weights, out, jax.nn.silu(z))

    return Mixed(_convolved(sizes, weights, (xbc, steps), run), finish)


def _row_multipliers(sizes: Mamba2) -> jax.Array | None:
    """Return the multipliers (muP) of the rows of ``mixer_in_proj``, float32 ``[rows]``.

    They are the same for all groups of heads. The result is None if all multipliers are 1.
    """
    factors = sizes.piece_multipliers
    if all(factor == 1 for factor in factors):
        return None
    counts = [rows for _, rows in sizes.pieces["mixer_in_proj"]]
    return jnp.repeat(
        jnp.array(factors, jnp.float32), np.array(counts), total_repeat_length=sum(counts)
    )


def _gate_and_norm(
    sizes: Mamba2, weights: LayerParameters, out: jax.Array, gate: jax.Array
) -> jax.Array:
    """Multiply the output of the recurrence by a gate ``[..., K, G * U]``, and normalise it.

    ``sizes.norm`` determines whether the norm comes before or after the gate, or is omitted.
    """
    grouped = out.reshape(gate.shape)
    if sizes.norm == "none":
        return (grouped * gate).reshape(out.shape)
    if sizes.norm == "after gate":
        grouped = grouped * gate
    squares = mean_square(grouped, num_heads=sizes.num_groups)
    if sizes.num_copies > 1:
        squares = weights.layer.shard.all_reduce_mean(squares, sizes.num_copies)
    weight = expand(_float32(weights, "mixer_norm"), grouped.ndim)
    grouped = grouped * lax.rsqrt(squares + sizes.norm_eps) * weight
    if sizes.norm == "before gate":
        grouped = grouped * gate
    return grouped.reshape(out.shape)


def _convolved(
    sizes: Mixer,
    weights: LayerParameters,
    inputs: Arrays,
    run: Callable[[jax.Array, Arrays, Any, jax.Array], Any],
) -> Recurrence:
    """Return a recurrence that applies a convolution to its first input, and then calls `run`.

    `inputs` are arrays ``[..., heads, n]``. `run` takes four arguments: the first input, to which
    the convolution and its activation have been applied; a tuple of the other inputs; the state;
    and the number of tokens of each row. It gets inputs of the shape ``[B, T, heads * n]``. It
    returns the outputs ``[B, T, ...]`` and the new state.
    """

    def advance(inputs: Arrays, states: States, num_tokens: jax.Array) -> tuple[jax.Array, States]:
        filters = _float32(weights, "mixer_conv").reshape(-1, sizes.conv_width)
        bias = _conv_bias(sizes, weights)
        out, conv = causal_convolution(inputs[0], states[0], filters, bias, num_tokens)
        activated = ACTIVATIONS[sizes.conv_act](out)
        out, state = run(activated, inputs[1:], states[1], num_tokens)
        return out.reshape(*out.shape[:2], -1), (conv, state)

    flat = tuple(each.reshape(*each.shape[:-2], -1) for each in inputs)
    return Recurrence(flat, advance, sizes.states, takes_rows=True)


def _conv_bias(sizes: Mixer, weights: LayerParameters) -> jax.Array | None:
    return _float32(weights, "mixer_conv_bias").reshape(-1) if sizes.conv_bias else None


def _float32(weights: LayerParameters, name: str) -> jax.Array:
    return weights.vector(name).astype(jnp.float32)


def _normalise(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _L2_EPS)


def _log_decay(weights: LayerParameters, steps: jax.Array) -> jax.Array:
    """Return the logarithm of the decay for the projected time steps ``[..., K, n]``.

    The softplus of the time steps is applied here.
    """
    rates = jnp.exp(_float32(weights, "mixer_decay")).reshape(steps.shape[-2], -1)
    return -expand(rates, steps.ndim) * jax.nn.softplus(steps)


def _gated_norm(out: jax.Array, gate: jax.Array, weights: LayerParameters, eps: float) -> jax.Array:
    """Normalise each head of ``[..., heads * U]``, and multiply it by ``gate [..., heads, U]``."""
    heads = out.reshape(gate.shape)
    normed = rms_norm(heads, _float32(weights, "mixer_norm"), eps, num_heads=heads.shape[-2])
    return (normed * gate).reshape(out.shape)


_MIX: Mapping[type[Mixer], Callable[[Any, jax.Array, LayerParameters], Mixed]] = {
    ShortConvolution: _mix_convolution,
    GatedDeltaNet: _mix_delta_net,
    KimiDelta: _mix_kimi_delta,
    Mamba2: _mix_mamba,
}
