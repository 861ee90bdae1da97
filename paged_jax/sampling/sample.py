"""Choice of the next token of each row, inside the compiled decode step.

A token depends only on its row of logits, the seed, the index of the sample in its request, and its
position in the sequence. It does not depend on the slot, on the other rows of the batch, or on the
number of decode steps in one program.

Each row goes through the order of vLLM V1:

    logit bias, held-back stop tokens -> penalties -> mask of a grammar
    -> [temperature 0: the largest logit]
    -> temperature and filters, see `filter_logits` -> draw

**Ties.** Tokens are ordered by logit, and equal logits by id, lowest first. top_k therefore keeps
exactly k tokens, top_p keeps the smallest set that reaches its mass, and ``top_k=1`` chooses the
same token as ``temperature=0``. (vLLM keeps all tokens that tie with the k-th.)

**Bad logits.** -inf is never chosen. NaN counts as -inf, and +inf as the largest float32, so every
token is in range. The reported log-probability of such a row is NaN, so the caller can detect it. A
row without a usable logit yields token 0.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.arguments import is_int
from paged_jax.dims import bind
from paged_jax.formatting import short_repr
from paged_jax.kernels.linear import sum_rows
from paged_jax.sampling import filters
from paged_jax.sampling.filters import Constraints
from paged_jax.sampling.state import SlotSampling, as_key, fold_in

# Group size in `_categorical`: a multiple of every backend's vector width that divides most
# vocabulary sizes, so no padded copy is needed.
_DRAW_GROUP = 128
# Fields of `SlotSampling` that are large, so `rows_of` does not copy them.
_WHOLE = ("prompt_mask", "output_counts", "allowed_masks", "bad_words")


@short_repr
class Draws(NamedTuple):
    """Tokens drawn for each row, with log-probabilities under the model's own logits.

    Attributes:
      token_ids: i32[B], the tokens; 0 for inactive rows.
      logprobs: f32[B], their log-probabilities; 0 for inactive rows, NaN for bad logits.
      ranks: i32[B], their ranks, 1 is the most probable; 0 unless requested.
      top_ids: i32[B, N], the most probable tokens; 0 unless requested.
      top_logprobs: f32[B, N], log-probabilities of `top_ids`; 0 unless requested.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array

    def pack(self) -> jax.Array:
        """Pack all fields into i32[B, 3 + 2 * N], written by one kernel instead of five."""
        columns = [x if x.ndim > 1 else x[:, None] for x in self]
        bits = [lax.bitcast_convert_type(x, jnp.int32) for x in columns]
        return jnp.concatenate(bits, axis=1)

    @classmethod
    def unpack(cls, packed: jax.Array) -> "Draws":
        """Return the draws packed in i32[..., B, 3 + 2 * N].

        The fields have the same leading dimensions. If `packed` is a NumPy array, they are views of
        it.
        """
        token_ids, logprobs, ranks = (packed[..., i] for i in range(3))
        num_top = (packed.shape[-1] - 3) // 2
        top_ids, top_logprobs = packed[..., 3 : 3 + num_top], packed[..., 3 + num_top :]
        logprobs, top_logprobs = (x.view(jnp.float32) for x in (logprobs, top_logprobs))
        return cls(token_ids, logprobs, ranks, top_ids, top_logprobs)


