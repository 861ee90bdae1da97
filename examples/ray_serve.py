"""Serve a model with several replicas on Ray Serve. Each replica has an engine and a prefix cache.

    pip install "paged-jax[ray]"
    python examples/ray_serve.py --model DIR --replicas 2
    serve run ray_serve:build model=DIR replicas=2        # on a cluster, from this folder

On a cluster, Ray's configuration contains the address of its HTTP proxy. If it is not a loopback
address, add host=ADDRESS api-key=KEY.

With RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment, Ray's own ports are on the loopback
address too, except one port for each replica. Clients of other ports need the token of Ray.

    client -> Ray's HTTP proxy -> Ingress -> Replica: Engine, and the app of paged_jax.serve
                                          -> Replica

`Ingress` reads the body of a request and sends all requests whose prompts begin with the same
blocks to the same replica, because its cache has these blocks. It streams the response back. A
replica is ready when all of its programs are compiled. Ray restarts a replica that has died, or if
its engine has failed or stalled.

If a replica is full, the next replica on the ring of hashes gets its requests. If a replica dies,
its streams end; a request without any response yet is sent to another replica.
"""

# pyright: reportMissingImports=false
# Ray is not installed where types are checked.

import argparse
import asyncio
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_jax import Engine
from paged_jax.command_line import Parser, add_engine_arguments, engine_options
from paged_jax.server import Service, Settings, create_app
from paged_jax.server.affinity import NUM_BLOCKS, prompt_key, prompt_text
from paged_jax.server.api_error import ApiError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ROUTERS = {
    # Routes by the digest of the first blocks, which is passed as the session of a request.
    "hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    # Routes by a tree of the prompts of each replica. Ray can import it only with vLLM or SGLang.
    "prefix": "ray.serve.llm.request_router.PrefixCacheAffinityRouter",
}
# Parts of an ASGI scope that can be sent to another process.
_SCOPE = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
    "root_path", "headers", "client", "server",
)  # fmt: skip
# Seconds before each attempt to send a request. If a replica dies, Ray's router needs a moment to
# notice it.
_PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)


class Call(NamedTuple):
    """A request for a replica.

    Attributes:
      scope: the ASGI scope.
      body: the body.
      prompt: the text of the prompt, for Ray's prefix router. It must not be empty.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: str


class Replica:
    """Engine with the app of the server. A handle of Ray calls the app, without HTTP."""

    async def __init__(self, args: argparse.Namespace):
        # Compiling must not block the event loop, which answers Ray's health checks.
        service = await asyncio.to_thread(_make_service, args)
        self._service, self._app = service, create_app(service)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._running = contextlib.AsyncExitStack()
        await self._running.enter_async_context(service.lifespan(self._app))

    async def check_health(self) -> None:
        """Raise an error if Ray must restart this replica."""
        if self._service.engine.failure is not None or self._service.stalls.is_stalled:
            raise RuntimeError("The engine has failed or makes no progress.")

    async def answer(self, call: Call) -> AsyncIterator[Message]:
        """Run the app for a request and yield its messages."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        is_gone = asyncio.Event()
        body = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(call.scope, receive, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"].append((b"x-replica", self._name.encode()))
                yield message
        finally:
            # If the client has disconnected, the engine aborts its samples and frees the blocks.
            is_gone.set()
            await task


def _make_service(args: argparse.Namespace) -> Service:
    engine = Engine(**engine_options(args))
    engine.warmup()
    is_local = args.host in _LOOPBACK
    name = Path(args.model).resolve().name if args.model else "bundled"
    settings = Settings(
        model_name=args.served_model_name or name,
        api_keys=tuple(args.api_key or ()),
        allowed_hosts=_LOOPBACK if is_local else None,
    )
    return Service(engine, settings)


@serve.ingress()
class Ingress:
    """App behind Ray's HTTP proxy that selects a replica for each request."""

    def __init__(self, replicas: DeploymentHandle, args: argparse.Namespace):
        self._replicas = replicas.options(stream=True)
        self._num_blocks = args.prefix_blocks

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI app that Ray serves."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _live(receive, send)
            elif scope["type"] == "http":
                await self._answer(scope, receive, send)

        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        try:
            await self._forward(Call(plain, body, prompt_text(body) or " "), send)
        except BackPressureError:
            await _busy("All replicas are full.")(scope, receive, send)
        except _NoReplicaError:
            await _busy("The replica for this request has died.")(scope, receive, send)

    async def _forward(self, call: Call, send: Send) -> None:
        """Send the response of a replica. Retry if a replica dies before it sent anything."""
        replicas = self._replicas
        if key := prompt_key(call.body, num_blocks=self._num_blocks):
            replicas = replicas.options(session_id=key)
        answer = _Answer(send)
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            response: Any = replicas.answer.remote(call)
            try:
                async for message in response:
                    await answer.send(message)
                return
            except RayActorError:
                if answer.has_begun:
                    raise
            finally:
                response.cancel()
        raise _NoReplicaError


class _NoReplicaError(Exception):
    """Error of a request after every attempt ended with the death of a replica."""


class _Answer:
    """Response that delays its head until the body starts, so that a request can be retried."""

    def __init__(self, send: Send):
        self._send = send
        self._head: Message | None = None
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Ray's proxy adds the id of the request.
            headers = [field for field in message["headers"] if field[0] != b"x-request-id"]
            self._head = {**message, "headers": headers}
            return
        if not self.has_begun and self._head is not None:
            self.has_begun = True
            await self._send(self._head)
        await self._send(message)


async def _live(receive: Receive, send: Send) -> None:
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})


