"""Tests of the middleware that checks keys and hosts: tables of headers and paths, no engine."""

import asyncio
import base64
import itertools
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from paged_jax.server import Settings
from paged_jax.server.request_log import RECORD, RequestRecord
from paged_jax.server.security import CLIENT, Security
from paged_jax.server.service import Client

FIRST, SECOND, ADMIN = "first-key", "sécond-key", "admin-key"
HOSTS = ("127.0.0.1", "localhost", "::1", "api.example.com")
PROBES = ("/health", "/live", "/ping", "/ready")
PAGES = ("/", "/chat/chat.js", "/chat/chat.css")
CLOSED = (
    "/v1/models", "/metrics", "/openapi.json", "/cache", "/cache/state", "/sleep", "/chat",
    "/chat/cache.js", "/health/", "/live/x", "//", "", "/LIVE", "/llm/health", "/generate",
)  # fmt: skip


class Reply(NamedTuple):
    """The client that the application saw, or the status and the error if it saw none."""

    client: Client | None
    status: int = 0
    error: dict[str, Any] = {}  # noqa: RUF012
    headers: dict[str, str] = {}  # noqa: RUF012


def ask(
    headers: list[tuple[str, str]] = [("host", "localhost")],  # noqa: B006
    *,
    path: str = "/v1/models",
    root_path: str = "",
    keys: tuple[str, ...] = (FIRST, SECOND),
    admin_key: str | None = ADMIN,
    hosts: tuple[str, ...] | None = HOSTS,
    is_draining: bool = False,
) -> Reply:
    """Send a request to the middleware, in front of an application that answers nothing."""
    seen: list[Client] = []
    sent: list[dict[str, Any]] = []

    async def application(scope, receive, send) -> None:
        seen.append(scope[CLIENT])

    async def send(message) -> None:
        sent.append(message)

    settings = Settings(model_name="m", api_keys=keys, admin_key=admin_key, allowed_hosts=hosts)
    service: Any = SimpleNamespace(settings=settings, is_draining=is_draining)
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "root_path": root_path,
        "client": ("10.0.0.7", 1234),
        "headers": [(name.encode(), value.encode("utf-8")) for name, value in headers],
        RECORD: RequestRecord("1", False, "GET", path),
    }
    asyncio.run(Security(application, service)(scope, _nothing, send))
    if not sent:
        [client] = seen
        return Reply(client)
    assert not seen
    start, body = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(None, start["status"], json.loads(body["body"])["error"], found)


async def _nothing() -> Any:
    raise AssertionError("the middleware reads no body")


# Keys


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"me:{key}".encode()).decode()


# Values of the header Authorization, each with its key.
AUTHORIZATIONS = [
    (None, ""), ("", ""), ("Bearer", ""), ("Bearer ", ""), ("Bearer wrong", ""),
    (f"Bearer {FIRST}x", ""), (f"Bearer {FIRST[:-1]}", ""), ("Bearer \N{SNOWMAN}", ""),
    (FIRST, ""), (f"Token {FIRST}", ""), (f"Bearer{FIRST}", ""), ("Basic !", ""), ("Basic", ""),
    (basic("wrong"), ""), (basic(""), ""), (f"Bearer {basic(FIRST)}", ""),
    (f"Bearer {FIRST}", FIRST), (f"bearer  {FIRST} ", FIRST), (f"Bearer {SECOND}", SECOND),
    (basic(FIRST), FIRST), (basic(SECOND), SECOND), (f"Bearer {ADMIN}", ADMIN),
    (f"BEARER {ADMIN}", ADMIN), (basic(ADMIN), ADMIN), (f"bASIC {basic(ADMIN)[6:]}", ADMIN),
]  # fmt: skip
# Values of the header X-API-Key, each with its key. The admin key is accepted only as
# authorization.
API_KEYS = [
    (None, ""), ("", ""), ("wrong", ""), (f"{FIRST}x", ""), (f"Bearer {FIRST}", ""),
    ("\N{SNOWMAN}", ""), (FIRST, FIRST), (SECOND, SECOND), (ADMIN, ""),
]  # fmt: skip
PAIRS = list(itertools.product(AUTHORIZATIONS, API_KEYS))


def headers_of(authorization: str | None, api_key: str | None) -> list[tuple[str, str]]:
    found = [("host", "localhost"), ("authorization", authorization), ("x-api-key", api_key)]
    return [(name, value) for name, value in found if value is not None]


def test_one_valid_key_in_either_header_is_enough() -> None:
    """The key in Authorization comes first. The salt is the key's, whatever header it is in."""
    salts: dict[str, set[str]] = {}
    for (authorization, first), (api_key, second) in PAIRS:
        reply = ask(headers_of(authorization, api_key))
        key = first or second
        if not key:
            assert reply.status == 401, (authorization, api_key)
            assert reply.error["code"] == "invalid_api_key"
            assert "Bearer" in reply.headers["www-authenticate"]
            continue
        client = reply.client
        assert client is not None and client.is_known, (authorization, api_key)
        assert client.is_admin == (key == ADMIN), (authorization, api_key)
        is_bearer = (authorization or "").lower().startswith("bearer ")
        assert client.may_change == (key == ADMIN and is_bearer), (authorization, api_key)
        assert client.salt == client.name
        salts.setdefault(key, set()).add(client.salt)
    assert salts.keys() == {FIRST, SECOND, ADMIN}
    assert all(len(each) == 1 for each in salts.values())
    [first], [second], [admin] = salts.values()
    assert len({first, second, admin, ""}) == 4, "clients with other keys share no cache"
    assert FIRST not in first


