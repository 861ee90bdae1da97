"""Tests of chat messages and tool calls, whole and streamed, and of clients that use them."""

import json
from typing import Literal

import pydantic
import pytest
from pydantic import ValidationError

from paged_jax import Engine
from paged_jax.models.text.chat_template import ChatTemplate
from paged_jax.server import Settings
from paged_jax.server.api_error import ApiError
from paged_jax.server.bodies import ChatBody, ToolParam
from paged_jax.server.chats import check_calls, template_messages, template_tools
from tests.support.live_server import LiveServer, error_of
from tests.support.plain_client import PlainClient
from tests.support.reasoning_server import reasoning_server, tokenizer_of
from tests.support.structured import (
    HERMES_TEMPLATE,
    LLAMA3_TEMPLATE,
    PERSON,
    SIZES,
    TOOLS,
    ask_pydantic_ai,
)

MESSAGES = [{"role": "user", "content": "Well?"}]
ASK = {"model": "bundled", "messages": MESSAGES, "tools": TOOLS, "temperature": 1}


# Messages


def messages_of(*messages):
    return template_messages(ChatBody.model_validate({"messages": list(messages)}).messages)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("{}", "{}"),
        ("", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a": 1}'),
        ("{", '"{"'),
    ],
)
def test_as_messages_ignores_unknown_fields_of_calls(arguments, want) -> None:
    function = {"name": "f", "arguments": arguments, "extra_content": {"google": {}}}
    call = {"id": "1", "index": 0, "type": "function", "function": function}
    messages = messages_of({"role": "assistant", "content": None, "tool_calls": [call]})
    written = ChatTemplate("{{ messages[0].tool_calls | tojson }}").render(messages)
    function = f'{{"name": "f", "arguments": {want}}}'
    assert written == f'[{{"id": "1", "type": "function", "function": {function}}}]'


IMAGES = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}},
    {"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}},
    {"type": "file", "file": {"file_id": "f"}},
]


@pytest.mark.parametrize("part", IMAGES, ids=lambda part: part["type"])
def test_images_in_results_of_tools_become_a_line_of_text(part) -> None:
    """An error would repeat with each later request of the session."""
    content = [{"type": "text", "text": "Seen:"}, part]
    [message] = messages_of({"role": "tool", "tool_call_id": "1", "content": content})
    first, second = message["content"]
    assert first == content[0]
    line = f"[{part['type']} omitted: this model reads only text]"
    assert second == {"type": "text", "text": line}
    with pytest.raises(ValidationError):
        messages_of({"role": "user", "content": content})


def test_tool_param_ignores_unknown_fields() -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "annotations": {"readOnly": True}}
    body = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    tool = ToolParam.model_validate(body)
    assert tool.function.parameters == {"type": "object"}


def test_as_messages_passes_on_what_templates_read() -> None:
    """The template gets what it gets from transformers, without fields that are null."""
    message = {"role": "assistant", "content": "a", "reasoning_content": "so", "tool_plan": "p"}
    parsed = ChatBody.model_validate({"messages": [{**message, "name": None, "thinking": None}]})
    assert template_messages(parsed.messages) == [message]
    template = ChatTemplate("{{ messages[0].reasoning_content }}|{{ messages[0].tool_plan }}")
    assert template.render(template_messages(parsed.messages)) == "so|p"
    for name, value in (("reasoning", "so"), ("thinking", "so"), ("reasoning_content", "so")):
        fields = {"role": "assistant", "content": None, "reasoning_content": "", name: value}
        parsed = ChatBody.model_validate({"messages": [fields]})
        assert template.render(template_messages(parsed.messages)) == "so|"


def test_as_messages_keeps_the_text_of_refusals() -> None:
    part = {"type": "refusal", "refusal": "No."}
    for fields in ({"content": [part]}, {"content": None, "refusal": "No."}, {"refusal": "No."}):
        parsed = ChatBody.model_validate({"messages": [{"role": "assistant", **fields}]})
        assert (
            ChatTemplate("{{ messages[0].content }}").render(template_messages(parsed.messages))
            == "No."
        )


# Tools


class Trip(pydantic.BaseModel):
    """Model that frameworks turn into a tool."""

    city: Literal["Oslo", "Rome"]
    is_far: bool


