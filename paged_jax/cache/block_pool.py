# pyright: strict, reportUnknownMemberType=false
"""Block pool: reference counts, the queue of free blocks, and digests of cached blocks.

A block is *in use* if at least one entry of a block table refers to it; otherwise it is *free*. In
both states it can be *cached*: the pool keeps a digest and the token ids of the block, so that
another sequence with the same prefix can share the block (`paged_jax.blocks.attach`). A freed block
stays cached until it is allocated again. The free queue lists uncached blocks before cached blocks.
The most recently freed uncached block is at the head; among the cached blocks, the least recently
used comes first.

    ref_counts  [0 2 0 2 0 0]        blocks 1 and 3 are in use, each by two slots
    is_cached   [1 1 0 1 0 0]
    free queue   5 4 2 | 0           5 is allocated first; allocating 0 evicts its content

`paged_jax.blocks` is built from these functions. They do not check their arguments. In arrays of
block ids, P (the number of blocks) stands for "no block" and is ignored.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.arguments import names_arguments
from paged_jax.formatting import short_repr
from paged_jax.kernels.opaque_call import typed_jit, without_index_checks

# Length of a SHA-256 digest in 32-bit words.
NUM_DIGEST_WORDS = 8

# The hash table of `find` has 2**_BUCKET_BITS buckets, which take 256 KiB. Collisions are rare,
# because a sequence has far fewer blocks than the table has buckets.
_BUCKET_BITS = 16


@short_repr
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """Pool of blocks: reference counts, the queue of free blocks, and the cached blocks.

    Attributes:
      ref_counts: i32[P], the number of table entries that refer to each block; 0 if it is free.
      free_queue: i32[P], a ring buffer. The `num_free` entries that start at index `head` are the
          ids of the free blocks, in the order in which they will be allocated. The other entries
          are stale.
      head: i32[], the position in `free_queue` of the next block to allocate.
      num_free: i32[], the number of free blocks.
      is_cached: bool[P], whether the block can be found by its digest.
      digests: u32[P, 8], the SHA-256 digest of each cached block; stale for other blocks.
      token_ids: i32[P, C], the tokens of each cached block; stale for other blocks.
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
        """Return a pool of `num_blocks` free blocks that are not cached."""
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
        """Number of blocks in the pool (P)."""
        return self.ref_counts.shape[0]


def peek(pool: BlockPool, is_wanted: jax.Array) -> jax.Array:
    """Return the blocks that `take` would allocate, without allocating them.

    Each True in `is_wanted` gets the next block of the free queue, in row-major order. The result
    is i32 in the shape of `is_wanted`, with P for each False.
    """
    rank = _ranks(is_wanted)
    heads = pool.free_queue[(pool.head + rank - 1) % pool.num_blocks]
    return jnp.where(is_wanted, heads, pool.num_blocks)


