"""`Job`: the prompts and parameters of a request, and their run in the engine."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from paged_jax.async_engine import EngineClosedError
from paged_jax.engine.sleep import EngineAsleepError
from paged_jax.models.text.grammar import Grammar
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.api_error import ApiError, bad_request, engine_stopped, sleeping
from paged_jax.server.request_log import RequestRecord
from paged_jax.server.service import Service

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Job:
    """A request in the form that the engine needs: validated and tokenized.

    Attributes:
      name: prefix of the request ids in the engine. The index of the prompt is appended to it.
      record: the request's record for the log, which also stores the outputs.
      prompts: token ids of each prompt.
      params: sampling parameters of all prompts.
      cache_salt: salt of the client's API key, followed by the ``cache_salt`` of the request.
      options: other keyword arguments for `AsyncEngine.generate`.
      grammar: the compiled grammar of ``params.structured_outputs``, or None. The engine looks it
        up in the cache of grammars, which has only weak references to evicted grammars. So this
        reference keeps it alive.
    """

    name: str
    record: RequestRecord
    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str
    options: dict[str, Any]
    grammar: Grammar | None = None


def sample_job(
    service: Service, job: Job, on_added: Callable[[], None] = lambda: None
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run a job without beam search. See `generation.run`."""
    num_missing = len(job.prompts)

    def note_added() -> None:
        nonlocal num_missing
        num_missing -= 1
        if not num_missing:
            on_added()

    streams = [_outputs(service, job, index, note_added) for index in range(len(job.prompts))]
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _outputs(
    service: Service, job: Job, index: int, on_added: Callable[[], None]
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run ``job.prompts[index]``. Yield ``(index, output)`` whenever it has new tokens."""
    stream = service.engine.generate(
        {"prompt_token_ids": job.prompts[index], "cache_salt": job.cache_salt},
        job.params,
        request_id=f"{job.name}-{index}",
        on_added=on_added,
        **job.options,
    )
    try:
        async with contextlib.aclosing(stream):
            with service.stalls.arrival():
                first = await anext(stream, None)
            if first is not None:
                yield index, _record(job, index, first)
            async for output in stream:
                yield index, _record(job, index, output)
    except ValueError as error:
        raise bad_request(error) from None
    except EngineAsleepError:
        raise sleeping() from None
    except EngineClosedError:
        raise engine_stopped() from None


def _record(job: Job, index: int, output: RequestOutput) -> RequestOutput:
    """Store an output in the record of the request log, and return the output.

    Raises:
      ApiError: a sample of the output has failed.
    """
    job.record.note_output(index, output)
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise ApiError(500, str(sample.stop_reason), code="generation_failed")
    return output


async def _merge(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of several streams as they arrive. The first error ends all streams."""
    # The queue has room for a single item. If the client reads slowly, each of the merged streams
    # waits in `put`. The engine then keeps only the newest output of the stream's prompt, which
    # includes all earlier tokens.
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(1)

    async def forward(stream: AsyncGenerator[T]) -> None:
        end = None
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        num_active = len(tasks)
        while num_active:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_active -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
