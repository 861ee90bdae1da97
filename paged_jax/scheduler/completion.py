"""`Completion`: the text, the log-probabilities and the finish reason of a sample.

It decides on the host where a sample ends: at a stop string, a stop token or the maximum length. On
the device, `runner.decoding` stops the rows of sequences that end by a token or by their length.
"""

from array import array

from paged_jax.models.text.detokenizer import Detokenizer
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tool_reader import overlap
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import Logprob

CompletionSnapshot = tuple[
    float, int, int, str | None, str | int | None, str, int, tuple[bool, list[int]] | None
]
"""State of a `Completion`, to restore it. A plain tuple is fast; each step makes one per sample."""


class Completion:
    """The generated text of a sample; new tokens are appended, and its end is detected.

    Args:
      params: the sampling parameters of the request.
      tokenizer: the tokenizer that decodes tokens. The text stays empty if it is None, or if
        ``params.detokenize`` is False.
      continues_text: whether the prompt contains text, see `Tokenizer.decode`.

    Attributes:
      cumulative_logprob: sum of the log-probabilities of the generated tokens, in nats.
      token_logprobs: log-probability of each generated token, float32.
      logprobs: see `CompletionOutput`; None unless requested.
      finish_reason: see `CompletionOutput`.
      stop_reason: see `CompletionOutput`.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer | None, *, continues_text: bool = False
    ):
        self.cumulative_logprob = 0.0
        self.token_logprobs = array("f")
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._params = params
        self._stops = tuple(params.stop or ())
        self._max_held = max(map(len, self._stops), default=1) - 1
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                continues_text=continues_text,
            )
        self._text = ""
        self._num_final = 0  # Length of the beginning of `_text` that later tokens cannot change.

    def snapshot(self) -> CompletionSnapshot:
        """Return the current state, to pass it to `restore` later."""
        return (
            self.cumulative_logprob,
            len(self.token_logprobs),
            len(self.logprobs or ()),
            self.finish_reason,
            self.stop_reason,
            self._text,
            self._num_final,
            None if self._detokenizer is None else self._detokenizer.snapshot(),
        )

    def restore(self, snapshot: CompletionSnapshot) -> None:
        """Undo all changes since `snapshot`, for example after an exception."""
        (
            self.cumulative_logprob,
            num_token_logprobs,
            num_logprobs,
            self.finish_reason,
            self.stop_reason,
            self._text,
            self._num_final,
            detokenizer,
        ) = snapshot
        del self.token_logprobs[num_token_logprobs:]
        if self.logprobs is not None:
            del self.logprobs[num_logprobs:]
        if self._detokenizer is not None and detokenizer is not None:
            self._detokenizer.restore(detokenizer)

    @property
    def text(self) -> str:
        """The part of the text that later tokens cannot change."""
        return self._text[: self._num_final]

    def append(
        self,
        token_id: int,
        logprob: float,
        *,
        num_tokens: int,
        is_last: bool,
        eos_token_ids: frozenset[int],
        candidates: dict[int, Logprob] | None = None,
    ) -> None:
        """Append a token, and end the sample if this token stops it or reaches the limit.

        Args:
          token_id: the token.
          logprob: log-probability of the token, in nats.
          num_tokens: number of generated tokens, including this token.
          is_last: whether this is the last token before the maximum length.
          eos_token_ids: end-of-sequence tokens; they do not end the sample if the sampling
            parameters have ``ignore_eos``.
          candidates: the entry of `logprobs` for this token.
        """
        self.cumulative_logprob += logprob
        self.token_logprobs.append(logprob)
        if self.logprobs is not None and candidates is not None:
            self.logprobs.append(candidates)

        may_stop = num_tokens > self._params.min_tokens
        # With a grammar, a stop token ends the sample even before min_tokens, because it is only
        # sampled if the grammar allows no other token.
        may_end = may_stop or self._params.structured_outputs is not None
        if may_end and token_id in eos_token_ids and not self._params.ignore_eos:
            self.finish_reason = "stop"
        elif may_end and token_id in (self._params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token_id
        is_stop_token = self.finish_reason is not None
        if self.finish_reason is None and is_last:
            self.finish_reason = "length"

        if self._detokenizer is not None:
            # As in vLLM, the text excludes the stop token or stop string.
            if not is_stop_token or self._params.include_stop_str_in_output:
                self._text += self._detokenizer.push(token_id)
            if self.finish_reason is not None:
                self._text += self._detokenizer.finish()
        if may_stop:
            self._find_stop_string()
        self._release_text()

    def extend(
        self, token_ids: list[int], logprobs: list[float], *, eos_token_ids: frozenset[int]
    ) -> bool:
        """Append several tokens, if none of them can end the sample.

        This is faster than calling `append` for each token.

        Args:
          token_ids: the tokens. The caller must check that none of them reaches the maximum length.
          logprobs: the log-probabilities of the tokens, in nats.
          eos_token_ids: see `append`.

        Returns:
          True if the tokens were appended. False if nothing has changed; then the caller must call
          `append` for each token.
        """
        params, total, text = self._params, self.cumulative_logprob, ""
        if (
            self.logprobs is not None
            or not params.ignore_eos
            and _contains_any(eos_token_ids, token_ids)
        ):
            return False
        if params.stop_token_ids and _contains_any(frozenset(params.stop_token_ids), token_ids):
            return False
        # Add one value at a time, as `append` does, so that both round in the same way.
        for logprob in logprobs:
            total += logprob
        if self._detokenizer is not None:
            preview = self._detokenizer.peek(token_ids)
            if preview is None:
                return False
            text = preview
            if self._stops:
                recent = self._text[self._num_final :] + text
                for stop in self._stops:  # This is faster than `any` with a generator.
                    if stop in recent:
                        return False
            self._detokenizer.accept()
        self.cumulative_logprob = total
        self.token_logprobs.extend(logprobs)
        self._text += text
        self._release_text()
        return True

    def end(self, finish_reason: str, stop_reason: str | None = None) -> None:
        """End the sample for a reason other than its tokens, such as an abort.

        If the sample has already ended, this does nothing.

        Args:
          finish_reason: see `CompletionOutput`.
          stop_reason: see `CompletionOutput`.
        """
        if self.finish_reason is not None:
            return
        before = self.snapshot()
        try:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
            if self._detokenizer is not None:
                self._text += self._detokenizer.finish()
            self._release_text()
        except BaseException:
            self.restore(before)
            raise

    def _find_stop_string(self) -> None:
        matches = [(self._text.find(s, self._num_final), s) for s in self._stops]
        matches = [(index, s) for index, s in matches if index >= 0]
        if matches:
            index, stop = min(matches, key=lambda pair: pair[0])
            num_chars = index + len(stop) if self._params.include_stop_str_in_output else index
            self._text = self._text[:num_chars]
            self.finish_reason, self.stop_reason = "stop", stop

    def _release_text(self) -> None:
        """Extend `text` to all generated text, except an end that may begin a stop string."""
        num_final = len(self._text)
        if self._stops and self.finish_reason is None:
            tail = self._text[max(self._num_final, num_final - self._max_held) :]
            num_final -= max([overlap(tail, stop) for stop in self._stops])
        self._num_final = max(self._num_final, num_final)


def _contains_any(stop_ids: frozenset[int], token_ids: list[int]) -> bool:
    return not stop_ids.isdisjoint(token_ids)
