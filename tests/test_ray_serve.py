"""Tests of examples/ray_serve.py with two replicas, including the death of a replica."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT
from tests.support.live_server import free_ports, wait_until
from tests.support.streams import Stream
from tests.support.tiny_model import save_tiny_model

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.fixture(autouse=True, scope="module")
def ray() -> None:
    pytest.importorskip("ray")


OPTIONS = [
    "--replicas", "2", "--cpus", "0.5", "--max-num-seqs", "4", "--max-chunk", "32",
    "--num-blocks", "2000", "--served-model-name", "tiny",
]  # fmt: skip
# The common prefix of prompts: two blocks and a few tokens.
FAMILIES = [f"{letter} house of the king. " * 8 for letter in "abcdefghijklmnop"]


class Served:
    """Process of the example, with requests to it."""

    def __init__(self, model: Path, home: Path):
        [port] = free_ports(1)
        self.log, self.programs = model / "log", model / "programs"
        env = {
            **os.environ,
            "HOME": str(home),  # folder of the token of Ray
            "RAY_TMPDIR": str(home),
            "JAX_COMPILATION_CACHE_DIR": str(self.programs),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # ports on 127.0.0.1
            "RAY_USAGE_STATS_ENABLED": "0",
            # For busy machines: more time to start, and normal priority of the workers.
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_worker_niceness": "0",
        }
        command = [sys.executable, "examples/ray_serve.py", "--model", str(model), *OPTIONS]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--port", str(port)], cwd=ROOT, env=env, stdout=file, stderr=file
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def complete(self, prompt: str, **fields) -> httpx.Response:
        return self.client.post("/v1/completions", json=body(prompt, **fields))

    def stream(self, pool: ThreadPoolExecutor, prompt: str, num_tokens: int) -> Stream:
        """Return a response that has started to stream."""
        url = self.client.base_url.join("/v1/completions")
        return Stream(pool, str(url), body(prompt, max_tokens=num_tokens))

    def replica_of(self, prompt: str) -> str:
        """Return the replica that responds to a prompt; the response must be complete."""
        answer = self.complete(prompt)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-replica"]

    def ask(self, prompt: str, path: str) -> httpx.Response:
        """Send a request to the replica of a prompt, which is selected by the body."""
        return self.client.request("GET", path, content=json.dumps(body(prompt)))

    def pids(self, title: str = "") -> list[int]:
        """Return the processes that Ray has started with titles that begin with `title`."""
        parents, titles = {}, {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                stat, cmdline = (path / "stat").read_text(), (path / "cmdline").read_bytes()
            except OSError:  # the process has ended
                continue
            parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
            titles[int(path.name)] = cmdline.decode(errors="replace")
        own = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return [pid for pid in own - {self.process.pid} if titles[pid].startswith(title)]

    def end(self) -> None:
        started = self.pids()
        self.client.close()
        self.process.terminate()
        try:
            assert self.process.wait(60) == 0, self.log.read_text()[-2000:]
        finally:
            for pid in started:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def body(prompt: str, **fields) -> dict:
    return {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}


def steps_of(served: Served, prompt: str) -> float:
    """Return the number of steps of the engine in the replica of a prompt."""
    metrics = served.ask(prompt, "/metrics").text
    [line] = [line for line in metrics.splitlines() if line.startswith("paged_jax:steps_total")]
    return float(line.split()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    model = save_tiny_model(tmp_path_factory.mktemp("ray_serve"), context=8192)
    # Not in the folder of pytest, because the paths of sockets must be short.
    home = tempfile.mkdtemp(prefix="ray_serve_")
    server = Served(model, Path(home))
    try:
        wait_until(
            lambda: "Serving on" in server.log.read_text() or server.process.poll() is not None, 240
        )
        compiled = set(server.programs.iterdir())
        assert compiled
        yield server
        assert set(server.programs.iterdir()) == compiled, "compiled before they were ready"
    finally:
        server.end()
        shutil.rmtree(home, ignore_errors=True)


def test_replicas_respond_like_a_single_server(served) -> None:
    [model] = served.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert served.client.get("/nowhere").status_code == 404
    assert served.client.post("/v1/completions", json=[]).status_code == 400
    with ThreadPoolExecutor() as pool:
        stream = served.stream(pool, FAMILIES[0], 200)
        assert not stream.has_ended, "events come one by one"
        assert stream.is_whole()
    whole = served.complete(FAMILIES[0], max_tokens=200)
    pieces = [json.loads(event.removeprefix("data: ")) for event in stream.lines[:-1]]
    texts = [piece["choices"][0]["text"] for piece in pieces if piece["choices"]]
    assert "".join(texts) == whole.json()["choices"][0]["text"]


def test_prompts_with_a_common_prefix_go_to_the_same_replica(served) -> None:
    of_family = {family: served.replica_of(family + "who") for family in FAMILIES}
    assert len(set(of_family.values())) == 2, "both have families"
    for family, replica in of_family.items():
        answer = served.complete(family + "what")
        assert answer.headers["x-replica"] == replica
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_disconnected_client_ends_its_response(served) -> None:
    fields = body(FAMILIES[0], max_tokens=8000, stream=True)
    with served.client.stream("POST", "/v1/completions", json=fields) as answer:
        replica = answer.headers["x-replica"]
        next(answer.iter_lines())

    def is_idle() -> bool:
        health = served.ask(FAMILIES[0], "/health")
        assert health.headers["x-replica"] == replica
        return health.json()["num_running"] == 0

    num_steps = steps_of(served, FAMILIES[0])
    wait_until(is_idle, 60)
    assert steps_of(served, FAMILIES[0]) - num_steps < 500, "to its end it would have been 1000"


def test_request_is_retried_if_its_replica_is_killed_before_streaming(served) -> None:
    replicas = {served.replica_of(family): family for family in FAMILIES}
    assert len(replicas) == 2
    prompts = [family + end for family in replicas.values() for end in ("who", "what")]
    expected = [served.complete(prompt, max_tokens=600).json()["choices"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        streams = [served.stream(pool, prompt, 6000) for prompt in replicas.values()]
        assert {stream.headers["x-replica"] for stream in streams} == set(replicas)
        asked = [pool.submit(served.complete, prompt, max_tokens=600) for prompt in prompts]
        # Wait until the engines run the requests.
        wait_until(lambda: served.client.get("/health").json()["num_running"] == 3)
        os.kill(served.pids("ray::ServeReplica:paged_jax:Replica")[0], signal.SIGKILL)
        answers = [each.result(120) for each in asked]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert [answer.json()["choices"] for answer in answers] == expected
        cut, whole = sorted(streams, key=Stream.is_whole)
    assert not cut.is_whole() and whole.is_whole()
    # The other replica handles all requests until a new replica has started and gets its share.
    assert {served.replica_of(family) for family in FAMILIES} == {whole.headers["x-replica"]}
    deadline = time.monotonic() + 240
    while len({served.replica_of(family) for family in FAMILIES}) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
