# pyright: strict, reportUnknownMemberType=false
"""Counts of the blocks in use: of each group of layers, and saved by sharing."""

import dataclasses

from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """Use of the pool of a group of layers.

    Attributes:
      kept: the tokens that the layers keep, see `Retention.label`: ``"all"``, the window as text,
        or ``"states"``.
      description: the layers in words, see `Retention.text`.
      num_layers: number of layers in the group.
      num_blocks: number of blocks in the pool; for recurrent layers, number of states.
      num_used: number of these blocks or states that samples use.
    """

    kept: str
    description: str
    num_layers: int
    num_blocks: int
    num_used: int


class BlockMeter:
    """Counter of the blocks in use, and of the blocks that are saved by sharing.

    Args:
      stats: statistics of the engine; each count updates them.
      scheduler: scheduler with the running sequences.
      runner: runner that knows the number of free blocks.

    Attributes:
      free_blocks: number of free blocks of each group of layers, and of free states, at the last
        count.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, runner: ModelRunner):
        self._stats = stats
        self._scheduler = scheduler
        self._runner = runner
        self.free_blocks = runner.free_blocks
        # These are sums over all steps: the number of blocks that sharing saved, and the number of
        # blocks that would be in use without sharing.
        self._num_saved = 0
        self._num_unshared = 0

    @property
    def num_held(self) -> int:
        """Number of blocks of the first group that were in use at the last call of `count`."""
        return self._scheduler.num_blocks - self.free_blocks[0]

    def count_step(self, plan: StepPlan, tokens: StepTokens | None) -> None:
        """Count the blocks in use at the end of a step.

        Call it before the tokens of the step are appended to the sequences.
        """
        num_new: dict[Sequence, int] = {}
        if tokens is not None:
            num_new = dict(zip(plan.decodes, tokens.num_new.tolist(), strict=False))
        # Also count sequences that ended after this step was queued, because they still used their
        # blocks during the step.
        ended_sequences = [sequence for sequence in plan.decodes if sequence.slot is None]
        # Blocks that leave a window while a program runs are freed only by the next program. So
        # count the blocks that the window contained when the last program began.
        row = self._scheduler.block_budget.num_in_row
        starts: list[tuple[int, int]] = []
        for sequence in [*self._scheduler.running, *ended_sequences]:
            num_drawn = num_new.get(sequence, 0)
            start = sequence.num_computed if num_drawn else sequence.program_start
            starts.append((sequence.num_computed + num_drawn, start))
        # Use the numbers of free blocks that the step itself returned, because the device may
        # already run the next step.
        if tokens is None:
            free_blocks = self._runner.free_blocks
        else:
            free_blocks = [int(num_free) for num_free in tokens.free_blocks]
        self.count(sum(row(length, start) for length, start in starts), free_blocks)

    def count(self, num_unshared: int, free_blocks: list[int]) -> None:
        """Update the statistics with the number of blocks in use at the end of a step.

        Args:
          num_unshared: number of blocks that the sequences would use without sharing.
          free_blocks: number of free blocks of each group of layers.
        """
        self.free_blocks = free_blocks
        num_held = self.num_held
        self._stats.peak_num_blocks = max(self._stats.peak_num_blocks, num_held)
        self._num_saved += num_unshared - num_held
        self._num_unshared += num_unshared
        self._stats.sharing = self._num_saved / max(1, self._num_unshared)
