"""The free blocks, the holders of the others, and what is known of the content of each.

A block is free or held; either way it may be *cached*: full of tokens that are known by a digest,
so that a sequence that begins with the same tokens can hold it too (`paged_jax.blocks.attach`). A
block stays cached when it is freed, until it is taken again. So the free queue has two parts: at
its head the blocks whose content cannot be found, the last freed first, then the cached ones, the
least recently used first.

    ref_counts  [0 2 0 2 0 0]        held: 1 and 3, by two holders each
    is_cached   [1 1 0 1 0 0]
    free blocks  5 4 2 | 0           5 is taken first; when 0 is taken, its content is forgotten

These are the parts of which `paged_jax.blocks` is made. None of them checks its arguments: that
has been done, and P, one past the last block, stands for "no block".
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.arguments import names_arguments
from paged_jax.formatting import short_repr
from paged_jax.kernels.opaque_call import without_index_checks

# Of SHA-256, as 32-bit words.
NUM_DIGEST_WORDS = 8

# Of the buckets by which digests are found: far more than a sequence has blocks, and 256 KiB.
_BUCKET_BITS = 16


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """Which blocks are free, how many table entries refer to the others, and what is in them.

    Attributes:
      ref_counts: i32[P], the number of table entries that hold each block; 0 if it is free.
      free_queue: i32[P], a ring buffer. From `head` on, around the end, lie the ids of the
          `num_free` free blocks in the order in which they will be taken; the remaining places
          are stale.
      head: i32[], where in `free_queue` the next block is taken.
      num_free: i32[], how many blocks are free.
      is_cached: bool[P], whether the block is found by its digest.
      digests: u32[P, 8], the SHA-256 under which each cached block is found; stale for others.
      token_ids: i32[P, C], the tokens of each cached block; stale for others.
    """

    ref_counts: jax.Array
    free_queue: jax.Array
    head: jax.Array
    num_free: jax.Array
    is_cached: jax.Array
    digests: jax.Array
    token_ids: jax.Array

    @classmethod
    @names_arguments
    def create(cls, num_blocks: int, block_size: int) -> "BlockPool":
        """Return a pool of `num_blocks` free blocks, none of which is cached."""
        return cls(
            ref_counts=jnp.zeros(num_blocks, jnp.int32),
            free_queue=jnp.arange(num_blocks, dtype=jnp.int32),
            head=jnp.zeros((), jnp.int32),
            num_free=jnp.full((), num_blocks, jnp.int32),
            is_cached=jnp.zeros(num_blocks, bool),
            digests=jnp.zeros((num_blocks, NUM_DIGEST_WORDS), jnp.uint32),
            token_ids=jnp.zeros((num_blocks, block_size), jnp.int32),
        )

    @property
    def num_blocks(self) -> int:
        """P, the number of blocks in the pool."""
        return self.ref_counts.shape[0]


def peek(pool: BlockPool, is_wanted: jax.Array) -> jax.Array:
    """The blocks that `take` would take for every True, in order; elsewhere P."""
    rank = _ranks(is_wanted)
    heads = pool.free_queue[(pool.head + rank - 1) % pool.num_blocks]
    return jnp.where(is_wanted, heads, pool.num_blocks)


@without_index_checks
def take(pool: BlockPool, is_taken: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Take a block off the head of the free queue for every True, in order; elsewhere give P.

    The caller has made sure that there are enough. What was cached in the blocks is forgotten.
    """
    blocks = peek(pool, is_taken)
    return _hold_free(pool, blocks, jnp.sum(is_taken, dtype=jnp.int32)), blocks


