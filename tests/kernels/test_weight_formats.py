"""Quantised weights: packing, conversion between formats, products, gradients and lookup."""

import dataclasses
import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.kernels.embedding import look_up, look_up_differentiably
from paged_jax.kernels.linear import Stack, grouped_linear, linear
from paged_jax.kernels.native.layouts import InterleavedRows
from paged_jax.kernels.weight_formats import (
    CODES,
    WeightArrays,
    WeightFormat,
    common_format,
    convert,
    dequantise,
    divide_groups,
)
from tests.support.weights import FORMATS, elements, make_weight, random_arrays

# The package has a function of this name.
xla_linear = importlib.import_module("paged_jax.kernels.xla.linear")

SHAPE = 2, 5, 256


def width(format):
    """Return a number of inputs that a format allows."""
    return math.lcm(64, format.unit)


def formats():
    codes = st.sampled_from([*CODES, "int8", "float8_e4m3fn"])
    floats = st.sampled_from(["float32", "bfloat16", "float16", "int8"])
    return st.builds(
        WeightFormat,
        codes,
        st.sampled_from([None, 8, 16, 32, 256]),
        floats,
        st.none() | floats,
        st.booleans(),
    ).filter(lambda format: not format.has_sections or format.group_size in (8, 16, 32))


@given(formats(), st.integers(0, 2**32 - 1))
def test_shapes_describe_the_arrays_of_a_format(format, seed) -> None:
    arrays = random_arrays(format, SHAPE, np.random.default_rng(seed))
    given_arrays = {k: (x.shape, x.dtype) for k, x in arrays._asdict().items() if x is not None}
    assert format.shapes(SHAPE) == given_arrays
    assert format.num_bytes(SHAPE) == sum(x.nbytes for x in arrays if x is not None)
    w = make_weight(arrays, format)
    assert w.shape == SHAPE
    expected = None if format.group_size == SHAPE[-1] else format.group_size
    assert w.format == dataclasses.replace(format, group_size=expected)
    assert hash(w.format) == hash(dataclasses.replace(format, group_size=expected))


@given(formats(), st.integers(0, 2**32 - 1))
def test_dequantise_matches_float64(format, seed) -> None:
    arrays = random_arrays(format, SHAPE, np.random.default_rng(seed))
    got, want = dequantise(arrays, format.code), elements(arrays, format)
    assert got.dtype == np.float32 and got.shape == SHAPE
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=3e-6)
    on_device = dequantise(WeightArrays(*map(_as_array, arrays)), format.code)
    np.testing.assert_allclose(on_device, want, rtol=3e-7, atol=3e-6)


def _as_array(x):
    return None if x is None else jnp.asarray(x)


