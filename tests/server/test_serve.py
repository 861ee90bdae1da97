"""The server, through a real socket: what it answers, and what it refuses."""

import base64
import functools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from paged_jax import Engine, SamplingParams
from paged_jax.cache.blocks import check_invariants
from paged_jax.server import Limits, Service, Settings, create_app, schemas
from paged_jax.server.completion_answers import CompletionAnswer
from tests.support.live_server import LiveServer, wait_until
from tests.support.tiny_model import BOS, SIZES, save_tiny_model

TEMPLATE = (
    "{% for m in messages if m.role != 'critic' %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
    "{% if enable_thinking %}hm{% endif %}{{ reasoning_effort }}"
)
PROMPTS = ["the cat sat", "in the house", "ab"]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
LIMITS = Limits(
    max_body_bytes=20_000,
    max_prompts=4,
    max_stop=2,
    max_stop_chars=10,
    max_n=3,
    max_answer_logprobs=2000,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("serve"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine(folder, **SIZES, steps_per_dispatch=2)


@pytest.fixture(scope="module")
def shared_server(engine):
    with LiveServer(engine, Settings(model_name="tiny", limits=LIMITS)) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """Left as it was found."""
    yield shared_server
    shared_server.wait_until_idle()
    check_invariants(shared_server.engine.cache.tables)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def offline(folder, prompt, **params) -> list[list[int]]:
    """The tokens that an engine of one's own gives."""
    engine = Engine(folder, **SIZES, steps_per_dispatch=2)
    engine.add_request(prompt, SamplingParams(**{**GREEDY, **params}))
    outputs = []
    while engine.has_unfinished:
        outputs = engine.step() or outputs
    return [sample.token_ids for sample in outputs[-1].outputs]


def events(response: httpx.Response) -> list:
    """The data of server-sent events, up to the end that there must be."""
    *lines, end, rest = response.text.split("\n\n")
    assert end == "data: [DONE]" and rest == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# /generate


def test_generate_answers_what_the_engine_does(server, folder) -> None:
    body = {"prompt": PROMPTS[0], **GREEDY, "n": 2, "temperature": 1.0, "seed": 5, "logprobs": 2}
    answer = server.post("/generate", body).json()
    want = offline(folder, PROMPTS[0], n=2, temperature=1.0, seed=5)
    assert [sample["token_ids"] for sample in answer["outputs"]] == want
    assert answer["text"] == [sample["text"] for sample in answer["outputs"]]
    assert answer["finished"] and answer["usage"]["completion_tokens"] == 16
    assert answer["prompt_token_ids"][0] == BOS
    first = answer["outputs"][0]
    assert first["token_ids"][0] == int(next(iter(first["logprobs"][0])))


def test_generate_streams_the_same(server, folder) -> None:
    body = {"prompt_token_ids": [BOS, 5, 9, 7], **GREEDY, "n": 2, "stream": True, "seed": 3}
    [want] = offline(folder, {"prompt_token_ids": [BOS, 5, 9, 7]})
    response = server.post("/generate", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    pieces = events(response)
    for index in (0, 1):
        mine = [s for piece in pieces for s in piece["outputs"] if s["index"] == index]
        assert [t for s in mine for t in s["token_ids"]] == want
        assert mine[-1]["finish_reason"] == "length"
    assert len(pieces) > 2
    assert [piece["finished"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_generate_needs_one_prompt(server) -> None:
    for body in ({}, {"prompt": "a", "prompt_token_ids": [5]}):
        assert "and not both" in error_of(server.post("/generate", body), 400)["message"]


def test_explain(server) -> None:
    body = {"prompt": "why? why? why?", **GREEDY, "explain": True}
    explanation = server.post("/generate", body).json()["explanation"]
    assert explanation["num_cached_tokens"] == 0 and "block" in explanation["prefix_match"]
    body = {"prompt": ["the cat sat on the"] * 2, **GREEDY, "explain": True}
    answer = server.post("/v1/completions", body).json()
    assert [each["num_cached_tokens"] for each in answer["explanations"]] != [0, 0]
    last = events(server.post("/v1/completions", {**body, "stream": True}))[-1]
    assert len(last["explanations"]) == 2 and last["choices"] == []


# OpenAI's client


def test_openai_completions(client, folder) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    engine = Engine(folder, **SIZES)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        [tokens] = offline(folder, prompt)
        assert text == engine.tokenizer.decode(tokens, continues_text=True)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.object == "text_completion" and answer.model == "tiny"


def test_openai_stream_with_usage(client) -> None:
    options = {"model": "tiny", "prompt": PROMPTS, "n": 2, "seed": 7, "max_tokens": 6}
    whole = client.completions.create(**options)
    texts, counts, usage = {}, {}, None
    asked = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in client.completions.create(**options, stream=True, stream_options=asked):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            # As vLLM: what the sample of an event has used so far.
            assert counts.get(choice.index, 0) < chunk.usage.completion_tokens
            counts[choice.index] = chunk.usage.completion_tokens
        usage = chunk.usage
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len(texts) == 6
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(counts.values())


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("prompt", ["the cat", "<s>the</s> cat", [0, 5, 0, 6], [5]])
def test_openai_logprobs_and_echo(client, prompt, skip_special_tokens) -> None:
    ask = functools.partial(
        client.completions.create, model="tiny", prompt=prompt, max_tokens=3, temperature=0,
        echo=True, extra_body={"skip_special_tokens": skip_special_tokens},
    )  # fmt: skip
    choice = ask(logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert choice.text == ask().choices[0].text
    assert isinstance(prompt, list) or choice.text.startswith(prompt)
    assert logprobs.token_logprobs[0] is None and all(x <= 0 for x in logprobs.token_logprobs[1:])
    # The text is that of the tokens; a start token that nobody wrote has none.
    assert "".join(logprobs.tokens) == choice.text
    assert isinstance(prompt, list) or logprobs.tokens[0] == ""
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    chosen = logprobs.token_logprobs[-1]
    assert chosen == max(logprobs.top_logprobs[-1].values())


def test_events_hold_no_character_that_ends_a_line(server) -> None:
    """Clients such as httpx split a stream wherever `str.splitlines` does."""
    ends = [end for end in map(chr, range(0x3000)) if len(f"a{end}b".splitlines()) > 1]
    text = "a".join(["", *ends, ""])
    body = {"prompt": text, "echo": True, "stream": True, **GREEDY}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    pieces = [json.loads(line) for line in lines[:-1]]
    echoed = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
    assert lines[-1] == "[DONE]" and echoed.startswith(text)


def test_openai_chat(client, folder) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=8, temperature=0, logprobs=True,
        top_logprobs=3, extra_body={"ignore_eos": True},
    )  # fmt: skip
    engine = Engine(folder, **SIZES)
    ids = engine.tokenizer.encode("u:the cat\na:", add_special_tokens=False)
    [tokens] = offline(folder, {"prompt_token_ids": ids})
    [choice] = answer.choices
    assert choice.message.content == engine.tokenizer.decode(tokens, continues_text=True)
    assert choice.finish_reason == "length" and len(choice.logprobs.content) == 8
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [3] * 8
    assert bytes(choice.logprobs.content[0].bytes).decode() == choice.logprobs.content[0].token

    parts = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    stream = client.chat.completions.create(
        model="tiny", messages=parts, max_tokens=8, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_without_a_length_ends_at_the_limit(server) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], **GREEDY, "n": 3, "logprobs": True}
    del body["max_tokens"]

    def usage(**more) -> int:
        answer = server.post("/v1/chat/completions", {**body, **more}).json()
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        return answer["usage"]["completion_tokens"]

    prompt = len("u:ab\na:")
    assert usage(top_logprobs=1) == 3 * (64 - prompt)
    assert usage(top_logprobs=20) == 3 * (2000 // (3 * 21))


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_as_published(server, stream) -> None:
    """What is not checked where it is made."""
    asked = {**GREEDY, "n": 2, "stream": stream}
    chat = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 3}
    text = {"prompt": "ab", "logprobs": 3}
    chat_type = schemas.ChatCompletionChunk if stream else schemas.ChatCompletionResponse
    for path, body, answer_type in (
        ("/v1/chat/completions", chat, chat_type),
        ("/v1/completions", {**text, "echo": True}, schemas.CompletionResponse),
        ("/generate", {**text, "prompt_logprobs": 2}, schemas.GenerateResponse),
    ):
        response = server.post(path, {**asked, **body})
        answers = events(response) if stream else [response.json()]
        for answer in answers:
            checked = answer_type.model_validate_json(json.dumps(answer), strict=True)
            assert json.loads(checked.model_dump_json()) == answer
        assert '"logprobs":{' in response.text or '"logprobs":[{' in response.text


@pytest.mark.parametrize(("stream", "name"), [(False, "response_body"), (True, "chunks")])
def test_making_a_large_answer_holds_nobody_up(server, monkeypatch, stream, name) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    make = getattr(CompletionAnswer, name)

    def make_slowly(*arguments):
        has_begun.set()
        assert may_end.wait(10)
        return make(*arguments)

    def tokens_of(response: httpx.Response) -> list[str]:
        answers = events(response) if stream else [response.json()]
        choices = [choice for answer in answers for choice in answer["choices"]]
        return [token for choice in choices for token in choice["logprobs"]["tokens"]]

    body = {"prompt": "ab", **GREEDY, "logprobs": 20, "stream": stream}
    want = tokens_of(server.post("/v1/completions", body))
    monkeypatch.setattr("paged_jax.server.service._SMALL", 20)
    monkeypatch.setattr(CompletionAnswer, name, make_slowly)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", body)
        assert has_begun.wait(10)
        assert server.get("/health", timeout=5).json()["num_running"] <= 1
        may_end.set()
        assert tokens_of(answer.result()) == want


def test_openai_chat_goes_on(client) -> None:
    """The second turn sends the first answer back, as the client's library writes it."""
    messages = [{"role": "user", "content": "ab"}]
    options = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **options)
    message = first.choices[0].message.model_dump()
    assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= set(message)
    messages += [message, {"role": "user", "content": "the"}]
    second = client.chat.completions.create(messages=messages, **options)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 4
    silent = [{"role": "assistant", "content": None, "tool_calls": []}, messages[0]]
    told = client.chat.completions.create(messages=silent, **options)
    assert told.usage.prompt_tokens == first.usage.prompt_tokens + len("a:\n")
    for field, value in (("tool_calls", [{"id": "1"}]), ("audio", {"id": "1"})):
        with pytest.raises(openai.BadRequestError, match=f"messages.0.{field}"):
            client.chat.completions.create(messages=[{**silent[0], field: value}], **options)
    with pytest.raises(openai.BadRequestError, match="messages.0.content must.*images"):
        parts = [{"type": "image_url", "image_url": {"url": "x"}}]
        client.chat.completions.create(messages=[{"role": "user", "content": parts}], **options)


def test_chat_ignores_fields_that_no_template_reads(server) -> None:
    """Clients send messages back with fields of their own, or of other servers."""
    part = {"type": "text", "text": "ab"}
    plain = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    extra = [
        {"role": "user", "content": [{**part, "cache_control": {"type": "ephemeral"}}], "id": "m"},
        {"role": "assistant", "content": "a", "timestamp": 4.5, "annotations": [{"type": "x"}]},
        {"role": "tool", "content": "b", "tool_call_id": "1", "is_error": False, "index": 0},
    ]
    plain_body, body = {"messages": plain, **GREEDY}, {"messages": extra, **GREEDY}
    want = server.post("/v1/chat/completions", plain_body).json()
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    assert answer.json()["choices"][0]["message"] == want["choices"][0]["message"]


@pytest.mark.parametrize("endpoint", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_integers_may_be_written_with_a_fraction_of_zero(server, endpoint) -> None:
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


def test_prompts_may_be_token_ids_with_a_fraction_of_zero(server) -> None:
    for prompt in ([3, 4], [[3, 4], [5]]):
        body = {"prompt": prompt, **GREEDY}
        written = json.dumps(body).replace("3", "3.0").replace("4", "4.0")
        want = server.post("/v1/completions", body).json()["choices"]
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + "/v1/completions", content=written, headers=headers)
        assert answer.json()["choices"] == want


def test_chat_template_kwargs_reach_the_template(server) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], **GREEDY}
    path = "/v1/chat/completions"
    usage = server.post(path, body).json()["usage"]
    body["chat_template_kwargs"] = {"enable_thinking": True}
    more = server.post(path, body).json()["usage"]
    assert more["prompt_tokens"] == usage["prompt_tokens"] + len("hm")
    body["reasoning_effort"] = "low"
    most = server.post(path, body).json()["usage"]
    assert most["prompt_tokens"] == more["prompt_tokens"] + len("low")
    body["chat_template_kwargs"] = {"messages": []}
    error = error_of(server.post(path, body), 400)
    assert error["param"] == "chat_template_kwargs" and "'messages'" in error["message"]


def test_openai_stop_and_seed(client) -> None:
    options = {"model": "tiny", "prompt": "ab", "max_tokens": 30, "seed": 1}
    options["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**options).choices[0].text
    assert client.completions.create(**options).choices[0].text == text
    stop = text[3:5]
    choice = client.completions.create(**options, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"


def test_what_clients_send_by_habit_is_no_mistake(server) -> None:
    habits = {"user": "me", "store": False, "metadata": {"a": "b"}, "seed": -1, "stream": None}
    body = {"prompt": "ab", "suffix": None, "best_of": 1, "echo": False, **habits, **GREEDY}
    body |= {"reasoning_effort": "low"}
    assert server.post("/v1/completions", body).status_code == 200
    messages = [{"role": "assistant", "content": "hi", "refusal": None}]
    body = {"messages": messages, "tools": [], "tool_choice": "none", **habits, **GREEDY}
    body |= {"echo": False, "best_of": 1, "top_logprobs": 0}
    body |= {"store": True, "stream_options": {"include_obfuscation": False}}
    # OpenAI's hints, other servers' fields with their defaults, and null for whatever there is.
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
        ({"top_logprobs": 1}, "top_logprobs", "top_logprobs needs logprobs to be true."),
        ({"include_reasoning": False}, "include_reasoning", "only as null or true."),
        ({"length_penalty": 0.5}, "length_penalty", "needs use_beam_search to be true."),
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
def test_what_would_change_the_answer_is_refused(server, change, param, message) -> None:
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
def test_what_is_not_supported_is_named(server, field, value, rule) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], field: value, **GREEDY}
    error = error_of(server.post("/v1/chat/completions", body), 400)
    assert error["message"].startswith(f"{field} must be null") and rule in error["message"]
    assert error["param"].split(".")[0] == field


def test_openai_models(client) -> None:
    [model] = client.models.list().data
    assert model.id == client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_openai_errors(client) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' is served"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="tiny", prompt="a", top_p=0)


# Mistakes


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt must be a text, a list of texts, token ids, or a list of token"),
        ({"prompt": ["a", 5]}, "prompt must be a text"),
        ({"prompt": []}, "prompt must .* none of them empty"),
        ({"prompt": [3, -1]}, "prompt"),
        ({}, "prompt: Field required."),
        ({"prompt": "a", "stop": 5}, "stop must be a text or a list of texts"),
        ({"prompt": [3, 1000]}, "prompt must hold token ids in 0..42, got 1000."),
        ({"prompt": "a" * 100}, "maximum context length is 64 tokens.* got 101"),
        ({"prompt": ["a"] * 5}, "number of prompts must be at most 4 .max_prompts"),
        ({"prompt": "a", "n": 4}, "max_n"),
        ({"prompt": "a", "n": 0}, "n: .*greater"),
        ({"prompt": "a", "logprobs": 21}, "max_logprobs"),
        # The prompt is a start token and a letter.
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
        ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "token ids for keys"),
        ({"prompt": "a", "logit_bias": {"\u0665": 1}}, "token ids for keys"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024"),
        ({"prompt": "a", "stop_token_ids": [99]}, "stop_token_ids"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"prompt": "a", "timeout": 0}, "timeout"),
        ([], "object"),
    ],
)
def test_mistakes_are_named(server, body, message) -> None:
    for stream in (False, True):
        if isinstance(body, dict):
            body = {**body, "stream": stream}
        error = error_of(server.post("/v1/completions", body), 400)
        assert re.search(message, error["message"]), error
        # The parameter is a field, where it is a single one.
        assert (error["param"] or "prompt").split(".")[0] in {*body, "prompt"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"n": NaN}'],
)
def test_what_is_not_json_is_refused(server, content) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(server.url + "/generate", content=content, headers=headers)
    error_of(response, 400)


