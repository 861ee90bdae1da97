"""Sampling state of all slots on the device, and functions that write it from the host."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np

from paged_jax.arguments import is_int
from paged_jax.formatting import short_repr
from paged_jax.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from paged_jax.sampling.token_bias import NO_BIAS, TokenBias

# Requests with a temperature below this value are greedy, as in vLLM. This also avoids divisions by
# denormal numbers, which some backends flush to zero.
SMALLEST_TEMPERATURE = 1e-5
# A number that is larger than the position of any token.
_ALWAYS = 2**31 - 1
# `_NO_TOKEN` fills columns of `SlotSampling.recent_ids` that have no generated token yet.
# `_ANY_TOKEN` fills the columns before a word in `SlotSampling.bad_words`, and matches every token.
_NO_TOKEN, _ANY_TOKEN = -2, -1


def as_key(key_data: jax.Array) -> jax.Array:
    """Return a `jax.random` key for threefry2x32 key data u32[..., 2]."""
    # Name the implementation, so that random numbers do not depend on jax_default_prng_impl.
    return jax.random.wrap_key_data(key_data, impl="threefry2x32")


def fold_in(key_data: jax.Array, number: jax.typing.ArrayLike) -> jax.Array:
    """Apply `jax.random.fold_in` to threefry2x32 key data u32[2]. Return new key data."""
    return jax.random.key_data(jax.random.fold_in(as_key(key_data), number))


@short_repr
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """Sampling state of every slot, on the device. Unused slots are greedy.

    Attributes:
      temperature: f32[S]; 0 is greedy.
      top_k: i32[S]; 0 is off.
      top_p: f32[S]; 1 is off.
      min_p: f32[S]; 0 is off.
      presence_penalty: f32[S].
      frequency_penalty: f32[S].
      repetition_penalty: f32[S]; 1 is off.
      keys: u32[S, 2], threefry2x32 key data, made from the seed and the index of the sample.
      bias_ids: i32[S, max_logit_bias], ids of biased tokens, padded with V, which is not a token.
      bias_values: f32[S, max_logit_bias], the bias of each of these tokens.
      num_start_ids: i32[S]. The first `num_start_ids` biases apply only at positions below
        `start_until`.
      start_until: i32[S], see `num_start_ids`.
      held_ids: i32[S, max_stop_ids], stop tokens that are excluded at positions below `held_until`,
        because of ``min_tokens``; padded with V.
      held_until: i32[S], see `held_ids`.
      bad_words: i32[S, max_bad_words, L], a row with the tokens of each bad word. Shorter words are
        padded on the left with -1, which matches any token. Unused rows end with V, which is not a
        token.
      recent_ids: i32[S, L], the last L generated tokens. The token at position p is in column
        p % L. Columns without a generated token have -2, which matches no token.
      allowed_masks: i32[S, ceil(V / 32)], a bit for each token, which is set if the token is
        allowed. Token 0 is the lowest bit of the first word.
      is_restricted: bool[S], whether the slot has bad words or a token that is not allowed.
      changed_until: i32[S]. From this position on, no bias, penalty, held-back token or restriction
        changes the logits. `to_device_values` computes this field and `is_restricted`.
      prompt_mask: bool[S, V], whether each token is in the prompt.
      output_counts: i32[S, V], number of times that each token was generated.

    Memory: 5 bytes per slot and token of the vocabulary, 0.6 MB per slot at V = 128,000.

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
    num_start_ids: jax.Array
    start_until: jax.Array
    held_ids: jax.Array
    held_until: jax.Array
    bad_words: jax.Array
    recent_ids: jax.Array
    allowed_masks: jax.Array
    is_restricted: jax.Array
    changed_until: jax.Array
    prompt_mask: jax.Array
    output_counts: jax.Array

    @classmethod
    def create(
        cls,
        num_slots: int,
        vocab_size: int,
        max_logit_bias: int = 32,
        max_stop_ids: int = 16,
        max_bad_words: int = MAX_BAD_WORDS,
    ) -> "SlotSampling":
        """Return the initial state: all slots are greedy and have no penalties.

        Args:
          num_slots: S.
          vocab_size: V.
          max_logit_bias: maximum number of entries of a request's ``logit_bias``.
          max_stop_ids: maximum number of stop tokens of a request with ``min_tokens``.
          max_bad_words: maximum number of token sequences of a request's bad words.

        Raises:
          ValueError: ``num_slots`` or ``vocab_size`` is not positive, or a maximum is negative.
        """
        sizes = {"num_slots": (num_slots, 1), "vocab_size": (vocab_size, 1)}
        sizes |= {"max_logit_bias": (max_logit_bias, 0), "max_stop_ids": (max_stop_ids, 0)}
        sizes["max_bad_words"] = (max_bad_words, 0)
        for name, (size, minimum) in sizes.items():
            if not is_int(size) or size < minimum:
                raise ValueError(
                    f"SlotSampling.create: {name} must be an integer >= {minimum}, got {size!r}. "
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
            num_start_ids=jnp.zeros(num_slots, jnp.int32),
            start_until=jnp.zeros(num_slots, jnp.int32),
            held_ids=jnp.full((num_slots, max_stop_ids), vocab_size, jnp.int32),
            held_until=jnp.zeros(num_slots, jnp.int32),
            bad_words=jnp.broadcast_to(
                bad_word_rows((), max_bad_words, vocab_size),
                (num_slots, max_bad_words, MAX_BAD_WORD_TOKENS),
            ),
            recent_ids=jnp.full((num_slots, MAX_BAD_WORD_TOKENS), _NO_TOKEN, jnp.int32),
            allowed_masks=jnp.full((num_slots, num_mask_words(vocab_size)), -1, jnp.int32),
            is_restricted=jnp.zeros(num_slots, jnp.bool_),
            changed_until=jnp.zeros(num_slots, jnp.int32),
            prompt_mask=jnp.zeros((num_slots, vocab_size), jnp.bool_),
            output_counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
        )


