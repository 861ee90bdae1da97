# pyright: strict, reportUnknownMemberType=false
"""Outputs of requests, with the names of vLLM's offline API, and their explanations."""

import dataclasses
from typing import Literal

from paged_jax.formatting import short_repr

# Reason why a sequence does not run, or "" if it runs: other sequences are before it in the queue
# ("turn"); not enough slots or blocks are free ("slots", "blocks"); the step has no tokens left
# ("budget"); a running sequence is computing a block of its prefix ("same prefix"); another sample
# is computing the prompt for it ("fork"); it was preempted and waits to resume ("preempted").
WaitReason = Literal["", "turn", "slots", "blocks", "budget", "same prefix", "fork", "preempted"]
# Reasons why a sample was preempted, and reasons why the next candidate was not preempted instead.
PreemptionReason = Literal["decode", "prefill", "priority"]
PreemptionAdvantage = Literal["priority", "progress", "cost", "arrival", "index"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability in nats and rank of a token; rank 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


@short_repr
@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
      index: index of the sample, below ``n``.
      text: the generated text so far. It continues the prompt, including a leading space, and
        excludes the stop string or stop token unless requested.
      token_ids: the generated tokens, including an end-of-sequence token that stopped the sample.
      cumulative_logprob: sum of the log-probabilities of the tokens in nats, computed from the
        unmodified logits of the model.
      logprobs: log-probabilities of each token and of the most probable tokens at its position;
        None unless requested.
      finish_reason: ``"stop"`` (a stop token or stop string), ``"length"`` (max_tokens or the
        maximum context was reached), ``"abort"`` (by the caller or by a deadline) or ``"error"``.
        None if the sample has not ended.
      stop_reason: the stop string or the id of the stop token that ended the sample; None for an
        end-of-sequence token; ``"deadline"`` for a deadline; the message of an error.
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
    """Times of events of a request, in seconds of a monotonic clock; None before the event.

    Attributes:
      arrival_time: time at which the request arrived.
      first_scheduled_time: start of the first step that runs the request.
      first_token_time: time at which the host received the first token.
      finished_time: time at which the last sample ended.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass(frozen=True)
class Wait:
    """A period during which a sample waited.

    Attributes:
      reason: why it waited: ``"turn"``, ``"slots"``, ``"blocks"``, ``"budget"``, ``"same prefix"``,
        ``"fork"`` or ``"preempted"``.
      start: start of the wait, in seconds after the arrival of the request.
      seconds: duration in seconds, up to now if the wait has not ended.
      detail: a sentence that explains the reason. It contains the `numbers`.
      sample: index of the sample.
      numbers: the numbers in `detail`, by name, as they were when the wait began.
      other_request: for ``"same prefix"``, the id of the request that computes the prefix; None if
        it is this request, or for other reasons.
    """

    reason: WaitReason
    start: float = 0.0
    seconds: float = 0.0
    detail: str = ""
    sample: int = 0
    numbers: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    other_request: str | None = None


@dataclasses.dataclass(frozen=True)
class PreemptionNote:
    """A preemption: a running sample lost its slot and its blocks.

    Attributes:
      seconds: time of the preemption, in seconds after the arrival of the request.
      kind: ``"recompute"`` if the blocks were released, ``"swap"`` if they were copied to host
        memory.
      num_tokens: number of tokens in these blocks.
      detail: a sentence that explains why blocks were needed, and why this sample was chosen.
      sample: index of the sample.
      reason: why blocks were needed: for the next tokens of running samples (``"decode"``), for
        prompts that were being computed (``"prefill"``), or for a request with a better priority
        (``"priority"``).
      numbers: the numbers in `detail`, by name.
      other_request: id of the request with the better priority; None for other reasons.
      spared_request: id of the request that would have been preempted next; None if this sample was
        the only candidate.
      advantage: why that request was not preempted instead: it had a better ``"priority"``, no
        ``"progress"`` since it resumed, a higher ``"cost"`` of preemption, an earlier
        ``"arrival"``, or its sample had a lower ``"index"``.
    """

    seconds: float = 0.0
    kind: Literal["recompute", "swap"] = "recompute"
    num_tokens: int = 0
    detail: str = ""
    sample: int = 0
    reason: PreemptionReason = "decode"
    numbers: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    other_request: str | None = None
    spared_request: str | None = None
    advantage: PreemptionAdvantage | None = None


@short_repr
@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why the samples of a request waited, and how much of its prompt was cached.

    ``dataclasses.asdict`` converts it to JSON data.

    Attributes:
      waits: the waits of all samples, ordered by their start.
      preemptions: the preemptions of all samples, ordered by time.
      num_cached_tokens: number of prompt tokens found in the prefix cache.
      prefix_match: a sentence that explains where the match in the prefix cache ended, and why;
        None until the request has started to run.
    """

    waits: list[Wait]
    preemptions: list[PreemptionNote]
    num_cached_tokens: int
    prefix_match: str | None


@short_repr
@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """Output of a request, complete or up to the tokens generated so far.

    Attributes:
      request_id: id of the request; by default a number.
      prompt: the text of the prompt; None if the request was given as token ids.
      prompt_token_ids: token ids of the prompt.
      outputs: one output for each of the ``n`` samples.
      finished: whether all samples are complete.
      metrics: the times of the request.
      num_cached_tokens: number of prompt tokens found in the prefix cache.
      prompt_logprobs: log-probabilities of each prompt token and of the most probable tokens at
        its position, None for the first token; None unless requested.
      explanation: why the request waited, and how much of its prompt was cached; None unless
        requested.
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
