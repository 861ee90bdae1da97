"""Room for more tokens, with copies on write where a block is shared."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.blocks.tables import BlockTables, as_slot_values
from paged_jax.cache.blocks.window import slide
from paged_jax.cache.sizes import first_kept_column, num_blocks_needed
from paged_jax.checks import check_positive
from paged_jax.opaque import put_or_drop, take_or_fill
from paged_jax.short_repr import short_repr


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockCopies:
    """The copies on write that the caller of `reserve` must make before it writes K and V.

    Attributes:
      source: i32[S], the block to copy for each slot, or P where there is nothing to copy.
      target: i32[S], the block to copy it to, or P. Targets are distinct, and none is a source.
    """

    source: jax.Array
    target: jax.Array


def reserve(
    tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int = 1
) -> tuple[BlockTables, BlockCopies, jax.Array]:
    """Make room for more tokens in every slot and advance the lengths by as much.

    On an empty slot this allocates a prompt, on a running one it appends. A slot about to write
    into a partly filled block that others hold too gets a block of its own in its place, and the
    copy is reported. If all holders of such a block write, the last of them keeps it. What a slot
    writes into is cached no longer (it can be, if the slot was truncated).

    With a window, slots that grow first give back what has left it, even if `ok` is then False:
    such blocks are never read again. See `slide`.

    Args:
      tables: the state; may be donated.
      num_tokens: i32[S], how many tokens to add to each slot; 0 leaves a slot alone.
      max_tokens: upper bound on `num_tokens` (static). Work is in proportion to
          S * ceil(max_tokens / C), whatever M and P are, beside one S x S comparison.

    Returns:
      `(tables, copies, ok)`. `ok` is bool[]. It is False, the state unchanged and `copies`
      empty if the free blocks do not suffice for all slots together, if any slot would exceed
      its M * C tokens, or if any `num_tokens` is negative or above `max_tokens`.

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
    """As `reserve`, of empty slots whose tokens come from elsewhere: for what is read again only.

    With a window a slot gets blocks for the tokens that its next one attends to, and none for
    those before them. Else this is `reserve`. The way of a sequence back from host memory.

    Args:
      tables: the state; may be donated.
      num_tokens: i32[S], how many tokens each slot shall have; 0 leaves a slot alone.
      max_tokens: upper bound on `num_tokens` (static).

    Returns:
      See `reserve`; `ok` is also False if a slot that shall have tokens has some.

    Raises:
      ValueError: `num_tokens` is not i32[S] or `max_tokens` is not a positive integer.

    Example:
      >>> tables = BlockTables.create(8, num_slots=1, max_blocks_per_slot=8, block_size=4, window=6)
      >>> tables, _, ok = restore(tables, jnp.array([17]), max_tokens=32)
      >>> tables.block_tables.tolist(), tables.lengths.tolist()
      ([[8, 8, 0, 1, 2, 8, 8, 8]], [17])
    """
    reservation = begin_restore(tables, num_tokens, max_tokens=max_tokens)
    return finish_restore(tables, reservation, reservation.is_possible)


class Reservation(NamedTuple):
    """What `reserve` will do if it is possible, here and in other groups: nothing is taken yet."""

    tables: BlockTables  # without what has left the windows
    end: jax.Array  # i32[S], the lengths afterwards
    writes: "SharedWrites"
    columns: jax.Array  # i32[S, W], see `plan_columns`
    is_taken: jax.Array  # bool[S, W]
    is_possible: jax.Array  # bool[]


def begin_reserve(
    tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int, function: str = "reserve"
) -> Reservation:
    """Decide whether `reserve` is possible, and how."""
    num_tokens = as_slot_values(function, "num_tokens", num_tokens, jnp.int32, tables)
    check_positive(function, max_tokens=max_tokens)
    if tables.window is not None:
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
    return Reservation(tables, end, writes, columns_SW, is_taken_SW, ok)


def finish_reserve(
    reservation: Reservation, ok: jax.Array
) -> tuple[BlockTables, BlockCopies, jax.Array]:
    """Do it where `ok` bool[], which implies that it is possible; return what `reserve` does."""
    tables, end, writes, columns_SW, is_taken_SW, _ = reservation
    # From here on `ok` masks every update.
    is_taken_SW &= ok
    is_copy = writes.is_copy & ok
    pool, taken_SW = block_pool.take(tables.pool, is_taken_SW)
    pool = writes.note(pool, ok)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    # Only taken entries change; the others are sent past the end of their row and dropped.
    columns_SW = jnp.where(is_taken_SW, columns_SW, tables.max_blocks_per_slot)
    block_tables = put_or_drop(tables.block_tables, (slots[:, None], columns_SW), taken_SW)
    copies = BlockCopies(
        source=jnp.where(is_copy, writes.block, tables.num_blocks),
        target=jnp.where(is_copy, taken_SW[:, 0], tables.num_blocks),
    )
    lengths = jnp.where(ok, end, tables.lengths)
    return replace(tables, pool=pool, block_tables=block_tables, lengths=lengths), copies, ok


