"""Answers in every format of calls, through all three APIs, whole and as streams.

No model runs: the tokens of each answer are given, in the form that a chat template writes. So the
tests cover constraint, parser and writers of all formats, and cost no compilation.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from paged_jax import Tokenizer
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.detokenizer import Detokenizer
from paged_jax.models.text.grammar import GrammarCompiler
from paged_jax.models.text.reasoning import HARMONY, HARMONY_MARKS, THINK
from paged_jax.models.text.tool_grammars import ToolGrammars
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paged_jax.server import anthropic_codec, chat_codec, response_codec
from paged_jax.server.anthropic_bodies import MessagesBody
from paged_jax.server.api_error import ApiError
from paged_jax.server.bodies import ChatBody
from paged_jax.server.json_encoding import json_response
from paged_jax.server.response_bodies import ResponsesBody
from paged_jax.server.sample_deltas import DeltaTracker
from paged_jax.server.writer import Writer
from tests.models.test_reasoning import HARMONY_TEMPLATE
from tests.models.test_tools import KNOWN
from tests.support.tiny_model import EOS

TEMPLATES = {name: source for name, (source, _) in KNOWN.items()} | {"gpt-oss": HARMONY_TEMPLATE}
SHORT_IDS = "mistral v3 with short ids"
_CHECK = "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('length') }}{% endif %}"
TEMPLATES[SHORT_IDS] = TEMPLATES["mistral v3"].replace("[TOOL_CALLS]", f"{_CHECK}[TOOL_CALLS]")
# Marks that are special tokens in the vocabularies of their models.
SPECIAL = [
    *HARMONY_MARKS, "<|call|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|START_ACTION|>",
    "<|END_ACTION|>", "<|tool_call|>", "<|/tool_call|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|python_start|>", "<|python_end|>",
]  # fmt: skip
NOTE = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
PARAMETERS = {"type": "object", "properties": NOTE, "required": list(NOTE)}
FUNCTIONS = [{"name": "note", "parameters": PARAMETERS}, {"name": "now"}]
TEXT = 'São "Paulo"\n{x: [1]} </b> & \N{SNOWMAN} ' + "and so on, " * 4
CALLS = [("note", {"text": TEXT, "count": 3, "tags": ["a", "é"]}), ("now", {})]
CONTENT, THOUGHTS = "It is 5 \N{SNOWMAN}, so: ", "Hm, <b> or {x}? \N{SNOWMAN}"


@dataclasses.dataclass(frozen=True)
class Answered:
    """An answer, independent of the API that carried it."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    end: str
    num_tokens: tuple[int, int, int]
    logprobs: str | None = None

    @property
    def without_logprobs(self) -> "Answered":
        return dataclasses.replace(self, logprobs=None)


@functools.cache
def backend() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    found.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in SPECIAL])
    return found


@functools.cache
def service_of(family: str) -> Any:
    """Return a service without an engine, with the template of a family."""
    tokenizer = Tokenizer(backend(), eos_token_ids=[EOS], chat_template=TEMPLATES[family])
    grammars = GrammarCompiler(backend(), tokenizer.vocab_size, [EOS])
    return SimpleNamespace(
        tokenizer=tokenizer,
        reasoning_format=HARMONY if family == "gpt-oss" else THINK,
        grammars=grammars,
        tool_grammars=ToolGrammars(grammars),
        settings=SimpleNamespace(model_name="m"),
    )


# Answers


