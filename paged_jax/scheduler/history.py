"""What a request waits for and loses while it runs, noted for who asked why. Imports no jax."""

import dataclasses
import time
from typing import Literal

from paged_jax.scheduler.outputs import Explanation, PreemptionNote, Wait, WaitReason


class History:
    """The waits and preemptions of all samples of one request, as they happen.

    Args:
      arrival_time: on the clock of ``time.perf_counter()``.

    Attributes:
      prefix_match: as in `Explanation`.

    Example:
      >>> history = History(time.perf_counter())
      >>> history.wait(0, "slots", "no slot of 4 was free")
      >>> history.run(0)
      >>> [wait.reason for wait in history.explanation(num_cached_tokens=0).waits]
      ['slots']
    """

    def __init__(self, arrival_time: float):
        self.prefix_match: str | None = None
        self._arrival_time = arrival_time
        self._waits: list[Wait] = []
        self._preemptions: list[PreemptionNote] = []
        # By sample: the index, among the waits, of the one that goes on.
        self._open: dict[int, int] = {}
        self._known_samples: set[int] = set()

    def wait(self, sample: int, reason: WaitReason, detail: str) -> None:
        """A sample waits; nothing new if it did so already for the same reason."""
        if sample in self._open and self._waits[self._open[sample]].reason == reason:
            return
        now = self._now()
        self._close(sample, now)
        # It has waited since it arrived, before anybody could look at it.
        start = now if sample in self._known_samples else 0.0
        self._known_samples.add(sample)
        self._open[sample] = len(self._waits)
        self._waits.append(Wait(reason, start, 0.0, detail, sample))

    def run(self, sample: int) -> None:
        """A sample waits no more: it has got a slot, or has ended."""
        self._close(sample, self._now())

    def preempt(
        self, sample: int, kind: Literal["recompute", "swap"], num_tokens: int, detail: str
    ) -> None:
        """A sample loses its slot and blocks."""
        self._preemptions.append(PreemptionNote(self._now(), kind, num_tokens, detail, sample))

    def explanation(self, num_cached_tokens: int) -> Explanation:
        """All of it so far."""
        now, going_on = self._now(), set(self._open.values())
        return Explanation(
            waits=[
                _until(wait, now) if index in going_on else wait
                for index, wait in enumerate(self._waits)
            ],
            preemptions=list(self._preemptions),
            num_cached_tokens=num_cached_tokens,
            prefix_match=self.prefix_match,
        )

    def _close(self, sample: int, now: float) -> None:
        if sample in self._open:
            index = self._open.pop(sample)
            self._waits[index] = _until(self._waits[index], now)

    def _now(self) -> float:
        return time.perf_counter() - self._arrival_time


def describe_match(num_tokens: int, num_cached_tokens: int, block_size: int) -> str:
    """Where the match of a prompt in the prefix cache ended and why, in a sentence.

    Args:
      num_tokens: of the prompt.
      num_cached_tokens: of these, found.
      block_size: C.

    Example:
      >>> describe_match(40, 16, block_size=16)  # doctest: +ELLIPSIS
      'block 1 (tokens 16..31) was not in the cache: ...'
    """
    num_blocks, num_found = (num_tokens - 1) // block_size, num_cached_tokens // block_size
    if not num_blocks:
        return (
            f"nothing was looked up: only full blocks of {block_size} tokens are cached, the last "
            f"token is always computed, and the prompt has {num_tokens}"
        )
    if num_found == num_blocks:
        return (
            "every full block before the last token, which is always computed, was in the cache: "
            f"{num_cached_tokens} of {num_tokens} tokens"
        )
    return (
        f"block {num_found} (tokens {num_cached_tokens}..{num_cached_tokens + block_size - 1}) was "
        "not in the cache: nobody has computed the prompt up to there with this cache_salt and "
        "these weights, or the cache has given the block up since"
    )


def _until(wait: Wait, now: float) -> Wait:
    return dataclasses.replace(wait, seconds=now - wait.start)
