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
from paged_jax.server.deltas import Sent, num_entries, whole
from paged_jax.server.generation import generate
from paged_jax.server.jobs import Job, check_sizes, make_job
from paged_jax.server.receiving import receive
from paged_jax.server.records import RECORD, RequestRecord
from paged_jax.server.responses import DONE, EventStream, encode_event, json_response
from paged_jax.server.security import CLIENT
from paged_jax.server.service import Client, Service

B = TypeVar("B", bound=bodies.SamplingBody)
AnswerType = Callable[[Service, B, Client, RequestRecord], Answer]


async def complete(
    service: Service,
    request: Request,
    *,
    body_type: type[B],
    answer_type: AnswerType[B],
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
    answer = answer_type(service, body, client, request.scope[RECORD])
    check_sizes(answer)
    run = generate
    if isinstance(body, bodies.OpenAiBody) and body.use_beam_search:
        check_beams(answer)
        run = functools.partial(search, length_penalty=body.length_penalty)
    with contextlib.ExitStack() as stack:
        num_samples = answer.num_prompts * answer.num_samples
        stack.enter_context(service.admit(num_samples, client, is_stream=bool(body.stream)))
        size = math.inf if answer.has_form else answer.record.size(answer.num_chars)
        job = await service.encode(request.receive, size, lambda: make_job(answer))
        if body.stream:
            events = _events(service, answer, job)
            # The first event is made before the status is sent, so that an error can have its own.
            async with service.while_connected(request.receive):
                first = await anext(events)
            return EventStream(service, first, events, stack.pop_all())
        async with service.while_connected(request.receive):
            return await _collect(service, answer, job, run(service, answer, job))


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
    make = functools.partial(_whole, answer, ordered)
    if service.is_small(sum(num_entries(output, whole(output)) for output in ordered)):
        return make()
    return await service.render(make)


def _whole(answer: Answer, outputs: list[RequestOutput]) -> Response:
    return json_response(answer.answer(outputs))


async def _events(service: Service, answer: Answer, job: Job) -> AsyncGenerator[bytes]:
    """The answer as server-sent events: opening, chunks, closing, and the end mark."""
    sent, done = Sent(), {}
    data = b"".join(map(encode_event, answer.opening()))
    async with contextlib.aclosing(generate(service, answer, job)) as outputs:
        async for index, output in outputs:
            deltas = sent.deltas(index, output)
            if service.is_small(num_entries(output, deltas)):
                data += answer.events(index, output, deltas)
            else:
                make = functools.partial(answer.events, index, output, deltas)
                data += await service.render(make)
            if output.finished:
                done[index] = output
            # The last of them goes with the end, in one piece.
            if data and len(done) < len(job.prompts):
                yield data
                data = b""
    closing = answer.closing([done[index] for index in range(len(job.prompts))])
    yield b"".join([data, *map(encode_event, closing), DONE])
