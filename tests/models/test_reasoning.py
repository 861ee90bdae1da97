"""Reasoning in the text of chat models: formats, constraints, and the reader of answers."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paged_jax import StructuredOutputsParams, Tokenizer
from paged_jax.arguments import ArgumentError
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.chat_template import ChatTemplate
from paged_jax.models.text.grammar import GrammarCompiler, GrammarCursor
from paged_jax.models.text.grammar_source import constraint_rule
from paged_jax.models.text.reasoning import (
    FORMATS,
    HARMONY,
    HARMONY_MARKS,
    THINK,
    AnswerReader,
    HarmonyReader,
    harmony_grammar,
    select_format,
)
from paged_jax.models.text.tool_formats import HERMES, LLAMA3, find_support
from paged_jax.models.text.tool_grammars import tool_grammar
from tests.models.test_grammar import V
from tests.support.structured import TOOLS
from tests.support.tiny_model import EOS

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLED = [("call", "now"), ("arguments", "{}")]


def two(reasoning: str, content: str) -> list[tuple[str, str]]:
    return [("reasoning", reasoning), ("content", content)]


READINGS = [
    (THINK, "either", None, "Yes.", [("content", "Yes.")]),
    (THINK, "either", None, "<thin", [("content", "<thin")]),
    (
        THINK,
        "either",
        None,
        "\n<think>\nHm.\n</think>\n\nYes",
        [("reasoning", "Hm."), ("content", "Yes")],
    ),
    (THINK, "either", None, "<think>\n\n</think>\n\nYes", [("content", "Yes")]),
    (THINK, "reasoning", None, "So <b>\n it", [("reasoning", "So <b>\n it")]),
    (
        THINK,
        "reasoning",
        None,
        "a\n</think>b</think>",
        [("reasoning", "a"), ("content", "b</think>")],
    ),
    (THINK, "answer", None, "<think>x</think>", [("content", "<think>x</think>")]),
    (THINK, "reasoning", HERMES, f"{CALL}</think>\n\n{CALL}", [("reasoning", CALL), *CALLED]),
    (THINK, "either", HERMES, f"So: {CALL}", [("content", "So: "), *CALLED]),
    (None, "answer", None, "<think>a</think>", [("content", "<think>a</think>")]),
    (
        FORMATS["cohere"],
        "either",
        None,
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
        two("a", "b"),
    ),
    (
        FORMATS["mistral"],
        "either",
        None,
        "[THINK]a[/THINK]b",
        two("a", "b"),
    ),
]


def read_in_pieces(reader, text: str, cuts: list[int]) -> list[tuple[str, str]]:
    """Return the parts of a text that is read in pieces; neighbours of one kind are joined."""
    found: list[tuple[str, str]] = []
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    for index, piece in enumerate(pieces, 1):
        for kind, part in reader.push(piece, is_last=index == len(pieces)):
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1] + part)
            else:
                found.append((kind, part))
    return found


@given(st.sampled_from(READINGS), st.lists(st.integers(0, 90), max_size=6))
def test_reader_does_not_depend_on_the_pieces(reading, cuts) -> None:
    reasoning, start, tools, text, want = reading
    assert read_in_pieces(AnswerReader(reasoning, start, tools), text, cuts) == want


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("assistant\n", "either"),
        ("assistant\n<think>\n", "reasoning"),
        ("assistant\n<think>\n\n</think>\n\n", "answer"),
        ("<think>hm</think> Yes\nassistant\n", "either"),
    ],
)
def test_start_follows_from_the_end_of_the_prompt(prompt, start) -> None:
    assert THINK.start(prompt) == start


def test_select_format_reads_the_template() -> None:
    assert select_format("auto", "{{ m.content.split('</think>')[-1] }}") is THINK
    assert select_format("auto", "{{ m.content }}") is None and select_format("auto", None) is None
    assert select_format("none", "</think>") is None
    assert select_format("mistral", None) is FORMATS["mistral"]
    with pytest.raises(ArgumentError, match="reasoning_format must be one of auto, none, think"):
        select_format("harmless", None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled_folder())


@pytest.fixture(scope="module")
def accepts(tokenizer):
    """Return whether a grammar accepts a text, completely or as a beginning."""
    compiler = GrammarCompiler(tokenizer.backend, V, [EOS])

    def accepts(constraint: StructuredOutputsParams, text: str) -> bool:
        matcher = compiler.compile(constraint).start()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if matcher.try_consume_tokens(token_ids) != len(token_ids):
            return False
        return matcher.is_accepting()

    return accepts


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json": (StructuredOutputsParams(json=SCHEMA), '{"n": 1}', '{"m": 1}'),
    "object": (StructuredOutputsParams(json_object=True), "{}", "[]"),
    "regex": (StructuredOutputsParams(regex="a/b|c"), "a/b", "b"),
    "choice": (StructuredOutputsParams(choice=["yes", 'a "b"']), 'a "b"', "a"),
    "grammar": (StructuredOutputsParams(grammar='start: x\nx: "u" | "v"'), "v", "w"),
    "tools": (
        StructuredOutputsParams(grammar=tool_grammar(HERMES, TOOLS, is_required=True)),
        CALL,
        "x",
    ),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constrain_applies_the_constraint_to_the_answer(accepts, kind) -> None:
    constraint, good, wrong = CONSTRAINTS[kind]
    assert THINK.constrain(constraint, "answer") is constraint
    opened, either = THINK.constrain(constraint, "reasoning"), THINK.constrain(constraint, "either")
    for thoughts in ("hm {<tool_call>", ""):
        assert accepts(opened, f"{thoughts}</think>\n\n{good}")
        assert accepts(either, f"<think>\n{thoughts}</think>\n\n{good}")
        assert not accepts(opened, f"{thoughts}</think>\n\n{wrong}")
        assert not accepts(either, f"<think>\n{thoughts}</think>\n\n{wrong}")
    assert accepts(either, good) and not accepts(either, wrong) and not accepts(opened, good)


@pytest.mark.parametrize("format", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_constrain_keeps_calls_out_of_the_reasoning(accepts, format) -> None:
    """With tools, an answer may be text, unless it begins with the mark of reasoning."""
    call = CALL if format is HERMES else '{"name": "now", "parameters": {}}'
    grammar = tool_grammar(format, TOOLS, not_first="<think>")
    constraint = THINK.constrain(StructuredOutputsParams(grammar=grammar), "either")
    assert accepts(constraint, f"<think>a {call}\n</think>\n\n{call}") and accepts(constraint, call)
    assert accepts(constraint, "<think>a <tool_call></think>Yes.") and accepts(constraint, "Yes.")
    assert not accepts(constraint, "<think>a") and not accepts(constraint, call[:-8])


def test_constraint_rule_can_be_part_of_a_grammar(accepts) -> None:
    for constraint, good, wrong in CONSTRAINTS.values():
        rule = StructuredOutputsParams(
            grammar=f'start: "go: " rest\nrest: {constraint_rule(constraint)}'
        )
        assert accepts(rule, f"go: {good}") and not accepts(rule, f"go: {wrong}")
    assert json.loads(constraint_rule(CONSTRAINTS["json"][0]).removeprefix("%json "))["x-guidance"]


# A small template in the style of gpt-oss.
HARMONY_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ANALYSIS = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
HARMONY_READINGS = [
    ("<|channel|>final<|message|>Yes", [("content", "Yes")]),
    (f"{ANALYSIS}<|channel|>final<|message|>Yes", [("reasoning", "Hm <b>."), ("content", "Yes")]),
    (f"{ANALYSIS}{HARMONY_CALL}", [("reasoning", "Hm <b>."), ("call", "f"), ("arguments", "{}")]),
    (
        f"<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{HARMONY_CALL}",
        [("content", "Wait."), ("call", "f"), ("arguments", "{}")],
    ),
    (
        ' to=functions.g<|channel|>analysis code<|message|>{"a": 1}',
        [("call", "g"), ("arguments", '{"a": 1}')],
    ),
    ("<|channel|>analysis<|message|>cut sh", [("reasoning", "cut sh")]),
    ("<|channel|>ana", []),
]


@given(st.sampled_from(HARMONY_READINGS), st.lists(st.integers(0, 150), max_size=6))
def test_reader_of_harmony_does_not_depend_on_the_pieces(reading, cuts) -> None:
    text, want = reading
    reader = HarmonyReader()
    assert read_in_pieces(reader, text, cuts) == want
    assert reader.has_reasoned == ("analysis<|message|>" in text)


def test_template_of_harmony_is_recognised() -> None:
    assert select_format("auto", HARMONY_TEMPLATE) is HARMONY
    support = find_support(ChatTemplate(HARMONY_TEMPLATE).render)
    assert support.format is not None and support.format.kind == "harmony"


@pytest.fixture(scope="module")
def harmony_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    backend.add_special_tokens(
        [tokenizers.AddedToken(mark, special=True) for mark in HARMONY_MARKS]
    )
    return Tokenizer(backend, eos_token_ids=[EOS], chat_template=HARMONY_TEMPLATE)


def walk(cursor: GrammarCursor, tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """Return random allowed tokens up to the end. Special tokens are likely, so texts are short."""
    token_ids: list[int] = []
    size = tokenizer.vocab_size
    while True:
        cursor.follow(token_ids, 0)
        if cursor.forced:
            token_id = cursor.forced[0]
        else:
            words = np.zeros((size + 31) // 32, np.int32)
            cursor.write_mask(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            special = [each for each in allowed if tokenizer.is_special(each)]
            token_id = int(rng.choice(special if special and rng.random() < 0.5 else allowed))
        if token_id == EOS:
            return token_ids
        token_ids.append(token_id)


@pytest.fixture(scope="module")
def random_answers(harmony_tokenizer):
    """Return random answers of a grammar, read as parts."""
    tokenizer = harmony_tokenizer
    compiler = GrammarCompiler(tokenizer.backend, tokenizer.vocab_size, [EOS])

    def answers(tools, **options):
        token_ids = {mark: tokenizer.backend.token_to_id(mark) for mark in HARMONY_MARKS}
        grammar = harmony_grammar(token_ids, tools, **options)
        cursor = compiler.compile(StructuredOutputsParams(grammar=grammar))
        rng = np.random.default_rng(0)
        for _ in range(6):
            token_ids = walk(GrammarCursor(cursor), tokenizer, rng)
            text = tokenizer.decode(token_ids, skip_special_tokens=False).replace("</s>", "")
            yield [tuple(part) for part in HarmonyReader().push(text, is_last=True)]

    return answers


@pytest.mark.parametrize("names", [("weather", "now"), ("weather",)])
def test_random_answers_are_calls(random_answers, names) -> None:
    tools = [tool for tool in TOOLS if tool["function"]["name"] in names]
    for parts in random_answers(tools, is_required=True):
        *_, (kind, name), (_, arguments) = parts
        assert kind == "call"
        assert set(json.loads(arguments)) == ({"city", "days"} if name == "weather" else set())
        assert name in names


def test_random_answers_follow_the_form_in_the_final_channel(random_answers) -> None:
    for parts in random_answers([], answer='"yes" | "no"'):
        kind, text = parts[-1]
        assert kind == "content" and text in ("yes", "no")


def test_harmony_message_without_an_end_ends_at_the_next_message_at_any_cut() -> None:
    """Models sometimes leave out the end of a message before a call."""
    text = "<|channel|>final<|message|>Yes<|start|>assistant to=functions.f<|message|>{}<|end|>"
    for cut in range(len(text) + 1):
        reader = HarmonyReader()
        parts = [*reader.push(text[:cut]), *reader.push(text[cut:], is_last=True)]
        found = {kind: "".join(text for other, text in parts if other == kind) for kind, _ in parts}
        assert found == {"content": "Yes", "call": "f", "arguments": "{}"}, text[:cut]
