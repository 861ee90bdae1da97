# pyright: strict, reportUnknownMemberType=false
"""Drawings of block tables as text: the tokens and blocks of each sequence, and the pool."""

import numpy as np

from paged_jax.cache.blocks.tables import BlockTables
from paged_jax.cache.drawing import pool_lines
from paged_jax.cache.sequence_blocks import num_blocks_needed


def draw_tables(tables: BlockTables, title: str) -> str:
    """Return a drawing of the blocks of every sequence and of the pool, as lines of text.

    Args:
      tables: the block tables; they are copied to the host.
      title: the first line.

    Returns:
      Lines of text::

        after the prompt: 2 of 8 blocks in use, 6 free
          sequence in slot 0, 6 tokens
            logical   0 -> physical    0   tokens 0..3         4 of 4 places
            logical   1 -> physical    1   tokens 4..5         2 of 4 places
            token 0: logical block 0, physical block 0, offset 0
            token 3: logical block 0, physical block 0, offset 3
            token 5: logical block 1, physical block 1, offset 1
          pool: . free, c free and cached, digits count the sequences of a block
             0  11......

    Example:
      >>> print(draw_tables(BlockTables.create(8, 2, 4, block_size=16), "before"))
      before: 0 of 8 blocks in use, 8 free
        pool: . free, c free and cached, digits count the sequences of a block
           0  ........
    """
    lengths = np.asarray(tables.lengths)
    counts = np.asarray(tables.pool.ref_counts)
    num_used = int((counts > 0).sum())
    lines = [f"{title}: {num_used} of {len(counts)} blocks in use, {len(counts) - num_used} free"]
    for slot in np.flatnonzero(lengths):
        lines += _draw_slot(tables, int(slot), int(lengths[slot]), counts)
    return "\n".join(lines + pool_lines(counts, np.asarray(tables.pool.is_cached)))


def locate_token(tables: BlockTables, slot: int, position: int) -> str:
    """Return a line of text with the block and the offset of a token.

    Example:
      >>> import jax.numpy as jnp
      >>> from paged_jax import blocks
      >>> tables = BlockTables.create(8, 2, 4, block_size=4)
      >>> tables, _, _ = blocks.reserve(tables, jnp.array([6, 0]), max_tokens=8)
      >>> locate_token(tables, 0, 5)
      'token 5: logical block 1, physical block 1, offset 1'
    """
    logical, offset = divmod(position, tables.block_size)
    physical = int(tables.block_tables[slot, logical])
    if physical == tables.num_blocks:
        return f"token {position}: logical block {logical}, freed"
    return f"token {position}: logical block {logical}, physical block {physical}, offset {offset}"


def _draw_slot(tables: BlockTables, slot: int, length: int, counts: np.ndarray) -> list[str]:
    size = tables.block_size
    row = np.asarray(tables.block_tables[slot])
    lines = [f"  sequence in slot {slot}, {length} tokens"]
    rule, begin = tables.retention, 0
    cursor = 0 if tables.first_columns is None else int(tables.first_columns[slot])
    if num_freed := rule.num_freed(cursor, size):
        begin, last = (rule.freed_column(index, size) for index in (0, num_freed - 1))
        lines.append(f"    logical {begin:3d} to {last} were freed: they left the sliding window")
        begin = last + 1
    columns = [x for x in range(num_blocks_needed(length, size)) if rule.is_kept(x, cursor, size)]
    for logical in columns:
        first, last = logical * size, min(length, (logical + 1) * size) - 1
        physical = int(row[logical])
        sharing = f"   shared by {counts[physical]}" if counts[physical] > 1 else ""
        tokens = f"tokens {first}..{last}"
        lines.append(
            f"    logical {logical:3d} -> physical {physical:4d}   {tokens:18s}"
            f"{last - first + 1:3d} of {size} places{sharing}"
        )
    # Show the first token that is not freed, a token in the middle, and the last token.
    first = min(begin * size, length - 1)
    for position in sorted({first, max(length // 2, first), length - 1}):
        lines.append(f"    {locate_token(tables, slot, position)}")
    return lines
