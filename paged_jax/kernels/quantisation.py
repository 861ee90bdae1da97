"""int8 and fp8 pools: how numbers are rounded to them, and the types in which they are computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# Types of a quantised pool, each with the largest magnitude that it represents.
QUANTISED: dict[Any, float] = {
    jnp.dtype(jnp.int8): 127.0,
    jnp.dtype(jnp.float8_e4m3fn): 448.0,
}


def is_quantised(dtype: DTypeLike) -> bool:
    """Whether a pool of this type needs scales."""
    return jnp.dtype(dtype) in QUANTISED


def check_pool_dtype(function: str, name: str, dtype: DTypeLike) -> None:
    """Refuse a type that no pool can have.

    Raises:
      ValueError: it is neither floating point nor one of the quantised types.
    """
    if not (jnp.issubdtype(dtype, jnp.floating) or is_quantised(dtype)):
        raise ValueError(
            f"{function}: {name} must be floating point, int8 or float8_e4m3fn, "
            f"got {jnp.dtype(dtype)}."
        )


def product_dtype(q_dtype: DTypeLike, pool_dtype: DTypeLike) -> Any:
    """The type in which queries meet keys.

    That of the queries where the pool is quantised (int8 and e4m3 are exact in bf16 and f16),
    else the wider of the two.
    """
    if is_quantised(pool_dtype):
        return jnp.dtype(q_dtype)
    return wider_dtype(q_dtype, pool_dtype)


def query_dtype(pool_dtype: DTypeLike) -> Any:
    """The type in which a model hands queries to the ops, so that they meet keys in one product.

    That of the pool, and bfloat16 where the pool is quantised. In float32, which a model computes
    in elsewhere, tensor cores and matrix units would multiply slowly or not at all.

    Example:
      >>> [query_dtype(dtype).name for dtype in ("float32", "float16", "int8")]
      ['float32', 'float16', 'bfloat16']
    """
    return jnp.dtype(jnp.bfloat16 if is_quantised(pool_dtype) else pool_dtype)


def wider_dtype(a: DTypeLike, b: DTypeLike) -> Any:
    """The type that two types promote to, also where `jax_numpy_dtype_promotion` is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def scale_of_peak(peak: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the f32 scale of each row from its largest magnitude; 1 if the row is all zero.

    The peak is multiplied by the float32 value nearest to ``1 / 127`` or ``1 / 448``. A division
    would give different bits in different compilers: XLA replaces it by this multiplication, and
    Triton by an approximate division.

    Args:
      peak: f32 of any shape, the largest magnitude of each row.
      dtype: int8 or float8_e4m3fn.
    """
    return jnp.where(peak > 0, peak * np.float32(1 / QUANTISED[jnp.dtype(dtype)]), 1.0)


def quantise(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Round the last axis of an array to int8 or fp8 with one scale for all of it.

    Args:
      x: floating point ``[..., D]``.
      dtype: int8 or float8_e4m3fn.

    Returns:
      ``(values, scale)``: `dtype` ``[..., D]`` and f32 ``[...]``, such that ``values * scale`` is
      `x` up to rounding: to the nearest of 255 levels for int8, to 3 bits of mantissa for fp8. The
      largest magnitude is met exactly. Where `x` is all zero the scale is 1.

    Example:
      >>> values, scale = quantise(jnp.array([1.0, -2.0, 0.5]), jnp.int8)
      >>> values.tolist(), round(float(scale), 5)
      ([64, -127, 32], 0.01575)
    """
    dtype = jnp.dtype(dtype)
    largest = QUANTISED[dtype]
    x = x.astype(jnp.float32)
    scale = scale_of_peak(jnp.max(jnp.abs(x), axis=-1), dtype)
    scaled = jnp.clip(x / scale[..., None], -largest, largest)
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scale
