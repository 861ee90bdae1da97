"""`generate`: the engine's outputs for a job, merged over its prompts."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

from paged_jax.async_engine import EngineClosedError
from paged_jax.engine.sleep import EngineAsleepError
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.answers import Answer
from paged_jax.server.errors import ApiError, bad_request
from paged_jax.server.jobs import Job
from paged_jax.server.service import Service, engine_stopped, sleeping

T = TypeVar("T")


def generate(
    service: Service, answer: Answer, job: Job
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Run a job: yield the outputs of all its prompts as they grow, each with its prompt's index.

    Raises:
      ApiError: the engine refuses the job, fails, or has stopped.
    """
    streams = [_output(service, answer, job, index) for index in range(len(job.prompts))]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _output(
    service: Service, answer: Answer, job: Job, index: int
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    stream = service.engine.generate(
        {"prompt_token_ids": job.prompts[index], "cache_salt": job.cache_salt},
        job.params,
        request_id=f"{answer.name}-{index}",
        final_only=not answer.body.stream,
        **job.options,
    )
    try:
        async with contextlib.aclosing(stream):
            with service.stalls.arrival():
                first = await anext(stream, None)
            if first is not None:
                yield index, _noted(answer, index, first)
            async for output in stream:
                yield index, _noted(answer, index, output)
    except ValueError as error:
        raise bad_request(error) from None
    except EngineAsleepError:
        raise sleeping() from None
    except EngineClosedError:
        raise engine_stopped() from None


def _noted(answer: Answer, index: int, output: RequestOutput) -> RequestOutput:
    answer.record.note_output(index, output)
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise ApiError(500, str(sample.stop_reason), code="generation_failed")
    return output


async def _merged(streams: list[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """The items of several streams as they arrive; the first error ends them all."""
    # One item: a slow client then gets the newest output of a prompt, which holds those before.
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(1)

    async def run(stream: AsyncGenerator[T]) -> None:
        end = None
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(run(stream)) for stream in streams]
    try:
        num_left = len(tasks)
        while num_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
