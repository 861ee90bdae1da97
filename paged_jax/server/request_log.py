"""Log of requests: an id, a log line, a metric and a trace span for each request.

`RequestLogMiddleware` is the outermost middleware. It stores a `RequestRecord` in the ASGI scope.

`log_output` writes the lines. Spans use OpenTelemetry's API directly, which takes 36 us of CPU time
for a stream of 64 events, and 0 without an SDK (medians of interleaved runs). OpenTelemetry's own
ASGI middleware takes 126 us, and 70 us without an SDK.
"""

import contextlib
import dataclasses
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.api_error import is_anthropic

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    propagate = trace = None

# Key of the ASGI scope under which the request's `RequestRecord` is stored.
RECORD = "paged_jax.record"

# Matches request ids that clients may choose. They appear in logs and in the engine's request ids.
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Generator of request ids. They need not be secret, and `secrets` would need a system call per
# request.
_RANDOM = random.Random()
# Maximum bytes of a small body, see `RequestRecord.size`.
_SMALL_BODY = 2**12
# HTTP methods that metrics distinguish. All other words that clients may send are counted together.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Paths that are requested every few seconds, and would flood the log. All requests of `_PROBES` and
# the successful requests of `_FREQUENT` are logged at the level "debug".
_PROBES = ("/live", "/ready", "/health")
_FREQUENT = ("/metrics", "/cache/state")
# Names of span attributes. Token counts have the names of OpenTelemetry's conventions for
# generative AI, and times have the names of vLLM.
_USAGE_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
    "queued_seconds": "gen_ai.latency.time_in_queue",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
}

_logger = logging.getLogger("paged_jax.server")


