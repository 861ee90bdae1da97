"""Test of 200 concurrent clients: each receives the tokens that it would receive alone."""

import asyncio
import dataclasses
import json
import random
import string
from pathlib import Path
from typing import Any

import httpx
import pytest

from paged_jax import LLM, Engine, RequestOutput, SamplingParams
from paged_jax.cache.blocks import check_invariants
from paged_jax.server import Limits, Settings
from tests.support.live_server import LiveServer, wait_until
from tests.support.tiny_model import SIZES, save_tiny_model

NUM_CLIENTS = 200
SETTINGS = Settings(model_name="tiny", limits=Limits(max_queue=2 * NUM_CLIENTS))
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
PREFIXES = ("", "the cat sat in ", "one day ")
CHAT = "/v1/chat/completions"
PATHS = ("/generate", "/generate", "/v1/completions", CHAT)


@dataclasses.dataclass(frozen=True)
class Client:
    """Request of a client, and the number of events after which it disconnects."""

    path: str
    text: str
    params: dict[str, Any]
    is_stream: bool
    vanishes_after: int | None

    @property
    def body(self) -> dict[str, Any]:
        prompt = {"messages": self.messages} if self.path == CHAT else {"prompt": self.text}
        return {**prompt, **self.params, "stream": self.is_stream}

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def draw_clients() -> list[Client]:
    rng = random.Random(0)
    clients = []
    for number in range(NUM_CLIENTS):
        vanishes = number % 10 == 3
        word = "".join(rng.choices(string.ascii_lowercase, k=4)) + " "
        params = {
            "seed": number,
            "temperature": rng.choice((0.0, 0.8, 1.2)),
            "top_p": 0.95,
            "max_tokens": 26 if vanishes else rng.randint(1, 24),
            "n": rng.choice((1, 1, 1, 2)),
            "ignore_eos": True,
        }
        clients.append(
            Client(
                path=rng.choice(PATHS),
                text=rng.choice(PREFIXES) + word * rng.randint(1, 4),
                params=params,
                is_stream=vanishes or rng.random() < 0.5,
                vanishes_after=rng.randint(1, 3) if vanishes else None,
            )
        )
    return clients


def expected_outputs(folder: Path, clients: list[Client]) -> list[RequestOutput]:
    """Return the outputs of a separate engine."""
    llm = LLM(folder, **SIZES)
    prompts = [
        llm.chat_prompt(client.messages) if client.path == CHAT else client.text
        for client in clients
    ]
    return llm.generate(prompts, [SamplingParams(**client.params) for client in clients])


Samples = list[tuple[str, list[int] | None]]


async def play(http: httpx.AsyncClient, client: Client) -> Samples | None:
    """Return text and token ids (if any) of each sample; None if the client disconnects."""
    if not client.is_stream:
        response = await http.post(client.path, json=client.body)
        assert response.status_code == 200, response.text
        return joined([response.json()], client.params["n"])
    pieces = []
    async with http.stream("POST", client.path, json=client.body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return joined(pieces, client.params["n"])
            if line:
                pieces.append(json.loads(line.removeprefix("data: ")))
            if len(pieces) == client.vanishes_after:
                return None
    raise AssertionError("the stream ended without [DONE]")


def joined(pieces: list[dict[str, Any]], n: int) -> Samples:
    """Return the samples of a response or of the events of a stream."""
    texts, token_ids = [""] * n, [[] for _ in range(n)]
    tells_tokens = "outputs" in pieces[0]
    for piece in pieces:
        for sample in piece["outputs"] if tells_tokens else piece["choices"]:
            message = sample.get("message") or sample.get("delta") or {}
            texts[sample["index"]] += sample.get("text", message.get("content", ""))
            token_ids[sample["index"]] += sample.get("token_ids", [])
    return [
        (text, ids if tells_tokens else None) for text, ids in zip(texts, token_ids, strict=True)
    ]


def samples_of(output: RequestOutput, client: Client) -> Samples:
    tells_tokens = client.path == "/generate"
    return [(each.text, each.token_ids if tells_tokens else None) for each in output.outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("load"), chat_template=TEMPLATE)


@pytest.mark.slow
def test_concurrent_clients_receive_their_own_tokens(folder) -> None:
    clients = draw_clients()
    expected = expected_outputs(folder, clients)

    async def play_all(url: str) -> list[Samples | None]:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*[play(http, client) for client in clients])

    # Two tokens per event, so that clients disconnect long before the end.
    with LiveServer(Engine(folder, **SIZES, steps_per_dispatch=2), SETTINGS) as server:
        assert server.post("/generate", {"prompt": "a", "max_tokens": 2}).status_code == 200
        wait_until(lambda: server.num_connections == 0)
        num_tasks = server.num_tasks
        answers = asyncio.run(play_all(server.url))
        for client, answer, output in zip(clients, answers, expected, strict=True):
            assert (answer is None) == (client.vanishes_after is not None)
            assert answer in (None, samples_of(output, client)), client
        assert server.engine.stats.num_preemptions and server.engine.stats.num_cached_tokens
        server.wait_until_idle()
        wait_until(lambda: server.num_connections == 0)
        wait_until(lambda: server.num_tasks <= num_tasks)
        check_invariants(server.engine.cache.tables)
        health = server.get("/health").json()
        assert health["status"] == "ok" and health["num_running"] == health["num_waiting"] == 0
        again = asyncio.run(play_alone(server.url, clients[0]))
        assert again == samples_of(expected[0], clients[0])


async def play_alone(url: str, client: Client) -> Samples | None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await play(http, client)
