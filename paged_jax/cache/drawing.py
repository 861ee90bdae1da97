# pyright: strict, reportUnknownMemberType=false
"""Drawings of the blocks of a cache: a table as text, and a map as HTML for notebooks.

Both show the blocks in the order of their ids, and the block ids of each sequence. The size of a
drawing is limited, so that even the cache of a large engine can be printed.
"""

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_PER_LINE = 64  # In text drawings, one line shows this number of blocks of the pool.
_MAX_LINES = 16  # In text drawings, the pool takes at most this number of lines.
_MAX_ROWS = 16  # Text and HTML drawings list at most this number of sequences.
_MAX_IDS = 16  # Text and HTML drawings list at most this number of block ids per sequence.
_MAX_CELLS = 2048  # In HTML drawings, the map shows at most this number of blocks.

# The colors suit both light and dark pages. A free block is drawn as an outline in the text color.
_STYLE = """
.paged-jax-map { font: 13px/1.5 system-ui, sans-serif; max-width: 60em }
.paged-jax-map div { display: flex; flex-wrap: wrap; gap: 2px; margin: 6px 0 }
.paged-jax-map i { box-sizing: border-box; width: 14px; height: 14px; border-radius: 2px }
.paged-jax-map i.f { border: 1px solid currentColor; opacity: .35 }
.paged-jax-map i.c { background: #55a86b }
.paged-jax-map i.u { background: #5b8def }
.paged-jax-map i.s { background: #e8862e }
.paged-jax-map p { display: flex; gap: 6px; align-items: center; margin: 0 }
.paged-jax-map td, .paged-jax-map th { text-align: left; padding: 0 1em 0 0 }
"""
_KINDS = {"f": "free", "c": "free, in the prefix cache", "u": "used", "s": "shared"}


class BlockRow(NamedTuple):
    """A sequence in a drawing, with its blocks.

    Attributes:
      name: name of the sequence, such as its slot.
      num_tokens: number of tokens.
      block_ids: ids of the blocks of the sequence, in the order of its tokens, without freed
          blocks.
    """

    name: str
    num_tokens: int
    block_ids: Sequence[int]


class BlockMap(NamedTuple):
    """The data of a drawing: the blocks of a pool, and the sequences that use them.

    Attributes:
      title: the first line of the drawing, about the pool.
      ref_counts: number of sequences that use each block.
      is_cached: whether the prefix cache can find each block.
      rows: the sequences.
    """

    title: str
    ref_counts: np.ndarray
    is_cached: np.ndarray
    rows: Sequence[BlockRow]


def draw_text(blocks: BlockMap) -> str:
    """Return a table of the sequences with their block ids, and a map of the pool, as text.

    In the example below, two sequences share block 0, one sequence uses block 1, block 2 is cached
    and free, and block 3 is free.

    Example:
      >>> counts, is_cached = np.array([2, 1, 0, 0]), np.array([True, False, True, False])
      >>> rows = [BlockRow("0", 9, [0, 1]), BlockRow("1", 8, [0])]
      >>> print(draw_text(BlockMap("2 of 4 blocks in use", counts, is_cached, rows)))
      2 of 4 blocks in use
        slot  tokens  blocks
           0       9  0 1
           1       8  0
        pool: . free, c free and cached, digits count the sequences of a block
           0  21c.
    """
    lines = [blocks.title]
    if blocks.rows:
        lines.append("  slot  tokens  blocks")
    for row in blocks.rows[:_MAX_ROWS]:
        lines.append(f"  {row.name:>4}  {row.num_tokens:6d}  {_ids(row.block_ids)}")
    if len(blocks.rows) > _MAX_ROWS:
        lines.append(f"  and {len(blocks.rows) - _MAX_ROWS} more")
    pool = pool_lines(blocks.ref_counts, blocks.is_cached)
    lines += pool[: 1 + _MAX_LINES]
    num_drawn = _PER_LINE * _MAX_LINES
    if len(blocks.ref_counts) > num_drawn:
        lines.append(f"  and {len(blocks.ref_counts) - num_drawn} more blocks")
    return "\n".join(lines)


def pool_lines(ref_counts: np.ndarray, is_cached: np.ndarray) -> list[str]:
    """Draw a pool as text: a legend, then lines with a character per block."""
    symbols = "".join(
        str(min(int(count), 9)) if count else "c" if is_block_cached else "."
        for count, is_block_cached in zip(ref_counts, is_cached, strict=True)
    )
    lines = ["  pool: . free, c free and cached, digits count the sequences of a block"]
    for start in range(0, len(symbols), _PER_LINE):
        lines.append(f"  {start:4d}  {symbols[start : start + _PER_LINE]}")
    return lines


def draw_html(blocks: BlockMap) -> str:
    """Return HTML with a map of the blocks and a table of the sequences; names are escaped."""
    legend = " ".join(f'<i class="{kind}"></i>{text}' for kind, text in _KINDS.items())
    cells = "".join(
        f'<i class="{_kind(int(count), bool(is_block_cached))}" title="block {block}, '
        f'used by {int(count)}"></i>'
        for block, (count, is_block_cached) in enumerate(
            zip(blocks.ref_counts[:_MAX_CELLS], blocks.is_cached[:_MAX_CELLS], strict=True)
        )
    )
    num_left_out = max(len(blocks.ref_counts) - _MAX_CELLS, 0)
    remainder = f"<p>and {num_left_out} more blocks</p>" if num_left_out else ""
    rows = "".join(
        f"<tr><td>{html.escape(row.name)}</td><td>{row.num_tokens}</td>"
        f"<td>{_ids(row.block_ids)}</td></tr>"
        for row in blocks.rows[:_MAX_ROWS]
    )
    if len(blocks.rows) > _MAX_ROWS:
        rows += f"<tr><td>and {len(blocks.rows) - _MAX_ROWS} more</td></tr>"
    head = "<tr><th>sequence</th><th>tokens</th><th>blocks</th></tr>"
    table = f"<table>{head}{rows}</table>" if rows else ""
    return (
        f"<style>{_STYLE}</style><section class='paged-jax-map'>"
        f"<b>{html.escape(blocks.title)}</b><p>{legend}</p><div>{cells}</div>{remainder}{table}"
        "</section>"
    )


def _kind(count: int, is_cached: bool) -> str:
    if count:
        return "s" if count > 1 else "u"
    return "c" if is_cached else "f"


def _ids(block_ids: Sequence[int]) -> str:
    labels = [str(block) for block in block_ids[:_MAX_IDS]]
    if len(block_ids) > _MAX_IDS:
        labels.append(f"... {len(block_ids)} in all")
    return " ".join(labels)
