"""`CompletionEndpoint`: handles requests for generated text, whole or as a stream."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.answers import Answer, DeltaTracker, num_entries, whole_samples
from paged_jax.server.api_error import ApiError
from paged_jax.server.disconnection import ClientGone
from paged_jax.server.generation import check_request, make_job, run
from paged_jax.server.json_encoding import json_response
from paged_jax.server.receiving import receive_body
from paged_jax.server.request_log import RECORD, RequestRecord
from paged_jax.server.sampling_body import SamplingBody
from paged_jax.server.security import CLIENT
from paged_jax.server.service import Client, Service

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
    finished_outputs: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(run(answer, job)) as outputs:
        async for index, output in outputs:
            finished_outputs[index] = output
    ordered = [finished_outputs[index] for index in range(len(job.prompts))]
    size = sum(num_entries(output, whole_samples(output)) for output in ordered)
    return await answer.service.render(size, lambda: json_response(answer.response_body(ordered)))


async def _stream(answer: Answer, receive: Receive, send: Send) -> None:
    """Generate all samples and send their text as events of a stream.

    The response starts when the engine has accepted the request. An error before that is sent with
    its own HTTP status, however long the checks take. A later error is sent as the last event of
    the stream.
    """
    sender, last_chunk = _EventSender(answer, send), b""
    try:
        async with answer.service.while_connected(receive), sender:
            await _send_events(answer, sender)
    except ClientGone:
        if not sender.is_started:
            raise
        return
    except ApiError as error:
        if not sender.is_started:
            raise
        answer.record.note_error(error.code, str(error))
        last_chunk = answer.failure(error)
    await send(_body(last_chunk, is_last=True))


class _EventSender:
    """Sender of a stream's events, and of pings while there are no events.

    It is an async context manager, whose end stops the pings.

    Args:
      answer: the answer to the request.
      send: the ASGI `send` function of the request.

    Attributes:
      is_started: whether the start of the response was sent.
      is_accepted: whether the engine has accepted the request. Nothing may be sent before that.
      is_held: whether to send no pings now, because later events have been built already. Pings may
        be numbered too, so they must be sent in the order in which they are built.
    """

    def __init__(self, answer: Answer, send: Send):
        self._answer = answer
        self._send = send
        self._opening = b""
        self._lock = asyncio.Lock()
        self._last = 0.0
        self._pings: asyncio.Task[None] | None = None
        self.is_started = self.is_accepted = self.is_held = False

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *exception: object) -> None:
        if self._pings is not None:
            self._pings.cancel()

    def accept(self) -> None:
        """Send the opening events, and then a ping whenever nothing was sent for a while.

        Without pings, proxies and clients may close the connection, for example while a long prompt
        waits or is computed. `Settings.ping_seconds` is the time between two of them.
        """
        self.is_accepted = True
        self._last = time.monotonic()
        self._opening = b"".join(map(self._answer.encode, self._answer.opening()))
        self._pings = asyncio.create_task(self._keep_open())

    async def send(self, data: bytes) -> None:
        """Send the bytes of events, after the start of the response and the opening events."""
        async with self._lock:
            data, self._opening = self._opening + data, b""
            if not self.is_started:
                self.is_started = True
                await self._send(_STREAM_START)
            await self._send(_body(data))
            self._last = time.monotonic()

    async def _keep_open(self) -> None:
        if self._opening:
            await self.send(b"")
        seconds = self._answer.service.settings.ping_seconds
        while seconds:
            await asyncio.sleep(max(0.0, self._last + seconds - time.monotonic()) or seconds)
            if time.monotonic() - self._last >= seconds and not self.is_held:
                await self.send(self._answer.ping())


async def _send_events(answer: Answer, sender: _EventSender) -> None:
    """Send the events of a stream: opening events, events with new text, and the end."""
    job = await make_job(answer)
    tracker, finished_outputs, data = DeltaTracker(), dict[int, RequestOutput](), b""
    async with contextlib.aclosing(run(answer, job, sender.accept)) as outputs:
        async for index, output in outputs:
            deltas = tracker.deltas(index, output)
            sender.is_held = True
            data += await answer.service.render(
                num_entries(output, deltas),
                functools.partial(answer.events, index, output, deltas),
            )
            if output.finished:
                finished_outputs[index] = output
            # The events of the last output are sent together with the closing events.
            if data and sender.is_accepted and len(finished_outputs) < len(job.prompts):
                await sender.send(data)
                data = b""
            sender.is_held = bool(data)
    closing = answer.closing([finished_outputs[index] for index in range(len(job.prompts))])
    await sender.send(b"".join([data, *map(answer.encode, closing), answer.end_mark]))


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
