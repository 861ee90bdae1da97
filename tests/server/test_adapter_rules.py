"""Rules of the APIs for given outputs of the engine: token counts, hidden reasoning, ends, space.

The rules come from the documentation of OpenAI's and Anthropic's APIs, and from the parsers of
their clients, which `test_clients_read_the_streams` runs. No model runs.
"""

import dataclasses
import itertools
import json
from typing import Any

import pytest

from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.scheduler.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paged_jax.server.answer_blocks import BlockTracker
from paged_jax.server.bodies import CompletionBody, GenerateBody
from paged_jax.server.completion_codec import (
    CompletionWriter,
    GenerateWriter,
    read_completion,
    read_generate,
)
from paged_jax.server.writer import Writer
from tests.server.test_all_formats import (
    APIS,
    CALLS,
    answer_of,
    events_of,
    service_of,
    whole_of,
    written_calls,
)

FAMILY = "qwen 2.5"
PROMPT = [7, 8, 9, 10, 11]
THOUGHTS = "ЖЖ secret ЖЖ"  # letters that occur nowhere else
NOW = "<tool_call>\n" + '{"name": "now", "arguments": {}}' + "\n</tool_call>"
NOTE = written_calls(FAMILY, CALLS[:1])
TEXT_APIS: dict[str, tuple[Any, Any, Any]] = {
    "completions": (CompletionBody, read_completion, CompletionWriter),
    "generate": (GenerateBody, read_generate, GenerateWriter),
}


def make(api: str, family: str = FAMILY, **fields: Any) -> Writer:
    """Return a new writer of any API, for a request with the two tools if the API has tools."""
    if api not in TEXT_APIS:
        return answer_of(family, api, **({"logprobs": None} if api == "chat" else {}), **fields)
    body_type, read, make_writer = TEXT_APIS[api]
    if api == "completions":
        fields = {"stream_options": {"include_usage": True}, **fields}
    body, service = body_type.model_validate({"prompt": "Well?", **fields}), service_of(family)
    return make_writer(service, body, read(service, body), "1")


def outputs_of(
    *texts: str, end: str = "stop", stop_reason: str | None = None, num_cached: int = 0
) -> list[RequestOutput]:
    """Return the engine's outputs after each piece of a text. Each piece counts as a token."""
    outputs = []
    for count, text in enumerate(itertools.accumulate(texts), 1):
        reasons = (end, stop_reason) if count == len(texts) else (None, None)
        sample = CompletionOutput(0, text, [5] * count, 0.0, None, *reasons)
        times = RequestMetrics(0.0)
        outputs.append(
            RequestOutput("r", None, PROMPT, [sample], count == len(texts), times, num_cached)
        )
    return outputs


def both(api: str, *texts: str, fields: dict[str, Any] | None = None, **options: Any) -> tuple:
    """Return the whole answer, and the events of the same answer as a stream."""
    outputs = outputs_of(*texts, **options)
    whole = whole_of(make(api, **(fields or {})), outputs)
    return whole, events_of(make(api, **(fields or {})), outputs)


# Token counts


def openai_counts(usage: dict[str, Any], prompt: str, completion: str) -> tuple[int, int, int]:
    """Return the numbers of prompt, cached and completion tokens. The first includes the second."""
    assert usage["total_tokens"] == usage[f"{prompt}_tokens"] + usage[f"{completion}_tokens"]
    cached = usage[f"{prompt}_tokens_details"]["cached_tokens"]
    return usage[f"{prompt}_tokens"], cached, usage[f"{completion}_tokens"]


@pytest.mark.parametrize("num_cached", [0, 3, 5])
@pytest.mark.parametrize("api", ["completions", "generate", "chat", "responses"])
def test_prompt_tokens_include_cached_tokens_at_openai(api, num_cached) -> None:
    whole, events = both(api, "It", " is", num_cached=num_cached)
    if api == "responses":
        assert [event["response"]["usage"] for event in events[:2]] == [None, None]
        usages = whole["usage"], events[-1]["response"]["usage"]
        names = "input", "output"
    else:
        usages, names = (whole["usage"], events[-1]["usage"]), ("prompt", "completion")
    for usage in usages:
        assert openai_counts(usage, *names) == (5, num_cached, 2)


