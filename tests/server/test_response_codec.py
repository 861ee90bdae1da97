"""Tests of `POST /v1/responses`, whole and streamed, also with OpenAI's client."""

import json
from typing import Literal

import pydantic
import pytest

from paged_jax.server import bodies
from paged_jax.server.api_error import ApiError
from paged_jax.server.response_bodies import ResponsesBody, ToolNames, chat_body
from paged_jax.server.schemas import ResponseObject
from tests.support.live_server import error_of
from tests.support.reasoning_server import reasoning_server
from tests.support.structured import TOOLS

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASK = {"model": "bundled", "input": "Well?", "temperature": 1, "store": False}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


class Trip(pydantic.BaseModel):
    """Model that the client turns into a schema."""

    city: Literal["Oslo", "Rome"]
    is_far: bool


@pytest.fixture(scope="module")
def server():
    with reasoning_server() as server:
        yield server


def test_client_receives_reasoning_and_text(client) -> None:
    answer = client.responses.create(**ASK, max_output_tokens=24, extra_body={"seed": 3})
    ResponseObject.model_validate(answer)
    reasoning, message = answer.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text
    assert message.content[0].text != ""
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    usage = answer.usage
    assert usage.output_tokens == 24 and 0 < usage.output_tokens_details.reasoning_tokens < 24
    assert usage.total_tokens == usage.input_tokens + 24


def test_stream_has_every_event_in_order(client) -> None:
    """The sum of the deltas equals the final response."""
    options = {**ASK, "max_output_tokens": 24, "reasoning": {"summary": "auto"}}
    events = client.responses.create(**options, extra_body={"seed": 17}, stream=True)
    final = events[-1].response
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    summary = [e.delta for e in events if e.type == "response.reasoning_summary_text.delta"]
    assert len(summary) > 1, "the summary is streamed, too"
    for name in ("output_item", "content_part"):
        assert kinds.count(f"response.{name}.added") == kinds.count(f"response.{name}.done") == 2
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    thoughts = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    reasoning, message = final.output
    assert text == message.content[0].text and thoughts == reasoning.content[0].text
    assert reasoning.summary[0].text == thoughts == "".join(summary)
    assert (reasoning.status, message.status) == ("completed", "incomplete")
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert done == final.output


@pytest.mark.peers
def test_client_parses_objects(openai_client) -> None:
    answer = openai_client.responses.parse(**ASK, text_format=Trip)
    assert isinstance(answer.output_parsed, Trip) and answer.status == "completed"


def check_call(call) -> None:
    assert call.type == "function_call" and call.id.startswith("fc_")
    value = json.loads(call.arguments)
    assert set(value) == ({"city", "days"} if call.name == "weather" else set())


@pytest.mark.peers
@pytest.mark.parametrize("is_stream", [False, True])
def test_client_receives_calls_and_sends_results(openai_client, is_stream) -> None:
    options = {**ASK, "tools": FUNCTIONS, "tool_choice": "required", "extra_body": QUIET}
    if is_stream:
        with openai_client.responses.stream(**options) as stream:
            for event in stream:
                if event.type == "response.function_call_arguments.done":
                    assert event.name and json.loads(event.arguments) is not None
            answer = stream.get_final_response()
    else:
        answer = openai_client.responses.create(**options)
    calls = answer.output
    assert calls and answer.output_text == ""
    for call in calls:
        check_call(call)
    items = [{"role": "user", "content": "Well?"}, *(call.model_dump() for call in calls)]
    for call in calls:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    more = openai_client.responses.create(
        model="bundled", input=items, tools=FUNCTIONS, max_output_tokens=1, extra_body=QUIET
    )
    assert more.usage.input_tokens > answer.usage.input_tokens


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_leave_out_the_reasoning(client, is_stream) -> None:
    options = {**ASK, "max_output_tokens": 24, "include": ["message.output_text.logprobs"]}
    options["extra_body"] = {"seed": 3}
    if is_stream:
        events = client.responses.create(**options, stream=True)
        streamed = [e for e in events if e.type == "response.output_text.delta"]
        assert sum(len(event.logprobs) for event in streamed) > 0
        answer = events[-1].response
    else:
        answer = client.responses.create(**options)
    [part] = answer.output[1].content
    spelled = b"".join(bytes(each.bytes) for each in part.logprobs).decode()
    assert spelled.lstrip() == part.text != ""
    count = answer.usage.output_tokens - answer.usage.output_tokens_details.reasoning_tokens
    assert len(part.logprobs) in (count - 1, count), "a token of white space is left out"


