"""An answer in every format of tool calls and reasoning, cut at every position.

A stream may divide the text anywhere: within a mark, a name, an escape sequence or white space. The
expected parts are those that the chat template was given to write the text. No model runs.
"""

import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from paged_jax.models.text.reasoning import FORMATS, HARMONY, THINK, AnswerReader, HarmonyReader
from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.scheduler.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paged_jax.server.bodies import CompletionBody
from paged_jax.server.completion_codec import CompletionWriter, read_completion
from tests.server.test_all_formats import (
    APIS,
    FUNCTIONS,
    SHORT_IDS,
    TEMPLATES,
    Answered,
    answer_of,
    events_of,
    service_of,
    written_calls,
)

FAMILIES = [family for family in TEMPLATES if family != SHORT_IDS]
# The text has quotes, a line end, brackets, an incomplete tag, and characters of several bytes.
CALLS = [("now", {}), ("note", {"text": 'é "P"\n{x: [1]} </p & \N{SNOWMAN}', "count": -3})]
THOUGHTS, CONTENT = "Hm,\n<b> {x} <", "It is 5 < 6, [so]: "
# Longer than the longest text that a reader holds back, with beginnings of marks.
TAIL = "Done: a < b, <tool {x} [T] <| it. " + "And so on\n\n" * 60 + "the end"
# Formats that differ most: JSON without a mark, tags, and messages.
DIFFERENT = ["llama 3", "qwen 3 coder", "gpt-oss"]
Parts = list[tuple[str, str]]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def reader_of(family: str) -> AnswerReader | HarmonyReader:
    if family == "gpt-oss":
        return HarmonyReader()
    return AnswerReader(THINK, "either", service_of(family).tokenizer.tool_format, TOOLS)


def called(calls: Iterable[tuple[str, dict[str, Any]]]) -> Parts:
    """Return the parts of calls. The templates write JSON as `json.dumps` does."""
    return [
        part
        for name, arguments in calls
        for part in (("call", name), ("arguments", json.dumps(arguments, ensure_ascii=False)))
    ]


@functools.cache
def example(family: str, tail: str = "") -> tuple[str, Parts]:
    """Return the text of an answer with thoughts, content, calls and a tail, and its parts.

    Formats without a mark have no content before the call; some formats have only one call.
    """
    format = service_of(family).tokenizer.tool_format
    if family == "gpt-oss":
        final = "<|start|>assistant<|channel|>"
        text = f"<|channel|>analysis<|message|>{THOUGHTS}<|end|>"
        text += f"{final}commentary<|message|>{CONTENT}<|end|><|start|>assistant"
        text += written_calls(family, CALLS[1:])
        text += f"<|end|>{final}final<|message|>{tail}" if tail else ""
        calls, content = CALLS[1:], CONTENT
    else:
        calls = CALLS if format.between is not None else CALLS[1:]
        content = CONTENT if format.mark else ""
        text = f"<think>\n{THOUGHTS}\n</think>\n\n{content}{written_calls(family, calls)}"
        text += f"\n {tail}" if tail else ""
    parts = [("reasoning", THOUGHTS), ("content", content), *called(calls), ("content", tail)]
    return text, [part for part in parts if part[1]]


def joined(deltas: Iterable[AnswerDelta]) -> Parts:
    """Join neighbours of one kind, except calls: a name must come whole."""
    found: Parts = []
    for kind, text in deltas:
        if found and found[-1][0] == kind != "call":
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


