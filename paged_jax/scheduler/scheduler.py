"""Scheduler for continuous batching: preempts sequences, and rejects those that never fit.

It is plain Python without jax.

The scheduler only makes decisions. It knows requests, numbers of blocks and numbers of tokens, but
no arrays and no block ids. It calls a `BlockMemory` to change the contents of slots. A step of the
engine is:

    plan = scheduler.schedule(memory, now)
    run plan.chunks, then plan.forks, then plan.decodes for up to plan.num_steps steps
    append the generated tokens, then call sequence.advance(...) for each chunk and decoded row
    scheduler.finish(memory, sequence) for each sequence that stopped

This module decides which sequences are preempted, and how. `plan_builder` decides the chunks and
decode steps of running sequences, and `admission` which waiting sequences start. `lookahead`
plans the next step before the tokens of the last step are known. `queue` stores waiting and running
sequences, `block_budget` counts blocks, and `explain` records why sequences wait.

Prefill computes K and V of all tokens of a sequence except the last token, which is the input of
the first decode step. So a sequence with n known tokens begins to decode when n - 1 of them are in
the cache. This is the same for new sequences and for sequences that resume after a preemption.

    waiting --admit--> running: prefill --> decode --finish-->
        ^------------ preempt ---'------------'

Sequences are ranked by priority, then by arrival; this rank is called seniority. Every sequence
finishes eventually: the most senior running sequence is never preempted, and a sequence that does
not fit the pool alone is rejected on arrival. So the most senior sequence finishes, then the next,
and so on. Waiting clients take turns.
"""

import dataclasses
from collections.abc import Sequence as Items
from typing import Literal

from paged_jax.arguments import ArgumentError
from paged_jax.cache.retention import AllTokens
from paged_jax.cache.sequence_blocks import num_cached_tokens_at
from paged_jax.models.layer_groups import CacheSpec, LayerGroup
from paged_jax.scheduler.admission import Admission
from paged_jax.scheduler.block_budget import BlockBudget, BlockMemory, make_budget
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.lookahead import Lookahead
from paged_jax.scheduler.outputs import PreemptionAdvantage, PreemptionNote
from paged_jax.scheduler.plan_builder import PlanBuilder
from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.step_plan import StepPlan

Preemption = Literal["auto", "recompute", "swap"]
"""How to preempt a sequence: release its blocks, swap them to the host, or the cheaper of both."""

# Names of the elements of the tuple that `_preemption_rank` returns. The first element in which two
# candidates differ is the reason why one of them was preempted and the other was not.
_ADVANTAGES: tuple[PreemptionAdvantage, ...] = (
    "priority",
    "progress",
    "cost",
    "arrival",
    "index",
)


@dataclasses.dataclass
class PreemptionCosts:
    """Costs of the two ways to preempt a sequence, recomputing and swapping.

    Attributes:
      seconds_per_token: seconds to compute the K and V of a token again.
      seconds_per_block: seconds to copy a block of all layers from the device to the host or back.
        A swap copies each block twice.
      max_swapped_blocks: maximum number of blocks in host memory; None if unlimited.
    """

    seconds_per_token: float = 1e-4
    seconds_per_block: float = 1e-4
    max_swapped_blocks: int | None = None


