"""Requests and deadlines in the scheduler, and random histories run by a fake device."""

import weakref

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.cache.retention import retention
from paged_jax.cache.sequence_blocks import max_blocks_in_window
from paged_jax.models.layer_groups import LayerGroup
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import PreemptionCosts, Scheduler
from paged_jax.scheduler.step_plan import StepPlan
from tests.support.fake_memory import (
    VOCABULARY,
    FakeEngine,
    FakeMemory,
    expected_tokens,
    make_request,
)
from tests.support.scheduling import C, add, check_outputs, make_engine, prompt_of

PREEMPTIONS = ("auto", "recompute", "swap")


def test_add_rejects_sequences_that_do_not_fit_the_pool():
    engine = make_engine(num_blocks=5)
    add(engine, 0, length=1, max_tokens=20)  # 5 blocks: the last token is never written
    message = (
        "pool of 5 blocks of 4 tokens, got 7 prompt tokens and 15 tokens to generate, which need 6"
    )
    with pytest.raises(ValueError, match=message):
        add(engine, 1, length=7, max_tokens=15, num_samples=2)
    with pytest.raises(ValueError, match="at most max_length = 3 tokens, got 4"):
        add(engine, 1, length=4, max_tokens=-1)
    with pytest.raises(ValueError, match="must be unique, got '0' again"):
        add(engine, 0, length=3)
    assert len(engine.scheduler.waiting) == 1
    engine.run()
    check_outputs(engine)
    add(engine, 0, length=3)  # the id is free again


def test_abort_frees_all_blocks():
    engine = make_engine(num_slots=3)
    running = add(engine, 0, length=9, max_tokens=9, num_samples=2)
    waiting = add(engine, 1, length=9, num_samples=3)
    add(engine, 2, length=9)
    engine.step()
    memory, scheduler = engine.memory, engine.scheduler
    assert scheduler.abort(memory, waiting[0].request) == waiting
    request = running[0].request
    assert scheduler.abort(memory, request) == running
    assert scheduler.abort(memory, request) == []
    engine.run()
    check_outputs(engine)


def test_abort_frees_swapped_blocks():
    engine = make_engine(num_slots=1, preemption="swap")
    [victim] = add(engine, 0, length=9, max_tokens=9, priority=1)
    engine.step()
    add(engine, 1, length=9)
    engine.step()
    assert victim.is_swapped and victim.host_blocks
    engine.scheduler.abort(engine.memory, victim.request)
    assert not victim.is_swapped and victim.host_blocks is None
    engine.run()
    check_outputs(engine)


def test_finish_after_abort_does_nothing():
    engine = make_engine()
    first, second = add(engine, 0, length=5, num_samples=2)
    engine.step()
    engine.scheduler.abort(engine.memory, first.request)
    engine.scheduler.finish(engine.memory, second)
    assert engine.scheduler.sequences == []
    check_outputs(engine)


def test_restart_continues_with_the_known_tokens():
    engine = make_engine(num_slots=2, max_chunk=4)
    old = add(engine, 0, length=9, max_tokens=9, num_samples=2, deadline=50.0)
    old += add(engine, 1, length=9)
    for _ in range(3):
        engine.step()
    assert len(old[0].token_ids) == 11
    engine.memory = FakeMemory(2, 20, C)
    engine.scheduler.restart(old)
    assert engine.scheduler.waiting == old and not engine.scheduler.running
    assert not any(s.num_computed or s.is_fork or s.slot is not None for s in old)
    for _ in range(4):
        engine.step()
    assert engine.step(now=50.0).expired == old[:2]
    engine.run()
    check_outputs(engine)
    assert engine.finished == old[2:]


def test_scheduler_holds_requests_until_their_sequences_finish(no_collector):
    engine = make_engine(num_slots=2)
    sequences = add(engine, 0, length=9, max_tokens=9, num_samples=2)
    sequences += add(engine, 1, length=9, deadline=1.0)
    first, _, expiring = (weakref.ref(sequence.request) for sequence in sequences)
    engine.step()
    engine.scheduler.finish(engine.memory, sequences[0])
    engine.scheduler.restart(sequences[1:])
    engine.memory = FakeMemory(2, 20, C)
    assert first() is not None and expiring() is not None
    assert engine.step(now=1.0).expired == sequences[2:]
    assert first() is not None and expiring() is None
    engine.run()
    engine.finished_requests.clear()
    assert first() is None