@without_index_checks
def take_some(pool: BlockPool, blocks: jax.Array, is_taken: jax.Array) -> BlockPool:
    """Take some of the `blocks` that `peek` gave, P elsewhere; the others stay in their order."""
    is_left = ~is_taken & (blocks < pool.num_blocks)
    num_taken = jnp.sum(is_taken, dtype=jnp.int32)
    place = (pool.head + num_taken + _ranks(is_left) - 1) % pool.num_blocks
    place = jnp.where(is_left, place, pool.num_blocks)
    pool = replace(pool, free_queue=pool.free_queue.at[place].set(blocks, mode="drop"))
    return _hold_free(pool, jnp.where(is_taken, blocks, pool.num_blocks), num_taken)


def _hold_free(pool: BlockPool, blocks: jax.Array, num_taken: jax.Array) -> BlockPool:
    """The pool without the first `num_taken` blocks of its queue, which are `blocks`, or P."""
    return replace(
        pool,
        ref_counts=pool.ref_counts.at[blocks].set(1, mode="drop"),
        is_cached=pool.is_cached.at[blocks].set(False, mode="drop"),
        head=(pool.head + num_taken) % pool.num_blocks,
        num_free=pool.num_free - num_taken,
    )


def _ranks(mask: jax.Array) -> jax.Array:
    """How many are True up to each place, in the order of rows; i32, of any shape."""
    return jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(mask.shape)


@without_index_checks
def hold(pool: BlockPool, entries: jax.Array) -> BlockPool:
    """Add one reference for each of `entries` i32[N] (P: none), blocks that are held already."""
    blocks, counts, _ = tally(entries, pool.num_blocks)
    return replace(pool, ref_counts=pool.ref_counts.at[blocks].add(counts, mode="drop"))


@without_index_checks
def give_back(pool: BlockPool, entries: jax.Array) -> BlockPool:
    """Give back one reference for each of `entries` i32[N] (P: none); queue what is then free.

    In the order of the entries: cached blocks join the tail of the queue, others its head.
    """
    blocks, counts, positions = tally(entries, pool.num_blocks)
    refs = pool.ref_counts.at[blocks].get(mode="fill", fill_value=-1)
    # Back from the order of the sort to that of the entries, in which blocks join the queue.
    is_freed = jnp.zeros(entries.shape, bool).at[positions].set(refs == counts)
    is_cached = pool.is_cached.at[entries].get(mode="fill", fill_value=False)
    cached_rank = jnp.cumsum(is_freed & is_cached, dtype=jnp.int32)
    other_rank = jnp.cumsum(is_freed & ~is_cached, dtype=jnp.int32)
    place = jnp.where(
        is_cached, pool.head + pool.num_free + cached_rank - 1, pool.head - other_rank
    )
    place = jnp.where(is_freed, place % pool.num_blocks, pool.num_blocks)
    return replace(
        pool,
        # Not an addition: in a loop, writes that depend on what was read need no copy of the array.
        ref_counts=pool.ref_counts.at[blocks].set(refs - counts, mode="drop"),
        free_queue=pool.free_queue.at[place].set(entries, mode="drop"),
        head=(pool.head - other_rank[-1]) % pool.num_blocks,
        num_free=pool.num_free + cached_rank[-1] + other_rank[-1],
    )


@without_index_checks
def revive(pool: BlockPool, blocks: jax.Array) -> BlockPool:
    """Add one reference to each of `blocks` i32[N], distinct, P for none; free ones become held.

    Those leave the middle of the free queue, which closes the gaps: costs a pass over P.
    """
    is_revived = jnp.zeros(pool.num_blocks, bool).at[blocks].set(True, mode="drop")
    index = jnp.arange(pool.num_blocks, dtype=jnp.int32)
    queued = pool.free_queue[(pool.head + index) % pool.num_blocks]
    is_kept = (index < pool.num_free) & ~is_revived[queued]
    rank = jnp.cumsum(is_kept, dtype=jnp.int32)
    place = jnp.where(is_kept, (pool.head + rank - 1) % pool.num_blocks, pool.num_blocks)
    return replace(
        pool,
        ref_counts=pool.ref_counts.at[blocks].add(1, mode="drop"),
        free_queue=pool.free_queue.at[place].set(queued, mode="drop"),
        num_free=rank[-1],
    )