@settings(max_examples=300)
@given(st.lists(formats(), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_convert_to_the_common_format_is_exact(some, seed) -> None:
    target = common_format(some, SHAPE[-1])
    kinds = {(each.code, each.has_order) for each in some}
    if target is None:
        assert len(kinds) > 1
        return
    for format in some:
        arrays = random_arrays(format, SHAPE, np.random.default_rng(seed))
        converted = convert(arrays, format, target)
        shapes = {k: (x.shape, x.dtype) for k, x in converted._asdict().items() if x is not None}
        assert target.shapes(SHAPE) == shapes
        np.testing.assert_array_equal(
            dequantise(converted, target.code), dequantise(arrays, format.code)
        )
    assert common_format([*some, target], SHAPE[-1]) == target


def test_common_format_has_5_bits_if_all_integers_fit() -> None:
    def common_code(*names):
        format = common_format([FORMATS[name] for name in names], 128)
        return None if format is None else (format.code, format.group_size)

    assert common_code("q4_0", "q4_1") == common_code("q5_0", "mxfp4") == ("int5", 32)
    assert common_code("q4_1", "q5_1") == ("uint5", 32)
    assert common_code("q5_0", "q5_1") == common_code("iq4_nl", "q4_1") == ("int8", 32)
    assert common_code("q5_0", "q8_0") == ("int8", 32)
    assert common_code("q4_0", "nvfp4") == ("int8", 16)  # the kernels need groups of 32


@given(formats(), st.sampled_from([1, 2, 4]))
def test_divide_groups_gives_each_part_whole_groups(format, parts) -> None:
    divided = divide_groups(format, SHAPE[-1], parts)
    assert SHAPE[-1] // parts % divided.group_size == 0
    assert (format.group_size or SHAPE[-1]) % divided.group_size == 0
    assert dataclasses.replace(divided, group_size=format.group_size) == format


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_linear_matches_float64_in_every_format(name, dtype) -> None:
    rng = np.random.default_rng(0)
    format = FORMATS[name]
    num_inputs = width(format)
    arrays = random_arrays(format, (3, 7, num_inputs), rng)
    w = make_weight(arrays, format, dtype)
    x = rng.normal(size=(5, num_inputs)).astype(dtype).astype(np.float32)
    multiply = jax.jit(linear, static_argnames="backend")
    exact, terms = _product(x, elements(arrays, format))
    for backend in (None, "xla"):
        for rows in (x, x[:1]):
            got = multiply(rows, w, backend=backend)
            assert got.shape == (len(rows), 3, 7) and got.dtype == jnp.float32
            assert (np.abs(got - exact[: len(rows)]) <= 2e-6 * terms[: len(rows)]).all()


def _product(x, w):
    w = w.reshape(-1, w.shape[-1])
    exact, terms = x.astype(np.float64) @ w.T, np.abs(x.astype(np.float64)) @ np.abs(w).T
    return exact.reshape(len(x), 3, 7), terms.reshape(len(x), 3, 7)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_elements", [128 * 4, 128 * 9])
def test_linear_in_tiles_matches_a_single_tile(num_elements, num_rows, monkeypatch) -> None:
    """21 outputs in tiles of 4 and 9: the last tile overlaps the tile before it."""
    rng = np.random.default_rng(0)
    format = FORMATS["awq"]
    w = make_weight(random_arrays(format, (3, 7, 128), rng), format)
    x = jnp.asarray(rng.normal(size=(num_rows, 128)), jnp.float32)

    def loss(x):
        return jnp.sum(xla_linear.linear(x, w) ** 2)

    want = xla_linear.linear(x, w), jax.grad(loss)(x)
    monkeypatch.setattr(xla_linear, "_MAX_CPU_TILE_ELEMENTS", num_elements)
    np.testing.assert_allclose(xla_linear.linear(x, w), want[0], rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(jax.grad(loss)(x), want[1], rtol=1e-5, atol=1e-2)


def test_linear_converts_one_tile_of_a_large_weight_at_a_time() -> None:
    format = FORMATS["awq"]
    shapes = format.shapes((1 << 14, 1 << 10)).values()
    w = make_weight(WeightArrays(*(np.zeros(*each) for each in shapes)), format)
    x = jnp.zeros((7, 1 << 10))

    def loss(x):
        return jnp.sum(xla_linear.linear(x, w))

    for function in (loss, jax.grad(loss)):
        compiled = jax.jit(function).lower(x).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < (4 << 24) / 8


@pytest.mark.parametrize("name", FORMATS)
def test_linear_is_differentiable_in_x(name) -> None:
    """The weight is a layer of a stack, and the forward pass uses the kernel for CPUs."""
    rng = np.random.default_rng(0)
    format = FORMATS[name]
    layers = [random_arrays(format, (7, width(format)), rng) for _ in range(2)]
    stacked = WeightArrays(
        *(None if x[0] is None else jnp.stack(x) for x in zip(*layers, strict=True))
    )
    bar = rng.normal(size=(3, 7)).astype(np.float32)

    def loss(x):
        w = make_weight(layers[1], format)
        return jnp.sum(linear(x, dataclasses.replace(w, stack=Stack(stacked, 1))) * bar)

    got = jax.jit(jax.grad(loss))(jnp.zeros((3, width(format))))
    np.testing.assert_allclose(got, bar @ elements(layers[1], format), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("name", FORMATS)
def test_grouped_linear_matches_float64_in_every_format(name, backend) -> None:
    """The gradient in x matches too. Scales of experts without rows are NaN: they are not read."""
    rng = np.random.default_rng(0)
    format, sizes = FORMATS[name], (3, 0, 4, 1)
    num_inputs = width(format)
    arrays = random_arrays(format, (4, 7, num_inputs), rng)
    arrays.scales[1] = -1 if format.has_sections else np.nan  # four bytes -1 are a NaN
    x = rng.normal(size=(10, num_inputs)).astype(np.float32)
    multiply = functools.partial(grouped_linear, backend=backend)
    bar = rng.normal(size=(10, 7)).astype(np.float32)

    @jax.jit
    def run(x):
        w = make_weight(arrays, format)
        out, pull = jax.vjp(lambda x: multiply(x, w, jnp.array(sizes)), x)
        return out, pull(jnp.asarray(bar))[0]

    out, gradient = run(x)
    w = elements(arrays, format)
    owners = np.repeat(np.arange(4), sizes)
    want, want_gradient = np.zeros((10, 7)), np.zeros((10, num_inputs))
    for row, owner in enumerate(owners):
        want[row], want_gradient[row] = w[owner] @ x[row], bar[row] @ w[owner]
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["q5_1", "q4_k", "gptq"])
def test_xla_reads_weights_in_the_layouts_of_cpus(name) -> None:
    """Results and gradients equal the results and gradients of the plain layout."""
    rng = np.random.default_rng(0)
    format, sizes = FORMATS[name], jnp.array([2, 0, 3])
    arrays = random_arrays(format, (3, 32, width(format)), rng)
    x = rng.normal(size=(5, width(format))).astype(np.float32)

    @jax.jit
    def run(x, w):
        def multiply(x):
            groups = grouped_linear(x, w, sizes, backend="xla")
            return linear(x, w, backend="xla"), groups

        out, pull = jax.vjp(multiply, x)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    plain, prepared = (
        make_weight(arrays, format, layout=layout) for layout in (None, InterleavedRows())
    )
    assert not np.array_equal(plain.values, prepared.values)
    jax.tree.map(np.testing.assert_array_equal, run(x, prepared), run(x, plain))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=pytest.mark.slow if is_slow else ())
        for name in FORMATS
        for layout in (None, InterleavedRows())
        for is_slow in [layout is not None and name != "q4_1"]
    ],
)
def test_look_up_dequantises_only_the_rows_that_it_finds(name, layout) -> None:
    rng = np.random.default_rng(0)
    format = FORMATS[name]
    arrays = random_arrays(format, (4096, width(format)), rng)
    table = make_weight(arrays, format, layout=layout)
    token_ids = jnp.array([7, 0, 4095, 7])
    compiled = jax.jit(look_up).lower(table, token_ids).compile()
    got = compiled(table, token_ids)
    np.testing.assert_array_equal(got, dequantise(arrays, format.code)[np.asarray(token_ids)])
    np.testing.assert_array_equal(look_up_differentiably(table, token_ids), got)
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4
