"""Sharing of a step between running sequences: chunks, decodes, samples and numbers of steps."""

import pytest

from tests.support.scheduling import C, add, check_outputs, make_engine, prompt_of

# Prefill and budget


def test_add_chunk_decodes_in_the_step_that_completes_the_prefill():
    engine = make_engine(max_chunk=4)
    [sequence] = add(engine, 0, length=11, max_tokens=2)
    plans = [engine.step() for _ in range(4)]
    assert [plan.chunks for plan in plans] == [[(sequence, n)] for n in (4, 4, 2)] + [[]]
    assert [plan.decodes for plan in plans] == [[], [], [sequence], [sequence]]
    check_outputs(engine)


def test_prompt_of_one_token_needs_no_prefill():
    engine = make_engine()
    [sequence] = add(engine, 0, length=1)
    plan = engine.step()
    assert (plan.chunks, plan.decodes) == ([], [sequence])


def test_decodes_come_before_chunks():
    engine = make_engine(budget=10, num_blocks=40)
    first, second = (add(engine, i, length=5, max_tokens=20)[0] for i in range(2))
    engine.step()
    assert (first.num_prefill, second.num_prefill) == (0, 0)
    [third] = add(engine, 2, length=30)
    plan = engine.step()
    assert plan.decodes == [first, second] and plan.chunks == [(third, 8)]
    [last] = add(engine, 3, length=5)
    assert engine.step().chunks == [(third, 8)] and last.waits_for == "budget"


def test_urgent_prompt_of_one_token_with_max_tokens_0_draws_no_token():
    engine = make_engine(num_slots=1)
    add(engine, 0, length=5, max_tokens=9, priority=1)
    engine.step()
    [urgent] = add(engine, 1, length=1, max_tokens=0)
    assert engine.step().computed == [urgent] and engine.finished == [urgent]
    engine.run()
    check_outputs(engine)


def test_prefill_that_uses_up_the_budget_decodes_in_the_next_step():
    engine = make_engine(budget=8)
    [sequence] = add(engine, 0, length=9)
    assert engine.step().decodes == []
    plan = engine.step()
    assert plan.decodes == [sequence] and not plan.chunks


def test_prefill_that_uses_up_the_blocks_decodes_in_a_later_step():
    engine = make_engine(num_blocks=6, max_chunk=4)
    [sequence] = add(engine, 0, length=9)
    engine.step()
    # As if other sequences had taken all blocks except one.
    assert engine.memory.reserve({3: 4 * C})
    plan = engine.step()
    assert plan.chunks == [(sequence, 4)] and plan.decodes == []
    engine.memory.empty(3)
    assert engine.step().decodes == [sequence]


def test_add_chunks_serves_the_most_senior_sequence_first():
    engine = make_engine(num_slots=3, budget=6, num_blocks=40)
    [first], [second] = add(engine, 0, length=20), add(engine, 1, length=20)
    engine.step()
    [urgent] = add(engine, 2, length=20, priority=-1)
    assert first.slot is not None and second.waits_for == "budget"
    assert engine.step().chunks == [(urgent, 6)]
    engine.run()
    assert engine.finished == [urgent, first, second]


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


def test_samples_without_a_slot_find_the_prompt_in_the_cache():
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
    # Three blocks for the prompt, one for a copy of the last: one more for each running sample.
    assert engine.step().forks == [(leader, [second])]
    engine.run()
    check_outputs(engine)


@pytest.mark.parametrize(("budget", "step_of_fork"), [(11, 0), (10, 1), (8, 1)])
def test_samples_fork_one_step_later_if_the_prompt_uses_up_the_budget(budget, step_of_fork):
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


# How many steps


def test_num_steps_is_max_steps_if_all_decode():
    engine = make_engine(num_slots=2, max_steps=8, max_chunk=4)
    add(engine, 0, length=3, max_tokens=20)
    plan = engine.step()
    assert (plan.num_steps, plan.leave_on_stop) == (8, False)
    add(engine, 1, length=9, max_tokens=3)
    [waiting] = add(engine, 2, length=3, max_tokens=3)
    plan = engine.step()
    assert (plan.num_steps, plan.leave_on_stop) == (1, True), "a prompt is partly computed"
    plan = engine.step()
    assert (plan.num_steps, plan.leave_on_stop) == (8, True)
    # The plan stopped as soon as a sequence was complete, which freed its slot.
    assert waiting in engine.step().decodes


def test_num_steps_is_limited_by_the_longest_sequence():
    engine = make_engine(max_steps=8)
    add(engine, 0, length=3, max_tokens=2)
    add(engine, 1, length=3, max_tokens=5)
    assert engine.step().num_steps == 5
    assert not engine.scheduler.has_unfinished


def test_num_steps_is_1_while_a_sequence_waits_for_the_budget():
    engine = make_engine(max_steps=8, budget=5)
    add(engine, 0, length=5, max_tokens=9)
    [other] = add(engine, 1, length=2, max_tokens=9)
    plan = engine.step()
    assert other.waits_for == "budget" and len(plan.decodes) == 1
    assert [plan.num_steps, engine.step().num_steps] == [1, 8]


@pytest.mark.parametrize(("num_slots", "num_steps"), [(2, 8), (4, 1)])
@pytest.mark.parametrize("too_large", [False, True])
def test_num_steps_is_1_while_a_sequence_waits_for_a_prefix(num_slots, num_steps, too_large):
    """With no free slot, many steps run."""
    engine = make_engine(num_slots=num_slots, max_steps=8)
    add(engine, 0, length=5, max_tokens=9)
    [equal] = add(engine, 1, length=5, max_tokens=9, prompt=prompt_of(0, 5))
    add(engine, 2, length=5, max_tokens=9)
    if too_large:
        add(engine, 3, length=75)
    plan = engine.step()
    assert equal.waits_for == "same prefix" and len(plan.decodes) == 2
    assert plan.num_steps == num_steps


def test_num_steps_ignores_outdated_reasons_to_wait():
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
