"""`Reading`: the engine's counts after a step, which other threads read without stopping it."""

import dataclasses
import time
from collections import Counter

from paged_jax.engine.engine import Engine
from paged_jax.engine.stats import EngineStats, GroupUse
from paged_jax.scheduler.outputs import WaitReason


@dataclasses.dataclass(frozen=True)
class Reading:
    """The state of the engine after a step.

    Attributes:
      time: the moment of the reading, in seconds of ``time.perf_counter()``.
      has_unfinished: whether the engine has requests that are not finished.
      num_running: number of samples that hold a slot.
      num_waiting: number of samples that wait for a slot.
      num_waiting_for: how many of them wait for what.
      sleep_level: 0 while the engine is awake, else the level of its sleep.
      num_used_blocks: number of blocks that samples hold.
      groups: blocks of each group of layers that keep the same tokens.
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
    def of(cls, engine: Engine) -> "Reading":
        """Read an engine, in its own thread or before that thread runs."""
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
