"""Tests of request bodies: accepted fields, errors, limits, malicious bodies."""

import contextlib
import gzip
import json
import re
import threading
from collections.abc import Callable

import httpx
import pytest

from paged_jax import Engine
from paged_jax.cache.blocks import check_invariants
from paged_jax.server import Limits, Settings, bodies, service
from tests.support.hostile_clients import answered_at_once, post, streams_beside
from tests.support.live_server import (
    GREEDY,
    LiveServer,
    check_error,
    error_of,
    read_answer,
    wait_until,
)
from tests.support.tiny_model import SIZES, save_tiny_model

LIMITS = Limits(
    max_body_bytes=20_000,
    max_prompts=4,
    max_stop=2,
    max_stop_chars=10,
    max_n=3,
    max_answer_logprobs=2000,
)


@pytest.fixture(scope="module")
def shared_server(folder):
    engine = Engine(folder, **SIZES, steps_per_dispatch=2)
    with LiveServer(engine, Settings(model_name="tiny", limits=LIMITS)) as server:
        yield server


@pytest.fixture(scope="module")
def shared_roomy_server(folder):
    engine = Engine(folder, **SIZES, steps_per_dispatch=2)
    with LiveServer(engine, Settings(model_name="tiny")) as server:
        yield server


@pytest.fixture
def roomy_server(shared_roomy_server, caplog):
    """Server with the default limits that must log no error."""
    yield shared_roomy_server
    shared_roomy_server.wait_until_idle()
    check_invariants(shared_roomy_server.engine.cache.tables)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


# Accepted fields


@pytest.mark.parametrize("endpoint", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_bodies_accept_integers_written_as_floats(server, endpoint) -> None:
    """A number with a zero fractional part is an integer (JSON Schema, section 6.1.1)."""
    prompt = {"messages": [{"role": "user", "content": "ab"}]}
    if "chat" not in endpoint:
        prompt = {"prompt": "ab"}
    sizes = {"max_tokens": 4, "top_k": 3, "n": 1, "seed": 5, "min_tokens": 2, "priority": 0}
    body = {**prompt, **sizes, "stop_token_ids": [5], "temperature": 1, "ignore_eos": True}
    written = {name: float(value) for name, value in sizes.items()} | {"stop_token_ids": [5.0]}
    want = server.post(endpoint, body).json()
    answer = server.post(endpoint, {**body, **written})
    assert answer.status_code == 200, answer.text
    field = "text" if endpoint == "/generate" else "choices"
    assert answer.json()[field] == want[field]
    for wrong in (4.5, True, "4"):
        error_of(server.post(endpoint, {**body, "max_tokens": wrong}), 400)


def test_bodies_accept_token_ids_written_as_floats(server) -> None:
    for prompt in ([3, 4], [[3, 4], [5]]):
        body = {"prompt": prompt, **GREEDY}
        written = json.dumps(body).replace("3", "3.0").replace("4", "4.0")
        want = server.post("/v1/completions", body).json()["choices"]
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + "/v1/completions", content=written, headers=headers)
        assert answer.json()["choices"] == want


def test_bodies_accept_fields_that_change_nothing(server) -> None:
    habits = {"user": "me", "store": False, "metadata": {"a": "b"}, "seed": -1, "stream": None}
    habits["service_tier"] = "priority"
    body = {"prompt": "ab", "suffix": None, "best_of": 1, "echo": False, **habits, **GREEDY}
    body |= {"reasoning_effort": "low"}
    assert server.post("/v1/completions", body).status_code == 200
    messages = [{"role": "assistant", "content": "hi", "refusal": None}]
    body = {"messages": messages, "tools": [], "tool_choice": "none", **habits, **GREEDY}
    body |= {"echo": False, "best_of": 1, "top_logprobs": 0}
    body |= {"store": True, "stream_options": {"include_obfuscation": False}}
    # OpenAI's hints, other servers' fields with their defaults, and null.
    body |= {"safety_identifier": "me", "prompt_cache_key": "k", "reasoning_effort": "low"}
    body |= {"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True}
    body |= {
        "web_search_options": None,
        "functions": [],
        "use_beam_search": False,
        "length_penalty": 1,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text


# Errors


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"no_stop_trim": True}, "no_stop_trim", "only as null or false."),
        ({"guided_json": {}}, "guided_json", "supported here. Did you mean structured_outputs?"),
        (
            {"max_token": 5},
            "max_token",
            "max_token is not supported here. Did you mean max_tokens?",
        ),
        ({"top_key": 1}, "top_key", "Did you mean top_k?"),
        ({"echo": True}, "echo", "only as null or false."),
        (
            {"top_logprobs": 1},
            "top_logprobs",
            "top_logprobs must be null or 0 unless logprobs is true.",
        ),
        (
            {"length_penalty": 0.5},
            "length_penalty",
            "must be null or 1 unless use_beam_search is true.",
        ),
        (
            {"messages": [{"role": "critic", "content": "ab"}, {"role": "user", "content": "a"}]},
            "messages.0.role",
            "got 'critic'. Use another role.",
        ),
        (
            {"stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "as this server does not pad its events.",
        ),
        (
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "Did you mean include_usage?",
        ),
    ],
)
def test_bodies_reject_fields_that_change_the_response(server, change, param, message) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], **GREEDY, **change}
    error = error_of(server.post("/v1/chat/completions", body), 400)
    assert error["param"] == param and error["message"].endswith(message)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], "template has no tools"),
        ("modalities", ["text", "audio"], "does not support audio"),
    ],
)
def test_bodies_reject_unsupported_values(server, field, value, rule) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], field: value, **GREEDY}
    error = error_of(server.post("/v1/chat/completions", body), 400)
    assert error["message"].startswith(f"{field} must be null") and rule in error["message"]
    assert error["param"].split(".")[0] == field


