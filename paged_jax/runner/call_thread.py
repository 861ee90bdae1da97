"""`CallThread`: makes calls that would block the main thread until the device has computed."""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


class CallThread(concurrent.futures.ThreadPoolExecutor):
    """Thread that calls functions in the order of submission, until this object is deleted.

    Usually, JAX queues a program and the call returns immediately. On GPUs, the call of a program
    with a data-dependent loop returns only after the loop, because the host fetches the loop
    condition after each iteration. This thread makes such calls, so that the main thread can go on.

    Example:
      >>> thread = CallThread()
      >>> thread.submit(lambda: 1 + 1).result()
      2
    """

    def __init__(self) -> None:
        super().__init__(1, "paged_jax caller")

    def submit(self, fn: Any, /, *args: Any, **options: Any) -> concurrent.futures.Future[Any]:
        """Call `fn` after all earlier calls, with the JAX settings of the submitting thread."""
        settings = _settings()

        def call() -> Any:
            with _with_settings(settings):
                return fn(*args, **options)

        return super().submit(call)


# Maps names of JAX settings to the context managers that change them. Each thread has its own
# values of these settings. Only settings that affect calls are listed: if their values in the
# `CallThread` and in the main thread differed, JAX would compile programs again, compute other
# results, or refuse transfers.
_CONTEXTS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_enable_x64": jax.enable_x64,
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
}


def _settings() -> dict[str, Any]:
    """Return the JAX settings of this thread."""
    return {name: getattr(jax.config, name) for name in _CONTEXTS}


@contextlib.contextmanager
def _with_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Return a context manager that applies `settings` to this thread."""
    with contextlib.ExitStack() as stack:
        for name, value in _settings().items():
            if settings[name] != value:
                stack.enter_context(_CONTEXTS[name](settings[name]))
        yield
