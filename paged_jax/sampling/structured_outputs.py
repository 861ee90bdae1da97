# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""`StructuredOutputsParams`: a JSON schema, a pattern or a grammar that a text must match."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from paged_jax.arguments import ArgumentError, is_sequence, names_arguments
from paged_jax.formatting import short_repr

_STRUCTURED = "StructuredOutputsParams"


class StructuredOutputError(RuntimeError):
    """Error if the grammar of structured outputs becomes too complex during generation."""


@names_arguments
@short_repr
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint on a generated text, with vLLM's field names. Exactly one field must be set.

    Attributes:
      json: a JSON schema that the text must match, as text or as a dict; stored as text.
      regex: a regular expression that the whole text must match, in the syntax of Rust's crate
        `regex`.
      choice: list of the allowed texts; stored as a tuple.
      grammar: a grammar in llguidance's variant of Lark. The text must match its rule ``start``.
      json_object: True if the text must be a JSON object, with any fields.

    Raises:
      ValueError: not exactly one field is set, or it has a wrong type. Schemas and grammars are
        compiled later, see `Engine.add_request`.

    Example:
      >>> StructuredOutputsParams(choice=["yes", "no"]).choice
      ('yes', 'no')
      >>> StructuredOutputsParams(json={"type": "integer"}).json
      '{"type": "integer"}'
      >>> StructuredOutputsParams()
      Traceback (most recent call last):
      ...
      paged_jax.arguments.ArgumentError: StructuredOutputsParams: exactly one of json, regex, ...
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        fields = [name for name, value in vars(self).items() if value not in (None, False)]
        if len(fields) != 1:
            names = ", ".join(field.name for field in dataclasses.fields(self))
            received = " and ".join(fields) or "none"
            raise ArgumentError(
                _STRUCTURED, f"exactly one of {names} must be given, got {received}."
            )
        [name] = fields
        convert, rule = _FORMS[name]
        value = convert(getattr(self, name))
        if value is None:
            problem = f"must {rule}, got {getattr(self, name)!r}."
            raise ArgumentError(_STRUCTURED, problem, name)
        object.__setattr__(self, name, value)


def _schema(value: Any) -> str | None:
    try:
        # Do not sort the keys: properties are generated in the order of the schema's keys.
        text = json.dumps(dict(cast(Any, value))) if isinstance(value, Mapping) else value
        is_schema = isinstance(text, str) and isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(_STRUCTURED, f"must be JSON: {error}.", "json") from None
    return text if is_schema else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> tuple[str, ...] | None:
    is_valid = is_sequence(value) and all(isinstance(text, str) and text for text in value)
    return tuple(value) if is_valid and value else None


# Maps each field to a function and a rule. The function returns the value to store, or None for an
# invalid value. An error message puts "must" before the rule.
_FORMS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "json": (_schema, "be a JSON schema, as a dict or as text"),
    "regex": (_text, "be a non-empty text"),
    "choice": (_texts, "be a list of one or more non-empty texts"),
    "grammar": (_text, "be a non-empty text"),
    "json_object": (lambda value: value is True or None, "be a bool"),
}
