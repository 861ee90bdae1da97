"""From logits to tokens: the function that draws inside the step, and its state.

A token depends on four things and nothing else: its row of logits, the seed, which of the ``n``
samples it belongs to, and its position in the sequence. It does not depend on the slot, on the
other rows of the batch, or on how many steps run in one dispatch.

Each row goes through the order that vLLM V1 uses:

    logit bias, held-back stop tokens -> penalties -> [temperature 0: the largest logit]
    -> temperature -> min_p -> top_k -> top_p -> draw

**Ties.** Tokens are ordered by logit, and among equal logits by id, lowest first. So top_k keeps
exactly k tokens, top_p keeps the smallest set that reaches its mass, and ``top_k=1`` chooses what
``temperature=0`` chooses. (vLLM keeps all tokens that tie with the k-th.)

**Bad logits.** -inf is never chosen. NaN counts as -inf and +inf as the largest float32, so no bad
value ever yields a token out of range; the reported log-probability of such a row is NaN, which is
how the caller notices. A row without a single usable logit yields token 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.checks import is_int
from paged_jax.dims import bind
from paged_jax.sampling.params import SamplingParams

# vLLM's rule: below this a temperature means greedy. It also keeps the quotient away from
# denormal floats, which some backends flush to zero.
SMALLEST_TEMPERATURE = 1e-5
# Size of the groups in which a token is drawn, see _draw. A multiple of the vector width of every
# backend that divides most vocabularies, which avoids a padded copy.
_DRAW_GROUP = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "keys",
        "bias_ids",
        "bias_values",
        "held_ids",
        "held_until",
        "prompt_mask",
        "output_counts",
    ),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """The sampling state of every slot, on the device. Unused slots are greedy.

    Attributes:
      temperature: f32[S]; 0 is greedy.
      top_k: i32[S]; 0 is off.
      top_p: f32[S]; 1 is off.
      min_p: f32[S]; 0 is off.
      presence_penalty: f32[S].
      frequency_penalty: f32[S].
      repetition_penalty: f32[S]; 1 is off.
      keys: u32[S, 2], threefry key data: the seed, folded with the sample index.
      bias_ids: i32[S, max_logit_bias], filled up with V, which is no token.
      bias_values: f32[S, max_logit_bias].
      held_ids: i32[S, max_stop_ids], stop tokens that may not appear yet, filled up with V.
      held_until: i32[S], the first position at which they may.
      prompt_mask: bool[S, V], the tokens that are in the prompt.
      output_counts: i32[S, V], how often each token was generated.

    Memory: 5 bytes for each slot and token of the vocabulary, 0.6 MB a slot at V = 128,000.

    Example:
      >>> state = SlotSampling.create(num_slots=4, vocab_size=100)
      >>> state.output_counts.shape
      (4, 100)
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    keys: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    held_ids: jax.Array
    held_until: jax.Array
    prompt_mask: jax.Array
    output_counts: jax.Array

    @classmethod
    def create(
        cls, num_slots: int, vocab_size: int, max_logit_bias: int = 32, max_stop_ids: int = 16
    ) -> "SlotSampling":
        """All slots greedy, without penalties.

        Args:
          num_slots: S.
          vocab_size: V.
          max_logit_bias: most entries that a request's ``logit_bias`` may have.
          max_stop_ids: most stop tokens that a request with ``min_tokens`` may have.

        Raises:
          ValueError: ``num_slots`` or ``vocab_size`` is not positive, or a maximum is negative.
        """
        sizes = {"num_slots": (num_slots, 1), "vocab_size": (vocab_size, 1)}
        sizes |= {"max_logit_bias": (max_logit_bias, 0), "max_stop_ids": (max_stop_ids, 0)}
        for name, (size, least) in sizes.items():
            if not is_int(size) or size < least:
                raise ValueError(
                    f"SlotSampling.create: {name} must be an integer >= {least}, got {size!r}. "
                    "Pass the size to allocate."
                )
        return cls(
            temperature=jnp.zeros(num_slots, jnp.float32),
            top_k=jnp.zeros(num_slots, jnp.int32),
            top_p=jnp.ones(num_slots, jnp.float32),
            min_p=jnp.zeros(num_slots, jnp.float32),
            presence_penalty=jnp.zeros(num_slots, jnp.float32),
            frequency_penalty=jnp.zeros(num_slots, jnp.float32),
            repetition_penalty=jnp.ones(num_slots, jnp.float32),
            keys=jnp.zeros((num_slots, 2), jnp.uint32),
            bias_ids=jnp.full((num_slots, max_logit_bias), vocab_size, jnp.int32),
            bias_values=jnp.zeros((num_slots, max_logit_bias), jnp.float32),
            held_ids=jnp.full((num_slots, max_stop_ids), vocab_size, jnp.int32),
            held_until=jnp.zeros(num_slots, jnp.int32),
            prompt_mask=jnp.zeros((num_slots, vocab_size), jnp.bool_),
            output_counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
        )


