# pyright: strict, reportUnknownMemberType=false
"""Argument checks of the ops over pools, which run at trace time.

Error messages begin with `function`, the name of the op that the user has called.
"""

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
from paged_jax.kernels.kv_dtypes import QUANTISED, SCALE_DTYPE, KVDtype, check_pool_dtype
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.padding import round_up_to_lanes
from paged_jax.kernels.pools import Pools

# Maximum `value_dim`. It is far above the values of real models, and catches mistyped numbers.
_MAX_VALUE_DIM = 1 << 16


def pool_letters(
    pools: Pools, head_dim: int, value_dim: int | None = None
) -> dict[str, tuple[Any, str]]:
    """Return the arrays of the pools with their dimension letters, as `dims.bind` takes them.

    The arrays are returned without the padding of their last dimension. `value_dim` is the number
    of elements of a value (U) if it is not `head_dim` (D), else None.
    """
    letters: dict[str, tuple[Any, str]] = {"k_pool": (_without_padding(pools.k, head_dim), "LPKCD")}
    if pools.v is not None:
        last = "D" if value_dim in (None, head_dim) else "U"
        letters["v_pool"] = (_without_padding(pools.v, value_dim or head_dim), f"LPKC{last}")
    if pools.k_scale is not None:
        letters["k_scale"] = (pools.k_scale, "LPKC")
    if pools.v_scale is not None:
        letters["v_scale"] = (pools.v_scale, "LPKC")
    return letters


def check_pools(function: str, pools: Pools, layer: Any, *, has_own_dim: bool = False) -> None:
    """Check the dtypes, shapes and scales of pools, and that the layer exists.

    If `has_own_dim` is True, the last dimension of the pool of values may differ from D.
    """
    kv = _check_value_pool(function, pools, has_own_dim)
    scales = {"k_scale": pools.k_scale}
    if pools.v is not None:
        scales["v_scale"] = pools.v_scale
    elif pools.v_scale is not None:
        raise ValueError(
            f"{function}: v_scale must be None if v_pool is None, got shape "
            f"{list(pools.v_scale.shape)}. The values use the scales of the keys."
        )
    for name, scale in scales.items():
        if kv.has_scales and scale is None:
            raise ValueError(
                f"{function}: {name} must be given for a pool of {pools.k.dtype}, got None. Pass "
                f"its scales, f32 {list(pools.k.shape[:4])}."
            )
        if not kv.has_scales and scale is not None:
            names = " and ".join(kv_dtype.name for kv_dtype in QUANTISED)
            raise ValueError(
                f"{function}: {name} must be None for a pool of {pools.k.dtype}, got shape "
                f"{list(scale.shape)}. Only {names} pools have scales."
            )
        if scale is not None and scale.dtype != SCALE_DTYPE:
            raise ValueError(f"{function}: {name} must be {SCALE_DTYPE}, got {scale.dtype}.")
    L = pools.k.shape[0]
    if jnp.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"{function}: layer must be one integer, got {layer}.")
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < L:
        raise ValueError(f"{function}: layer must be in 0..{L - 1}, got {layer}.")


def default_layer(function: str, k_pool: Any, layer: int | jax.Array | None) -> int | jax.Array:
    """Return the argument `layer`, or 0 if it is None and the pool has one layer.

    Raises:
      ValueError: the argument is None, and the pool has several layers.
    """
    if layer is not None:
        return layer
    shape = np.shape(k_pool)
    if len(shape) == 5 and shape[0] != 1:
        raise ValueError(
            f"{function}: layer must be given for pools of {shape[0]} layers, got None. Pass the "
            "index of a layer."
        )
    return 0


def _check_value_pool(function: str, pools: Pools, has_own_dim: bool) -> KVDtype:
    """Check the dtypes of both pools, and the shape of the pool of values; return their dtype."""
    kv = check_pool_dtype(function, "k_pool", pools.k.dtype)
    if pools.v is None:
        return kv
    check_pool_dtype(function, "v_pool", pools.v.dtype)
    if pools.k.dtype != pools.v.dtype:
        raise ValueError(
            f"{function}: v_pool must have the dtype of k_pool, {pools.k.dtype}, "
            f"got {pools.v.dtype}."
        )
    if not has_own_dim and pools.k.shape != pools.v.shape:
        raise ValueError(
            f"{function}: v_pool must have the shape of k_pool, {list(pools.k.shape)}, "
            f"got {list(pools.v.shape)}."
        )
    return kv


