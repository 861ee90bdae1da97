"""How many blocks tokens take, and how many tokens of a sequence are cached. Imports no jax."""


def num_blocks_needed(num_tokens, block_size: int):
    """Return how many blocks `num_tokens` tokens fill or begin; integers or arrays of them.

    Example:
      >>> [num_blocks_needed(n, 16) for n in (0, 1, 16, 17)]
      [0, 1, 1, 2]
    """
    return (num_tokens + block_size - 1) // block_size


def num_cached_tokens_at(length: int) -> int:
    """Return how many tokens of a sequence are in the cache once it has `length` tokens.

    A token's K and V are computed when it is the input of the step that draws the next one. The
    last token is the input of no step, so it is never written to the cache.

    Example:
      >>> num_cached_tokens_at(5)
      4
    """
    return length - 1


def length_with_cached_tokens(num_tokens: int) -> int:
    """Return the length of a sequence that has `num_tokens` tokens in the cache.

    The inverse of `num_cached_tokens_at`.

    Example:
      >>> length_with_cached_tokens(4)
      5
    """
    return num_tokens + 1