async def _read(receive: Receive) -> bytes:
    parts, is_more = [], True
    while is_more:
        message = await receive()
        parts.append(message.get("body", b""))
        is_more = message.get("more_body", False)
    return b"".join(parts)


def _busy(reason: str) -> Response:
    return ApiError(503, reason, code="overloaded", headers={"Retry-After": "1"}).response()


def build(options: dict[str, str]) -> serve.Application:
    """Return the application for ``serve run``, which passes command-line options as a dict."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return _application(_parser().parse_args(words))


def _application(args: argparse.Namespace) -> serve.Application:
    if args.host not in _LOOPBACK and not args.api_key:
        raise ValueError(f"--host must be a loopback address without --api-key, got {args.host}.")
    resources = {"num_cpus": args.cpus, "num_gpus": args.gpus}
    if args.tpus:
        resources["resources"] = {"TPU": args.tpus}
    replica = serve.deployment(Replica).options(
        num_replicas=args.replicas,
        # A full batch, and the same number of waiting requests. Others go to the next replica.
        max_ongoing_requests=2 * (args.max_num_seqs or 16),
        max_queued_requests=args.max_queue,
        request_router_config=_router(args.router),
        ray_actor_options=resources,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=30,
    )
    ingress = serve.deployment(Ingress).options(max_ongoing_requests=args.max_queue + 1000)
    return ingress.bind(replica.bind(args), args)


def _router(name: str) -> RequestRouterConfig:
    router: Any = _ROUTERS[name]
    try:
        importlib.import_module(router.rpartition(".")[0])
    except ImportError as error:
        raise ValueError(
            f"--router {name} must be one that Ray can import here: {error}."
        ) from None
    return RequestRouterConfig(request_router_class=router)


def _parser() -> Parser:
    parser = Parser(prog="ray_serve.py", description="Serve a model with replicas on Ray Serve.")
    add_engine_arguments(parser)
    group = parser.add_argument_group("replicas")
    add = group.add_argument
    add("--replicas", type=int, default=2, metavar="N", help="number of replicas; default: 2")
    add("--cpus", type=float, default=1, metavar="N", help="CPU cores of a replica; default: 1")
    add("--gpus", type=float, default=0, metavar="N", help="GPUs of a replica; default: 0")
    add("--tpus", type=float, default=0, metavar="N", help="TPU chips of a replica; default: 0")
    add("--router", choices=_ROUTERS, default="hash", help="routing policy; default: hash")
    add(
        "--prefix-blocks",
        type=int,
        default=NUM_BLOCKS,
        metavar="N",
        help=f"number of first blocks of a prompt that --router hash uses; default: {NUM_BLOCKS}",
    )
    add(
        "--max-queue",
        type=int,
        default=100,
        metavar="N",
        help="requests that wait if all replicas are full; others get 503; default: 100",
    )
    add("--address", help="address of a Ray cluster, such as auto; default: a new local cluster")
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; default: 8000")
    add(
        "--served-model-name",
        metavar="NAME",
        help="model name in requests and responses; default: the name of the model's folder",
    )
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="key that requests must have; may be repeated",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal."""
    parser = _parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> None:
    application = _application(args)
    if args.address is None:
        # All passed objects are small. By default, Ray would reserve a third of the memory.
        ray.init(address="local", include_dashboard=False, object_store_memory=100 << 20)
    else:
        ray.init(address=args.address)
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    try:
        serve.start(http_options=HTTPOptions(host=args.host, port=args.port))
        serve.run(application, name="paged_jax")
        print(f"Serving on http://{args.host}:{args.port}", file=sys.stderr, flush=True)
        is_over.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
