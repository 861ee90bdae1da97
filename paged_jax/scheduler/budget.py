"""What a step may still take while it is planned: tokens of its budget and free blocks."""

from paged_jax.scheduler.holdings import Holdings
from paged_jax.scheduler.request import Sequence


class StepBudget:
    """Tokens and blocks that are left of a step.

    Args:
      running: the sequences in slots; a live list that grows as sequences are admitted.
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
        self.num_promised = sum(map(holdings.num_claimed, running))
        self._running = running
        self._holdings = holdings

    @property
    def num_spare(self) -> int:
        """Blocks that a newcomer may claim; below 0 where too many are promised.

        One is kept back for each running sequence that will ever need more. It needs that block
        before it has decoded C tokens, so without it the newcomer is likely to be preempted soon.
        """
        growing = [s for s in self._running if self._holdings.can_grow(s)]
        return self.num_free - self.num_promised - len(growing)

    def take(self, num_tokens: int, num_blocks: int) -> None:
        """Count tokens of a running sequence, and blocks that were promised to it."""
        self.num_tokens -= num_tokens
        self.num_free -= num_blocks
        self.num_promised -= num_blocks
