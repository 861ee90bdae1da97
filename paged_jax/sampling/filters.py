"""Processing of logits before a token is drawn: biases, penalties, masks and filters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.dims import bind
from paged_jax.formatting import short_repr
from paged_jax.sampling.state import SlotSampling, num_mask_words


def change_logits(
    logits: jax.Array,
    is_changed: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array,
    constraints: "Constraints | None",
) -> jax.Array:
    """Apply biases, penalties, masks, bad words and allowed tokens. Return logits f32[B, V].

    `is_changed`, bool[B], says whether any of these settings changes the logits of a row. The other
    arguments are as for `sample`.
    """

    def adjust(z: jax.Array) -> jax.Array:
        return mask(adjust_logits(z, rows, positions, active, slots))

    def restrict(z: jax.Array) -> jax.Array:
        z = adjust_logits(z, rows, positions, active, slots)
        return mask(restrict_logits(z, rows, positions, slots))

    def mask(z: jax.Array) -> jax.Array:
        return z if constraints is None else constraints.mask(z, positions, active, slots)

    is_restricted = jnp.any(rows.is_restricted & active)
    return apply_first([(is_restricted, restrict), (jnp.any(is_changed), adjust)], logits)


def adjust_logits(
    logits: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """Apply biases and penalties to logits, and exclude stop tokens before min_tokens.

    Return logits f32[B, V]. Settings with neutral values leave a row bitwise unchanged. So the
    result of a row does not depend on whether other rows need this function.
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


def restrict_logits(
    z: jax.Array, rows: SlotSampling, positions: jax.Array, slots: jax.Array
) -> jax.Array:
    """Exclude tokens that are not allowed or would complete a bad word.

    Return logits f32[B, V], which are -inf for excluded tokens. If only some tokens are allowed, a
    logit of -inf of an allowed token becomes the lowest finite number, so that a token can be
    drawn. If the bad words would exclude every token of a row, they are ignored for this row.
    """
    masks = rows.allowed_masks.at[slots].get(mode="clip")
    is_limited = jnp.any(masks != -1, axis=1, keepdims=True)
    z = jnp.where(is_limited, _masked(z, masks), z)
    words = rows.bad_words.at[slots].get(mode="clip")
    first, last = words[..., :-1], words[..., -1]
    num_recent = rows.recent_ids.shape[1]
    # Columns of `recent_ids` with the tokens of the last L - 1 positions, the oldest first.
    columns = positions[:, None] + jnp.arange(1, num_recent, dtype=jnp.int32)[None]
    recent = jnp.take_along_axis(rows.recent_ids, columns % num_recent, axis=1)
    is_begun = jnp.all((first < 0) | (first == recent[:, None]), axis=2)
    completing = jnp.where(is_begun, last, z.shape[1])
    row = jnp.arange(z.shape[0], dtype=jnp.int32)[:, None]
    # The bad words must not exclude all possible tokens of a row. So count the possible tokens that
    # they exclude, each token once. It would be simpler to compare the logits before and after the
    # exclusion, but this needs a copy of the logits.
    is_possible = z.at[row, completing].get(mode="fill", fill_value=-jnp.inf) > -jnp.inf
    is_same = completing[:, :, None] == completing[:, None]
    is_repeated = jnp.any(is_same & jnp.tri(is_same.shape[1], k=-1, dtype=jnp.bool_)[None], axis=2)
    is_left = count_true(z > -jnp.inf) > count_true(is_possible & ~is_repeated)
    completing = jnp.where(is_left[:, None], completing, z.shape[1])
    return z.at[row, completing].set(-jnp.inf, mode="drop")


