"""Snapshots of the engine, which other threads can read without waiting for the engine.

The engine's thread takes an `EngineSnapshot` after each step. Probes, metrics and the cache page
read the newest snapshot, and the cache page also the history of snapshots.
"""

import collections
import dataclasses
import threading
import time
from collections import Counter

from paged_jax.engine.block_meter import GroupUse
from paged_jax.engine.engine import Engine
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.outputs import WaitReason

# Minimum seconds between two snapshots in the history.
_INTERVAL = 0.5
# Seconds before now that the history covers.
_HISTORY_SECONDS = 120.0


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
        wait_counts: Counter[WaitReason] = Counter(
            [sequence.waits_for for sequence in sequences if sequence.slot is None]
        )
        return cls(
            time=time.perf_counter(),
            has_unfinished=engine.has_unfinished and not engine.is_sleeping,
            num_running=len(sequences) - wait_counts.total(),
            num_waiting=wait_counts.total(),
            num_waiting_for=wait_counts,
            sleep_level=engine.sleep_level,
            num_used_blocks=groups[0].num_used,
            groups=groups,
            stats=engine.stats,
        )


class SnapshotHistory:
    """Snapshots of the last two minutes, at most two per second.

    When a cache page is opened, it draws its curves from them.
    """

    def __init__(self, snapshot: EngineSnapshot):
        self._latest = snapshot
        self._snapshots = collections.deque([snapshot], maxlen=round(_HISTORY_SECONDS / _INTERVAL))
        self._lock = threading.Lock()

    def observe(self, snapshot: EngineSnapshot) -> None:
        """Add the snapshot of a step. This is called in the engine's thread."""
        before, self._latest = self._latest, snapshot
        if snapshot.time - self._snapshots[-1].time < _INTERVAL:
            return
        with self._lock:
            if snapshot.time - before.time > 2 * _INTERVAL:
                # There was a pause without steps. Also add a snapshot for its start and one for its
                # end. Otherwise, the page would average the rate of the new step over the pause.
                self._snapshots.append(before)
                self._snapshots.append(dataclasses.replace(before, time=snapshot.time - _INTERVAL))
            self._snapshots.append(snapshot)

    def snapshots(self, now: float) -> list[EngineSnapshot]:
        """Return the snapshots of the last two minutes, in order of time.

        A copy of the newest snapshot with the time `now` is appended, so that curves end at `now`.
        """
        with self._lock:
            snapshots = [
                *self._snapshots,
                self._latest,
                dataclasses.replace(self._latest, time=now),
            ]
        # Times must be distinct, because the page divides by the time between two snapshots.
        distinct_snapshots = {snapshot.time: snapshot for snapshot in snapshots}.values()
        return [
            snapshot for snapshot in distinct_snapshots if snapshot.time >= now - _HISTORY_SECONDS
        ]
