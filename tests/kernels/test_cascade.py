"""Tests of `cascade_attention`, `num_shared_blocks` and `merge_attention`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.kernels import cascade_attention, merge_attention, num_shared_blocks
from tests.support.paged_batch import BACKENDS, LAYER, PagedBatch, queries

C = 8
FLOAT8 = jnp.float8_e4m3fn


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "backend", "interpret"))
def program(q, pools, tables, lengths, num_shared, sinks, **static):
    return cascade_attention(
        q, pools.k, pools.v, tables, lengths, num_shared, k_scale=pools.k_scale,
        v_scale=pools.v_scale, layer=LAYER, sinks=sinks, **static,
    )  # fmt: skip


def run(batch: PagedBatch, q, num_shared, sinks=None, **static) -> np.ndarray:
    arrays = batch.pools, batch.block_tables, batch.lengths, np.int32(num_shared), sinks
    return np.asarray(program(q, *arrays, **static))


@pytest.mark.parametrize(
    ("backend", "dtype", "G"),
    [("xla", np.float32, 3), ("xla", np.int8, 1), ("reference", FLOAT8, 3)],
)
def test_cascade_attention_matches_float64(backend, dtype, G) -> None:
    """Two sequences end with the last shared block, and another is empty. Unused blocks are NaN."""
    batch = PagedBatch.random([0, 24, 41, 24, 300, 31], C=C, dtype=dtype).sharing(3)
    q = queries((6, 2 * G, 16))
    want, _ = batch.expected_decode(q)
    for num_shared in (0, 1, 3):
        np.testing.assert_allclose(run(batch, q, num_shared, backend=backend), want, atol=1e-5)


def test_cascade_attention_without_shared_blocks_equals_paged_attention() -> None:
    batch = PagedBatch.random([17, 0, 90], C=C)
    q = queries((3, 4, 16))
    want, _ = batch.decode(q, backend="xla")
    np.testing.assert_array_equal(run(batch, q, 0, backend="xla"), want)


def test_cascade_attention_with_a_soft_cap_and_sinks() -> None:
    batch = PagedBatch.random([17, 16, 90], C=C).sharing(2)
    q, sinks = queries((3, 4, 16)), queries((4,), seed=2)
    want, _ = batch.expected_decode(q, sinks=sinks, soft_cap=2.0, scale=0.7)
    out = run(batch, q, 2, sinks=sinks, soft_cap=2.0, scale=0.7)
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_cascade_attention_clips_lengths_to_the_table() -> None:
    batch = PagedBatch.random([96, 17, 96], C=C, extra_width=0).sharing(2)
    q = queries((3, 4, 16))
    want, _ = batch.expected_decode(q)
    batch.lengths = np.array([97, 17, 1000], np.int32)
    np.testing.assert_allclose(run(batch, q, 2, backend="xla"), want, atol=1e-5)


def test_cascade_attention_names_missing_lengths() -> None:
    batch = PagedBatch.random([24], C=C)
    with pytest.raises(ValueError, match=r"cascade_attention: context_lens .* got None\."):
        cascade_attention(queries((1, 4, 16)), *batch.pools[:2], batch.block_tables, None, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "copies"), [("triton", 1), ("triton", 4), ("mosaic_tpu", 1)])
def test_cascade_attention_in_kernels_matches_float64(name, copies) -> None:
    """The kernels get the queries of all sequences as query heads of a single sequence.

    With four copies of the batch, the GPU kernel cuts this group of heads into slices.
    """
    lanes = 128 if name == "mosaic_tpu" else None
    batch = PagedBatch.random(copies * [40, 25, 24, 0, 61], C=C, lanes=lanes).sharing(3)
    q = queries((5 * copies, 4, 16))
    want, _ = batch.expected_decode(q)
    np.testing.assert_allclose(run(batch, q, 3, **BACKENDS[name]), want, atol=1e-5)


def count_shared(tables: np.ndarray, lens: np.ndarray, block_size: int) -> int:
    rows = [b for b, n in enumerate(lens) if n]
    count = 0
    for column in range(tables.shape[1]):
        is_full = all(lens[b] >= (column + 1) * block_size for b in rows)
        if not rows or not is_full or len({int(tables[b, column]) for b in rows}) > 1:
            break
        count += 1
    return count if (len(rows) - 1) * count * block_size >= 512 else 0


count_by_program = jax.jit(num_shared_blocks, static_argnums=2)


@given(data=st.data())
def test_num_shared_blocks_counts_full_shared_blocks(data) -> None:
    B, M, block_size = 3, 4, 256
    integers = st.integers(0, M * block_size)
    lens = np.array(data.draw(st.lists(integers, min_size=B, max_size=B)), np.int32)
    block_ids = st.lists(st.integers(0, 1), min_size=B * M, max_size=B * M)
    tables = np.array(data.draw(block_ids), np.int32).reshape(B, M)
    if data.draw(st.booleans()):
        tables[:] = tables[0]
    got = count_by_program(tables, lens, block_size)
    assert int(got) == count_shared(tables, lens, block_size)


MERGE = jax.jit(merge_attention)


def test_merge_attention_of_a_shared_prefix() -> None:
    """Two sequences attend to 24 shared tokens, then each to its own tokens."""
    prefix = PagedBatch.random([24, 0]).rows(np.array([0, 0]))
    rest = PagedBatch.random([17, 0], seed=5)  # with the shapes of `prefix`
    q = queries((2, 4, 16))
    parts = (*prefix.decode(q, backend="xla"), *rest.decode(q, backend="xla"))
    out, lse = MERGE(*parts)

    whole = PagedBatch.random([41, 24])
    whole.k = [np.concatenate([prefix.k[0], k]) for k in rest.k]
    whole.v = [np.concatenate([prefix.v[0], v]) for v in rest.v]
    want_out, want_lse = whole.expected_decode(q)
    np.testing.assert_allclose(out, want_out, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_merge_attention_of_empty_results_is_empty() -> None:
    nothing = np.zeros((1, 4), np.float32), np.full(1, -np.inf, np.float32)
    out, lse = MERGE(*nothing, *nothing)
    assert out.tolist() == [[0, 0, 0, 0]] and lse.tolist() == [-np.inf]
    out, lse = MERGE(*nothing, np.ones((1, 4), np.float32), np.array([2.0], np.float32))
    assert out.tolist() == [[1, 1, 1, 1]] and lse.tolist() == [2]


def test_merge_attention_of_logits_far_below_zero() -> None:
    """The expected values are from a softmax in float64."""
    out, lse = np.float32([[1.0], [2.0], [4.0]]), np.float32([-1e31, -1e31, -3e38])
    merged = MERGE(out[:2], lse[:2], out[[1, 2]], lse[[1, 2]])
    np.testing.assert_allclose(merged[0], [[1.5], [2.0]])
    np.testing.assert_allclose(merged[1], [-1e31, -1e31])
    merged = MERGE(out[2:], lse[2:], np.zeros((1, 1), np.float32), np.full(1, -np.inf, np.float32))
    assert merged[0].tolist() == [[4.0]] and merged[1] == lse[2]


def test_merge_attention_refuses_mismatched_shapes() -> None:
    with pytest.raises(ValueError, match=r"shapes \[..., D\], \[...\]"):
        merge_attention(np.ones((2, 4)), np.ones(3), np.ones((2, 4)), np.ones(3))
