"""Sharing of a step between running sequences, and admission of waiting sequences."""

import pytest

from paged_jax.models.layer_groups import LayerGroup
from paged_jax.scheduler.scheduler import Scheduler
from tests.support.fake_memory import FakeEngine, make_request
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


# Admission


def test_window_budget_runs_long_prompts_in_few_blocks():
    window, groups = 9, (LayerGroup(9, (0, 1)),)
    scheduler = Scheduler(
        2, 3, C, max_num_batched_tokens=64, max_chunk=32, max_steps=4, groups=groups
    )
    engine = FakeEngine(scheduler, 2, eos=None, window=window)
    [first], [second] = add(engine, 0, length=200, max_tokens=20), add(engine, 1, length=90)
    engine.run()
    assert {len(first.token_ids), len(second.token_ids)} == {220, 93}
    check_outputs(engine)
    # A window covers at most three blocks, including the block of the next token.
    small = Scheduler(1, 2, C, max_num_batched_tokens=64, max_chunk=32, groups=groups)
    request = make_request(2, prompt_of(2, 50), max_tokens=5)
    with pytest.raises(ValueError, match="pool of 2 blocks of 4 tokens, .* which need 3"):
        small.add(request.sequences)


def test_window_budget_counts_whole_rows_for_samples():
    """Samples share blocks at first. A shared block is free when the last sample frees it."""
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


def test_num_swapped_counts_the_blocks_of_each_group():
    """With 20 tokens one of four layers has 5 blocks, the others have 2: 11 / 4, rounded up."""
    groups = (LayerGroup(None, (3,)), LayerGroup(9, (0, 1, 2)))
    scheduler = Scheduler(1, 20, C, max_num_batched_tokens=9, max_chunk=9, groups=groups)
    assert [scheduler.block_budget.num_swapped(n) for n in (20, 8)] == [3, 2]
    assert scheduler.block_budget.num_wanted(20) == scheduler.block_budget.num_required(20) == 5


def test_admit_does_not_let_others_overtake_a_large_request():
    engine = make_engine(num_blocks=10)
    add(engine, 0, length=17, max_tokens=4)
    [large], [small] = add(engine, 1, length=25), add(engine, 2, length=1)
    plan = engine.step()
    assert len(plan.decodes) == 1 and plan.leave_on_stop
    assert (large.waits_for, small.waits_for) == ("blocks", "turn")
    engine.run()
    assert engine.finished[0].request.request_id == "0"
    check_outputs(engine)


def test_admit_does_not_starve_a_large_request():
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
    # Ten steps of earlier requests, eight steps of the large one, and a few until it is admitted.
    assert number < 4 + 10 + 8 + 4


def test_admit_reserves_a_block_for_each_growing_sequence():
    # Three blocks for each. Admitting the third needs a reserved block for each of the other two.
    for num_blocks, num_running in ((11, 3), (10, 2)):
        engine = make_engine(num_blocks=num_blocks, enable_prefix_caching=False)
        for number in range(4):
            add(engine, number, length=10, max_tokens=12)
        assert len(engine.step().decodes) == num_running


def test_admit_reserves_no_block_for_sequences_that_cannot_grow():
    # Three blocks for each, enough for all tokens.
    engine = make_engine(num_blocks=9, enable_prefix_caching=False)
    for number in range(4):
        add(engine, number, length=10, max_tokens=3)
    assert len(engine.step().decodes) == 3


def test_admit_counts_the_promised_blocks_of_partial_prefills():
    engine = make_engine(num_blocks=12, max_chunk=4)
    add(engine, 0, length=32)
    [second] = add(engine, 1, length=16)
    engine.step()
    # Eleven blocks are free, seven of them are promised.
    assert engine.memory.num_free == 11 and second.waits_for == "blocks"


def test_try_to_start_does_not_look_up_a_waiting_request_in_every_step():
    engine = make_engine(num_blocks=10)
    add(engine, 0, length=17, max_tokens=12)
    [large] = add(engine, 1, length=25)
    for _ in range(8):
        engine.step()
    assert large.waits_for == "blocks"
    # Once for the first request. Once for the large one during the first prefill and once after it.
    assert engine.memory.num_attempts == 3
    engine.run()
    check_outputs(engine)


def test_retry_deferred_looks_up_again_after_a_prefill():
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


def test_equal_prompts_are_prefilled_once():
    engine = make_engine(max_chunk=6)
    prompt = prompt_of(0, 14)
    add(engine, 0, length=14)
    equal = [add(engine, n, length=14, prompt=prompt)[0] for n in (1, 2)]
    [longer] = add(engine, 3, length=16, prompt=prompt + [2, 2])
    [other] = add(engine, 4, length=6, salt="other")
    plan = engine.step()
    assert all(s.waits_for == "same prefix" for s in (*equal, longer))
    assert [s.request.request_id for s, _ in plan.chunks] == ["0", "4"], "other requests pass them"
    assert plan.num_steps == 1 and other in plan.decodes
    engine.run()
    check_outputs(engine)
    # Three shared blocks, and the tokens after them: 1 token of each prompt, 3 of the longest.
    assert engine.num_prefilled == 5 + 12 + 1 + 1 + 1 + 3
    assert engine.scheduler.stats.num_cached_tokens == 3 * 12


def test_no_sequence_waits_for_a_block_that_decode_fills():
    engine = make_engine(max_chunk=4)
    add(engine, 0, length=8)
    engine.step()
    [longer] = add(engine, 1, length=12, prompt=prompt_of(0, 12))
    plan = engine.step()
    assert len(plan.chunks) == 2 and longer.num_computed == 8


def test_prompts_with_different_salts_share_no_blocks():
    engine = make_engine()
    for number, salt in enumerate(("", "a", "b")):
        add(engine, number, length=14, prompt=prompt_of(0, 14), salt=salt)
    assert len(engine.step().chunks) == 3
    assert engine.scheduler.stats.num_cached_tokens == 0


def test_no_look_ups_without_prefix_caching():
    engine = make_engine(enable_prefix_caching=False)
    for number in range(2):
        add(engine, number, length=14, prompt=prompt_of(0, 14))
    assert [n for _, n in engine.step().chunks] == [13, 13]
    engine.run()
    assert engine.memory.num_attempts == engine.scheduler.stats.num_queried_tokens == 0


def test_cached_prompt_still_computes_its_last_token():
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
