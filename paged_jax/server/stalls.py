"""`StallDetector`: whether the engine has work but no longer makes progress, for ``/health``."""

import contextlib
import time
from collections.abc import Callable, Iterator

from paged_jax.server.reading import Reading


class StallDetector:
    """Measures the time since the engine last finished a step or had no work.

    Args:
      reading: the engine's counts before its first step.
      stall_seconds: seconds that the engine may have work without finishing a step.
      is_excused: function that says whether the engine compiles a program, which is progress
        however long it takes, or sleeps.
    """

    def __init__(
        self, reading: Reading, stall_seconds: float, is_excused: Callable[[], bool] = bool
    ):
        self._stall_seconds = stall_seconds
        self._is_excused = is_excused
        self._has_unfinished = reading.has_unfinished
        # Requests on their way to the engine, which takes none while it is stuck in a step.
        self._num_arriving = 0
        # The last moment at which a step ended or there was nothing to do.
        self._last_progress = reading.time

    def observe(self, reading: Reading) -> None:
        """Record that a step ended. Called in the engine's thread."""
        self._has_unfinished = reading.has_unfinished
        self._last_progress = reading.time

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """Count a request as work from before the engine takes it until its first output."""
        if not self._has_work:
            self._last_progress = time.perf_counter()
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @property
    def is_stalled(self) -> bool:
        """Whether there is work, and no step has ended for longer than `stall_seconds`."""
        if self._is_excused():
            self._last_progress = time.perf_counter()
        seconds = time.perf_counter() - self._last_progress
        return self._has_work and seconds > self._stall_seconds

    @property
    def _has_work(self) -> bool:
        return self._num_arriving > 0 or self._has_unfinished
