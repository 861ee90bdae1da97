"""Rows of the embedding table in the forms of each platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.models import matrices


@pytest.mark.parametrize("form", [matrices._take_bits, matrices._take_from_lanes])
def test_each_form_of_look_up_takes_the_rows_themselves(form) -> None:
    """Of a table of which the last registers' rows are fewer than a TPU has lanes. No other row,
    though read, is in the result."""
    table = np.asarray(jax.random.normal(jax.random.key(0), (1000, 72)), jnp.bfloat16)
    token_ids = np.array([0, 127, 128, 895, 896, 999, 999], np.int32)
    others = np.setdiff1d(np.arange(1000), token_ids)
    table[others] = np.nan
    rows = jax.jit(form)(table, token_ids)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows, table[token_ids].astype(np.float32))


def test_look_up_on_tpu_reads_registers_of_few_rows_and_gathers_many() -> None:
    """A gather copies such a table, but is the least that can be read for very many rows."""
    table = jax.ShapeDtypeStruct((1000, 72), jnp.bfloat16)

    def primitives(num_rows: int) -> str:
        ids = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
        return str(jax.make_jaxpr(matrices._take_from_lanes)(table, ids))

    assert "dynamic_slice" in primitives(7) and " gather" not in primitives(7)
    assert " gather" in primitives(8)
