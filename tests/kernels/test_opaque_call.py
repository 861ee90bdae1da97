"""Tests that `checkify.index_checks` accepts out-of-range indices that ops drop on purpose."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from paged_jax import cache as paged
from paged_jax.kernels import (
    cascade_attention,
    copy_blocks,
    paged_attention,
    paged_prefill_attention,
    paged_rope_write,
    paged_write,
    ragged_paged_attention,
)
from paged_jax.kernels.opaque_call import without_index_checks
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG

L, P, K, C, D, B = 2, 6, 2, 4, 8, 3
POOL = np.random.default_rng(0).normal(size=(L, P, K, C, D)).astype(np.float32)
PAGES = np.random.default_rng(1).normal(size=(P, C, 2 * K, D)).astype(np.float32)
# Table entries after the length are invalid, the last sequence is empty, and padding has block P.
TABLES = np.array([[0, 1, P], [2, P, 10**6], [P, P, -1]], np.int32)
LENS, QUERY_LENS = np.array([7, 3, 0], np.int32), np.array([3, 2, 0], np.int32)
Q, CHUNKS = np.ones((B, 2 * K, D), np.float32), np.ones((B, 5, 2 * K, D), np.float32)
NEW, QKV = np.ones((4, K, D), np.float32), np.ones((4, K, 4, D), np.float32)
BLOCKS, OFFSETS = np.array([3, P, -1, 10**6], np.int32), np.array([3, 0, 0, 0], np.int32)
ANGLES = np.ones((4, D // 2), np.float32)
BOUNDS, NUM_SEQS = np.array([0, 3, 5, 5], np.int32), np.array([2], np.int32)


def ragged(q, **backend):
    return ragged_paged_attention(
        q, jnp.asarray(PAGES), LENS, TABLES, BOUNDS, NUM_SEQS, sm_scale=1.0, **backend
    )


def quantised_write(new, **backend):
    pool, scale = jnp.zeros(POOL.shape, jnp.int8), jnp.zeros(POOL.shape[:4])
    written = paged_write(
        pool, pool, jax.lax.stop_gradient(new), new, BLOCKS, OFFSETS,
        layer=0, k_scale=scale, v_scale=scale, **backend,
    )  # fmt: skip
    return written.k_scale


def rope_write(qkv, **backend):
    places = BLOCKS, OFFSETS
    return paged_rope_write(POOL, POOL, qkv, ANGLES, ANGLES, *places, layer=0, **backend)[1].k


# Functions of an array and the backend.
OPS = {
    "write": (lambda x, **b: paged_write(POOL, POOL, x, x, BLOCKS, OFFSETS, layer=0, **b).k, NEW),
    "rope_write": (rope_write, QKV),
    "copy": (lambda x, **b: copy_blocks(x, POOL, OFFSETS[:2], BLOCKS[:2], **b).k, POOL),
    "decode": (lambda x, **b: paged_attention(x, POOL, POOL, TABLES, LENS, layer=0, **b), Q),
    "prefill": (
        lambda x, **b: paged_prefill_attention(
            x, POOL, POOL, TABLES, LENS, QUERY_LENS, layer=0, **b
        ),
        CHUNKS,
    ),
    "cascade": (
        lambda x, **b: cascade_attention(x, POOL, POOL, TABLES[[0, 0, 2]], LENS, 1, layer=0, **b),
        Q,
    ),
    "ragged": (ragged, np.ones((9, 2 * K, D), np.float32)),
}


def check(function, *args) -> None:
    """Check that no error is reported and that the checks do not change the result."""
    error, got = checkify.checkify(jax.jit(function), errors=checkify.index_checks)(*args)
    assert error.get() is None
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(function)(*args))


def gradient(function):
    return jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.slow), None])
def test_ops_pass_index_checks(name, backend) -> None:
    function, x = OPS[name]
    check(partial(function, backend=backend), x)
    check(gradient(partial(function, backend=backend)), x)


def test_paged_write_of_scales_passes_index_checks() -> None:
    check(quantised_write, NEW)


@pytest.mark.parametrize("window", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_cache_functions_pass_index_checks(window) -> None:
    def use_all() -> tuple:
        cache = paged.PagedCache.create(
            num_layers=L, num_blocks=2 * P, num_kv_heads=K, block_size=C, head_dim=D,
            num_slots=B, max_blocks_per_slot=3, window=window,
        )  # fmt: skip
        cache, _ = paged.reserve(cache, jnp.array([5, 2, 0]), max_tokens=6)
        digests = jnp.arange(2 * 8, dtype=jnp.uint32).reshape(2, 8)
        tokens = jnp.zeros((2, C), jnp.int32)
        slots = jnp.array([0, -1], jnp.int32)
        cache = paged.publish(cache, slots, jnp.array([0, 9]), digests, tokens)
        cache, _ = paged.fork(cache, jnp.array([-1, -1, 0]))
        cache, _ = paged.reserve(cache, jnp.array([1, 0, 1]))
        places = paged.locate(cache.tables, jnp.array([-1, 0, 7, 1]), jnp.array([0, 5, 1, 99]))
        cache = paged.truncate(cache, jnp.array([4, 2, 6]), max_tokens=6)
        cache = paged.reorder(cache, jnp.array([2, -1, 0]))[0]
        cache = paged.release(cache, jnp.array([True, False, False]))
        values = paged.read_blocks(cache, 2, 0, width=3)
        cache, num_found = paged.attach(cache, 0, digests, tokens, 2)
        cache, ok = paged.restore(cache, jnp.array([0, 0, 0]), max_tokens=6)
        cache = paged.write_blocks(cache, 2, 0, values)
        return paged.forget(cache), places, values, num_found, ok, paged.gather(cache, 2, layer=0)

    check(use_all)


def test_index_checks_still_apply_to_the_caller() -> None:
    def program(x, place):
        return OPS["write"][0](x)[place]

    error, _ = checkify.checkify(jax.jit(program), errors=checkify.index_checks)(NEW, L)
    assert "out-of-bounds" in error.get()


@jax.jit
def put(x, index, new):
    return jnp.sin(x).at[index].set(jnp.cos(new), mode="drop", unique_indices=True)


def test_without_index_checks_keeps_values_and_derivatives() -> None:
    """Test vmap, and derivatives in both modes up to second order, against the plain function."""
    hidden = without_index_checks(put)
    x, index, new = jnp.arange(4.0), jnp.array([2, 7, 0]), jnp.arange(3.0) + 0.5

    def views(put):
        outer = jnp.float32(1.5)  # an array in the closure of the function

        def loss(x, new):
            return jnp.sum(outer * put(x, index, new) ** 3)

        yield put, (x, index, new)
        yield jax.vmap(put, in_axes=(None, None, 0)), (x, index, jnp.stack([new, 2 * new]))
        yield jax.grad(loss, argnums=(0, 1)), (x, new)
        yield jax.vmap(jax.grad(loss), in_axes=(0, None)), (jnp.stack([x, 3 * x]), new)
        yield jax.hessian(loss), (x, new)
        yield jax.grad(lambda x, new: jnp.sum(jax.grad(loss, 1)(x, new) ** 2)), (x, new)
        yield partial(jax.jvp, loss), ((x, new), (new.sum() * x, new))

    for (function, args), (plain, _) in zip(views(hidden), views(put), strict=True):
        got, expected = jax.jit(function)(*args), jax.jit(plain)(*args)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, expected)


def test_prefill_passes_index_checks() -> None:
    """Rows that are skipped have an out-of-range slot."""
    model = random_llama(CONFIG)
    cache = model.create_cache(
        num_slots=B, max_length=16, num_blocks=P, block_size=C, max_tokens=4, dtype=jnp.float32
    )
    token_ids, slots, num_tokens = (
        jnp.ones((2, 4), jnp.int32),
        jnp.array([0, -1]),
        jnp.array([3, 0]),
    )
    check(lambda cache: model.prefill(cache, token_ids, slots, num_tokens)[0], cache)