@pytest.mark.peers
def test_openai_client_raises_its_errors(openai_client) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="'tiny' is served"):
        openai_client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        openai_client.completions.create(model="tiny", prompt="a", top_p=0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt must be a text, a list of texts, a list of token ids, or a list"),
        ({"prompt": ["a", 5]}, "prompt must be a text"),
        ({"prompt": []}, "prompt must .* none of them empty"),
        ({"prompt": [3, -1]}, "prompt"),
        ({}, "prompt: Field required.$"),
        ({"inputs": "a"}, "Field required. inputs is not supported here. Did you mean prompt"),
        ({"inputs": None, "ip": None}, "prompt: Field required.$"),
        ({"messages": []}, "Field required. .* Send messages to /v1/chat/completions.$"),
        ({"prompt": "a", "stop": 5}, "stop must be a text or a list of texts"),
        ({"prompt": [3, 1000]}, "prompt must hold token ids in 0..42, got 1000."),
        ({"prompt": "a" * 100}, "maximum context length is 64 tokens.* got 101"),
        ({"prompt": ["a"] * 5}, "number of prompts must be at most 4 .max_prompts"),
        ({"prompt": "a", "n": 4}, "max_n"),
        ({"prompt": "a", "n": 0}, "n: .*greater"),
        ({"prompt": "a", "logprobs": 21}, "max_logprobs"),
        # The prompt is BOS and a letter.
        ({"prompt": "a", "logprobs": 20, "n": 3, "max_tokens": 32}, "max_answer_log.* got 2016"),
        ({"prompt": "a", "logprobs": 20, "n": 2, "max_tokens": 99}, "got 2604"),
        ({"prompt": ["a"] * 4, "logprobs": 9, "echo": True, "max_tokens": 50}, "got 2080"),
        ({"prompt": "a", "stop": ["a", "b", "c"]}, "max_stop"),
        ({"prompt": "a", "stop": "a" * 11}, "max_stop_chars"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: .*number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        (
            {"prompt": "a", "max_token": 5},
            "max_token is not supported here. Did you mean max_tokens",
        ),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids must hold integers"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words"),
        ({"prompt": "a", "bad_words": ["a"] * 129}, "bad_words must be a sequence of at most 128"),
        ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "must have token ids as keys"),
        ({"prompt": "a", "logit_bias": {"\u0665": 1}}, "must have token ids as keys"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024"),
        ({"prompt": "a", "stop_token_ids": [99]}, "stop_token_ids"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"prompt": "a", "timeout": 0}, "timeout"),
        ([], "object"),
    ],
)
def test_errors_name_the_field(server, body, message) -> None:
    for stream in (False, True):
        if isinstance(body, dict):
            body = {**body, "stream": stream}
        error = error_of(server.post("/v1/completions", body), 400)
        assert re.search(message, error["message"]), error
        # `param` is a field, unless several fields are responsible.
        assert (error["param"] or "prompt").split(".")[0] in {*body, "prompt"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"n": NaN}'],
)
def test_bodies_must_be_json(server, content) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + "/generate", content=content, headers=headers)
    error_of(response, 400)


def test_bodies_need_a_content_type_and_a_limited_size(server) -> None:
    text = '{"prompt": "a"}'
    response = httpx.post(server.url + "/generate", content=text)
    assert "application/json" in error_of(response, 415)["message"]
    error_of(server.post("/generate", {"prompt": "a" * 30_000}), 413)
    # Without a Content-Length header.
    pieces = (b'{"prompt": "' + b"a" * 9000 for _ in range(5))
    response = httpx.post(
        server.url + "/generate", content=pieces, headers={"content-type": "application/json"}
    )
    assert "max_body_bytes" in error_of(response, 413)["message"]


