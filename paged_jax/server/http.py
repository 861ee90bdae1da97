"""`Server`: uvicorn, with an orderly shutdown on a signal."""

import asyncio
import functools
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from paged_jax.server.connection import Connection
from paged_jax.server.limits import Limits
from paged_jax.server.startup import Startup

# Seconds for a last event to reach its client before the server closes all connections.
_LAST_EVENT = 1.0

_logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Serves until a signal: the first lets running requests finish, the second ends them.

    After the first the server still listens, and answers new requests with 503, until those that
    run have ended and `grace` is over. The exit status is 0 in all cases, as every client gets an
    answer or an error. A signal before there is an engine ends the server at once.

    Args:
      startup: the application.
      limits: bounds of headers, bodies and connections.
      drain_timeout: seconds that running requests have to finish after the first signal.
      grace: seconds that the server listens after the first signal, at least; none after Ctrl-C.
      **options: further options of `uvicorn.Config`, such as ``log_level``.
    """

    def __init__(
        self,
        startup: Startup,
        limits: Limits,
        *,
        drain_timeout: float,
        grace: float = 0.0,
        **options: Any,
    ):
        make_connection: Any = functools.partial(Connection, limits, self._count_refusal)
        super().__init__(
            uvicorn.Config(
                startup,
                http=make_connection,
                ws="none",
                lifespan="on",
                server_header=False,
                # A proxy's headers must not decide which client this is.
                proxy_headers=False,
                **options,
            )
        )
        self._startup = startup
        self._drain_timeout = drain_timeout
        self._grace = grace
        startup.on_failure = self._stop_listening

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: drain on the first, stop on the second."""
        # uvicorn's own handler would let the second signal kill the process with its streams.
        service = self._startup.service
        if service is None:
            self._stop_listening()
        elif service.is_draining:
            service.stop()
            self._stop_listening()
        else:
            grace = 0.0 if sig == signal.SIGINT else self._grace
            service.drain(self._drain_timeout, grace, self._stop_listening)

    def _count_refusal(self, status: int) -> None:
        if self._startup.service is not None:
            self._startup.service.metrics.http.count("none", "none", status)

    def _stop_listening(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the addresses."""
        await super().startup(sockets)
        for each in sockets or []:
            _logger.info("listening on %s, and getting ready", url_of(each))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the connections to end, and close those that do not."""
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_off(self) -> None:
        """Close all connections once the service has stopped: uvicorn would wait for their end."""
        if self._startup.service is not None:
            await self._startup.service.stopped()
        await asyncio.sleep(_LAST_EVENT)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def url_of(listener: socket.socket) -> str:
    """Return the URL at which programs on this machine reach a listening socket."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # all addresses of this machine
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
