"""What the scheduler asks of the cache, done on the device."""

import dataclasses

import jax
import numpy as np

from paged_jax.kernels import Pools
from paged_jax.runner import Sizes, Weights
from paged_jax.runner.executor import Executor
from paged_jax.runner.slots import Slots
from tests.support.fake_memory import make_request

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


def test_blocks_that_move_in_several_pieces_come_back_in_their_places(tiny_model) -> None:
    executor = Executor(
        Weights(tiny_model),
        SIZES,
        2 * NUM_TOKENS,
        cache_dtype="float32",
        cascade=False,
        backend=None,
    )
    slots = Slots(executor, ())
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
    # Another sequence takes some of the blocks, so that the first one gets others.
    slots.flush()
    executor.run(executor.programs.reserve.call(np.array([0, NUM_TOKENS // 2], np.int32)))
    slots.swap_in(sequence)

    assert (np.asarray(executor.state.cache.block_tables)[0] != blocks).any()
    for was, now in zip(before, held(0), strict=True):
        np.testing.assert_array_equal(now, was)
    assert slots.num_swapped_blocks in (0, 2 * NUM_TOKENS), "none is counted while compiling"
