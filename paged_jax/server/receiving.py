"""`receive`: the body of a request, read within its limits and checked against its schema."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from paged_jax.server.errors import ApiError
from paged_jax.server.records import RECORD
from paged_jax.server.service import Service
from paged_jax.server.validation import of_validation

B = TypeVar("B", bound=BaseModel)

# Bytes of a body that is checked in ten milliseconds, whatever it holds.
_AT_ONCE = 2**15


async def receive(service: Service, request: Request, body_type: type[B]) -> B:
    """The body of a request, which is not read yet.

    Args:
      service: the engine and how it is served.
      request: the request.
      body_type: the schema of the endpoint's body.

    Raises:
      ApiError: the body is not JSON, has a mistake, or is too long or too slow.
      ClientDisconnect: the client has left.
    """
    content = await _read(service, request)
    request.scope[RECORD].num_bytes = len(content)
    try:
        if len(content) <= _AT_ONCE:
            return body_type.model_validate_json(content)
        # Many at a time would be checked before the next event of a stream is sent.
        return await service.encode(
            request.receive, len(content), lambda: body_type.model_validate_json(content)
        )
    except ValidationError as error:
        raise of_validation(error) from None


async def _read(service: Service, request: Request) -> bytes:
    """Read the body; refuse one that is not JSON, too long, or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also keeps out web pages of other sites, which may not send JSON here unasked.
        raise ApiError(415, f"The Content-Type must be application/json, got {kind[:100]!r}.")
    limits = service.limits
    declared = request.headers.get("content-length", "")
    parts, size = [], int(declared) if declared.isdecimal() else 0
    limits.check("max_body_bytes", size, None, what="the size of the body", status=413)
    try:
        async with asyncio.timeout(limits.body_timeout):
            size = 0
            async for part in request.stream():
                size += len(part)
                limits.check("max_body_bytes", size, None, what="the size of the body", status=413)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body must be complete within {limits.body_timeout:g} seconds (body_timeout).",
            code="body_timeout_exceeded",
            headers={"Connection": "close"},
        ) from None
    return b"".join(parts)
