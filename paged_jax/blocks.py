"""Who holds which block of KV memory: reserve, share, copy on write and release, as pure functions.

The pool is P blocks of C tokens each. A slot is one running sequence, a row of the block table that
names, in order, the blocks in which its tokens lie. Here C = 4, P = 6, and slot 1 was forked from
slot 0, so that the two share their blocks until one of them writes:

    lengths   block_tables              ref_counts  [0 2 0 2 0 0]
       6      [ 3  1  P  P ]            free blocks  4 0 2 5      (4 is reused first)
       6      [ 3  1  P  P ]
       0      [ P  P  P  P ]            P, one past the last block, stands for "no block": a scatter
                                        with mode="drop" ignores it

Every operation returns new state and serves all slots at once, with cumulative sums and ranks in
place of loops; the outcome is that of serving the slots one by one in the order of their indices.
Where an operation cannot be done for every slot it does nothing and answers `ok=False`. That is
decided *before* the updates, which are then masked out: selecting between an old and a new state
afterwards would keep both alive, and donated buffers could not be updated in place.

Nothing here knows about K and V: `reserve` reports which blocks the caller must copy (see
`paged_jax.cache`). Dimension letters are those of `paged_jax.dims`.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from paged_jax.dims import bind

# Sums of two block ids or of two token positions must fit in int32.
_MAX_SIZE = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """Which blocks are free, and how many table entries refer to each of the others.

    Attributes:
      ref_counts: i32[P], the number of table entries that hold each block; 0 if it is free.
      free_queue: i32[P], a ring buffer. From `head` on, around the end, lie the ids of the
          `num_free` free blocks, least recently used first; the remaining places are stale.
      head: i32[], where in `free_queue` the next block is taken.
      num_free: i32[], how many blocks are free.
    """

    ref_counts: jax.Array
    free_queue: jax.Array
    head: jax.Array
    num_free: jax.Array

    @property
    def num_blocks(self) -> int:
        """P, the number of blocks in the pool."""
        return self.ref_counts.shape[0]


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
        pool = BlockPool(
            ref_counts=jnp.zeros(num_blocks, jnp.int32),
            free_queue=jnp.arange(num_blocks, dtype=jnp.int32),
            head=jnp.zeros((), jnp.int32),
            num_free=jnp.full((), num_blocks, jnp.int32),
        )
        return cls(
            pool=pool,
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
    copy is reported. If all holders of such a block write, the last of them keeps it.

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
    pool, taken_SW = _take(tables.pool, is_taken_SW)
    shared = jnp.where(writes.is_last & ok, writes.block, tables.num_blocks)
    pool = replace(pool, ref_counts=pool.ref_counts.at[shared].set(writes.refs_left, mode="drop"))
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
      of an empty slot is an empty slot. Costs a sort of S * M entries.

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
    shared_SM = jnp.where(is_child[:, None], tables.block_tables[parents], tables.num_blocks)
    blocks, counts, _ = _tally(shared_SM.reshape(-1), tables.num_blocks)
    ref_counts = tables.pool.ref_counts.at[blocks].add(counts, mode="drop")
    tables = BlockTables(
        pool=replace(tables.pool, ref_counts=ref_counts),
        block_tables=jnp.where(is_child[:, None], shared_SM, tables.block_tables),
        lengths=jnp.where(is_child, tables.lengths[parents], tables.lengths),
        block_size=tables.block_size,
    )
    return tables, ok


def release(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Empty slots; blocks that nobody holds any more join the tail of the free queue.

    They join it slot by slot, the end of a sequence before its beginning, because the beginning
    is what other sequences are likely to have in common and should be reused last. A block that
    several of the slots share joins with the last of them. Empty slots stay empty, so that
    releasing twice does nothing. Costs a sort of S * M entries.

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
    held_SM = jnp.where(mask[:, None], tables.block_tables, tables.num_blocks)
    return BlockTables(
        pool=_give_back(tables.pool, held_SM[:, ::-1].reshape(-1)),
        block_tables=jnp.where(mask[:, None], tables.num_blocks, tables.block_tables),
        lengths=jnp.where(mask, 0, tables.lengths),
        block_size=tables.block_size,
    )


def check_invariants(tables: BlockTables) -> None:
    """Check on the host that no block is lost, free and held at once, or held by mistake.

    For tests and debugging: it copies the state to the host, and cannot be called inside `jit`.

    Raises:
      AssertionError: naming the first invariant that does not hold, and where.

    Example:
      >>> check_invariants(BlockTables.create(4, 2, 2, 4))
    """
    ref_counts = np.asarray(tables.pool.ref_counts)
    table = np.asarray(tables.block_tables)
    lengths = np.asarray(tables.lengths)
    num_blocks, num_free = tables.num_blocks, int(tables.pool.num_free)

    _require(0 <= num_free <= num_blocks, "num_free", f"be 0 to {num_blocks}", num_free)
    ring = (int(tables.pool.head) + np.arange(num_free)) % num_blocks
    free = np.asarray(tables.pool.free_queue)[ring]
    is_block = (free >= 0) & (free < num_blocks)
    _require(is_block.all(), "free_queue", "hold block ids", free.tolist())
    _require(len(set(free.tolist())) == num_free, "free_queue", "hold ids once", free.tolist())

    is_length = (lengths >= 0) & (lengths <= table.shape[1] * tables.block_size)
    _require(is_length.all(), "lengths", "fit the tables", lengths.tolist())
    num_held = num_blocks_needed(lengths, tables.block_size)
    for slot, row in enumerate(table.tolist()):
        held, rest = row[: num_held[slot]], row[num_held[slot] :]
        name = f"block_tables[{slot}]"
        _require(all(0 <= b < num_blocks for b in held), name, "cover the length", row)
        _require(len(set(held)) == len(held), name, "hold a block once", row)
        _require(set(rest) <= {num_blocks}, name, f"be {num_blocks} past the length", row)

    entries = np.bincount(table[table < num_blocks], minlength=num_blocks)
    for block in range(num_blocks):
        count = int(ref_counts[block])
        name = f"ref_counts[{block}]"
        _require(count == entries[block], name, f"be {entries[block]}, as in the tables", count)
        _require((count == 0) == (block in free), name, "be 0 just where the block is free", count)


@dataclass(frozen=True)
class _SharedWrites:
    """What happens to the partly filled last blocks that slots write into while others hold them.

    All fields are [S]: the last block of the slot (P if it writes into none or holds it alone),
    whether the slot must write into a copy of it, whether it is the last of the slots that write
    into this block, and how many references the block keeps.
    """

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
    is_same_SS = block[:, None] == block[None, :]
    num_writers = jnp.sum(is_same_SS, axis=1, dtype=jnp.int32)
    is_last = is_shared & ~jnp.any(is_same_SS & (slots[None, :] > slots[:, None]), axis=1)
    # If nobody else is left to hold the block, the last writer keeps it: no leak, one copy less.
    is_kept = num_writers == refs
    return _SharedWrites(
        block=block,
        is_copy=is_shared & ~(is_last & is_kept),
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


def _take(pool: BlockPool, is_taken: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Take a block off the head of the free queue for every True, in order; elsewhere give P.

    The caller has made sure that there are enough.
    """
    rank = jnp.cumsum(is_taken.reshape(-1), dtype=jnp.int32).reshape(is_taken.shape)
    num_taken = rank.reshape(-1)[-1]
    heads = pool.free_queue[(pool.head + rank - 1) % pool.num_blocks]
    blocks = jnp.where(is_taken, heads, pool.num_blocks)
    pool = replace(
        pool,
        ref_counts=pool.ref_counts.at[blocks].set(1, mode="drop"),
        head=(pool.head + num_taken) % pool.num_blocks,
        num_free=pool.num_free - num_taken,
    )
    return pool, blocks


