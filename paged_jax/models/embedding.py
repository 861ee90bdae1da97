"""Rows of the embedding table, without a copy of the table in any program."""

import jax
import jax.numpy as jnp
from jax import lax


def look_up(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """The float32 rows ``[N, E]`` of a table ``[V, E]`` for token ids i32 ``[N]``.

    For steps over a cache: a bfloat16 table gets no gradient.
    """
    if table.dtype != jnp.bfloat16:
        return _look_up(table, token_ids)
    return lax.platform_dependent(table, token_ids, cpu=_look_up_as_bits, default=_look_up)


def _look_up(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    return table[token_ids].astype(jnp.float32)


def _look_up_as_bits(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """As `_look_up` of a bfloat16 table, for CPUs.

    Without the detour through integers, XLA's CPU backend converts the whole table to float32 for
    the gather, and the output head of a tied model then reads that copy. For a TPU the detour is
    what copies the table. It has no gradient, so the plain forward does not come here.
    """
    rows = lax.bitcast_convert_type(table, jnp.uint16)[token_ids]
    return lax.bitcast_convert_type(rows, jnp.bfloat16).astype(jnp.float32)
