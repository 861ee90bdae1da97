"""Tests of the GPU decode kernel in the interpreter, against float64, with small steps."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from paged_jax.kernels import gpu_device
from paged_jax.kernels.op import choose_backend
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.triton.backend import decode, refusal
from paged_jax.kernels.triton.tuning import DecodeParams
from tests.support.kernel_cases import Case, equations, lowering_for
from tests.support.paged_batch import LAYER, OUT_OF_RANGE, PagedBatch, queries

INTERPRET = jax.default_backend() != "gpu"

# Small steps, so that short sequences take several. Blocks of 8 and 128 tokens are smaller and
# larger.
SMALL_STEPS = DecodeParams(step_tokens=16, num_warps=4, num_stages=3)


PROGRAM = jax.jit(decode, static_argnames=("options", "interpret", "params", "num_parts"))


def run(
    batch: PagedBatch,
    q,
    *,
    sinks=None,
    params: DecodeParams | None = SMALL_STEPS,
    num_parts: int | None = None,
    program=PROGRAM,
    **options,
) -> tuple[np.ndarray, np.ndarray]:
    args = AttentionArgs(
        q, batch.pools, batch.block_tables, batch.lengths, None, sinks, np.int32(LAYER)
    )
    options = Options(**({"scale": q.shape[-1] ** -0.5} | options))
    out, lse = program(
        args, options=options, interpret=INTERPRET, params=params, num_parts=num_parts
    )
    return np.asarray(out), np.asarray(lse)


def check(
    batch: PagedBatch,
    q,
    *,
    atol=1e-5,
    rtol=0.0,
    params: DecodeParams | None = SMALL_STEPS,
    num_parts: int | None = 0,
    **kwargs,
) -> None:
    slid = batch.slid(kwargs.get("sliding_window"))
    out, lse = run(slid, q, params=params, num_parts=num_parts, **kwargs)
    expected, expected_lse = batch.expected_decode(q, **kwargs)
    assert out.dtype == q.dtype
    assert lse.dtype == np.float32
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=atol, rtol=rtol)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


SINKS = np.array([0.5, -1.0, 3.0, -np.inf, 8.0, 0.0], np.float32)
VARIANTS = {
    "plain": {},
    "window": {"scale": 0.3, "sliding_window": 37},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 0.5, "sliding_window": 50, "soft_cap": 5.0, "sinks": SINKS},
}
LENGTHS = [0, 1, 15, 16, 17, 130, 64]


def standard() -> tuple[PagedBatch, np.ndarray]:
    """Return a batch and queries. Tests that use them with the same options share a program."""
    return PagedBatch.random(LENGTHS), queries((len(LENGTHS), 6, 16))


# Parts of two steps, sequences that are not split, and parts of one step with unused program
# instances.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_parts"), [*((name, 9) for name in VARIANTS), ("all", 0), ("sinks", 40)]
)
def test_decode_matches_float64(name, num_parts) -> None:
    check(*standard(), num_parts=num_parts, **VARIANTS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("C", "K", "G", "D", "lanes"), [(1, 1, 1, 8, None), (12, 1, 3, 20, 128), (128, 2, 4, 256, None)]
)
def test_decode_any_shape(C, K, G, D, lanes) -> None:
    """Blocks are smaller and larger than a step. `test_attention.py` has the sizes in between."""
    lengths = [0, 1, C - 1, C, C + 1, 40]
    batch = PagedBatch.random(lengths, K=K, C=C, D=D, lanes=lanes)
    check(batch, queries((len(lengths), K * G, D)), num_parts=6)


@pytest.mark.parametrize(
    ("pool_dtype", "G", "num_parts"), [("float32", 40, 0), ("float32", 40, 7), ("int8", 17, 7)]
)
def test_decode_of_large_groups_in_slices(pool_dtype, G, num_parts) -> None:
    """Slices have 14 and 9 heads, and the last slice fewer. Each slice merges its parts."""
    batch = PagedBatch.random([0, 1, 40], dtype=jnp.dtype(pool_dtype))
    sinks = np.linspace(-2, 2, 2 * G, dtype=np.float32)
    check(batch, queries((3, 2 * G, 16)), num_parts=num_parts, sinks=sinks, sliding_window=37)


@pytest.mark.parametrize(
    ("G", "pool_dtype", "num_slices"),
    [(32, "bfloat16", 1), (71, "bfloat16", 3), (1024, "bfloat16", 32), (32, "float32", 2)],
)
def test_decode_has_program_instances_for_each_slice_of_a_group(G, pool_dtype, num_slices) -> None:
    """The tile of a whole group of 1024 does not fit the shared memory of any GPU."""
    case = Case("decode", "triton", G=G, dtype=pool_dtype)
    with lowering_for("cuda"):
        program = jax.make_jaxpr(case.function())(*case.shapes())
    [kernel] = [x for x in equations(program.jaxpr) if x.primitive.name == "pallas_call"]
    assert kernel.params["grid_mapping"].grid[0] == case.K * num_slices


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool_dtype", "D", "lanes", "num_parts"),
    [("int8", 16, None, 0), ("float8_e4m3fn", 80, 128, 4)],
)
def test_decode_of_quantised_pools(pool_dtype, D, lanes, num_parts) -> None:
    batch = PagedBatch.random([0, 1, 40, 16], D=D, dtype=jnp.dtype(pool_dtype), lanes=lanes)
    check(batch, queries((4, 6, D)), num_parts=num_parts, **VARIANTS["all"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "bfloat16"),
        ("float16", "int8"),
        ("bfloat16", "float8_e4m3fn"),
    ],
)
def test_decode_rounds_only_the_result(dtype, pool_dtype) -> None:
    """The error is half a unit in the last place, because weights are not rounded."""
    batch = PagedBatch.random([5, 130, 64], dtype=jnp.dtype(pool_dtype))
    q = queries((3, 4, 16), jnp.dtype(dtype))
    rtol = 0.0 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    check(batch, q, rtol=rtol, num_parts=6)


@pytest.mark.slow
def test_decode_with_scales_too_small_for_float16() -> None:
    batch = PagedBatch.random([5, 130, 64], dtype=jnp.int8)
    factor = np.float32(1e-3)
    pools = batch.pools
    assert pools.v_scale is not None
    tiny = dataclasses.replace(
        batch,
        v=[factor * v for v in batch.v],
        pools=pools._replace(v_scale=factor * pools.v_scale),
    )
    # Half a unit in the last place; some results are subnormal numbers.
    check(tiny, queries((3, 4, 16), np.float16), rtol=2**-10, atol=2**-25, num_parts=6)


def scaled(batch: PagedBatch, k_exponents: list[np.ndarray], v_exponents: list[np.ndarray]):
    """Multiply quantised tokens by powers of two, given as exponents ``[N, K]`` per sequence."""
    pools, values = batch.pools, {}
    for name, exponents in {"k": k_exponents, "v": v_exponents}.items():
        scale = getattr(pools, f"{name}_scale").copy()
        for b, powers in enumerate(exponents):
            places = np.arange(len(powers))
            C = scale.shape[3]
            scale[LAYER, batch.block_tables[b, places // C], :, places % C] *= 2.0**powers
        values[name] = [
            x * 2.0 ** powers[..., None]
            for x, powers in zip(getattr(batch, name), exponents, strict=True)
        ]
        pools = pools._replace(**{f"{name}_scale": scale})
    return dataclasses.replace(batch, pools=pools, **values)


def test_decode_with_all_options_and_growing_scales() -> None:
    """A fast test with larger tolerances of all that the slower tests check separately."""
    lengths = [5, 136, 64, 0]
    batch = PagedBatch.random(lengths, dtype=jnp.float8_e4m3fn, extra_width=0)
    flat = [np.zeros((n, 2)) for n in lengths]
    growing = [x + np.arange(len(x))[:, None] // 8 for x in flat]
    batch = scaled(batch, flat, growing)
    batch.lengths[1] = 2**31 - 1  # more than its table holds
    q = queries((4, 6, 16), jnp.bfloat16)
    check(batch, q, rtol=2**-8, atol=2**-8, num_parts=12, **VARIANTS["all"])


@pytest.mark.slow
@pytest.mark.parametrize("pool_dtype", ["int8", "float8_e4m3fn"])
def test_decode_of_quantised_pools_with_queries_and_scales_of_any_size(pool_dtype) -> None:
    """Queries and scales exceed the range of float16, the dtype of the matmuls."""
    lengths = [5, 130, 64]
    batch = PagedBatch.random(lengths, dtype=jnp.dtype(pool_dtype))
    rng = np.random.default_rng(2)
    k_exponents, v_exponents = (
        [rng.integers(-20, 20, (n, 2)).astype(float) - shift for n in lengths] for shift in (20, 0)
    )
    batch = scaled(batch, k_exponents, v_exponents)
    # Powers of two per row, and then per element.
    q = queries((3, 4, 16)) * 2.0 ** np.array([-70, -10, 0, 14])[:, None]
    q = (q * 2.0 ** rng.integers(-12, 1, (3, 4, 16))).astype(jnp.bfloat16)
    out, lse = run(batch, q, num_parts=6)
    expected, expected_lse = batch.expected_decode(q)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)
    for b, v in enumerate(batch.v):
        # Half a unit in the last place of bfloat16, and errors of float32 sums of the largest
        # values.
        np.testing.assert_allclose(
            out[b].astype(np.float64), expected[b], rtol=2**-8, atol=2**-20 * np.abs(v).max()
        )
    shrunk = scaled(
        batch, [0 * x for x in k_exponents], [x - 70 for x in map(np.zeros_like, v_exponents)]
    )
    np.testing.assert_array_equal(
        run(shrunk, q, num_parts=6)[0], (out * 2.0**-70).astype(out.dtype)
    )


@pytest.mark.slow
def test_decode_of_quantised_pools_keeps_small_weights_of_large_values() -> None:
    """Each token contributes equally, with softmax weights below the smallest float16 number."""
    lengths = [5, 130, 64]
    batch = PagedBatch.random(lengths, dtype=jnp.int8)
    # Pairs of equal query heads. Their scores span many powers of two.
    q = np.repeat(30 * queries((3, 2, 16)), 2, axis=1).astype(jnp.bfloat16)
    exponents = []
    for row, k in zip(q.astype(np.float64), batch.k, strict=True):
        scores = np.einsum("kd,nkd->nk", row[::2], k) * 16**-0.5 / np.log(2)
        exponents.append(np.clip(np.round(scores.max(axis=0) - scores), 0, 24))
    assert max(x.max() for x in exponents) == 24
    batch = scaled(batch, [0 * x for x in exponents], exponents)
    check(batch, q, rtol=2**-8, atol=2**-12, num_parts=6)


@pytest.mark.slow
@pytest.mark.parametrize(("step_tokens", "C"), [(128, 8), (32, 64)])
def test_decode_any_step(step_tokens, C) -> None:
    batch = PagedBatch.random([200, 31], C=C)
    params = DecodeParams(step_tokens, num_warps=4, num_stages=3)
    check(batch, queries((2, 2, 16)), params=params, num_parts=6)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [-1, 10**9])
def test_decode_ignores_entries_past_the_end(entry) -> None:
    batch, q = standard()
    batch.block_tables[batch.block_tables == OUT_OF_RANGE] = entry
    check(batch, q, num_parts=9)


@pytest.mark.slow
def test_decode_of_large_scores_does_not_overflow() -> None:
    batch, q = standard()
    q *= 1e4
    out, lse = run(batch, q, num_parts=9)
    _, expected_lse = batch.expected_decode(q)
    # The terms of a small score are as large as the terms of the largest score.
    largest = np.abs(expected_lse[np.isfinite(expected_lse)]).max()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2**-24 * largest)
    assert np.isfinite(out).all()


@pytest.mark.slow
def test_decode_is_deterministic_and_rows_are_independent() -> None:
    batch, q = standard()
    backwards = np.arange(len(LENGTHS))[::-1]
    together = run(batch, q, num_parts=9)
    again = run(batch, q, num_parts=9)
    turned = run(batch.rows(backwards), q[backwards], num_parts=9)
    for first, second, third in zip(together, again, turned, strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, third[backwards])


@pytest.mark.parametrize("step", [-1, 4])
def test_decode_merges_the_same_bits_in_any_order(monkeypatch, step) -> None:
    """On a GPU program instances end in any order. Here they run sequentially in another order."""
    batch, q = standard()
    expected = run(batch, q, num_parts=9)
    module = importlib.import_module("paged_jax.kernels.triton.decode")
    program_id = pl.program_id

    def turned(axis: int):
        return program_id(0) if axis == 0 else (step * program_id(1)) % pl.num_programs(1)

    monkeypatch.setattr(pl, "program_id", turned)
    # Bypass the jit cache, which has the program of the usual order.
    monkeypatch.setattr(module, "_decode", module._decode.__wrapped__)
    found = run(batch, q, num_parts=9, program=decode)
    for first, second in zip(expected, found, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_decode_without_parts_has_the_same_bits_in_any_batch() -> None:
    batch, q = standard()
    together = run(batch, q, num_parts=0)
    alone = run(batch.rows(np.arange(5, 6)), q[5:6], num_parts=0)
    for first, second in zip(together, alone, strict=True):
        np.testing.assert_array_equal(first[5:6], second)


def problem(**changes) -> Problem:
    sizes = {"B": 1, "H": 4, "K": 2, "C": 16, "D": changes.pop("D", 128)}
    fields = {
        "op": "decode",
        "sizes": tuple(sizes.items()),
        "q_dtype": jnp.bfloat16,
        "pool_dtype": jnp.bfloat16,
        "has_sinks": False,
        "options": Options(scale=1.0),
        "lanes": sizes["D"],
    }
    return Problem(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"D": 512}, "head dimension must be at most 256, got 512"),
        ({"D": 33, "pool_dtype": jnp.int8}, "bytes in pairs"),
        ({"q_dtype": np.float64}, "queries must be .* got float64"),
        ({"pool_dtype": jnp.float8_e5m2}, "pools must be .* got float8_e5m2"),
    ],
)
def test_refusal_says_why(changes, reason) -> None:
    assert re.search(reason, refusal(problem(**changes)) or "")


def test_refusal_of_fp8_depends_on_the_gpu() -> None:
    fp8 = problem(pool_dtype=jnp.float8_e4m3fn)
    with gpu_device.assume(gpu_device.GpuInfo("NVIDIA A100", 108, (8, 0))):
        assert "compute capability 8.9" in (refusal(fp8) or "")
        assert refusal(problem()) is None
        assert refusal(fp8, interpret=True) is None


def test_refusal_names_gpus_before_ampere() -> None:
    with gpu_device.assume(gpu_device.GpuInfo("Tesla T4", 40, (7, 5))):
        choice = choose_backend(problem(), "cuda")
        assert choice.backend == "xla"
        assert choice.reason.startswith(
            "triton does not support the call: XLA compiles Triton for compute capability 8.0 and "
            "later only, and Tesla T4 has 7.5; mosaic_gpu does not support the call: "
        )
        # The interpreter needs no GPU.
        assert refusal(problem(), interpret=True) is None


def test_refusal_is_none_for_supported_dtypes() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn):
        assert refusal(problem(pool_dtype=dtype)) is None
