"""Tests of the routes that change the engine: permissions, and the effect on clients."""

import base64
import json
import threading
import time
from pathlib import Path

import jax
import pytest
from flax import nnx

from paged_jax import Engine, Llama
from paged_jax.server import Settings
from tests.support.live_server import LiveServer, check_error, wait_until
from tests.support.tiny_model import CONFIG, SIZES, save_tiny_model

ADMIN = {"authorization": "Bearer admin-key"}
KEY = {"authorization": "Bearer key"}
BODY = {"prompt": "the cat sat on", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
ROUTES = ["/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights_from_disk"]


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    settings = Settings(
        model_name="tiny",
        api_keys=("key",),
        admin_key="admin-key",
        profile_folder=str(tmp_path_factory.mktemp("profiles")),
    )
    engine = Engine(tiny_folder, **SIZES, steps_per_dispatch=1)
    with LiveServer(engine, settings) as server:
        yield server


def do(server: LiveServer, path: str, body: object = None, status: int = 200) -> dict:
    response = server.post(path, body, headers=ADMIN)
    assert response.status_code == status, response.text
    return response.json()


def text(server: LiveServer) -> str:
    response = server.post("/generate", BODY, headers=KEY)
    assert response.status_code == 200, response.text
    return response.json()["text"][0]


def sleep_state(server: LiveServer) -> list[float]:
    lines = server.get("/metrics", headers=KEY).text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("vllm:engine_sleep")]


@pytest.mark.parametrize("path", ROUTES)
def test_admin_routes_require_the_admin_key_as_bearer_token(server, path) -> None:
    # A browser that knows the key as a password sends it with requests of any web site.
    password = base64.b64encode(b":admin-key").decode()
    for headers in (KEY, {"authorization": f"Basic {password}"}):
        response = server.post(path, {}, headers=headers)
        error = check_error(response.status_code, response.content, {403})
        assert error["code"] == "admin_key_required"
    assert server.post(path, {}).status_code == 401
    assert not server.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"]


def test_admin_routes_are_closed_without_an_admin_key(tiny_folder) -> None:
    with LiveServer(Engine(tiny_folder, **SIZES), Settings(model_name="tiny")) as server:
        assert server.post("/start_profile", None).status_code == 403
        response = server.post("/sleep", None)
        assert "the server was started without --admin-key" in response.json()["error"]["message"]
        assert response.status_code == 403 and server.get("/ready").status_code == 200


def test_sleep_rejects_new_requests_and_loses_no_running_request(server, monkeypatch) -> None:
    expected, pieces, advance = text(server), [], server.engine.advance

    def advance_slowly() -> list:
        time.sleep(0.05)
        return advance()

    monkeypatch.setattr(server.engine, "advance", advance_slowly)

    def read() -> None:
        body = {**BODY, "stream": True}
        with server.client(headers=KEY) as client:
            with client.stream("POST", "/generate", json=body) as response:
                data = (line.removeprefix("data: ") for line in response.iter_lines() if line)
                pieces.extend(json.loads(each)["text"][0] for each in data if each != "[DONE]")

    stream = threading.Thread(target=read)
    stream.start()
    wait_until(lambda: pieces)
    used = sum(array.nbytes for array in jax.live_arrays())
    assert do(server, "/sleep?level=1")["is_sleeping"]
    assert sum(array.nbytes for array in jax.live_arrays()) < used
    assert sleep_state(server) == [0, 1, 0]
    response = server.post("/v1/completions", BODY, headers=KEY)
    error = check_error(response.status_code, response.content, {503})
    assert error["code"] == "sleeping" and int(response.headers["retry-after"]) > 0
    assert server.get("/cache/state", headers=ADMIN).status_code == 503
    statuses = {path: server.get(path).status_code for path in ("/live", "/ready", "/health")}
    assert statuses == {"/live": 200, "/ready": 503, "/health": 200}
    assert server.get("/ready").json()["status"] == "sleeping"
    assert stream.is_alive()
    assert not do(server, "/wake_up")["is_sleeping"]
    stream.join(30)
    assert "".join(pieces) == expected == text(server)
    assert sleep_state(server) == [1, 0, 0] and server.get("/ready").status_code == 200


def test_update_weights_loads_a_folder(server, tiny_folder, tmp_path) -> None:
    expected = text(server)
    other = save_tiny_model(tmp_path)
    Llama(CONFIG, rngs=nnx.Rngs(3)).save_pretrained(other)
    do(server, "/update_weights_from_disk", {"model_path": str(other)})
    changed = text(server)
    assert changed != expected
    # Trainers have no memory for old and new weights together.
    do(server, "/sleep?level=2")
    assert "update_params first" in do(server, "/wake_up", status=409)["error"]["message"]
    do(server, "/wake_up?tags=weights")
    do(server, "/update_weights_from_disk", {"model_path": str(tiny_folder)})
    assert do(server, "/wake_up?tags=kv_cache") == {"is_sleeping": False}
    assert text(server) == expected


def test_update_weights_rejects_other_models(server, tiny_folder, tmp_path) -> None:
    expected = text(server)
    other = save_tiny_model(tmp_path)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    for folder, message in ((other, "rope.theta must be"), (tmp_path / "none", "must exist")):
        answer = do(server, "/update_weights_from_disk", {"model_path": str(folder)}, 400)
        assert message in answer["error"]["message"]
    do(server, "/update_weights_from_disk", {"folder": "x"}, 400)
    assert text(server) == expected


def test_errors_name_the_parameter(server) -> None:
    for path, name in (("/sleep?level=3", "level"), ("/wake_up?tags=all", "tags")):
        if path.startswith("/wake_up"):
            do(server, "/sleep")
        assert do(server, path, status=400)["error"]["param"] == name
    do(server, "/wake_up")


def test_reset_prefix_cache_forgets_prompts(server) -> None:
    def num_cached() -> int:
        usage = server.post("/generate", BODY, headers=KEY).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    num_cached()
    assert num_cached() > 0
    do(server, "/reset_prefix_cache")
    assert num_cached() == 0


def test_profile_is_recorded_between_start_and_stop(server) -> None:
    folder = Path(server.service.settings.profile_folder)
    assert do(server, "/stop_profile", status=409)["error"]["code"] == "profile_state"
    do(server, "/start_profile")
    do(server, "/start_profile", status=409)
    text(server)
    assert not list(folder.rglob("*.pb"))
    do(server, "/stop_profile")
    [profile] = folder.rglob("*.xplane.pb")
    assert b"engine step" in profile.read_bytes()
