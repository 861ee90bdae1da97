# pyright: strict, reportUnknownMemberType=false
"""Copies of the contents of a cache: blocks, recurrent states and state dictionaries.

`read_blocks` copies the blocks of a sequence out of the pools, including shared blocks, and
`read_state` the states of recurrent layers. To bring the sequence back, possibly into another slot,
call `paged_cache.restore`, then `write_blocks` and `write_state`.

A state dictionary for `flax.serialization` has an entry for each field of a cache, including static
fields. `to_bytes`, `from_bytes` and `from_state_dict` of `flax.serialization` accept a cache, also
inside a larger tree such as a train state.
"""

from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paged_jax.arguments import check_positive
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.groups import CacheGroup, StateGroup, StatePools, find_layer, locate
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.cache.sequence_blocks import first_kept_column
from paged_jax.flax_versions import check_installed_flax
from paged_jax.kernels.backend import Pools
from paged_jax.kernels.opaque_call import take_or_fill, without_index_checks
from paged_jax.kernels.rows import set_rows


def read_blocks(
    cache: PagedCache, slot: ArrayLike, first: ArrayLike, *, width: int, group: int = 0
) -> Pools:
    """Copy blocks of a slot out of the pools, in all layers of a group.

    To copy a whole sequence, call this function repeatedly with the same `width`. Then only one
    program per group of layers is compiled. In a group with a window, only the blocks that the next
    token attends to are copied.

    Args:
      cache: the cache. It is only read, so do not donate it.
      slot: i32[], the slot.
      first: i32[], the index of the first block to copy. Index 0 is the first block of the slot or,
        in a group with a window, the block in column `first_kept_column`.
      width: number of blocks to copy (static).
      group: index of the group to read (static).

    Returns:
      `Pools` with copies of the blocks: K and V [L, width, K, C, D] and, if the pools are
      quantised, scales [L, width, K, C]. They are 0 at indices for which the slot has no block.

    Raises:
      ValueError: `width` is not a positive integer, or there is no such group.

    Example:
      >>> from paged_jax.cache import release, reserve, restore
      >>> cache = PagedCache.create(
      ...     num_layers=2, num_blocks=8, num_kv_heads=1, block_size=4, head_dim=8,
      ...     num_slots=2, max_blocks_per_slot=4,
      ... )
      >>> cache, _ = reserve(cache, jnp.array([5, 0]), max_tokens=8)
      >>> saved = read_blocks(cache, 0, 0, width=2)
      >>> cache = release(cache, jnp.array([True, False]))
      >>> cache, _ = restore(cache, jnp.array([0, 5]), max_tokens=8)
      >>> cache = write_blocks(cache, 1, 0, saved)
      >>> saved.k.shape, cache.lengths.tolist()
      ((2, 2, 1, 4, 8), [0, 5])
    """
    check_positive("read_blocks", width=width)
    chosen = _group("read_blocks", cache, group)
    blocks = _held_blocks(chosen, slot, first, width)
    is_held = blocks < chosen.num_blocks
    layers_L1 = jnp.arange(chosen.num_layers, dtype=jnp.int32)[:, None]
    rows_LN = layers_L1 * chosen.num_blocks + jnp.where(is_held, blocks, 0)[None, :]

    def read(pool: jax.Array) -> jax.Array:
        # Reshape the pool to [L * P, ...] and gather rows of it. If `pool[:, blocks]` were used,
        # XLA would change the layout of the scales on TPUs, where P is their innermost dimension.
        values = pool.reshape(-1, *pool.shape[2:])[rows_LN]
        return jnp.where(is_held.reshape(1, -1, *[1] * (pool.ndim - 2)), values, 0)

    return jax.tree.map(read, chosen.pools)


