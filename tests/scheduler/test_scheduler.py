"""The scheduler: each rule by itself, then random histories, run by a fake device."""

import weakref

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.cache.sequence_blocks import max_blocks_in_window
from paged_jax.models.layer_groups import LayerGroup
from paged_jax.scheduler.preemption import PreemptionCosts
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan
from tests.support.fake_memory import (
    VOCABULARY,
    FakeEngine,
    FakeMemory,
    draw,
    expected_tokens,
    make_request,
)

C = 4
PREEMPTIONS = ("auto", "recompute", "swap")


def make_engine(
    num_slots: int = 4,
    num_blocks: int = 20,
    *,
    budget: int = 100,
    max_chunk: int = 100,
    max_steps: int = 1,
    **options,
) -> FakeEngine:
    scheduler = Scheduler(
        num_slots,
        num_blocks,
        C,
        max_num_batched_tokens=budget,
        max_chunk=max_chunk,
        max_steps=max_steps,
        **options,
    )
    return FakeEngine(scheduler, num_slots, eos=None)


def prompt_of(number: int, length: int) -> list[int]:
    """Prompts that share no block, unless they have the same number."""
    return [1 + (number + 3 * position) % (VOCABULARY - 1) for position in range(length)]


def add(
    engine: FakeEngine,
    number: int,
    length: int,
    max_tokens: int = 3,
    *,
    num_samples: int = 1,
    prompt: list[int] | None = None,
    priority: int = 0,
    deadline: float | None = None,
    salt: str = "",
) -> list[Sequence]:
    """Queue a request that arrives as the one of this number."""
    request = make_request(
        number,
        prompt or prompt_of(number, length),
        max_tokens=max_tokens,
        num_samples=num_samples,
        salt=salt,
        priority=priority,
        deadline=deadline,
    )
    engine.scheduler.add(request.sequences)
    return request.sequences


def check_outputs(engine: FakeEngine) -> None:
    """All are gone with the right tokens, and all blocks are back."""
    assert not engine.scheduler.has_unfinished
    assert engine.memory.num_free == engine.scheduler.num_blocks
    for s in engine.finished:
        prompt, token_ids = s.token_ids[: s.num_prompt_tokens], list(s.token_ids)
        while len(prompt) < s.max_length:
            prompt.append(draw(prompt, s.index, engine.window))
        assert token_ids == prompt


# Requests come and go


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_slots": 0}, "num_slots must be a positive integer, got 0"),
        ({"num_blocks": 1.5}, "num_blocks must be a positive integer, got 1.5"),
        ({"max_steps": True}, "max_steps must be a positive integer, got True"),
        ({"budget": 3}, "max_num_batched_tokens must be at least num_slots = 4.*got 3"),
        ({"preemption": "drop"}, "must be auto, recompute or swap, got 'drop'"),
    ],
)
def test_scheduler_refuses_sizes_that_cannot_work(sizes, message):
    with pytest.raises(ValueError, match=f"Scheduler: .*{message}"):
        make_engine(**sizes)


def test_add_refuses_what_could_never_run_alone():
    engine = make_engine(num_blocks=5)
    add(engine, 0, length=1, max_tokens=20)  # The last token is never written: 5 blocks.
    message = "pool of 5 blocks of 4 tokens, got 7 prompt tokens and 15 new ones, which need 6"
    with pytest.raises(ValueError, match=message):
        add(engine, 1, length=7, max_tokens=15, num_samples=2)
    with pytest.raises(ValueError, match="at most max_length = 3, got 4"):
        add(engine, 1, length=4, max_tokens=-1)
    with pytest.raises(ValueError, match="must be unique, got '0' again"):
        add(engine, 0, length=3)
    assert len(engine.scheduler.waiting) == 1
    engine.run()
    check_outputs(engine)
    add(engine, 0, length=3)  # The name is free again.


def test_abort_brings_every_block_home():
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
    assert (scheduler.stats.num_aborted, scheduler.stats.num_finished) == (5, 1)


def test_abort_forgets_what_was_swapped_out():
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
    stats = engine.scheduler.stats
    assert (stats.num_aborted, stats.num_finished) == (2, 0)
    check_outputs(engine)


def test_restart_goes_on_with_the_tokens_that_there_are():
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


def test_requests_are_kept_as_long_as_they_have_unfinished_sequences(no_collector):
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


