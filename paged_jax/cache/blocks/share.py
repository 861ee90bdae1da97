"""Slots become copies of others, shorter, or empty: blocks are shared and given back."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from paged_jax.cache import block_pool
from paged_jax.cache.blocks.pieces import empty_slots, hold_slots
from paged_jax.cache.blocks.tables import BlockTables, as_slot_values
from paged_jax.cache.blocks.window import shortest_lengths
from paged_jax.cache.sizes import num_blocks_needed
from paged_jax.checks import check_positive
from paged_jax.opaque import put_or_drop, take_or_fill


def fork(tables: BlockTables, parents: jax.Array) -> tuple[BlockTables, jax.Array]:
    """Make slots into copies of other slots; no token is copied, every block is shared.

    Args:
      tables: the state; may be donated.
      parents: i32[S], the slot that each slot becomes a copy of; -1 leaves a slot alone.

    Returns:
      `(tables, ok)`. `ok` is bool[]. It is False and the state unchanged if any child is not
      empty, or any parent is no slot, the child itself, or a child in the same call. The copy
      of an empty slot is an empty slot. Costs in proportion to the blocks that become shared,
      and a pass over the tables.

    Raises:
      ValueError: `parents` is not i32[S].

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(4, num_slots=3, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 0, 0]), max_tokens=8)
      >>> tables, ok = fork(tables, jnp.array([-1, 0, 0]))
      >>> bool(ok), tables.pool.ref_counts.tolist(), int(tables.pool.num_free)
      (True, [3, 3, 0, 0], 2)
    """
    parents = as_slot_values("fork", "parents", parents, jnp.int32, tables)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    is_child = parents != -1
    is_slot = (parents >= 0) & (parents < tables.num_slots)
    parents = jnp.where(is_slot & is_child, parents, slots)
    is_valid = is_slot & (parents != slots) & ~is_child[parents] & (tables.lengths == 0)
    ok = jnp.all(is_valid | ~is_child)

    is_child &= ok
    return hold_slots(_follow(tables, jnp.where(is_child, parents, slots)), is_child), ok


def reorder(tables: BlockTables, parents: jax.Array) -> tuple[BlockTables, jax.Array]:
    """Make slots into copies of other slots, all at once: what beam search does to its beams.

    Slot s becomes what slot `parents[s]` was before the call, and what slot s held is released.
    Blocks are shared, none is copied, so that it never runs out of them.

    Args:
      tables: the state; may be donated.
      parents: i32[S], the slot that each slot becomes a copy of; -1 leaves a slot alone, as does
          its own index. A slot may be the parent of many, and have a parent itself.

    Returns:
      `(tables, ok)`. `ok` is bool[]. It is False and the state unchanged if any parent is no slot.
      Costs in proportion to the blocks of the slots that change, and a pass over the tables.

    Raises:
      ValueError: `parents` is not i32[S].

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(4, num_slots=3, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 3, 1]), max_tokens=8)
      >>> tables, ok = reorder(tables, jnp.array([1, 0, 0]))
      >>> tables.block_tables.tolist(), tables.lengths.tolist(), tables.pool.ref_counts.tolist()
      ([[2, 4], [0, 1], [0, 1]], [3, 7, 7], [2, 2, 1, 0])
    """
    parents = as_slot_values("reorder", "parents", parents, jnp.int32, tables)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    is_slot = (parents >= 0) & (parents < tables.num_slots)
    ok = jnp.all(is_slot | (parents == -1))
    is_changed = is_slot & ok
    parents = jnp.where(is_changed, parents, slots)

    # New references first: a block that only changes hands must not pass through the free queue.
    after = hold_slots(_follow(tables, parents), is_changed)
    before = empty_slots(replace(tables, pool=after.pool), is_changed)
    return replace(after, pool=before.pool), ok


def release(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Empty slots; blocks that no slot holds any more join the free queue.

    Cached ones join its tail, slot by slot, the end of a sequence before its beginning, because
    the beginning is what other sequences are likely to have in common and should be reused last.
    The others join its head and are reused first. A block that several of the slots share joins
    with the last of them. Empty slots stay empty, so that releasing twice does nothing. Costs in
    proportion to the blocks that the slots hold, whatever M is.

    Args:
      tables: the state; may be donated.
      mask: bool[S], the slots to release.

    Raises:
      ValueError: `mask` is not bool[S].

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 2]), max_tokens=8)
      >>> tables = release(tables, jnp.array([True, False]))
      >>> tables.block_tables.tolist(), tables.pool.ref_counts.tolist()
      ([[4, 4], [2, 4]], [0, 0, 1, 0])
    """
    mask = as_slot_values("release", "mask", mask, jnp.bool_, tables)
    return empty_slots(tables, mask)


def truncate(tables: BlockTables, lengths: jax.Array, *, max_tokens: int) -> BlockTables:
    """Shorten slots, and give the blocks past their new ends back, as `release` does.

    Args:
      tables: the state; may be donated.
      lengths: i32[S], how many tokens to leave in each slot. Slots that are no longer than that
          are left alone, and no slot is cut by more than `max_tokens`. Nor, with a window, so
          short that its next token would see what has been given back: what the last `reserve`
          or `commit` has added can always be cut.
      max_tokens: upper bound on the tokens cut from a slot (static). Costs a sort of
          S * ceil(max_tokens / C) entries.

    Raises:
      ValueError: `lengths` is not i32[S] or `max_tokens` is not a positive integer.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 2]), max_tokens=8)
      >>> tables = truncate(tables, jnp.array([4, 9]), max_tokens=4)
      >>> tables.block_tables.tolist(), tables.lengths.tolist()
      ([[0, 4], [2, 4]], [4, 2])
    """
    lengths = as_slot_values("truncate", "lengths", lengths, jnp.int32, tables)
    check_positive("truncate", max_tokens=max_tokens)
    max_tokens = min(max_tokens, tables.max_blocks_per_slot * tables.block_size)

    shortest = jnp.maximum(tables.lengths - max_tokens, shortest_lengths(tables))
    lengths = jnp.clip(lengths, shortest, tables.lengths)
    width = num_blocks_needed(max_tokens, tables.block_size)
    ahead = jnp.arange(width, dtype=jnp.int32)
    columns_SW = num_blocks_needed(lengths, tables.block_size)[:, None] + ahead[None, :]
    rows_S1 = jnp.arange(tables.num_slots, dtype=jnp.int32)[:, None]
    # Columns past the end of the row, or of what the slot holds, give P.
    cut_SW = take_or_fill(tables.block_tables, (rows_S1, columns_SW), fill_value=tables.num_blocks)
    return replace(
        tables,
        pool=block_pool.give_back(tables.pool, cut_SW[:, ::-1].reshape(-1)),
        block_tables=put_or_drop(tables.block_tables, (rows_S1, columns_SW), tables.num_blocks),
        lengths=lengths,
    )


def _follow(tables: BlockTables, parents: jax.Array) -> BlockTables:
    """The tables with each slot as its parent i32[S] is, before any reference is counted."""
    after = replace(
        tables, block_tables=tables.block_tables[parents], lengths=tables.lengths[parents]
    )
    if tables.first_columns is None:
        return after
    return replace(after, first_columns=tables.first_columns[parents])
