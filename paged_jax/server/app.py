"""`create_app`: the routes, which answer requests at once or as server-sent events."""

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paged_jax.async_engine import EngineClosedError
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server import cache_page, openapi, schemas
from paged_jax.server.answers import Answer
from paged_jax.server.deltas import SampleDelta, Sent, num_entries, whole
from paged_jax.server.errors import ApiError, bad_request
from paged_jax.server.generate_answer import GenerateAnswer
from paged_jax.server.jobs import Job, make_job
from paged_jax.server.openai_answers import ChatAnswer, CompletionAnswer
from paged_jax.server.security import IS_KNOWN, SALT, Security
from paged_jax.server.service import ClientGone, Service, engine_stopped
from paged_jax.server.validation import of_validation
from paged_jax.version import __version__

B = TypeVar("B", bound=schemas.SamplingBody)
T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"
# The status that nginx logs for a client that has left, which no client receives.
_CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service) -> Starlette:
    """The ASGI application that serves an engine."""

    def route(path: str, endpoint: Callable[..., Any], *methods: str) -> Route:
        return Route(path, functools.partial(endpoint, service), methods=methods or ["GET"])

    def complete(body_type: type[B], answer_type: Callable[[Service, B, str], Answer]):
        return functools.partial(_complete, body_type=body_type, answer_type=answer_type)

    app = Starlette(
        routes=[
            route("/health", _health),
            route("/metrics", _metrics),
            route("/openapi.json", _openapi),
            route("/v1/models", _models),
            route("/v1/models/{model:path}", _model),
            route("/generate", complete(schemas.GenerateBody, GenerateAnswer), "POST"),
            route("/v1/completions", complete(schemas.CompletionBody, CompletionAnswer), "POST"),
            route("/v1/chat/completions", complete(schemas.ChatBody, ChatAnswer), "POST"),
            *cache_page.routes(service),
        ],
        middleware=[Middleware(Security, service=service)],
        exception_handlers={
            ApiError: _api_error,
            ClientGone: _client_gone,
            ClientDisconnect: _client_gone,
            HTTPException: _http_error,
            Exception: _unexpected,
        },
        lifespan=service.lifespan,
    )
    # Otherwise a path with a slash too many is redirected to the host named by the Host header.
    app.router.redirect_slashes = False
    return app


# State


async def _health(service: Service, request: Request) -> Response:
    """Whether the engine is alive and makes progress, without waiting for its thread."""
    if service.engine.failure is not None:
        status = "failed"
    elif service.stalls.is_stalled:
        status = "stalled"
    else:
        status = "draining" if service.is_draining else "ok"
    health = schemas.Health(status=status)
    if request.scope[IS_KNOWN]:
        health = health.model_copy(update=_details(service))
    return _json(health, 200 if status == "ok" else 503)


def _details(service: Service) -> dict[str, Any]:
    reading = service.metrics.reading
    stats = reading.stats
    return {
        "model": service.settings.model_name,
        "version": __version__,
        "num_running": reading.num_running,
        "num_waiting": reading.num_waiting,
        "blocks": schemas.Blocks(
            total=service.num_blocks,
            used=reading.num_used_blocks,
            free=service.num_blocks - reading.num_used_blocks,
            block_size=service.block_size,
        ),
        "prefix_cache_hit_rate": stats.num_cached_tokens / max(1, stats.num_queried_tokens),
        "num_preemptions": stats.num_preemptions,
        "seconds_since_step": time.perf_counter() - reading.time if stats.num_steps else None,
    }


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(service: Service, request: Request) -> Response:
    return JSONResponse(openapi.document(service.limits))


async def _models(service: Service, request: Request) -> Response:
    return _json(schemas.ModelList(data=[_served_model(service)]))


async def _model(service: Service, request: Request) -> Response:
    _check_model(service, request.path_params["model"])
    return _json(_served_model(service))


def _served_model(service: Service) -> schemas.Model:
    return schemas.Model(
        id=service.settings.model_name,
        created=service.created,
        max_model_len=service.max_model_len,
    )


def _check_model(service: Service, name: str | None) -> None:
    served = service.settings.model_name
    if name is not None and name != served:
        raise ApiError(
            404,
            f"The model {name[:100]!r} does not exist; {served!r} is served.",
            param="model",
            code="model_not_found",
        )


# Completions