def write_blocks(
    cache: PagedCache, slot: ArrayLike, first: ArrayLike, values: Pools, *, group: int = 0
) -> PagedCache:
    """Overwrite blocks of a slot with the result of `read_blocks`; the tables do not change.

    Args:
      cache: the cache. Donate it, or its pools are copied.
      slot: i32[], a slot for which `restore` has allocated blocks. If a block is shared, it changes
        for all slots that share it.
      first: see `read_blocks`.
      group: see `read_blocks`.
      values: the contents of the blocks, a result of `read_blocks`. Contents at indices for which
        the slot has no block are ignored.

    Raises:
      ValueError: `values` do not have the shapes and dtypes of the pools, or there is no such
        group.
    """
    new = _write_blocks(_group("write_blocks", cache, group), slot, first, values)
    groups = cache.groups
    return replace(cache, groups=(*groups[:group], new, *groups[group + 1 :]))


def _write_blocks(
    group: CacheGroup, slot: ArrayLike, first: ArrayLike, values: Pools
) -> CacheGroup:
    pools = group.pools
    width = _check_values(pools, values)
    blocks = _held_blocks(group, slot, first, width)
    num_layers, num_blocks = group.num_layers, group.num_blocks
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
        places = jnp.where(is_held, blocks, num_blocks + columns)[None, :, None, None]
        return scale.at[layers, places, heads, offsets].set(new, mode="drop", unique_indices=True)

    scales = jax.tree.map(put_scale, pools[2:], values[2:])
    return group.replace_pools(Pools(*jax.tree.map(put, pools[:2], values[:2]), *scales))


def _group(function: str, cache: PagedCache, group: int) -> CacheGroup:
    if not 0 <= group < len(cache.groups):
        raise ValueError(f"{function}: group must be 0 to {len(cache.groups) - 1}, got {group}.")
    return cache.groups[group]


@partial(without_index_checks, static_argnums=(3,))
def _held_blocks(group: CacheGroup, slot: ArrayLike, first: ArrayLike, width: int) -> jax.Array:
    """Return the ids of the blocks that `read_blocks` copies, i32[width]; P for no block."""
    columns = jnp.asarray(first, jnp.int32) + jnp.arange(width, dtype=jnp.int32)
    window = group.tables.window
    if window is not None:
        length = group.tables.lengths.at[jnp.asarray(slot, jnp.int32)].get(
            mode="fill", fill_value=0
        )
        columns += first_kept_column(length, window, group.block_size)
    return group.block_tables.at[jnp.asarray(slot, jnp.int32), columns].get(
        mode="fill", fill_value=group.num_blocks, wrap_negative_indices=False
    )


def _check_values(pools: Pools, values: Pools) -> int:
    """Check that `values` have the shapes and dtypes of `pools`; return the number of blocks."""
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


def read_state(group: StateGroup, slot: jax.Array) -> tuple[StatePools, ...]:
    """Copy the recurrent state of a slot out of the pools; zeros for an empty slot.

    Returns:
      For each group of recurrent layers, its arrays. Each array has the shape of a pool,
      ``[L, P, ...]``, without the dimension P.
    """
    entry = take_or_fill(group.tables.entries, slot, fill_value=group.num_entries)
    is_held = entry < group.num_entries
    index = jnp.where(is_held, entry, 0)

    def read(pool: jax.Array) -> jax.Array:
        state = cast(jax.Array, jax.lax.dynamic_index_in_dim(pool, index, 1, keepdims=False))
        return jnp.where(is_held, state, 0)

    return jax.tree.map(read, group.pools)


def write_state(group: StateGroup, slot: jax.Array, values: tuple[StatePools, ...]) -> StateGroup:
    """Overwrite the recurrent state of a slot with the result of `read_state`.

    An empty slot stays empty.
    """
    entry = take_or_fill(group.tables.entries, slot, fill_value=group.num_entries)

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        L, P, *_ = pool.shape
        layers = jnp.arange(L, dtype=jnp.int32)
        rows = jnp.where(entry < P, layers * P + entry, L * P + layers)
        return set_rows(pool, rows, new)

    return replace(group, pools=jax.tree.map(write, group.pools, values))


