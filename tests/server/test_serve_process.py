"""Tests of ``python -m paged_jax.serve`` as a process: its log, shutdown and errors."""

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paged_jax import serve
from paged_jax.server import Limits, Settings
from paged_jax.server.http_server import url_of
from tests.support.live_server import check_error, wait_until
from tests.support.server_process import ServerProcess
from tests.support.tiny_model import save_tiny_model

ENDLESS = {"prompt": "ab", "max_tokens": 8000, "ignore_eos": True, "n": 2, "stream": True}


OPTIONS = ["--no-warmup", "--num-blocks", "4000", "--max-num-seqs", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a model with a long context, so that requests can run for long."""
    return save_tiny_model(tmp_path_factory.mktemp("process"), context=8192)


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess("--model", str(folder), *OPTIONS, *arguments)
    try:
        yield server
    finally:
        server.kill()


class Stream:
    """Stream of a client that is read in a thread."""

    def __init__(self, url: str, body: dict):
        self.lines: list[str] = []
        self.status = 0
        self._thread = threading.Thread(target=self._run, args=(url, body))
        self._thread.start()

    def _run(self, url: str, body: dict) -> None:
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            self.status = response.status_code
            self.lines += filter(None, response.iter_lines())

    def end(self) -> str:
        """Return the data of the last event of a complete HTTP response."""
        self._thread.join(60)
        assert self.status == 200 and self.lines
        return self.lines[-1].removeprefix("data: ")


def begin_streams(server: ServerProcess, **options) -> list[Stream]:
    """Return streams that have started."""
    paths = ["/generate", "/v1/completions"] * 2
    streams = [Stream(server.url + path, {**ENDLESS, **options}) for path in paths]
    wait_until(lambda: all(stream.status for stream in streams), 120)
    return streams


def assert_cut_off(streams: list[Stream]) -> None:
    for stream in streams:
        error = check_error(503, stream.end().encode(), {503})
        assert error["code"] == "shutting_down"


@pytest.mark.parametrize(
    ("keys", "admin_key", "has_page"),
    [((), None, True), (("a",), None, False), (("a",), "b", True), ((), "b", True)],
)
def test_hint_shows_a_request_and_the_cache_page(keys, admin_key, has_page) -> None:
    """With API keys but without an admin key the cache page is closed."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        url = url_of(listener)
    assert url.startswith("http://127.0.0.1:")
    hint = serve._hint(url, Settings("tiny", api_keys=keys, admin_key=admin_key))
    assert (f"{url}/cache" in hint) == has_page
    command = shlex.split(hint[hint.lower().index("try: ") + 5 :])
    assert command[:2] == ["curl", f"{url}/generate"]
    assert ("Authorization: Bearer $PAGED_JAX_API_KEY" in command) == bool(keys)
    assert set(json.loads(command[-1])) == {"prompt", "max_tokens"}


@pytest.mark.slow
def test_sigterm_finishes_streams_and_rejects_new_requests(folder) -> None:
    with serving(folder, "--grace", "3") as server:
        assert "ready: " in server.log and "4000 blocks of 16 tokens" in server.log
        assert "(as num_blocks says)" in server.log
        # No line claims that the startup is complete before the model is ready.
        assert "startup" not in server.log and "Uvicorn" not in server.log
        wait_until(lambda: "curl" in server.log)
        last = server.log.splitlines()[-1]
        assert f"{server.url}/cache shows the cache" in last
        command = shlex.split(last.partition("try: ")[2])
        headers, body = dict([command[3].split(": ")]), json.loads(command[-1])
        response = httpx.post(command[1], json=body, headers=headers, timeout=120)
        assert response.status_code == 200 and response.json()["outputs"]
        streams = begin_streams(server, max_tokens=600)
        with httpx.Client(timeout=10) as client:
            assert not server.is_closed_to(client)
            server.terminate()
            # On the existing connection and on new connections.
            wait_until(lambda: server.is_closed_to(client))
            wait_until(lambda: server.is_closed_to(httpx))
            # Probes are still answered, so that a load balancer can notice.
            assert httpx.get(f"{server.url}/ready").json()["status"] == "draining"
            assert httpx.get(f"{server.url}/live").status_code == 200
        assert [stream.end() for stream in streams] == ["[DONE]"] * 4
        assert server.wait() == 0


@pytest.mark.slow
def test_second_sigterm_ends_streams(folder) -> None:
    with serving(folder) as server:
        streams = begin_streams(server)
        with stuck_clients(server):
            server.terminate()
            time.sleep(0.5)
            assert server.process.poll() is None
            start = time.monotonic()
            server.terminate()
            assert server.wait() == 0
            assert time.monotonic() - start < 20
        assert_cut_off(streams)


@pytest.mark.slow
def test_drain_timeout_ends_streams(folder) -> None:
    with serving(folder, "--drain-timeout", "0.5") as server:
        streams = begin_streams(server)
        with stuck_clients(server):
            start = time.monotonic()
            server.terminate()
            assert server.wait() == 0
            assert 0.5 < time.monotonic() - start < 20
        assert_cut_off(streams)


@contextlib.contextmanager
def stuck_clients(server: ServerProcess) -> Iterator[None]:
    """Connect a client that does not read, one without a body, and one that sends nothing."""
    address = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
    body = json.dumps({**ENDLESS, "logprobs": 20})
    head = "POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for text in (f"content-length: {len(body)}\r\n\r\n{body}", "content-length: 9\r\n\r\n", ""):
            connection = stack.enter_context(socket.create_connection(address))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall((head + text).encode() if text else b"")
        time.sleep(0.5)
        yield


# Open files


@pytest.fixture
def file_limit():
    """Limit on open files of this process, which is restored afterwards."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield resource
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_soft_limit_of_open_files_is_raised_to_fit_all_connections(file_limit, caplog) -> None:
    _, hard = file_limit.getrlimit(file_limit.RLIMIT_NOFILE)
    file_limit.setrlimit(file_limit.RLIMIT_NOFILE, (700, hard))
    limits = Limits(max_connections=800)
    assert serve._fit_open_files(limits) is limits and not caplog.records
    soft, now = file_limit.getrlimit(file_limit.RLIMIT_NOFILE)
    assert 800 < soft < 1024 and now == hard
    # A limit that is high enough is not lowered.
    serve._fit_open_files(Limits(max_connections=10))
    assert file_limit.getrlimit(file_limit.RLIMIT_NOFILE)[0] == soft


@pytest.mark.parametrize(("hard", "least", "most"), [(256, 100, 200), (64, 32, 32)])
def test_hard_limit_of_open_files_lowers_the_connections(
    file_limit, hard, least, most, caplog, monkeypatch
) -> None:
    """A hard limit that was lowered cannot be restored, so this one is simulated."""
    limits = [(50, hard)]
    monkeypatch.setattr(serve.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(serve.resource, "setrlimit", lambda kind, new: limits.append(new))
    found = serve._fit_open_files(Limits(max_streams=7))
    assert limits[-1] == (hard, hard)
    assert least <= found.max_connections <= most and found.max_streams == 7
    [record] = caplog.records
    assert record.levelname == "WARNING" and "--max-connections must be at most" in record.message


# Errors of options


def error_line(*arguments: str, status: int = 1) -> str:
    """Return the error line of a server process that does not start."""
    command = [sys.executable, "-m", "paged_jax.serve", "--no-warmup", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    return check_error_line(result.stdout, result.stderr)


def check_error_line(out: str, err: str) -> str:
    *before, line = err.splitlines()
    assert [each for each in before if " INFO: " not in each] == []
    assert out == ""
    assert line.startswith("paged_jax.serve: error: ")
    return line


def error_line_here(capsys, *arguments: str, status: int = 1) -> str:
    """Do the same as `error_line` without a process, which takes seconds to start."""
    try:
        assert serve.main(["--no-warmup", *arguments]) == status
    except SystemExit as error:  # raised by argparse
        assert error.code == status
    out, err = capsys.readouterr()
    return check_error_line(out, err)


@pytest.mark.slow
def test_errors_are_a_single_line(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = error_line("--port", port)
        assert "in use" in line and port in line
    assert "nowhere" in error_line("--model", str(tmp_path / "nowhere"), "--port", "0")
    assert "--nonsense" in error_line("--nonsense", status=2)


@pytest.mark.parametrize(
    "arguments, name, status",
    [
        (("--host", "0.0.0.0"), "--api-key", 1),
        (("--host", "no.such.host.invalid", "--api-key", "k"), "--host", 1),
        (("--port", "70000"), "--port", 1),
        (("--drain-timeout", "nan"), "--drain-timeout", 1),
        (("--api-key", ""), "--api-key", 1),
        (("--api-key", "key "), "without spaces at the start", 1),
        (("--api-key", "k", "--admin-key", "a\nb"), "printable", 1),
        (("--served-model-name", ""), "--served-model-name must not be empty", 1),
        (("--root-path", "llm"), "--root-path must be a path .* got llm", 1),
        (("--root-path", "/llm/"), "--root-path must be a path", 1),
        (("--root-path", "/\u00e4"), "--root-path must be a path in ASCII", 1),
        (("--allowed-host", "api.example.com:80"), "without scheme, port", 1),
        (("--allowed-host", "http://api.example.com"), "without scheme, port", 1),
        (("--allowed-host", "*.example.com"), "--allowed-host must be a name", 1),
        (("--allowed-host", "[::1]"), "--allowed-host must be a name", 1),
        (("--heartbeat-timeout", "9"), "--heartbeat-timeout must be combined with", 1),
        (("--profile", "profiles"), "--admin-key", 1),
        (("--port", "http"), "--port", 2),
    ],
)
def test_invalid_options_are_rejected(arguments, name, status, capsys) -> None:
    assert re.search(name, error_line_here(capsys, *arguments, status=status))


def test_keys_from_the_environment_are_stripped(monkeypatch) -> None:
    """Kubernetes keeps the line end of a secret's file."""
    monkeypatch.setenv("PAGED_JAX_ADMIN_KEY", "admin\n")
    monkeypatch.setenv("PAGED_JAX_API_KEY", "one two\n")
    args = serve.make_parser().parse_args(
        ["--allowed-host", "API.example.com", "--allowed-host", "::1"]
    )
    settings = serve.server_options(args).settings(Limits(), None)
    assert settings.admin_key == "admin" and settings.api_keys == ("one", "two")
    assert settings.allowed_hosts == ("::1", "api.example.com")


@pytest.mark.parametrize(
    "arguments, name",
    [
        (("--header-timeout", "0"), "--header-timeout"),
        (("--max-queue", "-1"), "--max-queue"),
        (("--block-size", "0"), "--block-size"),
    ],
)
def test_invalid_limits_and_sizes_are_named(arguments, name, capsys) -> None:
    assert name in error_line_here(capsys, "--port", "0", *arguments)


def test_invalid_model_is_named(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in error_line_here(capsys, "--port", "0", "--model", str(tmp_path))
