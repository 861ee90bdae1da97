# pyright: strict
"""`Retention`: which tokens of a sequence a group of layers keeps, computed without jax.

Groups of layers differ in what a sequence holds, in when it is freed, in what the
prefix cache needs, and in what their pools cost. A rule answers all of these questions::

    AllTokens()      full and latent attention   every block, freed at the end of the sequence
    LastTokens(W)    sliding windows             the blocks that the next token attends to; a slot
                                                 frees the others when it grows
    LastState()      recurrent layers            one state

A new kind is a new rule. The allocator (`cache.blocks`), swapping (`cache.contents`), the scheduler
(`scheduler.block_budget`) and the planner (`engine.footprint`) only call its methods. What a group
as a whole must do is described in `cache.groups.Group`.

A slot frees blocks in the order of their columns, but lazily. So it has a *cursor*: all columns
before it that the rule does not keep are freed, see `BlockTables.first_columns`. Methods accept
integers and arrays of integers.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from paged_jax.cache.sequence_blocks import (
    Count,
    first_kept_column,
    max_blocks_in_window,
    num_blocks_needed,
)


class Retention:
    """Rule for the tokens that a group of layers keeps.

    The methods below describe a slot that keeps the columns from its cursor on. Instances are
    hashable, because they are static in compiled programs.

    Attributes:
      frees: whether slots free blocks while they grow. If not, tables have no cursors.
      is_fixed: whether a pool has the same size for any number of blocks of the first group.
    """

    frees: ClassVar[bool]
    is_fixed: ClassVar[bool] = False

    @property
    def num_tokens(self) -> float:
        """Number of last tokens of a sequence that are kept at least; infinite for all tokens."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """Description of the layers, such as ``"with a window of 1,024"``."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Short description for metrics, such as ``"1024"``."""
        raise NotImplementedError

    # What a sequence holds, and when it is freed

    def cursor(self, num_tokens: Count, block_size: int) -> Count:
        """Return the cursor of a slot that has freed all blocks it does not need any more.

        With n tokens in the cache, the slot needs the blocks that the next token attends to, and
        those that position ``n // C * C`` attends to, the first position of the next token's block.
        """
        raise NotImplementedError

    def num_freed(self, cursor: Count, block_size: int) -> Count:
        """Return the number of blocks that a slot with a cursor has freed."""
        return cursor

    def freed_column(self, index: Count, block_size: int) -> Count:
        """Return the column of the block that a slot frees as number `index`, from 0."""
        return index

    def is_kept(self, columns: Any, cursor: Any, block_size: int) -> Any:
        """Return whether a slot with a cursor keeps the blocks in `columns`."""
        return columns >= cursor

    def kept_column(self, index: Any, cursor: Any, block_size: int) -> Any:
        """Return the column of the kept block number `index`, from 0, of a slot with a cursor."""
        return index + cursor

    def num_kept(self, num_tokens: int, block_size: int) -> int:
        """Return the number of blocks that a sequence keeps, and that a swap copies."""
        num_blocks = num_blocks_needed(num_tokens, block_size)
        return num_blocks - self.num_freed(self.cursor(num_tokens, block_size), block_size)

    def shortest_length(self, cursor: Any, block_size: int) -> Any:
        """Return the smallest length to which a slot that has freed blocks can be cut."""
        raise NotImplementedError

    def max_restored(self, block_size: int) -> int:
        """Return the maximum number of tokens from the cursor of a restored slot to its end."""
        raise NotImplementedError

    # What the prefix cache needs

    def has_kept(self, num_missing: Any, cursors: Any, block_size: int) -> Any:
        """Return whether the prefix cache has the blocks that each prefix of a sequence needs.

        Args:
          num_missing: [N + 1], the number of missing blocks among the first 0, 1, ..., N blocks.
          cursors: [N + 1], the cursors of slots with 0, 1, ..., N full blocks.
          block_size: C, number of tokens in a block.
        """
        return num_missing[cursors] == num_missing

    # What a pool costs

    def max_in_slot(self, max_length: int, max_tokens: int, block_size: int) -> int:
        """Return the maximum number of blocks that a slot holds.

        Args:
          max_length: maximum number of tokens in a slot.
          max_tokens: maximum number of tokens that a program appends.
          block_size: C, number of tokens in a block.
        """
        width = num_blocks_needed(max_length, block_size)
        return min(width, self.max_held(max_tokens, block_size)) if self.frees else width

    def max_held(self, max_tokens: int, block_size: int) -> int:
        """Return the maximum number of blocks that a slot of any length holds.

        `max_tokens` is the maximum number of tokens that a program appends.
        """
        raise NotImplementedError

    def num_pool_blocks(self, num_first: int, num_useful: int) -> int:
        """Return the number of blocks of a group that is not the first one.

        Groups that keep all tokens have equal numbers of blocks, so they cache equal prefixes.

        Args:
          num_first: number of blocks of the first group.
          num_useful: maximum number of blocks that all slots together hold in this group.
        """
        return min(num_first, num_useful) if self.frees else num_first

    def num_accessed(self, length: int, block_size: int) -> int:
        """Return the number of places in blocks that a decode step reads and writes.

        These are the tokens that the last of `length` tokens attends to.
        """
        return int(min(length, self.num_tokens))

    # What layers may use the group

    def serves(self, window: int | None) -> bool:
        """Return whether the group keeps enough for a layer that attends to `window` tokens.

        `window` is None for a layer that attends to all tokens.
        """
        return (math.inf if window is None else window) <= self.num_tokens