def assign(
    state: SlotSampling,
    slot: int,
    params: SamplingParams,
    *,
    seed: int,
    sample_index: int = 0,
    prompt_token_ids: Sequence[int] | np.ndarray = (),
    output_token_ids: Sequence[int] | np.ndarray = (),
    eos_token_ids: Sequence[int] = (),
) -> SlotSampling:
    """Give a slot to one sample of a request. Called from the host; one compiled program.

    Args:
      state: donated.
      slot: the row to write, 0 <= slot < S.
      params: of the request.
      seed: of the random draws, 0 to 2**63 - 1, used in place of ``params.seed``, which may be
        None.
      sample_index: which of the ``n`` samples this is.
      prompt_token_ids: for the repetition penalty.
      output_token_ids: what was generated already, when a preempted request comes back.
      eos_token_ids: the model's end tokens, which ``params.min_tokens`` holds back together with
        ``params.stop_token_ids``.

    Returns:
      The new state.

    Raises:
      ValueError: the slot, the seed or a token id is out of range, or there are more biases or
        held-back stop tokens than the state has room for.

    Cost: copies 5 * V bytes to the device, whatever the length of the prompt.

    Example:
      >>> state = SlotSampling.create(num_slots=2, vocab_size=8)
      >>> state = assign(state, 1, SamplingParams(top_k=3), seed=0, prompt_token_ids=[5, 5, 2])
      >>> state.top_k.tolist()
      [0, 3]
    """
    num_slots, vocab_size = state.output_counts.shape
    for name, value, bound in (
        ("slot", slot, num_slots),
        ("seed", seed, 2**63),
        ("sample_index", sample_index, 2**31),
    ):
        if not is_int(value) or not 0 <= value < bound:
            raise ValueError(
                f"assign: {name} must be an integer in [0, {bound}), got {value!r}. "
                f"Pass a {name} in that range."
            )
    bias = params.logit_bias or {}
    held = (*eos_token_ids, *(params.stop_token_ids or ())) if params.min_tokens else ()
    prompt = _token_ids("prompt_token_ids", prompt_token_ids, vocab_size)
    output = _token_ids("output_token_ids", output_token_ids, vocab_size)
    bias_ids = _token_ids("logit_bias", tuple(bias), vocab_size)
    held_ids = _token_ids("stop_token_ids", held, vocab_size)
    bias_values = _to_float32(list(bias.values()))
    row = SlotSampling(
        temperature=_row(params.temperature, np.float32),
        top_k=_row(params.top_k, np.int32),
        top_p=_row(params.top_p, np.float32),
        min_p=_row(params.min_p, np.float32),
        presence_penalty=_row(params.presence_penalty, np.float32),
        frequency_penalty=_row(params.frequency_penalty, np.float32),
        repetition_penalty=_row(params.repetition_penalty, np.float32),
        # Both halves by hand: jax.random.key(seed) loses the upper one unless x64 is on.
        keys=_row([int(seed) >> 32, int(seed) & 0xFFFFFFFF], np.uint32),
        bias_ids=_padded("logit_bias", bias_ids, state.bias_ids.shape[1], vocab_size),
        bias_values=_padded("logit_bias", bias_values, state.bias_ids.shape[1], 0),
        held_ids=_padded("stop_token_ids", held_ids, state.held_ids.shape[1], vocab_size),
        held_until=_row(min(len(prompt) + params.min_tokens, 2**31 - 1), np.int32),
        prompt_mask=_row(np.bincount(prompt, minlength=vocab_size) > 0, np.bool_),
        output_counts=_row(np.bincount(output, minlength=vocab_size), np.int32),
    )
    return _write_row(state, row, np.int32(slot), np.uint32(sample_index))


