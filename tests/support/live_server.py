"""Server in a thread with its own port, for tests with real clients."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx

from paged_jax import Engine
from paged_jax.server import Service, Settings
from paged_jax.server.app import Startup
from paged_jax.server.http_server import Server

# Chat template that skips messages of unknown roles and reads two variables.
CHAT_TEMPLATE = (
    "{% for m in messages if m.role != 'critic' %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
    "{% if enable_thinking %}hm{% endif %}{{ reasoning_effort }}"
)
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


class LiveServer:
    """Serves an engine on 127.0.0.1 as a context manager."""

    def __init__(
        self, engine: Engine, settings: Settings, *, drain_timeout: float = 5.0, **options: Any
    ):
        self.engine = engine
        self.service = Service(engine, settings)
        self._startup = Startup(lambda note: self.service)
        # Send logs to pytest's handlers.
        self.server = Server(
            self._startup,
            settings.limits,
            drain_timeout=drain_timeout,
            log_level="error",
            log_config=None,
            **options,
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        # Small socket buffers, so that the server notices clients that do not read.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],))

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        wait_until(lambda: self._is_ready or not self._thread.is_alive())
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.is_alive():
            self.signal()
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def _is_ready(self) -> bool:
        return self.server.started and self._startup.service is not None

    def signal(self) -> None:
        """Act as on SIGTERM."""
        self.server.handle_exit(0, None)

    @contextlib.contextmanager
    def client(self, **options) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=self.url, timeout=60, **options) as client:
            yield client

    def post(self, path: str, body: object, **options) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, **{"timeout": 60, **options})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, data: bytes) -> tuple[int, bytes]:
        """Send bytes on a new connection; return status (0 without an answer) and body."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return read_answer(connection, data.partition(b" ")[0].decode("latin-1"))

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def num_tasks(self) -> int:
        """Number of tasks in the server's event loop."""
        assert self.service._loop is not None
        return len(asyncio.all_tasks(self.service._loop))

    def wait_until_idle(self) -> None:
        """Wait until no request runs and all blocks are free."""
        wait_until(lambda: self.service.num_active == 0)
        keys = self.service.settings.api_keys
        headers = bearer(keys[0]) if keys else {}
        wait_until(lambda: self.get("/health", headers=headers).json()["blocks"]["used"] == 0)


def read_answer(connection: socket.socket, method: str = "POST") -> tuple[int, bytes]:
    """Return status (0 without an answer) and body of the next answer on a connection."""
    response = http.client.HTTPResponse(connection, method=method)
    try:
        response.begin()
        return response.status, response.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, b""


def check_error(status: int, content: bytes, expected: Iterable[int]) -> dict[str, Any]:
    """Return the error in an answer. Check its form, and that it does not echo all input."""
    assert status in expected, (status, content[:200])
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert len(content) < 4000
    return error


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error of a response with this status. It must have OpenAI's form."""
    return check_error(response.status_code, response.content, {status})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of server-sent events. The last event must be [DONE]."""
    *lines, end, rest = response.text.split("\n\n")
    assert end == "data: [DONE]" and rest == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def bearer(key: str) -> dict[str, str]:
    """Return the header with an API key."""
    return {"authorization": f"Bearer {key}"}


def wait_until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def free_ports(count: int) -> list[int]:
    """Return unused ports on 127.0.0.1."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]
