"""Tests of the GPU kernels for writing: unsupported problems, and rounding.

`test_writing.py` tests their results, and `test_lowering.py` their lowering.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from paged_jax.kernels import op as kernel_op
from paged_jax.kernels.backend import Backend, Kernel
from paged_jax.kernels.kv_dtypes import quantise, round_half_to_even
from paged_jax.kernels.op import choose_backend
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.triton import write
from paged_jax.kernels.writing import paged_write
from tests.support.kernel_cases import Case, equations, lower, lowering_for


def lowered(case: Case) -> str:
    return lower(case.function(), *case.shapes(), platform="cuda", donate_argnums=0).as_text()


@pytest.mark.parametrize("op", ["write", "copy_blocks"])
@pytest.mark.parametrize("pool_dtype", ["int8", "float8_e4m3fn"])
def test_write_and_copy_blocks_see_large_pools_as_words(op, pool_dtype):
    """Pallas computes addresses of bytes in signed 32-bit integers, which would overflow."""
    case = Case(op, "triton", L=32, P=6000, K=8, pool_dtype=pool_dtype)
    [call] = [line for line in lowered(case).splitlines() if "xla.gpu.triton" in line]
    types = call.rpartition(" : ")[2]
    assert "xi8>" not in types and "xui8>" not in types and "xf8" not in types
    assert ("xui16>" if op == "write" else "xui32>") in types


def problem(pool_dtype: str, op: str = "write", **sizes: int) -> Problem:
    sizes = {"L": 2, "P": 4, "K": 2, "C": 8, "D": 16, "N": 3} | sizes
    dtype = jnp.dtype(pool_dtype)
    return Problem(
        op=op, sizes=tuple(sizes.items()), q_dtype=dtype, pool_dtype=dtype, has_sinks=False,
        options=Options(), lanes=sizes["D"],
    )  # fmt: skip


def test_choose_backend_gives_xla_what_triton_does_not_support():
    assert choose_backend(problem("bfloat16"), "cuda").backend == "triton"
    for refused, reason in (
        (problem("float64"), "got float64"),
        (problem("int8", D=17), "an even number of elements, got 17 and 17"),
        (problem("int8", "copy_blocks", K=1, C=1, D=10), "a multiple of 4 bytes, got 10"),
    ):
        choice = choose_backend(refused, "cuda")
        assert choice.backend == "xla" and reason in choice.reason


def test_choose_backend_takes_the_first_backend_that_supports_the_problem(monkeypatch):
    def refusal(problem):
        return None if problem.q_dtype == jnp.bfloat16 else "it takes bfloat16 only"

    first = Backend({"write": Kernel(write.write, refusal)}, platform="cuda")
    monkeypatch.setattr(kernel_op, "BACKENDS", {"first": first, **kernel_op.BACKENDS})
    assert choose_backend(problem("bfloat16"), "cuda").backend == "first"
    assert choose_backend(problem("float32"), "cuda").backend == "triton"
    neither = choose_backend(problem("float64"), "cuda")
    assert neither.backend == "xla"
    assert neither.reason.startswith(
        "first does not support the call: it takes bfloat16 only; "
        "triton does not support the call: "
    )


def test_paged_write_with_unsupported_triton_is_an_error():
    pool, scale = np.zeros((1, 1, 1, 4, 17), np.int8), np.zeros((1, 1, 1, 4), np.float32)
    new, places = np.zeros((2, 1, 17), np.float32), np.arange(2)
    write = functools.partial(
        paged_write, pool, pool, new, new, 0 * places, places, k_scale=scale, v_scale=scale
    )
    with pytest.raises(
        NotImplementedError, match="triton does not support the call: it writes bytes in pairs"
    ):
        write(backend="triton")
    assert write().k_scale[0, 0, 0].tolist() == [1, 1, 0, 0]


def test_round_half_to_even_equals_jnp_round():
    halves = np.arange(-260, 261, dtype=np.float32) / 2
    x = np.concatenate(
        [halves, np.nextafter(halves, np.float32(np.inf)), np.nextafter(halves, -np.float32(9e9))]
    )
    np.testing.assert_array_equal(jax.jit(round_half_to_even)(x), np.asarray(jnp.round(x)))


@pytest.mark.parametrize(
    "case",
    [
        Case("write", "triton", pool_dtype="int8"),
        Case("write", "triton", pool_dtype="float8_e4m3fn"),
        Case("rope_write", "triton", D=80, pool_dtype="int8", has_norms=True),
        Case("decode", "triton", pool_dtype="int8", soft_cap=5.0, has_sinks=True),
        Case("prefill", "triton", pool_dtype="int8", soft_cap=5.0, has_sinks=True),
    ],
    ids=str,
)
def test_kernels_divide_no_float_by_a_constant(case):
    """Triton's division by a constant is approximate. XLA multiplies by the reciprocal."""
    with lowering_for("cuda"):
        program = jax.make_jaxpr(case.function())(*case.shapes())
    divisions = [x for x in equations(program.jaxpr) if x.primitive.name == "div"]
    floats = [x for x in divisions if jnp.issubdtype(x.outvars[0].aval.dtype, jnp.floating)]
    assert floats and not [x for x in floats if isinstance(x.invars[1], Literal)]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantise_multiplies_the_peak_by_the_reciprocal(dtype):
    """The product has the same bits in every compiler. A division may differ in the last bit."""
    x = np.random.default_rng(0).lognormal(size=(1000, 4)).astype(np.float32)
    peak, largest = x.max(-1), {jnp.int8: 127, jnp.float8_e4m3fn: 448}[dtype]
    expected = peak * np.float32(1 / largest)
    assert (expected != peak / np.float32(largest)).any()
    for function in (quantise, jax.jit(quantise, static_argnums=1)):
        np.testing.assert_array_equal(function(jnp.asarray(x), dtype)[1], expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_write_quantises_like_quantise_bit_for_bit(dtype):
    rng = np.random.default_rng(0)
    magnitude = 10.0 ** rng.uniform(-30, 30, size=(256, 2, 1))
    k, v = (rng.normal(size=(2, 256, 2, 64)) * magnitude).astype(np.float32)
    pool, scale = jnp.zeros((1, 16, 2, 16, 64), dtype), jnp.zeros((1, 16, 2, 16))
    blocks, offsets = np.divmod(np.arange(256), 16)
    written = paged_write(
        pool, pool, k, v, blocks, offsets, k_scale=scale, v_scale=scale,
        backend="triton", interpret=jax.default_backend() != "gpu",
    )  # fmt: skip
    for values, scales, new in ((written.k, written.k_scale, k), (written.v, written.v_scale, v)):
        expected, expected_scales = jax.jit(quantise, static_argnums=1)(new, dtype)
        np.testing.assert_array_equal(scales[0, blocks, :, offsets], expected_scales)
        np.testing.assert_array_equal(
            np.asarray(values[0, blocks, :, offsets]).view(np.uint8),
            np.asarray(expected).view(np.uint8),
        )
