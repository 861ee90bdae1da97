"""Clients that mean no good: each is answered in time, and nobody else notices."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from paged_jax import Engine
from paged_jax.cache.blocks import check_invariants
from paged_jax.server import Limits, Settings, bodies, service
from tests.support.live_server import LiveServer, check_error, read_answer, wait_until
from tests.support.tiny_model import SIZES, save_tiny_model

LIMITS = Limits(
    header_timeout=0.3, body_timeout=0.3, send_timeout=0.5, max_streams=3, max_queue=60,
    max_header_bytes=4096, max_connections=40,
)  # fmt: skip
# Seconds within which a mistake is answered, and for which a stream beside may get nothing: far
# more than either takes (half a second, on 2 cores), as tests may share their cores with others.
AT_ONCE = 10.0
HOST = b"host: 127.0.0.1\r\n"
JSON = HOST + b"content-type: application/json\r\n"
CHUNKED = b"POST /generate HTTP/1.1\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n"
LONG = {"prompt": "ab", "max_tokens": 55, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("hostile"), chat_template="{{ messages }}")


@pytest.fixture(scope="module")
def shared_server(folder):
    engine = Engine(folder, **SIZES, steps_per_dispatch=2)
    with LiveServer(engine, Settings(model_name="tiny", limits=LIMITS)) as server:
        # Compiled, so that no stream waits for that.
        for n in (1, 2, 4):
            for more in ({}, {"logprobs": 20}):
                assert server.post("/generate", {**LONG, "n": n, **more}).status_code == 200
        yield server


@pytest.fixture
def server(shared_server, caplog):
    """Left as it was found, and without an error in its log."""
    yield shared_server
    shared_server.wait_until_idle()
    check_invariants(shared_server.engine.cache.tables)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def post(body: bytes, path: str = "/generate") -> bytes:
    return b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path.encode(), JSON, len(body), body,
    )  # fmt: skip


def open_stream(server: LiveServer, body: dict = LONG, *, buffer: int = 0) -> socket.socket:
    """A connection on which a stream has begun."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(post(json.dumps(body).encode()))
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def read_message(file: BinaryIO) -> tuple[int, bytes]:
    """The next answer on a connection that may hold others behind it."""
    status, size = int(file.readline().split()[1]), 0
    while line := file.readline().strip().lower():
        if line.startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    return status, file.read(size)


@contextlib.contextmanager
def streams_beside(server: LiveServer) -> Iterator[None]:
    """Streams one after the other all the while, none of which may wait for long."""
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
    start = time.monotonic()
    yield
    assert time.monotonic() - start < AT_ONCE + also


# What is not HTTP


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
def test_what_is_not_http_is_refused(server, data) -> None:
    with answered_at_once():
        status, content = server.send(data)
    check_error(status, content, {400})


def test_a_wish_for_another_protocol_is_ignored(server, caplog) -> None:
    wish = b"connection: upgrade\r\nupgrade: websocket\r\n"
    status, _ = server.send(b"GET /live HTTP/1.1\r\n" + HOST + wish + b"\r\n")
    assert status == 200
    assert "uvicorn" not in caplog.text  # nor anybody told to install another library


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
        (b"GET / HTTP/1.1", 404),
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
def test_strange_targets_are_not_there(server, line, status) -> None:
    with answered_at_once():
        answer = server.send(line[:4000] + line[-9:] + b"\r\n" + HOST + b"\r\n" if len(line) > 4000
                             else line + b"\r\n" + HOST + b"\r\n")  # fmt: skip
    check_error(*answer, {status})


@pytest.mark.parametrize("host", [b"[::1", b"[", b"a b", b"\xff", b"", b"a" * 3000])
def test_strange_hosts_do_no_harm(server, host) -> None:
    assert server.send(b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % host)[0] in (200, 400)
    answer = server.send(b"GET /nothing HTTP/1.1\r\nhost: %b\r\n\r\n" % host)
    check_error(*answer, {400, 404})


