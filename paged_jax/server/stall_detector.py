"""`StallDetector`: decides whether the engine has work but finishes no step."""

import contextlib
import time
from collections.abc import Callable, Iterator

from paged_jax.server.snapshot import EngineSnapshot


class StallDetector:
    """Detector of a stalled engine, for ``/health``: it has work but finishes no step.

    Args:
      snapshot: snapshot taken before the first step.
      stall_seconds: the engine is stalled if it finishes no step for this many seconds.
      is_excused: function that returns whether the engine sleeps or compiles a program. During this
        time, the engine is never reported as stalled.
    """

    def __init__(
        self, snapshot: EngineSnapshot, stall_seconds: float, is_excused: Callable[[], bool] = bool
    ):
        self._stall_seconds = stall_seconds
        self._is_excused = is_excused
        self._has_unfinished = snapshot.has_unfinished
        # Number of submitted requests that have no output yet. They are counted here because
        # `_has_unfinished` is from the last step: if the engine hangs, it does not include requests
        # that were submitted later.
        self._num_arriving = 0
        # The last time at which a step finished or the engine was idle.
        self._last_progress = snapshot.time

    def observe(self, snapshot: EngineSnapshot) -> None:
        """Record that a step has finished. This is called in the engine's thread."""
        self._has_unfinished = snapshot.has_unfinished
        self._last_progress = snapshot.time

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """Treat the engine as having work during the ``with`` statement.

        The statement must enclose the time from the submission of a request to its first output.
        """
        if not self._has_work:
            self._last_progress = time.perf_counter()
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has work, but has finished no step for `stall_seconds`."""
        if self._is_excused():
            self._last_progress = time.perf_counter()
        seconds = time.perf_counter() - self._last_progress
        return self._has_work and seconds > self._stall_seconds

    @property
    def _has_work(self) -> bool:
        return self._num_arriving > 0 or self._has_unfinished
