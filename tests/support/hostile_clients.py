"""Raw HTTP requests, and checks that other clients are not delayed by them."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

from tests.support.live_server import LiveServer, wait_until

# Seconds within which an error must be sent, and for which a concurrent stream may pause. Both take
# at most half a second on 2 idle cores, but tests may share their cores.
AT_ONCE = 10.0
HOST = b"host: 127.0.0.1\r\n"
JSON = HOST + b"content-type: application/json\r\n"
LONG = {"prompt": "ab", "max_tokens": 55, "ignore_eos": True, "temperature": 0, "stream": True}


def post(body: bytes, path: str = "/generate") -> bytes:
    """Return a POST request with a JSON body."""
    return b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path.encode(), JSON, len(body), body,
    )  # fmt: skip


def open_stream(server: LiveServer, body: dict = LONG, *, buffer: int = 0) -> socket.socket:
    """Return a connection on which a stream was requested."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(post(json.dumps(body).encode()))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Return all data until the connection is closed."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def read_message(file: BinaryIO) -> tuple[int, bytes]:
    """Return status and body of the next response of several on a connection."""
    status, size = int(file.readline().split()[1]), 0
    while line := file.readline().strip().lower():
        if line.startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    return status, file.read(size)


@contextlib.contextmanager
def streams_beside(server: LiveServer) -> Iterator[None]:
    """Run streams one after another while the context is active. None may pause for long."""
    is_over = threading.Event()
    gaps: list[float] = []

    def run() -> None:
        last = time.monotonic()
        with server.client() as client:
            while not is_over.is_set():
                with client.stream("POST", "/generate", json=LONG) as response:
                    for _ in response.iter_lines():
                        gaps.append(time.monotonic() - last)
                        last = time.monotonic()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: len(gaps) > 5)
        yield
    finally:
        is_over.set()
        thread.join(30)
    assert max(gaps) < AT_ONCE


@contextlib.contextmanager
def answered_at_once(also: float = 0.0) -> Iterator[None]:
    """Check that the context takes less than `AT_ONCE` and `also` seconds."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < AT_ONCE + also