@functools.partial(jax.jit, donate_argnums=0)
def _write_row(
    state: SlotSampling, row: SlotSampling, slot: jax.Array, sample_index: jax.Array
) -> SlotSampling:
    row = settle(row, sample_index)
    return jax.tree.map(lambda array, value: array.at[slot].set(value), state, row)


def settle(row: SlotSampling, sample_index: jax.Array) -> SlotSampling:
    """One row as `sample` reads it, from what a request says and the key of its seed.

    Args:
      row: arrays of a `SlotSampling` without their first axis, numbers as in `SamplingParams`.
      sample_index: u32[], which of the ``n`` samples this is.
    """
    is_greedy = row.temperature < SMALLEST_TEMPERATURE
    return dataclasses.replace(
        row,
        temperature=jnp.where(is_greedy, 0.0, row.temperature),
        top_k=jnp.maximum(row.top_k, 0),
        keys=fold_in(row.keys, sample_index),
    )


def sample(
    logits: jax.Array,
    state: SlotSampling,
    positions: jax.Array,
    active: jax.Array,
    slots: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, SlotSampling]:
    """Choose one token for each active row.

    Args:
      logits: [B, V], any float dtype; computed with in float32.
      state: of S slots.
      positions: i32[B], the index that the new token will have in its sequence, which is the
        number of tokens before it. Seeds the draw.
      active: bool[B]. The logits of other rows are ignored.
      slots: i32[B], the distinct slots of the active rows; of others they mean nothing. None is for
        B = S, where row i is slot i.

    Returns:
      tokens: i32[B], 0 where not active.
      logprobs: f32[B], the log-probability of the token under the logits as they came, before
        bias, penalties and temperature (vLLM's ``raw_logprobs``); 0 where not active, NaN where
        the row holds NaN or +inf.
      state: with the tokens of active rows counted; in place, if it is donated.

    Raises:
      ValueError: shapes disagree (at trace time).

    Cost: what no active row asks for is skipped at run time, by ``lax.cond``: a greedy batch makes
    no noise, looks for no cut-off and reads no counts. Do not ``vmap`` this: it turns every cond
    into both of its branches. On 2 CPU cores at B = 16, V = 49152: greedy 1 ms, drawn 2 ms, top_k
    or top_p 6 to 9 ms, both 13 to 16 ms.

    Example:
      >>> state = assign(SlotSampling.create(2, 3), 0, SamplingParams(temperature=0), seed=0)
      >>> logits = jnp.array([[0.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
      >>> tokens, logprobs, state = sample(
      ...     logits, state, jnp.array([5, 0]), jnp.array([True, False]))
      >>> tokens.tolist()
      [1, 0]
    """
    num_slots, vocab_size = state.output_counts.shape
    if slots is None:
        bind("sample", logits=(logits, "SV"), output_counts=(state.output_counts, "SV"))
        slots = jnp.arange(num_slots, dtype=jnp.int32)
    bind(
        "sample",
        logits=(logits, "BV"),
        prompt_mask=(state.prompt_mask, "SV"),
        positions=(positions, "B"),
        active=(active, "B"),
        slots=(slots, "B"),
    )
    raw = logits.astype(jnp.float32)
    rows = _rows_of(state, slots)
    is_edited = jnp.any(_is_edited(rows, positions, active, vocab_size))
    is_penalised = jnp.any(_is_penalised(rows, active))
    is_drawn = active & (rows.temperature > 0)

    def choose(raw):
        z = _when(is_edited, lambda z: _edit(z, rows, positions, active), raw)
        z = _when(is_penalised, lambda z: _penalise(z, rows, slots), z)
        z = _finite_or_dropped(z)
        return _when(
            jnp.any(is_drawn),
            lambda tokens: jnp.where(is_drawn, _draw(z, rows, positions, is_drawn), tokens),
            _argmax(z),
        )

    # All in one branch: each cond that returns logits costs a copy of them.
    tokens = lax.cond(
        is_edited | is_penalised | jnp.any(is_drawn),
        choose,
        lambda raw: _argmax(_finite_or_dropped(raw)),
        raw,
    )
    tokens = jnp.where(active, tokens, 0)
    logprobs = _at(raw, tokens) - jax.nn.logsumexp(raw, axis=-1)
    # The slot S of inactive rows is out of range, and dropped.
    counted = jnp.where(active, slots, num_slots)
    counts = state.output_counts.at[counted, tokens].add(1, mode="drop")
    state = dataclasses.replace(state, output_counts=counts)
    return tokens, jnp.where(active, logprobs, 0.0), state


