"""Which slot holds which block of KV memory: reserve, share, copy on write, release; all pure.

The pool is P blocks of C tokens each. A slot is one running sequence, a row of the block table that
names, in order, the blocks in which its tokens lie. Here C = 4, P = 6, and slot 1 was forked from
slot 0, so that the two share their blocks until one of them writes:

    lengths   block_tables              ref_counts  [0 2 0 2 0 0]
       6      [ 3  1  P  P ]            free blocks  4 0 2 5      (4 is taken first)
       6      [ 3  1  P  P ]
       0      [ P  P  P  P ]            P, one past the last block, stands for "no block": a scatter
                                        with mode="drop" ignores it

A full block can be *cached*: `publish` notes the digest and the tokens by which `attach` finds it
for another slot that begins alike. It stays cached when no slot holds it any more, until it is
taken again; blocks that are not cached are taken first. See `paged_jax.cache.block_pool`.

Every operation returns new state and serves all slots at once, with cumulative sums and ranks in
place of loops; the outcome is that of serving the slots one by one in the order of their indices.
What is long for few slots and short for most is done in pieces, so that it costs what is held.
Where an operation cannot be done for every slot it does nothing and answers `ok=False`. That is
decided *before* the updates, which are then masked out: selecting between an old and a new state
afterwards would keep both alive, and donated buffers could not be updated in place.

Tables with a *window* hold no more of a sequence than what its next token attends to, and what the
last program has appended; see `paged_jax.cache.blocks.tables`. Layers of several windows have a
table each over the same slots: functions for groups of them decide for all before any changes.

Nothing here knows about K and V: `reserve` reports which blocks the caller must copy (see
`paged_jax.cache`). Dimension letters are those of `paged_jax.dims`.
"""

from paged_jax.cache.blocks.inspection import check_invariants
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
