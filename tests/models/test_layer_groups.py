"""A model with different sliding windows, and a cache with several groups."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Llama, LlamaConfig, SamplingParams
from paged_jax.cache import CacheGroup, PagedCache, paged_cache
from paged_jax.cache.blocks import check_invariants
from paged_jax.models.paged_model import create_cache
from paged_jax.models.parts.latent import LatentSizes
from paged_jax.runner.decode_state import DecodeState, assign
from paged_jax.runner.decoding import decode_steps, verify_steps
from paged_jax.sampling.state import Assignment

C = 4
LENGTH = 45
# The window is no multiple of C, so that it begins and ends within blocks.
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    sliding_window=10,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
)
CHUNK = 8

PREFILL = jax.jit(Llama.prefill, donate_argnames="cache")
DECODE = jax.jit(Llama.decode, donate_argnames="cache")
FORK = jax.jit(paged_cache.fork, donate_argnums=0)


@functools.cache
def make_model() -> Llama:
    return Llama(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def make_tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(0), (2, LENGTH), 0, CONFIG.vocab_size)


@functools.cache
def plain_logits() -> np.ndarray:
    return np.asarray(jax.jit(lambda model: model(make_tokens()))(make_model()))


def make_cache() -> PagedCache:
    """Return a cache with three slots and pools of NaN, to detect reads of free blocks."""
    cache = create_cache(CONFIG, num_slots=3, max_length=LENGTH + 3, block_size=C, max_tokens=CHUNK)
    assert len(cache.groups) == 2
    return poison(cache)


@functools.partial(jax.jit, donate_argnums=0)
def poison(cache: PagedCache) -> PagedCache:
    """Fill free blocks with NaN."""

    def spoil(group: CacheGroup) -> CacheGroup:
        is_free = (group.tables.pool.ref_counts == 0)[None, :, None, None, None]
        pools = jax.tree.map(lambda pool: jnp.where(is_free, jnp.nan, pool), group.pools)
        return group.replace_pools(pools)

    return dataclasses.replace(cache, groups=tuple(map(spoil, cache.groups)))


def i32(*values: Any) -> jax.Array:
    return jnp.array(values, jnp.int32)


def test_paged_steps_match_the_plain_forward() -> None:
    """Freed blocks are filled with NaN after each step, so free blocks are never read."""
    model, ids, expected = make_model(), make_tokens(), plain_logits()
    cache = make_cache()
    most = 0
    for start in range(0, 24, CHUNK):
        logits, cache, ok = PREFILL(
            model, cache, ids[:, start : start + CHUNK], i32(0, 1), i32(CHUNK, CHUNK)
        )
        assert ok
        np.testing.assert_allclose(logits, expected[:, start + CHUNK - 1], atol=2e-6)
        cache = poison(cache)
    cache, ok = FORK(cache, i32(-1, -1, 0))  # slot 2 continues slot 0 in its own blocks
    assert ok
    for place in range(24, LENGTH):
        tokens = ids[i32(0, 1, 0), place]
        logits, cache, ok = DECODE(model, cache, tokens, i32(0, 1, 2))
        assert ok
        np.testing.assert_allclose(logits[:2], expected[:, place], atol=2e-6)
        np.testing.assert_array_equal(logits[2], logits[0])
        cache = poison(cache)
        held = np.asarray(cache.groups[1].block_tables) < cache.groups[1].num_blocks
        most = max(most, held.sum(1).max())
    for group in cache.groups:
        check_invariants(group.tables)
    assert most <= -(-10 // C) + 1, "steps add no more than the window's blocks and one"
    for group in paged_cache.release(cache, jnp.ones(3, bool)).groups:
        assert int(group.tables.pool.num_free) == group.num_blocks


def test_decode_rejects_a_cache_that_keeps_too_few_tokens() -> None:
    sizes = {"num_kv_heads": 2, "block_size": C, "head_dim": 8}
    cache = PagedCache.create(
        num_layers=3, num_blocks=8, num_slots=2, max_blocks_per_slot=4, window=10, **sizes
    )
    with pytest.raises(
        ValueError, match="cache must keep all tokens for layer 1, got a cache that keeps the last"
    ):
        DECODE.eval_shape(make_model(), cache, i32(1), i32(0))
    group = PagedCache.create(
        num_layers=3, num_blocks=8, num_slots=2, max_blocks_per_slot=4, **sizes
    )
    with pytest.raises(ValueError, match="cache must have 3 layers, got 2"):
        DECODE.eval_shape(make_model(), PagedCache(group.groups, ((0, 0), (0, 1))), i32(1), i32(0))


def test_create_cache_sizes_the_pool_of_each_group() -> None:
    """One of three layers keeps all 4096 tokens. The others keep 10, and 8 new tokens."""
    cache = create_cache(CONFIG, num_slots=3, max_length=4096, block_size=C, max_tokens=CHUNK)
    every, some = cache.groups
    assert (every.num_layers, every.num_blocks) == (1, 3 * 1024)
    assert (some.num_layers, some.num_blocks) == (2, 3 * 6)
    assert cache.layers == ((1, 0), (0, 0), (1, 1))
    few = create_cache(CONFIG, num_slots=3, max_length=4096, block_size=C, num_blocks=9)
    assert [group.num_blocks for group in few.groups] == [9, 9]


@pytest.mark.slow
def test_programs_draw_the_same_tokens_as_with_one_group() -> None:
    """Runs several steps per program, and verifies drafts. Half of the drafts are right."""
    verify = jax.jit(verify_steps, donate_argnames="state")
    decode = jax.jit(decode_steps, donate_argnames="state", static_argnames="max_steps")
    one = PagedCache.create(
        num_layers=3, num_blocks=40, num_kv_heads=2, block_size=C, head_dim=8, num_slots=3,
        max_blocks_per_slot=12,
    )  # fmt: skip
    drawn: list[list[list[int]]] = []
    for cache in (one, make_cache()):
        state = DecodeState.create(cache, CONFIG.vocab_size)
        params = SamplingParams(temperature=1.0)
        rows = [Assignment(slot, params, [slot + 3], 1, slot, LENGTH) for slot in (0, 2)]
        state = assign(state, rows)
        slots, rows = i32(2, 0), [[], []]
        for turn in range(9):
            if turn % 3 == 2:
                known = drawn[0] if drawn else rows
                guesses = [row[len(rows[b]) :][:3] for b, row in enumerate(known)]
                guesses = [(guess + [0, 0, 0])[:3] for guess in guesses]
                tokens, state = verify(make_model(), state, i32(*guesses), i32(3, 2), slots)
            else:
                tokens, state = decode(make_model(), state, slots, 5, max_steps=5)
            assert tokens.ok
            for b, count in enumerate(tokens.num_new.tolist()):
                rows[b] += tokens.token_ids[:count, b].tolist()
        drawn.append(rows)
        for group in state.cache.groups:
            check_invariants(group.tables)
    shortest = [min(map(len, pair)) for pair in zip(*drawn, strict=True)]
    assert min(shortest) > 30
    for b, count in enumerate(shortest):
        assert drawn[0][b][:count] == drawn[1][b][:count]


def prefill_step(model: Llama, state: DecodeState, slots: jax.Array):
    tokens = jnp.ones((4, CHUNK), jnp.int32)
    logits, cache, ok = model.prefill(state.cache, tokens, slots, slots + 1)
    return logits, dataclasses.replace(state, cache=cache), ok


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(
    "step", [functools.partial(decode_steps, num_steps=3, max_steps=4), prefill_step]
)
def test_programs_update_all_pools_in_place(step) -> None:
    def create() -> DecodeState:
        sizes = {"num_slots": 64, "max_length": 8192, "block_size": C, "max_tokens": 512}
        return DecodeState.create(create_cache(CONFIG, **sizes), CONFIG.vocab_size)

    state, slots = jax.eval_shape(create), jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=1).lower(make_model(), state, slots).compile()
    memory = compiled.memory_analysis()
    nbytes = [sum(leaf.size * 4 for leaf in jax.tree.leaves(p)) for p in state.cache.group_pools]
    assert memory.alias_size_in_bytes > sum(nbytes)
    # A copy of the keys of a single layer would be a quarter of the smaller pools.
    assert memory.temp_size_in_bytes < min(nbytes) / 5


LATENT = dataclasses.replace(
    CONFIG,
    latent=LatentSizes(0, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
    num_key_value_heads=4,
    head_dim=4,
    sliding_window=None,
    layer_types=(),
)


@pytest.mark.parametrize("config", [CONFIG, LATENT], ids=["windows", "latent"])
def test_num_values_counts_the_elements_of_a_token_in_the_pools(config) -> None:
    cache = jax.eval_shape(
        lambda: create_cache(config, num_slots=3, max_length=LENGTH, block_size=C, max_tokens=CHUNK)
    )
    for group, pools in zip(config.layer_groups, cache.groups, strict=True):
        num_tokens = pools.pools.k.shape[1] * C
        assert group.num_values * num_tokens == sum(x.size for x in jax.tree.leaves(pools.pools))