def read(reader: AnswerReader | HarmonyReader, *pieces: str) -> Parts:
    *first, last = pieces
    deltas = [delta for piece in first for delta in reader.push(piece)]
    return joined([*deltas, *reader.push(last, is_last=True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_finds_the_parts_at_every_cut(family) -> None:
    text, want = example(family)
    assert read(reader_of(family), text) == want
    for cut in range(len(text) + 1):
        assert read(reader_of(family), text[:cut], text[cut:]) == want, text[:cut]
    for size in (1, 2, 3):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(reader_of(family), *pieces) == want
        assert read(reader_of(family), *pieces, "") == want, "the end may bring no text"


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_finds_the_parts_at_every_pair_of_cuts(family) -> None:
    """Of a short call; in most formats, only pairs around a short piece."""
    text, want = written_calls(family, CALLS[:1]), called(CALLS[:1])
    longest = len(text) if family in DIFFERENT else 5
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        if second - first > longest:
            continue
        pieces = text[:first], text[first:second], text[second:]
        assert read(reader_of(family), *pieces) == want, pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_returns_a_long_text_after_the_calls(family) -> None:
    """The text is complete, and comes while it is written, not at the end."""
    text, want = example(family, TAIL)
    assert read(reader_of(family), text) == want
    assert read(reader_of(family), *text) == want
    num_head = len(text) - len(TAIL)
    for cut in range(num_head - 4, num_head + 40):
        assert read(reader_of(family), text[:cut], text[cut:]) == want, text[:cut]
    reader = reader_of(family)
    seen = joined(delta for char in text[:-20] for delta in reader.push(char))
    assert seen[:-1] == want[:-1] and TAIL[:-40].startswith(seen[-1][1][:-40])
    assert len(seen[-1][1]) > len(TAIL) - 40


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_of_an_answer_that_ends_early_does_not_depend_on_the_pieces(family) -> None:
    """Names are complete or missing, and arguments are the beginning of the complete ones.

    Thoughts may end with the beginning of their closing mark, which could be text.
    """
    text, want = example(family, "" if family == "gpt-oss" else "Done")
    reader, deltas = reader_of(family), list[AnswerDelta]()
    thoughts = [("reasoning", THOUGHTS + ("<|end|>" if family == "gpt-oss" else "\n</think>"))]
    calls = [part for part in want if part[0] in ("call", "arguments")]
    for end, char in enumerate(text, 1):
        found = read(reader_of(family), text[:end])
        ending = copy.deepcopy(reader).push(char, is_last=True)
        assert joined([*deltas, *ending]) == found, text[:end]
        deltas += reader.push(char)
        assert joined([*deltas, *copy.deepcopy(reader).push("", is_last=True)]) == found
        for kinds, parts in ((("reasoning",), thoughts), (("call", "arguments"), calls)):
            mine = [part for part in found if part[0] in kinds]
            if mine:
                *before, (kind, last) = mine
                assert before == parts[: len(before)]
                assert parts[len(before)][0] == kind and parts[len(before)][1].startswith(last)
                assert kind != "call" or parts[len(before)][1] == last


# Reasoning


def reasoned(name: str) -> tuple[str, str, Callable[[str], AnswerReader | HarmonyReader]]:
    """Return an answer in a reasoning format, its last part, and a function for its reader."""
    format = FORMATS[name]
    if format is HARMONY:
        text = f"{format.opening}{THOUGHTS}{format.closing}<|start|>assistant<|channel|>final"
        return f"{text}<|message|>{CONTENT}", CONTENT, lambda start: HarmonyReader()
    before, after = (format.removed[:2]) if format.removed else ("", "")
    text = f"{format.opening}\n{THOUGHTS} \n{format.closing}\n\n{before}{CONTENT}{after}"
    return text, CONTENT, lambda start: AnswerReader(format, start, None)


@pytest.mark.parametrize("name", FORMATS)
def test_reader_separates_the_reasoning_at_every_cut(name) -> None:
    """Also if the prompt ends with the opening mark, or if white space is before it."""
    text, content, make = reasoned(name)
    want = [("reasoning", THOUGHTS), ("content", content)]
    cases = [(text, "either")]
    if FORMATS[name] is not HARMONY:
        opened = text.removeprefix(FORMATS[name].opening)
        cases += [(f" \n{text}", "either"), (opened, "reasoning"), (opened.lstrip(), "reasoning")]
    for text, start in cases:
        assert read(make(start), text) == read(make(start), *text) == want
        for first in range(len(text) + 1):
            for second in range(first, min(first + 9, len(text) + 1)):
                pieces = text[:first], text[first:second], text[second:]
                assert read(make(start), *pieces) == want, pieces


# Streams of all APIs


def outputs_of(ends: Iterable[int], text: str, token_ids: list[int]) -> list[RequestOutput]:
    """Return an output of the engine for the text up to each position; the last is finished."""
    outputs = []
    for end in ends:
        is_last = end == len(text)
        sample = CompletionOutput(
            0, text[:end], token_ids if is_last else token_ids[:1], 0.0, None,
            "stop" if is_last else None,
        )  # fmt: skip
        outputs.append(RequestOutput("r", None, [2, 3], [sample], is_last, RequestMetrics(0.0)))
    return outputs


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("family", FAMILIES)
def test_streams_have_the_parts_at_every_cut(family, api) -> None:
    """In pieces of one character, and for the formats that differ most also at each single cut."""
    text, parts = example(family, "Done")
    token_ids = service_of(family).tokenizer.encode(text, add_special_tokens=False)
    calls = [text for kind, text in parts if kind in ("call", "arguments")]
    content = "".join(text for kind, text in parts if kind == "content")
    counts = 2, len(token_ids)
    want = Answered(
        content, THOUGHTS, tuple(zip(calls[::2], calls[1::2], strict=True)), "calls", (*counts, 0)
    )
    read_answer, join = APIS[api]
    cuts = [range(1, len(text) + 1)]
    if family in DIFFERENT:
        cuts += [(cut, len(text)) for cut in range(1, len(text))]
    for ends in cuts:
        outputs = outputs_of(ends, text, token_ids)
        body = join(events_of(answer_of(family, api), outputs))
        found = read_answer(body).without_logprobs
        assert found.num_tokens[:2] == counts
        assert dataclasses.replace(found, num_tokens=want.num_tokens) == want, ends


def test_streams_of_completions_have_the_text_at_every_cut() -> None:
    """White space, marks and characters of several bytes included."""
    text = f" \n<think>{THOUGHTS}</think> {CONTENT}\n"
    for ends in (range(1, len(text) + 1), *((cut, len(text)) for cut in range(1, len(text)))):
        body = CompletionBody.model_validate({"prompt": "Well?"})
        service = service_of("qwen 2.5")
        writer = CompletionWriter(service, body, read_completion(service, body), "1")
        events = events_of(writer, outputs_of(ends, text, [5, 6]))
        assert "".join(event["choices"][0]["text"] for event in events) == text, ends
