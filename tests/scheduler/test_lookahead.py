"""`Lookahead`: plans made before the tokens of the last plan are known."""

import pytest

from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan
from tests.support.fake_memory import FakeMemory, append, make_request


class Steps:
    """A scheduler with lookahead and eight blocks of four tokens."""

    def __init__(self, *, num_slots: int = 2, max_steps: int = 8, **options: bool):
        self.memory = FakeMemory(num_slots, 8, 4)
        self.scheduler = Scheduler(
            num_slots,
            8,
            4,
            max_num_batched_tokens=16,
            max_chunk=8,
            max_steps=max_steps,
            **options,
        )
        self.requests = []

    def add(self, num_prompt: int = 4, max_tokens: int = 12, **options) -> None:
        number = len(self.requests)
        prompt = [1 + (number + i) % 7 for i in range(num_prompt)]
        request = make_request(number, prompt, max_tokens=max_tokens, **options)
        self.requests.append(request)
        self.scheduler.add(request.sequences)

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.memory)
        for sequence, count in plan.chunks:
            sequence.advance(count)
        return plan

    def ahead(self, plan: StepPlan, now: float = 0.0) -> StepPlan | None:
        return self.scheduler.lookahead.next_plan(plan, now)


def test_next_plan_runs_half_of_max_steps() -> None:
    steps = Steps()
    steps.add()
    plan = steps.plan()
    assert (plan.num_steps, plan.is_ahead) == (4, False)
    ahead = steps.ahead(plan)
    assert ahead is not None and ahead.is_ahead and ahead.decodes == plan.decodes
    assert (ahead.num_steps, ahead.leave_on_stop, ahead.chunks, ahead.forks) == (4, False, [], [])
    append(plan.decodes[0], [1] * 4)
    last = steps.ahead(ahead)
    assert last is not None and last.num_steps == 4
    append(plan.decodes[0], [1] * 4)
    # These plans generate all 12 tokens.
    assert steps.ahead(last) is None


@pytest.mark.parametrize("max_steps", [1, 3, 8])
def test_two_plans_have_at_most_max_steps(max_steps) -> None:
    steps = Steps(max_steps=max_steps)
    steps.add()
    plan = steps.plan()
    ahead = steps.ahead(plan)
    assert ahead is not None
    # Each plan has at least one step.
    assert plan.num_steps + ahead.num_steps <= max(2, max_steps + 1)


def test_next_plan_is_none_if_lookahead_is_disabled() -> None:
    steps = Steps()
    steps.scheduler.lookahead.is_used = False
    steps.add()
    plan = steps.plan()
    assert plan.num_steps == 8 and steps.ahead(plan) is None


def test_next_plan_is_none_after_an_arrival() -> None:
    steps = Steps()
    steps.add()
    plan = steps.plan()
    steps.add()
    assert steps.ahead(plan) is None
    append(plan.decodes[0], [1] * 4)
    plan = steps.plan()
    assert len(plan.decodes) == 2 and steps.ahead(plan) is not None


def test_next_plan_is_none_during_prefill() -> None:
    steps = Steps()
    steps.add(num_prompt=12)
    plan = steps.plan()
    assert plan.chunks and not plan.decodes and steps.ahead(plan) is None
    assert steps.ahead(steps.plan()) is not None


def test_next_plan_is_none_if_a_chunk_may_help_a_waiting_request() -> None:
    steps = Steps()
    steps.add(num_prompt=9)
    steps.add(num_prompt=20)
    plan = steps.plan()
    assert plan.chunks and plan.decodes and steps.scheduler.waiting
    assert steps.ahead(plan) is None


def test_next_plan_is_none_if_a_sequence_ends_while_others_wait() -> None:
    steps = Steps(num_slots=2)
    for _ in range(3):
        steps.add()
    plan = steps.plan()
    assert len(plan.decodes) == 2 and plan.leave_on_stop
    ahead = steps.ahead(plan)
    assert ahead is not None and ahead.leave_on_stop
    steps.scheduler.finish(steps.memory, plan.decodes[0])
    assert steps.ahead(ahead) is None
    assert len(steps.plan().decodes) == 2


def test_next_plan_omits_finished_sequences() -> None:
    steps = Steps()
    steps.add()
    steps.add()
    plan = steps.plan()
    first, second = plan.decodes
    steps.scheduler.finish(steps.memory, first)
    ahead = steps.ahead(plan)
    assert ahead is not None and ahead.decodes == [second]
    steps.scheduler.abort(steps.memory, steps.requests[1])
    assert steps.ahead(ahead) is None


def test_next_plan_is_none_after_a_deadline() -> None:
    steps = Steps()
    steps.add(deadline=5.0)
    plan = steps.plan()
    assert steps.ahead(plan, 4.0) is not None
    assert steps.ahead(plan, 5.0) is None


