"""Tests of connections: malformed HTTP, slow clients, clients that do not read, and limits."""

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest

from paged_jax import Engine
from paged_jax.cache.blocks import check_invariants
from paged_jax.server import Limits, Settings
from tests.support.hostile_clients import (
    HOST,
    JSON,
    LONG,
    answered_at_once,
    open_stream,
    post,
    read_all,
    read_message,
    streams_beside,
)
from tests.support.live_server import LiveServer, check_error, read_answer, wait_until
from tests.support.tiny_model import SIZES, save_tiny_model

LIMITS = Limits(
    header_timeout=0.3, body_timeout=0.3, send_timeout=0.5, max_streams=3, max_queue=60,
    max_header_bytes=4096, max_connections=40,
)  # fmt: skip
CHUNKED = b"POST /generate HTTP/1.1\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("hostile"), chat_template="{{ messages }}")


@pytest.fixture(scope="module")
def shared_server(folder):
    engine = Engine(folder, **SIZES, steps_per_dispatch=2)
    with LiveServer(engine, Settings(model_name="tiny", limits=LIMITS)) as server:
        # Compile the programs, so that no stream waits for the compiler.
        for n in (1, 2, 4):
            for more in ({}, {"logprobs": 20}):
                assert server.post("/generate", {**LONG, "n": n, **more}).status_code == 200
        yield server


@pytest.fixture
def server(shared_server, caplog):
    """Server that must have no running request, no leaked block and no logged error afterwards."""
    yield shared_server
    shared_server.wait_until_idle()
    check_invariants(shared_server.engine.cache.tables)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


# Malformed HTTP


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health\r\n\r\n",
        b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /he\x00alth HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /h\xc3\xa4 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST * 2 + b"\r\n",
        b"GET /health HTTP/1.1\r\nho st: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\x00\r\n\r\n",
        b"GET /health HTTP/1.1\r\n folded: a\r\n" + HOST + b"\r\n",
        b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 0x10\r\n\r\n",
        b"POST /generate HTTP/1.1\r\n" + JSON + b"transfer-encoding: gzip\r\n\r\n",
        CHUNKED.replace(HOST, HOST + b"content-length: 2\r\n") + b"2\r\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/9.9\r\n" + HOST + b"\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"2\r\n{}nonsense",
    ],
)  # fmt: skip
def test_malformed_http_is_rejected(server, data) -> None:
    with answered_at_once():
        status, content = server.send(data)
    check_error(status, content, {400})


def test_upgrade_to_another_protocol_is_ignored(server, caplog) -> None:
    wish = b"connection: upgrade\r\nupgrade: websocket\r\n"
    status, _ = server.send(b"GET /live HTTP/1.1\r\n" + HOST + wish + b"\r\n")
    assert status == 200
    assert "uvicorn" not in caplog.text  # uvicorn advises no library for WebSockets


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"CONNECT evil.example:80 HTTP/1.1", 404),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"PRI * HTTP/2.0", 400),
        (b"GET http://127.0.0.1/nothing HTTP/1.1", 404),
        (b"GET http:///health HTTP/1.1", 400),
        (b"GET http://:80/health HTTP/1.1", 400),
        (b"GET http://user@127.0.0.1/health HTTP/1.1", 400),
        (b"GET ftp://127.0.0.1/health HTTP/1.1", 400),
        (b"GET /chat/chat.html HTTP/1.1", 404),
        (b"GET // HTTP/1.1", 404),
        (b"GET /generate/ HTTP/1.1", 404),
        (b"GET /% HTTP/1.1", 404),
        (b"GET /%ff%fe%00 HTTP/1.1", 404),
        (b"GET /generate%00 HTTP/1.1", 404),
        (b"GET /%67enerate HTTP/1.1", 405),
        (b"GET /cache/..%2f..%2fetc%2fpasswd HTTP/1.1", 404),
        (b"GET /cache/cache.js%00 HTTP/1.1", 404),
        (b"GET /cache/blocks/" + b"9" * 4000 + b" HTTP/1.1", 404),
        (b"GET /cache/blocks/-1 HTTP/1.1", 404),
        (b"GET /cache/blocks/%D9%A3 HTTP/1.1", 404),
        (b"GET /cache/state?since=" + b"9" * 4000 + b" HTTP/1.1", 400),
        (b"GET /v1/models/%ff HTTP/1.1", 404),
        (b"GET /v1/models/" + b"a" * 4000 + b" HTTP/1.1", 404),
    ],
)
def test_unusual_targets_are_not_found(server, line, status) -> None:
    with answered_at_once():
        answer = server.send(line[:4000] + line[-9:] + b"\r\n" + HOST + b"\r\n" if len(line) > 4000
                             else line + b"\r\n" + HOST + b"\r\n")  # fmt: skip
    check_error(*answer, {status})


