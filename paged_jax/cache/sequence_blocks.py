# pyright: strict, reportUnknownMemberType=false
"""The number and the digests of the blocks of a sequence, computed without jax.

The K and V of a token depend on all tokens before it, so the digest of a full block covers the
tokens of the block and the digest of the previous block, its parent. The parent of the first block
is the root. Blocks that are not full have no digest.

    root   = sha256(weights, cache_salt)
    digest = sha256(parent, tokens as little-endian int32)

Equal digests mean that the prefixes, the weights and the salts are equal. So a request cannot reuse
blocks of another tenant (with another salt), or blocks that were computed with older weights.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

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


def root_digest(weights: bytes, cache_salt: str = "") -> bytes:
    """Return the 32-byte digest that is the parent of every first block.

    Args:
      weights: bytes that identify the weights, and everything else that K and V depend on.
      cache_salt: only requests with the same salt share blocks.

    Example:
      >>> root_digest(b"v1") == root_digest(b"v1", "tenant")
      False
    """
    # Hash the length of `weights` too: otherwise (b"ab", "c") and (b"a", "bc") would have the same
    # digest.
    parts = struct.pack("<q", len(weights)), weights, cache_salt.encode()
    return hashlib.sha256(b"".join(parts)).digest()


def link_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the 32-byte digest of a full block.

    Args:
      parent: digest of the previous block, or `root_digest` for the first block.
      token_ids: the tokens of the block.

    Example:
      >>> link_digest(root_digest(b"v1"), [1, 2, 3, 4]).hex()[:8]
      '2e13baba'
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}i", *token_ids)).digest()


class PrefixChain:
    """Digests of the full blocks of one growing sequence; each digest is computed once.

    Args:
      root: see `root_digest`.
      block_size: C, tokens per block.

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
        """Return the digest of every full block of `token_ids`.

        `token_ids` must begin with the tokens of the previous call. Do not modify the returned
        list, because the chain keeps it.
        """
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
    """Return 32-byte digests as an array u32[N, 8], the format of the functions on the device.

    Example:
      >>> digest_words([root_digest(b"v1")]).shape
      (1, 8)
    """
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, 8)
