# pyright: strict, reportUnknownMemberType=false
"""Statistics of an engine: the durations of the phases of a step, and the blocks in use."""

import dataclasses
import time
from collections.abc import Callable

import jax

from paged_jax.cache.retention import retention
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.outputs import EngineStats
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import Lookahead, StepPlan


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """Use of the pool of a group of layers.

    Attributes:
      window: sliding window of the layers in tokens; None if they have no window.
      num_layers: number of layers in the group.
      num_blocks: number of blocks in the pool; for recurrent layers, number of states.
      num_used: number of these blocks or states that samples use.
      is_recurrent: whether the group consists of the recurrent layers of the model.
    """

    window: int | None
    num_layers: int
    num_blocks: int
    num_used: int
    is_recurrent: bool = False

    @property
    def kept(self) -> str:
        """Tokens that the pool keeps: ``"all"`` or the window as text; for states, ``"states"``."""
        return "states" if self.is_recurrent else retention(self.window).label


class Stopwatch:
    """Stopwatch for a phase of a step, used as a context manager.

    Each ``with`` block of the stopwatch is also a range in profiles of `jax.profiler`.

    Args:
      executor: executor that measures the time for compilation and for waiting.
      name: the name of the range.

    Attributes:
      seconds: total duration of the ``with`` blocks since `reset`, without blocks that compiled a
        program.
      waited: seconds that `Executor.check` waited for queued programs during these blocks.
      has_compiled: whether a program was compiled in a block since `reset`.
    """

    def __init__(self, executor: Executor, name: str):
        self._executor = executor
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Set the times to 0 and `has_compiled` to False."""
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
    """Clock that measures the phases of a step.

    Args:
      stats: statistics of the engine; `count_step` updates them.
      runner: runner; its executor measures the time for compilation and for waiting.

    Attributes:
      scheduling: stopwatch of the first phase, which plans the step.
      running: stopwatch of the second phase, which runs programs.
      postprocessing: stopwatch of the third phase, which appends tokens to samples.
      prefilling: stopwatch of the part of `running` that queues prefills.
      decoding: stopwatch of the part of `running` that queues decode steps and reads their tokens.
    """

    def __init__(self, stats: EngineStats, runner: ModelRunner):
        self._stats = stats
        self._runner = runner
        # Number of prompt tokens that were computed in the time `stats.prefill_seconds`.
        self._num_prefilled = 0
        self.scheduling = Stopwatch(runner.executor, "schedule")
        self.running = Stopwatch(runner.executor, "run")
        self.prefilling = Stopwatch(runner.executor, "prefill")
        self.decoding = Stopwatch(runner.executor, "decode")
        self.postprocessing = Stopwatch(runner.executor, "postprocess")

    def start_step(self) -> None:
        """Reset all stopwatches."""
        for watch in (
            self.scheduling, self.running, self.prefilling, self.decoding, self.postprocessing,
        ):  # fmt: skip
            watch.reset()

    def count_step(self, plan: StepPlan, tokens: StepTokens | None, *, is_ahead: bool) -> None:
        """Add the times of a step to the statistics.

        Args:
          plan: the plan of the step.
          tokens: tokens that the step sampled; None if no sequence decodes.
          is_ahead: whether the next step was already queued on the device.
        """
        stats, running = self._stats, self.running
        prefill_seconds = decode_seconds = 0.0
        # The stopwatch `prefilling` only measures the time to queue prefills. The host waits for
        # the prefills later, while the stopwatch `decoding` runs. So add this waiting time to the
        # time of prefilling, and subtract it from the time of decoding.
        if plan.chunks and not running.has_compiled:
            prefill_seconds = self.prefilling.seconds + running.waited
            self._num_prefilled += sum(count for _, count in plan.chunks)
        # If a program was compiled, the time for decoding is unknown, so the step is not counted.
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
        """Set the costs of recomputing and of swapping in the scheduler to the measured values."""
        if self._num_prefilled:
            seconds = self._stats.prefill_seconds / self._num_prefilled
            scheduler.costs.seconds_per_token = seconds
        if self._runner.num_swapped_blocks:
            seconds = self._runner.swap_seconds / self._runner.num_swapped_blocks
            scheduler.costs.seconds_per_block = seconds


class MaskClock:
    """Clock that measures grammar masks and chooses k, which is `Lookahead.num_free_steps`.

    After each token of a sequence with a grammar, the host must compute a token mask before the
    sequence can decode again. A cycle consists of a decode step of all sequences and of the time
    for the masks. With k = 0, the device is idle during that time. With k > 0, it decodes k steps
    of the sequences without a grammar. The clock chooses the largest k for which a cycle takes at
    most 5% longer than with k = 0 (10% for k = 1). So sequences without a grammar become faster,
    and sequences with a grammar hardly slower. After every `_PERIOD` cycles, the clock measures
    some cycles with k = 0 for comparison.

    Args:
      lookahead: object that plans the steps; the clock sets its `num_free_steps`.
      max_steps: maximum number of decode steps in one dispatch.
      now: function that returns the time in seconds.
    """

    # In each cycle, sequences without a grammar decode k extra steps, see the docstring of the
    # class. After every `_PERIOD` cycles, the clock measures `_SAMPLES` cycles with k = 0. If k = 1
    # is too slow, k stays 0 for a period. Then k = 1 is tried again. Each time that k = 1 is far
    # too slow (see `_FAR_TOO_LONG`), the period doubles, up to `_LONGEST_PERIOD`.
    _PERIOD, _LONGEST_PERIOD, _SAMPLES = 128, 2048, 8
    # Let t(k) be the duration of a cycle. The ratio t(k) / t(0) must not exceed `_MOST` for k > 1,
    # or `_MOST_OF_ONE` for k = 1. If the ratio exceeds `_FAR_TOO_LONG`, k = 1 is far too slow.
    _MOST, _MOST_OF_ONE, _FAR_TOO_LONG = 1.05, 1.1, 1.4

    def __init__(
        self, lookahead: Lookahead, max_steps: int, now: Callable[[], float] = time.perf_counter
    ):
        self._lookahead = lookahead
        self._most = max(1, max_steps - 1)
        self._now = now
        # Time at which the host last read tokens of sequences with a grammar.
        self._read_at: float | None = None
        self._num_cycles, self._period = 0, self._PERIOD
        self._samples: list[float] = []
        self._plain_seconds = 0.0  # Duration of a cycle with k = 0.
        # The value that k gets after the current measurement with k = 0. If it is 0, k stays 0 for
        # a whole period.
        self._next_k = 1
        # Duration of a cycle with k = `_next_k`, if it seemed too long; otherwise 0. It will be
        # compared with a new measurement with k = 0.
        self._doubtful_seconds = 0.0
        self._lookahead.num_free_steps = 0

    def note_read(self, plan: StepPlan, num_steps: int) -> None:
        """Update the measurements when the host has read the tokens of a plan.

        `num_steps` is the number of decode steps that sampled these tokens.
        """
        if not plan.bound:
            if not plan.is_ahead:
                self._read_at = None  # No sequence has a grammar.
            return
        before, self._read_at = self._read_at, self._now()
        has_others = len(plan.bound) < len(plan.decodes)
        if before is None or plan.chunks or num_steps != 1 or not has_others:
            return
        self._num_cycles += 1
        self._samples.append(self._read_at - before)
        # Ignore the first two cycles after a change of k (see the docstring of the class), because
        # some of their steps were planned with the old k.
        if len(self._samples) == self._SAMPLES + 2:
            # Use the lower quartile of the durations, because other processes make some cycles
            # longer.
            self._choose(sorted(self._samples[2:])[self._SAMPLES // 4])

    def _choose(self, seconds: float) -> None:
        """Choose the next k (see the docstring of the class).

        `seconds` is the measured duration of a cycle with the current k.
        """
        k, is_due = self._lookahead.num_free_steps, self._num_cycles >= self._period
        self._samples = self._samples[-2:]
        if not k:
            self._plain_seconds = seconds
            if self._next_k or is_due:
                self._set(self._k_after_plain())
        elif is_due:
            self._period, self._next_k = self._PERIOD, k
            self._set(0)
        elif self._is_too_long(seconds, k):
            # The machine may have become slower since the last measurement with k = 0. So measure
            # k = 0 again before deciding that this k is too large.
            self._next_k, self._doubtful_seconds = k, seconds
            self._set(0)
        # A cycle has one step of all sequences and k shorter steps of fewer sequences. So one more
        # short step makes the cycle longer by a factor below 1 + 1 / (k + 1). Assume the factor
        # 1 + 0.6 / (k + 1).
        elif seconds * (1 + 0.6 / (k + 1)) < self._plain_seconds * self._MOST and k < self._most:
            self._set(k + 1)

    def _is_too_long(self, seconds: float, k: int) -> bool:
        return seconds > self._plain_seconds * (self._MOST if k > 1 else self._MOST_OF_ONE)

    def _k_after_plain(self) -> int:
        """Choose the next k (see the docstring of the class) after a measurement with k = 0.

        The result is also stored in `_next_k`.
        """
        k, seconds = self._next_k or 1, self._doubtful_seconds
        self._doubtful_seconds = 0.0
        if not seconds:
            self._num_cycles = 0
        elif self._is_too_long(seconds, k):
            k -= 1
            if not k and seconds > self._FAR_TOO_LONG * self._plain_seconds:
                self._period = min(2 * self._period, self._LONGEST_PERIOD)
        self._next_k = k
        return k

    def _set(self, num_free_steps: int) -> None:
        self._lookahead.num_free_steps = num_free_steps
        self._samples = []


class BlockMeter:
    """Counter of the blocks in use, and of the blocks that are saved by sharing.

    Args:
      stats: statistics of the engine; each count updates them.
      scheduler: scheduler with the running sequences.
      runner: runner that knows the number of free blocks.

    Attributes:
      free_blocks: number of free blocks of each group of layers, and of free states, at the last
        count.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, runner: ModelRunner):
        self._stats = stats
        self._scheduler = scheduler
        self._runner = runner
        self.free_blocks = runner.free_blocks
        # These are sums over all steps: the number of blocks that sharing saved, and the number of
        # blocks that would be in use without sharing.
        self._num_saved = 0
        self._num_unshared = 0

    @property
    def num_held(self) -> int:
        """Number of blocks of the first group that were in use at the last call of `count`."""
        return self._scheduler.num_blocks - self.free_blocks[0]

    def count_step(self, plan: StepPlan, tokens: StepTokens | None) -> None:
        """Count the blocks in use at the end of a step.

        Call it before the tokens of the step are appended to the sequences.
        """
        num_new: dict[Sequence, int] = {}
        if tokens is not None:
            num_new = dict(zip(plan.decodes, tokens.num_new.tolist(), strict=False))
        # Also count sequences that ended after this step was queued, because they still used their
        # blocks during the step.
        ended = [sequence for sequence in plan.decodes if sequence.slot is None]
        # Blocks that leave a window while a program runs are freed only by the next program. So
        # count the blocks that the window contained when the last program began.
        row = self._scheduler.block_budget.num_in_row
        starts: list[tuple[int, int]] = []
        for sequence in [*self._scheduler.running, *ended]:
            num_drawn = num_new.get(sequence, 0)
            start = sequence.num_computed if num_drawn else sequence.program_start
            starts.append((sequence.num_computed + num_drawn, start))
        # Use the numbers of free blocks that the step itself returned, because the device may
        # already run the next step.
        if tokens is None:
            free_blocks = self._runner.free_blocks
        else:
            free_blocks = [int(num_free) for num_free in tokens.free_blocks]
        self.count(sum(row(length, start) for length, start in starts), free_blocks)

    def count(self, num_unshared: int, free_blocks: list[int]) -> None:
        """Update the statistics with the number of blocks in use at the end of a step.

        Args:
          num_unshared: number of blocks that the sequences would use without sharing.
          free_blocks: number of free blocks of each group of layers.
        """
        self.free_blocks = free_blocks
        num_held = self.num_held
        self._stats.peak_num_blocks = max(self._stats.peak_num_blocks, num_held)
        self._num_saved += num_unshared - num_held
        self._num_unshared += num_unshared
        self._stats.sharing = self._num_saved / max(1, self._num_unshared)
