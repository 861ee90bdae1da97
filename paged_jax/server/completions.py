"""`CompletionEndpoint`: handles requests for generated text, whole or as a stream."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.answers import Answer, DeltaTracker, num_entries, whole_samples
from paged_jax.server.generation import check_request, make_job, run
from paged_jax.server.receiving import receive_body
from paged_jax.server.request_log import RECORD, RequestRecord
from paged_jax.server.responses import ApiError, json_response
from paged_jax.server.sampling_body import SamplingBody
from paged_jax.server.security import CLIENT
from paged_jax.server.service import Client, ClientGone, Service

B = TypeVar("B", bound=SamplingBody)
AnswerType = Callable[[Service, B, Client, RequestRecord], Answer]

# The ASGI message that starts the response.
_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # tells nginx to forward each event immediately
    ],
}


# Maximum seconds without events after which a stream sends its first ping.
_FIRST_PING = 1.0


class CompletionEndpoint(Generic[B]):
    """ASGI endpoint for generated text.

    A request is handled in these steps. `receive_body` reads and parses the body. An `Answer`
    interprets the fields of its endpoint. `check_request` checks the limits. `Service.admit` counts
    the samples in progress. `make_job` tokenizes the prompts. `run` yields the engine's outputs,
    which the `Answer` converts to JSON.

    Args:
      service: the engine and its settings.
      body_type: Pydantic model of the request body.
      answer_type: subclass of `Answer` for the endpoint.
    """

    def __init__(self, service: Service, body_type: type[B], answer_type: AnswerType[B]):
        self._service = service
        self._body_type = body_type
        self._answer_type = answer_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        service, client, request = self._service, scope[CLIENT], Request(scope, receive)
        service.check_room(1, client)
        body = await receive_body(service, request, self._body_type)
        answer = self._answer_type(service, body, client, scope[RECORD])
        check_request(answer)
        num_samples = answer.num_prompts * answer.num_samples
        with service.admit(num_samples, client, is_stream=bool(body.stream)):
            if body.stream:
                await _stream(answer, receive, send)
                return
            async with service.while_connected(receive):
                response = await _respond(answer)
        await response(scope, receive, send)


async def _respond(answer: Answer) -> Response:
    """Generate all samples and return the whole response."""
    job = await make_job(answer)
    finished: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(run(answer, job)) as outputs:
        async for index, output in outputs:
            finished[index] = output
    ordered = [finished[index] for index in range(len(job.prompts))]
    size = sum(num_entries(output, whole_samples(output)) for output in ordered)
    return await answer.service.render(size, lambda: json_response(answer.response_body(ordered)))


async def _stream(answer: Answer, receive: Receive, send: Send) -> None:
    """Generate all samples and send their text as events of a stream.

    The response starts only when the first event is sent. An error before that is sent with its own
    HTTP status. A later error is sent as the last event of the stream.
    """
    sender, ending = _EventSender(send), b""
    pings = answer.service.settings.ping_seconds
    async with contextlib.aclosing(_events(answer)) as events:
        try:
            async with answer.service.while_connected(receive), sender.pinging(answer.ping, pings):
                async for data in events:
                    await sender.send(data)
        except ClientGone:
            if not sender.is_started:
                raise
            return
        except ApiError as error:
            if not sender.is_started:
                raise
            answer.record.note_error(error.code, str(error))
            ending = answer.failure(error)
        await send(_body(ending, is_last=True))


class _EventSender:
    """Sender of a stream's events, and of pings while there are no events.

    Args:
      send: the ASGI `send` function of the request.

    Attributes:
      is_started: whether the start of the response was sent.
    """

    def __init__(self, send: Send):
        self._send = send
        self._is_sending = False
        self._last = time.monotonic()
        self.is_started = False

    async def send(self, data: bytes) -> None:
        """Send the bytes of events. Before the first events, send the start of the response."""
        self._is_sending = True
        if not self.is_started:
            self.is_started = True
            await self._send(_STREAM_START)
        await self._send(_body(data))
        self._is_sending, self._last = False, time.monotonic()

    @contextlib.asynccontextmanager
    async def pinging(self, ping: bytes, seconds: float) -> AsyncIterator[None]:
        """Send `ping` whenever nothing was sent for `seconds`, until the ``with`` block ends.

        Without pings, proxies and clients may close the connection, for example while a long prompt
        is computed. The first ping is sent after at most `_FIRST_PING` seconds without events. If
        `seconds` is 0, no pings are sent.
        """
        task = asyncio.create_task(self._ping(ping, seconds)) if seconds else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _ping(self, ping: bytes, seconds: float) -> None:
        wait = min(seconds, _FIRST_PING)
        while True:
            await asyncio.sleep(max(0.0, self._last + wait - time.monotonic()) or wait)
            if time.monotonic() - self._last >= wait and not self._is_sending:
                await self.send(ping)
                wait = seconds


async def _events(answer: Answer) -> AsyncGenerator[bytes]:
    """Yield the bytes of a stream: opening events, events with new text, and the end."""
    job = await make_job(answer)
    tracker, finished = DeltaTracker(), {}
    data = b"".join(map(answer.encode, answer.opening()))
    async with contextlib.aclosing(run(answer, job)) as outputs:
        async for index, output in outputs:
            deltas = tracker.deltas(index, output)
            data += await answer.service.render(
                num_entries(output, deltas),
                functools.partial(answer.events, index, output, deltas),
            )
            if output.finished:
                finished[index] = output
            # The events of the last output are sent together with the closing events.
            if data and len(finished) < len(job.prompts):
                yield data
                data = b""
    closing = answer.closing([finished[index] for index in range(len(job.prompts))])
    yield b"".join([data, *map(answer.encode, closing), answer.end_mark])


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
