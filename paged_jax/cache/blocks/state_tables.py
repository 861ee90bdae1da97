# pyright: strict, reportUnknownMemberType=false
"""States of recurrent layers: a pool of entries, and the entry of each slot.

A recurrent layer keeps arrays of a fixed size for each sequence, and each token overwrites them. An
*entry* of the pool holds the state of a sequence in all recurrent layers, after some number of
tokens. An id refers to the same entry in every layer::

    entries     [ 3  3  P  0 ]       slots 0 and 1 share entry 3, slot 2 is empty
    ref_counts  [ 1  0  0  2  0 ]    P, the number of entries, means "no entry"

A program that appends tokens reads the whole state of a slot and writes a whole new state. It may
write to another entry than it reads, at no further cost. So copy on write is a choice of two ids:
`reserve_states` chooses for each slot the entry to read (`sources`) and the entry to write
(`entries`). They are equal while the slot owns its entry. They differ if other slots share it, or
if it is a *snapshot*: an entry in the prefix cache, which must not change. A new slot reads P,
which stands for zeros, so it never sees the state of an earlier sequence.

A snapshot is found under the digest of the attention block that ends where its tokens end. It stays
in the pool after its last slot has left, until the entry is needed: least recently used snapshots
are evicted first, as in `block_pool`. A slot holds at most one entry, so a pool with as many
entries as slots never runs out. Further entries are room for snapshots. If there is no free entry,
the last slot that uses a snapshot overwrites it, and the snapshot is forgotten.

While a sequence decodes, each slot also keeps its state at the last multiple of 64 tokens, as a
*mark*: the step that computes the next token writes to another entry, and the old entry stays. The
host does not know the tokens yet, so it cannot publish the state immediately. It publishes the mark
when the sequence ends. The next turn of a conversation then continues from there. A verification of
drafts never passes the next multiple of 64, so that the program after it can leave a mark there::

    tokens     0 ........... 64 ........... 128 ... 150, end
    entry          3                5           1            marks: 3, then 5
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import BlockPool
from paged_jax.formatting import short_repr
from paged_jax.kernels.opaque_call import take_or_fill, without_index_checks

# Number of tokens that recurrent layers process together in prompts. Chunks end at multiples of it,
# so that the states do not depend on the sizes of chunks. Marks are states after such multiples.
STATE_INTERVAL = 64


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateTables:
    """The entry of each slot, and which entries are free or snapshots.

    Attributes:
      pool: the `BlockPool` of the entries. The tokens of a snapshot are the tokens of the attention
        block that ends with it.
      entries: i32[S], the entry with the state of each slot after all of its tokens; P if the slot
        is empty. A program writes the new state of the slot to it.
      sources: i32[S], the entry that the program reads; P for zeros.
      marks: i32[S], an entry with an earlier state of the slot; P for none.
      mark_lengths: i32[S], number of tokens in that state.
      spares: i32[S], a free entry that the planned program writes from `turns` tokens on, so that
        the old entry becomes a mark; P for none. See `plan_states`.
      turns: i32[S], number of tokens of the next mark.
    """

    pool: BlockPool
    entries: jax.Array
    sources: jax.Array
    marks: jax.Array
    mark_lengths: jax.Array
    spares: jax.Array
    turns: jax.Array

    @classmethod
    @names_arguments
    def create(cls, num_entries: int, num_slots: int, block_size: int) -> "StateTables":
        """Return `num_slots` empty slots over a pool of `num_entries` free entries.

        Raises:
          ValueError: a size is not a positive integer, or there are fewer entries than slots.
        """
        check_positive(
            "StateTables.create",
            num_entries=num_entries,
            num_slots=num_slots,
            block_size=block_size,
        )
        if num_entries < num_slots:
            raise ValueError(
                f"StateTables.create: num_entries must be at least num_slots = {num_slots}, so "
                f"that all slots can have a state, got {num_entries}. Use more entries or fewer "
                "slots."
            )
        # The arrays must be separate: a buffer can be donated only once.
        entries, sources, marks, spares = (
            jnp.full(num_slots, num_entries, jnp.int32) for _ in range(4)
        )
        mark_lengths, turns = (jnp.zeros(num_slots, jnp.int32) for _ in range(2))
        pool = BlockPool.create(num_entries, block_size)
        return cls(pool, entries, sources, marks, mark_lengths, spares, turns)

    @property
    def num_slots(self) -> int:
        """Number of slots (S)."""
        return self.entries.shape[0]

    @property
    def num_entries(self) -> int:
        """Number of entries in the pool (P); also the id for "no entry"."""
        return self.pool.num_blocks


@without_index_checks
def reserve_states(tables: StateTables, is_writer: jax.Array) -> StateTables:
    """Choose the entries that the next program reads and writes.

    A slot of `is_writer` writes in place if no other slot uses its entry afterwards and the entry
    is no snapshot. Otherwise it gets a free entry. Its old entry stays as it is, for other slots or
    in the prefix cache. If there are too few free entries, snapshots that only writers use are
    overwritten. All entries are chosen before an old entry becomes free, so no program writes to an
    entry that another slot reads.

    Args:
      tables: the state; may be donated.
      is_writer: bool[S], the slots that get tokens from the program. The program must write the
        states of all of them.

    Example:
      >>> tables = StateTables.create(num_entries=4, num_slots=3, block_size=16)
      >>> tables = reserve_states(tables, jnp.array([True, False, False]))
      >>> tables = follow_states(tables, jnp.array([-1, 0, -1]), ok=True)      # slot 1 copies 0
      >>> tables = reserve_states(tables, jnp.array([True, False, False]))
      >>> tables.sources.tolist(), tables.entries.tolist()
      ([0, 0, 4], [1, 0, 4])
    """
    P, pool = tables.num_entries, tables.pool
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    held = jnp.where(is_writer, tables.entries, P)
    is_same_SS = held[:, None] == held[None, :]
    num_writers = jnp.sum(is_same_SS, axis=0, dtype=jnp.int32)
    last_writer = jnp.max(jnp.where(is_same_SS, slots[:, None], -1), axis=0)
    # If all slots that share an entry write, the last slot may keep it. P has no references.
    may_keep = (last_writer == slots) & (num_writers == take_or_fill(pool.ref_counts, held))
    may_keep &= held < P
    is_snapshot = pool.is_cached.at[held].get(mode="fill", fill_value=False)
    is_needed, is_wanted = is_writer & ~may_keep, may_keep & is_snapshot
    # If free entries run out, free all marks before a snapshot is overwritten.
    is_short = jnp.sum(is_needed | is_wanted, dtype=jnp.int32) > pool.num_free
    tables = _drop_marks(tables, jnp.broadcast_to(is_short, is_writer.shape))
    pool = tables.pool
    num_spare = pool.num_free - jnp.sum(is_needed, dtype=jnp.int32)
    is_taken = is_needed | (is_wanted & (jnp.cumsum(is_wanted, dtype=jnp.int32) <= num_spare))

    pool, taken = block_pool.take(pool, is_taken)
    pool = block_pool.forget(pool, jnp.where(may_keep & ~is_taken, held, P))
    pool = block_pool.give_back(pool, jnp.where(is_taken, held, P))
    return replace(
        tables,
        pool=pool,
        entries=jnp.where(is_taken, taken, tables.entries),
        sources=tables.entries,
        spares=jnp.full_like(tables.spares, P),
    )


def _drop_marks(tables: StateTables, mask: jax.Array) -> StateTables:
    """Free the marks of the slots in `mask` bool[S]."""
    P = tables.num_entries
    pool = block_pool.give_back(tables.pool, jnp.where(mask, tables.marks, P))
    return replace(tables, pool=pool, marks=jnp.where(mask, P, tables.marks))


def state_interval(block_size: int) -> int:
    """Return the number of tokens between marks, and between the ends of chunks.

    It is a multiple of the block size.
    """
    return math.lcm(STATE_INTERVAL, block_size)


def plan_states(
    tables: StateTables, is_writer: jax.Array, lengths: jax.Array, most: jax.Array
) -> StateTables:
    """Choose entries for a program that appends tokens one at a time, and where it leaves marks.

    A program that reaches ``turns`` tokens in a slot must read that state from the entry of the
    slot, and write the following states to its spare entry. Then call `commit_marks`. Marks use
    free entries only. Half of the entries beyond one per slot are left to snapshots.

    Args:
      tables: the state; may be donated.
      is_writer: bool[S], the slots that get tokens, see `reserve_states`.
      lengths: i32[S], tokens of each slot before the program.
      most: i32[], maximum number of tokens that the program appends to a slot.
    """
    return plan_marks(reserve_states(tables, is_writer), is_writer, lengths, most)


@without_index_checks
def plan_marks(
    tables: StateTables, is_writer: jax.Array, lengths: jax.Array, most: int | jax.Array
) -> StateTables:
    """Choose where a program leaves marks, after `reserve_states`; see `plan_states`."""
    interval, P = state_interval(tables.pool.token_ids.shape[1]), tables.num_entries
    turns = (lengths + interval - 1) // interval * interval
    # If the length is a multiple already and the slot does not write in place, the old entry keeps
    # this state anyway, so no mark is needed.
    is_left = (turns > lengths) | (tables.sources == tables.entries)
    is_reached = is_writer & is_left & (turns > 0) & (turns < lengths + most)
    is_reached &= (tables.marks == P) | (tables.mark_lengths != turns)
    room = tables.pool.num_free - (P - tables.num_slots) // 2
    is_reached &= jnp.cumsum(is_reached, dtype=jnp.int32) <= room
    return replace(tables, spares=block_pool.peek(tables.pool, is_reached), turns=turns)


@without_index_checks
def commit_marks(tables: StateTables, lengths: jax.Array) -> StateTables:
    """Keep the marks that the program has left in slots with `lengths` i32[S] tokens after it."""
    P = tables.num_entries
    has_turned = (tables.spares < P) & (lengths > tables.turns)
    pool = block_pool.take_some(tables.pool, tables.spares, has_turned)
    pool = block_pool.give_back(pool, jnp.where(has_turned, tables.marks, P))
    return replace(
        tables,
        pool=pool,
        entries=jnp.where(has_turned, tables.spares, tables.entries),
        marks=jnp.where(has_turned, tables.entries, tables.marks),
        mark_lengths=jnp.where(has_turned, tables.turns, tables.mark_lengths),
        spares=jnp.full_like(tables.spares, P),
    )


def follow_states(tables: StateTables, parents: jax.Array, ok: jax.Array) -> StateTables:
    """Give slots the states of other slots. The entries are shared until a slot is written.

    Args:
      tables: the state; may be donated.
      parents: i32[S], the parent of each slot that gets the state of another slot; -1 or its own
        index leaves a slot unchanged.
      ok: bool[], whether to change anything. If it is True, all parents exist.
    """
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    parents = jnp.where(ok & (parents >= 0), parents, slots)
    is_changed = parents != slots
    entries = tables.entries[parents]
    tables = _drop_marks(tables, is_changed)
    pool = block_pool.hold(tables.pool, jnp.where(is_changed, entries, tables.num_entries))
    pool = block_pool.give_back(pool, jnp.where(is_changed, tables.entries, tables.num_entries))
    return replace(tables, pool=pool, entries=entries)


def release_states(tables: StateTables, mask: jax.Array) -> StateTables:
    """Empty the slots that `mask` bool[S] marks. Snapshots stay in the prefix cache."""
    tables = _drop_marks(tables, mask)
    pool = block_pool.give_back(tables.pool, jnp.where(mask, tables.entries, tables.num_entries))
    return replace(tables, pool=pool, entries=jnp.where(mask, tables.num_entries, tables.entries))


@without_index_checks
def attach_state(tables: StateTables, slot: jax.Array, entry: jax.Array) -> StateTables:
    """Give an empty slot a snapshot. Nothing changes if `entry` is P, which means "no entry"."""
    pool = block_pool.revive(tables.pool, entry[None])
    entries = tables.entries.at[slot].set(entry, mode="drop")
    return replace(tables, pool=pool, entries=entries)


@without_index_checks
def publish_states(
    tables: StateTables,
    slots: jax.Array,
    is_snapshot: jax.Array,
    digests: jax.Array,
    token_ids: jax.Array,
    ends: jax.Array,
    lengths: jax.Array,
) -> StateTables:
    """Add the states and marks of slots to the prefix cache, as snapshots.

    A row of the arguments is ignored if its slot has neither a state nor a mark of `ends` tokens,
    if that entry is a snapshot already, or if another snapshot has the digest.

    Args:
      tables: the state; may be donated.
      slots: i32[N], the slot of each snapshot.
      is_snapshot: bool[N], whether to add the state of the slot at the end of the block.
      digests: u32[N, 8], digests of the attention blocks that end where the states end.
      token_ids: i32[N, C], the tokens in these blocks.
      ends: i32[N], number of tokens up to the end of each block.
      lengths: i32[S], number of tokens of each slot.
    """
    pool, P = tables.pool, tables.num_entries
    rows = jnp.where(is_snapshot, slots, -1)
    entries, marks = (take_or_fill(x, rows, fill_value=P) for x in (tables.entries, tables.marks))
    marks = jnp.where(take_or_fill(tables.mark_lengths, rows) == ends, marks, P)
    entries = jnp.where(take_or_fill(lengths, rows) == ends, entries, marks)
    is_known = block_pool.find(pool, digests, entries < P) < P
    is_new = (entries < P) & ~is_known & ~pool.is_cached.at[entries].get(mode="clip")
    # Slots can share an entry, and sequences with equal tokens can have different entries.
    index = jnp.arange(len(slots), dtype=jnp.int32)
    is_equal_NN = (entries[:, None] == entries[None]) | jnp.all(
        digests[:, None] == digests[None], axis=2
    )
    is_earlier_NN = is_new[None] & (index[None] < index[:, None])
    is_new &= ~jnp.any(is_equal_NN & is_earlier_NN, axis=1)
    entries = jnp.where(is_new, entries, P)
    return replace(tables, pool=block_pool.remember(pool, entries, digests, token_ids))


def forget_states(tables: StateTables) -> StateTables:
    """Remove all snapshots from the prefix cache, and all marks."""
    tables = _drop_marks(tables, jnp.ones_like(tables.marks, bool))
    pool = replace(tables.pool, is_cached=jnp.zeros_like(tables.pool.is_cached))
    return replace(tables, pool=pool)
