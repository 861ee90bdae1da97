# pyright: strict, reportUnknownMemberType=false
"""Copies of the contents of a cache: blocks, recurrent states and state dictionaries.

`read_blocks` copies what a sequence holds in a group out of the pools, including shared blocks. To
bring the sequence back, possibly into another slot, call `paged_cache.restore`, then
`write_blocks`.

A state dictionary for `flax.serialization` has an entry for each field of a cache, including static
fields. `to_bytes`, `from_bytes` and `from_state_dict` of `flax.serialization` accept a cache, also
inside a larger tree such as a train state.
"""

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from paged_jax.arguments import check_positive
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.groups import CacheGroup, Group, find_layer, locate
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.cache.retention import Retention
from paged_jax.flax_versions import check_installed_flax
from paged_jax.kernels.pools import Pools


def read_blocks(
    cache: PagedCache, slot: ArrayLike, first: ArrayLike, *, width: int, group: int = 0
) -> Any:
    """Copy blocks of a slot out of the pools, in all layers of a group.

    The group of recurrent layers has a single "block" for each slot, its state.

    To copy a whole sequence, call this function repeatedly with the same `width`. Then only one
    program per group of layers is compiled. In a group with a window, only the blocks that the next
    token attends to are copied.

    Args:
      cache: the cache. It is only read, so do not donate it.
      slot: i32[], the slot.
      first: i32[], the index of the first block to copy. Index 0 is the first block of the slot or,
        in a group with a window, the first block that it keeps.
      width: number of blocks to copy (static).
      group: index of the group in `PagedCache.groups` (static).

    Returns:
      `Pools` with copies of the blocks: K and V [L, width, K, C, D] and, if the pools are
      quantised, scales [L, width, K, C]. They are 0 at indices for which the slot has no block. For
      recurrent layers, a tuple of `StatePools` with one entry, [L, 1, ...].

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
    return _group("read_blocks", cache, group).read(slot, first, width)


def write_blocks(
    cache: PagedCache, slot: ArrayLike, first: ArrayLike, values: Any, *, group: int = 0
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
    groups = list(cache.groups)
    groups[group] = _group("write_blocks", cache, group).write(slot, first, values)
    return cache.replace_groups(groups)


def _group(function: str, cache: PagedCache, group: int) -> Group:
    groups = cache.groups
    if not 0 <= group < len(groups):
        raise ValueError(f"{function}: group must be 0 to {len(groups) - 1}, got {group}.")
    return groups[group]


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
    group: int
    group, layer = find_layer(cache.layers, layer)
    pools, tables = cache.block_groups[group].pools, cache.block_groups[group].tables
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
    return {field.name: _plain(getattr(cache, field.name)) for field in fields(cache)}


def _plain(value: Any) -> Any:
    """Return the state of a field. That of a rule is its text, which is only compared."""
    from flax import serialization

    return repr(value) if isinstance(value, Retention) else serialization.to_state_dict(value)


def _from_state_dict(target: Any, state: dict[str, Any]) -> Any:
    """Return `target` with the arrays of `state`; raise ValueError if fields or sizes differ."""
    name = type(target).__name__
    expected = {field.name for field in fields(target)}
    if expected != set(state):
        raise ValueError(
            f"{name}: the state must have the fields {sorted(expected)}, got {sorted(state)}. "
            f"Restore a state that was saved from a {name}."
        )
    static = {field.name for field in fields(target) if field.metadata.get("static")}
    for field in static:
        value = _plain(getattr(target, field))
        if value != state[field]:
            raise ValueError(
                f"{name}: the state must have {field} = {value}, got {state[field]}. "
                "Restore into a cache with the sizes of the saved cache."
            )
    values = {
        field: _restored(f"{name}.{field}", getattr(target, field), state[field])
        for field in sorted(expected - static)
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
        return Pools(*(_restored(f"{name}.{field}", old, state[field]) for field, old in fields))
    if not isinstance(target, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        from flax import serialization

        return serialization.from_state_dict(target, state)
    if (target.shape, target.dtype) != (state.shape, state.dtype):
        raise ValueError(
            f"{name}: the state must be {target.dtype} {[*target.shape]}, got {state.dtype} "
            f"{list(state.shape)}. Restore into a cache with the sizes of the saved cache."
        )
    return jnp.asarray(state)
