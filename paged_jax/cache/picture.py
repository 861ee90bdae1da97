"""The block table as text: which physical block holds which tokens of which sequence."""

import numpy as np

from paged_jax.cache.blocks import BlockTables, num_blocks_needed

_ROW = 64  # blocks in a line of the map


def draw_tables(tables: BlockTables, title: str) -> str:
    """Draw every sequence's blocks, and the pool with free, held and shared blocks.

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
          pool (. free, digit: sequences that hold the block, 9 for more)
               0  11......

    Example:
      >>> print(draw_tables(BlockTables.create(8, 2, 4, block_size=16), "before"))
      before: 0 of 8 blocks in use, 8 free
        pool (. free, digit: sequences that hold the block, 9 for more)
             0  ........
    """
    lengths = np.asarray(tables.lengths)
    counts = np.asarray(tables.pool.ref_counts)
    num_used = int((counts > 0).sum())
    lines = [f"{title}: {num_used} of {len(counts)} blocks in use, {len(counts) - num_used} free"]
    for slot in np.flatnonzero(lengths):
        lines += _draw_slot(tables, int(slot), int(lengths[slot]), counts)
    lines.append("  pool (. free, digit: sequences that hold the block, 9 for more)")
    symbols = "".join("." if count == 0 else str(min(int(count), 9)) for count in counts)
    lines += [
        f"    {start:4d}  {symbols[start : start + _ROW]}" for start in range(0, len(symbols), _ROW)
    ]
    return "\n".join(lines)


def locate_token(tables: BlockTables, slot: int, position: int) -> str:
    """Say in one line where a token lies.

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
        return f"token {position}: logical block {logical}, given back"
    return f"token {position}: logical block {logical}, physical block {physical}, offset {offset}"


def _draw_slot(tables: BlockTables, slot: int, length: int, counts: np.ndarray) -> list[str]:
    size = tables.block_size
    row = np.asarray(tables.block_tables[slot])
    lines = [f"  sequence in slot {slot}, {length} tokens"]
    begin = 0 if tables.first_columns is None else int(tables.first_columns[slot])
    if begin:
        lines.append(
            f"    logical   0 to {begin - 1} were given back: no window reaches them any more"
        )
    for logical in range(begin, num_blocks_needed(length, size)):
        first, last = logical * size, min(length, (logical + 1) * size) - 1
        physical = int(row[logical])
        sharing = f"   shared by {counts[physical]}" if counts[physical] > 1 else ""
        tokens = f"tokens {first}..{last}"
        lines.append(
            f"    logical {logical:3d} -> physical {physical:4d}   {tokens:18s}"
            f"{last - first + 1:3d} of {size} places{sharing}"
        )
    # Where given tokens lie: the first that is held, one in the middle, and the last.
    first = min(begin * size, length - 1)
    for position in sorted({first, max(length // 2, first), length - 1}):
        lines.append(f"    {locate_token(tables, slot, position)}")
    return lines