def sample(
    logits: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array | None = None,
    with_top: bool | jax.Array = True,
    constraints: Constraints | None = None,
    *,
    num_top: int = 0,
) -> tuple[Draws, SlotSampling]:
    """Choose one token for each active row.

    Args:
      logits: [B, V], any float dtype; converted to float32.
      rows: the sampling state of each row: the state of S slots, or `rows_of` it.
      positions: i32[B], the index of the new token in its sequence, which is the number of tokens
        before it. Together with the row's key it determines the random draw.
      active: bool[B]. The logits of inactive rows are ignored.
      slots: i32[B], the distinct slots of the active rows; any value for inactive rows. None if
        B = S and row i is slot i.
      with_top: bool[], whether to compute ranks and the most probable tokens.
      constraints: tokens that grammars allow in each row, see `Constraints.of_rows`; None if no row
        has a grammar.
      num_top: N, number of most probable tokens (static); with 0, ranks are not computed either.

    Returns:
      draws: the tokens. Their log-probabilities are computed from `logits` before bias, penalties
        and temperature (vLLM's ``raw_logprobs``); NaN for rows with NaN or +inf.
      rows: the state with the tokens of active rows counted, updated in place if donated.

    Raises:
      ValueError: shapes disagree, or `num_top` is out of range (at trace time).

    Cost: ``lax.cond`` skips at run time the work that no active row needs. A greedy batch checks
    one condition, and generates no noise, searches no cut-off and reads no counts. On GPUs, where
    the host waits for each condition, a sampled batch checks two more conditions: for filters and
    for the most probable tokens. Do not ``vmap`` this function, because that runs both branches of
    every cond. On 2 CPU cores at B = 16, V = 49152: greedy 1 ms, sampled 2 ms, with top_k or top_p
    6 to 9 ms, with both 13 to 16 ms.

    Example:
      >>> state = SlotSampling.create(2, 3)  # all slots are greedy
      >>> logits = jnp.array([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
      >>> draws, state = sample(logits, state, jnp.array([5, 0]), jnp.array([True, False]))
      >>> draws.token_ids.tolist()
      [1, 0]
    """
    slots = _check_shapes(logits, rows, positions, active, slots)
    raw = logits.astype(jnp.float32)
    is_changed = positions < rows.changed_until
    if constraints is not None:
        is_changed |= constraints.is_masked(positions)
    is_changed &= active
    is_drawn = active & (rows.temperature > 0)
    is_reported = jnp.any(active) & with_top if num_top else jnp.zeros((), jnp.bool_)

    def force(tokens):
        tokens = tokens if constraints is None else constraints.force(tokens, positions)
        return jnp.where(active, tokens, 0)

    def choose(raw, tokens):
        z = filters.change_logits(raw, is_changed, rows, positions, active, slots, constraints)
        z = _finite_or_dropped(z)
        draw = functools.partial(_draw, z, rows, positions, is_drawn)
        tokens = force(_choose(z, tokens, is_changed, is_drawn, draw))
        if not num_top:
            return unreported(raw, tokens)
        return lax.cond(is_reported, report, unreported, raw, tokens)

    def report(raw, tokens):
        return _report(raw, tokens, active, num_top).pack()

    def unreported(raw, tokens):
        return _unreported(tokens, num_top).pack()

    # Two passes over the logits compute the largest logit, its first id and the denominator.
    finite = _finite_or_dropped(raw)
    largest = jnp.max(finite, axis=1, keepdims=True)
    greedy = force(_first(finite == largest))
    # One cond covers all special cases, because each cond that returns logits copies them, and on
    # GPUs the host waits for each condition.
    is_special = jnp.any(is_changed | is_drawn) | is_reported
    chosen = lax.cond(is_special, choose, unreported, raw, greedy)
    draws = Draws.unpack(chosen)
    tokens = draws.token_ids
    logprobs = jnp.where(active, _at(raw, tokens) - log_sum_exp(raw, largest)[:, 0], 0.0)
    # Inactive rows get slot S, which is out of range, so they are skipped.
    counted = jnp.where(active, slots, rows.output_counts.shape[0])
    counts = rows.output_counts.at[counted, tokens].add(1, mode="drop")
    draws = draws._replace(logprobs=logprobs)
    recent_ids = filters.next_recent_ids(rows, tokens, positions, active)
    return draws, dataclasses.replace(rows, output_counts=counts, recent_ids=recent_ids)


def _check_shapes(
    logits: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array | None,
) -> jax.Array:
    """Check that all shapes agree, and return the slots of the rows."""
    if slots is None:
        bind("sample", logits=(logits, "SV"), output_counts=(rows.output_counts, "SV"))
        slots = jnp.arange(rows.output_counts.shape[0], dtype=jnp.int32)
    bind(
        "sample",
        logits=(logits, "BV"),
        prompt_mask=(rows.prompt_mask, "SV"),
        temperature=(rows.temperature, "B"),
        positions=(positions, "B"),
        active=(active, "B"),
        slots=(slots, "B"),
    )
    return slots