@pytest.mark.parametrize("num_cached", [0, 3, 5])
def test_input_tokens_exclude_cached_tokens_at_anthropic(num_cached) -> None:
    """The first event already has the counts of the prompt; the last has the final counts."""
    whole, events = both("messages", "It", " is", num_cached=num_cached)
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    for usage, num_new in ((whole["usage"], 2), (start, 0), (end, 2)):
        assert usage["input_tokens"] == 5 - num_cached
        assert usage["cache_read_input_tokens"] == num_cached
        assert usage["cache_creation_input_tokens"] == 0 and usage["output_tokens"] == num_new


# Hidden reasoning

HIDING = {
    "chat": {"include_reasoning": False},
    "messages": {"thinking": {"type": "enabled", "display": "omitted", "budget_tokens": 1024}},
}


@pytest.mark.parametrize("end", ["stop", "length"])
@pytest.mark.parametrize("api", HIDING)
def test_hidden_reasoning_is_in_no_event(api, end) -> None:
    """Wherever the stream is cut, also within the marks, and also if it ends early."""
    text = f"<think>\n{THOUGHTS}\n</think>\n\nIt is {NOW}"
    text = text if end == "stop" else text[: text.index("</think>") - 2]
    read, join = APIS[api]
    shown = read(whole_of(make(api), outputs_of(text, end=end)))
    assert "Ж" in shown.reasoning and "</think>" not in shown.reasoning
    cuts = [tuple(text), *((text[:cut], text[cut:]) for cut in range(1, len(text)))]
    for pieces in cuts:
        whole, events = both(api, *pieces, end=end, fields=HIDING[api])
        assert "Ж" not in json.dumps([whole, events], ensure_ascii=False), pieces
        for answer in (whole, join(events)):
            found = read(answer)
            assert (found.content, found.calls, found.end) == (
                shown.content,
                shown.calls,
                shown.end,
            )
            # Hidden tokens are counted.
            assert found.num_tokens[:2] == (5, len(pieces)) and found.reasoning == ""


def test_summary_of_the_reasoning_is_only_for_those_who_ask() -> None:
    """OpenAI: `summary` is [] unless `reasoning.summary` is set."""
    text = f"<think>{THOUGHTS}</think>Yes"
    for asked in (None, {"effort": "low"}, {"summary": "auto"}, {"generate_summary": "detailed"}):
        whole, events = both("responses", *text, fields={"reasoning": asked})
        is_wanted = asked is not None and "effort" not in asked
        assert bool(whole["output"][0]["summary"]) is is_wanted
        assert any("summary" in event["type"] for event in events) is is_wanted


# Ends

THOUGHT = f"<think>\n{THOUGHTS}"
# Beginnings of an answer, and the types of the items in a response. The last item is cut short.
CUTS = {
    "text": (("It is", " 5"), ["message"]),
    "reasoning": ((THOUGHT,), ["reasoning"]),
    "text after reasoning": ((f"{THOUGHT}\n</think>\n\nIt",), ["reasoning", "message"]),
    "name": (("It ", '<tool_call>\n{"name": "now", "arguments": '), ["message", "function_call"]),
    "arguments": ((NOTE[:-40],), ["function_call"]),
    "second call": ((f"{NOW}\n{NOTE[:-40]}",), ["function_call", "function_call"]),
}


@pytest.mark.parametrize("kind", CUTS)
def test_response_that_is_cut_short_has_an_incomplete_last_item(kind) -> None:
    """In the response, in the events of its items, and with the reason."""
    texts, types = CUTS[kind]
    whole, events = both("responses", *texts, end="length")
    statuses = ["completed"] * (len(types) - 1) + ["incomplete"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, events[-1]["response"]):
        assert response["status"] == "incomplete" and response["error"] is None
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["type"] for item in response["output"]] == types
        assert [item["status"] for item in response["output"]] == statuses
    assert done == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * len(types)


@pytest.mark.parametrize("text", ["It is 5", f"{THOUGHT}</think>It", NOW, f"{NOW}\n{NOTE}"])
def test_response_that_is_complete_has_complete_items(text) -> None:
    whole, events = both("responses", *text)
    assert events[-1]["type"] == "response.completed"
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("completed", None)
        assert {item["status"] for item in response["output"]} == {"completed"}


