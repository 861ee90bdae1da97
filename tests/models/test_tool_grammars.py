"""Grammars for answers with calls, for schemas as frameworks write them."""

import json

import numpy as np
import pydantic
import pytest

from paged_jax import Tokenizer
from paged_jax.arguments import ArgumentError
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.grammar import GrammarCursor, Grammars
from paged_jax.models.text.tool_grammars import ToolGrammars
from paged_jax.models.text.tools import HERMES
from tests.models.test_grammar import V, walk
from tests.models.test_tools import read
from tests.support.tiny_model import EOS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(bundled_folder())


@pytest.fixture(scope="module")
def compiler(tokenizer) -> Grammars:
    return Grammars(tokenizer, V, [EOS])


@pytest.fixture(scope="module")
def grammars(compiler) -> ToolGrammars:
    return ToolGrammars(compiler)


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


# Patterns of pydantic's Decimal and of zod's email, in which llguidance knows no look-ahead.
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
    "dependentRequired": closed() | {"dependentRequired": {"n": ["n"]}},
}
# Of these nothing binds, beyond that the arguments are an object.
NOT_BOUND = {
    "required": closed(required=["n", "other"]),
    "text": {"type": "string"},
    "properties": {"type": "object", "properties": None},
    "names": closed(required=[{"n": 1}]),
    "names of the rest": {"type": "object", "properties": {}, "required": [["n"]]},
    "patternProperties": {"type": "object", "patternProperties": {"^(?!x)": {}}},
}


def call_blindly(grammars, compiler, tokenizer, tools, choice) -> list[dict]:
    """Return the arguments of blind calls of a tool."""
    form = grammars.form(HERMES, tools, choice)
    grammar = compiler.compile(form)
    rng, found = np.random.default_rng(0), []
    for _ in range(5):
        [(name, arguments)] = read(HERMES, tokenizer.decode(walk(GrammarCursor(grammar), rng)))
        assert name == choice
        found.append(json.loads(arguments))
    return found


@pytest.mark.parametrize("kind", HINTS)
def test_form_binds_what_can_be_expressed(grammars, compiler, tokenizer, kind) -> None:
    tools = [tool(HINTS[kind]), tool(closed(), "g")]
    for name in ("f", "g"):
        found = call_blindly(grammars, compiler, tokenizer, tools, name)
        for arguments in found:
            if kind == "uniqueItems" and name == "f":
                assert all(isinstance(item, bool) for item in arguments["n"])
            else:
                assert 1 <= arguments["n"] <= 9
            assert set(arguments) <= set(tools[name == "g"]["function"]["parameters"]["properties"])
    assert grammars.form(HERMES, tools, "auto").grammar is not None


@pytest.mark.parametrize("kind", NOT_BOUND)
def test_form_allows_any_object_where_nothing_can_be_expressed(
    grammars, compiler, tokenizer, kind
) -> None:
    tools = [tool(NOT_BOUND[kind]), tool(closed(), "g")]
    grammar = compiler.compile(grammars.form(HERMES, tools, "f"))
    text = '<tool_call>\n{"name": "f", "arguments": {"anything": [1, {"b": null}]}}\n</tool_call>'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert grammar.start().validate_tokens(token_ids) == len(token_ids)
    assert call_blindly(grammars, compiler, tokenizer, tools, "g")[0].keys() == {"n"}
    no_object = tokenizer.encode(text.replace('{"anything"', '["anything"'))
    assert grammar.start().validate_tokens(no_object) < len(no_object)


@pytest.mark.parametrize("kind", [*HINTS, *NOT_BOUND])
def test_form_names_the_strict_tool_that_cannot_be_expressed(grammars, kind) -> None:
    schema = {**HINTS, **NOT_BOUND}[kind]
    tools = [tool(closed(), "fine", strict=True), tool(schema, "wrong", strict=True)]
    with pytest.raises(ArgumentError, match="that of 'wrong' cannot be: ") as error:
        grammars.form(HERMES, tools, "auto")
    assert error.value.field == "tools" and len(error.value.message) < 500
    assert grammars.form(HERMES, tools, "fine").grammar
    grammars.form(HERMES, [tool(closed(), strict=True), tool(schema, "g", strict=False)], "auto")


def test_form_takes_arguments_as_an_object(grammars, compiler, tokenizer) -> None:
    """OpenAI: omitted `parameters` are an empty list; an empty schema allows everything."""
    for parameters, allowed in (
        (None, "{}"),
        ({}, '{"a": 1}'),
        ({"type": ["object", "null"]}, "{}"),
    ):
        grammar = compiler.compile(grammars.form(HERMES, [tool(parameters)], "f"))
        for value, is_allowed in ((allowed, True), ("null", False), ("1", False)):
            text = f'<tool_call>\n{{"name": "f", "arguments": {value}}}\n</tool_call>'
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            assert (grammar.start().validate_tokens(token_ids) == len(token_ids)) is is_allowed


def test_form_does_not_count_descriptions(grammars) -> None:
    words = {"description": "x" * 50_000, "title": "y" * 50_000, "examples": ["z" * 50_000]}
    schema = closed(description={**LONG, **words}) | words
    schema["$defs"] = {"title": {"type": "string", **words}}
    form = grammars.form(HERMES, [tool(schema, strict=True)], "f")
    assert len(form.grammar) < 1000 and "description" in form.grammar


def test_form_leaves_out_the_largest_schemas(grammars, compiler, tokenizer) -> None:
    large = closed(**{f"property_{i}": {"enum": [f"v{i}"]} for i in range(4000)})
    tools = [tool(large), tool(closed(), "g")]
    assert call_blindly(grammars, compiler, tokenizer, tools, "g")
    form = grammars.form(HERMES, tools, "auto")
    assert len(form.grammar) < 1000 and '"maximum": 9' in form.grammar
    many = [
        tool(closed(**{f"p{i}": {"type": "any"} for i in range(50)}), f"f{j}") for j in range(20)
    ]
    assert call_blindly(grammars, compiler, tokenizer, [*many, tools[1]], "g")
    form = grammars.form(HERMES, [*many, tools[1]], "auto")
    assert form.grammar.count('"maximum": 9') == 1, "too many to look at each argument"
    with pytest.raises(ArgumentError, match="'f' cannot be: must have at most 131072 characters"):
        grammars.form(HERMES, [tool(large, strict=True)], "auto")


def test_form_needs_grammars(tokenizer) -> None:
    with pytest.raises(ArgumentError, match="tools must be None as the model has no end-of-seq"):
        ToolGrammars(Grammars(tokenizer, V, [])).form(HERMES, [tool({})], "auto")
