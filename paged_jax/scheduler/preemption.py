"""Which sequence loses its blocks when they run out, whether they are swapped, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paged_jax.scheduler.holdings import Holdings
from paged_jax.scheduler.outputs import PreemptionAdvantage
from paged_jax.scheduler.queue import Entry
from paged_jax.scheduler.request import Sequence

Preemption = Literal["auto", "recompute", "swap"]
"""How blocks are taken away; ``"auto"`` is whichever costs less."""

# Why a victim is chosen before another, in the order of `PreemptionPolicy.rank`.
_ADVANTAGES: tuple[PreemptionAdvantage, ...] = (
    "priority",
    "progress",
    "cost",
    "arrival",
    "index",
)


@dataclass
class PreemptionCosts:
    """What it costs to take a sequence's blocks away: the cheaper way is taken.

    Attributes:
      seconds_per_token: seconds to compute a token again.
      seconds_per_block: seconds to copy a block of all layers between device and host; a swap
        copies each twice.
      max_swapped_blocks: blocks that fit host memory; None for any number.
    """

    seconds_per_token: float = 1e-4
    seconds_per_block: float = 1e-4
    max_swapped_blocks: int | None = None


@dataclass(frozen=True)
class PreemptionPolicy:
    """The choice of a victim at one moment. It changes nothing.

    Attributes:
      preemption: the ways to take blocks away that are allowed.
      costs: the costs of these ways.
      holdings: counts blocks.
      num_swapped_blocks: blocks that are in host memory already.
      entries: what the scheduler remembers of each sequence.
    """

    preemption: Preemption
    costs: PreemptionCosts
    holdings: Holdings
    num_swapped_blocks: int
    entries: Mapping[Sequence, Entry]

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """The candidate of the worst priority that loses least, then the newest."""
        return min(candidates, key=self.rank)

    def rank(self, sequence: Sequence) -> tuple[int, bool, float, int, int]:
        """Ranks sequences: the smaller, the sooner it is preempted.

        A sequence that came back and has gained no tokens since is spared if there is another: else
        the same two might preempt each other again and again.
        """
        has_progressed = len(sequence.token_ids) > self.entries[sequence].length_before
        priority, arrival, index = sequence.seniority
        return -priority, not has_progressed, self._cost(sequence), -arrival, -index

    def is_swapped(self, sequence: Sequence) -> bool:
        """Whether its blocks would be swapped, and not released to be computed again."""
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
        """The candidate that would have been next, and what it has before the victim; None if there
        was no other."""
        others = [s for s in candidates if s is not victim]
        if not others:
            return None
        other = self.victim(others)
        pairs = zip(_ADVANTAGES, self.rank(victim), self.rank(other), strict=True)
        return other, next(name for name, own, its in pairs if own != its)

    def _cost(self, sequence: Sequence) -> float:
        """Seconds that are lost if this sequence is preempted."""
        if self.is_swapped(sequence):
            return self._swap_cost(sequence)
        return self._recompute_cost(sequence)

    def _recompute_cost(self, sequence: Sequence) -> float:
        # Less if the prefix cache still has some of it, which is not known beforehand.
        return sequence.num_computed * self.costs.seconds_per_token

    def _swap_cost(self, sequence: Sequence) -> float:
        num_blocks = self.holdings.num_swapped(sequence.num_computed)
        return 2 * num_blocks * self.costs.seconds_per_block

    def _fits_host(self, sequence: Sequence) -> bool:
        most = self.costs.max_swapped_blocks
        num_blocks = self.holdings.num_swapped(sequence.num_computed)
        return most is None or self.num_swapped_blocks + num_blocks <= most
