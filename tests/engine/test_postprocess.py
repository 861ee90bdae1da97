"""Log-probabilities, metrics and statistics of generated tokens."""

import dataclasses

import jax
import numpy as np
import pytest

from paged_jax import LLM, Llama
from tests.support.generation import GREEDY, PROMPTS, complete_prompt, generate, tokens_of
from tests.support.tiny_model import SIZES
from tests.support.workload import check_empty


@pytest.fixture(scope="module")
def shared_llm(tiny_folder) -> LLM:
    return LLM(tiny_folder, **SIZES)


@pytest.fixture
def llm(shared_llm):
    """Return the shared engine, and check after the test that it is empty."""
    yield shared_llm
    check_empty(shared_llm)


@pytest.fixture(scope="module")
def plain_logprobs(shared_llm):
    """Return a function: log-probabilities float64 [T, V] after each token, by the plain model."""
    forward = jax.jit(Llama.__call__)

    def logprobs(token_ids: list[int]) -> np.ndarray:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(token_ids)] = token_ids
        logits = np.asarray(forward(shared_llm.model, padded), np.float64)[0, : len(token_ids)]
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return logprobs


def test_logprobs_match_the_model(llm, plain_logprobs) -> None:
    prompt_ids = llm.tokenizer.encode(PROMPTS[3])
    completion = complete_prompt(llm, PROMPTS[3], temperature=1.5, seed=2, logprobs=3)
    token_ids = completion.token_ids
    expected = plain_logprobs(prompt_ids + token_ids[:-1])[len(prompt_ids) - 1 :]
    assert completion.logprobs is not None and len(completion.logprobs) == len(token_ids)
    for row, token_id, candidates in zip(expected, token_ids, completion.logprobs, strict=True):
        best = np.argsort(-row, kind="stable")[:3].tolist()
        assert set(candidates) == {token_id, *best}
        top = [token for token, candidate in candidates.items() if candidate.rank <= 3]
        assert sorted(top, key=lambda token: candidates[token].rank) == best
        for token, candidate in candidates.items():
            assert candidate.rank == 1 + int((row > row[token]).sum())
            assert candidate.logprob == pytest.approx(row[token], abs=2e-5)
            assert candidate.decoded_token == llm.tokenizer.decode(
                [token], skip_special_tokens=False
            )
    chosen = [c[token].logprob for c, token in zip(completion.logprobs, token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-6)
    assert max(len(candidates) for candidates in completion.logprobs) == 4, (
        "at least one chosen token is not among the best"
    )


def test_logprobs_zero_reports_only_the_chosen_token(llm) -> None:
    completion = complete_prompt(llm, PROMPTS[3], logprobs=0)
    assert [list(candidates) for candidates in completion.logprobs] == [
        [token_id] for token_id in completion.token_ids
    ]
    without = complete_prompt(llm, PROMPTS[3])
    assert without.logprobs is None
    assert without.token_ids == completion.token_ids
    assert without.cumulative_logprob == pytest.approx(completion.cumulative_logprob, abs=1e-6)


def test_prompt_logprobs_match_the_model(llm, plain_logprobs) -> None:
    prompt_ids = llm.tokenizer.encode(PROMPTS[0])
    assert len(prompt_ids) > 17, "more than one chunk"
    params = dataclasses.replace(GREEDY, prompt_logprobs=2)
    generate(llm, PROMPTS[0], GREEDY)  # cached blocks must be computed again
    [output] = generate(llm, PROMPTS[0], params)
    expected = plain_logprobs(prompt_ids)
    first, *others = output.prompt_logprobs
    assert first is None and len(others) == len(prompt_ids) - 1
    for row, token_id, candidates in zip(expected, prompt_ids[1:], others, strict=False):
        best = np.argsort(-row, kind="stable")[:2].tolist()
        assert set(candidates) == {token_id, *best}
        for token, candidate in candidates.items():
            assert candidate.rank == 1 + int((row > row[token]).sum())
            assert candidate.logprob == pytest.approx(row[token], abs=2e-5)
    assert tokens_of([output]) == tokens_of(generate(llm, PROMPTS[0], GREEDY))


def test_metrics_are_in_order(llm) -> None:
    for output in generate(llm, PROMPTS, GREEDY):
        metrics = output.metrics
        times = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.finished_time,
        ]
        assert times == sorted(times)


def test_stats_count_tokens(tiny_folder) -> None:
    llm = LLM(tiny_folder, **SIZES, enable_prefix_caching=False)
    generate(llm, PROMPTS, GREEDY)
    stats = llm.stats
    assert stats.num_prompt_tokens == sum(len(llm.tokenizer.encode(p)) for p in PROMPTS)
    assert stats.num_generated_tokens == 12 * len(PROMPTS)
    # The first step of a batch size compiles and does not count for the decoding rate.
    assert stats.num_decode_tokens < stats.num_generated_tokens
    generate(llm, PROMPTS, GREEDY)
    assert llm.stats.num_decode_tokens == stats.num_decode_tokens + 12 * len(PROMPTS)
    stats = llm.stats
    seconds = (stats.prefill_seconds, stats.decode_seconds, stats.host_seconds)
    assert min(*seconds, stats.compile_seconds, stats.first_token_seconds) > 0