def test_bodies_have_a_type_and_a_size(server) -> None:
    text = '{"prompt": "a"}'
    response = httpx.post(server.url + "/generate", content=text)
    assert "application/json" in error_of(response, 415)["message"]
    error_of(server.post("/generate", {"prompt": "a" * 30_000}), 413)
    # Without a length in front.
    pieces = (b'{"prompt": "' + b"a" * 9000 for _ in range(5))
    response = httpx.post(
        server.url + "/generate", content=pieces, headers={"content-type": "application/json"}
    )
    assert "max_body_bytes" in error_of(response, 413)["message"]


@pytest.mark.parametrize(
    ("context", "size"), [(64, 2**20), (2**16, 2**20), (131_072, 2**21), (10**6, 16 * 10**6)]
)
def test_limits_of_bodies_grow_with_the_context(context, size) -> None:
    assert Limits().for_context(context).max_body_bytes == size
    assert Limits(max_body_bytes=0).for_context(context).max_body_bytes == 0


def test_a_prompt_that_fills_a_long_context_is_within_the_limits(tmp_path) -> None:
    """The pool is too small for this one, which is another mistake than its size."""
    folder = save_tiny_model(tmp_path, context=200_000)
    engine = Engine(folder, max_num_seqs=1, block_size=16, num_blocks=20)
    with LiveServer(engine, Settings(model_name="tiny")) as server:
        response = server.post("/generate", {"prompt": "the cat " * 199_000})
        assert server.get("/openapi.json").json()["info"]["description"].count("3200000")
        error_of(response, 400)


