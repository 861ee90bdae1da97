"""Plain numpy in float64: what attention over a sequence means, without any blocks."""

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
    """The last T tokens of one sequence of N attend causally.

    Args:
      q: ``[T, H, D]``; k, v: ``[N, K, D]``; sinks: ``[H]``.

    Returns:
      float64 ``[T, H, D]`` and the log-sum-exp ``[T, H]``.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (T, H, D), (N, K, _) = q.shape, k.shape
    out, lse = np.zeros_like(q), np.full((T, H), -np.inf)
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
    """As `attention_and_lse`, without the log-sum-exp."""
    return attention_and_lse(q, k, v, **options)[0]
