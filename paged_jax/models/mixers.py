"""Recurrent layers: their sizes, their states, and their computation.

A mixer takes the place of attention in a layer. It projects the normalised hidden states, passes a
`Recurrence` to the cache, and applies a gate to the output::

    x ---> projections ---> Recurrence: convolution, recurrence over a state ---> gate ---> out_proj
                |                                                                   ^
                +-------------------------------------------------------------------+

Weights are grouped by heads of keys (K), so that they can be divided over devices together with the
states. The parameters of a layer with a mixer, of which each kind has some::

    mixer_in_proj     [K, rows, E]    inputs of the convolution and the gate of the output
    mixer_gates_proj  [K, rows, E]    gates of each head
    mixer_rank_proj   [1, 2 * D, E]   first half of two projections of rank D, for two gates
    mixer_decay_proj  [K, D, D]       second half, decay
    mixer_gate_proj   [K, D, D]       second half, gate of the output
    mixer_out_proj    [E, values]
    mixer_conv        [K, rows, 1, w]          mixer_conv_bias  [K, rows]
    mixer_decay       [K, G] or [1, 1, K, 1]   logarithm of the decay of each head
    mixer_time        [K, G] or [K, D]         bias of the time step
    mixer_skip        [K, G]                   factor of the input that is added to the output
    mixer_norm        [U] or [K, G * U]        norm of the output
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paged_jax.kernels.norm_rope import mean_square, rms_norm
from paged_jax.kernels.recurrent import causal_convolution, delta_rule, state_space
from paged_jax.models.layer_attention import Recurrence, States
from paged_jax.models.layer_groups import StateShape

Shape = tuple[int, ...]
# Constant added to the sum of squares of queries and keys of the delta rule.
_L2_EPS = 1e-6
# Initial time step of a new model.
_TIME_STEP = 0.01


class MixerWeights(NamedTuple):
    """Access to the parameters of a layer.

    Attributes:
      project: multiplies the normalised inputs of the layer by a matrix, given by its name:
        float32 ``[..., *out]``.
      multiply: multiplies other activations, float32 ``[..., in]``, by a matrix.
      vector: returns another parameter by its name, float32.
    """

    project: Callable[[str], jax.Array]
    multiply: Callable[[jax.Array, str], jax.Array]
    vector: Callable[[str], jax.Array]


class Mixed(NamedTuple):
    """A recurrence, and the function that turns its output into the input of ``mixer_out_proj``."""

    recurrence: Recurrence
    finish: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixer:
    """Sizes and switches of a kind of recurrent layer. Subclasses define the computation.

    Attributes:
      conv_width: number of tokens of a convolution (w).
      conv_bias: whether the convolution has a bias.
    """

    conv_width: int
    conv_bias: bool = False

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays that a sequence keeps in each layer."""
        raise NotImplementedError

    def shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        """Return the shape of each parameter, for hidden states of a size E."""
        raise NotImplementedError

    @property
    def pieces(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """Names and rows per head of the pieces of parameters, which files may store separately."""
        return {}

    def mix(self, weights: MixerWeights) -> Mixed:
        """Return the recurrence of a layer, and the function for its output."""
        raise NotImplementedError

    def _conv_state(self, num_channels: int) -> StateShape:
        # One dimension: devices would pad a dimension of three tokens to eight.
        return StateShape("conv", ((self.conv_width - 1) * num_channels,), None)

    def _convolve(
        self, weights: MixerWeights, x: jax.Array, state: jax.Array, num_tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run the convolution of a layer with the activation that follows it."""
        filters = weights.vector("mixer_conv").reshape(-1, self.conv_width)
        bias = weights.vector("mixer_conv_bias").reshape(-1) if self.conv_bias else None
        out, state = causal_convolution(x, state, filters, bias, num_tokens)
        return jax.nn.silu(out), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvolution(Mixer):
    """Gated short convolution of LFM2: ``c * convolution(b * x)``.

    Attributes:
      num_channels: number of channels (F).
    """

    num_channels: int

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays of a sequence: the last inputs of the convolution."""
        return (self._conv_state(self.num_channels),)

    def shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        """Return the shapes of the parameters."""
        F = self.num_channels
        return {
            "mixer_in_proj": (3, F, hidden_size),
            "mixer_out_proj": (hidden_size, F),
            "mixer_conv": (F, 1, self.conv_width),
        }

    def mix(self, weights: MixerWeights) -> Mixed:
        """Return the recurrence, and the function for its output."""
        b, c, x = jnp.moveaxis(weights.project("mixer_in_proj"), -2, 0)
        filters = weights.vector("mixer_conv").reshape(self.num_channels, self.conv_width)

        def advance(
            inputs: tuple[jax.Array, ...], states: States, num_tokens: jax.Array
        ) -> tuple[jax.Array, States]:
            out, state = causal_convolution(*inputs, *states, filters, None, num_tokens)
            return out, (state,)

        return Mixed(Recurrence((b * x,), advance, self.states), lambda out: c * out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Mixer):
    """Gated delta net (Yang et al., arXiv 2412.06464) of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

    Rows of ``mixer_in_proj`` for each head of keys: its query, its key, G values, G output gates.
    Rows of ``mixer_gates_proj``: G of beta, G of the decay.

    Attributes:
      num_key_heads: number of heads of queries and keys (K).
      num_value_heads: number of heads of values, each with its own state.
      key_dim: elements of a key (D).
      value_dim: elements of a value (U).
      has_negative_eigenvalues: whether beta is between 0 and 2 instead of 0 and 1, so that a token
        may change the sign of a part of the state.
      norm_eps: constant added to the mean square in the norm of the output.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_negative_eigenvalues: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                "GatedDeltaNet: num_value_heads must be a multiple of num_key_heads, got "
                f"{self.num_value_heads} and {self.num_key_heads}."
            )

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        K = self.num_key_heads
        return K, self.num_value_heads // K, self.key_dim, self.value_dim

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays of a sequence: inputs of the convolution, and the state of each head."""
        K, G, D, U = self._sizes
        return self._conv_state(K * (2 * D + G * U)), StateShape("state", (K * G, D, U), "float32")

    def shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        """Return the shapes of the parameters."""
        K, G, D, U = self._sizes
        return {
            "mixer_in_proj": (K, 2 * D + 2 * G * U, hidden_size),
            "mixer_gates_proj": (K, 2 * G, hidden_size),
            "mixer_out_proj": (hidden_size, K * G * U),
            "mixer_conv": (K, 2 * D + G * U, 1, self.conv_width),
            "mixer_decay": (K, G),
            "mixer_time": (K, G),
            "mixer_norm": (U,),
        }

    @property
    def pieces(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """Names and rows per head of keys of the pieces of parameters."""
        _, G, D, U = self._sizes
        qkv = ("q", D), ("k", D), ("v", G * U)
        return {
            "mixer_in_proj": (*qkv, ("z", G * U)),
            "mixer_gates_proj": (("b", G), ("a", G)),
            "mixer_conv": qkv,
        }

    def mix(self, weights: MixerWeights) -> Mixed:
        """Return the recurrence, and the function for its output."""
        K, G, D, U = self._sizes
        fused = weights.project("mixer_in_proj")
        qkv, z = fused[..., : 2 * D + G * U], fused[..., 2 * D + G * U :]
        gates = weights.project("mixer_gates_proj")
        beta = jax.nn.sigmoid(gates[..., :G]) * (2 if self.has_negative_eigenvalues else 1)
        log_decay = _log_decay(weights, _add(gates[..., G:], weights.vector("mixer_time")))

        def advance(
            inputs: tuple[jax.Array, ...], states: States, num_tokens: jax.Array
        ) -> tuple[jax.Array, States]:
            qkv, beta, log_decay = inputs
            qkv, conv = self._convolve(weights, qkv, states[0], num_tokens)
            B, T = qkv.shape[:2]
            qkv = qkv.reshape(B, T, K, -1)
            out, state = delta_rule(
                _normalise(qkv[..., :D]) * D**-0.5,
                _normalise(qkv[..., D : 2 * D]),
                qkv[..., 2 * D :].reshape(B, T, K, G, U),
                log_decay.reshape(B, T, K, G),
                beta.reshape(B, T, K, G),
                states[1].reshape(B, K, G, D, U),
                num_tokens,
            )
            return out.reshape(B, T, -1), (conv, state.reshape(states[1].shape))

        recurrence = Recurrence(_flat(K, qkv, beta, log_decay), advance, self.states)
        gate = jax.nn.silu(z.reshape(*z.shape[:-2], K * G, U))
        return Mixed(recurrence, lambda out: _gated_norm(out, gate, weights, self.norm_eps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDelta(Mixer):
    """Kimi Delta Attention (arXiv 2510.26692): a delta rule whose elements decay independently.

    Rows of ``mixer_in_proj`` for each head: its query, its key, its value.

    Attributes:
      num_heads: number of heads (K).
      head_dim: elements of queries, keys and values (D), and the rank of the gates.
      norm_eps: constant added to the mean square in the norm of the output.
    """

    num_heads: int
    head_dim: int
    norm_eps: float = 1e-5

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays of a sequence: inputs of the convolution, and the state of each head."""
        K, D = self.num_heads, self.head_dim
        return self._conv_state(3 * K * D), StateShape("state", (K, D, D), "float32")

    def shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        """Return the shapes of the parameters."""
        K, D = self.num_heads, self.head_dim
        return {
            "mixer_in_proj": (K, 3 * D, hidden_size),
            "mixer_gates_proj": (K, 1, hidden_size),
            "mixer_rank_proj": (1, 2 * D, hidden_size),
            "mixer_decay_proj": (K, D, D),
            "mixer_gate_proj": (K, D, D),
            "mixer_out_proj": (hidden_size, K * D),
            "mixer_conv": (K, 3 * D, 1, self.conv_width),
            "mixer_decay": (1, 1, K, 1),
            "mixer_time": (K, D),
            "mixer_norm": (D,),
        }

    @property
    def pieces(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """Names and rows per head of the pieces of parameters."""
        D = self.head_dim
        qkv = ("q", D), ("k", D), ("v", D)
        ranks = ("decay", D), ("gate", D)
        return {"mixer_in_proj": qkv, "mixer_rank_proj": ranks, "mixer_conv": qkv}

    def mix(self, weights: MixerWeights) -> Mixed:
        """Return the recurrence, and the function for its output."""
        K, D = self.num_heads, self.head_dim
        qkv = weights.project("mixer_in_proj")
        beta = jax.nn.sigmoid(weights.project("mixer_gates_proj")[..., 0])
        low = weights.project("mixer_rank_proj")[..., 0, :]
        steps = weights.multiply(low[..., :D], "mixer_decay_proj")
        steps = _add(steps, weights.vector("mixer_time"))
        log_decay = _log_decay(weights, steps)
        gate = jax.nn.sigmoid(weights.multiply(low[..., D:], "mixer_gate_proj"))

        def advance(
            inputs: tuple[jax.Array, ...], states: States, num_tokens: jax.Array
        ) -> tuple[jax.Array, States]:
            qkv, beta, log_decay = inputs
            qkv, conv = self._convolve(weights, qkv, states[0], num_tokens)
            B, T = qkv.shape[:2]
            q, k, v = jnp.moveaxis(qkv.reshape(B, T, K, 3, D), 3, 0)
            out, state = delta_rule(
                _normalise(q) * D**-0.5,
                _normalise(k),
                v[..., None, :],
                log_decay.reshape(B, T, K, 1, D),
                beta.reshape(B, T, K, 1),
                states[1][:, :, None],
                num_tokens,
            )
            return out.reshape(B, T, -1), (conv, state[:, :, 0])

        inputs = (
            qkv.reshape(*qkv.shape[:-2], -1),
            beta,
            log_decay.reshape(*log_decay.shape[:-2], -1),
        )
        recurrence = Recurrence(inputs, advance, self.states)
        return Mixed(recurrence, lambda out: _gated_norm(out, gate, weights, self.norm_eps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2(Mixer):
    """Mamba-2 (Dao and Gu, arXiv 2405.21060) of Nemotron-H, Granite 4 and Falcon-H1.

    Rows of ``mixer_in_proj`` for each group of heads: G * U gates of the output, G * U inputs, D of
    b, D of c, G time steps.

    Attributes:
      num_heads: number of heads, each with its own state.
      num_groups: number of groups (K) of heads that share b and c.
      head_dim: elements of an input (U).
      state_dim: elements of b and c (D).
      norm: ``"after gate"``, ``"before gate"``, or ``"none"``: place of the norm of the output. It
        normalises the heads of a group together.
      norm_eps: constant added to the mean square in this norm.
      time_limits: smallest and largest time step.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    norm: str = "after gate"
    norm_eps: float = 1e-5
    time_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(
                "Mamba2: num_heads must be a multiple of num_groups, got "
                f"{self.num_heads} and {self.num_groups}."
            )

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        K = self.num_groups
        return K, self.num_heads // K, self.state_dim, self.head_dim

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Arrays of a sequence: inputs of the convolution, and the state of each head."""
        K, G, D, U = self._sizes
        return self._conv_state(K * (2 * D + G * U)), StateShape("state", (K * G, U, D), "float32")

    def shapes(self, hidden_size: int) -> Mapping[str, Shape]:
        """Return the shapes of the parameters."""
        K, G, D, U = self._sizes
        shapes = {
            "mixer_in_proj": (K, 2 * G * U + 2 * D + G, hidden_size),
            "mixer_out_proj": (hidden_size, K * G * U),
            "mixer_conv": (K, G * U + 2 * D, 1, self.conv_width),
            "mixer_decay": (K, G),
            "mixer_time": (K, G),
            "mixer_skip": (K, G),
        }
        if self.conv_bias:
            shapes["mixer_conv_bias"] = (K, G * U + 2 * D)
        if self.norm != "none":
            shapes["mixer_norm"] = (K, G * U)
        return shapes

    @property
    def pieces(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """Names and rows per group of the pieces of parameters."""
        _, G, D, U = self._sizes
        xbc = ("x", G * U), ("b", D), ("c", D)
        return {
            "mixer_in_proj": (("z", G * U), *xbc, ("dt", G)),
            "mixer_conv": xbc,
            "mixer_conv_bias": xbc,
        }

    def mix(self, weights: MixerWeights) -> Mixed:
        """Return the recurrence, and the function for its output."""
        K, G, D, U = self._sizes
        fused = weights.project("mixer_in_proj")
        ends = [G * U, 2 * G * U + 2 * D]
        z, xbc, steps = jnp.split(fused, ends, axis=-1)
        steps = jax.nn.softplus(_add(steps, weights.vector("mixer_time")))
        steps = jnp.clip(steps, *self.time_limits)

        def advance(
            inputs: tuple[jax.Array, ...], states: States, num_tokens: jax.Array
        ) -> tuple[jax.Array, States]:
            xbc, steps = inputs
            xbc, conv = self._convolve(weights, xbc, states[0], num_tokens)
            B, T = xbc.shape[:2]
            xbc, steps = xbc.reshape(B, T, K, -1), steps.reshape(B, T, K, G)
            x, b, c = jnp.split(xbc, [G * U, G * U + D], axis=-1)
            x = x.reshape(B, T, K, G, U)
            out, state = state_space(
                x * steps[..., None],
                b,
                c,
                -_expand(jnp.exp(weights.vector("mixer_decay")), 4) * steps,
                states[1].reshape(B, K, G, U, D),
                num_tokens,
            )
            out = out + _expand(weights.vector("mixer_skip")[..., None], 5) * x
            return out.reshape(B, T, -1), (conv, state.reshape(states[1].shape))

        recurrence = Recurrence(_flat(K, xbc, steps), advance, self.states)
        return Mixed(recurrence, lambda out: self._gate(weights, out, jax.nn.silu(z)))

    def _gate(self, weights: MixerWeights, out: jax.Array, gate: jax.Array) -> jax.Array:
        """Apply the gate ``[..., K, G * U]`` and the norm to the output of the recurrence."""
        grouped = out.reshape(gate.shape)
        if self.norm == "none":
            return (grouped * gate).reshape(out.shape)
        if self.norm == "after gate":
            grouped = grouped * gate
        scale = lax.rsqrt(mean_square(grouped, num_heads=self.num_groups) + self.norm_eps)
        grouped = grouped * scale * _expand(weights.vector("mixer_norm"), grouped.ndim)
        if self.norm == "before gate":
            grouped = grouped * gate
        return grouped.reshape(out.shape)


def initial_vector(name: str, shape: Shape, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Return initial values of a parameter that is not a matrix.

    Decay rates are between 1 and 16, as in Mamba-2. Parameters of the decay are float32 in models
    of any dtype, because errors in them add up in the state.

    Args:
      name: name of the parameter.
      shape: its shape.
      dtype: dtype of other parameters.
      key: random key.
    """
    if name == "mixer_decay":
        return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
    if name == "mixer_time":
        return jnp.full(shape, math.log(math.expm1(_TIME_STEP)))
    if name == "mixer_conv":
        return (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(dtype)
    return jnp.full(shape, 0 if name == "mixer_conv_bias" else 1, dtype)


def _normalise(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _L2_EPS)


def _log_decay(weights: MixerWeights, steps: jax.Array) -> jax.Array:
    """Return the logarithm of the decay from time steps ``[..., K, n]`` before softplus."""
    rates = jnp.exp(weights.vector("mixer_decay")).reshape(steps.shape[-2], -1)
    return -_expand(rates, steps.ndim) * jax.nn.softplus(steps)


def _expand(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def _add(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + _expand(bias, x.ndim)


def _flat(K: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays ``[..., K, n]`` as ``[..., K * n]``."""
    return tuple(x.reshape(*x.shape[:-2], K * x.shape[-1]) for x in arrays)


def _gated_norm(out: jax.Array, gate: jax.Array, weights: MixerWeights, eps: float) -> jax.Array:
    """Normalise each head of ``[..., heads * U]``, and multiply it by ``gate [..., heads, U]``."""
    heads = out.reshape(gate.shape)
    normed = rms_norm(heads, weights.vector("mixer_norm"), eps, num_heads=heads.shape[-2])
    return (normed * gate).reshape(out.shape)