@pytest.fixture(scope="module", params=[HERMES_TEMPLATE, LLAMA3_TEMPLATE], ids=["hermes", "llama3"])
def server(request):
    tokenizer = tokenizer_of(request.param)
    with LiveServer(Engine(tokenizer=tokenizer, **SIZES), Settings(model_name="bundled")) as server:
        yield server


def check_call(call) -> None:
    value = json.loads(call.function.arguments)
    assert set(value) == ({"city", "days"} if call.function.name == "weather" else set())
    assert call.id.startswith("call_") and call.type == "function"


def test_client_receives_calls(client) -> None:
    answer = client.chat.completions.create(
        **ASK, tool_choice="required", parallel_tool_calls=False, n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        check_call(call)
    # The client sends back the calls with their results.
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    told = [*MESSAGES, message, result]
    more = client.chat.completions.create(model="bundled", messages=told, max_tokens=1)
    arguments = message.tool_calls[0].function.arguments
    assert more.usage.prompt_tokens > answer.usage.prompt_tokens - 10 + len(arguments) / 8


@pytest.mark.peers
def test_openai_client_receives_the_named_call(openai_client) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = openai_client.chat.completions.create(**ASK, tool_choice=choice, seed=1)
    [call] = answer.choices[0].message.tool_calls
    check_call(call)
    assert call.function.name == "weather" and answer.choices[0].finish_reason == "stop"
    with openai_client.chat.completions.stream(**ASK, tool_choice=choice, seed=1) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    [same] = streamed.message.tool_calls
    assert same.function.arguments == call.function.arguments
    assert same.function.name == "weather" and streamed.finish_reason == "stop"


def test_stream_has_the_name_before_the_arguments(client) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False, "stream": True}
    stream = client.chat.completions.create(**ASK, **options)
    calls, reasons = [], []
    for event in stream:
        [choice] = event.choices
        assert choice.delta.content is None, "clients would begin a text"
        reasons.append(choice.finish_reason)
        for delta in choice.delta.tool_calls or ():
            if delta.index == len(calls):
                assert delta.id and delta.type == "function" and delta.function.name
                calls.append(delta)
            else:
                assert delta.index == len(calls) - 1 and delta.id is None
                calls[-1].function.arguments += delta.function.arguments
    assert calls and reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    for call in calls:
        check_call(call)


def test_response_with_tools_may_be_text(client, server) -> None:
    """A logit bias makes the model write text instead of a call."""
    bias = {str(server.service.tokenizer.encode("the", add_special_tokens=False)[0]): 100}
    answer = client.chat.completions.create(**ASK, max_tokens=4, logit_bias=bias)
    [choice] = answer.choices
    assert "the" in choice.message.content and choice.message.tool_calls is None
    assert choice.finish_reason == "length"


def test_unsupported_schema_is_a_hint_unless_strict(server) -> None:
    """OpenAI treats schemas so too. The schemas of other tools still apply."""
    parameters = {"type": "object", "properties": {"x": {"$ref": "https://example.com/x.json"}}}
    function = {"name": "fetch", "parameters": parameters}
    tools = [{"type": "function", "function": function}, TOOLS[0]]
    body = {"messages": MESSAGES, "tools": tools, "max_tokens": 4}
    assert server.post("/v1/chat/completions", body).status_code == 200
    body |= {"tool_choice": "required", "temperature": 1, "max_tokens": None}
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = server.post("/v1/chat/completions", {**body, "tool_choice": choice}).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
    function["strict"] = True
    error = error_of(server.post("/v1/chat/completions", body), 400)
    assert error["param"] == "tools" and "'fetch'" in error["message"]


