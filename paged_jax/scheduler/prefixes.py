"""Which blocks of prompts the prefix cache will soon have, because they are being computed."""

from paged_jax.scheduler.request import Sequence


class SharedPrefixes:
    """Finds sequences that should wait for a prefix that another one is computing.

    One block is enough to compare: a digest stands for its position and for all blocks before it,
    so a sequence that has any later block in common with the other has this one too.

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

    def next_block(self, sequence: Sequence) -> set[bytes]:
        """The digest of the block that a prefilling sequence computes next; empty if no other
        sequence can use it."""
        column = sequence.num_computed // self._block_size
        if column >= self.num_cacheable(sequence):
            return set()
        return {sequence.digests[column]}

    def next_blocks(self, running: list[Sequence]) -> set[bytes]:
        """The digests of the next blocks of all running sequences that prefill."""
        return set().union(*map(self.next_block, running))

    def will_be_cached(self, sequence: Sequence, computing: set[bytes]) -> bool:
        """Whether one of the blocks that are being computed is part of the sequence's prefix."""
        if not computing or sequence.is_swapped:
            return False
        return not computing.isdisjoint(sequence.digests[: self.num_cacheable(sequence)])
