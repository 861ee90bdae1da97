"""Long random traffic: no request is lost, nothing leaks, and no tokens are mixed up.

Lengths and arrivals are drawn with the statistics of a trace of the Azure LLM inference service
(Patel et al., 2024), and lengths are scaled down to the context of the tiny model. Time is counted
in engine steps, so every run is the same.
"""

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.scheduler.request import Sequence
from tests.support.random_model import random_llama
from tests.support.tiny_model import BOS, CONFIG, EOS, SIZES
from tests.support.workload import Job, check_empty, check_groups, play

# Number of tokens of the trace per token here.
PROMPT_SCALE, OUTPUT_SCALE = 64, 16
# Mean and standard deviation of the logarithm of the number of tokens in the first 1,000 requests
# of the trace, and its maximum. The time between requests has a mean of 0.216 seconds.
PROMPT_TOKENS, OUTPUT_TOKENS = (6.49, 1.04, 4100), (5.19, 0.91, 1000)
MEAN_SECONDS = 0.216
# Many slots, for batches of all sizes and prefill of several prompts together. The longest request
# needs 16 blocks, 12 average requests about 80.
WIDE: dict[str, Any] = {
    **SIZES,
    "num_blocks": 50,
    "max_num_seqs": 12,
    "max_chunk": 64,
    "max_num_batched_tokens": 128,
}
# Number of requests that run again alone.
NUM_ALONE = 24


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Return the clock of the engine. Tests set its time in seconds."""
    clock = SimpleNamespace(now=0.0)
    fake_time = SimpleNamespace(perf_counter=lambda: clock.now)
    modules = ("core", "engine", "mask_clock", "postprocess", "request_table", "step_clock")
    for module in modules:
        monkeypatch.setattr(f"paged_jax.engine.{module}.time", fake_time)
    return clock


def draw_jobs(num_jobs: int, *, steps_per_second: float) -> list[Job]:
    """Return requests with random lengths, parameters, aborts and priorities."""
    random = np.random.default_rng(0)
    context, letters = CONFIG.max_position_embeddings, np.arange(3, CONFIG.vocab_size)
    # Each prompt begins with the instructions of one of a few assistants.
    instructions = [random.choice(letters, n).tolist() for n in (5, 12, 25)]
    jobs, seconds = [], 0.0
    for number in range(num_jobs):
        num_tokens = min(_draw_length(random, *PROMPT_TOKENS, PROMPT_SCALE), context - 1)
        max_tokens = _draw_length(random, *OUTPUT_TOKENS, OUTPUT_SCALE)
        max_tokens = min(max_tokens, context - num_tokens)
        begin = instructions[random.choice(3)] if random.random() < 0.5 else []
        own = random.choice(letters, num_tokens).tolist()
        token_ids = [BOS, *begin, *own][:num_tokens]
        at = int(seconds * steps_per_second)
        seconds += random.exponential(MEAN_SECONDS)
        jobs.append(
            Job(
                str(number),
                {"prompt_token_ids": token_ids},
                _params(random, max_tokens),
                priority=int(random.choice([-1, 0, 1], p=[0.04, 0.92, 0.04])),
                timeout=int(random.integers(1, 60)) if random.random() < 0.05 else None,
                at=at,
                abort_at=at + int(random.geometric(0.05)) if random.random() < 0.1 else None,
            )
        )
    return jobs


def _draw_length(
    random: np.random.Generator, mean: float, deviation: float, most: int, scale: int
) -> int:
    return max(1, round(min(random.lognormal(mean, deviation), most) / scale))


def _params(random: np.random.Generator, max_tokens: int) -> SamplingParams:
    ignore_eos = bool(random.random() < 0.9)
    return SamplingParams(
        n=2 if random.random() < 0.05 else 1,
        temperature=float(random.choice([0.0, 0.8, 1.2])),
        top_p=float(random.choice([1.0, 0.9])),
        frequency_penalty=float(random.choice([0.0, 0.0, 0.3])),
        seed=int(random.integers(2**31)),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logit_bias=None if ignore_eos else {EOS: 3.0},
    )


def soak(
    engine: Engine, jobs: list[Job], clock: SimpleNamespace
) -> tuple[dict[str, RequestOutput], set[str]]:
    """Run the jobs, check the block tables now and then, and check all outputs.

    Returns:
      The outputs, and the names of jobs that were preempted.
    """
    preempted: set[str] = set()

    def on_step(num_steps: int) -> None:
        clock.now = float(num_steps)
        waiting = engine.core.scheduler.waiting
        preempted.update(s.request.request_id for s in waiting if s.num_preemptions)
        if num_steps % 100 == 0:
            check_groups(engine.cache)

    clock.now = 0.0
    outputs = play(engine, jobs, on_step=on_step)
    for job in jobs:
        check_complete(job, outputs[job.name])
    check_empty(engine)
    return outputs, preempted


def check_complete(job: Job, output: RequestOutput) -> None:
    """Check that every sample has all its tokens, unless its request was aborted."""
    assert output.prompt_token_ids == job.prompt["prompt_token_ids"]
    assert [sample.index for sample in output.outputs] == list(range(job.params.n))
    most = job.params.max_tokens
    assert most is not None
    for sample in output.outputs:
        num_tokens = len(sample.token_ids)
        match sample.finish_reason:
            case "length":
                assert num_tokens == most
            case "stop":
                assert 1 <= num_tokens <= most and not job.params.ignore_eos
                assert sample.token_ids[-1] == EOS and EOS not in sample.token_ids[:-1]
            case "abort":
                assert num_tokens < most
                patience = (job.timeout, job.abort_at)
                assert patience[sample.stop_reason is None] is not None
            case reason:
                pytest.fail(f"{job.name} ended with {reason}")


def check_alone(
    engine: Engine, jobs: list[Job], outputs: dict[str, RequestOutput], preempted: set[str]
) -> None:
    """Run some completed jobs again alone, preempted jobs first, and compare their outputs."""
    completed = [
        job
        for job in jobs
        if all(sample.finish_reason != "abort" for sample in outputs[job.name].outputs)
    ]
    completed.sort(key=lambda job: job.name not in preempted)
    # The first half is preempted jobs, if there are enough; the rest comes from all jobs.
    others = completed[NUM_ALONE // 2 :]
    for job in [*completed[: NUM_ALONE // 2], *others[:: len(others) // (NUM_ALONE // 2)]]:
        job = dataclasses.replace(job, at=0, abort_at=None, timeout=None)
        alone = play(engine, [job])[job.name]
        engine.reset_prefix_cache()
        for ours, theirs in zip(outputs[job.name].outputs, alone.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids, job.name
            assert ours.finish_reason == theirs.finish_reason, job.name
    check_empty(engine)


def num_sequences_alive() -> int:
    """Return the number of sequences of all engines that are not garbage-collected."""
    gc.collect()
    # Not isinstance, which reads `__class__`: some objects of torch warn then.
    return sum(type(x) is Sequence for x in gc.get_objects())


def count_ends(outputs: dict[str, RequestOutput]) -> dict[Any, int]:
    ends: dict[Any, int] = {}
    for output in outputs.values():
        for sample in output.outputs:
            key = sample.finish_reason, sample.stop_reason
            ends[key] = ends.get(key, 0) + 1
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "num_jobs", "steps_per_second"),
    [
        pytest.param(SIZES, 1000, 9, id="four slots"),
        pytest.param(WIDE, 2000, 5, id="twelve slots", marks=pytest.mark.exhaustive),
    ],
)
def test_a_thousand_requests_complete_and_leak_nothing(
    tiny_model, clock, sizes, num_jobs, steps_per_second
) -> None:
    jobs = draw_jobs(num_jobs, steps_per_second=steps_per_second)
    num_alive = num_sequences_alive()
    engine = Engine(tiny_model, **sizes, preemption="swap")
    # Too little host memory for all preempted sequences, so some are recomputed.
    engine.core.scheduler.costs.max_swapped_blocks = 12
    outputs, preempted = soak(engine, jobs, clock)
    assert num_sequences_alive() == num_alive

    stats, ends = engine.stats, count_ends(outputs)
    assert stats.num_swap_preemptions > 10
    assert stats.num_preemptions - stats.num_swap_preemptions > 5
    assert stats.num_cached_tokens > 1000
    assert ends["abort", None] > 25 and ends["abort", "deadline"] > 10
    assert ends["length", None] > 750 and ends["stop", None] > 10
    check_alone(Engine(tiny_model, **sizes), jobs, outputs, preempted)


@pytest.mark.slow
def test_drafts_and_a_quantised_cache_leak_nothing(tiny_model, clock) -> None:
    jobs = draw_jobs(200, steps_per_second=9)
    jobs = [babbling(job) if int(job.name) % 4 else job for job in jobs]
    num_alive = num_sequences_alive()
    options: dict[str, Any] = {**SIZES, "kv_dtype": "int8", "num_speculative_tokens": 4}
    engine = Engine(tiny_model, **options, preemption="swap")
    outputs, preempted = soak(engine, jobs, clock)
    assert num_sequences_alive() == num_alive

    assert engine.stats.num_accepted_tokens > 20
    assert engine.stats.num_swap_preemptions > 10
    check_alone(Engine(tiny_model, **options), jobs, outputs, preempted)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [("sliding_attention", "full_attention"), ()])
def test_windows_leak_nothing(clock, layers) -> None:
    """A window and a full-attention layer, and a window alone with fewer blocks."""
    config = dataclasses.replace(
        CONFIG, layer_types=layers, sliding_window=12, model_type="qwen3" if layers else "mistral"
    )
    model = random_llama(config, scale=0.4)
    jobs = draw_jobs(300, steps_per_second=9)
    num_alive = num_sequences_alive()
    sizes = SIZES if layers else {**SIZES, "num_blocks": 10}
    engine = Engine(model, **sizes, preemption="swap")
    engine.core.scheduler.costs.max_swapped_blocks = 8
    outputs, preempted = soak(engine, jobs, clock)
    assert num_sequences_alive() == num_alive
    assert engine.stats.num_preemptions > 5 and engine.stats.num_cached_tokens > 60
    check_alone(Engine(model, **sizes), jobs, outputs, preempted)


def babbling(job: Job) -> Job:
    """Return the same job with few letters, so that drafts are accepted."""
    params = dataclasses.replace(job.params, logit_bias={9: 40.0, 10: 40.0, 11: 40.0})
    return dataclasses.replace(job, params=params)
