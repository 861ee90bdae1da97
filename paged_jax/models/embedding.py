"""Rows of the embedding table, without a copy of the table in any program."""

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.models.weight import Weight


def look_up(table: Weight, token_ids: jax.Array) -> jax.Array:
    """The float32 rows ``[N, E]`` of a table ``[V, E]`` for token ids i32 ``[N]``.

    For steps over a cache: a bfloat16 table gets no gradient.
    """
    if table.values.dtype != jnp.bfloat16:
        return take_rows(table, token_ids)
    return lax.platform_dependent(table.values, token_ids, cpu=_take_bits, default=_take)


def take_rows(table: Weight, token_ids: jax.Array) -> jax.Array:
    """As `look_up`, of token ids of any shape, and differentiable in a table of floats."""
    rows = _take(table.values, token_ids)
    return rows if table.scales is None else rows * table.scales[token_ids][..., None]


def _take(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    return table[token_ids].astype(jnp.float32)


def _take_bits(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """As `_take` of a bfloat16 table, for CPUs.

    Without the detour through integers, XLA's CPU backend converts the whole table to float32 for
    the gather, and the output head of a tied model then reads that copy. For a TPU the detour is
    what copies the table. It has no gradient, so the plain forward does not come here.
    """
    rows = lax.bitcast_convert_type(table, jnp.uint16)[token_ids]
    return lax.bitcast_convert_type(rows, jnp.bfloat16).astype(jnp.float32)
