"""Engines of models whose layers keep different tokens: every way of going about it gives the
tokens of the plain forward, blocks that have left windows are reused, and none is lost.

Three models: windows and a layer that keeps all; two windows; a window alone, in a pool that is far
smaller than prompts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine, Llama, LlamaConfig, SamplingParams
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG
from tests.support.workload import Job, check_empty, check_groups, play

CONTEXT, WINDOW = 160, 24
SIZES: dict[str, Any] = {
    "block_size": 8, "max_num_seqs": 4, "max_chunk": 16, "steps_per_dispatch": 3,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class TwoWindows(LlamaConfig):
    """Layers whose windows differ in size: of the last two, those of even and of odd numbers."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple((40, WINDOW)[layer % 2] for layer in range(self.num_hidden_layers))


def make_config(kind: str) -> LlamaConfig:
    fields = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)}
    fields |= {"max_position_embeddings": CONTEXT, "eos_token_ids": (), "sliding_window": WINDOW}
    if kind == "two windows":
        return TwoWindows(**fields | {"num_hidden_layers": 3})
    if kind == "window only":
        return LlamaConfig(**fields | {"model_type": "mistral"})
    layers = ("sliding_attention",) * 3 + ("full_attention",)
    return LlamaConfig(
        **fields | {"num_hidden_layers": 4, "layer_types": layers, "model_type": "qwen3"}
    )


# Blocks of the first group, too few for all that may run at once: about 14 each, or 10 of them.
NUM_BLOCKS = {"mixed": 20, "two windows": 14, "window only": 9}


@pytest.fixture(scope="module")
def models() -> dict[str, Llama]:
    return {kind: random_llama(make_config(kind), scale=0.4) for kind in NUM_BLOCKS}


@pytest.fixture(scope="module")
def next_tokens() -> Callable[..., list[int]]:
    """What the plain forward finds most probable after each token of a sequence."""
    forward = jax.jit(lambda model, token_ids: model(token_ids)[0])

    def find(model: Llama, token_ids: list[int], bias: dict[int, float] | None) -> list[int]:
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(token_ids)] = token_ids
        logits = np.array(forward(model, jnp.asarray(padded)))
        for token_id, more in (bias or {}).items():
            logits[:, token_id] += more
        return np.argmax(logits, axis=-1).tolist()[: len(token_ids)]

    return find


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    random = np.random.default_rng(0)

    def letters(count: int) -> list[int]:
        return random.integers(3, CONFIG.vocab_size, count).tolist()

    def job(name: str, token_ids: list[int], max_tokens: int, at: int = 0, **options: Any) -> Job:
        priority = options.pop("priority", 0)
        params = SamplingParams(**GREEDY, max_tokens=max_tokens, **options)
        return Job(name, {"prompt_token_ids": token_ids}, params, priority, at=at)

    long = letters(90)
    return [
        job("long", long, 20),
        job("one token", letters(1), 40),
        job("three samples", letters(51), 14, n=3),
        job("longest", letters(130), 12, at=20, priority=-1),
        # Which guesses find.
        job("repeats", letters(7) * 6, 30, at=3, logit_bias={9: 60.0, 10: 60.0}),
        job("same beginning", [*long[:67], *letters(9)], 10, at=14, priority=-1),
        job("long again", long, 20, at=40),
    ]


def check_tokens(find: Callable[..., list[int]], model: Llama, job: Job, output: Any) -> None:
    """All samples have the tokens that are most probable after those before them."""
    assert len(output.outputs) == job.params.n
    for sample in output.outputs:
        assert len(sample.token_ids) == job.params.max_tokens
        token_ids = [*output.prompt_token_ids, *sample.token_ids]
        expected = find(model, token_ids, job.params.logit_bias)
        assert sample.token_ids == expected[len(output.prompt_token_ids) - 1 : -1], job.name


SWAPPED, RECOMPUTED = {"preemption": "swap"}, {"preemption": "recompute"}
UNCACHED = {"enable_prefix_caching": False}
PREEMPTED, MOVED = "num_preemptions", "num_swap_preemptions"
CACHED, GUESSED = "num_cached_tokens", "num_accepted_tokens"
# Options, and what must happen, or nothing was tested. Those of a row share programs.
VARIANTS = [
    ("mixed", SWAPPED, (MOVED, CACHED)),
    ("mixed", RECOMPUTED | UNCACHED, (PREEMPTED,)),
    ("mixed", SWAPPED | {"num_speculative_tokens": 3}, (MOVED, CACHED, GUESSED)),
    ("mixed", RECOMPUTED | {"max_chunk": 64, "block_size": 4, "num_blocks": 38}, (PREEMPTED,)),
    ("two windows", SWAPPED | UNCACHED, (MOVED,)),
    ("two windows", RECOMPUTED, (PREEMPTED, CACHED)),
    ("window only", RECOMPUTED, (PREEMPTED, CACHED)),
    ("window only", SWAPPED | UNCACHED, (MOVED,)),
    ("window only", SWAPPED | {"num_speculative_tokens": 3}, (MOVED, CACHED, GUESSED)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options", "happens"), VARIANTS)
def test_tokens_are_those_of_the_plain_forward(
    models, next_tokens, jobs, kind, options, happens
) -> None:
    model = models[kind]
    engine = Engine(model, **SIZES | {"num_blocks": NUM_BLOCKS[kind]} | options)
    for _ in range(2):
        outputs = play(engine, jobs, on_step=lambda _: check_groups(engine.cache))
        for job in jobs:
            check_tokens(next_tokens, model, job, outputs[job.name])
        check_empty(engine)
    for name in happens:
        assert getattr(engine.stats, name) > 0, f"{name}: make it happen"
