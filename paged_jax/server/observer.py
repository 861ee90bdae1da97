"""`Observer`: gives each request an id, and when it has ended a line in the log and a count."""

import logging
import re
import time
from collections.abc import Callable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_jax.server.records import RECORD, RequestRecord
from paged_jax.server.tracing import span

# What is asked every few seconds would bury all else in the log: of probes each answer is as
# expected, of the others those that are no errors.
_PROBES = ("/live", "/ready", "/health")
_FREQUENT = ("/metrics", "/cache/state")

_logger = logging.getLogger("paged_jax.server")


class Observer:
    """ASGI middleware around all others: nothing is answered that it does not see.

    The id of a request is in its record, in the scope; answers carry it as ``X-Request-ID``.

    Args:
      app: the application behind the middleware.
      observe: function that is called with the record of each request that has ended.
      model_name: the model that is served, for traces.
      routes: routes of the application, whose paths name the requests in metrics.
    """

    def __init__(
        self,
        app: ASGIApp,
        observe: Callable[[RequestRecord], None] = lambda record: None,
        model_name: str = "",
        routes: Iterable[BaseRoute] = (),
    ):
        self._app = app
        self._observe = observe
        self._model_name = model_name
        self._handlers: list[tuple[re.Pattern[str], str]] = [
            (route.path_regex, route.path.replace(":path}", "}"))
            for route in routes
            if isinstance(route, Route)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD] = RequestRecord.of(scope)
        record.handler = next(
            (path for pattern, path in self._handlers if pattern.match(record.path)), "none"
        )

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                name = (b"x-request-id", record.request_id.encode())
                message = {**message, "headers": [*message["headers"], name]}
            elif message["type"] == "http.response.body":
                record.is_complete = not message.get("more_body", False)
            await send(message)

        with span(record, scope, self._model_name):
            try:
                await self._app(scope, receive, send_observed)
            except BaseException:
                record.status = record.status or 500
                raise
            finally:
                record.seconds = time.perf_counter() - record.start
                self._observe(record)
                _log(record)


def _log(record: RequestRecord) -> None:
    if record.path in _PROBES or (record.path in _FREQUENT and record.status < 400):
        level = logging.DEBUG
    else:
        level = logging.WARNING if record.status >= 500 else logging.INFO
    _logger.log(level, "request", extra={"fields": record.fields()})
