"""Tests of the server behind nginx, with the configuration of docs/deploy.md."""

import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paged_jax import Engine
from paged_jax.server import Settings
from tests.support import ROOT
from tests.support.live_server import LiveServer, check_error, free_ports, wait_until
from tests.support.tiny_model import SIZES

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
OPENSSL = shutil.which("openssl")
[CONFIG] = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
NAME = "api.example.com"
# Configuration of nginx around the part in the page. All files are in a temporary folder.
FRAME = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_buffer_size 4m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {config}
}}
"""


@pytest.fixture(scope="module")
def server(tiny_folder):
    settings = Settings(model_name="tiny", allowed_hosts=(NAME, "127.0.0.1"))
    engine = Engine(tiny_folder, **SIZES, steps_per_dispatch=1)
    with LiveServer(engine, settings, root_path="/llm") as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server, tmp_path_factory) -> Iterator[httpx.Client]:
    """Client of the proxy that verifies its certificate."""
    if NGINX is None or OPENSSL is None:
        pytest.skip("nginx is missing: install Debian's package nginx-light")
    folder: Path = tmp_path_factory.mktemp("nginx")
    certificate, key = folder / "api.pem", folder / "api.key"
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", f"/CN={NAME}", "-addext"]
    command += [f"subjectAltName=DNS:{NAME},IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(certificate)], check=True, capture_output=True)
    [port] = free_ports(1)
    config = CONFIG
    for here, there in (
        ("127.0.0.1:5000", f"127.0.0.1:{server.port}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/api.pem", str(certificate)),
        ("/etc/ssl/api.key", str(key)),
    ):
        assert config.count(here) == 1
        config = config.replace(here, there)
    file = folder / "nginx.conf"
    file.write_text(FRAME.format(folder=folder, config=config))
    process = subprocess.Popen(
        [NGINX, "-p", str(folder), "-c", str(file), "-e", str(folder / "error.log")]
    )
    context = ssl.create_default_context(cafile=certificate)
    try:
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", headers={"Host": NAME}, verify=context, timeout=10
        ) as client:
            wait_until(lambda: _answers(client) or process.poll() is not None)
            yield client
    finally:
        process.terminate()
        process.wait(10)


def _answers(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/").status_code)
    except httpx.TransportError:
        return False


@pytest.mark.peers
def test_routes_are_below_the_root_path(proxy, server) -> None:
    for path in ("live", "ready", "health", "metrics", "v1/models", "cache", "cache/cache.js"):
        assert proxy.get(f"/llm/{path}").status_code == 200, path
        assert proxy.get(f"/{path}").status_code in (403, 404), "nginx serves nothing there"
    # The page finds its files relative to its own address.
    assert 'src="cache/cache.js"' in proxy.get("/llm/cache").text
    # The OpenAPI document has the path.
    assert proxy.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    answer = proxy.get("/llm/nothing")
    check_error(answer.status_code, answer.content, {404})


@pytest.mark.peers
def test_metrics_label_requests_by_their_route(proxy, server) -> None:
    """The label has no root path."""
    body = {"prompt": "ab", "max_tokens": 1}
    answer = proxy.post("/llm/generate", json=body)
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), "set by nginx"
    assert 'handler="/generate",method="POST",status="2xx"' in proxy.get("/llm/metrics").text


@pytest.mark.peers
def test_other_host_names_are_rejected(proxy) -> None:
    answer = proxy.get("/llm/v1/models", headers={"Host": "other.example.com"})
    error = check_error(answer.status_code, answer.content, {400})
    assert error["code"] == "host_not_allowed"


@pytest.mark.peers
def test_limit_of_bodies_is_the_limit_of_the_server(proxy) -> None:
    """By default nginx rejects bodies over 1 MiB with an HTML page."""
    answer = proxy.post("/llm/generate", json={"prompt": "a" * 2**20})
    error = check_error(answer.status_code, answer.content, {413})
    assert error["code"] == "max_body_bytes_exceeded"


@pytest.mark.peers
def test_proxy_does_not_buffer_streams(proxy, server, monkeypatch) -> None:
    """The engine waits until the client has received the first tokens."""
    is_seen, num_steps = threading.Event(), 0
    note = server.service.engine._on_step

    def on_step(engine, requests) -> None:
        nonlocal num_steps
        num_steps += 1
        assert num_steps <= 3 or is_seen.wait(20)
        note(engine, requests)

    monkeypatch.setattr(server.service.engine, "_on_step", on_step)
    body = {"prompt": "ab", "max_tokens": 12, "ignore_eos": True, "stream": True}
    with proxy.stream("POST", "/llm/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith('data: {"id":')
        is_seen.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    server.wait_until_idle()


@pytest.mark.peers
def test_disconnect_from_the_proxy_ends_the_request(proxy, server) -> None:
    body = {"prompt": "ab", "max_tokens": 50, "ignore_eos": True, "stream": True, "n": 3}
    with proxy.stream("POST", "/llm/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://127.0.0.1/live", 200),
        (f"HTTP://{NAME}:8000/live?a=b", 200),
        (f"https://{NAME}/live", 200),
        ("http://evil.example/live", 400),
        (f"http://{NAME}", 200),
        (f"http://{NAME}?a=b", 200),
        (f"http://{NAME}/nothing", 404),
    ],
)
@pytest.mark.parametrize("host", ["evil.example", NAME])
def test_absolute_target_replaces_the_host_header(server, target, status, host) -> None:
    """RFC 9112, 3.2.2: a server accepts the absolute form and ignores the Host header."""
    head = f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n"
    assert server.send(head.encode())[0] == status


def test_absolute_target_keeps_query_and_body(server) -> None:
    body = b'{"prompt": "ab", "max_tokens": 1}'
    with server.connect() as connection:
        for _ in range(2):  # on the same connection, like clients of a proxy
            connection.sendall(
                b"POST http://%b/generate HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n"
                b"content-type: application/json\r\n\r\n%b" % (NAME.encode(), len(body), body)
            )
            assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
    head = f"GET http://{NAME}/cache/state?since=no HTTP/1.1\r\nhost: a\r\n\r\n"
    status, content = server.send(head.encode())
    assert status == 400 and b"since" in content
