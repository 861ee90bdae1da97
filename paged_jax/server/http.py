"""What uvicorn leaves open: time limits, errors as JSON, a drain that ends well."""

import asyncio
import json
import logging
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_jax.server.app import create_app
from paged_jax.server.errors import ApiError, too_many
from paged_jax.server.limits import Limits
from paged_jax.server.service import Service

# Seconds for which a client that was refused may go on sending before it is cut off.
_LINGER = 1.0
# Seconds for a last event to reach the client when the server must end.
_LAST_WORDS = 1.0

_logger = logging.getLogger("uvicorn.error")


class Server(uvicorn.Server):
    """Serves until a signal: the first lets what has begun finish, the second ends it.

    The exit status is 0 either way, as whoever is running has been told the end.

    Args:
      service: what is served.
      drain_timeout: seconds between the first signal and the end of what has not finished.
      **logging_options: ``log_level`` and the like, of `uvicorn.Config`.
    """

    def __init__(self, service: Service, *, drain_timeout: float, **logging_options: Any):
        limits = service.limits
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=protocol(limits),
                ws="none",
                lifespan="on",
                h11_max_incomplete_event_size=limits.max_header_bytes,
                server_header=False,
                # Whoever is in front of the server may not say who the client is.
                proxy_headers=False,
                **logging_options,
            )
        )
        self._service = service
        self._drain_timeout = drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own, which would let the second signal kill the process, and its streams.
        if self.should_exit:
            self._service.stop()
        self._service.drain(self._drain_timeout)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            _logger.info("Serving on %s", _url(each))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_off(self) -> None:
        """Leave nobody who could keep the server from ending: uvicorn waits for all of them."""
        await self._service.stopped()
        await asyncio.sleep(_LAST_WORDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def protocol(limits: Limits) -> type[H11Protocol]:
    """The protocol class for uvicorn's config."""

    class Protocol(H11Protocol):
        """Answers requests that are not HTTP, or too slow or too long to be, in OpenAI's shape.

        Three clocks watch a connection: uvicorn's own for one that is idle, `_deadline` for what a
        client has begun to send, `_unread` for what it does not take.
        """

        _deadline: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _is_refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # `pause_writing` is called as soon as the kernel does not take all.
            transport.set_write_buffer_limits(high=0)
            # uvicorn's begins after the first answer only.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            if len(self.connections) > limits.max_connections:
                self._refuse(too_many("connections", limits.max_connections, "max_connections"))

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                return
            super().data_received(data)
            self._watch_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._deadline = _cancelled(self._deadline)
            super().connection_lost(exc)
            self._unread = _cancelled(self._unread)

        def send_400_response(self, msg: str) -> None:
            # What could not be parsed is still there.
            if len(self.conn.trailing_data[0]) > limits.max_header_bytes:
                most = limits.max_header_bytes
                error = ApiError(
                    431,
                    f"The headers must be at most {most} bytes (max_header_bytes).",
                    code="max_header_bytes_exceeded",
                )
            else:
                error = ApiError(400, msg, code="invalid_http")
            self._refuse(error)

        # Clients that send too slowly

        def _watch_request(self) -> None:
            seconds = self._seconds_to_send()
            if seconds is None or self.transport.is_closing():
                self._deadline = _cancelled(self._deadline)
            elif self._deadline is None:
                self._deadline = self.loop.call_later(seconds, self._give_up)

        def _seconds_to_send(self) -> float | None:
            state, is_answered = self.conn.their_state, self.conn.our_state is h11.DONE
            if state is h11.IDLE and self.conn.trailing_data[0]:
                return limits.header_timeout
            if state is h11.SEND_BODY and is_answered:  # nobody reads the rest of the body
                return limits.body_timeout
            return None

        def _give_up(self) -> None:
            seconds = limits.header_timeout
            self._refuse(
                ApiError(
                    408,
                    f"The headers must be complete within {seconds:g} seconds (header_timeout).",
                    code="header_timeout_exceeded",
                )
            )

        def _refuse(self, error: ApiError) -> None:
            self._deadline = _cancelled(self._deadline)
            if self.transport.is_closing():
                return
            # In an answer that has begun there is no room for another.
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._answer(error)
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            # Were it closed while the client sends, the answer would be lost with the connection.
            self._is_refused = True
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(_LINGER, self.transport.close)

        def _answer(self, error: ApiError) -> None:
            body = json.dumps(error.body()).encode()
            headers = {
                **(error.headers or {}),
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
            }
            events: list[Any] = [
                h11.Response(status_code=error.status, headers=list(headers.items())),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            for event in events:
                self.transport.write(self.conn.send(event) or b"")

        # Clients that do not read

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unread = _cancelled(self._unread)

        def _watch_reader(self) -> None:
            size = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(limits.send_timeout, self._check_reader, size)

        def _check_reader(self, size: int) -> None:
            if self.transport.get_write_buffer_size() < size:
                self._watch_reader()
            else:
                self.transport.abort()

    return Protocol


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
