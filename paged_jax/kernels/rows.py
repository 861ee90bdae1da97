"""Gather and scatter of rows, without the copies that XLA's CPU backend makes of narrow types."""

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.opaque import without_index_checks

# Types that XLA's CPU backend scatters and gathers through a copy in a wider type, and what holds
# their bits.
BITS = {
    jnp.dtype(jnp.bfloat16): jnp.uint16,
    jnp.dtype(jnp.float8_e4m3fn): jnp.uint8,
}


# Where rows go: one index of the first axis, or one of each of the leading axes.
_Index = jax.Array | tuple[jax.Array, ...]


@jax.custom_jvp
def set_rows(rows: jax.Array, index: _Index, new: jax.Array) -> jax.Array:
    """Scatter `new` [N, ...] to `rows` at distinct `index` i32[N]; those past the end are dropped.

    XLA's CPU backend computes a bfloat16 scatter (or dynamic_update_slice) in float32, converting
    the whole array there and back at every call, and one of fp8 in float16. Scattering the bits as
    integers leaves one pass over the array when a program first writes to it and one at its end,
    however many writes there are: between writes the casts cancel. Remove once a donated scatter
    of these types is in place on CPU.
    """
    if rows.dtype not in BITS:
        return _set_rows_as_is(rows, index, new)
    # Elsewhere these types are scattered in place as they are, and the casts would be what copies.
    return lax.platform_dependent(rows, index, new, cpu=_set_rows_as_bits, default=_set_rows_as_is)


@without_index_checks
def _set_rows_as_is(rows: jax.Array, index: _Index, new: jax.Array) -> jax.Array:
    return rows.at[index].set(new, mode="drop", unique_indices=True)


def _set_rows_as_bits(rows: jax.Array, index: _Index, new: jax.Array) -> jax.Array:
    dtype = BITS[rows.dtype]
    bits = lax.bitcast_convert_type(rows, dtype)
    bits = _set_rows_as_is(bits, index, lax.bitcast_convert_type(new, dtype))
    return lax.bitcast_convert_type(bits, rows.dtype)


@set_rows.defjvp
def _set_rows_jvp(primals, tangents):
    # Needed because the derivative of a cast of bits is zero for JAX, without a warning.
    rows, index, new = primals
    rows_dot, _, new_dot = tangents
    return set_rows(rows, index, new), _set_rows_as_is(rows_dot, index, new_dot)


def take_rows(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    """Gather rows of a matrix; every index must be in range."""
    if matrix.dtype not in BITS:
        return _take_rows_as_is(matrix, rows)
    # XLA's CPU backend would convert the whole matrix to float32 first, at every call.
    return lax.platform_dependent(matrix, rows, cpu=_take_rows_as_bits, default=_take_rows_as_is)


def _take_rows_as_is(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    return matrix.at[rows].get(mode="promise_in_bounds")


def _take_rows_as_bits(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    # The barrier ties the cast to the rows of this step of the loop. Else XLA moves it out of the
    # loop, where it is a copy of the whole matrix and no longer part of the gather.
    matrix, rows = lax.optimization_barrier((matrix, rows))
    bits = lax.bitcast_convert_type(matrix, BITS[matrix.dtype])
    return lax.bitcast_convert_type(_take_rows_as_is(bits, rows), matrix.dtype)
