"""What runs next while it is not known yet what the last step has drawn: more of the same.

The device knows the last token of each sequence and stops sequences by itself, so that a dispatch
of decoding can follow another one at once, and the device need not wait for the host to read
tokens. What they were can change the plan only if sequences end; then the rows of these draw
nothing, or, where the host alone could know that, tokens that nobody wants.
"""

from paged_jax.scheduler.plan import StepPlan
from paged_jax.scheduler.queue import Queue


class Lookahead:
    """Plans steps ahead where nothing but decoding the same sequences can follow.

    That ends when a request arrives or expires, when one of the sequences ends for which others
    wait, and when blocks run out: then tokens are read first, and the scheduler plans. So they are
    while one of the sequences has a grammar.

    Args:
      queue: the waiting line and the slots.
      max_steps: most decode steps that are queued at once. Two dispatches have half of them each,
        so that a request that arrives waits for no more than it would for one.
      is_used: whether steps are planned ahead at all.
    """

    def __init__(self, queue: Queue, max_steps: int, *, is_used: bool):
        self._queue = queue
        self._max_steps = max_steps
        self._is_used = is_used
        self._is_open = False

    @property
    def max_steps(self) -> int:
        """Most decode steps in the next dispatch."""
        return -(-self._max_steps // 2) if self._is_open else self._max_steps

    def open(self, plan: StepPlan, may_admit_next: bool) -> None:
        """Look ahead from a new plan, if all that run decode in it and none can join them.

        Args:
          plan: the plan that the scheduler has just made.
          may_admit_next: whether the next step could admit a sequence.
        """
        queue = self._queue
        is_full = bool(plan.decodes) and len(plan.decodes) == len(queue.running)
        # What a grammar allows depends on the tokens: the host has to read them to make the mask
        # of the next ones, and a program that is queued draws what it computes.
        is_free = all(sequence.followed_grammar() is None for sequence in plan.decodes)
        # What a prompt leaves in the prefix cache may let others in that lack blocks.
        may_admit_next |= bool(plan.chunks and queue.waiting and queue.free_slots)
        self._is_open = self._is_used and is_full and is_free and not may_admit_next

    def close(self) -> None:
        """Look no further ahead than what is queued, until the scheduler has planned."""
        self._is_open = False

    def next_plan(self, plan: StepPlan, now: float = 0.0) -> StepPlan | None:
        """Decide what runs after a plan, before it is known what it has drawn.

        Args:
          plan: the last plan, which runs.
          now: seconds, on the clock of the deadlines.

        Returns:
          The plan of more decode steps; None if something else may come first, or if all sequences
          are complete by then.
        """
        if not self._is_open or self._queue.deadlines.is_due(now):
            return None
        decodes = [sequence for sequence in plan.decodes if sequence.slot is not None]
        longest = max((s.max_length - len(s.token_ids) for s in decodes), default=0)
        num_steps = min(self.max_steps, longest - plan.num_steps)
        if num_steps <= 0:
            return None
        leave_on_stop = bool(self._queue.waiting)
        return StepPlan(
            decodes=decodes, num_steps=num_steps, leave_on_stop=leave_on_stop, is_ahead=True
        )
