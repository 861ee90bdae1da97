"""Recurrences over a state of fixed size: convolution, delta rule, and state space model.

Each sequence has a state per layer. All ops take the states before the first token, and return the
states after the last token. The input is a single token or a chunk of any length. The arithmetic is
float32. Padding after the tokens of a row does not change its state.

For a single token, the states may also be entries of a pool, see `StateRows`. A backend with a
kernel then reads and writes each state once. Without a kernel, and for longer chunks, the general
backend computes the ops in plain JAX (`xla/recurrent.py`).
"""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from paged_jax.kernels.op import Op
from paged_jax.kernels.state_rows import ConvolutionStep, RecurrentStep, StateRows, StateStep
from paged_jax.kernels.xla.recurrent import advance_rows, apply_recurrence, convolve

# The states of a batch, given either as an array or as entries of a pool.
State = TypeVar("State", jax.Array, StateRows)


def causal_convolution(
    x: jax.Array,
    state: State,
    weight: jax.Array,
    bias: jax.Array | None,
    num_tokens: jax.Array,
) -> tuple[jax.Array, State]:
    """Convolve each channel with its own filter over the last w tokens.

    Inputs are first rounded to the dtype of the state. The results therefore do not depend on how a
    sequence is divided into chunks.

    Args:
      x: float32 ``[B, T, F]``.
      state: floating point ``[B, (w - 1) * F]``, the last w - 1 inputs of each sequence, the oldest
        first; zeros before the first token. If T is 1, it may also be `StateRows`.
      weight: floating point ``[F, w]``. The last element belongs to the newest token.
      bias: floating point ``[F]`` or None.
      num_tokens: i32 ``[B]``, number of tokens of each row. The rest of the row is padding.

    Returns:
      The output, float32 ``[B, T, F]``, and the new state. Outputs of padding are meaningless.

    Example:
      >>> x, state = jnp.array([[[1.0], [2.0], [4.0]]]), jnp.zeros((1, 1))
      >>> out, state = causal_convolution(x, state, jnp.array([[10.0, 1]]), None, jnp.array([2]))
      >>> out[0, :2, 0].tolist(), state.tolist()  # the third input is padding
      ([1.0, 12.0], [[2.0]])
    """
    if isinstance(state, StateRows):
        return _run_step(ConvolutionStep(state, x[:, 0], weight, bias, num_tokens))
    return convolve(x, state, weight, bias, num_tokens)


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: State,
    num_tokens: jax.Array,
) -> tuple[jax.Array, State]:
    """Apply the gated delta rule (Yang et al., arXiv 2412.06464), or KDA (arXiv 2510.26692).

    For each head and token, the state ``S [D, U]`` and the output are computed as follows::

        S = exp(log_decay) * S
        S = S + beta * outer(k, v - k @ S)
        out = q @ S

    Args:
      q: queries, float32 ``[B, T, K, D]``. Each of the K heads has G heads of values.
      k: keys, float32 ``[B, T, K, D]``.
      v: values, float32 ``[B, T, K, G, U]``.
      log_decay: logarithm of the decay, at most 0, float32 ``[B, T, K, G]``; or ``[B, T, K, G, D]``
        if the elements of a key decay at different rates.
      beta: step size of the update, 0 to 2, float32 ``[B, T, K, G]``.
      state: float32 ``[B, K, G, D, U]`` or ``[B, K * G, D, U]``. If T is 1, it may also be
        `StateRows` with a pool ``[L, P, K * G, D, U]``, which may pad D and U.
      num_tokens: i32 ``[B]``, number of tokens of each row. The rest of the row is padding.

    Returns:
      The output, float32 ``[B, T, K, G, U]``, and the new state.
    """
    log_decay, beta = _without_padding(num_tokens, log_decay, beta)
    if log_decay.ndim == beta.ndim:
        log_decay = log_decay[..., None]
    return _apply(q, k, v, log_decay, beta, state)


def state_space(
    x: jax.Array,
    b: jax.Array,
    c: jax.Array,
    log_decay: jax.Array,
    state: State,
    num_tokens: jax.Array,
) -> tuple[jax.Array, State]:
    """Apply the recurrence of Mamba-2 (Dao and Gu, arXiv 2405.21060).

    For each head and token, the state ``S [U, D]`` becomes ``exp(log_decay) * S + outer(x, b)``.
    The output is ``S @ c``.

    Args:
      x: inputs times their time steps, float32 ``[B, T, K, G, U]``. G heads share b and c.
      b: vectors that write to the state, float32 ``[B, T, K, D]``.
      c: vectors that read from the state, float32 ``[B, T, K, D]``.
      log_decay: logarithm of the decay, at most 0, float32 ``[B, T, K, G]``.
      state: float32 ``[B, K, G, U, D]`` or ``[B, K * G, U, D]``. If T is 1, it may also be
        `StateRows` with a pool ``[L, P, K * G, U, D]``, which may pad U and D.
      num_tokens: i32 ``[B]``, number of tokens of each row. The rest of the row is padding.

    Returns:
      The output, float32 ``[B, T, K, G, U]``, and the new state.
    """
    x, log_decay = _without_padding(num_tokens, x, log_decay)
    return _apply(c, b, x, log_decay[..., None], None, state)


def _apply(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    state: State,
) -> tuple[jax.Array, State]:
    if isinstance(state, StateRows):
        arrays: Any = jax.tree.map(lambda x: x[:, 0], (q, k, v, log_decay, beta))
        return _run_step(RecurrentStep(state, *arrays))
    return apply_recurrence(q, k, v, log_decay, beta, state)


ADVANCE_ROWS = Op("advance_rows", advance_rows, is_optional=True)


def _run_step(step: StateStep) -> tuple[jax.Array, StateRows]:
    layer = jnp.asarray(step.rows.layer, jnp.int32)
    args = step._replace(rows=replace(step.rows, layer=layer))
    out, pool = ADVANCE_ROWS(args, backend=step.rows.backend)
    return out[:, None], replace(step.rows, pool=pool)


def _without_padding(num_tokens: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays ``[B, T, ...]`` with the padding set to zero."""
    T = arrays[0].shape[1]
    is_token = jnp.arange(T, dtype=jnp.int32)[None] < num_tokens[:, None]
    return tuple(
        jnp.where(is_token.reshape(is_token.shape + (1,) * (x.ndim - 2)), x, 0) for x in arrays
    )
