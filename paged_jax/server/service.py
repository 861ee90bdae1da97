"""`Service`: the engine, the settings and the requests in progress, shared by all routes.

It decides which requests run and how they end: `fair_quota` for their places, `disconnection` for
clients that leave.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeVar

from starlette.types import Receive

from paged_jax.async_engine import AsyncEngine, EngineClosedError
from paged_jax.engine.engine import Engine
from paged_jax.engine.sleep import EngineAsleepError
from paged_jax.models.text.reasoning import select_format
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tool_grammars import ToolGrammars
from paged_jax.scheduler.request import Request
from paged_jax.server.api_error import ApiError, engine_stopped, shutting_down, sleeping
from paged_jax.server.cache_recorder import CacheRecorder
from paged_jax.server.disconnection import CancelOnDisconnect
from paged_jax.server.fair_quota import FairQuota
from paged_jax.server.limits import Limits
from paged_jax.server.metrics import Metrics
from paged_jax.server.snapshot import EngineSnapshot, SnapshotHistory
from paged_jax.server.stall_detector import StallDetector

T = TypeVar("T")

# Maximum seconds after a failure of the engine until all clients have received the error.
_LAST_ERRORS = 5.0
# Maximum seconds to wait for the last step at shutdown. A step that hangs must not block the exit.
_LAST_STEP = 10.0
# At shutdown, seconds between two checks of whether all requests have finished.
_POLL = 0.05
# Maximum characters of a short text, which takes about ten milliseconds to tokenize.
_SHORT = 2**14
# Maximum characters of a tiny text. Tokenizing it takes less time than a switch of threads.
_TINY = 2**8
# Maximum number of tokens and log-probabilities in a response that is built in the event loop. Each
# of them takes a few microseconds.
_SMALL = 2048


class Client(NamedTuple):
    """The sender of a request, and its permissions.

    Attributes:
      name: identity of the client for quotas: a hash of its API key, or its network address if no
        keys are required.
      salt: cache salt of the API key; empty if no keys are required.
      is_known: whether the client has sent a valid key, or no keys are required.
      is_admin: whether the client may see the prompts of all clients.
      may_change: whether the client may change the engine. It must have sent the admin key as a
        bearer token, because browsers never send bearer tokens on their own.
    """

    name: str = ""
    salt: str = ""
    is_known: bool = False
    is_admin: bool = False
    may_change: bool = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
      model_name: name of the model in requests and responses.
      limits: limits on requests.
      api_keys: valid API keys. All routes except the probes and the chat page require one of them.
        If empty, no key is required.
      admin_key: key that the cache page and the routes that change the engine require. If None,
        these routes are disabled, and the page is available only if no API keys are required.
      allowed_hosts: accepted names in the ``Host`` header; None accepts all names.
      stall_seconds: ``/health`` reports a stalled engine if it has work but finishes no step for
        this many seconds.
      profile_folder: folder for profiles; None disables the routes that record them.
      reasoning_format: format of the reasoning in answers of chats. ``"auto"`` detects it from the
        chat template, ``"none"`` leaves the reasoning in the content, and other values are names of
        `reasoning.FORMATS`.
      ping_seconds: seconds without events after which a stream sends a ping; 0 for no pings.
      allowed_origins: web sites whose pages may use the server (CORS), such as
        ``https://example.com``; ``*`` allows all sites.
    """

    model_name: str
    limits: Limits = Limits()
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin_key: str | None = dataclasses.field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] | None = None
    stall_seconds: float = 60.0
    profile_folder: str | None = None
    reasoning_format: str = "auto"
    ping_seconds: float = 0.0
    allowed_origins: tuple[str, ...] = ()


