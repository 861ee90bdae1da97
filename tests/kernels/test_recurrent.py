"""Recurrent ops against float64 recurrences, at all lengths of a chunk and for extreme gates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import recurrent
from paged_jax.kernels.xla import recurrent as plain
from tests.support import recurrences

# Lengths of the rows of one batch: one token, less than a tile, whole tiles, and many tiles.
LENGTHS = np.array([1, 15, 64, 65, 1000, 0], np.int32)
B, T = len(LENGTHS), 1000
K, G, D, U = 2, 2, 24, 40
SHORT = 7  # tokens of a chunk that fits a single small tile

delta_rule = jax.jit(recurrent.delta_rule)
state_space = jax.jit(recurrent.state_space)
convolution = jax.jit(recurrent.causal_convolution)

# Log decays and betas of a case: smallest and largest values.
GATES = {
    "usual": ((-2.0, 0.0), (0.0, 1.0)),
    "no decay, no writes": ((-1e-6, 0.0), (0.0, 1e-6)),
    "no decay, beta 1": ((-1e-6, 0.0), (0.999, 1.0)),
    "beta 2": ((-0.1, 0.0), (1.9, 2.0)),
    "decay to zero": ((-50.0, -49.0), (0.0, 1.0)),
    "large and small decay": ((-50.0, 0.0), (0.0, 1.0)),
}


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def gates(rng, shape: tuple[int, ...], case: str) -> np.ndarray:
    low, high = GATES[case][0]
    values = rng.uniform(low, high, shape)
    if case == "large and small decay":
        values = np.where(rng.random(shape) < 0.5, values, values * 1e-4)
    return values.astype(np.float32)


def delta_inputs(case: str, *, by_element: bool, equal_keys: bool = False) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    q, k = (unit(rng.normal(size=(B, T, K, D))) for _ in range(2))
    if equal_keys:
        k = unit(k[:, :1] + 1e-3 * k)
    v = rng.normal(size=(B, T, K, G, U))
    log_decay = gates(rng, (B, T, K, G, D)[: 5 if by_element else 4], case)
    beta = rng.uniform(*GATES[case][1], (B, T, K, G))
    state = rng.normal(size=(B, K, G, D, U))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta, state)]


def rows_of(x: np.ndarray, b: int, length: int) -> np.ndarray:
    return x[b, :length]


def check_delta(inputs: list[np.ndarray], lengths: np.ndarray, tolerance: float) -> None:
    """Compare all heads with the recurrence. The padding of the inputs is large."""
    q, k, v, log_decay, beta, state = inputs
    out, new = map(np.asarray, delta_rule(*inputs, jnp.asarray(lengths)))
    for b, n in enumerate(lengths):
        for key_head, g in np.ndindex(K, G):
            head = b, slice(0, n), key_head
            of_key = q[head], k[head]
            of_value = [x[(*head, g)] for x in (v, log_decay, beta)]
            expected, last = recurrences.delta_rule(*of_key, *of_value, state[b, key_head, g])
            largest = max(1, np.abs(last).max(), np.abs(expected).max(initial=0))
            np.testing.assert_allclose(new[b, key_head, g], last, rtol=0, atol=tolerance * largest)
            if n:
                actual = out[(*head, g)]
                np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("by_element", [False, True], ids=["head", "element"])
@pytest.mark.parametrize("case", GATES)
def test_delta_rule_equals_the_recurrence(case, by_element) -> None:
    check_delta(delta_inputs(case, by_element=by_element), LENGTHS, 5e-6)


@pytest.mark.parametrize("by_element", [False, True], ids=["head", "element"])
def test_delta_rule_is_accurate_for_nearly_equal_keys(by_element) -> None:
    inputs = delta_inputs("beta 2", by_element=by_element, equal_keys=True)
    check_delta(inputs, LENGTHS, 5e-5)


@pytest.mark.parametrize("by_element", [False, True], ids=["head", "element"])
@pytest.mark.parametrize("length", [1, SHORT, 33])
def test_delta_rule_of_short_chunks_equals_the_recurrence(length, by_element) -> None:
    inputs = delta_inputs("usual", by_element=by_element)
    inputs = [x[:, :length] for x in inputs[:-1]] + inputs[-1:]
    check_delta(inputs, np.minimum(LENGTHS, length), 2e-6)


@pytest.mark.parametrize("by_element", [False, True], ids=["head", "element"])
def test_chunks_on_the_grid_give_the_same_bits(by_element) -> None:
    *inputs, state = delta_inputs("usual", by_element=by_element)
    inputs = [x[:, :512] for x in inputs]
    lengths = np.full(B, 512, np.int32)
    whole, last = delta_rule(*inputs, state, lengths)
    halves = []
    for start in (0, 128, 256, 384):
        part = [x[:, start : start + 128] for x in inputs]
        out, state = delta_rule(*part, state, np.full(B, 128, np.int32))
        halves.append(out)
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole)
    np.testing.assert_array_equal(state, last)


def state_space_inputs(case: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(B, T, K, G, U))
    b, c = (unit(rng.normal(size=(B, T, K, D))) for _ in range(2))
    state = rng.normal(size=(B, K, G, U, D))
    return [each.astype(np.float32) for each in (x, b, c, gates(rng, (B, T, K, G), case), state)]


@pytest.mark.parametrize("length", [1, SHORT, T])
@pytest.mark.parametrize("case", [case for case in GATES if "beta" not in case])
def test_state_space_equals_the_recurrence(case, length) -> None:
    x, b, c, log_decay, state = state_space_inputs(case)
    inputs = [each[:, :length] for each in (x, b, c, log_decay)]
    lengths = np.minimum(LENGTHS, length)
    out, new = map(np.asarray, state_space(*inputs, state, lengths))
    for row, n in enumerate(lengths):
        for k, g in np.ndindex(K, G):
            of_head = x[row, :n, k, g], b[row, :n, k], c[row, :n, k], log_decay[row, :n, k, g]
            expected, last = recurrences.state_space(*of_head, state[row, k, g])
            largest = max(1, np.abs(last).max(), np.abs(expected).max(initial=0))
            np.testing.assert_allclose(new[row, k, g], last, rtol=0, atol=5e-6 * largest)
            if n:
                actual = out[row, :n, k, g]
                np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6 * largest)


@pytest.mark.parametrize("length", [1, SHORT])
def test_a_recurrence_without_beta_takes_a_decay_per_element(length) -> None:
    x, b, c, log_decay, state = state_space_inputs("usual")
    arrays = [each[:, :length] for each in (c, b, x)]
    log_decay = log_decay[:, :length, ..., None]
    run = jax.jit(plain.apply_recurrence)
    expected = run(*arrays, log_decay, None, state)
    actual = run(*arrays, np.repeat(log_decay, D, axis=-1), None, state)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("length", [1, SHORT])
@pytest.mark.parametrize("has_bias", [False, True])
def test_causal_convolution_equals_the_recurrence(length, has_bias) -> None:
    rng = np.random.default_rng(2)
    F, width = 6, 4
    x = rng.normal(size=(B, length, F)).astype(np.float32)
    state = rng.normal(size=(B, (width - 1) * F)).astype(np.float32)
    weight = rng.normal(size=(F, width)).astype(np.float32)
    bias = rng.normal(size=F).astype(np.float32) if has_bias else None
    lengths = np.minimum(LENGTHS, length)
    out, new = convolution(x, state, weight, bias, lengths)
    for row, n in enumerate(lengths):
        before = state[row].reshape(width - 1, F)
        if n:
            expected, _ = recurrences.causal_convolution(x[row, :n], before, weight, bias)
            np.testing.assert_allclose(out[row, :n], expected, rtol=0, atol=1e-5)
        kept = np.concatenate([before, x[row, :n]])[-(width - 1) :]
        np.testing.assert_array_equal(new[row].reshape(width - 1, F), kept)


def test_causal_convolution_rounds_inputs_to_the_dtype_of_the_state() -> None:
    """Otherwise the first outputs of a chunk would depend on where the chunk begins."""
    x = np.random.default_rng(3).normal(size=(1, 6, 8)).astype(np.float32)
    weight, state = jnp.ones((8, 4)), jnp.zeros((1, 24), jnp.bfloat16)
    whole, last = convolution(x, state, weight, None, jnp.array([6]))
    first, state = convolution(x[:, :3], state, weight, None, jnp.array([3]))
    second, state = convolution(x[:, 3:], state, weight, None, jnp.array([3]))
    np.testing.assert_array_equal(jnp.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(state.astype(jnp.float32), last.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="by_step")
def loss(inputs, state, *, by_step: bool) -> jax.Array:
    length = inputs[0].shape[1]
    if not by_step:
        return jnp.sum(jnp.sin(recurrent.delta_rule(*inputs, state, jnp.array([length]))[0]))
    total = 0.0
    for t in range(length):
        token = [x[:, t : t + 1] for x in inputs]
        out, state = recurrent.delta_rule(*token, state, jnp.array([1]))
        total += jnp.sum(jnp.sin(out))
    return jnp.asarray(total)


@pytest.mark.parametrize(
    "by_element",
    [
        pytest.param(False, id="head"),
        pytest.param(True, id="element", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_tiles_equal_gradients_of_steps(by_element) -> None:
    *inputs, state = delta_inputs("usual", by_element=by_element)
    inputs = [x[:1, :20] for x in inputs]
    actual, expected = (
        jax.grad(functools.partial(loss, by_step=by_step), argnums=(0, 1))(inputs, state[:1])
        for by_step in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), actual, expected)