def test_tools_are_shown_with_any_tool_choice(server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    plain, silent, shown = (
        server.post("/v1/chat/completions", {**body, **change}).json()["usage"]["prompt_tokens"]
        for change in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
    )
    assert plain < silent == shown
    asked = {"messages": MESSAGES, "tools": TOOLS}
    assert server.post("/tokenize", asked).json()["count"] == shown
    error = error_of(server.post("/tokenize", {"prompt": "a", "tools": TOOLS}), 400)
    assert error["param"] == "tools"


@pytest.mark.peers
def test_instructor_receives_objects_by_tools(openai_client) -> None:
    instructor = pytest.importorskip("instructor")
    ask = instructor.from_openai(openai_client)
    trip = ask.chat.completions.create(
        model="bundled", messages=MESSAGES, response_model=Trip, max_retries=0
    )
    assert isinstance(trip, Trip)


@pytest.mark.peers
def test_pydantic_ai_receives_objects_by_tools(server) -> None:
    assert isinstance(ask_pydantic_ai(server.url, Trip, "Where?"), Trip)


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        (
            {"tool_choice": "required", "tools": []},
            "tool_choice",
            "tool_choice must be null, none or auto if there are no tools.",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice must name tools of the request, got 'x'.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
            "String should match pattern",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "tools.0",
            'type must be "function", as this server has no other tools, got custom',
        ),
        (
            {"messages": [{"role": "assistant"}]},
            "messages.0",
            "content must be given, unless there are tool_calls, a refusal or reasoning",
        ),
    ],
)
def test_invalid_tools_are_rejected(server, change, param, message) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, **change}
    error = error_of(server.post("/v1/chat/completions", body), 400)
    assert message in error["message"] and error["param"] == param


