# pyright: strict, reportUnknownMemberType=false
"""Outputs of generation, with the names of vLLM's offline API, and totals of an engine."""

import dataclasses
from typing import Literal

from paged_jax.formatting import short_repr

# Why a sequence does not run. "turn": other sequences are before it in the queue. "fork": another
# sample computes the prompt for it. "same prefix": a running sequence computes a block of its
# prefix.
WaitReason = Literal["", "turn", "slots", "blocks", "budget", "same prefix", "fork", "preempted"]
# Why a sample was preempted, and why the next candidate was spared.
PreemptionReason = Literal["decode", "prefill", "priority"]
PreemptionAdvantage = Literal["priority", "progress", "cost", "arrival", "index"]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at a position. Rank 1 is the most probable token."""

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
      cumulative_logprob: sum of the tokens' log-probabilities in nats, under the model's own
        distribution.
      logprobs: log-probabilities of each token and of the most probable tokens at its position;
        None unless requested.
      finish_reason: ``"stop"`` (a stop token or string), ``"length"`` (max_tokens or the context
        is used up), ``"abort"`` (by the caller or a deadline), ``"error"``, or None before the end.
      stop_reason: the stop string or stop token id that ended the sample; None for end of
        sequence; ``"deadline"`` after a deadline; a message after an error.
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
    """Times of a request in seconds of a monotonic clock; None before the event.

    Attributes:
      arrival_time: arrival of the request.
      first_scheduled_time: start of the first step that contains the request.
      first_token_time: generation of the first token.
      finished_time: end of the last sample.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclasses.dataclass(frozen=True)
class Wait:
    """A period in which a sample waits.

    Attributes:
      reason: why it waited: ``"turn"``, ``"slots"``, ``"blocks"``, ``"budget"``,
        ``"same prefix"``, ``"fork"`` or ``"preempted"``.
      start: start in seconds after the arrival of the request.
      seconds: duration; the time until now if the wait has not ended.
      detail: the reason as a sentence, with its numbers.
      sample: index of the sample.
      numbers: the numbers in `detail` by name, at the start of the wait.
      other_request: id of the request that computes the same prefix; None if no other request
        does.
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
    """A preemption: a sample lost its slot and its blocks.

    Attributes:
      seconds: time in seconds after the arrival of the request.
      kind: ``"recompute"`` if the blocks were released, ``"swap"`` if they were copied to host
        memory.
      num_tokens: number of tokens in these blocks.
      detail: a sentence that says why blocks were needed, and why this sample was chosen.
      sample: index of the sample.
      reason: the need for blocks: the next tokens of running samples (``"decode"``), prompts that
        were being computed (``"prefill"``), or a request of better ``"priority"``.
      numbers: the numbers in `detail` by name.
      other_request: id of the request of better priority; None for other reasons.
      spared_request: id of the request of the next candidate; None if there was no other candidate.
      advantage: why the next candidate was spared: better ``"priority"``, no ``"progress"`` since
        it resumed, higher ``"cost"``, earlier ``"arrival"``, or lower ``"index"`` of the sample.
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
      prefix_match: a sentence that says where the match in the prefix cache ended, and why; None
        until the request runs.
    """

    waits: list[Wait]
    preemptions: list[PreemptionNote]
    num_cached_tokens: int
    prefix_match: str | None


@short_repr
@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """Output of a request so far.

    Attributes:
      request_id: id of the request, by default its number.
      prompt: the text of the prompt; None if the request was given as token ids.
      prompt_token_ids: token ids of the prompt.
      outputs: one output for each of the ``n`` samples.
      finished: whether all samples are complete.
      metrics: the times of the request.
      num_cached_tokens: number of prompt tokens found in the prefix cache.
      prompt_logprobs: log-probabilities of each prompt token and of the most probable tokens at
        its position, None for the first token; None unless requested.
      explanation: why the request waited, and where its prefix match ended; None unless requested.
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


@dataclasses.dataclass
class EngineStats:
    """Totals of an engine since it was built. Times do not include compilation.

    Attributes:
      num_steps: engine steps run so far; each may decode several tokens of a sequence.
      num_prompt_tokens: prompt tokens computed, without those found in the prefix cache.
      num_generated_tokens: tokens drawn.
      num_decode_tokens: tokens drawn in dispatches that did not compile.
      prefill_seconds: seconds in programs that prefill.
      decode_seconds: seconds in programs that decode, until their tokens were on the host.
      host_seconds: seconds of work on the host while the device was idle.
      schedule_seconds: seconds of planning, including the plan's operations on the cache.
      postprocess_seconds: seconds of converting tokens to text and ending requests.
        `schedule_seconds` and `postprocess_seconds` are part of `host_seconds`, except for steps in
        which the device decoded at the same time.
      compile_seconds: seconds of compilation, in the first calls of programs.
      first_token_seconds: seconds from the arrival of the first request to its first token,
        including compilation.
      peak_num_blocks: maximum number of blocks that requests held at the end of a step.
      num_preemptions: number of times that a sequence lost its blocks to others.
      num_swap_preemptions: number of preemptions that copied the blocks to host memory.
      num_recomputed_tokens: number of tokens computed again after a preemption.
      num_queried_tokens: number of tokens looked up in the prefix cache.
      num_cached_tokens: number of tokens found in the prefix cache.
      num_drafts: number of drafts in speculative decoding.
      num_draft_tokens: number of drafted tokens.
      num_accepted_tokens: number of drafted tokens that were accepted.
      num_accepted_at: number of accepted tokens by their position in the draft.
      sharing: fraction of blocks saved by sharing: blocks saved divided by the blocks that all
        sequences would hold without sharing, both summed over all steps (Kwon et al., 2023, section
        6.3).
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    schedule_seconds: float = 0.0
    postprocess_seconds: float = 0.0
    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    peak_num_blocks: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: tuple[int, ...] = ()
    sharing: float = 0.0