def test_samples_go_on_if_the_first_leaves_before_they_are_forked():
    engine = make_engine(max_chunk=4)
    first, second, third = add(engine, 0, length=11, num_samples=3)
    engine.step()
    assert first.num_computed == 4 and second.waits_for == "fork"
    engine.scheduler.finish(engine.memory, first)
    engine.run()
    check_outputs(engine)
    assert set(engine.finished) == {second, third}


def test_deadlines_end_requests_wherever_they_are():
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
    assert engine.scheduler.stats.num_expired == 5


def test_a_deadline_does_not_end_a_later_request_of_the_same_name():
    engine = make_engine()
    [old] = add(engine, 0, length=3, deadline=5.0)
    engine.run()
    request = make_request(1, [1, 2, 3], max_tokens=3, request_id="0")
    engine.scheduler.add(request.sequences)
    assert engine.step(now=6.0).expired == []
    assert old in engine.finished


def test_deadlines_in_a_far_future_are_forgotten_with_their_requests():
    engine = make_engine()
    for number in range(50):
        add(engine, number, length=3, deadline=1e9 + number)
        engine.run()
    assert len(engine.scheduler._queue.deadlines) <= 2
    [left] = add(engine, 50, length=3, max_tokens=60, deadline=5.0)
    engine.step()
    assert engine.step(now=6.0).expired == [left]


# Prefill and budget


def test_prefill_reads_chunks_and_decodes_in_the_step_that_ends_it():
    engine = make_engine(max_chunk=4)
    [sequence] = add(engine, 0, length=11, max_tokens=2)
    plans = [engine.step() for _ in range(4)]
    assert [plan.chunks for plan in plans] == [[(sequence, n)] for n in (4, 4, 2)] + [[]]
    assert [plan.decodes for plan in plans] == [[], [], [sequence], [sequence]]
    check_outputs(engine)


def test_a_prompt_of_one_token_needs_no_prefill():
    engine = make_engine()
    [sequence] = add(engine, 0, length=1)
    plan = engine.step()
    assert (plan.chunks, plan.decodes) == ([], [sequence])


def test_decodes_are_served_before_chunks():
    engine = make_engine(budget=10, num_blocks=40)
    first, second = (add(engine, i, length=5, max_tokens=20)[0] for i in range(2))
    engine.step()
    assert (first.num_prefill, second.num_prefill) == (0, 0)
    [third] = add(engine, 2, length=30)
    plan = engine.step()
    assert plan.decodes == [first, second] and plan.chunks == [(third, 8)]
    [last] = add(engine, 3, length=5)
    assert engine.step().chunks == [(third, 8)] and last.waits_for == "budget"


def test_a_prompt_of_one_token_that_preempts_draws_none_if_none_is_asked_for():
    engine = make_engine(num_slots=1)
    add(engine, 0, length=5, max_tokens=9, priority=1)
    engine.step()
    [urgent] = add(engine, 1, length=1, max_tokens=0)
    assert engine.step().computed == [urgent] and engine.finished == [urgent]
    engine.run()
    check_outputs(engine)


def test_a_prefill_that_uses_up_the_budget_decodes_in_the_next_step():
    engine = make_engine(budget=8)
    [sequence] = add(engine, 0, length=9)
    assert engine.step().decodes == []
    plan = engine.step()
    assert plan.decodes == [sequence] and not plan.chunks


def test_a_prefill_that_used_up_the_blocks_decodes_in_a_later_step():
    engine = make_engine(num_blocks=6, max_chunk=4)
    [sequence] = add(engine, 0, length=9)
    engine.step()
    # As if others had taken all blocks but the next one.
    assert engine.memory.reserve({3: 4 * C})
    plan = engine.step()
    assert plan.chunks == [(sequence, 4)] and plan.decodes == []
    engine.memory.empty(3)
    assert engine.step().decodes == [sequence]


def test_the_most_senior_prefill_comes_first():
    engine = make_engine(num_slots=3, budget=6, num_blocks=40)
    [first], [second] = add(engine, 0, length=20), add(engine, 1, length=20)
    engine.step()
    [urgent] = add(engine, 2, length=20, priority=-1)
    assert first.slot is not None and second.waits_for == "budget"
    assert engine.step().chunks == [(urgent, 6)]
    engine.run()
    assert engine.finished == [urgent, first, second]


