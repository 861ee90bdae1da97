# pyright: strict, reportUnknownMemberType=false
"""Block tables (one row of block ids per slot), and operations that share and free blocks.

With a sliding window, a slot frees the blocks that no later token attends to. The token at position
n attends to ``n - window + 1 .. n``. A slot keeps all blocks that the first token of its last block
attends to, see `first_kept_column`. Example: C = 4, window 6, 17 tokens in the slot. The first
token of the last block, at position 16, attends to 11 to 16. So columns 0 and 1 are freed::

    tokens  0..3   4..7   8..11   12..15   16           17 is next
    row       P      P      7        2      0           first_columns 2

Blocks are freed *lazily*: a slot frees the blocks that left its window only when it is about to
grow. Until then it keeps all blocks to which the last program appended tokens. So these blocks can
still be published, and the tokens can still be truncated if they were rejected draft tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.drawing import BlockMap, BlockRow, draw_html, draw_text
from paged_jax.cache.retention import AllTokens, Retention, retention
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.dims import bind
from paged_jax.formatting import cut, integers, shortened
from paged_jax.kernels.opaque_call import put_or_drop, take_or_fill, typed_jit, without_index_checks

# Sizes are below this bound, so that the sum of two block ids or two token positions fits in int32.
_MAX_SIZE = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTables:
    """Block tables of all slots, and the pool of their blocks.

    Attributes:
      pool: the `BlockPool`.
      block_tables: i32[S, M], the block ids of each slot in the order of its tokens, padded with P
        (the number of blocks).
      lengths: i32[S], the number of tokens in each slot; 0 if it is empty.
      block_size: C, the number of tokens in a block (static).
      retention: the rule for the tokens that slots keep (static). When a slot grows, it frees the
        blocks that it does not keep. Their columns become P.
      first_columns: i32[S], the cursor of each slot, at most `Retention.cursor`. All columns before
        it that the slot does not need are freed. None if slots free no blocks while they grow.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(
      ...     num_blocks=6, num_slots=3, max_blocks_per_slot=4, block_size=4
      ... )
      >>> tables, copies, ok = reserve(tables, jnp.array([6, 0, 1]), max_tokens=8)
      >>> bool(ok), tables.block_tables.tolist()
      (True, [[0, 1, 6, 6], [6, 6, 6, 6], [2, 6, 6, 6]])
    """

    pool: BlockPool
    block_tables: jax.Array
    lengths: jax.Array
    block_size: int = field(metadata={"static": True})
    retention: Retention = field(default=AllTokens(), metadata={"static": True})
    first_columns: jax.Array | None = None

    def __repr__(self) -> str:
        description = describe_use(self)
        return shortened(self) if description is None else cut(f"BlockTables({description})")

    def __str__(self) -> str:
        """Draw the blocks of each slot and the pool."""
        blocks = _read_map(self)
        return repr(self) if blocks is None else draw_text(blocks)

    def _repr_html_(self) -> str | None:
        blocks = _read_map(self)
        return None if blocks is None else draw_html(blocks)

    @classmethod
    @names_arguments
    def create(
        cls,
        num_blocks: int,
        num_slots: int,
        max_blocks_per_slot: int,
        block_size: int,
        window: int | Retention | None = None,
    ) -> "BlockTables":
        """Return `num_slots` empty slots over a pool of `num_blocks` free blocks.

        Args:
          num_blocks: P, number of blocks.
          num_slots: S, number of slots.
          max_blocks_per_slot: M, maximum number of blocks in a slot.
          block_size: C, number of tokens in a block.
          window: number of tokens that a query attends to, including its own position; None for
            all tokens, or another `Retention`.

        Raises:
          ValueError: a size is not a positive integer, or so large that block ids or token
              positions do not fit in int32.
        """
        check_positive(
            "BlockTables.create",
            num_blocks=num_blocks,
            num_slots=num_slots,
            max_blocks_per_slot=max_blocks_per_slot,
            block_size=block_size,
            **({"window": window} if isinstance(window, int) else {}),
        )
        _check_below("num_blocks", num_blocks, "Use fewer, larger blocks.")
        _check_below(
            "max_blocks_per_slot * block_size",
            max_blocks_per_slot * block_size,
            "Use shorter block tables.",
        )
        rule = retention(window)
        return cls(
            pool=BlockPool.create(num_blocks, block_size),
            block_tables=jnp.full((num_slots, max_blocks_per_slot), num_blocks, jnp.int32),
            lengths=jnp.zeros(num_slots, jnp.int32),
            block_size=block_size,
            retention=rule,
            first_columns=jnp.zeros(num_slots, jnp.int32) if rule.frees else None,
        )

    @property
    def num_slots(self) -> int:
        """Number of slots (S)."""
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_slot(self) -> int:
        """Maximum number of blocks in a slot (M)."""
        return self.block_tables.shape[1]

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool (P). In block tables, P means "no block"."""
        return self.pool.num_blocks


