"""Plain numpy in float64: what attention over a sequence means, without any blocks."""

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """The last T tokens of one sequence of N attend causally.

    Args:
      q: ``[T, H, D]``; k, v: ``[N, K, D]``.

    Returns:
      float64 ``[T, H, D]``.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (T, H, D), (N, K, _) = q.shape, k.shape
    out = np.zeros_like(q)
    for t in range(T):
        end = N - T + t + 1
        begin = 0 if sliding_window is None else max(0, end - sliding_window)
        for h in range(H):
            head = h // (H // K)
            scores = k[begin:end, head] @ q[t, h] * (D**-0.5 if scale is None else scale)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[begin:end, head]
    return out
