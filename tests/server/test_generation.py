"""Tests of beam search and `best_of` over HTTP."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from paged_jax import LLM, BeamSearchParams, Engine
from paged_jax.arguments import ArgumentError
from paged_jax.server import Settings
from paged_jax.server.api_error import ApiError
from paged_jax.server.beam_search import check_beam_search
from tests.support.live_server import CHAT_TEMPLATE, LiveServer, error_of
from tests.support.tiny_model import SIZES, save_tiny_model

PROMPTS = ["the cat sat", "ab"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("beams"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def shared_server(folder):
    with LiveServer(Engine(folder, **SIZES), Settings(model_name="tiny")) as server:
        yield server


@pytest.fixture
def server(shared_server):
    yield shared_server
    shared_server.wait_until_idle()


def test_beam_search_matches_the_engine(server, folder) -> None:
    """Other requests run at the same time, and their samples do not change."""
    llm = LLM(folder, **SIZES)
    other = {"prompt": "in the house", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    want_other = server.post("/v1/completions", other).json()["choices"][0]["text"]
    with ThreadPoolExecutor(2) as pool:
        for changes in ({}, {"ignore_eos": True, "length_penalty": 0.0}):
            others = [pool.submit(server.post, "/v1/completions", other) for _ in range(2)]
            params = BeamSearchParams(**{"beam_width": 3, "max_tokens": 6, **changes})
            wanted = llm.beam_search(PROMPTS, params)
            body = {"prompt": PROMPTS, "n": 3, "max_tokens": 6, "temperature": 0, **changes}
            body |= {"use_beam_search": True, "return_token_ids": True}
            answer = server.post("/v1/completions", body).json()
            found = [
                (choice["prompt_token_ids"] + choice["token_ids"], choice["finish_reason"])
                for choice in answer["choices"]
            ]
            want = [(s.tokens, s.finish_reason) for each in wanted for s in each.sequences]
            assert found == want
            assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
            texts = [s.text for each in wanted for s in each.sequences]
            prompts = [prompt for prompt in PROMPTS for _ in range(3)]
            given = [choice["text"] for choice in answer["choices"]]
            assert [p + g for p, g in zip(prompts, given, strict=True)] == texts
            for each in others:
                assert each.result().json()["choices"][0]["text"] == want_other
    chat = {"messages": [{"role": "user", "content": "ab"}], "n": 2, "max_tokens": 3}
    answer = server.post("/v1/chat/completions", {**chat, "use_beam_search": True}).json()
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 2


def test_best_of_returns_the_most_probable_samples(server) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 5, "temperature": 1.5, "seed": 3, "logprobs": 0}
    every = server.post("/v1/completions", {**body, "n": 6}).json()
    best = server.post("/v1/completions", {**body, "n": 2, "best_of": 6}).json()
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]

    def mean(choice: dict) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    for prompt in range(2):
        drawn = sorted(every["choices"][6 * prompt :][:6], key=mean, reverse=True)
        kept = best["choices"][2 * prompt :][:2]
        assert [choice["text"] for choice in kept] == [choice["text"] for choice in drawn[:2]]


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"use_beam_search": True, "n": 11}, "n", "at most 10"),
        ({"use_beam_search": True, "best_of": 11}, "best_of", "at most 10"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "null or 0 with"),
        ({"use_beam_search": True, "stop": "a"}, "stop", "must be null with"),
        ({"use_beam_search": True, "bad_words": ["a"]}, "bad_words", "must be null with"),
        ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids", "null with"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs", "must be null with"),
        ({"use_beam_search": True, "stream": True}, "stream", "must be null with"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"n": 3, "best_of": 2}, "best_of", "best_of must be at least n"),
        ({"best_of": 2, "stream": True}, "best_of", "null in a stream"),
        ({"best_of": 99}, "best_of", "must be at most 16"),
    ],
)
def test_unsupported_options_are_rejected(server, changes, param, message) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": "ab", **changes}), 400)
    assert error["param"] == param and message in error["message"]


def test_beam_search_reports_a_form_that_cannot_be_compiled() -> None:
    """A chat compiles the form of its answer when its parameters are made."""

    def params() -> None:
        raise ArgumentError("form", "cannot be compiled: no such type", "response_format")

    with pytest.raises(ApiError, match="response_format cannot be compiled") as caught:
        check_beam_search(None, SimpleNamespace(params=params))
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_beam_search_omits_suppressed_tokens(tmp_path) -> None:
    """The tokens that generation_config.json suppresses, as in the engine's beam search."""
    folder = save_tiny_model(tmp_path)
    options = {"suppress_tokens": [17, 29], "begin_suppress_tokens": [18]}
    path = folder / "generation_config.json"
    path.write_text(json.dumps(options), encoding="utf-8")
    [wanted] = LLM(folder, **SIZES).beam_search("ab", BeamSearchParams(beam_width=2, max_tokens=6))
    body = {"prompt": "ab", "n": 2, "max_tokens": 6, "temperature": 0, "use_beam_search": True}
    with LiveServer(Engine(folder, **SIZES), Settings(model_name="tiny")) as server:
        answer = server.post("/v1/completions", {**body, "return_token_ids": True}).json()
        found = [each["prompt_token_ids"] + each["token_ids"] for each in answer["choices"]]
        assert found == [sequence.tokens for sequence in wanted.sequences]
        assert not {17, 29} & {token for row in found for token in row}
    path.write_text(json.dumps({"suppress_tokens": list(range(5, 30))}), encoding="utf-8")
    with LiveServer(Engine(folder, **SIZES), Settings(model_name="tiny")) as server:
        response = server.post("/v1/completions", body)
        assert response.status_code == 400
        assert "use_beam_search is not implemented for the token biases" in response.text