def test_routes_that_are_not_there(server) -> None:
    error_of(server.get("/nothing"), 404)
    error_of(server.get("/generate"), 405)
    error_of(server.post("/v1/chat/completions", {"messages": []}), 400)


# Health and metrics


def test_health_tells_the_state_of_the_cache(server) -> None:
    health = server.get("/health").json()
    assert health["status"] == "ok" and health["blocks"]["total"] == SIZES["num_blocks"]
    assert health["num_running"] == health["num_waiting"] == 0


def test_metrics_have_vllms_names(server) -> None:
    def read() -> dict[str, float]:
        lines = server.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        own = '{engine="0",model_name="tiny"}'
        return {name.replace(own, ""): float(value) for name, value in pairs}

    before = read()
    server.post("/generate", {"prompt": "the cat sat on", **GREEDY})
    server.wait_until_idle()
    after = read()
    growth = {name: after[name] - before.get(name, 0) for name in after}
    assert growth["vllm:generation_tokens_total"] == 8
    assert growth["vllm:prompt_tokens_total"] > 8
    assert growth["vllm:time_to_first_token_seconds_count"] == 1
    assert growth["vllm:e2e_request_latency_seconds_count"] == 1
    assert growth["vllm:request_time_per_output_token_seconds_count"] == 1
    assert growth["vllm:inter_token_latency_seconds_count"] >= 6
    labels = '{engine="0",finished_reason="length",model_name="tiny"}'
    assert growth[f"vllm:request_success_total{labels}"] == 1
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert {"vllm:num_preemptions_total", "vllm:prefix_cache_queries_total"} <= set(after)