# Admission


def test_a_prompt_runs_in_far_fewer_blocks_where_all_layers_have_a_window():
    window, groups = 9, (LayerGroup(9, (0, 1)),)
    scheduler = Scheduler(
        2, 3, C, max_num_batched_tokens=64, max_chunk=32, max_steps=4, groups=groups
    )
    engine = FakeEngine(scheduler, 2, eos=None, window=window)
    [first], [second] = add(engine, 0, length=200, max_tokens=20), add(engine, 1, length=90)
    engine.run()
    assert {len(first.token_ids), len(second.token_ids)} == {220, 93}
    check_outputs(engine)
    # A window that is cut anywhere lies in three blocks, of which the last takes the next token.
    small = Scheduler(1, 2, C, max_num_batched_tokens=64, max_chunk=32, groups=groups)
    request = make_request(2, prompt_of(2, 50), max_tokens=5)
    with pytest.raises(ValueError, match="pool of 2 blocks of 4 tokens, .* which need 3"):
        small.add(request.sequences)


def test_samples_are_counted_with_whole_rows_where_all_layers_have_a_window():
    """They share blocks at first; what they give back is free once the last has done so."""
    scheduler = Scheduler(
        4, 8, C, max_num_batched_tokens=64, max_chunk=32, groups=(LayerGroup(9, (0, 1)),)
    )
    engine = FakeEngine(scheduler, 4, eos=None, window=9)
    sequences = add(engine, 0, length=20, max_tokens=12, num_samples=4)
    [(_, children)] = engine.step().forks
    assert len(children) == 1 and engine.memory.num_free > 3
    engine.run()
    check_outputs(engine)
    assert len(sequences) == len(engine.finished) and scheduler.stats.num_preemptions == 0


def test_groups_of_layers_are_swapped_with_what_each_keeps():
    """Of 20 tokens, one of four layers has 5 blocks, the others 2 each: 11 / 4, rounded up."""
    groups = (LayerGroup(None, (3,)), LayerGroup(9, (0, 1, 2)))
    scheduler = Scheduler(1, 20, C, max_num_batched_tokens=9, max_chunk=9, groups=groups)
    assert [scheduler.block_budget.num_swapped(n) for n in (20, 8)] == [3, 2]
    assert scheduler.block_budget.num_wanted(20) == scheduler.block_budget.num_required(20) == 5


def test_a_large_request_is_not_overtaken():
    engine = make_engine(num_blocks=10)
    add(engine, 0, length=17, max_tokens=4)
    [large], [small] = add(engine, 1, length=25), add(engine, 2, length=1)
    plan = engine.step()
    assert len(plan.decodes) == 1 and plan.leave_on_stop
    assert (large.waits_for, small.waits_for) == ("blocks", "turn")
    engine.run()
    assert engine.finished[0].request.request_id == "0"
    check_outputs(engine)


def test_a_small_stream_does_not_starve_a_large_request():
    engine = make_engine(num_slots=3, num_blocks=12)
    for number in range(3):
        add(engine, number, length=9, max_tokens=10)
    engine.step()
    [large] = add(engine, 3, length=40, max_tokens=8)
    for number in range(4, 100):
        add(engine, number, length=9, max_tokens=10)
        engine.step()
        if large in engine.finished:
            break
    # Ten steps for those before it, eight of its own, and a few to get in.
    assert number < 4 + 10 + 8 + 4


def test_admission_keeps_blocks_for_those_that_run():
    # Three blocks for each, and when the third comes, one kept back for each of the other two.
    for num_blocks, num_running in ((11, 3), (10, 2)):
        engine = make_engine(num_blocks=num_blocks, enable_prefix_caching=False)
        for number in range(4):
            add(engine, number, length=10, max_tokens=12)
        assert len(engine.step().decodes) == num_running


def test_admission_keeps_no_block_for_who_will_never_need_one():
    # Three blocks for each, which hold all that they will ever write.
    engine = make_engine(num_blocks=9, enable_prefix_caching=False)
    for number in range(4):
        add(engine, number, length=10, max_tokens=3)
    assert len(engine.step().decodes) == 3