def test_finish_of_the_leader_queues_its_siblings():
    engine = make_engine(max_chunk=4)
    first, second, third = add(engine, 0, length=11, num_samples=3)
    engine.step()
    assert first.num_computed == 4 and second.waits_for == "fork"
    engine.scheduler.finish(engine.memory, first)
    engine.run()
    check_outputs(engine)
    assert set(engine.finished) == {second, third}


def test_schedule_expires_waiting_and_running_requests():
    engine = make_engine(num_slots=2)
    running = add(engine, 0, length=9, max_tokens=20, deadline=2.0)
    waiting = add(engine, 1, length=9, num_samples=4, deadline=1.0)
    add(engine, 2, length=9, max_tokens=5)
    engine.scheduler.abort(engine.memory, waiting[0].request)
    again = add(engine, 3, length=9, num_samples=4, deadline=1.5)
    assert engine.step(now=0.5).expired == []
    assert engine.step(now=1.5).expired == again
    assert engine.step(now=1.9).expired == []
    assert engine.step(now=9.0).expired == running
    engine.run()
    check_outputs(engine)


def test_schedule_keeps_a_later_request_with_an_expired_id():
    engine = make_engine()
    [old] = add(engine, 0, length=3, deadline=5.0)
    engine.run()
    request = make_request(1, [1, 2, 3], max_tokens=3, request_id="0")
    engine.scheduler.add(request.sequences)
    assert engine.step(now=6.0).expired == []
    assert old in engine.finished


def test_deadlines_of_finished_requests_are_removed():
    engine = make_engine()
    for number in range(50):
        add(engine, number, length=3, deadline=1e9 + number)
        engine.run()
    assert not engine.scheduler._queue.by_deadline
    [left] = add(engine, 50, length=3, max_tokens=60, deadline=5.0)
    engine.step()
    assert engine.step(now=6.0).expired == [left]


def test_schedule_returns_an_empty_plan_without_requests():
    engine = make_engine(max_steps=8)
    assert engine.step() == StepPlan()


def test_stats_count_cached_tokens():
    engine = make_engine(num_slots=3)
    add(engine, 0, length=9, num_samples=3)
    add(engine, 1, length=9, prompt=prompt_of(0, 9))
    engine.run()
    stats = engine.scheduler.stats
    assert (stats.num_queried_tokens, stats.num_cached_tokens) == (16, 8)
    assert stats.num_preemptions == stats.num_recomputed_tokens == 0


# Random histories


