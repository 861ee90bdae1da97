"""What the server's log looks like: lines for people, or JSON for programs."""

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# Visible ASCII without the quotation mark and the equals sign.
_PLAIN = re.compile(r"[!#-<>-~]*")


@contextlib.contextmanager
def logs_on_stderr(level: str, log_format: LogFormat) -> Iterator[None]:
    """A context in which the logs of the server and of uvicorn go to stderr, from a level on.

    uvicorn's lines about its start and end appear at level ``"debug"`` only: "Application startup
    complete." comes minutes before the model is ready.

    Args:
      level: ``"debug"``, ``"info"``, ``"warning"`` or ``"error"``.
      log_format: ``"text"``, or ``"json"``: an object a line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    # Each by its name: a handler of the root would also write what other libraries log.
    number = logging.getLevelName(level.upper())
    # There is a line for the kernels of each platform in each program.
    calm = number if number == logging.DEBUG else max(number, logging.WARNING)
    levels = {"paged_jax": number, "uvicorn": calm, "paged_jax.kernels": calm}
    loggers = [logging.getLogger(name) for name in levels]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(levels[logger.name])
    try:
        yield
    finally:
        for logger, (handlers, propagate, old) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old)


class TextFormatter(logging.Formatter):
    """A line for people: time, level, message, and the record's fields as ``name=value``.

    What clients send may hold line ends and terminal codes, so a value that is not plain is
    quoted.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, before a traceback."""
        fields = _fields(record).items()
        return " ".join([super().formatMessage(record), *(f"{k}={_plain(v)}" for k, v in fields)])


class JsonFormatter(logging.Formatter):
    """An object a line, with ``time``, ``level``, ``logger``, ``message`` and the record's fields.

    Example:
      >>> record = logging.LogRecord("paged_jax", logging.INFO, "", 0, "ready", None, None)
      >>> record.fields = {"status": 200}
      >>> line = json.loads(JsonFormatter().format(record))
      >>> line["level"], line["message"], line["status"]
      ('info', 'ready', 200)
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
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

    converter = staticmethod(time.gmtime)  # type: ignore[assignment]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was logged with ``extra={"fields": ...}``."""
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in getattr(record, "fields", {}).items()
    }


def _plain(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
