"""Engines of paged_jax for the benchmark of serving."""

import dataclasses
import time
from typing import Any, NamedTuple

from benchmarks.serving.outcome import Outcome
from benchmarks.serving.workloads import Request
from paged_jax import Engine, Llama, SamplingParams

# Maximum number of prompt tokens of a sequence in a step.
_MAX_CHUNK = 512
# Number of tokens that warm-up requests generate.
_WARMUP_TOKENS = 12


class EngineSizes(NamedTuple):
    """Common sizes of all engines of a comparison.

    Attributes:
      max_num_seqs: maximum number of running sequences.
      max_model_len: maximum length of a sequence.
      pool_tokens: number of tokens that fit into the pools, independent of the block size.
      block_size: number of tokens in a block, for paged K and V.
      max_num_batched_tokens: maximum number of tokens of an engine step; None is the default.
      steps_per_dispatch: number of decode steps per dispatch.
    """

    max_num_seqs: int
    max_model_len: int
    pool_tokens: int
    block_size: int
    max_num_batched_tokens: int | None
    steps_per_dispatch: int


# Kinds of caches (is paged, has a prefix cache), by their names in the tables.
VARIANTS: dict[str, tuple[bool, bool]] = {
    "paged, prefix cache": (True, True),
    "paged": (True, False),
    "contiguous": (False, False),
}


def make_engine(model: Llama, sizes: EngineSizes, variant: str) -> Engine:
    """Create an engine for one of the VARIANTS, without compiling.

    "contiguous" is the same engine with blocks of `max_model_len` tokens: every sequence has one
    block, reserved when it is admitted, and attention reads the whole block.
    """
    is_paged, has_prefix_cache = VARIANTS[variant]
    block_size = sizes.block_size if is_paged else sizes.max_model_len
    num_blocks, max_num_seqs = sizes.pool_tokens // block_size, sizes.max_num_seqs
    if not is_paged:
        max_num_seqs = min(max_num_seqs, num_blocks)
        # The scheduler reserves one more block for each running sequence, although a second block
        # is never needed here. Without these additional blocks, only half as many sequences would
        # run.
        num_blocks += max_num_seqs
    optional = {}
    if sizes.max_num_batched_tokens is not None:
        optional["max_num_batched_tokens"] = sizes.max_num_batched_tokens
    return Engine(
        model,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_model_len=sizes.max_model_len,
        max_chunk=min(_MAX_CHUNK, sizes.max_model_len),
        steps_per_dispatch=sizes.steps_per_dispatch,
        enable_prefix_caching=has_prefix_cache,
        **optional,
    )


def warm_up(engine: Engine, requests: list[Request]) -> None:
    """Compile the programs for such requests, by serving 1, 2, 4, ... shortened requests.

    `Engine.warmup` would compile all programs, which takes several times as long.
    """
    short = [
        dataclasses.replace(request, num_new=min(request.num_new, _WARMUP_TOKENS))
        for request in requests
    ]
    first, count = 0, 1
    while first < len(short):
        serve(engine, short[first : first + count])
        first, count = first + count, 2 * count


def serve(engine: Engine, requests: list[Request]) -> Outcome:
    """Serve requests, each added at its arrival time, until all are complete.

    `Outcome.details` has the increments of the engine's totals, and its peaks since it was created.
    """
    before = _numbers(engine.stats)
    indices: dict[str, int] = {}
    token_ids: list[list[int]] = [[] for _ in requests]
    token_times: list[list[float]] = [[] for _ in requests]
    step_seconds = []
    order = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    num_added = 0
    start = time.perf_counter()
    while num_added < len(order) or engine.has_unfinished:
        now = time.perf_counter() - start
        while num_added < len(order) and requests[order[num_added]].arrival <= now:
            index = order[num_added]
            indices[_add(engine, requests[index])] = index
            num_added += 1
        if not engine.has_unfinished:
            time.sleep(requests[order[num_added]].arrival - now)
            continue
        step_start = time.perf_counter()
        outputs = engine.step()
        step_end = time.perf_counter()
        step_seconds.append(step_end - step_start)
        for output in outputs:
            index = indices[output.request_id]
            token_ids[index] = output.outputs[0].token_ids
            num_more = len(token_ids[index]) - len(token_times[index])
            token_times[index] += [step_end - start] * num_more
    seconds = time.perf_counter() - start
    after = _numbers(engine.stats)
    return Outcome(
        seconds=seconds,
        token_ids=token_ids,
        arrivals=[request.arrival for request in requests],
        token_times=token_times,
        step_seconds=step_seconds,
        details={
            name: value if name.startswith("peak_") else value - before[name]
            for name, value in after.items()
        },
    )


def _add(engine: Engine, request: Request) -> str:
    params = SamplingParams(temperature=0, max_tokens=request.num_new, ignore_eos=True)
    return engine.add_request({"prompt_token_ids": request.prompt_token_ids}, params)


def _numbers(stats: Any) -> dict[str, float]:
    return {
        field.name: value
        for field in dataclasses.fields(stats)
        if isinstance(value := getattr(stats, field.name), int | float)
        # Differences of these two have no meaning: a time of the first request, and a ratio.
        and field.name not in ("first_token_seconds", "sharing")
    }
