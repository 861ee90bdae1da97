"""What goes on in the engine, noted after each step, for whoever asks without stopping it."""

import dataclasses
import time

from paged_jax.engine import Engine, EngineStats
from paged_jax.outputs import RequestOutput
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
        # When there was last nothing to do, or a step.
        self._last_progress = time.perf_counter()

    def on_step(self, engine: Engine, outputs: list[RequestOutput]) -> None:
        """To be called in the engine's thread after each step, and what else ends requests."""
        self.reading = Reading.of(engine)
        self._last_progress = self.reading.time
        self.metrics.observe(outputs, self.reading.time)

    def on_arrival(self, is_first: bool) -> None:
        """A request has come; the first one after a rest starts the clock."""
        if is_first:
            self._last_progress = time.perf_counter()

    def is_stalled(self, num_active: int) -> bool:
        """Whether requests are there, and nothing has happened for too long."""
        seconds = time.perf_counter() - self._last_progress
        return num_active > 0 and seconds > self._stall_seconds
