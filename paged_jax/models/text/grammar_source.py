"""Sources of grammars for llguidance, from structured outputs and JSON schemas.

A *label* is one of the alternative constants of a choice: an item of ``choice`` or of a schema's
``enum``, or a ``const`` in a union such as ``anyOf``. *Fuel* is llguidance's unit for the work to
build a lexer; a grammar that needs more than its limit is rejected.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paged_jax.sampling.params import StructuredOutputsParams

MANY_LABELS = 1000
"""Number of labels above which llguidance may work longer on a constraint, see `label_fuel`."""
_LABELS = re.compile(r'"(enum|anyOf|oneOf)"\s*:\s*(?=\[)')
# The keys of a label in a union: {"const": "a", "title": "The first"}.
_LABEL_KEYS = {"const", "type", "title", "description"}
# Maximum number of characters to read of unions that contain no labels, as a multiple of the text's
# length.
_MAX_WASTE = 8
# Characters that JSON escapes.
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
LAYOUT: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
"""Layout of JSON unless the schema has "x-guidance": on one line, as ``json.dumps`` writes it.

The names of properties are then forced, and a model cannot fill the context with white space.
"""
# Keys for human readers, which do not affect validation.
_ANNOTATIONS = frozenset({
    "$comment", "$schema", "default", "deprecated", "description", "example", "examples",
    "readOnly", "title", "writeOnly",
})  # fmt: skip
# Keys that state which unnamed properties an object may have, and keys that combine schemas.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_JOINED = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas")


class _SchemaKeys(NamedTuple):
    """Keys of a schema whose values contain schemas.

    Attributes:
      mappings: keys with a mapping from names to schemas.
      lists: keys with a list of schemas.
      single: keys with a single schema.
    """

    mappings: tuple[str, ...]
    lists: tuple[str, ...]
    single: tuple[str, ...]

    def replace(self, schema: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the schema with each direct inner schema replaced by ``function(inner)``."""
        new = dict(schema)
        for name, part in schema.items():
            if name in self.mappings and isinstance(part, Mapping):
                new[name] = {key: function(value) for key, value in part.items()}
            elif name in self.lists and isinstance(part, list):
                new[name] = [*map(function, part)]
            elif name in self.single:
                new[name] = function(part)
        return new


# `_CLOSABLE` has the keys whose inner schemas `close` closes too. `_ALL` has all keys with inner
# schemas.
_CLOSABLE = _SchemaKeys(
    ("properties", "patternProperties", "$defs", "definitions"),
    ("anyOf", "oneOf", "prefixItems"),
    ("items", "additionalProperties"),
)
_ALL = _SchemaKeys(
    (*_CLOSABLE.mappings, "dependentSchemas"),
    (*_CLOSABLE.lists, "allOf", "items"),
    (
        *_CLOSABLE.single, "additionalItems", "contains", "else", "if", "not", "propertyNames",
        "then", "unevaluatedItems", "unevaluatedProperties",
    ),
)  # fmt: skip


def without_annotations(schema: Any) -> Any:
    """Return a schema without descriptions, titles, defaults and other annotations.

    Both schemas accept the same texts. Annotations can be most of a schema.

    Example:
      >>> without_annotations({"title": "T", "properties": {"title": {"description": "It."}}})
      {'properties': {'title': {}}}
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = {name: part for name, part in schema.items() if name not in _ANNOTATIONS}
    return _ALL.replace(kept, without_annotations)


def close(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbid properties that a schema does not name, unless the schema says otherwise.

    Frameworks usually generate schemas that allow further properties, and an unsure model would
    write further properties until the context is full. Every text that matches the closed schema
    matches the given schema.

    A schema is left unchanged if it says which further properties are allowed, or if it combines
    several descriptions of an object. These could contradict each other when closed.

    Example:
      >>> close({"type": "object", "properties": {"a": {"type": "null"}}})
      {'type': 'object', 'properties': {'a': {'type': 'null'}}, 'additionalProperties': False}
    """
    return schema if _is_joined(schema) else _closed(schema)


