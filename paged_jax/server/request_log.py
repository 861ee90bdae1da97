"""Log of requests: an id, a log line, a metric and a trace span for each request.

`RequestLogMiddleware` is the outermost middleware. It stores a `RequestRecord` in the ASGI scope.

Libraries exist for three parts of this module. They are not used, because they take more CPU time
per request (medians of interleaved runs):

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
import os
import queue
import random
import re
import select
import sys
import threading
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
# Maximum number of log lines that wait to be written, a few megabytes.
_MAX_WAITING = 10_000
# Maximum seconds to wait at the end until the waiting lines are written.
_LAST_LINES = 1.0
# Matches values that a text line shows without quotes: visible ASCII characters except " and =.
_PLAIN = re.compile(r"[!#-<>-~]*")

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
        given = Headers(scope=scope).get("x-request-id", "")
        is_given = _ID.fullmatch(given) is not None
        method = scope["method"] if scope["method"] in _METHODS else "other"
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        name = given if is_given else f"{_RANDOM.getrandbits(64):016x}"
        return cls(name, is_given, method, path)

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
        used = {_USAGE_ATTRIBUTES[name]: value for name, value in usage.items()}
        span.set_attributes(attributes | used)
        if record.status >= 500:
            span.set_status(trace.Status(trace.StatusCode.ERROR, record.error_code))


@contextlib.contextmanager
def logs_on_stderr(level: str, log_format: LogFormat) -> Iterator[None]:
    """Write the logs of the server and of uvicorn to stderr during the ``with`` statement.

    uvicorn's messages about its start and end are written only at the level ``"debug"``: it reports
    "Application startup complete." minutes before the model is loaded, which is misleading.

    Warnings of Python and of asyncio are part of the log. A thread writes the lines, so that the
    server goes on if nobody reads stderr.

    Args:
      level: minimum level: ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``.
      log_format: ``"text"``, or ``"json"`` for a JSON object in each line.
    """
    # `sys.__stderr__` is None if the process was started without stderr.
    handler = (
        logging.NullHandler()
        if sys.__stderr__ is None
        else (BackgroundHandler(sys.__stderr__.fileno()))
    )
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    number = logging.getLevelName(level.upper())
    # The kernels log a line for each program and platform. Show these lines only at "debug".
    quiet = number if number == logging.DEBUG else max(number, logging.WARNING)
    levels = {
        "paged_jax": number,
        "uvicorn": quiet,
        "paged_jax.kernels": quiet,
        "asyncio": quiet,
        "py.warnings": quiet,
    }
    # Do not use the root logger: its handler would also write the messages of other libraries.
    loggers = [logging.getLogger(name) for name in levels]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(levels[logger.name])
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (handlers, propagates, old) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagates
            logger.setLevel(old)
        handler.close()


class BackgroundHandler(logging.Handler):
    """Log handler that writes lines in a thread, and drops lines if they are not read.

    A pipe that nobody reads is full after some hundred lines, and writing to it then blocks: in the
    event loop, all requests, probes and signals would wait. If too many lines wait, new lines are
    dropped. The log reports their number as soon as it is read again.

    Args:
      file: file descriptor to write to. Python's own stream is not used, because Python would wait
        for its lock at the end of the process.
    """

    def __init__(self, file: int):
        super().__init__()
        self._file = file
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        self._num_dropped = 0
        self._is_closed = False
        # A daemon thread, because it may wait for a reader forever.
        self._thread = threading.Thread(target=self._run, name="paged_jax log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add the line of a record to the queue; drop it if the queue is full."""
        try:
            self._lines.put_nowait(self._line(record))
        except queue.Full:
            self._num_dropped += 1  # `handle` holds the lock of this handler
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Wait until all lines are written, but only for a few seconds."""
        if self._is_closed:  # `logging` closes all handlers at the end of the process
            return
        self._is_closed = True
        try:
            self._lines.put(None, timeout=_LAST_LINES)
        except queue.Full:
            self._lines.get_nowait()
            self._num_dropped += 1
            self._lines.put_nowait(None)
        self._thread.join(_LAST_LINES)
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self._num_dropped and self._lines.qsize() < _MAX_WAITING // 2:
                self._report_dropped()
        if self._num_dropped:
            self._report_dropped()

    def _report_dropped(self) -> None:
        with self.lock or contextlib.nullcontext():
            count, self._num_dropped = self._num_dropped, 0
        text = f"{count} log lines were dropped, because the log was not read"
        record = logging.LogRecord(_logger.name, logging.WARNING, "", 0, text, None, None)
        self._write(self._line(record))

    def _write(self, line: bytes) -> None:
        """Write a line, and wait for the reader. Ignore errors: the file may be closed."""
        while line:
            try:
                line = line[os.write(self._file, line) :]
            except BlockingIOError:  # another process has made the file non-blocking
                select.select([], [self._file], [])
            except OSError:
                return


class TextFormatter(logging.Formatter):
    """Log formatter for people: time, level, message, and fields as ``name=value``.

    Values with spaces, line ends or terminal codes are quoted, because clients choose some of the
    values.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the log line with its fields, without a traceback."""
        fields = _fields(record).items()
        return " ".join([super().formatMessage(record), *(f"{k}={_quote(v)}" for k, v in fields)])


class JsonFormatter(logging.Formatter):
    """Log formatter for programs: JSON objects with time, level, logger, message and fields.

    Example:
      >>> record = logging.LogRecord("paged_jax", logging.INFO, "", 0, "ready", None, None)
      >>> record.fields = {"status": 200}
      >>> line = json.loads(JsonFormatter().format(record))
      >>> line["level"], line["message"], line["status"]
      ('info', 'ready', 200)
    """

    converter = staticmethod(time.gmtime)  # type: ignore[assignment]

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON of a log record."""
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