def test_input_tokens_are_counted_with_tools_and_template(client) -> None:
    body = {"model": "bundled", "input": "Hello", "instructions": "Be brief."}
    plain = client.responses.input_tokens.count(**body)
    assert plain.object == "response.input_tokens"
    with_tools = client.responses.input_tokens.count(**body, tools=FUNCTIONS)
    assert with_tools.input_tokens > plain.input_tokens > 5
    for counted, tools in ((plain, []), (with_tools, FUNCTIONS)):
        usage = client.responses.create(**body, tools=tools, max_output_tokens=1).usage
        assert usage.input_tokens == counted.input_tokens


def test_logprobs_have_the_bytes_of_the_text(client) -> None:
    answer = client.responses.create(
        **ASK,
        max_output_tokens=4,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body=QUIET,
    )
    [part] = answer.output[0].content
    assert b"".join(bytes(each.bytes) for each in part.logprobs).decode() == part.text
    assert all(len(each.top_logprobs) >= 2 for each in part.logprobs)
    options = {"max_output_tokens": 4, "top_logprobs": 2, "extra_body": QUIET}
    answer = client.responses.create(**ASK, **options)
    assert len(answer.output[0].content[0].logprobs) == 4, "top_logprobs alone asks for them"


def chat_of(**fields):
    body = ResponsesBody.model_validate({"input": "x", **fields})
    messages = chat_body(body, None).messages
    return [each.model_dump(exclude_none=True) for each in messages]


def test_items_of_a_turn_are_one_message() -> None:
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None}
    thought = {**reasoning, "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "So", "annotations": []}],
    }
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": [user["content"][0]]}
    skipped = [{"type": "web_search_call", "id": "w"}, {"type": "item_reference", "id": "rs_2"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        user,
        reasoning,
        thought,
        said,
        call,
        *skipped,
        result,
    ]
    function = {"name": "f", "arguments": "{}"}
    assert chat_of(input=items, instructions="Help.") == [
        {"role": "system", "content": "Help.\n\nBe brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Hi"},
    ]


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_images_in_results_become_a_line_of_text(kind) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aa"}
    parts = [{"type": "input_text", "text": "Seen: "}, image, {"type": "input_file", "file_id": 1}]
    [message] = chat_of(input=[{"type": kind, "call_id": "c", "output": parts}])
    assert message["content"] == (
        "Seen: [input_image omitted: this model reads only text]"
        "[input_file omitted: this model reads only text]"
    )


@pytest.mark.peers
def test_openai_client_knows_the_events_of_custom_tools(openai_client) -> None:
    tool = {"type": "custom", "name": "patch", "description": "Change files."}
    options = {**ASK, "tools": [tool], "tool_choice": {"type": "custom", "name": "patch"}}
    events = list(openai_client.responses.create(**options, extra_body=QUIET, stream=True))
    for event in events:
        pydantic.TypeAdapter(type(event)).validate_python(event.model_dump())
    [call] = events[-1].response.output
    done = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert call.type == "custom_tool_call" and [each.input for each in done] == [call.input]


def test_tools_of_other_types_are_skipped(client) -> None:
    """Codex sends them, and ends its session if they are refused."""
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    answer = client.responses.create(
        **ASK, tools=tools, tool_choice="auto", max_output_tokens=1, extra_body=QUIET
    )
    assert answer.tools == []


NAMESPACE = {
    "type": "namespace",
    "name": "mcp__sky__",
    "description": "The sky.",
    "tools": [FUNCTIONS[0], {"type": "custom", "name": "draw"}],
}


@pytest.mark.peers
@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_of_functions_in_a_namespace_have_it_apart(openai_client, is_stream) -> None:
    """The client knows the function by its own name, the chat by a joined name."""
    options = {
        **ASK,
        "tools": [NAMESPACE, FUNCTIONS[1]],
        "tool_choice": {"type": "function", "name": "weather"},
        "extra_body": QUIET,
    }
    if is_stream:
        with openai_client.responses.stream(**options) as stream:
            names = [e.name for e in stream if e.type == "response.function_call_arguments.done"]
            answer = stream.get_final_response()
        assert names == ["weather"]
    else:
        answer = openai_client.responses.create(**options)
    [call] = answer.output
    assert (call.name, call.namespace) == ("weather", "mcp__sky__")
    assert set(json.loads(call.arguments)) == {"city", "days"}
    assert [tool.type for tool in answer.tools] == ["namespace", "function"]
    function = chat_of(input=[call.model_dump()])[0]["tool_calls"][0]["function"]
    assert function["name"] == "mcp__sky__weather"


def test_names_in_a_chat_are_short_and_unique() -> None:
    body = ResponsesBody.model_validate({"input": "x", "tools": [NAMESPACE, *FUNCTIONS]})
    functions = [tool.function for tool in chat_body(body, None).tools]
    names = ["mcp__sky__weather", "mcp__sky__draw", "weather", "now"]
    assert [each.name for each in functions] == names
    assert functions[0].description == "The sky.\nThe weather of the next days."
    joined = {ToolNames.join("space \N{SNOWMAN}" * 9, f"{'f' * 50}{i}") for i in range(9)}
    assert len(joined) == 9 and set(map(len, joined)) == {64}
    for name in joined:
        bodies.FunctionParam(name=name)


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (
            [{"type": "namespace", "name": "mcp__sky__"}],
            ["mcp__sky__weather", "mcp__sky__draw"],
        ),
        ([{"type": "custom", "name": "draw"}], ["mcp__sky__draw"]),
        (
            [{"type": "function", "name": "weather", "namespace": "mcp__sky__"}],
            ["mcp__sky__weather"],
        ),
        ([{"type": "function", "name": "now"}, {"type": "mcp", "server_label": "x"}], ["now"]),
        ([{"type": "function", "name": "weather"}], ["mcp__sky__weather"]),
    ],
)
def test_allowed_tools_select_functions(allowed, names) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    tools = [NAMESPACE, FUNCTIONS[1]]
    body = ResponsesBody.model_validate({"input": "x", "tools": tools, "tool_choice": choice})
    chat = chat_body(body, None)
    shown = [tool.function.name for tool in chat.tools or ()]
    assert shown == ["mcp__sky__weather", "mcp__sky__draw", "now"]
    assert isinstance(chat.tool_choice, bodies.AllowedToolChoice)
    found = chat.tool_choice.allowed_tools.tools
    assert [each.function.name for each in found] == names