def bounded(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts and deadlines in pools that are too small for all requests."""

    @initialize(
        num_slots=st.integers(1, 5),
        num_blocks=st.integers(3, 14),
        budget=st.integers(5, 30),
        max_chunk=st.integers(1, 12),
        max_steps=st.integers(1, 6),
        caching=st.booleans(),
        preemption=st.sampled_from(PREEMPTIONS),
        max_swapped=st.sampled_from([None, 0, 4]),
        window=st.sampled_from([None, None, 1, 5, 11]),
    )
    def start(
        self,
        num_slots,
        num_blocks,
        budget,
        max_chunk,
        max_steps,
        caching,
        preemption,
        max_swapped,
        window,
    ):
        scheduler = Scheduler(
            num_slots,
            num_blocks,
            C,
            max_num_batched_tokens=budget,
            max_chunk=max_chunk,
            max_steps=max_steps,
            enable_prefix_caching=caching,
            preemption=preemption,
            costs=PreemptionCosts(1.0, 1.5, max_swapped),
            groups=(LayerGroup(retention(window), (0, 1)),),
        )
        self.engine = FakeEngine(scheduler, num_slots, window=window)
        self.window = window
        self.scheduler = scheduler
        self.prompts: dict[Sequence, list[int]] = {}
        self.requests: list[Request] = []
        self.gone: set[Sequence] = set()
        self.now = 0.0

    @rule(
        stem=st.integers(0, 2),
        num_stem=st.integers(0, 3 * C),
        tail=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6),
        num_samples=st.sampled_from([1, 1, 1, 2, 4]),
        max_tokens=st.integers(0, 14),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        lifetime=st.sampled_from([None, None, None, 0, 3, 15]),
        client=st.sampled_from(["", "", "a", "b"]),
    )
    def add(self, stem, num_stem, tail, num_samples, max_tokens, priority, lifetime, client):
        num_samples = num_samples if max_tokens else 1  # as in SamplingParams
        number = len(self.requests)
        deadline = None if lifetime is None else self.now + lifetime
        prompt = [(stem + i) % VOCABULARY for i in range(num_stem)] + tail
        request = make_request(
            number,
            prompt,
            max_tokens=max_tokens,
            num_samples=num_samples,
            block_size=C,
            priority=priority,
            deadline=deadline,
            client=client,
        )
        sequences = request.sequences
        # The last token is never written.
        needed = -(-(len(prompt) + max(0, max_tokens - 1)) // C)
        if self.window is not None:
            needed = min(needed, max_blocks_in_window(self.window, 1, C))
        if needed > self.scheduler.num_blocks:
            waiting = list(self.scheduler.waiting)
            with pytest.raises(ValueError, match=f"which need {needed}"):
                self.scheduler.add(sequences)
            assert self.scheduler.waiting == waiting
            return
        self.scheduler.add(sequences)
        self.requests.append(request)
        self.prompts.update({sequence: prompt for sequence in sequences})

    @rule()
    def step(self):
        self.now += 1
        before, num_preemptions = self.ranks(), self.scheduler.stats.num_preemptions
        plan = self.engine.step(self.now)
        self.gone.update(plan.expired)
        if plan.expired or self.scheduler.stats.num_preemptions > num_preemptions:
            return  # the running sequences changed before the queue was read
        still = [rank for s, rank in before.items() if s.waits_for not in ("", "same prefix")]
        let_in = [rank for s, rank in before.items() if not s.waits_for]
        assert not still or not let_in or max(let_in) < min(still)

    def ranks(self) -> dict[Sequence, tuple[int, ...]]:
        """Return the rank of each waiting sequence: priority, turn, arrival, index."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        served = [s.request.client for s in running]
        return {
            s: (
                s.request.priority,
                served.count(s.request.client)
                + sum(
                    o.request.client == s.request.client and o.seniority < s.seniority
                    for o in waiting
                ),
                s.request.arrival,
                s.index,
            )
            for s in waiting
        }

    @rule()
    def steps(self):
        for _ in range(5):
            self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        aborted = self.scheduler.abort(self.engine.memory, request)
        assert all(s.request is request and s not in self.engine.finished for s in aborted)
        self.gone.update(aborted)

    @invariant()
    def blocks_add_up(self):
        self.engine.memory.check()
        unfinished = set(self.prompts) - self.gone - set(self.engine.finished)
        known = {*self.scheduler.waiting, *self.scheduler.running}
        assert known <= unfinished
        assert self.scheduler.has_unfinished == bool(unfinished)
        swapped = [s for s in self.scheduler.waiting if s.is_swapped]
        num_blocks = sum(
            -(-s.num_computed // C) - self.engine.memory._first_kept(s.num_computed)
            for s in swapped
        )
        assert self.scheduler._queue.num_swapped_blocks == num_blocks
        if self.window is not None:
            self.rows_are_bounded()

    def rows_are_bounded(self):
        """Check that each slot holds as many blocks as the scheduler counts, and not too many.

        The maximum is the blocks of a window and of the tokens of one program.
        """
        memory, block_budget = self.engine.memory, self.scheduler.block_budget
        max_step_tokens = max(self.scheduler.max_chunk, self.scheduler.max_steps)
        most, total = max_blocks_in_window(self.window, max_step_tokens, C), 0
        for sequence in self.scheduler.running:
            num_held = len(memory._held(sequence.slot))
            counted = block_budget.num_in_row(sequence.num_computed, sequence.program_start)
            assert num_held == counted <= most
            total += counted
        if self.scheduler.max_steps == 1:  # with several steps, rows may share blocks
            assert total <= self.scheduler.num_blocks

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        # Each step computes at least one token, and few tokens are computed twice.
        most = 20 + 4 * sum(s.max_length for s in self.prompts)
        self.engine.num_steps = 0
        while self.scheduler.has_unfinished:
            self.step()
            assert self.engine.num_steps < most
        assert self.gone | set(self.engine.finished) == set(self.prompts)
        assert not self.gone & set(self.engine.finished)
        assert self.engine.memory.num_free == self.scheduler.num_blocks
        for sequence in self.engine.finished:
            expected = expected_tokens(
                self.prompts[sequence], sequence.index, sequence.max_length, self.window
            )
            assert sequence.token_ids == expected
        for sequence in self.prompts:
            assert sequence.slot is None and sequence.host_blocks is None


TestHistories = SchedulerMachine.TestCase
TestHistories.settings = bounded(100)
