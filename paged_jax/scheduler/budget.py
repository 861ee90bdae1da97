"""What a step may still take while it is planned: tokens of its budget and free blocks."""

from paged_jax.scheduler.holdings import Holdings
from paged_jax.scheduler.request import Sequence


class StepBudget:
    """Tokens and blocks that are left of a step.

    Args:
      running: the sequences in slots. For each that joins them comes `promise`, or `keep_back`.
      holdings: counts blocks.
      num_tokens: most tokens in the step.
      num_free: free blocks before the step.

    Attributes:
      num_tokens: tokens that are left.
      num_free: free blocks that are left.
      num_promised: free blocks that running sequences will take, later in this step or in the
        next: each is promised the blocks of its remaining prefill and of its first decode.
    """

    def __init__(self, running: list[Sequence], holdings: Holdings, num_tokens: int, num_free: int):
        self.num_tokens = num_tokens
        self.num_free = num_free
        self.num_promised = self._num_growing = 0
        self._holdings = holdings
        for sequence in running:
            self.promise(sequence)

    @property
    def num_spare(self) -> int:
        """Blocks that a newcomer may claim; below 0 where too many are promised.

        One is kept back for each running sequence that will ever need more. It needs that block
        before it has decoded C tokens, so without it the newcomer is likely to be preempted soon.
        """
        return self.num_free - self.num_promised - self._num_growing

    def promise(self, sequence: Sequence) -> None:
        """Promise a running sequence the blocks that it will take."""
        self.num_promised += self._holdings.num_claimed(sequence)
        self.keep_back(sequence)

    def keep_back(self, sequence: Sequence) -> None:
        """Keep a block back for a running sequence if it will ever need more than was promised."""
        self._num_growing += self._holdings.can_grow(sequence)

    def take(self, num_tokens: int, num_blocks: int) -> None:
        """Count tokens of a running sequence, and blocks that were promised to it."""
        self.num_tokens -= num_tokens
        self.num_free -= num_blocks
        self.num_promised -= num_blocks
