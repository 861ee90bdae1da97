"""Tests of two servers behind SGLang's router, with the options of docs/replicas.md."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from paged_jax import Engine
from paged_jax.server import Settings
from tests.support import ROOT
from tests.support.live_server import LiveServer, free_ports, wait_until
from tests.support.server_process import ServerProcess
from tests.support.streams import Stream
from tests.support.tiny_model import SIZES, save_tiny_model

pytestmark = pytest.mark.peers
# The first characters differ, because the router distinguishes prompts by them.
PROMPTS = ["the cat sat on the mat", "in a house of their own", "some are not as they were"]
OPTIONS = re.findall(
    r"--policy cache_aware .*?$\n.*?$", (ROOT / "docs" / "replicas.md").read_text(), re.MULTILINE
)


@pytest.fixture(autouse=True, scope="module")
def router_package() -> None:
    pytest.importorskip("sglang_router")


@contextlib.contextmanager
def routing(urls: list[str], log: Path) -> Iterator[str]:
    """Run a router in front of servers, and yield its URL."""
    port, prometheus_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "sglang_router.launch_router",
        "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus_port),
        "--worker-urls", *urls, *OPTIONS[0].replace("\\", "").split(),
    ]  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_until(lambda: _models(url) == ["tiny"] or process.poll() is not None)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _models(url: str) -> list[str]:
    try:
        answer = httpx.get(f"{url}/v1/models")
    except httpx.TransportError:
        return []
    return [model["id"] for model in answer.json()["data"]] if answer.is_success else []


def complete(router: str, prompt: str, num_tokens: int) -> httpx.Response:
    return httpx.post(f"{router}/v1/completions", json=body(prompt, num_tokens), timeout=240)


def body(prompt: str, num_tokens: int) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens}
    return {**body, "temperature": 0, "ignore_eos": True}


def test_router_sends_prompts_to_the_server_with_their_blocks(tiny_folder, tmp_path: Path) -> None:
    def num_cached(prompt: str) -> int:
        # Short prompts, so that the blocks of two prompts fit into a pool.
        answer = complete(router, prompt, 8)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    settings = Settings(model_name="tiny")
    with contextlib.ExitStack() as stack:
        servers = [LiveServer(Engine(tiny_folder, **SIZES), settings) for _ in range(2)]
        urls = [stack.enter_context(server).url for server in servers]
        router = stack.enter_context(routing(urls, tmp_path / "log"))
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert not any(pool.map(num_cached, PROMPTS))
        assert all(server.engine.stats.num_steps for server in servers), "both must have work"
        # One after another, so that the servers differ only in their cached blocks.
        for prompt in PROMPTS * 2:
            assert num_cached(prompt)


def num_running(server: ServerProcess) -> int:
    metrics = httpx.get(f"{server.url}/metrics").text
    return int(float(re.findall(r"^vllm:num_requests_running\{.*\} (.*)$", metrics, re.M)[0]))


@pytest.mark.slow
def test_router_retries_requests_of_a_killed_server(tmp_path) -> None:
    folder = save_tiny_model(tmp_path, context=8192)
    options = ["--model", str(folder), "--served-model-name", "tiny", "--no-warmup"]
    options += ["--num-blocks", "4000", "--max-num-seqs", "8"]
    with ThreadPoolExecutor(8) as pool, contextlib.ExitStack() as stack:

        def start(_: int) -> ServerProcess:
            server = ServerProcess(*options)
            stack.callback(server.kill)
            return server

        servers = list(pool.map(start, range(2)))
        router = stack.enter_context(routing([server.url for server in servers], tmp_path / "log"))

        def ask(prompt: str, num_tokens: int) -> str:
            answer = complete(router, prompt, num_tokens)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        # Concurrently, so that both servers receive requests; twice, so that all is compiled.
        for _ in range(2):
            list(pool.map(ask, PROMPTS * 2, [16] * 6))
        expected = list(pool.map(ask, PROMPTS, [2000] * 3))
        # Streams keep the servers busy until the end of the test. Requests without streams follow,
        # and take long enough to observe that the first server runs one of them.
        url = f"{router}/v1/completions"
        streams = [Stream(pool, url, body(prompt, 6000)) for prompt in PROMPTS]
        num_streams = num_running(servers[0])
        answers = [pool.submit(ask, prompt, 2000) for prompt in PROMPTS]
        wait_until(lambda: num_running(servers[0]) > num_streams)
        servers[0].process.kill()
        assert [answer.result(240) for answer in answers] == expected
        assert {stream.is_whole() for stream in streams} == {False, True}
