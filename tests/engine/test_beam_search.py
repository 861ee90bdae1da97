"""Beam search compared with a search on the plain model, and with enumeration of all sequences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, BeamSearchParams, Llama, SamplingParams, Tokenizer
from paged_jax.engine.beam_search import BeamChoice
from tests.support.tiny_model import BOS, CONFIG, EOS, SIZES
from tests.support.workload import check_empty

V = CONFIG.vocab_size
LONG = [BOS, *range(5, 22)]  # 18 tokens: 4 full blocks and 2 tokens
OTHER = [BOS, *range(25, 32)]
PROMPTS = [LONG, OTHER, [BOS], [BOS, 9, 9, 30], [BOS, *range(20, 28)]]
# A token that is probable in the tiny model is among them.
END_IDS = (EOS, 3)
BAD = "BeamSearchParams: "


@pytest.fixture(scope="session")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture(scope="session")
def shared_llm(tiny_model, tokenizer) -> LLM:
    return LLM(tiny_model, tokenizer=tokenizer, **SIZES)


@pytest.fixture
def llm(shared_llm):
    """Return the shared engine, and check after the test that it is empty."""
    yield shared_llm
    check_empty(shared_llm)


@pytest.fixture(scope="session")
def ending_llm(tiny_model, tokenizer) -> LLM:
    """Return an engine in which sequences end often."""
    return with_ends(tiny_model, tokenizer, END_IDS)


@pytest.fixture(scope="session")
def log_softmax(tiny_model):
    """Return a function: log-probabilities float64 [N, V] of the next token of N sequences."""
    run = jax.jit(lambda weights, ids: nnx.merge(graphdef, weights)(ids))
    graphdef, weights = nnx.split(tiny_model)

    def log_softmax(sequences: list[list[int]]) -> np.ndarray:
        token_ids = np.zeros((V, 40), np.int32)
        for row, sequence in enumerate(sequences):
            token_ids[row, : len(sequence)] = sequence
        lasts = [len(sequence) - 1 for sequence in sequences]
        logits = np.asarray(run(weights, token_ids), np.float64)[range(len(lasts)), lasts]
        return logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))

    return log_softmax


def with_ends(model: Llama, tokenizer: Tokenizer, end_ids) -> LLM:
    """Return an engine with `end_ids` as end-of-sequence tokens."""
    return LLM(model, tokenizer=Tokenizer(tokenizer.backend, eos_token_ids=end_ids), **SIZES)


def search(llm: LLM, prompts: list[list[int]], **params):
    params = BeamSearchParams(**{"beam_width": 4, "max_tokens": 12, **params})
    outputs = llm.beam_search([{"prompt_token_ids": ids} for ids in prompts], params)
    return [output.sequences for output in outputs]


@pytest.fixture(scope="session")
def wide_llm(tiny_model) -> LLM:
    """Return an engine for more beams than tokens, with other sizes and without prefix caching."""
    sizes = {"block_size": 3, "num_blocks": 3 * V, "max_num_seqs": V + 9, "max_chunk": 8}
    return LLM(tiny_model, **sizes, enable_prefix_caching=False)


def expected(log_softmax, prompt, *, width, end_ids=(), penalty=1.0, max_tokens=12):
    """Return the beams after all steps: (tokens, log-probability, whether complete)."""
    live, done = [(list(prompt), 0.0)], []
    for _ in range(max_tokens):
        rows = log_softmax([tokens for tokens, _ in live])
        new = []
        for (tokens, total), row in zip(live, rows, strict=True):
            for token in np.argsort(-row)[: width + max(width, len(end_ids))].tolist():
                item = ([*tokens, token], total + row[token])
                (done if token in end_ids else new).append(item)
        live = sorted(new, key=lambda item: item[1])[::-1][:width]
    return best_of(
        [(*item, True) for item in done] + [(*item, False) for item in live], width, penalty
    )


def best_of(items, width, penalty):
    def score(item):
        tokens, total, is_complete = item
        return total / (len(tokens) - is_complete) ** penalty

    return sorted(items, key=score)[::-1][:width]


def check_equal(sequences, items) -> None:
    assert [s.tokens for s in sequences] == [tokens for tokens, _, _ in items]
    assert [s.finish_reason == "stop" for s in sequences] == [item[2] for item in items]
    totals = [total for _, total, _ in items]
    np.testing.assert_allclose([s.cum_logprob for s in sequences], totals, rtol=1e-4)


# Results


def test_beam_search_matches_the_plain_model(llm, log_softmax) -> None:
    for prompt, width in zip(PROMPTS[:3], (4, 4, 2), strict=True):
        [sequences] = search(llm, [prompt], beam_width=width, ignore_eos=True)
        check_equal(sequences, expected(log_softmax, prompt, width=width))
        assert {s.stop_reason for s in sequences} == {None}


@pytest.mark.parametrize("penalty", [1.0, pytest.param(-2.0, marks=pytest.mark.slow)])
def test_beam_search_ranks_complete_sequences_by_length(ending_llm, log_softmax, penalty) -> None:
    num_steps, num_complete = ending_llm.stats.num_steps, 0
    for prompt in PROMPTS:
        [sequences] = search(ending_llm, [prompt], length_penalty=penalty)
        check_equal(
            sequences,
            expected(log_softmax, prompt, width=4, end_ids=END_IDS, penalty=penalty),
        )
        for sequence in sequences:
            if sequence.finish_reason == "stop":
                assert sequence.stop_reason == sequence.tokens[-1] in END_IDS
                num_complete += 1
    assert num_complete > 3
    # The search ends as soon as the result is certain; the plain search runs all steps.
    assert ending_llm.stats.num_steps - num_steps < 12 * len(PROMPTS)
    check_empty(ending_llm)


def test_beam_search_continues_with_more_end_tokens_than_beams(
    tiny_model, tokenizer, log_softmax
) -> None:
    for prompt in PROMPTS[:2]:
        [row] = log_softmax([prompt])
        # The number of beams is padded to four.
        end_ids = [token for token in np.argsort(-row).tolist() if token != EOS][:5]
        llm = with_ends(tiny_model, tokenizer, end_ids)
        [sequences] = search(llm, [prompt], beam_width=2, length_penalty=9.0)
        assert len(sequences[0].tokens) == len(prompt) + 12
        end_ids = (EOS, *end_ids)
        check_equal(sequences, expected(log_softmax, prompt, width=2, end_ids=end_ids, penalty=9.0))


def test_length_penalty_changes_the_order(ending_llm) -> None:
    lengths = {
        penalty: sum(
            len(sequence.tokens)
            for [sequence, *_] in search(ending_llm, PROMPTS, length_penalty=penalty)
        )
        for penalty in (-6.0, 6.0)
    }
    assert lengths[-6.0] < lengths[6.0]


@pytest.mark.slow
def test_beam_search_with_many_beams_finds_the_best_sequences(wide_llm, log_softmax) -> None:
    for end_ids, ignore_eos in (((EOS,), False), ((), True)):
        [sequences] = search(
            wide_llm, [LONG], beam_width=V, max_tokens=2, ignore_eos=ignore_eos, length_penalty=2
        )
        [first] = log_softmax([LONG])
        second = log_softmax([[*LONG, token] for token in range(V)])
        items = [([*LONG, token], first[token], True) for token in end_ids]
        items += [
            ([*LONG, a, b], first[a] + second[a, b], b in end_ids)
            for a, b in itertools.product(range(V), range(V))
            if a not in end_ids
        ]
        check_equal(sequences, best_of(items, V, 2.0))
    check_empty(wide_llm)


def test_beam_search_of_width_1_is_greedy(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for prompt in PROMPTS:
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        [[beam]] = search(llm, [prompt], beam_width=1, max_tokens=20, ignore_eos=True)
        completion = output.outputs[0]
        assert beam.tokens == prompt + completion.token_ids
        assert beam.cum_logprob == pytest.approx(completion.cumulative_logprob, rel=1e-5)


def test_text_includes_the_prompt(ending_llm, tokenizer) -> None:
    prompt = PROMPTS[3]
    bare, with_end = (
        search(ending_llm, [prompt], include_stop_str_in_output=include)[0]
        for include in (False, True)
    )
    assert {s.finish_reason for s in bare} == {"stop", "length"}
    for a, b in zip(bare, with_end, strict=True):
        assert a.tokens == b.tokens
        assert a.text.startswith(tokenizer.decode(prompt))
        is_stop = a.finish_reason == "stop"
        assert a.text == tokenizer.decode(a.tokens[:-1] if is_stop else a.tokens)
        end = tokenizer.decode(a.tokens[-1:], skip_special_tokens=False) if is_stop else ""
        assert b.text == a.text + end


def test_beam_search_ends_at_the_context(llm) -> None:
    prompt = [BOS, *([7, 9] * 28)]  # 57 of 64 tokens
    [sequences] = search(llm, [prompt], beam_width=2, max_tokens=50, ignore_eos=True)
    assert [len(s.tokens) for s in sequences] == [64, 64]
    assert {s.finish_reason for s in sequences} == {"length"}


# The end of a search, on the host


def scores_of(token_ids, seed: int, max_bias: float) -> np.ndarray:
    """Return log-probabilities float64 [4] after some tokens, with a bias on token 1."""
    row = 5 * np.random.default_rng([seed, *token_ids]).normal(size=4)
    return row - np.log(np.exp(row).sum()) + [0, max_bias, 0, 0]


@pytest.mark.parametrize("penalty", [-1.5, 0.0, 2.0])
@pytest.mark.parametrize("max_bias", [0.0, 0.5, 4.0])
def test_a_search_ends_only_when_its_result_is_certain(penalty, max_bias) -> None:
    """With a bias, a sum can grow and exceed 0. Searches that run all steps give the result."""
    params = BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=penalty)
    num_early = 0
    for seed in range(30):
        prompt = [0] * (1 if seed % 2 else 20)  # the length matters more after a short prompt
        choice, early = BeamChoice(prompt, 5, params, frozenset({3}), max_bias), None
        while choice.beams and choice.num_generated < 5:
            if choice.is_done and early is None:
                early = choice.best()
            rows = [scores_of(beam.token_ids, seed, max_bias) for beam in choice.beams]
            ids = [np.argsort(-row).tolist() for row in rows]
            ordered = zip(rows, ids, strict=True)
            choice.advance(ids, [row[order].tolist() for row, order in ordered])
        assert choice.is_done
        num_early += early is not None
        assert early in (None, choice.best())
    assert num_early > 1 or max_bias == 4


# Several prompts, memory


@pytest.mark.slow
def test_beam_search_of_several_prompts_equals_single_searches(ending_llm) -> None:
    steps = [ending_llm.stats.num_steps]
    alone = [search(ending_llm, [prompt], beam_width=2)[0] for prompt in PROMPTS]
    steps.append(ending_llm.stats.num_steps)
    together = search(ending_llm, PROMPTS, beam_width=2)
    steps.append(ending_llm.stats.num_steps)
    num_alone, num_together = np.diff(steps)
    assert num_alone / 2 <= num_together < num_alone / 1.5
    for a, b in zip(alone, together, strict=True):
        assert [s.tokens for s in a] == [s.tokens for s in b]
        assert [s.finish_reason for s in a] == [s.finish_reason for s in b]
        totals = [s.cum_logprob for s in b]
        np.testing.assert_allclose([s.cum_logprob for s in a], totals, rtol=1e-5)
    check_empty(ending_llm)
    assert search(ending_llm, []) == []


def test_beam_search_waits_if_blocks_may_not_suffice(llm) -> None:
    # Two beams of LONG may need 12 of the 20 blocks, two beams of OTHER 8.
    for prompts, num_steps in (((LONG, OTHER), 12), ((LONG, LONG), 24)):
        before = llm.stats.num_steps
        search(llm, list(prompts), beam_width=2, ignore_eos=True)
        assert llm.stats.num_steps - before == num_steps


@pytest.mark.slow
def test_beam_search_does_not_depend_on_sizes(wide_llm, log_softmax) -> None:
    [sequences] = search(wide_llm, [LONG], beam_width=V, max_tokens=5, ignore_eos=True)
    check_equal(sequences, expected(log_softmax, LONG, width=V, max_tokens=5))
    assert {sequence.text for sequence in sequences} == {""}
    check_empty(wide_llm)


def test_stats_sharing_counts_blocks_that_beams_share(tiny_model) -> None:
    llm = LLM(tiny_model, **SIZES)
    search(llm, [LONG], max_tokens=15, ignore_eos=True)
    # Without sharing, 4 beams would hold 8 blocks each; with a shared prompt, 20 together.
    assert 0.4 < llm.stats.sharing < 0.8
    assert 8 < llm.stats.peak_num_blocks <= 20
    assert llm.stats.num_steps == 15
    assert llm.stats.num_queried_tokens == 17


def test_beam_search_uses_the_prefix_cache(llm) -> None:
    llm.reset_prefix_cache()
    first = search(llm, [LONG], ignore_eos=True)
    before = llm.stats.num_cached_tokens
    assert search(llm, [LONG], ignore_eos=True) == first
    assert llm.stats.num_cached_tokens - before == 16
    params = SamplingParams(temperature=0, max_tokens=1)
    [output] = llm.generate({"prompt_token_ids": LONG}, params, use_tqdm=False)
    assert output.num_cached_tokens == 16


def test_beam_search_shares_a_prompt_that_is_running(llm) -> None:
    # Two beams of the first prompt may need 17 of the 20 blocks, two beams of the second 3. The
    # first search fills the context and ends three steps before the second.
    full, short = [BOS, *([7, 9] * 31)], [BOS, 20, 21, 22, 23]
    before = llm.stats.num_cached_tokens
    search(llm, [full, short, [*short, 24]], beam_width=2, max_tokens=4, ignore_eos=True)
    assert llm.stats.num_cached_tokens - before == 4


def test_beam_search_rejects_searches_that_never_fit(llm) -> None:
    before = llm.stats.num_steps
    with pytest.raises(ValueError, match="4 beams of 18 .* 16 new .* pool of 20 .* may need 24"):
        search(llm, [[BOS], LONG], max_tokens=16)
    with pytest.raises(ValueError, match="beam_width must be at most max_num_seqs = 4, got 5"):
        search(llm, [LONG], beam_width=5)
    assert llm.stats.num_steps == before
    [sequences] = search(llm, [LONG], max_tokens=15, ignore_eos=True)
    assert len(sequences) == 4


@pytest.mark.slow
def test_beam_search_returns_all_sequences_if_there_are_few(wide_llm, log_softmax) -> None:
    [sequences] = search(wide_llm, [[BOS, 9]], beam_width=V + 9, max_tokens=1)
    [row] = log_softmax([[BOS, 9]])
    assert sorted(s.tokens[-1] for s in sequences) == list(range(V))
    np.testing.assert_allclose(sum(np.exp(s.cum_logprob) for s in sequences), 1, rtol=1e-5)
    assert [s.tokens[-1] for s in sequences if s.finish_reason == "stop"] == [EOS]
    assert row[sequences[0].tokens[-1]] == row.max()
    check_empty(wide_llm)


# Failures


@pytest.mark.parametrize(
    "name",
    [
        "beam",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("attach", "prefill", "publish", "release")
        ),
    ],
)
def test_beam_search_interrupted_anywhere_leaves_the_engine_empty(llm, monkeypatch, name) -> None:
    first = search(llm, PROMPTS[:2], beam_width=2, ignore_eos=True)
    for is_after in (False, True):
        owner = llm.core.runner
        original, calls = getattr(owner, name), iter(range(2))

        def interrupt(*args, is_after=is_after, original=original, calls=calls, **kwargs):
            is_second = next(calls) == 1
            if is_after or not is_second:
                result = original(*args, **kwargs)
            if is_second:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupt)
            search(llm, PROMPTS[:2], beam_width=2, ignore_eos=True)
            search(llm, PROMPTS[:2], beam_width=2, ignore_eos=True)
        check_empty(llm)
        assert search(llm, PROMPTS[:2], beam_width=2, ignore_eos=True) == first


def test_beam_search_raises_for_nan(tiny_model) -> None:
    llm = LLM(tiny_model, **SIZES)
    llm.update_params(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), nnx.state(tiny_model)))
    with pytest.raises(FloatingPointError, match="NaN after 18 tokens"):
        search(llm, [LONG])
    check_empty(llm)


def test_beam_search_requires_an_idle_engine(llm) -> None:
    request_id = llm.add_request({"prompt_token_ids": LONG}, SamplingParams(max_tokens=4))
    with pytest.raises(RuntimeError, match="no request may be unfinished, got 1"):
        search(llm, [LONG])
    llm.abort(request_id)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one character"),
        ({"prompt_token_ids": []}, "at least one token"),
        ({"prompt_token_ids": [V]}, rf"0\.\.{V - 1}, got {V}"),
        ({"prompt_token_ids": [5] * 64}, "at most 63 tokens"),
    ],
)
def test_beam_search_rejects_bad_prompts(llm, prompt, message) -> None:
    before = llm.stats.num_steps
    with pytest.raises(ValueError, match=message):
        llm.beam_search(["the cat", prompt], BeamSearchParams(beam_width=2, max_tokens=4))
    assert llm.stats.num_steps == before


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer >= 1, got 0"),
        ({"beam_width": True}, "beam_width must be an integer >= 1, got True"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer >= 1, got 2.5"),
        ({"max_tokens": None}, "max_tokens must be an integer >= 1, got None"),
        ({"ignore_eos": 1}, "ignore_eos must be a bool, got 1"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output must be a bool"),
        ({"temperature": 0.7}, "temperature must be 0, .* got 0.7"),
        ({"length_penalty": 10**400}, r"length_penalty must be in \[-10, 10\], got 1000"),
        ({"length_penalty": float("nan")}, r"length_penalty must be in \[-10, 10\], got nan"),
        ({"length_penalty": 11}, r"length_penalty must be in \[-10, 10\], got 11"),
        ({"length_penalty": "1"}, "length_penalty must be in"),
    ],
)
def test_beam_search_params_rejects_bad_values(params, message) -> None:
    with pytest.raises(ValueError, match=BAD + message) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **params})
    assert "\n" not in str(caught.value)