@pytest.mark.parametrize("kind", CUTS)
def test_answers_that_are_cut_short_say_so(kind) -> None:
    """Even if they have calls, which the client must not execute."""
    texts, _ = CUTS[kind]
    whole, events = both("chat", *texts, end="length")
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert whole["choices"][0]["finish_reason"] == reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    whole, events = both("messages", *texts, end="length")
    for end in (whole, events[-2]["delta"]):
        assert (end["stop_reason"], end["stop_sequence"]) == ("max_tokens", None)
    whole, events = both("completions", *texts, end="length")
    assert whole["choices"][0]["finish_reason"] == "length"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_stop_string_is_told() -> None:
    """Anthropic: `stop_sequence` has the text. A call comes before it: clients execute the call."""
    for api, place in (("chat", "choices"), ("completions", "choices")):
        whole, events = both(api, "It is", end="stop", stop_reason="5")
        [choice] = whole[place]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "5")
        last = [event for event in events if event["choices"]][-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "5")
    for text, reason in (("It is", ("stop_sequence", "5")), (NOW, ("tool_use", None))):
        whole, events = both("messages", text, stop_reason="5")
        for end in (whole, events[-2]["delta"]):
            assert (end["stop_reason"], end["stop_sequence"]) == reason
    whole, _ = both("responses", "It is", stop_reason="5")
    assert whole["status"] == "completed"


def test_choice_of_a_named_function_ends_with_stop() -> None:
    """OpenAI: the reason is "tool_calls" only if the model chose to call."""
    named = {"type": "function", "function": {"name": "now"}}
    for choice, reason in ((None, "tool_calls"), ("required", "tool_calls"), (named, "stop")):
        whole, events = both("chat", NOW, fields={"tool_choice": choice})
        assert whole["choices"][0]["finish_reason"] == reason
        assert events[-2]["choices"][0]["finish_reason"] == reason


# Calls without arguments


@pytest.mark.parametrize("family", ["qwen 2.5", "qwen 3 coder", "glm 4.7", "llama 4", "gpt-oss"])
def test_call_without_arguments_has_an_empty_object(family) -> None:
    """Clients parse the arguments as JSON, and "" is not JSON."""
    text = written_calls(family, [("now", {})])
    for pieces in ((text,), tuple(text)):
        for api in ("chat", "responses", "messages"):
            outputs = outputs_of(*pieces)
            read, join = APIS[api]
            assert read(whole_of(make(api, family), outputs)).calls == (("now", "{}"),)
            assert read(join(events_of(make(api, family), outputs))).calls == (("now", "{}"),)


@pytest.mark.parametrize("is_stream", [False, True])
def test_call_that_ends_before_its_arguments(is_stream) -> None:
    """Responses and messages have {}. The sum of the deltas is what the last event has."""
    texts = CUTS["name"][0]
    whole, events = both("responses", *texts, end="length")
    [_, call] = (events[-1]["response"] if is_stream else whole)["output"]
    assert (call["name"], call["arguments"]) == ("now", "{}")
    if is_stream:
        found = [event for event in events if "function_call_arguments" in event["type"]]
        assert [event.get("delta") or event["arguments"] for event in found] == ["{}", "{}"]
    whole, events = both("messages", *texts, end="length")
    if is_stream:
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert starts[1]["input"] == {}
        assert not any("partial_json" in e.get("delta", {}) for e in events)
    else:
        assert (whole["content"][1]["name"], whole["content"][1]["input"]) == ("now", {})


# White space

SPACES = [
    # Text, reasoning and content; and whether a call follows.
    ("\n <think>\n\n Hm. \n\n</think>\n\n \nYes \n", "Hm.", "Yes \n", False),
    ("<think>\n \n</think>\n\nYes", "", "Yes", False),
    ("  \n Yes", "", "  \n Yes", False),
    (f"<think> a\n b </think>\n\n{NOW}\n", "a\n b", "", True),
    (f"\n\n{NOW}\n \n", "", "", True),
    (f"Yes\n{NOW}\n", "", "Yes\n", True),
    (f" \nYes{NOW}", "", " \nYes", True),
    (f"<think>Hm</think>\n Yes {NOW}", "Hm", "Yes ", True),
]


@pytest.mark.parametrize("api", ["responses", "messages", "chat"])
@pytest.mark.parametrize(("text", "reasoning", "content", "has_call"), SPACES)
def test_space_around_parts_is_dropped_and_other_space_kept(
    api, text, reasoning, content, has_call
) -> None:
    """White space alone is no item and no block; in chats it is text only if it is not the end."""
    read, join = APIS[api]
    cuts = [(text,), tuple(text), *((text[:cut], text[cut:]) for cut in range(1, len(text), 4))]
    for pieces in cuts:
        outputs = outputs_of(*pieces)
        whole = whole_of(make(api), outputs)
        for body in (whole, join(events_of(make(api), outputs))):
            found = read(body)
            assert found.reasoning == reasoning
            assert (found.content if content else found.content.strip()) == content
            assert found.calls == ((("now", "{}"),) if has_call else ())
        count = bool(reasoning) + bool(content) + has_call
        if api != "chat":
            assert len(whole["output" if api == "responses" else "content"]) == count


