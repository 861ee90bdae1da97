"""Steps of recurrent layers in their pools, against float64 recurrences, on all backends.

Entries that no row may read are NaN. Rows share states as after a fork.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import op as kernel_op
from paged_jax.kernels import recurrent
from paged_jax.kernels import rows as row_access
from paged_jax.kernels.padding import padded_state_shape
from paged_jax.kernels.rows import set_states, take_states
from paged_jax.kernels.state_rows import StateRows
from tests.support import recurrences
from tests.support.families import interpreted_triton

L, P, LAYER = 2, 9, 1
K, G = 2, 3
# Rows 0, 2 and 6 read the same state, which row 2 overwrites. Row 3 starts from zeros. Row 4 is
# padding. Row 5 reads a state and writes nothing. Row 7 has no token, so it copies its state.
SOURCES = np.array([3, 7, 3, P, P, 5, 3, 8], np.int32)
ENTRIES = np.array([1, 7, 3, 0, P, P + 4, 6, 2], np.int32)
NUM_TOKENS = np.array([1, 1, 1, 1, 0, 1, 1, 0], np.int32)
B = len(SOURCES)

Advance = Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]


@pytest.fixture(params=["xla", "cpu", "triton", "mosaic_tpu"])
def backend(request, monkeypatch) -> str:
    """Name of a backend. Kernels in Pallas are interpreted."""
    tpu = kernel_op.BACKENDS["mosaic_tpu"].interpreted()
    backends = {**kernel_op.BACKENDS, "triton": interpreted_triton(), "mosaic_tpu": tpu}
    monkeypatch.setattr(kernel_op, "BACKENDS", backends)
    return request.param


def random(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def check(
    step: Callable[..., Any],
    arrays: list[np.ndarray],
    state_shape: tuple[int, ...],
    advance: Advance,
    backend: str,
    dtype: str = "float32",
    is_padded: bool = False,
) -> None:
    """Compare a step with `advance`, a function of a row and its state in float64.

    Args:
      step: an op of `recurrent`. It takes the arrays with a dimension T after B, the rows, and the
        numbers of tokens.
      arrays: ``[B, ...]`` each.
      state_shape: shape of a state.
      advance: returns the output of a row and its new state.
      backend: name of the backend.
      dtype: dtype of the pool.
      is_padded: whether the pool pads the states, as on TPUs.
    """
    [pool] = random(5, (L, P, *state_shape))
    pool[1 - LAYER] = np.nan
    pool[LAYER, [0, 1, 2, 4, 6]] = np.nan
    before = pool.astype(dtype)
    if is_padded:
        shape = padded_state_shape(state_shape, "tpu")
        assert shape != state_shape
        more = [(0, new - old) for old, new in zip(state_shape, shape, strict=True)]
        before = np.pad(before, [(0, 0), (0, 0), *more])

    @jax.jit
    def run(pool, sources, entries, *arrays):
        rows = StateRows(pool, jnp.int32(LAYER), sources, entries, backend)
        out, rows = step([x[:, None] for x in arrays], rows, jnp.asarray(NUM_TOKENS))
        return out[:, 0], rows.pool

    out, after = map(np.asarray, run(jnp.asarray(before), SOURCES, ENTRIES, *arrays))
    inner = tuple(map(slice, state_shape))
    expected = before.astype(np.float64)
    tolerance = {"rtol": 0, "atol": 3e-6 if dtype == "float32" else 1e-2}
    for row, (source, entry) in enumerate(zip(SOURCES, ENTRIES, strict=True)):
        state = np.zeros(state_shape)
        if source < P:
            state = before[LAYER, source][inner].astype(np.float64)
        out_of_row, new = advance(row, state)
        if NUM_TOKENS[row]:
            np.testing.assert_allclose(out[row], out_of_row, **tolerance)
        if entry < P:
            expected[LAYER, entry] = 0
            expected[LAYER, entry][inner] = new if NUM_TOKENS[row] else state
    np.testing.assert_allclose(after.astype(np.float64), expected, **tolerance)
    # Entries that no row writes keep their bits.
    others = np.setdiff1d(np.arange(P), ENTRIES)
    assert after[LAYER, others].tobytes() == before[LAYER, others].tobytes()
    assert after[1 - LAYER].tobytes() == before[1 - LAYER].tobytes()


# Sizes of Qwen3.5, of OLMo Hybrid, and sizes that fill no vector and no tile. The kernel for TPUs
# leaves states with less than 128 lanes to XLA, unless they are padded.
@pytest.mark.parametrize(
    "D, U, is_padded, by_element",
    [
        (128, 128, False, False),
        (27, 43, True, True),
        (24, 43, False, True),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in (
                (128, 128, False, True),
                (96, 192, False, False),
                (96, 192, False, True),
                (24, 43, False, False),
                (96, 192, True, False),
                (96, 192, True, True),
                (27, 43, True, False),
            )
        ),
    ],
)
def test_delta_step_equals_the_recurrence(backend, D, U, is_padded, by_element) -> None:
    q, k, v, log_decay, beta = random(
        0, (B, K, D), (B, K, D), (B, K, G, U), (B, K, G, D)[: 4 if by_element else 3], (B, K, G)
    )
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay, beta = -np.abs(log_decay), np.abs(beta)
    log_decay[1] = -200  # a state that is forgotten

    def advance(row: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outs, states = np.zeros((K, G, U)), np.zeros((K * G, D, U))
        for head, group in np.ndindex(K, G):
            of_key = q[row, head][None], k[row, head][None]
            of_value = v[row, head, group][None], log_decay[row, head, group][None]
            arrays = *of_key, *of_value, beta[row, head, group][None]
            out, new = recurrences.delta_rule(*arrays, state[head * G + group])
            outs[head, group], states[head * G + group] = out[0], new
        return outs, states

    def step(arrays: Any, rows: StateRows, num_tokens: jax.Array) -> Any:
        q, k, v, log_decay, beta = arrays
        return recurrent.delta_rule(q, k, v, log_decay, beta, rows, num_tokens)

    arrays = [q, k, v, log_decay, beta]
    check(step, arrays, (K * G, D, U), advance, backend, is_padded=is_padded)


# Sizes of Nemotron 3 Nano, and sizes that fill no vector and no tile.
@pytest.mark.parametrize("U, D, is_padded", [(64, 128, False), (7, 43, False), (7, 43, True)])
def test_state_space_step_equals_the_recurrence(backend, U, D, is_padded) -> None:
    x, b, c, log_decay = random(1, (B, K, G, U), (B, K, D), (B, K, D), (B, K, G))
    b, c = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (b, c))
    log_decay = -np.abs(log_decay)

    def advance(row: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outs, states = np.zeros((K, G, U)), np.zeros((K * G, U, D))
        for head, group in np.ndindex(K, G):
            of_key = b[row, head][None], c[row, head][None]
            arrays = x[row, head, group][None], *of_key, log_decay[row, head, group][None]
            out, new = recurrences.state_space(*arrays, state[head * G + group])
            outs[head, group], states[head * G + group] = out[0], new
        return outs, states

    def step(arrays: Any, rows: StateRows, num_tokens: jax.Array) -> Any:
        x, b, c, log_decay = arrays
        return recurrent.state_space(x, b, c, log_decay, rows, num_tokens)

    arrays = [x, b, c, log_decay]
    check(step, arrays, (K * G, U, D), advance, backend, is_padded=is_padded)


@pytest.mark.parametrize("backend", ["xla", "cpu", "triton"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("F, width", [(43, 4), (640, 3)])
def test_convolution_step_equals_the_recurrence(backend, F, width, has_bias, dtype) -> None:
    x, weight, bias = random(2, (B, F), (F, width), (F,))
    x = x.astype(dtype).astype(np.float32)
    filters = weight, bias if has_bias else None

    def advance(row: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = state.reshape(width - 1, F)
        out, new = recurrences.causal_convolution(x[row][None], inputs, *filters)
        return out[0], new.reshape(-1)

    def step(arrays: Any, rows: StateRows, num_tokens: jax.Array) -> Any:
        layer_bias = jnp.asarray(bias) if has_bias else None
        return recurrent.causal_convolution(
            arrays[0], rows, jnp.asarray(weight), layer_bias, num_tokens
        )

    check(step, [x], ((width - 1) * F,), advance, backend, dtype)


@pytest.mark.parametrize("backend", ["xla", None])
def test_a_step_in_the_pool_is_differentiable(backend) -> None:
    D, U = 8, 5
    shapes = (B, 1, K, D), (B, 1, K, D), (B, 1, K, G, U), (B, 1, K, G), (B, 1, K, G)
    q, k, v, log_decay, beta = map(jnp.asarray, random(3, *shapes))
    [pool] = map(jnp.asarray, random(4, (L, P, K * G, D, U)))
    ids = jnp.asarray(SOURCES), jnp.asarray(ENTRIES)
    num_tokens = jnp.asarray(NUM_TOKENS)

    def in_pool(pool, k):
        rows = StateRows(pool, LAYER, *ids, backend)
        out, rows = recurrent.delta_rule(q, k, v, -abs(log_decay), beta, rows, num_tokens)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(rows.pool))

    def in_rows(pool, k):
        rows = StateRows(pool, LAYER, *ids)
        gates = -abs(log_decay), beta
        out, states = recurrent.delta_rule(q, k, v, *gates, take_states(rows), num_tokens)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(set_states(rows, states)))

    actual, expected = (jax.jit(jax.grad(f, (0, 1)))(pool, k) for f in (in_pool, in_rows))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_rows_of_a_pool_are_read_and_written_by_their_ids() -> None:
    pool = jnp.arange(12.0).reshape(2, 3, 2)
    rows = StateRows(pool, 1, jnp.array([2, 3, -1]), jnp.array([0, 3, -1]))
    assert take_states(rows).tolist() == [[10, 11], [0, 0], [0, 0]]
    written = set_states(rows, jnp.full((3, 2), -1.0))
    assert written.tolist() == pool.at[1, 0].set(-1).tolist()
    rows = dataclasses.replace(rows, layer=0)
    assert take_states(rows).tolist() == [[4, 5], [0, 0], [0, 0]]


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_slices_of_a_pool_equal_gathered_states(shape, count) -> None:
    """TPUs read slices. Entries past the end are not written."""
    pool = np.random.default_rng(count).normal(size=(L, 12, *shape)).astype(np.float32)
    entries = np.random.default_rng(count).permutation(13)[:count].astype(np.int32)
    held = np.minimum(entries, 11)
    taken = row_access._take_slices(jnp.asarray(pool), jnp.int32(LAYER), jnp.asarray(held))
    np.testing.assert_array_equal(taken, pool[LAYER, held])
    new = np.random.default_rng(7).normal(size=(count, *shape)).astype(np.float32)
    put = row_access._set_slices(*map(jnp.asarray, (pool, np.int32(LAYER), entries, new)))
    expected = pool.copy()
    expected[LAYER, entries[entries < 12]] = new[entries < 12]
    np.testing.assert_array_equal(put, expected)
