"""`ChangeGuard`: one change of the engine's state at a time, and recovery if it is interrupted."""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Generator
from typing import Any

from paged_jax.engine.transfers import allow_host_transfers


class ChangeGuard:
    """Guard of the engine's state, which allows one change (such as a step) at a time.

    If a change is interrupted, the engine is restarted immediately. If the restart is interrupted
    too, the engine is restarted before the next change.

    Args:
      restart: function that discards the state on the device and queues the requests again.
    """

    def __init__(self, restart: Callable[[], None]):
        self._restart = restart
        self._is_broken = False  # True if a change or a restart has begun but not ended.
        self._postponed: list[Callable[[], None]] = []
        # Weak reference to the generator of the latest change: a function that returns it or None.
        self._latest: Callable[[], Any] = lambda: None

    @property
    def _is_changing(self) -> bool:
        # Inspect the generator of the change instead of a flag, because an interrupt could leave
        # the flag set. If it comes before the start, the traceback keeps a generator that never
        # starts.
        generator = self._latest()
        return generator is not None and inspect.getgeneratorstate(generator) in (
            inspect.GEN_RUNNING,
            inspect.GEN_SUSPENDED,
        )

    def change(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager inside which the caller may change the state.

        Raises:
          RuntimeError: another change has begun and not ended.
        """
        if self._is_changing:
            raise RuntimeError(
                "Engine: calls must not overlap, got a call during another call. Use AsyncEngine "
                "to add requests while the engine runs."
            )
        while self._postponed:
            self._postponed.pop()()
        change = self._change()
        self._latest = weakref.ref(change)
        return contextlib.contextmanager(lambda: change)()

    def _change(self) -> Generator[None]:
        with allow_host_transfers():
            if self._is_broken:
                self.recover()
            self._is_broken = True
            try:
                yield
            except BaseException:
                self.recover()
                raise
            self._is_broken = False

    def recover(self) -> None:
        """Call `restart`. If `restart` is interrupted, the next `change` calls it again."""
        self._is_broken = True
        self._restart()
        self._is_broken = False

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call `action` now or, if a change is in progress, just before the next change."""
        if self._is_changing:
            self._postponed.append(action)
        else:
            action()
