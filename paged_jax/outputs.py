"""What a generation call returns, with the names and meanings of vLLM's offline API."""

import dataclasses


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
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
