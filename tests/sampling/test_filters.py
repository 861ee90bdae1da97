"""Filters of logits against float64, and constraints of grammars."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling import filters
from paged_jax.sampling.filters import (
    Constraints,
    adjust_logits,
    filter_logits,
    restrict_logits,
)
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.sample import rows_of, sample
from paged_jax.sampling.state import SlotSampling
from tests.support import oracles_sampling as oracles
from tests.support.decode_sequences import write_slot
from tests.support.kernel_cases import lower

jit_filter = jax.jit(filter_logits)
V = 70


def random_logits(*shape, seed=0, scale=3.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


# -- Kept tokens ----------------------------------------------------------------------------------

FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 299},
    {"top_k": 300},
    {"top_k": 5000},
    {"top_p": 1e-6},
    {"top_p": 1e-60},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 1, "top_p": 0.5, "min_p": 0.5},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.05, "temperature": 0.6},
    {"top_p": 0.7, "temperature": 3.0},
    {"top_p": 0.7, "temperature": 0.05},
]


def check_filter(logits):
    """Check each filter on a row of a batch: kept tokens exactly, probabilities closely."""
    columns = {
        name: jnp.array([f.get(name, default) for f in FILTERS], dtype)
        for name, default, dtype in (
            ("temperature", 1.0, jnp.float32),
            ("min_p", 0.0, jnp.float32),
            ("top_k", 0, jnp.int32),
            ("top_p", 1.0, jnp.float32),
        )
    }
    log_weights = np.asarray(jit_filter(jnp.asarray(logits), **columns))
    for row, options in enumerate(FILTERS):
        want = oracles.kept_probabilities(logits[row], **options)
        kept = np.isfinite(log_weights[row])
        np.testing.assert_array_equal(kept, want > 0, err_msg=str(options))
        got = np.exp(log_weights[row].astype(np.float64))
        np.testing.assert_allclose(
            got / got.sum(), want, rtol=3e-6, atol=1e-12, err_msg=str(options)
        )


@pytest.mark.parametrize("seed", range(4))
def test_filter_logits_matches_the_oracle(seed):
    # With a larger scale the lowest temperature would round weights to 0 in float64.
    check_filter(random_logits(len(FILTERS), 300, seed=seed, scale=2.0))


@pytest.mark.parametrize("seed", range(4))
def test_filter_logits_breaks_ties_by_token_id(seed):
    # With multiples of 1/2, every cut of 300 tokens is at a tie, and the maximum is a tie.
    logits = np.round(random_logits(len(FILTERS), 300, seed=seed, scale=1.0) * 2) / 2
    check_filter(np.minimum(logits, 1.5))


def test_filter_logits_keeps_the_first_of_equal_logits():
    kept = jit_filter(
        jnp.zeros((3, 10)),
        temperature=jnp.ones(3),
        min_p=jnp.array([0.0, 0.0, 1.0]),
        top_k=jnp.array([3, 0, 0]),
        top_p=jnp.array([1.0, 0.5, 1.0]),
    )
    assert np.isfinite(kept).sum(axis=1).tolist() == [3, 5, 10]
    assert np.isfinite(kept)[0, :3].all() and np.isfinite(kept)[1, :5].all()


def test_filter_logits_separates_adjacent_floats():
    # Adjacent float32 values of both signs and around zero: any rounding would merge them.
    up = np.float32(np.inf)
    one = np.nextafter(np.float32(1), up)
    rows = np.array(
        [
            [1.0, one, np.nextafter(one, up), -5.0],
            [-1.0, -one, -np.nextafter(one, up), -50.0],
            [0.0, 1e-30, -1e-30, -1.0],
        ],
        np.float32,
    )
    kept = jit_filter(
        jnp.asarray(rows),
        temperature=jnp.full(3, 7.0),
        min_p=jnp.zeros(3),
        top_k=jnp.array([2, 2, 2]),
        top_p=jnp.ones(3),
    )
    assert np.isfinite(kept).tolist() == [
        [False, True, True, False],
        [True, True, False, False],
        [True, True, False, False],
    ]


def test_filter_logits_never_keeps_minus_infinity():
    logits = random_logits(2, 40)
    logits[:, 5:] = -np.inf
    kept = jit_filter(
        jnp.asarray(logits),
        temperature=jnp.full(2, 1e30),
        min_p=jnp.zeros(2),
        top_k=jnp.array([30, 0]),
        top_p=jnp.array([1.0, 0.999999]),
    )
    assert np.isfinite(kept).sum(axis=1).tolist() == [5, 5]


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_search_cut_finds_the_same_cuts_with_any_number_of_passes(num_bits):
    """GPUs try 15 cuts in a pass, CPUs try one."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**32, (64, 40), dtype=np.uint64).astype(np.uint32).view(np.float32)
    rows[np.isnan(rows)] = -np.inf
    rows[:4] = [[-np.inf], [np.inf], [0.0], [np.finfo(np.float32).max]]
    rows[4, ::2] = -0.0
    wanted = rng.integers(0, 42, 64).astype(np.int32)

    find = jax.jit(filters.search_cut, static_argnames="num_bits")
    cuts = find(rows, wanted, num_bits=num_bits)
    weighed = find(rows, wanted / 4, np.full(rows.shape, 0.25, np.float32), num_bits=num_bits)
    np.testing.assert_array_equal(weighed, cuts)
    for row, number, cut in zip(rows, wanted, cuts, strict=True):
        # The largest float that `number` entries reach: a value of the row, or the largest float.
        ordered = np.sort(row)[::-1]
        want = np.inf if number == 0 else ordered[number - 1] if number <= 40 else -np.inf
        assert cut == min(want, np.finfo(np.float32).max)


