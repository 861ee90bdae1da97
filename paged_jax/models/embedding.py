"""Rows of the embedding table, without a copy of the table in any program."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from paged_jax.kernels.linear import Weight

# Numbers in a row of a TPU's registers.
_LANES = 128


def look_up(table: Weight, token_ids: jax.Array) -> jax.Array:
    """The float32 rows ``[N, E]`` of a table ``[V, E]`` for token ids i32 ``[N]``.

    For steps over a cache: a bfloat16 table gets no gradient.
    """
    if table.values.dtype != jnp.bfloat16:
        return take_rows(table, token_ids)
    forms = {"cpu": _take_bits, "tpu": _take_from_lanes, "default": _take}
    return lax.platform_dependent(table.values, token_ids, **forms)


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


def _take_from_lanes(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """As `_take`, for TPUs.

    XLA lays a table whose E is no multiple of 128 out with V along the lanes, which pads less, and
    copies all of it for a gather (gpt-oss 20B on 16 chips of v5e: 74 MB, jax 0.10.2 to 0.12.0). So
    of each token the 128 rows are read that share its registers, as long as all of these together
    are not more than the table. To ask for the layout of the table does not help; to ask for that
    of the slice does.
    """
    (V, E), (N,) = table.shape, token_ids.shape
    if E % _LANES == 0 or N * _LANES > V:
        return _take(table, token_ids)

    def take(token_id: jax.Array) -> jax.Array:
        start = jnp.minimum(token_id // _LANES * _LANES, V - _LANES)
        rows = lax.dynamic_slice_in_dim(table, start, _LANES)
        rows = with_layout_constraint(rows, Layout(major_to_minor=(1, 0))).astype(jnp.float32)
        is_row = jnp.arange(_LANES, dtype=jnp.int32) == token_id - start
        return jnp.sum(jnp.where(is_row[:, None], rows, 0), axis=0)

    return lax.map(take, token_ids)
