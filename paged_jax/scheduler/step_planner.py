"""Planning of an engine step: first for running sequences, then for waiting sequences."""

import itertools
from collections.abc import Iterable

from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.scheduler.block_budget import BlockBudget, BlockMemory
from paged_jax.scheduler.outputs import EngineStats, WaitReason
from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.step_plan import StepPlan


class StepPlanner:
    """Adds sequences to a `StepPlan`, and counts the tokens and blocks that are left.

    For each running sequence, the planner reserves the blocks for the rest of its prefill and for
    its first decode step.

    Args:
      plan: the plan to fill.
      queue: the waiting sequences and the slots. Forks get slots or join the queue.
      memory: interface to the blocks of the KV cache.
      block_budget: object that counts the blocks of sequences.
      num_tokens: maximum number of tokens in the step.
      max_chunk: maximum number of tokens that a step prefills per sequence.
      state_interval: see `Scheduler`; None if no layer is recurrent.
      keeps_states: whether chunks also end at the `Sequence.snapshot_points`, where the recurrent
        state is added to the prefix cache.

    Attributes:
      plan: the plan.
      memory: interface to the blocks of the KV cache.
      num_tokens: number of tokens that may still be added to the step.
      num_free: number of free blocks that are left.
    """

    def __init__(
        self,
        plan: StepPlan,
        queue: Queue,
        memory: BlockMemory,
        block_budget: BlockBudget,
        *,
        num_tokens: int,
        max_chunk: int,
        state_interval: int | None = None,
        keeps_states: bool = False,
    ):
        self.plan = plan
        self.memory = memory
        self.num_tokens = num_tokens
        self.num_free = block_budget.num_free(memory, queue.running)
        self._queue = queue
        self._block_budget = block_budget
        self._block_size = block_budget.block_size
        self._max_chunk = max_chunk
        self._state_interval = state_interval
        self._keeps_states = keeps_states
        self._num_promised = self._num_growing = 0
        for sequence in queue.running:
            self.promise(sequence)

    @property
    def num_spare(self) -> int:
        """Number of blocks that are left for a new sequence.

        It is negative if more blocks are reserved than are free. One block is reserved for each
        running sequence that may grow. That sequence needs the block within C decode steps, where C
        is the block size. Without the reserve, the new sequence would soon be preempted for it.
        """
        return self.num_free - self._num_promised - self._num_growing

    def promise(self, sequence: Sequence) -> None:
        """Reserve the blocks that a running sequence will take."""
        self._num_promised += self._block_budget.num_claimed(sequence)
        self._num_growing += self._block_budget.can_grow(sequence)

    def _take(self, num_tokens: int, num_blocks: int) -> None:
        """Subtract tokens and blocks from the numbers that are left for the step."""
        self.num_tokens -= num_tokens
        self.num_free -= num_blocks
        self._num_promised -= num_blocks

    @property
    def is_empty(self) -> bool:
        """Whether the plan has no chunks and no decodes."""
        return not (self.plan.decodes or self.plan.chunks or self.plan.computed)

    def num_steps(self, max_steps: int, may_admit_next: bool) -> int:
        """Return the number of decode steps of the plan.

        It is 1 if the next step may admit a sequence, or if a running sequence is still in prefill.
        Otherwise it is `max_steps`, but at most the number of steps until all sequences reach their
        maximum length, or until a sequence with a grammar needs a new token mask.

        Args:
          max_steps: maximum number of decode steps in one plan.
          may_admit_next: whether the next step may admit a sequence.
        """
        decodes = self.plan.decodes
        if not decodes:
            return 0
        if may_admit_next or len(decodes) < len(self._queue.running):
            return 1
        longest = max(s.max_length - len(s.token_ids) for s in decodes)
        grammars = filter(None, (s.active_grammar() for s in self.plan.bound))
        # One token is sampled after the forced tokens. Then the host must compute the next mask,
        # unless the forced tokens end the text.
        known = [len(grammar.forced) + 1 for grammar in grammars if not grammar.ends]
        return min(max_steps, longest, *known)

    def add_decodes(self) -> None:
        """Add all running sequences with a complete prefill to `decodes`."""
        ready = [s for s in self._queue.running if not s.num_prefill and s.draws_tokens]
        for sequence in ready:
            self._take(1, self._block_budget.num_claimed(sequence))
        self.plan.decodes += ready
        for sequence in ready:
            self._add_forks(sequence)

    def add_chunks(self) -> None:
        """Add chunks of all running sequences in prefill, in the order of seniority."""
        for sequence in self._queue.running:
            if sequence.num_prefill or not sequence.draws_tokens:
                self.add_chunk(sequence)

    def add_chunk(self, sequence: Sequence) -> None:
        """Add the next chunk of a sequence, limited by the free blocks and the tokens left.

        If the chunk completes the prefill, the sequence is also added to `decodes` or, if it
        generates no tokens, to `computed`.
        """
        start = sequence.num_computed
        # The program frees blocks at its start, and can use them for the tokens of the chunk.
        num_before = num_blocks_needed(start, self._block_size)
        num_known = num_before + self._block_budget.num_freed_next(sequence)
        fits = max(0, (num_known + self.num_free) * self._block_size - start)
        num_tokens = min(sequence.num_prefill, self._max_chunk, self.num_tokens, fits)
        if self._state_interval is not None:
            num_tokens = self._align(sequence, num_tokens, self._state_interval)
        if num_tokens:
            self.plan.chunks.append((sequence, num_tokens))
            num_blocks = num_blocks_needed(start + num_tokens, self._block_size)
            self._take(num_tokens, max(0, num_blocks - num_known))
        if num_tokens == sequence.num_prefill:
            if sequence.draws_tokens:
                self._add_first_decode(sequence)
            else:
                self.plan.computed.append(sequence)

    def _align(self, sequence: Sequence, num_tokens: int, interval: int) -> int:
        """Shorten a chunk of `num_tokens` tokens for a model with recurrent layers.

        The chunk ends at the next of the `snapshot_points` at the latest. Unless it completes the
        prefill, it ends at a multiple of `interval`, so that the recurrent states do not depend on
        the chunk sizes. If there is no such multiple in the chunk, its length does not change.
        """
        start = sequence.num_computed
        end = start + num_tokens
        if self._keeps_states and sequence.chain is not None:
            points = sequence.snapshot_points(interval)
            end = min((point for point in points if start < point < end), default=end)
        if end < start + sequence.num_prefill and end // interval * interval > start:
            end = end // interval * interval
        return end - start

    def _add_first_decode(self, sequence: Sequence) -> None:
        """Add a sequence to `decodes` in the step that completes its prefill.

        If not enough tokens or blocks are left, it is not added. Its first decode is then planned
        in the next step, where it comes before all chunks.
        """
        length = len(sequence.token_ids)
        num_new = num_blocks_needed(length, self._block_size)
        num_new -= num_blocks_needed(length - 1, self._block_size)
        num_children = min(len(sequence.siblings), len(self._queue.free_slots))
        if self.num_tokens > num_children and self.num_free >= num_new:
            self._take(1, num_new)
            self.plan.decodes.append(sequence)
            self._add_forks(sequence)

    def _add_forks(self, leader: Sequence) -> None:
        """Fork the other samples of a prompt from the leader, which has computed the prompt.

        The forks and the leader generate their first tokens in this step. For its token, each fork
        needs one block: a new block, or a copy of the partly filled block at the end of the prompt.
        (One sample writes to the original block; the count assumes that this is the leader.)
        So after this step, no two samples share a partly filled block. If there is no slot or block
        for a sample, it joins the queue, and will find the prompt in the prefix cache.
        `WindowBlockBudget` counts no block as shared, so it counts all blocks of a fork.
        """
        if not leader.siblings:
            return
        children: list[Sequence] = []
        num_blocks = self._block_budget.num_for_fork(leader)
        for sibling in leader.siblings:
            if self._queue.free_slots and self.num_spare >= num_blocks:
                sibling.num_computed = len(leader.token_ids) - 1
                sibling.program_start = leader.program_start
                sibling.is_fork = True
                self._queue.take_slot(sibling)
                self._num_growing += self._block_budget.can_grow(sibling)
                self.num_tokens -= 1
                self.num_free -= num_blocks
                children.append(sibling)
            else:
                self._queue.join(sibling)
        leader.siblings = []
        if children:
            self.plan.forks.append((leader, children))
            self.plan.decodes += children


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

    def admit(self, planner: StepPlanner) -> bool:
        """Start waiting sequences and plan their first chunks, until a sequence cannot start.

        If a sequence does not fit, no sequence after it in the queue is started; otherwise a large
        sequence might wait forever. Only sequences that wait for a prefix of a running sequence are
        skipped.

        Returns:
          Whether the next step may admit more sequences, even if no sequence ends in this step.
        """
        queue = self._queue
        deferred, self._deferred = self._deferred, []
        computing = self.next_digests()
        for sequence in queue.waiting:
            reason = self._reason_to_wait(planner, sequence, computing)
            if not reason and not self.try_to_start(planner, sequence):
                reason = "blocks"
            if not reason:
                self._keep_common_prefixes(sequence, queue.waiting)
                planner.add_chunk(sequence)
                computing |= self.next_digest(sequence)
                continue
            self._defer(planner, sequence, reason)
            if reason != "same prefix":
                break
        still_deferred = set(self._deferred)
        for sequence in deferred:
            if sequence.waits_for and sequence not in still_deferred:
                queue.note_turn(sequence)
        is_brief = any(s.waits_for in ("budget", "same prefix") for s in self._deferred)
        return is_brief and bool(queue.free_slots)

    def try_to_start(self, planner: StepPlanner, sequence: Sequence) -> bool:
        """Start a sequence if there are blocks for its whole prefill and its first decode step.

        The length of its cached prefix is known only after `BlockMemory.attach`. To avoid a call of
        `attach` for a waiting sequence in every step, `num_wanted` stores the number of blocks that
        the sequence needed. `attach` is called again when this number of blocks is free, when other
        sequences have prefilled, or when no sequence runs.

        Returns:
          Whether the sequence was started. If not, it has no slot and holds no blocks.
        """
        queue, memory, block_budget = self._queue, planner.memory, self._block_budget
        num_spare = planner.num_spare
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
        planner.num_free -= num_attached
        planner.promise(sequence)
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

    def waits_for_prefix(self, sequence: Sequence, computing: set[bytes]) -> bool:
        """Return whether the digests `computing` contain a block of the sequence's prefix."""
        if not computing or sequence.is_swapped:
            return False
        return not computing.isdisjoint(sequence.digests[: self._num_cacheable(sequence)])

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
        self, planner: StepPlanner, sequence: Sequence, computing: set[bytes]
    ) -> WaitReason:
        """Return the reason why a sequence cannot start, or "". Does not check free blocks."""
        if self.waits_for_prefix(sequence, computing):
            for running in self._queue.running:
                self._keep_common_prefixes(running, [sequence])
            return "same prefix"
        if not self._queue.free_slots:
            return "slots"
        if not planner.num_tokens:
            return "budget"
        return ""

    def _keep_common_prefixes(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Add the branch points of a running sequence: the ends of prefixes shared with `others`.

        Args:
          sequence: the running sequence.
          others: sequences that may begin with the same tokens.
        """
        if self._state_interval is None:
            return
        for other in others:
            pairs = zip(sequence.digests, other.digests, strict=False)
            num_common = sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], pairs))
            self._add_branch_point(sequence, num_common * self._block_budget.block_size)

    def _defer(self, planner: StepPlanner, sequence: Sequence, reason: WaitReason) -> None:
        self._deferred.append(sequence)
        numbers: dict[str, int] = {}
        other_request = None
        if sequence.history is not None:
            if reason == "same prefix":
                other_request = self._owner_of_prefix(sequence)
            else:
                numbers = self._numbers(planner, sequence, reason)
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

    def _numbers(
        self, planner: StepPlanner, sequence: Sequence, reason: WaitReason
    ) -> dict[str, int]:
        """Return the numbers that explain why a sequence waits, see `Wait.numbers`."""
        if reason == "slots":
            return {"num_slots": len(self._queue.running)}
        if reason == "budget":
            return {"max_num_batched_tokens": self._max_num_batched_tokens}
        num_free = planner.num_free
        num_kept = min(num_free, num_free - planner.num_spare)
        num_wanted = sequence.num_wanted
        if num_wanted:
            return {"num_wanted": num_wanted, "num_free": num_free, "num_kept": num_kept}
        # The prefix was not looked up, because no blocks were left. So use an upper bound.
        most = self._block_budget.num_for_admission(len(sequence.token_ids))
        return {"most_wanted": most, "num_free": num_free, "num_kept": num_kept}

    def _count_lookup(self, sequence: Sequence, is_looked_up: bool) -> None:
        if is_looked_up:
            self._stats.num_queried_tokens += len(sequence.token_ids) - 1
            self._stats.num_cached_tokens += sequence.num_computed
        num_lost = sequence.num_lost
        num_found = min(sequence.num_computed, num_lost)
        self._stats.num_recomputed_tokens += num_lost - num_found
