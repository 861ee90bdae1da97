"""The waits and preemptions of a request while it runs, noted if an explanation was asked for."""

import dataclasses
import time
from typing import Literal

from paged_jax.scheduler.outputs import Explanation, PreemptionNote, Wait, WaitReason
from paged_jax.scheduler.reasons import (
    NO_FACTS,
    PreemptionFacts,
    WaitFacts,
    describe_preemption,
    describe_wait,
)


class History:
    """The waits and preemptions of all samples of one request, as they happen.

    Args:
      arrival_time: seconds, on the clock of ``time.perf_counter()``.

    Attributes:
      prefix_match: see `Explanation`.

    Example:
      >>> history = History(time.perf_counter())
      >>> history.wait(0, "slots", WaitFacts({"num_slots": 4}))
      >>> history.run(0)
      >>> [wait.detail for wait in history.explanation(num_cached_tokens=0).waits]
      ['no slot of 4 was free']
    """

    def __init__(self, arrival_time: float):
        self.prefix_match: str | None = None
        self._arrival_time = arrival_time
        self._waits: list[Wait] = []
        self._preemptions: list[PreemptionNote] = []
        # By sample: the index, among the waits, of the one that is not over.
        self._open: dict[int, int] = {}
        self._known_samples: set[int] = set()

    def wait(self, sample: int, reason: WaitReason, facts: WaitFacts = NO_FACTS) -> None:
        """Note that a sample waits; nothing new if it did so already for the same reason."""
        if sample in self._open and self._waits[self._open[sample]].reason == reason:
            return
        now = self._now()
        self._close(sample, now)
        # The first wait began when the request arrived, before the scheduler looked at it.
        start = now if sample in self._known_samples else 0.0
        self._known_samples.add(sample)
        self._open[sample] = len(self._waits)
        self._waits.append(
            Wait(
                reason,
                start,
                0.0,
                sample=sample,
                numbers=dict(facts.numbers),
                other_request=facts.other_request,
            )
        )

    def run(self, sample: int) -> None:
        """Note that a sample no longer waits: it has got a slot, or has ended."""
        self._close(sample, self._now())

    def preempt(
        self,
        sample: int,
        kind: Literal["recompute", "swap"],
        num_tokens: int,
        facts: PreemptionFacts,
    ) -> None:
        """Note that a sample loses its slot and blocks."""
        self._preemptions.append(
            PreemptionNote(
                self._now(),
                kind,
                num_tokens,
                sample=sample,
                reason=facts.reason,
                numbers=dict(facts.numbers),
                other_request=facts.other_request,
                spared_request=facts.spared_request,
                advantage=facts.advantage,
            )
        )

    def explanation(self, num_cached_tokens: int) -> Explanation:
        """All that was noted so far, with sentences."""
        now, still_open = self._now(), set(self._open.values())
        waits = [
            _until(wait, now) if index in still_open else wait
            for index, wait in enumerate(self._waits)
        ]
        return Explanation(
            waits=[dataclasses.replace(wait, detail=describe_wait(wait)) for wait in waits],
            preemptions=[
                dataclasses.replace(note, detail=describe_preemption(note))
                for note in self._preemptions
            ],
            num_cached_tokens=num_cached_tokens,
            prefix_match=self.prefix_match,
        )

    def _close(self, sample: int, now: float) -> None:
        if sample in self._open:
            index = self._open.pop(sample)
            self._waits[index] = _until(self._waits[index], now)

    def _now(self) -> float:
        return time.perf_counter() - self._arrival_time


def _until(wait: Wait, now: float) -> Wait:
    return dataclasses.replace(wait, seconds=now - wait.start)
