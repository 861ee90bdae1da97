"""An engine for asyncio: requests from many tasks share it, and each task streams its own.

The engine runs in a thread of its own, which alone touches it; tasks leave commands for it and are
given outputs through queues of their own event loops.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from paged_jax.engine.engine import Engine
from paged_jax.engine.inputs import Prompt
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request

# A step that fails may have lacked memory for a moment.
_MAX_ATTEMPTS = 3

_logger = logging.getLogger(__name__)


class EngineClosedError(RuntimeError):
    """The engine takes no requests: it was closed, or it has failed; the cause says how."""


class AsyncEngine:
    """Runs an `Engine` in the background. Use it in an ``async with`` statement.

    Args:
      engine: which nobody else uses from now on.
      on_step: called as ``on_step(engine, requests)`` in the engine's thread, after each step with
        the requests that got tokens or ended, and after each abort with that request. They are for
        reading, until it returns; tasks get their outputs afterwards. The first exception in it is
        logged, later ones are ignored.

    Example:
      >>> async def main():
      ...     async with AsyncEngine(Engine(max_num_seqs=2)) as engine:
      ...         params = SamplingParams(temperature=0, max_tokens=4)
      ...         async for output in engine.generate("It is", params):
      ...             pass
      ...         return output
      >>> output = asyncio.run(main())
      >>> output.finished, len(output.outputs[0].token_ids)
      (True, 4)
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[Engine, list[Request]], None] | None = None,
    ):
        self._engine = engine
        self._on_step = on_step
        self._is_on_step_reported = False
        # What the thread shall do next; None asks it to stop.
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._thread: threading.Thread | None = None
        # Commands are left only while the thread still looks for them.
        self._lock = threading.Lock()
        self._is_running = False
        self._failure: BaseException | None = None

    async def __aenter__(self) -> "AsyncEngine":
        if self._thread is not None:
            raise RuntimeError(
                "AsyncEngine: it must be closed, its last step over, before it is entered anew."
            )
        self._commands, self._failure = queue.SimpleQueue(), None
        self._thread = threading.Thread(target=self._work, name="paged_jax engine", daemon=True)
        self._is_running = True
        self._thread.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, timeout: float | None = None) -> None:
        """End all requests where they stand, and stop the thread.

        Args:
          timeout: seconds to wait for the step that runs; then the thread is left to itself. It
            does not keep the process alive. Close again to wait longer.
        """
        if self._thread is None:
            return
        with self._lock:
            self._is_running = False
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, timeout)
        if not self._thread.is_alive():
            self._thread = None

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        final_only: bool = False,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt: yield what there is whenever there is more, the last one finished.

        A task that is cancelled, or that leaves the iteration, ends its request and frees its
        blocks within a step.

        Args:
          prompt: a text or a dict, as for `Engine.add_request`.
          sampling_params: how tokens are chosen; by default as the model's authors recommend.
          final_only: yield the finished output only, which costs less.
          **options: request_id, priority, timeout, explain, as for `Engine.add_request`.

        Raises:
          ValueError: as `Engine.add_request`.
          EngineClosedError: the engine is closed, or has failed.
        """
        stream = _Stream(asyncio.get_running_loop(), is_final_only=final_only)
        # The time until the thread gets to it is the request's, too.
        options.setdefault("arrival_time", time.perf_counter())
        try:
            await self._call(self._add, stream, prompt, sampling_params, options)
            while not stream.is_done:
                yield await stream.get()
        finally:
            if not stream.is_done:  # nobody waits here: a cancelled task must not
                with contextlib.suppress(EngineClosedError):
                    self._leave(_Command(self._end, (stream,)))

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread before it was closed."""
        return self._failure

    async def abort(self, request_id: str) -> None:
        """End a request where it stands; whoever iterates over it gets what there is."""
        await self._call(self._abort, request_id)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Return ``function(engine)``, run between two steps: for stats, weights, the cache."""
        return await self._call(function, self._engine)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        command = _Command(function, args, asyncio.get_running_loop())
        self._leave(command)
        return await command.future

    def _leave(self, command: "_Command") -> None:
        with self._lock:
            if not self._is_running:
                raise self._closed()
            self._commands.put(command)

    def _closed(self) -> "EngineClosedError":
        state = "a closed one" if self._failure is None else "one that has failed"
        error = EngineClosedError(f"AsyncEngine: it must be running, got {state}.")
        error.__cause__ = self._failure
        return error

    # In the thread

    def _work(self) -> None:
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            self._failure = error
        with self._lock:
            self._is_running = False
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.refuse(self._closed())
        streams = dict(self._streams)
        if self._failure is not None:
            # Told first: an engine that has failed may not even be able to end its requests.
            for stream in streams.values():
                _call_in(stream.loop, functools.partial(stream.set, self._closed()))
            self._streams.clear()
        for request_id in streams:
            with contextlib.suppress(Exception):
                self._abort(request_id)

    def _step(self) -> None:
        """Run a step. The engine loses no request in one that fails, so it may try again."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                requests = self._engine.advance()
                break
            except Exception:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
        self._tell(requests)
        self._deliver(requests)

    def _tell(self, requests: list[Request]) -> None:
        """Let `on_step` know. Its mistakes are not the requests': they must go on."""
        if self._on_step is None:
            return
        try:
            self._on_step(self._engine, requests)
        except Exception:
            if not self._is_on_step_reported:
                _logger.exception("AsyncEngine: on_step failed. This is reported only once.")
            self._is_on_step_reported = True

    def _obey(self) -> bool:
        """Carry out what has been asked for, waiting where there is nothing to run; False: stop."""
        while True:
            is_idle = not self._engine.has_unfinished
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.carry_out()

    def _add(
        self, stream: "_Stream", prompt: Prompt, params: SamplingParams | None, options: Any
    ) -> None:
        if stream.is_left:
            return
        stream.request_id = self._engine.add_request(prompt, params, **options)
        self._streams[stream.request_id] = stream

    def _end(self, stream: "_Stream") -> None:
        """A task has left; its request may not have been added yet, or have ended, and its id may
        be another's by now."""
        stream.is_left = True
        if stream.request_id is not None and self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._abort(stream.request_id)

    def _abort(self, request_id: str) -> None:
        request = self._engine.end(request_id)
        if request is not None:
            self._tell([request])
            self._deliver([request])

    def _deliver(self, requests: list[Request]) -> None:
        """Wake each loop once, for all of its tasks that get something: that is a system call."""
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for request in requests:
            stream = self._streams.get(request.request_id)
            if stream is not None and (request.is_finished or not stream.is_final_only):
                parcels.setdefault(stream.loop, []).append((stream, request.output()))
                if request.is_finished:
                    del self._streams[request.request_id]
        for loop, parcel in parcels.items():
            _call_in(loop, lambda parcel=parcel: [stream.set(item) for stream, item in parcel])


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(function)


