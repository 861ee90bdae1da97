"""SGLang's router in front of two servers knows the model, and sends prompts to their blocks."""

import contextlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from paged_jax import Engine
from paged_jax.server import Settings
from tests.support.live_server import LiveServer, wait_until
from tests.support.tiny_model import SIZES

pytest.importorskip("sglang_router")

# Begin differently: the router tells prompts apart by their first characters.
PROMPTS = ["the cat sat on the mat", "in a house of their own", "some are not as they were"]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def servers(tiny_folder):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                LiveServer(Engine(tiny_folder, **SIZES), Settings(model_name="tiny"))
            )
            for _ in range(2)
        ]


@pytest.fixture
def router(servers, tmp_path: Path):
    port, prometheus_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "sglang_router.launch_router",
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prometheus_port),
        "--policy", "cache_aware", "--worker-urls", *(server.url for server in servers),
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
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


def test_prompts_go_where_their_blocks_are(router, servers) -> None:
    def num_cached(prompt: str) -> int:
        # So short that the blocks of two of them stay in a server's pool.
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{router}/v1/completions", json={**body, "model": "tiny"}, timeout=60)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert not any(pool.map(num_cached, PROMPTS))
    assert all(server.engine.stats.num_steps for server in servers), "both have work"
    # One after another: where blocks are is all that tells the servers apart.
    for prompt in PROMPTS * 2:
        assert num_cached(prompt)