class SlotRow(NamedTuple):
    """Sampling settings for a slot, as NumPy arrays on the host.

    `write_rows` takes several rows, stacked along a new first dimension.

    Attributes:
      slot: i32[], the slot to write.
      sample_index: u32[], index of the sample in its request.
      values: a row of each field of `SlotSampling`. The values are as in `SamplingParams`, until
        `to_device_values` converts them.
    """

    slot: jax.typing.ArrayLike
    sample_index: jax.typing.ArrayLike
    values: SlotSampling


class Assignment(NamedTuple):
    """A slot, and the sequence that gets the slot.

    Attributes:
      slot: the slot, 0 <= slot < S.
      params: sampling parameters of the request.
      token_ids: tokens of the prompt, followed by the generated tokens if the sequence was
        preempted.
      num_prompt_tokens: number of prompt tokens in `token_ids`.
      seed: seed of the random draws, 0 to 2**63 - 1. It replaces ``params.seed``, which may be
        None.
      max_length: maximum number of tokens of the sequence, prompt included.
      sample_index: index of the sample in its request. Random numbers depend on it and the seed.
      eos_token_ids: end-of-sequence tokens of the model; ignored with ``params.ignore_eos``.
      token_bias: biases of the model, in addition to the ``logit_bias`` of `params`.
      bad_word_ids: token sequences of the ``bad_words`` of `params`.
    """

    slot: int
    params: SamplingParams
    token_ids: list[int] | np.ndarray
    num_prompt_tokens: int
    seed: int
    max_length: int
    sample_index: int = 0
    eos_token_ids: Iterable[int] = ()
    token_bias: TokenBias = NO_BIAS
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end the sequence: ``stop_token_ids``, and EOS unless ignored."""
        eos_token_ids = () if self.params.ignore_eos else self.eos_token_ids
        return *eos_token_ids, *(self.params.stop_token_ids or ())


def slot_row(state: SlotSampling, assignment: Assignment) -> SlotRow:
    """Return the row with the sampling settings of a sequence, for `write_rows`.

    Args:
      state: the state that the row is for. Only its shapes are used.
      assignment: the slot and the sequence.

    Raises:
      ValueError: the slot, the seed or a token id is out of range, or the state has no room for all
        biases, bad words, or stop tokens that are forbidden until the minimum length.

    The row has 5 * V bytes, independent of the length of the prompt.
    """
    params, token_bias = assignment.params, assignment.token_bias
    num_slots, vocab_size = state.output_counts.shape
    for name, value, bound in (
        ("slot", assignment.slot, num_slots),
        ("seed", assignment.seed, 2**63),
        ("sample_index", assignment.sample_index, 2**31),
    ):
        if not is_int(value) or not 0 <= value < bound:
            raise ValueError(
                f"slot_row: {name} must be an integer in [0, {bound}), got {value!r}. "
                f"Pass a {name} in that range."
            )
    logit_bias, seed = params.logit_bias or {}, int(assignment.seed)
    # Clip the biases of a request to finite float32 numbers. The model's biases may be -inf.
    bias_values = [token_bias.values_at(0), _to_float32(list(logit_bias.values()))]
    bias_values = np.concatenate(bias_values).astype(np.float32)
    # With structured outputs, the grammar's mask implements `min_tokens`.
    min_tokens = params.min_tokens if params.structured_outputs is None else 0
    stop_ids = assignment.stop_ids if min_tokens else ()
    token_ids, num_prompt_tokens = assignment.token_ids, assignment.num_prompt_tokens
    bad_words = assignment.bad_word_ids
    prompt = _token_ids("prompt_token_ids", token_ids[:num_prompt_tokens], vocab_size)
    output = _token_ids("output_token_ids", token_ids[num_prompt_tokens:], vocab_size)
    bias_ids = _token_ids("logit_bias", (*token_bias.all_ids, *logit_bias), vocab_size)
    held_ids = _token_ids("stop_token_ids", stop_ids, vocab_size)
    values = SlotSampling(
        temperature=_row(params.temperature, np.float32),
        top_k=_row(params.top_k, np.int32),
        top_p=_row(params.top_p, np.float32),
        min_p=_row(params.min_p, np.float32),
        presence_penalty=_row(params.presence_penalty, np.float32),
        frequency_penalty=_row(params.frequency_penalty, np.float32),
        repetition_penalty=_row(params.repetition_penalty, np.float32),
        # Do not use jax.random.key(seed): without x64 it ignores the upper 32 bits of the seed.
        keys=_row([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        bias_ids=_padded("logit_bias", bias_ids, state.bias_ids.shape[1], vocab_size),
        bias_values=_padded("logit_bias", bias_values, state.bias_ids.shape[1], 0),
        num_start_ids=_row(len(token_bias.start_ids), np.int32),
        start_until=_row(len(prompt) + 1 if token_bias.start_ids else 0, np.int32),
        held_ids=_padded("stop_token_ids", held_ids, state.held_ids.shape[1], vocab_size),
        held_until=_row(min(len(prompt) + min_tokens, _ALWAYS), np.int32),
        bad_words=_row(bad_word_rows(bad_words, state.bad_words.shape[1], vocab_size), np.int32),
        recent_ids=_row(_recent(output, len(prompt)), np.int32),
        allowed_masks=_row(_allowed_mask(params, vocab_size), np.int32),
        is_restricted=_row(False, np.bool_),
        changed_until=_row(0, np.int32),
        prompt_mask=_row(np.bincount(prompt, minlength=vocab_size) > 0, np.bool_),
        output_counts=_row(np.bincount(output, minlength=vocab_size), np.int32),
    )
    return SlotRow(np.int32(assignment.slot), np.uint32(assignment.sample_index), values)


def write_rows(state: SlotSampling, rows: SlotRow) -> SlotSampling:
    """Return the state with the rows of some slots replaced.

    This is a pure function. Donate `state`, so that it is updated in place.

    Args:
      state: the state.
      rows: results of `slot_row`, stacked along a new first dimension. Rows with slot S, which does
        not exist, are ignored; they can be used as padding.
    """
    values = jax.vmap(to_device_values)(rows.values, rows.sample_index)
    return jax.tree.map(lambda x, new: x.at[rows.slot].set(new, mode="drop"), state, values)


def to_device_values(row: SlotSampling, sample_index: jax.typing.ArrayLike) -> SlotSampling:
    """Convert the settings in a `SlotRow` to the values that `sample` reads.

    For example, low temperatures become 0, and `keys` is made from the seed and `sample_index`.

    Args:
      row: ``SlotRow.values``. `keys` has the two 32-bit words of the seed.
      sample_index: u32[], index of the sample in its request.
    """
    is_greedy = row.temperature < SMALLEST_TEMPERATURE
    vocab_size = row.output_counts.shape[0]
    is_penalised = (
        (row.repetition_penalty != 1) | (row.frequency_penalty != 0) | (row.presence_penalty != 0)
    )
    is_start = jnp.arange(row.bias_ids.shape[0], dtype=jnp.int32) < row.num_start_ids
    is_changed = is_penalised | jnp.any((row.bias_ids < vocab_size) & ~is_start)
    is_restricted = jnp.any(row.bad_words[:, -1] < vocab_size) | jnp.any(row.allowed_masks != -1)
    is_changed |= is_restricted
    start_until = jnp.where(row.num_start_ids > 0, row.start_until, 0)
    held_until = jnp.where(jnp.any(row.held_ids < vocab_size), row.held_until, 0)
    return dataclasses.replace(
        row,
        is_restricted=is_restricted,
        changed_until=jnp.where(is_changed, _ALWAYS, jnp.maximum(start_until, held_until)),
        temperature=jnp.where(is_greedy, 0.0, row.temperature),
        top_k=jnp.maximum(row.top_k, 0),
        keys=fold_in(row.keys, sample_index),
    )


def num_mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask with a bit for each token.

    Example:
      >>> num_mask_words(64), num_mask_words(65)
      (2, 3)
    """
    return -(-vocab_size // 32)


def mask_of(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return a mask with the bits of the given tokens set, i32[ceil(V / 32)].

    Token 0 is the lowest bit of the first word. In the example, the first word is 2**0 + 2**2, and
    the second word is 2**1, because token 33 is the second bit of that word.

    Example:
      >>> mask_of([0, 2, 33], vocab_size=64).tolist()
      [5, 2]
    """
    bits = np.zeros(32 * num_mask_words(vocab_size), np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def bad_word_rows(
    bad_word_ids: Sequence[Sequence[int]], max_bad_words: int, vocab_size: int
) -> np.ndarray:
    """Return the row of `SlotSampling.bad_words` for a slot, i32[max_bad_words, L].

    L is `MAX_BAD_WORD_TOKENS`. The example shows only the last three columns.

    Args:
      bad_word_ids: token sequences of the bad words.
      max_bad_words: number of rows.
      vocab_size: V, which marks unused rows.

    Raises:
      ValueError: there are too many sequences, a sequence is too long or empty, or a token id is
        out of range.

    Example:
      >>> bad_word_rows([[5], [3, 7]], max_bad_words=3, vocab_size=8)[:, -3:].tolist()
      [[-1, -1, 5], [-1, 3, 7], [-1, -1, 8]]
    """
    lengths = [len(word) for word in bad_word_ids]
    is_fitting = all(1 <= length <= MAX_BAD_WORD_TOKENS for length in lengths)
    if len(lengths) > max_bad_words or not is_fitting:
        raise ValueError(
            f"slot_row: bad_word_ids must have at most {max_bad_words} sequences of 1 to "
            f"{MAX_BAD_WORD_TOKENS} tokens, got {len(lengths)} with lengths up to "
            f"{max(lengths, default=0)}. Use fewer or shorter words."
        )
    rows = np.full((max_bad_words, MAX_BAD_WORD_TOKENS), _ANY_TOKEN, np.int32)
    rows[:, -1] = vocab_size
    for row, word in zip(rows, bad_word_ids, strict=False):
        row[-len(word) :] = _token_ids("bad_word_ids", word, vocab_size)
    return rows


def _allowed_mask(params: SamplingParams, vocab_size: int) -> np.ndarray:
    if params.allowed_token_ids is None:
        return np.full(num_mask_words(vocab_size), -1, np.int32)
    allowed = _token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    return mask_of(allowed, vocab_size)


def _recent(output: np.ndarray, num_prompt_tokens: int) -> np.ndarray:
    recent = np.full(MAX_BAD_WORD_TOKENS, _NO_TOKEN)
    last = np.arange(max(0, len(output) - len(recent)), len(output))
    recent[(num_prompt_tokens + last) % len(recent)] = output[last]
    return recent


def _row(values: Any, dtype: Any) -> Any:
    # The return type is Any, because the result is a NumPy array and the fields of `SlotSampling`
    # are declared as jax.Array.
    if dtype == np.float32:
        values = _to_float32(values)
    return np.asarray(values, dtype)


def _to_float32(values: Any) -> np.ndarray:
    # Clip the values: large Python floats would become infinite in float32, and later NaN.
    largest = np.finfo(np.float32).max
    return np.clip(np.asarray(values, np.float64), -largest, largest).astype(np.float32)


def _token_ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64).reshape(-1)
    invalid_ids = array[(array < 0) | (array >= vocab_size)]
    if invalid_ids.size:
        raise ValueError(
            f"slot_row: {name} must hold token ids in [0, {vocab_size}), got {invalid_ids[0]}. "
            "Check that the tokenizer belongs to this model."
        )
    return array


def _padded(name: str, values: np.ndarray, length: int, filler: int) -> Any:
    if len(values) > length:
        raise ValueError(
            f"slot_row: {name} must have at most {length} entries, got {len(values)}. "
            "Raise max_logit_bias or max_stop_ids in SlotSampling.create."
        )
    dtype = values.dtype if values.dtype == np.float32 else np.int32
    padded = np.full(length, filler, dtype)
    padded[: len(values)] = values
    return padded
