"""Preemption of running sequences: causes, choice of the victim, swapping or recomputing."""

import pytest

from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import PreemptionCosts
from tests.support.fake_memory import FakeEngine
from tests.support.scheduling import add, check_outputs, make_engine, prompt_of


def make_full(*, max_tokens: int = 30, **options) -> tuple[FakeEngine, list[Sequence]]:
    """Return three sequences with two of nine blocks each, which take a third in the next step."""
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
    # All have 12 tokens and no block is free: one is preempted, the others get its three blocks.
    assert plan.decodes == sequences[:2]
    assert sequences[2].waits_for == "preempted" and sequences[2].num_preemptions == 1
    engine.run()
    check_outputs(engine)


def test_schedule_admits_none_after_a_preemption():
    engine, sequences = make_full()
    [small] = add(engine, 3, length=1, max_tokens=1)
    while not engine.scheduler.stats.num_preemptions:
        plan = engine.step()
        assert small.slot is None
    assert plan.decodes == sequences[:2] and engine.memory.num_free >= 1


def test_victim_has_the_lowest_cost_rather_than_the_latest_arrival():
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


def test_victim_has_the_worst_priority():
    engine = make_engine(num_blocks=9, enable_prefix_caching=False)
    [low] = add(engine, 0, length=9, max_tokens=24, priority=5)
    [high] = add(engine, 1, length=2, max_tokens=28)
    [middle] = add(engine, 2, length=2, max_tokens=28, priority=1)
    while not engine.scheduler.stats.num_preemptions:
        engine.step()
    assert [s.num_preemptions for s in (low, high, middle)] == [1, 0, 0]


def test_victim_is_not_a_sequence_without_progress_since_it_resumed():
    """A sequence with the lowest cost is spared too, or it could be preempted again and again."""
    engine = make_engine(
        num_slots=2, num_blocks=40, max_chunk=2, enable_prefix_caching=False, preemption="recompute"
    )
    [long] = add(engine, 0, length=17, max_tokens=40, priority=1)
    [short] = add(engine, 1, length=9, max_tokens=40, priority=1)
    while len(long.token_ids) == 17:
        engine.step()

    def preempt(number: int) -> list[int]:
        """Add an urgent request and return the number of preemptions of both sequences."""
        add(engine, number, length=1, max_tokens=1, priority=0)
        engine.step()
        return [long.num_preemptions, short.num_preemptions]

    assert preempt(2) == [0, 1], "it has the lower cost"
    engine.step()
    assert 0 < short.num_computed < len(short.token_ids) - 1, "its prefill continues"
    assert short.num_computed < long.num_computed
    assert preempt(3) == [1, 1]
    num_tokens = len(long.token_ids)
    while len(long.token_ids) == num_tokens:
        engine.step()
    assert short.num_computed < long.num_computed
    assert preempt(4) == [1, 2], "both have made progress"
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
def test_is_swapped_chooses_the_cheaper_way(costs, is_swap):
    # Twelve tokens in three blocks; a swap copies each block twice.
    engine, sequences = make_full(costs=costs, max_tokens=12)
    while not engine.scheduler.stats.num_preemptions:
        engine.step()
    assert sequences[2].is_swapped is is_swap
    stats = engine.scheduler.stats
    assert (stats.num_preemptions, stats.num_swap_preemptions) == (1, is_swap)
    num_prefilled = engine.num_prefilled
    while sequences[2].slot is None:
        engine.step()
    assert stats.num_recomputed_tokens == (0 if is_swap else 12)
    assert engine.num_prefilled - num_prefilled == stats.num_recomputed_tokens
    engine.run()
    check_outputs(engine)


def test_cached_tokens_are_not_counted_as_recomputed():
    engine = make_engine(num_slots=1, preemption="recompute")
    [low] = add(engine, 0, length=11, max_tokens=4, priority=1)
    engine.step()
    add(engine, 1, length=2, max_tokens=1)
    engine.step()
    assert low.num_preemptions == 1
    engine.run()
    check_outputs(engine)
    # Two full blocks of its eleven tokens were still in the cache.
    assert engine.scheduler.stats.num_recomputed_tokens == 3


def test_swapped_sequences_share_the_host_memory():
    engine = make_engine(preemption="swap", costs=PreemptionCosts(max_swapped_blocks=5))
    low = [add(engine, n, length=9, max_tokens=9, priority=1)[0] for n in range(3)]
    engine.step()
    for number in range(3, 7):
        add(engine, number, length=2, max_tokens=2)
    engine.step()
    assert sum(s.is_swapped for s in low) == 1
    engine.run()
    check_outputs(engine)


def test_prefills_without_a_free_block_preempt():
    engine = make_engine(num_blocks=8, max_chunk=4, num_slots=2)
    [first], [second] = add(engine, 0, length=30), add(engine, 1, length=24)
    scheduler, memory = engine.scheduler, engine.memory
    engine.step()
    assert second.waits_for == "blocks"
    # As if it had been admitted anyway.
    scheduler._queue.waiting.remove(second)
    scheduler._queue.take_slot(second)
    while not scheduler.stats.num_preemptions:
        plan = engine.step()
    assert second.waits_for == "preempted" and [s for s, _ in plan.chunks] == [first]
    assert memory.num_free
    engine.run()
    check_outputs(engine)


# Priorities


def test_better_priority_takes_the_slot_of_the_worst_priority():
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


def test_better_priority_takes_only_the_blocks_it_needs():
    engine = make_engine(num_blocks=12, enable_prefix_caching=False)
    low = [add(engine, n, length=13, max_tokens=9, priority=1)[0] for n in range(2)]
    engine.step()
    assert engine.memory.num_free == 4
    [good] = add(engine, 2, length=20, max_tokens=4)
    assert engine.step().decodes == [low[0], good]
    engine.run()
    check_outputs(engine)


def test_better_priority_may_take_all_blocks():
    """Blocks that the other sequence holds, that are promised to it, and its reserved block."""
    engine = make_engine(num_blocks=12, max_chunk=4, enable_prefix_caching=False)
    [low] = add(engine, 0, length=13, max_tokens=9, priority=1)
    engine.step()
    assert engine.memory.num_free == 11 and low.num_prefill
    [good] = add(engine, 1, length=45, max_tokens=4)
    engine.step()
    assert good.slot is not None and low.waits_for == "preempted"
    engine.run()
    check_outputs(engine)


def test_equal_prompts_of_better_priority_are_prefilled_once():
    engine = make_engine()
    add(engine, 0, length=5, max_tokens=9, priority=1)
    engine.step()
    urgent = [add(engine, n, length=9, prompt=prompt_of(1, 9))[0] for n in (1, 2)]
    assert engine.step().chunks == [(urgent[0], 8)]
    engine.run()
    assert engine.num_prefilled == 4 + 8


def test_better_priority_preempts_none_if_blocks_still_do_not_suffice():
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


def test_better_priority_does_not_count_shared_blocks_as_freed():
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


def test_better_priority_is_admitted_first():
    engine = make_engine(num_slots=1)
    sequences = [add(engine, n, length=3, priority=-n)[0] for n in range(3)]
    engine.run()
    assert engine.finished == sequences[::-1]