@dataclasses.dataclass
class RequestRecord:
    """Data about a request and its response, for logs, metrics and traces.

    Attributes:
      request_id: the client's ``X-Request-ID`` if it is valid, otherwise a new id.
      is_given: whether the client chose the id. Clients may use an id for several requests.
      method: HTTP method; ``"other"`` for unknown methods.
      path: path of the URL.
      handler: path of the matching route, with parameters in braces; ``"none"`` if no route
        matches.
      start: arrival time, in seconds of ``time.perf_counter()``.
      status: HTTP status of the response; 0 until it starts.
      is_complete: whether the whole response was sent.
      seconds: time from the arrival to the end of the response, in seconds.
      error_code: code of the error that was sent; None without an error or a code.
      error: message of the error that was sent; None without an error.
      num_bytes: size of the request body in bytes.
    """

    request_id: str
    is_given: bool
    method: str
    path: str
    handler: str = "none"
    start: float = dataclasses.field(default_factory=time.perf_counter)
    status: int = 0
    is_complete: bool = False
    seconds: float = 0.0
    error_code: str | None = None
    error: str | None = None
    num_bytes: int = 0
    _outputs: dict[int, RequestOutput] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        """Make the record of a request that has just arrived, from its ASGI scope."""
        header = Headers(scope=scope).get("x-request-id", "")
        is_given = _ID.fullmatch(header) is not None
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        name = header if is_given else f"{_RANDOM.getrandbits(64):016x}"
        return cls(name, is_given, method, path)

    def part(self) -> "RequestRecord":
        """Return a record of a part of the request, whose outputs are not those of the request."""
        return dataclasses.replace(self, _outputs={})

    def size(self, num_chars: int) -> int:
        """Estimate the work of a request, as a number of characters, for `Service.encode`.

        For a small body this is `num_chars`, the number of characters to tokenize. For a large body
        it is at least the number of bytes: a body with thousands of empty messages has few
        characters, but is slow to process.
        """
        return num_chars if self.num_bytes <= _SMALL_BODY else max(num_chars, self.num_bytes)

    def note_output(self, prompt: int, output: RequestOutput) -> None:
        """Store the newest output of a prompt. `prompt` is its index in the request."""
        self._outputs[prompt] = output

    def note_error(self, code: str | None, message: str) -> None:
        """Store the code and the message of the error that is sent to the client."""
        self.error_code, self.error = code, message

    def usage(self) -> dict[str, float]:
        """Return token counts and times of the outputs; {} if there are none.

        Token counts are sums over all prompts of the request. ``queued_seconds`` is the longest
        time from the arrival to the first step of a prompt. ``first_token_seconds`` is the shortest
        time from the arrival to the first token of a prompt.
        """
        outputs = list(self._outputs.values())
        if not outputs:
            return {}
        times = [output.metrics for output in outputs]
        queued, first = (
            [
                end - timing.arrival_time
                for timing in times
                if (end := getattr(timing, name)) is not None
            ]
            for name in ("first_scheduled_time", "first_token_time")
        )
        return {
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "generated_tokens": sum(
                len(sample.token_ids) for output in outputs for sample in output.outputs
            ),
            **({"queued_seconds": max(queued)} if queued else {}),
            **({"first_token_seconds": min(first)} if first else {}),
        }

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line, without fields that are None."""
        fields = {
            "method": self.method,
            "path": self.path[:200],
            "status": self.status,
            "request_id": self.request_id,
            "seconds": self.seconds,
            **self.usage(),
            "client_gone": None if self.is_complete else True,
            "error_code": self.error_code,
            "error": self.error,
        }
        return {name: value for name, value in fields.items() if value is not None}


class RequestLogMiddleware:
    """ASGI middleware that gives each request an id, and logs and counts it when it ends.

    It is the outermost middleware. Each response has the id in its header ``X-Request-ID``.

    Args:
      app: the application that gets the requests.
      observe: function that is called with the record of each finished request.
      model_name: name of the served model, for traces.
      routes: routes of the application. Metrics label each request with the path of its route.
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
        """Pass a request to the application, and log it when it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD] = RequestRecord.of(scope)
        record.handler = next(
            (path for pattern, path in self._handlers if pattern.match(record.path)), "none"
        )

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                value = record.request_id.encode()
                new = [(b"x-request-id", value)]
                if is_anthropic(record.path):  # Anthropic's client reads the header `request-id`
                    new.append((b"request-id", value))
                message = {**message, "headers": [*message["headers"], *new]}
            elif message["type"] == "http.response.body":
                record.is_complete = not message.get("more_body", False)
            await send(message)

        with _span(record, scope, self._model_name):
            try:
                await self._app(scope, receive, send_and_record)
            except BaseException:
                record.status = record.status or 500
                raise
            finally:
                record.seconds = time.perf_counter() - record.start
                self._observe(record)
                _log(record)


def _log(record: RequestRecord) -> None:
    is_expected = record.status < 400 or record.status == 503  # 503 while the server starts
    if record.path in _PROBES or (record.path in _FREQUENT and is_expected):
        level = logging.DEBUG
    else:
        level = logging.WARNING if record.status >= 500 else logging.INFO
    _logger.log(level, "request", extra={"fields": record.fields()})


@contextlib.contextmanager
def _span(record: RequestRecord, scope: Scope, model_name: str) -> Iterator[None]:
    """Record the ``with`` statement as an OpenTelemetry span of the client's trace.

    This does nothing unless OpenTelemetry's API is installed and an SDK is configured. The
    attributes of the span are read from `record` at the end of the ``with`` statement.
    """
    if trace is None or propagate is None:
        yield
        return
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # there is no SDK
        yield
        return
    tracer = trace.get_tracer("paged_jax")
    with tracer.start_as_current_span(
        f"{record.method} {record.handler}",
        context=propagate.extract(dict(Headers(scope=scope))),
        kind=trace.SpanKind.SERVER,
    ) as span:
        yield
        attributes = {
            "http.request.method": record.method,
            "http.route": record.handler,
            "http.response.status_code": record.status,
            "gen_ai.request.id": record.request_id,
        }
        usage = record.usage()
        if usage:
            attributes["gen_ai.request.model"] = model_name
        usage_attributes = {_USAGE_ATTRIBUTES[name]: value for name, value in usage.items()}
        span.set_attributes(attributes | usage_attributes)
        if record.status >= 500:
            span.set_status(trace.Status(trace.StatusCode.ERROR, record.error_code))
