"""Keeps the device busy: queues the next dispatch before the tokens of the last one are read."""

import time

from paged_jax.engine.run import Dispatch, PlanRunner
from paged_jax.engine.stats import StepClock
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan


class Pipeline:
    """Plans steps, queues them, and reads what they have drawn.

    A step reads the dispatch that the step before it has queued ahead, and queues the next one
    first; so while the host turns tokens into text, the device decodes. Where the scheduler has to
    know the tokens before it plans, nothing is queued ahead, and the next step begins with a plan.

        device   | dispatch 1 | dispatch 2 | dispatch 3 |
        host     queue 2, read 1 | text of 1, queue 3, read 2 | text of 2, ...

    Args:
      scheduler: makes the plans.
      runner: has the slots.
      plan_runner: queues plans, and reads their tokens.
      clock: measures the parts.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, plan_runner: PlanRunner, clock: StepClock
    ):
        self._scheduler = scheduler
        self._runner = runner
        self._plan_runner = plan_runner
        self._clock = clock
        self._ahead: Dispatch | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether a dispatch is queued whose tokens are not read."""
        return self._ahead is not None

    def run(self) -> tuple[StepPlan, StepTokens | None]:
        """Run a step: a plan, and the tokens drawn, a row for each of its decodes."""
        clock, dispatch, self._ahead = self._clock, self._ahead, None
        if dispatch is None:
            with clock.scheduling:
                plan = self._scheduler.schedule(self._runner.slots, time.perf_counter())
            with clock.running:
                dispatch = self._plan_runner.queue(plan)
        with clock.scheduling:
            ahead = self._scheduler.lookahead.next_plan(dispatch.plan, time.perf_counter())
        with clock.running:
            if ahead is not None:
                self._ahead = self._plan_runner.queue(ahead)
            tokens = self._plan_runner.read(dispatch)
        if tokens is not None and not tokens.ok:
            self._scheduler.lookahead.close()  # blocks ran out: the scheduler makes some free
        return dispatch.plan, tokens

    def drop_ended(self) -> None:
        """Forget the dispatch that is queued ahead if all of its sequences have ended."""
        if self._ahead is not None:
            if all(sequence.slot is None for sequence in self._ahead.plan.decodes):
                self._ahead = None

    def clear(self) -> None:
        """Forget what is queued: the device is emptied."""
        self._ahead = None
