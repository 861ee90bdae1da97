"""Simplification of JSON schemas, so that they can be compiled to grammars.

It removes annotations, follows references, merges `allOf`, and forbids unlisted properties.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Keys for human readers, which do not influence validation.
_ANNOTATIONS = frozenset({
    "$comment", "$schema", "default", "deprecated", "description", "example", "examples",
    "readOnly", "title", "writeOnly",
})  # fmt: skip
# Keys that allow or forbid unlisted properties of an object, and keys that combine schemas.
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_JOINED = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas")


class _SchemaKeys(NamedTuple):
    """Keys of a JSON schema that contain inner schemas.

    Attributes:
      mappings: keys of objects with a schema for each name.
      lists: keys of lists of schemas.
      single: keys of single schemas.
    """

    mappings: tuple[str, ...]
    lists: tuple[str, ...]
    single: tuple[str, ...]

    def replace(self, schema: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
        """Return `schema` after replacing each schema directly inside it by ``function(inner)``."""
        new = dict(schema)
        for name, part in schema.items():
            if name in self.mappings and isinstance(part, Mapping):
                new[name] = {key: function(value) for key, value in part.items()}
            elif name in self.lists and isinstance(part, list):
                new[name] = [*map(function, part)]
            elif name in self.single:
                new[name] = function(part)
        return new


# `_ALL` contains all keys with inner schemas. `close` forbids unlisted properties only in the inner
# schemas under the keys in `_CLOSABLE`.
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
    """Remove descriptions, titles, defaults and other annotations from a schema.

    The result accepts the same texts. Annotations can be the largest part of a schema.

    Example:
      >>> without_annotations({"title": "T", "properties": {"title": {"description": "It."}}})
      {'properties': {'title': {}}}
    """
    if not isinstance(schema, Mapping):
        return schema
    entries = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
    return _ALL.replace(entries, without_annotations)


def close(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbid properties that a schema does not list, unless it allows or forbids them itself.

    Schemas that frameworks generate usually allow additional properties. An unsure model would then
    write additional properties until the context is full. Every text that matches the closed schema
    also matches the given schema.

    First, the objects in each `allOf` are merged. If the schema still combines several descriptions
    of an object after that, it is not closed, because closed descriptions could contradict each
    other. Objects that state which additional properties are allowed are not changed.

    Example:
      >>> close({"type": "object", "properties": {"a": {"type": "null"}}})
      {'type': 'object', 'properties': {'a': {'type': 'null'}}, 'additionalProperties': False}
    """
    schema = merged(schema)
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


# `merged` can join objects that have only these keys, annotations and definitions.
_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties"}
DEFINITIONS = ("$defs", "definitions")
"""Keys of a schema with definitions that its other parts may refer to."""
# Keys next to an `allOf` that stay in the schema when the `allOf` is merged.
_KEPT = frozenset((*DEFINITIONS, "x-guidance"))
# Maximum number of characters that merging may add by repeating definitions, as a multiple of the
# size of the schema.
_MAX_GROWTH = 4