def _masked(z: jax.Array, masks: jax.Array) -> jax.Array:
    """Set logits of excluded tokens to -inf. Return logits f32[B, V].

    Args:
      z: f32[B, V], the logits. A logit of -inf of an allowed token becomes the lowest finite
        number, so that the token can be drawn.
      masks: i32[B, ceil(V / 32)], one bit for each allowed token, see `mask_of`.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : z.shape[1]] == 1
    return jnp.where(allowed, jnp.maximum(z, jnp.finfo(z.dtype).min), -jnp.inf)


def next_recent_ids(
    rows: SlotSampling, token_ids: jax.Array, positions: jax.Array, active: jax.Array
) -> jax.Array:
    """Return the updated `recent_ids` of the rows, i32[B, L].

    Args:
      rows: the sampling state of each row.
      token_ids: i32[B], the new tokens.
      positions: i32[B], their positions in the sequences.
      active: bool[B]; inactive rows do not change.
    """
    column = lax.broadcasted_iota(jnp.int32, rows.recent_ids.shape, 1)
    is_new = (column == (positions % column.shape[1])[:, None]) & active[:, None]
    return jnp.where(is_new, token_ids[:, None], rows.recent_ids)


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
    per_row = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    bind("filter_logits", logits=(logits, "SV"), **{k: (a, "S") for k, a in per_row.items()})
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
    has_k, has_p = (jnp.any(x).astype(jnp.int32) for x in (top_k > 0, top_p < 1))
    cut = lax.switch(has_k + 2 * has_p, cuts, z, scaled, top_k, top_p)
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
    goal = top_p * jnp.sum(weights, axis=1)
    logit = _highest_cut(z, weights, goal)
    # Keep at least the most probable token, even if `goal` is rounded to 0.
    logit = jnp.minimum(logit, jnp.max(z, axis=1))
    logit = jnp.where(top_p < 1, logit, -jnp.inf)
    is_tie = z == logit[:, None]
    # Tokens with a logit equal to the cut-off have equal weights. Keep as many of them as needed to
    # reach `goal`: the missing weight, divided by the weight of one of these tokens, rounded up.
    weight = jnp.max(jnp.where(is_tie, weights, 0.0), axis=1)
    above = jnp.sum(_weights_above(z > logit[:, None], weights), axis=1)
    missing = jnp.ceil((goal - above) / jnp.where(weight > 0, weight, 1.0))
    num_ties = jnp.maximum(missing, 1.0).astype(jnp.int32)
    return _Cut(logit, _nth_true(is_tie, num_ties))


def _both_cuts(z: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> _Cut:
    """Return the cut-off that applies top_k first, then top_p to the tokens that top_k keeps."""
    by_k = _top_k_cut(z, scaled, top_k, top_p)
    by_p = _top_p_cut(jnp.where(by_k.is_kept(z), z, -jnp.inf), scaled, top_k, top_p)
    is_cut = by_p.logit > -jnp.inf
    return _Cut(*(jnp.where(is_cut, p, k) for p, k in zip(by_p, by_k, strict=True)))


def _highest_cut(z: jax.Array, weights: jax.Array | None, goal: jax.Array) -> jax.Array:
    """Return the highest cut-off at which the kept tokens weigh at least `goal` in total.

    Tokens with a logit >= the cut-off are kept. The cut-off of a row is -inf if its total weight is
    less than `goal`.

    The search tries bit patterns of float32 numbers. It is exact: sums are computed in a fixed
    order, so rounded sums of non-negative weights are monotone. On CPUs it is a binary search with
    32 passes over each row. On GPUs and TPUs, launching a pass takes as long as the pass itself, so
    8 passes try 15 cut-offs each. Measured on 2 CPU cores at S = 16, V = 49152: binary search 3 to
    6 ms, jnp.sort 143 ms. lax.top_k takes 1.1 ms for k = 20 and 2.7 ms for k = 256, but it needs a
    static bound for k, which does not exist for top_p.

    Args:
      z: f32[S, V], the logits.
      weights: f32[S, V], weights >= 0 of the tokens; None gives each token the weight 1.
      goal: [S], the required total weight.

    Returns:
      f32[S], the cut-offs.
    """
    args = z, goal, *(() if weights is None else (weights,))
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
    z: jax.Array, goal: jax.Array, weights: jax.Array | None = None, *, num_bits: int
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
        is_reached = _sum(jnp.stack(parts)) >= goal[None]
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


def apply_first(
    cases: Sequence[tuple[jax.Array, Callable[[jax.Array], jax.Array]]], x: jax.Array
) -> jax.Array:
    """Apply the first function with a True condition to `x`; return `x` if all are False.

    No second function is applied, so each function must include the work of all later functions. On
    GPUs, ``cases[0]`` is applied even if its condition is False, because the host would wait longer
    for the conditions than its function takes. So this function must be correct in any case.

    Args:
      cases: pairs of a condition, bool[], and a function. The function takes an array and returns
        an array of the same shape and dtype.
      x: the argument of the functions.
    """
    is_cheap = lax.platform_dependent(cuda=lambda: True, rocm=lambda: True, default=lambda: False)
    conditions, functions = zip(*cases, strict=True)
    first = jnp.int32(len(cases))
    for i in reversed(range(len(cases))):
        first = jnp.where(conditions[i], i, first)
    return lax.switch(jnp.where(is_cheap, 0, first), [*functions, lambda x: x], x)


def count_true(mask: jax.Array) -> jax.Array:
    """Return the number of True entries of each row, i32[S]."""
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


NEVER = 2**31 - 1
"""A number that is larger than the position of any token."""


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constraints:
    """Restrictions by the grammars of structured outputs, for the next tokens of each slot.

    The host computes them. Before a step, it writes for each slot with a grammar: the forced
    tokens, to which the grammar allows no alternative, and a mask of the tokens that may follow the
    forced tokens. For example, with two forced tokens:

        position      start         start + 1     start + 2               start + 3
                      forced_ids[0] forced_ids[1] sampled with the mask   the row waits here until
                                                                          the host writes again

    Attributes:
      starts: i32[S], position of the first forced or masked token; -1 for a slot without a grammar.
      num_forced: i32[S], number of forced tokens, from position `starts` on.
      waits_at: i32[S], position at which the row waits until the host has written new restrictions;
        `NEVER` if the grammar has ended.
      forced_ids: i32[S, N], the forced tokens.
      masks: i32[S, ceil(V / 32)], a bit for each token, which is set if the token may follow the
        forced tokens. Token 0 is the lowest bit of the first word.

    Memory: one bit per slot and token of the vocabulary, 16 KB per slot at V = 128,000.
    """

    starts: jax.Array
    num_forced: jax.Array
    waits_at: jax.Array
    forced_ids: jax.Array
    masks: jax.Array

    @classmethod
    def create(cls, num_slots: int, vocab_size: int, max_forced: int) -> "Constraints":
        """Return constraints for slots without grammars.

        Args:
          num_slots: S.
          vocab_size: V; 0 if no slot will ever have a grammar.
          max_forced: N, maximum number of forced tokens of a slot.
        """
        return cls(
            starts=jnp.full(num_slots, -1, jnp.int32),
            num_forced=jnp.zeros(num_slots, jnp.int32),
            waits_at=jnp.full(num_slots, NEVER, jnp.int32),
            forced_ids=jnp.zeros((num_slots, max_forced), jnp.int32),
            masks=jnp.zeros((num_slots, num_mask_words(vocab_size)), jnp.int32),
        )

    @property
    def can_bind(self) -> bool:
        """Whether slots may have grammars: `create` was called with a `vocab_size` above 0."""
        return self.masks.shape[1] > 0

    def of_rows(self, slots: jax.Array) -> "Constraints":
        """Gather the constraints of the rows of a batch.

        `masks` is not gathered: it keeps its S rows, and `mask` indexes it by slot.

        Args:
          slots: i32[B], the slot of each row; any value for rows that are never active.
        """
        parts = self.starts, self.num_forced, self.waits_at, self.forced_ids
        parts = [x.at[slots].get(mode="clip") for x in parts]
        return Constraints(*parts, masks=self.masks)

    def write(
        self,
        slots: jax.Array,
        starts: jax.Array,
        num_forced: jax.Array,
        waits_at: jax.Array,
        forced_ids: jax.Array,
        masks: jax.Array,
    ) -> "Constraints":
        """Replace the rows of some slots. Return the new constraints.

        `slots`, i32[S], has the slots to replace, padded with negative numbers. Each other argument
        has S new rows for the attribute of the same name.
        """
        num_slots = self.starts.shape[0]
        slots = jnp.where(slots >= 0, slots, num_slots)
        new = Constraints(starts, num_forced, waits_at, forced_ids, masks)
        return jax.tree.map(lambda old, x: old.at[slots].set(x, mode="drop"), self, new)

    def limit(self, max_lengths: jax.Array) -> jax.Array:
        """Return `max_lengths` i32[B], limited to `waits_at` for rows with a grammar."""
        return jnp.where(self.starts >= 0, jnp.minimum(max_lengths, self.waits_at), max_lengths)

    def is_masked(self, positions: jax.Array) -> jax.Array:
        """Return, for each row, whether its mask applies at its position, bool[B]."""
        return (self.starts >= 0) & (positions == self.starts + self.num_forced)

    def mask(
        self, logits: jax.Array, positions: jax.Array, active: jax.Array, slots: jax.Array
    ) -> jax.Array:
        """Set logits of tokens that the masks exclude to -inf. Return logits f32[B, V].

        A row is changed only if it is active and its mask applies at its position. A logit of -inf
        of an allowed token then becomes the lowest finite number, so that the token can be drawn.
        """
        bound = _masked(logits, self.masks.at[slots].get(mode="clip"))
        return jnp.where((active & self.is_masked(positions))[:, None], bound, logits)

    def force(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return `token_ids` i32[B], replaced in rows at the position of a forced token."""
        place = positions - self.starts
        is_forced = (self.starts >= 0) & (place >= 0) & (place < self.num_forced)
        place = jnp.clip(place, 0, self.forced_ids.shape[1] - 1)
        known = jnp.take_along_axis(self.forced_ids, place[:, None], axis=1)[:, 0]
        return jnp.where(is_forced, known, token_ids)
