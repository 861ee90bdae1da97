"""Plan of an engine step, and plans made before the tokens of the last step are known."""

from dataclasses import dataclass, field

from paged_jax.scheduler.queue import Queue
from paged_jax.scheduler.request import Sequence


@dataclass
class StepPlan:
    """Work of an engine step. The engine runs chunks, then forks, then decodes.

    Attributes:
      expired: sequences whose deadline has passed. The scheduler has already released them and no
        longer holds their requests.
      chunks: sequences to prefill, each with its number of tokens. The engine publishes the blocks
        that a chunk fills before the next plan, because other sequences may wait for them.
      computed: sequences that generate no tokens and are complete after their chunk.
      forks: pairs of a sequence and the sequences whose empty slots become copies of its slot.
      decodes: sequences that decode. There are enough free blocks for the first decode step,
        including copies of shared blocks.
      bound: sequences of `decodes` with a grammar whose next tokens the engine restricts before it
        decodes. All their tokens are known. The program draws the tokens that the grammar forces
        and one more; then these sequences wait, and the others continue.
      num_steps: maximum number of decode steps; 0 if no sequence decodes.
      leave_on_stop: whether decoding ends as soon as one sequence is complete: others wait.
      is_ahead: whether the plan was made before the tokens of the previous plan were known. Its
        sequences may already be complete, or there may be too few free blocks. In both cases the
        device draws no tokens.
    """

    expired: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    computed: list[Sequence] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    bound: list[Sequence] = field(default_factory=list)
    num_steps: int = 0
    leave_on_stop: bool = False
    is_ahead: bool = False


class Lookahead:
    """Planner of further decode steps while the device still runs the previous plan.

    The device knows the last token of each sequence and stops sequences itself. It can therefore
    run a second plan of decode steps before the host has read the tokens of the first. If a
    sequence ends in the first plan, its row draws nothing in the second, or draws tokens that the
    host drops.

    The host needs the last token of a sequence with a grammar to restrict its next token. If other
    sequences have no grammar, plans alternate: all sequences decode, then only the others, while
    the host reads the tokens of the first plan and computes the masks of the third:

        device   | all, 1 step | others, k steps | all, 1 step | others, k steps |
        host           read, compute the masks         read, compute the masks

    With drafts, which depend on the latest tokens, lookahead is used only beside sequences with a
    grammar. Plans made ahead then decode without drafts.

    Lookahead stops when a request arrives or expires, when a sequence ends while others wait, when
    blocks run out, and if all sequences have a grammar. Then the host reads all tokens, and the
    scheduler makes the next plan.

    Args:
      queue: the waiting sequences and the slots.
      max_steps: maximum number of decode steps on the device at a time. With lookahead, each of two
        plans has half of them, rounded up. A new request then waits at most one step longer.
      has_drafts: whether plans that are not made ahead may verify drafts.

    Attributes:
      is_used: whether to plan ahead; True unless a test or benchmark changes it.
      num_free_steps: k, number of decode steps in which only sequences without a grammar decode. 0
        if all sequences wait for the masks. `MaskClock` sets it, to less than `max_steps`.
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

    def open(self, plan: StepPlan, may_admit_next: bool) -> None:
        """Allow planning ahead if all running sequences decode in `plan` and none can join them.

        Args:
          plan: the plan that the scheduler has just made.
          may_admit_next: whether the next step may admit a sequence.
        """
        queue, self._rows = self._queue, plan.decodes
        is_full = bool(plan.decodes) and len(plan.decodes) == len(queue.running)
        self._has_grammars = bool(plan.bound)
        can_alternate = self.num_free_steps > 0 and len(plan.bound) < len(plan.decodes)
        # A chunk may complete blocks of a prefix that a waiting sequence shares. Then the waiting
        # sequence may fit into the next step.
        may_admit_next |= bool(plan.chunks and queue.waiting and queue.free_slots)
        is_free = can_alternate if plan.bound else not self._has_drafts
        self._is_open = self.is_used and is_full and is_free and not may_admit_next

    def close(self) -> None:
        """Stop planning ahead until the scheduler has made the next plan."""
        self._is_open = False
        self._rows = []

    def forget(self, sequence: Sequence) -> None:
        """Exclude an ended sequence from later plans, so that its memory can be freed."""
        self._rows = [each for each in self._rows if each is not sequence]

    def next_plan(self, plan: StepPlan, now: float = 0.0) -> StepPlan | None:
        """Return the plan that follows a running plan whose tokens are not known yet.

        Args:
          plan: the last plan.
          now: current time in seconds, on the clock of the deadlines.

        Returns:
          A plan of more decode steps. None if the scheduler must plan first, or if all sequences
          will be complete.
        """
        if not self._is_open or self._queue.expired(now):
            return None
        decodes = [sequence for sequence in self._rows if sequence.slot is not None]
        if self._has_grammars:
            return self._plan_beside_grammars(plan, decodes)
        if self._has_drafts:
            return None
        longest = max((s.max_length - len(s.token_ids) for s in decodes), default=0)
        return self._make(decodes, min(self.max_steps, longest - plan.num_steps))

    def _plan_beside_grammars(self, plan: StepPlan, running: list[Sequence]) -> StepPlan | None:
        """Plan without the sequences whose next mask depends on tokens that are not known yet."""
        is_planned, was_bound = set(plan.decodes), set(plan.bound)
        decodes: list[Sequence] = []
        known: dict[Sequence, int] = {}  # number of steps until each needs a further mask
        longest = 0
        for sequence in running:
            num_ahead = plan.num_steps if sequence in is_planned else 0
            grammar = sequence.active_grammar()
            if grammar is not None and not num_ahead:
                known[sequence] = min(self.max_steps, len(grammar.forced) + 1)
                if grammar.ends:
                    known[sequence] = self.max_steps
            elif grammar is not None:
                is_forced = sequence in was_bound and len(grammar.forced) > num_ahead
                if not is_forced:
                    continue
            decodes.append(sequence)
            longest = max(longest, sequence.max_length - len(sequence.token_ids) - num_ahead)
        self._has_grammars = any(s.grammar is not None and not s.grammar.is_over for s in running)
        most = min(known.values(), default=self.max_steps)
        if len(decodes) < len(running):  # some sequences wait for masks
            most = max(min(known.values(), default=0), self.num_free_steps)
        return self._make(decodes, min(most, longest), list(known))

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
