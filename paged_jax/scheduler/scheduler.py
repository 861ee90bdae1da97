"""Decides which sequences get a slot, blocks and a share of the next step. Imports no jax.

The scheduler is policy. It knows requests, numbers of blocks and numbers of tokens, never arrays or
block ids; what it decides about memory, a `BlockMemory` does at once. A step of the engine is

    plan = scheduler.schedule(memory, now)
    run plan.chunks, then plan.forks, then plan.decodes for up to plan.num_steps steps
    sequence.advance(...) for each chunk and each decoded row, whose tokens are appended before
    scheduler.finish(memory, sequence) for those that stopped

The parts: `queue` knows where sequences are, `line` which of those that wait is the next,
`planning` gives running ones a share of the step, `admission` lets waiting ones run, `preemption`
chooses a victim, `reasons` says why; `lookahead` plans a step before it is known what the one
before it has drawn.

Prefill fills the cache with all tokens of a sequence but the last, which is the first input of
decode. So a sequence with n known tokens decodes once n - 1 of them are in the cache, whether it is
new or comes back after a preemption, and at least one token is always computed.

    waiting --admit--> running: prefill --> decode --finish-->
        ^------------ preempt ---'------------'

Progress: running sequences are ranked by priority, then arrival. The most senior one is never
preempted to make room, and a sequence that could not run even alone is refused when it arrives. So
the most senior one finishes, then the next, and so on. In the line of those that wait, clients
take turns.
"""

from collections.abc import Sequence as Items
from typing import get_args

from paged_jax.cache.sequence_blocks import num_cached_tokens_at
from paged_jax.checks import ArgumentError, check_positive
from paged_jax.models.layer_types import LayerGroup
from paged_jax.scheduler.admission import Admission
from paged_jax.scheduler.budget import StepBudget
from paged_jax.scheduler.holdings import Holdings, make_holdings
from paged_jax.scheduler.lookahead import Lookahead
from paged_jax.scheduler.memory import BlockMemory
from paged_jax.scheduler.plan import SchedulerStats, StepPlan
from paged_jax.scheduler.planning import StepPlanner
from paged_jax.scheduler.preemption import Preemption, PreemptionCosts, PreemptionPolicy
from paged_jax.scheduler.prefixes import SharedPrefixes
from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.reasons import PreemptionFacts
from paged_jax.scheduler.request import Request, Sequence


