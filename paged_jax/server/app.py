"""`create_app`: the routes of the server, and what they answer besides generated text."""

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paged_jax import __version__
from paged_jax.server import admin, bodies, cache_page, openapi, router_info, schemas
from paged_jax.server.completions import AnswerType, complete
from paged_jax.server.connected import ClientGone
from paged_jax.server.errors import ApiError
from paged_jax.server.generate_answer import GenerateAnswer
from paged_jax.server.observer import Observer
from paged_jax.server.openai_answers import ChatAnswer, CompletionAnswer
from paged_jax.server.records import RECORD
from paged_jax.server.responses import json_response
from paged_jax.server.security import IS_KNOWN, Security
from paged_jax.server.service import Service
from paged_jax.server.tokenization import detokenize, tokenize, tokenizer_info

B = TypeVar("B", bound=bodies.SamplingBody)

# The status that nginx logs for a client that has left, which no client receives.
_CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service) -> Starlette:
    """The ASGI application that serves an engine."""

    def route(path: str, endpoint: Callable[..., Any], *methods: str) -> Route:
        return Route(path, functools.partial(endpoint, service), methods=methods or ["GET"])

    def text(path: str, body: type[B], answer: AnswerType[B]) -> Route:
        return route(path, functools.partial(complete, body_type=body, answer_type=answer), "POST")

    routes = [
        # Requests are compared with them one by one, so the most frequent ones are the first.
        text("/generate", bodies.GenerateBody, GenerateAnswer),
        text("/v1/completions", bodies.CompletionBody, CompletionAnswer),
        text("/v1/chat/completions", bodies.ChatBody, ChatAnswer),
        route("/live", _live),
        route("/ready", _ready),
        route("/health", _health),
        route("/metrics", _metrics),
        route("/openapi.json", _openapi),
        route("/v1/models", _models),
        route("/v1/models/{model:path}", _model),
        route("/tokenize", tokenize, "POST"),
        route("/detokenize", detokenize, "POST"),
        route("/tokenizer_info", tokenizer_info),
        *router_info.routes(service),
        *admin.routes(service),
        *cache_page.routes(service),
    ]
    observer = Middleware(
        Observer,
        observe=service.metrics.http.observe,
        model_name=service.settings.model_name,
        routes=routes,
    )
    app = Starlette(
        routes=routes,
        middleware=[observer, Middleware(Security, service=service)],
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


async def _live(service: Service, request: Request) -> Response:
    """Whether the process can still be of use: only a new one can, once the engine has failed."""
    has_failed = service.engine.failure is not None
    status = "failed" if has_failed else "ok"
    return json_response(schemas.Probe(status=status), 503 if has_failed else 200)


async def _ready(service: Service, request: Request) -> Response:
    """Whether requests should be sent here."""
    reason = service.unreadiness
    return json_response(schemas.Probe(status=reason or "ok"), 503 if reason else 200)


async def _health(service: Service, request: Request) -> Response:
    """Whether the engine is alive and makes progress, without waiting for its thread."""
    if service.engine.failure is not None:
        status = "failed"
    elif service.stalls.is_stalled:
        status = "stalled"
    elif service.is_draining:
        status = "draining"
    else:
        status = "sleeping" if service.is_sleeping else "ok"
    health = schemas.Health(status=status)
    if request.scope[IS_KNOWN]:
        health = health.model_copy(update=_details(service))
    return json_response(health, 200 if status in ("ok", "sleeping") else 503)


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
    return JSONResponse(openapi.document(service.limits, request.scope.get("root_path", "")))


async def _models(service: Service, request: Request) -> Response:
    return json_response(schemas.ModelList(data=[_served_model(service)]))


async def _model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["model"])
    return json_response(_served_model(service))


def _served_model(service: Service) -> schemas.Model:
    return schemas.Model(
        id=service.settings.model_name,
        created=service.created,
        max_model_len=service.max_model_len,
    )


# Errors


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Without request.url, which would parse the Host header, an arbitrary text.
    place = f"{request.method} {request.scope['path'][:100]}"
    message = {
        404: f"There is no {place}. See /openapi.json for what there is.",
        405: f"{place} is not allowed.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers) if error.headers else None
    return _answer(request, ApiError(error.status_code, message, headers=headers))


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, so the log has its traceback. The answer passes the observer
    # no more, so it gets the header here.
    headers = {"X-Request-ID": request.scope[RECORD].request_id}
    message = "Something went wrong in the server."
    return ApiError(500, message, code="internal_error", headers=headers).response()


def _answer(request: Request, error: ApiError) -> Response:
    request.scope[RECORD].note_error(error.code, str(error))
    return error.response()
