"""Attention within chunks, compared with a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import op as kernel_op
from paged_jax.kernels import paged_attention
from paged_jax.kernels.attention import chunked_attention, chunked_prefill_attention
from tests.support.families import interpreted_triton

C, K, G, D = 4, 2, 2, 8
H, CHUNK = K * G, 12
LENGTHS = np.array([1, 12, 13, 0, 30, 37], np.int32)
M = 10


def make_pools() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pools ``[1, P, K, C, D]`` and shuffled tables. Free blocks and tails are NaN."""
    random = np.random.default_rng(0)
    num_blocks = len(LENGTHS) * M
    tables = random.permutation(num_blocks).reshape(len(LENGTHS), M).astype(np.int32)
    k, v = (np.full((1, num_blocks, K, C, D), np.nan, np.float32) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        for place in range(length):
            block = tables[row, place // C]
            for pool in (k, v):
                pool[0, block, :, place % C] = random.normal(size=(K, D))
        tables[row, -(-length // C) :] = num_blocks + 7
    return k, v, tables


POOLS = make_pools()


def expected_row(q: np.ndarray, row: int, position: int) -> np.ndarray:
    """Return the output ``[H, D]`` of a query ``[H, D]``."""
    k_pool, v_pool, tables = POOLS
    places = np.arange(position // CHUNK * CHUNK, position + 1)
    k, v = (
        pool[0, tables[row, places // C], :, places % C].astype(np.float64)
        for pool in (k_pool, v_pool)
    )
    scores = np.einsum("kgd,nkd->kgn", q.reshape(K, G, D).astype(np.float64), k) * D**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgn,nkd->kgd", weights, v).reshape(H, D)


@pytest.fixture(params=["xla", "triton", "cpu"])
def backend(request, monkeypatch) -> str:
    backends = {**kernel_op.BACKENDS, "triton": interpreted_triton()}
    monkeypatch.setattr(kernel_op, "BACKENDS", backends)
    if request.param == "cpu" and jax.default_backend() != "cpu":
        pytest.skip("no CPU")
    return request.param


@pytest.mark.parametrize("width", [M, CHUNK // C + 1])
def test_chunked_attention_sees_the_tokens_of_a_chunk(backend, width) -> None:
    """The wide table has several chunks, the other one a chunk and a block."""
    k, v, tables = map(jnp.asarray, POOLS)
    lengths = np.where(LENGTHS <= width * C, LENGTHS, 0)
    q = np.random.default_rng(1).normal(size=(len(LENGTHS), H, D)).astype(np.float32)
    out = chunked_attention(
        jnp.asarray(q), k, v, tables[:, :width], lengths, chunk=CHUNK, backend=backend
    )
    for row, length in enumerate(lengths):
        if length:
            wanted = expected_row(q[row], row, length - 1)
            np.testing.assert_allclose(out[row], wanted, atol=2e-6)


@pytest.mark.parametrize("T", [1, 2, 12, 13, 26])
def test_chunked_prefill_attention_divides_rows_at_chunks(backend, T) -> None:
    """The queries of a row belong to up to three chunks."""
    k, v, tables = map(jnp.asarray, POOLS)
    counts = np.minimum(LENGTHS, [1, T, T, 3, T - T // 3, T]).astype(np.int32)
    q = np.random.default_rng(2).normal(size=(len(LENGTHS), T, H, D)).astype(np.float32)
    out = chunked_prefill_attention(
        jnp.asarray(q), k, v, tables, LENGTHS, counts, chunk=CHUNK, backend=backend
    )
    assert out.shape == q.shape
    for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        for step in range(count):
            wanted = expected_row(q[row, step], row, length - count + step)
            np.testing.assert_allclose(out[row, step], wanted, atol=2e-6)


def test_chunked_attention_needs_whole_blocks_per_chunk() -> None:
    k, v, tables = map(jnp.asarray, POOLS)
    q = jnp.zeros((len(LENGTHS), H, D))
    with pytest.raises(ValueError, match="chunk must be a multiple of the block size 4, got 10"):
        chunked_attention(q, k, v, tables, LENGTHS, chunk=10)
    # Sequences that fit into a chunk attend to all of their tokens, in the usual program.
    short = tables[:, :3]
    lens = jnp.minimum(LENGTHS, CHUNK)
    whole = jax.make_jaxpr(lambda q: paged_attention(q, k, v, short, lens))(q)
    chunk = jax.make_jaxpr(lambda q: chunked_attention(q, k, v, short, lens, chunk=CHUNK))(q)
    assert str(chunk) == str(whole)
