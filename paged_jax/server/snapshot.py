"""Snapshots of the engine, which other threads can read without waiting for the engine.

The engine's thread takes an `EngineSnapshot` after each step. Probes, metrics and the cache page
read the newest snapshot. This module also has the stall detector, the history of snapshots, and the
recorder of cache events.
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
from paged_jax.engine.block_meter import GroupUse
from paged_jax.engine.engine import Engine
from paged_jax.scheduler.outputs import EngineStats, WaitReason

# Minimum seconds between two snapshots in the history.
_INTERVAL = 0.5
# Seconds before now that the history covers.
_HISTORY_SECONDS = 120.0
# Maximum number of cache events that are stored for the cache page. The oldest are dropped.
_MAX_EVENTS = 1000
# If a snapshot of the cache takes fewer seconds than this, one is taken after every step. Otherwise
# (the cache is large), snapshots are less frequent, so that they use at most a fifth of the time.
# Events between two snapshots that cancel each other are then missed.
_QUICK = 0.01
# A cache page is assumed to be closed if it has sent no request for this many seconds.
_OPEN_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """State of the engine after a step.

    Attributes:
      time: time of the snapshot, in seconds of ``time.perf_counter()``.
      has_unfinished: whether the engine is awake and has unfinished requests.
      num_running: number of samples that have a slot.
      num_waiting: number of samples that wait for a slot.
      num_waiting_for: number of waiting samples for each reason.
      sleep_level: 0 while the engine is awake, otherwise its sleep level.
      num_used_blocks: number of blocks that samples use, in the first group of layers.
      groups: numbers of blocks of each group of layers.
      stats: counters of the engine since it was created.
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


class SnapshotHistory:
    """Snapshots of the last two minutes, at most two per second.

    When a cache page is opened, it draws its curves from them.
    """

    def __init__(self, snapshot: EngineSnapshot):
        self._latest = snapshot
        self._kept = collections.deque([snapshot], maxlen=round(_HISTORY_SECONDS / _INTERVAL))
        self._lock = threading.Lock()

    def observe(self, snapshot: EngineSnapshot) -> None:
        """Add the snapshot of a step. This is called in the engine's thread."""
        before, self._latest = self._latest, snapshot
        if snapshot.time - self._kept[-1].time < _INTERVAL:
            return
        with self._lock:
            if snapshot.time - before.time > 2 * _INTERVAL:
                # There was a pause without steps. Also add a snapshot for its start and one for its
                # end. Otherwise, the page would average the rate of the new step over the pause.
                self._kept.append(before)
                self._kept.append(dataclasses.replace(before, time=snapshot.time - _INTERVAL))
            self._kept.append(snapshot)

    def snapshots(self, now: float) -> list[EngineSnapshot]:
        """Return the snapshots of the last two minutes, in order of time.

        A copy of the newest snapshot with the time `now` is appended, so that curves end at `now`.
        """
        with self._lock:
            kept = [*self._kept, self._latest, dataclasses.replace(self._latest, time=now)]
        # Times must be distinct, because the page divides by the time between two snapshots.
        distinct = {each.time: each for each in kept}.values()
        return [each for each in distinct if each.time >= now - _HISTORY_SECONDS]


class CacheRecorder:
    """Recorder of cache events, see `cache_map.changes`. It records while a page is open."""

    def __init__(self) -> None:
        self._last: CacheMap | None = None
        self._num_requests = 0
        self._cost = 0.0
        self._last_request = self._taken = float("-inf")
        self._numbers = itertools.count(1)
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
        elif self._cost < _QUICK or now - self._taken > 4 * self._cost:
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
                self._events.append({"number": next(self._numbers), "time": time.time(), **fields})
        self._last, self._taken = cache_map, time.monotonic()
        self._cost = self._taken - start
        return cache_map
