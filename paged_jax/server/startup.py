"""`Startup`: answers probes from the first moment on, and serves once there is an engine."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_jax.server.app import create_app
from paged_jax.server.errors import ApiError
from paged_jax.server.observer import Observer
from paged_jax.server.service import Service

# Seconds after which a client may ask again.
_RETRY_AFTER = 5


class Startup:
    """An ASGI application that is there before its service is.

    Until then ``/live`` is answered with 200, and everything else with 503 and what is being done.

    Args:
      make: function that makes the service; called in a thread, with a function that takes a line
        about what is being done.

    Attributes:
      service: the engine and how it is served; None until it is made.
      on_failure: function that is called, in the event loop, if `make` raises.

    Example:
      >>> startup = Startup(lambda note: note("loading the model"))
      >>> startup.service is None, startup.detail
      (True, 'starting')
    """

    def __init__(self, make: Callable[[Callable[[str], None]], Service]):
        self._make = make
        self._made: concurrent.futures.Future[Service] = concurrent.futures.Future()
        self._is_ending = asyncio.Event()
        self._app: ASGIApp | None = None
        self.service: Service | None = None
        self.detail = "starting"
        self.on_failure: Callable[[], None] = lambda: None
        self._waiting = Observer(self._answer)

    @property
    def is_making(self) -> bool:
        """Whether the thread that makes the service runs; it cannot be stopped."""
        return not self._made.done()

    def check(self) -> None:
        """Raise what `make` has raised, if it has failed."""
        if self._made.done():
            self._made.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._waiting(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._not_yet(scope)(scope, receive, send)

    def _not_yet(self, scope: Scope) -> JSONResponse:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == "/live":
            return JSONResponse({"status": "ok"})
        if path in ("/health", "/ready"):
            return JSONResponse({"status": "starting", "detail": self.detail}, 503)
        return ApiError(
            503,
            f"The server is starting: {self.detail}.",
            code="starting",
            headers={"Retry-After": str(_RETRY_AFTER)},
        ).response()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Make the service beside the event loop, and run its engine until the server ends."""
        await receive()
        # A daemon: a compiler that is at work must not keep the process alive.
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
            self._made.set_result(self._make(self._note))
        except BaseException as error:
            self._made.set_exception(error)

    def _note(self, line: str) -> None:
        self.detail = line

    async def _serve(self) -> None:
        try:
            # Shielded, as the thread sets the result even if nobody waits for it any more.
            service = await asyncio.shield(asyncio.wrap_future(self._made))
        except Exception:
            self.on_failure()
            return
        async with service.lifespan(self):
            self.service, self._app = service, create_app(service)
            await self._is_ending.wait()
