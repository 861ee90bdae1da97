"""Which waiting sequences get slots and blocks, and what the others wait for."""

from paged_jax.scheduler.budget import StepBudget
from paged_jax.scheduler.holdings import Holdings
from paged_jax.scheduler.memory import BlockMemory
from paged_jax.scheduler.outputs import WaitReason
from paged_jax.scheduler.plan import SchedulerStats
from paged_jax.scheduler.planning import StepPlanner
from paged_jax.scheduler.prefixes import SharedPrefixes
from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.reasons import NO_FACTS, WaitFacts
from paged_jax.scheduler.request import Sequence


class Admission:
    """Gives slots to waiting sequences, in the order of the line.

    Args:
      queue: the waiting line and the slots.
      prefixes: the prefixes that are being computed.
      stats: totals of the scheduler; admissions and look-ups are counted here.
      num_slots: S, most sequences that run at once.
      holdings: counts blocks.
      max_num_batched_tokens: most tokens in a step.
    """

    def __init__(
        self,
        queue: Queue,
        prefixes: SharedPrefixes,
        stats: SchedulerStats,
        *,
        num_slots: int,
        holdings: Holdings,
        max_num_batched_tokens: int,
    ):
        self._queue = queue
        self._prefixes = prefixes
        self._stats = stats
        self._num_slots = num_slots
        self._holdings = holdings
        self._max_num_batched_tokens = max_num_batched_tokens
        # Sequences that the last call of `admit` gave a reason to wait.
        self._refused: list[Sequence] = []

    def clear(self) -> None:
        """Forget the sequences that were refused."""
        self._refused = []

    def admit(self, memory: BlockMemory, planner: StepPlanner) -> bool:
        """Admit sequences and plan their first chunks, until one does not fit. None overtakes that
        one, or a large one might wait forever. Only those are passed over that wait for a prefix
        that a running sequence computes.

        Returns:
          Whether the next step could admit more, even if none leaves in this one.
        """
        queue, budget = self._queue, planner.budget
        refused, self._refused = self._refused, []
        computing = self._prefixes.next_blocks(queue.running)
        for sequence in queue.waiting:
            reason = self._reason_to_wait(budget, sequence, computing)
            if not reason and not self.try_to_start(memory, budget, sequence):
                reason = "blocks"
            if not reason:
                planner.add_chunk(sequence)
                computing |= self._prefixes.next_block(sequence)
                continue
            self._refuse(sequence, reason, budget)
            if reason != "same prefix":
                break
        still_refused = set(self._refused)
        for sequence in refused:
            if sequence.waits_for and sequence not in still_refused:
                queue.note_turn(sequence)
        is_brief = any(s.waits_for in ("budget", "same prefix") for s in self._refused)
        return is_brief and bool(queue.free_slots)

    def try_to_start(self, memory: BlockMemory, budget: StepBudget, sequence: Sequence) -> bool:
        """Let a sequence run if there are blocks for its whole prefill and first decode.

        What it finds in the cache is known only after it was attached. So that a sequence that
        waits is not attached in every step, the number of free blocks that it wanted is kept, and
        it is tried again when there are as many, when others have prefilled, or when none runs.

        Returns:
          Whether it runs; otherwise nothing has changed.
        """
        queue, entry = self._queue, self._queue.entries[sequence]
        num_spare = budget.num_spare
        if queue.running and entry.num_wanted > num_spare:
            return False
        num_free = memory.num_free
        sequence.slot = queue.free_slots[-1]
        is_looked_up = self._prefixes.num_cacheable(sequence) > 0 and not sequence.is_swapped
        if is_looked_up:
            sequence.num_computed = memory.attach(sequence)
        num_attached = num_free - memory.num_free
        num_needed = self._holdings.num_admitted(len(sequence.token_ids))
        if not sequence.is_swapped:
            start = sequence.num_computed
            num_needed -= self._holdings.num_in_row(start, start)
        entry.num_wanted = num_attached + num_needed
        if entry.num_wanted > num_spare:
            if is_looked_up:
                memory.release(sequence)
                sequence.num_computed = 0
            sequence.slot = None
            return False
        if sequence.is_swapped:
            memory.swap_in(sequence)
            queue.mark_swapped(sequence, False)
            num_attached = num_free - memory.num_free
        else:
            self._count_lookup(sequence, is_looked_up)
        budget.num_free -= num_attached
        budget.promise(sequence)
        queue.waiting.remove(sequence)
        queue.take_slot(sequence)
        return True

    def retry_refused(self) -> None:
        """Try again what was refused: it may find more in the cache, as others have prefilled."""
        for sequence in self._refused:
            if sequence in self._queue.entries:
                self._queue.entries[sequence].num_wanted = 0

    def _reason_to_wait(
        self, budget: StepBudget, sequence: Sequence, computing: set[bytes]
    ) -> WaitReason:
        """Why a sequence cannot start yet, whatever blocks there are; empty if it can."""
        if self._prefixes.will_be_cached(sequence, computing):
            return "same prefix"
        if not self._queue.free_slots:
            return "slots"
        if not budget.num_tokens:
            return "budget"
        return ""

    def _refuse(self, sequence: Sequence, reason: WaitReason, budget: StepBudget) -> None:
        self._refused.append(sequence)
        facts = NO_FACTS
        if sequence.history is not None:
            facts = self._facts(sequence, reason, budget)
        self._queue.note_wait(sequence, reason, facts)

    def _facts(self, sequence: Sequence, reason: WaitReason, budget: StepBudget) -> WaitFacts:
        """The numbers of this moment behind a reason to wait."""
        match reason:
            case "slots":
                return WaitFacts({"num_slots": self._num_slots})
            case "budget":
                return WaitFacts({"max_num_batched_tokens": self._max_num_batched_tokens})
            case "blocks":
                num_kept = min(budget.num_free, budget.num_free - budget.num_spare)
                numbers = {"num_free": budget.num_free, "num_kept": num_kept}
                num_wanted = self._queue.entries[sequence].num_wanted
                if num_wanted:
                    return WaitFacts({"num_wanted": num_wanted, **numbers})
                # Where no block can be spared, what it would find has not been looked up.
                most = self._holdings.num_admitted(len(sequence.token_ids))
                return WaitFacts({"most_wanted": most, **numbers})
            case "same prefix":
                owner = next(
                    running.request
                    for running in self._queue.running
                    if self._prefixes.will_be_cached(sequence, self._prefixes.next_block(running))
                )
                is_own = owner is sequence.request
                return WaitFacts(other_request=None if is_own else owner.request_id)
            case _:
                return NO_FACTS

    def _count_lookup(self, sequence: Sequence, is_looked_up: bool) -> None:
        if is_looked_up:
            self._stats.num_queried_tokens += len(sequence.token_ids) - 1
            self._stats.num_cached_tokens += sequence.num_computed
        num_lost = self._queue.entries[sequence].num_lost
        num_found = min(sequence.num_computed, num_lost)
        self._stats.num_recomputed_tokens += num_lost - num_found