def test_blocks_are_opened_extended_and_closed_in_turn() -> None:
    """Each block is closed before the next is opened, and white space never opens a block."""
    parts = [
        ("content", "\n"), ("content", " a"), ("content", " "), ("reasoning", " "),
        ("reasoning", "b"), ("call", "f"), ("call", "g"), ("arguments", "{}"), ("content", "\n"),
        ("content", "c"), ("content", "\n"),
    ]  # fmt: skip
    tracker = BlockTracker()
    changes = [
        (change.action, change.block.index, change.text)
        for kind, text in parts
        for change in tracker.push([AnswerDelta(kind, text)])
    ]
    changes += [
        (each.action, each.block.index, each.text) for each in tracker.push([], is_last=True)
    ]
    assert changes == [
        ("open", 0, ""), ("extend", 0, "\n a"), ("extend", 0, " "), ("close", 0, ""),
        ("open", 1, ""), ("extend", 1, " b"), ("close", 1, ""), ("open", 2, ""), ("close", 2, ""),
        ("open", 3, ""), ("extend", 3, "{}"), ("close", 3, ""), ("open", 4, ""),
        ("extend", 4, "\nc"), ("extend", 4, "\n"), ("close", 4, ""),
    ]  # fmt: skip
    assert [(each.kind, each.name, each.text) for each in tracker.blocks] == [
        ("content", "", "\n a "), ("reasoning", "", " b"), ("call", "f", ""), ("call", "g", "{}"),
        ("content", "", "\nc\n"),
    ]  # fmt: skip


# The clients' own parsers


def read_by_openai_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event, strict=True))
    return state.current_completion_snapshot.model_dump()


def read_by_openai_responses(events: list[dict[str, Any]]) -> dict[str, Any]:
    from openai import NOT_GIVEN
    from openai._models import construct_type
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import ResponseStreamEvent

    state = ResponseStreamState(input_tools=NOT_GIVEN, text_format=NOT_GIVEN)
    parsed = [construct_type(value=event, type_=ResponseStreamEvent) for event in events]
    for event in parsed[:-1]:
        state.handle_event(event)
    output = [each.to_dict(warnings=False) for each in state.accumulate_event(parsed[-1]).output]
    # The client does not collect the reasoning.
    output = [
        last if last["type"] == "reasoning" else {**item, "status": last["status"]}
        for item, last in zip(output, events[-1]["response"]["output"], strict=True)
    ]
    return {**events[-1]["response"], "output": output}


def read_by_anthropic(events: list[dict[str, Any]]) -> dict[str, Any]:
    from anthropic._models import construct_type
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import RawMessageStreamEvent

    message, buffers = None, {}
    for event in events:
        if event["type"] != "ping":
            parsed = construct_type(value=event, type_=RawMessageStreamEvent)
            message = accumulate_event(event=parsed, current_snapshot=message, json_bufs=buffers)
    return message.model_dump()


CLIENTS = {
    "chat": read_by_openai_chat,
    "responses": read_by_openai_responses,
    "messages": read_by_anthropic,
}
ANSWERS = [(text, "stop") for text, *_ in SPACES] + [(NOW, "stop"), (f"{NOW}\n{NOTE}", "stop")]
ANSWERS += [("".join(texts), "length") for texts, _ in CUTS.values()]


@pytest.mark.peers
@pytest.mark.parametrize("api", CLIENTS)
@pytest.mark.parametrize(("text", "end"), ANSWERS)
def test_clients_read_the_streams(api, text, end) -> None:
    """The parsers of the clients find in a stream what the whole answer has."""
    read, _ = APIS[api]
    for pieces in ((text,), tuple(text)):
        whole, events = both(api, *pieces, end=end)
        want, found = read(whole), read(CLIENTS[api](events))
        if api == "messages" and end == "length":
            # The client completes the JSON of arguments that are cut short.
            names = [tuple((name, "") for name, _ in each.calls) for each in (want, found)]
            assert names[0] == names[1]
            found = dataclasses.replace(found, calls=want.calls)
        assert dataclasses.replace(found, num_tokens=want.num_tokens) == want
        assert found.num_tokens[:2] == want.num_tokens[:2]
