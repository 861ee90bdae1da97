"""`complete`: from a request for text to its answer, whole or as a stream."""

import contextlib
import functools
import math
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server import bodies
from paged_jax.server.answers import Answer
from paged_jax.server.beam_answers import check_beams, search
from paged_jax.server.deltas import SampleDelta, Sent, num_entries, whole
from paged_jax.server.generation import generate
from paged_jax.server.jobs import Job, check_sizes, make_job
from paged_jax.server.receiving import receive
from paged_jax.server.records import RECORD
from paged_jax.server.responses import DONE, EventStream, encode_event, json_response
from paged_jax.server.security import CLIENT
from paged_jax.server.service import Client, Service

B = TypeVar("B", bound=bodies.SamplingBody)


async def complete(
    service: Service,
    request: Request,
    *,
    body_type: type[B],
    answer_type: Callable[[Service, B, Client], Answer],
) -> Response:
    """Answer a request for generated text.

    Args:
      service: the engine and how it is served.
      request: the request, whose body is not read yet.
      body_type: the schema of the endpoint's body.
      answer_type: the endpoint's answer.

    Raises:
      ApiError: the request has a mistake, exceeds a limit, or cannot be run.
      ClientGone: the client has left.
    """
    client = request.scope[CLIENT]
    service.check_room(1, client)
    body = await receive(service, request, body_type)
    if isinstance(body, bodies.OpenAiBody):
        service.check_model(body.model)
    answer = answer_type(service, body, client)
    answer.belong_to(request.scope[RECORD])
    check_sizes(answer)
    run = generate
    if isinstance(body, bodies.OpenAiBody) and body.use_beam_search:
        check_beams(answer)
        run = functools.partial(search, length_penalty=body.length_penalty)
    with contextlib.ExitStack() as stack:
        num_samples = answer.num_prompts * answer.num_samples
        stack.enter_context(service.admit(num_samples, client, is_stream=bool(body.stream)))
        size = math.inf if answer.has_form else answer.num_chars
        job = await service.encode(request.receive, size, lambda: make_job(answer))
        if body.stream:
            events = _events(service, answer, job)
            # The first event is made before the status is sent, so that an error can have its own.
            first = await service.while_connected(request.receive, anext(events))
            return EventStream(service, first, events, stack.pop_all())
        outputs = run(service, answer, job)
        return await service.while_connected(
            request.receive, _collect(service, answer, job, outputs)
        )


async def _collect(
    service: Service,
    answer: Answer,
    job: Job,
    outputs: AsyncGenerator[tuple[int, RequestOutput]],
) -> Response:
    done: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(outputs):
        async for index, output in outputs:
            done[index] = output
    ordered = [done[index] for index in range(len(job.prompts))]
    size = sum(num_entries(output, whole(output)) for output in ordered)
    return await service.render(size, lambda: json_response(answer.answer(ordered)))


async def _events(service: Service, answer: Answer, job: Job) -> AsyncGenerator[bytes]:
    """The answer as server-sent events: opening, chunks, closing, and the end mark."""
    sent, done = Sent(), {}
    opening = b"".join(map(encode_event, answer.opening()))
    async with contextlib.aclosing(generate(service, answer, job)) as outputs:
        async for index, output in outputs:
            deltas = list(sent.deltas(index, output))
            chunk = functools.partial(_chunk, answer, index, output, deltas)
            if data := opening + await service.render(num_entries(output, deltas), chunk):
                yield data
            opening = b""
            if output.finished:
                done[index] = output
    closing = answer.closing([done[index] for index in range(len(job.prompts))])
    yield b"".join([*map(encode_event, closing), DONE])


def _chunk(answer: Answer, index: int, output: RequestOutput, deltas: list[SampleDelta]) -> bytes:
    return b"".join(map(encode_event, answer.chunks(index, output, deltas)))
