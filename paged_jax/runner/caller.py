"""Calls programs in a thread of its own, one after another, while the engine's thread goes on.

JAX queues a program and returns, as a rule. Not for one with a loop that ends by itself, on GPUs:
whoever calls it waits, because the host asks after each turn whether there is another one. So calls
that are to wait for the one before them are made here.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


class Caller:
    """A thread that makes calls in the order in which they come. It ends with the last reference.

    Example:
      >>> caller = Caller()
      >>> caller.submit(lambda: 1 + 1).result()
      2
    """

    def __init__(self) -> None:
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Call a function after all that were submitted before, under this thread's settings."""
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "paged_jax caller")
        settings = _settings()

        def call() -> Any:
            with _under(settings):
                return function()

        return self._thread.submit(call)


# Settings of a thread that programs depend on, and their contexts: else programs would be compiled
# anew, or mean something else, or their arguments would be stopped on their way.
_CONTEXTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_enable_x64": jax.enable_x64,
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
}


def _settings() -> dict[str, Any]:
    """The settings of this thread."""
    return {name: getattr(jax.config, name) for name in _CONTEXTS}


@contextlib.contextmanager
def _under(settings: dict[str, Any]) -> Iterator[None]:
    """A context in which this thread has the settings of another one."""
    with contextlib.ExitStack() as stack:
        for name, own in _settings().items():
            if settings[name] != own:
                stack.enter_context(_CONTEXTS[name](settings[name]))
        yield