def merged(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the objects in each `allOf`, and merge each reference with the keys next to it.

    The result accepts the same texts as `schema`. Recursive objects, and objects with keys that are
    not in `_OBJECT_KEYS`, are not merged.

    Example:
      >>> parts = [{"properties": {name: {}}, "required": [name]} for name in "ab"]
      >>> merged({"allOf": parts})
      {'properties': {'a': {}, 'b': {}}, 'required': ['a', 'b']}
    """
    try:
        return _Merger(schema).merge(schema)
    except (RecursionError, _TooLargeError):
        return schema


class _TooLargeError(Exception):
    """Error for a merged schema that would be too large, because it repeats definitions."""


class _Merger:
    """Implementation of `merged` for one schema.

    Args:
      root: the whole schema, for looking up local references.
    """

    def __init__(self, root: Any):
        self._root = root
        self._room: int | None = None  # characters of definitions that may still be repeated
        self._active: list[str] = []  # references that are being followed, to detect recursion

    def merge(self, schema: Any) -> Any:
        """Join the objects of each `allOf` in a schema, where possible; return the new schema."""
        if not isinstance(schema, Mapping):
            return schema
        replaced = _ALL.replace(schema, self.merge)
        annotations = {key: replaced[key] for key in _KEPT if key in replaced}
        siblings = {
            key: replaced[key] for key in replaced.keys() - _KEPT - _ANNOTATIONS - {"allOf", "$ref"}
        }
        parts = replaced.get("allOf", [])
        if not isinstance(parts, list):
            return replaced
        if "$ref" in replaced and (siblings or parts):
            parts = [{"$ref": replaced["$ref"]}, *parts]
        if not parts:
            return replaced
        if len(parts) == 1 and not siblings and isinstance(parts[0], Mapping):
            return {**parts[0], **annotations}
        objects = [*map(self._object, parts), self._object(siblings, is_beside=True)]
        # Properties come in the order of the schema.
        order = [key for key in replaced if key in ("properties", "allOf", "$ref")]
        if order[0] == "properties":
            objects.insert(0, objects.pop())
        supported = [member for member in objects if member is not None]
        if len(supported) < len(objects):
            return replaced
        return {**self._joined(supported), **annotations}

    def _object(self, part: Any, *, is_beside: bool = False) -> dict[str, Any] | None:
        """Return `part` as an object schema that can be joined with others.

        Args:
          part: a schema, or a reference to a schema.
          is_beside: whether `part` consists of the keys beside an `allOf`. Only these keys may
            forbid additional properties.

        Returns:
          The object schema without annotations. None if `part` cannot be joined.
        """
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str) and not part.keys() - {"$ref"} - _ANNOTATIONS:
            return self._target(reference)
        if not isinstance(part, Mapping):
            return {} if part is True else None
        entries = {key: value for key, value in part.items() if key not in _ANNOTATIONS}
        if is_beside and entries.get("unevaluatedProperties") is False:
            del entries["unevaluatedProperties"]
            entries["additionalProperties"] = False
        elif entries.get("additionalProperties", True) is not True:
            return None
        is_object = (
            not entries.keys() - _OBJECT_KEYS
            and entries.get("type", "object") == "object"
            and isinstance(entries.get("properties", {}), Mapping)
            and isinstance(entries.get("required", []), list)
        )
        return entries if is_object else None

    def _target(self, reference: str) -> dict[str, Any] | None:
        """Return the object schema to which a reference points, or None.

        The result is None if the schema is missing or recursive, or if `_object` returns None.
        """
        target = resolve({"$ref": reference}, self._root)
        if target is None or reference in self._active:
            return None
        if self._room is None:
            self._room = _MAX_GROWTH * len(json.dumps(self._root))
        self._room -= len(json.dumps(target))
        if self._room < 0:
            raise _TooLargeError
        self._active.append(reference)
        target_object = self._object(self.merge(target))
        self._active.pop()
        return target_object

    def _joined(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        """Join object schemas: the result has the properties and required properties of all."""
        joined: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        required: dict[str, None] = {}
        for member in objects:
            for name, schema in member.get("properties", {}).items():
                before = properties.setdefault(name, schema)
                if before != schema:
                    properties[name] = self.merge({"allOf": [before, schema]})
            required |= dict.fromkeys(member.get("required", []))
            joined |= {
                key: member[key] for key in ("type", "additionalProperties") if key in member
            }
        if properties:
            joined["properties"] = properties
        return joined | ({"required": list(required)} if required else {})


def resolve(schema: Any, root: Any) -> Any:
    """Follow plain local references, and return the schema to which they lead.

    A plain reference is a schema with no key but ``$ref``, except annotations. Other schemas are
    returned unchanged.

    Args:
      schema: a schema, which may be ``{"$ref": "#/..."}``.
      root: the schema with the definitions.

    Returns:
      A schema that is not a plain reference; None if a reference cannot be resolved.

    Example:
      >>> resolve({"$ref": "#/$defs/a"}, {"$defs": {"a": {"type": "null"}}})
      {'type': 'null'}
    """
    seen: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(pointer := schema.get("$ref"), str):
        if schema.keys() - {"$ref"} - _ANNOTATIONS:
            return schema
        if pointer in seen or not pointer.startswith("#/"):
            return None
        seen.add(pointer)
        schema = root
        for name in pointer[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def argument_schemas(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of each argument of a function by name, with references resolved.

    Args:
      parameters: the schema of all arguments.
    """
    schema = merged({**parameters, "type": "object"})
    properties = schema.get("properties")
    named = properties if isinstance(properties, Mapping) else {}
    return {name: resolve(inner, schema) for name, inner in named.items()}


def is_text(schema: Any) -> bool:
    """Return whether a schema describes a string.

    This matters in formats with tags, which write strings without quotes.
    """
    return isinstance(schema, Mapping) and schema.get("type") == "string"
