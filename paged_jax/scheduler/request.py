"""A request and its samples while they run: plain Python, no arrays."""

import dataclasses

from paged_jax.models.text.tokenizer import Detokenizer, Tokenizer
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.history import History
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


class Sample:
    """One continuation of a prompt: its tokens, its text, and whether it has stopped.

    Args:
      index: which of the prompt's samples this is.
      params: of the request.
      tokenizer: None leaves the text empty.
      continues_text: see `Tokenizer.decode`; true where the prompt has any text.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        continues_text: bool = False,
    ):
        self.index = index
        self.params = params
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                continues_text=continues_text,
            )
        self._text = ""
        self._num_final = 0  # characters that no stop string can take back any more

    def append(
        self,
        token_id: int,
        logprob: float,
        *,
        eos_token_ids: frozenset[int],
        max_tokens: int,
        candidates: dict[int, Logprob] | None = None,
    ) -> None:
        """Take the next token, and stop if it is a stop token, completes a stop string, or is
        the last one allowed."""
        self.token_ids.append(token_id)
        self.cumulative_logprob += logprob
        if self.logprobs is not None and candidates is not None:
            self.logprobs.append(candidates)

        num_tokens = len(self.token_ids)
        may_stop = num_tokens > self.params.min_tokens
        if may_stop and token_id in eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif may_stop and token_id in (self.params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token_id
        is_stop_token = self.finish_reason is not None
        if self.finish_reason is None and num_tokens >= max_tokens:
            self.finish_reason = "length"

        if self._detokenizer is not None:
            # As in vLLM, what stops the text is not part of it, be it a string or a token.
            if not is_stop_token or self.params.include_stop_str_in_output:
                self._text += self._detokenizer.push(token_id)
            if self.finish_reason is not None:
                self._text += self._detokenizer.finish()
        if may_stop:
            self._find_stop_string()
        self._release_text()

    def end(self, finish_reason: str, stop_reason: str | None = None) -> None:
        """Stop here, for a reason that does not lie in the tokens, unless it has stopped before."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._detokenizer is not None:
            self._text += self._detokenizer.finish()
        self._release_text()

    def output(self) -> CompletionOutput:
        """What is final so far."""
        return CompletionOutput(
            index=self.index,
            text=self._text[: self._num_final],
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _find_stop_string(self) -> None:
        found = [(self._text.find(s, self._num_final), s) for s in self.params.stop or ()]
        found = [(at, s) for at, s in found if at >= 0]
        if found:
            at, stop = min(found, key=lambda pair: pair[0])
            keep = at + len(stop) if self.params.include_stop_str_in_output else at
            self._text = self._text[:keep]
            self.finish_reason, self.stop_reason = "stop", stop

    def _release_text(self) -> None:
        """Count as final what is not the beginning of a stop string."""
        held = 0
        if self.finish_reason is None:
            for stop in self.params.stop or ():
                longest = min(len(stop) - 1, len(self._text) - self._num_final)
                held = max(
                    held,
                    next((n for n in range(longest, 0, -1) if self._text.endswith(stop[:n])), 0),
                )
        self._num_final = max(self._num_final, len(self._text) - held)


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt and what is asked of it.

    Attributes:
      request_id: its name.
      arrival: how many requests came before it.
      prompt: the text; None if it was given as token ids.
      prompt_token_ids: what the model reads.
      params: how tokens are chosen.
      seed: of its random draws.
      max_tokens: of each sample, with the context taken into account.
      samples: one for each continuation.
      metrics: its times.
      priority: lower is served first.
      deadline: on the clock of the metrics; None for never.
      cache_salt: it shares cached blocks only with requests that have the same.
      num_cached_tokens: of the prompt, found in the prefix cache.
      prompt_logprobs: as in `RequestOutput`; grows while the prompt is computed.
      history: of its waits, for the explanation of the outputs; None if nobody asked.
    """

    request_id: str
    arrival: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    samples: list[Sample]
    metrics: RequestMetrics
    priority: int
    deadline: float | None
    cache_salt: str
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    history: History | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all samples are complete."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def mark(self, **times: float) -> None:
        """Note when something happened, unless it was noted before."""
        new = {name: t for name, t in times.items() if getattr(self.metrics, name) is None}
        self.metrics = dataclasses.replace(self.metrics, **new)

    def output(self) -> RequestOutput:
        """What is final so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sample.output() for sample in self.samples],
            finished=self.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            explanation=(
                None if self.history is None else self.history.explanation(self.num_cached_tokens)
            ),
        )
