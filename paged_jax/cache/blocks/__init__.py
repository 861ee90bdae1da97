# pyright: strict, reportUnknownMemberType=false
"""Block allocator: reserve, share, copy on write and release, as pure functions.

The pool has P blocks of C tokens. A slot holds one running sequence. Its row of the block table
lists the blocks of its tokens in order. Example with C = 4 and P = 6: slot 1 was forked from slot
0, so the two share their blocks until one of them writes.

    lengths   block_tables              ref_counts  [0 2 0 2 0 0]
       6      [ 3  1  P  P ]            free blocks  4 0 2 5      (4 is allocated first)
       6      [ 3  1  P  P ]
       0      [ P  P  P  P ]            P, one past the last block, means "no block": a scatter
                                        with mode="drop" ignores it

A full block can be *cached*: `publish` stores its digest and its tokens, and `attach` finds it for
another slot with the same prefix. It stays cached after its last slot is released, until it is
allocated again. Blocks that are not cached are allocated first. See `paged_jax.cache.block_pool`.

Every operation returns new state. It processes all slots together, with cumulative sums instead of
loops over slots. The result is the same as if the slots were processed one after another, in the
order of their indices. Operations on all blocks of a slot process a fixed number of blocks at a
time, so their cost is proportional to the number of blocks that slots hold. If an operation is
impossible for any slot, it returns `ok=False` and changes nothing, except that `reserve` frees
blocks that left a window. The operation decides this *before* it updates the state, and masks the
updates. If it selected between the old and the new state afterwards, both would be alive at the
same time, so XLA could not update donated buffers in place.

Tables with a sliding *window* hold only the blocks that the next token attends to, and the blocks
that the last program appended; see `paged_jax.cache.blocks.tables`. Groups of layers with different
windows have separate tables over the same slots. A function that takes several tables first checks
that the operation is possible in all of them, and only then changes any table.

The allocator does not access K and V: `reserve` returns the block copies that the caller must make
(see `paged_jax.cache`). Dimension letters are defined in `paged_jax.dims`.
"""

from paged_jax.cache.blocks.invariants import check_invariants
from paged_jax.cache.blocks.prefix import attach, forget, publish
from paged_jax.cache.blocks.reserve import BlockCopies, ReservePlan, commit, plan, reserve, restore
from paged_jax.cache.blocks.tables import BlockTables, fork, release, reorder, slide, truncate
from paged_jax.cache.sequence_blocks import num_blocks_needed

__all__ = [
    "BlockCopies",
    "BlockTables",
    "ReservePlan",
    "attach",
    "check_invariants",
    "commit",
    "fork",
    "forget",
    "num_blocks_needed",
    "plan",
    "publish",
    "release",
    "reorder",
    "reserve",
    "restore",
    "slide",
    "truncate",
]
