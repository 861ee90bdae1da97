"""Products of rows with the weights of their groups, in plain JAX: for devices without a kernel.

`jax.lax.ragged_dot` would be one line. But XLA multiplies all rows by all weights, on CPUs and GPUs
(jax 0.10.2 to 0.12.0): 23 to 370 times the time of the kernel for CPUs. So this is a loop over
tiles of rows, each by the one weight of its group, as `triton.grouped_linear` has it. XLA copies
that weight out of the others first; and on CPUs, which take no part of an array of bfloat16, it
converts all of them to float32 before the loop.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

_MAX_TILE = 64
_MAX_GRADIENT_TILE = 512


def grouped_linear(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """See `paged_jax.kernels.grouped_linear`."""
    R, X = x.shape[0], w.shape[0]
    tile = min(R, _MAX_TILE, max(8, math.ceil(2 * R / X)))
    begins = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    num_tiles = -(-group_sizes // tile)
    tile_ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    x = x.astype(w.dtype)

    def multiply(index: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(tile_ends <= index, dtype=jnp.int32)
        first = begins[group] + (index - tile_ends[group] + num_tiles[group]) * tile
        start = jnp.minimum(first, R - tile)  # the last tile ends with the rows
        weight = lax.dynamic_index_in_dim(w, group, keepdims=False)
        new = _product(lax.dynamic_slice_in_dim(x, start, tile), weight)
        old = lax.dynamic_slice_in_dim(out, start, tile)
        rows = start + jnp.arange(tile, dtype=jnp.int32)
        is_mine = (rows >= first) & (rows < begins[group] + group_sizes[group])
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_mine[:, None], new, old), start, 0)

    out = jnp.zeros((R, w.shape[1]), jnp.float32)
    return lax.fori_loop(0, tile_ends[-1], multiply, out)


def grouped_gradients(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients in `x` and `w`, of whose weights one after the other meets its rows.

    Args:
      x, w, group_sizes: see `paged_jax.kernels.grouped_linear`.
      cotangent: float32 ``[R, out]``, of the products.
    """
    R, X = x.shape[0], w.shape[0]
    tile = min(R, _MAX_GRADIENT_TILE, max(8, math.ceil(R / X)))
    begins = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    rounded = x.astype(w.dtype)

    def of_group(dx: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        weight, begin, size = group

        def add(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dx, dw = sums
            first = begin + index * tile
            start = jnp.minimum(first, R - tile)  # the last tile ends with the rows
            rows = start + jnp.arange(tile, dtype=jnp.int32)
            is_mine = ((rows >= first) & (rows < begin + size))[:, None]

            def take(array: jax.Array) -> jax.Array:
                return jnp.where(is_mine, lax.dynamic_slice_in_dim(array, start, tile), 0)

            dy = take(cotangent)
            new = _product(dy, weight, (1, 0))
            old = lax.dynamic_slice_in_dim(dx, start, tile)
            dx = lax.dynamic_update_slice_in_dim(dx, jnp.where(is_mine, new, old), start, 0)
            return dx, dw + _product(dy, take(rounded), (0, 0))

        sums = dx, jnp.zeros(weight.shape, jnp.float32)
        dx, dw = lax.fori_loop(0, -(-size // tile), add, sums)
        return dx, dw.astype(w.dtype)

    dx, dw = lax.scan(of_group, jnp.zeros(x.shape, jnp.float32), (w, begins, group_sizes))
    return dx.astype(x.dtype), dw


def _product(x: jax.Array, w: jax.Array, contracted: tuple[int, int] = (1, 1)) -> jax.Array:
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)
