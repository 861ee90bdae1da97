# pyright: strict, reportUnknownMemberType=false
"""Checks of the invariants of block tables and pools, on the host."""

import numpy as np

from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks.tables import BlockTables
from paged_jax.cache.sequence_blocks import num_blocks_needed


def check_invariants(tables: BlockTables) -> None:
    """Check on the host that the block tables and the block pool agree with each other.

    Every block must either be in the free queue once, or have a reference count equal to the number
    of table entries that refer to it. This function is for tests and debugging. It copies the state
    to the host and cannot be called inside `jit`.

    Raises:
      AssertionError: an invariant does not hold; the message names the first such invariant.

    Example:
      >>> check_invariants(BlockTables.create(4, 2, 2, 4))
    """
    check_pool(tables.pool)
    table, lengths = np.asarray(tables.block_tables), np.asarray(tables.lengths)
    num_blocks = tables.num_blocks

    is_length = (lengths >= 0) & (lengths <= table.shape[1] * tables.block_size)
    require(is_length.all(), "lengths", "fit the tables", lengths.tolist())
    first_columns = _checked_first_columns(tables, lengths)
    ends = num_blocks_needed(lengths, tables.block_size)
    columns = np.arange(tables.max_blocks_per_slot)
    for slot, entries in enumerate(table):
        is_full = columns < ends[slot]
        is_kept = tables.retention.is_kept(columns, first_columns[slot], tables.block_size)
        used_entries, freed_entries = entries[is_full & is_kept], entries[is_full & ~is_kept]
        name, tail_entries, row = f"block_tables[{slot}]", entries[~is_full], entries.tolist()
        require(
            np.all((0 <= used_entries) & (used_entries < num_blocks)), name, "cover the length", row
        )
        require(len(np.unique(used_entries)) == len(used_entries), name, "hold a block once", row)
        require(
            np.all(freed_entries == num_blocks), name, f"be {num_blocks} before first_columns", row
        )
        require(np.all(tail_entries == num_blocks), name, f"be {num_blocks} past the length", row)

    entries = np.bincount(table[table < num_blocks], minlength=num_blocks)
    for block, count in enumerate(np.asarray(tables.pool.ref_counts).tolist()):
        rule = f"be {entries[block]}, as in the tables"
        require(count == entries[block], f"ref_counts[{block}]", rule, count)


def _checked_first_columns(tables: BlockTables, lengths: np.ndarray) -> np.ndarray:
    """Check and return the first column of each slot that is not freed.

    If slots free blocks, the column must be at most `Retention.cursor`, because the slot needs the
    blocks from there on. It may be lower, because a slot frees blocks only when it grows.
    """
    if not tables.retention.frees:
        require(tables.first_columns is None, "first_columns", "be None", tables.first_columns)
        return np.zeros_like(lengths)
    first_columns = np.asarray(tables.first_columns)
    cursors = tables.retention.cursor(lengths, tables.block_size)
    is_kept = (first_columns >= 0) & (first_columns <= cursors)
    rule = f"be 0 to {cursors.tolist()}, where windows begin"
    require(is_kept.all(), "first_columns", rule, first_columns.tolist())
    return first_columns


def check_pool(pool: BlockPool) -> None:
    """Check on the host the invariants of a pool that do not involve block tables."""
    ref_counts, is_cached = np.asarray(pool.ref_counts), np.asarray(pool.is_cached)
    num_blocks, num_free = pool.num_blocks, int(pool.num_free)

    require(0 <= num_free <= num_blocks, "num_free", f"be 0 to {num_blocks}", num_free)
    head = int(pool.head)
    require(0 <= head < num_blocks, "head", f"be 0 to {num_blocks - 1}", head)
    ring = (head + np.arange(num_free)) % num_blocks
    free = np.asarray(pool.free_queue)[ring]
    is_block = (free >= 0) & (free < num_blocks)
    require(is_block.all(), "free_queue", "hold block ids", free.tolist())
    require(len(set(free.tolist())) == num_free, "free_queue", "hold ids once", free.tolist())
    for block, count in enumerate(ref_counts.tolist()):
        name = f"ref_counts[{block}]"
        require(
            (count == 0) == (block in free), name, "be 0 if and only if the block is free", count
        )

    is_ordered = np.all(is_cached[free][:-1] <= is_cached[free][1:])
    require(is_ordered, "free_queue", "hold cached blocks after all others", free.tolist())
    digests = np.asarray(pool.digests)[is_cached]
    is_unique = len(np.unique(digests, axis=0)) == len(digests)
    require(is_unique, "digests", "be unique among cached blocks", digests.tolist())


def require(condition: bool | np.bool, name: str, rule: str, value: object) -> None:
    """Raise AssertionError unless `condition`; the message has `name`, `rule` and `value`."""
    if not condition:
        raise AssertionError(f"check_invariants: {name} must {rule}, got {value}.")
