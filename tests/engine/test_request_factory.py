"""`RequestFactory`: forms of prompts, and rejected prompts and parameters."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import LLM, SamplingParams
from tests.support.generation import GREEDY, PROMPTS, complete_prompt, generate, tokens_of
from tests.support.tiny_model import BOS, SIZES
from tests.support.workload import check_empty


@pytest.fixture(scope="module")
def shared_llm(tiny_folder) -> LLM:
    return LLM(tiny_folder, **SIZES)


@pytest.fixture
def llm(shared_llm):
    """Return the shared engine, and check after the test that it is empty."""
    yield shared_llm
    check_empty(shared_llm)


def test_prompt_forms_are_equivalent(llm) -> None:
    text = PROMPTS[0]
    token_ids = llm.tokenizer.encode(text)
    assert token_ids[0] == BOS and BOS not in token_ids[1:]
    forms = [text, {"prompt": text}, {"prompt_token_ids": token_ids}]
    forms.append({"prompt_token_ids": np.array(token_ids)})
    forms.append({"prompt_token_ids": jnp.array(token_ids)})
    forms.append({"prompt_token_ids": list(np.array(token_ids, np.uint16))})
    outputs = generate(llm, forms, GREEDY)
    for output in outputs:
        assert output.prompt_token_ids == token_ids
        assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    assert tokens_of(outputs) == [tokens_of(outputs)[0]] * len(forms)
    assert [output.prompt for output in outputs] == [text, text, None, None, None, None]
    for one in (text, forms[2], iter([text])):
        assert tokens_of(generate(llm, one, GREEDY)) == tokens_of(outputs[:1])
    assert generate(llm, [], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "at least one character, got ''"),
        ([PROMPTS[0], ""], GREEDY, r"^prompts\[1\]: request: .*at least one character"),
        (PROMPTS[0], {"temperature": 0}, r"got a dict\. Pass SamplingParams\(\*\*params\)"),
        ({"prompt": 5}, GREEDY, "at least one character, got 5"),
        ("\ud800", GREEDY, "valid Unicode"),
        ({"prompt_token_ids": []}, GREEDY, "at least one token"),
        ({"prompt_token_ids": 5}, GREEDY, "list of integers, got 5"),
        ({"prompt_token_ids": "ab"}, GREEDY, "list of integers, got 'ab'"),
        ({"prompt_token_ids": [5, 99]}, GREEDY, "integers in 0..42, got 99"),
        ({"prompt_token_ids": [-1]}, GREEDY, "integers in 0..42, got -1"),
        ({"prompt_token_ids": [5, True]}, GREEDY, "integers in 0..42, got True"),
        ({"prompt_token_ids": [5.0]}, GREEDY, "integers in 0..42, got 5.0"),
        ({"prompt_token_ids": np.array([5.0])}, GREEDY, r"shape \(1,\) and dtype float64"),
        ({"prompt_token_ids": jnp.array([True])}, GREEDY, r"shape \(1,\) and dtype bool"),
        ({"prompt_token_ids": np.array([[5, 6]])}, GREEDY, r"one-dimensional .* shape \(1, 2\)"),
        (
            {"prompt_token_ids": np.array(5)},
            GREEDY,
            r"one-dimensional array of integers, got .* shape \(\)",
        ),
        ({"prompt_token_ids": jnp.array([5, 99])}, GREEDY, "integers in 0..42, got 99"),
        ({"prompt": "ab", "prompt_token_ids": [5]}, GREEDY, "either prompt or prompt_token_ids"),
        ({"text": "ab"}, GREEDY, r"got the keys \['text'\]"),
        ({"prompt": "ab", "cache_slat": "a"}, GREEDY, r"cache_salt, got cache_slat\."),
        ([5.5], GREEDY, r"list of token ids, or a dict .* got 5\.5"),
        ([[5, 6.5]], GREEDY, r"must hold integers in .*, got 6\.5"),
        ({"prompt_token_ids": [5] * 64}, GREEDY, "at most 63 tokens.*context of 64, got 64"),
        (PROMPTS, [GREEDY], r"one value per prompt \(5\), got 1"),
        ("ab", [GREEDY, GREEDY], r"one value per prompt \(1\), got 2"),
        ({"prompt": "ab", "cache_salt": 5}, GREEDY, "cache_salt must be a text, got 5"),
        ("ab", SamplingParams(logit_bias={43: 1.0}), "logit_bias must hold integers in 0..42"),
        ("ab", SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "at most 1024 entries"),
        ("ab", SamplingParams(stop_token_ids=[43]), "stop_token_ids must hold integers in 0..42"),
        ("ab", SamplingParams(stop_token_ids=list(range(2, 20))), "at most 16"),
    ],
)
def test_generate_rejects_mistakes_before_anything_runs(llm, prompts, params, message) -> None:
    before = generate(llm, "ab", GREEDY)[0]
    with pytest.raises(ValueError, match=message):
        generate(llm, prompts, params)
    with pytest.raises(ValueError, match=message):
        llm.stream(prompts, params)
    check_empty(llm)
    after = generate(llm, "ab", GREEDY)[0]
    assert after.outputs == before.outputs
    assert int(after.request_id) == int(before.request_id) + 1, "a rejected request takes no number"


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), 10**400, True, "1"])
def test_add_request_rejects_bad_timeouts(llm, timeout) -> None:
    with pytest.raises(ValueError, match="timeout must be seconds > 0 or None, got "):
        llm.add_request("ab", GREEDY, timeout=timeout)


def test_generate_without_a_tokenizer_takes_token_ids(llm) -> None:
    bare = LLM(llm.model, **SIZES)
    assert bare.tokenizer is None
    prompt = {"prompt_token_ids": llm.tokenizer.encode(PROMPTS[0])}
    completion = complete_prompt(bare, prompt)
    assert completion.token_ids == complete_prompt(llm, prompt).token_ids
    assert completion.text == ""
    assert (
        complete_prompt(bare, prompt, stop_token_ids=[completion.token_ids[2]]).stop_reason
        is not None
    )
    with pytest.raises(ValueError, match="tokenizer for text prompts, got none"):
        generate(bare, PROMPTS[0], GREEDY)
    with pytest.raises(ValueError, match="stop must be empty"):
        generate(bare, prompt, SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="must have a tokenizer"):
        bare.chat([{"role": "user", "content": "hello"}])
    assert bare.get_default_sampling_params() == SamplingParams(temperature=0)