def gather(
    cache: PagedCache, slot: int | jax.Array, *, layer: int | jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return the K and V of a slot in the order of its tokens. For tests and debugging.

    Args:
      cache: the cache.
      slot: the slot, a Python integer or i32[].
      layer: the layer, a Python integer; i32[] if the cache has one group.

    Returns:
      `(k, v)`, both [M * C, K, D]: the keys and values of the tokens in the slot, followed by
      zeros. Tokens in freed blocks also get zeros. Quantised elements are
      multiplied by their scales, in float32. `v` is None with latent attention, where each
      value vector is the beginning of its key vector.

    Raises:
      ValueError: a Python `slot` or `layer` does not exist.
    """
    num_slots = cache.num_slots
    _check_layer("gather", layer, cache.num_layers)
    if isinstance(slot, int) and not 0 <= slot < num_slots:
        raise ValueError(f"gather: slot must be 0 to {num_slots - 1}, got {slot}.")
    index, layer = find_layer(cache.layers, layer)
    pools, tables = cache.groups[index].pools, cache.groups[index].tables
    slots = jnp.full(tables.max_blocks_per_slot * tables.block_size, slot, jnp.int32)
    positions = jnp.arange(slots.size, dtype=jnp.int32)
    blocks, offsets = locate(tables, slots, positions)
    is_token = blocks < tables.num_blocks
    blocks = jnp.where(is_token, blocks, 0)

    def read(pool: jax.Array, scale: jax.Array | None) -> jax.Array:
        tokens = pool[layer, blocks, :, offsets]
        if scale is not None:
            tokens = tokens.astype(scale.dtype) * scale[layer, blocks, :, offsets][..., None]
        return jnp.where(is_token[:, None, None], tokens, 0)

    return read(pools.k, pools.k_scale), (None if pools.v is None else read(pools.v, pools.v_scale))


def _check_layer(function: str, layer: int | jax.Array, num_layers: int) -> None:
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(f"{function}: layer must be 0 to {num_layers - 1}, got {layer}.")


def register_caches() -> None:
    """Register the classes of caches and block tables with `flax.serialization`."""
    check_installed_flax()  # before Flax is imported
    from flax import serialization

    for kind in (BlockPool, BlockTables, CacheGroup, PagedCache):
        serialization.register_serialization_state(
            kind, _to_state_dict, _from_state_dict, override=True
        )


def _to_state_dict(cache: Any) -> dict[str, Any]:
    from flax import serialization

    return {
        field.name: serialization.to_state_dict(getattr(cache, field.name))
        for field in fields(cache)
    }


def _from_state_dict(target: Any, state: dict[str, Any]) -> Any:
    """Return `target` with the arrays of `state`; raise ValueError if fields or sizes differ."""
    name = type(target).__name__
    expected = {field.name for field in fields(target)}
    if expected != set(state):
        raise ValueError(
            f"{name}: the state must have the fields {sorted(expected)}, got {sorted(state)}. "
            f"Restore a state that was saved from a {name}."
        )
    from flax import serialization

    static = {field.name for field in fields(target) if field.metadata.get("static")}
    for each in static:
        value = serialization.to_state_dict(getattr(target, each))
        if value != state[each]:
            raise ValueError(
                f"{name}: the state must have {each} = {value}, got {state[each]}. Restore into a "
                "cache with the sizes of the saved cache."
            )
    values = {
        each: _restored(f"{name}.{each}", getattr(target, each), state[each])
        for each in sorted(expected - static)
    }
    return replace(target, **values)


def _restored(name: str, target: Any, state: Any) -> Any:
    if (target is None) != (state is None):
        kinds = ["None" if value is None else "an array" for value in (target, state)]
        raise ValueError(
            f"{name}: the state must be {kinds[0]}, got {kinds[1]}. Restore into a cache with "
            "the dtype and the window of the saved cache."
        )
    if isinstance(target, Pools):
        fields = target._asdict().items()
        return Pools(*(_restored(f"{name}.{each}", old, state[each]) for each, old in fields))
    if not isinstance(target, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        from flax import serialization

        return serialization.from_state_dict(target, state)
    if (target.shape, target.dtype) != (state.shape, state.dtype):
        raise ValueError(
            f"{name}: the state must be {target.dtype} {[*target.shape]}, got {state.dtype} "
            f"{list(state.shape)}. Restore into a cache with the sizes of the saved cache."
        )
    return jnp.asarray(state)
