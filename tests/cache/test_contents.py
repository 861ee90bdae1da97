"""Caches are saved and restored with `flax.serialization`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from paged_jax import cache as lib
from paged_jax.cache import PagedCache
from paged_jax.cache.blocks import check_invariants

SIZES = {"num_kv_heads": 1, "block_size": 4, "head_dim": 8, "num_slots": 2}


def new_cache(dtype=jnp.float32, **changes) -> PagedCache:
    sizes = {**SIZES, "num_layers": 1, "num_blocks": 6, "max_blocks_per_slot": 4, **changes}
    return PagedCache.create(dtype=dtype, **sizes)


def grouped_cache() -> PagedCache:
    groups = new_cache().groups + new_cache(window=4).groups
    return PagedCache(groups, layers=((0, 0), (1, 0)))


def used(cache):
    """Return the cache with two slots in use, and different numbers in all pools."""
    cache, ok = lib.reserve(cache, jnp.array([5, 2]), max_tokens=8)
    assert ok
    pools = [
        jnp.arange(1, x.size + 1).reshape(x.shape).astype(x.dtype)
        for x in jax.tree.leaves(cache.group_pools)
    ]
    structure = jax.tree.structure(cache.group_pools)
    return cache.replace_group_pools(jax.tree.unflatten(structure, pools))


MAKE = {
    "float32": new_cache,
    "bfloat16": partial(new_cache, jnp.bfloat16),
    "int8": partial(new_cache, jnp.int8),
    "float8_e4m3fn": partial(new_cache, jnp.float8_e4m3fn),
    "window": partial(new_cache, window=4),
    "grouped": grouped_cache,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_from_bytes_restores_a_cache(make) -> None:
    """Inside a larger tree, into arrays or shapes. The restored cache must be usable."""
    cache = used(make())
    data = serialization.to_bytes({"cache": cache, "step": 3})
    for target in (make(), jax.eval_shape(make)):
        got = serialization.from_bytes({"cache": target, "step": 0}, data)["cache"]
        assert jax.tree.structure(got) == jax.tree.structure(cache)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(cache), strict=True):
            assert a.dtype == b.dtype and isinstance(a, jax.Array)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for group in got.groups:
        check_invariants(group.tables)
    again, ok = lib.reserve(got, jnp.array([1, 1]))
    assert ok and again.lengths.tolist() == [6, 3]


def test_state_dict_of_a_cache_has_its_fields() -> None:
    cache = new_cache(window=4)
    state = serialization.to_state_dict(cache)
    assert set(state) == {"groups", "layers", "recurrent_layers"}
    group = state["groups"]["0"]
    assert set(group) == {"pools", "tables"}
    assert set(group["pools"]) == {"k", "v", "k_scale", "v_scale"}
    assert group["tables"]["retention"] == "LastTokens(window=4)"
    assert group["tables"]["block_size"] == 4
    np.testing.assert_array_equal(group["tables"]["pool"]["free_queue"], np.arange(6))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"num_blocks": 7}, r"CacheGroup.pools.k: the state must be float32 \[1, 7, 1, 4, 8\]"),
        ({"dtype": jnp.bfloat16}, "CacheGroup.pools.k: the state must be bfloat16"),
        (
            {"window": 4},
            r"the state must have retention = LastTokens\(window=4\), got AllTokens\(\)",
        ),
        ({"block_size": 2, "head_dim": 16}, "CacheGroup.pools.k: the state must be"),
    ],
)
def test_from_state_dict_rejects_a_cache_of_other_sizes(target, message) -> None:
    state = serialization.to_state_dict(new_cache())
    with pytest.raises(ValueError, match=message):
        serialization.from_state_dict(new_cache(**target), state)
    with pytest.raises(ValueError, match="the state must have the fields"):
        serialization.from_state_dict(new_cache(), {"groups": state["groups"]})
