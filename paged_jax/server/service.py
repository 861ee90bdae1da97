"""`Service`: what the routes share: the engine, the settings, and the requests in progress."""

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
from paged_jax.engine.loading import find_eos_token_ids
from paged_jax.engine.sleep import EngineAsleepError
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tool_grammars import ToolGrammars
from paged_jax.scheduler.request import Request
from paged_jax.server.cache_recorder import CacheRecorder
from paged_jax.server.connected import Connected
from paged_jax.server.errors import ApiError
from paged_jax.server.limits import Limits
from paged_jax.server.metrics import CacheConfig, Metrics
from paged_jax.server.reading import Reading
from paged_jax.server.recent import Recent
from paged_jax.server.shares import Shares
from paged_jax.server.stalls import StallDetector

T = TypeVar("T")
# Seconds to wait for the last step at the end: one that is stuck must not keep the server alive.
_LAST_STEP = 10.0
# Characters of a text that is tokenized in some ten milliseconds, and of one that is tokenized in
# less time than it takes to hand it to another thread.
_SHORT, _TINY = 2**14, 2**8
# Seconds between two looks at what still runs.
_POLL = 0.05
# Tokens and log-probabilities in an answer that is made while streams wait: microseconds each.
_SMALL = 2048


class Client(NamedTuple):
    """Who sends a request.

    Attributes:
      name: what is the same in all requests of a client: of its API key or, where none is needed,
        its address.
      salt: the cache salt of its API key; empty without keys.
    """

    name: str = ""
    salt: str = ""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
      model_name: the model's name in requests and answers.
      limits: bounds of requests.
      api_keys: keys of which every route but ``/health`` needs one; if empty, none is needed.
      admin_key: the key of the cache page; if None, the page is open without API keys and closed
        with them.
      allowed_hosts: accepted names in the ``Host`` header; None accepts any.
      stall_seconds: seconds without a finished step, in spite of work, that make ``/health`` report
        a stalled engine.
      profile_folder: where profiles are written; None closes the routes that record them.
    """

    model_name: str
    limits: Limits = Limits()
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin_key: str | None = dataclasses.field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] | None = None
    stall_seconds: float = 60.0
    profile_folder: str | None = None


class Service:
    """An engine and the requests that are served with it.

    Args:
      engine: the engine, which belongs to the service from now on.
      settings: the server's settings.
    """

    def __init__(self, engine: Engine, settings: Settings):
        self.settings = settings
        self.limits = settings.limits.for_context(engine.max_model_len)
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.grammars = engine.grammars
        self.tool_grammars = ToolGrammars(self.grammars)
        self.max_token_chars = (
            math.inf if engine.tokenizer is None else engine.tokenizer.max_token_chars
        )
        self.max_model_len = engine.max_model_len
        self.max_length = engine.max_length
        self.vocab_size = engine.config.vocab_size
        self.eos_token_ids = find_eos_token_ids(
            engine.config, engine.tokenizer, engine.generation_config
        )
        self.generation_config = engine.generation_config
        self.token_bias = engine.token_bias
        self.num_blocks = engine.num_blocks
        self.block_size = engine.block_size
        self.max_num_seqs = engine.max_num_seqs
        reading = Reading.of(engine)
        cache_config = CacheConfig(
            engine.block_size,
            engine.num_blocks,
            str(engine.cache.groups[0].k.dtype),
            engine.enable_prefix_caching,
        )
        self.metrics = Metrics(settings.model_name, cache_config, reading)
        self.stalls = StallDetector(
            reading, settings.stall_seconds, lambda: engine.is_compiling or engine.is_sleeping
        )
        self.load_params = engine.load_params
        self._sleep_level = lambda: engine.sleep_level
        self.cache_recorder = CacheRecorder()
        self.recent = Recent(reading)
        self.engine = AsyncEngine(engine, on_step=self._on_step)
        self.created = int(time.time())
        self.is_draining = False
        # A batch and a queue.
        self._room = engine.max_num_seqs + self.limits.max_queue
        self._samples = Shares("samples", limit="max_queue", most=self._room)
        most = self.limits.max_streams
        self._streams = Shares("streams", limit="max_streams", most=most)
        self._is_stopping = asyncio.Event()
        self._connected: set[Connected] = set()
        self._rendering = asyncio.Lock()
        self._encoders = [
            ThreadPoolExecutor(1, f"paged_jax encode {length}") for length in ("short", "long")
        ]
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object):
        """Run the engine while the application runs; use it as the ASGI lifespan."""
        del app
        self._loop = asyncio.get_running_loop()
        await self.engine.__aenter__()
        try:
            yield
        finally:
            for encoder in self._encoders:
                encoder.shutdown(wait=False, cancel_futures=True)
            await self.engine.close(timeout=_LAST_STEP)

    def _on_step(self, engine: Engine, requests: list[Request]) -> None:
        reading = self.note(engine, requests)
        if not reading.sleep_level:
            self.cache_recorder.observe(engine)

    def note(self, engine: Engine, requests: Iterable[Request] = ()) -> Reading:
        """Read the engine for probes and metrics. Called in its thread, after each change."""
        reading = Reading.of(engine)
        self.stalls.observe(reading)
        self.metrics.observe(reading, requests)
        self.recent.observe(reading)
        return reading

    # Shutdown: a signal handler may call both

    def drain(self, timeout: float, grace: float, then: Callable[[], None]) -> None:
        """Refuse new requests, and let those in progress finish.

        Args:
          timeout: seconds that they have to finish.
          grace: seconds before `then` is called, at least.
          then: function that is called, in the event loop, when they have ended.
        """
        if self._loop is None or self.is_draining:
            return
        self.is_draining = True
        asyncio.run_coroutine_threadsafe(self._drained(timeout, grace, then), self._loop)

    async def _drained(self, timeout: float, grace: float, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(timeout, self._stop)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_stopping.wait(), grace)
        while self.num_active and not self._is_stopping.is_set():
            await asyncio.sleep(_POLL)
        then()

    def stop(self) -> None:
        """End the requests in progress with an error."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._is_stopping.set()
        for each in list(self._connected):
            each.end(shutting_down())

    async def stopped(self) -> None:
        """Wait until `stop` was called or the time to drain has passed."""
        await self._is_stopping.wait()

    # Requests

    def check_model(self, name: str | None) -> None:
        """Raise an `ApiError` if a request names a model that is not served."""
        served = self.settings.model_name
        if name is not None and name != served:
            raise ApiError(
                404,
                f"The model {name[:100]!r} does not exist; {served!r} is served.",
                param="model",
                code="model_not_found",
            )

    @property
    def num_active(self) -> int:
        """Number of samples in progress."""
        return self._samples.total

    def check_room(self, num_samples: int, client: Client) -> None:
        """Raise an `ApiError` if so many more samples would exceed the batch and the queue."""
        if self.is_sleeping:
            raise sleeping()
        if num_samples > self._room:
            raise ApiError(
                400,
                f"prompts times n must be at most {self._room} (max_queue and the batch), "
                f"got {num_samples}.",
                code="max_queue_exceeded",
            )
        self._samples.check(client.name, num_samples)

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return self._sleep_level() > 0

    @property
    def unreadiness(
        self,
    ) -> Literal["failed", "draining", "sleeping", "stalled", "full"] | None:
        """Why no requests should be sent here for now: a word for probes; None if they should."""
        if self.engine.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if self.is_sleeping:
            return "sleeping"
        if self.stalls.is_stalled:
            return "stalled"
        return "full" if self._samples.is_full else None

    @contextlib.contextmanager
    def admit(self, num_samples: int, client: Client, *, is_stream: bool) -> Iterator[None]:
        """Count the samples of a request, and its stream, while it is served.

        Raises:
          ApiError: there are too many samples or streams.
        """
        self.check_room(num_samples, client)
        with self._samples.take(client.name, num_samples), contextlib.ExitStack() as stack:
            if is_stream:
                stack.enter_context(self._streams.take(client.name, 1))
            yield

    async def call_engine(self, receive: Receive, function: Callable[[Engine], T]) -> T:
        """Return ``function(engine)``, called between two steps, unless the client leaves before.

        Raises:
          ClientGone: the client has left.
          ApiError: the engine or the server stops.
        """
        try:
            async with self.while_connected(receive):
                return await self.engine.call(function)
        except EngineClosedError:
            raise engine_stopped() from None
        except EngineAsleepError:
            raise sleeping() from None

    async def encode(self, receive: Receive, num_chars: float, function: Callable[[], T]) -> T:
        """Return ``function()``, which turns text into tokens, unless the client leaves before.

        In one of two threads, unless it is done at once: short texts do not wait for long ones.

        Args:
          receive: the ASGI channel of the client.
          num_chars: characters of the text; infinity for other work that may take long.
          function: a function that shares no mutable state with other requests.
        """
        if num_chars <= _TINY:
            return function()
        lane = self._encoders[num_chars > _SHORT]
        async with self.while_connected(receive):
            return await asyncio.get_running_loop().run_in_executor(lane, function)

    @staticmethod
    def is_small(size: int) -> bool:
        """Whether an answer of so many tokens and log-probabilities is made at once."""
        return size <= _SMALL

    async def render(self, function: Callable[[], T]) -> T:
        """Return ``function()``, which makes an answer that is not small: in a thread.

        One thread at a time: several would compete with the streams for Python's interpreter lock.

        Args:
          function: a function that shares no mutable state with other requests.
        """
        async with self._rendering:
            return await asyncio.to_thread(function)

    def while_connected(self, receive: Receive) -> Connected:
        """A context whose work is cancelled if the client leaves or the server stops.

        Leaving it raises:
          ClientGone: the client has left.
          ApiError: the server stops.
        """
        if self._is_stopping.is_set():
            raise shutting_down()
        return Connected(receive, self._connected)


def shutting_down() -> ApiError:
    """The answer to a request that arrives during shutdown, or is not finished by its end."""
    return ApiError(
        503,
        "The server is shutting down.",
        code="shutting_down",
        headers={"Retry-After": "10", "Connection": "close"},
    )


def sleeping() -> ApiError:
    """The answer to a request that arrives while the engine sleeps."""
    return ApiError(
        503,
        "The engine sleeps, and takes requests again after POST /wake_up.",
        code="sleeping",
        headers={"Retry-After": "10"},
    )


def engine_stopped() -> ApiError:
    """The answer to a request that the engine can no longer run."""
    return ApiError(503, "The engine has stopped.", code="engine_stopped")