def check_step_limits(
    function: str,
    max_num_batched_tokens: int,
    num_slots: int,
    preemption: str,
    *,
    slots_name: str = "num_slots",
) -> None:
    """Check what a scheduler needs to make progress: a token for each slot, and a way to preempt.

    Args:
      function: the name that messages begin with.
      max_num_batched_tokens: most tokens in a step.
      num_slots: S, most sequences that run at once.
      preemption: the way to take blocks away, a value of `Preemption`.
      slots_name: the caller's name of `num_slots`.

    Raises:
      ArgumentError: naming the argument.
    """
    if max_num_batched_tokens < num_slots:
        raise ArgumentError(
            function,
            f"must be at least {slots_name} = {num_slots}, so that all can decode, got "
            f"{max_num_batched_tokens}. Use more tokens or fewer slots.",
            "max_num_batched_tokens",
        )
    choices = get_args(Preemption)
    if preemption not in choices:
        rule = f"must be {', '.join(choices[:-1])} or {choices[-1]}, got {preemption!r}."
        raise ArgumentError(function, rule, "preemption")


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing, priorities and preemption.

    Args:
      num_slots: S, most sequences that run at once.
      num_blocks: P, blocks in the pool, of the first of several groups of layers.
      block_size: C, tokens in a block.
      max_num_batched_tokens: most tokens in a step: those of chunks, and one for each sequence that
        decodes. At least num_slots.
      max_chunk: most tokens of one sequence that a step prefills.
      max_steps: most decode steps that are queued at once.
      runs_ahead: whether `lookahead` is used.
      enable_prefix_caching: whether prompts are looked up in the cache.
      preemption: how blocks are taken away: ``"recompute"`` releases them, ``"swap"`` copies them
        to host memory, ``"auto"`` does what costs less.
      costs: costs of both ways; may be changed at any time.
      groups: groups of layers that keep the same tokens, the one that keeps most first, see
        `LlamaConfig.layer_groups`; by default all layers keep all tokens.

    Attributes:
      stats: totals since the scheduler was made.
      holdings: counts the blocks of sequences.
      lookahead: plans steps ahead of tokens.

    Raises:
      ValueError: a size is not positive, or max_num_batched_tokens is below num_slots.
    """

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        *,
        max_num_batched_tokens: int,
        max_chunk: int,
        max_steps: int = 1,
        runs_ahead: bool = False,
        enable_prefix_caching: bool = True,
        preemption: Preemption = "auto",
        costs: PreemptionCosts | None = None,
        groups: Items[LayerGroup] = (LayerGroup(None, (0,)),),
    ):
        check_positive(
            "Scheduler",
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk=max_chunk,
            max_steps=max_steps,
        )
        check_step_limits("Scheduler", max_num_batched_tokens, num_slots, preemption)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk = max_chunk
        self.max_steps = max_steps
        self.enable_prefix_caching = enable_prefix_caching
        self.preemption: Preemption = preemption
        self.costs = costs or PreemptionCosts()
        self.stats = SchedulerStats()
        self.holdings = make_holdings(num_blocks, block_size, max_chunk, groups)
        self._queue = Queue(num_slots, self.holdings, self.stats)
        self.lookahead = Lookahead(self._queue, max_steps, is_used=runs_ahead)
        self._prefixes = SharedPrefixes(block_size, enable_prefix_caching)
        self._admission = Admission(
            self._queue,
            self._prefixes,
            self.stats,
            num_slots=num_slots,
            holdings=self.holdings,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    # Requests come and go

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the samples of a new request, which all have the same tokens so far.

        The request is kept until its last sequence has left: sequences hold it only weakly.
        Only the first is admitted and prefilled; the others become forks of it.

        Raises:
          ValueError: as `check`. Nothing is queued then.
        """
        self.check(sequences)
        self.lookahead.close()
        self._queue.track(sequences[0].request, sequences)
        self._queue.join(sequences[0], siblings=sequences[1:])

    def check(self, sequences: list[Sequence]) -> None:
        """See that the samples of a new request can be queued.

        Raises:
          ValueError: one could not run even with all blocks, or the request_id is taken.
        """
        self._queue.check_is_new(sequences)
        for sequence in sequences:
            _check_fits(sequence, self.holdings)

    def finish(self, memory: BlockMemory, sequence: Sequence) -> None:
        """Release a sequence that is complete, unless its request was aborted before."""
        if sequence in self._queue.entries:
            self._drop(memory, sequence)
            self.stats.num_finished += 1

    def abort(self, memory: BlockMemory, request: Request) -> list[Sequence]:
        """Release all unfinished sequences of a request, and return them."""
        unfinished = self._queue.unfinished.get(request.request_id)
        sequences = [] if unfinished is None else list(unfinished.sequences)
        for sequence in sequences:
            self._drop(memory, sequence)
        self.stats.num_aborted += len(sequences)
        return sequences

    def restart(self, sequences: list[Sequence]) -> None:
        """Begin again with these sequences, each with the tokens that it has, and an empty memory.

        All others are forgotten, and so is what was running, swapped or half planned; stats stay.
        """
        by_request: dict[Request, list[Sequence]] = {}
        for sequence in sequences:
            by_request.setdefault(sequence.request, []).append(sequence)
        self.lookahead.close()
        self._queue.clear()
        self._admission.clear()
        for sequence in sequences:
            sequence.restart()
        for request, own in by_request.items():
            self._queue.track(request, own)
        for sequence in sequences:
            self._queue.join(sequence)

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences in line, in the order in which they get slots."""
        return list(self._queue.waiting)

    @property
    def running(self) -> list[Sequence]:
        """The sequences with a slot, the most senior first."""
        return self._queue.running

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not finished, the most senior first. Those with a slot run."""
        return self._queue.sequences

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._queue.unfinished)

    # One step

    def schedule(self, memory: BlockMemory, now: float = 0.0) -> StepPlan:
        """Decide what runs next, and bring memory into the state that it needs.

        Everything in the plan must be run before the next call.

        Args:
          memory: gives and takes blocks at once, as is decided.
          now: seconds, on the clock of the deadlines.
        """
        memory = self.holdings.memory(memory, self.running)
        plan = StepPlan(expired=self._expire(memory, now))
        num_preemptions = self.stats.num_preemptions
        self._admit_urgent(memory)
        self._free_blocks_for_decode(memory)
        is_calm = self.stats.num_preemptions == num_preemptions
        planner = StepPlanner(
            plan,
            self._budget(memory),
            self._queue,
            holdings=self.holdings,
            max_chunk=self.max_chunk,
        )
        planner.add_decodes()
        planner.add_chunks()
        while self.running and planner.is_empty:
            # All prefill, and none has a block left: the most senior gets those of another.
            self._preempt(memory, self.running[1:], PreemptionFacts("prefill"))
            planner.budget, is_calm = self._budget(memory), False
            planner.add_chunks()
        # After a preemption none is admitted: it would take what was just made free.
        may_admit_next = bool(self._queue.waiting)
        if is_calm:
            may_admit_next = self._admission.admit(memory, planner)
        self.lookahead.open(plan, may_admit_next)
        plan.num_steps = planner.num_steps(self.lookahead.max_steps, may_admit_next)
        plan.leave_on_stop = bool(self._queue.waiting)
        if plan.chunks:
            self._admission.retry_refused()
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        return plan

    def _expire(self, memory: BlockMemory, now: float) -> list[Sequence]:
        expired = self._queue.due(now)
        for sequence in expired:
            self._drop(memory, sequence)
        self.stats.num_expired += len(expired)
        return expired

    def _admit_urgent(self, memory: BlockMemory) -> None:
        """Let sequences run in place of those of worse priority."""
        queue, prefixes = self._queue, self._prefixes
        computing = prefixes.next_blocks(queue.running)
        for sequence in queue.waiting:
            priority = sequence.request.priority
            juniors = [s for s in queue.running if s.request.priority > priority]
            if not juniors:
                return
            if prefixes.will_be_cached(sequence, computing):
                continue
            if not self._preempt_for(memory, sequence, juniors):
                return
            computing |= prefixes.next_block(sequence)

    def _preempt_for(
        self, memory: BlockMemory, sequence: Sequence, juniors: list[Sequence]
    ) -> bool:
        """Let a sequence run at the cost of `juniors`; False if even that is not enough."""
        holdings, request = self.holdings, sequence.request
        while True:
            budget = self._budget(memory)
            if self._queue.free_slots:
                if self._admission.try_to_start(memory, budget, sequence):
                    return True
                # Preempting them frees what they alone hold, what they will claim, and the block
                # that is kept back for each that grows.
                claims = sum(holdings.num_claimed(s) + holdings.can_grow(s) for s in juniors)
                most = budget.num_spare + memory.num_held(juniors) + claims
                if self._queue.entries[sequence].num_wanted > most:
                    return False
            if not juniors:
                return False
            facts = PreemptionFacts("priority", {"priority": request.priority}, request.request_id)
            juniors.remove(self._preempt(memory, juniors, facts))

    def _free_blocks_for_decode(self, memory: BlockMemory) -> None:
        """Preempt until every running sequence that decodes can do one step.

        Decodes go before prefill: they are nearest to giving their blocks back.
        """
        while True:
            claims = [self.holdings.num_growing(s) for s in self.running if not s.num_prefill]
            num_wanted, num_free = sum(claims), memory.num_free
            if num_wanted <= num_free:
                return
            numbers = {"num_samples": len(claims), "num_wanted": num_wanted, "num_free": num_free}
            self._preempt(memory, self.running[1:], PreemptionFacts("decode", numbers))

    def _preempt(
        self, memory: BlockMemory, candidates: list[Sequence], facts: PreemptionFacts
    ) -> Sequence:
        """Take slot and blocks from the candidate that can best spare them, and return it."""
        policy = self._preemption_policy()
        sequence = policy.victim(candidates)
        is_swapped = policy.is_swapped(sequence)
        if sequence.history is not None:
            if spared := policy.advantage(sequence, candidates):
                other, advantage = spared
                facts = facts._replace(spared_request=other.request.request_id, advantage=advantage)
            kind = "swap" if is_swapped else "recompute"
            sequence.history.preempt(sequence.index, kind, sequence.num_computed, facts)
        entry = self._queue.entries[sequence]
        if is_swapped:
            memory.swap_out(sequence)
            self._queue.mark_swapped(sequence, True)
            self.stats.num_swap_preemptions += 1
        else:
            memory.release(sequence)
            entry.num_lost = sequence.num_computed
            sequence.num_computed = sequence.program_start = 0
            self.stats.num_recompute_preemptions += 1
        sequence.num_preemptions += 1
        sequence.is_fork = False
        entry.length_before = len(sequence.token_ids)
        self._queue.give_slot(sequence)
        self._queue.join(sequence, "preempted")
        return sequence

    def _preemption_policy(self) -> PreemptionPolicy:
        queue = self._queue
        return PreemptionPolicy(
            self.preemption, self.costs, self.holdings, queue.num_swapped_blocks, queue.entries
        )

    def _budget(self, memory: BlockMemory) -> StepBudget:
        return StepBudget(self.running, self.holdings, self.max_num_batched_tokens, memory.num_free)

    def _drop(self, memory: BlockMemory, sequence: Sequence) -> None:
        if sequence.slot is not None:
            memory.release(sequence)
        self._queue.drop(sequence)
        if self._queue.waiting:
            self.lookahead.close()  # one of them may get what this one had


def _check_fits(sequence: Sequence, holdings: Holdings) -> None:
    num_tokens = len(sequence.token_ids)
    if not 0 < num_tokens <= sequence.max_length:
        raise ArgumentError(
            "Scheduler.add",
            "must hold at least one token and at most max_length = "
            f"{sequence.max_length}, got {num_tokens}.",
            "token_ids",
        )
    # As many as admission asks for, where no token is drawn.
    most = max(num_tokens, num_cached_tokens_at(sequence.max_length))
    needed = holdings.num_required(most)
    if needed > holdings.num_blocks:
        raise ArgumentError(
            "Scheduler.add",
            f"a sequence must fit the pool of {holdings.num_blocks} blocks of "
            f"{holdings.block_size} tokens, got {num_tokens} prompt tokens and "
            f"{sequence.max_length - num_tokens} new ones, which need {needed}. "
            "Use fewer tokens or more blocks.",
        )
