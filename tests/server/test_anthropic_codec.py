"""Tests of `POST /v1/messages`, whole and streamed, also with Anthropic's client."""

import re

import pytest

from paged_jax.server.anthropic_bodies import MessagesBody, chat_of_messages
from paged_jax.server.schemas import AnthropicMessage
from tests.support.plain_client import PlainClient
from tests.support.reasoning_server import reasoning_server
from tests.support.structured import TOOLS

CHAT = [{"role": "user", "content": "Well?"}]
ASK = {"model": "bundled", "messages": CHAT, "max_tokens": 24}
QUIET = {"thinking": {"type": "disabled"}}
FUNCTIONS = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in TOOLS
]
KEY = "secret key"


@pytest.fixture(scope="module")
def server():
    with reasoning_server(api_keys=(KEY,)) as server:
        yield server


@pytest.fixture
def client(server):
    with PlainClient(server.url, {"x-api-key": KEY}) as client:
        yield client


@pytest.fixture
def anthropic_client(server):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_client_receives_thinking_and_text(client) -> None:
    message = client.messages.create(**ASK, extra_body={"seed": 3, "temperature": 1})
    AnthropicMessage.model_validate(message)
    thinking, text = message.content
    assert thinking.type == "thinking" and thinking.thinking and text.type == "text" and text.text
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 24
    again = client.messages.create(**ASK, extra_body={"seed": 3, "temperature": 1})
    assert again.content[1].text == text.text and again.usage.cache_read_input_tokens > 0


@pytest.mark.peers
def test_stream_equals_the_whole_answer(anthropic_client) -> None:
    options = {**ASK, "extra_body": {"seed": 3, "temperature": 1}}
    whole = anthropic_client.messages.create(**options)
    with anthropic_client.messages.stream(**options) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert [block.model_dump() for block in message.content] == [
        block.model_dump() for block in whole.content
    ]
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == 2


@pytest.mark.peers
@pytest.mark.parametrize("is_stream", [False, True])
def test_client_receives_calls_and_sends_results(anthropic_client, is_stream) -> None:
    options = {
        **ASK,
        **QUIET,
        "max_tokens": 400,
        "tools": FUNCTIONS,
        "tool_choice": {"type": "any"},
    }
    if is_stream:
        with anthropic_client.messages.stream(**options) as stream:
            message = stream.get_final_message()
    else:
        message = anthropic_client.messages.create(**options)
    assert message.stop_reason == "tool_use" and message.content
    results = []
    for block in message.content:
        assert block.type == "tool_use" and block.id.startswith("toolu_")
        assert set(block.input) == ({"city", "days"} if block.name == "weather" else set())
        results.append({"type": "tool_result", "tool_use_id": block.id, "content": "5"})
    told = [
        *CHAT,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    more = anthropic_client.messages.create(
        model="bundled", messages=told, tools=FUNCTIONS, max_tokens=1, **QUIET
    )
    assert more.usage.input_tokens + more.usage.cache_read_input_tokens > 20


def test_stop_sequences_end_the_answer(client) -> None:
    options = {**ASK, **QUIET, "extra_body": {"seed": 1}}
    first = client.messages.create(**options).content[0].text
    stop = first[3:6]
    message = client.messages.create(**options, stop_sequences=[stop])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert message.content[0].text == first[: first.index(stop)]


def test_count_tokens_counts_tools_and_template(client) -> None:
    counted = client.messages.count_tokens(
        model="bundled", messages=CHAT, system="Be brief.", tools=FUNCTIONS
    )
    answer = client.messages.create(**ASK, system="Be brief.", tools=FUNCTIONS)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert (
        counted.input_tokens
        > client.messages.count_tokens(model="bundled", messages=CHAT).input_tokens
    )


def chat_of(*messages, **fields):
    body = MessagesBody.model_validate({"messages": list(messages), "max_tokens": 1, **fields})
    chat = chat_of_messages(body, None)
    return [each.model_dump(exclude_none=True) for each in chat.messages]


def test_blocks_become_messages_of_a_chat() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "5"}],
    }
    failed = {**result, "content": "no", "is_error": True}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    found = chat_of(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [thinking, {"type": "server_tool_use"}, use]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "And?"}]},
        system=system,
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab\nc"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "5"},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
        {"role": "user", "content": "And?"},
    ]


def test_images_in_results_become_a_line_of_text() -> None:
    """Claude Code's tool Read sends images. An error would repeat with each later request."""
    source = {"type": "base64", "media_type": "image/png", "data": "aa"}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": " (a.png)"}]
    for is_error, before in ((False, ""), (True, "Error: ")):
        result = {"type": "tool_result", "tool_use_id": "t", "content": parts}
        [message] = chat_of({"role": "user", "content": [{**result, "is_error": is_error}]})
        line = "[image omitted: this model reads only text] (a.png)"
        assert message == {"role": "tool", "tool_call_id": "t", "content": before + line}


