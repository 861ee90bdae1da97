"""The backend "xla_exact": a row has the same bits in any batch, and in decodes and prefills."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import Pools, grouped_linear
from paged_jax.kernels.linear import Weight, linear, sum_rows
from paged_jax.kernels.recurrent import causal_convolution, delta_rule, state_space
from paged_jax.kernels.state_rows import StateRows
from paged_jax.models.codecs.dtype_formats import quantise
from tests.support import recurrences
from tests.support.paged_batch import PagedBatch, queries

# The bits depend on the machine code.
pytestmark = pytest.mark.optimised

EXACT = "xla_exact"
LENGTHS = [0, 1, 33, 70, 131, 64, 5]
CHUNKS = [3, 1, 20, 40, 33, 40, 5]  # the first sequence is empty, so its chunk is padding
SINKS = np.array([0.3, -1, 2, -np.inf], np.float32)


@jax.jit
def multiply(x, w):
    """Multiply between operations that XLA could merge into the matmul."""
    return x[:, :1] + linear(x * 1.5, w, backend=EXACT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "shape",
    [(37, 61), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1, 3), (96, 520)))],
    ids=str,
)
def test_linear_gives_equal_bits_for_any_rows(shape, dtype) -> None:
    """A row is at each place of a tile, alone and with others."""
    rng = np.random.default_rng(sum(shape))
    w, x = (rng.normal(size=size).astype(np.float32) for size in (shape, (21, shape[1])))
    if dtype == "int8":
        values, scales = map(jnp.asarray, quantise(w)[:2])
        weight = Weight(values, scales)
        exact = np.asarray(values, np.float64) * np.asarray(scales, np.float64)
        rounded = x * 1.5
    else:
        weight = jnp.asarray(w, dtype)
        exact = np.asarray(weight, np.float64)
        rounded = np.asarray(jnp.asarray(x * np.float32(1.5), dtype), np.float64)
    together = np.asarray(multiply(x, weight))
    scale = 1 + np.abs(rounded) @ np.abs(exact).T
    assert (np.abs(together - x[:, :1] - rounded @ exact.T) <= 1e-6 * scale).all()
    for first in range(1, 8):
        rows = slice(first, first + 9)
        np.testing.assert_array_equal(multiply(x[rows], weight), together[rows])
    np.testing.assert_array_equal(multiply(x[5:6], weight), together[5:6])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_grouped_linear_gives_equal_bits_for_any_groups(dtype) -> None:
    rng = np.random.default_rng(3)
    w = jnp.asarray(rng.normal(size=(4, 23, 40)), dtype)
    x = jnp.asarray(rng.normal(size=(30, 40)), dtype)
    run = jax.jit(lambda x, w, sizes: grouped_linear(x, w, sizes, backend=EXACT))
    sizes = np.array([11, 0, 9, 3])
    together = np.asarray(run(x, w, sizes))
    assert not together[23:].any()
    groups = np.repeat(np.arange(4), sizes)
    expected = np.einsum(
        "ri,roi->ro", np.asarray(x, np.float64)[:23], np.asarray(w, np.float64)[groups]
    )
    np.testing.assert_allclose(together[:23], expected, rtol=1e-5, atol=2e-5)
    for row in (0, 10, 13, 22):
        alone = run(x[row : row + 1], w, np.eye(4, dtype=np.int32)[groups[row]])
        np.testing.assert_array_equal(alone[0], together[row])


def _add_halves(x: np.ndarray) -> np.ndarray:
    """Add the second half of each row to the first one until one element is left, in float32."""
    while (size := x.shape[1]) > 1:
        first, second = np.split(x, [-(-size // 2)], axis=1)
        x = first + np.pad(second, ((0, 0), (0, size % 2)))
    return x


def test_sum_rows_gives_equal_bits_for_any_rows() -> None:
    """Each square is rounded before it is added, in programs of any number of rows."""
    run = jax.jit(lambda x: sum_rows(jnp.square(x), backend=EXACT))
    for size in (1, 5, 999):
        x = np.random.default_rng(size).normal(size=(70, size)).astype(np.float32)
        together = np.asarray(run(x))
        np.testing.assert_array_equal(together, _add_halves(x * x))
        np.testing.assert_array_equal(run(x[9:10]), together[9:10])


def _with_half_blocks(batch: PagedBatch) -> PagedBatch:
    """Return the same sequences in blocks of half the size."""

    def halve(pool: Any) -> Any:
        if pool is None:
            return None
        L, P, K, C, *last = pool.shape
        halves = np.swapaxes(pool.reshape(L, P, K, 2, C // 2, *last), 2, 3)
        return halves.reshape(L, 2 * P, K, C // 2, *last)

    tables = 2 * batch.block_tables[..., None] + np.arange(2)
    pools = Pools(*map(halve, batch.pools))
    tables = tables.reshape(len(tables), -1).astype(np.int32)
    return dataclasses.replace(batch, pools=pools, block_tables=tables)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param("float32", {}, marks=pytest.mark.slow),
        ("float32", {"sliding_window": 21, "soft_cap": 3.0}),
        ("bfloat16", {"soft_cap": 3.0, "sinks": SINKS}),
        pytest.param("bfloat16", {"value_dim": 8}, marks=pytest.mark.slow),
        pytest.param("int8", {"sliding_window": 40, "sinks": SINKS}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_gives_equal_bits_in_decodes_and_prefills(dtype, options) -> None:
    """Also for other chunks of the same tokens, other block sizes, and a sequence alone."""
    options = {"backend": EXACT, "scale": 0.25, **options}
    value_dim = options.pop("value_dim", None)
    sizes: dict = {"K": 1 if value_dim else 2, "value_dim": value_dim, "dtype": jnp.dtype(dtype)}
    batch = PagedBatch.random(LENGTHS, **sizes)
    q = queries((7, 40, 4, 16), jnp.bfloat16 if dtype == "bfloat16" else np.float32)
    query_lens = np.minimum(LENGTHS, CHUNKS)
    out, lse = batch.prefill(q, query_lens, **options)
    tolerance = 1e-2 if dtype == "bfloat16" else 2e-6
    expected = {name: value for name, value in options.items() if name != "backend"}
    expected_out, expected_lse = batch.expected_prefill(q, query_lens, **expected)
    np.testing.assert_allclose(out.astype(np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)

    last = np.maximum(query_lens - 1, 0)
    rows = np.arange(len(LENGTHS))
    decoded = batch.decode(q[rows, last], **options)
    for got, all_queries in zip(decoded, (out, lse), strict=True):
        np.testing.assert_array_equal(got[1:], all_queries[rows, last][1:])
    assert not decoded[0][0].any()
    alone = batch.rows(np.array([4])).decode(q[[4], [32]], **options)
    np.testing.assert_array_equal(alone[0], decoded[0][4:5])
    # Chunks of the last seven tokens, in blocks of half the size.
    chunks = np.stack([q[4, 26:33], q[3, 33:40]])
    ends = _with_half_blocks(batch).rows(np.array([4, 3])).prefill(chunks, [7, 7], **options)
    for got, all_queries in zip(ends, (out, lse), strict=True):
        np.testing.assert_array_equal(got[0], all_queries[4, 26:33])
        np.testing.assert_array_equal(got[1], all_queries[3, 33:40])


def _rows(states: np.ndarray, dtype: str) -> StateRows:
    entries = jnp.arange(len(states), dtype=jnp.int32)
    return StateRows(jnp.asarray(states, dtype)[None], 0, entries, entries, EXACT)


def _check_step(run, states: np.ndarray, inputs: list[np.ndarray], oracle, dtype: str) -> None:
    """Compare a step of a batch with the same rows alone, and with a float64 oracle."""
    step = jax.jit(run)

    def advance(rows: slice):
        out, new = step(_rows(states[rows], dtype), *(x[rows] for x in inputs))
        return np.asarray(out), np.asarray(new.pool[0])

    out, new = advance(slice(None))
    for b in (0, 4):
        alone = advance(slice(b, b + 1))
        np.testing.assert_array_equal(alone[0][0], out[b])
        np.testing.assert_array_equal(alone[1][0], new[b])
        expected_out, expected_state = oracle(b)
        np.testing.assert_allclose(out[b].ravel(), np.ravel(expected_out), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            new[b].astype(np.float64).ravel(), np.ravel(expected_state), rtol=1e-5, atol=1e-5
        )


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("by_element", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_delta_rule_gives_equal_bits_in_any_batch(by_element) -> None:
    B, K, G, D, U = 5, 2, 3, 9, 7
    q, k, v = _normal(B, 1, K, D), _normal(B, 2, K, D)[:, 1:], _normal(B, 1, K, G, U)
    states = _normal(B, K * G, D, U)
    log_decay = -np.abs(_normal(B, 1, K, G, D) if by_element else _normal(B, 1, K, G))
    beta, ones = np.abs(_normal(B, 1, K, G)), np.ones(B, np.int32)

    def run(rows, q, k, v, log_decay, beta, ones):
        return delta_rule(q * 0.5, k, v, log_decay, beta, rows, ones)

    def oracle(b: int):
        heads = [
            recurrences.delta_rule(
                0.5 * q[b, :, h // G], k[b, :, h // G], v[b, :, h // G, h % G],
                log_decay[b, :, h // G, h % G], beta[b, :, h // G, h % G], states[b, h],
            )
            for h in range(K * G)
        ]  # fmt: skip
        return np.array([out for out, _ in heads]), np.array([state for _, state in heads])

    _check_step(run, states, [q, k, v, log_decay, beta, ones], oracle, "float32")

    # Inputs that are products have the bits of rounded products.
    def multiply(rows, *inputs):
        return run(rows, *(x * jnp.float32(0.7) for x in inputs[:-1]), inputs[-1])

    inputs = q, k, v, log_decay, beta
    of_products = jax.jit(multiply)(_rows(states, "float32"), *inputs, ones)
    rounded = [x * np.float32(0.7) for x in inputs]
    wanted = jax.jit(run)(_rows(states, "float32"), *rounded, ones)
    np.testing.assert_array_equal(of_products[0], wanted[0])
    np.testing.assert_array_equal(of_products[1].pool, wanted[1].pool)


def test_state_space_gives_equal_bits_in_any_batch() -> None:
    B, K, G, D, U = 5, 2, 3, 9, 7
    x, b_, c = _normal(B, 1, K, G, U), _normal(B, 1, K, D), _normal(B, 2, K, D)[:, 1:]
    states = _normal(B, K * G, U, D)
    log_decay, ones = -np.abs(_normal(B, 1, K, G)), np.ones(B, np.int32)

    def run(rows, x, b, c, log_decay, ones):
        return state_space(x * 0.5, b, c, log_decay, rows, ones)

    def oracle(b: int):
        heads = [
            recurrences.state_space(
                0.5 * x[b, :, h // G, h % G], b_[b, :, h // G], c[b, :, h // G],
                log_decay[b, :, h // G, h % G], states[b, h],
            )
            for h in range(K * G)
        ]  # fmt: skip
        return np.array([out for out, _ in heads]), np.array([state for _, state in heads])

    _check_step(run, states, [x, b_, c, log_decay, ones], oracle, "float32")


def test_causal_convolution_gives_equal_bits_in_any_batch() -> None:
    """With a bfloat16 state, the new input is rounded to bfloat16."""
    B, F, width = 5, 11, 4
    x, weight, bias = _normal(B, 1, F), _normal(F, width), _normal(F)
    states = _normal(B, (width - 1) * F).astype(jnp.bfloat16)

    def run(rows, x, ones):
        return causal_convolution(x, rows, jnp.array(weight), jnp.array(bias), ones)

    def oracle(b: int):
        state = states[b].astype(np.float64).reshape(width - 1, F)
        return recurrences.causal_convolution(x[b].astype(jnp.bfloat16), state, weight, bias)

    _check_step(run, states, [x, np.ones(B, np.int32)], oracle, "bfloat16")


@pytest.mark.slow
def test_gradients_are_those_of_fast_numerics() -> None:
    """Each op has the gradients of its fast variant, up to rounding."""
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((12, 24), (3, 16, 24)))
    sizes = jnp.array([5, 4, 3])

    def loss(x, w, backend):
        y = linear(x, w[0], backend=backend) + grouped_linear(x, w, sizes, backend=backend)
        return jnp.sum(jnp.sin(y) * sum_rows(jnp.square(y), backend=backend))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for got, expected in zip(grad(x, w, EXACT), grad(x, w, "xla"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-3)
