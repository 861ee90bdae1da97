"""Lines of the log on stderr."""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import warnings

from paged_jax.server.log_output import JsonFormatter, TextFormatter, logs_on_stderr
from tests.support.live_server import wait_until


def test_log_lines_cannot_be_forged() -> None:
    record = logging.LogRecord("paged_jax.server", logging.INFO, "", 0, "request", None, None)
    record.fields = {"path": "/a\n2026 INFO: request", "error": 'x="y" z', "seconds": 0.12345678}
    text, line = TextFormatter().format(record), JsonFormatter().format(record)
    assert text.count("\n") == line.count("\n") == 0
    assert text.endswith(r'path="/a\n2026 INFO: request" error="x=\"y\" z" seconds=0.123457')
    assert json.loads(line)["path"] == "/a\n2026 INFO: request"


def test_log_that_is_not_read_delays_nobody(monkeypatch) -> None:
    """Lines are dropped and counted. The end of the process does not wait for a reader either."""
    num_lines = 20_000
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb") as stderr:
        monkeypatch.setattr(sys, "__stderr__", stderr)

        def write() -> None:
            with logs_on_stderr("info", "text"):
                for index in range(num_lines):
                    logging.getLogger("paged_jax.server").info("line %d of the log", index)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        os.set_blocking(reader, False)
        text = b""

        def num_accounted() -> int:
            nonlocal text
            with contextlib.suppress(BlockingIOError):
                text += os.read(reader, 2**16)
            num_dropped = sum(map(int, re.findall(rb"(\d+) log lines were dropped", text)))
            return text.count(b" of the log\n") + num_dropped

        wait_until(lambda: num_accounted() >= num_lines)
        assert num_accounted() == num_lines
    assert text.count(b" of the log\n") > 9_000


def test_log_has_warnings_of_libraries(monkeypatch, tmp_path) -> None:
    """Otherwise they would be written in the event loop, and between JSON lines."""
    path = tmp_path / "log"
    with open(path, "wb") as stderr:
        monkeypatch.setattr(sys, "__stderr__", stderr)
        with logs_on_stderr("info", "json"), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("a deprecated option", stacklevel=1)
            logging.getLogger("asyncio").error("no more files")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert "a deprecated option" in lines[0]["message"]
    assert lines[1]["message"] == "no more files"
