"""`sample`: chooses the next token of each row, inside the compiled decode step.

The token depends only on the row's logits, the seed, the index of the sample in its request, and
the token's position in the sequence. It does not depend on the slot, on the other rows of the
batch, or on the number of decode steps in one program.

The logits of each row are processed in the order of vLLM V1:

    `penalties`: logit bias, exclusion of stop tokens before min_tokens -> penalties -> mask of a
    grammar (`constraints`)
    -> with temperature 0: the token with the largest logit
    -> otherwise `filters`: temperature, min_p, top_k and top_p -> random draw

`ModelRunner` decides whether ranks and the most probable tokens are computed: if a request of the
batch reports them.

**Ties.** If logits are equal, the token with the lower id counts as more probable. So top_k keeps
exactly k tokens, top_p keeps the smallest set that reaches its mass, and ``top_k=1`` chooses the
same token as ``temperature=0``. (vLLM keeps all tokens with a logit equal to the k-th largest.)

**Invalid logits.** A token with the logit -inf is never chosen. NaN is treated as -inf, and +inf as
the largest float32, so the chosen token id is always valid. For a row with NaN or +inf, the
reported log-probability is NaN, so that the caller can detect it. If all logits of a row are NaN or
-inf, token 0 is chosen.
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
from paged_jax.sampling.conditions import apply_first
from paged_jax.sampling.constraints import Constraints
from paged_jax.sampling.filters import count_true, filter_logits
from paged_jax.sampling.penalties import change_logits, next_recent_ids
from paged_jax.sampling.state import SlotSampling, as_key, fold_in

# Number of tokens in a group of `_categorical`. It is a multiple of every backend's vector width,
# and divides most vocabulary sizes, so that no padded copy is needed.
_DRAW_GROUP = 128
# Large fields of `SlotSampling`, which `rows_of` does not copy.
_WHOLE = ("prompt_mask", "output_counts", "allowed_masks", "bad_words")


@short_repr
class Draws(NamedTuple):
    """Chosen token of each row. Log-probabilities refer to the model's unprocessed logits.

    Attributes:
      token_ids: i32[B], the chosen tokens; 0 for inactive rows.
      logprobs: f32[B], log-probabilities of the chosen tokens; 0 for inactive rows, NaN for rows
        with NaN or +inf in their logits.
      ranks: i32[B], ranks of the chosen tokens, 1 for the most probable; 0 if not requested.
      top_ids: i32[B, N], the N most probable tokens; 0 if not requested.
      top_logprobs: f32[B, N], log-probabilities of `top_ids`; 0 if not requested.
    """

    token_ids: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array

    def pack(self) -> jax.Array:
        """Pack all fields into one array i32[B, 3 + 2 * N], which a single kernel writes."""
        columns = [x if x.ndim > 1 else x[:, None] for x in self]
        bits = [lax.bitcast_convert_type(x, jnp.int32) for x in columns]
        return jnp.concatenate(bits, axis=1)

    @classmethod
    def unpack(cls, packed: jax.Array) -> "Draws":
        """Convert an array that `pack` returned back to `Draws`.

        Args:
          packed: i32[..., B, 3 + 2 * N]. The leading dimensions are kept. If it is a NumPy array,
            the fields of the result are views of it.
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
    backend: str | None = None,
) -> tuple[Draws, SlotSampling]:
    """Choose one token for each active row.

    Args:
      logits: [B, V], any float dtype; converted to float32.
      rows: the sampling state of each row. This is the state of all S slots if `slots` is None,
        otherwise the result of `rows_of`.
      positions: i32[B], the index of the new token in its sequence, which is the number of tokens
        before it. The random draw depends on the row's key and on this position.
      active: bool[B]; inactive rows get token 0, and their state does not change.
      slots: i32[B], the slots of the rows. The slots of active rows must be distinct; inactive rows
        may have any value. None means that B = S and that row i is slot i.
      with_top: bool[], whether to compute ranks and the most probable tokens.
      constraints: restrictions by grammars, see `Constraints.of_rows`; None if no row has a
        grammar.
      num_top: N, number of most probable tokens (static). With 0, ranks are not computed either.
      backend: backend of the model, see `log_sum_exp` (static).

    Returns:
      draws: the tokens. Their log-probabilities are computed from `logits` before bias, penalties
        and temperature (vLLM's ``raw_logprobs``).
      rows: the new state, with the new tokens of active rows counted. It is updated in place if
        donated.

    Raises:
      ValueError: shapes disagree, or `num_top` is out of range (at trace time).

    Cost: ``lax.cond`` skips at run time the work that no active row needs. A greedy batch evaluates
    one condition, and needs no random numbers, no search for cut-offs and no token counts. On GPUs,
    the host waits for each condition; a batch with random sampling evaluates two more, for filters
    and for the most probable tokens. Do not ``vmap`` this function, because then both branches of
    every cond run. On 2 CPU cores at B = 16, V = 49152: greedy 1 ms, sampled 2 ms, with top_k or
    top_p 6 to 9 ms, with both 13 to 16 ms.

    In the example, row 0 is greedy and row 1 is inactive.

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
        z = change_logits(raw, is_changed, rows, positions, active, slots, constraints)
        z = _finite_or_dropped(z)
        draw = functools.partial(_draw, z, rows, positions, is_drawn)
        tokens = force(_choose(z, tokens, is_changed, is_drawn, draw))
        if not num_top:
            return unreported(raw, tokens)
        return lax.cond(is_reported, report, unreported, raw, tokens)

    def report(raw, tokens):
        return _report(raw, tokens, active, num_top, backend).pack()

    def unreported(raw, tokens):
        return _unreported(tokens, num_top).pack()

    # A greedy row needs two passes over its logits. The first pass finds the largest logit. The
    # second pass finds the first id with this logit, and sums the denominator of the softmax.
    finite = _finite_or_dropped(raw)
    largest = jnp.max(finite, axis=1, keepdims=True)
    greedy = force(_first(finite == largest))
    # Use a single cond for all rows that are not plain greedy. Each cond that returns logits would
    # copy them, and on GPUs the host waits for each condition.
    is_special = jnp.any(is_changed | is_drawn) | is_reported
    packed = lax.cond(is_special, choose, unreported, raw, greedy)
    draws = Draws.unpack(packed)
    tokens = draws.token_ids
    logits = _at(raw, tokens)
    denominators = log_sum_exp(raw, largest, backend=backend)[:, 0]
    logprobs = jnp.where(active, logits - denominators, 0.0)
    # The slot of inactive rows is set to S, which is out of range, so that they are not counted.
    active_slots = jnp.where(active, slots, rows.output_counts.shape[0])
    counts = rows.output_counts.at[active_slots, tokens].add(1, mode="drop")
    draws = draws._replace(logprobs=logprobs)
    recent_ids = next_recent_ids(rows, tokens, positions, active)
    return draws, dataclasses.replace(rows, output_counts=counts, recent_ids=recent_ids)


def _check_shapes(
    logits: jax.Array,
    rows: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array | None,
) -> jax.Array:
    """Check that all shapes agree. Return the slots of the rows, i32[B]."""
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
    """Return the chosen token of each row, i32[B].

    Args:
      z: f32[B, V], the logits after bias, penalties and masks.
      greedy: i32[B], the token with the largest logit before these changes.
      is_changed: bool[B], whether a row's logits were changed. If so, the largest logit of `z` is
        searched again.
      is_drawn: bool[B], whether a row is sampled at random. Other rows are greedy.
      draw: function without arguments that returns tokens sampled from `z`, i32[B].
    """

    def largest(tokens: jax.Array) -> jax.Array:
        return jnp.where(is_changed, _argmax(z), tokens)

    def drawn(tokens: jax.Array) -> jax.Array:
        return jnp.where(is_drawn, draw(), tokens)

    tokens = apply_first([(jnp.any(is_changed), largest)], greedy)
    return apply_first([(jnp.any(is_drawn), drawn)], tokens)


def _unreported(tokens: jax.Array, num_top: int) -> Draws:
    """Return `Draws` with the tokens i32[B], and zeros in all other fields."""
    zeros = jnp.zeros((*tokens.shape, num_top), jnp.int32)
    zero_ids = jnp.zeros_like(tokens)
    return Draws(tokens, _as_float(zero_ids), zero_ids, zeros, _as_float(zeros))


def _report(
    raw: jax.Array, tokens: jax.Array, active: jax.Array, num_top: int, backend: str | None
) -> Draws:
    """Return `Draws` with tokens, ranks and the `num_top` most probable tokens of active rows.

    In inactive rows, ranks and most probable tokens are zero. `logprobs` is zero in all rows.
    """
    values, ids = top_logprobs(raw, num_top, backend=backend)
    return _unreported(tokens, num_top)._replace(
        ranks=jnp.where(active, ranks(raw, tokens), 0),
        top_ids=jnp.where(active[:, None], ids, 0),
        top_logprobs=jnp.where(active[:, None], values, 0.0),
    )


def rows_of(state: SlotSampling, slots: jax.Array) -> SlotSampling:
    """Gather the sampling state of the rows of a batch, for the argument `rows` of `sample`.

    Args:
      state: the sampling state of S slots.
      slots: i32[B], the slot of each row; any value for rows that are never active.

    Returns:
      The state with B rows in its small fields. Large fields are not gathered: they keep their S
      rows, and `sample` indexes them by its argument `slots`.
    """
    unsliced_fields = {name: getattr(state, name) for name in _WHOLE}
    rows = jax.tree.map(
        lambda x: x.at[slots].get(mode="clip"),
        dataclasses.replace(state, **dict.fromkeys(unsliced_fields)),
    )
    return dataclasses.replace(rows, **unsliced_fields)


def top_logprobs(
    logits: jax.Array,
    k: int,
    bias: tuple[jax.Array, jax.Array] | None = None,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the k most probable tokens of each row and their log-probabilities.

    Args:
      logits: [S, V], the logits of the model.
      k: static, 1 <= k <= V.
      bias: ids of N tokens, i32[N], and values f32[S, N] that are added to the log-probabilities of
        these tokens; None for no bias. The log-probabilities are not normalised again.
      backend: backend of the model, see `log_sum_exp` (static).

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
        return values - log_sum_exp(logits, backend=backend), ids
    bias_ids, bias_values = bias
    biased_logits = logits.at[:, bias_ids].add(bias_values)
    values, ids = lax.top_k(biased_logits, k)
    return values - log_sum_exp(logits, backend=backend), ids


def log_sum_exp(
    logits: jax.Array, peak: jax.Array | None = None, *, backend: str | None = None
) -> jax.Array:
    """Return the logarithm of the softmax denominator of each row, f32[S, 1].

    On CPUs, for small batches, each row is summed in the same order for any number of rows. So
    results are bitwise equal in any batch. This is not the case for `jax.nn.logsumexp`.

    Args:
      logits: f32[S, V].
      peak: f32[S, 1], the largest logit of each row. If it is None, it is computed.
      backend: with an exact backend, see `is_exact`, this is true for any number of rows (static).

    Example:
      >>> round(float(log_sum_exp(jnp.log(jnp.array([[0.5, 1.0, 1.5]])))[0, 0]), 4)
      1.0986
    """
    if peak is None:
        peak = jnp.max(logits, axis=-1, keepdims=True)
    peak = lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    return peak + jnp.log(sum_rows(jnp.exp(logits - peak), backend=backend))


def ranks(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return the rank of the given token in each row, i32[S]; 1 is the most probable.

    Args:
      logits: [S, V], the logits of the model.
      token_ids: i32[S].

    Example:
      >>> ranks(jnp.array([[0.2, 0.7, 0.1]]), jnp.array([0])).tolist()
      [2]
    """
    return 1 + count_true(logits > _at(logits, token_ids)[:, None])


