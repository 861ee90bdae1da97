# pyright: strict, reportUnknownMemberType=false
"""Clocks and counters of an engine: times of the phases of a step, and blocks in use."""

import dataclasses
import time
from collections.abc import Callable

import jax

from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.outputs import EngineStats
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import Lookahead, StepPlan


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """Blocks of a group of layers that keep the same tokens, or states of recurrent layers.

    Attributes:
      window: number of last tokens that these layers attend to; None for all.
      num_layers: number of layers in the group.
      num_blocks: number of blocks, or of states, in its pool.
      num_used: number of blocks, or of states, that samples hold.
      is_recurrent: whether these are states of recurrent layers.
    """

    window: int | None
    num_layers: int
    num_blocks: int
    num_used: int
    is_recurrent: bool = False

    @property
    def kept(self) -> str:
        """Content that these layers keep: a number of tokens, ``"all"``, or ``"states"``."""
        return "states" if self.is_recurrent else str(self.window or "all")


class Stopwatch:
    """Stopwatch for the ``with`` blocks of a phase of a step.

    Each block is also a range in profiles of `jax.profiler`.

    Args:
      executor: reports how long it compiled and waited.
      name: the name of the range.

    Attributes:
      seconds: seconds of the blocks since `reset`, without blocks that compiled a program.
      waited: seconds that the host waited for queued programs in `Executor.check`.
      has_compiled: whether a program was compiled in a block.
    """

    def __init__(self, executor: Executor, name: str):
        self._executor = executor
        self._name = name
        self.reset()

    def reset(self) -> None:
        """Set the attributes to zero."""
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
    """Clock for the phases of a step.

    Args:
      stats: totals of the engine; `count_step` updates them.
      runner: reports how long it compiled and waited.

    Attributes:
      scheduling, running, postprocessing: stopwatches of the three phases of a step.
      prefilling, decoding: stopwatches of the two parts of `running`.
    """

    def __init__(self, stats: EngineStats, runner: ModelRunner):
        self._stats = stats
        self._runner = runner
        self._num_prefilled = 0  # number of tokens prefilled in `prefill_seconds`
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
        """Add the times of a step to the totals.

        Args:
          plan: the plan of the step.
          tokens: tokens of the step; None if nothing decodes.
          is_ahead: whether the device already runs the next step.
        """
        stats, running = self._stats, self.running
        prefill_seconds = decode_seconds = 0.0
        # The `prefilling` stopwatch measures only the queueing of programs. The host waits for them
        # while `decoding` runs, so move this waiting time from decoding to prefilling.
        if plan.chunks and not running.has_compiled:
            prefill_seconds = self.prefilling.seconds + running.waited
            self._num_prefilled += sum(count for _, count in plan.chunks)
        # Do not count the decoding time of a step that compiled a program: it is not known.
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
        """Give the scheduler the measured costs of preemption."""
        if self._num_prefilled:
            seconds = self._stats.prefill_seconds / self._num_prefilled
            scheduler.costs.seconds_per_token = seconds
        if self._runner.num_swapped_blocks:
            seconds = self._runner.swap_seconds / self._runner.num_swapped_blocks
            scheduler.costs.seconds_per_block = seconds


