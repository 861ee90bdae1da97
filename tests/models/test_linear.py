"""`linear` in all its forms: the right values, and no crash at the corners of what is used."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.linear import linear
from tests.support.covering import all_pairs

pytestmark = pytest.mark.optimised


@pytest.mark.parametrize(
    ("dtype", "shape", "out_features"),
    [
        tuple(row.values())
        for row in all_pairs(
            {
                "dtype": ["float32", "bfloat16", "float16"],
                "shape": [(1,), (2,), (3,), (16,), (17,), (100,), (1, 1), (2, 5)],
                "out_features": [6, 7],
            }
        )
    ],
)
def test_linear_matches_float64(dtype, shape, out_features) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*shape, 24)).astype(np.float32)
    w = jnp.asarray(rng.normal(size=(out_features, 24)), dtype)
    out = jax.jit(linear)(x, w)
    assert out.dtype == jnp.float32
    assert out.shape == (*shape, out_features)
    # Inputs may be rounded to the dtype of the weights, nothing else.
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    scale = np.abs(x.astype(np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    error = np.abs(np.asarray(out) - x.astype(np.float64) @ np.asarray(w, np.float64).T)
    assert (error <= tolerance * scale).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 4])
def test_linear_is_differentiable(dtype, rows) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(6, 8)), dtype)
    dx, dw = jax.jit(jax.grad(lambda x, w: linear(x, w).sum(), argnums=(0, 1)))(x, w)
    np.testing.assert_allclose(dx, np.tile(np.asarray(w, np.float32).sum(0), (rows, 1)), rtol=0.02)
    expected = np.tile(np.asarray(x).sum(0), (6, 1))
    np.testing.assert_allclose(np.asarray(dw, np.float32), expected, rtol=0.02, atol=0.05)


@pytest.mark.slow
def test_linear_does_not_crash() -> None:
    """In a process of its own: where XLA's library reads out of bounds, the process dies."""
    code = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from paged_jax.kernels.linear import linear

        def chain(x, ws):
            for w in ws:
                y = linear(x, w)
                x = x * (1 + 1e-6 * y.mean())
            return y

        run = jax.jit(chain)
        for out_features, inputs in ((576, 1536), (4096, 1536), (49152, 576)):
            ws = [jnp.ones((out_features, inputs)) for _ in range(6)]
            for rows in (2, 7, 16):
                for _ in range(20):
                    run(jnp.ones((rows, inputs)), ws).block_until_ready()
    """)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
