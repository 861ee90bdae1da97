"""Why a sequence waited, was preempted, or was cached as far as it was: facts, and as sentences.

The scheduler notes facts: a reason, numbers, other requests. They become English here alone, when
an output is made, and once more where the names of other requests must not be shown.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from paged_jax.scheduler.outputs import (
    PreemptionAdvantage,
    PreemptionNote,
    PreemptionReason,
    Wait,
)


class WaitFacts(NamedTuple):
    """What was true at the moment when a wait began.

    Attributes:
      numbers: the numbers of the sentence, as in `Wait`.
      other_request: see `Wait`.
    """

    numbers: Mapping[str, int] = {}
    other_request: str | None = None


NO_FACTS = WaitFacts()


class PreemptionFacts(NamedTuple):
    """What led to a preemption; attributes as of `PreemptionNote`."""

    reason: PreemptionReason
    numbers: Mapping[str, int] = {}
    other_request: str | None = None
    spared_request: str | None = None
    advantage: PreemptionAdvantage | None = None


def name_request(request_id: str) -> str:
    """A request by its id, as in a sentence."""
    return f"request {request_id}"


def describe_wait(wait: Wait, name: Callable[[str], str] = name_request) -> str:
    """A wait as a sentence.

    Args:
      wait: the wait; its `detail` is not read.
      name: function that names another request, given its id.

    Example:
      >>> describe_wait(Wait("turn", 0.0, 0.0, numbers={"num_ahead": 2}))
      '2 samples stood before it in the queue'
    """
    numbers = wait.numbers
    match wait.reason:
        case "turn":
            if not numbers["num_ahead"]:
                return "it was the first in the queue, for a step to take it in"
            return f"{_count(numbers['num_ahead'], 'sample')} stood before it in the queue"
        case "slots":
            return f"no slot of {numbers['num_slots']} was free"
        case "budget":
            return f"a step had no tokens left of {numbers['max_num_batched_tokens']}"
        case "blocks":
            if "num_wanted" in numbers:
                wanted = _count(numbers["num_wanted"], "block")
            else:
                wanted = f"up to {_count(numbers['most_wanted'], 'block')}"
            return (
                f"it wanted {wanted}, {numbers['num_free']} were free, {numbers['num_kept']} of "
                "these kept for the samples that run"
            )
        case "same prefix":
            if wait.other_request is None:
                return "another sample of the request was computing the same prefix"
            return f"{name(wait.other_request)} was computing the same prefix"
        case "fork":
            return "another sample of the request was to compute the prompt for all of them"
        case _:
            return "it had lost its blocks and waited for its return"


def describe_preemption(note: PreemptionNote, name: Callable[[str], str] = name_request) -> str:
    """A preemption as a sentence: why it came to that, and why it was this sample.

    Args:
      note: the preemption; its `detail` is not read.
      name: function that names another request, given its id.
    """
    return f"{_describe_cause(note, name)}; {_describe_choice(note, name)}"


def _describe_cause(note: PreemptionNote, name: Callable[[str], str]) -> str:
    numbers = note.numbers
    match note.reason:
        case "decode":
            return (
                f"the next tokens of {_count(numbers['num_samples'], 'sample')} wanted "
                f"{_count(numbers['num_wanted'], 'more block')}, {numbers['num_free']} were free"
            )
        case "prefill":
            return "no block was free for any of the prompts that were being computed"
        case "priority":
            assert note.other_request is not None
            other, priority = name(note.other_request), numbers["priority"]
            return f"{other} came with the better priority {priority}"


def _describe_choice(note: PreemptionNote, name: Callable[[str], str]) -> str:
    if note.spared_request is None or note.advantage is None:
        return "no other could give way"
    why = {
        "priority": "had the worse priority",
        "progress": "had not just come back",
        "cost": "had less to lose",
        "arrival": "was newer",
        "index": "was the later sample",
    }[note.advantage]
    return f"it gave way before {name(note.spared_request)} because it {why}"


def describe_match(num_tokens: int, num_cached_tokens: int, block_size: int) -> str:
    """Where the match of a prompt in the prefix cache ended and why, in a sentence.

    Args:
      num_tokens: tokens of the prompt.
      num_cached_tokens: tokens of it that were found.
      block_size: C, tokens in a block.

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
        "not in the cache: no request has computed the prompt up to there with this cache_salt "
        "and these weights, or the cache has given the block up since"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
