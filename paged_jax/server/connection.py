"""`Connection`: a client's HTTP connection, which uvicorn parses, with limits of time and size."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_jax.server.errors import ApiError, too_many
from paged_jax.server.limits import Limits

# Seconds for which a refused client may keep sending before its connection is closed.
_LINGER = 1.0

# The absolute form of a request target. An http URL has a host and no user name (RFC 9110, 4.2).
_ABSOLUTE = re.compile(rb"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_HTTP_URL = re.compile(rb"https?://(?P<host>[^:/?#@][^/?#@]*)(?P<path>[/?].*)?", re.IGNORECASE)

_logger = logging.getLogger("paged_jax.server")


class Connection(H11Protocol):
    """One client's connection, with limits of time and size; errors are in OpenAI's JSON format.

    Three timers end a connection: uvicorn's own one that is idle, `_deadline` one whose client has
    sent part of a request, `_unread` one whose client does not read its answer.

    Args:
      limits: bounds of headers, bodies and connections.
      on_refusal: function that is called with the status of an answer to what is no request.
      **options: the arguments that uvicorn gives each connection.
    """

    def __init__(self, limits: Limits, on_refusal: Callable[[int], None], **options: Any):
        super().__init__(**options)
        self.conn = _Framing(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._on_refusal = on_refusal
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._last_use = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of an idle connection, and refuse one too many."""
        super().connection_made(transport)
        # `pause_writing` is called as soon as the kernel does not take all data at once.
        transport.set_write_buffer_limits(high=0)
        # uvicorn's timer would start after the first answer.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        most, now = self._limits.max_connections, len(self.connections) - 1
        if now >= most and not self._close_an_idle_one():
            self._refuse(too_many("connections", limit="max_connections", most=most, now=now))

    def data_received(self, data: bytes) -> None:
        """Parse what the client sends, unless it was refused."""
        if self._is_refused:
            return
        self._last_use = self.loop.time()
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        """Start or stop the timer for the rest of the client's request."""
        super().on_response_complete()
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._deadline = _cancelled(self._deadline)
        super().connection_lost(exc)
        self._unread = _cancelled(self._unread)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has headers that are too long."""
        # The bytes that could not be parsed are still there.
        if len(self.conn.trailing_data[0]) > self._limits.max_header_bytes:
            most = self._limits.max_header_bytes
            error = ApiError(
                431,
                f"The headers must be at most {most} bytes (max_header_bytes).",
                code="max_header_bytes_exceeded",
            )
        else:
            error = ApiError(400, msg, code="invalid_http")
        self._refuse(error)

    # uvicorn asks the first of these before it calls the application, and leaves to the second what
    # would continue in another protocol. None does here: HTTP lets a server ignore that wish.

    def _should_upgrade(self) -> bool:
        return self._ambiguity() is not None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Refuse a request that a proxy in front might read in another way."""
        self._refuse(ApiError(400, self._ambiguity() or "", code="invalid_http"))

    def _ambiguity(self) -> str | None:
        names = {name for name, _ in self.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            return "A request must not have both Content-Length and Transfer-Encoding."
        if (version := self.scope["http_version"]) not in ("1.0", "1.1"):
            return f"The version of HTTP must be 1.0 or 1.1, got {version}."
        if _ABSOLUTE.match(self.scope["raw_path"].removeprefix(self.root_path.encode())):
            return "An absolute request target must be an http URL with a host and no user name."
        return None

    def _close_an_idle_one(self) -> bool:
        """Close the connection that has been idle the longest, if any is: whoever holds many open
        must not keep others out, such as the probes of a cluster."""
        others = (each for each in self.connections if each is not self)
        idle = [each for each in others if isinstance(each, Connection) and each._is_idle]
        if not idle:
            return False
        min(idle, key=lambda each: each._last_use).transport.close()
        return True

    @property
    def _is_idle(self) -> bool:
        is_answered = self.cycle is None or self.cycle.response_complete
        has_begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        return is_answered and not has_begun and not self.transport.is_closing()

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
            return self._limits.header_timeout
        if state is h11.SEND_BODY and is_answered:  # the rest of the body is ignored
            return self._limits.body_timeout
        return None

    def _give_up(self) -> None:
        seconds = self._limits.header_timeout
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
        _logger.info("refused", extra={"fields": {"status": error.status, "error": str(error)}})
        self._on_refusal(error.status)
        # An answer that has begun cannot be replaced by another.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(error)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # If it were closed while the client sends, the client could lose the answer.
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
        """Start the timer of a client that does not read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the timer of a client that does not read."""
        super().resume_writing()
        self._unread = _cancelled(self._unread)

    def _watch_reader(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self._limits.send_timeout, self._check_reader, size)

    def _check_reader(self, size: int) -> None:
        if self.transport.get_write_buffer_size() < size:
            self._watch_reader()
        else:
            self.transport.abort()


class _Framing(h11.Connection):
    """h11's connection with absolute request targets and faster streams.

    A piece of a stream changes no state, so it skips the state machine. A stream has thousands of
    pieces.
    """

    _is_stream = False

    def next_event(self) -> Any:
        """Return the next event; a request has its target in origin form."""
        event = super().next_event()
        return _in_origin_form(event) if isinstance(event, h11.Request) else event

    def send(self, event: Any) -> Any:
        """The bytes of an event."""
        if type(event) is h11.Data and self._is_stream and self.our_state is h11.SEND_BODY:
            return self._framed(event.data)
        if type(event) is h11.Response:
            self._is_stream = all(name != b"content-length" for name, _ in event.headers)
        return super().send(event)

    def _framed(self, data: bytes) -> bytes:
        """A piece of a body whose length is not known, as RFC 9112 has it (7.1 and 6.3)."""
        # A chunk of no bytes would be the last.
        has_chunks = data and self.their_http_version != b"1.0"
        return b"%x\r\n%b\r\n" % (len(data), data) if has_chunks else data


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Return a request whose absolute target is split into path and Host (RFC 9112, 3.2.2).

    The host of the target replaces the Host header. Other targets are left as they are.
    """
    url = _HTTP_URL.fullmatch(request.target)
    if url is None:
        return request
    path = url["path"] or (b"*" if request.method == b"OPTIONS" else b"")
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=path if path[:1] in (b"/", b"*") else b"/" + path,
        headers=[(b"host", url["host"]), *headers],
        http_version=request.http_version,
    )


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