class _Stream:
    """The way of one request's outputs from the engine's thread into an event loop.

    It holds one item: an output holds those before it, so a task that is slow to take them misses
    nothing, and nothing piles up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_final_only: bool):
        self.is_done = False  # the task has all of it
        self.is_final_only = is_final_only
        # The thread's:
        self.is_left = False
        self.request_id: str | None = None
        self.loop = loop
        self._newest: RequestOutput | Exception | None = None
        self._has_news = asyncio.Event()

    def set(self, item: RequestOutput | Exception) -> None:
        """The newest output, or what has ended them. In the loop's thread."""
        self._newest = item
        self._has_news.set()

    async def get(self) -> RequestOutput:
        """The newest output, when there is one that was not taken."""
        await self._has_news.wait()
        self._has_news.clear()
        item = self._newest
        if not isinstance(item, RequestOutput):
            self.is_done = True
            assert item is not None
            raise item
        self.is_done = item.finished
        return item


class _Command:
    """A call for the thread to make, and perhaps somebody in an event loop who waits for it."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        self._function = function
        self._args = args
        self._loop = loop
        self.future: Any = None if loop is None else loop.create_future()

    def carry_out(self) -> None:
        try:
            result = self._function(*self._args)
        except Exception as error:
            self.refuse(error)
        else:
            self._answer("set_result", result)

    def refuse(self, error: Exception) -> None:
        self._answer("set_exception", error)

    def _answer(self, method: str, value: Any) -> None:
        def answer() -> None:
            if not self.future.cancelled():
                getattr(self.future, method)(value)

        if self._loop is not None:
            _call_in(self._loop, answer)
