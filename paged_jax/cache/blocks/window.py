"""What leaves a sliding window: blocks that no token to come attends to are given back.

The token at position n attends to ``n - window + 1 .. n``: what lies before is never read again.
Kept is what the first token of its block attends to, see `first_kept_column`. Here C = 4, the
window is 6, and 17 tokens are in the slot. The first of its block is 16, which attends to tokens 11
to 16, so that columns 0 and 1 can go::

    tokens  0..3   4..7   8..11   12..15   16           17 is next
    row       P      P      7        2      0           first_columns 2

It is done *lazily*, when a slot is about to grow: until then it holds what its last program has
appended, so that these blocks can be published, or cut off again if they were guesses.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from paged_jax.cache.blocks.pieces import drop_columns
from paged_jax.cache.blocks.tables import BlockTables
from paged_jax.cache.sizes import first_kept_column, num_blocks_needed


def slide(tables: BlockTables, mask: jax.Array) -> BlockTables:
    """Give back the blocks of the slots of `mask` bool[S] that have left their windows.

    Those that are cached can be found until they are taken again. Does nothing without a window.
    `reserve` does it for slots that grow; before `plan`, which changes no table, it is up to the
    caller. Costs in proportion to the blocks given back.

    Args:
      tables: the state; may be donated.
      mask: bool[S], the slots that are about to grow.

    Example:
      >>> from paged_jax.cache.blocks import reserve
      >>> tables = BlockTables.create(8, num_slots=1, max_blocks_per_slot=8, block_size=4, window=6)
      >>> tables, _, _ = reserve(tables, jnp.array([17]), max_tokens=32)
      >>> tables = slide(tables, jnp.array([True]))
      >>> tables.block_tables.tolist(), tables.first_columns.tolist()
      ([[8, 8, 2, 3, 4, 8, 8, 8]], [2])
    """
    if (state := tables.window_state) is None:
        return tables
    window, first_columns = state
    ends = jnp.where(mask, first_kept_column(tables.lengths, window, tables.block_size), 0)
    after = drop_columns(tables, first_columns, ends)
    return replace(after, first_columns=jnp.maximum(first_columns, ends))


def shortest_lengths(tables: BlockTables) -> jax.Array | int:
    """The least tokens to which slots can be cut, which still hold all that is then to be kept.

    i32[S], of which none is above the length; 0 without a window.
    """
    if (state := tables.window_state) is None:
        return 0
    window, first_columns = state
    size = tables.block_size
    least = num_blocks_needed(first_columns * size + window - 1, size) * size
    return jnp.where(first_columns > 0, least, 0)
