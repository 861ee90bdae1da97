"""The ASGI application with all routes, and `Startup`, which serves while the model loads."""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_jax import __version__
from paged_jax.server import admin, cache_page, openapi, schemas
from paged_jax.server.anthropic_codec import MessagesWriter, read_message
from paged_jax.server.api_error import ApiError
from paged_jax.server.chat_codec import ChatWriter, read_chat
from paged_jax.server.completion_codec import (
    CompletionWriter,
    GenerateWriter,
    read_completion,
    read_generate,
)
from paged_jax.server.completions import CompletionEndpoint
from paged_jax.server.disconnection import ClientGone
from paged_jax.server.json_encoding import json_response
from paged_jax.server.request_log import RECORD, RequestLogMiddleware
from paged_jax.server.response_codec import ResponsesWriter, read_response
from paged_jax.server.security import CLIENT, Security
from paged_jax.server.service import Service
from paged_jax.server.tokenization import (
    count_input_tokens,
    count_message_tokens,
    detokenize,
    tokenize,
    tokenizer_info,
)

# Status for a client that has disconnected, as in nginx. It appears only in logs and metrics.
_CLIENT_CLOSED_REQUEST = 499
# Value of the header Retry-After, in seconds, while the server starts.
_RETRY_AFTER = 5


def create_app(service: Service) -> Starlette:
    """Return the ASGI application that serves an engine."""

    def route(path: str, endpoint: Callable[..., Any], *methods: str) -> Route:
        return Route(path, functools.partial(endpoint, service), methods=methods or ["GET"])

    def constant(path: str, model: BaseModel) -> Route:
        async def answer(request: Request) -> Response:
            return json_response(model)

        return Route(path, answer)

    model_info, server_info = _router_infos(service)
    routes = [
        # Starlette tries routes in order, so the most frequent routes are first.
        *_generation_routes(service),
        route("/v1/messages/count_tokens", count_message_tokens, "POST"),
        route("/v1/responses/input_tokens", count_input_tokens, "POST"),
        route("/live", _live),
        route("/ping", _ready, "GET", "POST"),
        route("/version", _version),
        route("/ready", _ready),
        route("/health", _health),
        route("/metrics", _metrics),
        route("/openapi.json", _openapi),
        route("/v1/models", _models),
        route("/v1/models/{model:path}", _model),
        route("/tokenize", tokenize, "POST"),
        route("/detokenize", detokenize, "POST"),
        route("/tokenizer_info", tokenizer_info),
        # Versions of SGLang's router use different paths for the same data.
        constant("/get_model_info", model_info),
        constant("/model_info", model_info),
        constant("/get_server_info", server_info),
        constant("/server_info", server_info),
        *admin.routes(service),
        *cache_page.routes(service),
        *cache_page.chat_page_routes(),
    ]
    request_log = Middleware(
        RequestLogMiddleware,
        observe=service.metrics.observe_response,
        model_name=service.settings.model_name,
        routes=routes,
    )
    app = Starlette(
        routes=routes,
        middleware=[*_cors(service), request_log, Middleware(Security, service=service)],
        exception_handlers={
            ApiError: _api_error,
            ClientGone: _client_gone,
            ClientDisconnect: _client_gone,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
        lifespan=service.lifespan,
    )
    # By default, Starlette redirects a path with a missing or an additional slash at its end. The
    # redirect contains the Host header, which the client chooses, so it could lead to any host.
    app.router.redirect_slashes = False
    return app


def _cors(service: Service) -> list[Middleware]:
    """Return the CORS middleware, which lets web pages of the allowed sites use the server."""
    origins = service.settings.allowed_origins
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


def _generation_routes(service: Service) -> list[Route]:
    codecs: dict[str, tuple[Any, Any]] = {
        "/generate": (read_generate, GenerateWriter),
        "/v1/completions": (read_completion, CompletionWriter),
        "/v1/chat/completions": (read_chat, ChatWriter),
        "/v1/responses": (read_response, ResponsesWriter),
        "/v1/messages": (read_message, MessagesWriter),
    }
    bodies: dict[str, Any] = {endpoint.path: endpoint.body for endpoint in openapi.ENDPOINTS}
    return [
        Route(path, CompletionEndpoint(service, bodies[path], *codec), methods=["POST"])
        for path, codec in codecs.items()
    ]


# State


async def _live(service: Service, request: Request) -> Response:
    """Answer the liveness probe: 503 if the engine has failed and a restart is needed."""
    has_failed = service.engine.failure is not None
    status = "failed" if has_failed else "ok"
    return json_response(schemas.Probe(status=status), 503 if has_failed else 200)


async def _ready(service: Service, request: Request) -> Response:
    """Answer the readiness probe: 503 while load balancers should send no requests."""
    reason = service.unreadiness
    return json_response(schemas.Probe(status=reason or "ok"), 503 if reason else 200)


async def _version(service: Service, request: Request) -> Response:
    return json_response(schemas.Version(version=__version__))


async def _health(service: Service, request: Request) -> Response:
    """Report the state of the engine. This does not wait for the engine's thread.

    The HTTP status is 503 if the engine has failed or is stalled, or if the server is draining.
    """
    if service.engine.failure is not None:
        status = "failed"
    elif service.stalls.is_stalled:
        status = "stalled"
    elif service.is_draining:
        status = "draining"
    else:
        status = "sleeping" if service.is_sleeping else "ok"
    health = schemas.Health(status=status)
    if request.scope[CLIENT].is_known:
        health = health.model_copy(update=_details(service))
    return json_response(health, 200 if status in ("ok", "sleeping") else 503)


def _details(service: Service) -> dict[str, Any]:
    snapshot = service.snapshot
    stats = snapshot.stats
    return {
        "model": service.settings.model_name,
        "version": __version__,
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "blocks": schemas.BlockCounts(
            total=service.num_blocks,
            used=snapshot.num_used_blocks,
            free=service.num_blocks - snapshot.num_used_blocks,
            block_size=service.block_size,
        ),
        "prefix_cache_hit_rate": stats.num_cached_tokens / max(1, stats.num_queried_tokens),
        "num_preemptions": stats.num_preemptions,
        "seconds_since_step": time.perf_counter() - snapshot.time if stats.num_steps else None,
    }


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(service: Service, request: Request) -> Response:
    return JSONResponse(openapi.document(service.limits, request.scope.get("root_path", "")))


async def _models(service: Service, request: Request) -> Response:
    card = _model_card(service)
    return json_response(schemas.ModelList(data=[card], first_id=card.id, last_id=card.id))


async def _model(service: Service, request: Request) -> Response:
    service.check_model(request.path_params["model"])
    return json_response(_model_card(service))


def _model_card(service: Service) -> schemas.ModelCard:
    name, created = service.settings.model_name, service.created
    return schemas.ModelCard(
        id=name,
        display_name=name,
        created=created,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        max_model_len=service.max_model_len,
    )


def _router_infos(service: Service) -> tuple[schemas.ModelInfo, schemas.ServerInfo]:
    """Return the data about the model and the server that SGLang's router requests."""
    name = service.settings.model_name
    model = schemas.ModelInfo(
        model_path=name,  # do not reveal the path of the folder to clients
        served_model_name=name,
        max_context_length=service.max_model_len,
        vocab_size=service.vocab_size,
    )
    # `ServerInfo` has no field `model_path`, because SGLang's router would try to load a tokenizer
    # from that path.
    server = schemas.ServerInfo(
        served_model_name=name,
        version=__version__,
        max_running_requests=service.max_num_seqs,
        max_total_num_tokens=service.num_blocks * service.block_size,
    )
    return model, server


# Errors


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record = request.scope[RECORD]
    record.note_error(error.code, str(error))
    return error.response(request.scope["path"], record.request_id)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Do not use `request.url`, which parses the Host header and fails for some values.
    route = f"{request.method} {request.scope['path'][:100]}"
    message = {
        404: f"There is no {route}. {_advice(request)}",
        405: f"{route} is not allowed. Use {(error.headers or {}).get('Allow', 'POST')}.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers) if error.headers else None
    return await _api_error(request, ApiError(error.status_code, message, headers=headers))


def _advice(request: Request) -> str:
    """Return advice for the 404 error: a similar path that exists, or the list of all paths."""
    # Clients append a path to a base URL, so slashes or `/v1` may be missing or doubled.
    parts = [part for part in request.scope["path"].split("/") if part]
    path = "/" + "/".join(part for part, _ in itertools.groupby(parts))
    paths = [endpoint.path for endpoint in openapi.ENDPOINTS if endpoint.method == request.method]
    suggestion = next((candidate for candidate in (path, f"/v1{path}") if candidate in paths), None)
    return (
        "See /openapi.json for all routes." if suggestion is None else f"Did you mean {suggestion}?"
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    # Starlette raises the exception again after this response, so its traceback is logged. The
    # response bypasses `RequestLogMiddleware`, so the header X-Request-ID is added here.
    request_id = request.scope[RECORD].request_id
    headers = {"X-Request-ID": request_id}
    message = "Something went wrong in the server."
    error = ApiError(500, message, code="internal_error", headers=headers)
    return error.response(request.scope["path"], request_id)


# Startup


class Startup:
    """ASGI application that creates the service in a thread, and then serves its application.

    Until the service exists, ``/live`` returns 200, and all other paths return 503 with a text
    about the progress.

    Args:
      make: function that creates the service, for example by loading the model. It is called in a
        thread as ``make(report)``, and may call ``report(line)`` with a line about its progress.

    Attributes:
      service: the engine and its settings; None until `make` has returned.
      detail: the last line that `make` reported.
      on_failure: function that is called in the event loop if the service cannot be created, or
        after its engine has failed.

    Example:
      >>> startup = Startup(lambda report: report("loading the model"))
      >>> startup.service is None, startup.detail
      (True, 'starting')
    """

    def __init__(self, make: Callable[[Callable[[str], None]], Service]):
        self._make = make
        self._future: concurrent.futures.Future[Service] = concurrent.futures.Future()
        self._is_ending = asyncio.Event()
        self._app: ASGIApp = RequestLogMiddleware(self._answer_early)
        self._failure: BaseException | None = None
        self.service: Service | None = None
        self.detail = "starting"
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def is_making(self) -> bool:
        """Whether `make` is still running. Its thread cannot be stopped."""
        return not self._future.done()

    def check(self) -> None:
        """Raise the exception because of which there is no service, if any."""
        if self._future.done():
            self._future.result()
        if self._failure is not None:
            raise self._failure

    @property
    def has_failed_engine(self) -> bool:
        """Whether the engine of the service has failed. The log has the exception."""
        return self.service is not None and self.service.engine.failure is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or the startup and shutdown events of the ASGI lifespan."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_early(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that arrives before the service exists."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == "/live":
            response = JSONResponse({"status": "ok"})
        elif path in ("/health", "/ready"):
            response = JSONResponse({"status": "starting", "detail": self.detail}, 503)
        else:
            response = ApiError(
                503,
                f"The server is starting: {self.detail}.",
                code="starting",
                headers={"Retry-After": str(_RETRY_AFTER)},
            ).response()
        await response(scope, receive, send)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        """Create the service in a thread and run its engine, until the server shuts down."""
        await receive()
        # Use a daemon thread, so that a running compilation does not keep the process alive.
        threading.Thread(target=self._run_make, name="paged_jax startup", daemon=True).start()
        serving = asyncio.create_task(self._serve())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._is_ending.set()
        if self.is_making:
            serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await send({"type": "lifespan.shutdown.complete"})

    def _run_make(self) -> None:
        try:
            self._future.set_result(self._make(self._report))
        except BaseException as error:
            self._future.set_exception(error)

    def _report(self, line: str) -> None:
        self.detail = line

    async def _serve(self) -> None:
        try:
            # `shield` prevents that cancelling this task also cancels the future, which the thread
            # sets later.
            service = await asyncio.shield(asyncio.wrap_future(self._future))
            app = create_app(service)
        except Exception as error:
            self._failure = error
            self.on_failure()
            return
        service.on_failure = self.on_failure
        async with service.lifespan(self):
            self.service, self._app = service, app
            await self._is_ending.wait()
