"""Requests that arrive, and are aborted, at given steps of an engine."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.cache.blocks import check_invariants
from paged_jax.cache.paged_cache import PagedCache


@dataclasses.dataclass(frozen=True)
class Job:
    """A request with the step of its arrival and of its abort.

    Attributes:
      name: its request_id.
      prompt, params, priority, timeout: as for `Engine.add_request`.
      at: the number of steps before which it is added.
      abort_at: the number of steps before which it is aborted if it has not ended; None for never.
    """

    name: str
    prompt: Mapping[str, Any]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    at: int = 0
    abort_at: int | None = None


def play(
    engine: Engine, jobs: Iterable[Job], *, on_step: Callable[[int], None] | None = None
) -> dict[str, RequestOutput]:
    """Run jobs to their ends; each must end exactly once.

    Args:
      engine: an engine without requests.
      jobs: in any order; jobs of the same step are added in this order.
      on_step: called after each step with the number of steps so far.
    """
    jobs = sorted(jobs, key=lambda job: job.at)
    to_add = collections.deque(jobs)
    to_abort = collections.defaultdict(list)
    for job in jobs:
        if job.abort_at is not None:
            to_abort[max(job.at, job.abort_at)].append(job.name)
    ended: dict[str, RequestOutput] = {}

    def end(output: RequestOutput) -> None:
        assert output.request_id not in ended, "a request ends once"
        ended[output.request_id] = output

    num_steps = 0
    while to_add or engine.has_unfinished:
        while to_add and to_add[0].at <= num_steps:
            job = to_add.popleft()
            engine.add_request(
                job.prompt,
                job.params,
                request_id=job.name,
                priority=job.priority,
                timeout=job.timeout,
            )
        for name in to_abort.pop(num_steps, ()):
            aborted = engine.abort(name)
            if aborted is not None:
                end(aborted)
        for output in engine.step():
            assert output.request_id not in ended, "nothing comes after the end"
            if output.finished:
                end(output)
        num_steps += 1
        if on_step is not None:
            on_step(num_steps)
    assert ended.keys() == {job.name for job in jobs}
    return ended


def finish(engine: Engine) -> dict[str, list[int]]:
    """Run to the end, and return the tokens of each request's first sample."""
    tokens = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in tokens, "a request ends once"
                tokens[output.request_id] = output.outputs[0].token_ids
    check_empty(engine)
    return tokens


def check_groups(cache: PagedCache) -> None:
    """Check that no group loses blocks, and that no group uses more blocks than the first."""
    num_used = []
    for group in cache.block_groups:
        check_invariants(group.tables)
        num_used.append(group.num_blocks - int(group.tables.pool.num_free))
    assert max(num_used) == num_used[0]


def check_empty(engine: Engine) -> None:
    """Check that nothing is left of finished requests, on the device and on the host."""
    check_groups(engine.cache)
    assert engine.cache.groups[0].num_blocks == engine.num_blocks
    for group in engine.cache.block_groups:
        assert int(group.tables.pool.num_free) == group.num_blocks
        assert group.tables.lengths.tolist() == [0] * engine.max_num_seqs
    scheduler, slots = engine.core.scheduler, engine.core.runner
    assert not engine.core.requests.unfinished
    assert not scheduler.waiting and not scheduler.running and not scheduler.has_unfinished
    assert not scheduler._queue.unfinished
    assert sorted(scheduler._queue.free_slots) == list(range(engine.max_num_seqs))
    assert not slots._to_publish and not slots._to_release
    assert slots._owners == [None] * engine.max_num_seqs


def complete(engine: Engine, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    """Return the final output of a request, and run other requests meanwhile."""
    request_id = engine.add_request(prompt, params, **options)
    while True:
        for output in engine.step():
            if output.request_id == request_id and output.finished:
                return output


def full_batch(count: int, num_slots: int) -> int:
    """Return the number of slots: with it as `row_bucket`, engines compile fewer programs."""
    return num_slots
