"""One contract for all attention backends, against float64.

Tables are shuffled, entries past a sequence's end are out of range, and every byte of the pool
that belongs to no token is NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from paged_jax.kernels import BACKENDS, paged_attention, paged_prefill_attention

OUT_OF_RANGE = 10**6
LAYER = 1


@dataclasses.dataclass
class Batch:
    """Sequences of given lengths, laid out in a poisoned pool of two layers."""

    k: list[np.ndarray]  # each [length, K, D]
    v: list[np.ndarray]
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_tables: np.ndarray
    lengths: np.ndarray


def lay_out(lengths, *, K=2, C=8, D=16, extra_width=3, dtype=np.float32, seed=0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    counts = -(-lengths // C)
    P = int(counts.sum()) + 5
    M = max(int(counts.max()), 1) + extra_width
    k = [rng.normal(size=(n, K, D)).astype(dtype) for n in lengths]
    v = [rng.normal(size=(n, K, D)).astype(dtype) for n in lengths]
    k_pool, v_pool = (np.full((2, P, K, C, D), np.nan, dtype) for _ in range(2))
    tables = np.full((len(lengths), M), OUT_OF_RANGE, np.int32)
    free = list(rng.permutation(P))
    for b, n in enumerate(lengths):
        for block in range(counts[b]):
            tables[b, block] = free.pop()
        for t in range(n):
            k_pool[LAYER, tables[b, t // C], :, t % C] = k[b][t]
            v_pool[LAYER, tables[b, t // C], :, t % C] = v[b][t]
    return Batch(k, v, k_pool, v_pool, tables, lengths)


def queries(shape, dtype=np.float32, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def run_decode(batch: Batch, q, **options) -> np.ndarray:
    return np.asarray(
        paged_attention(
            q, batch.k_pool, batch.v_pool, batch.block_tables, batch.lengths,
            layer=LAYER, **options,
        )
    )  # fmt: skip


def expected_decode(batch: Batch, q, **options) -> np.ndarray:
    out = np.zeros(q.shape)
    for b, n in enumerate(batch.lengths):
        if n:
            out[b] = oracles.attention(q[b][None], batch.k[b], batch.v[b], **options)[0]
    return out


def run_prefill(batch: Batch, q, query_lens, **options) -> np.ndarray:
    return np.asarray(
        paged_prefill_attention(
            q, batch.k_pool, batch.v_pool, batch.block_tables, batch.lengths,
            np.asarray(query_lens, np.int32), layer=LAYER, **options,
        )
    )  # fmt: skip


def expected_prefill(batch: Batch, q, query_lens, **options) -> np.ndarray:
    out = np.zeros(q.shape)
    for b, n in enumerate(query_lens):
        if n:
            out[b, :n] = oracles.attention(q[b, :n], batch.k[b], batch.v[b], **options)
    return out


@pytest.fixture(params=sorted(BACKENDS))
def backend(request) -> str:
    return request.param


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 11},
    "window-of-one": {"sliding_window": 1},
    "cap": {"soft_cap": 2.0},
    "all": {"scale": 0.5, "sliding_window": 150, "soft_cap": 5.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_paged_attention_matches_float64(backend, options) -> None:
    batch = lay_out([0, 1, 7, 8, 9, 200, 33, 129, 128, 127, 300])
    q = queries((11, 6, 16))
    np.testing.assert_allclose(
        run_decode(batch, q, backend=backend, **options),
        expected_decode(batch, q, **options),
        atol=1e-5,
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_paged_prefill_attention_matches_float64(backend, options) -> None:
    batch = lay_out([0, 1, 8, 40, 200, 150])
    query_lens = [0, 1, 3, 40, 130, 0]
    q = queries((6, 130, 4, 16))
    np.testing.assert_allclose(
        run_prefill(batch, q, query_lens, backend=backend, **options),
        expected_prefill(batch, q, query_lens, **options),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("C", "K", "G", "D"),
    [
        (1, 1, 1, 8),
        (4, 2, 3, 64),
        (8, 1, 8, 80),
        (16, 3, 5, 32),
        (32, 2, 2, 128),
        (64, 1, 7, 96),
        (128, 2, 4, 256),
    ],
)
def test_paged_attention_any_shape(backend, C, K, G, D) -> None:
    lengths = [0, 1, max(C - 1, 1), C, C + 1, 70]
    batch = lay_out(lengths, K=K, C=C, D=D)
    q = queries((len(lengths), K * G, D))
    np.testing.assert_allclose(
        run_decode(batch, q, backend=backend), expected_decode(batch, q), atol=1e-5
    )
    query_lens = [min(n, 5) for n in lengths]
    q = queries((len(lengths), 6, K * G, D))
    np.testing.assert_allclose(
        run_prefill(batch, q, query_lens, backend=backend),
        expected_prefill(batch, q, query_lens),
        atol=1e-5,
    )


@pytest.mark.parametrize("extra_width", [0, 1, 40])
def test_paged_attention_any_table_width(backend, extra_width) -> None:
    batch = lay_out([17, 3, 40], extra_width=extra_width)
    q = queries((3, 2, 16))
    np.testing.assert_allclose(
        run_decode(batch, q, backend=backend), expected_decode(batch, q), atol=1e-5
    )


def test_paged_attention_blocks_may_be_shared(backend) -> None:
    batch = lay_out([24, 24])
    batch.block_tables[1] = batch.block_tables[0]
    q = np.repeat(queries((1, 2, 16)), 2, axis=0)
    out = run_decode(batch, q, backend=backend)
    np.testing.assert_array_equal(out[0], out[1])


def test_paged_attention_bfloat16_reads_the_stored_values(backend) -> None:
    batch = lay_out([5, 130, 64], dtype=jnp.bfloat16)
    q = queries((3, 4, 16), jnp.bfloat16)
    out = run_decode(batch, q, backend=backend)
    assert out.dtype == jnp.bfloat16
    # Only the result is rounded to bfloat16: half a unit in its last place.
    expected = expected_decode(batch, q)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_paged_attention_rows_do_not_see_each_other(backend, op) -> None:
    """Bitwise, where they lie in the batch; to rounding, how many there are.

    XLA compiles each batch size by itself, and may order the sums of a product differently.
    """
    lengths = [300, 0, 5, 129, 64, 64, 17, 250, 1, 90, 31]
    batch = lay_out(lengths)
    q = queries((len(lengths), 3, 4, 16))
    query_lens = np.minimum(lengths, 3)

    def run(rows):
        part = Batch(
            batch.k, batch.v, batch.k_pool, batch.v_pool,
            batch.block_tables[rows], batch.lengths[rows],
        )  # fmt: skip
        if op == "decode":
            return run_decode(part, q[rows, 0], backend=backend)
        return run_prefill(part, q[rows], query_lens[rows], backend=backend)

    together = run(np.arange(len(lengths)))
    backwards = run(np.arange(len(lengths))[::-1])
    np.testing.assert_array_equal(together, backwards[::-1])
    half = run(np.arange(0, len(lengths), 2))
    np.testing.assert_allclose(together[::2], half, atol=1e-6)


def test_paged_attention_layer_may_be_traced(backend) -> None:
    batch = lay_out([9, 20])
    q = queries((2, 2, 16))

    def attend(layer):
        return paged_attention(
            q, batch.k_pool, batch.v_pool, batch.block_tables, batch.lengths,
            layer=layer, backend=backend,
        )  # fmt: skip

    np.testing.assert_allclose(
        jax.jit(attend)(jnp.int32(LAYER)), expected_decode(batch, q), atol=1e-5
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16])
def test_paged_attention_tables_may_be_narrow(backend, dtype) -> None:
    """Row numbers of the pool are larger than the block ids that they are made from."""
    batch = lay_out([900, 700], K=4, D=8)
    batch.block_tables[batch.block_tables == OUT_OF_RANGE] = 255
    q = queries((2, 8, 8))
    expected = expected_decode(batch, q)
    batch.block_tables = batch.block_tables.astype(dtype)
    np.testing.assert_allclose(run_decode(batch, q, backend=backend), expected, atol=1e-5)


def test_paged_attention_cost_follows_the_tokens() -> None:
    """Counted, not timed: the loop makes one step per tile that holds tokens.

    A table of 100 times the width must not make the compiled program gather more at a time.
    """
    costs = []
    for extra_width in (64, 6400):
        batch = lay_out([9, 20], extra_width=extra_width)
        compiled = (
            jax.jit(lambda q, t, b=batch: paged_attention(q, b.k_pool, b.v_pool, t, b.lengths))
            .lower(queries((2, 2, 16)), batch.block_tables)
            .compile()
        )
        costs.append(compiled.memory_analysis().temp_size_in_bytes)
    table_bytes = 2 * 6400 * 4
    assert costs[1] - costs[0] <= 2 * table_bytes


BAD_CALLS = {
    "rank": ({"q": np.zeros((2, 4))}, r"q must have shape \[B, H, D\]"),
    "batch": ({"block_tables": np.zeros((3, 4), np.int32)}, "block_tables must have B"),
    "head dim": ({"q": np.zeros((2, 4, 8), np.float32)}, "must have D"),
    "heads": ({"q": np.zeros((2, 3, 16), np.float32)}, "multiple of the pool's 2 KV heads"),
    "q dtype": ({"q": np.zeros((2, 4, 16), np.int32)}, "q must be floating point"),
    "table dtype": ({"block_tables": np.zeros((2, 4), np.float32)}, "integer array"),
    "layer": ({"layer": 2}, r"layer must be in 0\.\.1, got 2"),
    "window": ({"sliding_window": 0}, "sliding_window must be at least 1"),
    "cap": ({"soft_cap": -1.0}, "soft_cap must be positive"),
    "scale": ({"scale": float("nan")}, "scale must be finite"),
    "backend": ({"backend": "cuda"}, "backend must be None or one of 'reference', 'xla'"),
}


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_paged_attention_refuses(change, message) -> None:
    pool = np.zeros((2, 4, 2, 8, 16), np.float32)
    arguments = {
        "q": np.zeros((2, 4, 16), np.float32),
        "k_pool": pool,
        "v_pool": pool,
        "block_tables": np.zeros((2, 4), np.int32),
        "context_lens": np.ones(2, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))