def filter_logits(
    logits: jax.Array,
    *,
    temperature: jax.Array,
    min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """The distribution that `sample` draws from, as unnormalised log-probabilities.

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
    z = _when(jnp.any(top_k > 0), lambda z: _keep_top_k(z, top_k), z)
    z = _when(jnp.any(top_p < 1), lambda z: _keep_top_p(z, scaled, top_p), z)
    return jnp.where(z == -jnp.inf, -jnp.inf, scaled)


def top_logprobs(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k most probable tokens of each row and their log-probabilities.

    Args:
      logits: [S, V], as they came from the model.
      k: static, 1 <= k <= V.

    Returns:
      values: f32[S, k], largest first.
      ids: i32[S, k]; equal values in the order of their ids.

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
            "Skip the call where no request asks for log-probabilities."
        )
    logits = logits.astype(jnp.float32)
    values, ids = lax.top_k(logits, k)
    return values - jax.nn.logsumexp(logits, axis=-1, keepdims=True), ids


def ranks(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """The rank of one token of each row, i32[S]; 1 is the most probable.

    Args:
      logits: [S, V], as they came from the model.
      token_ids: i32[S].

    Example:
      >>> ranks(jnp.array([[0.2, 0.7, 0.1]]), jnp.array([0])).tolist()
      [2]
    """
    return 1 + _count(logits > _at(logits, token_ids)[:, None])


def _rows_of(state: SlotSampling, slots: jax.Array) -> SlotSampling:
    """The slots of a batch; what has an entry for each token of the vocabulary stays whole."""
    counts = {"prompt_mask": state.prompt_mask, "output_counts": state.output_counts}
    rows = jax.tree.map(
        lambda x: x.at[slots].get(mode="clip"), dataclasses.replace(state, **dict.fromkeys(counts))
    )
    return dataclasses.replace(rows, **counts)


def _finite_or_dropped(z: jax.Array) -> jax.Array:
    """The policy for bad logits, see the top of the file."""
    return jnp.nan_to_num(z, nan=-jnp.inf, posinf=jnp.finfo(jnp.float32).max, neginf=-jnp.inf)


def _is_edited(
    rows: SlotSampling, positions: jax.Array, active: jax.Array, vocab_size: int
) -> jax.Array:
    """Which active rows have a bias or hold stop tokens back, bool[B]."""
    is_biased = jnp.any(rows.bias_ids < vocab_size, axis=1)
    is_held = (positions < rows.held_until) & jnp.any(rows.held_ids < vocab_size, axis=1)
    return active & (is_biased | is_held)


def _edit(
    logits: jax.Array, rows: SlotSampling, positions: jax.Array, active: jax.Array
) -> jax.Array:
    """Add the biases and hold stop tokens back, f32[B, V]."""
    vocab_size = logits.shape[1]
    is_held = active & (positions < rows.held_until)
    held_ids = jnp.where(is_held[:, None], rows.held_ids, vocab_size)
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = logits.at[row, rows.bias_ids].add(rows.bias_values, mode="drop")
    return logits.at[row, held_ids].set(-jnp.inf, mode="drop")


def _is_penalised(rows: SlotSampling, active: jax.Array) -> jax.Array:
    """Which active rows have a penalty, bool[B]."""
    return active & (
        (rows.repetition_penalty != 1)
        | (rows.frequency_penalty != 0)
        | (rows.presence_penalty != 0)
    )


def _penalise(z: jax.Array, rows: SlotSampling, slots: jax.Array) -> jax.Array:
    """Apply the penalties, f32[B, V].

    With neutral values every line returns its input bit for bit, so a row without penalties does
    not see whether a neighbour has them.
    """
    is_prompt = rows.prompt_mask.at[slots].get(mode="clip")
    counts = rows.output_counts.at[slots].get(mode="clip")
    seen = counts > 0
    r = rows.repetition_penalty[:, None]
    z = jnp.where(is_prompt | seen, jnp.where(z > 0, z / r, z * r), z)
    z = z - rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return z - jnp.where(seen, rows.presence_penalty[:, None], 0.0)


def _argmax(z: jax.Array) -> jax.Array:
    """The first id of the largest value, i32[S]. No NaN may be in z.

    Two plain reductions: at S = 16, V = 49152 on 2 cores they take 0.4 ms, where jnp.argmax, one
    reduction over pairs that XLA does not vectorise on CPU, takes 1.8 ms.
    """
    vocab_size = z.shape[1]
    ids = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    return jnp.min(jnp.where(z == jnp.max(z, axis=1, keepdims=True), ids, vocab_size), axis=1)


def _draw(
    z: jax.Array, state: SlotSampling, positions: jax.Array, is_drawn: jax.Array
) -> jax.Array:
    """Draw from the filtered distribution, i32[S]. Rows outside of is_drawn mean nothing."""
    # Those rows are greedy: their filters, whatever they are, must not cost a search.
    log_weights = filter_logits(
        z,
        temperature=jnp.where(is_drawn, state.temperature, 1.0),
        min_p=jnp.where(is_drawn, state.min_p, 0.0),
        top_k=jnp.where(is_drawn, state.top_k, 0),
        top_p=jnp.where(is_drawn, state.top_p, 1.0),
    )
    return _categorical(log_weights, jax.vmap(fold_in)(state.keys, positions))


def _categorical(log_weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw from exp(log_weights), f32[S, V] with a maximum of 0 in each row, to i32[S].

    The Gumbel-max trick, twice: first it draws a group of neighbouring tokens by its mass, then a
    token of that group. The distribution is the same as that of one draw over all tokens, with
    V / 128 + 128 random numbers a row instead of V: 0.2 ms instead of 11.9 ms at S = 16,
    V = 49152 on 2 cores.
    """
    num_rows, vocab_size = log_weights.shape
    num_groups = -(-vocab_size // _DRAW_GROUP)
    padding = num_groups * _DRAW_GROUP - vocab_size
    log_weights = jnp.pad(log_weights, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    groups = log_weights.reshape(num_rows, num_groups, _DRAW_GROUP)
    # "high" has the far tail of the noise right, which a large vocabulary does reach.
    noise = jax.vmap(
        lambda key: jax.random.gumbel(
            _as_key(key), (num_groups + _DRAW_GROUP,), jnp.float32, mode="high"
        )
    )(keys)
    log_masses = jnp.log(jnp.sum(jnp.exp(groups), axis=-1))
    group = jnp.argmax(log_masses + noise[:, :num_groups], axis=1)
    within = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    member = jnp.argmax(within + noise[:, num_groups:], axis=1)
    return (group * _DRAW_GROUP + member).astype(jnp.int32)


def _keep_top_k(z: jax.Array, top_k: jax.Array) -> jax.Array:
    """Set all but the top_k largest of each row to -inf; where top_k is 0, nothing."""
    cut = _highest_cut(lambda cut: _count(z >= cut) >= top_k, z.shape[0])
    cut = jnp.where(top_k > 0, cut, -jnp.inf)[:, None]
    return _keep_above(z, cut, top_k - _count(z > cut))


def _keep_top_p(z: jax.Array, scaled: jax.Array, top_p: jax.Array) -> jax.Array:
    """Set all but the smallest set with mass top_p to -inf; where top_p is 1, nothing."""
    weights = jnp.where(z == -jnp.inf, 0.0, jnp.exp(scaled))

    def mass(keep):
        return jnp.sum(jnp.where(keep, weights, 0.0), axis=1)

    goal = top_p * jnp.sum(weights, axis=1)
    cut = _highest_cut(lambda cut: mass(z >= cut) >= goal, z.shape[0])
    # A goal that rounds to 0 is reached by the empty set: one token stays all the same.
    cut = jnp.minimum(cut, jnp.max(z, axis=1))
    cut = jnp.where(top_p < 1, cut, -jnp.inf)[:, None]
    # Equal logits have equal weights, so the number of them that is needed is a quotient.
    weight = jnp.max(jnp.where(z == cut, weights, 0.0), axis=1)
    missing = jnp.ceil((goal - mass(z > cut)) / jnp.where(weight > 0, weight, 1.0))
    return _keep_above(z, cut, jnp.maximum(missing, 1.0).astype(jnp.int32))


def _highest_cut(is_enough: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """The highest float32 for which is_enough still holds, f32[S]; -inf if it holds for none.

    is_enough takes cuts f32[S, 1] and returns bool[S]; once false it stays false for higher cuts.
    Both users sum non-negative terms in a fixed order, and rounding keeps such sums monotone.

    Bisection over the bit patterns of float32: 32 passes over the row, and exact. Measured on 2 CPU
    cores at S = 16, V = 49152: 3 to 6 ms, where jnp.sort takes 143 ms. lax.top_k takes 1.1 ms for
    k = 20 and 2.7 ms for k = 256, but k would have to be a static bound, and top_p has none.
    """

    def as_float(order):
        # The bits of negative floats count downwards; this flips them, and is its own inverse.
        bits = order ^ ((order >> 31) & 0x7FFFFFFF)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def step(_, bounds):
        low, high = bounds
        # The mean, rounded down, without the overflow of low + high.
        middle = (low & high) + ((low ^ high) >> 1)
        enough = is_enough(as_float(middle)[:, None])
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    infinity = 0x7F800000
    # -inf is ~infinity in this order. Fewer than 2**32 floats lie between: 32 halvings.
    low = jnp.full(num_rows, ~infinity, jnp.int32)
    high = jnp.full(num_rows, infinity, jnp.int32)
    return as_float(lax.fori_loop(0, 32, step, (low, high))[0])


def _keep_above(z: jax.Array, cut: jax.Array, num_ties: jax.Array) -> jax.Array:
    """Keep what exceeds cut f32[S, 1], and the first num_ties i32[S] of what equals it.

    The cumulative sum (2.4 ms, as much as the search) is only made if a tie has to be broken.
    """
    # Rows that are not cut have no tie to break, which would cost the others that sum.
    is_tie = (z == cut) & (cut > -jnp.inf)

    def first_ties(is_tie):
        rank = jnp.cumsum(is_tie, axis=1, dtype=jnp.int32)
        return is_tie & (rank <= num_ties[:, None])

    is_kept_tie = _when(jnp.any(_count(is_tie) > num_ties), first_ties, is_tie)
    return jnp.where((z > cut) | is_kept_tie, z, -jnp.inf)


def _when(is_needed: jax.Array, function: Callable[[jax.Array], jax.Array], x: jax.Array):
    """function(x) if is_needed, else x; decided at run time."""
    return lax.cond(is_needed, function, lambda x: x, x)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, axis=1, dtype=jnp.int32)


def _at(values: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, ids[:, None], axis=1)[:, 0]


def _as_key(key_data: jax.Array) -> jax.Array:
    # Named, so that a user's jax_default_prng_impl does not change what a seed means.
    return jax.random.wrap_key_data(key_data, impl="threefry2x32")


def fold_in(key_data: jax.Array, number: jax.Array) -> jax.Array:
    """Derive the data of another random key from that of a key and a number."""
    return jax.random.key_data(jax.random.fold_in(_as_key(key_data), number))


def _row(values: Any, dtype: Any) -> Any:
    # Any, because a field is declared as jax.Array and the row still lies on the host.
    if dtype == np.float32:
        values = _to_float32(values)
    return np.asarray(values, dtype)


def _to_float32(values: Any) -> np.ndarray:
    # What a Python float holds may round to infinity as float32, which would turn into NaN.
    largest = np.finfo(np.float32).max
    return np.clip(np.asarray(values, np.float64), -largest, largest).astype(np.float32)


def _token_ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64).reshape(-1)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"assign: {name} must hold token ids in [0, {vocab_size}), got {outside[0]}. "
            "Check that the tokenizer belongs to this model."
        )
    return array


def _padded(name: str, values: np.ndarray, length: int, filler: int) -> Any:
    if len(values) > length:
        raise ValueError(
            f"assign: {name} must have at most {length} entries, got {len(values)}. "
            "Raise max_logit_bias or max_stop_ids in SlotSampling.create."
        )
    dtype = values.dtype if values.dtype == np.float32 else np.int32
    padded = np.full(length, filler, dtype)
    padded[: len(values)] = values
    return padded
