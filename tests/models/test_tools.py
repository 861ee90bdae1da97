"""Calls of functions in the text of models: bound by grammars, read in pieces."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax import StructuredOutputsParams, Tokenizer
from paged_jax.models.loading import bundled_folder
from paged_jax.models.text.grammar import GrammarCursor, Grammars
from paged_jax.models.text.tools import HERMES, LLAMA3, ToolFormat, ToolReader, find_format
from tests.models.test_grammar import V, walk
from tests.support.structured import HERMES_TEMPLATE, LLAMA3_TEMPLATE, TOOLS
from tests.support.tiny_model import EOS


@pytest.mark.parametrize(
    ("template", "format"),
    [(HERMES_TEMPLATE, HERMES), (LLAMA3_TEMPLATE, LLAMA3), ("{{ messages[0].content }}", None)],
)
def test_find_format_reads_the_template(template, format) -> None:
    assert find_format(template) == format


def read(format: ToolFormat, *pieces: str) -> list[tuple[str, ...]]:
    """Texts and calls of an answer that comes in pieces."""
    reader, found = ToolReader(format), []
    for index, piece in enumerate(pieces, 1):
        for delta in reader.push(piece, is_last=index == len(pieces)):
            if delta.kind == "call":
                found.append((delta.text, ""))
            elif delta.kind == "arguments":
                found[-1] = (found[-1][0], found[-1][1] + delta.text)
            elif found and len(found[-1]) == 1:
                found[-1] = (found[-1][0] + delta.text,)
            else:
                found.append((delta.text,))
    return found


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}<tool_call>"}}\n</tool_call>'
READINGS = [
    (HERMES, "just <tool text", [("just <tool text",)]),
    (HERMES, CALL, [("f", '{"a": "}<tool_call>"}')]),
    (
        HERMES,
        f"So:\n{CALL}\n{CALL} done",
        [("So:\n",), *[("f", '{"a": "}<tool_call>"}')] * 2, ("done",)],
    ),
    (HERMES, CALL[:-16], [("f", '{"a": "}<tool_call>')]),
    (HERMES, 'x<tool_call>\n{"na', [('x<tool_call>\n{"na',)]),
    (LLAMA3, "just {text}", [("just {text}",)]),
    (LLAMA3, '{"name": "g", "parameters": {"a": {"b": "}"}}}', [("g", '{"a": {"b": "}"}}')]),
    (LLAMA3, '{"name": "g", "parameters": {"a": {"b": "}"}', [("g", '{"a": {"b": "}"}')]),
    (LLAMA3, '{"name": "g", "parameters": {}}', [("g", "{}")]),
]


@given(st.sampled_from(READINGS), st.lists(st.integers(0, 150), max_size=8))
def test_reader_reads_the_same_in_any_pieces(reading, cuts) -> None:
    format, text, want = reading
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert read(format, *pieces) == want


def test_reader_keeps_the_spaces_of_text_after_a_call() -> None:
    """Only the space between a call and the text that follows it is left out."""
    want = [("f", '{"a": "}<tool_call>"}'), ("Hello world",)]
    assert read(HERMES, CALL, "\n", " ", "Hello", " world") == want
    assert read(HERMES, f"{CALL}\n\nHello", " ", "world") == want
    bare = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = read(HERMES, f"{CALL} Hello", " world", f"\n{bare}", " \n", "Bye ")
    assert found == [*want[:1], ("Hello world\n",), ("f", "{}"), ("Bye ",)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled_folder())


@pytest.mark.parametrize("format", [HERMES, LLAMA3], ids=["hermes", "llama3"])
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_blind_answers_are_calls_of_the_functions(tokenizer, format, choice) -> None:
    form = StructuredOutputsParams(grammar=format.grammar(TOOLS, choice))
    grammar = Grammars(tokenizer, V, [EOS]).compile(form)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(10):
        calls = read(format, tokenizer.decode(walk(GrammarCursor(grammar), rng)))
        for name, arguments in calls:
            value = json.loads(arguments)
            assert set(value) == ({"city", "days"} if name == "weather" else set())
            seen.add(name)
        assert len(calls) == 1 or format is HERMES and choice == "required"
    assert seen == ({"weather"} if choice == "weather" else {"weather", "now"})


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "Look: <tool_call>"),
        (LLAMA3, "{"),
    ],
)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_answers_may_be_text_until_a_call_begins(tokenizer, format, text, is_parallel) -> None:
    form = StructuredOutputsParams(grammar=format.grammar(TOOLS, "auto", is_parallel=is_parallel))
    cursor = GrammarCursor(Grammars(tokenizer, V, [EOS]).compile(form))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    cursor.follow(token_ids[:-1], 0)
    assert not cursor.forced, "anything may come"
    cursor.follow(token_ids, 0)
    assert tokenizer.decode(cursor.forced).lstrip("\n").lstrip("{") == '"name": "'
