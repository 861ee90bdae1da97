"""Tests of JSON schemas that join objects with `allOf` and references."""

import json

import numpy as np
import pytest

from paged_jax import StructuredOutputsParams, Tokenizer
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.grammar import GrammarCompiler, GrammarCursor
from paged_jax.models.text.json_schemas import argument_schemas, close, merged
from paged_jax.models.text.tool_formats import HERMES
from paged_jax.models.text.tool_grammars import tool_grammar
from tests.models.test_grammar import V, walk
from tests.models.test_tools import KNOWN, read, support_of, tool
from tests.support.tiny_model import EOS

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9, "minimum": 0}}}
TRIP = {"properties": {**CITY["properties"], **DAYS["properties"]}, "required": ["city"]}
# A definition that contains itself.
NODE = {"allOf": [{"properties": {"next": {"$ref": "#/$defs/Node"}}}, CITY]}


def with_definitions(**schema):
    return {"$defs": {"City": CITY, "Colour": {"type": "string", "enum": ["red"]}}, **schema}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"allOf": [CITY, DAYS]}, TRIP),
        (with_definitions(allOf=[{"$ref": "#/$defs/City"}, DAYS], title="Trip"), TRIP),
        (with_definitions(**{"$ref": "#/$defs/City"}, **DAYS), TRIP),
        ({"allOf": [{"allOf": [CITY]}, True], **DAYS}, TRIP),
        ({**CITY, "allOf": [DAYS]}, TRIP),
        ({"allOf": [CITY, DAYS], "unevaluatedProperties": False}, TRIP),
        ({"allOf": [CITY, CITY, DAYS], "description": "A trip."}, TRIP),
    ],
)
def test_merged_joins_objects(schema, expected) -> None:
    found = close(schema)
    want = {"type": "object", **expected, "additionalProperties": False}
    assert {key: found[key] for key in found if key != "$defs"} == want
    assert list(found["properties"]) == list(TRIP["properties"]), "the order of the schema"
    assert merged(found) == found


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [CITY, {**DAYS, "additionalProperties": False}]},  # no city is allowed
        {"allOf": [CITY, {"minProperties": 1}]},
        {"allOf": [CITY, {"type": "array"}]},
        {"allOf": [CITY, {"anyOf": [DAYS]}]},
        {"allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"maximum": 2}}}]},
        {"allOf": [CITY, {"$ref": "https://example.com/schema.json"}]},
        {"allOf": [CITY, {"$ref": "#/$defs/missing"}]},
        {"allOf": [CITY, {"properties": 5}]},
        {"allOf": [CITY, 5]},
        {"allOf": 5},
        {"allOf": [{"$ref": "#"}, CITY]},
    ],
)
def test_other_schemas_are_left_open(schema) -> None:
    assert "additionalProperties" not in close(schema)
    assert "allOf" in json.dumps(merged(schema))


def test_merged_ends_for_recursive_definitions() -> None:
    schema = {"$defs": {"Node": NODE}, "allOf": [{"$ref": "#/$defs/Node"}, DAYS]}
    found = merged(schema)
    assert set(found["properties"]) == {"next", "city", "days"}
    assert found["properties"]["next"] == {"$ref": "#/$defs/Node"}
    loop = {"$ref": "#/$defs/b", "properties": {}}
    assert merged({"$defs": {"a": loop, "b": {"$ref": "#/$defs/b"}}, "allOf": [loop]})


def test_merged_does_not_multiply_definitions() -> None:
    """Each definition names the next twice, so all together would have 2**40 properties."""

    def inner(name: str, index: int):
        part = {"allOf": [{"$ref": f"#/$defs/A{index}"}, {"properties": {"k": {}}}]}
        return {"properties": {name: part}}

    definitions = {f"A{i}": {"allOf": [inner("x", i + 1), inner("y", i + 1)]} for i in range(40)}
    schema = {"$defs": {**definitions, "A40": CITY}, "allOf": [{"$ref": "#/$defs/A0"}, CITY]}
    assert merged(schema) is schema


def test_arguments_of_tools_may_be_joined() -> None:
    shirt = with_definitions(
        allOf=[{"$ref": "#/$defs/City"}], properties={"colour": {"$ref": "#/$defs/Colour"}}
    )
    schemas = argument_schemas(shirt)
    assert schemas["colour"] == {"type": "string", "enum": ["red"]}
    tokenizer = Tokenizer.from_folder(bundled_folder())
    compiler, rng = GrammarCompiler(tokenizer.backend, V, [EOS]), np.random.default_rng(0)
    coder = support_of(KNOWN["qwen 3 coder"][0]).format
    assert coder is not None
    for parameters in (shirt, with_definitions(**{"$ref": "#/$defs/City"})):
        tools = [tool({**parameters, "required": ["city"]})]
        for format in (HERMES, coder):
            grammar = tool_grammar(format, tools, is_required=True, is_parallel=False)
            compiled = compiler.compile(StructuredOutputsParams(grammar=grammar))
            for _ in range(3):
                text = tokenizer.decode(walk(GrammarCursor(compiled), rng))
                [(name, arguments)] = read(format, text, tools=tools)
                value = json.loads(arguments)
                assert name == "f" and value["city"] in ("Oslo", "Rome")
                assert value.get("colour", "red") == "red"
                assert set(value) <= set(argument_schemas(parameters))