def _finite_or_dropped(z: jax.Array) -> jax.Array:
    """Replace NaN by -inf, and +inf by the largest float32."""
    return jnp.nan_to_num(z, nan=-jnp.inf, posinf=jnp.finfo(jnp.float32).max, neginf=-jnp.inf)


def _argmax(z: jax.Array) -> jax.Array:
    """Return the first column of the largest value in each row, i32[S].

    `z`, f32[S, V], must not contain NaN. This takes 0.4 ms at S = 16, V = 49152 on 2 cores.
    jnp.argmax takes 1.8 ms, because it reduces pairs of value and index, which XLA does not
    vectorise on CPUs.
    """
    return _first(z == jnp.max(z, axis=1, keepdims=True))


def _first(mask: jax.Array) -> jax.Array:
    """Return the column of the first True in each row, i32[S]; V if a row has no True."""
    ids = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    return jnp.min(jnp.where(mask, ids, mask.shape[1]), axis=1)


def _draw(
    z: jax.Array, state: SlotSampling, positions: jax.Array, is_drawn: jax.Array
) -> jax.Array:
    """Apply `filter_logits`, then draw a token of each row at random, i32[S].

    The tokens of rows where `is_drawn` is False are meaningless.
    """
    # For rows without a draw, use neutral parameters, so that no cut-offs are searched for them.
    log_weights = filter_logits(
        z,
        temperature=jnp.where(is_drawn, state.temperature, 1.0),
        min_p=jnp.where(is_drawn, state.min_p, 0.0),
        top_k=jnp.where(is_drawn, state.top_k, 0),
        top_p=jnp.where(is_drawn, state.top_p, 1.0),
    )
    return _categorical(log_weights, jax.vmap(fold_in)(state.keys, positions))


