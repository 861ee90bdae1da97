"""What goes on in the engine, noted after each step, for whoever asks without stopping it."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from paged_jax.engine.engine import Engine, EngineStats
from paged_jax.scheduler.request import Request
from paged_jax.server.metrics import Metrics


@dataclasses.dataclass(frozen=True)
class Reading:
    """The engine after a step.

    Attributes:
      time: of ``time.perf_counter()``.
      has_unfinished: whether there is more to do.
      num_running: samples in a slot.
      num_waiting: samples that wait for one.
      num_used_blocks: held by samples.
      stats: totals.
    """

    time: float
    has_unfinished: bool
    num_running: int
    num_waiting: int
    num_used_blocks: int
    stats: EngineStats

    @classmethod
    def of(cls, engine: Engine) -> "Reading":
        sequences = engine.sequences
        num_running = sum(sequence.slot is not None for sequence in sequences)
        return cls(
            time=time.perf_counter(),
            has_unfinished=engine.has_unfinished,
            num_running=num_running,
            num_waiting=len(sequences) - num_running,
            num_used_blocks=round(engine.cache_use * engine.num_blocks),
            stats=engine.stats,
        )


class Monitor:
    """The last reading, and metrics of what came before it.

    Args:
      engine: before it runs.
      metrics: what is observed of each output.
      stall_seconds: work and no step for longer than this means that something is wrong.
    """

    def __init__(self, engine: Engine, metrics: Metrics, stall_seconds: float):
        self.metrics = metrics
        self.reading = Reading.of(engine)
        self._stall_seconds = stall_seconds
        self._num_arriving = 0
        # When there was last nothing to do, or a step.
        self._last_progress = time.perf_counter()

    def on_step(self, engine: Engine, requests: list[Request]) -> None:
        """To be called in the engine's thread after each step, and what else ends requests."""
        self.reading = Reading.of(engine)
        self._last_progress = self.reading.time
        self.metrics.observe(requests, self.reading.time)

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """While a request is handed to the engine, which may be stuck."""
        if not self._has_work:
            self._last_progress = time.perf_counter()
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has work, and nothing has happened for too long."""
        seconds = time.perf_counter() - self._last_progress
        return self._has_work and seconds > self._stall_seconds

    @property
    def _has_work(self) -> bool:
        return self._num_arriving > 0 or self.reading.has_unfinished
