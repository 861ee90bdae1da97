"""Conversion of JSON schemas for grammars: no annotations, and closed objects."""

from collections.abc import Mapping
from typing import Any

# Where the schemas within a schema are: as values of a mapping, in a list, or alone.
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
# What says more about the properties of the same object.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_JOINED = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas")


# Keys for human readers. Validation does not depend on them.
_ANNOTATIONS = frozenset({
    "$comment", "$schema", "default", "deprecated", "description", "example", "examples",
    "readOnly", "title", "writeOnly",
})  # fmt: skip
_MORE_MAPPINGS = (*_MAPPINGS, "dependentSchemas")
_MORE_LISTS = (*_LISTS, "allOf", "items")
_MORE_ALONE = (
    *_ALONE, "additionalItems", "contains", "else", "if", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def without_annotations(schema: Any) -> Any:
    """Return a schema without descriptions, titles, defaults and the like.

    Both schemas accept the same texts. Annotations can be most of a schema.

    Example:
      >>> without_annotations({"title": "T", "properties": {"title": {"description": "It."}}})
      {'properties': {'title': {}}}
    """
    if not isinstance(schema, Mapping):
        return schema
    new = {name: part for name, part in schema.items() if name not in _ANNOTATIONS}
    for name, part in new.items():
        if name in _MORE_MAPPINGS and isinstance(part, Mapping):
            new[name] = {key: without_annotations(value) for key, value in part.items()}
        elif name in _MORE_LISTS and isinstance(part, list):
            new[name] = [*map(without_annotations, part)]
        elif name in _MORE_ALONE:
            new[name] = without_annotations(part)
    return new


def close(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Allow objects no properties beyond those named, where a schema leaves that open.

    What frameworks make of a class most often leaves it open, and a model that is not sure where to
    end would write further properties until the context is full. Whatever follows the closed schema
    follows the given one.

    A schema that is left as it is: one that says of itself what further properties there are, or
    that joins several descriptions of one object, which closed might exclude each other.

    Example:
      >>> close({"type": "object", "properties": {"a": {"type": "null"}}})
      {'type': 'object', 'properties': {'a': {'type': 'null'}}, 'additionalProperties': False}
    """
    return schema if _is_joined(schema) else _closed(schema)


def _is_joined(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    has_two = "properties" in schema and any(name in schema for name in _JOINED)
    return "allOf" in schema or has_two or any(map(_is_joined, _within(schema)))


def _within(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas within a schema."""
    found = [schema[name] for name in _ALONE if name in schema]
    for name in _MAPPINGS:
        part = schema.get(name)
        found += part.values() if isinstance(part, Mapping) else ()
    for name in _LISTS:
        part = schema.get(name)
        found += part if isinstance(part, list) else ()
    return found


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    new = dict(schema)
    for name, part in schema.items():
        if name in _MAPPINGS and isinstance(part, Mapping):
            new[name] = {key: _closed(value) for key, value in part.items()}
        elif name in _LISTS and isinstance(part, list):
            new[name] = [*map(_closed, part)]
        elif name in _ALONE:
            new[name] = _closed(part)
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, Mapping) and isinstance(required, list):
        are_named = all(isinstance(name, str) and name in named for name in required)
        if are_named and not any(name in schema for name in _OPEN):
            new["additionalProperties"] = False
    return new
