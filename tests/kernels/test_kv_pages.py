"""`write_kv_pages`, and adapters for the calls of other libraries to both ragged ops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import ragged_paged_attention, write_kv_pages
from tests.support.ragged_batch import RaggedBatch

# Queries and tokens of each sequence.
LENGTHS = [(1, 1), (1, 200), (0, 7), (5, 18), (130, 150)]
SINKS = np.linspace(-2, 3, 6, dtype=np.float32)  # one for each query head of a batch

# Adapters for the calls of other libraries. Their arguments have other names and shapes.


def call_of_levanter(q_NKGD, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, *, sm_scale):
    """Queries by KV head and group, a scalar number of sequences, a traced scale."""
    N, K, G, D = q_NKGD.shape
    out = ragged_paged_attention(
        q_NKGD.reshape(N, K * G, D),
        *(kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs),
        sm_scale=sm_scale,
    )
    return out.reshape(q_NKGD.shape)


def call_of_easydel(
    queries, kv_pages, context_lens, block_tables, query_start_loc, num_seqs, *,
    softmax_scale, logits_soft_cap, sliding_window, softmax_aux,
):  # fmt: skip
    """Other argument names, a Python number of sequences, sinks."""
    return ragged_paged_attention(
        *(queries, kv_pages, context_lens, block_tables, query_start_loc, num_seqs),
        sm_scale=softmax_scale,
        soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        sinks=softmax_aux,
    )


def call_of_sglang(
    q, k, v, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, sinks, slots, *, sm_scale
):
    """A flat table, pages with packed heads; the call writes `k` and `v` before it attends."""
    P, C, D = *kv_cache.shape[:2], kv_cache.shape[-1]
    pages = kv_cache.reshape(P, C, -1, D)
    pages = write_kv_pages(pages, k, v, *jnp.divmod(slots, C))
    tables = page_indices.reshape(len(kv_lens), -1)
    arrays = q, pages, kv_lens, tables, cu_q_lens, distribution[2:]
    out = ragged_paged_attention(*arrays, sm_scale=sm_scale, sinks=sinks)
    return out, pages.reshape(kv_cache.shape)


def test_ragged_attention_serves_the_call_of_levanter() -> None:
    batch = RaggedBatch.random(LENGTHS)
    q, *rest = batch.arrays
    arrays = (q.reshape(len(q), 2, 3, 16), *rest[:-1], rest[-1][0])
    out = jax.jit(call_of_levanter)(*arrays, sm_scale=0.3)
    np.testing.assert_allclose(out.reshape(q.shape), batch.expected(sm_scale=0.3), atol=1e-5)


def test_ragged_attention_serves_the_call_of_easydel() -> None:
    batch = RaggedBatch.random(LENGTHS)
    arrays = (*batch.arrays[:-1], int(batch.num_seqs[0]))
    out = call_of_easydel(
        *arrays, softmax_scale=0.3, logits_soft_cap=3.0, sliding_window=20, softmax_aux=SINKS
    )
    options = {"soft_cap": 3.0, "sliding_window": 20, "sinks": SINKS}
    np.testing.assert_allclose(out, batch.expected(sm_scale=0.3, **options), atol=1e-5)


def test_ragged_attention_serves_the_call_of_sglang_jax() -> None:
    batch = RaggedBatch.random(LENGTHS)
    q, pages, kv_lens, tables, cu_q_lens, num_seqs = batch.arrays
    P, C, K2, D = pages.shape
    slots, new = np.full(len(q), -1), np.zeros((len(q), K2, D), np.float32)
    for s in range(num_seqs[0]):
        places = np.arange(kv_lens[s] - (cu_q_lens[s + 1] - cu_q_lens[s]), kv_lens[s])
        rows = slice(*cu_q_lens[s : s + 2])
        slots[rows] = tables[s, places // C] * C + places % C
        new[rows] = pages.reshape(-1, K2, D)[slots[rows]]
    before = pages.reshape(-1, K2, D).copy()
    before[slots[slots >= 0]] = np.nan  # the call must write them
    out, cache = jax.jit(call_of_sglang, static_argnames="sm_scale")(
        q, new[:, ::2], new[:, 1::2], before.reshape(P, C, K2 // 2, 2, D), kv_lens, tables.ravel(),
        cu_q_lens, np.array([0, 0, num_seqs[0]]), SINKS, slots, sm_scale=0.3,
    )  # fmt: skip
    np.testing.assert_allclose(out, batch.expected(sm_scale=0.3, sinks=SINKS), atol=1e-5)
    np.testing.assert_array_equal(cache.reshape(pages.shape), pages)


WRITES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"k_scale": 0.5, "v_scale": 4.0},
    "int8": {"k_scale": 0.05, "v_scale": 0.01},
    "float8_e4m3fn": {"k_scale": 0.001, "v_scale": 0.5},
    "float8_e5m2": {},
}


@pytest.mark.parametrize("dtype", WRITES)
def test_write_kv_pages_matches_numpy(dtype) -> None:
    """Compare with NumPy. Tokens out of range are dropped, and large values saturate."""
    rng, scales = np.random.default_rng(3), WRITES[dtype]
    before = rng.normal(size=(4, 8, 4, 16)).astype(jnp.dtype(dtype))
    k, v = rng.normal(size=(2, 6, 2, 16)).astype(np.float32) * 2
    pages, offsets = np.array([3, 0, -1, 4, 2, 1]), np.array([7, 0, 1, 2, 8, -1])
    want = before.copy()
    for token in range(2):
        for part, (x, name) in enumerate(((k, "k_scale"), (v, "v_scale"))):
            x = x[token] / np.float32(scales.get(name, 1.0))
            if dtype == "int8":
                x = np.clip(np.rint(x), -128, 127)
            if dtype.startswith("float8"):
                x = np.clip(x, *(float(getattr(jnp.finfo(dtype), end)) for end in ("min", "max")))
            want[pages[token], offsets[token], part::2] = x.astype(want.dtype)
    got = jax.jit(write_kv_pages)(before, k, v, pages, offsets, **scales)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_write_kv_pages_copies_no_pages(dtype) -> None:
    pages = jax.ShapeDtypeStruct((10_000, 8, 4, 16), jnp.dtype(dtype))
    new = jax.ShapeDtypeStruct((6, 2, 16), jnp.float32)
    place = jax.ShapeDtypeStruct((6,), jnp.int32)
    write = jax.jit(write_kv_pages, donate_argnums=0)
    memory = write.lower(pages, new, new, place, place).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * pages.size * pages.dtype.itemsize
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes


def test_write_kv_pages_has_gradients_for_floating_point_pages() -> None:
    pages, new = jnp.ones((2, 4, 2, 8)), jnp.ones((2, 1, 8))
    bar = np.random.default_rng(0).normal(size=pages.shape).astype(np.float32)

    def objective(pages, k):
        places = jnp.array([1, -1]), jnp.array([2, 0])
        return jnp.sum(write_kv_pages(pages, k, k, *places, v_scale=2.0).astype(jnp.float32) * bar)

    pages_bar, k_bar = jax.grad(objective, (0, 1))(pages, new)
    want = bar.copy()
    want[1, 2] = 0
    np.testing.assert_array_equal(pages_bar, want)
    np.testing.assert_allclose(k_bar[0, 0], bar[1, 2, 0] + bar[1, 2, 1] / 2, rtol=1e-6)
    assert not k_bar[1].any()
    with pytest.raises(NotImplementedError, match="write_kv_pages: the pools must be floating"):
        jax.grad(lambda k: objective(pages.astype(jnp.int8), k))(new)


def test_write_kv_pages_refuses_more_rows_than_int32_counts() -> None:
    pages = jax.ShapeDtypeStruct((2**28, 8, 2, 8), jnp.int8)
    new, place = jnp.zeros((2, 1, 8)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="write_kv_pages: the pool must have at most 2147483645"):
        jax.eval_shape(write_kv_pages, pages, new, new, place, place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_pages": np.zeros((2, 4, 3, 8))}, r"kv_pages must have shape \[P, C, 2 \* K, D\]"),
        ({"k": np.zeros((2, 2, 8), np.float32)}, "k must have K"),
        ({"v": np.zeros((2, 1, 8), np.int32)}, "v must be floating point, got int32"),
        ({"pages": np.zeros(2)}, "pages must be an integer array"),
        ({"offsets": None}, "offsets must be an array, got None"),
        ({"k_scale": jnp.ones(8)}, r"k_scale must be one number, got float32 \[8\]"),
    ],
)
def test_write_kv_pages_refuses_wrong_arguments(change, message) -> None:
    new, place = np.zeros((2, 1, 8), np.float32), np.zeros(2, np.int32)
    arguments = {"kv_pages": np.zeros((2, 4, 2, 8), np.float32), "k": new, "v": new}
    arguments |= {"pages": place, "offsets": place}
    with pytest.raises(ValueError, match=f"write_kv_pages: .*{message}"):
        write_kv_pages(**(arguments | change))
