# pyright: strict, reportUnknownMemberType=false
"""`AsyncEngine`: an engine in a background thread, for asyncio tasks that stream outputs.

Only this thread uses the engine. Tasks send commands to the thread through a queue, and the thread
passes outputs to the event loop of each task.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from paged_jax.arguments import names_arguments
from paged_jax.engine.engine import Engine
from paged_jax.engine.request_factory import Prompt
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request

# Maximum number of attempts to run a step. A step may fail once because device memory is short.
_MAX_ATTEMPTS = 3

_logger = logging.getLogger(__name__)


class EngineClosedError(RuntimeError):
    """The engine accepts no requests: it was closed, or it failed with the error `__cause__`."""


@names_arguments
class AsyncEngine:
    """Engine in a background thread. Use it in an ``async with`` statement.

    Args:
      engine: an engine that nothing else uses from now on.
      on_step: function that is called as ``on_step(engine, requests)`` in the engine's thread,
        after each step and after each abort. `requests` has the requests that got new tokens or
        ended. They must not be used after `on_step` has returned. Tasks get their outputs after
        that. If `on_step` raises exceptions, the first is logged and the others are ignored.
      on_failure: function that is called without arguments in the engine's thread, after an error
        has ended the thread and all tasks have got it as the `__cause__` of their exceptions.

    A step that fails is logged with its traceback and tried again. If it fails three times, the
    engine stops.

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
        on_failure: Callable[[], None] = lambda: None,
    ):
        self._engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._is_on_step_reported = False
        # Commands that the thread runs between two steps. The value None stops the thread.
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._thread: threading.Thread | None = None
        # Protects `_is_running`: no command may enter the queue after the thread has stopped.
        self._lock = threading.Lock()
        self._is_running = False
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        state = "failed" if self._failure else "running" if self._is_running else "not running"
        return f"AsyncEngine({self._engine!r}, {state})"

    async def __aenter__(self) -> "AsyncEngine":
        if self._thread is not None:
            raise RuntimeError(
                "AsyncEngine: the engine must be closed before `async with` enters it again, got "
                "an engine whose thread still runs. Call close() without a timeout first."
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
        """Abort all requests and stop the thread. Tasks get outputs with the tokens so far.

        Args:
          timeout: maximum seconds to wait for the step that is running; None for no limit. After a
            timeout, the thread stops when its step ends, and it does not keep the process alive.
            Call `close` again to wait for it.
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
        on_added: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt: yield its output whenever it has new tokens, until it is finished.

        If the task is cancelled or stops iterating, the request is aborted and its blocks are freed
        after the current step.

        Args:
          prompt: a text or a dict, see `Engine.add_request`.
          sampling_params: sampling parameters; `Engine.get_default_sampling_params` by default.
          final_only: whether to yield only the finished output, which is cheaper.
          on_added: function that is called when the engine has accepted the request. After that, no
            ValueError is raised.
          **options: further arguments of `Engine.add_request`.

        Raises:
          ValueError: see `Engine.add_request`.
          EngineClosedError: the engine is closed or has failed.
        """
        stream = _Stream(asyncio.get_running_loop(), is_final_only=final_only)
        # Set the arrival time here, so that it includes the wait until the thread adds the request.
        options.setdefault("arrival_time", time.perf_counter())
        try:
            await self._call(self._add, stream, prompt, sampling_params, options)
            on_added()
            while not stream.is_done:
                yield await stream.get()
        finally:
            if not stream.is_done:  # do not await, because a cancelled task must not wait
                with contextlib.suppress(EngineClosedError):
                    self._send(self._cancel, stream)

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the engine's thread; None if the thread has not failed."""
        return self._failure

    async def abort(self, request_id: str) -> None:
        """Abort a request. The task that iterates over it gets an output with the tokens so far."""
        await self._call(self._abort, request_id)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Call ``function(engine)`` in the engine's thread between two steps. Return its result."""
        return await self._call(function, self._engine)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.wrap_future(self._send(function, *args))

    def _send(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Queue ``function(*args)`` for the engine's thread, and return the future of its result.

        Raises:
          EngineClosedError: the engine is closed or has failed.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        # Mark the future as running, so that a cancelled task cannot cancel its command.
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._is_running:
                raise self._closed()
            self._commands.put(_Command(function, args, future))
        return future

    def _closed(self) -> "EngineClosedError":
        state = "was closed" if self._failure is None else "has failed"
        error = EngineClosedError(
            f"AsyncEngine: the engine must be running, got an engine that {state}."
        )
        error.__cause__ = self._failure
        return error

    # The methods below run in the engine's thread.

    def _run_thread(self) -> None:
        try:
            while self._drain_commands():
                self._step()
        except BaseException as error:
            self._failure = error
            _logger.critical("AsyncEngine: the engine has failed and stops.", exc_info=error)
        with self._lock:
            self._is_running = False
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.future.set_exception(self._closed())
        streams = dict(self._streams)
        if self._failure is not None:
            # Pass the error to the tasks first, because the calls of `_abort` below may raise.
            for stream in streams.values():
                _call_in(stream.loop, functools.partial(stream.set, self._closed()))
            self._streams.clear()
        for request_id in streams:
            with contextlib.suppress(Exception):
                self._abort(request_id)
        if self._failure is not None:
            self._on_failure()

    def _step(self) -> None:
        """Run a step of the engine, call `on_step`, and pass the outputs to the tasks."""
        requests = self._advance()
        self._notify(requests)
        self._deliver(requests)

    def _advance(self) -> list[Request]:
        """Run a step of the engine. Return the requests that got new tokens or ended.

        A step that fails is repeated, up to `_MAX_ATTEMPTS` attempts in all. This is safe, because
        a step that fails loses no request. `_run_thread` logs the exception of the last attempt.
        """
        for attempt in range(1, _MAX_ATTEMPTS):
            try:
                return self._engine.advance()
            except Exception:
                _logger.exception(
                    "AsyncEngine: attempt %d of %d to run a step failed. Trying again.",
                    attempt,
                    _MAX_ATTEMPTS,
                )
        return self._engine.advance()

    def _notify(self, requests: list[Request]) -> None:
        """Call `on_step`. Catch its exceptions, which must not end the engine's thread."""
        if self._on_step is None:
            return
        try:
            self._on_step(self._engine, requests)
        except Exception:
            if not self._is_on_step_reported:
                _logger.exception("AsyncEngine: on_step failed. This is reported only once.")
            self._is_on_step_reported = True

    def _drain_commands(self) -> bool:
        """Run all queued commands. While the engine is idle, wait for more commands.

        Return whether the thread should go on with a step: False if `close` was called.
        """
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
        """Abort the request of a task that no longer iterates.

        If the request has not been added yet, `_add` will not add it. If it has ended, nothing is
        aborted, because a newer request may have the same id.
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
        """Pass the outputs of requests to their tasks.

        All outputs for an event loop are passed in a single call, because each call wakes the loop,
        which takes a system call.
        """
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
    with contextlib.suppress(RuntimeError):  # the loop may be closed
        loop.call_soon_threadsafe(function)


class _Stream:
    """Channel that passes the outputs of a request from the engine's thread to a task.

    It stores only the newest output, which includes all earlier tokens. A slow task therefore
    misses no tokens, and memory does not grow.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_final_only: bool):
        self.is_done = False  # whether the task has received the last output or an exception
        self.is_final_only = is_final_only
        # Only the engine's thread uses `is_cancelled` and `request_id`.
        self.is_cancelled = False
        self.request_id: str | None = None
        self.loop = loop
        self._newest: RequestOutput | Exception | None = None
        self._news: asyncio.Future[None] | None = None  # set when there is a new output

    def set(self, item: RequestOutput | Exception) -> None:
        """Store the newest output, or the exception that ends the stream, and wake the task.

        Must be called in the thread of the event loop.
        """
        self._newest = item
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def get(self) -> RequestOutput:
        """Wait until there is an output that was not returned before. Return the newest output.

        If the stream ended with an exception, raise it.
        """
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


class _Command(NamedTuple):
    """Function that the engine's thread calls, its arguments, and the future for its result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: concurrent.futures.Future[Any]

    def run(self) -> None:
        try:
            self.future.set_result(self.function(*self.args))
        except Exception as error:
            self.future.set_exception(error)