class Scheduler:
    """Scheduler with chunked prefill, prefix caching, priorities and preemption.

    Args:
      num_slots: S, maximum number of sequences that run at the same time.
      num_blocks: P, number of blocks in the pool of the first group of layers.
      block_size: C, number of tokens in a block.
      max_num_batched_tokens: maximum number of tokens in a step, at least `num_slots`. The tokens
        of chunks count, and one token for each sequence that decodes.
      max_chunk: maximum number of tokens that a step prefills per sequence.
      max_steps: maximum number of decode steps that are queued on the device at the same time.
      has_drafts: whether steps may verify drafts, see `Lookahead`.
      enable_prefix_caching: whether prompts are looked up in the prefix cache.
      preemption: how to preempt a sequence. ``"recompute"`` releases its blocks, ``"swap"`` copies
        them to host memory, ``"auto"`` chooses the cheaper of the two.
      costs: costs of the two ways to preempt. The caller may change them at any time.
      groups: groups of layers that keep the same tokens, see `ModelConfig.layer_groups`. The first
        group keeps the most tokens. By default all layers keep all tokens.
      state_interval: prompt chunks end at multiples of this number of tokens, at which recurrent
        states can be added to the prefix cache; None if no layer is recurrent. It is a multiple of
        `block_size`.
      stats: statistics of the engine; the scheduler counts preemptions and prefix look-ups in it.

    Attributes:
      block_budget: object that counts the blocks of sequences.
      lookahead: object that plans steps before the tokens of the last step are known.
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
        has_drafts: bool = False,
        enable_prefix_caching: bool = True,
        preemption: Preemption = "auto",
        costs: PreemptionCosts | None = None,
        groups: Items[CacheSpec] = (LayerGroup(AllTokens(), (0,)),),
        state_interval: int | None = None,
        stats: EngineStats | None = None,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk = max_chunk
        self.max_steps = max_steps
        self.enable_prefix_caching = enable_prefix_caching
        self.preemption: Preemption = preemption
        self.costs = costs or PreemptionCosts()
        self.stats = stats or EngineStats()
        self.state_interval = state_interval
        self.block_budget = make_budget(num_blocks, block_size, groups, max_chunk)
        queue = self._queue = Queue(num_slots, self.block_budget)
        self.lookahead = Lookahead(queue, max_steps, has_drafts=has_drafts)
        self._admission = Admission(
            queue,
            self.block_budget,
            self.stats,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            state_interval=state_interval if enable_prefix_caching else None,
        )

    # Requests

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the samples of a new request, which all have the tokens of its prompt.

        Only the first sample is admitted and prefilled; the other samples become forks of it. The
        scheduler keeps a reference to the request until its last sequence has ended, because
        sequences only have a weak reference.

        Raises:
          ValueError: see `check`. Then nothing is queued.
        """
        self.check(sequences)
        self.lookahead.close()
        self._queue.track(sequences[0].request, sequences)
        self._queue.join(sequences[0], siblings=sequences[1:])

    def check(self, sequences: list[Sequence]) -> None:
        """Check that the samples of a new request can be queued.

        Raises:
          ValueError: a sequence has no tokens, has more tokens than its `max_length`, or does not
            fit the pool; or an unfinished request has the same `request_id`.
        """
        self._queue.check_is_new(sequences)
        for sequence in sequences:
            _check_fits(sequence, self.block_budget)

    def finish(self, memory: BlockMemory, sequence: Sequence) -> None:
        """Remove a complete sequence, and release its slot.

        If its request has been aborted before, this does nothing.
        """
        if sequence in self._queue.unfinished:
            self._drop(memory, sequence)

    def abort(self, memory: BlockMemory, request: Request) -> list[Sequence]:
        """Remove all unfinished sequences of a request, release their slots, and return them."""
        sequences = self._queue.unfinished_of(request)
        for sequence in sequences:
            self._drop(memory, sequence)
        return sequences

    def restart(self, sequences: list[Sequence]) -> None:
        """Queue `sequences` again after the cache was emptied; their tokens are kept.

        All other sequences, all slots, all swapped blocks and all plans are discarded.
        """
        sequences_by_request: dict[Request, list[Sequence]] = {}
        for sequence in sequences:
            sequences_by_request.setdefault(sequence.request, []).append(sequence)
        self.lookahead.close()
        self._queue.clear()
        self._admission.clear()
        for sequence in sequences:
            sequence.restart()
        for request, members in sequences_by_request.items():
            self._queue.track(request, members)
        for sequence in sequences:
            self._queue.join(sequence)

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting sequences, in the order of the queue."""
        return list(self._queue.waiting)

    @property
    def running(self) -> list[Sequence]:
        """The sequences with a slot, sorted by seniority."""
        return self._queue.running

    @property
    def sequences(self) -> list[Sequence]:
        """All unfinished sequences, sorted by seniority."""
        return self._queue.sequences

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._queue.unfinished)

    # One step

    def schedule(self, memory: BlockMemory, now: float = 0.0) -> StepPlan:
        """Plan the next step, and change the slots in `memory` as the plan requires.

        Sequences are admitted, preempted or aborted at their deadline. The caller must run the
        whole plan before the next call.

        Args:
          memory: interface to the blocks of the KV cache.
          now: current time in seconds, on the clock of the deadlines.
        """
        plan = StepPlan(expired=self._expire(memory, now))
        num_preemptions = self.stats.num_preemptions
        self._admit_urgent(memory)
        self._free_blocks_for_decode(memory)
        can_admit = self.stats.num_preemptions == num_preemptions
        builder = self._plan_builder(memory, plan)
        builder.add_decodes()
        builder.add_chunks()
        while self.running and builder.is_empty:
            # All running sequences are in prefill, and no block is free. Preempt a sequence, so
            # that the most senior sequence gets blocks.
            self._preempt(memory, self.running[1:], PreemptionNote(reason="prefill"))
            builder, can_admit = self._plan_builder(memory, plan), False
            builder.add_chunks()
        # After a preemption, admit no waiting sequence. It would take the blocks that were just
        # freed for the running sequences.
        may_admit_next = bool(self._queue.waiting)
        if can_admit:
            may_admit_next = self._admission.admit(builder)
        plan.bound = [s for s in plan.decodes if s.active_grammar() is not None]
        self.lookahead.enable_after(plan, may_admit_next)
        plan.num_steps = builder.num_steps(self.lookahead.max_steps, may_admit_next)
        plan.leave_on_stop = bool(self._queue.waiting)
        if plan.chunks:
            self._admission.retry_deferred()
        return plan

    def _expire(self, memory: BlockMemory, now: float) -> list[Sequence]:
        expired = self._queue.expired(now)
        for sequence in expired:
            self._drop(memory, sequence)
        return expired

    def _admit_urgent(self, memory: BlockMemory) -> None:
        """Preempt sequences of worse priority to admit waiting sequences of better priority."""
        queue, admission = self._queue, self._admission
        pending_digests = admission.next_digests()
        for sequence in queue.waiting:
            priority = sequence.request.priority
            candidates = [s for s in queue.running if s.request.priority > priority]
            if not candidates:
                return
            if admission.waits_for_prefix(sequence, pending_digests):
                continue
            if not self._preempt_for(memory, sequence, candidates):
                return
            pending_digests |= admission.next_digest(sequence)

    def _preempt_for(
        self, memory: BlockMemory, sequence: Sequence, candidates: list[Sequence]
    ) -> bool:
        """Preempt sequences in `candidates` until `sequence` can start, and start it.

        Returns:
          Whether the sequence was started. False if there is no room for it even without the
          juniors.
        """
        block_budget, request = self.block_budget, sequence.request
        while True:
            builder = self._plan_builder(memory, StepPlan())
            if self._queue.free_slots:
                if self._admission.try_to_start(builder, sequence):
                    return True
                # Compute the number of blocks that are available if all juniors are preempted: the
                # spare blocks, the blocks that only juniors hold, and the blocks that are reserved
                # for the prompts and the growth of juniors.
                num_claimed = sum(
                    block_budget.num_claimed(s) + block_budget.can_grow(s) for s in candidates
                )
                max_free = (
                    builder.num_spare + block_budget.num_held(memory, candidates) + num_claimed
                )
                if sequence.num_wanted > max_free:
                    return False
            if not candidates:
                return False
            note = PreemptionNote(
                reason="priority",
                numbers={"priority": request.priority},
                other_request=request.request_id,
            )
            candidates.remove(self._preempt(memory, candidates, note))

    def _free_blocks_for_decode(self, memory: BlockMemory) -> None:
        """Preempt sequences until all decoding sequences have blocks for one step.

        Decoding sequences take precedence over prefilling sequences, because they end and free
        their blocks sooner.
        """
        while True:
            claims = [
                self.block_budget.num_for_decode(s) for s in self.running if not s.num_prefill
            ]
            num_wanted = sum(claims)
            num_free = self.block_budget.num_free(memory, self.running)
            if num_wanted <= num_free:
                return
            numbers = {"num_samples": len(claims), "num_wanted": num_wanted, "num_free": num_free}
            note = PreemptionNote(reason="decode", numbers=numbers)
            self._preempt(memory, self.running[1:], note)

    def _preempt(
        self, memory: BlockMemory, candidates: list[Sequence], note: PreemptionNote
    ) -> Sequence:
        """Preempt the candidate with the lowest `_preemption_rank`, and return it.

        `note` has the reason for the preemption; this method sets the other fields of `note`.
        """
        sequence = min(candidates, key=self._preemption_rank)
        is_swapped = self._should_swap(sequence)
        if sequence.history is not None:
            remaining = [candidate for candidate in candidates if candidate is not sequence]
            spared = min(remaining, key=self._preemption_rank, default=None)
            sequence.history.preempt(
                dataclasses.replace(
                    note,
                    kind="swap" if is_swapped else "recompute",
                    num_tokens=sequence.num_computed,
                    sample=sequence.index,
                    spared_request=None if spared is None else spared.request.request_id,
                    advantage=None if spared is None else self._advantage(sequence, spared),
                )
            )
        if is_swapped:
            memory.swap_out(sequence)
            self._queue.mark_swapped(sequence, True)
            self.stats.num_swap_preemptions += 1
        else:
            memory.release(sequence)
            sequence.num_lost = sequence.num_computed
            sequence.num_computed = sequence.program_start = 0
        self.stats.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.is_fork = False
        sequence.length_before = len(sequence.token_ids)
        self._queue.free_slot(sequence)
        self._queue.join(sequence, "preempted")
        return sequence

    def _preemption_rank(self, sequence: Sequence) -> tuple[int, bool, float, int, int]:
        """Return the sort key for preemption; the sequence with the lowest rank is preempted.

        The criteria for the lowest rank, the most important first, are: a worse priority; tokens
        generated since the sequence last resumed; a cheaper preemption; a later arrival. Without
        the second criterion, two sequences could preempt each other forever, without any progress.
        """
        has_progressed = len(sequence.token_ids) > sequence.length_before
        seconds = self._recompute_seconds(sequence)
        if self._should_swap(sequence):
            seconds = self._swap_seconds(sequence)
        priority, arrival, index = sequence.seniority
        return -priority, not has_progressed, seconds, -arrival, -index

    def _advantage(self, victim: Sequence, spared: Sequence) -> PreemptionAdvantage:
        """Return why `victim` is preempted instead of `spared`, the next candidate."""
        ranks = self._preemption_rank(victim), self._preemption_rank(spared)
        return next(
            name
            for name, rank, spared_rank in zip(_ADVANTAGES, *ranks, strict=True)
            if rank != spared_rank
        )

    def _should_swap(self, sequence: Sequence) -> bool:
        """Return whether a preemption copies the blocks of the sequence to the host."""
        if self.preemption == "recompute" or not sequence.num_computed:
            return False
        max_blocks, num_swapped = self.costs.max_swapped_blocks, self._queue.num_swapped_blocks
        num_blocks = self.block_budget.num_swapped(sequence.num_computed)
        if max_blocks is not None and num_swapped + num_blocks > max_blocks:
            return False
        is_cheaper = self._swap_seconds(sequence) < self._recompute_seconds(sequence)
        return self.preemption == "swap" or is_cheaper

    def _recompute_seconds(self, sequence: Sequence) -> float:
        # The returned time is an upper bound, because part of the sequence may still be in the
        # prefix cache when it resumes.
        return sequence.num_computed * self.costs.seconds_per_token

    def _swap_seconds(self, sequence: Sequence) -> float:
        num_blocks = self.block_budget.num_swapped(sequence.num_computed)
        return 2 * num_blocks * self.costs.seconds_per_block

    def _plan_builder(self, memory: BlockMemory, plan: StepPlan) -> PlanBuilder:
        return PlanBuilder(
            plan,
            self._queue,
            memory,
            self.block_budget,
            num_tokens=self.max_num_batched_tokens,
            max_chunk=self.max_chunk,
            state_interval=self.state_interval,
            keeps_states=self.enable_prefix_caching,
        )

    def _drop(self, memory: BlockMemory, sequence: Sequence) -> None:
        if sequence.slot is not None:
            memory.release(sequence)
        self._queue.drop(sequence)
        self.lookahead.forget(sequence)
        if self._queue.waiting:
            # A waiting sequence may be admitted with the freed slot or blocks.
            self.lookahead.close()


def _check_fits(sequence: Sequence, block_budget: BlockBudget) -> None:
    num_tokens = len(sequence.token_ids)
    if not 0 < num_tokens <= sequence.max_length:
        raise ArgumentError(
            "Scheduler.add",
            "must hold at least one token and at most max_length = "
            f"{sequence.max_length} tokens, got {num_tokens}.",
            "token_ids",
        )
    # Admission requires blocks for all tokens of a sequence, even if it generates no tokens.
    max_length = max(num_tokens, num_cached_tokens_at(sequence.max_length))
    num_required = block_budget.num_required(max_length)
    if num_required > block_budget.num_blocks:
        raise ArgumentError(
            "Scheduler.add",
            f"a sequence must fit the pool of {block_budget.num_blocks} blocks of "
            f"{block_budget.block_size} tokens, got {num_tokens} prompt tokens and "
            f"{sequence.max_length - num_tokens} tokens to generate, which need {num_required} "
            "blocks. Use fewer tokens or more blocks.",
        )
