"""`CompletionEndpoint`: handles requests for generated text, whole or as a stream."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.api_error import ApiError
from paged_jax.server.disconnection import ClientGone
from paged_jax.server.generation import check_request, make_job, run
from paged_jax.server.generation_request import GenerationRequest
from paged_jax.server.job import Job
from paged_jax.server.json_encoding import json_response
from paged_jax.server.receiving import receive_body
from paged_jax.server.request_log import RECORD, RequestRecord
from paged_jax.server.sample_deltas import DeltaTracker, num_entries, whole_samples
from paged_jax.server.sampling_body import SamplingBody
from paged_jax.server.security import CLIENT
from paged_jax.server.service import Client, Service
from paged_jax.server.writer import Writer

B = TypeVar("B", bound=SamplingBody)

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

    A request is handled in these steps. `receive_body` parses the body, and the reader of the API
    turns it into a `GenerationRequest`. `check_request` checks the limits. `Service.admit` counts
    the samples in progress. `make_job` tokenizes the prompts. `run` yields the engine's outputs,
    which the `Writer` of the API converts to JSON.

    Args:
      service: the engine and its settings.
      body_type: Pydantic model of the request body.
      read: reader of the body. It is called as ``read(service, body)``.
      make_writer: subclass of `Writer` for the endpoint.
    """

    def __init__(
        self,
        service: Service,
        body_type: type[B],
        read: Callable[[Service, B], GenerationRequest],
        make_writer: Callable[[Service, B, GenerationRequest, str], Writer],
    ):
        self._service = service
        self._body_type = body_type
        self._read = read
        self._make_writer = make_writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        service, client, record = self._service, scope[CLIENT], scope[RECORD]
        service.check_room(1, client)
        body = await receive_body(service, Request(scope, receive), self._body_type)
        request = self._read(service, body)
        check_request(service, request)
        writer = self._make_writer(service, body, request, record.request_id)
        exchange = _Exchange(service, client, record, request, writer)
        num_samples = request.num_prompts * request.num_samples
        with service.admit(num_samples, client, is_stream=request.stream):
            if request.stream:
                await exchange.stream(receive, send)
                return
            async with service.while_connected(receive):
                response = await exchange.respond()
        await response(scope, receive, send)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """A request and its response, in a service that has admitted the request."""

    service: Service
    client: Client
    record: RequestRecord
    request: GenerationRequest
    writer: Writer

    async def respond(self) -> Response:
        """Generate all samples and return the whole response."""
        job = await self._make_job()
        finished_outputs: dict[int, RequestOutput] = {}
        async with contextlib.aclosing(run(self.service, self.request, job)) as outputs:
            async for index, output in outputs:
                finished_outputs[index] = output
        ordered = [finished_outputs[index] for index in range(len(job.prompts))]
        size = sum(num_entries(output, whole_samples(output)) for output in ordered)
        response_body = self.writer.response_body
        return await self.service.render(size, lambda: json_response(response_body(ordered)))

    async def stream(self, receive: Receive, send: Send) -> None:
        """Generate all samples and send their text as events of a stream.

        The response starts when the engine has accepted the request. An error before that is sent
        with its own HTTP status, however long the checks take. A later error is sent as the last
        event of the stream.
        """
        sender = _EventSender(self.writer, self.service.settings.ping_seconds, send)
        last_chunk = b""
        try:
            async with self.service.while_connected(receive), sender:
                await self._send_events(sender)
        except ClientGone:
            if not sender.is_started:
                raise
            return
        except ApiError as error:
            if not sender.is_started:
                raise
            self.record.note_error(error.code, str(error))
            last_chunk = self.writer.failure(error)
        await send(_body(last_chunk, is_last=True))

    async def _send_events(self, sender: "_EventSender") -> None:
        """Send the events of a stream: opening events, events with new text, and the end."""
        job = await self._make_job()
        writer, tracker = self.writer, DeltaTracker()
        finished_outputs, data = dict[int, RequestOutput](), b""
        outputs = run(self.service, self.request, job, sender.accept)
        async with contextlib.aclosing(outputs):
            async for index, output in outputs:
                deltas = tracker.deltas(index, output)
                sender.is_held = True
                data += await self.service.render(
                    num_entries(output, deltas),
                    functools.partial(writer.events, index, output, deltas),
                )
                if output.finished:
                    finished_outputs[index] = output
                # The events of the last output are sent together with the closing events.
                if data and sender.is_accepted and len(finished_outputs) < len(job.prompts):
                    await sender.send(data)
                    data = b""
                sender.is_held = bool(data)
        closing = writer.closing([finished_outputs[index] for index in range(len(job.prompts))])
        await sender.send(b"".join([data, *map(writer.encode, closing), writer.end_mark]))

    async def _make_job(self) -> Job:
        return await make_job(self.service, self.request, self.client, self.record)


class _EventSender:
    """Sender of a stream's events, and of pings while there are no events.

    It is an async context manager, whose end stops the pings.

    Args:
      writer: the writer of the response.
      ping_seconds: seconds without events after which a ping is sent; 0 for no pings.
      send: the ASGI `send` function of the request.

    Attributes:
      is_started: whether the start of the response was sent.
      is_accepted: whether the engine has accepted the request. Nothing may be sent before that.
      is_held: whether to send no pings now, because later events have been built already. Pings may
        be numbered too, so they must be sent in the order in which they are built.
    """

    def __init__(self, writer: Writer, ping_seconds: float, send: Send):
        self._writer = writer
        self._ping_seconds = ping_seconds
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
        self._opening = b"".join(map(self._writer.encode, self._writer.opening()))
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
        seconds = self._ping_seconds
        while seconds:
            await asyncio.sleep(max(0.0, self._last + seconds - time.monotonic()) or seconds)
            if time.monotonic() - self._last >= seconds and not self.is_held:
                await self.send(self._writer.ping())


def _body(data: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
