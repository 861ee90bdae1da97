"""Events of the stream of a request's samples, which all APIs write in their own format."""

import dataclasses
from collections.abc import Sequence

from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput


@dataclasses.dataclass(frozen=True)
class SampleDelta:
    """Text and tokens of a sample that are new since the previous event of a stream.

    Attributes:
      sample: the whole sample so far.
      text: the new text.
      start: index of the first new token; 0 if the whole sample is new.
    """

    sample: CompletionOutput
    text: str
    start: int

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return self.sample.token_ids[self.start :]

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each new token, a dict from token ids to log-probabilities; None if not requested."""
        logprobs = self.sample.logprobs
        return None if logprobs is None else logprobs[self.start :]


def whole_samples(output: RequestOutput) -> list[SampleDelta]:
    """Return a delta for each sample, with all its text and tokens."""
    return [SampleDelta(sample, sample.text, 0) for sample in output.outputs]


def num_entries(output: RequestOutput, deltas: Sequence[SampleDelta]) -> int:
    """Return the number of tokens plus log-probabilities in an event or response."""
    count = 0
    for delta in deltas:
        count += len(delta.sample.token_ids) - delta.start
        if delta.sample.logprobs is not None:
            count += sum(map(len, delta.sample.logprobs[delta.start :]))
    # The endpoint decides whether the first or the last event has the log-probabilities of the
    # prompt, so count them for both events.
    if output.prompt_logprobs is not None:
        if output.finished or any(delta.start == 0 for delta in deltas):
            count += sum(len(row) for row in output.prompt_logprobs if row is not None)
    return count


class DeltaTracker:
    """Record of the number of characters and tokens that a stream has sent of each sample."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def deltas(self, prompt: int, output: RequestOutput) -> list[SampleDelta]:
        """Return the new parts of a prompt's samples, and record them as sent.

        `prompt` is the index of the prompt in its request. Samples without new parts are left out.
        """
        new = []
        for sample in output.outputs:
            key = prompt, sample.index
            num_chars, num_tokens, is_done = self._sent.get(key, (0, 0, False))
            ends = sample.finish_reason is not None
            counts = len(sample.text), len(sample.token_ids), ends
            if is_done or counts == (num_chars, num_tokens, False):
                continue
            self._sent[key] = counts
            new.append(SampleDelta(sample, sample.text[num_chars:], num_tokens))
        return new
