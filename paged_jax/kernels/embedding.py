"""Lookup of embeddings: rows of a weight matrix, as floats."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from paged_jax.kernels.bits import as_bits, from_bits
from paged_jax.kernels.weight_formats import Weight, dequantise

# Number of lanes of a TPU vector register: each of its rows has this number of elements.
_TPU_LANES = 128


def look_up(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Look up embeddings float32 ``[N, E]`` of token ids i32 ``[N]`` in a table ``[V, E]``.

    The compiled program does not copy the table, and converts only the selected rows. For some
    dtypes no gradient flows to the table, so training must use `look_up_differentiably`.
    """
    return _find_rows(table, token_ids, _look_up_rows)


def look_up_differentiably(table: Weight, token_ids: jax.Array) -> jax.Array:
    """Look up embeddings like `look_up`, but with gradients and for ids of any shape."""
    return _find_rows(table, token_ids, _take)


def _find_rows(
    table: Weight, token_ids: jax.Array, take: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    take = take if table.layout is None else table.layout.take_rows
    rows = table.arrays.map_rows(lambda array: take(array, token_ids))
    return dequantise(rows, table.format.code)


def _look_up_rows(array: jax.Array, token_ids: jax.Array) -> jax.Array:
    dtype = array.dtype
    if dtype == jnp.bfloat16:
        forms = {"cpu": _take_bits, "tpu": _take_from_lanes, "default": _take}
        return lax.platform_dependent(array, token_ids, **forms)
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return lax.platform_dependent(array, token_ids, cpu=_take_bits, default=_take)
    return _take(array, token_ids)


def _take(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    return table[token_ids]


def _take_bits(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Take rows of a bfloat16, float16 or float8 table on CPU.

    For a plain gather, XLA's CPU backend converts the whole table to float32. If embeddings are
    tied, the output head then reads this converted copy. Gathering the bits as integers avoids
    this, but has no gradient. On TPUs, a gather of integers would copy the table.
    """
    return from_bits(as_bits(table)[token_ids], table.dtype)


def _take_from_lanes(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Gather rows of a bfloat16 table ``[V, E]`` on TPU, without a copy of the table.

    If E is not a multiple of 128, XLA stores the table with V along the lanes, because this layout
    needs less padding. A gather then copies the whole table (gpt-oss 20B on 16 v5e chips: 74 MB,
    jax 0.10.2 to 0.12.0). Instead, read an aligned block of 128 rows for each token, and select a
    row of each block. If these blocks together are larger than the table, gather the rows anyway. A
    layout constraint on the block prevents the copy, but a constraint on the table does not.
    """
    (V, E), (N,) = table.shape, token_ids.shape
    if E % _TPU_LANES == 0 or N * _TPU_LANES > V:
        return _take(table, token_ids)

    def take(token_id: jax.Array) -> jax.Array:
        start = jnp.minimum(token_id // _TPU_LANES * _TPU_LANES, V - _TPU_LANES)
        rows = lax.dynamic_slice_in_dim(table, start, _TPU_LANES)
        rows = with_layout_constraint(rows, Layout(major_to_minor=(1, 0))).astype(jnp.float32)
        is_row = jnp.arange(_TPU_LANES, dtype=jnp.int32) == token_id - start
        return jnp.sum(jnp.where(is_row[:, None], rows, 0), axis=0).astype(table.dtype)

    return lax.map(take, token_ids)
