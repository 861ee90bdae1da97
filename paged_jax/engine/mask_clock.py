# pyright: strict, reportUnknownMemberType=false
"""`MaskClock`: decides how many steps other sequences decode while grammars wait for masks."""

import time
from collections.abc import Callable

from paged_jax.scheduler.lookahead import Lookahead
from paged_jax.scheduler.step_plan import StepPlan


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
    # Let t(k) be the duration of a cycle. The ratio t(k) / t(0) must not exceed `_MAX_RATIO`
    # (`_MAX_RATIO_OF_ONE` for k = 1). If it exceeds `_FAR_TOO_LONG`, k = 1 is far too slow.
    _MAX_RATIO, _MAX_RATIO_OF_ONE, _FAR_TOO_LONG = 1.05, 1.1, 1.4

    def __init__(
        self, lookahead: Lookahead, max_steps: int, now: Callable[[], float] = time.perf_counter
    ):
        self._lookahead = lookahead
        self._max_k = max(1, max_steps - 1)
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
        has_unbound = len(plan.bound) < len(plan.decodes)
        if before is None or plan.chunks or num_steps != 1 or not has_unbound:
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
        elif (
            seconds * (1 + 0.6 / (k + 1)) < self._plain_seconds * self._MAX_RATIO
            and k < self._max_k
        ):
            self._set(k + 1)

    def _is_too_long(self, seconds: float, k: int) -> bool:
        return seconds > self._plain_seconds * (
            self._MAX_RATIO if k > 1 else self._MAX_RATIO_OF_ONE
        )

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