@pytest.mark.parametrize("admin_key", [None, ADMIN])
def test_everyone_is_known_without_keys(admin_key) -> None:
    """Without any key everyone may see the cache page, but nobody may change the engine."""
    for (authorization, key), (api_key, _) in PAIRS:
        client = ask(headers_of(authorization, api_key), keys=(), admin_key=admin_key).client
        assert client is not None and client.is_known
        assert (client.name, client.salt) == ("10.0.0.7", "")
        assert client.is_admin == (admin_key is None or key == ADMIN)
        is_bearer = (authorization or "").lower().startswith("bearer ")
        assert client.may_change == (admin_key is not None and key == ADMIN and is_bearer)


def test_admin_key_is_not_needed() -> None:
    for (authorization, first), (api_key, second) in PAIRS:
        reply = ask(headers_of(authorization, api_key), admin_key=None)
        key = second if first in ("", ADMIN) else first
        assert (reply.client is not None) == bool(key), (authorization, api_key)
        if reply.client is not None:
            assert not reply.client.is_admin and not reply.client.may_change


# Paths


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_only_probes_and_the_chat_page_need_no_key(root_path) -> None:
    for path in (*PROBES, *PAGES, *CLOSED):
        options = {"path": root_path + path, "root_path": root_path}
        reply = ask(**options)
        if path in (*PROBES, *PAGES):
            assert reply.client is not None and not reply.client.is_known, path
        else:
            assert reply.status == 401, path
        assert ask(headers_of(f"Bearer {FIRST}", None), **options).client is not None


def test_only_probes_are_answered_while_the_server_drains() -> None:
    """With or without a key: clients should not try another key."""
    for path, key in itertools.product((*PROBES, *PAGES, *CLOSED), (None, FIRST, "wrong")):
        reply = ask(headers_of(None, key), path=path, is_draining=True)
        assert (reply.client is not None) == (path in PROBES), path
        if reply.client is None:
            assert (reply.status, reply.error["code"]) == (503, "shutting_down")


def test_other_scopes_reach_the_application() -> None:
    """The lifespan has no headers."""
    seen = []

    async def application(scope, receive, send) -> None:
        seen.append(scope["type"])

    service: Any = SimpleNamespace(settings=Settings(model_name="m", api_keys=(FIRST,)))
    asyncio.run(Security(application, service)({"type": "lifespan"}, _nothing, _nothing))
    assert seen == ["lifespan"]


# Hosts. RFC 9110, 7.2: Host = uri-host [ ":" port ], where the port may be empty (RFC 3986, 3.2.3).

ALLOWED = [
    "127.0.0.1", "127.0.0.1:5000", "127.0.0.1:", "localhost", "LOCALHOST:80", "[::1]", "[::1]:5000",
    "api.example.com", "API.Example.COM:443",
]  # fmt: skip
# Names of others, missing names, and values that are no host. Many begin or end like a host.
REJECTED = [
    None, "", ":", ":5000", "evil.example", "evil.example:80", "localhost.evil.example",
    "127.0.0.1.evil.example", "xlocalhost", "evil-localhost", "example.com", "[::2]", "[::1", "::1",
    "[]", "[localhost]:x", "*", "0.0.0.0", "127.0.0.2", "2130706433", "evil.example@localhost",
    "localhost@evil.example", "localhost/evil.example", "evil.example/@localhost", "localhost?x",
    "localhost#x", "localhost\\x", "localhost, evil.example", "localhost evil.example",
    "localhost:80:80", "localhost:port", "localhost:-1", "http://localhost", "localh\u00f6st",
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/models", "/live", "/"])
def test_requests_to_other_hosts_are_rejected(path) -> None:
    """RFC 9112, 3.2: an invalid value is answered with 400. A valid key makes no difference."""
    for key, host in itertools.product((None, FIRST), (*ALLOWED, *REJECTED)):
        headers = [each for each in headers_of(None, key) if each[0] != "host"]
        reply = ask([*headers, *([] if host is None else [("host", host)])], path=path)
        if host in ALLOWED:
            assert reply.status in (0, 401), host
            assert reply.client is not None or (key is None and path == "/v1/models"), host
        else:
            assert (reply.status, reply.error.get("code")) == (400, "host_not_allowed"), host


def test_any_host_is_accepted_without_a_list() -> None:
    for host in (*ALLOWED, *REJECTED):
        given = [] if host is None else [("host", host)]
        assert ask([*given, ("x-api-key", FIRST)], hosts=None).client is not None, host
