"""Cancellation of the work for a client that disconnects."""

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGone(Exception):
    """Exception for a client that disconnected before it received its response."""


class CancelOnDisconnect:
    """Async context manager that cancels its body if the client disconnects.

    `end` cancels the body for other reasons, such as a shutdown. Like `asyncio.timeout`, this class
    cancels the task that entered it, and raises the reason as an exception at the end of the body.
    The body does not run in a separate task, which would delay each event of a stream.

    Args:
      receive: the ASGI `receive` function of a request with a body that has been read.
      active: a set of the context managers that are active. This object is a member of the set
        while it is active.
    """

    def __init__(self, receive: Receive, active: "set[CancelOnDisconnect]"):
        self._receive = receive
        self._active = active
        self._reason: Exception | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        self._active.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._active.discard(self)
        self._watcher.cancel()
        # If the task was also cancelled from outside, it must stay cancelled.
        if self._reason is not None and self._task.uncancel() <= self._num_cancels:
            if kind is asyncio.CancelledError:
                raise self._reason from None

    def end(self, reason: Exception) -> None:
        """Cancel the body of the ``async with`` statement, which then raises `reason`.

        Later calls have no effect.
        """
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGone())