def _categorical(log_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw a token of each row with probabilities proportional to exp(log_weights), i32[S].

    The Gumbel-max trick is applied twice: first to draw a group of 128 consecutive tokens in
    proportion to the total weight of the group, then to draw a token of the group. The distribution
    is the same as with a single draw among all tokens. A row needs only V / 128 + 128 random
    numbers instead of V. This takes 0.2 ms instead of 11.9 ms at S = 16, V = 49152 on 2 cores.

    Args:
      log_weights: f32[S, V], with a maximum of 0 in each row.
      keys: u32[S, 2], the random key data of each row.
    """
    num_rows, vocab_size = log_weights.shape
    num_groups = -(-vocab_size // _DRAW_GROUP)
    padding = num_groups * _DRAW_GROUP - vocab_size
    log_weights = jnp.pad(log_weights, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    groups = log_weights.reshape(num_rows, num_groups, _DRAW_GROUP)
    # mode="high" makes very large values of the noise accurate, which occur with large
    # vocabularies.
    noise = jax.vmap(
        lambda key: jax.random.gumbel(
            as_key(key), (num_groups + _DRAW_GROUP,), jnp.float32, mode="high"
        )
    )(keys)
    log_masses = jnp.log(jnp.sum(jnp.exp(groups), axis=-1))
    group = jnp.argmax(log_masses + noise[:, :num_groups], axis=1)
    candidates = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    member = jnp.argmax(candidates + noise[:, num_groups:], axis=1)
    return (group * _DRAW_GROUP + member).astype(jnp.int32)


def _as_float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _at(values: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, ids[:, None], axis=1)[:, 0]