@without_index_checks
@jax.jit  # so that eager calls compile the loop once, not each time
def find(pool: BlockPool, digests: jax.Array, is_wanted: jax.Array) -> jax.Array:
    """Return the block that is cached under each of `digests` u32[N, 8], i32[N].

    It is P where there is none, or where `is_wanted` bool[N] is False. The blocks look for their
    digests among the wanted ones: a table says which of these to compare with, by the first bits.
    Where several have the same first bits, each takes a round of its own; that is rare, so that the
    cost is in proportion to N + P.
    """
    num_wanted = len(digests)
    index = jnp.arange(num_wanted, dtype=jnp.int32)
    buckets, pool_buckets = (
        (d[:, 0] >> (32 - _BUCKET_BITS)).astype(jnp.int32) for d in (digests, pool.digests)
    )

    def search(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        blocks, is_open = state
        places = jnp.where(is_open, buckets, 2**_BUCKET_BITS)
        table = jnp.full(2**_BUCKET_BITS, num_wanted, jnp.int32)
        table = table.at[places].min(index, mode="drop")
        entries = table[pool_buckets]
        is_match = jnp.all(digests.at[entries].get(mode="clip") == pool.digests, axis=1)
        is_match &= pool.is_cached & (entries < num_wanted)
        # Distinct, as no two blocks are cached under one digest.
        entries = jnp.where(is_match, entries, num_wanted)
        ids = jnp.arange(pool.num_blocks, dtype=jnp.int32)
        return blocks.at[entries].set(ids, mode="drop"), is_open & (table[buckets] != index)

    start = jnp.full(num_wanted, pool.num_blocks, jnp.int32), is_wanted
    return lax.while_loop(lambda state: jnp.any(state[1]), search, start)[0]


@without_index_checks
def remember(
    pool: BlockPool, blocks: jax.Array, digests: jax.Array, token_ids: jax.Array
) -> BlockPool:
    """Cache `blocks` i32[N], distinct, P for none, under `digests` u32[N, 8].

    `token_ids` i32[N, C] are in them.
    """
    return replace(
        pool,
        is_cached=pool.is_cached.at[blocks].set(True, mode="drop"),
        digests=pool.digests.at[blocks].set(digests, mode="drop"),
        token_ids=pool.token_ids.at[blocks].set(token_ids, mode="drop"),
    )


@without_index_checks
def forget(pool: BlockPool, blocks: jax.Array) -> BlockPool:
    """Let `blocks`, i32 of any shape, held ones or P, no longer be found."""
    return replace(pool, is_cached=pool.is_cached.at[blocks].set(False, mode="drop"))


@without_index_checks
def forget_marked(pool: BlockPool, is_forgotten: jax.Array) -> BlockPool:
    """Let the blocks of `is_forgotten` bool[P] no longer be found, free ones among them.

    Those join the free blocks that cannot be found, as the last of them: costs a pass over P.
    """
    is_cached = pool.is_cached & ~is_forgotten
    index = jnp.arange(pool.num_blocks, dtype=jnp.int32)
    queued = pool.free_queue[(pool.head + index) % pool.num_blocks]
    is_free = index < pool.num_free
    is_last, is_first = is_free & is_cached[queued], is_free & ~is_cached[queued]
    first_rank, last_rank = (jnp.cumsum(x, dtype=jnp.int32) for x in (is_first, is_last))
    rank = jnp.where(is_last, first_rank[-1] + last_rank, first_rank) - 1
    place = jnp.where(is_free, (pool.head + rank) % pool.num_blocks, pool.num_blocks)
    free_queue = pool.free_queue.at[place].set(queued, mode="drop")
    return replace(pool, is_cached=is_cached, free_queue=free_queue)


def tally(entries: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
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
