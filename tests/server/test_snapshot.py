"""History of the snapshots of an engine."""

import itertools
from collections import Counter

from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.server.snapshot import EngineSnapshot, SnapshotHistory


def snapshot_at(time: float, generated: int = 0) -> EngineSnapshot:
    stats = EngineStats(num_generated_tokens=generated)
    return EngineSnapshot(time, True, 1, 2, Counter(), 0, 3, [], stats)


def rates(snapshots: list[EngineSnapshot]) -> list[tuple[float, float]]:
    """Return the time of each snapshot and the tokens per second since the previous one."""
    return [
        (
            after.time,
            (after.stats.num_generated_tokens - before.stats.num_generated_tokens)
            / (after.time - before.time),
        )
        for before, after in itertools.pairwise(snapshots)
    ]


def test_history_keeps_two_snapshots_per_second() -> None:
    history = SnapshotHistory(snapshot_at(0.0))
    for step in range(1, 20_001):  # 200 seconds with 300 tokens each
        history.observe(snapshot_at(step / 100, 3 * step))
    snapshots = history.snapshots(200.001)
    assert 200 < len(snapshots) <= 242 and 80 < snapshots[0].time < 82
    assert snapshots[-1] == snapshot_at(200.001, 60_000)
    assert all(abs(rate - 300) < 10 for _, rate in rates(snapshots[:-1]))


def test_history_separates_a_pause_from_the_steps_after_it() -> None:
    history = SnapshotHistory(snapshot_at(0.0))
    for step in range(1, 301):
        history.observe(snapshot_at(step / 100, 3 * step))
    for step in range(1, 301):
        history.observe(snapshot_at(50 + step / 100, 900 + 3 * step))
    found = rates(history.snapshots(60.0))
    pause = [rate for time, rate in found if 3.01 < time <= 49.6 or time > 53.01]
    assert pause and set(pause) == {0.0}
    assert any(49 < time < 50 for time, _ in found), "a line would rise during the whole pause"
    busy = [rate for time, rate in found if 0.5 < time <= 3 or 50.5 < time <= 53]
    assert len(busy) >= 8 and all(abs(rate - 300) < 10 for rate in busy)