def written_calls(family: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as the template of a family writes them, without the end of the message."""
    tokenizer = service_of(family).tokenizer
    told_calls = [
        {"id": "abcdefgh1", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    question = {"role": "user", "content": "Well?"}
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    prompt = tokenizer.render_chat([question], tools=tools)
    told = [question, {"role": "assistant", "content": "", "tool_calls": told_calls}]
    text = tokenizer.render_chat(told, tools=tools, add_generation_prompt=False)
    text = text.removeprefix(prompt)
    return re.sub(r"(<\|(end|eom|call)\|>|<think>\s*</think>)\s*", "", text).strip("\n")


def scripts(family: str) -> Iterator[tuple[str, str, Answered]]:
    """Yield a name, the text of an answer, and its parts, for several answers."""
    format = service_of(family).tokenizer.tool_format
    assert format is not None
    is_harmony = family == "gpt-oss"
    calls = tuple((name, json.dumps(value, ensure_ascii=False)) for name, value in CALLS)
    thoughts, content = f"<think>\n{THOUGHTS}\n</think>\n\n", CONTENT
    if is_harmony:
        thoughts = f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant"
        content = f"<|channel|>final<|message|>{CONTENT}"
    one = written_calls(family, CALLS[:1])
    empty = Answered("", "", (), "stop", (0, 0, 0))
    yield "text", content, dataclasses.replace(empty, content=CONTENT)
    called = dataclasses.replace(empty, calls=calls[:1], end="calls")
    yield "call", one, called
    thought = dataclasses.replace(called, reasoning=THOUGHTS)
    yield "reasoning and call", thoughts + one, thought
    yield (
        "reasoning and text",
        thoughts + content,
        dataclasses.replace(empty, reasoning=THOUGHTS, content=CONTENT),
    )
    if format.between is not None:
        two = dataclasses.replace(called, calls=calls)
        yield "two calls", written_calls(family, CALLS), two
    if format.mark:
        yield "text and call", CONTENT + one, dataclasses.replace(called, content=CONTENT)


def outputs_of(family: str, text: str, params: dict[str, Any], step: int) -> list[RequestOutput]:
    """Return the outputs of the engine for a given text: one after each `step` tokens."""
    tokenizer: Tokenizer = service_of(family).tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    stream = Detokenizer(
        tokenizer,
        skip_special_tokens=params.get("skip_special_tokens", True),
        continues_text=True,
    )
    shown, outputs = "", []
    for count, token_id in enumerate(token_ids, 1):
        shown += stream.push(token_id)
        is_last = count == len(token_ids)
        if is_last:
            shown += stream.finish()
        if count % step and not is_last:
            continue
        spelled = [{each: Logprob(-1.0, 1, "")} for each in token_ids[:count]]
        sample = CompletionOutput(
            0, shown, token_ids[:count], 0.0, spelled, "stop" if is_last else None
        )
        outputs.append(RequestOutput("r", None, [2, 3], [sample], is_last, RequestMetrics(0.0)))
    return outputs


# APIs


def read_chat(body: dict[str, Any]) -> Answered:
    [choice] = body["choices"]
    message, usage = choice["message"], body["usage"]
    ends = {"tool_calls": "calls", "stop": "stop", "length": "length"}
    calls = message.get("tool_calls") or ()
    tokens = (choice["logprobs"] or {"content": []})["content"]
    return Answered(
        message["content"] or "",
        message.get("reasoning") or "",
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls),
        ends[choice["finish_reason"]],
        (
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["completion_tokens_details"]["reasoning_tokens"],
        ),
        spelled_by(tokens),
    )


def spelled_by(tokens: list[dict[str, Any]]) -> str:
    return b"".join(bytes(token["bytes"]) for token in tokens).decode()


def join_chat(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole answer that the deltas of a stream add up to."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    tokens, reason = [], None
    for event in events:
        for choice in event["choices"]:
            delta, reason = choice["delta"], choice.get("finish_reason")
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    assert re.fullmatch("call_[0-9a-f]{24}|[0-9a-f]{9}", call["id"])
                    message["tool_calls"].append({"function": dict(call["function"])})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
            tokens += (choice.get("logprobs") or {"content": []})["content"]
    choice = {"message": message, "finish_reason": reason, "logprobs": {"content": tokens}}
    return {"choices": [choice], "usage": events[-1]["usage"]}


def read_response(body: dict[str, Any]) -> Answered:
    texts = {"reasoning": "", "message": ""}
    calls, tokens = [], []
    for item in body["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
            continue
        [part] = item["content"]
        texts[item["type"]] += part["text"]
        tokens += part.get("logprobs", [])
    usage, is_whole = body["usage"], body["status"] == "completed"
    return Answered(
        texts["message"],
        texts["reasoning"],
        tuple(calls),
        ("calls" if calls else "stop") if is_whole else "length",
        (
            usage["input_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
        ),
        spelled_by(tokens),
    )


def join_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that the deltas add up to, which must equal the last event's."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not event["item"].get("content") and not event["item"].get("arguments")
            items.append(event["item"])
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind in ("reasoning_text.delta", "output_text.delta"):
            item = items[event["output_index"]]
            part = (item["content"] or [{"text": "", "logprobs": []}])[0]
            part["text"] += event["delta"]
            part["logprobs"] += event.get("logprobs", [])
            item["content"] = [part]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[event["output_index"]]["id"]
    last = events[-1]["response"]
    joined = {**last, "output": items}
    assert read_response(joined) == read_response(last)
    return joined


def read_message(body: dict[str, Any]) -> Answered:
    texts = {"thinking": "", "text": ""}
    calls = []
    for block in body["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"], ensure_ascii=False)))
        else:
            texts[block["type"]] += block[block["type"]]
    usage = body["usage"]
    ends = {"tool_use": "calls", "end_turn": "stop", "max_tokens": "length"}
    return Answered(
        texts["text"],
        texts["thinking"],
        tuple(calls),
        ends[body["stop_reason"]],
        (
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["thinking_tokens"],
        ),
    )


def join_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the deltas of a stream add up to."""
    start, *_, end, stop = events
    message, blocks = start["message"], []
    assert stop == {"type": "message_stop"} and message["content"] == []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for key in ("text", "thinking"):
                if key in delta:
                    block[key] += delta[key]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        if block["type"] == "tool_use":
            with contextlib.suppress(ValueError):  # the answer was cut short
                block["input"] = json.loads(block["json"] or "{}")
    return {**message, "content": blocks, **end["delta"], "usage": end["usage"]}


def body_of(api: str, **fields: Any) -> Any:
    if api == "chat":
        tools = [{"type": "function", "function": function} for function in FUNCTIONS]
        usage = {"include_usage": True}
        asked = {"messages": [{"role": "user", "content": "Well?"}], "tools": tools}
        return ChatBody.model_validate(
            {**asked, "logprobs": True, "stream_options": usage, **fields}
        )
    if api == "responses":
        tools = [{"type": "function", **function} for function in FUNCTIONS]
        include = ["message.output_text.logprobs"]
        asked = {"input": "Well?", "tools": tools, "include": include}
        return ResponsesBody.model_validate({**asked, **fields})
    tools = [
        {"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})}
        for each in FUNCTIONS
    ]
    asked = {"messages": [{"role": "user", "content": "Well?"}], "max_tokens": 900}
    return MessagesBody.model_validate({**asked, "tools": tools, **fields})


CODECS: dict[str, tuple[Any, Any]] = {
    "chat": (chat_codec.read_chat, chat_codec.ChatWriter),
    "responses": (response_codec.read_response, response_codec.ResponsesWriter),
    "messages": (anthropic_codec.read_message, anthropic_codec.MessagesWriter),
}
# Functions that read a whole answer, and join the events of a stream to a whole answer.
APIS: dict[str, tuple[Any, Any]] = {
    "chat": (read_chat, join_chat),
    "responses": (read_response, join_response),
    "messages": (read_message, join_message),
}


def answer_of(family: str, api: str, **fields: Any) -> Writer:
    """Return a writer, whose attribute `request` is what was read from the body."""
    (read, make_writer), service, body = CODECS[api], service_of(family), body_of(api, **fields)
    return make_writer(service, body, read(service, body), "1")


def events_of(answer: Writer, outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    """Return the events of a stream, decoded from their bytes."""
    tracker = DeltaTracker()
    data = b"".join(map(answer.encode, answer.opening()))
    for output in outputs:
        data += answer.events(0, output, tracker.deltas(0, output))
    data += b"".join(map(answer.encode, answer.closing(outputs[-1:])))
    frames = [frame.splitlines() for frame in data.decode().split("\n\n") if frame]
    events = [json.loads(lines[-1].removeprefix("data: ")) for lines in frames]
    for event, lines in zip(events, frames, strict=True):
        assert len(lines) == 1 or lines[0] == f"event: {event['type']}"
    return events


def cut(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return outputs that end at `max_tokens`."""
    *rest, last = outputs
    sample = dataclasses.replace(last.outputs[0], finish_reason="length")
    return [*rest, dataclasses.replace(last, outputs=[sample], finished=True)]


def whole_of(answer: Writer, outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return a whole answer, decoded from its bytes."""
    return json.loads(json_response(answer.response_body(outputs[-1:])).body)


def answered(family: str, api: str, outputs: list[RequestOutput]) -> Answered:
    """Return a whole answer, after a comparison with the same answer as a stream."""
    read, join = APIS[api]
    answer = answer_of(family, api)
    answer.request.params()
    answer.request.prompts()
    whole = read(whole_of(answer, outputs))
    stream = answer_of(family, api)
    stream.request.params()
    stream.request.prompts()
    assert read(join(events_of(stream, outputs))) == whole
    return whole


@pytest.mark.parametrize("family", TEMPLATES)
def test_streams_and_whole_answers_are_the_same_in_all_apis(family) -> None:
    for (name, text, want), step in zip(scripts(family), itertools.cycle([1, 3, 8])):
        params = answer_of(family, "chat").request.params()
        outputs = outputs_of(family, text, params, step)
        for api in APIS:
            found = answered(family, api, outputs)
            num_tokens = 2, len(outputs[-1].outputs[0].token_ids)
            assert found.num_tokens[:2] == num_tokens, (name, api)
            assert (found.num_tokens[2] > 0) == bool(want.reasoning)
            assert found.num_tokens[2] < num_tokens[1]
            want = dataclasses.replace(want, num_tokens=found.num_tokens)
            assert found.without_logprobs == want, (name, api)
            if found.logprobs is not None:
                # A token may also contain the beginning of a mark.
                assert found.logprobs.startswith(want.content), (name, api)
                assert len(found.logprobs) < len(want.content) + 8, (name, api)


@pytest.mark.parametrize(("family", "length"), [(SHORT_IDS, 9), ("mistral v3", 29)])
def test_ids_of_calls_have_the_length_that_the_template_accepts(family, length) -> None:
    outputs = outputs_of(family, written_calls(family, CALLS), {"skip_special_tokens": False}, 1)
    chat, response = (answer_of(family, api) for api in ("chat", "responses"))
    for answer in (chat, response):
        answer.request.params()
    [choice] = whole_of(chat, outputs)["choices"]
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    ids += [item["call_id"] for item in whole_of(response, outputs)["output"]]
    assert len(set(ids)) == 4 and set(map(len, ids)) == {length}


@pytest.mark.parametrize("family", TEMPLATES)
def test_answers_that_are_cut_short_are_the_same_in_all_apis(family) -> None:
    for _, text, _ in scripts(family):
        outputs = outputs_of(family, text, answer_of(family, "chat").request.params(), 1)
        for end in range(1, len(outputs), 1 + len(outputs) // 6):
            chat, response, message = (answered(family, api, cut(outputs[:end])) for api in APIS)
            assert chat.end == response.end == message.end == "length"
            assert chat.num_tokens == response.num_tokens == message.num_tokens
            # Blocks leave out white space, and arguments that are not complete JSON.
            assert chat.content.strip() == response.content.strip() == message.content.strip()
            assert chat.reasoning == response.reasoning == message.reasoning
            names = [[name for name, _ in each.calls] for each in (chat, response, message)]
            assert names[0] == names[1] == names[2]
            for (_, one), (_, other) in zip(chat.calls, response.calls, strict=True):
                assert other == (one or "{}")


@pytest.mark.parametrize("family", TEMPLATES)
def test_grammar_accepts_what_the_template_writes(family) -> None:
    service = service_of(family)
    for name, text, want in scripts(family):
        token_ids = service.tokenizer.encode(text, add_special_tokens=False)
        for choice in ("auto", "required") if want.calls and not want.content else ("auto",):
            answer = answer_of(family, "chat", tool_choice=choice)
            answer.request.prompts()
            grammar = service.grammars.compile(answer.request.params()["structured_outputs"])
            assert grammar.start().validate_tokens(token_ids) == len(token_ids), (name, choice)
        wrong = text.replace("note", "node")
        if wrong != text and not want.content and not want.reasoning:
            token_ids = service.tokenizer.encode(wrong, add_special_tokens=False)
            assert grammar.start().validate_tokens(token_ids) < len(token_ids), name


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    """Return the choice between some functions, as the fields of a chat and of a response."""
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    plain = [{"type": "function", "name": name} for name in names]
    return {
        "chat": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}},
        "responses": {"type": "allowed_tools", "mode": mode, "tools": plain},
    }


@pytest.mark.parametrize("family", TEMPLATES)
def test_allowed_tools_restrict_calls_and_keep_the_prompt(family) -> None:
    service = service_of(family)
    token_ids = service.tokenizer.encode(written_calls(family, CALLS[:1]), add_special_tokens=False)
    for api, mode in itertools.product(("chat", "responses"), ("auto", "required")):
        prompt = answer_of(family, api).request.prompts()
        for names, is_allowed in ((["note", "now"], True), (["note"], True), (["now"], False)):
            answer = answer_of(family, api, tool_choice=allowing(*names, mode=mode)[api])
            assert answer.request.prompts() == prompt
            grammar = service.grammars.compile(answer.request.params()["structured_outputs"])
            num_valid = grammar.start().validate_tokens(token_ids)
            assert (num_valid == len(token_ids)) is is_allowed, (api, mode, names)
            text = service.tokenizer.encode("No.", add_special_tokens=False)
            if family != "gpt-oss":
                is_text = grammar.start().validate_tokens(text) == len(text)
                assert is_text is (mode == "auto")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_allowed_tools_must_be_in_the_tools(api) -> None:
    answer = answer_of("qwen 2.5", api, tool_choice=allowing("now")[api])
    assert answer.request.params()
    with pytest.raises(ApiError, match="must name tools of the request, got 'later'"):
        answer_of("qwen 2.5", api, tool_choice=allowing("now", "later")[api]).request.params()


def test_allowed_tools_of_other_types_are_skipped() -> None:
    """Hosted tools do not exist here. Without functions, nothing can be called."""
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    answer = answer_of("qwen 2.5", "responses", tool_choice=choice)
    assert "structured_outputs" not in answer.request.params()
    with pytest.raises(ApiError, match="must allow at least one function"):
        answer_of("qwen 2.5", "responses", tool_choice={**choice, "mode": "required"})


@pytest.mark.parametrize("family", TEMPLATES)
def test_tool_choice_none_keeps_the_prompt(family) -> None:
    """The prefix of the chat stays in the cache. Text that looks like a call remains text."""
    text = written_calls(family, CALLS[1:])
    for api, choice in (("chat", "none"), ("responses", "none"), ("messages", {"type": "none"})):
        answer = answer_of(family, api, tool_choice=choice)
        assert answer.request.prompts() == answer_of(family, api).request.prompts()
        params = answer.request.params()
        assert "structured_outputs" not in params or family == "gpt-oss"
        whole = whole_of(answer, outputs_of(family, text, params, 1))
        assert not APIS[api][0](whole).calls or family == "gpt-oss"


PATCH = '*** Update "a.txt"\n-\tb\n+{"c": "é"}'
GRAMMAR = "start: /.+/"
CUSTOM = {
    "type": "custom", "name": "patch", "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen 2.5", "qwen 3 coder"])
def test_custom_tools_take_a_text(family) -> None:
    """In the chat they are functions with the argument `input`. The API has the text alone."""
    text = written_calls(family, [("patch", {"input": PATCH})])
    namespace = {"type": "namespace", "name": "files", "tools": [CUSTOM]}
    for tools, name in (([CUSTOM], "patch"), ([namespace], "files__patch")):
        answer = answer_of(family, "responses", tools=tools)
        [shown] = answer.chat.body.tools
        assert shown.function.name == name and GRAMMAR in shown.function.description
        outputs = outputs_of(family, text.replace("patch", name), answer.request.params(), 1)
        *_, call = whole_of(answer, outputs)["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", PATCH)
        assert call.get("namespace") == ("files" if name != "patch" else None)
        events = events_of(answer_of(family, "responses", tools=tools), outputs)
        kinds = [event["type"].removeprefix("response.") for event in events[-5:]]
        prefix = "custom_tool_call_input"
        assert kinds == [
            "output_item.added", f"{prefix}.delta", f"{prefix}.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        added, delta, done, item, _ = events[-5:]
        assert added["item"]["input"] == "" and delta["delta"] == done["input"] == PATCH
        assert {added["item"]["id"], delta["item_id"], done["item_id"]} == {item["item"]["id"]}
        assert item["item"]["input"] == PATCH and item["item"]["id"].startswith("ctc_")
        # The client sends the call and its result.
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
        told = answer_of(family, "responses", tools=tools, input=[call, result]).chat.body.messages
        function = told[0].tool_calls[0].function
        assert (function.name, function.arguments) == (name, {"input": PATCH})
        assert (told[0].tool_calls[0].id, told[1].tool_call_id) == (call["call_id"],) * 2
        assert told[1].content == "Done."


def test_custom_tool_that_was_cut_short_is_incomplete() -> None:
    answer = answer_of("qwen 2.5", "responses", tools=[CUSTOM], tool_choice=CUSTOM)
    text = written_calls("qwen 2.5", [("patch", {"input": PATCH})])
    outputs = outputs_of("qwen 2.5", text, answer.request.params(), 1)
    response = whole_of(answer, cut(outputs[: len(outputs) // 2]))
    assert response["status"] == "incomplete"
    [call] = response["output"]
    assert call["status"] == "incomplete" and PATCH not in call["input"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_end_of_the_time_limit_is_told(is_stream) -> None:
    """A call that was cut short is never reported as a call to execute."""
    text = written_calls("qwen 2.5", CALLS[:1])
    outputs = outputs_of("qwen 2.5", text, {}, 1)
    outputs = outputs[: len(outputs) // 2]
    sample = dataclasses.replace(
        outputs[-1].outputs[0], finish_reason="abort", stop_reason="deadline"
    )
    outputs[-1] = dataclasses.replace(outputs[-1], outputs=[sample], finished=True)
    found = {}
    for api, (_, join) in APIS.items():
        answer = answer_of("qwen 2.5", api)
        answer.request.params()
        whole = join(events_of(answer, outputs)) if is_stream else whole_of(answer, outputs)
        found[api] = whole
    assert found["chat"]["choices"][0]["finish_reason"] == "abort"
    if not is_stream:
        assert found["chat"]["choices"][0]["stop_reason"] == "deadline"
    assert found["responses"]["status"] == "incomplete"
    assert found["responses"]["incomplete_details"] == {"reason": "deadline"}
    assert found["messages"]["stop_reason"] == "max_tokens"
    assert found["messages"]["content"][0]["type"] == "tool_use"


def test_harmony_without_separate_reasoning_keeps_it_in_the_content() -> None:
    """Calls are still read from their channel."""
    for name, text, want in scripts("gpt-oss"):
        answer = answer_of("gpt-oss", "chat", separate_reasoning=False)
        outputs = outputs_of("gpt-oss", text, answer.request.params(), 1)
        answer.request.prompts()
        grammar = service_of("gpt-oss").grammars.compile(
            answer.request.params()["structured_outputs"]
        )
        token_ids = outputs[-1].outputs[0].token_ids
        assert grammar.start().validate_tokens(token_ids) == len(token_ids), name
        message = whole_of(answer, outputs)["choices"][0]["message"]
        assert (message["content"] or "") == want.reasoning + want.content
        assert "reasoning" not in message and len(message.get("tool_calls", ())) == len(want.calls)


XML = ["qwen 3 coder", "glm 4.5", "glm 4.7", "minimax m2"]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("family", XML)
def test_texts_in_tags_are_streamed_piece_by_piece(family, api) -> None:
    """A client sees the beginning of a long text long before its end."""
    text = written_calls(family, CALLS[:1])
    answer = answer_of(family, api)
    outputs = outputs_of(family, text, answer.request.params(), 1)
    answer.request.prompts()
    tracker, seen = DeltaTracker(), []
    for output in outputs:
        events = answer.events(0, output, tracker.deltas(0, output))
        if b'"arguments":"' in events or b"arguments.delta" in events or b"partial_json" in events:
            seen.append(len(output.outputs[0].token_ids))
    texts = [output.outputs[0].text for output in outputs]
    start, end = (
        next(index for index, each in enumerate(texts) if part in each)
        for part in ('"Paulo', TEXT.strip())
    )
    assert len([count for count in seen if start < count <= end]) > (end - start) / 2 > 10
