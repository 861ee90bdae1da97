"""Detection of an engine that finishes no step."""

from collections import Counter

from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.server.snapshot import EngineSnapshot
from paged_jax.server.stall_detector import StallDetector


def snapshot_at(time: float, generated: int = 0) -> EngineSnapshot:
    stats = EngineStats(num_generated_tokens=generated)
    return EngineSnapshot(time, True, 1, 2, Counter(), 0, 3, [], stats)


def test_stall_detector_excuses_compiling() -> None:
    is_compiling = True
    stalls = StallDetector(snapshot_at(0.0), 1.0, lambda: is_compiling)
    assert not stalls.is_stalled
    is_compiling = False
    assert not stalls.is_stalled  # the time starts when compiling ends
    stalls.observe(snapshot_at(0.0))
    assert stalls.is_stalled
