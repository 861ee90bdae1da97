"""`CacheRecorder`: records cache events while a cache page is open."""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

from paged_jax.cache_map import CacheMap, changes, snapshot
from paged_jax.engine.engine import Engine

# Maximum number of cache events that are stored for the cache page. The oldest are dropped.
_MAX_EVENTS = 1000
# If a snapshot of the cache takes fewer seconds than this, one is taken after every step. Otherwise
# (the cache is large), snapshots are less frequent, so that they use at most a fifth of the time.
# Events between two snapshots that cancel each other are then missed.
_QUICK = 0.01
# A cache page is assumed to be closed if it has sent no request for this many seconds.
_OPEN_SECONDS = 3.0


class CacheRecorder:
    """Recorder of cache events, see `cache_map.changes`. It records while a page is open."""

    def __init__(self) -> None:
        self._last: CacheMap | None = None
        self._num_requests = 0
        self._cost = 0.0
        self._last_request = self._snapshot_time = float("-inf")
        self._counter = itertools.count(1)
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MAX_EVENTS)

    @contextlib.contextmanager
    def keep_recording(self) -> Iterator[None]:
        """Treat the cache page as open during the ``with`` statement, which handles its request.

        Otherwise, recording would stop if a long step delayed the response.
        """
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._last_request = time.monotonic()

    def observe(self, engine: Engine) -> None:
        """Record the cache events of a step. This is called in the engine's thread."""
        now = time.monotonic()
        if not self._num_requests and now - self._last_request > _OPEN_SECONDS:
            # Drop the snapshot: a comparison with it later would give one event for many steps.
            self._last = None
        elif self._cost < _QUICK or now - self._snapshot_time > 4 * self._cost:
            self._take(engine)

    def state(self, engine: Engine, since: int) -> tuple[CacheMap, list[dict[str, Any]]]:
        """Return the current `CacheMap`, and the events with numbers above `since`.

        This is called in the engine's thread.
        """
        cache_map = self._take(engine)
        return cache_map, [event for event in self._events if event["number"] > since]

    def _take(self, engine: Engine) -> CacheMap:
        start = time.monotonic()
        cache_map = snapshot(engine)
        if self._last is not None:
            for event in changes(self._last, cache_map):
                fields = dataclasses.asdict(event)
                self._events.append({"number": next(self._counter), "time": time.time(), **fields})
        self._last, self._snapshot_time = cache_map, time.monotonic()
        self._cost = self._snapshot_time - start
        return cache_map
