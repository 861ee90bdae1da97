"""The KV cache: K and V of every token in blocks, and the tables that say which block is whose.

The pools are `[L, P, K, C, D]`: layer, block, KV head, token in the block, head dimension. One
block id stands for the same block in every layer and in both pools. A decode step, in each layer:

    cache, ok = reserve(cache, num_tokens)                               # room for the new tokens
    token_blocks, offsets = locate(cache.tables, slots, positions)       # where they go
    pools = paged_write(pools.k, pools.v, k, v, token_blocks, offsets, layer=layer)

What writes to the pools and reads them is in `paged_jax.kernels`. A loop over layers carries
`cache.pools` whole, as its state; `replace_pools` puts them back.

On CPU, keep pools in float32, float16 or int8: XLA updates no others in place there.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache import blocks as allocator
from paged_jax.cache.blocks import BlockCopies, BlockTables, ReservePlan
from paged_jax.cache.blocks.prefix import attach_groups, publish_groups
from paged_jax.cache.blocks.reserve import (
    Reservation,
    begin_reserve,
    begin_restore,
    finish_reserve,
    finish_restore,
    num_possible,
)
from paged_jax.cache.blocks.tables import describe_use, shortest_lengths
from paged_jax.dims import bind
from paged_jax.kernels.backend import Pools
from paged_jax.kernels.dispatch import backend_for
from paged_jax.kernels.pool_format import check_pool_dtype, is_quantised
from paged_jax.kernels.writing import check_num_rows, copy_blocks
from paged_jax.short_repr import cut, shortened

# The kind of cache that a function is given, and returns.
AnyCache = TypeVar("AnyCache", bound="Cache")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """K and V of every token of every slot, and which slot holds which block.

    Attributes:
      k: [L, P, K, C, D], keys: floating point, or int8 or float8_e4m3fn with scales.
      v: [L, P, K, C, D], values, as the keys.
      tables: the `BlockTables`: lengths, block tables and free blocks.
      k_scale: f32[L, P, K, C], what the numbers of each token and head are multiplied by; None
        unless the pools are quantised.
      v_scale: the same for the values.

    Example:
      >>> cache = PagedCache.create(
      ...     num_layers=2, num_blocks=8, num_kv_heads=1, block_size=4, head_dim=8,
      ...     num_slots=2, max_blocks_per_slot=4,
      ... )
      >>> cache, ok = reserve(cache, jnp.array([5, 0]), max_tokens=8)
      >>> bool(ok), cache.lengths.tolist(), cache.nbytes
      (True, [5, 0], 4096)
    """

    k: jax.Array
    v: jax.Array
    tables: BlockTables
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    def __repr__(self) -> str:
        use, shape = describe_use(self.tables), getattr(self.k, "shape", ())
        if use is None or len(shape) != 5:
            return shortened(self)
        return cut(
            f"PagedCache({shape[0]} layers, {shape[2]} KV heads of {shape[4]}, {self.k.dtype}, "
            f"{use})"
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
        num_slots: int,
        max_blocks_per_slot: int,
        dtype: DTypeLike = jnp.float32,
        window: int | None = None,
    ) -> "PagedCache":
        """Return a cache with empty slots and zeroed pools of `dtype`.

        int8 or float8_e4m3fn quantise K and V, each token and head with a scale of its own: half
        the memory of bfloat16 and a little more, ``4 / D`` bytes for each number.

        With a `window`, that of the attention of all its layers, slots give back the blocks that
        no token to come attends to, see `BlockTables`.

        Raises:
          ValueError: a size is not a positive integer, the pool has more rows than int32 counts, or
            `dtype` is neither floating point nor one of the two.
        """
        check_pool_dtype("PagedCache.create", "dtype", dtype)
        check_positive(
            "PagedCache.create",
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        tables = BlockTables.create(num_blocks, num_slots, max_blocks_per_slot, block_size, window)
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        check_num_rows("PagedCache.create", shape)
        # Two arrays, not one used twice: a buffer can be donated only once.
        k, v = (jnp.zeros(shape, dtype) for _ in range(2))
        if not is_quantised(dtype):
            return cls(k=k, v=v, tables=tables)
        k_scale, v_scale = (jnp.zeros(shape[:-1], jnp.float32) for _ in range(2))
        return cls(k=k, v=v, tables=tables, k_scale=k_scale, v_scale=v_scale)

    @property
    def groups(self) -> tuple["PagedCache", ...]:
        """This cache alone: of a `GroupedCache`, its caches."""
        return (self,)

    @property
    def layers(self) -> None:
        """Nothing: each layer has its own number in the one group."""

    def replace_groups(self, groups: tuple["PagedCache", ...]) -> "PagedCache":
        """Return the cache that takes this one's place."""
        (cache,) = groups
        return cache

    def find_layer(self, layer: Any) -> tuple["PagedCache", Any]:
        """The cache of a layer, and its number there: this one, and the layer itself."""
        return self, layer

    @property
    def pools(self) -> Pools:
        """K and V with their scales, as kernels take them."""
        return Pools(self.k, self.v, self.k_scale, self.v_scale)

    def replace_pools(self, pools: Pools) -> "PagedCache":
        """Return the cache with other pools."""
        return replace(self, **pools._asdict())

    @property
    def block_tables(self) -> jax.Array:
        """i32[S, M], the blocks of each slot, then P."""
        return self.tables.block_tables

    @property
    def lengths(self) -> jax.Array:
        """i32[S], the number of tokens in each slot."""
        return self.tables.lengths

    @property
    def num_layers(self) -> int:
        """L."""
        return self.k.shape[0]

    @property
    def num_blocks(self) -> int:
        """P, the number of blocks in the pool; also the entry that stands for "no block"."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        """C, the number of tokens in a block."""
        return self.k.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k.shape[4]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.tables.num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of both pools and their scales, without the tables, which are small."""
        return sum(array.nbytes for array in self.pools if array is not None)