def test_admission_counts_the_rest_of_prompts_that_are_half_read():
    engine = make_engine(num_blocks=12, max_chunk=4)
    add(engine, 0, length=32)
    [second] = add(engine, 1, length=16)
    engine.step()
    # Eleven blocks are free, and seven of them promised.
    assert engine.memory.num_free == 11 and second.waits_for == "blocks"


def test_a_request_that_waits_for_blocks_is_not_looked_up_in_every_step():
    engine = make_engine(num_blocks=10)
    add(engine, 0, length=17, max_tokens=12)
    [large] = add(engine, 1, length=25)
    for _ in range(8):
        engine.step()
    assert large.waits_for == "blocks"
    # Once for the first; then beside its prefill, and after that.
    assert engine.memory.num_attempts == 3
    engine.run()
    check_outputs(engine)


def test_a_request_that_waits_for_blocks_is_looked_up_again_when_others_have_its_prefix():
    engine = make_engine(num_blocks=12)
    add(engine, 5, length=21, max_tokens=9)
    engine.step()
    prompt = prompt_of(0, 21)
    [sequence] = add(engine, 1, length=21, prompt=prompt)
    engine.step()
    assert sequence.waits_for == "blocks"
    add(engine, 0, length=21, max_tokens=9, prompt=prompt, priority=-1)
    engine.step()
    assert sequence.waits_for == "blocks"
    engine.step()
    assert sequence.slot is not None
    engine.run()
    check_outputs(engine)


# The prefix cache


def test_equal_prompts_that_arrive_together_are_prefilled_once():
    engine = make_engine(max_chunk=6)
    prompt = prompt_of(0, 14)
    add(engine, 0, length=14)
    equal = [add(engine, n, length=14, prompt=prompt)[0] for n in (1, 2)]
    [longer] = add(engine, 3, length=16, prompt=prompt + [2, 2])
    [other] = add(engine, 4, length=6, salt="other")
    plan = engine.step()
    assert all(s.waits_for == "same prefix" for s in (*equal, longer))
    assert [s.request.request_id for s, _ in plan.chunks] == ["0", "4"], "others go past them"
    assert plan.num_steps == 1 and other in plan.decodes
    engine.run()
    check_outputs(engine)
    # Three blocks for all, and what is past them: 1 token of each prompt but the last, or 3.
    assert engine.num_prefilled == 5 + 12 + 1 + 1 + 1 + 3
    assert engine.scheduler.stats.num_cached_tokens == 3 * 12


def test_nobody_waits_for_a_block_that_decode_will_fill():
    engine = make_engine(max_chunk=4)
    add(engine, 0, length=8)
    engine.step()
    [longer] = add(engine, 1, length=12, prompt=prompt_of(0, 12))
    plan = engine.step()
    assert len(plan.chunks) == 2 and longer.num_computed == 8


def test_prompts_with_different_salts_share_nothing():
    engine = make_engine()
    for number, salt in enumerate(("", "a", "b")):
        add(engine, number, length=14, prompt=prompt_of(0, 14), salt=salt)
    assert len(engine.step().chunks) == 3
    assert engine.scheduler.stats.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_looked_up():
    engine = make_engine(enable_prefix_caching=False)
    for number in range(2):
        add(engine, number, length=14, prompt=prompt_of(0, 14))
    assert [n for _, n in engine.step().chunks] == [13, 13]
    engine.run()
    assert engine.memory.num_attempts == engine.scheduler.stats.num_queried_tokens == 0


def test_a_cached_prompt_still_computes_its_last_token():
    engine = make_engine()
    for number, num_computed in ((0, 12), (1, 0)):
        [sequence] = add(engine, number, length=13, prompt=prompt_of(0, 13))
        plan = engine.step()
        assert sum(n for _, n in plan.chunks) == num_computed
        assert plan.decodes == [sequence]
        engine.run()
    check_outputs(engine)


# Samples


@pytest.mark.parametrize("length", [1, 8, 9, 10])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_samples_fork_before_the_first_decode(length, max_tokens):
    engine = make_engine(max_steps=4)
    leader, *others = add(engine, 0, length, max_tokens, num_samples=4)
    plan = engine.step()
    assert plan.forks == [(leader, others)] and plan.decodes == [leader, *others]
    assert engine.num_prefilled == length - 1
    engine.run()
    check_outputs(engine)
    assert len(engine.finished) == 4


