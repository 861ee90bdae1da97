"""Recurrences in NumPy and float64, token by token."""

import numpy as np


def causal_convolution(
    x: np.ndarray, state: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Convolve ``x [T, F]`` after the inputs ``state [w - 1, F]`` with ``weight [F, w]``."""
    inputs = np.concatenate([state, x]).astype(np.float64)
    width = weight.shape[1]
    out = [(inputs[t : t + width] * weight.T).sum(0) for t in range(len(x))]
    return np.array(out) + (0 if bias is None else bias), inputs[len(x) :]


def delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Apply the gated delta rule of a head.

    Args:
      q, k: ``[T, D]``; v: ``[T, U]``; beta: ``[T]``; state: ``[D, U]``.
      log_decay: ``[T]``, or ``[T, D]`` with a decay for each element of a key.
    """
    state, out = state.astype(np.float64), []
    for t in range(len(q)):
        state = np.exp(np.float64(log_decay[t])).reshape(-1, 1) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - k[t].astype(np.float64) @ state))
        out.append(q[t].astype(np.float64) @ state)
    return np.array(out), state


def state_space(
    x: np.ndarray, b: np.ndarray, c: np.ndarray, log_decay: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Apply the recurrence of Mamba-2 of a head.

    Args:
      x: ``[T, U]``; b, c: ``[T, D]``; log_decay: ``[T]``; state: ``[U, D]``.
    """
    state, out = state.astype(np.float64), []
    for t in range(len(x)):
        state = np.exp(np.float64(log_decay[t])) * state + np.outer(x[t], b[t].astype(np.float64))
        out.append(state @ c[t])
    return np.array(out), state