def test_answer_with_tools_has_the_response_format_or_calls(client, server) -> None:
    """The union of both grammars: logit biases choose between a call and an object."""
    backend = server.service.tokenizer.backend
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": PERSON}}
    marks = {backend.token_to_id(token): -100 for token in ("<", "{", "▁<", "▁{")}
    for bias in ({}, {str(each): value for each, value in marks.items() if each is not None}):
        answer = client.chat.completions.create(**ASK, response_format=form, logit_bias=bias)
        message = answer.choices[0].message
        if message.tool_calls:
            for call in message.tool_calls:
                check_call(call)
        else:
            assert set(json.loads(message.content)) == {"name", "is_old"}
    answer = client.chat.completions.create(**ASK, response_format=form, tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        check_call(call)


def test_unknown_tool_format_is_rejected() -> None:
    """A guessed format would force text that the model does not use for calls."""
    source = HERMES_TEMPLATE.replace("{{ call.function.arguments | tojson }}", "?")
    tools = ChatBody.model_validate({"messages": MESSAGES, "tools": TOOLS}).tools
    with pytest.raises(
        ApiError, match="because the model's tool format is not supported.$"
    ) as error:
        template_tools(tools, tokenizer_of(source))
    assert error.value.status == 400 and error.value.param == "tools"
    # Earlier calls are shown to the model in any format.
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = ChatBody.model_validate({"messages": [*MESSAGES, told]}).messages
    check_calls(messages, tokenizer_of(HERMES_TEMPLATE.replace('"arguments"', '"args"')))
    without = "{{ tools }}{{ messages[0].content }}"
    with pytest.raises(ApiError, match="^messages.1.tool_calls must .* omits tool calls.$"):
        check_calls(messages, tokenizer_of(without))


def test_final_message_is_continued(server) -> None:
    """The prompt ends with the given text, whose spaces the template does not trim."""
    told = [*MESSAGES, {"role": "assistant", "content": "It is  "}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"messages": told, "max_tokens": 3, "return_token_ids": True, "stream": False, **fields}
    choice = server.post("/v1/chat/completions", body).json()
    prompt = server.service.tokenizer.decode(choice["prompt_token_ids"])
    assert prompt.endswith("It is  ")
    error = error_of(server.post("/v1/chat/completions", {**body, "messages": MESSAGES}), 400)
    assert error["param"] == "continue_final_message"
    wrong = {**body, "add_generation_prompt": None}
    error = error_of(server.post("/v1/chat/completions", wrong), 400)
    assert "add_generation_prompt is false" in error["message"]


def test_prompt_is_truncated_at_its_start(server) -> None:
    body = {"prompt": list(range(5, 205)), "max_tokens": 1, "return_token_ids": True}
    answer = server.post("/v1/completions", {**body, "truncate_prompt_tokens": 7}).json()
    assert answer["choices"][0]["prompt_token_ids"] == list(range(198, 205))
    longest = server.post("/v1/completions", {**body, "truncate_prompt_tokens": -1}).json()
    assert 7 < longest["usage"]["prompt_tokens"] < 200


# Reasoning


@pytest.fixture(scope="module")
def thinking_server():
    with reasoning_server() as server:
        yield server


@pytest.fixture
def thinker(thinking_server):
    with PlainClient(thinking_server.url) as client:
        yield client


@pytest.fixture
def openai_thinker(thinking_server):
    import openai

    url = f"{thinking_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


THINK_ABOUT = {"model": "bundled", "messages": MESSAGES, "temperature": 1, "seed": 3}


def test_reasoning_is_apart_from_the_content(thinker) -> None:
    options = {**THINK_ABOUT, "max_tokens": 24, "n": 2}
    text = thinker.chat.completions.create(**options, extra_body={"separate_reasoning": False})
    answer = thinker.chat.completions.create(**options)
    hidden = thinker.chat.completions.create(**options, extra_body={"include_reasoning": False})
    for raw, choice, quiet in zip(text.choices, answer.choices, hidden.choices, strict=True):
        reasoning, mark, content = raw.message.content.partition("e")
        assert mark and choice.message.reasoning == choice.message.reasoning_content
        assert choice.message.reasoning == reasoning.strip() and reasoning.strip()
        assert choice.message.content == (content.lstrip() or None)
        assert quiet.message.content == choice.message.content
        assert "reasoning" not in quiet.message
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens == 48
    assert answer.usage == hidden.usage


def test_stream_has_the_reasoning_before_the_content(thinker) -> None:
    options = {**THINK_ABOUT, "max_tokens": 24}
    message = thinker.chat.completions.create(**options).choices[0].message
    usage = {"stream_options": {"include_usage": True}}
    kinds, texts = [], {"reasoning": "", "content": ""}
    for event in thinker.chat.completions.create(**options, stream=True, **usage):
        for choice in event.choices:
            assert choice.delta.content != "", "clients would begin a text before the reasoning"
            for kind in ("reasoning", "content"):
                if text := getattr(choice.delta, kind, None):
                    kinds.append(kind)
                    texts[kind] += text
    assert texts == {"reasoning": message.reasoning, "content": message.content}
    assert sorted(kinds, reverse=True) == kinds and set(kinds) == {"reasoning", "content"}
    assert 0 < event.usage.completion_tokens_details.reasoning_tokens < 24


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_leave_out_the_reasoning(thinker, is_stream) -> None:
    options = {**THINK_ABOUT, "max_tokens": 24, "logprobs": True}
    if is_stream:
        choices = [
            choice
            for event in thinker.chat.completions.create(**options, stream=True)
            for choice in event.choices
        ]
        content = "".join(choice.delta.content or "" for choice in choices)
        tokens = [token for each in choices if each.logprobs for token in each.logprobs.content]
    else:
        [choice] = thinker.chat.completions.create(**options).choices
        content, tokens = choice.message.content, choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode().lstrip() == content != ""


def test_reasoning_that_is_cut_short_has_no_content(thinker) -> None:
    answer = thinker.chat.completions.create(**THINK_ABOUT, max_tokens=1)
    message = answer.choices[0].message
    assert message.content is None and message.reasoning
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1


@pytest.mark.peers
@pytest.mark.parametrize("effort", [None, "none"])
def test_schema_applies_after_the_reasoning(openai_thinker, effort) -> None:
    """Effort "none" closes the reasoning in the prompt, so the object comes at once."""
    answer = openai_thinker.chat.completions.parse(
        **THINK_ABOUT, response_format=Trip, reasoning_effort=effort
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Trip)
    assert (getattr(message, "reasoning", None) is None) == (effort == "none")


def test_calls_come_after_the_reasoning(thinker) -> None:
    answer = thinker.chat.completions.create(**THINK_ABOUT, tools=TOOLS, tool_choice="required")
    message = answer.choices[0].message
    assert message.reasoning and answer.choices[0].finish_reason == "tool_calls"
    for call in message.tool_calls:
        check_call(call)
    # The history has the reasoning under either name.
    more = thinker.chat.completions.create(
        model="bundled", messages=[*MESSAGES, message], max_tokens=1
    )
    assert more.choices[0].finish_reason == "length"