def test_compressed_bodies_are_rejected(server) -> None:
    """The header of the answer tells which encodings are accepted (RFC 9110, 15.5.16)."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    content = gzip.compress(b'{"prompt": "a"}')
    response = httpx.post(server.url + "/generate", content=content, headers=headers)
    assert "got 'gzip'. Send the body without compression" in error_of(response, 415)["message"]
    assert response.headers["accept-encoding"] == "identity"
    headers["content-encoding"] = "Identity"
    response = httpx.post(server.url + "/generate", content='{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


def test_bodies_may_fill_a_long_context(tmp_path) -> None:
    """The prompt is rejected because the pool is too small, not because of its size."""
    folder = save_tiny_model(tmp_path, context=200_000)
    engine = Engine(folder, max_num_seqs=1, block_size=16, num_blocks=20)
    with LiveServer(engine, Settings(model_name="tiny")) as server:
        response = server.post("/generate", {"prompt": "the cat " * 199_000})
        assert server.get("/openapi.json").json()["info"]["description"].count("3200000")
        error_of(response, 400)


# Malicious bodies


def repeated(item: str, *, begin: str, end: str = "]}", size: int = 10**6) -> bytes:
    return (begin + ",".join([item] * (size // (len(item) + 1))) + end).encode()


def numbered(item: str, *, begin: str, end: str = "}", count: int = 90_000) -> bytes:
    return (begin + ",".join(item.format(i) for i in range(count)) + end).encode()


BODIES: list[tuple[str, Callable[[], bytes]]] = [
    ("/generate", lambda: b"[" * 100_000),
    ("/generate", lambda: b'{"a":' * 100_000),
    ("/generate", lambda: b'{"prompt": "a", "x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"),
    ("/generate", lambda: b'{"prompt": "a", "seed": ' + b"9" * 10**6 + b"}"),
    ("/generate", lambda: b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}"),
    ("/generate", lambda: b'{"prompt": "a", "temperature": 1e999}'),
    ("/generate", lambda: b'{"prompt": "a", "temperature": -1e-999, "n": 1e5}'),
    ("/generate", lambda: b'{"prompt": "\xc3\x28"}'),
    ("/generate", lambda: b"\xff\xfe{\x00}\x00"),
    ("/generate", lambda: b'{"prompt": "a", "%b": 1}' % (b"k" * 10**6)),
    ("/generate", lambda: b'{"prompt": "a", "stop": "%b"}' % (b"k" * 10**6)),
    ("/generate", lambda: repeated("-1", begin='{"prompt_token_ids":[')),
    ("/generate", lambda: repeated("5", begin='{"prompt_token_ids":[')),
    ("/generate", lambda: repeated("-1", begin='{"prompt":"a","stop_token_ids":[')),
    ("/generate", lambda: repeated("5", begin='{"prompt":"a","stop_token_ids":[')),
    ("/generate", lambda: numbered('"x{}":1', begin='{"prompt":"a",')),
    ("/generate", lambda: numbered('"{}":1', begin='{"prompt":"a","logit_bias":{', end="}}")),
    ("/generate", lambda: numbered('"-{}":1', begin='{"prompt":"a","logit_bias":{', end="}}")),
    ("/generate", lambda: numbered('"{}":""', begin='{"prompt":"a","logit_bias":{', end="}}")),
    ("/v1/completions", lambda: repeated('""', begin='{"prompt":[')),
    ("/v1/completions", lambda: repeated('"a"', begin='{"prompt":[')),
    ("/v1/completions", lambda: repeated("[]", begin='{"prompt":[')),
    ("/v1/completions", lambda: repeated("[1]", begin='{"prompt":[')),
    ("/v1/completions", lambda: b'{"prompt": "a", "model": "%b"}' % (b"m" * 10**6)),
    ("/v1/chat/completions", lambda: repeated("{}", begin='{"messages":[')),
    ("/v1/chat/completions", lambda: repeated("1", begin='{"messages":[')),
    ("/v1/chat/completions",
     lambda: repeated("1", begin='{"messages":[{"role":"user","content":[', end="]}]}")),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(BODIES)))
def test_malicious_bodies_are_rejected_without_delaying_streams(roomy_server, index) -> None:
    path, body = BODIES[index]
    server = roomy_server
    data = post(body()[: server.service.limits.max_body_bytes], path)
    with streams_beside(server), answered_at_once():
        answer = server.send(data)
    check_error(*answer, {400, 404})


def test_prompts_beyond_the_context_are_rejected(roomy_server) -> None:
    server = roomy_server
    with streams_beside(server), answered_at_once():
        for prompt in ("a" * 200_000, "a" * 64):
            body = json.dumps({"prompt": prompt}).encode()
            assert check_error(*server.send(post(body)), {400})["code"] == "context_length_exceeded"


def test_long_texts_are_rejected_without_tokenizing(roomy_server, monkeypatch) -> None:
    server = roomy_server
    monkeypatch.setattr(
        server.service.tokenizer, "encode", lambda *a, **k: pytest.fail("tokenized")
    )
    text = "a" * (63 * server.service.tokenizer.max_token_chars + 1)
    for body in ({"prompt": text}, {"prompt": ["a", text]}):
        path = "/generate" if isinstance(body["prompt"], str) else "/v1/completions"
        answer = server.send(post(json.dumps(body).encode(), path))
        error = check_error(*answer, {400})
        assert (
            error["code"] == "context_length_exceeded" and "64 tokens or more" in error["message"]
        )


def test_short_prompts_are_tokenized_before_long_ones(roomy_server, monkeypatch) -> None:
    """Each has its own thread, and requests count as load while they are tokenized."""
    server = roomy_server
    may_end, encode = threading.Event(), server.service.tokenizer.encode

    def slow(text, **options):
        assert len(text) <= 2 or may_end.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(server.service.tokenizer, "encode", slow)
    monkeypatch.setattr(service, "_TINY", 0)
    monkeypatch.setattr(service, "_SHORT", 2)
    body = {"prompt": "abcdef", "max_tokens": 2, "n": 2}
    with server.connect() as connection:
        connection.sendall(post(json.dumps(body).encode()))
        wait_until(lambda: server.service.num_active == 2)
        assert server.post("/generate", {"prompt": "ab", "max_tokens": 2}).status_code == 200
        may_end.set()
        assert read_answer(connection)[0] == 200


def test_large_bodies_are_parsed_in_a_thread(roomy_server, monkeypatch) -> None:
    """Small bodies and streams do not wait: twenty large bodies took a quarter second each."""
    server = roomy_server
    may_end, check = threading.Event(), bodies.GenerateBody.model_validate_json

    def slow(content):
        assert len(content) < 2**15 or may_end.wait(30)
        return check(content)

    monkeypatch.setattr(bodies.GenerateBody, "model_validate_json", slow)
    large = json.dumps({"prompt": "ab", "max_tokens": 2, "cache_salt": "a" * 2**15}).encode()
    with streams_beside(server), contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(3)]
        for connection in connections:
            connection.sendall(post(large))
        assert server.post("/generate", {"prompt": "ab", "max_tokens": 2}).status_code == 200
        may_end.set()
        assert [read_answer(connection)[0] for connection in connections] == [200] * 3


def test_chats_of_many_empty_messages_are_tokenized_in_a_thread(roomy_server, monkeypatch) -> None:
    """The cost of a chat is estimated from the size of its body."""
    server = roomy_server
    sizes, encode = [], server.service.encode

    def spy(size, function):
        sizes.append(size)
        return encode(size, function)

    monkeypatch.setattr(server.service, "encode", spy)
    for count in (2, 1000):
        messages = [{"role": "user", "content": ""}] * count
        body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
        server.send(post(body, "/v1/chat/completions"))
        assert sizes[-1] == (0 if count == 2 else len(body))


def test_last_of_duplicate_keys_is_used(roomy_server) -> None:
    status, content = roomy_server.send(post(b'{"prompt":"a","n":3,"n":2,"max_tokens":1}'))
    assert status == 200 and len(json.loads(content)["outputs"]) == 2


def test_extreme_numbers_are_served_or_rejected(roomy_server) -> None:
    server = roomy_server
    for field, value in (
        ("temperature", 1e308), ("temperature", 5e-324), ("top_p", 5e-324), ("min_p", 1.0),
        ("repetition_penalty", 1e308), ("repetition_penalty", 5e-324), ("seed", 2**63 - 1),
        ("top_k", 2**31 - 1), ("max_tokens", 2**31 - 1), ("timeout", 1e308), ("timeout", 5e-324),
        ("priority", 2**31 - 1), ("logit_bias", {"5": 1e308}), ("logit_bias", {"5": -1e308}),
    ):  # fmt: skip
        body = {"prompt": "a", "max_tokens": 2, "temperature": 1.0, "logprobs": 2, field: value}
        assert server.post("/generate", body).status_code in (200, 400), (field, value)
