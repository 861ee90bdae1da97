"""What a generation call returns, with the names and meanings of vLLM's offline API."""

import dataclasses
from typing import Literal

from paged_jax.short_repr import short_repr

# Why a sequence does not run. "turn": it stands behind others in line; "fork": another sample is to
# compute the prompt; "same prefix": a running sequence is computing its next block.
WaitReason = Literal["", "turn", "slots", "blocks", "budget", "same prefix", "fork", "preempted"]
# What blocks were taken away for, and what the next candidate was spared for.
PreemptionReason = Literal["decode", "prefill", "priority"]
PreemptionAdvantage = Literal["priority", "progress", "cost", "arrival", "index"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position; ``rank`` 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


@short_repr
@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
      index: which of the ``n`` samples this is.
      text: the generated text so far. It continues the prompt, leading space included, and leaves
        out the stop string or stop token, unless it was asked for.
      token_ids: the generated tokens; an end-of-sequence token that stopped it is the last.
      cumulative_logprob: sum of the tokens' log-probabilities in nats, under the model's own
        distribution.
      logprobs: log-probabilities of each token itself and of the most probable ones at its
        position; None if not asked for.
      finish_reason: ``"stop"`` (a stop token or string), ``"length"`` (the asked-for tokens or
        the context are used up), ``"abort"`` (by the caller or a deadline), ``"error"``, or None
        before it ends.
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
    """When things happened, in seconds of a monotonic clock; None until they do.

    Attributes:
      arrival_time: when the request arrived.
      first_scheduled_time: when the first step that it takes part in began to run.
      first_token_time: when its first token was drawn.
      finished_time: when its last sample ended.
    """

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
      seconds: how long it took; so far, if it is not over.
      detail: the reason as a sentence, with its numbers.
      sample: index of the sample.
      numbers: the numbers of the sentence by name, as they were when the wait began.
      other_request: id of the request that computes the same prefix; None if there is none, or if
        another sample of this request does.
    """

    reason: WaitReason
    start: float
    seconds: float
    detail: str = ""
    sample: int = 0
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    other_request: str | None = None


@dataclasses.dataclass(frozen=True)
class PreemptionNote:
    """A moment in which a sample lost its slot and its blocks to others.

    Attributes:
      seconds: when it happened, from the arrival of the request.
      kind: ``"recompute"``: the blocks were released; ``"swap"``: they were copied to host memory.
      num_tokens: tokens whose K and V were in these blocks.
      detail: a sentence: why blocks were needed, and why it was this sample that lost them.
      sample: index of the sample.
      reason: what needed the blocks: the next tokens of running samples (``"decode"``), prompts
        that were being computed (``"prefill"``), or a request of better ``"priority"``.
      numbers: the numbers of the sentence by name, as they were at that moment.
      other_request: id of the request of better priority, None for other reasons.
      spared_request: id of the request whose sample would have been the next to lose its blocks;
        None if there was no other.
      advantage: what that one was spared for: its better ``"priority"``, no ``"progress"`` since
        it came back, the higher ``"cost"``, the earlier ``"arrival"``, or the lower ``"index"`` of
        the sample.
    """

    seconds: float
    kind: Literal["recompute", "swap"]
    num_tokens: int
    detail: str = ""
    sample: int = 0
    reason: PreemptionReason = "decode"
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    other_request: str | None = None
    spared_request: str | None = None
    advantage: PreemptionAdvantage | None = None


@short_repr
@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a request waited, and what the prefix cache did for it: one for all of its samples.

    ``dataclasses.asdict`` makes JSON of it.

    Attributes:
      waits: the waits of all samples, in the order in which they began.
      preemptions: the preemptions of all samples, in the order of time.
      num_cached_tokens: tokens of the prompt that were found in the prefix cache.
      prefix_match: where the match in the prefix cache ended and why, in a sentence; None until
        the request runs.
    """

    waits: list[Wait]
    preemptions: list[PreemptionNote]
    num_cached_tokens: int
    prefix_match: str | None


@short_repr
@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """Everything about one request, so far.

    Attributes:
      request_id: the request's name; its number where none was given.
      prompt: the prompt's text; None if the request was given as token ids.
      prompt_token_ids: the tokens that the model read.
      outputs: one output for each of the ``n`` samples.
      finished: whether all samples are complete.
      metrics: the times of the request.
      num_cached_tokens: tokens of the prompt that were found in the prefix cache.
      prompt_logprobs: log-probabilities of each token of the prompt itself and of the most probable
        ones at its position, None for the first token; None if not asked for.
      explanation: why the request waited, and where its prefix match ended; None if not asked for.
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
