"""How many blocks tokens take, and how many tokens of a sequence are cached. Imports no jax."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np


def num_blocks_needed(num_tokens, block_size: int):
    """Return how many blocks `num_tokens` tokens fill or begin; integers or arrays of them.

    Example:
      >>> [num_blocks_needed(n, 16) for n in (0, 1, 16, 17)]
      [0, 1, 1, 2]
    """
    return (num_tokens + block_size - 1) // block_size


def first_kept_column(num_tokens, window: int, block_size: int):
    """Return the first column of the block table that is still needed; integers or arrays of them.

    With n tokens in the cache, the next one attends to positions ``n - window + 1 .. n``. Kept is
    what the first token of its block attends to, position ``n // C * C``: a slot so never holds
    more than it does at the beginning of a block, and when it is released, the prefix cache has all
    that a continuation of its full blocks needs.

    Example:
      >>> [first_kept_column(n, window=10, block_size=4) for n in (0, 12, 15, 16, 20)]
      [0, 0, 0, 1, 2]
    """
    start = num_tokens // block_size * block_size + 1 - window
    return start * (start > 0) // block_size


def num_kept_blocks(num_tokens: int, window: int | None, block_size: int) -> int:
    """Return how many blocks of a sequence are kept: those of all tokens, or of a window.

    Example:
      >>> num_kept_blocks(40, None, 16), num_kept_blocks(40, 8, 16)
      (3, 2)
    """
    num_blocks = num_blocks_needed(num_tokens, block_size)
    if window is None:
        return num_blocks
    return num_blocks - first_kept_column(num_tokens, window, block_size)


def max_blocks_in_window(window: int, max_tokens: int, block_size: int) -> int:
    """Return the most blocks that a slot holds of layers with a sliding window.

    Those of the window and of the next token, and those of all others that the last program has
    appended, which were `max_tokens` in all at most: a program gives blocks back before it takes
    others.

    Example:
      >>> max_blocks_in_window(window=1024, max_tokens=512, block_size=16)
      97
    """
    num_further = num_blocks_needed(max_tokens - 1, block_size)
    return num_blocks_needed(window - 1, block_size) + 1 + num_further


def max_blocks_in_slot(
    window: int | None, max_length: int, max_tokens: int, block_size: int
) -> int:
    """Return the most blocks that a slot of up to `max_length` tokens holds of some layers.

    All of them where `window` is None, else see `max_blocks_in_window`.

    Example:
      >>> [max_blocks_in_slot(window, 32768, 512, 16) for window in (None, 1024, 65536)]
      [2048, 97, 2048]
    """
    width = num_blocks_needed(max_length, block_size)
    if window is None:
        return width
    return min(width, max_blocks_in_window(window, max_tokens, block_size))


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


def root_digest(weights: bytes, cache_salt: str = "") -> bytes:
    """The parent of every first block: 32 bytes.

    Args:
      weights: identifies the weights, and whatever else K and V depend on.
      cache_salt: only requests with the same salt share blocks.

    Example:
      >>> root_digest(b"v1") == root_digest(b"v1", "tenant")
      False
    """
    # The length keeps the two apart: without it (b"ab", "c") and (b"a", "bc") would be the same.
    parts = struct.pack("<q", len(weights)), weights, cache_salt.encode()
    return hashlib.sha256(b"".join(parts)).digest()


def link_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a full block, 32 bytes, from that of the block before it, or the root.

    Example:
      >>> link_digest(root_digest(b"v1"), [1, 2, 3, 4]).hex()[:8]
      '2e13baba'
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}i", *token_ids)).digest()


class PrefixChain:
    """The digests of one growing sequence, each computed once.

    Args:
      root: see `root_digest`.
      block_size: C, the number of tokens in a block.

    Example:
      >>> chain = PrefixChain(root_digest(b"v1"), block_size=2)
      >>> [len(chain.digests([5, 6, 7])), len(chain.digests([5, 6, 7, 8]))]
      [1, 2]
    """

    def __init__(self, root: bytes, block_size: int):
        self.root = root
        self.block_size = block_size
        self._digests: list[bytes] = []

    def digests(self, token_ids: Sequence[int]) -> list[bytes]:
        """The digest of every full block of `token_ids`, which may only have grown since the last
        call. The list is the chain's own: do not change it."""
        for start in range(
            len(self._digests) * self.block_size,
            len(token_ids) - self.block_size + 1,
            self.block_size,
        ):
            parent = self._digests[-1] if self._digests else self.root
            block = token_ids[start : start + self.block_size]
            self._digests.append(link_digest(parent, block))
        return self._digests


def digest_words(digests: Sequence[bytes]) -> np.ndarray:
    """Digests as the device keeps them: u32[N, 8].

    Example:
      >>> digest_words([root_digest(b"v1")]).shape
      (1, 8)
    """
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, 8)
