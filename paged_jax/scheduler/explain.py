"""`RequestHistory`: record of why a request waited or was preempted.

The scheduler records reasons, numbers and the ids of other requests. They are converted to
sentences when an output is created. The server converts them again, to hide the ids of other
requests.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping

from paged_jax.scheduler.outputs import Explanation, PreemptionNote, Wait, WaitReason


class RequestHistory:
    """Record of the waits and the preemptions of a request's samples.

    Args:
      arrival_time: arrival of the request in seconds, on the clock of ``time.perf_counter()``.

    Attributes:
      prefix_match: see `Explanation`.

    Example:
      >>> history = RequestHistory(time.perf_counter())
      >>> history.wait(0, "slots", numbers={"num_slots": 4})
      >>> history.run(0)
      >>> [wait.detail for wait in history.explanation(num_cached_tokens=0).waits]
      ['no slot of 4 was free']
    """

    def __init__(self, arrival_time: float):
        self.prefix_match: str | None = None
        self._arrival_time = arrival_time
        self._waits: list[Wait] = []
        self._preemptions: list[PreemptionNote] = []
        # Maps each waiting sample to the index of its current wait in `_waits`.
        self._open: dict[int, int] = {}
        self._seen_samples: set[int] = set()

    def wait(
        self,
        sample: int,
        reason: WaitReason,
        *,
        numbers: Mapping[str, int] | None = None,
        other_request: str | None = None,
    ) -> None:
        """Record that a sample begins to wait, unless it already waits for the same reason.

        See `Wait` for the arguments.
        """
        if sample in self._open and self._waits[self._open[sample]].reason == reason:
            return
        now = self._now()
        self._close(sample, now)
        # The first wait of a sample began when the request arrived.
        start = now if sample in self._seen_samples else 0.0
        self._seen_samples.add(sample)
        self._open[sample] = len(self._waits)
        numbers = dict(numbers or {})
        wait = Wait(reason, start, sample=sample, numbers=numbers, other_request=other_request)
        self._waits.append(wait)

    def run(self, sample: int) -> None:
        """Record that a sample no longer waits, because it got a slot or ended."""
        self._close(sample, self._now())

    def preempt(self, note: PreemptionNote) -> None:
        """Record that a sample is preempted now; `note.seconds` is set to the current time."""
        self._preemptions.append(dataclasses.replace(note, seconds=self._now()))

    def explanation(self, num_cached_tokens: int) -> Explanation:
        """Return the waits and preemptions so far, with sentences that explain them."""
        now, open_indices = self._now(), set(self._open.values())
        waits = [
            _with_seconds(wait, now) if index in open_indices else wait
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
            self._waits[index] = _with_seconds(self._waits[index], now)

    def _now(self) -> float:
        return time.perf_counter() - self._arrival_time


def _with_seconds(wait: Wait, now: float) -> Wait:
    return dataclasses.replace(wait, seconds=now - wait.start)


def name_request(request_id: str) -> str:
    """Return "request" and the id of a request, as its name in a sentence."""
    return f"request {request_id}"


def describe_wait(wait: Wait, name: Callable[[str], str] = name_request) -> str:
    """Return a sentence that explains why a sample waited.

    Args:
      wait: the wait; its `detail` is not read.
      name: function that takes the id of another request and returns a name for it.

    Example:
      >>> describe_wait(Wait("turn", 0.0, 0.0, numbers={"num_ahead": 2}))
      '2 samples stood before it in the queue'
    """
    numbers = wait.numbers
    match wait.reason:
        case "turn":
            if not numbers["num_ahead"]:
                return "it was first in the queue and waited for the next step"
            return f"{_count(numbers['num_ahead'], 'sample')} stood before it in the queue"
        case "slots":
            return f"no slot of {numbers['num_slots']} was free"
        case "budget":
            return f"a step had no tokens left of {numbers['max_num_batched_tokens']}"
        case "blocks":
            if "num_wanted" in numbers:
                demand = _count(numbers["num_wanted"], "block")
            else:
                demand = f"up to {_count(numbers['most_wanted'], 'block')}"
            return (
                f"it needed {demand}, {numbers['num_free']} were free, {numbers['num_kept']} of "
                "these reserved for running samples"
            )
        case "same prefix":
            if wait.other_request is None:
                return "another sample of the request was computing the same prefix"
            return f"{name(wait.other_request)} was computing the same prefix"
        case "fork":
            return "another sample of the request was computing the prompt for all of them"
        case _:
            return "it was preempted and waited to resume"


def describe_preemption(note: PreemptionNote, name: Callable[[str], str] = name_request) -> str:
    """Return a sentence with the cause of a preemption and the reason to choose this sample.

    Args:
      note: the preemption; its `detail` is not read.
      name: function that takes the id of another request and returns a name for it.
    """
    return f"{_describe_cause(note, name)}; {_describe_choice(note, name)}"


def _describe_cause(note: PreemptionNote, name: Callable[[str], str]) -> str:
    numbers = note.numbers
    match note.reason:
        case "decode":
            return (
                f"the next tokens of {_count(numbers['num_samples'], 'sample')} needed "
                f"{_count(numbers['num_wanted'], 'more block')}, {numbers['num_free']} were free"
            )
        case "prefill":
            return "no block was free for any of the prompts that were being computed"
        case "priority":
            assert note.other_request is not None
            other_request, priority = name(note.other_request), numbers["priority"]
            return f"{other_request} arrived with the better priority {priority}"


def _describe_choice(note: PreemptionNote, name: Callable[[str], str]) -> str:
    if note.spared_request is None or note.advantage is None:
        return "no other sample could be preempted"
    reason = {
        "priority": "had the worse priority",
        "progress": "had made progress since it last resumed",
        "cost": "had less to lose",
        "arrival": "was newer",
        "index": "was the later sample",
    }[note.advantage]
    return f"it was preempted before {name(note.spared_request)} because it {reason}"


def describe_match(
    num_tokens: int, num_cached_tokens: int, block_size: int, num_known_tokens: int = 0
) -> str:
    """Return a sentence that explains where the match in the prefix cache ended, and why.

    Args:
      num_tokens: number of tokens in the prompt.
      num_cached_tokens: number of prompt tokens that the request took from the prefix cache.
      block_size: C, number of tokens in a block.
      num_known_tokens: number of prompt tokens whose blocks were found. It is larger than
        `num_cached_tokens` if no snapshot of the recurrent state after these tokens was found.

    Example:
      >>> describe_match(40, 16, block_size=16)  # doctest: +ELLIPSIS
      'block 1 (tokens 16..31) was not in the cache: ...'
    """
    num_blocks, num_cached = (num_tokens - 1) // block_size, num_cached_tokens // block_size
    if not num_blocks:
        return (
            f"nothing was looked up: only full blocks of {block_size} tokens are cached, the last "
            f"token is always computed, and the prompt has {num_tokens}"
        )
    if num_known_tokens > num_cached_tokens:
        position = (
            f"after token {num_cached_tokens - 1}" if num_cached_tokens else "in none of them"
        )
        return (
            f"the blocks of tokens 0..{num_known_tokens - 1} were in the cache, but the last "
            f"snapshot of the states of recurrent layers was {position}: no request has left one "
            "further on, or the cache has evicted it since"
        )
    if num_cached == num_blocks:
        return (
            "every full block before the last token, which is always computed, was in the cache: "
            f"{num_cached_tokens} of {num_tokens} tokens"
        )
    return (
        f"block {num_cached} (tokens {num_cached_tokens}..{num_cached_tokens + block_size - 1}) "
        "was not in the cache: no request has computed the prompt up to there with this cache_salt "
        "and these weights, or the cache has evicted the block since"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
