"""Online softmax of the prefill kernel, in the registers of a computing warpgroup.

See `paged_jax.kernels.mosaic_gpu.flash_prefill`. A thread holds elements of 2 of the 64 rows, in
the layout of the results of `wgmma`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.mosaic_gpu.launch import compute_tanh, plgpu
from paged_jax.kernels.mosaic_gpu.query_tiles import ROWS, PrefillSizes
from paged_jax.kernels.op_args import Options

# Initial peak (largest score so far) of the softmax. If it were -inf, ``peak - new_peak`` would be
# NaN before the first token.
_LOWEST = float(np.finfo(np.float32).min)


class PrefillSoftmax(NamedTuple):
    """Online softmax over the tokens so far, for the 64 rows of a warpgroup.

    Attributes:
      peak: f32 ``[64]``, the largest score so far, times log2(e).
      total: f32 ``[64]``, sum of the weights, the denominator of the softmax.
      out: f32 ``[64, lanes]``, weighted sum of the values. If two warpgroups have the same rows,
        each has half of the lanes.
    """

    peak: jax.Array
    total: jax.Array
    out: jax.Array

    @classmethod
    def start(cls, num_lanes: int) -> "PrefillSoftmax":
        """Return the state before the first token."""
        return cls(
            _as_rows(jnp.full((ROWS,), _LOWEST, jnp.float32)),
            _as_rows(jnp.zeros((ROWS,), jnp.float32)),
            plgpu.layout_cast(jnp.zeros((ROWS, num_lanes), jnp.float32), plgpu.Layout.WGMMA),
        )


def _as_rows(x: jax.Array) -> jax.Array:
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA.reduce(1))


def is_seen_by(
    like: jax.Array, start: jax.Array, position: jax.Array, options: Options
) -> jax.Array:
    """Return a mask of the shape of `like`: whether the query of each row sees each token.

    `position` contains the position of each row's query. `start` is the position of the first
    token.
    """
    token = plgpu.broadcasted_iota(jnp.int32, like.shape, 1, layout=plgpu.Layout.WGMMA)
    distance = lax.broadcast_in_dim(position - start, like.shape, [0]) - token
    is_seen = distance >= 0
    if options.sliding_window is not None:
        is_seen &= distance < options.sliding_window
    return is_seen


def scale_scores(scores: jax.Array, options: Options) -> tuple[jax.Array, float]:
    """Return scores, and a positive factor that the caller must multiply them by.

    The product is the scaled and capped score times log2(e).
    """
    if options.soft_cap is not None:
        scores = compute_tanh(scores * np.float32(options.scale / options.soft_cap))
        return scores, options.soft_cap / math.log(2)
    unit = options.scale / math.log(2)
    # The factor must be positive, so that the order of the scores does not change.
    return (scores, unit) if unit > 0 else (scores * np.float32(unit), 1.0)


def weigh(
    softmax: PrefillSoftmax, scores: jax.Array, unit: float
) -> tuple[PrefillSoftmax, jax.Array]:
    """Add scores to the softmax; return its new state, and the weights ``[64, T]``.

    `unit` is the factor from `scale_scores`. The weighted sum `out` is rescaled to the new peak.
    The caller then adds the products of the weights and the values to it.
    """
    factor = np.float32(unit)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=1) * factor)
    decay = jnp.exp2(softmax.peak - peak)
    weights = jnp.exp2(scores * factor - _as_lanes(peak, scores))
    total = softmax.total * decay + jnp.sum(weights, axis=1)
    return PrefillSoftmax(peak, total, softmax.out * _as_lanes(decay, softmax.out)), weights


def _as_lanes(column: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast a vector with a number per row to the shape of `like`."""
    return lax.broadcast_in_dim(column, like.shape, [0])


def load_sinks(sinks_ref: Any, head: jax.Array, sizes: PrefillSizes) -> jax.Array | None:
    """Return the sink of each row's query head times log2(e), f32 ``[64]``; None without sinks."""
    if sinks_ref is None:
        return None
    sinks, first = jnp.full(head.shape, -jnp.inf, jnp.float32), lax.axis_index("place")
    for turn in range(sizes.slice_size):
        sink = sinks_ref[first * sizes.slice_size + turn].astype(jnp.float32)
        sinks = jnp.where(head == turn, sink * np.float32(1 / math.log(2)), sinks)
    return sinks


def finish(
    softmax: PrefillSoftmax, sinks: jax.Array | None, is_query: jax.Array, value_scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp of each row; 0 and -inf in rows without a query."""
    peak, total, out = softmax
    if sinks is not None:
        new_peak = jnp.maximum(peak, sinks)
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + jnp.exp2(sinks - new_peak)
        out, peak = out * _as_lanes(decay, out), new_peak
    total = jnp.where(is_query, total, 1.0)
    lse = jnp.where(is_query, peak * np.float32(math.log(2)) + jnp.log(total), -jnp.inf)
    factor = np.float32(value_scale) / total
    out = jnp.where(_as_lanes(is_query, out), out * _as_lanes(factor, out), 0.0)
    return out, lse
