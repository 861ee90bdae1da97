"""Encoding of answers as JSON responses and as server-sent events."""

import functools
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response

from paged_jax.formatting import LINE_ENDS

JsonDict = dict[str, Any]
"""A JSON object with the fields of one of the models in `schemas`, as a plain dict."""
# Line ends that are escaped in all JSON. Clients that read streams with `str.splitlines`, such as
# `httpx.Response.iter_lines`, would split an event at them.
_LINE_ENDS = {end.encode(): escape.encode() for end, escape in LINE_ENDS.items()}


def json_response(answer: BaseModel | JsonDict, status: int = 200) -> Response:
    """Return an HTTP response with a Pydantic model or a dict as JSON."""
    return Response(_encode(answer), status, media_type="application/json")


def encode_event(event: JsonDict) -> bytes:
    """Return the bytes of a server-sent event with the JSON of `event` as its data."""
    return b"data: %b\n\n" % _encode(event)


def _encode(answer: BaseModel | JsonDict) -> bytes:
    data = to_json(answer)
    for end, escape in _LINE_ENDS.items():
        data = data.replace(end, escape)
    return data


def encode_named_event(name: str, data: JsonDict) -> bytes:
    """Return the bytes of a server-sent event with a name and JSON data."""
    return b"event: " + name.encode() + b"\n" + encode_event(data)


def to_json_dict(model: type[BaseModel], /, **fields: Any) -> JsonDict:
    """Return the same JSON object as the serialisation of ``model(**fields)``.

    This takes a fifth of the time, because the model is not created and fields are not validated.
    Fields that the model declares with `exclude_if` are omitted if they are None.

    Args:
      model: the Pydantic model, which has the defaults.
      **fields: values of its fields. Fields with a default may be left out.

    Example:
      >>> class Choice(BaseModel):
      ...     index: int
      ...     finish_reason: str | None = None
      >>> to_json_dict(Choice, index=0)
      {'index': 0, 'finish_reason': None}
    """
    defaults, optional = _defaults(model)
    values = {k: value for k, value in fields.items() if value is not None or k not in optional}
    for name, value in defaults.items():
        values.setdefault(name, value)
    return values


@functools.cache
def _defaults(model: type[BaseModel]) -> tuple[JsonDict, frozenset[str]]:
    """Return a model's defaults (a dict by field name) and the names of its optional fields.

    Optional fields are those that are left out of the JSON if they are None. The dict does not
    contain them.
    """
    fields = model.model_fields.items()
    optional = frozenset(name for name, field in fields if field.exclude_if is not None)
    defaults = {
        name: field.default
        for name, field in fields
        if name not in optional and not field.is_required()
    }
    return defaults, optional
