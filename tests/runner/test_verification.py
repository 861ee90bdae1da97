"""Verification of drafts draws the tokens of decode steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.cache.blocks import check_invariants
from tests.support.decode_sequences import (
    FORK,
    GREEDY,
    NUM_ACCEPTED,
    PARAMS,
    PROMPTS,
    SEEDED,
    WIDTH,
    C,
    N,
    S,
    Sequence,
    T,
    assert_as_if_stepped,
    assert_same,
    cut,
    drafts_of,
    drawn,
    free_run,
    mixed,
    run,
    start,
    start_short_of_blocks,
    step_each,
    verify,
)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_verify_steps_draws_the_tokens_of_decode_steps(model, params) -> None:
    sequences = [Sequence(prompt, params, seed=4) for prompt in PROMPTS]
    free = drawn(run(model, start(model, sequences))[0])
    for kinds in (("right", "wrong", "partly", "short"), ("none", "mended", "right", "right")):
        drafts = [drafts_of(ids, kind) for ids, kind in zip(free, kinds, strict=True)]
        tokens, state = verify(model, start(model, sequences), drafts)
        num_new = [NUM_ACCEPTED[kind] + 1 for kind in kinds]
        assert drawn(tokens) == [ids[:n] for ids, n in zip(free, num_new, strict=True)]
        assert (int(tokens.num_steps), bool(tokens.ok)) == (max(num_new), True)
        assert int(tokens.free_blocks[0]) == int(state.cache.tables.pool.num_free)
        assert_as_if_stepped(state, step_each(model, start(model, sequences), num_new))
        # Decoding continues as without drafts.
        rest, _ = run(model, state, num_steps=N - 4)
        assert drawn(rest) == [ids[n : n + N - 4] for ids, n in zip(free, num_new, strict=True)]


def test_verify_steps_reports_the_logprobs_of_decode_steps(model) -> None:
    free = free_run(model)
    plain, _ = run(model, start(model, mixed()), num_steps=T + 1)
    tokens, _ = verify(model, start(model, mixed()), [drafts_of(ids, "right") for ids in free])
    assert tokens.num_new.tolist() == [T + 1] * S
    np.testing.assert_array_equal(tokens.draws.ranks, plain.draws.ranks[: T + 1])
    np.testing.assert_array_equal(tokens.draws.top_ids, plain.draws.top_ids[: T + 1])
    np.testing.assert_allclose(tokens.draws.logprobs, plain.draws.logprobs[: T + 1], atol=1e-5)
    np.testing.assert_allclose(
        tokens.draws.top_logprobs, plain.draws.top_logprobs[: T + 1], atol=1e-5
    )


def test_verify_steps_stops_within_drafts(model) -> None:
    free = free_run(model)
    sequences = mixed()
    sequences[0] = dataclasses.replace(
        sequences[0], params=dataclasses.replace(GREEDY, stop_token_ids=[free[0][1]])
    )
    sequences[1] = dataclasses.replace(sequences[1], max_length=len(PROMPTS[1]) + 3)
    sequences[2] = dataclasses.replace(sequences[2], max_length=len(PROMPTS[2]) + 1)
    tokens, state = verify(
        model, start(model, sequences), [drafts_of(ids, "right") for ids in free]
    )
    wanted = [cut(free[0], free[0][1]), free[1][:3], free[2][:1], free[3][: T + 1]]
    assert drawn(tokens) == wanted
    num_new = [len(ids) for ids in wanted]
    assert num_new[0] < T + 1
    assert_as_if_stepped(state, step_each(model, start(model, mixed()), num_new))


def test_verify_steps_at_the_end_of_a_table_needs_no_room_for_drafts(model) -> None:
    # One more token fills the table: no draft may be written.
    sequence = Sequence(PROMPTS[0], max_length=WIDTH * C + 1)
    tokens, state = run(model, start(model, [sequence]), [0], num_steps=N)
    for _ in range(2):
        tokens, state = run(model, state, [0], num_steps=N)
    tokens, state = run(model, state, [0], num_steps=2)
    assert int(state.cache.lengths[0]) == WIDTH * C - 1
    tokens, state = verify(model, state, [([3, 4, 5], T)], [0])
    assert (bool(tokens.ok), tokens.num_new.tolist()) == (True, [1, 0, 0, 0])
    assert int(state.cache.lengths[0]) == WIDTH * C


def test_verify_steps_of_forked_slots(model) -> None:
    samples = [Sequence(PROMPTS[0], SEEDED, seed=1, sample_index=i) for i in range(2)]
    free = drawn(run(model, start(model, samples), [0, 1])[0])
    state = start(model, samples[:1])
    cache, _ = FORK(state.cache, jnp.array([-1, 0, -1, -1], jnp.int32))
    state = samples[1].assign(dataclasses.replace(state, cache=cache), 1)
    tokens, state = verify(model, state, [drafts_of(free[0], "right")] * 2, [0, 1])
    assert tokens.num_new[0] == T + 1 > tokens.num_new[1]
    assert drawn(tokens)[1] == free[1][: int(tokens.num_new[1])]
    check_invariants(state.cache.tables)


def test_verify_steps_out_of_blocks_changes_nothing(model) -> None:
    _, state = run(model, start_short_of_blocks(model), [0, 1, 2], num_steps=6)
    before = jax.tree.map(np.array, state)
    drafts = [drafts_of(ids[-T:], "right") for ids in free_run(model)[:3]]
    tokens, state = verify(model, state, drafts, [0, 1, 2])
    assert (bool(tokens.ok), tokens.num_new.tolist(), int(tokens.num_steps)) == (False, [0] * S, 0)
    assert int(tokens.free_blocks[0]) == 1
    assert_same(before, state)
    tokens, _ = run(model, state, [0, 1, 2], num_steps=1)
    assert drawn(tokens) == [*(ids[6:7] for ids in free_run(model)[:3]), []]