async def _complete(
    service: Service,
    request: Request,
    *,
    body_type: type[B],
    answer_type: Callable[[Service, B, str], Answer],
) -> Response:
    service.check_room(1)
    try:
        body = body_type.model_validate_json(await _read(service, request))
    except ValidationError as error:
        raise of_validation(error) from None
    if isinstance(body, schemas.OpenAiBody):
        _check_model(service, body.model)
    answer = answer_type(service, body, request.scope.get(SALT, ""))
    job = await asyncio.to_thread(make_job, answer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(service.admit(job.num_samples, is_stream=bool(body.stream)))
        if body.stream:
            events = _events(service, answer, job)
            # The first event is made before the status is sent, so that an error can have its own.
            first = await service.while_connected(request.receive, anext(events))
            return _EventStream(service, first, events, stack.pop_all())
        return await service.while_connected(request.receive, _collect(service, answer, job))


async def _read(service: Service, request: Request) -> bytes:
    """Read the body; refuse one that is not JSON, too long, or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # This also keeps out web pages of other sites, which may not send JSON here unasked.
        raise ApiError(415, f"The Content-Type must be application/json, got {kind[:100]!r}.")
    limits = service.limits
    declared = request.headers.get("content-length", "")
    parts, size = [], int(declared) if declared.isdecimal() else 0
    limits.check("max_body_bytes", size, param="the size of the body", status=413)
    try:
        async with asyncio.timeout(limits.body_timeout):
            size = 0
            async for part in request.stream():
                size += len(part)
                limits.check("max_body_bytes", size, param="the size of the body", status=413)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body must be complete within {limits.body_timeout:g} seconds (body_timeout).",
            code="body_timeout_exceeded",
            headers={"Connection": "close"},
        ) from None
    return b"".join(parts)


async def _collect(service: Service, answer: Answer, job: Job) -> Response:
    done: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(_outputs(service, answer, job)) as outputs:
        async for index, output in outputs:
            done[index] = output
    ordered = [done[index] for index in range(len(job.prompts))]
    size = sum(num_entries(output, whole(output)) for output in ordered)
    return await service.render(size, lambda: _json(answer.answer(ordered)))


async def _events(service: Service, answer: Answer, job: Job) -> AsyncGenerator[bytes]:
    """The answer as server-sent events: opening, chunks, closing, and the end mark."""
    sent, done = Sent(), {}
    opening = b"".join(map(_event, answer.opening()))
    async with contextlib.aclosing(_outputs(service, answer, job)) as outputs:
        async for index, output in outputs:
            deltas = list(sent.deltas(index, output))
            chunk = functools.partial(_chunk, answer, index, output, deltas)
            if data := opening + await service.render(num_entries(output, deltas), chunk):
                yield data
            opening = b""
            if output.finished:
                done[index] = output
    closing = answer.closing([done[index] for index in range(len(job.prompts))])
    yield b"".join([*map(_event, closing), _DONE])


def _chunk(answer: Answer, index: int, output: RequestOutput, deltas: list[SampleDelta]) -> bytes:
    return b"".join(map(_event, answer.chunks(index, output, deltas)))


def _outputs(
    service: Service, answer: Answer, job: Job
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs of all prompts as they grow, each with the index of its prompt."""
    streams = [_output(service, answer, job, index) for index in range(len(job.prompts))]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _output(
    service: Service, answer: Answer, job: Job, index: int
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    stream = service.engine.generate(
        {"prompt_token_ids": job.prompts[index], "cache_salt": job.cache_salt},
        job.params,
        request_id=f"{answer.id}-{index}",
        final_only=not answer.body.stream,
        **job.options,
    )
    try:
        async with contextlib.aclosing(stream):
            with contextlib.ExitStack() as arriving:
                arriving.enter_context(service.stalls.arrival())
                async for output in stream:
                    arriving.close()
                    for sample in output.outputs:
                        if sample.finish_reason == "error":
                            raise ApiError(500, str(sample.stop_reason), code="generation_failed")
                    yield index, output
    except ValueError as error:
        raise bad_request(error) from None
    except EngineClosedError:
        raise engine_stopped() from None


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


class _EventStream(Response):
    """Sends events until they end, the client leaves, or the server stops.

    Args:
      service: the engine and how it is served.
      first: the first events, as bytes.
      events: the following events; closed at the end in any case.
      stack: a context that is left at the end in any case, which admitted the request.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        first: bytes,
        events: AsyncGenerator[bytes],
        stack: contextlib.ExitStack,
    ):
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._service = service
        self._first = first
        self._events = events
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})

        async def pump() -> None:
            await write(self._first)
            async for event in self._events:
                await write(event)

        with self._stack:
            async with contextlib.aclosing(self._events):
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                ending = b""
                try:
                    await self._service.while_connected(receive, pump())
                except ClientGone:
                    return
                except ApiError as error:
                    ending = _event(error.body())
                await write(ending, is_last=True)


# Answers


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status, media_type="application/json")


def _event(piece: BaseModel | dict[str, Any]) -> bytes:
    if isinstance(piece, BaseModel):
        text = piece.model_dump_json()
    else:
        text = json.dumps(piece)
    return f"data: {text}\n\n".encode()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Without request.url, which would parse the Host header, an arbitrary text.
    place = f"{request.method} {request.scope['path'][:100]}"
    message = {
        404: f"There is no {place}.",
        405: f"{place} is not allowed.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers) if error.headers else None
    return ApiError(error.status_code, message, headers=headers).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, so the log has its traceback.
    return ApiError(500, "Something went wrong in the server.", code="internal_error").response()
