"""Tests of the routes about the server's state, and of requests before the service exists."""

import socket
import threading

import httpx
import pytest

from paged_jax import Engine
from paged_jax.server import Limits, Service, Settings
from paged_jax.server.app import Startup
from paged_jax.server.http_server import Server
from paged_jax.server.service import Client
from tests.support.live_server import LiveServer, error_of, wait_until
from tests.support.tiny_model import SIZES, save_tiny_model


@pytest.fixture(scope="module")
def server(tiny_folder):
    with LiveServer(Engine(tiny_folder, **SIZES), Settings(model_name="tiny")) as server:
        yield server


def test_models_can_be_listed_and_retrieved(server) -> None:
    models = server.get("/v1/models").json()
    assert models["object"] == "list" and not models["has_more"]
    [model] = models["data"]
    assert model["id"] == models["first_id"] == models["last_id"] == "tiny"
    assert model["object"] == "model" and server.get("/v1/models/tiny").json() == model
    assert "does not exist" in error_of(server.get("/v1/models/other"), 404)["message"]


@pytest.mark.peers
def test_openai_client_lists_models(server) -> None:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        [model] = client.models.list().data
        assert model.id == client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("other")


def test_unknown_routes_and_methods_are_rejected(server) -> None:
    error_of(server.get("/nothing"), 404)
    assert error_of(server.get("/generate"), 405)["message"].endswith("not allowed. Use POST.")
    error_of(server.post("/v1/chat/completions", {"messages": []}), 400)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions?"),
        ("/v1//chat/completions", "/v1/chat/completions?"),
        ("/v1/v1/chat/completions", "/v1/chat/completions?"),
        ("/chat/completions", "/v1/chat/completions?"),
        ("/responses", "/v1/responses?"),
        ("/v1/embeddings", "/openapi.json for all routes."),
    ],
)
def test_unknown_routes_name_the_route_that_is_meant(server, path, advice) -> None:
    message = error_of(server.post(path, {}), 404)["message"]
    assert message.endswith(advice) and path in message


def test_health_reports_blocks_and_samples(server) -> None:
    health = server.get("/health").json()
    assert health["status"] == "ok" and health["blocks"]["total"] == SIZES["num_blocks"]
    assert health["num_running"] == health["num_waiting"] == 0


def test_openapi_document_lists_routes_and_schemas(server) -> None:
    document = server.get("/openapi.json").json()
    assert {"/generate", "/v1/completions", "/v1/chat/completions"} <= set(document["paths"])
    assert document["components"]["schemas"]["ChatBody"]["additionalProperties"] == {"type": "null"}


class Starting:
    """Server that creates its service only after `may_end` is set."""

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


def test_startup_answers_probes_while_compiling(tmp_path) -> None:
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


def test_startup_ends_on_a_signal_while_compiling() -> None:
    with Starting(lambda: pytest.fail("the service was created after the signal")) as starting:
        starting.server.handle_exit(0, None)
        starting.thread.join(10)
        assert not starting.thread.is_alive() and starting.startup.is_making


def test_startup_ends_the_server_if_the_service_fails() -> None:
    def fail():
        raise ValueError("no such model")

    with Starting(fail) as starting:
        starting.may_end.set()
        starting.thread.join(10)
        assert not starting.thread.is_alive()
        with pytest.raises(ValueError, match="no such model"):
            starting.startup.check()


def test_ready_reports_full_and_draining(tmp_path) -> None:
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
            # A draining server is alive but accepts no requests.
            assert starting.status("/live") == 200 and starting.status("/v1/models") == 503
