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


def json_response(answer: BaseModel | schemas.Piece, status: int = 200) -> Response:
    """A model as an answer, or a dict that is written as one."""
    return Response(to_json(answer), status, media_type="application/json")


def encode_event(piece: schemas.Piece) -> bytes:
    """A dict as an event of a stream."""
    return b"data: %b\n\n" % to_json(piece)


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
