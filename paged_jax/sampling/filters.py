"""Filters of logits before a random draw: temperature, min_p, top_k and top_p."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.dims import bind


def filter_logits(
    logits: jax.Array,
    *,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Apply temperature, min_p, top_k and top_p, in this order, which is the order of vLLM V1.

    Return the unnormalised log-probabilities of the distribution for the random draw.

    Args:
      logits: [S, V], after bias and penalties; no NaN and no +inf.
      temperature: f32[S], > 0.
      min_p: f32[S]; 0 is off.
      top_k: i32[S]; 0 is off.
      top_p: f32[S]; 1 is off. It is a fraction of the probability mass that remains after min_p and
        top_k. Sums are computed in float32. So if the mass of a set of tokens differs from the goal
        by less than about 1e-6, rounding decides whether the set reaches it.

    Returns:
      f32[S, V]: -inf for dropped tokens, 0 for the most probable token, at most 0 for the others.

    Raises:
      ValueError: shapes disagree (at trace time).

    Example:
      >>> logits = jnp.log(jnp.array([[0.5, 0.125, 0.375]]))
      >>> kept = filter_logits(logits, temperature=jnp.ones(1), min_p=jnp.zeros(1),
      ...                      top_k=jnp.array([2]), top_p=jnp.ones(1))
      >>> jnp.isfinite(kept).tolist()
      [[True, False, True]]
    """
    row_params = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    bind("filter_logits", logits=(logits, "SV"), **{k: (a, "S") for k, a in row_params.items()})
    z = logits.astype(jnp.float32)
    largest = jnp.max(z, axis=1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    # Subtract the largest logit before the division, to prevent overflow at low temperatures.
    scaled = (z - largest) / temperature[:, None]
    # Compare logarithms of probabilities, because that is exact for both extremes of min_p: log(1)
    # = 0 keeps only the largest logit, and log(0) = -inf keeps all.
    z = jnp.where(scaled >= jnp.log(min_p)[:, None], z, -jnp.inf)
    # The cut-offs of top_k and top_p are logits before the division by the temperature, because the
    # division may round different logits to the same value.
    cuts = (_no_cut, _top_k_cut, _top_p_cut, _both_cuts)
    has_top_k, has_top_p = (jnp.any(x).astype(jnp.int32) for x in (top_k > 0, top_p < 1))
    cut = lax.switch(has_top_k + 2 * has_top_p, cuts, z, scaled, top_k, top_p)
    return jnp.where((z > -jnp.inf) & cut.is_kept(z), scaled, -jnp.inf)


class _Cut(NamedTuple):
    """Cut-off of each row, which separates the tokens that are kept from the others.

    Attributes:
      logit: f32[S]. Tokens with a larger logit are kept; -inf keeps all tokens.
      last: i32[S]. Tokens with a logit equal to `logit` are kept if their id is at most `last`.
    """

    logit: jax.Array
    last: jax.Array

    def is_kept(self, z: jax.Array) -> jax.Array:
        """Return whether each token is kept, bool[S, V], for logits `z` f32[S, V]."""
        ids = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        logit, last = self.logit[:, None], self.last[:, None]
        return (z > logit) | ((z == logit) & (ids <= last))


def _no_cut(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    num_rows, vocab_size = z.shape
    return _Cut(
        jnp.full(num_rows, -jnp.inf, jnp.float32), jnp.full(num_rows, vocab_size, jnp.int32)
    )


def _top_k_cut(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    """Return the cut-off that keeps the `top_k` most probable tokens, or all if `top_k` is 0."""
    logit = jnp.where(top_k > 0, _highest_cut(z, None, top_k), -jnp.inf)
    num_ties = top_k - count_true(z > logit[:, None])
    return _Cut(logit, _nth_true(z == logit[:, None], num_ties))


def _top_p_cut(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    """Return the cut-off that keeps the smallest set with total probability top_p.

    It keeps all tokens if top_p is 1. `z` has the logits, and `scaled` the logits divided by the
    temperature, both f32[S, V].
    """
    weights = jnp.where(z == -jnp.inf, 0.0, jnp.exp(scaled))
    target_sum = top_p * jnp.sum(weights, axis=1)
    logit = _highest_cut(z, weights, target_sum)
    # Keep at least the most probable token, even if `target_sum` is rounded to 0.
    logit = jnp.minimum(logit, jnp.max(z, axis=1))
    logit = jnp.where(top_p < 1, logit, -jnp.inf)
    is_tie = z == logit[:, None]
    # Tokens with a logit equal to the cut-off have equal weights. Keep as many of them as needed to
    # reach `target_sum`: the missing weight, divided by the weight of one of them, rounded up.
    weight = jnp.max(jnp.where(is_tie, weights, 0.0), axis=1)
    weight_above = jnp.sum(_weights_above(z > logit[:, None], weights), axis=1)
    num_missing = jnp.ceil((target_sum - weight_above) / jnp.where(weight > 0, weight, 1.0))
    num_ties = jnp.maximum(num_missing, 1.0).astype(jnp.int32)
    return _Cut(logit, _nth_true(is_tie, num_ties))


def _both_cuts(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    """Return the cut-off that applies top_k first, then top_p to the tokens that top_k keeps."""
    k_cut = _top_k_cut(z, scaled, top_k, top_p)
    p_cut = _top_p_cut(jnp.where(k_cut.is_kept(z), z, -jnp.inf), scaled, top_k, top_p)
    is_cut = p_cut.logit > -jnp.inf
    return _Cut(*(jnp.where(is_cut, p, k) for p, k in zip(p_cut, k_cut, strict=True)))


def _highest_cut(z: jax.Array, weights: jax.Array | None, target: jax.Array) -> jax.Array:
    """Return the highest cut-off at which the kept tokens weigh at least `target` in total.

    Tokens with a logit >= the cut-off are kept. The cut-off of a row is -inf if its total weight is
    less than `target`.

    The search tries bit patterns of float32 numbers. It is exact: sums are computed in a fixed
    order, so rounded sums of non-negative weights are monotone. On CPUs it is a binary search with
    32 passes over each row. On GPUs and TPUs, launching a pass takes as long as the pass itself, so
    8 passes try 15 cut-offs each. Measured on 2 CPU cores at S = 16, V = 49152: binary search 3 to
    6 ms, jnp.sort 143 ms. lax.top_k takes 1.1 ms for k = 20 and 2.7 ms for k = 256, but it needs a
    static bound for k, which does not exist for top_p.

    Args:
      z: f32[S, V], the logits.
      weights: f32[S, V], weights >= 0 of the tokens; None gives each token the weight 1.
      target: [S], the required total weight.

    Returns:
      f32[S], the cut-offs.
    """
    args = z, target, *(() if weights is None else (weights,))
    return lax.platform_dependent(
        *args,
        cpu=lambda *args: search_cut(*args, num_bits=1),
        default=lambda *args: search_cut(*args, num_bits=4),
    )


# `search_cut` maps float32 numbers to unsigned integers in the same order. These are the integers
# of -inf and +inf. The integers of NaNs are outside of this range.
_MINUS_INFINITY, _INFINITY = np.uint32(0x007FFFFF), np.uint32(0xFF800000)
# Number of elements that a thread block of a GPU sums in `search_cut`.
_GROUP = 2048
# Size of the groups in `_nth_true`. Most vocabulary sizes are multiples of it.
_TIE_GROUP = 256


def search_cut(
    z: jax.Array, target: jax.Array, weights: jax.Array | None = None, *, num_bits: int
) -> jax.Array:
    """Compute `_highest_cut` in 32 / num_bits passes, which try 2**num_bits - 1 cut-offs each."""
    num_rows, vocab_size = z.shape
    num_cuts = 2**num_bits - 1
    # With several cut-offs per pass (on GPUs and TPUs), one kernel sums groups of elements, and
    # another adds the sums of the groups. With one cut-off per pass, a row is a single group.
    group = _GROUP if num_cuts > 1 else vocab_size
    widths = ((0, 0), (0, -vocab_size % group))
    z = jnp.pad(z, widths, constant_values=-jnp.inf).reshape(num_rows, -1, group)
    if weights is not None:
        weights = jnp.pad(weights, widths).reshape(z.shape)

    def as_float(order):
        # A negative float with a larger bit pattern has a smaller value. So invert all bits of
        # negative floats.
        bits = jnp.where(order >> 31 == 1, order ^ np.uint32(1 << 31), ~order)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def step(i, low):
        width = jnp.uint32(1) << (32 - num_bits * (i + 1)).astype(jnp.uint32)
        cuts = low[None] + width * jnp.arange(1, num_cuts + 1, dtype=jnp.uint32)[:, None]
        floats = as_float(cuts)[:, :, None, None]
        parts = [_sum(_weights_above(z >= floats[i], weights)) for i in range(num_cuts)]
        is_reached = _sum(jnp.stack(parts)) >= target[None]
        # Ignore cut-offs that have overflowed the unsigned integers and wrapped around.
        is_reached &= (cuts > low[None]) & (cuts < _INFINITY)
        return low + width * jnp.sum(is_reached, axis=0, dtype=jnp.uint32)

    low = jnp.full(num_rows, _MINUS_INFINITY)
    return as_float(lax.fori_loop(0, 32 // num_bits, step, low))


def _sum(x: jax.Array) -> jax.Array:
    # The dtype is given, because sums of integers would have 64 bits if x64 is enabled.
    return jnp.sum(x, axis=2, dtype=x.dtype)


def _weights_above(is_above: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return the weights of the tokens for which `is_above` is True, and 0 for the others.

    If `weights` is None, each token has the weight 1.
    """
    return is_above.astype(jnp.int32) if weights is None else jnp.where(is_above, weights, 0.0)


def _nth_true(mask: jax.Array, number: jax.Array) -> jax.Array:
    """Return the column of the `number`-th True in each row, i32[S].

    It is V or larger if a row has fewer True elements. The function first finds the group of
    `_TIE_GROUP` columns, then the column within the group. This is faster than a cumulative sum
    over the whole row, which would take as long as the search for the cut-off.

    Args:
      mask: bool[S, V].
      number: i32[S], counted from 1.
    """
    num_rows, vocab_size = mask.shape
    groups = jnp.pad(mask, ((0, 0), (0, -vocab_size % _TIE_GROUP)))
    groups = groups.reshape(num_rows, -1, _TIE_GROUP)
    number = number[:, None]
    ends = jnp.cumsum(jnp.sum(groups, axis=2, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    group = count_true(ends < number)
    num_before = jnp.max(jnp.where(ends < number, ends, 0), axis=1, keepdims=True)
    members = jnp.take_along_axis(groups, group[:, None, None], axis=1, mode="clip")[:, 0]
    ends = num_before + jnp.cumsum(members, axis=1, dtype=jnp.int32)
    return group * _TIE_GROUP + count_true(ends < number)


def count_true(mask: jax.Array) -> jax.Array:
    """Return the number of True entries of each row, i32[S]."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)
