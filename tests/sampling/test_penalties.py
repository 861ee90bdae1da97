"""Allowed tokens and bad words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.penalties import adjust_logits, restrict_logits
from paged_jax.sampling.sample import rows_of, sample
from paged_jax.sampling.state import SlotSampling
from tests.support.decode_sequences import write_slot

V = 70


def restricted_rows(*rows: dict) -> SlotSampling:
    """Return a state of three slots, with these options of `write_slot`."""
    state = SlotSampling.create(3, V)
    for slot, options in enumerate(rows):
        params = SamplingParams(temperature=0, allowed_token_ids=options.pop("allowed", None))
        state = write_slot(state, slot, params, seed=0, **options)
    return state


def best_tokens(logits, state: SlotSampling, num_tokens=1, starts=(0, 0, 0)) -> list[list[int]]:
    """Return the tokens that each slot draws from equal logits, from positions `starts` on."""
    slots, active = jnp.arange(3, dtype=jnp.int32), jnp.ones(3, jnp.bool_)
    rows, drawn = rows_of(state, slots), []
    for i in range(num_tokens):
        draws, rows = _draw_rows(logits, rows, jnp.array(starts) + i, active, slots)
        drawn.append(draws.token_ids.tolist())
    return np.transpose(drawn).tolist()


_draw_rows = jax.jit(sample)


def test_sample_draws_only_allowed_tokens() -> None:
    logits = jnp.zeros((3, V)).at[:, 40].set(9.0).at[:, 66].set(2.0).at[:, 31].set(1.0)
    state = restricted_rows({"allowed": [31, 0, 66]}, {"allowed": [V - 1]}, {})
    assert best_tokens(logits, state) == [[66], [V - 1], [40]]
    # An allowed token is drawn even if the model excludes it.
    nothing = jnp.full((3, V), -jnp.inf).at[:, 40].set(1.0)
    assert best_tokens(nothing, state)[1:] == [[V - 1], [40]]


def test_sample_completes_no_bad_word() -> None:
    # The best tokens are 9, 8, 7, ... Each row has other words, and other tokens before them.
    logits = jnp.broadcast_to(jnp.arange(V) % 10 - (jnp.arange(V) >= 10) * 20.0, (3, V))
    state = restricted_rows(
        {"bad_word_ids": [[9, 9], [8, 9]], "output_token_ids": [9]},
        {"bad_word_ids": [[9, 9, 8], [9, 9, 9], [7], [6]], "prompt_token_ids": [9, 9]},
        {"bad_word_ids": [[9, 9, 9, 9]]},
    )
    assert best_tokens(logits, state, 5, starts=(1, 2, 0)) == [
        [8, 8, 8, 8, 8],
        [9, 9, 5, 9, 9],
        [9, 9, 9, 8, 9],
    ]


def test_bad_words_match_tokens_generated_before() -> None:
    """The slot is written after 40 tokens, as for a preempted request."""
    generated = [*range(20, 40), *range(20)]
    longest = [*range(5, 20), 3]
    state = restricted_rows(
        {"bad_word_ids": [longest], "prompt_token_ids": [1] * 7, "output_token_ids": generated},
        {"bad_word_ids": [[4, *longest[1:]]], "output_token_ids": generated},
        {"bad_word_ids": [[19, 3], [3, 2]], "output_token_ids": generated},
    )
    logits = jnp.zeros((3, V)).at[:, 3].set(2.0).at[:, 2].set(1.0)
    tokens = best_tokens(logits, state, 2, starts=(47, 40, 40))
    assert tokens == [[2, 3], [3, 3], [2, 3]]


def test_bad_words_yield_if_no_token_is_left() -> None:
    logits = jnp.zeros((3, V)).at[:, 5].set(1.0)
    state = restricted_rows(
        {"allowed": [3], "bad_word_ids": [[3], [3, 3]]},
        {"allowed": [3, 5], "bad_word_ids": [[5], [5, 5]]},
        {},
    )
    assert best_tokens(logits, state, 2) == [[3, 3], [3, 3], [5, 5]]


def test_a_token_that_ends_several_bad_words_counts_once() -> None:
    """The bad words of a row apply as long as one token is left that they do not exclude."""
    logits = jnp.zeros((3, V)).at[:, 5].set(1.0)
    ends = [[5], [9, 5], [8, 9, 5]]
    before = {"output_token_ids": [8, 9]}
    state = restricted_rows(
        {"allowed": [3, 5], "bad_word_ids": ends, **before},  # 3 is left
        {"allowed": [3, 5], "bad_word_ids": [*ends, [3], [9, 3]], **before},  # none is left
        {"allowed": [3, 5, 6], "bad_word_ids": [[5], [7], [9, 7], [9, 6]], **before},  # 7 is no use
    )
    assert best_tokens(logits, state, starts=(2, 2, 2)) == [[3], [5], [3]]


def test_restrictions_do_not_change_other_rows() -> None:
    logits = jax.random.normal(jax.random.key(0), (3, V)).at[2, 3].set(-jnp.inf)
    slots, active = jnp.arange(3, dtype=jnp.int32), jnp.ones(3, jnp.bool_)
    state = restricted_rows({"allowed": [7]}, {"bad_word_ids": [[2]]}, {})
    rows = rows_of(state, slots)
    positions = jnp.zeros(3, jnp.int32)
    z = adjust_logits(logits, rows, positions, active, slots)
    z = restrict_logits(z, rows, positions, slots)
    np.testing.assert_array_equal(z[2], logits[2])
    np.testing.assert_array_equal(jnp.isfinite(z[0]).nonzero()[0], [7])
    np.testing.assert_array_equal(z[1], logits[1].at[2].set(-jnp.inf))


@pytest.mark.parametrize("words", [[[]], [[1] * 17], [[1]] * 129, [[V]]], ids=len)
def test_slot_row_rejects_bad_words_without_room(words) -> None:
    with pytest.raises(ValueError, match="slot_row: bad_word_ids must h"):
        restricted_rows({"bad_word_ids": words})
