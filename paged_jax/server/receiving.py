"""`receive_body`: reads a request body, within limits on size and time, and parses it."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from paged_jax.server.api_error import ApiError
from paged_jax.server.request_log import RECORD
from paged_jax.server.sampling_body import UNKNOWN_FIELD, Body
from paged_jax.server.service import Service

B = TypeVar("B", bound=Body)

# Maximum bytes of a body that is parsed in the event loop, which takes at most ten milliseconds.
# Larger bodies are parsed in a thread.
_SMALL = 2**15
# Maximum number of validation errors that are examined to make the error message.
_MAX_MISTAKES = 100
# Maps names of unsupported fields to rules, which follow "must" in error messages. The rules allow
# only values that do not change the response.
_NO_AUDIO = "as this server does not support audio"
_UNSUPPORTED = {
    "function_call": "be null, because this server supports only tool_calls",
    "audio": f"be null, {_NO_AUDIO}",
    "content": 'be a text or a list of {"type": "text"} parts, as this server does not support '
    "images or audio",
    "modalities": f'be null or ["text"], {_NO_AUDIO}',
    "include_obfuscation": "be null or false, as this server does not pad its events",
    "suffix": "be null or empty, as this server does not support text after the completion",
    "previous_response_id": "be null, as responses are not stored here: send the whole input",
    "conversation": "be null, as conversations are not stored here: send the whole input",
    "background": "be null or false, as responses are not stored here",
    "thread": "be null, as messages are not stored here: send the whole conversation",
    "container": "be null, as this server runs no containers",
    "mcp_servers": "be null or empty, as this server connects to no other servers",
}
# Rules for fields that accept several types. Such a rule replaces the messages of Pydantic, which
# reports an error for each of the types.
_UNIONS = {
    "prompt": "be a text, a list of texts, a list of token ids, or a list of such lists, none of "
    "them empty",
    "stop": "be a text or a list of texts, none of them empty",
    "tool_choice": 'be "none", "auto", "required", {"type": "function", "function": '
    '{"name": NAME}} or {"type": "allowed_tools", "allowed_tools": {"mode": MODE, "tools": LIST}}',
}


async def receive_body(service: Service, request: Request, body_type: type[B]) -> B:
    """Read the body of a request and parse it as a `body_type`.

    Raises:
      ApiError: the body is not JSON, is invalid or too large, or takes too long to arrive.
      ClientDisconnect: the client disconnected while the body was read.
      ClientGone: the client disconnected while the body was parsed in a thread.
    """
    content = await _read(service, request)
    request.scope[RECORD].num_bytes = len(content)
    try:
        if len(content) <= _SMALL:
            return body_type.model_validate_json(content)
        # Parse large bodies in a thread: in the event loop, this would delay all streams.
        async with service.while_connected(request.receive):
            return await service.encode(
                len(content), lambda: body_type.model_validate_json(content)
            )
    except ValidationError as error:
        fields = _fields(content) if len(content) <= _SMALL else {}
        raise _invalid_body(error, body_type, fields) from None


def _fields(content: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object; {} if the content is not a JSON object."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], body) if isinstance(body, dict) else {}


async def _read(service: Service, request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This check protects the server from web pages of other sites: a browser sends their
        # requests with the type application/json only if the server permits it (CORS).
        raise ApiError(415, f"The Content-Type must be application/json, got {kind[:100]!r}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"The Content-Encoding must be identity, got {encoding[:100]!r}. Send the body without "
            "compression.",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},  # RFC 9110, 15.5.16
        )
    limits = service.limits
    content_length = request.headers.get("content-length", "")
    parts, size = [], int(content_length) if content_length.isdecimal() else 0
    limits.check("max_body_bytes", size, None, description="the size of the body", status=413)
    try:
        async with asyncio.timeout(limits.body_timeout):
            size = 0
            async for part in request.stream():
                size += len(part)
                limits.check(
                    "max_body_bytes", size, None, description="the size of the body", status=413
                )
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body must be complete within {limits.body_timeout:g} seconds (body_timeout).",
            code="body_timeout_exceeded",
            headers={"Connection": "close"},
        ) from None
    return b"".join(parts)


def _invalid_body(
    error: ValidationError, body_type: type[Body], fields: Mapping[str, Any]
) -> ApiError:
    """Return the error for an invalid body, which names the first invalid field.

    Args:
      error: Pydantic's error.
      body_type: Pydantic model of the body.
      fields: the fields of the body. If one is missing, the message also names the first unknown
        field, which may be a misspelling of it.
    """
    if error.error_count() > _MAX_MISTAKES:
        return ApiError(
            400, f"The body has {error.error_count()} mistakes.", code="too_many_mistakes"
        )
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    if first["type"] == UNKNOWN_FIELD:
        return _unknown_field(first)
    # Combine the errors of all types of the same field.
    details = [detail for detail in errors if detail["loc"][:1] == first["loc"][:1]]
    locations = zip(*(filter(_is_place, detail["loc"]) for detail in details), strict=False)
    path = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, locations)]
    param = ".".join(map(str, path)) or None
    messages = list(dict.fromkeys(detail["msg"] for detail in details))
    if len(messages) > 1 and path and path[0] in _UNIONS:
        message, param = f"{path[0]} must {_UNIONS[path[0]]}.", str(path[0])
    else:
        message = ", or ".join(messages)
        message = _unsupported(path) or (f"{param}: {message}." if param else f"{message}.")
        if first["type"] == "missing" and len(path) == 1:
            message += _other_name(body_type, fields)
    return ApiError(400, message, param=param, code=first["type"])


def _other_name(body_type: type[Body], fields: Mapping[str, Any]) -> str:
    """Return a sentence about the first unknown field of a body; "" if there is none."""
    for unknown, value in fields.items():
        if unknown not in body_type.model_fields and not body_type.ignores(unknown, value):
            break
    else:
        return ""
    advice = " Send messages to /v1/chat/completions." if unknown == "messages" else ""
    return f" {body_type.describe_unknown(unknown)['rule']}{advice}"


def _unknown_field(error: ErrorDetails) -> ApiError:
    context = error.get("ctx", {})
    path = ".".join(map(str, filter(_is_place, (*error["loc"], context["name"]))))
    return ApiError(400, context["rule"], param=path, code=UNKNOWN_FIELD)


def _unsupported(path: list[int | str]) -> str | None:
    """Return the error message of the first unsupported field in a path; None if there is none.

    `path` is the path of an invalid value in the body: names of fields, and indices in lists.
    """
    for index, part in enumerate(path):
        if part in _UNSUPPORTED:
            return f"{'.'.join(map(str, path[: index + 1]))} must {_UNSUPPORTED[part]}."
    return None


def _is_place(part: int | str) -> bool:
    """Return whether a part of Pydantic's error location is a field name or a list index.

    Other parts are names of types, such as "list[int]" in ("prompt", "list[int]").
    """
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))