def _choose(
    z: jax.Array,
    greedy: jax.Array,
    is_changed: jax.Array,
    is_drawn: jax.Array,
    draw: Callable[[], jax.Array],
) -> jax.Array:
    """Return sampled tokens if `is_drawn`, else the ids of the largest logits, i32[B].

    Args:
      z: f32[B, V], the logits after bias, penalties and masks.
      greedy: i32[B], the ids of the largest logits before these changes.
      is_changed: bool[B], rows whose logits were changed.
      is_drawn: bool[B], rows that sample randomly.
      draw: function that returns i32[B], tokens sampled from `z`.
    """

    def largest(tokens: jax.Array) -> jax.Array:
        return jnp.where(is_changed, _argmax(z), tokens)

    def drawn(tokens: jax.Array) -> jax.Array:
        return jnp.where(is_drawn, draw(), tokens)

    tokens = filters.apply_first([(jnp.any(is_changed), largest)], greedy)
    return filters.apply_first([(jnp.any(is_drawn), drawn)], tokens)


def _unreported(tokens: jax.Array, num_top: int) -> Draws:
    """Return draws with the token ids i32[B]; all other fields are zero."""
    zeros = jnp.zeros((*tokens.shape, num_top), jnp.int32)
    none = jnp.zeros_like(tokens)
    return Draws(tokens, _as_float(none), none, zeros, _as_float(zeros))


def _report(raw: jax.Array, tokens: jax.Array, active: jax.Array, num_top: int) -> Draws:
    """Return draws with ranks and most probable tokens of active rows; 0 for other rows."""
    values, ids = top_logprobs(raw, num_top)
    return _unreported(tokens, num_top)._replace(
        ranks=jnp.where(active, ranks(raw, tokens), 0),
        top_ids=jnp.where(active[:, None], ids, 0),
        top_logprobs=jnp.where(active[:, None], values, 0.0),
    )


def rows_of(state: SlotSampling, slots: jax.Array) -> SlotSampling:
    """Return the sampling state of the rows of a batch, for `sample`.

    Args:
      state: the sampling state of S slots.
      slots: i32[B], the slots of the rows; any value for rows that are never active.

    Returns:
      The state with one entry for each row. Large fields are not copied: they keep all S slots, and
      `sample` indexes them by its argument `slots`.
    """
    whole = {name: getattr(state, name) for name in _WHOLE}
    rows = jax.tree.map(
        lambda x: x.at[slots].get(mode="clip"), dataclasses.replace(state, **dict.fromkeys(whole))
    )
    return dataclasses.replace(rows, **whole)


