"""A small problem for each kernel, solved before anything depends on it."""

import jax
import jax.numpy as jnp
import numpy as np


def failure(op: str, dtype: jnp.dtype, target: str) -> str | None:
    """Run a kernel on a CPU device; say what is wrong with it, or None."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:
        return "there is no CPU device to test it on"
    try:
        with jax.default_device(device):
            got, want = _PROBLEMS[op](target, dtype)
    except Exception as error:  # whatever goes wrong here, XLA can do the work
        return f"its self-test failed: {error}"
    if not np.allclose(got, want, rtol=1e-4, atol=1e-4):
        return f"its self-test failed: it is off by {np.abs(got - want).max():.2g}"
    return None


def _linear(target: str, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((7, 77), (2, 13, 77)))
    scales = rng.integers(1, 8, (2, 13)).astype(np.float32)
    operands = [x / 8, w.astype(dtype), np.int32(1)] + [scales] * (dtype == jnp.int8)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((7, 13), jnp.float32))
    want = x / 8 @ w[1].T
    got = np.asarray(jax.jit(call)(*operands))
    return got, want * scales[1] if dtype == jnp.int8 else want


def _grouped_linear(target: str, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((7, 77), (2, 3, 13, 77)))
    sizes = np.array([1, 0, 5], np.int32)  # and a row of no group
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((7, 13), jnp.float32))
    got = np.asarray(jax.jit(call)(x / 8, w.astype(dtype), sizes, np.int32(1)))
    want = [x[:1] / 8 @ w[1, 0].T, x[1:6] / 8 @ w[1, 2].T, np.zeros((1, 13))]
    return got, np.concatenate(want)


def _decode(target: str, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    got, want = _attention(target, dtype, num_queries=None)
    return got, want[:, -1]


def _prefill(target: str, dtype: jnp.dtype) -> tuple[np.ndarray, np.ndarray]:
    return _attention(target, dtype, num_queries=7)


def _attention(
    target: str, dtype: jnp.dtype, num_queries: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """What the last queries of a sequence get; without a number, one of another shape."""
    rng = np.random.default_rng(0)
    P, K, C, D, H, length, T = 4, 2, 8, 24, 6, 21, num_queries or 1
    q = rng.normal(size=(1, T, H, D)).astype(np.float32)
    k, v = (rng.integers(-7, 8, (1, P, K, C, D)).astype(np.float32) for _ in range(2))
    table, scales = np.array([[2, 0, 3]], np.int32), np.full((1, P, K, C), 0.25, np.float32)
    is_quantised = dtype.itemsize == 1
    queries = q[:, 0] if num_queries is None else q
    operands = [queries, k.astype(dtype), v.astype(dtype), table]
    operands += [np.array([length], np.int32), np.int32(0)]
    operands += [scales, scales] * is_quantised
    operands += [np.array([T], np.int32)] * (num_queries is not None)
    shapes = queries.shape, queries.shape[:-1]
    call = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(x, q.dtype) for x in shapes])
    attributes = attributes_of(0.1, None, None, is_quantised, False)
    got = np.asarray(jax.jit(lambda *args: call(*args, **attributes)[0])(*operands))

    factor = 0.25 if is_quantised else 1.0
    keys, values = (
        factor * pool[0, table[0]].transpose(1, 0, 2, 3).reshape(K, -1, D)[:, :length]
        for pool in (k, v)
    )
    scores = 0.1 * np.einsum("tkgd,knd->tkgn", q.reshape(T, K, H // K, D), keys)
    is_later = np.arange(length) > length - T + np.arange(T)[:, None]
    scores = np.where(is_later[:, None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return got, np.einsum("tkgn,knd->tkgd", weights, values).reshape(1, T, H, D)


_PROBLEMS = {
    "decode": _decode,
    "prefill": _prefill,
    "linear": _linear,
    "grouped_linear": _grouped_linear,
}


def attributes_of(
    scale: float,
    window: int | None,
    cap: float | None,
    has_scales: bool,
    has_sinks: bool,
    is_interleaved: bool = False,
) -> dict[str, np.generic]:
    """The static numbers of attention, as the kernels read them."""
    return {
        "scale": np.float32(scale),
        "sliding_window": np.int32(window or 0),
        "soft_cap": np.float32(cap or 0),
        "has_scales": np.int32(has_scales),
        "has_sinks": np.int32(has_sinks),
        "is_interleaved": np.int32(is_interleaved),
    }
