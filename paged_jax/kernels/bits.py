"""Small floats as integers with the same bits: XLA for CPUs would widen whole arrays of them.

Rows of an array are gathered here; `rows` also sets rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def bits_of(dtype: DTypeLike) -> Any:
    """Return the integer dtype as which rows of a dtype are gathered and scattered on CPUs.

    It is None for dtypes that are gathered and scattered as they are. The others are bfloat16 and
    the 8-bit floats: XLA's CPU backend would copy a whole array of them to a wider float dtype.

    Example:
      >>> bits_of("bfloat16").__name__, bits_of("float16")
      ('uint16', None)
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bfloat16:
        return jnp.uint16
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8
    return jnp.uint8 if is_narrow else None


def as_bits(x: jax.Array) -> jax.Array:
    """Bitcast an array of floats of at most 16 bits to unsigned integers.

    Other arrays are returned unchanged. Slice the result instead of the floats: before XLA's CPU
    backend slices such floats, it converts the whole array to wider floats. It slices integers in
    place. The result has no gradient.
    """
    if x.dtype.itemsize > 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """Undo `as_bits`: return the array with its original `dtype`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def take_rows(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    """Gather rows of a matrix. Every index must be in range."""
    if bits_of(matrix.dtype) is None:
        return _take_rows_as_is(matrix, rows)
    # On CPUs, gather the rows as integers, because XLA's CPU backend would otherwise convert the
    # whole matrix to float32 in each call.
    return lax.platform_dependent(matrix, rows, cpu=_take_rows_as_bits, default=_take_rows_as_is)


def _take_rows_as_is(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    return matrix.at[rows].get(mode="promise_in_bounds")


def _take_rows_as_bits(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    # The barrier keeps the cast inside the caller's loop, where XLA fuses it with the gather.
    # Without it, XLA would move the cast before the loop and copy the whole matrix.
    matrix, rows = lax.optimization_barrier((matrix, rows))
    bits = lax.bitcast_convert_type(matrix, bits_of(matrix.dtype))
    return lax.bitcast_convert_type(_take_rows_as_is(bits, rows), matrix.dtype)