class Cache(Protocol):
    """What the functions below take: a `PagedCache`, or a `GroupedCache` of several.

    Slots and lengths are the same in all of its groups; each has pools and tables of its own.
    """

    @property
    def groups(self) -> tuple[PagedCache, ...]:
        """The caches of layers that share a kind of attention."""
        ...

    @property
    def layers(self) -> tuple[tuple[int, int], ...] | None:
        """For each layer its group, and its number there; None where there is one group."""
        ...

    @property
    def pools(self) -> Any:
        """The `Pools` of a `PagedCache`, or a tuple of those of each group."""
        ...

    def replace_pools(self, pools: Any) -> Self:
        """Return the cache with other pools."""
        ...

    def replace_groups(self, groups: tuple[PagedCache, ...]) -> Self:
        """Return the cache with others in their places."""
        ...

    def find_layer(self, layer: Any) -> tuple[PagedCache, Any]:
        """The cache of a layer, and the layer's number in it."""
        ...


def reserve(
    cache: AnyCache,
    num_tokens: jax.Array,
    *,
    max_tokens: int = 1,
    backend: str | None = None,
) -> tuple[AnyCache, jax.Array]:
    """Make room for more tokens in every slot, copying the blocks that must not be written shared.

    As `paged_jax.blocks.reserve`, with its copies done in all layers. Each block that is copied
    costs reading and writing that block; where there is nothing to copy, the pools are not touched.

    Args:
      cache: the state; donate it, or its pools are copied.
      num_tokens: i32[S], how many tokens to add to each slot; 0 leaves a slot alone.
      max_tokens: upper bound on `num_tokens` (static).
      backend: backend of the copies, see `copy_blocks`; the platform's best where it has no copies.

    Returns:
      `(cache, ok)`. Where `ok`, bool[], is False the cache is unchanged, in all of its groups, but
      that slots may have given back what has left their windows.

    Raises:
      ValueError: `num_tokens` is not i32[S] or `max_tokens` is not a positive integer.
    """
    begun = [
        begin_reserve(group.tables, num_tokens, max_tokens=max_tokens) for group in cache.groups
    ]
    ok = _all_possible(begun)
    done = (finish_reserve(reservation, ok) for reservation in begun)
    return _take(cache, done, backend), ok


