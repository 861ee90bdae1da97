"""Tokens that ``generation_config.json`` suppresses, in every mode of generation."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import LLM, BeamSearchParams, SamplingParams
from paged_jax.rollouts import rollout
from tests.support.tiny_model import BOS, EOS, SIZES, save_tiny_model

PROMPT = [BOS, 5, 9, 30, 9]
# Probable tokens of the tiny model; the bias of 33 is large enough to change its choices.
OPTIONS = {
    "eos_token_id": EOS,
    "do_sample": False,
    "repetition_penalty": 1.3,
    "suppress_tokens": [3, 26, 37],
    "begin_suppress_tokens": [EOS, 5, 22, 17],
    "bad_words_ids": [[18], [4], [EOS]],
    "sequence_bias": [[[33], 4.0], [[29], -6.0]],
}
# Tokens by transformers: greedy, and the best of two beams without the penalty.
GREEDY_TOKENS = [33, 33, 16, 33, 21, 12, 39, 6, 33, EOS]
BEAM_TOKENS = [33, 33, 33, 36, 33, 36, 33, 16, 39, 33]
SUPPRESSED = {3, 26, 37, 18, 4}
AT_START = {EOS, 5, 22, 17}
N = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("biased"))
    (folder / "generation_config.json").write_text(json.dumps(OPTIONS), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, **SIZES)


def complete(llm: LLM, params: SamplingParams) -> list[list[int]]:
    [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.peers
def test_transformers_generates_the_expected_tokens(folder) -> None:
    """It reads the same file."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(**options) -> list[int]:
        [ids] = model.generate(torch.tensor([PROMPT]), pad_token_id=EOS, **options)
        return ids[len(PROMPT) :].tolist()

    assert generate(max_new_tokens=N) == GREEDY_TOKENS
    assert generate(max_new_tokens=N, repetition_penalty=1.0) != GREEDY_TOKENS
    options = {"num_beams": 2, "length_penalty": 0.0, "repetition_penalty": 1.0}
    assert generate(max_new_tokens=10, early_stopping="never", **options) == BEAM_TOKENS


def test_generate_greedy_matches_transformers(llm) -> None:
    assert complete(llm, llm.get_default_sampling_params(max_tokens=N)) == [GREEDY_TOKENS]
    # Sampling with top_k=1 runs the filters.
    drawn = llm.get_default_sampling_params(max_tokens=N, temperature=2.0, top_k=1, seed=3)
    assert complete(llm, drawn) == [GREEDY_TOKENS]


@pytest.mark.slow
def test_generate_with_drafts_matches_transformers(folder) -> None:
    llm = LLM(folder, num_speculative_tokens=3, **SIZES)
    prompt = {"prompt_token_ids": PROMPT}
    [output] = llm.generate(prompt, llm.get_default_sampling_params(max_tokens=N), use_tqdm=False)
    assert output.outputs[0].token_ids == GREEDY_TOKENS


def test_beam_search_matches_transformers(llm) -> None:
    """The best sequence is compared, because transformers keeps fewer complete sequences."""
    params = BeamSearchParams(beam_width=2, max_tokens=10, length_penalty=0.0)
    [output] = llm.beam_search({"prompt_token_ids": PROMPT}, params)
    assert output.sequences[0].tokens[len(PROMPT) :] == BEAM_TOKENS
    [plain] = LLM(llm.model, **SIZES).beam_search({"prompt_token_ids": PROMPT}, params)
    assert plain.sequences[0].tokens[len(PROMPT) :] != BEAM_TOKENS


def test_beam_search_returns_no_suppressed_token(llm) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    [output] = llm.beam_search({"prompt_token_ids": PROMPT}, params)
    check_allowed([sequence.tokens[len(PROMPT) :] for sequence in output.sequences])


def check_allowed(rows) -> None:
    for row in rows:
        assert not SUPPRESSED & set(row)
        assert row[0] not in AT_START
    drawn = {token for row in rows for token in row[1:]}
    assert AT_START & drawn  # they are suppressed only as the first token


def test_generate_draws_no_suppressed_token(llm) -> None:
    params = SamplingParams(n=16, temperature=3.0, max_tokens=N, seed=0)
    check_allowed(complete(llm, params))
    # The request's own bias does not allow them again.
    bias = dict.fromkeys(SUPPRESSED, 100.0)
    check_allowed(complete(llm, SamplingParams(**{**vars(params), "logit_bias": bias})))


@pytest.mark.slow
def test_rollout_draws_no_suppressed_token(llm) -> None:
    prompts, lengths = np.array([PROMPT] * 4), np.array([5, 3, 4, 5])
    params = SamplingParams(temperature=3.0, max_tokens=N, seed=0)
    drawn = llm.rollout(prompts, lengths, params)
    rows = zip(drawn.token_ids.tolist(), drawn.num_drawn.tolist(), strict=True)
    check_allowed([row[:count] for row, count in rows])
    run = jax.jit(rollout, static_argnames=("max_tokens", "token_bias"))
    given = {"max_tokens": N, "temperature": 3.0, "seed": 0, "token_bias": llm.token_bias}
    pure = run(llm.model, jnp.asarray(prompts), jnp.asarray(lengths), **given)
    np.testing.assert_array_equal(pure.token_ids, drawn.token_ids)
