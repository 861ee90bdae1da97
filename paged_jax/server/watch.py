"""Follows the cache from step to step, for as long as somebody looks."""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

from paged_jax.cache_map import CacheMap, changes, snapshot
from paged_jax.engine.engine import Engine

# Events that are kept for pages that come back for them.
_MAX_EVENTS = 1000
# Seconds that a look may take after each step. Of a large cache it takes longer, which everybody
# waits for: then it takes a fifth of the time, and misses what comes and goes in between.
_QUICK = 0.01
# Seconds after which a page that has not asked again counts as closed.
_WATCHED = 3.0


class CacheWatch:
    """Looks at the cache after each step, but only while somebody looks at the page."""

    def __init__(self) -> None:
        self._last: CacheMap | None = None
        self._num_asking = 0
        self._cost = 0.0
        self._asked = self._looked = float("-inf")
        self._numbers = itertools.count(1)
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MAX_EVENTS)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Somebody looks, or waits to: the step that runs may take a while."""
        self._num_asking += 1
        try:
            yield
        finally:
            self._num_asking -= 1
            self._asked = time.monotonic()

    def on_step(self, engine: Engine) -> None:
        """In the engine's thread, after each step."""
        now = time.monotonic()
        if not self._num_asking and now - self._asked > _WATCHED:
            self._last = None  # what has changed meanwhile is not what has just happened
        elif self._cost < _QUICK or now - self._looked > 4 * self._cost:
            self._look(engine)

    def state(self, engine: Engine, since: int) -> tuple[CacheMap, list[dict[str, Any]]]:
        """The map, and the events with a number above `since`. In the engine's thread."""
        cache_map = self._look(engine)
        return cache_map, [event for event in self._events if event["number"] > since]

    def _look(self, engine: Engine) -> CacheMap:
        start = time.monotonic()
        cache_map = snapshot(engine)
        if self._last is not None:
            for event in changes(self._last, cache_map):
                fields = dataclasses.asdict(event)
                self._events.append({"number": next(self._numbers), "time": time.time(), **fields})
        self._last, self._looked = cache_map, time.monotonic()
        self._cost = self._looked - start
        return cache_map
