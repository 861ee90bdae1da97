"""The backend `cpu_exact`: rows have the same bits alone, in a batch, in a prompt and in a decode.

Values are compared with float64. Unused blocks are NaN, and unused table entries are out of range.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import paged_attention, paged_prefill_attention
from paged_jax.kernels.exact import inverse_root, rounded, softplus
from paged_jax.kernels.kv_dtypes import KVDtype, quantise
from paged_jax.kernels.linear import sum_rows
from paged_jax.kernels.norm_rope import rms_norm, rotate
from paged_jax.kernels.op import BACKENDS, exact_variants, is_exact
from tests.support.compiler import needs_compiler
from tests.support.oracles import attention

pytestmark = needs_compiler

EXACT = "cpu_exact"
# Sizes of heads that fill no vector, one vector, and several; more tokens than a segment of 256.
# Windows start inside of tiles and of segments.
CASES = {
    "plain": {"T": 300, "H": 6, "K": 2, "D": 24},
    "short head": {"T": 70, "H": 4, "K": 1, "D": 6},
    "odd head": {"T": 40, "H": 3, "K": 3, "D": 13},
    "window": {"T": 340, "H": 4, "K": 2, "D": 16, "sliding_window": 45},
    "long window": {"T": 600, "H": 2, "K": 1, "D": 8, "sliding_window": 301},
    "cap and sinks": {"T": 290, "H": 8, "K": 1, "D": 32, "soft_cap": 2.0, "has_sinks": True},
    "sinks and window": {"T": 90, "H": 2, "K": 2, "D": 8, "sliding_window": 7, "has_sinks": True},
    "shared values": {"T": 280, "H": 4, "K": 1, "D": 40, "value_dim": 24},
}
BLOCK_SIZE = 8


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def as_pool(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the pool ``[1, P, K, C, ...]`` of a sequence ``[T, K, ...]``; other blocks are NaN."""
    T, *rest = x.shape
    pool = np.full((1, table.size + 3, rest[0], BLOCK_SIZE, *rest[1:]), np.nan, np.float32)
    for token in range(T):
        pool[0, table[token // BLOCK_SIZE], :, token % BLOCK_SIZE] = x[token]
    return pool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_prompt_has_the_bits_of_decode_steps(case, dtype) -> None:
    """Chunks of any size, and single queries, give the same bits, and those of float64 nearly."""
    sizes = dict(CASES[case])
    T, H, K, D = (sizes.pop(name) for name in "THKD")
    has_sinks, value_dim = sizes.pop("has_sinks", False), sizes.get("value_dim")
    q, k, v = draw(1, T, H, D), draw(2, T, K, D), draw(3, T, K, D)
    num_blocks = -(-T // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(num_blocks + 3)[:num_blocks]
    q = jnp.asarray(q, KVDtype.of(dtype).query_dtype)
    pools, scales, seen = [], [], []
    for x in (k,) if value_dim else (k, v):
        if dtype == "int8":
            values, scale = map(np.asarray, quantise(jnp.asarray(x), jnp.int8))
            seen.append(values * scale[..., None].astype(np.float64))
            # An int8 pool cannot hold NaN, but its scales can.
            pool = np.nan_to_num(as_pool(values.astype(np.float32), table))
            pools.append(jnp.asarray(pool, jnp.int8))
            scales.append(jnp.asarray(as_pool(scale, table)))
        else:
            pools.append(jnp.asarray(as_pool(x, table), dtype))
            seen.append(np.asarray(jnp.asarray(x, dtype), np.float64))
    sinks = jnp.asarray(draw(4, H)) if has_sinks else None
    named = dict(sizes, sinks=sinks, backend=EXACT)
    named |= dict(zip(("k_scale", "v_scale"), scales, strict=False))
    tables = jnp.asarray(np.append(table, 10**6)[None], jnp.int32)
    k_pool, v_pool = pools[0], None if value_dim else pools[1]

    @jax.jit
    def prefill(q, length):
        count = jnp.array([q.shape[1]])
        return paged_prefill_attention(q, k_pool, v_pool, tables, length, count, **named)

    @jax.jit
    def decode(q, lengths):
        rows = jnp.broadcast_to(tables, (q.shape[0], tables.shape[1]))
        return paged_attention(q, k_pool, v_pool, rows, lengths, **named)

    prompt = np.asarray(prefill(q[None], jnp.array([T]))[0])
    steps = np.asarray(decode(q, jnp.arange(1, T + 1)))
    np.testing.assert_array_equal(prompt, steps)
    start = T // 3 + 1
    chunk = np.asarray(prefill(q[None, start : start + 21], jnp.array([start + 21]))[0])
    np.testing.assert_array_equal(chunk, prompt[start : start + 21])
    alone = np.asarray(decode(q[-1:], jnp.array([T])))
    np.testing.assert_array_equal(alone, prompt[-1:])

    values = seen[0][..., :value_dim] if value_dim else seen[1]
    options = {name: sizes.get(name) for name in ("sliding_window", "soft_cap")}
    exact = attention(np.asarray(q, np.float64), seen[0], values, sinks=sinks, **options)
    tolerance = 2e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(prompt.astype(np.float64), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_inputs", [7, 46, 64, 576])
def test_norms_and_sums_do_not_depend_on_the_number_of_rows(num_inputs) -> None:
    """The other backends use XLA for more than 64 rows, and its ``rsqrt`` depends on shapes."""
    x, weight = draw(5, 200, num_inputs), draw(6, num_inputs)
    norm = jax.jit(functools.partial(rms_norm, eps=1e-5, backend=EXACT))
    add = jax.jit(functools.partial(sum_rows, backend=EXACT))
    for function in (lambda x: norm(x, weight), add):
        together = np.asarray(function(x))
        for num_rows in (1, 2, 7, 64, 65):
            np.testing.assert_array_equal(function(x[:num_rows]), together[:num_rows])
    rows = x.astype(np.float64)
    exact = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(norm(x, weight), exact, rtol=1e-6)


@pytest.mark.optimised  # without optimisations, nothing is fused
def test_rotation_has_the_same_bits_in_any_program() -> None:
    """Outside of `jit`, each operation is a program, so products are always rounded."""
    x, cos, sin = draw(7, 33, 4, 24), *(draw(seed, 33, 12) for seed in (8, 9))
    exact = functools.partial(rotate, backend=EXACT)
    np.testing.assert_array_equal(jax.jit(exact)(x, cos, sin), exact(x, cos, sin))
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    wanted = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    np.testing.assert_allclose(exact(x, cos, sin), wanted, rtol=0, atol=1e-6)


@pytest.mark.optimised
def test_softplus_has_the_same_bits_in_any_program() -> None:
    """With ``log1p``, 1 in 10,000 elements has other bits in a program of one or two rows."""
    x, bias = 3 * draw(5, 9600, 24), draw(6, 24)
    rates = np.exp(draw(7, 4, 1))

    def decay(x):
        steps = softplus((x + bias[None]).reshape(-1, 4, 6), EXACT)
        return rates[None] * steps

    together = jax.jit(decay)(x)
    for size in (1, 2):
        apart = jax.jit(lambda rows: jax.lax.map(decay, rows))(x.reshape(-1, size, 24))
        np.testing.assert_array_equal(apart.reshape(together.shape), together)
    x = np.append(x, [0, 90, -80, 17, -17]).astype(np.float32)
    exact = np.logaddexp(x.astype(np.float64), 0)
    np.testing.assert_allclose(softplus(x, EXACT), exact, rtol=3e-7)


def test_rounded_and_inverse_root_have_the_gradients_of_the_plain_functions() -> None:
    x = jnp.array([0.0, -0.0, 3.0, -2.0])
    gradient = jax.grad(lambda x: (rounded(x * 2, EXACT) * jnp.arange(4.0)).sum())(x)
    np.testing.assert_array_equal(gradient, 2 * np.arange(4.0))
    y = jnp.array([0.5, 2.0, 9.0])
    for function in (inverse_root, softplus):
        exact, fast = (jax.grad(lambda y, f=function, b=b: f(y, b).sum())(y) for b in (EXACT, None))
        np.testing.assert_allclose(exact, fast, rtol=1e-6)
    np.testing.assert_array_equal(inverse_root(jnp.array([4.0, 16.0]), EXACT), [0.5, 0.25])


def test_exact_variants_refuse_backends_that_have_none() -> None:
    assert exact_variants(None)[0] == exact_variants("cpu")[0] == EXACT
    assert is_exact(EXACT) and not is_exact("cpu") and not is_exact(None)
    with pytest.raises(ValueError, match="must be None, 'cpu' or 'xla' .*, got 'triton'"):
        exact_variants("triton")
    unavailable = BACKENDS[EXACT].unavailable_for(["float32", "int8"], "float32", "int8")
    assert unavailable is None
