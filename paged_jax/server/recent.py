"""`Recent`: a few counts of the last minutes, for curves on a page that is opened only now."""

import collections
import threading
from typing import NamedTuple

from paged_jax.server.reading import Reading

# Seconds between two samples, and for which they are kept: 240 of them, whatever the load.
_INTERVAL, _KEPT = 0.5, 120.0


class Sample(NamedTuple):
    """Counts at one moment; totals since the engine was built, where nothing else is said.

    Attributes:
      time: the moment, in seconds of ``time.perf_counter()``.
      generated: tokens drawn.
      queried: prompt tokens looked up in the prefix cache.
      cached: prompt tokens found there.
      waiting: samples that wait for a slot at this moment.
      used: blocks that samples hold at this moment.
    """

    time: float
    generated: int
    queried: int
    cached: int
    waiting: int
    used: int

    @classmethod
    def of(cls, reading: Reading) -> "Sample":
        """What a reading says."""
        stats = reading.stats
        return cls(
            reading.time,
            stats.num_generated_tokens,
            stats.num_queried_tokens,
            stats.num_cached_tokens,
            reading.num_waiting,
            reading.num_used_blocks,
        )


class Recent:
    """Keeps a sample for each half second in which the engine did something.

    Args:
      reading: the engine's counts before its first step.
    """

    def __init__(self, reading: Reading):
        self._latest = Sample.of(reading)
        self._samples = collections.deque([self._latest], maxlen=round(_KEPT / _INTERVAL))
        self._lock = threading.Lock()

    def observe(self, reading: Reading) -> None:
        """Note a step. Called in the engine's thread."""
        before, self._latest = self._latest, Sample.of(reading)
        if reading.time - self._samples[-1].time < _INTERVAL:
            return
        with self._lock:
            if reading.time - before.time > 2 * _INTERVAL:
                # Nothing happened up to here: else a rate would be that of the whole pause.
                self._samples.append(before)
                self._samples.append(before._replace(time=reading.time - _INTERVAL))
            self._samples.append(self._latest)

    def samples(self, now: float) -> list[Sample]:
        """The samples of the last two minutes, and the counts as they are now, the oldest first.

        Args:
          now: seconds of ``time.perf_counter()``.
        """
        with self._lock:
            kept = [*self._samples, self._latest, self._latest._replace(time=now)]
        # Of a moment that was noted twice, one: a rate divides by the time between two.
        distinct = {each.time: each for each in kept}.values()
        return [each for each in distinct if each.time >= now - _KEPT]
