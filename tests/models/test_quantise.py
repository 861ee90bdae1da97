"""Rounding of matrices to quantised formats, and the search for the scales of int4."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.kernels.weight_formats import (
    WeightArrays,
    WeightFormat,
    dequantise,
    num_bits,
    numbers,
)
from paged_jax.kernels.weight_packing import pack, scale_floats, split_levels
from paged_jax.models.codecs import dtype_formats as module
from paged_jax.models.codecs.dtype_formats import quantise, quantise_on_host
from tests.support.weights import FORMATS

INT4 = WeightFormat("int4", 32, "bfloat16")
UINT4 = WeightFormat("uint4", 32, "float16", "float16")
FP8 = WeightFormat("float8_e4m3fn", None, "float32")
KINDS = ("normal", "outlier", "uniform", "one sign", "two values", "sparse")


def random_groups(kind: str, rng: np.random.Generator, num_groups: int) -> np.ndarray:
    w = rng.normal(size=(num_groups, 32))
    if kind == "outlier":
        w[:, 3] *= 8
    elif kind == "uniform":
        w = rng.uniform(-1, 1, w.shape)
    elif kind == "one sign":
        w = np.abs(w)
    elif kind == "two values":
        w = np.where(w < 0, -1, 0.7)
    elif kind == "sparse":
        w[:, 2:] = 0
    return (w * np.exp(rng.normal(size=(num_groups, 1)))).astype(np.float32)


def squared_error(w: np.ndarray, arrays: WeightArrays, code: str) -> np.ndarray:
    return ((dequantise(arrays, code).astype(np.float64) - w) ** 2).sum(-1)


def least_squared_error(w: np.ndarray) -> np.ndarray:
    """Return the error of the best scale of each group: a dense grid, and the best fit to it."""
    w = w.astype(np.float64)
    largest = np.abs(w).max(-1, keepdims=True)
    best = (w * w).sum(-1)
    for quotient in np.concatenate([np.linspace(4, 9.5, 1500), -np.linspace(4, 9.5, 1500)]):
        codes = np.clip(np.rint(w * quotient / largest), -8, 7)
        scales = (w * codes).sum(-1) / (codes * codes).sum(-1)
        best = np.minimum(best, ((scales[:, None] * codes - w) ** 2).sum(-1))
    return best


@pytest.mark.parametrize("kind", KINDS)
def test_search_for_int4_is_near_the_least_error(kind) -> None:
    w = random_groups(kind, np.random.default_rng(0), 40)
    format = WeightFormat("int4", 32, "float32")
    error, least = squared_error(w, quantise(w, format), "int4"), least_squared_error(w)
    norm = (w.astype(np.float64) ** 2).sum(-1)
    # Two numbers have nearly exact codes for a scale between two scales that the search tries.
    slack = 1e-3 if kind == "sparse" else 1e-7
    assert (error <= 1.1 * least + slack * norm).all()
    assert error.sum() <= 1.015 * least.sum() + slack * norm.sum()
    # With a scale in bfloat16, the error grows by at most the rounding of the scale.
    rounded = squared_error(w, quantise(w, INT4), "int4")
    assert (rounded <= 1.11 * least + (slack + 2.0**-16) * norm).all()


def least_squared_error_with_minima(w: np.ndarray) -> np.ndarray:
    """Return the error of the best scale and minimum: a dense grid, and the best fit to it."""
    w = w.astype(np.float64)
    low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
    best = ((w - w.mean(-1, keepdims=True)) ** 2).sum(-1)
    for start in np.linspace(-0.05, 0.3, 36):
        for end in np.linspace(-0.05, 0.3, 36):
            inverse = 15 / ((1 - start - end) * (high - low))
            codes = np.clip(np.rint((w - low - start * (high - low)) * inverse), 0, 15)
            centred = codes - codes.mean(-1, keepdims=True)
            scales = (w * centred).sum(-1) / (centred * centred).sum(-1)
            error = w - w.mean(-1, keepdims=True) - scales[:, None] * centred
            best = np.minimum(best, (error**2).sum(-1))
    return best


@pytest.mark.parametrize("kind", KINDS)
def test_search_for_uint4_is_near_the_least_error(kind) -> None:
    w = random_groups(kind, np.random.default_rng(0), 40)
    error, least = squared_error(w, quantise(w, UINT4), "uint4"), least_squared_error_with_minima(w)
    norm = (w.astype(np.float64) ** 2).sum(-1)
    slack = 5e-3 if kind == "sparse" else 2.0**-20  # see above, and the rounding to float16
    assert (error <= 2.1 * least + slack * norm).all()
    assert error.sum() <= 1.13 * least.sum() + slack * norm.sum()


@given(st.integers(0, 2**32 - 1), st.integers(-6, 3))
def test_search_for_uint4_finds_exact_codes(seed, exponent) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (4, 64)).astype(np.uint8)
    codes[:, [0, 32]], codes[:, [1, 33]] = 0, 15
    scales = (rng.integers(64, 128, (4, 2)) * 2.0 ** (exponent - 7)).astype(np.float16)
    mins = (-scales * rng.integers(0, 16, (4, 2))).astype(np.float16)
    w = dequantise(WeightArrays(pack(codes), scales, mins), "uint4")
    arrays = quantise(w, UINT4)
    np.testing.assert_array_equal(arrays.scales, scales, strict=True)
    np.testing.assert_array_equal(arrays.mins, mins, strict=True)
    np.testing.assert_array_equal(arrays.values, pack(codes))


@given(st.integers(0, 2**32 - 1), st.integers(-60, 60), st.booleans())
def test_search_for_int4_finds_exact_codes(seed, exponent, is_negative) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (4, 64)).astype(np.uint8)
    codes[:, [0, 32]] = 0  # the number -8, so that the sign of the scale is known
    scales = rng.integers(128, 256, (4, 2)) * 2.0**exponent * (-1) ** is_negative
    w = dequantise(WeightArrays(pack(codes), scales.astype(np.float32)), "int4")
    arrays = quantise(w, INT4)
    np.testing.assert_array_equal(arrays.scales.astype(np.float64), scales)
    np.testing.assert_array_equal(arrays.values, pack(codes))


@pytest.mark.parametrize(
    "format",
    [
        FORMATS["int8 of a row"],
        FP8,
        INT4,
        FORMATS["q6_k"],
        FORMATS["q4_k"],
        WeightFormat("int8", 32, "float32", "int8"),
        WeightFormat("uint4", 32, "int8", "bfloat16"),
    ],
    ids=["int8", "fp8", "int4", "q6_k", "q4_k", "two levels of minima", "two levels of scales"],
)
def test_quantise_gives_equal_bits_with_numpy_and_jit(format) -> None:
    """Includes rows of zeros, denormal and huge numbers, and numbers between two codes."""
    rng = np.random.default_rng(1)
    w = rng.standard_t(4, size=(60, 256)).astype(np.float32)
    w[0], w[1], w[2, 5] = 0, 1e-44, 1e-30
    w[3] *= np.float32(1e30 if format != UINT4 else 1e3)
    w[4] = np.arange(256) - 127.5
    w[5], w[6, :200] = 3.25, 0
    arrays = quantise(w, format)
    compiled = jax.jit(lambda w: quantise(w, format))(w)
    on_host = quantise_on_host(w, format)
    for field, array in arrays._asdict().items():
        if array is None:
            assert getattr(compiled, field) is getattr(on_host, field) is None
            continue
        expected_shape, dtype = format.shapes(w.shape)[field]
        assert (array.shape, array.dtype) == (expected_shape, dtype)
        bits = np.ascontiguousarray(array).view(np.uint8)
        for other in (np.asarray(getattr(compiled, field)), getattr(on_host, field)):
            np.testing.assert_array_equal(other.view(np.uint8), bits, err_msg=field)
    assert np.isfinite(dequantise(arrays, format.code)).all()
    assert (dequantise(arrays, format.code)[0] == 0).all()


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(FORMATS)))
def test_quantise_rounds_to_the_nearest_number(seed, name) -> None:
    """Checks every format against the distance to the next number of its code."""
    format = FORMATS[name]
    num_inputs = math.lcm(128, format.unit)
    w = np.random.default_rng(seed).normal(size=(3, 2, num_inputs)).astype(np.float32)
    arrays = quantise(w, format)
    got = dequantise(arrays, format.code)
    scales = scale_floats(arrays.scales, num_inputs)
    groups = np.abs(got - w).reshape(*scales.shape, -1)
    if format.code == "float8_e4m3fn":  # 3 bits after the leading one
        steps = np.maximum(np.abs(w) / 16, 2.0**-10 * scales.max()).reshape(groups.shape)
    else:
        codes = np.arange(-127, 128).astype(np.int8) if format.code == "int8" else None
        table = np.sort(numbers(codes, "int8") if codes is not None else _table(format.code))
        steps = np.abs(scales)[..., None] * np.diff(table).max() / 2
        # The scale of int4 is the best for all numbers of a group, and cuts off the largest. For
        # other codes, the largest number may be smaller than the smallest is negative.
        if format.code in ("int4", "fp4", "nf4", "uint4"):
            steps = steps * 6
        if format.has_sections:  # scales and minima are rounded too
            steps = steps + np.abs(table).max() * _half_factors(arrays.scales, num_inputs)
            if arrays.mins is not None:
                steps = steps + _half_factors(arrays.mins, num_inputs)
    assert (groups <= 1.02 * steps + 1e-6).all()
    assert np.corrcoef(got.ravel(), w.ravel())[0, 1] > 0.97


def _half_factors(scales: np.ndarray, num_inputs: int) -> np.ndarray:
    """Return the rounding errors of scales of two levels, ``[*out, groups, 1]``."""
    numbers, factors = split_levels(scales, num_inputs)
    return np.repeat(factors, numbers.shape[-1] // factors.shape[-1], axis=-1)[..., None] / 2


def _table(code: str) -> np.ndarray:
    bits = num_bits(code)
    return np.unique(numbers(pack(np.arange(32, dtype=np.uint8) % (1 << bits), bits), code))


@pytest.mark.parametrize("format", [UINT4, FP8, FORMATS["gptq"], FORMATS["q4_1"]], ids=str)
def test_quantise_on_host_divides_rows_into_chunks(format, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 3 * 64)
    w = np.random.default_rng(2).normal(size=(2, 5, 64)).astype(np.float32)
    expected = quantise(w, format)
    with jax.transfer_guard("disallow"):
        got = quantise_on_host(w, format)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, np.asarray(other), strict=True)


def test_int8_of_a_row_is_exact_to_half_a_scale() -> None:
    w = np.random.default_rng(0).normal(size=(3, 50, 40)).astype(np.float32)
    w = (w * np.logspace(-35, 30, 50)[:, None]).astype(np.float32)
    w[0, 7], w[1, 3] = 0.0, np.float32(1e-44)
    for as_array in (np.asarray, jnp.asarray):
        values, scales, *_ = map(
            lambda x: None if x is None else np.asarray(x),
            quantise(as_array(w), FORMATS["int8 of a row"]),
        )
        assert values.dtype == np.int8 and scales.shape == (3, 50, 1)
        error = np.abs(values * scales.astype(np.float64) - w)
        assert (error <= 0.5001 * scales).all()
        large = np.abs(w).max(-1) > 1e-30
        assert (np.abs(values).max(-1)[large] == 127).all() and (values >= -127).all()
