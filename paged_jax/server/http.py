"""`Server`: uvicorn, with an orderly shutdown on a signal."""

import asyncio
import functools
import logging
import socket
from types import FrameType
from typing import Any

import uvicorn

from paged_jax.server.app import create_app
from paged_jax.server.connection import Connection
from paged_jax.server.service import Service

# Seconds for a last event to reach its client before the server closes all connections.
_LAST_EVENT = 1.0

_logger = logging.getLogger("uvicorn.error")


class Server(uvicorn.Server):
    """Serves until a signal: the first lets running requests finish, the second ends them.

    The exit status is 0 in both cases, as every client gets an answer or an error. Before the
    server listens, a signal ends the process as usual.

    Args:
      service: the engine and how it is served.
      drain_timeout: seconds that running requests have to finish after the first signal.
      **logging_options: options of `uvicorn.Config` about logs, such as ``log_level``.
    """

    def __init__(self, service: Service, *, drain_timeout: float, **logging_options: Any):
        limits = service.limits
        make_connection: Any = functools.partial(Connection, limits)
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=make_connection,
                ws="none",
                lifespan="on",
                h11_max_incomplete_event_size=limits.max_header_bytes,
                server_header=False,
                # A proxy's headers must not decide which client this is.
                proxy_headers=False,
                **logging_options,
            )
        )
        self._service = service
        self._drain_timeout = drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: drain on the first, stop on the second."""
        # uvicorn's own handler would let the second signal kill the process with its streams.
        if self.should_exit:
            self._service.stop()
        self._service.drain(self._drain_timeout)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the addresses."""
        await super().startup(sockets)
        for each in sockets or []:
            _logger.info("Serving on %s", _url(each))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the connections to end, and close those that do not."""
        cutting = asyncio.create_task(self._cut_off())
        await super().shutdown(sockets)
        cutting.cancel()

    async def _cut_off(self) -> None:
        """Close all connections once the service has stopped: uvicorn would wait for their end."""
        await self._service.stopped()
        await asyncio.sleep(_LAST_EVENT)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
