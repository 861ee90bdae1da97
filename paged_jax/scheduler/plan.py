"""What the scheduler hands out: the plan of a step, and totals of all steps."""

from dataclasses import dataclass, field

from paged_jax.scheduler.request import Sequence


@dataclass
class StepPlan:
    """What the engine runs in one step, in this order.

    Attributes:
      expired: sequences whose deadline has passed; they have left already, and the scheduler no
        longer keeps their requests.
      chunks: sequences and how many of their next tokens to prefill. Blocks that this fills should
        be published before the next plan, as other sequences may wait for them.
      computed: sequences that are complete when the chunks have run, as they draw no tokens.
      forks: sequences, and those whose empty slots become copies of theirs.
      decodes: sequences that decode. Free blocks suffice for their first step, copies included.
      num_steps: most decode steps; 0 if no sequence decodes.
      leave_on_stop: whether to stop as soon as one of them is complete, because others wait.
      is_ahead: whether the plan was made before the tokens of the one before it were known. Its
        decodes may have stopped, and blocks need not suffice; then nothing is drawn.
    """

    expired: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    computed: list[Sequence] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    num_steps: int = 0
    leave_on_stop: bool = False
    is_ahead: bool = False


@dataclass
class SchedulerStats:
    """Totals since the scheduler was made.

    Attributes:
      num_admitted: sequences that got a slot for the first time.
      num_finished: sequences that were complete.
      num_aborted: sequences whose request was aborted.
      num_expired: sequences whose deadline passed.
      num_recompute_preemptions: times that the blocks of a sequence were released.
      num_swap_preemptions: times that they were copied to host memory.
      num_recomputed_tokens: tokens that were computed again after a preemption.
      num_queried_tokens: tokens that were looked up in the prefix cache.
      num_cached_tokens: tokens that were found there.
      peak_running: most sequences that ran at once.
    """

    num_admitted: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_expired: int = 0
    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    peak_running: int = 0

    @property
    def num_preemptions(self) -> int:
        """Preemptions of both kinds."""
        return self.num_recompute_preemptions + self.num_swap_preemptions
