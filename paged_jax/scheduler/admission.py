"""`Admission`: decides which waiting sequences start in a step, and why the others wait.

It also decides where recurrent states are worth publishing, because sequences share a prefix: it
adds these points to `Sequence.branch_points`.
"""

import itertools
from collections.abc import Iterable

from paged_jax.scheduler.block_budget import BlockBudget
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.outputs import WaitReason
from paged_jax.scheduler.plan_builder import PlanBuilder
from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.request import Sequence


class Admission:
    """Admits waiting sequences to slots, in the order of the queue.

    A sequence waits while a running sequence computes a prefix that both share. To find this out,
    it is enough to look for the digest of the block that the running sequence computes next among
    the digests of the waiting sequence. A digest covers all earlier blocks, so sequences that share
    a later block also share this block.

    Args:
      queue: the waiting sequences and the slots.
      block_budget: object that counts the blocks of sequences.
      stats: statistics of the engine; look-ups in the prefix cache are counted there.
      max_num_batched_tokens: maximum number of tokens in a step.
      enable_prefix_caching: whether prompts are looked up in the prefix cache.
      state_interval: see `Scheduler`.
    """

    def __init__(
        self,
        queue: Queue,
        block_budget: BlockBudget,
        stats: EngineStats,
        *,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        state_interval: int | None = None,
    ):
        self._queue = queue
        self._block_budget = block_budget
        self._stats = stats
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._state_interval = state_interval
        # Sequences that the last call of `admit` considered but did not start.
        self._deferred: list[Sequence] = []

    def clear(self) -> None:
        """Remove the references to deferred sequences."""
        self._deferred = []

    def admit(self, builder: PlanBuilder) -> bool:
        """Start waiting sequences and plan their first chunks, until a sequence cannot start.

        If a sequence does not fit, no sequence after it in the queue is started; otherwise a large
        sequence might wait forever. Only sequences that wait for a prefix of a running sequence are
        skipped.

        Returns:
          Whether the next step may admit more sequences, even if no sequence ends in this step.
        """
        queue = self._queue
        deferred, self._deferred = self._deferred, []
        pending_digests = self.next_digests()
        for sequence in queue.waiting:
            reason = self._reason_to_wait(builder, sequence, pending_digests)
            if not reason and not self.try_to_start(builder, sequence):
                reason = "blocks"
            if not reason:
                self._keep_common_prefixes(sequence, queue.waiting)
                builder.add_chunk(sequence)
                pending_digests |= self.next_digest(sequence)
                continue
            self._defer(builder, sequence, reason)
            if reason != "same prefix":
                break
        still_deferred = set(self._deferred)
        for sequence in deferred:
            if sequence.waits_for and sequence not in still_deferred:
                queue.note_turn(sequence)
        is_brief = any(s.waits_for in ("budget", "same prefix") for s in self._deferred)
        return is_brief and bool(queue.free_slots)

    def try_to_start(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Start a sequence if there are blocks for its whole prefill and its first decode step.

        The length of its cached prefix is known only after `BlockMemory.attach`. To avoid a call of
        `attach` for a waiting sequence in every step, `num_wanted` stores the number of blocks that
        the sequence needed. `attach` is called again when this number of blocks is free, when other
        sequences have prefilled, or when no sequence runs.

        Returns:
          Whether the sequence was started. If not, it has no slot and holds no blocks.
        """
        queue, memory, block_budget = self._queue, builder.memory, self._block_budget
        num_spare = builder.num_spare
        if queue.running and sequence.num_wanted > num_spare:
            return False
        num_free, num_attached = block_budget.num_free(memory, queue.running), 0
        running = [*queue.running, sequence]
        sequence.slot = queue.free_slots[-1]
        is_looked_up = self._num_cacheable(sequence) > 0 and not sequence.is_swapped
        if is_looked_up:
            sequence.num_computed = sequence.program_start = memory.attach(sequence)
            self._add_branch_point(sequence, sequence.num_known)
            num_attached = num_free - block_budget.num_free(memory, running)
        num_needed = block_budget.num_for_admission(len(sequence.token_ids))
        if not sequence.is_swapped:
            start = sequence.num_computed
            num_needed -= block_budget.num_in_row(start, start)
        sequence.num_wanted = num_attached + num_needed
        if sequence.num_wanted > num_spare:
            if is_looked_up:
                memory.release(sequence)
                sequence.num_computed = sequence.program_start = 0
            sequence.slot = None
            return False
        if sequence.is_swapped:
            memory.swap_in(sequence)
            sequence.program_start = sequence.num_computed
            queue.mark_swapped(sequence, False)
            num_attached = num_free - block_budget.num_free(memory, running)
        else:
            self._count_lookup(sequence, is_looked_up)
        builder.num_free -= num_attached
        builder.promise(sequence)
        queue.waiting.remove(sequence)
        queue.take_slot(sequence)
        return True

    def retry_deferred(self) -> None:
        """Make the next step call `attach` again for the deferred sequences.

        Their prefix may be cached by then, because other sequences prefill in this step.
        """
        for sequence in self._deferred:
            sequence.num_wanted = 0

    def next_digest(self, sequence: Sequence) -> set[bytes]:
        """Return a set with the digest of the prompt block that a sequence computes next.

        The set is empty if this block will not be published to the prefix cache.
        """
        column = sequence.num_computed // self._block_budget.block_size
        if column >= self._num_cacheable(sequence):
            return set()
        return {sequence.digests[column]}

    def next_digests(self) -> set[bytes]:
        """Return the digests of the prompt blocks that the running sequences compute next."""
        return set().union(*map(self.next_digest, self._queue.running))

    def waits_for_prefix(self, sequence: Sequence, pending_digests: set[bytes]) -> bool:
        """Return whether the digests `pending_digests` contain a block of the sequence's prefix."""
        if not pending_digests or sequence.is_swapped:
            return False
        return not pending_digests.isdisjoint(sequence.digests[: self._num_cacheable(sequence)])

    def _num_cacheable(self, sequence: Sequence) -> int:
        """Return the number of blocks of a sequence that can be looked up in the prefix cache."""
        if not self._enable_prefix_caching or sequence.chain is None:
            return 0
        return (len(sequence.token_ids) - 1) // self._block_budget.block_size

    def _add_branch_point(self, sequence: Sequence, num_common: int) -> None:
        """Add a branch point near the end of a prefix that two sequences have in common.

        At a branch point, the recurrent state is added to the prefix cache.

        Args:
          sequence: the sequence that computes the prefix or the rest of it.
          num_common: number of tokens in the common prefix.
        """
        if (interval := self._state_interval) is not None:
            point = num_common // interval * interval
            if point > sequence.num_computed:
                sequence.branch_points.add(point)

    def _reason_to_wait(
        self, builder: PlanBuilder, sequence: Sequence, pending_digests: set[bytes]
    ) -> WaitReason:
        """Return the reason why a sequence cannot start, or "". Does not check free blocks."""
        if self.waits_for_prefix(sequence, pending_digests):
            for running in self._queue.running:
                self._keep_common_prefixes(running, [sequence])
            return "same prefix"
        if not self._queue.free_slots:
            return "slots"
        if not builder.num_tokens:
            return "budget"
        return ""

    def _keep_common_prefixes(self, sequence: Sequence, sequences: Iterable[Sequence]) -> None:
        """Add branch points of a running sequence: the ends of prefixes shared with `sequences`.

        Args:
          sequence: the running sequence.
          sequences: sequences that may begin with the same tokens.
        """
        if self._state_interval is None:
            return
        for running in sequences:
            pairs = zip(sequence.digests, running.digests, strict=False)
            num_common = sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], pairs))
            self._add_branch_point(sequence, num_common * self._block_budget.block_size)

    def _defer(self, builder: PlanBuilder, sequence: Sequence, reason: WaitReason) -> None:
        self._deferred.append(sequence)
        numbers: dict[str, int] = {}
        other_request = None
        if sequence.history is not None:
            if reason == "same prefix":
                other_request = self._owner_of_prefix(sequence)
            else:
                numbers = self._wait_details(builder, sequence, reason)
        self._queue.note_wait(sequence, reason, numbers=numbers, other_request=other_request)

    def _owner_of_prefix(self, sequence: Sequence) -> str | None:
        """Return the id of the request that computes the prefix of a sequence.

        The result is None if this is the request of the sequence itself.
        """
        owner = next(
            running.request
            for running in self._queue.running
            if self.waits_for_prefix(sequence, self.next_digest(running))
        )
        return None if owner is sequence.request else owner.request_id

    def _wait_details(
        self, builder: PlanBuilder, sequence: Sequence, reason: WaitReason
    ) -> dict[str, int]:
        """Return the numbers that explain why a sequence waits, see `Wait.numbers`."""
        if reason == "slots":
            return {"num_slots": len(self._queue.running)}
        if reason == "budget":
            return {"max_num_batched_tokens": self._max_num_batched_tokens}
        num_free = builder.num_free
        num_kept = min(num_free, num_free - builder.num_spare)
        num_wanted = sequence.num_wanted
        if num_wanted:
            return {"num_wanted": num_wanted, "num_free": num_free, "num_kept": num_kept}
        # The prefix was not looked up, because no blocks were left. So use an upper bound.
        max_blocks = self._block_budget.num_for_admission(len(sequence.token_ids))
        return {"most_wanted": max_blocks, "num_free": num_free, "num_kept": num_kept}

    def _count_lookup(self, sequence: Sequence, is_looked_up: bool) -> None:
        if is_looked_up:
            self._stats.num_queried_tokens += len(sequence.token_ids) - 1
            self._stats.num_cached_tokens += sequence.num_computed
        num_lost = sequence.num_lost
        num_cached = min(sequence.num_computed, num_lost)
        self._stats.num_recomputed_tokens += num_lost - num_cached