@pytest.mark.parametrize(
    "path",
    ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny",
     "/health", "/metrics", "/openapi.json", "/cache", "/cache/state", "/cache/blocks/0"],
)  # fmt: skip
def test_methods_that_a_route_does_not_have(server, path) -> None:
    posts = path in ("/generate", "/v1/completions", "/v1/chat/completions")
    with server.client() as client:
        for method in ("OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "GET" if posts else "POST"):
            response = client.request(method, path)
            check_error(response.status_code, response.content, {405})
            assert ("POST" if posts else "GET") in response.headers["allow"]
        response = client.head(path)
        assert response.status_code == (405 if posts else 200) and response.content == b""


@pytest.mark.parametrize(
    "authorization", [b"Basic \xc3\xa4", b"Basic !", b"Basic", b"Bearer \xff", b"Bearer", b"\xff"]
)
def test_strange_keys_are_wrong(folder, authorization) -> None:
    settings = Settings(model_name="tiny", api_keys=("key",), admin_key="admin")
    with LiveServer(Engine(folder, **SIZES), settings) as server:
        for path in (b"/v1/models", b"/cache"):
            head = b"GET %b HTTP/1.1\r\n%bauthorization: %b\r\n\r\n" % (path, HOST, authorization)
            check_error(*server.send(head), {401})


# Headers and bodies that are too long, or that never come


def test_long_headers(server) -> None:
    with streams_beside(server), answered_at_once():
        for size in (5000, 2_000_000):
            head = b"GET /health HTTP/1.1\r\n" + HOST + b"a: " + b"b" * size
            error = check_error(*server.send(head), {431})
            assert error["code"] == "max_header_bytes_exceeded"
        check_error(*server.send(b"GET /" + b"a" * 5000), {431})


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"])
def test_headers_that_come_slowly(server, before) -> None:
    """On a connection that is new, and on one that has had an answer."""
    with streams_beside(server), server.connect() as connection:
        if before:
            connection.sendall(before)
            assert read_answer(connection, "GET")[0] == 200
        with answered_at_once(LIMITS.header_timeout):
            drip(connection, b"POST /generate HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 100)
            error = check_error(*read_answer(connection), {408})
        assert error["code"] == "header_timeout_exceeded"


def drip(connection: socket.socket, data: bytes) -> None:
    """Send byte by byte until there is an answer."""
    connection.setblocking(False)
    for byte in data:
        with contextlib.suppress(BlockingIOError):
            if connection.recv(1, socket.MSG_PEEK):
                break
        connection.sendall(bytes([byte]))
        time.sleep(0.02)
    connection.settimeout(10)


def test_a_body_that_comes_slowly(server) -> None:
    head = b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 9000\r\n\r\n"
    with streams_beside(server), server.connect() as connection:
        connection.sendall(head)
        with answered_at_once(LIMITS.body_timeout):
            drip(connection, b" " * 1000)
            error = check_error(*read_answer(connection), {408})
        assert error["code"] == "body_timeout_exceeded"


def test_a_body_whose_rest_nobody_reads(server) -> None:
    """It is refused by its head; dripping on does not keep the connection."""
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


def test_a_body_that_ends_too_early(server) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 9000\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        with answered_at_once():
            assert read_answer(connection)[0] == 0
    wait_until(lambda: server.num_connections == 0)


def test_a_body_that_goes_on_too_long(server) -> None:
    body = b'{"prompt": "ab", "max_tokens": 1}'
    with server.connect() as connection:
        connection.sendall(post(body) + b" and more of it")
        file = connection.makefile("rb")
        assert read_message(file)[0] == 200
        with answered_at_once():
            check_error(*read_message(file), {400})


def test_nobody_says_anything(server, monkeypatch) -> None:
    monkeypatch.setattr(server.server.config, "timeout_keep_alive", 0.2)
    with server.connect() as connection, answered_at_once(0.2):
        assert connection.recv(1) == b""


# Bodies that are JSON, more or less


def repeated(item: str, *, begin: str, end: str = "]}", size: int = 10**6) -> bytes:
    return (begin + ",".join([item] * (size // (len(item) + 1))) + end).encode()


BODIES: list[tuple[str, Callable[[], bytes]]] = [
    ("/generate", lambda: b"[" * 100_000),
    ("/generate", lambda: b'{"a":' * 100_000),
    ("/generate", lambda: b'{"prompt": "a", "x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"),
    ("/generate", lambda: b'{"prompt": "a", "seed": ' + b"9" * 10**6 + b"}"),
    ("/generate", lambda: b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}"),
    ("/generate", lambda: b'{"prompt": "a", "temperature": 1e999}'),
    ("/generate", lambda: b'{"prompt": "a", "temperature": -1e-999, "n": 1e5}'),
    ("/generate", lambda: b'{"prompt": "\xc3\x28"}'),
    ("/generate", lambda: b"\xff\xfe{\x00}\x00"),
    ("/generate", lambda: b'{"prompt": "a", "%b": 1}' % (b"k" * 10**6)),
    ("/generate", lambda: b'{"prompt": "a", "stop": "%b"}' % (b"k" * 10**6)),
    ("/generate", lambda: repeated("-1", begin='{"prompt_token_ids":[')),
    ("/generate", lambda: repeated("5", begin='{"prompt_token_ids":[')),
    ("/generate", lambda: repeated("-1", begin='{"prompt":"a","stop_token_ids":[')),
    ("/generate", lambda: repeated("5", begin='{"prompt":"a","stop_token_ids":[')),
    ("/generate", lambda: numbered('"x{}":1', begin='{"prompt":"a",')),
    ("/generate", lambda: numbered('"{}":1', begin='{"prompt":"a","logit_bias":{', end="}}")),
    ("/generate", lambda: numbered('"-{}":1', begin='{"prompt":"a","logit_bias":{', end="}}")),
    ("/generate", lambda: numbered('"{}":""', begin='{"prompt":"a","logit_bias":{', end="}}")),
    ("/v1/completions", lambda: repeated('""', begin='{"prompt":[')),
    ("/v1/completions", lambda: repeated('"a"', begin='{"prompt":[')),
    ("/v1/completions", lambda: repeated("[]", begin='{"prompt":[')),
    ("/v1/completions", lambda: repeated("[1]", begin='{"prompt":[')),
    ("/v1/completions", lambda: b'{"prompt": "a", "model": "%b"}' % (b"m" * 10**6)),
    ("/v1/chat/completions", lambda: repeated("{}", begin='{"messages":[')),
    ("/v1/chat/completions", lambda: repeated("1", begin='{"messages":[')),
    ("/v1/chat/completions",
     lambda: repeated("1", begin='{"messages":[{"role":"user","content":[', end="]}]}")),
]  # fmt: skip


def numbered(item: str, *, begin: str, end: str = "}", count: int = 90_000) -> bytes:
    return (begin + ",".join(item.format(i) for i in range(count)) + end).encode()


@pytest.mark.parametrize("index", range(len(BODIES)))
def test_evil_bodies_are_refused_and_stall_nobody(server, index) -> None:
    path, body = BODIES[index]
    data = post(body()[: server.service.limits.max_body_bytes], path)
    with streams_beside(server), answered_at_once():
        answer = server.send(data)
    check_error(*answer, {400, 404})


def test_prompts_that_are_too_long(server) -> None:
    with streams_beside(server), answered_at_once():
        for prompt in ("a" * 200_000, "a" * 64):
            body = json.dumps({"prompt": prompt}).encode()
            assert check_error(*server.send(post(body)), {400})["code"] == "context_length_exceeded"


def test_long_texts_are_refused_by_their_characters(server, monkeypatch) -> None:
    monkeypatch.setattr(
        server.service.tokenizer, "encode", lambda *a, **k: pytest.fail("tokenized")
    )
    text = "a" * (63 * server.service.tokenizer.max_token_chars + 1)
    for body in ({"prompt": text}, {"prompt": ["a", text]}):
        path = "/generate" if isinstance(body["prompt"], str) else "/v1/completions"
        answer = server.send(post(json.dumps(body).encode(), path))
        error = check_error(*answer, {400})
        assert (
            error["code"] == "context_length_exceeded" and "64 tokens or more" in error["message"]
        )


def test_short_prompts_do_not_wait_for_long_ones(server, monkeypatch) -> None:
    """To be tokenized: that has a place of its own, and counts as load."""
    may_end, encode = threading.Event(), server.service.tokenizer.encode

    def slow(text, **options):
        assert len(text) <= 2 or may_end.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(server.service.tokenizer, "encode", slow)
    monkeypatch.setattr(service, "_TINY", 0)
    monkeypatch.setattr(service, "_SHORT", 2)
    body = {"prompt": "abcdef", "max_tokens": 2, "n": 2}
    with server.connect() as connection:
        connection.sendall(post(json.dumps(body).encode()))
        wait_until(lambda: server.service.num_active == 2)
        assert server.post("/generate", {"prompt": "ab", "max_tokens": 2}).status_code == 200
        may_end.set()
        assert read_answer(connection)[0] == 200


def test_small_bodies_do_not_wait_while_large_ones_are_checked(server, monkeypatch) -> None:
    """Nor streams: of twenty that were checked at once each took a quarter of a second."""
    may_end, check = threading.Event(), bodies.GenerateBody.model_validate_json

    def slow(content):
        assert len(content) < 2**15 or may_end.wait(30)
        return check(content)

    monkeypatch.setattr(bodies.GenerateBody, "model_validate_json", slow)
    large = json.dumps({"prompt": "ab", "max_tokens": 2, "cache_salt": "a" * 2**15}).encode()
    with streams_beside(server), contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(3)]
        for connection in connections:
            connection.sendall(post(large))
        assert server.post("/generate", {"prompt": "ab", "max_tokens": 2}).status_code == 200
        may_end.set()
        assert [read_answer(connection)[0] for connection in connections] == [200] * 3


def test_chats_are_as_large_as_their_bodies(server, monkeypatch) -> None:
    """Those of a thousand messages without a character are written in a thread, too."""
    sizes, encode = [], server.service.encode

    def spy(size, function):
        sizes.append(size)
        return encode(size, function)

    monkeypatch.setattr(server.service, "encode", spy)
    for count in (2, 1000):
        messages = [{"role": "user", "content": ""}] * count
        body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
        server.send(post(body, "/v1/chat/completions"))
        assert sizes[-1] == (0 if count == 2 else len(body))


def test_the_last_of_equal_keys_counts(server) -> None:
    status, content = server.send(post(b'{"prompt":"a","n":3,"n":2,"max_tokens":1}'))
    assert status == 200 and len(json.loads(content)["outputs"]) == 2


def test_numbers_at_their_bounds_are_served(server) -> None:
    for field, value in (
        ("temperature", 1e308), ("temperature", 5e-324), ("top_p", 5e-324), ("min_p", 1.0),
        ("repetition_penalty", 1e308), ("repetition_penalty", 5e-324), ("seed", 2**63 - 1),
        ("top_k", 2**31 - 1), ("max_tokens", 2**31 - 1), ("timeout", 1e308), ("timeout", 5e-324),
        ("priority", 2**31 - 1), ("logit_bias", {"5": 1e308}), ("logit_bias", {"5": -1e308}),
    ):  # fmt: skip
        body = {"prompt": "a", "max_tokens": 2, "temperature": 1.0, "logprobs": 2, field: value}
        assert server.post("/generate", body).status_code in (200, 400), (field, value)


# Odd ways to speak HTTP that are right


def test_expect_100_continue(server) -> None:
    body = b'{"prompt": "ab", "max_tokens": 1}'
    expect = b"expect: 100-continue\r\n"
    head = b"POST /generate HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head % (JSON, expect, len(body)))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert read_answer(connection)[0] == 200
    # Nobody asks for a body that is too long.
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


def test_http_1_0(server) -> None:
    assert server.send(b"GET /health HTTP/1.0\r\n\r\n")[0] == 200
    data = post(json.dumps(LONG).encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
    status, content = server.send(data)
    assert status == 200 and content.endswith(b"data: [DONE]\n\n")


# Clients that do not read, do not come back, or are too many


def test_a_stream_that_nobody_reads_is_ended(server) -> None:
    body = {**LONG, "n": 16, "logprobs": 20}
    with streams_beside(server), open_stream(server, body, buffer=2048) as connection:
        wait_until(lambda: server.num_connections == 2)
        with answered_at_once(LIMITS.send_timeout + 4):  # to compute it takes a while
            wait_until(lambda: server.num_connections == 1)
        answer = read_all(connection)
        assert b" 200 OK" in answer and b"[DONE]" not in answer


def test_an_answer_that_nobody_reads_is_dropped(server) -> None:
    body = {**LONG, "n": 16, "logprobs": 20, "stream": False}
    with open_stream(server, body, buffer=2048) as connection:
        wait_until(lambda: server.num_connections == 1)
        wait_until(lambda: server.num_connections == 0)
        assert not read_all(connection).endswith(b"}")


def test_a_slow_reader_gets_all_of_it(server) -> None:
    body = {**LONG, "n": 4, "logprobs": 20, "stream": False}
    with open_stream(server, body, buffer=2048) as connection:
        response, start = b"", time.monotonic()
        while not response.endswith(b"}"):
            response += connection.recv(2**13)
            time.sleep(0.02)
        assert time.monotonic() - start > LIMITS.send_timeout


def test_too_many_streams(server) -> None:
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
def test_too_many_connections(server, begun) -> None:
    """The one that has been idle the longest makes room; where none is idle, the new one goes."""
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


def test_too_many_requests(server) -> None:
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


def test_clients_that_leave_in_the_middle_of_a_body(server) -> None:
    for _ in range(5):
        with server.connect() as connection:
            connection.sendall(
                b"POST /generate HTTP/1.1\r\n" + JSON + b"content-length: 99\r\n\r\n{"
            )
    wait_until(lambda: server.num_connections == 0)


# An engine that hangs, or dies


@pytest.fixture
def own_server(folder):
    engine = Engine(folder, **SIZES, steps_per_dispatch=2)
    with LiveServer(engine, Settings(model_name="tiny", stall_seconds=0.2)) as server:
        assert server.post("/generate", {"prompt": "ab", "max_tokens": 2}).status_code == 200
        yield server


def test_health_tells_of_an_engine_that_hangs(own_server, monkeypatch) -> None:
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


def test_everybody_hears_of_an_engine_that_died(own_server, monkeypatch) -> None:
    def fail():
        raise RuntimeError("no memory")

    with open_stream(own_server, {**LONG, "n": 16}) as connection:
        while b"data: " not in connection.recv(5000):
            pass
        monkeypatch.setattr(own_server.engine, "advance", fail)
        wait_until(lambda: own_server.get("/health").json()["status"] == "failed")
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            rest += connection.recv(2**16)
    assert b'"code":"engine_stopped"' in rest and b"[DONE]" not in rest
    assert own_server.get("/health").status_code == 503
    for response in (own_server.post("/generate", {"prompt": "a"}), own_server.get("/cache/state")):
        error = check_error(response.status_code, response.content, {503})
        assert error["code"] == "engine_stopped"
    wait_until(lambda: own_server.service.num_active == 0)
