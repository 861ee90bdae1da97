"""Forms of the embedding lookup for single platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import embedding


@pytest.mark.parametrize("form", [embedding._take_bits, embedding._take_from_lanes])
def test_look_up_forms_return_exact_rows(form) -> None:
    """The number of rows is no multiple of the lanes of a TPU, and all other rows are NaN."""
    table = np.asarray(jax.random.normal(jax.random.key(0), (1000, 72)), jnp.bfloat16)
    token_ids = np.array([0, 127, 128, 895, 896, 999, 999], np.int32)
    others = np.setdiff1d(np.arange(1000), token_ids)
    table[others] = np.nan
    rows = jax.jit(form)(table, token_ids)
    np.testing.assert_array_equal(rows, table[token_ids], strict=True)


def test_look_up_on_tpu_gathers_only_many_rows() -> None:
    """A gather copies the table, but for many rows this is less than 128 rows per token."""
    table = jax.ShapeDtypeStruct((1000, 72), jnp.bfloat16)

    def primitives(num_rows: int) -> str:
        ids = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
        return str(jax.make_jaxpr(embedding._take_from_lanes)(table, ids))

    assert "dynamic_slice" in primitives(7) and " gather" not in primitives(7)
    assert " gather" in primitives(8)
