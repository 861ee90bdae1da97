"""Serve a model with several replicas on Ray Serve, each an engine with a prefix cache of its own.

    pip install "paged-jax[ray]"
    python examples/ray_serve.py --model DIR --replicas 2
    serve run ray_serve:build model=DIR replicas=2        # on a cluster, from this folder

On a cluster Ray's own configuration says where its HTTP proxy listens; for any but a loopback
address, host=ADDRESS api-key=KEY tell the application.

With RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment Ray's own ports are on the loopback
address, too, but for one of each replica; others can be reached with the token that Ray makes.

    client -> Ray's HTTP proxy -> Ingress -> Replica: Engine, and the app of paged_jax.serve
                                          -> Replica

`Ingress` reads a request's body, sends all requests whose prompts begin alike to one replica, where
their blocks are, and passes the answer on as it comes. A replica counts as ready once all of its
programs are compiled; Ray restarts one that has died or whose engine has failed or stalls.

While a replica is full, the next one on the ring of hashes gets its requests. A replica that dies
takes its streams along; an answer of which nothing was sent yet is asked for again elsewhere.
"""

# pyright: reportMissingImports=false
# Ray is large, and not part of the environment in which types are checked.

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
from paged_jax.server.responses import ApiError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ROUTERS = {
    # By the digest of the first blocks, which is the session of a request.
    "hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    # By a tree of the prompts that each replica has had. Ray imports it beside vLLM or SGLang only.
    "prefix": "ray.serve.llm.request_router.PrefixCacheAffinityRouter",
}
# Parts of an ASGI scope that can be sent to another process.
_SCOPE = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
    "root_path", "headers", "client", "server",
)  # fmt: skip
# Seconds before each attempt at a request whose replica has died: Ray's router hears of it soon.
_PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)


class Call(NamedTuple):
    """A request on its way to a replica.

    Attributes:
      scope: what ASGI says of it, but for its body.
      body: its body.
      prompt: the text of its prompt, which is what Ray's prefix router reads; it may not be empty.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: str


class Replica:
    """An engine and the server's app, which is called through a handle and not through HTTP."""

    async def __init__(self, args: argparse.Namespace):
        # Ray calls a replica alive while its event loop answers: compiling must not block it.
        service = await asyncio.to_thread(_make_service, args)
        self._service, self._app = service, create_app(service)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._running = contextlib.AsyncExitStack()
        await self._running.enter_async_context(service.lifespan(self._app))

    async def check_health(self) -> None:
        """Raise if only a new process helps; Ray starts one then."""
        if self._service.engine.failure is not None or self._service.stalls.is_stalled:
            raise RuntimeError("The engine has failed or makes no progress.")

    async def answer(self, call: Call) -> AsyncIterator[Message]:
        """Run the app for one request, and yield what it sends."""
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
            # If the client has left, the engine ends its samples and gives back their blocks.
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
    """The app behind Ray's HTTP proxy, which picks a replica for each request."""

    def __init__(self, replicas: DeploymentHandle, args: argparse.Namespace):
        self._replicas = replicas.options(stream=True)
        self._num_blocks = args.prefix_blocks

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Ray serves over HTTP."""

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
            await self._pass_on(Call(plain, body, prompt_text(body) or " "), send)
        except BackPressureError:
            await _busy("All replicas are full.")(scope, receive, send)
        except _NoReplicaError:
            await _busy("The replica that was to answer has died.")(scope, receive, send)

    async def _pass_on(self, call: Call, send: Send) -> None:
        """Send what a replica answers; ask again as long as nothing of an answer was sent."""
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
    """Every attempt at a request ended with the death of its replica."""


class _Answer:
    """Keeps the head of an answer back until there is a body: until then another can be sent."""

    def __init__(self, send: Send):
        self._send = send
        self._head: Message | None = None
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Ray's proxy adds the request's ID.
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
    """The application for ``serve run``, which gives the options of the command line as a dict."""
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
        # A batch, and as many that are ready when there is room in it. Others go elsewhere.
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
    add("--replicas", type=int, default=2, metavar="N", help="engines; default: 2")
    add("--cpus", type=float, default=1, metavar="N", help="CPU cores of a replica; default: 1")
    add("--gpus", type=float, default=0, metavar="N", help="GPUs of a replica; default: 0")
    add("--tpus", type=float, default=0, metavar="N", help="TPU chips of a replica; default: 0")
    add("--router", choices=_ROUTERS, default="hash", help="how a replica is picked; default: hash")
    add(
        "--prefix-blocks",
        type=int,
        default=NUM_BLOCKS,
        metavar="N",
        help=f"blocks of a prompt's beginning by which --router hash picks; default: {NUM_BLOCKS}",
    )
    add(
        "--max-queue",
        type=int,
        default=100,
        metavar="N",
        help="requests that wait while all replicas are full; others get 503; default: 100",
    )
    add("--address", help="a Ray cluster, such as auto; default: one of its own, on this machine")
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; default: 8000")
    add("--served-model-name", metavar="NAME", help="default: the name of the model's folder")
    add("--api-key", action="append", metavar="KEY", help="key that every request needs")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal."""
    parser = _parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> None:
    application = _application(args)
    if args.address is None:
        # All of what is passed is small; Ray would otherwise take a third of the memory for it.
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