def _give_back(pool: BlockPool, entries: jax.Array) -> BlockPool:
    """Give back one reference for each of `entries` i32[N] (P: none); queue what is then free."""
    blocks, counts, positions = _tally(entries, pool.num_blocks)
    refs = pool.ref_counts.at[blocks].get(mode="fill", fill_value=-1)
    # Back from the order of the sort to that of the entries, in which blocks join the queue.
    is_freed = jnp.zeros(entries.shape, bool).at[positions].set(refs == counts)
    rank = jnp.cumsum(is_freed, dtype=jnp.int32)
    tail = (pool.head + pool.num_free + rank - 1) % pool.num_blocks
    tail = jnp.where(is_freed, tail, pool.num_blocks)
    return replace(
        pool,
        ref_counts=pool.ref_counts.at[blocks].add(-counts, mode="drop"),
        free_queue=pool.free_queue.at[tail].set(entries, mode="drop"),
        num_free=pool.num_free + rank[-1],
    )


def _tally(entries: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count how often each block occurs in `entries` i32[N], where P counts as none.

    Returns `(blocks, counts, positions)`, all i32[N] and sorted by block. Each block that occurs
    is listed once, with its count and the position of its last occurrence; all other `blocks` are
    P with count 0. So a scatter to `blocks` never meets the same block twice: sorting takes the
    place of a scatter-add on which all holders of a shared block would contend.
    """
    index = jnp.arange(entries.shape[0], dtype=jnp.int32)
    ranked, positions = lax.sort((entries, index), num_keys=1, is_stable=True)
    is_change = ranked[1:] != ranked[:-1]
    edge = jnp.ones(1, bool)
    first = lax.cummax(jnp.where(jnp.concatenate([edge, is_change]), index, 0))
    is_listed = jnp.concatenate([is_change, edge]) & (ranked < num_blocks)
    blocks = jnp.where(is_listed, ranked, num_blocks)
    return blocks, jnp.where(is_listed, index - first + 1, 0), positions


def check_positive(function: str, **sizes: int) -> None:
    """Raise ValueError in the name of `function` unless every size is a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"{function}: {name} must be a positive integer, got {size!r}. Pass at least 1."
            )


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
    if values.dtype != dtype:
        raise ValueError(
            f"{function}: {name} must be {jnp.dtype(dtype).name}, got {values.dtype}. Cast it."
        )
    return values


def _require(holds, name: str, rule: str, value) -> None:
    if not holds:
        raise AssertionError(f"check_invariants: {name} must {rule}, got {value}.")
