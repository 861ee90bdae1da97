"""Names for the content of KV blocks: the prefix cache finds a block by what leads up to it.

K and V of a token depend on all tokens before it, so a block is named by the whole sequence up to
its end: each digest covers the block's tokens and the digest of the block before.

    root = sha256(weights, cache_salt)      link = sha256(parent, tokens as little-endian int32)

Equal digests mean equal prefixes under equal weights and an equal salt: neither another tenant nor
yesterday's weights can hit. Blocks that are not full have no digest. Plain Python and NumPy.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np


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
