"""Snapshots of the engine for other threads: counts, stalls, history, cache changes.

The engine's thread takes an `EngineSnapshot` after each step. Probes, metrics and the cache page
read the newest snapshot without waiting for the engine.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from paged_jax.cache_map import CacheMap, changes, snapshot
from paged_jax.engine.engine import Engine
from paged_jax.engine.stats import GroupUse
from paged_jax.scheduler.outputs import EngineStats, WaitReason

# Seconds between two snapshots of the history, and seconds that the history covers.
_INTERVAL, _HISTORY_SECONDS = 0.5, 120.0
# Maximum number of cache events kept for pages that poll them.
_MAX_EVENTS = 1000
# If a cache snapshot takes fewer seconds than this, one is taken after every step. Snapshots of a
# large cache are slower, and are taken less often, so that they use at most a fifth of the time.
# Changes that are undone between two snapshots are then missed.
_QUICK = 0.01
# Seconds after its last request at which a cache page counts as closed.
_OPEN_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """State of the engine after a step.

    Attributes:
      time: time of the snapshot, in seconds of ``time.perf_counter()``.
      has_unfinished: whether the engine is awake and has unfinished requests.
      num_running: number of samples that hold a slot.
      num_waiting: number of samples that wait for a slot.
      num_waiting_for: number of waiting samples by reason.
      sleep_level: 0 while the engine is awake, otherwise its sleep level.
      num_used_blocks: number of blocks held by samples.
      groups: block usage of each cache group.
      stats: the engine's totals since it was created.
    """

    time: float
    has_unfinished: bool
    num_running: int
    num_waiting: int
    num_waiting_for: Counter[WaitReason]
    sleep_level: int
    num_used_blocks: int
    groups: list[GroupUse]
    stats: EngineStats

    @classmethod
    def of(cls, engine: Engine) -> "EngineSnapshot":
        """Return a snapshot of an engine. Call it in the engine's thread."""
        sequences, groups = engine.sequences, engine.cache_groups
        waits: Counter[WaitReason] = Counter(
            [sequence.waits_for for sequence in sequences if sequence.slot is None]
        )
        return cls(
            time=time.perf_counter(),
            has_unfinished=engine.has_unfinished and not engine.is_sleeping,
            num_running=len(sequences) - waits.total(),
            num_waiting=waits.total(),
            num_waiting_for=waits,
            sleep_level=engine.sleep_level,
            num_used_blocks=groups[0].num_used,
            groups=groups,
            stats=engine.stats,
        )


class StallDetector:
    """Detector of an engine that has work but makes no progress, for ``/health``.

    Args:
      snapshot: snapshot taken before the first step.
      stall_seconds: seconds without a finished step, despite work, that count as a stall.
      is_excused: function that returns whether the engine sleeps or compiles a program, which may
        take any time.
    """

    def __init__(
        self, snapshot: EngineSnapshot, stall_seconds: float, is_excused: Callable[[], bool] = bool
    ):
        self._stall_seconds = stall_seconds
        self._is_excused = is_excused
        self._has_unfinished = snapshot.has_unfinished
        # Requests that the engine has not accepted yet. A stuck engine accepts none.
        self._num_arriving = 0
        # Time at which a step last finished or the engine was last idle.
        self._last_progress = snapshot.time

    def observe(self, snapshot: EngineSnapshot) -> None:
        """Record that a step has finished. Called in the engine's thread."""
        self._has_unfinished = snapshot.has_unfinished
        self._last_progress = snapshot.time

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """Return a context in which the engine counts as busy, from submission to first output."""
        if not self._has_work:
            self._last_progress = time.perf_counter()
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @property
    def is_stalled(self) -> bool:
        """Whether there is work and no step has finished for more than `stall_seconds`."""
        if self._is_excused():
            self._last_progress = time.perf_counter()
        seconds = time.perf_counter() - self._last_progress
        return self._has_work and seconds > self._stall_seconds

    @property
    def _has_work(self) -> bool:
        return self._num_arriving > 0 or self._has_unfinished


class SnapshotHistory:
    """Snapshots of the last two minutes, at most two per second.

    A cache page that is opened later draws its first curves from them.
    """

    def __init__(self, snapshot: EngineSnapshot):
        self._latest = snapshot
        self._kept = collections.deque([snapshot], maxlen=round(_HISTORY_SECONDS / _INTERVAL))
        self._lock = threading.Lock()

    def observe(self, snapshot: EngineSnapshot) -> None:
        """Record a step. Called in the engine's thread."""
        before, self._latest = self._latest, snapshot
        if snapshot.time - self._kept[-1].time < _INTERVAL:
            return
        with self._lock:
            if snapshot.time - before.time > 2 * _INTERVAL:
                # Mark the pause, so that rates after it are not averaged over the pause.
                self._kept.append(before)
                self._kept.append(dataclasses.replace(before, time=snapshot.time - _INTERVAL))
            self._kept.append(snapshot)

    def snapshots(self, now: float) -> list[EngineSnapshot]:
        """Return the snapshots of the last two minutes; the last is the newest, with time `now`."""
        with self._lock:
            kept = [*self._kept, self._latest, dataclasses.replace(self._latest, time=now)]
        # Rates divide by the time between two snapshots, so times must be distinct.
        distinct = {each.time: each for each in kept}.values()
        return [each for each in distinct if each.time >= now - _HISTORY_SECONDS]


class CacheRecorder:
    """Recorder of changes of the cache between steps as events, while a cache page is open."""

    def __init__(self) -> None:
        self._last: CacheMap | None = None
        self._num_asking = 0
        self._cost = 0.0
        self._asked = self._taken = float("-inf")
        self._numbers = itertools.count(1)
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MAX_EVENTS)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Return a context in which recording goes on, for a page that waits for a response.

        The page counts as open even if a long step delays the response.
        """
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
            self._last = (
                None  # an old snapshot would give the events of all steps since it was taken
            )
        elif self._cost < _QUICK or now - self._taken > 4 * self._cost:
            self._take(engine)

    def state(self, engine: Engine, since: int) -> tuple[CacheMap, list[dict[str, Any]]]:
        """Return the current cache map and the events numbered above `since`.

        Called in the engine's thread.
        """
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
