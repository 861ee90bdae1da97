"""Layouts of weights for the C++ kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.native.layouts import InterleavedRows


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_interleaved_rows_orders_32_rows_by_columns(as_array) -> None:
    """Values move in groups of four, and each scale moves alone."""
    rng, layout = np.random.default_rng(0), InterleavedRows()
    values = rng.integers(-128, 128, (2, 2, 32, 24)).astype(np.int8)
    scales = rng.normal(size=(2, 2, 32, 3)).astype(np.float16)
    for array, run in ((values, 4), (scales, 1)):
        got = layout.prepare(as_array(array))
        assert got.shape == array.shape and got.dtype == array.dtype
        np.testing.assert_array_equal(layout.unprepare(got), array)
        flat, num_runs = np.asarray(got).reshape(-1), array.shape[-1] // run
        places = (np.arange(size) for size in (4, num_runs, 32, run))
        bundle, column, row, one = np.ix_(*places)
        place = ((bundle * num_runs + column) * 32 + row) * run + one
        expected = array.reshape(4, 32, -1)[bundle, row, column * run + one]
        np.testing.assert_array_equal(flat[place], expected)