def as_slot_values(
    function: str, name: str, values: ArrayLike, dtype: DTypeLike, tables: BlockTables
) -> jax.Array:
    """Convert an argument with one value per slot to an array [S] of dtype `dtype`.

    Raises ValueError, with `function` and `name` in the message, if its shape or dtype is wrong.
    """
    values = jnp.asarray(values)
    bind(function, block_tables=(tables.block_tables, "SM"), **{name: (values, "S")})
    return check_dtype(function, name, values, dtype)


def check_dtype(function: str, name: str, values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return `values` unchanged; raise ValueError unless they have dtype `dtype`."""
    if values.dtype != dtype:
        raise ValueError(
            f"{function}: {name} must be {jnp.dtype(dtype).name}, got {values.dtype}. Cast it."
        )
    return values


def _check_below(name: str, size: int, advice: str) -> None:
    if size >= _MAX_SIZE:
        raise ValueError(
            f"BlockTables.create: {name} must be below {_MAX_SIZE}, got {size}. {advice}"
        )


def _read_map(tables: BlockTables) -> BlockMap | None:
    """Return a `BlockMap` of the tables; None if the arrays are traced and cannot be read."""
    arrays = tables.block_tables, tables.lengths, tables.pool.ref_counts, tables.pool.is_cached
    values = [integers(array, ndim) for array, ndim in zip(arrays, (2, 1, 1, 1), strict=True)]
    if any(value is None for value in values):
        return None
    block_tables, lengths, ref_counts, is_cached = map(np.asarray, values)
    rows = [
        # Leave out columns without a block, which hold P.
        BlockRow(str(slot), int(length), row[row < len(ref_counts)].tolist())
        for slot, (length, row) in enumerate(zip(lengths, block_tables, strict=True))
        if length
    ]
    title = f"BlockTables({describe_use(tables)})"
    return BlockMap(title, ref_counts, is_cached, rows)


def describe_use(tables: BlockTables) -> str | None:
    """Return a text for `repr`: the number of used blocks, and the lengths of the slots.

    Returns None if the arrays cannot be read or have extra dimensions, for example inside
    `jax.vmap`.
    """
    num_free = integers(tables.pool.num_free, 0)
    lengths = integers(tables.lengths, 1)
    shape = getattr(tables.pool.ref_counts, "shape", ())
    if num_free is None or lengths is None or len(shape) != 1:
        return None
    window = f", window {tables.retention.label}" if tables.retention.frees else ""
    return (
        f"{shape[0] - int(num_free)} of {shape[0]} blocks of {tables.block_size} tokens in use"
        f"{window}, lengths {shortened(lengths.tolist())}"
    )


# Number of table entries that `_in_pieces` processes together. It is small, so that the entries are
# sorted fast, but larger than the number of blocks of most slots, so that one piece suffices.
_PIECE = 512

Update = Callable[[BlockTables, jax.Array, jax.Array], BlockTables]


def hold_slots(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Add a reference to each block of the slots for which `mask` bool[S] is True."""
    return _update_slots(_hold_piece, tables, mask)


def empty_slots(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Empty the slots for which `mask` bool[S] is True; the last block of a slot is freed first."""
    tables = _update_slots(_empty_piece, tables, mask)
    lengths = jnp.where(mask, 0, tables.lengths)
    if tables.first_columns is None:
        return replace(tables, lengths=lengths)
    first_columns = jnp.where(mask, 0, tables.first_columns)
    return replace(tables, lengths=lengths, first_columns=first_columns)


def _hold_piece(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> BlockTables:
    return replace(tables, pool=block_pool.hold(tables.pool, _entries(tables, rows, columns)))


def _empty_piece(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> BlockTables:
    entries = _entries(tables, rows, columns)
    # Skip entries that already hold P ("no block"). The result is the same, but the write now
    # depends on the read, so XLA orders it after the read and updates the table in place.
    columns = jnp.where(entries < tables.num_blocks, columns, tables.max_blocks_per_slot)
    return replace(
        tables,
        pool=block_pool.give_back(tables.pool, entries),
        block_tables=tables.block_tables.at[rows, columns].set(tables.num_blocks, mode="drop"),
    )


def _entries(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Return the block ids at `(rows, columns)` of the table; P for positions outside of it."""
    return tables.block_tables.at[rows, columns].get(mode="fill", fill_value=tables.num_blocks)


@partial(without_index_checks, static_argnums=(0,))
@partial(typed_jit, static_argnums=(0,))  # Without `jit`, each eager call compiles `update` again.
def _update_slots(update: Update, tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Call `update` (see `_in_pieces`) for all blocks of the slots in `mask` bool[S]."""
    num_held = jnp.where(mask, num_blocks_needed(tables.lengths, tables.block_size), 0)
    if tables.first_columns is None:
        return _in_pieces(update, tables, num_held)
    rule, size = tables.retention, tables.block_size
    cursors = jnp.where(mask, tables.first_columns, 0)

    def find_column(index: jax.Array, cursor: jax.Array) -> jax.Array:
        return rule.kept_column(index, cursor, size)

    return _in_pieces(
        update, tables, num_held - rule.num_freed(cursors, size), cursors, find_column
    )


@without_index_checks
@typed_jit
def _free_up_to(tables: BlockTables, before: jax.Array, after: jax.Array) -> BlockTables:
    """Free the blocks between an old and a new cursor of each slot, both i32[S]."""
    rule, size = tables.retention, tables.block_size
    starts, ends = rule.num_freed(before, size), rule.num_freed(after, size)

    def find_column(index: jax.Array, begin: jax.Array) -> jax.Array:
        return rule.freed_column(index + begin, size)

    return _in_pieces(_empty_piece, tables, jnp.maximum(ends - starts, 0), starts, find_column)


def _in_pieces(
    update: Update,
    tables: BlockTables,
    counts: jax.Array,
    starts: jax.Array | None = None,
    find_column: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add,
) -> BlockTables:
    """Apply `update` to `counts` i32[S] table entries of each slot.

    Entry number i of slot s is in column ``find_column(i, starts[s])``; in column i if `starts` is
    None. `update(tables, rows, columns)` is called for `_PIECE` entries at a time and returns new
    tables. Slots are processed in order, and the last block of each slot is processed first. In the
    last call, `rows` and `columns` are padded with positions outside the table. So the cost is
    proportional to the number of blocks, not to the size of the table.
    """
    num_slots, width = tables.block_tables.shape
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    size = min(num_slots * width, _PIECE)

    def update_piece(piece: jax.Array, tables: BlockTables) -> BlockTables:
        index = piece * size + jnp.arange(size, dtype=jnp.int32)
        rows = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        columns = ends.at[rows].get(mode="clip") - 1 - index
        if starts is not None:
            columns = find_column(columns, starts.at[rows].get(mode="clip"))
        return update(tables, rows, jnp.where(rows < num_slots, columns, width))

    num_pieces = (ends[-1] + size - 1) // size
    return cast(BlockTables, lax.fori_loop(jnp.int32(0), num_pieces, update_piece, tables))


def slide(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Free the blocks that have left the windows of the slots for which `mask` is True.

    Freed blocks stay cached until they are allocated again. Without a window nothing changes.
    `reserve` calls this function for slots that grow. `plan` does not call it, because `plan` does
    not change the tables; call it before `plan`. The cost is proportional to the number of freed
    blocks.

    Args:
      tables: the state; may be donated.
      mask: bool[S], whether each slot is about to grow.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(8, num_slots=1, max_blocks_per_slot=8, block_size=4, window=6)
      >>> tables, _, _ = reserve(tables, jnp.array([17]), max_tokens=32)
      >>> tables = slide(tables, jnp.array([True]))
      >>> tables.block_tables.tolist(), tables.first_columns.tolist()
      ([[8, 8, 2, 3, 4, 8, 8, 8]], [2])
    """
    if (cursors := tables.first_columns) is None:
        return tables
    ends = jnp.where(mask, tables.retention.cursor(tables.lengths, tables.block_size), 0)
    after = _free_up_to(tables, cursors, ends)
    return replace(after, first_columns=jnp.maximum(cursors, ends))


def shortest_lengths(tables: BlockTables) -> jax.Array | int:
    """Return the smallest length to which each slot can be truncated, i32[S].

    It is 0 without a window. In a shorter slot, the next token would attend to freed blocks.
    """
    if (cursors := tables.first_columns) is None:
        return 0
    min_lengths = tables.retention.shortest_length(cursors, tables.block_size)
    return jnp.where(cursors > 0, min_lengths, 0)


def fork(tables: BlockTables, parents: jax.Array) -> tuple[BlockTables, jax.Array]:
    """Make empty slots copies of other slots by sharing all their blocks; no data is copied.

    The cost is a pass over the tables and an update of each block that becomes shared.

    Args:
      tables: the state; may be donated.
      parents: i32[S], the parent of each slot that becomes a copy; -1 leaves a slot unchanged.

    Returns:
      `(tables, ok)`. `ok`, bool[], is False if a child is not empty, or if a parent does not exist,
      is the child itself, or is a child in the same call. Then the state is unchanged. The copy of
      an empty slot is an empty slot.

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
    """Replace slots by copies of other slots in a single step, for example in beam search.

    Slot s becomes a copy of the old content of slot `parents[s]`, and its own old content is
    released. Blocks are shared, not copied, so this never runs out of blocks. The cost is
    proportional to the number of blocks of the slots that change, plus a pass over the tables.

    Args:
      tables: the state; may be donated.
      parents: i32[S], the parent of each slot; -1 or its own index leaves a slot unchanged. A slot
          may be the parent of several slots, and may have a parent itself.

    Returns:
      `(tables, ok)`. `ok`, bool[], is False and the state unchanged if a parent does not exist.

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

    # Add the new references first. Otherwise, a block that moves between slots would become free.
    after = hold_slots(_follow(tables, parents), is_changed)
    before = empty_slots(replace(tables, pool=after.pool), is_changed)
    return replace(after, pool=before.pool), ok


def release(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Empty slots and free the blocks that no other slot uses.

    Freed blocks that are cached join the tail of the free queue, slot by slot, beginning with the
    last block of a slot. So the beginning of a sequence is evicted last, because other sequences
    are more likely to share it. Uncached blocks join the head of the queue and are reused first. A
    block that several released slots share is queued with the last of these slots. Releasing an
    empty slot changes nothing. The cost is proportional to the number of blocks that the slots
    hold.

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
    """Shorten slots, and free the blocks past their new ends.

    Args:
      tables: the state; may be donated.
      lengths: i32[S], the number of tokens to keep in each slot; slots that are already shorter
          stay unchanged. At most `max_tokens` tokens of a slot are removed. With a window, a slot
          keeps enough tokens that its next token attends to no block that was freed already. The
          tokens appended by the last `reserve` or `commit` can always be removed.
      max_tokens: upper bound on the tokens removed from a slot (static). The cost is a sort of
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

    min_lengths = jnp.maximum(tables.lengths - max_tokens, shortest_lengths(tables))
    lengths = jnp.clip(lengths, min_lengths, tables.lengths)
    width = num_blocks_needed(max_tokens, tables.block_size)
    column_offsets = jnp.arange(width, dtype=jnp.int32)
    columns_SW = num_blocks_needed(lengths, tables.block_size)[:, None] + column_offsets[None, :]
    rows_S1 = jnp.arange(tables.num_slots, dtype=jnp.int32)[:, None]
    # For columns past the end of the row or of the slot, the lookup returns P (no block).
    cut_SW = take_or_fill(tables.block_tables, (rows_S1, columns_SW), fill_value=tables.num_blocks)
    return replace(
        tables,
        pool=block_pool.give_back(tables.pool, cut_SW[:, ::-1].reshape(-1)),
        block_tables=put_or_drop(tables.block_tables, (rows_S1, columns_SW), tables.num_blocks),
        lengths=lengths,
    )


def _follow(tables: BlockTables, parents: jax.Array) -> BlockTables:
    """Give each slot the table row and the length of its parent in `parents` i32[S].

    Reference counts are not updated.
    """
    after = replace(
        tables, block_tables=tables.block_tables[parents], lengths=tables.lengths[parents]
    )
    if tables.first_columns is None:
        return after
    return replace(after, first_columns=tables.first_columns[parents])
