"""How running sequences share a step: decodes first, then chunks of prompts; and forks."""

from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.scheduler.budget import StepBudget
from paged_jax.scheduler.holdings import Holdings
from paged_jax.scheduler.plan import StepPlan
from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.request import Sequence


class StepPlanner:
    """Fills the plan of one step, within its budget.

    Args:
      plan: the plan to fill.
      budget: what the step may take.
      queue: the waiting line and the slots. Forks get slots, or join the line.
      holdings: counts blocks.
      max_chunk: most tokens of one sequence that a step prefills.
    """

    def __init__(
        self,
        plan: StepPlan,
        budget: StepBudget,
        queue: Queue,
        *,
        holdings: Holdings,
        max_chunk: int,
    ):
        self.plan = plan
        self.budget = budget
        self._queue = queue
        self._holdings = holdings
        self._block_size = holdings.block_size
        self._max_chunk = max_chunk

    def num_steps(self, max_steps: int, may_admit_next: bool) -> int:
        """Decode steps: one while anything but decoding could follow in the next step, else many,
        as far as grammars are known.

        Args:
          max_steps: most decode steps in one dispatch.
          may_admit_next: whether the next step could admit a sequence.
        """
        decodes = self.plan.decodes
        if not decodes:
            return 0
        if may_admit_next or len(decodes) < len(self._queue.running):
            return 1
        longest = max(s.max_length - len(s.token_ids) for s in decodes)
        grammars = filter(None, (s.followed_grammar() for s in decodes))
        # After the tokens that are forced, one is drawn before more can be known; behind an end
        # there is nothing to know.
        known = [len(grammar.forced) + 1 for grammar in grammars if not grammar.ends]
        return min(max_steps, longest, *known)

    @property
    def is_empty(self) -> bool:
        """Whether nothing would run."""
        return not (self.plan.decodes or self.plan.chunks or self.plan.computed)

    def add_decodes(self) -> None:
        """Let all running sequences decode whose prompts are computed."""
        ready = [s for s in self._queue.running if not s.num_prefill and s.draws_tokens]
        for sequence in ready:
            self.budget.take(1, self._holdings.num_claimed(sequence))
        self.plan.decodes += ready
        for sequence in ready:
            self._add_forks(sequence)

    def add_chunks(self) -> None:
        """Let all running sequences prefill, the most senior first."""
        for sequence in self._queue.running:
            if sequence.num_prefill or not sequence.draws_tokens:
                self.add_chunk(sequence)

    def add_chunk(self, sequence: Sequence) -> None:
        """Prefill as much of a sequence as blocks and budget allow; it decodes if that is all.

        If it draws no tokens, it is complete then.
        """
        start, budget = sequence.num_computed, self.budget
        # Blocks that it has or may take, of all of its tokens: those that it gives back count, too.
        num_before = num_blocks_needed(start, self._block_size)
        num_known = num_before + self._holdings.num_back(sequence)
        fits = max(0, (num_known + budget.num_free) * self._block_size - start)
        num_tokens = min(sequence.num_prefill, self._max_chunk, budget.num_tokens, fits)
        if num_tokens:
            self.plan.chunks.append((sequence, num_tokens))
            num_blocks = num_blocks_needed(start + num_tokens, self._block_size)
            budget.take(num_tokens, max(0, num_blocks - num_known))
        if num_tokens == sequence.num_prefill:
            if sequence.draws_tokens:
                self._add_first_decode(sequence)
            else:
                self.plan.computed.append(sequence)

    def _add_first_decode(self, sequence: Sequence) -> None:
        """Decode in the step that ends the prefill, unless that has used up the step.

        In the next one it will be among those that decode before any sequence prefills.
        """
        length = len(sequence.token_ids)
        num_new = num_blocks_needed(length, self._block_size)
        num_new -= num_blocks_needed(length - 1, self._block_size)
        siblings = self._queue.entries[sequence].siblings
        num_children = min(len(siblings), len(self._queue.free_slots))
        if self.budget.num_tokens > num_children and self.budget.num_free >= num_new:
            self.budget.take(1, num_new)
            self.plan.decodes.append(sequence)
            self._add_forks(sequence)

    def _add_forks(self, leader: Sequence) -> None:
        """Start the other samples of a prompt, just before the first of them draws its first token.

        Each takes one block in that step: for its token, or for its copy of the block into which
        all of them write. (One of them need not copy; the leader counts as that one.) As all of
        them write in this step, no partly filled block is shared after it. A sample without a
        slot or blocks waits as a sequence of its own, and will find the prompt in the cache.
        Where sharing is not counted, it takes a whole row.
        """
        entry = self._queue.entries[leader]
        if not entry.siblings:
            return
        children: list[Sequence] = []
        num_blocks = self._holdings.num_forked(leader)
        for sibling in entry.siblings:
            if self._queue.free_slots and self.budget.num_spare >= num_blocks:
                sibling.num_computed = len(leader.token_ids) - 1
                sibling.program_start = leader.program_start
                sibling.is_fork = True
                self._queue.take_slot(sibling)
                self.budget.keep_back(sibling)
                self.budget.num_tokens -= 1
                self.budget.num_free -= num_blocks
                children.append(sibling)
            else:
                self._queue.join(sibling)
        entry.siblings = []
        if children:
            self.plan.forks.append((leader, children))
            self.plan.decodes += children
