"""Slots of `ModelRunner`: attach, publish, release and swap the slots of the device."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from paged_jax import Llama
from paged_jax.kernels import Pools
from paged_jax.runner.executor import Executor
from paged_jax.runner.runner import ModelRunner
from paged_jax.runner.sizes import PUBLISH_WIDTH, Sizes
from paged_jax.runner.weights import Weights
from paged_jax.scheduler.request import Sequence
from tests.support.fake_memory import make_request
from tests.support.tiny_model import CONFIG

NUM_TOKENS = 36
SIZES = Sizes(
    block_size=1,
    num_slots=2,
    max_model_len=40,
    max_chunk=16,
    max_steps=1,
    num_drafts=0,
    max_logit_bias=4,
    max_stop_ids=4,
)


def make_executor(model) -> Executor:
    """Return an executor with ``2 * NUM_TOKENS`` blocks."""
    return Executor(
        Weights(model),
        SIZES,
        2 * NUM_TOKENS,
        cache_dtype="float32",
        cascade=False,
        backend=None,
    )


def test_swap_in_restores_blocks_that_need_several_calls(tiny_model) -> None:
    executor = make_executor(tiny_model)
    slots = ModelRunner(executor, ())
    assert SIZES.swap_width * 2 < NUM_TOKENS, "three pieces"
    request = make_request(0, [7] * (NUM_TOKENS + 1), max_tokens=1)
    [sequence] = request.sequences
    sequence.chain = None  # nothing is published
    sequence.slot, sequence.num_computed = 0, NUM_TOKENS

    def held(slot: int) -> list[np.ndarray]:
        cache = executor.state.cache
        blocks = np.asarray(cache.block_tables)[slot, :NUM_TOKENS]
        return [np.asarray(pool)[:, blocks] for pool in cache.pools[:2]]

    executor.run(executor.programs.reserve.call(np.array([NUM_TOKENS, 0], np.int32)))
    state, rng = executor.state, np.random.default_rng(0)
    pools = [rng.normal(size=pool.shape).astype(np.float32) for pool in state.cache.pools[:2]]
    pools = Pools(*jax.device_put(pools, state.cache.k.sharding))
    executor._state = dataclasses.replace(state, cache=state.cache.replace_pools(pools))
    before, blocks = held(0), np.asarray(state.cache.block_tables)[0]

    slots.swap_out(sequence)
    # Another sequence takes some of the blocks, so that the first sequence gets other blocks.
    slots.flush()
    executor.run(executor.programs.reserve.call(np.array([0, NUM_TOKENS // 2], np.int32)))
    slots.swap_in(sequence)
    assert sequence.host_blocks is None, "host memory is given back"

    assert (np.asarray(executor.state.cache.block_tables)[0] != blocks).any()
    for was, now in zip(before, held(0), strict=True):
        np.testing.assert_array_equal(now, was)
    assert slots.num_swapped_blocks in (0, 2 * NUM_TOKENS), "none is counted while compiling"


def test_attach_finds_a_window_after_older_blocks_were_evicted(monkeypatch) -> None:
    """A prefix is found if the device still has the blocks of its last window."""
    monkeypatch.setattr("paged_jax.runner.runner._MAX_PUBLISHED", 0)
    C, window, num_tokens = 4, 9, 24
    config = dataclasses.replace(
        CONFIG, sliding_window=window, model_type="mistral", num_hidden_layers=1
    )
    executor = Executor(
        Weights(Llama(config, rngs=nnx.Rngs(0))),
        SIZES._replace(block_size=C),
        7,
        cache_dtype="float32",
        cascade=False,
        backend=None,
    )
    slots = ModelRunner(executor, ())
    prompt = list(range(100, 100 + num_tokens))

    def make_sequence(tokens: list[int], slot: int) -> Sequence:
        [sequence] = make_request(0, [*tokens, 1], max_tokens=1).sequences
        sequence.slot = slot
        return sequence

    # Like after a swap from the host, the sequence has only the blocks of its window.
    sequence = make_sequence(prompt, 0)
    executor.run(executor.programs.reserve.call(np.array([num_tokens, 0], np.int32)))
    sequence.num_computed = num_tokens
    slots.release(sequence)
    slots.flush()
    pool = jax.device_get(executor.state.cache.tables.pool)
    assert sorted(pool.token_ids[pool.is_cached][:, 0]) == [116, 120]

    assert slots.attach(make_sequence(prompt[:12], 1)) == 0
    assert slots.attach(make_sequence(prompt, 1)) == num_tokens


def test_flush_publishes_blocks_in_several_calls(tiny_model) -> None:
    executor = make_executor(tiny_model)
    slots = ModelRunner(executor, ())
    assert NUM_TOKENS > PUBLISH_WIDTH
    first, second = (
        make_request(i, list(range(NUM_TOKENS + 1)), max_tokens=1, block_size=1).sequences[0]
        for i in range(2)
    )
    first.slot, second.slot = 0, 1
    executor.run(executor.programs.reserve.call(np.array([NUM_TOKENS, 0], np.int32)))
    first.num_computed = NUM_TOKENS
    slots.publish(first)
    assert slots.attach(second) == NUM_TOKENS
