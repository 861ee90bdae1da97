"""Who holds which block of KV memory: reserve, share, copy on write and release, as pure functions.

The pool is P blocks of C tokens each. A slot is one running sequence, a row of the block table that
names, in order, the blocks in which its tokens lie. Here C = 4, P = 6, and slot 1 was forked from
slot 0, so that the two share their blocks until one of them writes:

    lengths   block_tables              ref_counts  [0 2 0 2 0 0]
       6      [ 3  1  P  P ]            free blocks  4 0 2 5      (4 is taken first)
       6      [ 3  1  P  P ]
       0      [ P  P  P  P ]            P, one past the last block, stands for "no block": a scatter
                                        with mode="drop" ignores it

A full block can be *cached*: `publish` notes the digest and the tokens by which `attach` finds it
for another slot that begins alike. It stays cached when nobody holds it any more, until it is
taken again; blocks that are not cached are taken first. See `paged_jax.cache.block_pool`.

Every operation returns new state and serves all slots at once, with cumulative sums and ranks in
place of loops; the outcome is that of serving the slots one by one in the order of their indices.
What is long for few slots and short for most is done in pieces, so that it costs what is held.
Where an operation cannot be done for every slot it does nothing and answers `ok=False`. That is
decided *before* the updates, which are then masked out: selecting between an old and a new state
afterwards would keep both alive, and donated buffers could not be updated in place.

Nothing here knows about K and V: `reserve` reports which blocks the caller must copy (see
`paged_jax.cache`). Dimension letters are those of `paged_jax.dims`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import BlockPool, require
from paged_jax.checks import check_positive
from paged_jax.dims import bind

# Sums of two block ids or of two token positions must fit in int32.
_MAX_SIZE = 2**30

# Table entries that are shared or released at once: what most slots hold, and quick to sort.
_PIECE = 512


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTables:
    """The blocks of every slot, and the pool they come from.

    Attributes:
      pool: the `BlockPool`.
      block_tables: i32[S, M], the blocks of each slot in the order of its tokens, then P.
      lengths: i32[S], the number of tokens in each slot; 0 if it is empty.
      block_size: C, the number of tokens in a block (static).

    Example:
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

    @classmethod
    def create(
        cls, num_blocks: int, num_slots: int, max_blocks_per_slot: int, block_size: int
    ) -> "BlockTables":
        """Return `num_slots` empty slots over a pool of `num_blocks` free blocks.

        Raises:
          ValueError: a size is not a positive integer, or so large that block ids or token
              positions would not fit in int32.
        """
        check_positive(
            "BlockTables.create",
            num_blocks=num_blocks,
            num_slots=num_slots,
            max_blocks_per_slot=max_blocks_per_slot,
            block_size=block_size,
        )
        _check_below("num_blocks", num_blocks, "Use fewer, larger blocks.")
        _check_below(
            "max_blocks_per_slot * block_size",
            max_blocks_per_slot * block_size,
            "Use shorter block tables.",
        )
        return cls(
            pool=BlockPool.create(num_blocks, block_size),
            block_tables=jnp.full((num_slots, max_blocks_per_slot), num_blocks, jnp.int32),
            lengths=jnp.zeros(num_slots, jnp.int32),
            block_size=block_size,
        )

    @property
    def num_slots(self) -> int:
        """S, the number of slots."""
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_slot(self) -> int:
        """M, the number of blocks a slot can hold."""
        return self.block_tables.shape[1]

    @property
    def num_blocks(self) -> int:
        """P, the number of blocks in the pool; also the entry that stands for "no block"."""
        return self.pool.num_blocks


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


def num_blocks_needed(num_tokens, block_size: int):
    """Return how many blocks `num_tokens` tokens fill or begin; integers or arrays of them.

    Example:
      >>> [num_blocks_needed(n, 16) for n in (0, 1, 16, 17)]
      [0, 1, 1, 2]
    """
    return (num_tokens + block_size - 1) // block_size


