"""What form a text must have: plain Python, checked when it is made."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.argument_names import names_arguments
from paged_jax.checks import ArgumentError
from paged_jax.short_repr import short_repr

_FUNCTION = "StructuredOutputsParams"


class StructuredOutputError(RuntimeError):
    """The grammar of a structured output became too complex to follow."""


@names_arguments
@short_repr
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that a generated text must have, with vLLM's names: exactly one of the five.

    Attributes:
      json: a JSON schema, as a text or as what `json` reads from it; kept as a text.
      regex: a regular expression, in the syntax of Rust's crate `regex`, which all of it matches.
      choice: texts, of which it is one; kept as a tuple.
      grammar: a grammar of llguidance, a variant of Lark, whose rule ``start`` it follows.
      json_object: whether it is any JSON object.

    Raises:
      ValueError: none or several are given, or one is of a wrong type. What a schema or a grammar
        says is looked at when a request is made, see `Engine.add_request`.

    Example:
      >>> StructuredOutputsParams(choice=["yes", "no"]).choice
      ('yes', 'no')
      >>> StructuredOutputsParams(json={"type": "integer"}).json
      '{"type": "integer"}'
      >>> StructuredOutputsParams()
      Traceback (most recent call last):
      ...
      paged_jax.checks.ArgumentError: StructuredOutputsParams: exactly one of json, regex, ...
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in dataclasses.fields(self))
            found = " and ".join(given) or "none"
            raise ArgumentError(_FUNCTION, f"exactly one of {names} must be given, got {found}.")
        [name] = given
        object.__setattr__(self, name, _CHECKS[name](name, getattr(self, name)))


def _schema(name: str, value: Any) -> str:
    try:
        # In the order in which it stands: so are the properties of the text.
        text = json.dumps(dict(value)) if isinstance(value, Mapping) else value
        is_schema = isinstance(text, str) and isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(_FUNCTION, f"must be JSON: {error}.", name) from None
    _require(is_schema, name, "be a JSON schema, a dict or the text of one", value)
    return text


def _text(name: str, value: Any) -> str:
    _require(isinstance(value, str) and bool(value), name, "be a non-empty text", value)
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    is_good = is_list and bool(value) and all(isinstance(text, str) and text for text in value)
    _require(is_good, name, "be a list of one or more non-empty texts", value)
    return tuple(value)


def _true(name: str, value: Any) -> bool:
    _require(value is True, name, "be a bool", value)
    return True


_CHECKS: Mapping[str, Any] = {
    "json": _schema,
    "regex": _text,
    "choice": _texts,
    "grammar": _text,
    "json_object": _true,
}


def _require(is_ok: bool, name: str, rule: str, value: object) -> None:
    if not is_ok:
        raise ArgumentError(_FUNCTION, f"must {rule}, got {value!r}.", name)
