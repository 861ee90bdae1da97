"""The KV cache of a model whose layers differ: a `PagedCache` for each kind of attention.

Layers that attend to all tokens keep them all; layers with a sliding window give blocks back as
they leave it, and so need fewer. Both kinds together are a `GroupedCache`, whose slots are those of
each of its groups, with the same lengths::

    layers  0  1  2  3  4  5          groups[0]  every token     layers 5 and 11
            6  7  8  9 10 11          groups[1]  a window        the other ten

            pools             table of slot 0, 100 tokens, C = 16, window 32
    group 0 [2,  P0, K, C, D]   [ 4  7  1  0  9  3  2 ]
    group 1 [10, P1, K, C, D]   [ .  .  .  .  5  8  6 ]        . stands for P1, "no block"

The functions of `paged_cache` take either kind of cache, and do what they do in all groups or in
none. The first group is the one that keeps most tokens, and none of the others runs out of blocks
before it: a slot holds no block of theirs for which it has none in the first one, and what slots
share there, they share everywhere (`blocks.prefix.publish_groups`). So free blocks are those of the
first group, for whoever counts them.

Layers that share K and V, as in Gemma 3n, would have the same place in `layers`: one of them
writes, and all read there.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.core import Tracer

from paged_jax.cache.blocks import BlockTables
from paged_jax.cache.blocks.tables import describe_use
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.kernels.backend import Pools
from paged_jax.short_repr import cut, shortened


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedCache:
    """K and V of layers of several kinds, and which slot holds which block in each kind.

    Attributes:
      groups: the caches of the kinds, over the same slots, the one that keeps most tokens first.
      layers: for each layer of the model its group, and its number there (static).

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_jax.cache import reserve
      >>> sizes = dict(num_kv_heads=1, block_size=4, head_dim=8, num_slots=2,
      ...              max_blocks_per_slot=8)
      >>> every = PagedCache.create(num_layers=1, num_blocks=16, **sizes)
      >>> last = PagedCache.create(num_layers=2, num_blocks=8, window=4, **sizes)
      >>> cache = GroupedCache((every, last), layers=((1, 0), (1, 1), (0, 0)))
      >>> for num_tokens in (12, 1):
      ...     cache, ok = reserve(cache, jnp.array([num_tokens, 0]), max_tokens=12)
      >>> [group.block_tables[0].tolist() for group in cache.groups]
      [[0, 1, 2, 3, 16, 16, 16, 16], [8, 8, 2, 0, 8, 8, 8, 8]]
    """

    groups: tuple[PagedCache, ...]
    layers: tuple[tuple[int, int], ...] = field(metadata={"static": True})

    def __repr__(self) -> str:
        uses = [
            describe_use(group.tables) for group in self.groups if isinstance(group, PagedCache)
        ]
        if len(uses) < len(self.groups) or None in uses:
            return shortened(self)
        return cut(f"GroupedCache({len(self.layers)} layers: {'; '.join(map(str, uses))})")

    def replace_groups(self, groups: tuple[PagedCache, ...]) -> "GroupedCache":
        """Return the cache with others in the places of its groups."""
        return replace(self, groups=tuple(groups))

    def find_layer(self, layer: Any) -> tuple[PagedCache, int]:
        """The group of a layer, and the layer's number in it; the layer is a Python integer.

        Raises:
          ValueError: the layer is traced.
        """
        if isinstance(layer, Tracer):
            raise ValueError(
                "GroupedCache: layer must be a Python integer, got a traced one. Unroll the loop "
                "over layers that differ."
            )
        group, number = self.layers[int(layer)]
        return self.groups[group], number

    @property
    def pools(self) -> tuple[Pools, ...]:
        """K and V of each group with their scales: what a loop over layers carries."""
        return tuple(group.pools for group in self.groups)

    def replace_pools(self, pools: tuple[Pools, ...]) -> "GroupedCache":
        """Return the cache with other pools."""
        groups = zip(self.groups, pools, strict=True)
        return self.replace_groups(tuple(group.replace_pools(each) for group, each in groups))

    @property
    def tables(self) -> BlockTables:
        """The tables of the first group: its free blocks are those that count."""
        return self.groups[0].tables

    @property
    def lengths(self) -> jax.Array:
        """i32[S], the number of tokens in each slot, the same in all groups."""
        return self.tables.lengths

    @property
    def num_layers(self) -> int:
        """L, of all groups."""
        return len(self.layers)

    @property
    def num_blocks(self) -> int:
        """P of the first group."""
        return self.tables.num_blocks

    @property
    def block_size(self) -> int:
        """C, the number of tokens in a block."""
        return self.tables.block_size

    @property
    def num_slots(self) -> int:
        """S."""
        return self.tables.num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of all pools and their scales, without the tables, which are small."""
        return sum(group.nbytes for group in self.groups)