def reserve(
    tables: BlockTables, num_tokens: jax.Array, *, max_tokens: int = 1
) -> tuple[BlockTables, BlockCopies, jax.Array]:
    """Make room for more tokens in every slot and advance the lengths by as much.

    On an empty slot this allocates a prompt, on a running one it appends. A slot about to write
    into a partly filled block that others hold too gets a block of its own in its place, and the
    copy is reported. If all holders of such a block write, the last of them keeps it. What a slot
    writes into is cached no longer (it can be, if the slot was truncated).

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
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, ok = reserve(tables, jnp.array([3, 0]), max_tokens=8)
      >>> tables, ok = fork(tables, jnp.array([-1, 0]))
      >>> tables, copies, ok = reserve(tables, jnp.array([1, 0]))
      >>> copies.source.tolist(), copies.target.tolist(), tables.lengths.tolist()
      ([0, 4], [1, 4], [4, 3])
    """
    num_tokens = _as_slot_values("reserve", "num_tokens", num_tokens, jnp.int32, tables)
    check_positive("reserve", max_tokens=max_tokens)
    capacity = tables.max_blocks_per_slot * tables.block_size
    max_tokens = min(max_tokens, capacity)

    start = tables.lengths
    end = start + jnp.clip(num_tokens, 0, max_tokens)
    is_in_bounds = (num_tokens >= 0) & (num_tokens <= max_tokens) & (end <= capacity)
    writes = _plan_shared_writes(tables, end > start)
    columns_SW, is_taken_SW = _plan_columns(tables, end, writes.is_copy, max_tokens)
    is_enough = jnp.sum(is_taken_SW, dtype=jnp.int32) <= tables.pool.num_free
    ok = jnp.all(is_in_bounds) & is_enough

    # From here on `ok` masks every update.
    is_taken_SW &= ok
    is_copy = writes.is_copy & ok
    pool, taken_SW = block_pool.take(tables.pool, is_taken_SW)
    shared = jnp.where(writes.is_last & ok, writes.block, tables.num_blocks)
    pool = replace(pool, ref_counts=pool.ref_counts.at[shared].set(writes.refs_left, mode="drop"))
    pool = block_pool.forget(pool, jnp.where(ok, writes.in_place, tables.num_blocks))
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    # Only taken entries change; the others are sent past the end of their row and dropped.
    columns_SW = jnp.where(is_taken_SW, columns_SW, tables.max_blocks_per_slot)
    block_tables = tables.block_tables.at[slots[:, None], columns_SW].set(taken_SW, mode="drop")
    copies = BlockCopies(
        source=jnp.where(is_copy, writes.block, tables.num_blocks),
        target=jnp.where(is_copy, taken_SW[:, 0], tables.num_blocks),
    )
    lengths = jnp.where(ok, end, start)
    return replace(tables, pool=pool, block_tables=block_tables, lengths=lengths), copies, ok


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
      >>> tables = BlockTables.create(4, num_slots=3, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 0, 0]), max_tokens=8)
      >>> tables, ok = fork(tables, jnp.array([-1, 0, 0]))
      >>> bool(ok), tables.pool.ref_counts.tolist(), int(tables.pool.num_free)
      (True, [3, 3, 0, 0], 2)
    """
    parents = _as_slot_values("fork", "parents", parents, jnp.int32, tables)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    is_child = parents != -1
    is_slot = (parents >= 0) & (parents < tables.num_slots)
    parents = jnp.where(is_slot & is_child, parents, slots)
    is_valid = is_slot & (parents != slots) & ~is_child[parents] & (tables.lengths == 0)
    ok = jnp.all(is_valid | ~is_child)

    is_child &= ok
    return _hold(_follow(tables, jnp.where(is_child, parents, slots)), is_child), ok


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
      >>> tables = BlockTables.create(4, num_slots=3, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 3, 1]), max_tokens=8)
      >>> tables, ok = reorder(tables, jnp.array([1, 0, 0]))
      >>> tables.block_tables.tolist(), tables.lengths.tolist(), tables.pool.ref_counts.tolist()
      ([[2, 4], [0, 1], [0, 1]], [3, 7, 7], [2, 2, 1, 0])
    """
    parents = _as_slot_values("reorder", "parents", parents, jnp.int32, tables)
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    is_slot = (parents >= 0) & (parents < tables.num_slots)
    ok = jnp.all(is_slot | (parents == -1))
    is_changed = is_slot & ok
    parents = jnp.where(is_changed, parents, slots)

    # New references first: a block that only changes hands must not pass through the free queue.
    after = _hold(_follow(tables, parents), is_changed)
    before = _empty(replace(tables, pool=after.pool), is_changed)
    return replace(after, pool=before.pool), ok