@dataclass(frozen=True)
class AllTokens(Retention):
    """The rule of layers that attend to all tokens, with full or latent attention."""

    frees: ClassVar[bool] = False

    @property
    def num_tokens(self) -> float:
        """Infinite."""
        return math.inf

    @property
    def text(self) -> str:
        """Description of the layers."""
        return "that keep all tokens"

    @property
    def label(self) -> str:
        """Short description for metrics."""
        return "all"

    def cursor(self, num_tokens: Count, block_size: int) -> Count:
        """Return 0."""
        count: Any = num_tokens
        return count * 0


@dataclass(frozen=True)
class LastTokens(Retention):
    """The rule of layers with a sliding window, see `first_kept_column`.

    Attributes:
      window: W, number of tokens that a query attends to, including its own position.

    Example:
      >>> [LastTokens(8).num_kept(n, block_size=16) for n in (16, 40)]
      [1, 2]
      >>> [LastTokens(w).max_in_slot(32768, 512, block_size=16) for w in (1024, 65536)]
      [97, 2048]
    """

    window: int
    frees: ClassVar[bool] = True

    @property
    def num_tokens(self) -> float:
        """The window."""
        return self.window

    @property
    def text(self) -> str:
        """Description of the layers."""
        return f"with a window of {self.window:,}"

    @property
    def label(self) -> str:
        """Short description for metrics."""
        return str(self.window)

    def cursor(self, num_tokens: Count, block_size: int) -> Count:
        """Return the first column of the window."""
        return first_kept_column(num_tokens, self.window, block_size)

    def shortest_length(self, cursor: Any, block_size: int) -> Any:
        """Return the smallest length at which the next token attends to no freed block."""
        return num_blocks_needed(cursor * block_size + self.window - 1, block_size) * block_size

    def max_restored(self, block_size: int) -> int:
        """Return the maximum number of tokens from the cursor of a restored slot to its end.

        These are the window of the first token in the last block, fewer than C tokens before this
        window (in its first block), and fewer than C tokens after it.
        """
        return self.window + 2 * block_size

    def max_held(self, max_tokens: int, block_size: int) -> int:
        """Return the blocks of a window and of the tokens that the last program appended."""
        return max_blocks_in_window(self.window, max_tokens, block_size)


@dataclass(frozen=True)
class LastState(Retention):
    """The rule of recurrent layers: no tokens, but the state after the last token.

    It counts as one block.
    """

    frees: ClassVar[bool] = False
    is_fixed: ClassVar[bool] = True

    @property
    def num_tokens(self) -> float:
        """Return 0."""
        return 0

    @property
    def text(self) -> str:
        """Description of the layers."""
        return "that are recurrent"

    @property
    def label(self) -> str:
        """Short description for metrics."""
        return "states"

    def num_kept(self, num_tokens: int, block_size: int) -> int:
        """Return 1, or 0 for a sequence without tokens."""
        return min(num_tokens, 1)

    def max_in_slot(self, max_length: int, max_tokens: int, block_size: int) -> int:
        """Return 1."""
        return 1

    def num_pool_blocks(self, num_first: int, num_useful: int) -> int:
        """Return the number of states for slots and snapshots."""
        return num_useful

    def num_accessed(self, length: int, block_size: int) -> int:
        """Return the places of two blocks: a step reads a state, and writes a whole new one."""
        return 2 * block_size


def retention(window: int | Retention | None) -> Retention:
    """Return the rule of layers with a sliding window of `window` tokens, or with no window.

    Example:
      >>> retention(None), retention(8)
      (AllTokens(), LastTokens(window=8))
    """
    if isinstance(window, Retention):
        return window
    return AllTokens() if window is None else LastTokens(window)
