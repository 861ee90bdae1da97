"""Tests of latent attention: values are the first elements of the keys, and have no pool.

All backends are compared with float64 on the stored values of the pool, see
`tests.support.paged_batch`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import (
    Pools,
    cascade_attention,
    copy_blocks,
    paged_attention,
    paged_prefill_attention,
    paged_write,
    write_kv_pages,
)
from paged_jax.kernels.kv_dtypes import quantise
from tests.support import oracles
from tests.support.compiler import needs_compiler
from tests.support.paged_batch import BACKENDS, LAYER, OUT_OF_RANGE, PagedBatch, lanes_for, queries
from tests.support.ragged_batch import RaggedBatch

D, U = 48, 32  # no power of two; keys are longer than values by half, as rotated parts are shorter

INTERPRETED = ("mosaic_tpu", "triton")


def cases(*names: str) -> list[Any]:
    """Return backends. Those with interpreted kernels, which compile slowly, are marked slow."""
    marks = {"cpu": [needs_compiler]} | {each: [pytest.mark.slow] for each in INTERPRETED}
    return [
        pytest.param(name, marks=marks.get(name, []), id=name) for name in names or sorted(BACKENDS)
    ]


# Lengths around the ends of blocks and tiles, as in the tests of other attention.
LENGTHS = [0, 1, 7, 8, 9, 200, 33, 129, 128, 150, 304]
QUERY_LENS = [0, 1, 3, 8, 0, 130, 33, 2, 1, 17, 130]
SINKS = np.array([0.3, -1.0, 2.5, 0.0, 4.0, -3.0], np.float32)
OPTIONS = {
    "plain": {},
    "all": {"scale": 0.3, "sliding_window": 150, "soft_cap": 2.0, "sinks": SINKS},
}


def check(batch: PagedBatch, q, query_lens, backend, *, rtol=0.0, atol=1e-5, **options) -> None:
    """Check outputs and log-sum-exp of a decode with the first queries and a prefill with all."""
    got = batch.attend(q, query_lens, **backend, **options)
    want = batch.expected(q, query_lens, **options)
    names = ("decode", "decode lse", "prefill", "prefill lse")
    for name, a, b in zip(names, (*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=rtol, atol=atol, err_msg=name)


def batch_of(name: str, lengths: Any, **sizes: Any) -> PagedBatch:
    """Return sequences for a backend: a head with keys of D elements. The first U are values."""
    sizes = {"K": 1, "D": D, "value_dim": U} | sizes
    return PagedBatch.random(lengths, lanes=lanes_for(BACKENDS[name], sizes["D"]), **sizes)


@functools.cache
def standard_queries() -> np.ndarray:
    return queries((len(LENGTHS), max(QUERY_LENS), 6, D))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", cases())
def test_latent_attention_matches_float64(name, options) -> None:
    """Decode kernels split the contexts of the wide table into parts, and merge their results."""
    batch = batch_of(name, LENGTHS, extra_width=500 if options == "plain" else 0)
    check(batch, standard_queries(), QUERY_LENS, BACKENDS[name], **OPTIONS[options])


def test_latent_attention_of_a_small_batch_matches_float64() -> None:
    """A quick test of interpreted kernels: one block more than a tile of keys."""
    batch = batch_of("triton", [9, 131, 0])
    check(batch, queries((3, 2, 5, D)), [2, 1, 0], BACKENDS["triton"], scale=0.2)


@pytest.mark.parametrize("name", cases("cpu", "reference", "xla"))
def test_latent_attention_ignores_padding_of_the_pools(name) -> None:
    """The padding is NaN."""
    batch = PagedBatch.random([9, 30, 0], K=1, D=D, value_dim=U, lanes=128)
    check(batch, queries((3, 2, 4, D)), [2, 1, 0], BACKENDS[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", cases())
def test_latent_attention_of_narrow_pools_matches_float64(name, dtype) -> None:
    """Quantised pools have one scale per token, of keys and values together."""
    batch = batch_of(name, [9, 30, 0], dtype=jnp.dtype(dtype))
    assert (batch.pools.k_scale is not None) == (dtype != "bfloat16")
    q = queries((3, 5, 4, D), jnp.bfloat16)
    check(batch, q, [4, 5, 0], BACKENDS[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", cases())
def test_latent_attention_of_the_sizes_of_deepseek_matches_float64(name) -> None:
    """More query heads than a tile of 16."""
    batch = batch_of(name, [40, 17], C=16, D=576, value_dim=512)
    check(batch, queries((2, 3, 20, 576)), [3, 2], BACKENDS[name], scale=192**-0.5)


@pytest.mark.parametrize("name", cases("cpu", "reference", "xla"))
def test_separate_values_of_another_size_match_float64(name) -> None:
    """Keys have 48 elements, and values 32 in a pool of their own."""
    batch = PagedBatch.random([40, 17, 0], D=D)
    batch.v = [v[..., :U] for v in batch.v]
    batch.pools = batch.pools._replace(v=batch.pools.v[..., :U])
    batch.value_dim = U
    check(batch, queries((3, 4, 4, D)), [4, 3, 0], BACKENDS[name], sliding_window=30)


@pytest.mark.parametrize("name", INTERPRETED)
def test_separate_values_of_another_size_are_refused_by_kernels(name) -> None:
    batch = PagedBatch.random([9], K=1, D=D, lanes=128)
    batch.value_dim = U
    with pytest.raises(
        NotImplementedError, match="paged_attention: .* does not support the call: it reads a pool"
    ):
        batch.decode(queries((1, 4, D)), **BACKENDS[name])


def test_long_keys_are_refused_by_triton() -> None:
    batch = PagedBatch.random([9], K=1, D=704, value_dim=640)
    with pytest.raises(
        NotImplementedError, match="triton does not support the call: keys and the values in them"
    ):
        batch.decode(queries((1, 4, 704)), **BACKENDS["triton"])


@pytest.mark.parametrize("name", cases("cpu", "triton", "xla"))
def test_ragged_latent_attention_matches_float64(name) -> None:
    lengths = [(1, 20), (5, 5), (33, 40), (1, 1), (0, 7), (2, 300)]
    batch = RaggedBatch.random(lengths, D=D, G=6, value_dim=U)
    assert batch.kv_pages.shape[2:] == (1, D)
    options = {"sm_scale": 0.2, "sliding_window": 150}
    got = batch.attend(return_lse=True, **BACKENDS[name], **options)
    for a, b in zip(got, batch.expected_with_lse(**options), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_cascade_of_latent_attention_matches_float64() -> None:
    batch = PagedBatch.random([200, 140, 0], K=1, D=D, value_dim=U).sharing(16)
    q = queries((3, 6, D))
    pools = batch.pools
    cascade = jax.jit(cascade_attention, static_argnames=("value_dim", "scale"))
    out = cascade(
        q, pools.k, None, batch.block_tables, batch.lengths, np.int32(16),
        layer=np.int32(LAYER), value_dim=U, scale=0.2,
    )  # fmt: skip
    np.testing.assert_allclose(out, batch.expected_decode(q, scale=0.2)[0], atol=1e-5)


@pytest.mark.parametrize("is_prefill", [False, True])
def test_gradients_of_latent_attention_match_float64(is_prefill) -> None:
    """The gradient in the pool is the sum of the gradients in keys and values."""
    batch = PagedBatch.random([11, 5], K=1, C=4, D=12, value_dim=8)
    pool = batch.pools.k
    assert pool is not None
    T, scale, query_lens = 3, 0.3, np.array([3, 2], np.int32)
    if not is_prefill:
        T, query_lens = 1, np.array([1, 1], np.int32)
    q = queries((2, T, 2, 12))
    bar = np.random.default_rng(5).normal(size=(2, T, 2, 8)).astype(np.float32)
    options: Any = {"scale": scale, "value_dim": 8, "layer": LAYER, "backend": "xla"}

    def loss(q, pool):
        arrays = pool, None, batch.block_tables, batch.lengths
        if is_prefill:
            out = paged_prefill_attention(q, *arrays, query_lens, **options)
        else:
            out = paged_attention(q[:, 0], *arrays, **options)[:, None]
        is_query = np.arange(T)[None] < query_lens[:, None]
        return jnp.sum(jnp.where(is_query[..., None, None], out * bar, 0))

    q_bar, pool_bar = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, pool)
    for b, n in enumerate(query_lens):
        want_q, want_k, want_v, _ = oracles.attention_gradients(
            q[b, :n], batch.k[b], batch.v[b], bar[b, :n], np.zeros((n, 2)), scale=scale
        )
        np.testing.assert_allclose(q_bar[b, :n], want_q, atol=1e-5)
        want_k[..., :8] += want_v
        places = np.arange(len(want_k))
        got = np.asarray(pool_bar)[LAYER, batch.block_tables[b, places // 4], :, places % 4]
        np.testing.assert_allclose(got, want_k, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["xla", "triton"])
def test_write_of_latent_rows_changes_only_their_places(name, dtype) -> None:
    backend = {name: BACKENDS[name] for name in ("xla", "triton")}[name]
    rng, shape = np.random.default_rng(0), (2, 5, 1, 4, D)
    is_narrow = dtype == "int8"
    old = rng.normal(size=shape).astype(np.float32)
    pool, scale = quantise(jnp.asarray(old), dtype) if is_narrow else (old.astype(dtype), None)
    new = rng.normal(size=(4, 1, D)).astype(np.float32)
    blocks, offsets = np.array([3, 0, OUT_OF_RANGE, -1]), np.array([1, 3, 0, 2])
    got = paged_write(pool, None, new, None, blocks, offsets, layer=1, k_scale=scale, **backend)
    assert got.v is None and got.v_scale is None
    want = np.asarray(pool).copy()
    values, scales = quantise(jnp.asarray(new), dtype) if is_narrow else (new.astype(dtype), None)
    want[1, [3, 0], 0, [1, 3]] = np.asarray(values)[:2, 0]
    np.testing.assert_array_equal(np.asarray(got.k), want)
    if scale is not None and scales is not None:
        want = np.asarray(scale).copy()
        want[1, [3, 0], 0, [1, 3]] = np.asarray(scales)[:2, 0]
        np.testing.assert_array_equal(np.asarray(got.k_scale), want)


@pytest.mark.parametrize("name", ["xla", "triton"])
def test_copies_of_latent_blocks(name) -> None:
    pool = np.random.default_rng(0).normal(size=(2, 5, 1, 4, D)).astype(np.float32)
    pools = copy_blocks(pool, None, np.array([4, 9]), np.array([1, 2]), **BACKENDS[name])
    want = pool.copy()
    want[:, 1] = want[:, 4]
    assert pools.v is None
    np.testing.assert_array_equal(pools.k, want)


def test_write_of_separate_values_of_another_size() -> None:
    k_pool, v_pool = np.zeros((1, 2, 1, 4, 6), np.float32), np.zeros((1, 2, 1, 4, 4), np.float32)
    k, v = np.ones((1, 1, 6), np.float32), 2 * np.ones((1, 1, 4), np.float32)
    pools = paged_write(k_pool, v_pool, k, v, np.array([1]), np.array([2]))
    assert pools.v is not None and pools.v.shape == v_pool.shape
    assert float(pools.k.sum()) == 6 and float(pools.v[0, 1, 0, 2].sum()) == 8


def test_write_of_latent_pages() -> None:
    pages, k = jnp.zeros((4, 8, 1, D)), jnp.ones((2, 1, D))
    pages = write_kv_pages(pages, k, None, jnp.array([3, -1]), jnp.array([7, 0]))
    assert float(pages[3, 7].sum()) == D and float(pages.sum()) == D


POOL = np.zeros((1, 2, 1, 4, D), np.float32)


def call(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "q": np.zeros((1, 4, D), np.float32), "k_pool": POOL, "v_pool": None,
        "block_tables": np.zeros((1, 2), np.int32), "context_lens": np.ones(1, np.int32),
        "value_dim": U,
    }  # fmt: skip
    return paged_attention(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_dim": None}, "value_dim must be an integer if v_pool is None, got None"),
        ({"value_dim": D + 1}, f"value_dim must be 1 to {D}, got {D + 1}"),
        ({"value_dim": 0}, f"value_dim must be 1 to {D}, got 0"),
        ({"value_dim": 1.5}, "value_dim must be an integer or None, got 1.5"),
        ({"v_pool": POOL}, "v_pool must have a last dimension"),
        ({"v_pool": POOL[..., :U], "value_dim": None}, "v_pool must have D"),
        ({"v_scale": np.ones((1, 2, 1, 4), np.float32)}, "v_scale must be None if v_pool is None"),
    ],
)
def test_latent_attention_checks_its_arguments(changes, message) -> None:
    with pytest.raises(ValueError, match=f"paged_attention: .*{message}"):
        call(**changes)


def test_writes_check_that_values_and_their_pool_belong_together() -> None:
    k, places = np.zeros((1, 1, D), np.float32), np.zeros(1, np.int32)
    for v_pool, v in ((None, k), (POOL, None)):
        with pytest.raises(ValueError, match="paged_write: v and v_pool must both be arrays"):
            paged_write(POOL, v_pool, k, v, places, places)
    for heads, v in ((1, k), (2, None)):
        with pytest.raises(ValueError, match="write_kv_pages: v must be None if kv_pages"):
            write_kv_pages(np.zeros((2, 4, heads, D), np.float32), k, v, places, places)


def test_value_dim_of_whole_keys_is_the_ordinary_call() -> None:
    """Values that are whole keys have the output of equal pools of keys and values."""
    batch = PagedBatch.random([9, 30], K=1, D=16, value_dim=16)
    q = queries((2, 4, 16))
    shared, _ = batch.decode(q, backend="xla")
    batch.value_dim, batch.pools = None, Pools(batch.pools.k, batch.pools.k)
    np.testing.assert_array_equal(shared, batch.decode(q, backend="xla")[0])