class MaskClock:
    """Clock for the masks of grammars; chooses `Lookahead.num_free_steps`, k.

    A sequence with a grammar gets a token in each cycle. With k = 0, a cycle is a decode step of
    all sequences, and the time in which the host computes the next masks. With k > 0, the other
    sequences decode k steps in that time. The clock chooses the largest k with which a cycle takes
    hardly longer than with k = 0: at most 5% longer, or 10% for k = 1. So the other sequences gain,
    and sequences with grammars lose little. Some cycles in every `_PERIOD` have k = 0, to compare.

    Args:
      lookahead: plans the steps.
      max_steps: maximum number of decode steps on the device at a time.
      now: returns the time in seconds.
    """

    # Number of cycles between two measurements with k = 0, and number of cycles of a measurement.
    # The period doubles when k = 1 takes far too long, because measuring it costs time.
    _PERIOD, _LONGEST_PERIOD, _SAMPLES = 128, 2048, 8
    # Durations of a cycle relative to k = 0: the maximum for k > 1, the maximum for k = 1, and the
    # duration from which on k = 1 takes far too long.
    _MOST, _MOST_OF_ONE, _FAR_TOO_LONG = 1.05, 1.1, 1.4

    def __init__(
        self, lookahead: Lookahead, max_steps: int, now: Callable[[], float] = time.perf_counter
    ):
        self._lookahead = lookahead
        self._most = max(1, max_steps - 1)
        self._now = now
        self._read_at: float | None = None  # time at which the last masked tokens were read
        self._num_cycles, self._period = 0, self._PERIOD
        self._samples: list[float] = []
        self._plain_seconds = 0.0  # seconds of a cycle with k = 0
        self._next = 1  # k after a measurement of k = 0; 0 if k > 0 is given up for a period
        self._doubtful_seconds = 0.0  # seconds of a cycle with k = `_next`, if too long
        self._lookahead.num_free_steps = 0

    def note_read(self, plan: StepPlan, num_steps: int) -> None:
        """Note that the tokens of a plan have been read, from `num_steps` decode steps."""
        if not plan.bound:
            if not plan.is_ahead:
                self._read_at = None  # no sequence has a grammar
            return
        before, self._read_at = self._read_at, self._now()
        has_others = len(plan.bound) < len(plan.decodes)
        if before is None or plan.chunks or num_steps != 1 or not has_others:
            return
        self._num_cycles += 1
        self._samples.append(self._read_at - before)
        # The first cycles after a change are partly planned with the previous k.
        if len(self._samples) == self._SAMPLES + 2:
            # Other programs on the machine make some cycles longer.
            self._choose(sorted(self._samples[2:])[self._SAMPLES // 4])

    def _choose(self, seconds: float) -> None:
        """Choose k after cycles that took `seconds` with the present k."""
        k, is_due = self._lookahead.num_free_steps, self._num_cycles >= self._period
        self._samples = self._samples[-2:]
        if not k:
            self._plain_seconds = seconds
            if self._next or is_due:
                self._set(self._k_after_plain())
        elif is_due:
            self._period, self._next = self._PERIOD, k
            self._set(0)
        elif self._is_too_long(seconds, k):
            # Perhaps the machine has become slower: compare with a new measurement of k = 0.
            self._next, self._doubtful_seconds = k, seconds
            self._set(0)
        # A further step takes less than 1 / (k + 1) of a cycle: it has fewer rows.
        elif seconds * (1 + 0.6 / (k + 1)) < self._plain_seconds * self._MOST and k < self._most:
            self._set(k + 1)

    def _is_too_long(self, seconds: float, k: int) -> bool:
        return seconds > self._plain_seconds * (self._MOST if k > 1 else self._MOST_OF_ONE)

    def _k_after_plain(self) -> int:
        """Return k after a measurement of k = 0, and remember it."""
        k, seconds = self._next or 1, self._doubtful_seconds
        self._doubtful_seconds = 0.0
        if not seconds:
            self._num_cycles = 0
        elif self._is_too_long(seconds, k):
            k -= 1
            if not k and seconds > self._FAR_TOO_LONG * self._plain_seconds:
                self._period = min(2 * self._period, self._LONGEST_PERIOD)
        self._next = k
        return k

    def _set(self, num_free_steps: int) -> None:
        self._lookahead.num_free_steps = num_free_steps
        self._samples = []


class BlockMeter:
    """Counter of blocks that sequences hold, and of blocks that sharing saves.

    Args:
      stats: totals of the engine; each count updates them.
      scheduler: has the running sequences.
      runner: has the number of free blocks.

    Attributes:
      free_blocks: number of free blocks of each group of layers, and of free states, at the last
        count.
    """

    def __init__(self, stats: EngineStats, scheduler: Scheduler, runner: ModelRunner):
        self._stats = stats
        self._scheduler = scheduler
        self._runner = runner
        self.free_blocks = runner.free_blocks
        self._num_saved = 0  # `_num_saved` and `_num_unshared` are sums over all steps
        self._num_unshared = 0

    @property
    def num_held(self) -> int:
        """Number of blocks of the first group that were held at the last count."""
        return self._scheduler.num_blocks - self.free_blocks[0]

    def count_step(self, plan: StepPlan, tokens: StepTokens | None) -> None:
        """Count the blocks after a step, before its tokens are appended to the sequences."""
        num_new: dict[Sequence, int] = {}
        if tokens is not None:
            num_new = dict(zip(plan.decodes, tokens.num_new.tolist(), strict=False))
        # Sequences that ended after the step was queued still used their blocks in it.
        ended = [sequence for sequence in plan.decodes if sequence.slot is None]
        # Blocks that leave a window while a program runs are freed by the next program. So count
        # the blocks from the position at which the last program began.
        row = self._scheduler.block_budget.num_in_row
        starts: list[tuple[int, int]] = []
        for sequence in [*self._scheduler.running, *ended]:
            num_drawn = num_new.get(sequence, 0)
            start = sequence.num_computed if num_drawn else sequence.program_start
            starts.append((sequence.num_computed + num_drawn, start))
        # Use the numbers at the end of this step: the device may already run the next step.
        if tokens is None:
            free_blocks = self._runner.free_blocks
        else:
            free_blocks = [int(num_free) for num_free in tokens.free_blocks]
        self.count(sum(row(length, start) for length, start in starts), free_blocks)

    def count(self, num_unshared: int, free_blocks: list[int]) -> None:
        """Update the totals with the blocks after a step.

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
