"""Batches in which some requests have grammars: the same tokens, and more steps for the others."""

import itertools

import pytest

from paged_jax import Engine, SamplingParams, StructuredOutputsParams
from paged_jax.cache.blocks import check_invariants
from paged_jax.scheduler.step_plan import StepPlan
from tests.support.structured import SIZES

FORMS = [
    StructuredOutputsParams(regex="[a-z ]{40,}"),
    StructuredOutputsParams(regex="(one|two|three)( and (one more|two more|no more)){9}"),
    None,
    None,
]
WAYS = ["after one another", "queued", "called by a thread"]
# So many tokens of all forms fit into the pool.
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(**SIZES)


def set_way(engine: Engine, way: str, num_free_steps: int) -> None:
    """Let an engine alternate with a fixed number of steps."""
    lookahead, clock = engine.core.scheduler.lookahead, engine.core.mask_clock
    lookahead.is_used = way != WAYS[0]
    engine.core.executor.calls_wait = way == WAYS[2]
    clock.note_read = lambda *args: None
    lookahead.num_free_steps = num_free_steps


@pytest.fixture(scope="module")
def drafting() -> Engine:
    """Engine that verifies drafts."""
    return Engine(**SIZES, num_speculative_tokens=3)


def play(
    engine: Engine, indices, *, abort_at: int | None = None, max_tokens: int = NUM_TOKENS
) -> tuple[dict, list[StepPlan]]:
    """Return the tokens of the requests of some forms, and all plans."""
    plans, run = [], engine.core._queue
    engine.core._queue = lambda plan: plans.append(plan) or run(plan)
    for index in indices:
        options = {
            "max_tokens": max_tokens,
            "seed": index,
            "temperature": 1.0 if index != 2 else 0.0,
        }
        options |= {"ignore_eos": FORMS[index] is None, "structured_outputs": FORMS[index]}
        engine.add_request("It is", SamplingParams(**options), request_id=str(index))
    tokens, count = {}, 0
    while engine.has_unfinished:
        count += 1
        if count == abort_at:
            engine.abort("1")
            engine.core.guard.recover()
        for output in engine.step():
            tokens[int(output.request_id)] = output.outputs[0].token_ids
    del engine.core._queue
    check_invariants(engine.cache.tables)
    return tokens, plans


@pytest.fixture(scope="module")
def alone(engine) -> dict[int, list[int]]:
    set_way(engine, WAYS[0], 0)
    return {index: play(engine, [index])[0][index] for index in range(len(FORMS))}


@pytest.mark.parametrize(
    ("way", "num_free_steps"),
    [
        pytest.param(way, k, marks=() if (way, k) == (WAYS[1], 1) else pytest.mark.slow)
        for way, k in itertools.product(WAYS, (0, 1, 5))
    ],
)
def test_tokens_do_not_depend_on_the_way(engine, alone, way, num_free_steps) -> None:
    set_way(engine, way, num_free_steps)
    tokens, plans = play(engine, range(len(FORMS)))
    assert tokens == alone
    # Plans without the sequences that wait for their masks.
    apart = [plan for plan in plans if not plan.bound and len(plan.decodes) == 2]
    has_apart = any(plan.num_steps == num_free_steps for plan in apart)
    assert has_apart is (way != WAYS[0] and num_free_steps > 0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("num_free_steps", [0, 3])
def test_tokens_do_not_depend_on_drafts(drafting, alone, way, num_free_steps) -> None:
    set_way(drafting, way, num_free_steps)
    num_drafts = drafting.stats.num_drafts
    tokens, plans = play(drafting, range(len(FORMS)))
    assert tokens == alone
    # Without the sequences that wait for their masks, and without drafts.
    apart = [plan for plan in plans if plan.is_ahead]
    assert bool(apart) is (num_free_steps > 0)
    assert any(len(plan.decodes) == 2 and plan.num_steps == num_free_steps for plan in apart) is (
        num_free_steps > 0
    )
    if not num_free_steps:
        assert drafting.stats.num_drafts > num_drafts
    # After the last grammar, no plan is made ahead.
    last = max(index for index, plan in enumerate(plans) if plan.bound)
    assert not any(plan.is_ahead for plan in plans[last + 2 :])


@pytest.mark.slow
def test_others_need_fewer_plans(engine, alone) -> None:
    """With k = 5 the others end in a sixth of the cycles of k = 0."""
    counts = []
    for num_free_steps in (0, 5):
        set_way(engine, WAYS[1], num_free_steps)
        tokens, plans = play(engine, range(len(FORMS)))
        free = {index for index in tokens if FORMS[index] is None}
        counts.append(sum(bool(plan.bound) and len(plan.decodes) == 4 for plan in plans))
        assert {index: tokens[index] for index in free} == {index: alone[index] for index in free}
    assert counts[1] <= counts[0] / 3


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[1:])
def test_tokens_do_not_depend_on_interruptions(engine, alone, way) -> None:
    for abort_at in (3, 4, 7):
        set_way(engine, way, 3)
        tokens, _ = play(engine, range(len(FORMS)), abort_at=abort_at)
        del tokens[1]
        assert tokens == {index: alone[index] for index in tokens} and len(tokens) == 3


def test_tokens_do_not_depend_on_missing_blocks(engine, alone) -> None:
    set_way(engine, WAYS[1], 4)
    assert not engine.stats.num_preemptions
    tokens, plans = play(engine, range(len(FORMS)), max_tokens=2 * NUM_TOKENS)
    assert {index: ids[:NUM_TOKENS] for index, ids in tokens.items()} == alone
    assert engine.stats.num_preemptions
    assert any(plan.is_ahead and plan.bound for plan in plans)