@pytest.mark.parametrize("host", [b"[::1", b"[", b"a b", b"\xff", b"", b"a" * 3000])
def test_malformed_host_headers_are_harmless(server, host) -> None:
    assert server.send(b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % host)[0] in (200, 400)
    answer = server.send(b"GET /nothing HTTP/1.1\r\nhost: %b\r\n\r\n" % host)
    check_error(*answer, {400, 404})


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny",
     "/health", "/metrics", "/openapi.json", "/cache", "/cache/state", "/cache/blocks/0"],
)  # fmt: skip
def test_unsupported_methods_are_rejected(server, path) -> None:
    posts = path in ("/generate", "/v1/completions", "/v1/chat/completions")
    with server.client() as client:
        for method in ("OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "GET" if posts else "POST"):
            response = client.request(method, path)
            check_error(response.status_code, response.content, {405})
            assert ("POST" if posts else "GET") in response.headers["allow"]
        response = client.head(path)
        assert response.status_code == (405 if posts else 200) and response.content == b""


# Headers and bodies that are too long or incomplete


def test_long_headers_are_rejected(server) -> None:
    with streams_beside(server), answered_at_once():
        for size in (5000, 2_000_000):
            head = b"GET /health HTTP/1.1\r\n" + HOST + b"a: " + b"b" * size
            error = check_error(*server.send(head), {431})
            assert error["code"] == "max_header_bytes_exceeded"
        check_error(*server.send(b"GET /" + b"a" * 5000), {431})


@pytest.mark.parametrize("before", [b"", b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n"])
def test_limit_of_headers_is_exact(server, before) -> None:
    """Also if all bytes arrive at once, and after another request in the same packet."""
    for num_bytes, status in ((LIMITS.max_header_bytes, 200), (LIMITS.max_header_bytes + 1, 431)):
        head = b"GET /live HTTP/1.1\r\n" + HOST + b"a: "
        head += b"b" * (num_bytes - len(head) - 4) + b"\r\n\r\n"
        assert len(head) == num_bytes
        with server.connect() as connection:
            connection.sendall(before + head)
            file = connection.makefile("rb")
            if before:
                assert read_message(file)[0] == 200
            found, content = read_message(file)
        assert found == status
        if status == 431:
            assert check_error(found, content, {431})["code"] == "max_header_bytes_exceeded"


@pytest.mark.parametrize(
    ("fields", "status"), [(JSON, 413), (HOST + b"content-type: text/plain\r\n", 415)]
)
def test_response_is_not_lost_while_the_client_sends(server, fields, status) -> None:
    """The server ignores the rest of the body before it closes the connection (RFC 9112, 9.6)."""
    body = b" " * 1_200_000
    head = b"POST /generate HTTP/1.1\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n"
    with answered_at_once():
        check_error(*server.send(head % (fields, len(body)) + body), {status})
    wait_until(lambda: server.num_connections == 0)


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"])
def test_slow_headers_time_out(server, before) -> None:
    """On a new connection, and on a connection that has received a response."""
    with streams_beside(server), server.connect() as connection:
        if before:
            connection.sendall(before)
            assert read_answer(connection, "GET")[0] == 200
        with answered_at_once(LIMITS.header_timeout):
            drip(connection, b"POST /generate HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 100)
            error = check_error(*read_answer(connection), {408})
        assert error["code"] == "header_timeout_exceeded"


def drip(connection: socket.socket, data: bytes) -> None:
    """Send byte by byte until a response arrives."""
    connection.setblocking(False)
    for byte in data:
        with contextlib.suppress(BlockingIOError):
            if connection.recv(1, socket.MSG_PEEK):
                break
        connection.sendall(bytes([byte]))
        time.sleep(0.02)
    connection.settimeout(10)


def test_slow_body_times_out(server) -> None:
    head = b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 9000\r\n\r\n"
    with streams_beside(server), server.connect() as connection:
        connection.sendall(head)
        with answered_at_once(LIMITS.body_timeout):
            drip(connection, b" " * 1000)
            error = check_error(*read_answer(connection), {408})
        assert error["code"] == "body_timeout_exceeded"


def test_connection_is_closed_if_the_body_of_a_rejected_request_continues(server) -> None:
    """The request is rejected because of its headers."""
    for length, kind, status in ((10**9, b"json", 413), (9000, b"xml", 415)):
        head = b"POST /generate HTTP/1.1\r\n%bcontent-type: application/%b\r\n" % (HOST, kind)
        with server.connect() as connection:
            connection.sendall(head + b"content-length: %d\r\n\r\n " % length)
            with answered_at_once():
                check_error(*read_answer(connection), {status})
            with answered_at_once(LIMITS.body_timeout + 1), contextlib.suppress(ConnectionError):
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.02)


def test_incomplete_body_closes_the_connection(server) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 9000\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        with answered_at_once():
            assert read_answer(connection)[0] == 0
    wait_until(lambda: server.num_connections == 0)


def test_data_after_the_body_is_rejected(server) -> None:
    body = b'{"prompt": "ab", "max_tokens": 1}'
    with server.connect() as connection:
        connection.sendall(post(body) + b" and more of it")
        file = connection.makefile("rb")
        assert read_message(file)[0] == 200
        with answered_at_once():
            check_error(*read_message(file), {400})


def test_silent_connection_is_closed(server, monkeypatch) -> None:
    monkeypatch.setattr(server.server.config, "timeout_keep_alive", 0.2)
    with server.connect() as connection, answered_at_once(0.2):
        assert connection.recv(1) == b""


# Unusual but valid HTTP


def test_expect_100_continue_is_answered(server) -> None:
    body = b'{"prompt": "ab", "max_tokens": 1}'
    expect = b"expect: 100-continue\r\n"
    head = b"POST /generate HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head % (JSON, expect, len(body)))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert read_answer(connection)[0] == 200
    # A body that is too long is rejected before it is sent.
    with server.connect() as connection:
        connection.sendall(head % (JSON, expect, 10**9))
        check_error(*read_answer(connection), {413})


def test_pipelined_requests_are_answered_in_order(server) -> None:
    bodies = [json.dumps({**LONG, "max_tokens": n, "stream": False}).encode() for n in (9, 1, 5)]
    wrong = b"POST /generate HTTP/1.1\r\n" + HOST + b"content-length: 2\r\n\r\n{}"
    with server.connect() as connection:
        connection.sendall(
            b"".join(map(post, bodies)) + wrong + post(bodies[0]) + b"nonsense\r\n\r\n"
        )
        lengths, statuses = [], []
        file = connection.makefile("rb")
        for _ in range(6):
            status, content = read_message(file)
            statuses.append(status)
            if status == 200:
                lengths.append(len(json.loads(content)["outputs"][0]["token_ids"]))
    assert statuses == [200, 200, 200, 415, 200, 400] and lengths == [9, 1, 5, 9]


def test_http_1_0_is_supported(server) -> None:
    assert server.send(b"GET /health HTTP/1.0\r\n\r\n")[0] == 200
    data = post(json.dumps(LONG).encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
    status, content = server.send(data)
    assert status == 200 and content.endswith(b"data: [DONE]\n\n")


# Clients that do not read, leave, or are too many


def test_unread_stream_is_ended(server) -> None:
    body = {**LONG, "n": 16, "logprobs": 20}
    with streams_beside(server), open_stream(server, body, buffer=2048) as connection:
        wait_until(lambda: server.num_connections == 2)
        with answered_at_once(LIMITS.send_timeout + 4):  # computing the stream takes a while
            wait_until(lambda: server.num_connections == 1)
        answer = read_all(connection)
        assert b" 200 OK" in answer and b"[DONE]" not in answer


def test_unread_response_is_dropped(server) -> None:
    body = {**LONG, "n": 16, "logprobs": 20, "stream": False}
    with open_stream(server, body, buffer=2048) as connection:
        wait_until(lambda: server.num_connections == 1)
        wait_until(lambda: server.num_connections == 0)
        assert not read_all(connection).endswith(b"}")


def test_slow_reader_receives_the_whole_response(server) -> None:
    body = {**LONG, "n": 4, "logprobs": 20, "stream": False}
    with open_stream(server, body, buffer=2048) as connection:
        response, start = b"", time.monotonic()
        while not response.endswith(b"}"):
            response += connection.recv(2**13)
            time.sleep(0.02)
        assert time.monotonic() - start > LIMITS.send_timeout


def test_streams_beyond_the_limit_are_rejected(server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.max_streams):
            body = {**LONG, "n": 16}
            stack.enter_context(open_stream(server, body))
        wait_until(lambda: server.service.num_active == 16 * LIMITS.max_streams)
        with answered_at_once():
            response = server.post("/generate", LONG)
        error = check_error(response.status_code, response.content, {429})
        assert error["code"] == "max_streams_exceeded" and response.headers["retry-after"]


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\n"], ids=["idle", "busy"])
def test_connections_beyond_the_limit_close_an_idle_connection(server, begun) -> None:
    """The longest idle connection is closed. Without an idle connection the new one is rejected."""
    wait_until(lambda: server.num_connections == 0)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(server.connect())
        wait_until(lambda: server.num_connections == 1)
        others = [stack.enter_context(server.connect()) for _ in range(LIMITS.max_connections - 1)]
        wait_until(lambda: server.num_connections == LIMITS.max_connections)
        if begun:
            for connection in [first, *others]:
                connection.sendall(begun)
            time.sleep(0.1)
        with answered_at_once():
            status, body = server.send(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
        if begun:
            assert check_error(status, body, {429})["code"] == "max_connections_exceeded"
        else:
            assert status == 200 and first.recv(1) == b""
    wait_until(lambda: server.num_connections == 0)


def test_samples_beyond_the_limit_are_rejected(server) -> None:
    room, n = SIZES["max_num_seqs"] + LIMITS.max_queue, 4
    with contextlib.ExitStack() as stack:
        prompts = {**LONG, "prompt": ["ab"] * (room // n), "n": n, "stream": False}
        connection = stack.enter_context(server.connect())
        connection.sendall(post(json.dumps(prompts).encode(), "/v1/completions"))
        wait_until(lambda: server.service.num_active == room)
        with answered_at_once():
            response = server.post("/generate", {"prompt": "a"})
        error = check_error(response.status_code, response.content, {429})
        assert error["code"] == "max_queue_exceeded" and response.headers["retry-after"]


def test_disconnect_within_a_body_closes_the_connection(server) -> None:
    for _ in range(5):
        with server.connect() as connection:
            connection.sendall(
                b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 99\r\n\r\n{"
            )
    wait_until(lambda: server.num_connections == 0)
