# pyright: strict, reportUnknownMemberType=false
"""Groups of layers in a cache, and lookup of layers and tokens in their pools.

The layers of a group keep the same tokens. Their pools of K and V have shape ``[L, P, K, C, D]``:
layer of the group, block, KV head, token in the block, head dimension. A block id refers to the
same block in every layer of the group, in K and in V.

Pools of recurrent states have shape ``[L, P, ...]``: layer, entry, and the shape of a sequence's
state. The tables in `paged_jax.cache.blocks.state_tables` list the entry of each slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.blocks.state_tables import StateTables
from paged_jax.cache.blocks.tables import describe_use
from paged_jax.dims import bind
from paged_jax.formatting import cut, integers, shortened
from paged_jax.kernels.backend import Pools
from paged_jax.kernels.kv_dtypes import SCALE_DTYPE, check_pool_dtype
from paged_jax.kernels.rows import pool_of_zeros
from paged_jax.kernels.writing import check_num_rows

# One entry per layer of a model: a pair of the index of the layer's group and the index of the
# layer in that group, or None if the layer belongs to no group.
LayerPlaces = tuple[tuple[int, int] | None, ...]

# The pools of a group of recurrent layers. Each pool has shape ``[L, P, ...]``: L layers of the
# group, P entries, and then the shape of the state of one sequence.
StatePools = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CacheGroup:
    """The pools and block tables of a group of attention layers that keep the same tokens.

    Attributes:
      pools: `Pools` with K ``[L, P, K, C, D]`` and V ``[L, P, K, C, U]``. Quantised pools also have
        scales, f32 ``[L, P, K, C]``, one factor per token and head. V is None in groups with latent
        attention.
      tables: the `BlockTables`: lengths, block tables and free blocks.
    """

    pools: Pools
    tables: BlockTables

    def __repr__(self) -> str:
        use, shape = describe_use(self.tables), getattr(self.pools.k, "shape", ())
        if use is None or len(shape) != 5:
            return shortened(self)
        return cut(
            f"CacheGroup({shape[0]} layers, {shape[2]} KV heads of {shape[4]}, "
            f"{self.pools.k.dtype}, {use})"
        )

    @classmethod
    @names_arguments
    def create(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        value_dim: int | None = None,
        num_slots: int,
        max_blocks_per_slot: int,
        dtype: DTypeLike = jnp.float32,
        window: int | None = None,
    ) -> "CacheGroup":
        """Return a group with empty slots and zeroed pools.

        Args:
          num_layers: L, number of layers in the group.
          num_blocks: P, number of blocks in the pools.
          num_kv_heads: K, number of KV heads.
          block_size: C, number of tokens per block.
          head_dim: D, number of elements of a key per head.
          value_dim: U, number of elements of a value per head; None means D. With 0 there is no
            pool for V, as each value vector is the beginning of its key vector (latent attention).
          num_slots: S, maximum number of sequences in the cache at the same time.
          max_blocks_per_slot: M, maximum number of blocks of a sequence.
          dtype: dtype of K and V. int8 and the other dtypes of `kv_dtypes.QUANTISED` quantise them
            with one float32 scale per token and head, which costs ``4 / D`` bytes per element.
          window: sliding window of the layers, in tokens. Slots free the blocks that no later token
            attends to, see `BlockTables`. None keeps all tokens.

        Raises:
          ValueError: a size is not a positive integer, the pools have more rows than int32 can
            count, or `dtype` is not supported.
        """
        kv = check_pool_dtype("CacheGroup.create", "dtype", dtype)
        check_positive(
            "CacheGroup.create",
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        if value_dim:
            check_positive("CacheGroup.create", value_dim=value_dim)
        tables = BlockTables.create(num_blocks, num_slots, max_blocks_per_slot, block_size, window)
        shape = (num_layers, num_blocks, num_kv_heads, block_size)
        check_num_rows("CacheGroup.create", (*shape, head_dim))
        last_dims = head_dim, head_dim if value_dim is None else value_dim
        # Create K and V as separate arrays, because JAX cannot donate the same buffer twice.
        pools = [pool_of_zeros((*shape, last), dtype) if last else None for last in last_dims]
        if kv.has_scales:
            pools += [pool_of_zeros(shape, SCALE_DTYPE) if last else None for last in last_dims]
        return cls(Pools(*pools), tables)  # type: ignore[arg-type]

    def replace_pools(self, pools: Pools) -> "CacheGroup":
        """Return a copy of the group with its pools replaced."""
        return replace(self, pools=pools)

    @property
    def block_tables(self) -> jax.Array:
        """Block ids of each slot in the order of its tokens, i32[S, M], padded with P."""
        return self.tables.block_tables

    @property
    def num_layers(self) -> int:
        """Number of layers (L)."""
        return self.pools.k.shape[0]

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pools (P); also the table entry for "no block"."""
        return self.pools.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads (K)."""
        return self.pools.k.shape[2]

    @property
    def block_size(self) -> int:
        """Number of tokens in a block (C)."""
        return self.pools.k.shape[3]

    @property
    def head_dim(self) -> int:
        """Head dimension (D)."""
        return self.pools.k.shape[4]

    @property
    def nbytes(self) -> int:
        """Bytes of the pools and their scales, without the tables, which are small."""
        return sum(array.nbytes for array in self.pools if array is not None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateGroup:
    """Pools with the states of all recurrent layers of a model, and the entry of each slot.

    Recurrent layers with states of equal shapes form a group and share pools. An entry id refers to
    the same sequence in all groups.

    Attributes:
      pools: for each group of recurrent layers, its arrays, each ``[L, P, ...]``.
      tables: the `StateTables` with the entry of each slot.
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
          arrays: for each group of recurrent layers, its arrays; each is described by the number of
            layers, the shape of a sequence's state, and the dtype.
          layers: group of each layer of the model and its index in the group, see `StateGroup`.
          num_entries: P, number of entries in the pools, at least `num_slots`.
          num_slots: S, maximum number of sequences in the cache.
          block_size: C, number of tokens per block of the attention groups.

        Raises:
          ValueError: a size is not a positive integer, or there are fewer entries than slots.
        """
        tables = StateTables.create(num_entries, num_slots, block_size)
        pools = tuple(
            tuple(
                pool_of_zeros((num_layers, num_entries, *shape), dtype)
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


def find_layer(layers: LayerPlaces, layer: Any) -> tuple[int, Any]:
    """Return the index of a layer's group, and the index of the layer in that group.

    Args:
      layers: see `PagedCache`.
      layer: index of the layer in the model, a Python integer or, with one group, a traced i32[].

    Raises:
      ValueError: `layer` is traced and there are several groups, or the layer belongs to no group.
    """
    if not isinstance(layer, Tracer):
        if (place := layers[int(layer)]) is None:
            raise ValueError(
                f"PagedCache: layer must belong to a group of the cache, got layer {layer}, which "
                "belongs to none."
            )
        return place
    if layers != tuple((0, index) for index in range(len(layers))):
        raise ValueError(
            "PagedCache: layer must be a Python integer if layers are in several groups, got a "
            "traced array. Unroll the loop over layers."
        )
    return 0, cast(Any, layer)


def locate(
    tables: BlockTables, slots: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the block id of each token and its offset in the block, from slots and positions.

    Args:
      tables: the block tables.
      slots: i32[N], the slot of each token; negative for padding.
      positions: i32[N], the position of each token in its sequence, from 0.

    Returns:
      `(blocks, offsets)`, both i32[N]. The block is P if the slot does not exist, if the position
      is not below the length of the slot, or if the block was freed. `paged_write` ignores tokens
      with block P.

    Raises:
      ValueError: `slots` and `positions` differ in shape.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(8, num_slots=2, max_blocks_per_slot=4, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([5, 2]), max_tokens=8)
      >>> [x.tolist() for x in locate(tables, jnp.array([0, 1, 1]), jnp.array([4, 1, 2]))]
      [[1, 2, 8], [0, 1, 2]]
    """
    bind("locate", slots=(slots, "N"), positions=(positions, "N"))
    is_slot = (slots >= 0) & (slots < tables.num_slots)
    row = jnp.where(is_slot, slots, 0)
    is_token = is_slot & (positions >= 0) & (positions < tables.lengths[row])
    column = jnp.where(is_token, positions // tables.block_size, 0)
    blocks = jnp.where(is_token, tables.block_tables[row, column], tables.num_blocks)
    return blocks, positions % tables.block_size