def user_says(*blocks: object) -> dict:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (user_says(), "messages must contain at least one message"),
        (user_says("x"), "messages.0.content.0 must be an object"),
        (user_says({"type": "text", "text": None}), "messages.0.content.0.text must be a text"),
        (user_says({"type": "tool_use", "id": "t"}), "messages.0.content.0.name must be a text"),
        (
            user_says({"type": "tool_result", "tool_use_id": "t", "content": 5}),
            "messages.0.content.0.content must be a text or a list",
        ),
        ({"system": [{"type": "image"}]}, "system.0.type must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "must be user or assistant"),
        ({"tool_choice": {"type": "every"}}, "tool_choice must be auto"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "prompt is too long"),
        ({"surprise": 1}, "surprise is not supported here"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "structured_outputs": {"regex": "a"},
            },
            "output_config.format must be null or text if structured_outputs is given",
        ),
        ({"stop_sequences": ["a"] * 17}, "stop strings must be at most 16"),
        ({"stop_sequences": ["a"] * 9, "stop": ["b"] * 8}, "must be at most 16 .*got 17"),
        ({"stop_sequences": ["a" * 5000]}, "length of a stop string must be at most"),
    ],
)
def test_errors_have_the_form_of_the_api(server, change, message) -> None:
    response = server.post("/v1/messages", {**ASK, **change}, headers={"x-api-key": KEY})
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert re.search(message, body["error"]["message"])
    assert body["request_id"] == response.headers["request-id"], "the client reads the header"


@pytest.mark.peers
def test_client_reads_errors(anthropic_client) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="surprise is not supported") as error:
        anthropic_client.messages.create(**ASK, extra_body={"surprise": 1})
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert error.value.body["request_id"] == error.value.request_id
    assert error.value.request_id


@pytest.mark.peers
def test_threads_are_rejected_with_the_details_that_clients_read(anthropic_client) -> None:
    """The client's tool runner repeats such a request with the whole conversation."""
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="not stored here") as error:
        anthropic_client.messages.create(**ASK, extra_body={"thread": {"type": "create"}})
    assert isinstance(error.value.details, anthropic.types.ThreadUnsupportedRequestErrorDetails)
    assert error.value.details.error_code == "thread_unsupported_request"
    with pytest.raises(anthropic.BadRequestError) as error:
        anthropic_client.messages.create(**ASK, extra_body={"surprise": 1})
    assert error.value.details is None


@pytest.mark.peers
def test_unknown_paths_of_the_api_have_its_form_of_errors(anthropic_client) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="There is no") as error:
        anthropic_client.messages.batches.list()
    assert error.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_format_constrains_the_text_under_both_names(client, name) -> None:
    """Clients of 2025 send `output_format` with the beta of structured outputs."""
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    body = {name: {"format": form} if name == "output_config" else form}
    thinking = {"thinking": {"type": "disabled"}, "temperature": 1}
    message = client.messages.create(
        **{**ASK, "max_tokens": 60, "extra_body": {**thinking, **body}}
    )
    assert [block.text for block in message.content if block.type == "text"][0] in ('"yes"', '"no"')


@pytest.mark.peers
def test_client_lists_the_model(anthropic_client) -> None:
    page = anthropic_client.models.list()
    [card] = page.data
    assert (card.id, card.display_name, card.type) == ("bundled", "bundled", "model")
    assert card.created_at.year >= 2026 and not page.has_more
    assert anthropic_client.models.retrieve("bundled") == card


@pytest.mark.parametrize("is_stream", [False, True])
def test_explanations_are_part_of_the_answer(client, is_stream) -> None:
    options = {**ASK, "max_tokens": 2, "extra_body": {"explain": True}}
    if is_stream:
        answer = [*client.messages.create(**options, stream=True)][-2]
    else:
        answer = client.messages.create(**options)
    assert answer.explanations[0]["prefix_match"]


def test_wrong_key_is_rejected_in_the_form_of_the_api(server) -> None:
    for headers in ({"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}, {}):
        response = server.post("/v1/messages", ASK, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    both = {"authorization": "Bearer wrong", "x-api-key": KEY}
    assert server.post("/v1/messages", ASK, headers=both).status_code == 200


def test_last_message_of_the_assistant_is_continued(client) -> None:
    said = {"role": "assistant", "content": "It is so far away "}
    counted = [
        client.messages.count_tokens(model="bundled", messages=messages, **QUIET).input_tokens
        for messages in (CHAT, [*CHAT, said])
    ]
    message = client.messages.create(model="bundled", messages=[*CHAT, said], max_tokens=4, **QUIET)
    assert [block.type for block in message.content] == ["text"]
    usage = message.usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert counted[0] < counted[1] == total
