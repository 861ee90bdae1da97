# pyright: strict, reportUnknownMemberType=false
"""Prefix cache: publish full blocks of tokens, and attach cached blocks to other slots.

A prefix is as long as all groups of layers can provide it.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks.tables import BlockTables, check_dtype
from paged_jax.dims import bind
from paged_jax.kernels.opaque_call import put_or_drop, take_or_fill, typed_jit, without_index_checks

# One `BlockTables` per group of layers. All groups have the same slots, and a slot has the same
# length in all groups.
Groups = tuple[BlockTables, ...]


def attach(
    tables: BlockTables,
    slot: ArrayLike,
    digests: jax.Array,
    token_ids: jax.Array,
    num_blocks: ArrayLike,
) -> tuple[BlockTables, jax.Array]:
    """Start an empty slot with the cached prefix of its tokens.

    The blocks of the sequence are looked up by digest and compared by tokens. The slot gets the
    longest prefix of blocks that are all cached. Blocks that are in use become shared; free blocks
    leave the free queue. The cost is one pass over the digests of the pool and one pass over the
    free queue.

    Args:
      tables: the state; may be donated.
      slot: i32[], the slot. Nothing changes if it is not empty or does not exist.
      digests: u32[N, 8], the digests of the full blocks of a sequence, N at most M. The digest of a
        block must identify all tokens from the beginning of the sequence to the end of the block.
      token_ids: i32[N, C], the tokens in each block.
      num_blocks: i32[], the number of blocks to look up; the others are padding.

    Returns:
      `(tables, num_cached)`. `num_cached` is i32[], the number of blocks found. The slot now holds
      `num_cached * C` tokens.

    Raises:
      ValueError: shapes or dtypes do not fit the tables, or there are more than M blocks.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([6, 0]), max_tokens=8)
      >>> digests, tokens = jnp.ones((1, 8), jnp.uint32), jnp.array([[11, 12, 13, 14]])
      >>> tables = publish(tables, jnp.array([0]), jnp.array([0]), digests, tokens)
      >>> tables, num_cached = attach(tables, 1, digests, tokens, 1)
      >>> int(num_cached), tables.block_tables.tolist(), tables.lengths.tolist()
      (1, [[0, 1], [0, 4]], [6, 4])
    """
    slot, query = begin_attach(tables, slot, digests, token_ids, num_blocks)
    prefix = find_prefix(tables, query)
    num_cached = longest_prefix([prefix], query)
    # If no block was found, replace `slot` by an index past the last slot, so that JAX drops all
    # writes and no slot changes.
    slot = jnp.where(num_cached > 0, slot, tables.num_slots)
    return start_slot(tables, slot, prefix.ids, num_cached), num_cached


class PrefixQuery(NamedTuple):
    """Full blocks of a sequence that are looked up in the prefix cache.

    Attributes:
      digests: u32[N, 8], the digest of each block.
      token_ids: i32[N, C], the tokens in each block.
      limit: i32[], the number of blocks to look up; the others are padding.
    """

    digests: jax.Array
    token_ids: jax.Array
    limit: jax.Array


class FoundPrefix(NamedTuple):
    """What a group of layers has cached of a sequence, and the prefixes that it can provide.

    Attributes:
      ids: i32[N], the block or snapshot that was found for each block of the sequence; P for none.
      num_blocks: i32[], the maximum number of blocks of a prefix; None for no maximum.
      is_possible: bool[N + 1], whether the group can provide a prefix of 0, 1, ..., N blocks; None
        for every length up to `num_blocks`.
    """

    ids: jax.Array
    num_blocks: jax.Array | None
    is_possible: jax.Array | None


def begin_attach(
    tables: BlockTables,
    slot: ArrayLike,
    digests: jax.Array,
    token_ids: jax.Array,
    num_blocks: ArrayLike,
) -> tuple[jax.Array, PrefixQuery]:
    """Check the arguments of `attach`, and return the slot and the blocks to look up.

    `tables` belong to the first group. The number of blocks to look up is 0 if the slot is not
    empty or does not exist.
    """
    digests, token_ids = _as_contents("attach", tables, digests, token_ids)
    if len(digests) > tables.max_blocks_per_slot:
        raise ValueError(
            f"attach: digests must have at most {tables.max_blocks_per_slot} rows, got "
            f"{len(digests)}. Pass only as many blocks as fit into a slot."
        )
    slot, num_blocks = jnp.asarray(slot, jnp.int32), jnp.asarray(num_blocks, jnp.int32)
    length = take_or_fill(tables.lengths, slot, fill_value=-1)
    limit = jnp.where(length == 0, jnp.minimum(num_blocks, len(digests)), 0)
    return slot, PrefixQuery(digests, token_ids, limit)


def find_prefix(tables: BlockTables, query: PrefixQuery) -> FoundPrefix:
    """Look up the blocks of a sequence in a group of layers.

    A group without a window needs all blocks of a prefix. A group with a window needs only the
    blocks that the next token attends to; its earlier blocks may have been evicted.
    """
    blocks, is_hit = find_blocks(tables.pool, query)
    N, rule, block_size = len(is_hit), tables.retention, tables.block_size
    if not rule.frees:
        first_miss = jnp.where(is_hit, N, jnp.arange(N, dtype=jnp.int32))
        return FoundPrefix(blocks, jnp.min(first_miss, initial=N), None)
    num_missed = jnp.pad(jnp.cumsum(~is_hit, dtype=jnp.int32), (1, 0))
    num_tokens = jnp.arange(N + 1, dtype=jnp.int32) * block_size
    cursors = rule.cursor(num_tokens, block_size)
    return FoundPrefix(blocks, None, rule.has_kept(num_missed, cursors, block_size))


def longest_prefix(prefixes: Sequence[FoundPrefix], query: PrefixQuery) -> jax.Array:
    """Return the number of blocks in the longest prefix that all groups can provide, i32[]."""
    limits = [prefix.num_blocks for prefix in prefixes if prefix.num_blocks is not None]
    limit = functools.reduce(jnp.minimum, limits or [query.limit])
    masks = [prefix.is_possible for prefix in prefixes if prefix.is_possible is not None]
    if not masks:
        return limit
    counts = jnp.arange(len(query.digests) + 1, dtype=jnp.int32)
    is_possible = functools.reduce(jnp.logical_and, masks, counts <= limit)
    return jnp.max(jnp.where(is_possible, counts, 0))


@without_index_checks
def start_slot(
    tables: BlockTables, slot: jax.Array, blocks: jax.Array, num_cached: jax.Array
) -> BlockTables:
    """Write the blocks of a cached prefix into an empty slot, and set its length.

    Args:
      tables: the tables of a group.
      slot: i32[], an empty slot. Nothing changes if it is equal to the number of slots.
      blocks: i32[N], the cached blocks of a sequence. The slot gets only those that it keeps.
      num_cached: i32[], the number of blocks in the prefix.
    """
    columns = jnp.arange(len(blocks), dtype=jnp.int32)
    is_taken = columns < num_cached
    num_tokens = num_cached * tables.block_size
    if tables.first_columns is not None:
        cursor = tables.retention.cursor(num_tokens, tables.block_size)
        is_taken &= tables.retention.is_kept(columns, cursor, tables.block_size)
        cursors = tables.first_columns.at[slot].set(cursor, mode="drop")
        tables = replace(tables, first_columns=cursors)
    blocks = jnp.where(is_taken, blocks, tables.num_blocks)
    return replace(
        tables,
        pool=block_pool.revive(tables.pool, blocks),
        block_tables=tables.block_tables.at[slot, columns].set(blocks, mode="drop"),
        lengths=tables.lengths.at[slot].set(num_tokens, mode="drop"),
    )


def publish(
    tables: BlockTables,
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
) -> BlockTables:
    """Add full blocks to the prefix cache: `attach` finds them until they are allocated again.

    Each row of the arguments names one block; rows are processed in order. A row is ignored if its
    slot does not exist (-1 is padding), or if the slot has no full block in this column. It is also
    ignored if the block is already cached, or if another block is cached under the digest. The cost
    is one pass over the digests of the pool, plus N comparisons of digests for each full block.

    Args:
      tables: the state; may be donated.
      slots: i32[N], the slot of each block.
      columns: i32[N], the column of each block in its slot. The first token of the block has
        position ``column * C``.
      digests: u32[N, 8], see `attach`.
      token_ids: i32[N, C], the tokens in each block.

    Returns:
      The tables.

    Raises:
      ValueError: shapes or dtypes do not fit the tables.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([6, 0]), max_tokens=8)
      >>> digests, tokens = jnp.ones((2, 8), jnp.uint32), jnp.ones((2, 4), jnp.int32)
      >>> tables = publish(tables, jnp.array([0, 0]), jnp.array([0, 1]), digests, tokens)
      >>> tables.pool.is_cached.tolist()
      [True, False, False, False]
    """
    return publish_groups((tables,), slots, columns, digests, token_ids)[0]


def publish_groups(
    groups: Groups,
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
) -> Groups:
    """Publish the same blocks in several groups of layers.

    The first group decides which blocks are published: in the other groups, a block is published
    only if the block of the same slot and column is cached in the first group. So two slots that
    share a block of the first group also share the corresponding block of each other group, unless
    one of them has freed it. Therefore no group uses more blocks than the first group, and the
    first group is the first to run out of free blocks.

    A group with a window evicts the blocks of a prefix earlier than the first group. A slot that
    computes this prefix again has new copies of its blocks in all groups. In the first group, they
    replace the older copies that are still cached. Otherwise, the new copies of the first group
    would not be cached, so the other groups could not publish theirs either. The prefix could then
    not be found until the first group had evicted its older copies.
    """
    first, *other_groups = groups
    digests, token_ids = _as_contents("publish", first, digests, token_ids)
    slots, columns = jnp.asarray(slots), jnp.asarray(columns)
    bind("publish", digests=(digests[:, 0], "N"), slots=(slots, "N"), columns=(columns, "N"))
    slots = check_dtype("publish", "slots", slots, jnp.int32)
    columns = check_dtype("publish", "columns", columns, jnp.int32)
    after = _publish_first(first, other_groups, slots, columns, digests, token_ids)
    return after, *(
        _publish_alike(tables, first, after, slots, columns, digests, token_ids)
        for tables in other_groups
    )


def _publish_first(
    tables: BlockTables,
    other_groups: list[BlockTables],
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
) -> BlockTables:
    """Add blocks of the first group to the prefix cache, see `publish_groups`."""
    no_block = tables.num_blocks
    blocks, is_full = _full_blocks(tables, slots, columns)
    pool = tables.pool
    cached_blocks = block_pool.find(pool, digests, is_full)
    is_new = is_full & (cached_blocks == no_block) & ~pool.is_cached[blocks]
    if other_groups:
        replaces = is_full & (cached_blocks < no_block) & ~pool.is_cached[blocks]
        replaces &= _would_complete(other_groups, slots, columns, digests)
        is_taken = _serve_in_order(is_new | replaces, blocks, digests)
        replaced_blocks = jnp.where(is_taken & replaces, cached_blocks, no_block)
        pool = block_pool.forget_marked(
            pool, put_or_drop(jnp.zeros(no_block, bool), replaced_blocks, True)
        )
    else:
        is_taken = _serve_in_order(is_new, blocks, digests)
    blocks = jnp.where(is_taken, blocks, no_block)
    return replace(tables, pool=block_pool.remember(pool, blocks, digests, token_ids))


def _would_complete(
    other_groups: list[BlockTables], slots: jax.Array, columns: jax.Array, digests: jax.Array
) -> jax.Array:
    """Return whether replacing the cached copy of each block caches it in more groups, bool[N].

    The first group has a cached copy, which would be replaced by the block of the slot. Another
    group gains the block if it has evicted its copy and the slot still holds the block. It loses
    the block if it has a cached copy but the slot no longer holds the block. The result is True if
    a group gains the block and no group loses it.
    """
    is_added, is_lost = jnp.zeros(len(slots), bool), jnp.zeros(len(slots), bool)
    for tables in other_groups:
        blocks, is_held = _full_blocks(tables, slots, columns)
        is_known = block_pool.find(tables.pool, digests, slots >= 0) < tables.num_blocks
        is_added |= is_held & ~is_known & ~tables.pool.is_cached[blocks]
        is_lost |= is_known & ~is_held
    return is_added & ~is_lost


def _publish_alike(
    tables: BlockTables,
    before: BlockTables,
    after: BlockTables,
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
) -> BlockTables:
    """Publish in another group the blocks that are now cached in the first group.

    These are the blocks of the same slots and columns. `tables` are the tables of the other group.
    `before` and `after` are the tables of the first group before and after its blocks were
    published. See `publish` for the other arguments.
    """
    first_blocks, is_full = _full_blocks(after, slots, columns)
    is_cached = is_full & after.pool.is_cached[first_blocks]
    is_cached &= jnp.all(after.pool.digests[first_blocks] == digests, axis=1)
    is_new = is_cached & ~before.pool.is_cached[first_blocks]
    blocks, is_held = _full_blocks(tables, slots, columns)
    # A digest may be new in the first group but already cached in this group. Then the first group
    # has evicted or replaced its older copy of the block, so the copy in this group is stale.
    stale = block_pool.find(tables.pool, digests, is_new)
    stale = jnp.where(is_held & (stale == blocks), tables.num_blocks, stale)
    is_stale = put_or_drop(jnp.zeros(tables.num_blocks, bool), stale, True)
    pool = block_pool.forget_marked(tables.pool, is_stale)
    is_known = block_pool.find(pool, digests, is_cached) < tables.num_blocks
    is_open = is_held & is_cached & ~is_known & ~pool.is_cached[blocks]
    is_taken = _serve_in_order(is_open, blocks, digests)
    blocks = jnp.where(is_taken, blocks, tables.num_blocks)
    return replace(tables, pool=block_pool.remember(pool, blocks, digests, token_ids))


def _full_blocks(
    tables: BlockTables, slots: jax.Array, columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the block ids at `(slots, columns)` of the table, and whether each block is full.

    Both results have shape [N]. The second one, bool, is False if the slot or the block does not
    exist, or if the block is not full; then the block id is arbitrary.
    """
    is_slot = (slots >= 0) & (slots < tables.num_slots)
    slots = jnp.where(is_slot, slots, 0)
    is_full = is_slot & (columns >= 0) & (columns < tables.lengths[slots] // tables.block_size)
    blocks = tables.block_tables[slots, jnp.where(is_full, columns, 0)]
    if tables.first_columns is None:
        return blocks, is_full
    is_full &= blocks < tables.num_blocks
    return jnp.where(is_full, blocks, 0), is_full


def forget(tables: BlockTables) -> BlockTables:
    """Remove all blocks from the prefix cache, for example after the weights have changed.

    Args:
      tables: the state; may be donated.

    Example:
      >>> tables = forget(BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4))
      >>> bool(tables.pool.is_cached.any())
      False
    """
    is_cached = jnp.zeros_like(tables.pool.is_cached)
    return replace(tables, pool=replace(tables.pool, is_cached=is_cached))


@without_index_checks
def find_blocks(pool: BlockPool, query: PrefixQuery) -> tuple[jax.Array, jax.Array]:
    """Look up the blocks of a sequence in the pool of a group.

    A slot must not hold a block twice. So if the same block is found for two positions, it counts
    as found only at the first position.

    Returns:
      `(blocks, is_found)`: block ids i32[N], and bool[N], whether each block was found.
    """
    digests, token_ids, limit = query
    size = len(digests)
    index = jnp.arange(size, dtype=jnp.int32)
    blocks = block_pool.find(pool, digests, index < limit)
    cached_ids = pool.token_ids.at[blocks].get(mode="fill", fill_value=-1)
    first = jnp.full(pool.num_blocks, size, jnp.int32).at[blocks].min(index, mode="drop")
    is_first = first.at[blocks].get(mode="fill", fill_value=size) == index
    return blocks, is_first & jnp.all(cached_ids == token_ids, axis=1)


@typed_jit
def _serve_in_order(is_new: jax.Array, blocks: jax.Array, digests: jax.Array) -> jax.Array:
    """Select the rows of `is_new` bool[N] to cache, so that no block or digest occurs twice.

    The rows are processed in order. A row is skipped if an earlier selected row has the same block
    or the same digest. This needs a loop, because the result for a row depends on the results for
    the rows before it.

    Returns:
      bool[N], whether to cache the block of each row.
    """
    order = jnp.nonzero(is_new, size=len(blocks), fill_value=0)[0].astype(jnp.int32)

    def serve(i: jax.Array, is_taken: jax.Array) -> jax.Array:
        entry = order[i]
        is_same = (blocks == blocks[entry]) | jnp.all(digests == digests[entry][None], axis=1)
        return is_taken.at[entry].set(~jnp.any(is_taken & is_same))

    num_new = jnp.sum(is_new, dtype=jnp.int32)
    initial = jnp.zeros_like(is_new)
    return cast(jax.Array, lax.fori_loop(jnp.int32(0), num_new, serve, initial))


def _as_contents(
    function: str, tables: BlockTables, digests: ArrayLike, token_ids: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    digests, token_ids = jnp.asarray(digests), jnp.asarray(token_ids)
    shape = [digests.shape[0] if digests.ndim else 0, block_pool.NUM_DIGEST_WORDS]
    if list(digests.shape) != shape:
        raise ValueError(
            f"{function}: digests must have shape [N, {shape[1]}], got {list(digests.shape)}."
        )
    bind(
        function,
        pool=(tables.pool.token_ids, "PC"),
        digests=(digests[:, 0], "N"),
        token_ids=(token_ids, "NC"),
    )
    digests = check_dtype(function, "digests", digests, jnp.uint32)
    return digests, check_dtype(function, "token_ids", token_ids, jnp.int32)
