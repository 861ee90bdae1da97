"""What one sample has beside its tokens: its text, log-probabilities, and why it ended."""

from array import array
from typing import Any

from paged_jax.models.text.tokenizer import Detokenizer, Tokenizer
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import Logprob


class Completion:
    """The text of one sample as its tokens come, and whether they have stopped it.

    Args:
      params: the sampling parameters of the request.
      tokenizer: turns tokens into text; None leaves the text empty, as the parameters may.
      continues_text: see `Tokenizer.decode`; true where the prompt has any text.

    Attributes:
      cumulative_logprob: sum of the tokens' log-probabilities, in nats.
      token_logprobs: those of each token, float32.
      logprobs: candidates for each token; None if not asked for.
      finish_reason, stop_reason: see `CompletionOutput`.
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
        self._most_held = max(map(len, self._stops), default=1) - 1
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                continues_text=continues_text,
            )
        self._text = ""
        self._num_final = 0  # characters that no stop string can take back any more

    def snapshot(self) -> tuple[Any, ...]:
        """All of its state, for `restore`."""
        state = None if self._detokenizer is None else self._detokenizer.snapshot()
        num_logprobs = len(self.token_logprobs), len(self.logprobs or ())
        reasons = self.finish_reason, self.stop_reason
        return self.cumulative_logprob, num_logprobs, reasons, self._text, self._num_final, state

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Undo what has changed since a snapshot, as after a change that was cut short."""
        self.cumulative_logprob, num_logprobs, reasons, self._text, self._num_final, state = (
            snapshot
        )
        self.finish_reason, self.stop_reason = reasons
        del self.token_logprobs[num_logprobs[0] :]
        if self.logprobs is not None:
            del self.logprobs[num_logprobs[1] :]
        if self._detokenizer is not None:
            self._detokenizer.restore(state)

    @property
    def text(self) -> str:
        """The text that is final: it only grows."""
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
        """Take the next token, and stop if it is a stop token, completes a stop string, or is last.

        Args:
          token_id: the token.
          logprob: its log-probability, in nats.
          num_tokens: how many tokens were generated, this one included.
          is_last: whether no more tokens are allowed.
          eos_token_ids: tokens that end a sample, unless its parameters ignore them.
          candidates: what `logprobs` keeps for this token.
        """
        self.cumulative_logprob += logprob
        self.token_logprobs.append(logprob)
        if self.logprobs is not None and candidates is not None:
            self.logprobs.append(candidates)

        may_stop = num_tokens > self._params.min_tokens
        # In a form, a stop token comes early only where nothing else can.
        may_end = may_stop or self._params.structured_outputs is not None
        if may_end and token_id in eos_token_ids and not self._params.ignore_eos:
            self.finish_reason = "stop"
        elif may_end and token_id in (self._params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token_id
        is_stop_token = self.finish_reason is not None
        if self.finish_reason is None and is_last:
            self.finish_reason = "length"

        if self._detokenizer is not None:
            # As in vLLM, what stops the text is not part of it, be it a string or a token.
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
        """Take tokens as `append` would one after another, if surely none of them stops the text.

        Args:
          token_ids: the tokens; more are allowed after them.
          logprobs: their log-probabilities, in nats.
          eos_token_ids: see `append`.

        Returns:
          Whether they were taken. If not, nothing has changed: `append` them one by one.
        """
        params, total, text = self._params, self.cumulative_logprob, ""
        if self.logprobs is not None or not params.ignore_eos and _meet(eos_token_ids, token_ids):
            return False
        if params.stop_token_ids and _meet(frozenset(params.stop_token_ids), token_ids):
            return False
        for logprob in logprobs:  # as `append` rounds
            total += logprob
        if self._detokenizer is not None:
            peeked = self._detokenizer.peek(token_ids)
            if peeked is None:
                return False
            text = peeked
            if self._stops:
                recent = self._text[self._num_final :] + text
                for stop in self._stops:  # `any` of a generator would show
                    if stop in recent:
                        return False
            self._detokenizer.accept()
        self.cumulative_logprob = total
        self.token_logprobs.extend(logprobs)
        self._text += text
        self._release_text()
        return True

    def end(self, finish_reason: str, stop_reason: str | None = None) -> None:
        """Stop here, for a reason that does not lie in the tokens, unless it has stopped before."""
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
        found = [(self._text.find(s, self._num_final), s) for s in self._stops]
        found = [(at, s) for at, s in found if at >= 0]
        if found:
            at, stop = min(found, key=lambda pair: pair[0])
            keep = at + len(stop) if self._params.include_stop_str_in_output else at
            self._text = self._text[:keep]
            self.finish_reason, self.stop_reason = "stop", stop

    def _release_text(self) -> None:
        """Count as final what is not the beginning of a stop string."""
        num_final = len(self._text)
        if self._stops and self.finish_reason is None:
            tail = self._text[max(self._num_final, num_final - self._most_held) :]
            num_final -= max([_num_begun(stop, tail) for stop in self._stops])
        self._num_final = max(self._num_final, num_final)


def _num_begun(stop: str, tail: str) -> int:
    """How many characters at the end of a text, in which it is not, are the beginning of `stop`."""
    at = tail.find(stop[0])
    while at >= 0:
        if stop.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(stop[0], at + 1)
    return 0


def _meet(some: frozenset[int], token_ids: list[int]) -> bool:
    return not some.isdisjoint(token_ids)
