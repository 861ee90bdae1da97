"""Tool calls in the text of models: formats, grammars that enforce them, and the reader."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pydantic
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from paged_jax import StructuredOutputsParams, Tokenizer
from paged_jax.arguments import ArgumentError
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.chat_template import ChatTemplate
from paged_jax.models.text.grammar import GrammarCompiler, GrammarCursor
from paged_jax.models.text.tool_formats import (
    HERMES,
    LLAMA3,
    ToolFormat,
    ToolSupport,
    find_support,
)
from paged_jax.models.text.tool_grammars import ToolGrammars, tool_grammar
from paged_jax.models.text.tool_reader import ToolReader
from tests.models.test_grammar import V, walk
from tests.support.structured import TOOLS
from tests.support.tiny_model import EOS

# Small templates that write calls in the style of model families.
CHAT = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | list }}"
    "{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def template(call: str, before: str = "", after: str = "", between: str = "") -> str:
    """Return the source of a chat template that writes calls in a format."""
    source = call.replace("NAME", "{{ c.function.name }}")
    source = source.replace("JSON", "{{ c.function.arguments | tojson }}")
    calls = "{% for c in m.tool_calls %}" + source
    calls += "{% if not loop.last %}" + between + "{% endif %}{% endfor %}"
    return CHAT.replace("CALLS", before + calls + after)


HERMES_CALL = '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>'


def pairs(before: str, between: str, after: str) -> str:
    """Return template source that writes arguments as keys and values in tags."""
    loop = "{% for k, v in c.function.arguments.items() %}"
    value = "{{ v if v is string else v | tojson }}"
    return f"{loop}{before}{{{{ k }}}}{between}{value}{after}{{% endfor %}}"


PYTHON = (
    "NAME({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
LINE = "{{ '\\n' }}"  # Jinja removes a line end after a block
BARE_HERMES = replace(HERMES, between="")
# For each format of calls: a template, and the format if the test checks it.
KNOWN: dict[str, tuple[str, ToolFormat | None]] = {
    "qwen 2.5": (template(HERMES_CALL, between=LINE), HERMES),
    "on one line": (template(HERMES_CALL.replace("\n", "")), None),
    "after a line end": (template(HERMES_CALL, before="\n", between=LINE), HERMES),
    "thoughts": (
        template(HERMES_CALL).replace(
            "{{ m.content }}",
            "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
        ),
        BARE_HERMES,
    ),
    "other keys": (
        template('<tool_call>\n{"function": "NAME", "args": JSON}\n</tool_call>'),
        None,
    ),
    "lists": (
        template('{"name": "NAME", "arguments": JSON}', "<tools>\n[", "]\n</tools>", ", "),
        None,
    ),
    "tags within tags": (template(HERMES_CALL, "<tool_calls>\n", "\n</tool_calls>"), None),
    "llama 3": (template('{"name": "NAME", "parameters": JSON}'), LLAMA3),
    "another end token": (
        template('{"name": "NAME", "parameters": JSON}', after="<|eom|>").replace(
            "{% endif %}<|end|>", "{% else %}<|end|>{% endif %}"
        ),
        LLAMA3,
    ),
    "qwen 3 coder": (
        template(
            "<tool_call>\n<function=NAME>\n"
            + pairs("<parameter=", ">\n", "\n</parameter>\n")
            + "</function>\n</tool_call>",
            between=LINE,
        ),
        ToolFormat(
            "<tool_call>\n<function=",
            ">\n",
            "</function>\n</tool_call>",
            "xml",
            between="\n",
            before_key="<parameter=",
            after_key=">\n",
            after_value="\n</parameter>\n",
        ),
    ),
    "glm 4.5": (
        template(
            "<tool_call>NAME\n"
            + pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
            + "</tool_call>",
            between=LINE,
        ),
        None,
    ),
    "glm 4.7": (
        template(
            "<tool_call>NAME"
            + pairs("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
            + "</tool_call>"
        ),
        None,
    ),
    "minimax m2": (
        template(
            '<invoke name="NAME">\n'
            + pairs('<parameter name="', '">', "</parameter>\n")
            + "</invoke>",
            "<minimax:tool_call>\n",
            "\n</minimax:tool_call>",
            LINE,
        ),
        None,
    ),
    "llama 3.2": (template(PYTHON, "[", "]", ", "), None),
    "llama 4": (template(PYTHON, "<|python_start|>[", "]<|python_end|>", ", "), None),
    "mistral v3": (
        template(
            '{"name": "NAME", "arguments": JSON, "id": "{{ c.id }}"}', "[TOOL_CALLS][", "]", ", "
        ),
        None,
    ),
    "mistral v11": (template("[TOOL_CALLS]NAME[CALL_ID]{{ c.id }}[ARGS]JSON"), None),
    "mistral v13": (template("[TOOL_CALLS]NAME[ARGS]JSON"), None),
    "phi 4 mini": (
        template('{"name": "NAME", "arguments": JSON}', "<|tool_call|>[", "]<|/tool_call|>", ", "),
        None,
    ),
    "command r7b": (
        template(
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "NAME", "parameters": JSON}',
            before="<|START_ACTION|>[\n",
            after="\n]<|END_ACTION|>",
            between="," + LINE,
        ),
        None,
    ),
    "deepseek v3": (
        template(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```"
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            LINE,
        ),
        None,
    ),
    "deepseek v3.1": (
        template(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        None,
    ),
}
UNKNOWN = {
    "not where texts stand": template('{"name": "NAME", "parameters": JSON}').replace(
        "{{ m.content }}", "{% if not m.tool_calls %}<|text|>{{ m.content }}{% endif %}"
    ),
    "keys in another order": template(
        '<tool_call>\n{"arguments": JSON, "name": "NAME"}\n</tool_call>'
    ),
    "no mark": template("call NAME with JSON"),
    "only values": template("<tool_call>NAME\n<value>{{ c.function.arguments.key_a }}</value>"),
}


def support_of(source: str) -> ToolSupport:
    return find_support(ChatTemplate(source).render)


@pytest.mark.parametrize("family", KNOWN)
def test_find_support_recognises_formats(family) -> None:
    source, format = KNOWN[family]
    support = support_of(source)
    assert support.shows_tools and support.writes_calls and support.format is not None
    assert format in (None, support.format)


MISTRAL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}"
    "[TOOL_CALLS][{{ c.function.name }}|{{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
)


def test_ids_that_a_template_rejects_become_short() -> None:
    """A call and its result keep the same id, whichever server gave it."""
    known = template(
        '{"name": "NAME", "arguments": JSON, "id": "{{ c.id }}"}', "[TOOL_CALLS][", "]", ", "
    )
    check = "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('9') }}{% endif %}"
    strict = known.replace("[TOOL_CALLS]", f"{check}[TOOL_CALLS]")
    formats = [support_of(source).format for source in (known, strict)]
    assert [format.has_short_ids for format in formats] == [False, True]
    assert formats[1] == replace(formats[0], has_short_ids=True)

    def render(first: str, second: str) -> str:
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {}}}
            for call_id in (first, second)
        ]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
        return ChatTemplate(MISTRAL).render(
            [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
        )

    assert "abcdefgh1" in render("abcdefgh1", "abcdefgh2")
    text = render("call_1", "abcdefgh2")
    first, second = re.findall(r"\|(\w{9})\]", text)
    assert second == "abcdefgh2" and text.endswith(first + second) and first != second
    assert render("call_1", "toolu_2").startswith(f"[TOOL_CALLS][f|{first}]")


@pytest.mark.parametrize("family", UNKNOWN)
def test_find_support_returns_no_format_for_unknown_calls(family) -> None:
    assert support_of(UNKNOWN[family]) == ToolSupport(True, True, None)


@pytest.mark.parametrize(
    ("source", "support"),
    [
        ("{{ messages[0].content }}", ToolSupport()),
        ('{# tools: <tool_call>, "parameters": #}{{ messages[0].content }}', ToolSupport()),
        ("{{ xml_tools }}{{ messages[0].content }}", ToolSupport()),
        (CHAT.replace("CALLS", ""), ToolSupport(shows_tools=True)),
        (
            template(HERMES_CALL).replace("{% if tools", "{% if xml_tools"),
            ToolSupport(False, True, BARE_HERMES),
        ),
        # A chat with tools gets the error of the template.
        ("{{ raise_exception('no') if tools }}", ToolSupport(True, True, None)),
        # Many templates reject two user messages in a row.
        (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('order') }}{% endif %}{{ m.content }}{% endfor %}",
            ToolSupport(),
        ),
    ],
)  # fmt: skip
def test_find_support_reports_what_a_template_shows(source, support) -> None:
    assert support_of(source) == support


@pytest.mark.peers
@pytest.mark.parametrize("family", KNOWN)
def test_reader_reads_calls_written_by_transformers(family) -> None:
    transformers = pytest.importorskip("transformers")
    source, format = KNOWN[family][0], support_of(KNOWN[family][0]).format
    assert format is not None
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source)
    arguments = {"city": "São {Paulo}", "days": [1, 2]}
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    question = {"role": "user", "content": "Well?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    options = {"tools": TOOLS, "tokenize": False}
    prompt = theirs.apply_chat_template([question], add_generation_prompt=True, **options)
    text = theirs.apply_chat_template([question, answer], **options).removeprefix(prompt)
    text = re.sub(r"<\|end\|>|<\|eom\|>|<think>\s*</think>", "", text).strip()
    assert read(format, text) == [("weather", json.dumps(arguments, ensure_ascii=False))]


def read(format: ToolFormat, *pieces: str, tools=()) -> list[tuple[str, ...]]:
    """Return the texts and calls of an answer that is read in pieces."""
    reader, found = ToolReader(format, tools), []
    for index, piece in enumerate(pieces, 1):
        for delta in reader.push(piece, is_last=index == len(pieces)):
            if delta.kind == "call":
                found.append((delta.text, ""))
            elif delta.kind == "arguments":
                found[-1] = (found[-1][0], found[-1][-1] + delta.text)
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
def test_reader_does_not_depend_on_the_pieces(reading, cuts) -> None:
    format, text, want = reading
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert read(format, *pieces) == want


# A text, a number and a value of unknown type in tags; None stands for a text that is cut short.
TAGGED = {"s": 'a "b"\n</parameter\n{1}', "n": 5, "any": "NaN"}
TAGGED_TOOL = {
    "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "any": {}}}}
}


@functools.cache
def tagged_call(family: str) -> tuple[ToolFormat, str]:
    """Return a format of calls with tags, and a call with the arguments `TAGGED`."""
    source = KNOWN[family][0]
    format = support_of(source).format
    assert format is not None
    function = {"name": "f", "arguments": TAGGED}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    told = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    text = ChatTemplate(source).render(told, add_generation_prompt=False)
    return format, text.removeprefix("<|start|>assistant\n").partition("<|end|>")[0]


@pytest.mark.parametrize("family", ["qwen 3 coder", "glm 4.5", "glm 4.7", "minimax m2"])
@given(st.lists(st.integers(0, 150), max_size=8), st.integers(0, 150))
def test_reader_of_tags_does_not_depend_on_the_pieces(family, cuts, end) -> None:
    """Also if the answer ends early. Texts of whole answers are complete JSON."""
    format, text = tagged_call(family)
    tools = [TAGGED_TOOL]
    [(name, arguments)] = read(format, text, tools=tools)
    assert name == "f" and json.loads(arguments) == TAGGED
    text = text[:end]
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:stop] for start, stop in zip(places, places[1:], strict=False)]
    found = read(format, *pieces, tools=tools)
    assert found == read(format, text, tools=tools)
    assert all(arguments.startswith(each[1]) for each in found if len(each) == 2)


def test_reader_of_tags_reports_a_text_before_its_end() -> None:
    format = support_of(KNOWN["qwen 3 coder"][0]).format
    assert format is not None
    reader = ToolReader(format, [TAGGED_TOOL])
    start = "<tool_call>\n<function=f>\n<parameter=s>\n"
    assert [tuple(delta) for delta in reader.push(start + 'a"')] == [
        ("call", "f"), ("arguments", '{"s": "'), ("arguments", 'a\\"'),
    ]  # fmt: skip
    assert [tuple(delta) for delta in reader.push("b\n</par")] == [("arguments", "b")]
    assert [tuple(delta) for delta in reader.push("c\n</parameter>\n")] == [
        ("arguments", '\\n</parc"')
    ]


def test_reader_keeps_spaces_of_text_after_a_call() -> None:
    """White space is dropped only directly after a call."""
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
@pytest.mark.parametrize("is_parallel", [True, False])
def test_random_answers_are_calls_of_the_functions(tokenizer, format, is_parallel) -> None:
    source = tool_grammar(format, TOOLS, is_required=True, is_parallel=is_parallel)
    constraint = StructuredOutputsParams(grammar=source)
    grammar = GrammarCompiler(tokenizer.backend, V, [EOS]).compile(constraint)
    rng, seen = np.random.default_rng(0), set()
    for _ in range(10):
        calls = read(format, tokenizer.decode(walk(GrammarCursor(grammar), rng)))
        for name, arguments in calls:
            value = json.loads(arguments)
            assert set(value) == ({"city", "days"} if name == "weather" else set())
            seen.add(name)
        assert len(calls) == 1 or format is HERMES and is_parallel
    assert seen == {"weather", "now"}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "Look: <tool_call>"),
        (LLAMA3, "{"),
    ],
)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_grammar_allows_text_before_a_call(tokenizer, format, text, is_parallel) -> None:
    constraint = StructuredOutputsParams(
        grammar=tool_grammar(format, TOOLS, is_parallel=is_parallel)
    )
    cursor = GrammarCursor(GrammarCompiler(tokenizer.backend, V, [EOS]).compile(constraint))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    cursor.follow(token_ids[:-1], 0)
    assert not cursor.forced, "any token may come"
    cursor.follow(token_ids, 0)
    assert tokenizer.decode(cursor.forced).lstrip("\n").lstrip("{") == '"name": "'


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.backend, V, [EOS])


@pytest.fixture(scope="module")
def grammars(compiler) -> ToolGrammars:
    return ToolGrammars(compiler)


def constraint_of(grammars, tools, choice):
    """Return the constraint on any answer ("auto"), or on a call of a tool given by its name."""
    is_call = choice != "auto"
    if is_call:
        tools = [each for each in tools if each["function"]["name"] == choice]
    options = {"is_required": is_call, "is_parallel": not is_call}
    return grammars.constraint(lambda tools: tool_grammar(HERMES, tools, **options), tools)


def tool(parameters, name="f", **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def closed(required=("n",), **properties):
    """Return the schema of an object with a number from 1 to 9 and more."""
    number = {"type": "integer", "minimum": 1, "maximum": 9}
    return {
        "type": "object",
        "properties": {"n": number, **properties},
        "required": list(required),
        "additionalProperties": False,
    }


class Tags(pydantic.BaseModel):
    """pydantic writes a set as an array with uniqueItems."""

    n: set[bool]


# Patterns of pydantic's Decimal and zod's email. llguidance does not support their look-ahead.
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAIL = r"^(?!\.)(?!.*\.\.)([a-z_'+\-\.]*)[a-z_+-]@([a-z][a-z\-]*\.)+[a-z]{2,}$"
LONG = {"type": "string", "maxLength": 3}
HINTS = {
    "uniqueItems": Tags.model_json_schema(),
    "look-ahead": closed(x={"anyOf": [{"type": "number"}, {"pattern": DECIMAL}]}),
    "email": closed(e={**LONG, "format": "email", "pattern": EMAIL}),
    "record": closed(r={"propertyNames": {"type": "string"}, "maxProperties": 0}),
    "not": closed(never={"not": {}}),
    "format": closed(c={**LONG, "format": "colour"}),
    "if": closed() | {"if": {"properties": {"n": {"const": 1}}}, "then": {"required": ["n"]}},
    "oneOf": closed(a={"oneOf": [{"const": 1}, {"const": 2}]}),
    "remote": closed(r={"$ref": "https://example.com/schema.json"}),
    "type": closed(a={"type": "any"}),
    "contains": closed(a={"type": "array", "maxItems": 0, "contains": {}}),
    "dependentSchemas": closed() | {"dependentSchemas": {"n": {"required": ["n"]}}},
    "unevaluatedProperties": closed() | {"unevaluatedProperties": False},
    "dependentRequired": closed() | {"dependentRequired": {"n": ["n"]}},
}
# Schemas that llguidance does not support at all. Arguments still have to be an object.
NOT_BOUND = {
    "required": closed(required=["n", "other"]),
    "text": {"type": "string"},
    "properties": {"type": "object", "properties": None},
    "names": closed(required=[{"n": 1}]),
    "names of the rest": {"type": "object", "properties": {}, "required": [["n"]]},
    "patternProperties": {"type": "object", "patternProperties": {"^(?!x)": {}}},
}


def random_calls(grammars, compiler, tokenizer, tools, choice) -> list[dict]:
    """Return the arguments of random calls of a tool."""
    constraint = constraint_of(grammars, tools, choice)
    grammar = compiler.compile(constraint)
    rng, found = np.random.default_rng(0), []
    for _ in range(5):
        [(name, arguments)] = read(HERMES, tokenizer.decode(walk(GrammarCursor(grammar), rng)))
        assert name == choice
        found.append(json.loads(arguments))
    return found


@pytest.mark.parametrize("kind", HINTS)
def test_constraint_enforces_supported_parts_of_schemas(
    grammars, compiler, tokenizer, kind
) -> None:
    tools = [tool(HINTS[kind]), tool(closed(), "g")]
    for name in ("f", "g"):
        found = random_calls(grammars, compiler, tokenizer, tools, name)
        for arguments in found:
            if kind == "uniqueItems" and name == "f":
                assert all(isinstance(item, bool) for item in arguments["n"])
            else:
                assert 1 <= arguments["n"] <= 9
            assert set(arguments) <= set(tools[name == "g"]["function"]["parameters"]["properties"])
    assert constraint_of(grammars, tools, "auto").grammar is not None


@pytest.mark.parametrize("kind", NOT_BOUND)
def test_constraint_allows_any_object_for_unsupported_schemas(
    grammars, compiler, tokenizer, kind
) -> None:
    tools = [tool(NOT_BOUND[kind]), tool(closed(), "g")]
    grammar = compiler.compile(constraint_of(grammars, tools, "f"))
    text = '<tool_call>\n{"name": "f", "arguments": {"anything": [1, {"b": null}]}}\n</tool_call>'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert grammar.start().validate_tokens(token_ids) == len(token_ids)
    assert random_calls(grammars, compiler, tokenizer, tools, "g")[0].keys() == {"n"}
    no_object = tokenizer.encode(text.replace('{"anything"', '["anything"'))
    assert grammar.start().validate_tokens(no_object) < len(no_object)


@pytest.mark.parametrize("kind", [*HINTS, *NOT_BOUND])
def test_constraint_rejects_strict_tools_with_unsupported_schemas(grammars, kind) -> None:
    schema = {**HINTS, **NOT_BOUND}[kind]
    tools = [tool(closed(), "fine", strict=True), tool(schema, "wrong", strict=True)]
    with pytest.raises(ArgumentError, match="schema for 'wrong': ") as error:
        constraint_of(grammars, tools, "auto")
    assert error.value.field == "tools" and len(error.value.message) < 500
    assert constraint_of(grammars, tools, "fine").grammar
    constraint_of(grammars, [tool(closed(), strict=True), tool(schema, "g", strict=False)], "auto")


def test_constraint_requires_arguments_as_an_object(grammars, compiler, tokenizer) -> None:
    """OpenAI: omitted `parameters` are an empty list; an empty schema allows everything."""
    for parameters, allowed in (
        (None, "{}"),
        ({}, '{"a": 1}'),
        ({"type": ["object", "null"]}, "{}"),
    ):
        grammar = compiler.compile(constraint_of(grammars, [tool(parameters)], "f"))
        for value, is_allowed in ((allowed, True), ("null", False), ("1", False)):
            text = f'<tool_call>\n{{"name": "f", "arguments": {value}}}\n</tool_call>'
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            assert (grammar.start().validate_tokens(token_ids) == len(token_ids)) is is_allowed


def test_constraint_does_not_count_descriptions(grammars) -> None:
    words = {"description": "x" * 50_000, "title": "y" * 50_000, "examples": ["z" * 50_000]}
    schema = closed(description={**LONG, **words}) | words
    schema["$defs"] = {"title": {"type": "string", **words}}
    constraint = constraint_of(grammars, [tool(schema, strict=True)], "f")
    assert len(constraint.grammar) < 1000 and "description" in constraint.grammar


def test_constraint_drops_the_largest_schemas(grammars, compiler, tokenizer) -> None:
    large = closed(**{f"property_{i}": {"enum": [f"v{i}"]} for i in range(4000)})
    tools = [tool(large), tool(closed(), "g")]
    assert random_calls(grammars, compiler, tokenizer, tools, "g")
    constraint = constraint_of(grammars, tools, "auto")
    assert len(constraint.grammar) < 1000 and '"maximum": 9' in constraint.grammar
    many = [
        tool(closed(**{f"p{i}": {"type": "any"} for i in range(50)}), f"f{j}") for j in range(20)
    ]
    assert random_calls(grammars, compiler, tokenizer, [*many, tools[1]], "g")
    constraint = constraint_of(grammars, [*many, tools[1]], "auto")
    assert constraint.grammar.count('"maximum": 9') == 1, "too many to check each argument"
    with pytest.raises(ArgumentError, match="schema for 'f': must have at most 131072 characters"):
        constraint_of(grammars, [tool(large, strict=True)], "auto")


def test_constraint_rejects_models_without_grammars(tokenizer) -> None:
    with pytest.raises(ArgumentError, match="tools must be None .* no end-of-sequence token"):
        constraint_of(ToolGrammars(GrammarCompiler(tokenizer.backend, V, [])), [tool({})], "auto")


def test_long_text_comes_before_the_end_if_the_closing_mark_is_missing() -> None:
    """Another call or the closing mark could follow, but not after so much text."""
    format = ToolFormat('{"name": "', '", "arguments": ', "}", opening="<calls>", between=", ",
                        closing="</calls>")  # fmt: skip
    reader, tail = ToolReader(format), "A text without a mark. " * 60
    text = '<calls>{"name": "f", "arguments": {"a": 1}}' + tail
    deltas = [delta for char in text for delta in reader.push(char)]
    found = "".join(delta.text for delta in deltas if delta.kind == "content")
    assert tail.startswith(found) and len(found) > len(tail) // 2
    deltas += reader.push("", is_last=True)
    parts = {kind: "".join(text for other, text in deltas if other == kind) for kind, _ in deltas}
    assert parts == {"call": "f", "arguments": '{"a": 1}', "content": tail}


ESCAPED = {"a": 'a quote " and } and \\', "b": ["]", '\\"', "\\"], "c": {}}


@pytest.mark.parametrize("format", [HERMES, LLAMA3])
def test_strings_with_escapes_do_not_end_the_arguments_at_any_cut(format) -> None:
    text = f"{format.before_name}f{format.after_name}{json.dumps(ESCAPED)}{format.after_arguments}"
    for cut in range(len(text) + 1):
        reader = ToolReader(format)
        deltas = [*reader.push(text[:cut]), *reader.push(text[cut:], is_last=True)]
        assert {delta.kind for delta in deltas} == {"call", "arguments"}, text[:cut]
        arguments = "".join(delta.text for delta in deltas if delta.kind == "arguments")
        assert json.loads(arguments) == ESCAPED, text[:cut]
