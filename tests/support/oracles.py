"""Attention over a sequence in NumPy and float64, without blocks."""

import numpy as np


def attention_and_lse(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute causal attention of the last T tokens of a sequence of N tokens.

    Args:
      q: ``[T, H, D]``; k: ``[N, K, D]``; v: ``[N, K, U]``; sinks: ``[H]``.

    Returns:
      float64 ``[T, H, U]`` and the log-sum-exp ``[T, H]``.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (T, H, D), (N, K, _) = q.shape, k.shape
    out, lse = np.zeros((T, H, v.shape[-1])), np.full((T, H), -np.inf)
    for t in range(T):
        end = N - T + t + 1
        begin = 0 if sliding_window is None else max(0, end - sliding_window)
        for h in range(H):
            head = h // (H // K)
            scores = k[begin:end, head] @ q[t, h] * (D**-0.5 if scale is None else scale)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if sinks is not None:
                scores = np.append(scores, np.float64(sinks[h]))
            peak = scores.max()
            weights = np.exp(scores - peak)
            lse[t, h] = peak + np.log(weights.sum())
            out[t, h] = weights[: end - begin] / weights.sum() @ v[begin:end, head]
    return out, lse


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options) -> np.ndarray:
    """Compute `attention_and_lse` without the log-sum-exp."""
    return attention_and_lse(q, k, v, **options)[0]


def attention_gradients(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out_bar: np.ndarray,
    lse_bar: np.ndarray,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute gradients of ``sum(out * out_bar) + sum(lse * lse_bar)`` of `attention_and_lse`.

    Args:
      q, k, v, sinks: as for `attention_and_lse`.
      out_bar: ``[T, H, D]``; lse_bar: ``[T, H]``.

    Returns:
      float64 gradients of q, k, v, and of sinks ``[H]``, which are 0 without sinks.
    """
    q, k, v, out_bar, lse_bar = (np.asarray(x, np.float64) for x in (q, k, v, out_bar, lse_bar))
    (T, H, _), (N, K, _) = q.shape, k.shape
    q_bar, k_bar, v_bar, sinks_bar = (np.zeros(x) for x in (q.shape, k.shape, v.shape, H))
    distance = (N - T + np.arange(T))[:, None] - np.arange(N)
    is_seen = (distance >= 0) & (distance < (sliding_window or np.inf))
    for h in range(H):
        head = h // (H // K)
        scores, slope = q[:, h] @ k[:, head].T * scale, 1.0
        if soft_cap is not None:
            slope = 1 - np.tanh(scores / soft_cap) ** 2
            scores = soft_cap * np.tanh(scores / soft_cap)
        sink = np.exp(-np.inf if sinks is None else np.float64(sinks[h]))
        weights = np.where(is_seen, np.exp(scores), 0)
        total = weights.sum(axis=1, keepdims=True) + sink
        if not total.all():
            continue  # neither a token nor a sink
        weights /= total
        v_bar[:, head] += weights.T @ out_bar[:, h]
        weights_bar = out_bar[:, h] @ v[:, head].T
        lse_bar_less_mean = lse_bar[:, h] - (weights * weights_bar).sum(axis=1)
        scores_bar = weights * (weights_bar + lse_bar_less_mean[:, None]) * slope * scale
        sinks_bar[h] = np.sum(sink / total[:, 0] * lse_bar_less_mean)
        q_bar[:, h] = scores_bar @ k[:, head]
        k_bar[:, head] += scores_bar.T @ q[:, h]
    return q_bar, k_bar, v_bar, sinks_bar