def test_samples_without_a_slot_wait_and_find_the_prompt_in_the_cache():
    engine = make_engine(num_slots=2)
    leader, second, third, fourth = add(engine, 0, length=14, num_samples=4)
    [later] = add(engine, 1, length=2)
    plan = engine.step()
    assert plan.forks == [(leader, [second])]
    assert engine.scheduler.waiting == [third, fourth, later]
    engine.run()
    check_outputs(engine)
    assert engine.num_prefilled == 13 + 1 + 1 + 1


def test_samples_without_blocks_wait():
    engine = make_engine(num_blocks=6)
    leader, second, *rest = add(engine, 0, length=10, max_tokens=6, num_samples=4)
    # Three blocks for the prompt, one for the copy of its last: one is left for each that runs.
    assert engine.step().forks == [(leader, [second])]
    engine.run()
    check_outputs(engine)


@pytest.mark.parametrize(("budget", "step_of_fork"), [(11, 0), (10, 1), (8, 1)])
def test_samples_fork_one_step_later_if_the_prompt_used_up_the_budget(budget, step_of_fork):
    engine = make_engine(budget=budget)
    leader, *others = add(engine, 0, length=9, num_samples=3)
    add(engine, 1, length=20)
    plans = [engine.step() for _ in range(2)]
    assert plans[step_of_fork].forks == [(leader, others)]
    assert plans[step_of_fork].decodes == [leader, *others]
    if step_of_fork:
        assert not plans[0].decodes


def test_samples_fork_after_their_leader_was_preempted():
    engine = make_engine(num_slots=2, max_chunk=4)
    leader, other = add(engine, 0, length=14, num_samples=2, priority=1)
    engine.step()
    first, second = add(engine, 1, length=3, num_samples=2)
    engine.step()
    assert first.slot is not None and second.waits_for == "slots"
    engine.step()
    assert (leader.waits_for, other.waits_for) == ("preempted", "fork")
    engine.run()
    check_outputs(engine)
    assert set(engine.finished) == {leader, other, first, second}


# Preemption


def make_full(*, max_tokens: int = 30, **options) -> tuple[FakeEngine, list[Sequence]]:
    """Three with two of nine blocks each; they take the others in the next step."""
    engine = make_engine(num_blocks=9, enable_prefix_caching=False, **options)
    sequences = [add(engine, n, length=5, max_tokens=max_tokens)[0] for n in range(3)]
    for _ in range(4):
        engine.step()
    assert engine.memory.num_free == 3
    assert [s.num_computed for s in sequences] == [8, 8, 8]
    return engine, sequences


def test_preemption_frees_just_enough_and_spares_the_most_senior():
    engine, sequences = make_full()
    while not engine.scheduler.stats.num_preemptions:
        plan = engine.step()
    # All have 12 tokens, and there is no block: one goes, and the other two have its three.
    assert plan.decodes == sequences[:2]
    assert sequences[2].waits_for == "preempted" and sequences[2].num_preemptions == 1
    engine.run()
    check_outputs(engine)


def test_nobody_is_admitted_in_a_step_that_preempted():
    engine, sequences = make_full()
    [small] = add(engine, 3, length=1, max_tokens=1)
    while not engine.scheduler.stats.num_preemptions:
        plan = engine.step()
        assert small.slot is None
    assert plan.decodes == sequences[:2] and engine.memory.num_free >= 1


def test_who_loses_least_is_preempted_before_who_came_last():
    engine = make_engine(num_blocks=9, enable_prefix_caching=False)
    [first] = add(engine, 0, length=1, max_tokens=28)
    [young] = add(engine, 1, length=4, max_tokens=28)
    [old] = add(engine, 2, length=9, max_tokens=20)
    while not engine.scheduler.stats.num_preemptions:
        engine.step()
    assert young.num_preemptions == 1 and not old.num_preemptions
    assert not first.num_preemptions
    engine.run()
    check_outputs(engine)


def test_who_has_the_worst_priority_is_preempted_first():
    engine = make_engine(num_blocks=9, enable_prefix_caching=False)
    [low] = add(engine, 0, length=9, max_tokens=24, priority=5)
    [high] = add(engine, 1, length=2, max_tokens=28)
    [middle] = add(engine, 2, length=2, max_tokens=28, priority=1)
    while not engine.scheduler.stats.num_preemptions:
        engine.step()
    assert [s.num_preemptions for s in (low, high, middle)] == [1, 0, 0]


