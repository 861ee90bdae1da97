"""What an engine counts and measures: totals, the times of a step's parts, and blocks in use."""

import dataclasses
import time

import jax

from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan


@dataclasses.dataclass
class EngineStats:
    """Totals of an engine since it was built. Times leave out what compiling takes.

    Attributes:
      num_steps: engine steps run so far; each may decode several tokens of a sequence.
      num_prompt_tokens: prompt tokens computed, without those found in the prefix cache.
      num_generated_tokens: tokens drawn.
      num_decode_tokens: tokens drawn in dispatches that did not compile.
      prefill_seconds: seconds in programs that prefill.
      decode_seconds: seconds of steps in programs that decode, until their tokens were on the host.
      host_seconds: seconds of steps outside of those programs, in which the device had to wait.
      schedule_seconds: seconds of planning, with what the plan asks of the cache.
      postprocess_seconds: seconds of turning tokens into text and ending requests; as those of
        planning, they count for host_seconds unless the device decoded meanwhile.
      compile_seconds: seconds of compiling, in the first calls of programs.
      first_token_seconds: seconds from the arrival of the first request to its first token, with
        the compilation that it waited for.
      peak_num_blocks: most blocks held at once at the end of a step.
      num_preemptions: times that a sequence lost its blocks to others.
      num_swap_preemptions: preemptions that copied the blocks to host memory.
      num_recomputed_tokens: tokens computed again after a preemption.
      num_queried_tokens: tokens looked up in the prefix cache.
      num_cached_tokens: tokens found in the prefix cache.
      num_drafts: times that next tokens of a sequence were guessed by speculation.
      num_draft_tokens: tokens guessed.
      num_accepted_tokens: guesses that were right.
      num_accepted_at: how many of these were the first token of their draft, the second, and so on.
      sharing: fraction of blocks saved by sharing, over all steps, of those that all sequences
        would hold without sharing any (Kwon et al., 2023, section 6.3).
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    schedule_seconds: float = 0.0
    postprocess_seconds: float = 0.0
    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    peak_num_blocks: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: tuple[int, ...] = ()
    sharing: float = 0.0


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """The blocks of a group of layers that keep the same tokens.

    Attributes:
      window: tokens of a sequence that these layers attend to; None for all.
      num_layers: layers of the group.
      num_blocks: blocks in its pool.
      num_used: blocks that samples hold.
    """

    window: int | None
    num_layers: int
    num_blocks: int
    num_used: int


class Stopwatch:
    """Measures `with` blocks, of which a step may have several.

    Each block is a range in profiles of `jax.profiler`.

    Args:
      executor: reports how long it compiled and waited.
      name: the name of the range.

    Attributes:
      seconds: seconds that the blocks took since `reset`; 0 for those that compiled.
      waited: seconds in which the host waited for the device to prefill.
      has_compiled: whether a program was compiled in any of them.
    """

    def __init__(self, executor: Executor, name: str):
        self._executor = executor
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Start at zero."""
        self.seconds = self.waited = 0.0
        self.has_compiled = False

    def __enter__(self) -> "Stopwatch":
        self._compiled, self._waited = self._executor.compile_seconds, self._executor.wait_seconds
        self._range = jax.profiler.TraceAnnotation(self._name)
        self._range.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        elapsed = time.perf_counter() - self._start
        self._range.__exit__(*exception)
        if self._executor.compile_seconds > self._compiled:
            self.has_compiled = True
        else:
            self.seconds += elapsed
        self.waited += self._executor.wait_seconds - self._waited