def test_openapi_document_names_every_route(server) -> None:
    document = server.get("/openapi.json").json()
    assert {"/generate", "/v1/completions", "/v1/chat/completions"} <= set(document["paths"])
    assert document["components"]["schemas"]["ChatBody"]["additionalProperties"] == {"type": "null"}


# Keys


@pytest.fixture(scope="module")
def locked(folder):
    settings = Settings(
        model_name="tiny",
        api_keys=("first-key", "second-key"),
        admin_key="admin-key",
        allowed_hosts=("127.0.0.1",),
    )
    with LiveServer(Engine(folder, **SIZES), settings) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/openapi.json", "/nothing"])
def test_every_route_but_health_asks_for_a_key(locked, path) -> None:
    assert locked.get("/health").status_code == 200
    wrong = [bearer(key) for key in ("first-ke", "first-key2", "ä")]
    for headers in ({}, {"authorization": "Bearer"}, *wrong):
        raw = {name: value.encode() for name, value in headers.items()}
        assert error_of(locked.get(path, headers=raw), 401)["code"] == "invalid_api_key"
    assert locked.get(path, headers=bearer("second-key")).status_code in (200, 404)


def test_health_tells_strangers_no_more_than_that(locked) -> None:
    assert locked.get("/health").json() == {"status": "ok"}
    assert "blocks" in locked.get("/health", headers=bearer("first-key")).json()


