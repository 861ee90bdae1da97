"""Lets an engine change once at a time, and recovers it from a change that is cut short."""

import contextlib
import weakref
from collections.abc import Callable, Generator
from typing import Any

from paged_jax.engine.transfers import own_transfers


class ChangeGuard:
    """Guards the changes of an engine's state, such as a step.

    A change that is cut short, by Ctrl-C for example, leaves the device in a state that is not
    known. The engine is recovered at once or, if that is cut short too, before the next change.

    Args:
      restart: makes a state that is known, from what the host knows.
    """

    def __init__(self, restart: Callable[[], None]):
        self._restart = restart
        self._is_broken = False  # a change or a recovery began and did not end
        self._postponed: list[Callable[[], None]] = []
        self._latest: Callable[[], Any] = lambda: None  # the generator of the latest change

    @property
    def _is_changing(self) -> bool:
        # Asked of the change itself: a flag could be left behind by one that is cut short.
        latest = self._latest()
        return latest is not None and latest.gi_frame is not None

    def change(self) -> contextlib.AbstractContextManager[None]:
        """A context for a change of state.

        Raises:
          RuntimeError: another one is under way.
        """
        if self._is_changing:
            raise RuntimeError("Engine: a call must end before the next begins, got one within it.")
        while self._postponed:
            self._postponed.pop()()
        change = self._change()
        self._latest = weakref.ref(change)
        return contextlib.contextmanager(lambda: change)()

    def _change(self) -> Generator[None]:
        with own_transfers():
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
        """Restart from what the host knows."""
        self._is_broken = True
        self._restart()
        self._is_broken = False

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call a function now or, while a change is under way, before the next one."""
        if self._is_changing:
            self._postponed.append(action)
        else:
            action()