def restore(
    cache: AnyCache, num_tokens: jax.Array, *, max_tokens: int, backend: str | None = None
) -> tuple[AnyCache, jax.Array]:
    """Give empty slots room for tokens that come from elsewhere; see `paged_jax.blocks.restore`.

    Before `write_blocks`. Groups with a window take blocks for what is in it alone.

    Args:
      cache, max_tokens, backend: see `reserve`.
      num_tokens: i32[S], how many tokens each slot shall have; 0 leaves a slot alone.

    Returns:
      See `reserve`.
    """
    tables = [group.tables for group in cache.groups]
    begun = [begin_restore(each, num_tokens, max_tokens=max_tokens) for each in tables]
    ok = _all_possible(begun)
    done = (finish_restore(each, rest, ok) for each, rest in zip(tables, begun, strict=True))
    return _take(cache, done, backend), ok


def plan(
    cache: AnyCache, limits: jax.Array, most: jax.Array, *, max_tokens: int, backend: str | None
) -> tuple[AnyCache, tuple[ReservePlan, ...]]:
    """Plan room for tokens, and make the copies; see `paged_jax.blocks.plan`.

    There is a plan for each of the cache's groups, all for as many tokens. The caller commits them
    before it does anything else with the tables, see `commit`. Slots with a limit first give back
    what has left their windows.
    """
    groups = [_slide(group, limits) for group in cache.groups]
    if len(groups) > 1:
        counts = [num_possible(g.tables, limits, max_tokens=max_tokens) for g in groups]
        most = functools.reduce(jnp.minimum, counts, jnp.asarray(most, jnp.int32))
    planned = [allocator.plan(g.tables, limits, most, max_tokens=max_tokens) for g in groups]
    copied = [_copy(g, each.copies, backend) for g, each in zip(groups, planned, strict=True)]
    return cache.replace_groups(tuple(copied)), tuple(planned)


def commit(cache: AnyCache, planned: Sequence[ReservePlan], lengths: jax.Array) -> AnyCache:
    """Take what was used of plans, up to `lengths` i32[S]; see `paged_jax.blocks.commit`."""
    return _replace_tables(
        cache,
        [
            allocator.commit(group.tables, each, lengths)
            for group, each in zip(cache.groups, planned, strict=True)
        ],
    )


def _all_possible(reservations: Sequence[Reservation]) -> jax.Array:
    return functools.reduce(operator.and_, [each.is_possible for each in reservations])


def _slide(group: PagedCache, limits: jax.Array) -> PagedCache:
    if group.tables.window is None:
        return group
    return replace(group, tables=allocator.slide(group.tables, limits > 0))


def _take(
    cache: AnyCache,
    done: Iterable[tuple[BlockTables, BlockCopies, jax.Array]],
    backend: str | None,
) -> AnyCache:
    """The cache with these tables, and with their copies made."""
    groups = [
        replace(_copy(group, copies, backend), tables=tables)
        for group, (tables, copies, _) in zip(cache.groups, done, strict=True)
    ]
    return cache.replace_groups(tuple(groups))


def _replace_tables(cache: AnyCache, tables: Iterable[BlockTables]) -> AnyCache:
    """The cache with other tables, those of its groups."""
    groups = zip(cache.groups, tables, strict=True)
    return cache.replace_groups(tuple(replace(group, tables=each) for group, each in groups))


