# pyright: strict, reportUnknownMemberType=false
"""State tables: the pool entry that holds each slot's state of the recurrent layers.

A recurrent layer keeps arrays of a fixed size for each sequence, and each token overwrites them. An
*entry* of the pool holds the state of a sequence in all recurrent layers, after some number of
tokens. An id refers to the same entry in every layer::

    entries     [ 3  3  P  0 ]       slots 0 and 1 share entry 3, slot 2 is empty
    ref_counts  [ 1  0  0  2  0 ]    P, the number of entries, means "no entry"

A program that appends tokens reads the whole state of a slot and writes a whole new state. It costs
the same to write the new state to another entry. So copy on write needs no copy, only two ids per
slot: `reserve_states` chooses the entry to read (`sources`) and the entry to write (`entries`). The
two are equal if no other slot uses the entry. They differ if other slots share the entry, or if it
is a *snapshot*: an entry in the prefix cache, which must not change. A new slot reads P, which
stands for zeros, so it never sees the state of an earlier sequence.

The prefix cache finds a snapshot by the digest of the attention block whose last token is the last
token of the snapshot. After the last slot has released it, the snapshot stays in the pool until its
entry is needed; the least recently used snapshots are evicted first, as in `block_pool`. Which
states become snapshots is decided in `scheduler.request` and `ModelRunner.publish`. A slot
needs only one entry, so a pool with as many entries as slots never runs out. Additional entries
hold snapshots. If no entry is free, the last slot that uses a snapshot overwrites it, and the
snapshot is removed from the prefix cache.

During decoding, each slot also keeps a *mark*: a second entry with its state at the last multiple
of 64 tokens. The step that computes the next token writes to another entry, and the old entry
becomes the mark. The host does not know the tokens yet, so it cannot publish the state immediately.
It publishes the mark when the sequence ends, so that the next turn of a conversation can continue
from it. A step that verifies draft tokens never appends tokens past the next multiple of 64, so
that the following program can leave a mark there::

    tokens     0 ........... 64 ........... 128 ... 150, end
    entry          3                5           1            marks: 3, then 5
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paged_jax.arguments import check_positive, names_arguments
from paged_jax.cache import block_pool
from paged_jax.cache.attention_metadata import StateMetadata
from paged_jax.cache.block_pool import BlockPool
from paged_jax.formatting import short_repr
from paged_jax.kernels.opaque_call import take_or_fill, without_index_checks

# Number of prompt tokens that recurrent layers process together. Prompt chunks end at multiples of
# this number, so that the states do not depend on the chunk sizes. A mark (see the docstring of the
# module) is the state after a multiple of this number of tokens.
STATE_INTERVAL = 64


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateTables:
    """The pool entries that hold each slot's recurrent state, and the pool of these entries.

    Attributes:
      pool: the `BlockPool` of the entries; a cached entry is a snapshot. For each snapshot,
        the pool's `token_ids` hold the tokens of the attention block whose last token is the
        snapshot's last token.
      entries: i32[S], the entry to which the next program writes the new state of each slot. After
        the program it holds the state after all tokens of the slot. P if the slot is empty.
      sources: i32[S], the entry that the next program reads; P stands for a state of zeros.
      marks: i32[S], the entry with each slot's mark, a saved earlier state; P if the slot has none.
      mark_lengths: i32[S], the number of tokens that the mark covers.
      switch_lengths: i32[S], the number of tokens after which the next program switches from
        `entries` to `next_entries`. The state after this number of tokens stays in its entry, and
        becomes the slot's mark.
      next_entries: i32[S], the free entry that the slot switches to, see `plan_states`. P if the
        next program leaves no mark.
    """

    pool: BlockPool
    entries: jax.Array
    sources: jax.Array
    marks: jax.Array
    mark_lengths: jax.Array
    switch_lengths: jax.Array
    next_entries: jax.Array

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
        # Create four separate arrays, because JAX cannot donate the same buffer twice.
        entries, sources, marks, next_entries = (
            jnp.full(num_slots, num_entries, jnp.int32) for _ in range(4)
        )
        mark_lengths, switch_lengths = (jnp.zeros(num_slots, jnp.int32) for _ in range(2))
        pool = BlockPool.create(num_entries, block_size)
        return cls(pool, entries, sources, marks, mark_lengths, switch_lengths, next_entries)

    @property
    def num_slots(self) -> int:
        """Number of slots (S)."""
        return self.entries.shape[0]

    @property
    def num_entries(self) -> int:
        """Number of entries in the pool (P); also the id for "no entry"."""
        return self.pool.num_blocks


@short_repr
class PlannedStates(NamedTuple):
    """Entries that the rows of a program read and write, in all of its steps.

    Attributes:
      sources, entries, switch_lengths, next_entries: i32 ``[B]``, see `StateTables`.
      num_entries: number of entries in the pool (P).
    """

    sources: jax.Array
    entries: jax.Array
    switch_lengths: jax.Array
    next_entries: jax.Array
    num_entries: int

    @classmethod
    def of_rows(cls, tables: StateTables, rows: jax.Array) -> "PlannedStates":
        """Return the entries of the slots `rows` i32 ``[B]``; P for slots that do not exist."""
        take = functools.partial(take_or_fill, index=rows, fill_value=tables.num_entries)
        return cls(
            sources=take(tables.sources),
            entries=take(tables.entries),
            switch_lengths=take(tables.switch_lengths),
            next_entries=take(tables.next_entries),
            num_entries=tables.num_entries,
        )

    def at_step(
        self, step: int | jax.Array, is_active: jax.Array, lengths: jax.Array
    ) -> StateMetadata:
        """Return the entries that one decode step of the program reads and writes.

        The first step reads the source entries. Each later step reads the entries that the previous
        step has written.

        Args:
          step: i32 ``[]``, index of the step in its program, from 0.
          is_active: bool ``[B]``, False for rows that get no token.
          lengths: i32 ``[B]``, sequence length of each row before the step.
        """
        P, is_switching = self.num_entries, self.next_entries < self.num_entries
        first = jnp.where(step == 0, self.sources, self.entries)
        entries = jnp.where(
            is_switching & (lengths >= self.switch_lengths), self.next_entries, self.entries
        )
        return StateMetadata(
            sources=jnp.where(
                is_switching & (lengths > self.switch_lengths), self.next_entries, first
            ),
            entries=jnp.where(is_active, entries, P),
        )


@without_index_checks
def reserve_states(tables: StateTables, is_writer: jax.Array) -> StateTables:
    """Choose the entries that the next program reads (`sources`) and writes (`entries`).

    A slot that writes does so in place if no other slot needs its entry and the entry is not a
    snapshot. Otherwise it writes to a free entry, and its old entry keeps its content for other
    slots or for the prefix cache. If there are too few free entries, snapshots that are used only
    by writing slots are overwritten. All new entries are allocated before any old entry is freed,
    so no slot writes to an entry that another slot reads.

    Args:
      tables: the tables to change; may be donated.
      is_writer: bool[S], whether the program appends tokens to each slot. It must write the states
        of all these slots.

    Example:
      >>> tables = StateTables.create(num_entries=4, num_slots=3, block_size=16)
      >>> tables = reserve_states(tables, jnp.array([True, False, False]))
      >>> tables = follow_states(tables, jnp.array([-1, 0, -1]), ok=True)  # slots 0 and 1 share
      >>> tables = reserve_states(tables, jnp.array([True, False, False]))
      >>> tables.sources.tolist(), tables.entries.tolist()
      ([0, 0, 4], [1, 0, 4])
    """
    P, pool = tables.num_entries, tables.pool
    slots = jnp.arange(tables.num_slots, dtype=jnp.int32)
    held_entries = jnp.where(is_writer, tables.entries, P)
    is_same_SS = held_entries[:, None] == held_entries[None, :]
    num_writers = jnp.sum(is_same_SS, axis=0, dtype=jnp.int32)
    last_writer = jnp.max(jnp.where(is_same_SS, slots[:, None], -1), axis=0)
    # If all slots that share an entry write to it, the last of these slots may keep the entry and
    # overwrite it.
    may_keep = (last_writer == slots) & (num_writers == take_or_fill(pool.ref_counts, held_entries))
    may_keep &= held_entries < P
    is_snapshot = pool.is_cached.at[held_entries].get(mode="fill", fill_value=False)
    is_needed, is_wanted = is_writer & ~may_keep, may_keep & is_snapshot
    # If there are not enough free entries for all slots, free the entries of all marks, so that
    # marks are discarded before snapshots are overwritten.
    is_short = jnp.sum(is_needed | is_wanted, dtype=jnp.int32) > pool.num_free
    tables = _drop_marks(tables, jnp.broadcast_to(is_short, is_writer.shape))
    pool = tables.pool
    num_spare = pool.num_free - jnp.sum(is_needed, dtype=jnp.int32)
    is_taken = is_needed | (is_wanted & (jnp.cumsum(is_wanted, dtype=jnp.int32) <= num_spare))

    pool, new_entries = block_pool.take(pool, is_taken)
    pool = block_pool.forget(pool, jnp.where(may_keep & ~is_taken, held_entries, P))
    pool = block_pool.give_back(pool, jnp.where(is_taken, held_entries, P))
    return replace(
        tables,
        pool=pool,
        entries=jnp.where(is_taken, new_entries, tables.entries),
        sources=tables.entries,
        next_entries=jnp.full_like(tables.next_entries, P),
    )


def _drop_marks(tables: StateTables, mask: jax.Array) -> StateTables:
    """Free the saved states (marks) of the slots for which `mask` bool[S] is True."""
    P = tables.num_entries
    pool = block_pool.give_back(tables.pool, jnp.where(mask, tables.marks, P))
    return replace(tables, pool=pool, marks=jnp.where(mask, P, tables.marks))


def state_interval(block_size: int) -> int:
    """Return the number of tokens between two marks, a multiple of the block size and of 64.

    A mark is a saved state, see the docstring of the module. Prompt chunks end at the same
    positions: at multiples of this number.
    """
    return math.lcm(STATE_INTERVAL, block_size)


def plan_states(
    tables: StateTables, is_writer: jax.Array, lengths: jax.Array, max_tokens: jax.Array
) -> StateTables:
    """Choose the entries that the next program reads and writes, and the slots that get a mark.

    A mark is a saved earlier state of a slot, see the docstring of the module. The program appends
    one token at a time, and writes the states of slot s to entry ``entries[s]``. When the slot has
    ``switch_lengths[s]`` tokens, the program must read the state from ``entries[s]``, and write all
    later states to entry ``next_entries[s]`` instead. So ``entries[s]`` keeps the state after
    ``switch_lengths[s]`` tokens, and becomes the mark when the caller calls `commit_marks` after
    the program.

    A mark is planned only if an entry is free for it. The pool has P entries for S slots. Half of
    the P - S additional entries are reserved for snapshots.

    Args:
      tables: the tables to change; may be donated.
      is_writer: bool[S], whether each slot gets tokens, see `reserve_states`.
      lengths: i32[S], the number of tokens in each slot before the program.
      max_tokens: i32[], the maximum number of tokens that the program appends to a slot.
    """
    return plan_marks(reserve_states(tables, is_writer), is_writer, lengths, max_tokens)


@without_index_checks
def plan_marks(
    tables: StateTables, is_writer: jax.Array, lengths: jax.Array, max_tokens: int | jax.Array
) -> StateTables:
    """Choose the slots whose recurrent state the next program saves as a mark.

    A mark can later be published to the prefix cache, see the docstring of the module. The result
    is stored in `switch_lengths` and `next_entries`, see `StateTables`. Call this function after
    `reserve_states`. See `plan_states` for the arguments.
    """
    interval, P = state_interval(tables.pool.token_ids.shape[1]), tables.num_entries
    switch_lengths = (lengths + interval - 1) // interval * interval
    # A slot with exactly `switch_lengths` tokens may read one entry and write to another, because
    # the first is shared or a snapshot. Then no mark is needed: the first entry keeps the state
    # anyway.
    keeps_state = (switch_lengths > lengths) | (tables.sources == tables.entries)
    is_reached = (
        is_writer & keeps_state & (switch_lengths > 0) & (switch_lengths < lengths + max_tokens)
    )
    is_reached &= (tables.marks == P) | (tables.mark_lengths != switch_lengths)
    num_available = tables.pool.num_free - (P - tables.num_slots) // 2
    is_reached &= jnp.cumsum(is_reached, dtype=jnp.int32) <= num_available
    return replace(
        tables, next_entries=block_pool.peek(tables.pool, is_reached), switch_lengths=switch_lengths
    )


@without_index_checks
def commit_marks(tables: StateTables, lengths: jax.Array) -> StateTables:
    """Record the marks that a program has saved as planned by `plan_states`.

    Each slot that got more than `switch_lengths` tokens now uses its entry in `next_entries`, which
    is allocated. Its old entry becomes its mark, and its previous mark is freed. `lengths` i32[S]
    is the number of tokens in each slot after the program.
    """
    P = tables.num_entries
    has_switched = (tables.next_entries < P) & (lengths > tables.switch_lengths)
    pool = block_pool.take_some(tables.pool, tables.next_entries, has_switched)
    pool = block_pool.give_back(pool, jnp.where(has_switched, tables.marks, P))
    return replace(
        tables,
        pool=pool,
        entries=jnp.where(has_switched, tables.next_entries, tables.entries),
        marks=jnp.where(has_switched, tables.entries, tables.marks),
        mark_lengths=jnp.where(has_switched, tables.switch_lengths, tables.mark_lengths),
        next_entries=jnp.full_like(tables.next_entries, P),
    )


def follow_states(tables: StateTables, parents: jax.Array, ok: jax.Array) -> StateTables:
    """Make each child slot share its parent's state, until one of the two writes a new state.

    Args:
      tables: the tables to change; may be donated.
      parents: i32[S], the index of each slot's parent. A slot with -1 or its own index has no
        parent, and is unchanged.
      ok: bool[], whether to apply the change. If it is True, all parents must exist.
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
    """Empty the slots for which `mask` bool[S] is True; snapshots stay in the prefix cache."""
    tables = _drop_marks(tables, mask)
    pool = block_pool.give_back(tables.pool, jnp.where(mask, tables.entries, tables.num_entries))
    return replace(tables, pool=pool, entries=jnp.where(mask, tables.num_entries, tables.entries))