class Service:
    """The engine, the settings of the server, and the requests in progress.

    Args:
      engine: the engine, which nothing else may use from now on.
      settings: settings of the server.

    Attributes:
      on_failure: function that is called in the event loop after the engine has failed and all
        clients have received the error. Only a new process can serve again.
    """

    def __init__(self, engine: Engine, settings: Settings):
        self.settings = settings
        self.on_failure: Callable[[], None] = lambda: None
        self.limits = settings.limits.for_context(engine.max_model_len)
        # Properties of the engine that never change, so that any thread may read them.
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.grammars = engine.grammars
        self.tool_grammars = ToolGrammars(self.grammars)
        template = None if engine.tokenizer is None else engine.tokenizer.chat_template
        self.reasoning_format = select_format(settings.reasoning_format, template)
        self.max_token_chars = (
            math.inf if engine.tokenizer is None else engine.tokenizer.max_token_chars
        )
        self.max_model_len = engine.max_model_len
        self.max_length = engine.max_length
        self.vocab_size = engine.config.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        self.generation_config = engine.generation_config
        self.token_bias = engine.token_bias
        self.num_blocks = engine.num_blocks
        self.block_size = engine.block_size
        self.max_num_seqs = engine.max_num_seqs
        self.load_params = engine.load_params
        self._sleep_level = lambda: engine.sleep_level
        # Observers of the engine's steps.
        snapshot = EngineSnapshot.of(engine)
        cache_config = {
            "block_size": engine.block_size,
            "num_gpu_blocks": engine.num_blocks,
            "cache_dtype": engine.cache.groups[0].pools.k.dtype,
            "enable_prefix_caching": engine.enable_prefix_caching,
        }
        self.metrics = Metrics(settings.model_name, cache_config, snapshot)
        self.stalls = StallDetector(
            snapshot, settings.stall_seconds, lambda: engine.is_compiling or engine.is_sleeping
        )
        self.cache_recorder = CacheRecorder()
        self.history = SnapshotHistory(snapshot)
        self.engine = AsyncEngine(
            engine, on_step=self._on_step, on_failure=self._drain_after_failure
        )
        # Requests in progress.
        self.created = int(time.time())
        self.is_draining = False
        self._max_samples = engine.max_num_seqs + self.limits.max_queue
        self._samples = FairQuota("samples", limit="max_queue", num_places=self._max_samples)
        max_streams = self.limits.max_streams
        self._streams = FairQuota("streams", limit="max_streams", num_places=max_streams)
        self._is_stopping = asyncio.Event()
        self._connected: set[CancelOnDisconnect] = set()
        self._rendering = asyncio.Lock()
        self._encoders = [
            ThreadPoolExecutor(1, f"paged_jax encode {length}") for length in ("short", "long")
        ]
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object):
        """Run the engine during the ``with`` statement. Use this as the ASGI lifespan."""
        del app
        self._loop = asyncio.get_running_loop()
        await self.engine.__aenter__()
        try:
            yield
        finally:
            for encoder in self._encoders:
                encoder.shutdown(wait=False, cancel_futures=True)
            await self.engine.close(timeout=_LAST_STEP)

    # State of the engine

    def _on_step(self, engine: Engine, requests: list[Request]) -> None:
        self.observe(engine, requests)
        if not self.snapshot.sleep_level:
            self.cache_recorder.observe(engine)

    def observe(self, engine: Engine, requests: Iterable[Request] = ()) -> None:
        """Take a snapshot of the engine, and record it in metrics, history and stall detector.

        This is called in the engine's thread after each step and after other changes.

        Args:
          engine: the engine.
          requests: the requests that got new tokens or ended.
        """
        snapshot = EngineSnapshot.of(engine)
        self.stalls.observe(snapshot)
        self.metrics.observe(snapshot, requests)
        self.history.observe(snapshot)

    @property
    def snapshot(self) -> EngineSnapshot:
        """The newest snapshot of the engine."""
        return self.metrics.snapshot

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, see `Engine.sleep`."""
        return self._sleep_level() > 0

    @property
    def unreadiness(
        self,
    ) -> Literal["failed", "draining", "sleeping", "stalled", "full"] | None:
        """Reason why load balancers should send no requests now; None if there is none."""
        if self.engine.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if self.is_sleeping:
            return "sleeping"
        if self.stalls.is_stalled:
            return "stalled"
        return "full" if self._samples.is_full else None

    # Shutdown. Signal handlers and other threads may call `drain` and `stop`.

    def drain(self, timeout: float, grace: float, callback: Callable[[], None]) -> None:
        """Reject new requests from now on, and let the requests in progress finish.

        Args:
          timeout: seconds after which unfinished requests end with an error.
          grace: minimum seconds before `callback` is called.
          callback: function that is called in the event loop when all requests have ended.
        """
        if self._loop is None or self.is_draining:
            return
        self.is_draining = True
        asyncio.run_coroutine_threadsafe(self._wait_and_call(timeout, grace, callback), self._loop)

    def _drain_after_failure(self) -> None:
        """Wait until all clients have received the error, and call `on_failure`."""
        self.drain(_LAST_ERRORS, 0.0, lambda: self.on_failure())

    async def _wait_and_call(
        self, timeout: float, grace: float, callback: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(timeout, self._stop)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_stopping.wait(), grace)
        while self.num_active and not self._is_stopping.is_set():
            await asyncio.sleep(_POLL)
        callback()

    def stop(self) -> None:
        """End the requests in progress with an error."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._is_stopping.set()
        for connection in list(self._connected):
            connection.end(shutting_down())

    async def stopped(self) -> None:
        """Wait until `stop` is called, or until the timeout of `drain` has passed."""
        await self._is_stopping.wait()

    # Requests

    def check_model(self, name: str | None) -> None:
        """Raise a 404 `ApiError` if `name` is neither None nor the name of the served model."""
        model_name = self.settings.model_name
        if name is not None and name != model_name:
            raise ApiError(
                404,
                f"The model {name[:100]!r} does not exist; {model_name!r} is served.",
                param="model",
                code="model_not_found",
            )

    @property
    def num_active(self) -> int:
        """Number of samples in progress."""
        return self._samples.total

    def check_room(self, num_samples: int, client: Client) -> None:
        """Raise an `ApiError` if a client may not add `num_samples` samples now."""
        if self.is_sleeping:
            raise sleeping()
        if num_samples > self._max_samples:
            raise ApiError(
                400,
                f"The number of prompts times n must be at most {self._max_samples} (max_queue + "
                f"max_num_seqs), got {num_samples}.",
                code="max_queue_exceeded",
            )
        self._samples.check(client.name, num_samples)

    @contextlib.contextmanager
    def admit(self, num_samples: int, client: Client, *, is_stream: bool) -> Iterator[None]:
        """Count a request's samples, and its stream, during the ``with`` statement.

        Raises:
          ApiError: the client has too many samples or streams, or see `check_room`.
        """
        self.check_room(num_samples, client)
        with self._samples.take(client.name, num_samples), contextlib.ExitStack() as stack:
            if is_stream:
                stack.enter_context(self._streams.take(client.name, 1))
            yield

    def while_connected(self, receive: Receive) -> "CancelOnDisconnect":
        """Return an async context manager that cancels its body if the client disconnects.

        It then raises `ClientGone`. It also cancels its body if the server stops, and then raises
        an `ApiError`.

        Args:
          receive: the ASGI `receive` function of a request with a body that has been read.
        """
        if self._is_stopping.is_set():
            raise shutting_down()
        return CancelOnDisconnect(receive, self._connected)

    async def call_engine(self, receive: Receive, function: Callable[[Engine], T]) -> T:
        """Call ``function(engine)`` in the engine's thread between two steps. Return its result.

        Args:
          receive: see `while_connected`.
          function: the function.

        Raises:
          ClientGone: the client disconnected before the result was there.
          ApiError: the engine sleeps or has stopped, or the server stops.
        """
        try:
            async with self.while_connected(receive):
                return await self.engine.call(function)
        except EngineClosedError:
            raise engine_stopped() from None
        except EngineAsleepError:
            raise sleeping() from None

    # Work outside the event loop

    async def encode(self, num_chars: float, function: Callable[[], T]) -> T:
        """Call a function that tokenizes text, in a thread if needed. Return its result.

        For tiny texts, it is called in the event loop. There are two threads, one for short and one
        for long texts, so that short texts do not wait for long texts.

        Args:
          num_chars: number of characters of the text; infinity for other work that may take long.
          function: a function that shares no mutable state with other requests.
        """
        if num_chars <= _TINY:
            return function()
        encoder = self._encoders[num_chars > _SHORT]
        return await asyncio.get_running_loop().run_in_executor(encoder, function)

    async def render(self, num_entries: int, function: Callable[[], T]) -> T:
        """Call a function that builds a response or events, in a thread if that takes long.

        Only one such thread runs at a time, because several threads would compete with the streams
        for Python's interpreter lock.

        Args:
          num_entries: number of tokens and log-probabilities in the response.
          function: a function that shares no mutable state with other requests.

        Returns:
          The result of `function`.
        """
        if num_entries <= _SMALL:
            return function()
        async with self._rendering:
            return await asyncio.to_thread(function)
