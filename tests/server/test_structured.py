"""Tests of structured outputs over HTTP, and of clients that use them."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Literal

import pydantic
import pytest

from paged_jax import Engine
from paged_jax.server import Settings
from tests.support.live_server import LiveServer, error_of, events
from tests.support.structured import PERSON, SIZES, ask_pydantic_ai

MESSAGES = [{"role": "user", "content": "Who is it?"}]


class Person(pydantic.BaseModel):
    """Model that frameworks turn into a schema. Some leave out the lengths of texts."""

    name: Literal["Ann", "Bob"]
    is_old: bool


@pytest.fixture(scope="module")
def server():
    with LiveServer(Engine(**SIZES), Settings(model_name="bundled")) as server:
        yield server


@pytest.mark.peers
def test_openai_client_parses_objects(openai_client) -> None:
    answer = openai_client.chat.completions.parse(
        model="bundled", messages=MESSAGES, response_format=Person, n=2, temperature=1
    )
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]


@pytest.mark.peers
def test_openai_client_parses_streams(openai_client) -> None:
    with openai_client.chat.completions.stream(
        model="bundled", messages=MESSAGES, response_format=Person, temperature=1
    ) as stream:
        kinds = {event.type for event in stream}
        assert "content.delta" in kinds
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@pytest.mark.peers
def test_instructor_receives_objects(openai_client) -> None:
    instructor = pytest.importorskip("instructor")
    ask = instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA)
    person = ask.chat.completions.create(
        model="bundled", messages=MESSAGES, response_model=Person, max_retries=0
    )
    assert isinstance(person, Person)


@pytest.mark.peers
def test_pydantic_ai_receives_objects(server) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    assert isinstance(
        ask_pydantic_ai(server.url, pydantic_ai.NativeOutput(Person), "Who is it?"), Person
    )


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_bytes_of_partial_characters(server, stream) -> None:
    """OpenAI documents that the bytes of all tokens, joined, are the text in UTF-8."""
    text = "日本, é"
    body = {"messages": MESSAGES, "structured_outputs": {"choice": [text]}, "stream": stream}
    body |= {"logprobs": True, "top_logprobs": 2}
    response = server.post("/v1/chat/completions", body)
    answers = events(response) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    logprobs = [each["logprobs"]["content"] for each in choices if each.get("logprobs")]
    tokens = [token for content in logprobs for token in content]
    assert any("\ufffd" in token["token"] for token in tokens)
    pieces = [bytes(token["bytes"]) for token in tokens if token["token"] != "</s>"]
    assert b"".join(pieces) == text.encode()
    assert all(other["bytes"] is not None for each in tokens for other in each["top_logprobs"])


def test_response_format_works_at_both_endpoints(server) -> None:
    """Chats and completions accept `response_format`, as in vLLM."""
    body = {"temperature": 1, "seed": 1, "max_tokens": 60}
    body["response_format"] = {"type": "json_object"}
    [choice] = server.post("/v1/chat/completions", {**body, "messages": MESSAGES}).json()["choices"]
    assert choice["message"]["content"].startswith("{")
    schema = {"name": "person", "schema": PERSON}
    body["response_format"] = {"type": "json_schema", "json_schema": schema}
    [choice] = server.post("/v1/completions", {**body, "prompt": "It is"}).json()["choices"]
    assert set(json.loads(choice["text"])) == set(PERSON["required"])


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": PERSON},  # llama.cpp's form
        {"type": "json_object", "value": PERSON},  # the form of huggingface_hub's client
        {"type": "json_schema", "json_schema": {"schema": PERSON, "extra": 1}},
    ],
)
def test_response_format_accepts_the_forms_of_other_servers(server, form) -> None:
    body = {"messages": MESSAGES, "temperature": 1, "max_tokens": 60, "response_format": form}
    [choice] = server.post("/v1/chat/completions", body).json()["choices"]
    assert set(json.loads(choice["message"]["content"])) == set(PERSON["required"])


@pytest.mark.parametrize("hint", [{"uniqueItems": True}, {"not": {}}, {"format": "colour"}])
def test_response_format_is_a_hint_unless_strict(server, hint) -> None:
    """Unsupported keywords of a schema are an error only with `strict`, as at OpenAI."""
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"enum": ["a"], **hint}}}
    named = {"name": "person", "schema": schema}
    body = {"messages": MESSAGES, "temperature": 1, "max_tokens": 60}
    body["response_format"] = {"type": "json_schema", "json_schema": named}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    value = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert value["name"] == "a" and set(value) == set(PERSON["required"])
    named["strict"] = True
    error = error_of(server.post("/v1/chat/completions", body), 400)
    [word] = hint
    assert error["param"] == "response_format" and word in error["message"]


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]"}, {"a", "b"}),
        ({"grammar": 'start: "a" | "b"'}, {"a", "b"}),
        ({"json": {"type": "boolean"}}, {"true", "false"}),
        ({"json": '{"type": "boolean"}'}, {"true", "false"}),
    ],
)
def test_structured_outputs_accept_all_forms_of_vllm(server, form, texts) -> None:
    body = {"prompt": "It is", "structured_outputs": form, "temperature": 1}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] in texts
    pieces = events(server.post("/generate", {**body, "stream": True}))
    assert "".join(text for piece in pieces for text in piece["text"]) in texts


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        (
            {"structured_outputs": {"json": {"type": "strin"}}},
            "structured_outputs",
            "structured_outputs cannot be compiled: Invalid type: strin",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "strin"}},
                }
            },
            "response_format",
            "response_format cannot be compiled: Invalid type: strin",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "exactly one of json, "),
        ({"structured_outputs": {"choice": []}, "use_beam_search": True}, "choice", "list of one"),
        (
            {"response_format": {"type": "json_object"}, "use_beam_search": True},
            "response_format",
            "response_format must be null with use",
        ),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "Did you mean regex?"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "Input should be 'text', "),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format: json_schema must be given if and only if type is json_schema.",
        ),
        (
            {"response_format": {"type": "text", "schema": PERSON}},
            "response_format",
            "schema and value must be null unless type is json_object.",
        ),
        (
            {"response_format": {"type": "json_object", "schema": PERSON, "value": PERSON}},
            "response_format",
            "only one of schema and value may be given.",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "response_format must be null or text if structured_outputs is given.",
        ),
    ],
)
def test_invalid_forms_are_rejected(server, change, param, message) -> None:
    error = error_of(server.post("/v1/chat/completions", {"messages": MESSAGES, **change}), 400)
    assert message in error["message"] and error["param"] == param


def test_slow_compilation_of_a_form_delays_no_other_request(server, monkeypatch) -> None:
    may_end, compile_now = threading.Event(), server.service.grammars.compile

    def compile_slowly(form):
        assert may_end.wait(30)
        return compile_now(form)

    monkeypatch.setattr(server.service, "grammars", SimpleNamespace(compile=compile_slowly))
    body = {"prompt": "It is", "structured_outputs": {"choice": ["yes"]}}
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(server.post, "/v1/completions", body)
        others = [server.post("/v1/completions", {"prompt": "It is", "max_tokens": 2})]
        may_end.set()
        answers = [slow.result(), *others]
    assert [answer.status_code for answer in answers] == [200, 200]