class StepClock:
    """Measures the parts of a step, and adds them to the totals when the step is over.

    Args:
      stats: the totals.
      runner: reports how long it compiled and waited.

    Attributes:
      scheduling, running, postprocessing: the stopwatches of the three parts of a step.
      prefilling, decoding: the stopwatches of the two parts of `running`.
    """

    def __init__(self, stats: EngineStats, runner: ModelRunner):
        self._stats = stats
        self._runner = runner
        self._num_prefilled = 0  # tokens that took the prefill_seconds of the stats
        self.scheduling = Stopwatch(runner.executor, "schedule")
        self.running = Stopwatch(runner.executor, "run")
        self.prefilling = Stopwatch(runner.executor, "prefill")
        self.decoding = Stopwatch(runner.executor, "decode")
        self.postprocessing = Stopwatch(runner.executor, "postprocess")

    def start_step(self) -> None:
        """Measure a new step."""
        for watch in (
            self.scheduling, self.running, self.prefilling, self.decoding, self.postprocessing,
        ):  # fmt: skip
            watch.reset()

    def count_step(self, plan: StepPlan, tokens: StepTokens | None, *, is_ahead: bool) -> None:
        """Add a step that is over to the totals.

        Args:
          plan: the plan of the step.
          tokens: the tokens that were read.
          is_ahead: whether a dispatch is queued that the device works on since.
        """
        stats, running = self._stats, self.running
        prefill_seconds = decode_seconds = 0.0
        # Prefill only queues programs. They are waited for while decoding, which is not its time.
        if plan.chunks and not running.has_compiled:
            prefill_seconds = self.prefilling.seconds + running.waited
            self._num_prefilled += sum(count for _, count in plan.chunks)
        # The time of the first tokens is not known apart from that of compiling.
        if tokens is not None and not self.decoding.has_compiled:
            decode_seconds = self.decoding.seconds - running.waited
            stats.num_decode_tokens += int(tokens.num_new.sum())
        stats.num_steps += 1
        stats.schedule_seconds += self.scheduling.seconds
        stats.postprocess_seconds += self.postprocessing.seconds
        if not running.has_compiled:
            stats.host_seconds += running.seconds - prefill_seconds - decode_seconds
        for watch, is_hidden in ((self.scheduling, plan.is_ahead), (self.postprocessing, is_ahead)):
            if is_hidden:
                decode_seconds += watch.seconds
            else:
                stats.host_seconds += watch.seconds
        stats.prefill_seconds += prefill_seconds
        stats.decode_seconds += decode_seconds

    def update_costs(self, scheduler: Scheduler) -> None:
        """Give the scheduler the costs of preemption, from all that was measured so far."""
        if self._num_prefilled:
            seconds = self._stats.prefill_seconds / self._num_prefilled
            scheduler.costs.seconds_per_token = seconds
        if self._runner.slots.num_swapped_blocks:
            seconds = self._runner.slots.swap_seconds / self._runner.slots.num_swapped_blocks
            scheduler.costs.seconds_per_block = seconds


class BlockMeter:
    """Counts the blocks that are held after each step, and those that sharing saves.

    Args:
      stats: the totals.
      scheduler: knows the running sequences.
      runner: knows the free blocks.

    Attributes:
      num_held: blocks held when they were last counted.
      others_free: free blocks of each group of layers but the first, at that time.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, runner: ModelRunner):
        self._stats = stats
        self._scheduler = scheduler
        self._runner = runner
        self.num_held = 0
        self.others_free = runner.slots.others_free
        self._num_saved = 0  # summed over steps, as is the next
        self._num_unshared = 0

    def count_step(self, plan: StepPlan, tokens: StepTokens | None) -> None:
        """Count the blocks after a step, before its tokens are appended to the sequences."""
        num_new: dict[Sequence, int] = {}
        if tokens is not None:
            num_new = dict(zip(plan.decodes, tokens.num_new.tolist(), strict=False))
        # What has ended since the program began, in one that ran ahead, had its blocks there.
        ended = [sequence for sequence in plan.decodes if sequence.slot is None]
        # A sequence that has drawn tokens holds what it had when that program began.
        row, starts = self._scheduler.block_budget.num_in_row, []
        for sequence in [*self._scheduler.running, *ended]:
            num_drawn = num_new.get(sequence, 0)
            start = sequence.num_computed if num_drawn else sequence.program_start
            starts.append((sequence.num_computed + num_drawn, start))
        # Not those of now, which the device may still work on.
        num_free = self._runner.slots.num_free if tokens is None else int(tokens.num_free)
        self.count(sum(row(length, start) for length, start in starts), num_free)

    def count(self, num_unshared: int, num_free: int) -> None:
        """Count the blocks that are held, and those that would be if none were shared."""
        self.num_held = self._scheduler.num_blocks - num_free
        self.others_free = self._runner.slots.others_free
        self._stats.peak_num_blocks = max(self._stats.peak_num_blocks, self.num_held)
        self._num_saved += num_unshared - self.num_held
        self._num_unshared += num_unshared
        self._stats.sharing = self._num_saved / max(1, self._num_unshared)
