"""Matmuls with quantised weights on GPUs: conversion in registers, tiles, parts and groups.

The kernels run compiled if there is a GPU, else in the interpreter. The PTX of their conversions
runs on any machine, in the interpreter of `tests.support.ptx`.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import gpu_device
from paged_jax.kernels import op as kernel_op
from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.linear import Weight, grouped_linear, linear
from paged_jax.kernels.triton import dequantise
from paged_jax.kernels.triton.dequantise import TileFormat
from paged_jax.kernels.weight_formats import CODES, WeightFormat
from tests.support import ptx, weights
from tests.support.covering import all_pairs, once_in_core, take_turns
from tests.support.families import interpreted_triton
from tests.support.kernel_cases import lower
from tests.support.weights import elements, make_weight, random_arrays

# The package has functions of these names.
kernel = importlib.import_module("paged_jax.kernels.triton.linear")
xla = importlib.import_module("paged_jax.kernels.xla.linear")

INTERPRET = jax.default_backend() != "gpu"
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-10}
# Formats that XLA multiplies by, because it fuses their conversion.
OF_ROWS = ("int8 of a row", "fp8 of a row", "int8 with an order")
OTHER = {
    "fp4": WeightFormat("fp4", 64, "float32"),
    "groups of a quarter": WeightFormat("int4", 48, "bfloat16", "bfloat16"),
    "fp8 with minima": WeightFormat("float8_e4m3fn", 32, "float16", "float16"),
}
# Formats that only CPUs have kernels for, and formats of models on GPUs.
COMPACT = {name: f for name, f in weights.FORMATS.items() if f.is_compact}
FORMATS = {name: f.widened for name, f in weights.FORMATS.items() if f.code == f.widened.code}
READ = {name: f for name, f in FORMATS.items() if name not in OF_ROWS} | OTHER


def run_ptx(code, arrays, dtype, pack):
    """Run inline assembly as Triton does, on `pack` consecutive elements of each array."""
    shape, registers = arrays[0].shape, []
    for array in arrays:
        words = np.ascontiguousarray(array).reshape(-1, pack).view(np.uint32)
        registers += [words[:, i].copy() for i in range(words.shape[1])]
    results = ptx.run(code, registers, pack * jnp.dtype(dtype).itemsize // 4)
    return jnp.asarray(np.stack(results, 1).view(jnp.dtype(dtype)).reshape(shape))


@pytest.mark.parametrize("has_min", [False, True])
@pytest.mark.parametrize("dtype", dequantise.DTYPES)
@pytest.mark.parametrize("code", sorted({each.code for each in READ.values()}))
def test_ptx_converts_all_bytes(monkeypatch, code, dtype, has_min) -> None:
    monkeypatch.setattr(dequantise, "run_ptx", run_ptx)
    columns, rng = 64, np.random.default_rng(0)
    values = jnp.arange(256, dtype=jnp.uint8).reshape(4, columns)
    if code == "int8":
        values = values.view(jnp.int8)
    if code == "float8_e4m3fn":
        values = jnp.where((values & 127) == 127, 0, values)  # PTX and JAX convert NaN alike
    weight = WeightFormat(code, 32, "float32", "float32" if has_min else None)
    step = columns * (2 if code in CODES else 1)
    format = TileFormat(weight, 4096, jnp.dtype(dtype), step, False)
    # These dtypes represent the scales and minima.
    groups = 4, step // 32
    scale = jnp.asarray(rng.integers(1, 8, groups) / 16, jnp.float32)
    low = jnp.asarray(rng.integers(-64, 64, groups) / 8, jnp.float32) if has_min else None
    tables = dequantise._tables(code, dtype)
    loaded = tuple(run_ptx(dequantise._look_up(x), (values,), jnp.int16, pack=4) for x in tables)
    for half in format.halves:
        got = dequantise._compiled(loaded or (values,), scale, low, half, format)
        want = dequantise._interpreted((values,), scale, low, half, format)
        assert got.dtype == want.dtype == dtype
        if code in ("nf4", "fp4"):  # the compiled numbers are rounded twice
            got, want = (np.asarray(x, np.float32) for x in (got, want))
            np.testing.assert_allclose(got, want, rtol=2 * TOLERANCE[dtype])
        else:
            np.testing.assert_array_equal(got, want)


def test_ptx_of_e2m1_takes_any_scale_that_the_dtype_represents(monkeypatch) -> None:
    monkeypatch.setattr(dequantise, "run_ptx", run_ptx)
    values = jnp.tile(jnp.arange(16, dtype=jnp.uint8), (2, 1))
    format = TileFormat(WeightFormat("e2m1", 32, "bfloat16"), 32, jnp.dtype("bfloat16"), 32, False)
    look_up = dequantise._look_up(dequantise._tables("e2m1", 0)[0])
    loaded = (run_ptx(look_up, (values,), jnp.int16, pack=4),)
    for exponent in (-120, -20, 0, 100):
        scale = jnp.full((2, 1), 2.0**exponent, jnp.float32)
        got = dequantise._compiled(loaded, scale, None, 0, format)
        np.testing.assert_array_equal(got[0], CODES["e2m1"] * np.float32(2.0**exponent))


def cases():
    """Return rows in which every pair of code paths occurs. Cases take the values in turn."""
    rows = all_pairs(
        {
            "name": [(name,) for name in READ],
            "dtype": [(dtype,) for dtype in dequantise.DTYPES],
            "num_rows": [(1, 15), (40, 64, 128)],
            # Outputs and inputs: whole tiles, parts of tiles, and several steps and parts.
            "shape": [((64, 128),), ((70, 192), (3, 7, 320)), ((5, 2112),)],
        }
    )
    rows = take_turns(rows)
    return [tuple(row.values()) for row in rows if divides(READ[row["name"]], row["shape"])]


def divides(format, shape):
    return shape[-1] % (format.group_size or shape[-1]) == 0


@pytest.mark.parametrize(("name", "dtype", "num_rows", "shape"), once_in_core(cases()))
def test_quantised_linear_matches_float64(name, dtype, num_rows, shape) -> None:
    rng, format = np.random.default_rng(0), READ[name]
    arrays = random_arrays(format, shape, rng)
    w = make_weight(arrays, format, dtype)
    x = rng.normal(size=(num_rows, shape[-1])).astype(np.float32)
    multiply = jax.jit(functools.partial(kernel.quantised_linear, interpret=INTERPRET))
    got = multiply(jnp.asarray(x), w)
    assert got.dtype == jnp.float32 and got.shape == (num_rows, *shape[:-1])
    # Rows, weights, and the scales and minima of 4-bit weights are rounded.
    want, terms = oracle(x, arrays, format)
    error = np.abs(np.asarray(got, np.float64).reshape(num_rows, -1) - want)
    assert (error <= 1.5 * TOLERANCE[dtype] * terms).all(), (error / terms).max()


def oracle(x, arrays, format):
    """Return the product in float64, and the sums of the magnitudes of its terms."""
    x = x.astype(np.float64)
    w = elements(arrays, format).reshape(-1, x.shape[1])
    groups = elements(arrays._replace(mins=None), format).reshape(w.shape)
    return x @ w.T, np.abs(x) @ (np.abs(groups) + np.abs(w - groups)).T


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_result_of_a_row_does_not_depend_on_other_rows(name) -> None:
    """Tiles of 8 to 64 rows add the same products in the same order."""
    rng, format = np.random.default_rng(0), FORMATS[name]
    w = make_weight(random_arrays(format, (70, 2112), rng), format, "bfloat16")
    x = jnp.asarray(rng.integers(-3, 4, (64, 2112)), jnp.float32)
    multiply = jax.jit(functools.partial(kernel.quantised_linear, interpret=INTERPRET))
    together = multiply(x, w)
    for num_rows in (1, 9, 30):
        np.testing.assert_allclose(multiply(x[:num_rows], w), together[:num_rows], rtol=1e-5)
    # The weight alone determines the numbers of parts and steps.
    tilings = {kernel.choose_tiling(n, w)._replace(**dict.fromkeys(FREE, 0)) for n in (1, 9, 30)}
    assert len(tilings) == 1 and tilings.pop().parts == 4


FREE = "rows", "outputs", "num_warps", "num_stages"


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_divide_the_inputs(parts) -> None:
    """Some parts of a weight with few inputs are empty."""
    rng, format = np.random.default_rng(0), FORMATS["q4_0"]
    arrays = random_arrays(format, (33, 1184), rng)
    w, x = make_weight(arrays, format, "float16"), rng.normal(size=(2, 1184)).astype(np.float32)
    tiling = kernel.choose_tiling(2, w)._replace(parts=parts)
    got = kernel.quantised_linear(jnp.asarray(x), w, tiling=tiling, interpret=INTERPRET)
    want, terms = oracle(x, arrays, format)
    assert (np.abs(np.asarray(got) - want) <= TOLERANCE["float16"] * terms).all()


@pytest.mark.parametrize("name", ["q4_0", "gptq", "q4_k", "q6_k"])
def test_linear_is_differentiable_in_x_through_the_kernel(name, monkeypatch) -> None:
    """The forward pass calls the kernel, which Pallas interprets on CPUs."""
    calls = []
    backends = {**kernel_op.BACKENDS, "triton": interpreted_triton(calls, "linear")}
    monkeypatch.setattr(kernel_op, "BACKENDS", backends)
    rng, format = np.random.default_rng(0), FORMATS[name]
    arrays = random_arrays(format, (7, 64), rng)
    w, bar = make_weight(arrays, format, "bfloat16"), rng.normal(size=(3, 7)).astype(np.float32)

    @jax.jit
    def run(x):
        out, pull = jax.vjp(lambda x: linear(x, w, backend="triton"), x)
        return out, pull(jnp.asarray(bar))[0]

    x = rng.normal(size=(3, 64)).astype(np.float32)
    out, gradient = run(x)
    assert calls
    want, terms = oracle(x, arrays, format)
    assert (np.abs(out - want) <= 1.5 * TOLERANCE["bfloat16"] * terms).all()
    w64 = elements(arrays, format)
    error = np.abs(gradient - bar @ w64)
    assert (error <= 2 * TOLERANCE["bfloat16"] * (np.abs(bar) @ np.abs(w64))).all()


# Sizes of groups, and rows after them that belong to no group.
SIZES = {
    "few": ((3, 0, 7, 1, 0), 2),
    "many": ((70, 1, 0, 16, 33, 0, 17), 11),
    "nobody": ((0, 0), 3),
}


@pytest.mark.parametrize(
    ("sizes", "name", "dtype", "shape"),
    [
        *once_in_core(
            row.values()
            for row in all_pairs(
                {
                    "sizes": ["few", "many"],
                    "name": [*READ, "int8 of a row"],
                    "dtype": list(dequantise.DTYPES),
                    "shape": [(33, 64), (72, 320)],
                }
            )
            if divides({**FORMATS, **OTHER}[row["name"]], row["shape"])
        ),
        ("nobody", "q4_0", "bfloat16", (33, 64)),
        ("nobody", "int8 of a row", "float16", (72, 320)),
    ],
)
def test_grouped_linear_reads_quantised_weights(sizes, name, dtype, shape) -> None:
    """Scales of groups without rows are NaN, and so are rows of no group."""
    rng, format = np.random.default_rng(0), {**FORMATS, **OTHER}[name]
    group_sizes, others = SIZES[sizes]
    arrays = random_arrays(format, (len(group_sizes), *shape), rng)
    arrays.scales[np.array(group_sizes) == 0] = np.nan
    x = rng.normal(size=(sum(group_sizes) + others, shape[-1])).astype(np.float32)
    x[sum(group_sizes) :] = np.nan
    multiply = functools.partial(grouped_linear, backend="triton", interpret=INTERPRET)
    out = jax.jit(multiply)(x, make_weight(arrays, format, dtype), jnp.asarray(group_sizes))
    for owner, (end, size) in enumerate(zip(np.cumsum(group_sizes), group_sizes, strict=True)):
        rows = slice(end - size, end)
        of_group = arrays._replace(
            **{k: a[owner] for k, a in arrays._asdict().items() if a is not None and k != "order"}
        )
        want, terms = oracle(x[rows], of_group, format)
        assert (np.abs(out[rows] - want) <= 1.5 * TOLERANCE[dtype] * terms).all()
    assert not out[sum(group_sizes) :].any()


@pytest.mark.parametrize("name", ["q4_0", "awq", "mxfp4", "nf4", "q4_k", "q6_k", "fp8 in groups"])
@pytest.mark.parametrize("num_rows", [1, 40, 128])
def test_linear_is_one_launch_on_a_gpu(name, num_rows) -> None:
    format = FORMATS[name]
    shapes = format.shapes((192, 1024))
    arrays = [shapes.get(key) for key in ("values", "scales", "mins", "order")]
    code = format.code if format.code in CODES else None
    w = Weight(*(x and jax.ShapeDtypeStruct(*x) for x in arrays), code=code, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((num_rows, 1024), jnp.float32)
    text = lower(linear, x, w, platform="cuda").as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1 and "stablehlo.dot_general" not in text


def test_kernel_leaves_weights_to_xla() -> None:
    def weight(name, dtype="bfloat16"):
        return make_weight(random_arrays(FORMATS[name], (8, 64), rng), FORMATS[name], dtype)

    rng = np.random.default_rng(0)
    refusal = functools.partial(kernel.quantised_refusal, jnp.ones((2, 64)))
    assert "without scales" in refusal(Weight(jnp.zeros((8, 64))))
    for name in OF_ROWS:
        assert "XLA fuses" in refusal(weight(name))
    for format in COMPACT.values():
        w = make_weight(random_arrays(format, (8, 256), rng), format, "bfloat16")
        assert "only kernels for CPUs" in refusal(w)
    assert "got float32" in refusal(weight("q4_0", "float32"))
    small = WeightFormat("int8", 8, "float32")
    w = make_weight(random_arrays(small, (8, 64), rng), small, "bfloat16")
    assert "groups must have a multiple of 16 inputs, got 8" in refusal(w)
    for gpu, is_refused in (("NVIDIA A100", True), ("NVIDIA L4", False)):
        capability = gpu_device.capability_of(gpu)
        with gpu_device.assume(GpuInfo(gpu, 100, capability)):
            assert ("8.9 and later" in (refusal(weight("fp8 in groups")) or "")) == is_refused
            assert refusal(weight("q4_0")) is None
    with gpu_device.assume(GpuInfo("Tesla T4", 40, (7, 5))):
        assert "Tesla T4 has 7.5" in refusal(weight("q4_0"))


def test_many_rows_are_left_to_xla_on_gpus() -> None:
    x, rng = jnp.ones((2, 64, 64)), np.random.default_rng(0)
    w = make_weight(random_arrays(FORMATS["q4_0"], (8, 64), rng), FORMATS["q4_0"], "bfloat16")
    assert kernel.quantised_refusal(x, w) is None
    why_not = kernel.quantised_refusal(jnp.ones((130, 64)), w)
    assert "from 129 rows on, and there are 130" in (why_not or "")
    for rows, is_kernel in ((x, True), (jnp.ones((130, 64)), False)):
        text = lower(linear, rows, w, platform="cuda").as_text()
        assert ("__gpu$xla.gpu.triton" in text) == is_kernel


@pytest.mark.parametrize("name", ["q4_1", "fp8 in groups"])
def test_xla_converts_tiles_of_a_weight_on_gpus(name, monkeypatch) -> None:
    """The form for GPUs runs on any platform. The last of its three tiles has fewer outputs."""
    rng, format = np.random.default_rng(0), FORMATS[name]
    arrays = random_arrays(format, (10, 256), rng)
    w = make_weight(arrays, format, "float32")
    x = rng.standard_normal((6, 256)).astype(np.float32)
    monkeypatch.setattr(xla, "_MAX_GPU_TILE_ELEMENTS", 4 * 256)
    multiply = jax.jit(lambda x: xla._multiply_on_gpu(x, w.arrays, format.code))
    want, terms = oracle(x, arrays, format)
    assert (np.abs(np.asarray(multiply(x), np.float64) - want) <= 1e-6 * terms).all()
    gradient = jax.grad(lambda x: jnp.sum(multiply(x)))(x)
    expected = np.broadcast_to(elements(arrays, format).sum(0), x.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_weights_that_the_kernel_leaves_to_xla_are_multiplied_on_gpus() -> None:
    rng = np.random.default_rng(0)
    w = make_weight(random_arrays(FORMATS["q4_0"], (8, 64), rng), FORMATS["q4_0"], "bfloat16")
    w = dataclasses.replace(w, dtype=jnp.dtype("float32"))
    text = lower(linear, jnp.ones((2, 64)), w, platform="cuda").as_text()
    assert "__gpu$xla.gpu.triton" not in text and "stablehlo.dot_general" in text
