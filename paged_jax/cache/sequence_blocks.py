# pyright: strict, reportUnknownMemberType=false
"""Numbers of blocks and of cached tokens of a sequence, computed from its length without jax."""

from typing import Any, TypeVar

# The type of counts, which are integers or arrays of integers.
Count = TypeVar("Count")


def num_blocks_needed(num_tokens: Count, block_size: int) -> Count:
    """Return the number of blocks for `num_tokens` tokens, an integer or an array of integers.

    Example:
      >>> [num_blocks_needed(n, 16) for n in (0, 1, 16, 17)]
      [0, 1, 1, 2]
    """
    count: Any = num_tokens
    return (count + block_size - 1) // block_size


def first_kept_column(num_tokens: Count, window: int, block_size: int) -> Count:
    """Return the first column of the block table that a slot with a sliding window keeps.

    With n tokens in the cache, the next token has position n and attends to the positions
    ``n - window + 1 .. n``. The slot also keeps the blocks that position ``n // C * C`` attends to;
    this is the first position in the block of position n. So after the slot is released, another
    sequence with the same full blocks finds all blocks that it needs in the prefix cache.

    Args:
      num_tokens: number of tokens in the cache, an integer or an array of integers.
      window: number of tokens that a query attends to, including its own position.
      block_size: C, number of tokens in a block.

    Example:
      >>> [first_kept_column(n, window=10, block_size=4) for n in (0, 12, 15, 16, 20)]
      [0, 0, 0, 1, 2]
    """
    count: Any = num_tokens
    start = count // block_size * block_size + 1 - window
    return start * (start > 0) // block_size


def max_blocks_in_window(window: int, max_tokens: int, block_size: int) -> int:
    """Return the maximum number of blocks that a slot holds in layers with a sliding window.

    The slot holds the blocks that the next token attends to, and the blocks of the tokens that the
    last program appended, at most `max_tokens`. Blocks are freed before new ones are allocated.

    Example:
      >>> max_blocks_in_window(window=1024, max_tokens=512, block_size=16)
      97
    """
    num_further = num_blocks_needed(max_tokens - 1, block_size)
    return num_blocks_needed(window - 1, block_size) + 1 + num_further


def num_cached_tokens_at(length: int) -> int:
    """Return the number of tokens in the cache for a sequence with `length` tokens.

    The K and V of a token are computed in the step that samples the token after it. So the last
    token of a sequence is not in the cache.

    Example:
      >>> num_cached_tokens_at(5)
      4
    """
    return length - 1
