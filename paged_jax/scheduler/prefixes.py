"""Which blocks of prompts the prefix cache will soon have, because they are being computed."""

from paged_jax.scheduler.request import Sequence

# The position of a block in its sequence, and its digest.
NextBlock = tuple[int, bytes]


class SharedPrefixes:
    """Finds sequences that should wait for a prefix that another one is computing.

    One block is enough to compare: a digest stands for all blocks before it, so a sequence that
    has any later block in common with the other has this one too.

    Args:
      block_size: C, tokens in a block.
      is_enabled: whether prompts are looked up in the cache at all.
    """

    def __init__(self, block_size: int, is_enabled: bool):
        self._block_size = block_size
        self._is_enabled = is_enabled

    def num_cacheable(self, sequence: Sequence) -> int:
        """Blocks that may come from the cache: the full ones of all tokens but the last."""
        if not self._is_enabled or sequence.chain is None:
            return 0
        return (len(sequence.token_ids) - 1) // self._block_size

    def next_block(self, sequence: Sequence) -> list[NextBlock]:
        """The block that a prefilling sequence computes next; empty if no other can use it."""
        column = sequence.num_computed // self._block_size
        if column >= self.num_cacheable(sequence):
            return []
        return [(column, sequence.digests[column])]

    def next_blocks(self, running: list[Sequence]) -> list[NextBlock]:
        """The next blocks of all running sequences that prefill."""
        return [block for sequence in running for block in self.next_block(sequence)]

    def will_be_cached(self, sequence: Sequence, computing: list[NextBlock]) -> bool:
        """Whether one of the blocks that are being computed is part of the sequence's prefix."""
        if not computing or sequence.is_swapped:
            return False
        num_cacheable = self.num_cacheable(sequence)
        return any(
            column < num_cacheable and sequence.digests[column] == digest
            for column, digest in computing
        )
