"""From raw logits to the distribution that is drawn from: biases, penalties, and filters."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.dims import bind
from paged_jax.sampling.state import SlotSampling


def change(
    logits: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """Add the biases, hold stop tokens back, and apply the penalties, f32[B, V].

    With neutral values every line returns its input bit for bit, so a row that asks for none of it
    does not see whether a neighbour does.
    """
    vocab_size = logits.shape[1]
    is_held = active & (positions < rows.held_until)
    held_ids = jnp.where(is_held[:, None], rows.held_ids, vocab_size)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    column = lax.broadcasted_iota(jnp.int32, rows.bias_ids.shape, 1)
    is_over = (column < rows.num_start_ids[:, None]) & (positions >= rows.start_until)[:, None]
    bias = jnp.where(is_over, 0.0, rows.bias_values)
    z = logits.at[row, rows.bias_ids].add(bias, mode="drop")
    z = z.at[row, held_ids].set(-jnp.inf, mode="drop")
    is_prompt = rows.prompt_mask.at[slots].get(mode="clip")
    counts = rows.output_counts.at[slots].get(mode="clip")
    seen = counts > 0
    r = rows.repetition_penalty[:, None]
    z = jnp.where(is_prompt | seen, jnp.where(z > 0, z / r, z * r), z)
    z = z - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return z - jnp.where(seen, rows.presence_penalty[:, None], 0.0)


def filter_drawn(z: jax.Array, rows: SlotSampling, is_drawn: jax.Array) -> jax.Array:
    """`filter_logits` of the rows that are drawn, f32[B, V]; the others mean nothing."""
    # Those are greedy: their filters, whatever they are, must not cost a search.
    return filter_logits(
        z,
        temperature=jnp.where(is_drawn, rows.temperature, 1.0),
        min_p=jnp.where(is_drawn, rows.min_p, 0.0),
        top_k=jnp.where(is_drawn, rows.top_k, 0),
        top_p=jnp.where(is_drawn, rows.top_p, 1.0),
    )


def filter_logits(
    logits: jax.Array,
    *,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """The distribution that `sample` draws from, as unnormalised log-probabilities.

    The temperature comes first, then min_p, top_k and top_p, in the order of vLLM V1.

    Args:
      logits: [S, V], after bias and penalties; no NaN and no +inf.
      temperature: f32[S], > 0.
      min_p: f32[S]; 0 is off.
      top_k: i32[S]; 0 is off.
      top_p: f32[S]; 1 is off. Refers to the mass that min_p and top_k leave. Sums are made in
        float32, so a set whose mass is within some 1e-6 of top_p may count as either.

    Returns:
      f32[S, V]: -inf for dropped tokens, 0 for the most probable one, and in between the others.

    Raises:
      ValueError: shapes disagree (at trace time).

    Example:
      >>> logits = jnp.log(jnp.array([[0.5, 0.125, 0.375]]))
      >>> kept = filter_logits(logits, temperature=jnp.ones(1), min_p=jnp.zeros(1),
      ...                      top_k=jnp.array([2]), top_p=jnp.ones(1))
      >>> jnp.isfinite(kept).tolist()
      [[True, False, True]]
    """
    per_row = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    bind("filter_logits", logits=(logits, "SV"), **{k: (a, "S") for k, a in per_row.items()})
    z = logits.astype(jnp.float32)
    largest = jnp.max(z, axis=1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    # Relative to the largest before the division: no temperature can overflow then.
    scaled = (z - largest) / temperature[:, None]
    # In logarithms, because log(1) = 0 keeps exactly the largest and log(0) = -inf keeps all.
    z = jnp.where(scaled >= jnp.log(min_p)[:, None], z, -jnp.inf)
    # The cuts are searched among the logits: temperature does not change their order, but its
    # rounding could merge neighbours.
    cuts = (_no_cut, _top_k_cut, _top_p_cut, _both_cuts)
    has_k, has_p = (jnp.any(x).astype(jnp.int32) for x in (top_k > 0, top_p < 1))
    cut = lax.switch(has_k + 2 * has_p, cuts, z, scaled, top_k, top_p)
    return jnp.where((z > -jnp.inf) & cut.is_kept(z), scaled, -jnp.inf)


class _Cut(NamedTuple):
    """What each row keeps: all above a logit, and of those that equal it the first.

    Attributes:
      logit: f32[S]; -inf keeps all.
      last: i32[S], the id of the last of the equal ones that is kept.
    """

    logit: jax.Array
    last: jax.Array

    def is_kept(self, z: jax.Array) -> jax.Array:
        """Which entries of f32[S, V] are kept, bool[S, V]."""
        ids = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        logit, last = self.logit[:, None], self.last[:, None]
        return (z > logit) | ((z == logit) & (ids <= last))


def _no_cut(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    num_rows, vocab_size = z.shape
    return _Cut(
        jnp.full(num_rows, -jnp.inf, jnp.float32), jnp.full(num_rows, vocab_size, jnp.int32)
    )


def _top_k_cut(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    """Keep the top_k largest of each row; where top_k is 0, all."""
    logit = jnp.where(top_k > 0, _highest_cut(z, None, top_k), -jnp.inf)
    num_ties = top_k - count(z > logit[:, None])
    return _Cut(logit, _place_of(z == logit[:, None], num_ties))


def _top_p_cut(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    """Keep the smallest set with mass top_p of each row; where top_p is 1, all."""
    weights = jnp.where(z == -jnp.inf, 0.0, jnp.exp(scaled))
    goal = top_p * jnp.sum(weights, axis=1)
    logit = _highest_cut(z, weights, goal)
    # A goal that rounds to 0 is reached by the empty set: one token stays even so.
    logit = jnp.minimum(logit, jnp.max(z, axis=1))
    logit = jnp.where(top_p < 1, logit, -jnp.inf)
    is_tie = z == logit[:, None]
    # Equal logits have equal weights, so the number of them that is needed is a quotient.
    weight = jnp.max(jnp.where(is_tie, weights, 0.0), axis=1)
    above = jnp.sum(_above(z > logit[:, None], weights), axis=1)
    missing = jnp.ceil((goal - above) / jnp.where(weight > 0, weight, 1.0))
    num_ties = jnp.maximum(missing, 1.0).astype(jnp.int32)
    return _Cut(logit, _place_of(is_tie, num_ties))


def _both_cuts(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    """What top_p keeps of what top_k keeps."""
    by_k = _top_k_cut(z, scaled, top_k, top_p)
    by_p = _top_p_cut(jnp.where(by_k.is_kept(z), z, -jnp.inf), scaled, top_k, top_p)
    is_cut = by_p.logit > -jnp.inf
    return _Cut(*(jnp.where(is_cut, p, k) for p, k in zip(by_p, by_k, strict=True)))


def _highest_cut(z: jax.Array, weights: jax.Array | None, goal: jax.Array) -> jax.Array:
    """The highest float32 that entries of each row reach which together weigh `goal`, f32[S].

    Weights are f32[S, V], none below 0, or 1 each; -inf where all entries together weigh less.

    A search over the bit patterns of float32, which is exact: the sums are made in a fixed order,
    and rounding keeps sums of what is not negative monotone. On CPUs by halves, in 32 passes over
    the row. On GPUs and TPUs, where to start a pass takes as long as to make it, 15 cuts are tried
    in each of 8 passes. Measured on 2 CPU cores at S = 16, V = 49152, by halves: 3 to 6 ms, where
    jnp.sort takes 143 ms. lax.top_k takes 1.1 ms for k = 20 and 2.7 ms for k = 256, but k would
    have to be a static bound, and top_p has none.
    """
    args = z, goal, *(() if weights is None else (weights,))
    return lax.platform_dependent(
        *args,
        cpu=lambda *args: search_cut(*args, num_bits=1),
        default=lambda *args: search_cut(*args, num_bits=4),
    )


# Floats in the order of their values, as unsigned integers; what lies outside is no number.
_MINUS_INFINITY, _INFINITY = np.uint32(0x007FFFFF), np.uint32(0xFF800000)
# Entries that one thread block of a GPU sums.
_GROUP = 2048
# Entries of which one is looked for at once; most vocabularies are multiples of it.
_TIE_GROUP = 256


def search_cut(
    z: jax.Array, goal: jax.Array, weights: jax.Array | None = None, *, num_bits: int
) -> jax.Array:
    """`_highest_cut` by trying 2**num_bits - 1 cuts in each of 32 / num_bits passes."""
    num_rows, vocab_size = z.shape
    num_cuts = 2**num_bits - 1
    # One pass for all cuts has two kernels, which leave as little to the second as that can sum.
    group = _GROUP if num_cuts > 1 else vocab_size
    widths = ((0, 0), (0, -vocab_size % group))
    z = jnp.pad(z, widths, constant_values=-jnp.inf).reshape(num_rows, -1, group)
    if weights is not None:
        weights = jnp.pad(weights, widths).reshape(z.shape)

    def as_float(order):
        # The bits of negative floats count downwards.
        bits = jnp.where(order >> 31 == 1, order ^ np.uint32(1 << 31), ~order)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def step(i, low):
        width = jnp.uint32(1) << (32 - num_bits * (i + 1)).astype(jnp.uint32)
        cuts = low[None] + width * jnp.arange(1, num_cuts + 1, dtype=jnp.uint32)[:, None]
        floats = as_float(cuts)[:, :, None, None]
        parts = [_sum(_above(z >= floats[i], weights)) for i in range(num_cuts)]
        is_reached = _sum(jnp.stack(parts)) >= goal[None]
        # What lies past the largest integer begins again at 0.
        is_reached &= (cuts > low[None]) & (cuts < _INFINITY)
        return low + width * jnp.sum(is_reached, axis=0, dtype=jnp.uint32)

    low = jnp.full(num_rows, _MINUS_INFINITY)
    return as_float(lax.fori_loop(0, 32 // num_bits, step, low))


def _sum(x: jax.Array) -> jax.Array:
    # Of 32 bits, whatever JAX's settings.
    return jnp.sum(x, axis=2, dtype=x.dtype)


def _above(is_above: jax.Array, weights: jax.Array | None) -> jax.Array:
    """What the entries above a cut add to a sum: their weights, or 1 each."""
    return is_above.astype(jnp.int32) if weights is None else jnp.where(is_above, weights, 0.0)


def _place_of(mask: jax.Array, number: jax.Array) -> jax.Array:
    """The id of the number-th True of each row of bool[S, V], i32[S]; at least V without it.

    Which group of ids it lies in, and where in that group: a cumulative sum over whole rows would
    take as long as the search for the cut.
    """
    num_rows, vocab_size = mask.shape
    groups = jnp.pad(mask, ((0, 0), (0, -vocab_size % _TIE_GROUP)))
    groups = groups.reshape(num_rows, -1, _TIE_GROUP)
    number = number[:, None]
    ends = jnp.cumsum(jnp.sum(groups, axis=2, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    group = count(ends < number)
    num_before = jnp.max(jnp.where(ends < number, ends, 0), axis=1, keepdims=True)
    members = jnp.take_along_axis(groups, group[:, None, None], axis=1, mode="clip")[:, 0]
    ends = num_before + jnp.cumsum(members, axis=1, dtype=jnp.int32)
    return group * _TIE_GROUP + count(ends < number)


def when(
    is_needed: jax.Array, function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """function(x), which must be x where it is not needed; then it is skipped at run time.

    Not on GPUs, where the host waits for each condition, for longer than these functions take.
    """
    is_cheap = lax.platform_dependent(cuda=lambda: True, rocm=lambda: True, default=lambda: False)
    return lax.cond(is_needed | is_cheap, function, lambda x: x, x)


def count(mask: jax.Array) -> jax.Array:
    """How many entries of each row are true, i32[S]."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)
