"""How answers are sent: `json_response` at once, `EventStream` as server-sent events."""

import contextlib
from collections.abc import AsyncGenerator

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paged_jax.server import schemas
from paged_jax.server.connected import ClientGone
from paged_jax.server.errors import ApiError
from paged_jax.server.records import RECORD
from paged_jax.server.service import Service

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""


# Line ends of Unicode that JSON leaves as they are, and their escapes. Clients that read a stream
# with `str.splitlines`, such as `httpx.Response.iter_lines`, would split an event there.
_LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}


def json_response(answer: BaseModel | schemas.Piece, status: int = 200) -> Response:
    """Return a response with a model or a dict as JSON."""
    return Response(_one_line(answer), status, media_type="application/json")


def encode_event(piece: schemas.Piece) -> bytes:
    """Return a dict as an event of a stream."""
    return b"data: %b\n\n" % _one_line(piece)


def _one_line(answer: BaseModel | schemas.Piece) -> bytes:
    """Return an answer as JSON without any character that ends a line."""
    data = to_json(answer)
    for end, escape in _LINE_ENDS.items():
        data = data.replace(end, escape)
    return data


class EventStream(Response):
    """Sends events until they end, the client leaves, or the server stops.

    Args:
      service: the engine and how it is served.
      first: the first events, as bytes.
      events: the following events; closed at the end in any case.
      stack: a context that is left at the end in any case, which admitted the request.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        first: bytes,
        events: AsyncGenerator[bytes],
        stack: contextlib.ExitStack,
    ):
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._service = service
        self._first = first
        self._events = events
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stack:
            async with contextlib.aclosing(self._events):
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                ending = b""
                try:
                    async with self._service.while_connected(receive):
                        await send(_body(self._first))
                        async for event in self._events:
                            await send(_body(event))
                except ClientGone:
                    return
                except ApiError as error:
                    scope[RECORD].note_error(error.code, str(error))
                    ending = encode_event(error.body())
                await send(_body(ending, is_last=True))


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
