"""JSON responses, events of a stream, and errors, in the format of OpenAI's API."""

import functools
import re
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from paged_jax.arguments import ArgumentError
from paged_jax.formatting import LINE_ENDS

JsonDict = dict[str, Any]
"""A JSON object with the fields of one of the models in `schemas`, as a plain dict."""

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Paths of Anthropic's API, possibly below a prefix.
_ANTHROPIC = re.compile(r"/v1/messages(/|$)")
# Details of errors in Anthropic's API, by the invalid field. Clients that keep the whole
# conversation repeat a request without `thread` if the error has these details.
_ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
# Types of errors in Anthropic's API, by status.
_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Maximum characters of an error message, which may quote text from the client.
_MAX_CHARS = 500
# Clients that read a stream with `str.splitlines`, such as `httpx.Response.iter_lines`, would split
# an event at these characters.
_LINE_ENDS = {end.encode(): escape.encode() for end, escape in LINE_ENDS.items()}


def json_response(answer: BaseModel | JsonDict, status: int = 200) -> Response:
    """Return a response with a model or a dict as JSON."""
    return Response(_encode(answer), status, media_type="application/json")


def encode_event(event: JsonDict) -> bytes:
    """Return the bytes of a server-sent event with this JSON as its data."""
    return b"data: %b\n\n" % _encode(event)


def _encode(answer: BaseModel | JsonDict) -> bytes:
    data = to_json(answer)
    for end, escape in _LINE_ENDS.items():
        data = data.replace(end, escape)
    return data


def encode_named_event(name: str, data: JsonDict) -> bytes:
    """Return the bytes of a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + encode_event(data)


def to_json_dict(model: type[BaseModel], /, **fields: Any) -> JsonDict:
    """Return the JSON object that ``model(**fields)`` serialises to, at a fifth of the cost.

    Fields are not validated. Fields of the model with `exclude_if` are omitted if they are None.

    Args:
      model: the Pydantic model, which has the defaults.
      **fields: values of its fields; fields with a default may be left out.

    Example:
      >>> class Choice(BaseModel):
      ...     index: int
      ...     finish_reason: str | None = None
      >>> to_json_dict(Choice, index=0)
      {'index': 0, 'finish_reason': None}
    """
    defaults, optional = _defaults(model)
    given = {k: value for k, value in fields.items() if value is not None or k not in optional}
    for name, value in defaults.items():
        given.setdefault(name, value)
    return given


@functools.cache
def _defaults(model: type[BaseModel]) -> tuple[JsonDict, frozenset[str]]:
    """Return the defaults that are always written, and the fields that are omitted if None."""
    fields = model.model_fields.items()
    optional = frozenset(name for name, field in fields if field.exclude_if is not None)
    defaults = {
        name: field.default
        for name, field in fields
        if name not in optional and not field.is_required()
    }
    return defaults, optional


class ApiError(Exception):
    """An error that is sent to the client as JSON.

    Args:
      status: HTTP status, 400 to 599.
      message: a sentence for the client; truncated after 500 characters.
      param: name of the invalid field; None if the error concerns no single field.
      code: a short identifier for programs.
      headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(_truncate(message))
        self.status = status
        self.param = None if param is None else _truncate(param)
        self.code = code
        self.headers = headers

    def body(self) -> JsonDict:
        """Return the JSON of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _ERROR_TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "", request_id: str | None = None) -> JSONResponse:
        """Return the error as an HTTP response, in the format of the API of a path."""
        body = anthropic_error(self, request_id) if is_anthropic(path) else self.body()
        return JSONResponse(body, self.status, self.headers)


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API, which has its own format of errors."""
    return _ANTHROPIC.search(path) is not None


def anthropic_error(error: ApiError, request_id: str | None) -> JsonDict:
    """Return the JSON of an error in Anthropic's format."""
    kind = _ANTHROPIC_ERRORS.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = str(error)
    if error.code == "context_length_exceeded":
        # Agents shorten the chat when they read these words.
        message = f"prompt is too long: {message}"
    detail: JsonDict = {"type": kind, "message": message}
    if error.param in _ANTHROPIC_DETAILS:
        detail["details"] = _ANTHROPIC_DETAILS[error.param]
    return {"type": "error", "error": detail, "request_id": request_id}


def bad_request(error: ValueError) -> ApiError:
    """Return the 400 error for a `ValueError` of the engine or tokenizer.

    The message leaves out the name of the Python function that raised the error.
    """
    if isinstance(error, ArgumentError):
        return ApiError(400, error.message, param=error.field)
    return ApiError(400, str(error))


def shutting_down() -> ApiError:
    """Return the error for requests that arrive during shutdown or are unfinished at its end."""
    return ApiError(
        503,
        "The server is shutting down.",
        code="shutting_down",
        headers={"Retry-After": "10", "Connection": "close"},
    )


def sleeping() -> ApiError:
    """Return the error for requests that arrive while the engine sleeps."""
    return ApiError(
        503,
        "The engine sleeps, and takes requests again after POST /wake_up.",
        code="sleeping",
        headers={"Retry-After": "10"},
    )


def engine_stopped() -> ApiError:
    """Return the error for requests that a stopped engine can no longer run."""
    return ApiError(503, "The engine has stopped.", code="engine_stopped")


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