def top_logprobs(
    logits: jax.Array, k: int, bias: tuple[jax.Array, jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the k most probable tokens of each row and their log-probabilities.

    Args:
      logits: [S, V], the logits of the model.
      k: static, 1 <= k <= V.
      bias: token ids i32[K] and values f32[S, K] that are added to their log-probabilities.

    Returns:
      values: f32[S, k], largest first.
      ids: i32[S, k]; equal values are ordered by id.

    Raises:
      ValueError: k is out of range.

    Example:
      >>> values, ids = top_logprobs(jnp.log(jnp.array([[0.2, 0.7, 0.1]])), 2)
      >>> ids.tolist()
      [[1, 0]]
    """
    vocab_size = bind("top_logprobs", logits=(logits, "SV"))["V"]
    if not is_int(k) or not 1 <= k <= vocab_size:
        raise ValueError(
            f"top_logprobs: k must be an integer in [1, {vocab_size}], got {k!r}. "
            "Skip the call if no request needs log-probabilities."
        )
    logits = logits.astype(jnp.float32)
    if bias is None:
        values, ids = lax.top_k(logits, k)
        return values - log_sum_exp(logits), ids
    bias_ids, bias_values = bias
    biased = logits.at[:, bias_ids].add(bias_values)
    values, ids = lax.top_k(biased, k)
    return values - log_sum_exp(logits), ids


def log_sum_exp(logits: jax.Array, peak: jax.Array | None = None) -> jax.Array:
    """Return the logarithm of the softmax denominator, f32[S, 1].

    Unlike `jax.nn.logsumexp`, small batches on CPUs sum each row in the same order for any number
    of rows.

    Args:
      logits: f32[S, V].
      peak: f32[S, 1], the largest logits; computed if None.

    Example:
      >>> round(float(log_sum_exp(jnp.log(jnp.array([[0.5, 1.0, 1.5]])))[0, 0]), 4)
      1.0986
    """
    if peak is None:
        peak = jnp.max(logits, axis=-1, keepdims=True)
    peak = lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    return peak + jnp.log(sum_rows(jnp.exp(logits - peak)))


def ranks(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return the rank of one token of each row, i32[S]; 1 is the most probable.

    Args:
      logits: [S, V], the logits of the model.
      token_ids: i32[S].

    Example:
      >>> ranks(jnp.array([[0.2, 0.7, 0.1]]), jnp.array([0])).tolist()
      [2]
    """
    return 1 + filters.count_true(logits > _at(logits, token_ids)[:, None])


def _finite_or_dropped(z: jax.Array) -> jax.Array:
    """Return the logits with NaN replaced by -inf, and +inf by the largest float32."""
    return jnp.nan_to_num(z, nan=-jnp.inf, posinf=jnp.finfo(jnp.float32).max, neginf=-jnp.inf)


def _argmax(z: jax.Array) -> jax.Array:
    """Return the first id of the largest value of each row, i32[S]. z must not contain NaN.

    Two plain reductions take 0.4 ms at S = 16, V = 49152 on 2 cores. jnp.argmax takes 1.8 ms,
    because it reduces pairs, which XLA does not vectorise on CPUs.
    """
    return _first(z == jnp.max(z, axis=1, keepdims=True))


def _first(mask: jax.Array) -> jax.Array:
    """Return the first True id of each row of bool[S, V], i32[S]; V if there is none."""
    ids = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    return jnp.min(jnp.where(mask, ids, mask.shape[1]), axis=1)


def _draw(
    z: jax.Array, state: SlotSampling, positions: jax.Array, is_drawn: jax.Array
) -> jax.Array:
    """Sample from the filtered distribution, i32[S]. Rows without `is_drawn` are undefined."""
    # The other rows are greedy. Neutral values avoid a search for their cut-offs.
    log_weights = filters.filter_logits(
        z,
        temperature=jnp.where(is_drawn, state.temperature, 1.0),
        min_p=jnp.where(is_drawn, state.min_p, 0.0),
        top_k=jnp.where(is_drawn, state.top_k, 0),
        top_p=jnp.where(is_drawn, state.top_p, 1.0),
    )
    return _categorical(log_weights, jax.vmap(fold_in)(state.keys, positions))


def _categorical(log_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw tokens i32[S] from exp(log_weights), f32[S, V] with a maximum of 0 in each row.

    This applies the Gumbel-max trick twice: it draws a group of neighbouring tokens by the group's
    mass, then a token of the group. The distribution equals a single draw over all tokens, but a
    row needs V / 128 + 128 random numbers instead of V: 0.2 ms instead of 11.9 ms at S = 16,
    V = 49152 on 2 cores.
    """
    num_rows, vocab_size = log_weights.shape
    num_groups = -(-vocab_size // _DRAW_GROUP)
    padding = num_groups * _DRAW_GROUP - vocab_size
    log_weights = jnp.pad(log_weights, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    groups = log_weights.reshape(num_rows, num_groups, _DRAW_GROUP)
    # mode="high" keeps the far tail of the noise accurate, which large vocabularies reach.
    noise = jax.vmap(
        lambda key: jax.random.gumbel(
            as_key(key), (num_groups + _DRAW_GROUP,), jnp.float32, mode="high"
        )
    )(keys)
    log_masses = jnp.log(jnp.sum(jnp.exp(groups), axis=-1))
    group = jnp.argmax(log_masses + noise[:, :num_groups], axis=1)
    within = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    member = jnp.argmax(within + noise[:, num_groups:], axis=1)
    return (group * _DRAW_GROUP + member).astype(jnp.int32)


def _as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _at(values: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, ids[:, None], axis=1)[:, 0]