def test_keys_are_asked_for_under_a_mount(folder) -> None:
    """And the page of the cache still asks for the admin's."""
    settings = Settings(model_name="tiny", api_keys=("key",), admin_key="admin")
    service = Service(Engine(folder, **SIZES), settings)
    app = Starlette(routes=[Mount("/llm", create_app(service))], lifespan=service.lifespan)
    with TestClient(app) as client:
        statuses = {
            path: [client.get(path, headers=headers).status_code for headers in ({}, bearer("key"))]
            for path in ("/llm/health", "/llm/v1/models", "/llm/cache", "/llm/cache/state")
        }
        assert statuses == {
            "/llm/health": [200, 200],
            "/llm/v1/models": [401, 200],
            "/llm/cache": [401, 401],
            "/llm/cache/state": [401, 401],
        }
        assert client.get("/llm/cache/state", headers=bearer("admin")).status_code == 200
        body = {"prompt": "ab", **GREEDY}
        assert client.post("/llm/generate", json=body, headers=bearer("key")).status_code == 200


def test_an_admin_key_alone_locks_the_page(folder) -> None:
    settings = Settings(model_name="tiny", admin_key="admin")
    service = Service(Engine(folder, **SIZES), settings)
    with TestClient(create_app(service)) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/cache").status_code == 401
        assert client.get("/cache", headers=bearer("admin")).status_code == 200