def _is_joined(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if "allOf" in schema or "properties" in schema and any(name in schema for name in _JOINED):
        return True
    inner: list[Any] = []
    _CLOSABLE.replace(schema, inner.append)
    return any(map(_is_joined, inner))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    new = _CLOSABLE.replace(schema, _closed)
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, Mapping) and isinstance(required, list):
        are_named = all(isinstance(name, str) and name in named for name in required)
        if are_named and not any(name in schema for name in _OPEN):
            new["additionalProperties"] = False
    return new


def constraint_text(constraint: StructuredOutputsParams) -> str:
    """Return the text of a constraint: a regular expression, a Lark grammar or a JSON schema."""
    if constraint.choice is not None:
        # A single terminal, because llguidance allows at most 2,000 alternatives in a rule.
        return f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, constraint.choice))}"
    if constraint.regex is not None or constraint.grammar is not None:
        return str(constraint.regex or constraint.grammar)
    return json.dumps(
        {"type": "object"} if constraint.json is None else close(json.loads(str(constraint.json)))
    )


def constraint_rule(constraint: StructuredOutputsParams) -> str:
    r"""Return the right side of a rule of a Lark grammar that accepts the texts of a constraint.

    Example:
      >>> constraint_rule(StructuredOutputsParams(regex=r"a/b\/c"))
      '/a\\/b\\/c/'
    """
    text = constraint_text(constraint)
    if constraint.regex is not None:
        escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], text)
        return f"/{escaped}/".replace("\n", "\\n")
    if constraint.grammar is not None or constraint.choice is not None:
        return f"%lark {{\n{text}\n}}"
    schema = json.loads(text)
    guidance = schema.get("x-guidance")
    own = guidance if isinstance(guidance, Mapping) else {}
    return "%json " + json.dumps({**schema, "x-guidance": {**LAYOUT, **own}})


def quoted(text: str) -> str:
    """Return a text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def constraint_source(constraint: StructuredOutputsParams, text: str) -> str:
    """Return the llguidance grammar of a constraint, given the result of `constraint_text`."""
    from llguidance import LLMatcher

    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(text)
    if constraint.grammar is not None or constraint.choice is not None:
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_json_schema(text, defaults=LAYOUT)


def unforced_source(source: str) -> str:
    """Return a source that allows all tokens that spell a forced text, not only one spelling.

    By default llguidance's masks allow only the token that the tokenizer would choose.
    """
    text = source
    if source.startswith('{"grammars"'):
        [grammar] = json.loads(source)["grammars"]
        text = grammar["lark_grammar"] or f"start: %json {json.dumps(grammar['json_schema'])}"
    return '%llguidance {"no_forcing": true}\n' + text


def without_descriptions(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return a JSON constraint without the annotations of its schema."""
    try:
        schema = json.dumps(without_annotations(json.loads(str(constraint.json))))
    except RecursionError:
        return constraint
    return StructuredOutputsParams(json=schema)


def split_labels(constraint: StructuredOutputsParams, text: str) -> tuple[Sequence[Any], str]:
    """Return the labels of a constraint, and its text with a single label per enum or union.

    For a ``choice``, the text is returned unchanged. The module docstring defines labels.
    """
    if constraint.choice is not None:
        return constraint.choice, text
    labels: list[Any] = []
    shorter, end, num_wasted = "", 0, 0
    for match in _LABELS.finditer(text):
        start = match.end()
        if start < end:  # this match is inside an enum that was already read
            continue
        # Stop reading unions after a while: in a hostile schema with nested unions, each outer
        # union would read the inner unions again.
        if match[1] != "enum" and num_wasted > _MAX_WASTE * len(text):
            continue
        try:
            values, stop = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if match[1] == "enum":
            labels += values
        elif all(isinstance(x, dict) and "const" in x and x.keys() <= _LABEL_KEYS for x in values):
            labels += [x["const"] for x in values]
        else:
            num_wasted += stop - start
            continue
        shorter += text[end:start] + json.dumps(values[:1])
        end = stop
    return labels, shorter + text[end:]


def label_fuel(labels: Sequence[Any]) -> int:
    """Return the fuel that a constraint gets for its labels, in addition to the usual limit.

    Measured: each label needs 13, plus 75 for each escaped character.
    """
    if len(labels) <= MANY_LABELS:
        return 0
    num_escapes = sum(len(_ESCAPED.findall(str(label))) for label in labels)
    return 16 * len(labels) + 128 * num_escapes
