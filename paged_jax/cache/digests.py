# pyright: strict, reportUnknownMemberType=false
"""Digests of the full blocks of a sequence, computed without jax.

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

import numpy as np


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