def test_the_cache_page_asks_for_the_admin_key(locked) -> None:
    for headers in ({}, bearer("first-key")):
        response = locked.get("/cache", headers=headers)
        error_of(response, 401)
        assert response.headers["www-authenticate"].startswith("Basic")
    password = base64.b64encode(b"me:admin-key").decode()
    for headers in (bearer("admin-key"), {"authorization": f"Basic {password}"}):
        assert locked.get("/cache", headers=headers).status_code == 200


def test_keys_do_not_share_cached_blocks(locked) -> None:
    body = {"prompt": "the cat sat on a mat", **GREEDY}

    def cached(key: str, **more) -> int:
        answer = locked.post("/generate", {**body, **more}, headers=bearer(key)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key") == 0
    assert cached("first-key") > 0
    assert cached("second-key") == 0
    assert cached("first-key", cache_salt="mine") == 0
    assert cached("first-key", cache_salt="mine") > 0
    assert cached("second-key", cache_salt="mine") == 0, "a salt is joined to that of the key"


def test_nobody_gets_in_front_of_other_tenants(locked) -> None:
    body = {"prompt": "a", **GREEDY}
    for priority, status in ((-1, 400), (0, 200), (1, 200)):
        response = locked.post(
            "/generate", {**body, "priority": priority}, headers=bearer("first-key")
        )
        assert response.status_code == status


def test_other_hosts_are_refused(locked) -> None:
    headers = bearer("first-key") | {"host": "evil.example:80"}
    assert error_of(locked.get("/v1/models", headers=headers), 400)["code"] == "host_not_allowed"


# Clients that leave


def test_a_client_that_leaves_frees_its_blocks(server) -> None:
    body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True, "n": 3}
    with server.client() as client, client.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    server.wait_until_idle()
    # One that waits for the whole answer, too.
    with server.connect() as connection:
        text = json.dumps({**body, "stream": False, "prompt": ["ab"] * 4})  # long enough to see
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(text)}\r\n"
        )
        connection.sendall(f"{head}content-type: application/json\r\n\r\n{text}".encode())
        wait_until(lambda: server.service.num_active > 0)
    server.wait_until_idle()