def release(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Empty slots; blocks that nobody holds any more join the free queue.

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
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 2]), max_tokens=8)
      >>> tables = release(tables, jnp.array([True, False]))
      >>> tables.block_tables.tolist(), tables.pool.ref_counts.tolist()
      ([[4, 4], [2, 4]], [0, 0, 1, 0])
    """
    mask = _as_slot_values("release", "mask", mask, jnp.bool_, tables)
    return _empty(tables, mask)


def truncate(tables: BlockTables, lengths: jax.Array, *, max_tokens: int) -> BlockTables:
    """Shorten slots, and give the blocks past their new ends back, as `release` does.

    Args:
      tables: the state; may be donated.
      lengths: i32[S], how many tokens to leave in each slot. Slots that are no longer than that
          are left alone, and no slot is cut by more than `max_tokens`.
      max_tokens: upper bound on the tokens cut from a slot (static). Costs a sort of
          S * ceil(max_tokens / C) entries.

    Raises:
      ValueError: `lengths` is not i32[S] or `max_tokens` is not a positive integer.

    Example:
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([7, 2]), max_tokens=8)
      >>> tables = truncate(tables, jnp.array([4, 9]), max_tokens=4)
      >>> tables.block_tables.tolist(), tables.lengths.tolist()
      ([[0, 4], [2, 4]], [4, 2])
    """
    lengths = _as_slot_values("truncate", "lengths", lengths, jnp.int32, tables)
    check_positive("truncate", max_tokens=max_tokens)
    max_tokens = min(max_tokens, tables.max_blocks_per_slot * tables.block_size)

    shortest = jnp.maximum(tables.lengths - max_tokens, 0)
    lengths = jnp.clip(lengths, shortest, tables.lengths)
    width = num_blocks_needed(max_tokens, tables.block_size)
    ahead = jnp.arange(width, dtype=jnp.int32)
    columns_SW = num_blocks_needed(lengths, tables.block_size)[:, None] + ahead[None, :]
    rows_S1 = jnp.arange(tables.num_slots, dtype=jnp.int32)[:, None]
    # Columns past the end of the row, or of what the slot holds, give P.
    cut_SW = tables.block_tables.at[rows_S1, columns_SW].get(
        mode="fill", fill_value=tables.num_blocks
    )
    return replace(
        tables,
        pool=block_pool.give_back(tables.pool, cut_SW[:, ::-1].reshape(-1)),
        block_tables=tables.block_tables.at[rows_S1, columns_SW].set(
            tables.num_blocks, mode="drop"
        ),
        lengths=lengths,
    )


def attach(
    tables: BlockTables,
    slot: ArrayLike,
    digests: jax.Array,
    token_ids: jax.Array,
    num_blocks: ArrayLike,
) -> tuple[BlockTables, jax.Array]:
    """Start an empty slot with the blocks in which the beginning of its tokens is cached.

    The longest prefix of the given blocks of which each is cached, with the same digest and the
    same tokens, becomes the start of the slot. Held blocks are shared, free ones held again.

    Args:
      tables: the state; may be donated.
      slot: i32[], the slot. Nothing is done if it is not empty or no slot.
      digests: u32[N, 8], the digests of the full blocks of a sequence, N at most M. The digest
          of a block must stand for all tokens from the beginning of the sequence to its end.
      token_ids: i32[N, C], the tokens in each block.
      num_blocks: i32[], how many of the N to look for; what follows is padding.

    Returns:
      `(tables, num_found)`. `num_found` is i32[], the number of blocks that were found; the slot
      now holds `num_found * C` tokens. Costs a pass over the digests of the pool, and one over the
      free queue.

    Raises:
      ValueError: shapes or dtypes do not fit the tables, or there are more than M blocks.

    Example:
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([6, 0]), max_tokens=8)
      >>> digests, tokens = jnp.ones((1, 8), jnp.uint32), jnp.array([[11, 12, 13, 14]])
      >>> tables = publish(tables, jnp.array([0]), jnp.array([0]), digests, tokens)
      >>> tables, num_found = attach(tables, 1, digests, tokens, 1)
      >>> int(num_found), tables.block_tables.tolist(), tables.lengths.tolist()
      (1, [[0, 1], [0, 4]], [6, 4])
    """
    digests, token_ids = _as_contents("attach", tables, digests, token_ids)
    if len(digests) > tables.max_blocks_per_slot:
        raise ValueError(
            f"attach: digests must be at most M = {tables.max_blocks_per_slot}, got "
            f"{len(digests)}. Leave out what a slot cannot hold."
        )
    slot, num_blocks = jnp.asarray(slot, jnp.int32), jnp.asarray(num_blocks, jnp.int32)
    length = tables.lengths.at[slot].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    limit = jnp.where(length == 0, jnp.minimum(num_blocks, len(digests)), 0)
    blocks, num_found = _find_prefix(tables.pool, digests, token_ids, limit)

    # Where nothing was found, one past the last slot: the updates are dropped.
    slot = jnp.where(num_found > 0, slot, tables.num_slots)
    columns = jnp.arange(len(blocks), dtype=jnp.int32)
    tables = replace(
        tables,
        pool=block_pool.revive(tables.pool, blocks),
        block_tables=tables.block_tables.at[slot, columns].set(blocks, mode="drop"),
        lengths=tables.lengths.at[slot].set(num_found * tables.block_size, mode="drop"),
    )
    return tables, num_found


def publish(
    tables: BlockTables,
    slots: jax.Array,
    columns: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
) -> BlockTables:
    """Cache full blocks: let `attach` find them, while they are held and until they are reused.

    Served one after the other. An entry is ignored if its slot does not exist (-1 is padding) or
    holds no such block or not all of its tokens, if the block is cached already, or if another
    block is cached under the digest.

    Args:
      tables: the state; may be donated.
      slots: i32[N], the slot of each block.
      columns: i32[N], its place in the slot: its tokens are those from position column * C on.
      digests: u32[N, 8], see `attach`.
      token_ids: i32[N, C], the tokens in each block.

    Returns:
      The tables. Costs a pass over the digests of the pool, and a comparison with N digests for
      each entry that names a full block.

    Raises:
      ValueError: shapes or dtypes do not fit the tables.

    Example:
      >>> tables = BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4)
      >>> tables, _, _ = reserve(tables, jnp.array([6, 0]), max_tokens=8)
      >>> digests, tokens = jnp.ones((2, 8), jnp.uint32), jnp.ones((2, 4), jnp.int32)
      >>> tables = publish(tables, jnp.array([0, 0]), jnp.array([0, 1]), digests, tokens)
      >>> tables.pool.is_cached.tolist()
      [True, False, False, False]
    """
    digests, token_ids = _as_contents("publish", tables, digests, token_ids)
    slots, columns = jnp.asarray(slots), jnp.asarray(columns)
    bind("publish", digests=(digests[:, 0], "N"), slots=(slots, "N"), columns=(columns, "N"))
    slots = _check_dtype("publish", "slots", slots, jnp.int32)
    columns = _check_dtype("publish", "columns", columns, jnp.int32)
    is_slot = (slots >= 0) & (slots < tables.num_slots)
    slots = jnp.where(is_slot, slots, 0)
    is_full = is_slot & (columns >= 0) & (columns < tables.lengths[slots] // tables.block_size)
    blocks = tables.block_tables[slots, jnp.where(is_full, columns, 0)]
    pool = tables.pool
    is_known = block_pool.find(pool, digests, is_full) < tables.num_blocks
    is_new = is_full & ~is_known & ~pool.is_cached[blocks]
    is_taken = _serve_in_order(is_new, blocks, digests)
    blocks = jnp.where(is_taken, blocks, tables.num_blocks)
    return replace(tables, pool=block_pool.remember(pool, blocks, digests, token_ids))


def forget(tables: BlockTables) -> BlockTables:
    """Let no block be found any more, as when the weights that made K and V have changed.

    Args:
      tables: the state; may be donated.

    Example:
      >>> tables = forget(BlockTables.create(4, num_slots=2, max_blocks_per_slot=2, block_size=4))
      >>> bool(tables.pool.is_cached.any())
      False
    """
    is_cached = jnp.zeros_like(tables.pool.is_cached)
    return replace(tables, pool=replace(tables.pool, is_cached=is_cached))


def check_invariants(tables: BlockTables) -> None:
    """Check on the host that no block is lost, free and held at once, or held by mistake.

    For tests and debugging: it copies the state to the host, and cannot be called inside `jit`.

    Raises:
      AssertionError: naming the first invariant that does not hold, and where.

    Example:
      >>> check_invariants(BlockTables.create(4, 2, 2, 4))
    """
    block_pool.check_invariants(tables.pool)
    table, lengths = np.asarray(tables.block_tables), np.asarray(tables.lengths)
    num_blocks = tables.num_blocks

    is_length = (lengths >= 0) & (lengths <= table.shape[1] * tables.block_size)
    require(is_length.all(), "lengths", "fit the tables", lengths.tolist())
    num_held = num_blocks_needed(lengths, tables.block_size)
    for slot, row in enumerate(table.tolist()):
        held, rest = row[: num_held[slot]], row[num_held[slot] :]
        name = f"block_tables[{slot}]"
        require(all(0 <= b < num_blocks for b in held), name, "cover the length", row)
        require(len(set(held)) == len(held), name, "hold a block once", row)
        require(set(rest) <= {num_blocks}, name, f"be {num_blocks} past the length", row)

    entries = np.bincount(table[table < num_blocks], minlength=num_blocks)
    for block, count in enumerate(np.asarray(tables.pool.ref_counts).tolist()):
        rule = f"be {entries[block]}, as in the tables"
        require(count == entries[block], f"ref_counts[{block}]", rule, count)


@dataclass(frozen=True)
class _SharedWrites:
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


def _plan_shared_writes(tables: BlockTables, is_writer: jax.Array) -> _SharedWrites:
    """Decide for each slot of `is_writer` bool[S] whether it must copy its last block."""
    num_blocks, slots = tables.num_blocks, jnp.arange(tables.num_slots, dtype=jnp.int32)
    # Where the next token goes: a block that has begun, or P, with no references, if it begins one.
    columns = tables.lengths // tables.block_size
    last = tables.block_tables.at[slots, columns].get(mode="fill", fill_value=num_blocks)
    refs = tables.pool.ref_counts.at[last].get(mode="fill", fill_value=0)
    is_shared = is_writer & (refs > 1)
    block = jnp.where(is_shared, last, num_blocks)

    # Comparing all pairs of slots ranks the writers of a block without their contending for it.
    # Down the columns, because XLA turns that into vector instructions on a CPU.
    is_same_SS = block[:, None] == block[None, :]
    num_writers = jnp.sum(is_same_SS, axis=0, dtype=jnp.int32)
    last_writer = jnp.max(jnp.where(is_same_SS, slots[:, None], -1), axis=0)
    is_last = is_shared & (last_writer == slots)
    # If nobody else is left to hold the block, the last writer keeps it: no leak, one copy less.
    is_kept = num_writers == refs
    is_copy = is_shared & ~(is_last & is_kept)
    return _SharedWrites(
        in_place=jnp.where(is_writer & ~is_copy, last, num_blocks),
        block=block,
        is_copy=is_copy,
        is_last=is_last,
        refs_left=jnp.where(is_kept, 1, refs - num_writers),
    )


def _plan_columns(
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


def _follow(tables: BlockTables, parents: jax.Array) -> BlockTables:
    """The tables with each slot as its parent i32[S] is, before any reference is counted."""
    return replace(
        tables, block_tables=tables.block_tables[parents], lengths=tables.lengths[parents]
    )


def _hold(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Add a reference to each block of the slots of `mask` bool[S]."""
    return _in_pieces(_hold_piece, tables, mask)


