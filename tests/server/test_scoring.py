"""Tests of log-probabilities and token ids of prompts, compared with the model's forward pass."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine
from paged_jax.cache.blocks import check_invariants
from paged_jax.server import Settings
from tests.support.live_server import CHAT_TEMPLATE, LiveServer, error_of, events
from tests.support.tiny_model import BOS, CONFIG, SIZES, save_tiny_model

# A prompt that fills the context in several chunks, a prompt of a few blocks, and BOS alone.
LONG = [BOS, *(3 + (7 * i) % 37 for i in range(CONFIG.max_position_embeddings - 1))]
PROMPTS = [LONG, LONG[:19], LONG[:1]]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("scoring"), chat_template=CHAT_TEMPLATE)
    with LiveServer(Engine(folder, **SIZES), Settings(model_name="tiny")) as server:
        yield server


@pytest.fixture
def server(shared_server):
    yield shared_server
    shared_server.wait_until_idle()
    check_invariants(shared_server.engine.cache.tables)


@pytest.fixture(scope="module")
def forward(tiny_model):
    """Return a function for the log-probabilities [T - 1, V] of all tokens but the first."""
    width = CONFIG.max_position_embeddings
    run = jax.jit(lambda model, ids: jax.nn.log_softmax(model(ids)))

    def logprobs(token_ids: list[int]) -> np.ndarray:
        padded = jnp.array([token_ids + [0] * (width - len(token_ids))])
        return np.asarray(run(tiny_model, padded))[0, : len(token_ids) - 1]

    return logprobs


def check_rows(rows: list, token_ids: list[int], want: np.ndarray, count: int) -> None:
    """Check the field `prompt_logprobs` of a response."""
    assert rows[0] is None and len(rows) == len(token_ids)
    for row, token_id, logprobs in zip(rows[1:], token_ids[1:], want, strict=True):
        best = set(np.argsort(-logprobs)[:count].tolist())
        assert set(map(int, row)) == best | {token_id}
        for name, candidate in row.items():
            logprob = logprobs[int(name)]
            assert candidate["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert candidate["rank"] == 1 + (logprobs > logprob).sum()


def test_max_tokens_zero_scores_the_prompt(server, forward) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = server.post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    for choice, token_ids in zip(answer["choices"], PROMPTS, strict=True):
        want, logprobs = forward(token_ids), choice["logprobs"]
        chosen = want[np.arange(len(want)), token_ids[1:]]
        assert logprobs["token_logprobs"][0] is None
        np.testing.assert_allclose(logprobs["token_logprobs"][1:], chosen, atol=1e-4)
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert choice["finish_reason"] == "length"
    [event] = events(server.post("/v1/completions", {**body, "prompt": LONG, "stream": True}))
    assert event["choices"] == answer["choices"][:1]
    # Without echo the response is empty, but later requests find the blocks in the cache.
    body = {"prompt": LONG[:18], "max_tokens": 0, "cache_salt": "warm"}
    for cached in (0, 16):
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == ""
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_prompt_logprobs_and_token_ids_match_the_model(server, forward) -> None:
    asked = {"prompt_logprobs": 3, "return_token_ids": True, "max_tokens": 2, "n": 2, "seed": 1}
    body = {"prompt": PROMPTS[1:], **asked, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    for index, choice in enumerate(answer["choices"]):
        token_ids = PROMPTS[1 + index // 2]
        assert choice["prompt_token_ids"] == token_ids and len(choice["token_ids"]) == 2
        check_rows(choice["prompt_logprobs"], token_ids, forward(token_ids), 3)
    # The echo may have fewer or more candidates than `prompt_logprobs`.
    for count in (1, 5):
        more = {"prompt": LONG[:19], "echo": True, "logprobs": count, "n": 1}
        [choice] = server.post("/v1/completions", {**body, **more}).json()["choices"]
        check_rows(choice["prompt_logprobs"], LONG[:19], forward(LONG[:19]), 3)
        assert all(len(row) <= count + 1 for row in choice["logprobs"]["top_logprobs"][1:])

    chat = {"messages": [{"role": "user", "content": "the cat"}], **asked, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", chat).json()
    token_ids = answer["prompt_token_ids"]
    assert len(token_ids) == answer["usage"]["prompt_tokens"]
    check_rows(answer["prompt_logprobs"], token_ids, forward(token_ids), 3)
    ids = {choice["index"]: choice["token_ids"] for choice in answer["choices"]}

    for path, body in (("/v1/completions", {"prompt": token_ids}), ("/v1/chat/completions", chat)):
        body = {**body, **asked, "ignore_eos": True, "stream": True}
        error = error_of(server.post(path, body), 400)
        assert error["param"] == "prompt_logprobs"
        streamed: dict[int, list[int]] = {}
        num_prompts = 0
        for event in events(server.post(path, {**body, "prompt_logprobs": None})):
            for choice in event["choices"]:
                streamed.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
                given = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
                assert given in (None, token_ids)
                num_prompts += given is not None
        assert streamed == ids and num_prompts == 2
    plain = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 1}).text
    assert "token_ids" not in plain and "prompt_logprobs" not in plain


def test_tokenize_and_detokenize_are_inverse(server) -> None:
    def tokenize(**body) -> dict:
        return server.post("/tokenize", body).json()

    answer = tokenize(prompt="the cat", return_token_strs=True)
    assert answer["token_strs"][:2] == ["<s>", "the"] and answer["max_model_len"] == 64
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    bare = tokenize(prompt="the cat", add_special_tokens=False)
    assert [BOS, *bare["tokens"]] == answer["tokens"] and bare["token_strs"] is None
    assert tokenize(prompt="")["tokens"] == [BOS]
    assert tokenize(prompt="a" * 1000)["count"] == 1001, "texts may be longer than the context"
    for tokens, text in ((answer["tokens"], "<s>the cat"), (bare["tokens"], "the cat"), ([], "")):
        assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}

    messages = [{"role": "user", "content": "ab"}]
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    tokens = tokenize(messages=[*messages, {"role": "assistant", "content": "c"}], **continued)
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == "u:ab\na:c", "without the line end after the message"
    for fields in (kwargs, {"reasoning_effort": "low"}, {"continue_final_message": True}):
        [name] = fields
        error = error_of(server.post("/tokenize", {"prompt": "ab", **fields}), 400)
        assert error["param"] == name and "must be null if prompt is given" in error["message"]
    for body, text in (
        ({}, "u:ab\na:"),
        ({"add_generation_prompt": True, **kwargs}, "u:ab\na:hm"),
        ({"add_special_tokens": True}, "<s>u:ab\na:"),
        ({"reasoning_effort": "low"}, "u:ab\na:low"),
        ({"reasoning_effort": None}, "u:ab\na:"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "ab"}},
            "u:ab\na:ab",
        ),
    ):
        tokens = tokenize(messages=messages, **body)["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == text
        if "add_generation_prompt" not in body:
            chat = {"messages": messages, **body, "max_tokens": 0, "return_token_ids": True}
            given = server.post("/v1/chat/completions", chat).json()["prompt_token_ids"]
            assert given == tokens
    body = {"prompt": "the cat", "max_tokens": 0, "return_token_ids": True}
    [choice] = server.post("/v1/completions", {**body, "add_special_tokens": False}).json()[
        "choices"
    ]
    assert choice["prompt_token_ids"] == bare["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "Exactly one of prompt and messages must be given."),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "Exactly one of prompt and messages must be given.",
        ),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "does not exist"),
        ("/tokenize", {"prompt": "a", "mesages": 1}, "Did you mean messages"),
        ("/detokenize", {"tokens": [3, 43]}, "must hold integers in 0..42, got 43"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 0, "n": 2},
            "n must be 1 if max_tokens is 0, because nothing is generated, got 2. Use 1.",
        ),
        ("/v1/completions", {"prompt": [5] * 65, "max_tokens": 0}, "at most 64, got 65"),
        ("/v1/completions", {"prompt": [5] * 64, "max_tokens": 1}, "at most 63, to leave room"),
    ],
)
def test_errors_name_the_rule(server, path, body, message) -> None:
    response = server.post(path, body)
    error = error_of(response, 404 if "model" in body else 400)
    assert message in error["message"], json.dumps(error)


@pytest.mark.peers
def test_lm_eval_computes_the_scores_of_the_model(server, forward, tiny_folder) -> None:
    """Runs the evaluation harness against the server."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval import utils
    from lm_eval.api.instance import Instance

    model = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        batch_size=3,
        num_concurrent=2,
        max_length=64,
        custom_prefix_token_id=BOS,
    )
    assert model.tokenizer_backend == "remote", "lm_eval must detect the tokenizer routes"
    tokenizer = Engine(tiny_folder, **SIZES).tokenizer

    def instances(kind: str, arguments: list[tuple]) -> list:
        return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]

    def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        rows = forward(context + continuation)[len(context) - 1 :]
        chosen = rows[np.arange(len(continuation)), continuation]
        return chosen.sum(), bool((chosen == rows.max(axis=1)).all())

    pairs = [("the cat", " sat on the mat"), ("in the", " house"), ("", "a"), ("the cat", " is")]
    found = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        before = tokenizer.encode(context, add_special_tokens=False) or [BOS]
        after = tokenizer.encode(continuation, add_special_tokens=False)
        want, is_best = score(before, after)
        assert logprob == pytest.approx(want, abs=1e-3) and is_greedy == is_best

    text = (
        "the cat sat on the mat and " * 4
    )  # longer than the context, so lm_eval splits it into windows
    ids = tokenizer.encode(text, add_special_tokens=False)
    windows = utils.get_rolling_token_windows(ids, BOS, model.max_length - 1, 1)
    parts = [score(*each)[0] for each in map(utils.make_disjoint_window, windows)]
    assert len(parts) > 1
    [found] = model.loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    assert found == pytest.approx(sum(parts), abs=1e-2)

    options = {"until": ["\n"], "max_gen_toks": 4}
    [generated] = model.generate_until(
        instances("generate_until", [("the cat", options)]), disable_tqdm=True
    )
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0, "stop": "\n"}
    assert generated == server.post("/v1/completions", body).json()["choices"][0]["text"]
