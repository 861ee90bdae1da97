"""Decoding on the device gives the tokens and the cache of a plain loop on the host."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.cache.blocks import check_invariants
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.runner import decode_state
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import decode_steps, verify_steps
from paged_jax.sampling.constraints import NEVER
from paged_jax.sampling.params import SamplingParams
from tests.support.decode_sequences import (
    BIASED,
    FORK,
    GREEDY,
    LENGTH,
    NUM_TOP,
    PENALISED,
    PLAIN,
    PROMPTS,
    RELEASE,
    SEEDED,
    WIDTH,
    C,
    N,
    P,
    S,
    Sequence,
    T,
    V,
    assert_as_if_stepped,
    assert_same,
    cut,
    drawn,
    empty_cache,
    expected,
    free_run,
    mixed,
    run,
    start,
    start_short_of_blocks,
    verify,
)
from tests.support.decode_step import DecodeLoop
from tests.support.tiny_model import EOS


def test_decode_steps_draws_the_tokens_of_a_host_loop(model) -> None:
    sequences = mixed()
    sequences[2] = dataclasses.replace(sequences[2], params=BIASED)
    tokens, state = run(model, start(model, sequences))
    assert drawn(tokens) == [expected(model, sequence) for sequence in sequences]
    assert (int(tokens.num_steps), bool(tokens.ok)) == (N, True)
    assert state.token_ids.tolist() == [ids[-1] for ids in drawn(tokens)]
    known = [len(sequence.token_ids) + N for sequence in sequences]
    assert state.cache.lengths.tolist() == [n - 1 for n in known]
    assert int(tokens.free_blocks[0]) == int(state.cache.tables.pool.num_free)
    check_invariants(state.cache.tables)


def test_decode_steps_does_not_depend_on_the_number_of_dispatches(model) -> None:
    tokens, state = run(model, start(model, mixed()))
    other = start(model, mixed())
    for i in range(N):
        step, other = run(model, other, num_steps=1)
        assert int(step.num_steps) == 1
        for of_all, of_step in zip(tokens.draws, step.draws, strict=True):
            assert_same(of_all[i], of_step[0])
    assert_as_if_stepped(state, other)


def test_decode_steps_accepts_rows_in_any_order(model) -> None:
    sequences = mixed()
    together, state = run(model, start(model, sequences))
    before = start(model, sequences)
    lengths = before.cache.lengths.tolist()
    some, other = run(model, before, [3, -1, 1])
    whole = drawn(together)
    assert drawn(some) == [whole[3], [], whole[1], []]
    ends = state.cache.lengths.tolist()
    assert other.cache.lengths.tolist() == [lengths[0], ends[1], lengths[2], ends[3]]
    assert other.token_ids.tolist()[::2] == [sequence.token_ids[-1] for sequence in sequences[::2]]
    counts = np.asarray(other.sampling.output_counts)
    assert counts.sum(axis=1).tolist() == [0, N, 0, N]
    assert counts[1, whole[1]].all()


def test_assign_continues_a_preempted_sequence(model) -> None:
    # Penalties depend on tokens generated before, and the seed on the position.
    sequence = Sequence(PROMPTS[0], PENALISED, seed=3)
    whole = drawn(run(model, start(model, [sequence]))[0])[0]
    again = dataclasses.replace(
        sequence, token_ids=PROMPTS[0] + whole[:3], num_prompt_tokens=len(PROMPTS[0])
    )
    assert drawn(run(model, start(model, [again]), [0])[0])[0][: N - 3] == whole[3:]


def test_decode_steps_of_forked_slots_copies_shared_blocks(model) -> None:
    # 6 tokens, 5 of them in the cache: a full block and a partly filled block.
    samples = [Sequence(PROMPTS[0], SEEDED, seed=1, sample_index=i) for i in range(S)]
    alone, _ = run(model, start(model, samples))
    state = start(model, [samples[0]])
    cache, ok = FORK(state.cache, jnp.array([-1, 0, 0, 0], jnp.int32))
    assert ok
    state = dataclasses.replace(state, cache=cache)
    for slot, each in enumerate(samples):
        state = each.assign(state, slot)
    tokens, state = run(model, state)
    assert drawn(tokens) == drawn(alone)
    assert len({tuple(ids) for ids in drawn(tokens)}) == S
    check_invariants(state.cache.tables)
    # 13 tokens each, and the first block is shared.
    assert int(tokens.free_blocks[0]) == P - 1 - S * 3


def test_decode_steps_reports_logprobs_ranks_and_top_tokens(model) -> None:
    sequence = Sequence(PROMPTS[0], SEEDED, seed=2)
    tokens, _ = run(model, start(model, [sequence]), [0])
    [ids, *_] = drawn(tokens)
    n = len(sequence.token_ids)
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : n + N] = sequence.token_ids + ids
    logprobs = np.asarray(jax.nn.log_softmax(PLAIN(model, padded)[0, n - 1 : n - 1 + N]))
    best = np.argsort(-logprobs, axis=1, kind="stable")
    np.testing.assert_allclose(tokens.draws.logprobs[:, 0], logprobs[np.arange(N), ids], atol=1e-5)
    ranks = 1 + (logprobs > logprobs[np.arange(N), ids][:, None]).sum(axis=1)
    assert tokens.draws.ranks[:, 0].tolist() == ranks.tolist()
    assert set(ranks.tolist()) > {1}
    np.testing.assert_array_equal(tokens.draws.top_ids[:, 0], best[:, :NUM_TOP])
    np.testing.assert_allclose(
        tokens.draws.top_logprobs[:, 0],
        np.take_along_axis(logprobs, best[:, :NUM_TOP], axis=1),
        atol=1e-5,
    )
    for padding in (
        tokens.draws.logprobs,
        tokens.draws.ranks,
        tokens.draws.top_ids,
        tokens.draws.top_logprobs,
    ):
        assert not padding[:, 1:].any()


@pytest.mark.slow
def test_decode_steps_draws_the_same_tokens_without_top_tokens(model) -> None:
    tokens, _ = run(model, start(model, mixed()), with_top=False)
    assert drawn(tokens) == free_run(model)
    drafts = [(ids[:T], T) for ids in free_run(model)]
    verified, _ = verify(model, start(model, mixed()), drafts, with_top=False)
    assert drawn(verified) == [ids[: T + 1] for ids in free_run(model)]
    for drawn_tokens in (tokens, verified):
        assert not drawn_tokens.draws.ranks.any()
        assert not drawn_tokens.draws.top_ids.any()
        assert not drawn_tokens.draws.top_logprobs.any()


def test_decode_steps_reports_no_top_tokens_with_num_top_0(model) -> None:
    run_without = functools.partial(decode_steps, max_steps=N)
    state = jax.eval_shape(lambda: DecodeState.create(empty_cache(model), V))
    slots = jnp.arange(S, dtype=jnp.int32)
    draws = jax.eval_shape(lambda *args: run_without(*args)[0].draws, model, state, slots, N)
    assert (draws.top_ids.shape, draws.top_logprobs.shape) == ((N, S, 0), (N, S, 0))


def test_decode_steps_stops_rows_at_stop_tokens_and_lengths(model) -> None:
    free = free_run(model)
    never = next(token_id for token_id in range(V) if token_id not in free[1])
    by_token = dataclasses.replace(SEEDED, stop_token_ids=[never, free[1][2]])
    sequences = mixed()
    sequences[0] = dataclasses.replace(sequences[0], max_length=len(PROMPTS[0]) + 4)
    sequences[1] = dataclasses.replace(sequences[1], params=by_token)
    sequences[2] = dataclasses.replace(sequences[2], eos_token_ids=(free[2][5],))
    tokens, state = run(model, start(model, sequences))
    wanted = [free[0][:4], cut(free[1], free[1][2]), cut(free[2], free[2][5]), free[3]]
    assert drawn(tokens) == wanted
    assert len({len(ids) for ids in wanted}) > 2
    assert int(tokens.num_steps) == N
    # The last token is not in the cache. The row keeps its blocks.
    lengths = [len(p) + len(ids) - 1 for p, ids in zip(PROMPTS, wanted, strict=True)]
    assert state.cache.lengths.tolist() == lengths
    assert state.token_ids.tolist() == [ids[-1] for ids in wanted]
    check_invariants(state.cache.tables)
    assert not tokens.token_ids[len(wanted[0]) :, 0].any()


def test_decode_steps_ends_when_all_rows_have_stopped(model) -> None:
    sequences = [dataclasses.replace(s, max_length=len(s.token_ids) + 2) for s in mixed()]
    sequences[1] = dataclasses.replace(sequences[1], max_length=len(PROMPTS[1]) + 3)
    tokens, _ = run(model, start(model, sequences))
    assert (int(tokens.num_steps), tokens.num_new.tolist()) == (3, [2, 3, 2, 2])
    assert tokens.ok
    tokens, state = run(model, start(model, sequences), [])
    assert (int(tokens.num_steps), tokens.num_new.tolist(), bool(tokens.ok)) == (0, [0] * S, True)


def test_leave_on_stop_ends_with_the_first_stopped_row(model) -> None:
    sequences = mixed()
    sequences[3] = dataclasses.replace(sequences[3], max_length=len(PROMPTS[3]) + 3)
    tokens, state = run(model, start(model, sequences), leave_on_stop=True)
    assert drawn(tokens) == [ids[:3] for ids in free_run(model)]
    # Padding does not count as a stopped row.
    tokens, _ = run(model, state, [0, 1, -1], leave_on_stop=True)
    assert tokens.num_new.tolist() == [N, N, 0, 0]


def test_rows_wait_for_the_host_while_others_continue(model) -> None:
    """Row 1 may draw two tokens, row 2 has a forced token and no mask, and row 3 never waits."""
    state, free = start(model, mixed()), free_run(model)
    starts = np.array([len(ids) for ids in PROMPTS[1:]], np.int32)
    every = np.full((S, state.constraints.masks.shape[1]), -1, np.int32)
    forced = np.zeros((S, state.constraints.forced_ids.shape[1]), np.int32)
    forced[:3, 0] = [free[row][0] for row in (1, 2, 3)]
    count = np.pad(np.ones(3, np.int32), (0, S - 3))
    waits_at = np.pad(starts + np.array([2, 1, 0]), (0, S - 3))
    waits_at[2] = NEVER
    slots = np.pad(np.array([1, 2, 3], np.int32), (0, S - 3), constant_values=-1)
    rows = slots, np.pad(starts, (0, S - 3)), count, waits_at, forced, every
    masks = decode_state.TokenMasks(*(np.asarray(row, np.int32) for row in rows))
    state = decode_state.write_token_masks(state, masks)
    tokens, state = run(model, state, leave_on_stop=True)
    assert drawn(tokens) == [free[0], free[1][:2], free[2][:1], free[3]]
    assert int(tokens.num_steps) == N and bool(tokens.ok)
    check_invariants(state.cache.tables)
    # They wait until the host has written further masks.
    again, state = run(model, state, [1, 2, -1, -1])
    assert again.num_new.tolist() == [0, 0, 0, 0] and int(again.num_steps) == 0
    masks.starts[:2] += [2, 1]
    masks.num_forced[:], masks.waits_at[:] = 0, NEVER
    state = decode_state.write_token_masks(state, masks)
    rest, _ = run(model, state, [1, 2, -1, -1])
    assert drawn(rest)[:2] == [
        free[1][2:] + drawn(rest)[0][N - 2 :],
        free[2][1:] + drawn(rest)[1][N - 1 :],
    ]


def test_stopped_rows_draw_nothing_in_later_calls(model) -> None:
    sequences = mixed()
    sequences[1] = dataclasses.replace(sequences[1], max_length=len(PROMPTS[1]) + 3)
    _, state = run(model, start(model, sequences), num_steps=4)
    lengths = state.cache.lengths.tolist()
    tokens, state = run(model, state, num_steps=2)
    assert tokens.num_new.tolist() == [2, 0, 2, 2]
    assert drawn(tokens) == [
        ids[4:6] if row != 1 else [] for row, ids in enumerate(free_run(model))
    ]
    assert state.cache.lengths.tolist() == [n + 2 * (i != 1) for i, n in enumerate(lengths)]
    # It counts as a stopped row, so no step is made.
    tokens, state = run(model, state, leave_on_stop=True)
    assert (int(tokens.num_steps), bool(tokens.ok)) == (0, True)
    tokens, _ = run(model, state, [0, 2], leave_on_stop=True, num_steps=1)
    assert tokens.num_new.tolist() == [1, 1, 0, 0]


def test_decode_steps_continues_a_prompt_that_ends_with_a_stop_token(model) -> None:
    prompt = PROMPTS[0]
    params = SamplingParams(temperature=0, stop_token_ids=[prompt[-1]])
    tokens, state = run(model, start(model, [Sequence(prompt, params)]), [0], num_steps=1)
    assert tokens.num_new.tolist() == [1, 0, 0, 0]
    always = dataclasses.replace(params, logit_bias={prompt[-1]: 1000.0})
    _, state = run(model, start(model, [Sequence(prompt, always)]), [0])
    tokens, _ = run(model, state, [0])
    assert int(tokens.num_steps) == 0


def test_eos_tokens_stop_unless_ignored_or_before_min_tokens(model) -> None:
    ending = SamplingParams(temperature=0, logit_bias={EOS: 1000.0})
    ways = [
        ending,
        dataclasses.replace(ending, ignore_eos=True),
        dataclasses.replace(ending, min_tokens=3),
        dataclasses.replace(ending, stop_token_ids=[EOS], ignore_eos=True),
    ]
    sequences = [Sequence(PROMPTS[0], params, eos_token_ids=(EOS,)) for params in ways]
    tokens, _ = run(model, start(model, sequences))
    assert tokens.num_new.tolist() == [1, N, 4, 1]


def test_nan_logits_give_nan_logprobs_and_do_not_stop_rows(model) -> None:
    graphdef, weights = nnx.split(model)
    broken = nnx.merge(graphdef, jax.tree.map(lambda x: x * jnp.nan, weights))
    # Without a valid logit, token 0 is drawn, although `min_tokens` excludes it.
    params = SamplingParams(temperature=0, stop_token_ids=[0], min_tokens=3)
    tokens, state = run(broken, start(broken, [Sequence(PROMPTS[0], params)]), [0])
    assert drawn(tokens)[0] == [0] * 4
    assert np.isnan(tokens.draws.logprobs[:4, 0]).all()
    check_invariants(state.cache.tables)


def test_stop_tokens_without_room_do_not_stop_on_the_device(model) -> None:
    [ids, *_] = free_run(model)
    others = [token_id for token_id in range(2, V) if token_id not in ids][:15]
    for stop_ids, num_new in (([*others, ids[0]], 1), ([*others, 2, ids[0]], N)):
        params = dataclasses.replace(GREEDY, stop_token_ids=stop_ids)
        tokens, _ = run(model, start(model, [Sequence(PROMPTS[0], params)]), [0])
        assert tokens.num_new.tolist()[0] == num_new


def test_decode_steps_ends_when_blocks_run_out(model) -> None:
    # 5, 2 and 0 tokens are in the cache. There are blocks for 7 steps: 12, 9 and 7 tokens need
    # 3 + 3 + 2 blocks.
    tokens, state = run(model, start_short_of_blocks(model), [0, 1, 2])
    assert not tokens.ok
    assert drawn(tokens) == [*(ids[:7] for ids in free_run(model)[:3]), []]
    assert (int(tokens.num_steps), int(tokens.free_blocks[0])) == (7, 0)
    assert state.cache.lengths.tolist() == [12, 9, 7, WIDTH * C]
    check_invariants(state.cache.tables)
    assert np.asarray(state.sampling.output_counts).sum(axis=1).tolist() == [7, 7, 7, 0]
    # After blocks were freed, decoding continues without loss.
    cache = RELEASE(state.cache, jnp.array([False, False, False, True]))
    tokens, _ = run(model, dataclasses.replace(state, cache=cache), [0, 1, 2], num_steps=1)
    assert tokens.ok
    assert drawn(tokens) == [*(ids[7:] for ids in free_run(model)[:3]), []]


def test_decode_steps_with_an_unknown_slot_changes_nothing(model) -> None:
    before = jax.tree.map(np.array, start(model, mixed()))
    tokens, state = run(model, start(model, mixed()), [0, S])
    assert (bool(tokens.ok), tokens.num_new.tolist()) == (False, [0] * S)
    assert_same(before, state)


WIDE = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


@pytest.mark.optimised
@pytest.mark.parametrize(
    "loop",
    [
        DecodeLoop(WIDE, 0.1, scan_layers=False, pool_dtype="float32", batch=1),
        pytest.param(
            DecodeLoop(WIDE, 0.1, scan_layers=False, pool_dtype="int8", batch=4),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            # XLA copies stacked weights, before the loop over layers in every step.
            DecodeLoop(WIDE, 0.1, scan_layers=True, dtype="float32", pool_dtype="float32", batch=1),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["float32", "int8 of 4", "scanned"],
)
def test_decode_steps_copies_neither_pools_nor_weights(loop) -> None:
    """XLA would convert bfloat16 weights to float32 before the loop."""
    loop = dataclasses.replace(loop, max_blocks_per_slot=16)
    arguments = loop.shapes()
    compiled = jax.jit(loop.function(), donate_argnums=1).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    weights = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]))
    cache = arguments[1].cache
    if not loop.scan_layers:
        assert memory.temp_size_in_bytes < weights
    assert memory.temp_size_in_bytes < 0.05 * cache.k.size * cache.k.dtype.itemsize
    pools = sum(pool.size * pool.dtype.itemsize for pool in cache.pools if pool is not None)
    assert memory.alias_size_in_bytes >= pools


def test_decode_steps_rejects_wrong_shapes(model) -> None:
    state = start(model, [])
    with pytest.raises(ValueError, match="max_steps must be a positive integer"):
        decode_steps(model, state, jnp.zeros(2, jnp.int32), 1, max_steps=0)
    with pytest.raises(ValueError, match=r"slots must have shape \[B\]"):
        decode_steps(model, state, jnp.zeros((2, 1), jnp.int32), 1, max_steps=1)
    with pytest.raises(ValueError, match="slots must be int32, got float32"):
        decode_steps(model, state, jnp.zeros(2), 1, max_steps=1)
    with pytest.raises(ValueError, match="slots must be distinct, got slot 1 more than once"):
        decode_steps(model, state, jnp.array([-1, 1, -1, 1]), 1, max_steps=1)
    with pytest.raises(ValueError, match="num_drafts must have B"):
        verify_steps(
            model, state, jnp.zeros((2, 3), jnp.int32), jnp.zeros(3, jnp.int32), jnp.arange(2)
        )
