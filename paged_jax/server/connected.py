"""`Connected`: a context whose work is cancelled if the client leaves or the server stops."""

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGone(Exception):
    """The client has disconnected before it got its answer."""


class Connected:
    """A context for the task that answers a client: it ends early where there is no use in more.

    As `asyncio.timeout` does, it cancels the task within, and raises the reason when the task has
    left: `ClientGone`, or what `end` was called with. So the work needs no task of its own, for
    each of which a stream would pay at each of its events.

    Args:
      receive: the ASGI channel of the client, of which nothing but the end is still to come.
      others: all contexts that tasks are in; this one is among them from its start to its end.
    """

    def __init__(self, receive: Receive, others: "set[Connected]"):
        self._receive = receive
        self._others = others
        self._reason: Exception | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        self._others.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._others.discard(self)
        self._watcher.cancel()
        # Not if the task was cancelled by others as well.
        if self._reason is not None and self._task.uncancel() <= self._num_cancels:
            if kind is asyncio.CancelledError:
                raise self._reason from None

    def end(self, reason: Exception) -> None:
        """Cancel the work for a reason, unless it is cancelled already."""
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGone())
