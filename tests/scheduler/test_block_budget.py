"""Counts of the blocks that sequences need."""

import pytest

from paged_jax.cache.retention import AllTokens, LastTokens
from paged_jax.models.layer_groups import LayerGroup
from paged_jax.scheduler.scheduler import Scheduler
from tests.support.fake_memory import FakeEngine, make_request
from tests.support.scheduling import C, add, check_outputs, prompt_of


def test_window_budget_runs_long_prompts_in_few_blocks():
    window, groups = 9, (LayerGroup(LastTokens(9), (0, 1)),)
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
        4,
        8,
        C,
        max_num_batched_tokens=64,
        max_chunk=32,
        groups=(LayerGroup(LastTokens(9), (0, 1)),),
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
    groups = (LayerGroup(AllTokens(), (3,)), LayerGroup(LastTokens(9), (0, 1, 2)))
    scheduler = Scheduler(1, 20, C, max_num_batched_tokens=9, max_chunk=9, groups=groups)
    assert [scheduler.block_budget.num_swapped(n) for n in (20, 8)] == [3, 2]
    assert scheduler.block_budget.num_wanted(20) == scheduler.block_budget.num_required(20) == 5
