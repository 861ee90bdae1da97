"""Harmony, the format of gpt-oss: reader, grammar and recognition of the template."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paged_jax import StructuredOutputsParams, Tokenizer
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.chat_template import ChatTemplate
from paged_jax.models.text.grammar import GrammarCompiler, GrammarCursor
from paged_jax.models.text.reasoning import (
    HARMONY,
    HARMONY_MARKS,
    HarmonyReader,
    harmony_grammar,
    select_format,
    uses_harmony,
)
from paged_jax.models.text.tool_formats import find_support
from tests.models.test_reasoning import read_in_pieces
from tests.support.structured import TOOLS
from tests.support.tiny_model import EOS

# A small template in the style of gpt-oss.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ANALYSIS = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
READINGS = [
    ("<|channel|>final<|message|>Yes", [("content", "Yes")]),
    (f"{ANALYSIS}<|channel|>final<|message|>Yes", [("reasoning", "Hm <b>."), ("content", "Yes")]),
    (f"{ANALYSIS}{CALL}", [("reasoning", "Hm <b>."), ("call", "f"), ("arguments", "{}")]),
    (
        f"<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{CALL}",
        [("content", "Wait."), ("call", "f"), ("arguments", "{}")],
    ),
    (
        ' to=functions.g<|channel|>analysis code<|message|>{"a": 1}',
        [("call", "g"), ("arguments", '{"a": 1}')],
    ),
    ("<|channel|>analysis<|message|>cut sh", [("reasoning", "cut sh")]),
    ("<|channel|>ana", []),
]


@given(st.sampled_from(READINGS), st.lists(st.integers(0, 150), max_size=6))
def test_reader_does_not_depend_on_the_pieces(reading, cuts) -> None:
    text, want = reading
    reader = HarmonyReader()
    assert read_in_pieces(reader, text, cuts) == want
    assert reader.has_reasoned == ("analysis<|message|>" in text)


def test_template_of_harmony_is_recognised() -> None:
    assert uses_harmony(TEMPLATE) and select_format("auto", TEMPLATE) is HARMONY
    support = find_support(ChatTemplate(TEMPLATE).render)
    assert support.format is not None and support.format.kind == "harmony"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    backend.add_special_tokens(
        [tokenizers.AddedToken(mark, special=True) for mark in HARMONY_MARKS]
    )
    return Tokenizer(backend, eos_token_ids=[EOS], chat_template=TEMPLATE)


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
def random_answers(tokenizer):
    """Return random answers of a grammar, read as parts."""
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