def test_who_came_back_is_spared_until_it_has_progressed():
    """Though it would lose less: else the same one might be preempted again and again."""
    engine = make_engine(
        num_slots=2, num_blocks=40, max_chunk=2, enable_prefix_caching=False, preemption="recompute"
    )
    [long] = add(engine, 0, length=17, max_tokens=40, priority=1)
    [short] = add(engine, 1, length=9, max_tokens=40, priority=1)
    while len(long.token_ids) == 17:
        engine.step()

    def preempt(number: int) -> list[int]:
        """How often either was preempted once a request that is preferred has its slot."""
        add(engine, number, length=1, max_tokens=1, priority=0)
        engine.step()
        return [long.num_preemptions, short.num_preemptions]

    assert preempt(2) == [0, 1], "it loses less"
    engine.step()
    assert 0 < short.num_computed < len(short.token_ids) - 1, "back, and not there yet"
    assert short.num_computed < long.num_computed
    assert preempt(3) == [1, 1]
    num_tokens = len(long.token_ids)
    while len(long.token_ids) == num_tokens:
        engine.step()
    assert short.num_computed < long.num_computed
    assert preempt(4) == [1, 2], "both have got further"
    engine.run()
    check_outputs(engine)


@pytest.mark.parametrize(
    ("costs", "is_swap"),
    [
        (PreemptionCosts(seconds_per_token=1.0, seconds_per_block=1.9), True),
        (PreemptionCosts(seconds_per_token=1.0, seconds_per_block=2.1), False),
        (PreemptionCosts(1.0, 1.9, max_swapped_blocks=2), False),
    ],
)
def test_the_cheaper_way_to_preempt_is_taken(costs, is_swap):
    # Twelve tokens in three blocks, each of them copied twice.
    engine, sequences = make_full(costs=costs, max_tokens=12)
    while not engine.scheduler.stats.num_preemptions:
        engine.step()
    assert sequences[2].is_swapped is is_swap
    stats = engine.scheduler.stats
    assert (stats.num_swap_preemptions, stats.num_recompute_preemptions) == (is_swap, not is_swap)
    num_prefilled = engine.num_prefilled
    while sequences[2].slot is None:
        engine.step()
    assert stats.num_recomputed_tokens == (0 if is_swap else 12)
    assert engine.num_prefilled - num_prefilled == stats.num_recomputed_tokens
    engine.run()
    check_outputs(engine)


def test_what_is_found_in_the_cache_is_not_counted_as_recomputed():
    engine = make_engine(num_slots=1, preemption="recompute")
    [low] = add(engine, 0, length=11, max_tokens=4, priority=1)
    engine.step()
    add(engine, 1, length=2, max_tokens=1)
    engine.step()
    assert low.num_preemptions == 1
    engine.run()
    check_outputs(engine)
    # Of its eleven tokens in the cache two full blocks were still there.
    assert engine.scheduler.stats.num_recomputed_tokens == 3


def test_host_memory_is_shared_by_all_that_are_swapped_out():
    engine = make_engine(preemption="swap", costs=PreemptionCosts(max_swapped_blocks=5))
    low = [add(engine, n, length=9, max_tokens=9, priority=1)[0] for n in range(3)]
    engine.step()
    for number in range(3, 7):
        add(engine, number, length=2, max_tokens=2)
    engine.step()
    assert sum(s.is_swapped for s in low) == 1
    engine.run()
    check_outputs(engine)


def test_prefills_that_have_no_block_left_preempt():
    engine = make_engine(num_blocks=8, max_chunk=4, num_slots=2)
    [first], [second] = add(engine, 0, length=30), add(engine, 1, length=24)
    scheduler, memory = engine.scheduler, engine.memory
    engine.step()
    assert second.waits_for == "blocks"
    # As if it had been let in all the same.
    scheduler._queue.waiting.remove(second)
    scheduler._queue.take_slot(second)
    while not scheduler.stats.num_preemptions:
        plan = engine.step()
    assert second.waits_for == "preempted" and [s for s, _ in plan.chunks] == [first]
    assert memory.num_free
    engine.run()
    check_outputs(engine)


# Priorities