def test_allowed_tools_name_the_namespace() -> None:
    wrong = {"type": "function", "name": "weather", "namespace": "other"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [wrong]}
    body = {"input": "x", "tools": [NAMESPACE, FUNCTIONS[1]], "tool_choice": choice}
    with pytest.raises(ApiError, match="must name tools of the request, got 'weather'"):
        chat_body(ResponsesBody.model_validate(body), None)


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "are not stored here"),
        ({"background": True}, "background", "are not stored here"),
        ({"surprise": 1}, "surprise", "surprise is not supported here"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "store: false"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "must be text, got input_image",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "any"}, "tool_choice", 'must be "none", "auto", "required"'),
        ({"input": "word " * 2000}, "input", "This model's maximum context length"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "must have a schema"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "text.format",
            "must be null or text if structured_outputs is given",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "text.format",
            "Invalid type: no",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},  # the form of chats
            "tools.0.name",
            "must be a text",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input", "at least one message"),
        ({"input": [{"content": "x", "type": "message"}]}, "input.0.role", "must be a text"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input.0.content.0", "an object"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]},
            "input.0.content.0.text",
            "must be a text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
            "input.0.name",
            "must be a text",
        ),
    ],
)
def test_invalid_bodies_are_rejected(server, change, param, message) -> None:
    error = error_of(server.post("/v1/responses", {"input": "x", **change}), 400)
    assert message in error["message"] and error["param"] == param
    assert "reasoning" not in error["message"], "no rule of the grammar around a schema"


@pytest.mark.parametrize("is_stream", [False, True])
def test_explanations_are_part_of_the_response(client, is_stream) -> None:
    options = {**ASK, "max_output_tokens": 2, "extra_body": {**QUIET, "explain": True}}
    if is_stream:
        answer = [*client.responses.create(**options, stream=True)][-1].response
    else:
        answer = client.responses.create(**options)
    assert answer.explanations[0]["prefix_match"]
