"""An engine that hangs or fails."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from paged_jax import Engine, serve
from paged_jax.server import Settings
from tests.support.hostile_clients import LONG, open_stream
from tests.support.live_server import LiveServer, check_error, wait_until
from tests.support.tiny_model import SIZES


@pytest.fixture
def own_server(tiny_folder):
    engine = Engine(tiny_folder, **SIZES, steps_per_dispatch=2)
    with LiveServer(engine, Settings(model_name="tiny", stall_seconds=0.2)) as server:
        assert server.post("/generate", {"prompt": "ab", "max_tokens": 2}).status_code == 200
        yield server


def test_health_reports_a_stalled_engine(own_server, monkeypatch) -> None:
    go_on, advance = threading.Event(), own_server.engine.advance

    def hang():
        go_on.wait(30)
        return advance()

    monkeypatch.setattr(own_server.engine, "advance", hang)
    try:
        with open_stream(own_server) as connection:
            wait_until(lambda: own_server.get("/health").json()["status"] == "stalled")
            assert own_server.get("/health").status_code == 503
            assert own_server.get("/metrics").status_code == 200
            go_on.set()
            rest = b""
            while b"[DONE]" not in rest:
                rest += connection.recv(2**16)
    finally:
        go_on.set()
    own_server.wait_until_idle()
    assert own_server.get("/health").status_code == 200


def fail_to_advance():
    raise RuntimeError("no memory")


def test_engine_failure_ends_all_requests_with_an_error_and_then_the_server(
    own_server, monkeypatch
) -> None:
    # Keep the server alive until its states have been checked.
    may_end = threading.Event()
    wait_and_call = own_server.service._wait_and_call

    async def wait_longer(timeout, grace, then):
        await asyncio.to_thread(may_end.wait, 30)
        await wait_and_call(timeout, grace, then)

    monkeypatch.setattr(own_server.service, "_wait_and_call", wait_longer)
    try:
        with open_stream(own_server, {**LONG, "n": 16}) as connection:
            while b"data: " not in connection.recv(5000):
                pass
            monkeypatch.setattr(own_server.engine, "advance", fail_to_advance)
            wait_until(lambda: own_server.get("/health").json()["status"] == "failed")
            rest = b""
            while not rest.endswith(b"0\r\n\r\n"):
                rest += connection.recv(2**16)
        assert b'"code":"engine_stopped"' in rest and b"[DONE]" not in rest
        for path in ("/health", "/live", "/ready"):
            assert own_server.get(path).status_code == 503
        response = own_server.post("/generate", {"prompt": "a"})
        check_error(response.status_code, response.content, {503})
    finally:
        may_end.set()
    own_server._thread.join(30)
    assert not own_server._thread.is_alive() and own_server._startup.has_failed_engine


def test_serve_exits_with_an_error_after_the_engine_has_failed(
    tiny_folder, monkeypatch, capfd
) -> None:
    """systemd (`Restart=on-failure`) and Docker restart a server only after such a status."""
    services, make = [], serve._make_service

    def make_broken(*arguments):
        service = make(*arguments)
        monkeypatch.setattr(service.engine._engine, "advance", fail_to_advance)
        services.append(service)
        return service

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(serve.os, "_exit", leave)
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    monkeypatch.setattr(serve, "_make_service", make_broken)
    options = ["--no-warmup", "--port", "0", "--model", str(tiny_folder), *sizes]
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(_status_of, options)
        wait_until(lambda: services and services[0]._loop is not None)
        log = ""
        while "listening on" not in log:
            log += capfd.readouterr().err
        url = re.findall(r"listening on (\S+),", log)[0]
        response = httpx.post(f"{url}/generate", json={"prompt": "ab"}, timeout=60)
        check_error(response.status_code, response.content, {503})
        assert status.result(30) == 1
    log += capfd.readouterr().err
    assert log.count("RuntimeError: no memory") == 3, "the traceback of each attempt"


def _status_of(options: list[str]) -> object:
    with pytest.raises(SystemExit) as error:
        serve.main(options)
    return error.value.code