def _empty(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Empty the slots of `mask` bool[S], see `release`."""
    tables = _in_pieces(_empty_piece, tables, mask)
    return replace(tables, lengths=jnp.where(mask, 0, tables.lengths))


def _hold_piece(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> BlockTables:
    return replace(tables, pool=block_pool.hold(tables.pool, _entries(tables, rows, columns)))


def _empty_piece(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> BlockTables:
    entries = _entries(tables, rows, columns)
    # No other places are left, but writes that depend on what was read need no copy of the array.
    columns = jnp.where(entries < tables.num_blocks, columns, tables.max_blocks_per_slot)
    return replace(
        tables,
        pool=block_pool.give_back(tables.pool, entries),
        block_tables=tables.block_tables.at[rows, columns].set(tables.num_blocks, mode="drop"),
    )


def _entries(tables: BlockTables, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The blocks at these places of the table; P where there is no such place."""
    return tables.block_tables.at[rows, columns].get(mode="fill", fill_value=tables.num_blocks)


@partial(jax.jit, static_argnums=0)  # so that eager calls compile the loop once, not each time
def _in_pieces(
    update: Callable[[BlockTables, jax.Array, jax.Array], BlockTables],
    tables: BlockTables,
    mask: jax.Array,
) -> BlockTables:
    """Apply `update(tables, rows, columns)` to all places that the slots of `mask` bool[S] fill.

    Slot by slot, the last block of each first. The places come in pieces of i32[_PIECE], the last
    of which is padded with places past the table: so the cost is that of what the slots hold, and
    not of what they could hold.
    """
    num_slots, width = tables.block_tables.shape
    held = jnp.where(mask, num_blocks_needed(tables.lengths, tables.block_size), 0)
    ends = jnp.cumsum(held, dtype=jnp.int32)
    size = min(num_slots * width, _PIECE)

    def update_piece(piece: jax.Array, tables: BlockTables) -> BlockTables:
        index = piece * size + jnp.arange(size, dtype=jnp.int32)
        rows = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        columns = ends.at[rows].get(mode="clip") - 1 - index
        return update(tables, rows, jnp.where(rows < num_slots, columns, width))

    num_pieces = (ends[-1] + size - 1) // size
    return lax.fori_loop(jnp.int32(0), num_pieces, update_piece, tables)


def _find_prefix(
    pool: BlockPool, digests: jax.Array, token_ids: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Find the blocks of the longest cached prefix of the first `limit` i32[] entries.

    Returns `(blocks, num_found)`: i32[N], P from the first miss on, and i32[]. A block that has
    been found already is one: a slot holds no block twice.
    """
    size = len(digests)
    index = jnp.arange(size, dtype=jnp.int32)
    blocks = block_pool.find(pool, digests, index < limit)
    known = pool.token_ids.at[blocks].get(mode="fill", fill_value=-1)
    first = jnp.full(pool.num_blocks, size, jnp.int32).at[blocks].min(index, mode="drop")
    is_first = first.at[blocks].get(mode="fill", fill_value=size) == index
    is_hit = is_first & jnp.all(known == token_ids, axis=1)
    num_found = jnp.min(jnp.where(is_hit, size, index), initial=size)
    return jnp.where(index < num_found, blocks, pool.num_blocks), num_found


@jax.jit
def _serve_in_order(is_new: jax.Array, blocks: jax.Array, digests: jax.Array) -> jax.Array:
    """Which entries of `is_new` bool[N] to cache: those whose block and digest no earlier one took.

    That depends on which of the earlier ones are cached, so it takes a loop.
    """
    order = jnp.nonzero(is_new, size=len(blocks), fill_value=0)[0].astype(jnp.int32)

    def serve(i: jax.Array, is_taken: jax.Array) -> jax.Array:
        entry = order[i]
        is_same = (blocks == blocks[entry]) | jnp.all(digests == digests[entry][None], axis=1)
        return is_taken.at[entry].set(~jnp.any(is_taken & is_same))

    num_new = jnp.sum(is_new, dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), num_new, serve, jnp.zeros_like(is_new))


def _check_below(name: str, size: int, advice: str) -> None:
    if size >= _MAX_SIZE:
        raise ValueError(
            f"BlockTables.create: {name} must be below {_MAX_SIZE}, got {size}. {advice}"
        )


def _as_slot_values(
    function: str, name: str, values: ArrayLike, dtype: DTypeLike, tables: BlockTables
) -> jax.Array:
    values = jnp.asarray(values)
    bind(function, block_tables=(tables.block_tables, "SM"), **{name: (values, "S")})
    return _check_dtype(function, name, values, dtype)


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
    digests = _check_dtype(function, "digests", digests, jnp.uint32)
    return digests, _check_dtype(function, "token_ids", token_ids, jnp.int32)


def _check_dtype(function: str, name: str, values: jax.Array, dtype: DTypeLike) -> jax.Array:
    if values.dtype != dtype:
        raise ValueError(
            f"{function}: {name} must be {jnp.dtype(dtype).name}, got {values.dtype}. Cast it."
        )
    return values
