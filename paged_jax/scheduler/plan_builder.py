"""`PlanBuilder`: adds chunks, decodes and forks to a `StepPlan` while tokens and blocks are left.

It decides the length of each chunk, including where a chunk ends so that a recurrent state can be
published (see `scheduler.request`), and the number of decode steps of a plan.
"""

from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.scheduler.block_budget import BlockBudget, BlockMemory
from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.step_plan import StepPlan


class PlanBuilder:
    """Adds sequences to a `StepPlan`, and counts the tokens and blocks that are left.

    For each running sequence, the builder reserves the blocks for the rest of its prefill and for
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
        max_remaining = max(s.max_length - len(s.token_ids) for s in decodes)
        grammars = filter(None, (s.active_grammar() for s in self.plan.bound))
        # One token is sampled after the forced tokens. Then the host must compute the next mask,
        # unless the forced tokens end the text.
        step_limits = [len(grammar.forced) + 1 for grammar in grammars if not grammar.ends]
        return min(max_steps, max_remaining, *step_limits)

    def add_decodes(self) -> None:
        """Add all running sequences with a complete prefill to `decodes`."""
        decodes = [s for s in self._queue.running if not s.num_prefill and s.draws_tokens]
        for sequence in decodes:
            self._take(1, self._block_budget.num_claimed(sequence))
        self.plan.decodes += decodes
        for sequence in decodes:
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
        max_tokens = max(0, (num_known + self.num_free) * self._block_size - start)
        num_tokens = min(sequence.num_prefill, self._max_chunk, self.num_tokens, max_tokens)
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