def begin_restore(tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int) -> Reservation:
    """Decide whether `restore` is possible, and how."""
    num_tokens = as_slot_values("restore", "num_tokens", num_tokens, jnp.int32, tables)
    check_positive("restore", max_tokens=max_tokens)
    is_refused = (num_tokens > max_tokens) | ((num_tokens > 0) & (tables.lengths > 0))
    num_tokens = jnp.where(is_refused, -1, num_tokens)
    if (state := tables.window_state) is None:
        return begin_reserve(tables, num_tokens, max_tokens=max_tokens, function="restore")
    # A slot that has given back all blocks before its window, and now appends what is in it.
    window, first_columns = state
    is_new = num_tokens > 0
    kept = first_kept_column(num_tokens, window, tables.block_size)
    first_columns = jnp.where(is_new, kept, first_columns)
    num_left = jnp.where(is_new, kept * tables.block_size, 0)
    tables = replace(
        tables, first_columns=first_columns, lengths=jnp.where(is_new, num_left, tables.lengths)
    )
    # A window, which begins within a block, and what follows the first token of the last block.
    most = min(max_tokens, window + 2 * tables.block_size)
    return begin_reserve(tables, num_tokens - num_left, max_tokens=most, function="restore")


def finish_restore(
    before: BlockTables, reservation: Reservation, ok: jax.Array
) -> tuple[BlockTables, BlockCopies, jax.Array]:
    """Do it where `ok` bool[]; `before` are the tables that were given."""
    tables, copies, ok = finish_reserve(reservation, ok)
    if tables.first_columns is None or before.first_columns is None:
        return tables, copies, ok
    lengths = jnp.where(ok, tables.lengths, before.lengths)
    first_columns = jnp.where(ok, tables.first_columns, before.first_columns)
    return replace(tables, lengths=lengths, first_columns=first_columns), copies, ok


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedWrites:
    """What happens to the partly filled last blocks that slots write into.

    All fields are [S]: the last block of the slot if the slot writes into this very block, else P;
    the last block if others hold it too, else P; whether the slot must write into a copy of it,
    whether it is the last of the slots that write into this block, and how many references the
    block keeps.
    """

    in_place: jax.Array
    block: jax.Array
    is_copy: jax.Array
    is_last: jax.Array
    refs_left: jax.Array

    def note(self, pool: BlockPool, ok: jax.Array) -> BlockPool:
        """The pool after these writes, where `ok` bool[]; of copies, what they leave behind."""
        shared = jnp.where(self.is_last & ok, self.block, pool.num_blocks)
        ref_counts = put_or_drop(pool.ref_counts, shared, self.refs_left)
        pool = replace(pool, ref_counts=ref_counts)
        return block_pool.forget(pool, jnp.where(ok, self.in_place, pool.num_blocks))


def plan_shared_writes(tables: BlockTables, is_writer: jax.Array) -> SharedWrites:
    """Decide for each slot of `is_writer` bool[S] whether it must copy its last block."""
    num_blocks, slots = tables.num_blocks, jnp.arange(tables.num_slots, dtype=jnp.int32)
    # Where the next token goes: a block that has begun, or P, with no references, if it begins one.
    columns = tables.lengths // tables.block_size
    last = take_or_fill(tables.block_tables, (slots, columns), fill_value=num_blocks)
    refs = take_or_fill(tables.pool.ref_counts, last)
    is_shared = is_writer & (refs > 1)
    block = jnp.where(is_shared, last, num_blocks)

    # Comparing all pairs of slots ranks the writers of a block without their contending for it.
    # Down the columns, because XLA turns that into vector instructions on a CPU.
    is_same_SS = block[:, None] == block[None, :]
    num_writers = jnp.sum(is_same_SS, axis=0, dtype=jnp.int32)
    last_writer = jnp.max(jnp.where(is_same_SS, slots[:, None], -1), axis=0)
    is_last = is_shared & (last_writer == slots)
    # If no other slot is left to hold the block, the last writer keeps it: no leak, one copy less.
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

    The first of the W columns is that of the next token. It gets a new block if the token is the
    first of its block, or if the slot must copy the block that is there; every further column up
    to length `end` gets one. Returns i32[S, W] and bool[S, W].
    """
    # W: only the first column can lie in a block that has begun, so max_tokens = 1 gives W = 1.
    width = 1 + num_blocks_needed(max_tokens - 1, tables.block_size)
    ahead = jnp.arange(min(width, tables.max_blocks_per_slot), dtype=jnp.int32)
    columns_SW = (tables.lengths // tables.block_size)[:, None] + ahead[None, :]
    is_written_SW = columns_SW < num_blocks_needed(end, tables.block_size)[:, None]
    is_begun_SW = columns_SW * tables.block_size < tables.lengths[:, None]
    return columns_SW, is_written_SW & (is_copy[:, None] | ~is_begun_SW)
