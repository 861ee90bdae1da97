"""Choice of the sequence to preempt, and of swapping or recomputing its blocks."""

from dataclasses import dataclass
from typing import Literal

from paged_jax.scheduler.block_budget import BlockBudget
from paged_jax.scheduler.outputs import PreemptionAdvantage
from paged_jax.scheduler.request import Sequence

Preemption = Literal["auto", "recompute", "swap"]
"""What happens to the blocks of a preempted sequence. ``"auto"`` chooses the cheaper way."""

# Reasons to spare a candidate, in the order of `PreemptionPolicy.rank`.
_ADVANTAGES: tuple[PreemptionAdvantage, ...] = (
    "priority",
    "progress",
    "cost",
    "arrival",
    "index",
)


@dataclass
class PreemptionCosts:
    """Costs of both ways to preempt a sequence.

    Attributes:
      seconds_per_token: seconds to compute a token again.
      seconds_per_block: seconds to copy a block of all layers between device and host. A swap
        copies each block twice.
      max_swapped_blocks: maximum number of blocks in host memory; None if unlimited.
    """

    seconds_per_token: float = 1e-4
    seconds_per_block: float = 1e-4
    max_swapped_blocks: int | None = None


@dataclass(frozen=True)
class PreemptionPolicy:
    """Choice of the sequence to preempt. It changes no state.

    Attributes:
      preemption: ``"recompute"``, ``"swap"`` or ``"auto"``.
      costs: costs of both ways.
      block_budget: counts blocks.
      num_swapped_blocks: number of blocks in host memory.
    """

    preemption: Preemption
    costs: PreemptionCosts
    block_budget: BlockBudget
    num_swapped_blocks: int

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """Return the sequence to preempt: the candidate of lowest `rank`."""
        return min(candidates, key=self.rank)

    def rank(self, sequence: Sequence) -> tuple[int, bool, float, int, int]:
        """Return the rank of a sequence. The sequence of lowest rank is preempted first.

        The order is: worst priority, progress since it resumed, lowest cost, latest arrival. A
        sequence that has gained no token since it resumed is spared if another candidate of the
        same priority has gained one. Otherwise two sequences could preempt each other again and
        again.
        """
        has_progressed = len(sequence.token_ids) > sequence.length_before
        priority, arrival, index = sequence.seniority
        return -priority, not has_progressed, self._cost(sequence), -arrival, -index

    def is_swapped(self, sequence: Sequence) -> bool:
        """Return whether the blocks would be swapped instead of released and recomputed."""
        if self.preemption == "recompute" or not sequence.num_computed:
            return False
        if not self._fits_host(sequence):
            return False
        return self.preemption == "swap" or self._swap_cost(sequence) < self._recompute_cost(
            sequence
        )

    def advantage(
        self, victim: Sequence, candidates: list[Sequence]
    ) -> tuple[Sequence, PreemptionAdvantage] | None:
        """Return the next candidate after the victim, and why it is spared.

        Returns None if the victim is the only candidate.
        """
        others = [s for s in candidates if s is not victim]
        if not others:
            return None
        other = self.victim(others)
        pairs = zip(_ADVANTAGES, self.rank(victim), self.rank(other), strict=True)
        return other, next(name for name, own, its in pairs if own != its)

    def _cost(self, sequence: Sequence) -> float:
        """Return the seconds that preempting this sequence costs."""
        if self.is_swapped(sequence):
            return self._swap_cost(sequence)
        return self._recompute_cost(sequence)

    def _recompute_cost(self, sequence: Sequence) -> float:
        # An upper bound: part of the sequence may still be in the prefix cache when it resumes.
        return sequence.num_computed * self.costs.seconds_per_token

    def _swap_cost(self, sequence: Sequence) -> float:
        num_blocks = self.block_budget.num_swapped(sequence.num_computed)
        return 2 * num_blocks * self.costs.seconds_per_block

    def _fits_host(self, sequence: Sequence) -> bool:
        most = self.costs.max_swapped_blocks
        num_blocks = self.block_budget.num_swapped(sequence.num_computed)
        return most is None or self.num_swapped_blocks + num_blocks <= most