@without_index_checks
def attach_state(tables: StateTables, slot: jax.Array, entry: jax.Array) -> StateTables:
    """Let an empty slot start from the snapshot `entry` i32[]; do nothing if it is P (no entry)."""
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
    """Add the states or marks of slots to the prefix cache, as snapshots.

    Row i of the arguments requests a snapshot of slot ``slots[i]`` after its first ``ends[i]``
    tokens. The row is ignored if neither the state nor the mark of the slot covers exactly that
    number of tokens, if the entry of this state or mark is already a snapshot, or if another
    snapshot has the digest.

    Args:
      tables: the tables to change; may be donated.
      slots: i32[N], the slot of each snapshot.
      is_snapshot: bool[N], whether to process the row; rows with False are ignored.
      digests: u32[N, 8], the digests of the attention blocks that end after `ends` tokens.
      token_ids: i32[N, C], the tokens in these blocks.
      ends: i32[N], the number of tokens that each snapshot covers, a multiple of C.
      lengths: i32[S], the number of tokens in each slot.
    """
    pool, P = tables.pool, tables.num_entries
    rows = jnp.where(is_snapshot, slots, -1)
    entries, marks = (take_or_fill(x, rows, fill_value=P) for x in (tables.entries, tables.marks))
    marks = jnp.where(take_or_fill(tables.mark_lengths, rows) == ends, marks, P)
    entries = jnp.where(take_or_fill(lengths, rows) == ends, entries, marks)
    is_known = block_pool.find(pool, digests, entries < P) < P
    is_new = (entries < P) & ~is_known & ~pool.is_cached.at[entries].get(mode="clip")
    # Publish only the first of several rows with the same entry or the same digest: slots can share
    # an entry, and sequences with equal tokens can have different entries.
    index = jnp.arange(len(slots), dtype=jnp.int32)
    is_equal_NN = (entries[:, None] == entries[None]) | jnp.all(
        digests[:, None] == digests[None], axis=2
    )
    is_earlier_NN = is_new[None] & (index[None] < index[:, None])
    is_new &= ~jnp.any(is_equal_NN & is_earlier_NN, axis=1)
    entries = jnp.where(is_new, entries, P)
    return replace(tables, pool=block_pool.remember(pool, entries, digests, token_ids))


def forget_states(tables: StateTables) -> StateTables:
    """Remove all snapshots from the prefix cache, and free all marks."""
    tables = _drop_marks(tables, jnp.ones_like(tables.marks, bool))
    pool = replace(tables.pool, is_cached=jnp.zeros_like(tables.pool.is_cached))
    return replace(tables, pool=pool)
