# pyright: strict, reportUnknownMemberType=false
"""`StepClock`: the durations of the phases of a step, and of recomputing and swapping."""

import time

import jax

from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.scheduler import Scheduler
from paged_jax.scheduler.step_plan import StepPlan


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
