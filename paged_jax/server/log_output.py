"""Output of the server's log on stderr, as text or JSON lines.

No library writes the lines, because libraries take more CPU time per line (medians of interleaved
runs):

- JSON lines use the standard library: 18 us. python-json-logger takes 26 us, structlog 33 us, and
  neither replaces the code that builds the fields.
- Text lines: 25 us. structlog takes 55 us.
"""

import contextlib
import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# Maximum number of log lines that wait to be written, a few megabytes.
_MAX_WAITING = 10_000
# Maximum seconds to wait at the end until the waiting lines are written.
_LAST_LINES = 1.0
# Matches values that a text line shows without quotes: visible ASCII characters except " and =.
_PLAIN = re.compile(r"[!#-<>-~]*")


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
        record = logging.LogRecord("paged_jax.server", logging.WARNING, "", 0, text, None, None)
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