def _copy(cache: PagedCache, copies: BlockCopies, backend: str | None) -> PagedCache:
    """The cache after these copies, in all layers."""
    pools = cache.pools
    pools = copy_blocks(
        pools.k, pools.v, copies.source, copies.target,
        k_scale=pools.k_scale, v_scale=pools.v_scale,
        backend=backend_for("copy_blocks", backend),
    )  # fmt: skip
    return cache.replace_pools(pools)


def fork(cache: AnyCache, parents: jax.Array) -> tuple[AnyCache, jax.Array]:
    """Make slots into copies of other slots that share all blocks; see `paged_jax.blocks.fork`."""
    done = [allocator.fork(group.tables, parents) for group in cache.groups]
    # Decided by slots and lengths, which are the same in all groups.
    return _replace_tables(cache, [tables for tables, _ in done]), done[0][1]


def release(cache: AnyCache, mask: jax.Array) -> AnyCache:
    """Empty the slots of `mask` bool[S]; see `paged_jax.blocks.release`."""
    return _replace_tables(cache, [allocator.release(g.tables, mask) for g in cache.groups])


def reorder(cache: AnyCache, parents: jax.Array) -> tuple[AnyCache, jax.Array]:
    """Make slots into what other slots were, all at once; see `paged_jax.blocks.reorder`."""
    done = [allocator.reorder(group.tables, parents) for group in cache.groups]
    return _replace_tables(cache, [tables for tables, _ in done]), done[0][1]


def truncate(cache: AnyCache, lengths: jax.Array, *, max_tokens: int) -> AnyCache:
    """Shorten slots to `lengths` i32[S]; see `paged_jax.blocks.truncate`."""
    tables = [group.tables for group in cache.groups]
    for each in tables:
        if each.window is not None:  # what one group has given back, none can be cut to
            lengths = jnp.maximum(lengths, shortest_lengths(each))
    cut = [allocator.truncate(each, lengths, max_tokens=max_tokens) for each in tables]
    return _replace_tables(cache, cut)


def attach(
    cache: AnyCache,
    slot: ArrayLike,
    digests: jax.Array,
    token_ids: jax.Array,
    num_blocks: ArrayLike,
) -> tuple[AnyCache, jax.Array]:
    """Start an empty slot with the cached prefix of its tokens; see `paged_jax.blocks.attach`.

    Of a prefix, groups with a window need those blocks alone that the next token attends to.
    """
    before = tuple(group.tables for group in cache.groups)
    tables, num_found = attach_groups(before, slot, digests, token_ids, num_blocks)
    return _replace_tables(cache, tables), num_found


def publish(
    cache: AnyCache,
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
) -> AnyCache:
    """Let full blocks be found by their digests; see `paged_jax.blocks.publish`.

    One digest stands for the block in all groups that hold it.
    """
    before = tuple(group.tables for group in cache.groups)
    return _replace_tables(cache, publish_groups(before, slots, columns, digests, token_ids))


def forget(cache: AnyCache) -> AnyCache:
    """Let no block be found any more; see `paged_jax.blocks.forget`."""
    return _replace_tables(cache, [allocator.forget(group.tables) for group in cache.groups])


def locate(
    tables: BlockTables, slots: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Find the block, and the place in it, of tokens given by slot and position.

    Args:
      tables: the block tables.
      slots: i32[N], the slot of each token. A negative one marks padding.
      positions: i32[N], the position of each token in its slot, from 0.

    Returns:
      `(blocks, offsets)`, both i32[N]. The block is P, which `paged_write` drops, where there is no
      such slot, the position is not below the slot's length, or the block was given back.

    Raises:
      ValueError: `slots` and `positions` differ in shape.

    Example:
      >>> tables = BlockTables.create(8, num_slots=2, max_blocks_per_slot=4, block_size=4)
      >>> tables, _, _ = allocator.reserve(tables, jnp.array([5, 2]), max_tokens=8)
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
