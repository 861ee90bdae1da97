"""Argument checks of the ops over pools, which run at trace time."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from paged_jax.dims import check_sizes
from paged_jax.kernels.backend import Options, Pools
from paged_jax.kernels.pool_format import check_pool_dtype, is_quantised, round_up_to_lanes


def pool_letters(pools: Pools, head_dim: int) -> dict[str, tuple[Any, str]]:
    """Return the pools as arguments of `dims.bind`, without the padding of the last dimension.

    Args:
      pools: the pools, with or without scales.
      head_dim: head dimension (D) of the call.
    """
    letters: dict[str, tuple[Any, str]] = {
        "k_pool": (_without_padding(pools.k, head_dim), "LPKCD"),
        "v_pool": (_without_padding(pools.v, head_dim), "LPKCD"),
    }
    if pools.k_scale is not None:
        letters["k_scale"] = (pools.k_scale, "LPKC")
    if pools.v_scale is not None:
        letters["v_scale"] = (pools.v_scale, "LPKC")
    return letters


def check_pools(function: str, pools: Pools, layer: Any) -> None:
    """Check the dtypes, shapes and scales of pools, and that they contain the layer."""
    for name, pool in {"k_pool": pools.k, "v_pool": pools.v}.items():
        check_pool_dtype(function, name, pool.dtype)
    if pools.k.dtype != pools.v.dtype:
        raise ValueError(
            f"{function}: v_pool must have the dtype of k_pool, {pools.k.dtype}, "
            f"got {pools.v.dtype}."
        )
    if pools.k.shape != pools.v.shape:
        raise ValueError(
            f"{function}: v_pool must have the shape of k_pool, {list(pools.k.shape)}, "
            f"got {list(pools.v.shape)}."
        )
    for name, scale in {"k_scale": pools.k_scale, "v_scale": pools.v_scale}.items():
        if is_quantised(pools.k.dtype) and scale is None:
            raise ValueError(
                f"{function}: {name} must be given for a pool of {pools.k.dtype}, got None. Pass "
                f"the scales f32 {list(pools.k.shape[:4])}."
            )
        if not is_quantised(pools.k.dtype) and scale is not None:
            raise ValueError(
                f"{function}: {name} must be None for a pool of {pools.k.dtype}, got shape "
                f"{list(scale.shape)}. Only int8 and float8_e4m3fn pools have scales."
            )
        if scale is not None and scale.dtype != jnp.float32:
            raise ValueError(f"{function}: {name} must be float32, got {scale.dtype}.")
    L = pools.k.shape[0]
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < L:
        raise ValueError(f"{function}: layer must be in 0..{L - 1}, got {layer}.")
    if jnp.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"{function}: layer must be one integer, got {layer}.")


# Advice in errors about lengths that are None.
_FULL = {
    "context_lens": " If all tables are full, pass jnp.full(B, M * C).",
    "query_lens": " If all chunks are full, pass jnp.full(B, T).",
}


def as_arrays(function: str, **arrays: Any) -> dict[str, jax.Array]:
    """Convert named arguments of `function` to arrays.

    Raises:
      ValueError: an argument is None, or a size is symbolic.
    """
    for name, array in arrays.items():
        if array is None:
            raise ValueError(f"{function}: {name} must be an array, got None.{_FULL.get(name, '')}")
        check_sizes(function, name, jnp.shape(array))
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def half_of_pages(function: str, kv_pages: jax.Array) -> jax.ShapeDtypeStruct:
    """Check pages of alternating keys and values, and return the shape and dtype of the keys.

    The shape is ``[P, C, K, D]``.

    Raises:
      ValueError: the pages do not have shape ``[P, C, 2 * K, D]``, or their dtype is neither
        floating point nor int8.
    """
    if kv_pages.ndim != 4 or kv_pages.shape[2] % 2:
        raise ValueError(
            f"{function}: kv_pages must have shape [P, C, 2 * K, D], keys and values alternating, "
            f"got {list(kv_pages.shape)}."
        )
    if not (jnp.issubdtype(kv_pages.dtype, jnp.floating) or kv_pages.dtype == jnp.int8):
        raise ValueError(
            f"{function}: kv_pages must be floating point or int8, got {kv_pages.dtype}."
        )
    P, C, K2, D = kv_pages.shape
    return jax.ShapeDtypeStruct((P, C, K2 // 2, D), kv_pages.dtype)


def as_scalar(function: str, name: str, value: Any, dtype: Any) -> jax.Array:
    """Convert a number, or an array with a single element, to an array of shape ``[]``.

    Raises:
      ValueError: the array does not have exactly one element, or its dtype is not numeric.
    """
    array = jnp.asarray(value)
    if array.size != 1 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(
            f"{function}: {name} must be one number, got {array.dtype} {list(array.shape)}."
        )
    return array.reshape(()).astype(dtype)


def check_sharding(function: str, arrays: Any) -> None:
    """Check that no array is on a mesh with explicit axes.

    JAX would require an explicit output sharding for each indexing operation on such arrays.

    Raises:
      ValueError: an array is on such a mesh.
    """
    for array in jax.tree.leaves(arrays):
        if AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types:
            raise ValueError(
                f"{function}: arrays must not be on a mesh with explicit axes, got "
                f"{jax.typeof(array)}. Call it in jax.shard_map(..., check_vma=False) or through "
                "jax.sharding.auto_axes, see 'Tensor parallel over KV heads' in docs/embedding.md."
            )


def as_int32(function: str, **integers: jax.Array) -> tuple[jax.Array, ...]:
    """Convert named integer arrays to int32, the dtype of row indices into the pool.

    Raises:
      ValueError: an array does not contain integers.
    """
    for name, array in integers.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{function}: {name} must be an integer array, got {array.dtype}.")
    return tuple(array.astype(jnp.int32) for array in integers.values())


def _without_padding(pool: jax.Array, head_dim: int) -> Any:
    if pool.ndim == 5 and pool.shape[-1] == round_up_to_lanes(head_dim):
        return jax.ShapeDtypeStruct((*pool.shape[:-1], head_dim), pool.dtype)
    return pool


def checked_options(
    function: str, scale: float, sliding_window: int | None, soft_cap: float | None
) -> Options:
    """Check the static options of attention, and convert them to Python numbers."""
    scale = static(function, "scale", scale, float)
    window = static(function, "sliding_window", sliding_window, operator.index)
    soft_cap = static(function, "soft_cap", soft_cap, float)
    if not math.isfinite(scale):
        raise ValueError(f"{function}: scale must be finite, got {scale}.")
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(
            f"{function}: sliding_window must be an integer, at least 1 and below 2**31, or None, "
            f"got {window}."
        )
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"{function}: soft_cap must be positive or None, got {soft_cap}.")
    return Options(scale, window, soft_cap)


def static(function: str, name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert a static argument to a Python number with `convert`, such as `float`; keep None.

    Raises:
      ValueError: the argument is traced, or cannot be converted.
    """
    if value is None:
        return None
    if isinstance(value, Tracer):
        raise ValueError(
            f"{function}: {name} must be static, got a traced {jax.typeof(value)}. Pass a Python "
            "number; in your own jit, name it in static_argnames."
        )
    try:
        return convert(value)
    except (TypeError, ValueError):
        kind = "an integer" if convert is operator.index else "a number"
        raise ValueError(f"{function}: {name} must be {kind} or None, got {value!r}.") from None
