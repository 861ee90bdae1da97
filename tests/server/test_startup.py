"""What the server answers before there is an engine, and how it ends then."""

import socket
import threading

import httpx
import pytest

from paged_jax import Engine
from paged_jax.server import Limits, Service, Settings
from paged_jax.server.app import Startup
from paged_jax.server.http_server import Server
from paged_jax.server.service import Client
from tests.support.live_server import wait_until
from tests.support.tiny_model import SIZES, save_tiny_model


class Starting:
    """A server whose service is made when `may_end` is set."""

    def __init__(self, make):
        self.may_end = threading.Event()

        def wait_and_make(note):
            note("compiling 12 of 49: decode")
            assert self.may_end.wait(30)
            return make()

        self.startup = Startup(wait_and_make)
        self.server = Server(
            self.startup, Limits(), drain_timeout=5.0, log_level="error", log_config=None
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, args=([listener],))

    def __enter__(self) -> "Starting":
        self.thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.handle_exit(0, None)
        self.may_end.set()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def status(self, path: str) -> int:
        return httpx.get(self.url + path).status_code


def test_probes_are_answered_while_it_compiles(tmp_path) -> None:
    engine = Engine(save_tiny_model(tmp_path), **SIZES)
    with Starting(lambda: Service(engine, Settings(model_name="tiny"))) as starting:
        assert starting.status("/live") == 200
        for path in ("/ready", "/health"):
            answer = httpx.get(starting.url + path)
            assert answer.status_code == 503
            assert answer.json() == {"status": "starting", "detail": "compiling 12 of 49: decode"}
        answer = httpx.post(starting.url + "/v1/completions", json={"prompt": "ab"})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert "compiling 12 of 49" in answer.json()["error"]["message"]
        starting.may_end.set()
        wait_until(lambda: starting.status("/ready") == 200)
        assert starting.status("/v1/models") == starting.status("/live") == 200


def test_a_signal_ends_it_at_once_while_it_compiles() -> None:
    with Starting(lambda: pytest.fail("it has ended before")) as starting:
        starting.server.handle_exit(0, None)
        starting.thread.join(10)
        assert not starting.thread.is_alive() and starting.startup.is_making


def test_a_start_that_fails_ends_the_server() -> None:
    def fail():
        raise ValueError("no such model")

    with Starting(fail) as starting:
        starting.may_end.set()
        starting.thread.join(10)
        assert not starting.thread.is_alive()
        with pytest.raises(ValueError, match="no such model"):
            starting.startup.check()


def test_it_is_ready_while_it_has_room_and_does_not_drain(tmp_path) -> None:
    engine = Engine(save_tiny_model(tmp_path), **SIZES)
    with Starting(lambda: Service(engine, Settings(model_name="tiny"))) as starting:
        starting.may_end.set()
        wait_until(lambda: starting.status("/ready") == 200)
        service = starting.startup.service
        most = service.max_num_seqs + service.limits.max_queue
        with service.admit(most, Client(), is_stream=False):
            assert httpx.get(starting.url + "/ready").json() == {"status": "full"}
            service.drain(5.0, 0.0, lambda: None)
            wait_until(lambda: service.is_draining)
            assert httpx.get(starting.url + "/ready").json() == {"status": "draining"}
            # What is told to stop is alive until it has stopped.
            assert starting.status("/live") == 200 and starting.status("/v1/models") == 503
