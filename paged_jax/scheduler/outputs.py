"""What a generation call returns, with the names and meanings of vLLM's offline API."""

import dataclasses
from typing import Literal

# Why a sequence is not resident. "turn": behind another that waits; "fork": for the prompt that it
# shares with another sample; "same prefix": for a resident that is just computing its next block.
WaitReason = Literal["", "turn", "slots", "blocks", "budget", "same prefix", "fork", "preempted"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position; ``rank`` 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
      index: which of the ``n`` samples this is.
      text: the generated text so far, which goes on where the prompt ends, space in front
        included. Without the stop string or stop token, unless it was asked for.
      token_ids: the generated tokens; an end-of-sequence token that stopped it is the last.
      cumulative_logprob: sum over the tokens, in nats, under the model's own distribution.
      logprobs: for each token the chosen one and the most probable ones; None if not asked for.
      finish_reason: ``"stop"`` (a stop token or string), ``"length"`` (the asked-for tokens or
        the context are used up), ``"abort"`` (by the caller or a deadline), ``"error"``, or None
        while it is running.
      stop_reason: the stop string or stop token id that ended it, None for end of sequence;
        ``"deadline"`` where that aborted it; what went wrong after an error.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """When things happened, in seconds of a monotonic clock; None until they do."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass(frozen=True)
class Wait:
    """A time in which a sample did not run.

    Attributes:
      reason: what it waited for: ``"turn"``, ``"slots"``, ``"blocks"``, ``"budget"``,
        ``"same prefix"``, ``"fork"`` or ``"preempted"``.
      start: seconds from the arrival of the request.
      seconds: how long it took; so far, if it goes on.
      detail: the same as a sentence, with the numbers of the moment when it began.
      sample: the index of the sample.
    """

    reason: WaitReason
    start: float
    seconds: float
    detail: str
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class PreemptionNote:
    """A moment in which a sample lost its slot and its blocks to others.

    Attributes:
      seconds: from the arrival of the request.
      kind: ``"recompute"``: the blocks were released; ``"swap"``: they were copied to host memory.
      num_tokens: whose K and V were in them: lost or held.
      detail: why it came to that, and why it was this sample.
      sample: the index of the sample.
    """

    seconds: float
    kind: Literal["recompute", "swap"]
    num_tokens: int
    detail: str
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a request waited, and what the prefix cache did for it: one for all of its samples.

    ``dataclasses.asdict`` makes JSON of it.

    Attributes:
      waits: in the order in which they began.
      preemptions: in the order of time.
      num_cached_tokens: of the prompt, found in the prefix cache.
      prefix_match: where the match in the prefix cache ended and why, in a sentence; None until
        the request runs.
    """

    waits: list[Wait]
    preemptions: list[PreemptionNote]
    num_cached_tokens: int
    prefix_match: str | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """Everything about one request, so far.

    Attributes:
      request_id: its name; where none was given, its number.
      prompt: the text; None if the request was given as token ids.
      prompt_token_ids: what the model read.
      outputs: one for each of the ``n`` samples.
      finished: whether all of them are complete.
      metrics: its times.
      num_cached_tokens: of the prompt, found in the prefix cache.
      prompt_logprobs: for each token of the prompt, the first (None) included, it and the most
        probable ones; None if not asked for.
      explanation: why it waited, where its prefix match ended; None if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    explanation: Explanation | None = None
