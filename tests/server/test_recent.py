"""Counts of the last minutes: few enough, and with pauses where nothing happened."""

import itertools
from collections import Counter

from paged_jax.engine.stats import EngineStats
from paged_jax.server.reading import Reading
from paged_jax.server.recent import Recent, Sample


def reading(time: float, generated: int) -> Reading:
    stats = EngineStats(num_generated_tokens=generated)
    return Reading(time, True, 1, 2, Counter(), 0, 3, [], stats)


def rates(samples: list[Sample]) -> list[tuple[float, float]]:
    return [
        (after.time, (after.generated - before.generated) / (after.time - before.time))
        for before, after in itertools.pairwise(samples)
    ]


def test_samples_are_few_and_say_how_fast_tokens_came() -> None:
    recent = Recent(reading(0.0, 0))
    for step in range(1, 20_001):  # 200 seconds of 300 tokens each
        recent.observe(reading(step / 100, 3 * step))
    samples = recent.samples(200.001)
    assert 200 < len(samples) <= 242 and 80 < samples[0].time < 82
    assert samples[-1] == Sample(200.001, 60_000, 0, 0, 2, 3)
    assert all(abs(rate - 300) < 10 for _, rate in rates(samples[:-1]))


def test_a_pause_is_no_part_of_what_comes_after_it() -> None:
    recent = Recent(reading(0.0, 0))
    for step in range(1, 301):
        recent.observe(reading(step / 100, 3 * step))
    for step in range(1, 301):
        recent.observe(reading(50 + step / 100, 900 + 3 * step))
    found = rates(recent.samples(60.0))
    pause = [rate for time, rate in found if 3.01 < time <= 49.6 or time > 53.01]
    assert pause and set(pause) == {0.0}
    assert any(49 < time < 50 for time, _ in found), "a line would rise through all of it"
    busy = [rate for time, rate in found if 0.5 < time <= 3 or 50.5 < time <= 53]
    assert len(busy) >= 8 and all(abs(rate - 300) < 10 for rate in busy)
