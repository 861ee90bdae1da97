"""Log of requests: an id, a log line, a metric and a trace span for each request.

`RequestLogMiddleware` surrounds all other middleware and keeps a `RequestRecord` in the ASGI scope.

Three parts are implemented here although libraries for them exist, because of their cost per
request (CPU time, medians of interleaved runs):

- Spans use OpenTelemetry's API directly: 36 us for a stream of 64 events, and 0 without an SDK.
  OpenTelemetry's own ASGI middleware takes 126 us, and 70 us without an SDK.
- JSON lines use the standard library: 18 us. python-json-logger takes 26 us, structlog 33 us, and
  neither replaces the code that builds the fields.
- Text lines: 25 us. structlog takes 55 us.
"""

import contextlib
import dataclasses
import json
import logging
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.responses import is_anthropic

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    propagate = trace = None

# Key of the ASGI scope under which the request's `RequestRecord` is stored.
RECORD = "paged_jax.record"

LogFormat = Literal["text", "json"]

# Request ids that are accepted from clients. They appear in logs and in the engine's request ids.
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Ids need not be secret, and the system's random numbers would cost a system call per request.
_RANDOM = random.Random()
# Maximum bytes of a small body, whose cost can be estimated from the characters of its texts.
_SMALL_BODY = 2**12
# Methods that metrics distinguish. Others are counted together, because a client may send any word.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Paths that are requested every few seconds and would flood the log. Probes are logged at debug
# level, the others too unless they fail.
_PROBES = ("/live", "/ready", "/health")
_FREQUENT = ("/metrics", "/cache/state")
# Span attributes: OpenTelemetry's conventions for generative models, and vLLM's names for times.
_USAGE_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
    "queued_seconds": "gen_ai.latency.time_in_queue",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
}
# Values that a text line shows without quotes: visible ASCII characters except " and =.
_PLAIN = re.compile(r"[!#-<>-~]*")

_logger = logging.getLogger("paged_jax.server")


@dataclasses.dataclass
class RequestRecord:
    """Facts about a request and its response, for logs, metrics and traces.

    Attributes:
      request_id: the client's ``X-Request-ID`` if it is valid, otherwise a new id.
      is_given: whether the client chose the id. It may use the id for several requests.
      method: HTTP method; ``"other"`` for unknown methods.
      path: path of the URL.
      handler: the route's path pattern; ``"none"`` if no route matches.
      start: arrival time, in seconds of ``time.perf_counter()``.
      status: status of the response; 0 until it starts.
      is_complete: whether the whole response was sent.
      seconds: time from the arrival to the end of the response.
      error_code: code of the error response, if any.
      error: message of the error response, if any.
      num_bytes: size of the body in bytes.
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
        """Return the record of a request that has just arrived."""
        given = Headers(scope=scope).get("x-request-id", "")
        is_given = _ID.fullmatch(given) is not None
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        name = given if is_given else f"{_RANDOM.getrandbits(64):016x}"
        return cls(name, is_given, method, path)

    def size(self, num_chars: int) -> int:
        """Return an estimate of the work: the characters to tokenize, or the bytes of a large body.

        For a large body it is the larger of both numbers, because a body with thousands of empty
        messages has few characters but is slow to process.
        """
        return num_chars if self.num_bytes <= _SMALL_BODY else max(num_chars, self.num_bytes)

    def note_output(self, prompt: int, output: RequestOutput) -> None:
        """Record the newest output of a prompt, given by its index in the request."""
        self._outputs[prompt] = output

    def note_error(self, code: str | None, message: str) -> None:
        """Record the error that is sent to the client."""
        self.error_code, self.error = code, message

    def usage(self) -> dict[str, float]:
        """Return token counts and times; empty if nothing was generated.

        Token counts are summed over prompts. ``queued_seconds`` is the longest time from the
        arrival of a prompt to its first step, ``first_token_seconds`` the shortest time to a first
        token.
        """
        outputs = list(self._outputs.values())
        if not outputs:
            return {}
        times = [output.metrics for output in outputs]
        queued, first = (
            [end - each.arrival_time for each in times if (end := getattr(each, name)) is not None]
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
        """Return the fields of the log line. Fields that do not apply are left out."""
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
    """Outermost ASGI middleware: gives each request an id, and logs and counts it at its end.

    Responses carry the id as ``X-Request-ID``.

    Args:
      app: the wrapped application.
      observe: function that is called with the record of each finished request.
      model_name: name of the served model, for traces.
      routes: routes of the application; their paths label the requests in metrics.
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
        """Pass on a request and record it."""
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
                if is_anthropic(record.path):  # the name that Anthropic's client reads
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
    """Wrap a request in an OpenTelemetry span that continues the client's trace.

    Does nothing unless OpenTelemetry's API is installed and an SDK collects spans. The record is
    read when the context exits, so it must be complete by then.
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
        used = {_USAGE_ATTRIBUTES[name]: value for name, value in usage.items()}
        span.set_attributes(attributes | used)
        if record.status >= 500:
            span.set_status(trace.Status(trace.StatusCode.ERROR, record.error_code))


@contextlib.contextmanager
def logs_on_stderr(level: str, log_format: LogFormat) -> Iterator[None]:
    """Write the logs of the server and of uvicorn to stderr while the context is active.

    uvicorn's messages about its start and end are shown at level ``"debug"`` only, because it
    reports "Application startup complete." minutes before the model is loaded.

    Args:
      level: minimum level: ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``.
      log_format: ``"text"``, or ``"json"`` for JSON objects, each on a line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    number = logging.getLevelName(level.upper())
    # The kernels log a line per program and platform, so they are quieter than the server.
    quiet = number if number == logging.DEBUG else max(number, logging.WARNING)
    levels = {"paged_jax": number, "uvicorn": quiet, "paged_jax.kernels": quiet}
    # A handler of the root logger would also write the messages of all other libraries.
    loggers = [logging.getLogger(name) for name in levels]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(levels[logger.name])
    try:
        yield
    finally:
        for logger, (handlers, propagates, old) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagates
            logger.setLevel(old)


class TextFormatter(logging.Formatter):
    """Formatter for people: time, level, message, and the record's fields as ``name=value``.

    Values that contain line ends, terminal codes or spaces are quoted, because clients choose some
    of them.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line with the fields, without a traceback."""
        fields = _fields(record).items()
        return " ".join([super().formatMessage(record), *(f"{k}={_quote(v)}" for k, v in fields)])


class JsonFormatter(logging.Formatter):
    """Formatter for programs: a JSON object with time, level, logger, message and the fields.

    Example:
      >>> record = logging.LogRecord("paged_jax", logging.INFO, "", 0, "ready", None, None)
      >>> record.fields = {"status": 200}
      >>> line = json.loads(JsonFormatter().format(record))
      >>> line["level"], line["message"], line["status"]
      ('info', 'ready', 200)
    """

    converter = staticmethod(time.gmtime)  # type: ignore[assignment]

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that were logged with ``extra={"fields": ...}``."""
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in getattr(record, "fields", {}).items()
    }


def _quote(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
