"""Runs an engine for asyncio: requests of many tasks share it, and each task streams its own.

A thread runs the engine, and nothing else touches it. Tasks send commands to the thread, and get
outputs through their own event loops.
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

from paged_jax.arguments import names_arguments
from paged_jax.engine.engine import Engine
from paged_jax.engine.request_factory import Prompt
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request

# Attempts at a step: one that fails may have lacked memory for a moment.
_MAX_ATTEMPTS = 3

_logger = logging.getLogger(__name__)


class EngineClosedError(RuntimeError):
    """The engine takes no requests: it was closed, or it has failed, with what is the cause."""


@names_arguments
class AsyncEngine:
    """Runs an `Engine` in the background. Use it in an ``async with`` statement.

    Args:
      engine: an engine that nothing else uses from now on.
      on_step: function that is called as ``on_step(engine, requests)`` in the engine's thread,
        after each step with the requests that got tokens or ended, and after each abort with that
        request. It may read them until it returns; tasks get their outputs afterwards. Its first
        exception is logged, later ones are ignored.

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
        # Calls that the thread makes between two steps; None stops it.
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._thread: threading.Thread | None = None
        # Held while a command is sent: only while the thread still reads them.
        self._lock = threading.Lock()
        self._is_running = False
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        state = "failed" if self._failure else "running" if self._is_running else "not running"
        return f"AsyncEngine({self._engine!r}, {state})"

    async def __aenter__(self) -> "AsyncEngine":
        if self._thread is not None:
            raise RuntimeError(
                "AsyncEngine: it must be closed, its last step over, before it is entered again."
            )
        self._commands, self._failure = queue.SimpleQueue(), None
        self._thread = threading.Thread(
            target=self._run_thread, name="paged_jax engine", daemon=True
        )
        self._is_running = True
        self._thread.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, timeout: float | None = None) -> None:
        """End all requests as they stand, and stop the thread.

        Args:
          timeout: seconds to wait for the step that runs. After them the thread continues alone; it
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

    @functools.partial(names_arguments, forwards_to=Engine.add_request)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        final_only: bool = False,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt: yield its output whenever it has new tokens; the last is finished.

        A task that is cancelled, or that stops iterating, ends its request and frees its blocks
        within a step.

        Args:
          prompt: a text or a dict, as for `Engine.add_request`.
          sampling_params: how tokens are chosen; by default as the model's authors recommend.
          final_only: whether only the finished output is yielded, which costs less.
          **options: request_id, priority, timeout, explain and client of `Engine.add_request`.

        Raises:
          ValueError: as `Engine.add_request`.
          EngineClosedError: the engine is closed, or has failed.
        """
        stream = _Stream(asyncio.get_running_loop(), is_final_only=final_only)
        # The request also waits until the thread adds it.
        options.setdefault("arrival_time", time.perf_counter())
        try:
            await self._call(self._add, stream, prompt, sampling_params, options)
            while not stream.is_done:
                yield await stream.get()
        finally:
            if not stream.is_done:  # without waiting, which a cancelled task must not do
                with contextlib.suppress(EngineClosedError):
                    self._send(_Command(self._cancel, (stream,)))

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine's thread; None if there was none."""
        return self._failure

    async def abort(self, request_id: str) -> None:
        """End a request as it stands; a task that iterates over it gets the tokens so far."""
        await self._call(self._abort, request_id)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Return ``function(engine)``, called between two steps: for stats, weights, the cache."""
        return await self._call(function, self._engine)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        command = _Command(function, args, asyncio.get_running_loop())
        self._send(command)
        return await command.future

    def _send(self, command: "_Command") -> None:
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

    def _run_thread(self) -> None:
        try:
            while self._drain_commands():
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
            # First of all: an engine that has failed may not even be able to end its requests.
            for stream in streams.values():
                _call_in(stream.loop, functools.partial(stream.set, self._closed()))
            self._streams.clear()
        for request_id in streams:
            with contextlib.suppress(Exception):
                self._abort(request_id)

    def _step(self) -> None:
        """Run a step. One that fails loses no request, so it is tried again."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                requests = self._engine.advance()
                break
            except Exception:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
        self._notify(requests)
        self._deliver(requests)

    def _notify(self, requests: list[Request]) -> None:
        """Call `on_step`. Its exceptions must not end the requests."""
        if self._on_step is None:
            return
        try:
            self._on_step(self._engine, requests)
        except Exception:
            if not self._is_on_step_reported:
                _logger.exception("AsyncEngine: on_step failed. This is reported only once.")
            self._is_on_step_reported = True

    def _drain_commands(self) -> bool:
        """Run all commands, and wait for one if the engine is idle. False: the thread must stop."""
        while True:
            is_idle = self._engine.is_sleeping or not self._engine.has_unfinished
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()

    def _add(
        self, stream: "_Stream", prompt: Prompt, params: SamplingParams | None, options: Any
    ) -> None:
        if stream.is_cancelled:
            return
        stream.request_id = self._engine.add_request(prompt, params, **options)
        self._streams[stream.request_id] = stream

    def _cancel(self, stream: "_Stream") -> None:
        """End the request of a task that takes no more outputs.

        It may not have been added yet, or have ended, and its id may be another's by now.
        """
        stream.is_cancelled = True
        if stream.request_id is not None and self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._abort(stream.request_id)

    def _abort(self, request_id: str) -> None:
        request = self._engine.end(request_id)
        if request is not None:
            self._notify([request])
            self._deliver([request])

    def _deliver(self, requests: list[Request]) -> None:
        """Give tasks their outputs. Each loop is woken once, because that is a system call."""
        updates: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for request in requests:
            stream = self._streams.get(request.request_id)
            if stream is not None and (request.is_finished or not stream.is_final_only):
                updates.setdefault(stream.loop, []).append((stream, request.output()))
                if request.is_finished:
                    del self._streams[request.request_id]
        for loop, items in updates.items():
            _call_in(loop, lambda items=items: [stream.set(item) for stream, item in items])


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop may be closed by now
        loop.call_soon_threadsafe(function)


class _Stream:
    """Carries the outputs of one request from the engine's thread into an event loop.

    It holds the newest output only, which includes those before it. So a slow task misses nothing,
    and outputs do not pile up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_final_only: bool):
        self.is_done = False  # the task has the last output
        self.is_final_only = is_final_only
        # For the thread alone:
        self.is_cancelled = False
        self.request_id: str | None = None
        self.loop = loop
        self._newest: RequestOutput | Exception | None = None
        self._news: asyncio.Future[None] | None = None  # what the task waits for

    def set(self, item: RequestOutput | Exception) -> None:
        """Take the newest output, or the exception that ends them. In the loop's thread."""
        self._newest = item
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def get(self) -> RequestOutput:
        """Wait for an output that was not returned yet, and return the newest."""
        if self._newest is None:
            self._news = self.loop.create_future()
            await self._news
        item, self._newest = self._newest, None
        if not isinstance(item, RequestOutput):
            self.is_done = True
            assert item is not None
            raise item
        self.is_done = item.finished
        return item


class _Command:
    """A call for the thread to make, and the future of the task that waits for it, if one does."""

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

    def run(self) -> None:
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