def test_next_plan_is_none_after_close() -> None:
    steps = Steps()
    steps.add()
    plan = steps.plan()
    steps.scheduler.lookahead.close()
    assert steps.ahead(plan) is None
    append(plan.decodes[0], [1])
    assert steps.ahead(steps.plan()) is not None


def test_next_plan_is_none_after_a_restart() -> None:
    steps = Steps()
    steps.add()
    plan = steps.plan()
    steps.scheduler.restart(plan.decodes)
    assert steps.ahead(plan) is None


# Grammars


class KnownTokens:
    """A grammar that forces some tokens; then the host must see each token."""

    is_over = False

    def __init__(self, forced: int = 0, *, ends: bool = False):
        self.forced, self.ends, self._num_forced, self._seen = [3] * forced, ends, forced, 0

    def follow(self, token_ids, start) -> None:
        self._seen = len(token_ids) - start
        self.forced = [3] * max(0, self._num_forced - self._seen)
        self.is_over = self.ends and self._seen >= self._num_forced


def beside_grammars(
    *grammars: KnownTokens, num_free: int = 1, k: int = 3, **options: bool
) -> Steps:
    """Return steps of requests with grammars, followed by requests without."""
    steps = Steps(num_slots=len(grammars) + num_free, **options)
    steps.scheduler.lookahead.num_free_steps = k
    for grammar in (*grammars, *[None] * num_free):
        steps.add(2)
        [steps.requests[-1].sequences[0].grammar] = [grammar]
    return steps


def draw_all(plan: StepPlan, *, waiting: int = 1) -> None:
    """Append the tokens of a plan; sequences with a grammar draw `waiting` tokens."""
    for sequence in plan.decodes:
        count = plan.num_steps if sequence.grammar is None else min(waiting, plan.num_steps)
        append(sequence, [1] * count)


def test_plans_alternate_beside_grammars() -> None:
    steps = beside_grammars(KnownTokens(), KnownTokens())
    first, second, free = (request.sequences[0] for request in steps.requests)
    plan = steps.plan()
    assert (plan.bound, plan.num_steps) == ([first, second], 1)
    for _ in range(2):
        alone = steps.ahead(plan)
        assert alone is not None
        assert (alone.decodes, alone.bound, alone.num_steps) == ([free], [], 3)
        draw_all(plan)  # the host reads the tokens of the first plan
        plan = steps.ahead(alone)
        assert plan is not None and plan.is_ahead
        assert (plan.decodes, plan.num_steps) == ([first, second, free], 1)
        assert plan.bound == [first, second]
        draw_all(alone)


def test_a_sequence_continues_with_forced_tokens_while_others_wait() -> None:
    steps = beside_grammars(KnownTokens(), KnownTokens(forced=5))
    first, second, free = (request.sequences[0] for request in steps.requests)
    plan = steps.plan()
    alone = steps.ahead(plan)
    assert plan.num_steps == 1 and alone is not None
    assert (alone.decodes, alone.bound) == ([second, free], [])
    draw_all(plan)
    # The host does not know how far the second sequence came, so it waits once.
    plan = steps.ahead(alone)
    assert plan is not None and (plan.decodes, plan.bound) == ([first, free], [first])
    draw_all(alone, waiting=3)
    other = steps.ahead(plan)
    assert other is not None and (other.decodes, other.bound) == ([second, free], [second])


def test_no_plan_ahead_of_sequences_that_all_have_grammars() -> None:
    steps = beside_grammars(KnownTokens(), KnownTokens(forced=4), num_free=0)
    assert steps.ahead(steps.plan()) is None


def test_no_plan_ahead_if_the_others_wait_too() -> None:
    steps = beside_grammars(KnownTokens(), k=0)
    assert steps.ahead(steps.plan()) is None
    steps = beside_grammars(KnownTokens())
    plan = steps.plan()
    steps.scheduler.lookahead.num_free_steps = 0
    assert steps.ahead(plan) is None


def test_with_drafts_plans_are_ahead_only_beside_grammars() -> None:
    steps = Steps(has_drafts=True)
    steps.add()
    assert steps.ahead(steps.plan()) is None, "drafts need the latest tokens"
    steps = beside_grammars(KnownTokens(forced=1, ends=True), has_drafts=True)
    plan = steps.plan()
    alone = steps.ahead(plan)
    assert alone is not None and len(alone.decodes) == 1
    draw_all(plan, waiting=4)
    both = steps.ahead(alone)
    assert both is not None and len(both.decodes) == 2
    draw_all(alone)
    assert steps.ahead(both) is None, "the grammar has ended"


def test_plans_are_long_again_after_the_grammars_have_ended() -> None:
    steps = beside_grammars(KnownTokens(forced=1, ends=True))
    plan = steps.plan()
    assert plan.num_steps == 4
    alone = steps.ahead(plan)
    assert alone is not None and len(alone.decodes) == 1
    draw_all(plan, waiting=4)
    both = steps.ahead(alone)
    assert both is not None and (len(both.decodes), both.bound, both.num_steps) == (2, [], 4)
