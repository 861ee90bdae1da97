"""Choice of the number of steps that other sequences decode while grammars wait for masks."""

import itertools

import numpy as np
import pytest

from paged_jax.engine.mask_clock import MaskClock
from paged_jax.scheduler.step_plan import StepPlan


class Cycles:
    """Simulated cycles, which take `fixed` seconds and `step` seconds for each of k steps."""

    def __init__(self, plain: float, fixed: float, step: float):
        self.plain, self.fixed, self.step, self.time = plain, fixed, step, 0.0
        self.noise = lambda: 1.0
        self.num_free_steps, bound, free = 1, object(), object()
        self.plan = StepPlan(decodes=[bound, free], bound=[bound])
        self.clock = MaskClock(self, 8, lambda: self.time)

    def run(self, count: int) -> list[int]:
        """Return k of each cycle."""
        chosen = []
        for _ in range(count):
            k = self.num_free_steps
            chosen.append(k)
            seconds = self.fixed + k * self.step if k else self.plain
            self.time += seconds * self.noise()
            self.clock.note_read(self.plan, 1)
        return chosen


@pytest.mark.parametrize(
    ("plain", "fixed", "step", "expected"),
    [
        (5.0, 2.5, 1.1, 2),  # slow host
        (20.0, 2.5, 1.0, 7),  # the maximum
        (13.5, 9.5, 7.5, 0),  # a step takes longer than the host
        (17.0, 9.5, 7.5, 1),
    ],
)
def test_clock_chooses_the_most_steps_that_cost_nothing(plain, fixed, step, expected) -> None:
    chosen = Cycles(plain, fixed, step).run(2000)
    assert max(set(chosen), key=chosen.count) == expected
    if expected:
        assert plain * 1.11 >= fixed + expected * step
    # Both are measured again from time to time.
    assert {0, 1} <= set(chosen) and chosen.count(expected) > 0.6 * len(chosen)


def test_clock_adapts() -> None:
    cycles = Cycles(5.0, 2.5, 1.1)
    cycles.run(300)
    cycles.plain = 12.0
    assert max(cycles.run(600)) == 7
    cycles.plain, cycles.step = 3.0, 2.0
    assert cycles.run(900)[-100:].count(0) > 60


def test_clock_is_not_misled_by_other_programs() -> None:
    """Half of the cycles take up to twice as long, and all become slower and faster in waves."""
    cycles, random = Cycles(5.0, 2.0, 0.5), np.random.default_rng(0)
    waves = itertools.count()

    def noise() -> float:
        wave = 1.5 + np.sin(next(waves) / 100)
        return wave * (1 + random.uniform(0, 1) * (random.uniform() < 0.5))

    cycles.noise = noise
    assert np.mean(cycles.run(4000)) > 2.5
