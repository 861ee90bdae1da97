"""Tests of `kv_dtypes`: the table of the dtypes of a cache, and its records."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.kv_dtypes import KV_DTYPES, QUANTISED, KVDtype, quantise


@pytest.mark.parametrize("dtype", QUANTISED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float16])
def test_half_precision_represents_quantised_dtypes_exactly(dtype, wide):
    """`query_dtype`, `matmul_dtype` and the kernels rely on this."""
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(values.astype(wide).astype(np.float32), values)


@pytest.mark.parametrize("name", KV_DTYPES)
def test_dequantise_inverts_quantise_for_numbers_of_the_dtype(name):
    kv = KV_DTYPES[name]
    assert kv is KVDtype.of(kv.values)
    x = np.float32([[kv.largest or 100.0, -3.0, 0.0, 1.0], [0.0] * 4])
    values, scale = kv.quantise(jnp.array(x))
    assert values.dtype == kv.values and (scale is None) == (kv.largest is None)
    np.testing.assert_array_equal(kv.dequantise(values, scale), x)


def test_row_bytes_are_the_bytes_of_a_row_and_its_scale():
    for kv in KV_DTYPES.values():
        values, scale = kv.quantise(jnp.ones((1, 24)))
        assert kv.row_bytes(24) == values.nbytes + (0 if scale is None else scale.nbytes)


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
def test_quantise_rejects_dtypes_without_scales(dtype):
    with pytest.raises(ValueError, match=f"dtype must be int8 or float8_e4m3fn, got {dtype}"):
        quantise(jnp.ones(4), dtype)


def test_of_rejects_integers_that_are_not_in_the_table():
    with pytest.raises(ValueError, match="dtype must be floating point, int8 .* got int16"):
        KVDtype.of("int16")