def test_a_better_priority_takes_the_slot_of_the_worst():
    engine = make_engine(num_slots=2)
    [worst] = add(engine, 0, length=5, max_tokens=9, priority=3)
    [bad] = add(engine, 1, length=5, max_tokens=9, priority=2)
    engine.step()
    [good] = add(engine, 2, length=5, max_tokens=4, priority=1)
    plan = engine.step()
    assert plan.decodes == [bad, good] and worst.waits_for == "preempted"
    [equal] = add(engine, 3, length=5, max_tokens=4, priority=2)
    assert engine.step().decodes == [good, bad] and equal.waits_for == "slots"
    engine.run()
    check_outputs(engine)
    assert engine.finished[0] is good and engine.finished[-1] is worst


def test_a_better_priority_takes_blocks_and_no_more_than_it_needs():
    engine = make_engine(num_blocks=12, enable_prefix_caching=False)
    low = [add(engine, n, length=13, max_tokens=9, priority=1)[0] for n in range(2)]
    engine.step()
    assert engine.memory.num_free == 4
    [good] = add(engine, 2, length=20, max_tokens=4)
    assert engine.step().decodes == [low[0], good]
    engine.run()
    check_outputs(engine)


def test_a_better_priority_may_take_all_blocks_there_are():
    """Those that the worse one holds, that it will still fill, and that is kept back for it."""
    engine = make_engine(num_blocks=12, max_chunk=4, enable_prefix_caching=False)
    [low] = add(engine, 0, length=13, max_tokens=9, priority=1)
    engine.step()
    assert engine.memory.num_free == 11 and low.num_prefill
    [good] = add(engine, 1, length=45, max_tokens=4)
    engine.step()
    assert good.slot is not None and low.waits_for == "preempted"
    engine.run()
    check_outputs(engine)


def test_equal_prompts_of_a_better_priority_are_prefilled_once():
    engine = make_engine()
    add(engine, 0, length=5, max_tokens=9, priority=1)
    engine.step()
    urgent = [add(engine, n, length=9, prompt=prompt_of(1, 9))[0] for n in (1, 2)]
    assert engine.step().chunks == [(urgent[0], 8)]
    engine.run()
    assert engine.num_prefilled == 4 + 8


def test_nobody_is_preempted_in_vain():
    engine = make_engine(num_blocks=12, enable_prefix_caching=False)
    [good] = add(engine, 0, length=29, max_tokens=4, priority=0)
    [low] = add(engine, 1, length=1, max_tokens=9, priority=2)
    engine.step()
    [middle] = add(engine, 2, length=30, max_tokens=4, priority=1)
    plan = engine.step()
    assert plan.decodes == [good, low] and middle.waits_for == "blocks"
    engine.run()
    check_outputs(engine)
    assert not engine.scheduler.stats.num_preemptions


def test_nobody_is_preempted_for_blocks_that_others_hold_as_well():
    engine = make_engine(num_slots=5, num_blocks=14)
    prompt = prompt_of(0, 25)
    add(engine, 0, length=25, prompt=prompt, max_tokens=3)
    engine.step()
    low = [add(engine, n, length=25, prompt=prompt, max_tokens=3, priority=2)[0] for n in (1, 2, 3)]
    engine.step()
    assert engine.memory.num_free == 4 and engine.memory.num_held(low) == 3
    [middle] = add(engine, 4, length=30, max_tokens=3, priority=1)
    engine.step()
    assert middle.waits_for == "blocks" and not engine.scheduler.stats.num_preemptions
    engine.run()
    check_outputs(engine)


def test_a_better_priority_goes_first_among_those_that_wait():
    engine = make_engine(num_slots=1)
    sequences = [add(engine, n, length=3, priority=-n)[0] for n in range(3)]
    engine.run()
    assert engine.finished == sequences[::-1]


# How many steps


def test_many_steps_are_dispatched_when_nothing_but_decoding_goes_on():
    engine = make_engine(num_slots=2, max_steps=8, max_chunk=4)
    add(engine, 0, length=3, max_tokens=20)
    plan = engine.step()
    assert (plan.num_steps, plan.leave_on_stop) == (8, False)
    add(engine, 1, length=9, max_tokens=3)
    [waiting] = add(engine, 2, length=3, max_tokens=3)
    plan = engine.step()
    assert (plan.num_steps, plan.leave_on_stop) == (1, True), "a prompt is half read"
    plan = engine.step()
    assert (plan.num_steps, plan.leave_on_stop) == (8, True)
    # It left as soon as one had stopped, which made room.
    assert waiting in engine.step().decodes