@pytest.mark.parametrize(("platform", "num_passes"), [("cpu", 32), ("cuda", 8)])
def test_filter_logits_uses_8_passes_on_gpus(platform, num_passes):
    rows = [jax.ShapeDtypeStruct((2,), dtype) for dtype in ("float32", "float32", "int32")]
    options = dict(zip(("temperature", "min_p", "top_k"), rows, strict=True)) | {"top_p": rows[0]}
    logits = jax.ShapeDtypeStruct((2, 5000), "float32")

    def function(logits, *values):
        return filter_logits(logits, **dict(zip(options, values, strict=True)))

    text = lower(function, logits, *options.values(), platform=platform).as_text()
    loops = re.findall(r"cond \{\s*%\w+ = stablehlo.constant dense<(\d+)>", text)
    assert loops == 4 * [str(num_passes)], "for top_k, for top_p, and for both"


def test_filter_logits_rejects_wrong_shapes():
    with pytest.raises(ValueError, match="filter_logits: top_p must have S"):
        filter_logits(
            jnp.zeros((2, 3)),
            temperature=jnp.ones(2),
            min_p=jnp.zeros(2),
            top_k=jnp.zeros(2, jnp.int32),
            top_p=jnp.ones(3),
        )


# Constraints: slot 1 has two forced tokens from position 5 on, then a mask.

KNOWN, ALLOWED = [3, 69], [0, 31, 32, 66]


def bound() -> Constraints:
    words = np.zeros((3, 3), np.int32)
    for token_id in ALLOWED:
        words[0, token_id // 32] |= np.uint32(1 << token_id % 32).view(np.int32)
    counts = np.array([2, 0, 0])
    rows = np.array([1, -1, -1]), np.full(3, 5), counts, counts + 6, np.array([KNOWN] * 3)
    return Constraints.create(3, V, max_forced=2).write(*map(jnp.asarray, (*rows, words)))


@pytest.fixture(scope="module")
def draw():
    """Return a function that draws the tokens of slots 0 and 1 at a position."""
    state = SlotSampling.create(3, V)
    for slot in (0, 1):
        state = write_slot(state, slot, SamplingParams(temperature=slot), seed=slot)
    slots = jnp.array([0, 1, 2], jnp.int32)
    rows, active = rows_of(state, slots), jnp.array([True, True, False])

    @jax.jit
    def run(logits, position, constraints):
        rows_bound = None if constraints is None else constraints.of_rows(slots)
        positions = jnp.full(3, position)
        return sample(logits, rows, positions, active, slots, True, rows_bound, num_top=1)[0]

    return run


def test_sample_applies_forced_tokens_and_masks(draw) -> None:
    logits = jax.random.normal(jax.random.key(0), (3, V)) * 3
    seen = set()
    for position in range(3, 60):
        free, draws = draw(logits, position, None), draw(logits, position, bound())
        assert draws.token_ids[0] == free.token_ids[0], "other rows are not affected"
        token_id = int(draws.token_ids[1])
        if position in (5, 6):
            assert token_id == KNOWN[position - 5]
        elif position != 7:
            assert token_id == free.token_ids[1]
        want = jax.nn.log_softmax(logits[1])[token_id]
        np.testing.assert_allclose(draws.logprobs[1], want, rtol=1e-5)
    # The position of the mask, with different logits.
    for seed in range(40):
        logits = jax.random.normal(jax.random.key(seed), (3, V)) * 3
        seen.add(int(draw(logits, 7, bound()).token_ids[1]))
    assert seen == set(ALLOWED)


def test_sample_can_draw_every_allowed_token(draw) -> None:
    logits = jnp.full((3, V), -jnp.inf).at[:, 40].set(1.0)
    assert int(draw(logits, 7, bound()).token_ids[1]) in ALLOWED
    logits = jnp.full((3, V), -jnp.inf).at[:, 66].set(-3e38)
    assert int(draw(logits, 7, bound()).token_ids[1]) in ALLOWED


# Restrictions: allowed tokens and bad words.


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