@without_index_checks
def take(pool: BlockPool, is_taken: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Allocate a block from the head of the free queue for each True in `is_taken`.

    The caller checks that there are enough free blocks. Allocated blocks are no longer cached.

    Returns:
      `(pool, blocks)`. `blocks` is i32 in the shape of `is_taken`, with P for each False.
    """
    blocks = peek(pool, is_taken)
    return _hold_free(pool, blocks, jnp.sum(is_taken, dtype=jnp.int32)), blocks


@without_index_checks
def take_some(pool: BlockPool, blocks: jax.Array, is_taken: jax.Array) -> BlockPool:
    """Allocate some of the blocks that `peek` returned; the others stay at the queue's head.

    Args:
      pool: the pool.
      blocks: i32, the result of `peek`.
      is_taken: bool of the same shape, whether to allocate each block.
    """
    is_remaining = ~is_taken & (blocks < pool.num_blocks)
    num_taken = jnp.sum(is_taken, dtype=jnp.int32)
    position = (pool.head + num_taken + _ranks(is_remaining) - 1) % pool.num_blocks
    position = jnp.where(is_remaining, position, pool.num_blocks)
    pool = replace(pool, free_queue=pool.free_queue.at[position].set(blocks, mode="drop"))
    return _hold_free(pool, jnp.where(is_taken, blocks, pool.num_blocks), num_taken)


def _hold_free(pool: BlockPool, blocks: jax.Array, num_taken: jax.Array) -> BlockPool:
    """Remove the first `num_taken` blocks from the free queue and mark them as in use.

    `blocks` are the ids of these blocks, i32 of any shape. Entries equal to P are ignored.
    """
    return replace(
        pool,
        ref_counts=pool.ref_counts.at[blocks].set(1, mode="drop"),
        is_cached=pool.is_cached.at[blocks].set(False, mode="drop"),
        head=(pool.head + num_taken) % pool.num_blocks,
        num_free=pool.num_free - num_taken,
    )


def _ranks(mask: jax.Array) -> jax.Array:
    """Return the cumulative count of True values in `mask`, i32 of the same shape.

    The count runs in row-major order and includes the position itself.
    """
    return jnp.cumsum(mask.reshape(-1), dtype=jnp.int32).reshape(mask.shape)


@without_index_checks
def hold(pool: BlockPool, entries: jax.Array) -> BlockPool:
    """Add a reference to a block for each element of `entries`.

    Args:
      pool: the pool.
      entries: i32[N], ids of blocks that are in use, possibly repeated. Entries equal to P are
        ignored.
    """
    blocks, counts, _ = tally(entries, pool.num_blocks)
    return replace(pool, ref_counts=pool.ref_counts.at[blocks].add(counts, mode="drop"))


@without_index_checks
def give_back(pool: BlockPool, entries: jax.Array) -> BlockPool:
    """Remove a reference to a block for each element of `entries`; free blocks without references.

    Blocks that become free join the free queue in the order of `entries`: cached blocks at its
    tail, uncached blocks at its head. If an id is repeated, its last occurrence determines the
    order.

    Args:
      pool: the pool.
      entries: i32[N], ids of blocks that are in use, possibly repeated. Entries equal to P are
        ignored.
    """
    blocks, counts, positions = tally(entries, pool.num_blocks)
    refs = pool.ref_counts.at[blocks].get(mode="fill", fill_value=-1)
    # `tally` returns its results sorted by block id. Scatter them back to the order of `entries`,
    # because the freed blocks must join the queue in that order.
    is_freed = jnp.zeros(entries.shape, bool).at[positions].set(refs == counts)
    is_cached = pool.is_cached.at[entries].get(mode="fill", fill_value=False)
    cached_rank = jnp.cumsum(is_freed & is_cached, dtype=jnp.int32)
    other_rank = jnp.cumsum(is_freed & ~is_cached, dtype=jnp.int32)
    position = jnp.where(
        is_cached, pool.head + pool.num_free + cached_rank - 1, pool.head - other_rank
    )
    position = jnp.where(is_freed, position % pool.num_blocks, pool.num_blocks)
    return replace(
        pool,
        # Compute the new counts and write them with `set`, instead of using `add`: inside a loop,
        # XLA updates an array in place only if the written values depend on values read from it.
        ref_counts=pool.ref_counts.at[blocks].set(refs - counts, mode="drop"),
        free_queue=pool.free_queue.at[position].set(entries, mode="drop"),
        head=(pool.head - other_rank[-1]) % pool.num_blocks,
        num_free=pool.num_free + cached_rank[-1] + other_rank[-1],
    )


@without_index_checks
def revive(pool: BlockPool, blocks: jax.Array) -> BlockPool:
    """Add a reference to each of `blocks`, and remove free blocks from the free queue.

    A free block may be anywhere in the queue, so the cost is proportional to P.

    Args:
      pool: the pool.
      blocks: i32[N], distinct ids of blocks, free or in use. Entries equal to P are ignored.
    """
    is_revived = jnp.zeros(pool.num_blocks, bool).at[blocks].set(True, mode="drop")
    index = jnp.arange(pool.num_blocks, dtype=jnp.int32)
    queued = pool.free_queue[(pool.head + index) % pool.num_blocks]
    is_kept = (index < pool.num_free) & ~is_revived[queued]
    rank = jnp.cumsum(is_kept, dtype=jnp.int32)
    position = jnp.where(is_kept, (pool.head + rank - 1) % pool.num_blocks, pool.num_blocks)
    return replace(
        pool,
        ref_counts=pool.ref_counts.at[blocks].add(1, mode="drop"),
        free_queue=pool.free_queue.at[position].set(queued, mode="drop"),
        num_free=rank[-1],
    )


@without_index_checks
# Without `jit`, every call of `find` outside of a jitted function would compile its loop again.
@typed_jit
def find(pool: BlockPool, digests: jax.Array, is_wanted: jax.Array) -> jax.Array:
    """Return the ids i32[N] of the blocks that are cached under digests u32[N, 8].

    An id is P if no block is cached under the digest, or if `is_wanted` bool[N] is False for it.

    The algorithm is a hash join. The first 16 bits of a digest select a bucket of a hash table, and
    each bucket holds one wanted digest at a time. Then the digest of every block of the pool is
    compared with the wanted digest in its bucket. If several wanted digests share a bucket, this is
    repeated for each of them. This is rare, so the cost is proportional to N + P.
    """
    num_digests = len(digests)
    index = jnp.arange(num_digests, dtype=jnp.int32)
    buckets, pool_buckets = (
        (d[:, 0] >> (32 - _BUCKET_BITS)).astype(jnp.int32) for d in (digests, pool.digests)
    )

    def search(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        blocks, is_open = state
        bucket_index = jnp.where(is_open, buckets, 2**_BUCKET_BITS)
        table = jnp.full(2**_BUCKET_BITS, num_digests, jnp.int32)
        table = table.at[bucket_index].min(index, mode="drop")
        entries = table[pool_buckets]
        is_match = jnp.all(digests.at[entries].get(mode="clip") == pool.digests, axis=1)
        is_match &= pool.is_cached & (entries < num_digests)
        # These entries are distinct, because no two blocks are cached under the same digest.
        entries = jnp.where(is_match, entries, num_digests)
        ids = jnp.arange(pool.num_blocks, dtype=jnp.int32)
        return blocks.at[entries].set(ids, mode="drop"), is_open & (table[buckets] != index)

    start = jnp.full(num_digests, pool.num_blocks, jnp.int32), is_wanted
    return lax.while_loop(lambda state: jnp.any(state[1]), search, start)[0]


@without_index_checks
def remember(
    pool: BlockPool, blocks: jax.Array, digests: jax.Array, token_ids: jax.Array
) -> BlockPool:
    """Add blocks to the prefix cache.

    Args:
      pool: the pool.
      blocks: i32[N], distinct block ids. Entries equal to P are ignored.
      digests: u32[N, 8], the digest of each block.
      token_ids: i32[N, C], the tokens in each block.
    """
    return replace(
        pool,
        is_cached=pool.is_cached.at[blocks].set(True, mode="drop"),
        digests=pool.digests.at[blocks].set(digests, mode="drop"),
        token_ids=pool.token_ids.at[blocks].set(token_ids, mode="drop"),
    )


@without_index_checks
def forget(pool: BlockPool, blocks: jax.Array) -> BlockPool:
    """Remove blocks that are in use from the prefix cache.

    `blocks` are the ids of these blocks, i32 of any shape. Entries equal to P are ignored.
    """
    return replace(pool, is_cached=pool.is_cached.at[blocks].set(False, mode="drop"))


@without_index_checks
def forget_marked(pool: BlockPool, is_forgotten: jax.Array) -> BlockPool:
    """Remove the blocks for which `is_forgotten` bool[P] is True from the prefix cache.

    The blocks may be free or in use. Free ones move to the end of the uncached part of the free
    queue. Because the queue is rebuilt, the cost is proportional to P.
    """
    is_cached = pool.is_cached & ~is_forgotten
    index = jnp.arange(pool.num_blocks, dtype=jnp.int32)
    queued = pool.free_queue[(pool.head + index) % pool.num_blocks]
    is_free = index < pool.num_free
    is_last, is_first = is_free & is_cached[queued], is_free & ~is_cached[queued]
    first_rank, last_rank = (jnp.cumsum(x, dtype=jnp.int32) for x in (is_first, is_last))
    rank = jnp.where(is_last, first_rank[-1] + last_rank, first_rank) - 1
    position = jnp.where(is_free, (pool.head + rank) % pool.num_blocks, pool.num_blocks)
    free_queue = pool.free_queue.at[position].set(queued, mode="drop")
    return replace(pool, is_cached=is_cached, free_queue=free_queue)


def tally(entries: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count how often each block occurs in `entries` i32[N]. Entries equal to P are ignored.

    Callers use the counts in a scatter that writes each block once. A scatter-add of all entries
    would be slow if many entries refer to the same block.

    Returns:
      `(blocks, counts, positions)`, all i32[N], sorted by block. Each block that occurs is listed
      once, with its count and the position of its last occurrence. All other `blocks` are P with
      count 0.
    """
    index = jnp.arange(entries.shape[0], dtype=jnp.int32)
    sorted_entries, positions = lax.sort((entries, index), num_keys=1, is_stable=True)
    is_change = sorted_entries[1:] != sorted_entries[:-1]
    boundary = jnp.ones(1, bool)
    first = lax.cummax(jnp.where(jnp.concatenate([boundary, is_change]), index, 0))
    is_listed = jnp.concatenate([is_change, boundary]) & (sorted_entries < num_blocks)
    blocks = jnp.where(is_listed, sorted_entries, num_blocks)
    return blocks, jnp.where(is_listed, index - first + 1, 0), positions
