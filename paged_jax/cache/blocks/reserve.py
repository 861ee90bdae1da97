# pyright: strict, reportUnknownMemberType=false
"""Allocation of blocks for new tokens, with copy on write for shared blocks.

`reserve` allocates blocks for a known number of tokens. `plan` and `commit` are for decode loops,
in which the number of tokens is known only after the loop: `plan` chooses blocks for the maximum
number of tokens, and `commit` allocates those blocks that were used.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.arguments import check_positive
from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks.tables import BlockTables, as_slot_values, slide
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.formatting import short_repr
from paged_jax.kernels.opaque_call import put_or_drop, take_or_fill


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockCopies:
    """Block copies that the caller of `reserve` must make before it writes K and V.

    Attributes:
      source: i32[S], the block to copy for each slot; P (no block) for slots without a copy.
      target: i32[S], the new block that receives the copy; P for slots without a copy. Targets are
        distinct, and none is a source.
    """

    source: jax.Array
    target: jax.Array


def reserve(
    tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int = 1
) -> tuple[BlockTables, BlockCopies, jax.Array]:
    """Allocate blocks for the next `num_tokens` tokens of every slot, and increase its length.

    An empty slot gets room for a prompt, a running slot gets room for new tokens. If the first new
    token belongs in a partly filled block that other slots share, the slot gets a new block
    instead, and the caller must copy the old block to it. If all slots that share such a block
    write to it in the same call, the last slot keeps the block. A partly filled block can be cached
    after `truncate`; if a slot writes to it, it is removed from the prefix cache.

    With a window, slots that grow first free the blocks that left the window, even if `ok` is False
    afterwards, because these blocks are never read again. See `slide`.

    Args:
      tables: the state; may be donated.
      num_tokens: i32[S], the number of tokens to append to each slot; 0 leaves a slot unchanged.
      max_tokens: upper bound on `num_tokens` (static). The cost is proportional to
        S * ceil(max_tokens / C), plus one S x S comparison. It does not depend on M and P.

    Returns:
      `(tables, copies, ok)`. `ok`, bool[], is False if there are not enough free blocks for all
      slots together, if a slot would exceed its M * C tokens, or if an element of `num_tokens` is
      negative or above `max_tokens`. Then `copies` are empty, and the state is unchanged, except
      that blocks that left a window are freed.

    Raises:
      ValueError: `num_tokens` is not i32[S] or `max_tokens` is not a positive integer.

    Example:
      >>> from paged_jax.cache.blocks import fork
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, ok = reserve(tables, jnp.array([3, 0]), max_tokens=8)
      >>> tables, ok = fork(tables, jnp.array([-1, 0]))
      >>> tables, copies, ok = reserve(tables, jnp.array([1, 0]))
      >>> copies.source.tolist(), copies.target.tolist(), tables.lengths.tolist()
      ([0, 4], [1, 4], [4, 3])
    """
    reservation = begin_reserve(tables, num_tokens, max_tokens=max_tokens)
    return finish_reserve(reservation, reservation.is_possible)


def restore(
    tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int
) -> tuple[BlockTables, BlockCopies, jax.Array]:
    """Allocate blocks in empty slots for tokens that are copied into them, e.g. from the host.

    With a window, a slot gets blocks only for the tokens that its next token attends to. Without a
    window this is the same as `reserve`.

    Args:
      tables: the state; may be donated.
      num_tokens: i32[S], the number of tokens of each slot; 0 leaves a slot unchanged.
      max_tokens: upper bound on `num_tokens` (static).

    Returns:
      See `reserve`; `ok` is also False if a slot with `num_tokens` above 0 is not empty.

    Raises:
      ValueError: `num_tokens` is not i32[S] or `max_tokens` is not a positive integer.

    Example:
      >>> tables = BlockTables.create(8, num_slots=1, max_blocks_per_slot=8, block_size=4, window=6)
      >>> tables, _, ok = restore(tables, jnp.array([17]), max_tokens=32)
      >>> tables.block_tables.tolist(), tables.lengths.tolist()
      ([[8, 8, 0, 1, 2, 8, 8, 8]], [17])
    """
    reservation = begin_restore(tables, num_tokens, max_tokens=max_tokens)
    return finish_reserve(reservation, reservation.is_possible)


class Reservation(NamedTuple):
    """Result of `begin_reserve` or `begin_restore` for one group of layers.

    `reserve` changes nothing unless it is possible in all groups. So the caller first prepares a
    `Reservation` for every group, and then passes each of them to `finish_reserve`.

    Attributes:
      tables: the tables to return if the reservation is not applied. The blocks that left their
        windows are already freed in them.
      end: i32[S], the lengths if the reservation is applied.
      first_columns: i32[S], the `first_columns` of the tables if the reservation is applied.
      writes: decides which slots must copy their last block before they write to it, because
        other slots share the block.
      columns: i32[S, W], the columns of the tables that may change, see `plan_columns`.
      is_taken: bool[S, W], whether each of these columns gets a new block.
      is_possible: bool[], whether all slots of the group have enough blocks.
    """

    tables: BlockTables
    end: jax.Array
    first_columns: jax.Array | None
    writes: "SharedWrites"
    columns: jax.Array
    is_taken: jax.Array
    is_possible: jax.Array


def begin_reserve(
    tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int, function: str = "reserve"
) -> Reservation:
    """Compute the changes that `reserve` makes in a group of layers, and whether it is possible.

    See `reserve` for the arguments. `function` is the name that error messages begin with.
    """
    num_tokens = as_slot_values(function, "num_tokens", num_tokens, jnp.int32, tables)
    check_positive(function, max_tokens=max_tokens)
    if tables.first_columns is not None:
        tables = slide(tables, num_tokens > 0)
    capacity = tables.max_blocks_per_slot * tables.block_size
    max_tokens = min(max_tokens, capacity)

    start = tables.lengths
    end = start + jnp.clip(num_tokens, 0, max_tokens)
    is_in_bounds = (num_tokens >= 0) & (num_tokens <= max_tokens) & (end <= capacity)
    writes = plan_shared_writes(tables, end > start)
    columns_SW, is_taken_SW = plan_columns(tables, end, writes.is_copy, max_tokens)
    is_enough = jnp.sum(is_taken_SW, dtype=jnp.int32) <= tables.pool.num_free
    ok = jnp.all(is_in_bounds) & is_enough
    first_columns = tables.first_columns
    return Reservation(tables, end, first_columns, writes, columns_SW, is_taken_SW, ok)


def finish_reserve(
    reservation: Reservation, ok: jax.Array
) -> tuple[BlockTables, BlockCopies, jax.Array]:
    """Apply a reservation if `ok` is True, or change nothing.

    Args:
      reservation: the result of `begin_reserve`.
      ok: bool[], whether to apply it. The caller passes True only if the reservations of all groups
        are possible.

    Returns:
      See `reserve`.
    """
    tables, end, first_columns, writes, columns_SW, is_taken_SW, _ = reservation
    is_taken_SW &= ok
    is_copy = writes.is_copy & ok
    pool, taken_SW = block_pool.take(tables.pool, is_taken_SW)
    pool = writes.apply_to(pool, ok)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    # Write only the columns that get a new block. Replace all other columns by an index past the
    # end of the row, so that JAX drops their writes.
    columns_SW = jnp.where(is_taken_SW, columns_SW, tables.max_blocks_per_slot)
    block_tables = put_or_drop(tables.block_tables, (slots[:, None], columns_SW), taken_SW)
    copies = BlockCopies(
        source=jnp.where(is_copy, writes.block, tables.num_blocks),
        target=jnp.where(is_copy, taken_SW[:, 0], tables.num_blocks),
    )
    lengths = jnp.where(ok, end, tables.lengths)
    if first_columns is not None and tables.first_columns is not None:
        first_columns = jnp.where(ok, first_columns, tables.first_columns)
    after = replace(
        tables,
        pool=pool,
        block_tables=block_tables,
        lengths=lengths,
        first_columns=first_columns,
    )
    return after, copies, ok


def begin_restore(tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int) -> Reservation:
    """Check whether `restore` is possible in one group, and compute the changes it makes.

    See `restore` for the arguments.
    """
    num_tokens = as_slot_values("restore", "num_tokens", num_tokens, jnp.int32, tables)
    check_positive("restore", max_tokens=max_tokens)
    is_refused = (num_tokens > max_tokens) | ((num_tokens > 0) & (tables.lengths > 0))
    num_tokens = jnp.where(is_refused, -1, num_tokens)
    if (first_columns := tables.first_columns) is None:
        return begin_reserve(tables, num_tokens, max_tokens=max_tokens, function="restore")
    # A restored slot gets blocks only for the tokens that it keeps. So pretend that the slot has
    # already stored all earlier tokens and freed their blocks, and append the rest.
    is_new = num_tokens > 0
    cursors = tables.retention.cursor(num_tokens, tables.block_size)
    num_skipped = jnp.where(is_new, cursors * tables.block_size, 0)
    shifted_tables = replace(
        tables,
        first_columns=jnp.where(is_new, cursors, first_columns),
        lengths=jnp.where(is_new, num_skipped, tables.lengths),
    )
    max_restored = min(max_tokens, tables.retention.max_restored(tables.block_size))
    reservation = begin_reserve(
        shifted_tables, num_tokens - num_skipped, max_tokens=max_restored, function="restore"
    )
    before = replace(reservation.tables, lengths=tables.lengths, first_columns=first_columns)
    return reservation._replace(tables=before)


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedWrites:
    """Decision for each slot whether it writes to its last block in place or to a copy.

    The decision is only about last blocks that are partly filled, because a new block needs no
    copy. All fields have shape [S].

    Attributes:
      in_place: i32, the last block if the slot writes to this block itself; otherwise P.
      block: i32, the last block if the slot gets tokens and other slots share it; otherwise P.
      is_copy: bool, whether the slot must write to a copy of `block`.
      is_last: bool, whether the slot is the last writer of `block`.
      refs_left: i32, the number of references to `block` after these writes.
    """

    in_place: jax.Array
    block: jax.Array
    is_copy: jax.Array
    is_last: jax.Array
    refs_left: jax.Array

    def apply_to(self, pool: BlockPool, ok: jax.Array) -> BlockPool:
        """Update the reference counts and the prefix cache of a pool for these writes.

        Copied blocks lose references, and blocks that are written in place are removed from the
        prefix cache. If `ok` bool[] is False, the pool is returned unchanged.
        """
        shared = jnp.where(self.is_last & ok, self.block, pool.num_blocks)
        ref_counts = put_or_drop(pool.ref_counts, shared, self.refs_left)
        pool = replace(pool, ref_counts=ref_counts)
        return block_pool.forget(pool, jnp.where(ok, self.in_place, pool.num_blocks))


def plan_shared_writes(tables: BlockTables, is_writer: jax.Array) -> SharedWrites:
    """Decide for each slot in `is_writer` bool[S] whether it must copy its last block."""
    num_blocks, slots = tables.num_blocks, jnp.arange(tables.num_slots, dtype=jnp.int32)
    # `last[slot]` is the block that gets the slot's next token. If that token begins a new block,
    # the entry is P (no block), and its reference count is read as 0.
    columns = tables.lengths // tables.block_size
    last = take_or_fill(tables.block_tables, (slots, columns), fill_value=num_blocks)
    refs = take_or_fill(tables.pool.ref_counts, last)
    is_shared = is_writer & (refs > 1)
    block = jnp.where(is_shared, last, num_blocks)

    # To find slots that write to the same block, compare all pairs of slots. A scatter would be
    # slower, because slots with the same block would contend for its element. The reductions are
    # over axis 0, because XLA vectorises such reductions on CPUs.
    is_same_SS = block[:, None] == block[None, :]
    num_writers = jnp.sum(is_same_SS, axis=0, dtype=jnp.int32)
    last_writer = jnp.max(jnp.where(is_same_SS, slots[:, None], -1), axis=0)
    is_last = is_shared & (last_writer == slots)
    # If all slots that share a block write to it, the last of these slots keeps the block. If it
    # copied the block too, the block would have no references and yet not be in the free queue.
    is_kept = num_writers == refs
    is_copy = is_shared & ~(is_last & is_kept)
    return SharedWrites(
        in_place=jnp.where(is_writer & ~is_copy, last, num_blocks),
        block=block,
        is_copy=is_copy,
        is_last=is_last,
        refs_left=jnp.where(is_kept, 1, refs - num_writers),
    )


def plan_columns(
    tables: BlockTables, end: jax.Array, is_copy: jax.Array, max_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """List the table columns that each slot may write to, and which of them get a new block.

    The first of the W columns is the column of the next token. It gets a new block if this token
    begins a block, or if the slot must copy the existing block. All further columns that are needed
    for `end` tokens get new blocks.

    Returns:
      `(columns, is_taken)`: i32[S, W], the columns, and bool[S, W], whether each gets a new block.
    """
    # Maximum number (W) of block-table columns that `max_tokens` new tokens of a slot can occupy.
    # It is 1 for a single token.
    width = 1 + num_blocks_needed(max_tokens - 1, tables.block_size)
    column_offsets = jnp.arange(min(width, tables.max_blocks_per_slot), dtype=jnp.int32)
    columns_SW = (tables.lengths // tables.block_size)[:, None] + column_offsets[None, :]
    is_written_SW = columns_SW < num_blocks_needed(end, tables.block_size)[:, None]
    is_begun_SW = columns_SW * tables.block_size < tables.lengths[:, None]
    return columns_SW, is_written_SW & (is_copy[:, None] | ~is_begun_SW)


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReservePlan:
    """Blocks that `plan` chose for the next tokens of the slots, but did not allocate.

    Attributes:
      num_tokens: i32[], the number of new tokens per slot. Each slot has blocks for this number,
        or for its limit if that is lower.
      block_tables: i32[S, M], the block tables with the planned blocks filled in.
      copies: block copies that must be made before K and V are written.
      columns: i32[S, W], the columns of the tables that may change.
      blocks: i32[S, W], the planned blocks of these columns; P for unchanged columns.
      writes: decides which slots must copy their last block before they write to it, because
        other slots share the block.
    """

    num_tokens: jax.Array
    block_tables: jax.Array
    copies: BlockCopies
    columns: jax.Array
    blocks: jax.Array
    writes: SharedWrites


def plan(
    tables: BlockTables, limits: jax.Array, most: jax.Array, *, max_tokens: int
) -> ReservePlan:
    """Choose blocks for as many new tokens per slot as the free blocks allow.

    The number of tokens is the same for all slots, except that no slot exceeds its limit. It is the
    largest number up to `most` for which `reserve` would succeed. Only `commit` allocates the
    blocks. So planned blocks that are not used in the end do not lose their cached content.

    Args:
      tables: the state. With a window, call `slide` before.
      limits: i32[S], the maximum number of new tokens of each slot, at least 0; 0 leaves a slot
        unchanged.
      most: i32[], a maximum number of tokens per slot that applies to all slots.
      max_tokens: N, upper bound on `most` (static). The cost is proportional to S * N.

    Raises:
      ValueError: `limits` is not i32[S] or `max_tokens` is not a positive integer.

    Example:
      >>> tables = BlockTables.create(3, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> planned = plan(tables, jnp.array([8, 8]), 8, max_tokens=8)  # 5 each would need 4 blocks
      >>> int(planned.num_tokens), planned.block_tables.tolist()
      (4, [[0, 3], [1, 3]])
      >>> tables = commit(tables, planned, jnp.array([2, 0]))
      >>> tables.block_tables.tolist(), int(tables.pool.num_free)
      ([[0, 3], [3, 3]], 2)
    """
    limits = as_slot_values("plan", "limits", limits, jnp.int32, tables)
    check_positive("plan", max_tokens=max_tokens)
    max_tokens = min(max_tokens, tables.max_blocks_per_slot * tables.block_size)
    writes = plan_shared_writes(tables, limits > 0)
    num_possible = _num_possible(tables, limits, writes, max_tokens)
    num_tokens = jnp.minimum(num_possible, jnp.asarray(most, jnp.int32))
    ok = num_tokens > 0

    end = tables.lengths + jnp.minimum(limits, num_tokens)
    columns_SW, is_taken_SW = plan_columns(tables, end, writes.is_copy & ok, max_tokens)
    blocks_SW = block_pool.peek(tables.pool, is_taken_SW)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    columns_SW = jnp.where(is_taken_SW, columns_SW, tables.max_blocks_per_slot)
    is_copy = writes.is_copy & ok
    return ReservePlan(
        num_tokens=num_tokens,
        block_tables=put_or_drop(tables.block_tables, (slots[:, None], columns_SW), blocks_SW),
        copies=BlockCopies(
            source=jnp.where(is_copy, writes.block, tables.num_blocks),
            target=jnp.where(is_copy, blocks_SW[:, 0], tables.num_blocks),
        ),
        columns=columns_SW,
        blocks=blocks_SW,
        writes=writes,
    )


def num_possible(tables: BlockTables, limits: jax.Array, *, max_tokens: int) -> jax.Array:
    """Return the maximum number of new tokens per slot that the free blocks allow, i32[].

    This is the `num_tokens` of the result of `plan` with ``most=max_tokens``. See `plan` for the
    arguments.
    """
    max_tokens = min(max_tokens, tables.max_blocks_per_slot * tables.block_size)
    return _num_possible(tables, limits, plan_shared_writes(tables, limits > 0), max_tokens)


def commit(tables: BlockTables, planned: ReservePlan, lengths: jax.Array) -> BlockTables:
    """Allocate the planned blocks that were used, and set the lengths; other blocks stay free.

    Args:
      tables: the state that the plan was made for; may be donated.
      planned: the plan. If its `num_tokens` is above 0, each slot with a limit above 0 must have
        received at least one token.
      lengths: i32[S], the new number of tokens in each slot. It must not exceed the old number by
        more than the plan allows.

    Raises:
      ValueError: `lengths` is not i32[S].
    """
    lengths = as_slot_values("commit", "lengths", lengths, jnp.int32, tables)
    num_held = num_blocks_needed(lengths, tables.block_size)
    is_used_SW = (planned.blocks < tables.num_blocks) & (planned.columns < num_held[:, None])
    pool = block_pool.take_some(tables.pool, planned.blocks, is_used_SW)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    columns_SW = jnp.where(is_used_SW, planned.columns, tables.max_blocks_per_slot)
    return replace(
        tables,
        pool=planned.writes.apply_to(pool, planned.num_tokens > 0),
        block_tables=put_or_drop(tables.block_tables, (slots[:, None], columns_SW), planned.blocks),
        lengths=lengths,
    )


def _num_possible(
    tables: BlockTables, limits: jax.Array, writes: SharedWrites, max_tokens: int
) -> jax.Array:
    """Return the largest number of new tokens per slot for which there are enough blocks, i32[].

    It is at most `max_tokens`. A slot with a lower limit in `limits` i32[S] gets only that number.
    """
    tokens_N1 = jnp.arange(1, max_tokens + 1, dtype=jnp.int32)[:, None]
    ends_NS = tables.lengths[None, :] + jnp.minimum(tokens_N1, limits[None, :])
    blocks_NS = num_blocks_needed(ends_NS, tables.block_size)
    num_held = num_blocks_needed(tables.lengths, tables.block_size)
    new_NS = blocks_NS - num_held[None, :] + writes.is_copy.astype(jnp.int32)[None, :]
    num_taken = jnp.sum(new_NS, axis=1, dtype=jnp.int32)
    is_in_bounds = jnp.all(blocks_NS <= tables.max_blocks_per_slot, axis=1)
    # If n tokens per slot are possible, all smaller numbers are possible too. So the largest
    # possible number equals the count of possible numbers.
    return jnp.sum(is_in_bounds & (num_taken <= tables.pool.num_free), dtype=jnp.int32)