# This advice is added to errors about lengths that are None.
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


def check_floating(function: str, **arrays: jax.Array | None) -> None:
    """Check that named arrays are floating point. Arrays that are None are skipped.

    Raises:
      ValueError: the dtype of an array is not floating point.
    """
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{function}: {name} must be floating point, got {array.dtype}.")


def as_pools(pools: Pools) -> Pools:
    """Convert pools and their scales to arrays."""
    v, k_scale, v_scale = (None if x is None else jnp.asarray(x) for x in pools[1:])
    return Pools(jnp.asarray(pools.k), v, k_scale, v_scale)


def half_of_pages(function: str, kv_pages: jax.Array) -> jax.ShapeDtypeStruct:
    """Check pages of alternating keys and values; return the shape and dtype of the keys.

    The shape of the keys is ``[P, C, K, D]``. Pages ``[P, C, 1, D]`` contain keys of one KV head
    and no values.

    Raises:
      ValueError: the pages do not have one of these shapes, or pages cannot have their dtype.
    """
    if kv_pages.ndim != 4 or (kv_pages.shape[2] % 2 and kv_pages.shape[2] != 1):
        raise ValueError(
            f"{function}: kv_pages must have shape [P, C, 2 * K, D], with alternating keys and "
            f"values, got {list(kv_pages.shape)}."
        )
    check_pool_dtype(function, "kv_pages", kv_pages.dtype)
    P, C, K2, D = kv_pages.shape
    return jax.ShapeDtypeStruct((P, C, 1 if K2 == 1 else K2 // 2, D), kv_pages.dtype)


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
                f"{jax.typeof(array)}. Call the op in jax.shard_map(..., check_vma=False) or "
                "through jax.sharding.auto_axes, see 'Tensor parallel over KV heads' in "
                "docs/more-ops.md."
            )


def as_int32(function: str, **integers: jax.Array) -> tuple[jax.Array, ...]:
    """Convert named integer arrays to int32, the dtype of indices into the pools.

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


def checked_value_dim(
    function: str, value_dim: Any, head_dim: int, *, has_values: bool
) -> int | None:
    """Check `value_dim`, and return it as an int, or None if it equals `head_dim`.

    Raises:
      ValueError: `value_dim` is traced, not an integer, not positive or too large; or there is no
        pool of values, and `value_dim` is None or larger than `head_dim`.
    """
    value_dim = static(function, "value_dim", value_dim, operator.index)
    if value_dim is None:
        if not has_values:
            raise ValueError(
                f"{function}: value_dim must be an integer if v_pool is None, got None. The values "
                "are the first value_dim elements of the keys."
            )
        return None
    max_value_dim = _MAX_VALUE_DIM if has_values else head_dim
    if not 1 <= value_dim <= max_value_dim:
        raise ValueError(f"{function}: value_dim must be 1 to {max_value_dim}, got {value_dim}.")
    return None if value_dim == head_dim else value_dim


def checked_options(
    function: str,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    value_dim: int | None = None,
) -> Options:
    """Check the static options of attention, and convert them to Python numbers.

    `value_dim` is the result of `checked_value_dim`.
    """
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
    return Options(scale, window, soft_cap, value_dim=value_dim)


def static(function: str, name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert a static argument with `convert`, such as `float`. Return None unchanged.

    Raises:
      ValueError: the argument is traced, or cannot be converted.
    """
    if value is None:
        return None
    if isinstance(value, Tracer):
        raise ValueError(
            f"{function}: {name} must be static, got a traced {jax.typeof(value)}. Pass a Python "
            "number. In a function that you compile with jax.jit, list it in static_argnames."
        )
    try:
        return convert(value)
    except (TypeError, ValueError):
        kind = "an integer" if convert is operator.index else "a number"
        raise ValueError(f"{function}: {name} must be {kind} or None, got {value!r}.") from None
