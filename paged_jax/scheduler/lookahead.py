"""`Lookahead`: decides whether the next step is planned before the tokens of a step are known."""

from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.step_plan import StepPlan


class Lookahead:
    """Plans the next decode steps while the device still runs the previous plan.

    The device knows the last token of each sequence, and stops complete sequences itself. So it can
    run a second plan of decode steps before the host has read the tokens of the first plan. If a
    sequence ends in the first plan, the device samples no tokens for it in the second plan. If only
    the host can detect the end, as for stop strings, it ignores the tokens of the second plan.

    If a sequence has a grammar, the host needs its last token to compute the token mask for its
    next token. If some sequences have a grammar and others do not, plans alternate: first all
    sequences decode one step, then only the sequences without a grammar decode, while the host
    reads the tokens of the first plan and computes the masks for the third plan:

        device   | all, 1 step | others, k steps | all, 1 step | others, k steps |
        host           read, compute the masks         read, compute the masks

    Drafts depend on the latest tokens. So with drafts, the lookahead is only used while some
    sequences have a grammar, and the plans made ahead decode without drafts.

    The lookahead stops when a request arrives or expires, when a sequence ends while others wait,
    when blocks run out, and if all sequences have a grammar. Then the host reads all tokens, and
    the scheduler makes the next plan.

    Args:
      queue: the waiting sequences and the slots.
      max_steps: maximum number of decode steps that are queued on the device at the same time. With
        lookahead, two plans are queued, and each has half of these steps, rounded up. So a new
        request waits at most one step longer than without lookahead.
      has_drafts: whether plans that are not made ahead may verify drafts.

    Attributes:
      is_used: whether to plan ahead; True unless a test or a benchmark changes it.
      num_free_steps: k, number of decode steps in plans for only the sequences without a grammar.
        With 0 there are no such plans, so all sequences wait for the masks. `MaskClock` sets it to
        less than `max_steps`.
    """

    def __init__(self, queue: Queue, max_steps: int, *, has_drafts: bool = False):
        self._queue = queue
        self._max_steps = max_steps
        self.is_used = True
        self._has_drafts = has_drafts
        self._is_open = False
        self._rows: list[Sequence] = []
        self._has_grammars = False
        self.num_free_steps = 1

    @property
    def max_steps(self) -> int:
        """Maximum number of decode steps in the next plan."""
        return -(-self._max_steps // 2) if self._is_open else self._max_steps

    def enable_after(self, plan: StepPlan, may_admit_next: bool) -> None:
        """Enable lookahead after `plan` if all running sequences decode and none can be admitted.

        Args:
          plan: the plan that the scheduler has just made.
          may_admit_next: whether the next step may admit a sequence.
        """
        queue, self._rows = self._queue, plan.decodes
        is_full = bool(plan.decodes) and len(plan.decodes) == len(queue.running)
        self._has_grammars = bool(plan.bound)
        can_alternate = self.num_free_steps > 0 and len(plan.bound) < len(plan.decodes)
        # A chunk may fill blocks of a prefix that a waiting sequence shares. The waiting sequence
        # then needs fewer blocks and may be admitted in the next step.
        may_admit_next |= bool(plan.chunks and queue.waiting and queue.free_slots)
        is_free = can_alternate if plan.bound else not self._has_drafts
        self._is_open = self.is_used and is_full and is_free and not may_admit_next

    def close(self) -> None:
        """Stop planning ahead until the scheduler has made the next plan."""
        self._is_open = False
        self._rows = []

    def forget(self, sequence: Sequence) -> None:
        """Remove the reference to an ended sequence, so that its memory can be freed."""
        self._rows = [row for row in self._rows if row is not sequence]

    def next_plan(self, plan: StepPlan, now: float = 0.0) -> StepPlan | None:
        """Return the next plan, while the tokens of the previous plan are not known yet.

        Args:
          plan: the previous plan.
          now: current time in seconds, on the clock of the deadlines.

        Returns:
          A plan with only decode steps. None if the scheduler must make the next plan, or if all
          sequences will be complete after `plan`.
        """
        if not self._is_open or self._queue.expired(now):
            return None
        decodes = [sequence for sequence in self._rows if sequence.slot is not None]
        if self._has_grammars:
            return self._plan_with_grammars(plan, decodes)
        if self._has_drafts:
            return None
        max_remaining = max((s.max_length - len(s.token_ids) for s in decodes), default=0)
        return self._make(decodes, min(self.max_steps, max_remaining - plan.num_steps))

    def _plan_with_grammars(self, plan: StepPlan, running: list[Sequence]) -> StepPlan | None:
        """Plan the next decode steps if some sequences have a grammar.

        A sequence is left out if its next token mask depends on tokens that are not known yet.
        """
        is_planned, was_bound = set(plan.decodes), set(plan.bound)
        decodes: list[Sequence] = []
        step_limits: dict[Sequence, int] = {}  # Steps until each sequence needs a new mask.
        max_remaining = 0
        for sequence in running:
            num_ahead = plan.num_steps if sequence in is_planned else 0
            grammar = sequence.active_grammar()
            if grammar is not None and not num_ahead:
                step_limits[sequence] = min(self.max_steps, len(grammar.forced) + 1)
                if grammar.ends:
                    step_limits[sequence] = self.max_steps
            elif grammar is not None:
                is_forced = sequence in was_bound and len(grammar.forced) > num_ahead
                if not is_forced:
                    continue
            decodes.append(sequence)
            max_remaining = max(
                max_remaining, sequence.max_length - len(sequence.token_ids) - num_ahead
            )
        self._has_grammars = any(s.grammar is not None and not s.grammar.is_over for s in running)
        num_steps = min(step_limits.values(), default=self.max_steps)
        if len(decodes) < len(running):  # Some sequences wait for masks.
            num_steps = max(min(step_limits.values(), default=0), self.num_free_steps)
        return self._make(decodes, min(num_steps, max_remaining), list(step_limits))

    def _make(
        self, decodes: list[Sequence], num_steps: int, bound: list[Sequence] | None = None
    ) -> StepPlan | None:
        if num_steps <= 0:
            return None
        return StepPlan(
            decodes=decodes,
            bound=bound or [],
            num_steps=num_steps,
            leave_on_stop=bool(self._queue.waiting),
            is_ahead=True,
        )