def test_no_more_steps_are_dispatched_than_the_longest_may_take():
    engine = make_engine(max_steps=8)
    add(engine, 0, length=3, max_tokens=2)
    add(engine, 1, length=3, max_tokens=5)
    assert engine.step().num_steps == 5
    assert not engine.scheduler.has_unfinished


def test_one_step_is_dispatched_while_somebody_waits_for_the_budget():
    engine = make_engine(max_steps=8, budget=5)
    add(engine, 0, length=5, max_tokens=9)
    [other] = add(engine, 1, length=2, max_tokens=9)
    plan = engine.step()
    assert other.waits_for == "budget" and len(plan.decodes) == 1
    assert [plan.num_steps, engine.step().num_steps] == [1, 8]


@pytest.mark.parametrize(("num_slots", "num_steps"), [(2, 8), (4, 1)])
@pytest.mark.parametrize("too_large", [False, True])
def test_one_step_is_dispatched_while_somebody_waits_for_a_prefix(num_slots, num_steps, too_large):
    """But many if it has to wait for a slot as well."""
    engine = make_engine(num_slots=num_slots, max_steps=8)
    add(engine, 0, length=5, max_tokens=9)
    [equal] = add(engine, 1, length=5, max_tokens=9, prompt=prompt_of(0, 5))
    add(engine, 2, length=5, max_tokens=9)
    if too_large:
        add(engine, 3, length=75)
    plan = engine.step()
    assert equal.waits_for == "same prefix" and len(plan.decodes) == 2
    assert plan.num_steps == num_steps


def test_a_reason_to_wait_that_is_outdated_does_not_hold_up_others():
    engine = make_engine(num_slots=2, max_steps=8, max_chunk=4)
    add(engine, 0, length=9, max_tokens=30)
    [equal] = add(engine, 1, length=9, max_tokens=9, prompt=prompt_of(0, 9))
    add(engine, 2, length=2, max_tokens=30)
    engine.step()
    assert equal.waits_for == "same prefix"
    add(engine, 3, length=2, max_tokens=3, priority=-1)
    add(engine, 4, length=2, max_tokens=20, priority=-1)
    for _ in range(2):
        plan = engine.step()
    assert equal.waits_for == "turn"
    assert plan.num_steps > 1


def test_nothing_to_do_is_an_empty_plan():
    engine = make_engine(max_steps=8)
    assert engine.step() == StepPlan()


def test_stats_count_what_happened():
    engine = make_engine(num_slots=3)
    add(engine, 0, length=9, num_samples=3)
    add(engine, 1, length=9, prompt=prompt_of(0, 9))
    engine.run()
    stats = engine.scheduler.stats
    assert (stats.num_admitted, stats.num_finished, stats.peak_running) == (4, 4, 3)
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
    """Random arrivals, aborts and deadlines in pools that are too small for what arrives."""

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
            groups=(LayerGroup(window, (0, 1)),),
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
        num_samples = num_samples if max_tokens else 1  # as SamplingParams has it
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
            return  # others than those ran when the line was looked at
        still = [rank for s, rank in before.items() if s.waits_for not in ("", "same prefix")]
        let_in = [rank for s, rank in before.items() if not s.waits_for]
        assert not still or not let_in or max(let_in) < min(still)

    def ranks(self) -> dict[Sequence, tuple[int, ...]]:
        """Of those that wait: priority, how many of its client are served before it, arrival."""
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
        """A row is what the scheduler counts, and no longer than a window and a program are."""
        memory, block_budget = self.engine.memory, self.scheduler.block_budget
        most_tokens = max(self.scheduler.max_chunk, self.scheduler.max_steps)
        most, total = max_blocks_in_window(self.window, most_tokens, C), 0
        for sequence in self.scheduler.running:
            num_held = len(memory._held(sequence.slot))
            counted = block_budget.num_in_row(sequence.num_computed, sequence.program_start)
            assert num_held == counted <= most
            total += counted
        if self.scheduler.max_steps == 1:  # else those of several steps may share some
            assert total <= self.scheduler.num_blocks

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        # Each of these steps puts some token in the cache; and little is computed twice.
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
