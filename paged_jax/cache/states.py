"""Pools of the states of recurrent layers, and reads and writes of the state of a slot.

`paged_jax.cache.blocks.state_tables` says which entry holds the state of a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.arguments import names_arguments
from paged_jax.cache.blocks.state_tables import StateTables
from paged_jax.formatting import cut, integers, shortened
from paged_jax.kernels.opaque_call import take_or_fill
from paged_jax.kernels.rows import set_rows

# For each layer of a model: the index of its group, and the index of the layer in that group. None
# for a layer in no group.
LayerPlaces = tuple[tuple[int, int] | None, ...]

# Arrays of a group of recurrent layers, each ``[L, P, ...]``: layer of the group, entry, and the
# shape for a sequence.
StatePools = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateGroup:
    """States of all recurrent layers of a model.

    Layers with arrays of equal shapes share pools. All layers share the entries.

    Attributes:
      pools: for each group of layers its arrays, each ``[L, P, ...]``.
      tables: the entries of the slots.
      layers: for each layer of the model, the index of its group of recurrent layers and its index
        in that group; None for layers that are not recurrent (static).
    """

    pools: tuple[StatePools, ...]
    tables: StateTables
    layers: LayerPlaces = field(metadata={"static": True})

    def __repr__(self) -> str:
        entries = integers(self.tables.pool.num_free, 0)
        if entries is None:
            return shortened(self)
        num_entries = self.tables.num_entries
        num_layers = sum(arrays[0].shape[0] for arrays in self.pools)
        return cut(
            f"StateGroup({num_layers} layers, {num_entries - int(entries)} of {num_entries} states "
            "in use)"
        )

    @classmethod
    @names_arguments
    def create(
        cls,
        arrays: Sequence[Sequence[tuple[int, tuple[int, ...], DTypeLike]]],
        *,
        layers: LayerPlaces,
        num_entries: int,
        num_slots: int,
        block_size: int,
    ) -> "StateGroup":
        """Return a group with empty slots and zeroed pools.

        Args:
          arrays: for each group of layers its arrays: number of layers, shape for a sequence, and
            dtype.
          layers: group of each layer of the model and its index in the group, see `StateGroup`.
          num_entries: P, entries in the pools, at least `num_slots`.
          num_slots: S, maximum number of sequences in the cache.
          block_size: C, tokens per block of the attention groups.

        Raises:
          ValueError: a size is not a positive integer, or there are fewer entries than slots.
        """
        tables = StateTables.create(num_entries, num_slots, block_size)
        pools = tuple(
            tuple(
                jnp.zeros((num_layers, num_entries, *shape), dtype)
                for num_layers, shape, dtype in group
            )
            for group in arrays
        )
        return cls(pools, tables, layers)

    @property
    def num_entries(self) -> int:
        """Number of entries in the pools (P)."""
        return self.tables.num_entries

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, without the tables, which are small."""
        return sum(array.nbytes for arrays in self.pools for array in arrays)


def read_state(group: StateGroup, slot: jax.Array) -> tuple[StatePools, ...]:
    """Copy the state of a slot out of the pools; zeros for an empty slot.

    Returns:
      For each group of layers its arrays, each ``[L, ...]``.
    """
    entry = take_or_fill(group.tables.entries, slot, fill_value=group.num_entries)
    is_held = entry < group.num_entries
    index = jnp.where(is_held, entry, 0)

    def read(pool: jax.Array) -> jax.Array:
        return jnp.where(is_held, jax.lax.dynamic_index_in_dim(pool, index, 1, keepdims=False), 0)

    return jax.tree.map(read, group.pools)


def write_state(group: StateGroup, slot: jax.Array, values: tuple[StatePools, ...]) -> StateGroup:
    """Write the result of `read_state` into the entry of a slot; an empty slot stays empty."""
    entry = take_or_fill(group.tables.entries, slot, fill_value=group.num_entries)

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        L, P, *_ = pool.shape
        layers = jnp.arange(L, dtype=jnp.int32)
        rows = jnp.where(entry < P, layers * P + entry, L * P + layers)
        return set_rows(pool, rows, new)

    return replace(group, pools=jax.tree.map(write, group.pools, values))
