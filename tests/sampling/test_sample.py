"""Sampled tokens: their distribution, penalties, log-probabilities, and independence of rows."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.sample import log_sum_exp, sample, top_logprobs
from paged_jax.sampling.state import SlotSampling
from tests.support import oracles_sampling as oracles
from tests.support.decode_sequences import write_slot

# Most tests share one program of this size, because compiling takes longer than running. 300 tokens
# are three groups of the two-level draw, and the last group is incomplete.
NUM_SLOTS, VOCAB = 8, 300
TRACES = collections.Counter()


@jax.jit
def jit_sample(logits, state, positions, active):
    TRACES[logits.shape, logits.dtype] += 1
    return sample(logits, state, positions, active)


def slots(*params, prompts=None, outputs=None, seeds=None):
    """Return a state of NUM_SLOTS slots; the first slots have these params."""
    state = SlotSampling.create(NUM_SLOTS, VOCAB)
    for slot, own in enumerate(params):
        state = write_slot(
            state,
            slot,
            own,
            seed=slot if seeds is None else seeds[slot],
            prompt_token_ids=() if prompts is None else prompts[slot],
            output_token_ids=() if outputs is None else outputs[slot],
        )
    return state


def step(logits, state, positions=None, active=None):
    """Sample for the first slots; other slots are inactive and other tokens are impossible."""
    num_rows, num_tokens = logits.shape
    num_slots, vocab_size = state.output_counts.shape
    padded = np.full((num_slots, vocab_size), np.nan, np.float32)
    padded[:num_rows] = -np.inf
    padded[:num_rows, :num_tokens] = logits
    all_positions, all_active = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.bool_)
    all_positions[:num_rows] = 0 if positions is None else positions
    all_active[:num_rows] = True if active is None else active
    draws, state = jit_sample(padded, state, all_positions, all_active)
    return np.asarray(draws.token_ids)[:num_rows], np.asarray(draws.logprobs)[:num_rows], state


def random_logits(*shape, seed=0, scale=3.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


# -- Draws ----------------------------------------------------------------------------------------


def draws(logits_row, params, num_draws, output=()):
    """Return tokens at `num_draws` positions of one seed, drawn in batches of 512 equal rows."""
    num_rows = 512
    logits = np.broadcast_to(logits_row, (num_rows, len(logits_row)))
    state = slots(params, seeds=[0], outputs=[output])
    state = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], (num_rows, *a.shape[1:])), state)
    tokens = [
        step(logits, state, np.arange(start, start + num_rows))[0]
        for start in range(0, num_draws, num_rows)
    ]
    return np.concatenate(tokens)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 1.5}],
    ids=str,
)
def test_sample_draws_by_probability(options):
    logits = np.full(VOCAB, -np.inf, np.float32)
    likely = [0, 1, 127, 128, 200, 255, 256, 299]
    logits[likely] = np.log(np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02], np.float32))
    num_draws = 8192
    tokens = draws(logits, SamplingParams(**options), num_draws)
    want = oracles.kept_probabilities(logits, **options)
    counts = np.bincount(tokens, minlength=300)
    assert counts[want == 0].sum() == 0
    expected = want[want > 0] * num_draws
    chi_square = ((counts[want > 0] - expected) ** 2 / expected).sum()
    # With 7 degrees of freedom, 24.3 is exceeded by chance once in 1000. The seed is fixed.
    assert chi_square < 24.3
    # Draws at different positions differ.
    assert len(set(tokens[:64].tolist())) > 1


def test_sample_draws_uniformly_across_and_within_groups():
    num_draws = 64 * VOCAB
    num_draws -= num_draws % 512
    tokens = draws(np.zeros(VOCAB, np.float32), SamplingParams(), num_draws)
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = num_draws / VOCAB
    # With 299 degrees of freedom, 378 is exceeded once in 1000; below 228 is as unlikely.
    assert 228 < ((counts - expected) ** 2 / expected).sum() < 378
    # Successive draws are independent, so sums of pairs modulo VOCAB are uniform.
    pairs = np.bincount((tokens[1:] + tokens[:-1]) % VOCAB, minlength=VOCAB)
    assert 228 < ((pairs - expected) ** 2 / expected).sum() < 378


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=20, temperature=2.0),
    SamplingParams(top_p=0.9, temperature=2.0),
    SamplingParams(min_p=0.05, temperature=2.0),
    SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.3, temperature=1.5
    ),
    SamplingParams(logit_bias={3: 4.0, 200: -2.0}, temperature=1.5),
    SamplingParams(top_k=50, top_p=0.95, min_p=0.01, frequency_penalty=-0.7, logit_bias={9: 1.0}),
]
MIXED_PROMPTS = [[slot, 2 * slot, 7] for slot in range(len(MIXED))]
MIXED_OUTPUTS = [[3 * slot, 9, 9] for slot in range(len(MIXED))]


def run_mixed(order, active=None, num_tokens=6):
    """Return the tokens and log-probabilities of MIXED for this order of the slots."""
    state = slots(
        *(MIXED[i] for i in order),
        prompts=[MIXED_PROMPTS[i] for i in order],
        outputs=[MIXED_OUTPUTS[i] for i in order],
        seeds=[1000 + i for i in order],
    )
    generated = []
    for position in range(num_tokens):
        rows = random_logits(len(MIXED), VOCAB, seed=position)[list(order)]
        positions = [position + 10 * i for i in order]
        tokens, logprobs, state = step(rows, state, positions, active)
        bits = np.asarray(logprobs).view(np.int32)
        generated.append(np.stack([np.asarray(tokens), bits], axis=1))
    result = np.empty((len(MIXED), num_tokens, 2), np.int64)
    result[list(order)] = np.stack(generated, axis=1)
    return result


def test_sample_does_not_depend_on_the_slot():
    order = [3, 1, 4, 7, 5, 0, 2, 6]
    np.testing.assert_array_equal(run_mixed(order), run_mixed(range(len(MIXED))))


@pytest.mark.parametrize("alone", range(len(MIXED)))
def test_sample_does_not_depend_on_other_rows(alone):
    # With a single active row, the work for other kinds of rows is skipped.
    active = np.arange(len(MIXED)) == alone
    together = run_mixed(range(len(MIXED)))
    np.testing.assert_array_equal(
        run_mixed(range(len(MIXED)), active=active)[alone], together[alone]
    )


def test_sample_ignores_inactive_rows():
    logits = random_logits(2, 50)
    logits[1] = np.nan
    params = SamplingParams(top_p=0.9, frequency_penalty=1.0)
    state = slots(params, params)
    tokens, logprobs, after = step(logits, state, active=[True, False])
    assert np.isfinite(logprobs).all() and tokens[1] == 0 and logprobs[1] == 0
    assert after.output_counts.sum(axis=1).tolist() == [1] + [0] * (NUM_SLOTS - 1)


def test_sample_depends_on_seed_sample_index_and_position():
    logits = np.zeros((1, VOCAB), np.float32)

    def token(seed, sample_index, position):
        state = SlotSampling.create(NUM_SLOTS, VOCAB)
        state = write_slot(state, 0, SamplingParams(), seed=seed, sample_index=sample_index)
        return int(step(logits, state, [position])[0][0])

    # Seeds may differ only in the upper half, or only in bit 62.
    streams = [(5, 0), (5, 1), (6, 0), (5 + 2**32, 0), (5 + 2**62, 0), (2**63 - 1, 0)]
    tokens = [tuple(token(*stream, position) for position in range(4)) for stream in streams]
    assert len(set(tokens)) == len(streams)
    assert all(len(set(row)) > 1 for row in tokens)
    assert tokens[0] == tuple(token(5, 0, position) for position in range(4))


def test_sample_does_not_depend_on_the_default_prng():
    state = slots(SamplingParams())
    arguments = (
        jnp.zeros((NUM_SLOTS, VOCAB)),
        state,
        jnp.arange(NUM_SLOTS, dtype=jnp.int32),
        jnp.ones(NUM_SLOTS, jnp.bool_),
    )
    # Separate functions, because JAX caches the trace of each function.
    want = jax.make_jaxpr(lambda *arguments: sample(*arguments))(*arguments)
    with jax.default_prng_impl("rbg"):
        got = jax.make_jaxpr(lambda *arguments: sample(*arguments))(*arguments)
    assert "fry" in str(want) and str(got) == str(want)


# -- Greedy, penalties, bias ----------------------------------------------------------------------


def test_sample_at_temperature_zero_takes_the_first_largest_logit():
    logits = random_logits(4, 200)
    logits[1, [17, 150]] = 50.0
    params = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5)
    tokens, _, _ = step(logits, slots(*[params] * 4))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    assert tokens[1] == 17


@pytest.mark.parametrize("option", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}], ids=str)
def test_sample_is_greedy_if_filters_keep_one_token(option):
    logits = random_logits(4, 200)
    logits[1, [17, 150]] = 50.0
    tokens, _, _ = step(logits, slots(*[SamplingParams(**option)] * 4))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 0.5},
        {"logit_bias": {3: 2.5, 39: -100.0, 0: 1.25}},
        {
            "presence_penalty": 0.75,
            "frequency_penalty": 0.25,
            "repetition_penalty": 4.0,
            "logit_bias": {5: 6.0, 6: 6.5},
        },
    ],
    ids=str,
)
def test_sample_penalties_match_the_oracle(options):
    num_slots, vocab_size = NUM_SLOTS, 40
    rng = np.random.default_rng(1)
    # With multiples of 1/64, float32 and float64 agree exactly.
    logits = np.round(random_logits(num_slots, vocab_size) * 64).astype(np.float32) / 64
    prompts = rng.integers(0, vocab_size, (num_slots, 15))
    outputs = rng.integers(0, vocab_size, (num_slots, 25))
    params = SamplingParams(temperature=0, **options)
    state = slots(*[params] * num_slots, prompts=prompts, outputs=outputs)
    tokens, _, _ = step(logits, state)
    named = {("bias" if name == "logit_bias" else name): v for name, v in options.items()}
    want = [
        oracles.penalised_logits(row, prompt=prompt, output=output, **named).argmax()
        for row, prompt, output in zip(logits, prompts, outputs, strict=True)
    ]
    assert tokens.tolist() == want
    assert tokens.tolist() != logits.argmax(axis=1).tolist()


def test_sample_applies_penalties_to_the_distribution():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.5)
    tokens = draws(logits, params, 4096, output=[0, 0])
    penalised = oracles.penalised_logits(
        logits, output=[0, 0], frequency_penalty=0.5, presence_penalty=0.5
    )
    expected = oracles.kept_probabilities(penalised) * 4096
    counts = np.bincount(tokens, minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 1 in 1000, 3 degrees of freedom


def test_sample_counts_generated_tokens():
    logits = np.zeros((3, 5), np.float32)
    logits[:, 2] = 1.0
    logits[:, 4] = 0.5
    params = SamplingParams(temperature=0, frequency_penalty=0.375)
    state = slots(params, params, SamplingParams(temperature=0))
    history = []
    for position in range(4):
        tokens, _, state = step(logits, state, [position] * 3, [True, position < 2, True])
        history.append(tokens.tolist())
    # 1.0, 0.625, then 0.25 < 0.5, then 0.25 > 0.125.
    assert [row[0] for row in history] == [2, 2, 4, 2]
    assert [row[1] for row in history] == [2, 2, 0, 0]
    want = [[0, 0, 3, 0, 1], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    assert state.output_counts[:3, :5].tolist() == want
    assert state.output_counts.sum() == 10


def test_sample_excludes_stop_tokens_until_min_tokens():
    logits = np.array([[0.0, 3.0, 2.0, 1.0]] * 2, np.float32)
    state = SlotSampling.create(NUM_SLOTS, VOCAB)
    patient = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2])
    state = write_slot(state, 0, patient, seed=0, prompt_token_ids=[0, 0, 0], eos_token_ids=[1])
    state = write_slot(state, 1, SamplingParams(temperature=0), seed=0, eos_token_ids=[1])
    tokens = []
    for position in (3, 4, 5):
        chosen, _, state = step(logits, state, [position] * 2)
        tokens.append(chosen.tolist())
    assert tokens == [[3, 1], [3, 1], [1, 1]]


@pytest.mark.parametrize("own_bias", [None, {0: 0.5}], ids=["next-to-a-bias", "with-a-bias"])
def test_sample_allows_stop_tokens_at_min_tokens_next_to_changed_rows(own_bias):
    """A batch with a changed row takes another branch, which must use the same positions."""
    logits = np.array([[0.0, 3.0, 2.0, 1.0]] * 2, np.float32)
    state = SlotSampling.create(NUM_SLOTS, VOCAB)
    patient = SamplingParams(temperature=0, min_tokens=2, logit_bias=own_bias)
    state = write_slot(state, 0, patient, seed=0, prompt_token_ids=[0, 0, 0], eos_token_ids=[1])
    biased = SamplingParams(temperature=0, logit_bias={3: 9.0})
    state = write_slot(state, 1, biased, seed=0, eos_token_ids=[1])
    tokens = []
    for position in (3, 4, 5):
        chosen, _, state = step(logits, state, [position] * 2)
        tokens.append(chosen.tolist())
    assert tokens == [[2, 3], [2, 3], [1, 3]]


# -- Invalid logits -------------------------------------------------------------------------------

BOTH_MODES = pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)], ids=["greedy", "drawn"]
)


@BOTH_MODES
def test_sample_never_chooses_minus_infinity_or_nan(params):
    logits = np.full((8, 300), -np.inf, np.float32)
    logits[:, 1::2] = np.nan
    logits[:, 290] = -40.0
    tokens, logprobs, _ = step(logits, slots(*[params] * 8), np.arange(8))
    assert tokens.tolist() == [290] * 8
    assert np.isnan(logprobs).all()


@BOTH_MODES
def test_sample_treats_plus_infinity_as_the_largest(params):
    logits = random_logits(2, 300)
    logits[:, 123] = np.inf
    tokens, logprobs, _ = step(logits, slots(params, params))
    assert tokens.tolist() == [123, 123]
    assert np.isnan(logprobs).all()


def test_sample_breaks_ties_of_plus_infinity():
    logits = random_logits(NUM_SLOTS, VOCAB)
    logits[:, [123, 200]] = np.inf
    tokens, _, _ = step(logits, slots(*[SamplingParams(top_p=0.4)] * NUM_SLOTS))
    assert tokens.tolist() == [123] * NUM_SLOTS


@BOTH_MODES
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_sample_returns_token_0_for_rows_without_usable_logits(params, bad):
    logits = np.full((2, 300), bad, np.float32)
    tokens, logprobs, _ = step(logits, slots(params, params))
    assert tokens.tolist() == [0, 0]
    assert np.isnan(logprobs).all()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e300},
        {"temperature": 1.1e-5},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"logit_bias": {0: 1e300, 1: -1e300}},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
    ],
    ids=str,
)
def test_sample_handles_extreme_params(options):
    logits = random_logits(4, 64, scale=1e4)
    logits[:, 32:] = -np.inf
    params = SamplingParams(**options)
    state = slots(*[params] * 4, prompts=[[3]] * 4, outputs=[[4, 40]] * 4)
    tokens, logprobs, _ = step(logits, state)
    assert (tokens < 32).all() and np.isfinite(logprobs).all()


# -- Log-probabilities ----------------------------------------------------------------------------


def test_sample_reports_logprobs_of_the_raw_logits():
    logits = random_logits(4, VOCAB, scale=5.0)
    params = SamplingParams(temperature=0.3, top_k=9, logit_bias={2: 30.0}, presence_penalty=2.0)
    tokens, logprobs, _ = step(logits, slots(*[params] * 4, outputs=[[2]] * 4))
    want = [oracles.log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(logprobs, want, rtol=1e-6, atol=2e-6)
    assert 2 in tokens


def test_top_logprobs_match_the_oracle():
    logits = np.round(random_logits(3, 100), 1)
    values, ids = top_logprobs(jnp.asarray(logits), 7)
    for row in range(3):
        want = oracles.log_softmax(logits[row])
        order = np.lexsort((np.arange(100), -logits[row]))[:7]
        assert ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(values[row], want[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [0, 101, -1, 2.0, True])
def test_top_logprobs_rejects_k_out_of_range(k):
    with pytest.raises(ValueError, match=r"top_logprobs: k must be an integer in \[1, 100\]"):
        top_logprobs(jnp.zeros((1, 100)), k)


def test_sample_computes_in_float32_for_bfloat16_logits():
    low = jnp.asarray(random_logits(NUM_SLOTS, VOCAB)).astype(jnp.bfloat16)
    rest = (
        slots(SamplingParams(), SamplingParams(top_p=0.5)),
        jnp.zeros(NUM_SLOTS, jnp.int32),
        jnp.ones(NUM_SLOTS, jnp.bool_),
    )
    got, _ = jit_sample(low, *rest)
    want, _ = jit_sample(low.astype(jnp.float32), *rest)
    assert got.logprobs.dtype == jnp.float32
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-6)


# -- One program ----------------------------------------------------------------------------------


def test_sample_and_write_slot_compile_once_for_all_params():
    state = slots(SamplingParams())
    logits = random_logits(NUM_SLOTS, VOCAB)
    step(logits, state)
    with jax.no_tracing():
        for slot, params in enumerate(MIXED):
            state = write_slot(state, slot, params, seed=slot, prompt_token_ids=range(slot))
            _, _, state = step(logits, state, [slot] * NUM_SLOTS, np.arange(NUM_SLOTS) != slot)
    # Once in this whole file, in any order of the tests.
    assert TRACES[(NUM_SLOTS, VOCAB), jnp.dtype(jnp.float32)] == 1


def test_sample_gives_the_same_result_inside_scan():
    logits = jnp.asarray(random_logits(len(MIXED), 300))
    state = slots(*MIXED)
    active = jnp.ones(len(MIXED), jnp.bool_)

    @jax.jit
    def rollout(state):
        def body(state, position):
            positions = jnp.full(len(MIXED), position)
            draws, state = sample(logits, state, positions, active)
            return state, draws.token_ids

        return jax.lax.scan(body, state, jnp.arange(5, dtype=jnp.int32))

    scanned_state, scanned = rollout(state)
    for position in range(5):
        tokens, _, state = step(logits, state, [position] * len(MIXED))
        np.testing.assert_array_equal(tokens, scanned[position])
    np.testing.assert_array_equal(state.output_counts, scanned_state.output_counts)


def test_sample_rejects_wrong_shapes():
    state = SlotSampling.create(2, 10)
    with pytest.raises(ValueError, match="sample: output_counts must have V"):
        sample(jnp.zeros((2, 11)), state, jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.bool_))


def test_sample_works_without_room_for_biases():
    state = SlotSampling.create(1, 4, max_logit_bias=0, max_stop_ids=0)
    assert step(np.array([[0, 0, 1, 0]], np.float32), state)[0].tolist() == [2]


def test_log_sum_exp_matches_numpy() -> None:
    """Also of a row in which no token is possible, and with a peak that is not the largest logit.

    A row of -inf is the logarithm of a sum of zeros, and exp(1000) is not finite.
    """
    logits = random_logits(5, VOCAB)
    logits[1], logits[2], logits[3, 1:] = -np.inf, logits[2] + 1000, -np.inf
    want = np.logaddexp.reduce(logits.astype(np.float64), axis=1)
    np.testing.assert_allclose(log_sum_exp(logits)[:, 0], want, rtol=1e-6)
    peak = jnp.asarray(logits).max(axis=1, keepdims=True) + 1
    np.testing.assert_allclose(log_sum_exp(logits, peak)[:, 0], want, rtol=1e-6)
