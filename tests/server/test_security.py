"""Tests of API keys, the admin key, cache salts and the Host header."""

import base64

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from paged_jax import Engine
from paged_jax.server import Service, Settings, create_app
from tests.support.hostile_clients import HOST
from tests.support.live_server import GREEDY, LiveServer, bearer, check_error, error_of
from tests.support.tiny_model import SIZES


@pytest.fixture(scope="module")
def locked(tiny_folder):
    settings = Settings(
        model_name="tiny",
        api_keys=("first-key", "second-key"),
        admin_key="admin-key",
        allowed_hosts=("127.0.0.1",),
    )
    with LiveServer(Engine(tiny_folder, **SIZES), settings) as server:
        yield server


def test_chat_page_needs_no_key(locked) -> None:
    """Claude Code checks with HEAD, without its key, whether a server exists."""
    assert httpx.head(locked.url).status_code == 200
    for path in ("/", "/chat/chat.js", "/chat/chat.css"):
        assert locked.get(path).status_code == 200
    for path in ("/chat", "/chat/cache.js", "/chat/../v1/models", "//"):
        assert locked.get(path).status_code == 401


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/openapi.json", "/nothing"])
def test_most_routes_require_a_key(locked, path) -> None:
    assert locked.get("/health").status_code == 200
    wrong = [bearer(key) for key in ("first-ke", "first-key2", "ä")]
    for headers in ({}, {"authorization": "Bearer"}, *wrong):
        raw = {name: value.encode() for name, value in headers.items()}
        assert error_of(locked.get(path, headers=raw), 401)["code"] == "invalid_api_key"
    assert locked.get(path, headers=bearer("second-key")).status_code in (200, 404)


def test_health_hides_details_without_a_key(locked) -> None:
    assert locked.get("/health").json() == {"status": "ok"}
    assert "blocks" in locked.get("/health", headers=bearer("first-key")).json()


def test_keys_are_required_under_a_mount(tiny_folder) -> None:
    """The cache page still requires the admin key."""
    settings = Settings(model_name="tiny", api_keys=("key",), admin_key="admin")
    service = Service(Engine(tiny_folder, **SIZES), settings)
    app = Starlette(routes=[Mount("/llm", create_app(service))], lifespan=service.lifespan)
    with TestClient(app) as client:
        statuses = {
            path: [client.get(path, headers=headers).status_code for headers in ({}, bearer("key"))]
            for path in ("/llm/health", "/llm/v1/models", "/llm/cache", "/llm/cache/state")
        }
        assert statuses == {
            "/llm/health": [200, 200],
            "/llm/v1/models": [401, 200],
            "/llm/cache": [401, 401],
            "/llm/cache/state": [401, 401],
        }
        assert client.get("/llm/cache/state", headers=bearer("admin")).status_code == 200
        body = {"prompt": "ab", **GREEDY}
        assert client.post("/llm/generate", json=body, headers=bearer("key")).status_code == 200


def test_admin_key_alone_locks_the_cache_page(tiny_folder) -> None:
    settings = Settings(model_name="tiny", admin_key="admin")
    service = Service(Engine(tiny_folder, **SIZES), settings)
    with TestClient(create_app(service)) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/cache").status_code == 401
        assert client.get("/cache", headers=bearer("admin")).status_code == 200


def test_cache_page_requires_the_admin_key(locked) -> None:
    for headers in ({}, bearer("first-key")):
        response = locked.get("/cache", headers=headers)
        error_of(response, 401)
        assert response.headers["www-authenticate"].startswith("Basic")
    password = base64.b64encode(b"me:admin-key").decode()
    for headers in (bearer("admin-key"), {"authorization": f"Basic {password}"}):
        assert locked.get("/cache", headers=headers).status_code == 200


def test_api_keys_do_not_share_cached_blocks(locked) -> None:
    body = {"prompt": "the cat sat on a mat", **GREEDY}

    def cached(key: str, **more) -> int:
        answer = locked.post("/generate", {**body, **more}, headers=bearer(key)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key") == 0
    assert cached("first-key") > 0
    assert cached("second-key") == 0
    assert cached("first-key", cache_salt="mine") == 0
    assert cached("first-key", cache_salt="mine") > 0
    assert cached("second-key", cache_salt="mine") == 0, "salts of key and request are joined"


def test_negative_priority_is_rejected_with_api_keys(locked) -> None:
    body = {"prompt": "a", **GREEDY}
    for priority, status in ((-1, 400), (0, 200), (1, 200)):
        response = locked.post(
            "/generate", {**body, "priority": priority}, headers=bearer("first-key")
        )
        assert response.status_code == status


def test_unknown_hosts_are_rejected(locked) -> None:
    headers = bearer("first-key") | {"host": "evil.example:80"}
    assert error_of(locked.get("/v1/models", headers=headers), 400)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nhost:\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: \r\n\r\n",
        b"GET /live HTTP/1.1\r\n\r\n",
        b"GET /live HTTP/1.0\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n\r\n",
    ],
)
def test_host_must_be_given_once(locked, head) -> None:
    """RFC 9112, 3.2: an empty Host header is no host of this server, even for a probe."""
    check_error(*locked.send(head), {400})


@pytest.mark.parametrize(
    "authorization", [b"Basic \xc3\xa4", b"Basic !", b"Basic", b"Bearer \xff", b"Bearer", b"\xff"]
)
def test_malformed_authorization_is_rejected(locked, authorization) -> None:
    for path in (b"/v1/models", b"/cache"):
        head = b"GET %b HTTP/1.1\r\n%bauthorization: %b\r\n\r\n" % (path, HOST, authorization)
        check_error(*locked.send(head), {401})


def test_pages_of_allowed_sites_may_use_the_server(tiny_folder) -> None:
    """A preflight request has no key. Without allowed sites there are no CORS headers."""
    site = "https://example.com"
    asked = {
        "origin": site,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    settings = Settings(model_name="m", api_keys=("k",), allowed_origins=(site,))
    with LiveServer(Engine(tiny_folder, **SIZES), settings) as server:
        with server.client() as client:
            answer = client.options("/v1/chat/completions", headers=asked)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == site
            assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
            refused = client.options("/v1/models", headers={**asked, "origin": "https://other.com"})
            assert "access-control-allow-origin" not in refused.headers
            denied = client.get("/v1/models", headers={"origin": site})
            assert denied.status_code == 401
            assert denied.headers["access-control-allow-origin"] == site
