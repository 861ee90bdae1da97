"""`CacheRecorder`: what changes in the cache from step to step, while the cache page is open."""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

from paged_jax.cache_map import CacheMap, changes, snapshot
from paged_jax.engine.engine import Engine

# Events kept for pages that ask for those since their last request.
_MAX_EVENTS = 1000
# Seconds that a snapshot after each step may take. One of a large cache takes longer, and delays
# every request: snapshots then take at most a fifth of the time, and miss what comes and goes
# between two of them.
_QUICK = 0.01
# Seconds after its last request at which a page counts as closed.
_OPEN_SECONDS = 3.0


class CacheRecorder:
    """Takes snapshots of the cache between steps, and keeps the changes between them as events.

    It does nothing while no page asks.
    """

    def __init__(self) -> None:
        self._last: CacheMap | None = None
        self._num_asking = 0
        self._cost = 0.0
        self._asked = self._taken = float("-inf")
        self._numbers = itertools.count(1)
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MAX_EVENTS)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Keep recording while a page waits for its answer, which a long step may delay."""
        self._num_asking += 1
        try:
            yield
        finally:
            self._num_asking -= 1
            self._asked = time.monotonic()

    def observe(self, engine: Engine) -> None:
        """Record a step. Called in the engine's thread."""
        now = time.monotonic()
        if not self._num_asking and now - self._asked > _OPEN_SECONDS:
            self._last = None  # changes since an old snapshot are not those of this step
        elif self._cost < _QUICK or now - self._taken > 4 * self._cost:
            self._take(engine)

    def state(self, engine: Engine, since: int) -> tuple[CacheMap, list[dict[str, Any]]]:
        """The cache now, and the events numbered above `since`. Called in the engine's thread."""
        cache_map = self._take(engine)
        return cache_map, [event for event in self._events if event["number"] > since]

    def _take(self, engine: Engine) -> CacheMap:
        start = time.monotonic()
        cache_map = snapshot(engine)
        if self._last is not None:
            for event in changes(self._last, cache_map):
                fields = dataclasses.asdict(event)
                self._events.append({"number": next(self._numbers), "time": time.time(), **fields})
        self._last, self._taken = cache_map, time.monotonic()
        self._cost = self._taken - start
        return cache_map
