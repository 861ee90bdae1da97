# pyright: strict, reportUnknownMemberType=false
"""Reads and writes of whole blocks and states in the pools of a group.

The groups of a cache use them when sequences are swapped, see `cache.groups.Group`.
"""

import jax
import jax.numpy as jnp

from paged_jax.kernels.opaque_call import without_index_checks
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.rows import set_rows


def read_pools(pools: Pools, blocks: jax.Array) -> Pools:
    """Copy blocks i32[N] out of pools, in all layers; zeros for block P, which means "no block".

    Returns:
      `Pools` with N blocks, such as K ``[L, N, K, C, D]``.
    """
    L, P = pools.k.shape[:2]
    is_held = blocks < P
    layers_L1 = jnp.arange(L, dtype=jnp.int32)[:, None]
    rows_LN = layers_L1 * P + jnp.where(is_held, blocks, 0)[None, :]

    def read(pool: jax.Array) -> jax.Array:
        # Reshape the pool to [L * P, ...] and gather rows of it. If `pool[:, blocks]` were used,
        # XLA would change the layout of the scales on TPUs, where P is their innermost dimension.
        values = pool.reshape(-1, *pool.shape[2:])[rows_LN]
        return jnp.where(is_held.reshape(1, -1, *[1] * (pool.ndim - 2)), values, 0)

    return jax.tree.map(read, pools)


def write_pools(pools: Pools, blocks: jax.Array, values: Pools) -> Pools:
    """Overwrite blocks i32[N] with `values`, a result of `read_pools`; block P is ignored."""
    num_layers, num_blocks = pools.k.shape[:2]
    width = blocks.size
    layers_L1 = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    columns = jnp.arange(width, dtype=jnp.int32)
    is_held = blocks < num_blocks
    # The indices of this scatter must be distinct, so each block that must not be written gets its
    # own index past the end of the whole pool. Index P of a layer would not be dropped, because in
    # the flattened pool it is the first row of the next layer.
    past_LN = num_layers * num_blocks + layers_L1 * width + columns[None, :]
    rows_LN = jnp.where(is_held[None, :], layers_L1 * num_blocks + blocks[None, :], past_LN)

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        return set_rows(pool, rows_LN.reshape(-1), new.reshape(-1, *new.shape[2:]))

    @without_index_checks
    def put_scale(scale: jax.Array, new: jax.Array) -> jax.Array:
        # Index every dimension of the scales instead of writing whole rows. Otherwise, XLA would
        # change their layout on TPUs, where P is the innermost dimension.
        L, _, K, C = scale.shape
        layers, _, heads, offsets = (x.astype(jnp.int32) for x in jnp.ogrid[:L, :1, :K, :C])
        block_index = jnp.where(is_held, blocks, num_blocks + columns)[None, :, None, None]
        return scale.at[layers, block_index, heads, offsets].set(
            new, mode="drop", unique_indices=True
        )

    scales = jax.tree.map(put_scale, pools[2:], values[2:])
    return Pools(*jax.tree.map(put, pools[:2], values[:2]), *scales)


def num_values_blocks(pools: Pools, values: Pools) -> int:
    """Return the number of blocks in `values`, after a check of their shapes and dtypes.

    Raises:
      ValueError: the shapes or dtypes are not those of `pools`.
    """
    if pools.is_quantised != values.is_quantised:
        raise ValueError(
            "write_blocks: values must have scales if the pools have scales, and no scales "
            "otherwise. Pass the result of "
            "read_blocks from a cache of the same dtype."
        )
    width = values.k.shape[1] if values.k.ndim > 1 else 0
    if pools.shares_values != values.shares_values:
        raise ValueError(
            "write_blocks: values.v must be None if and only if the pools have no V (as with "
            "latent attention). Pass the result of read_blocks from a cache of the same kind."
        )
    for name, pool, new in zip(Pools._fields, pools, values, strict=True):
        if pool is None or new is None:
            continue
        shape = (pool.shape[0], width, *pool.shape[2:])
        if new.shape != shape or new.dtype != pool.dtype:
            raise ValueError(
                f"write_blocks: values.{name} must be {pool.dtype} {list(shape)}, got {new.dtype} "
                f"{list(new.shape)}. Pass the result of read_blocks from a cache of the same kind."
            )
    return width
