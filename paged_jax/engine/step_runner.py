"""`StepRunner`: runs a plan of the scheduler on the device."""

import time
from typing import NamedTuple

import numpy as np

from paged_jax.engine.drafts import Drafter
from paged_jax.engine.postprocess import Postprocessor
from paged_jax.engine.stats import EngineStats, StepClock
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import QueuedResult
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.explain import describe_match
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan


class PendingStep(NamedTuple):
    """A step in flight: its programs are queued, and the host has not read its tokens.

    Attributes:
      plan: the plan of the step.
      drawn: the queued result, or the tokens of a verification, which are already on the host; None
        if nothing decodes.
    """

    plan: StepPlan
    drawn: QueuedResult | StepTokens | None


class StepRunner:
    """Runs plans: prefills chunks, forks samples and decodes.

    Args:
      runner: runs programs on the device.
      scheduler: the scheduler that makes the plans.
      postprocessor: stores the log-probabilities of prompts.
      drafter: drafts tokens to verify.
      clock: measures prefilling and decoding.
      stats: totals of the engine.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        postprocessor: Postprocessor,
        drafter: Drafter,
        clock: StepClock,
        stats: EngineStats,
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._postprocessor = postprocessor
        self._drafter = drafter
        self._clock = clock
        self._stats = stats

    def queue(self, plan: StepPlan) -> PendingStep:
        """Queue the programs of a plan."""
        if not plan.is_ahead:  # a plan made ahead has no new sequences
            self._note_start(plan)
        with self._clock.prefilling:
            self._prefill(plan)
            self._runner.slots.fork(plan.forks)
        with self._clock.decoding:
            return PendingStep(plan, self._decode(plan) if plan.decodes else None)

    def read(self, pending: PendingStep) -> StepTokens | None:
        """Wait for the tokens of a step and return them; None if nothing decodes.

        Raises:
          RuntimeError: there were not enough free blocks for the plan.
        """
        plan, drawn = pending
        with self._clock.decoding:
            self._runner.executor.check()
            tokens = self._runner.executor.read(drawn) if isinstance(drawn, QueuedResult) else drawn
        if tokens is not None and not tokens.num_steps and not plan.is_ahead:
            raise RuntimeError("Engine: the scheduler must leave blocks for a step, got none.")
        return tokens

    def _note_start(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        chunked = (sequence for sequence, _ in plan.chunks)
        for sequence in [*chunked, *plan.computed, *plan.decodes]:
            request = sequence.request
            if request.metrics.first_scheduled_time is None:
                request.mark(first_scheduled_time=now)
                request.num_cached_tokens = sequence.num_computed
                if request.history is not None:
                    request.history.prefix_match = self._describe_match(request)

    def _describe_match(self, request: Request) -> str:
        if not self._scheduler.enable_prefix_caching:
            return "nothing was looked up: the engine runs without prefix caching"
        if request.prompt_logprobs is not None:
            return "nothing was looked up: log-probabilities of a prompt need all of it computed"
        return describe_match(
            len(request.prompt_token_ids),
            request.num_cached_tokens,
            self._scheduler.block_size,
            request.sequences[0].num_known,
        )

    def _prefill(self, plan: StepPlan) -> None:
        scored = [chunk for chunk in plan.chunks if _is_scored(chunk[0])]
        self._runner.prefill([chunk for chunk in plan.chunks if not _is_scored(chunk[0])])
        for sequence, count in scored:
            scores = self._runner.score(sequence, count)
            self._postprocessor.append_prompt_logprobs(
                sequence.request, scores, start=sequence.num_computed, count=count
            )
        for sequence, count in plan.chunks:
            sequence.advance(count)
            self._runner.slots.publish(sequence)

    def _decode(self, plan: StepPlan) -> QueuedResult | StepTokens:
        with_top = any(s.request.params.logprobs is not None for s in plan.decodes)
        num_planned = sum(count for _, count in plan.chunks) + len(plan.decodes)
        drafts = None
        if not plan.is_ahead:  # drafts depend on the latest tokens
            drafts = self._drafter.drafts(
                plan.decodes, self._scheduler.max_num_batched_tokens - num_planned
            )
        if drafts is not None:
            tokens = self._runner.verify(plan.decodes, drafts, bound=plan.bound, with_top=with_top)
            if tokens.ok:
                self._count_drafts(drafts, np.asarray(tokens.num_new))
                return tokens
        return self._runner.decode(
            plan.decodes,
            plan.num_steps,
            bound=plan.bound,
            leave_on_stop=plan.leave_on_stop,
            with_top=with_top,
            is_ahead=plan.is_ahead,
        )

    def _count_drafts(self, drafts: list[list[int]], num_new: np.ndarray) -> None:
        stats, num_accepted = self._stats, np.maximum(num_new - 1, 0)
        stats.num_drafts += sum(map(bool, drafts))
        stats.num_draft_tokens += sum(map(len, drafts))
        stats.num_accepted_tokens += int(num_accepted.sum())
        positions = np.arange(self._runner.executor.sizes.num_drafts)
        before = stats.num_accepted_at or (0,) * len(positions)
        counts = before + (num_accepted[:, None] > positions).sum(axis=0)
        stats.num_accepted_at = tuple(counts.tolist())


def _is_scored(sequence: Sequence) -> bool:
    """Return whether a sequence computes the prompt log-probabilities of its request."""
    return sequence.request.prompt_logprobs is not None and sequence.index == 0
