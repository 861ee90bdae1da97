"""`SampleDelta`: the part of a sample that its client has not been sent yet."""

import dataclasses
from collections.abc import Sequence

from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput


@dataclasses.dataclass(frozen=True)
class SampleDelta:
    """What a sample has gained since its last delta; all of it if there was none.

    Attributes:
      sample: the whole sample so far.
      text: the new text.
      start: the index of the first new token.
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
        """The candidates at each new token, by token id; None if not asked for."""
        logprobs = self.sample.logprobs
        return None if logprobs is None else logprobs[self.start :]


def whole(output: RequestOutput) -> list[SampleDelta]:
    """Deltas that hold all of each sample."""
    return [SampleDelta(sample, sample.text, 0) for sample in output.outputs]


def num_entries(output: RequestOutput, deltas: Sequence[SampleDelta]) -> int:
    """Number of tokens and log-probabilities in an answer made of `deltas`: what it costs."""
    count = 0
    for delta in deltas:
        count += len(delta.sample.token_ids) - delta.start
        if delta.sample.logprobs is not None:
            count += sum(map(len, delta.sample.logprobs[delta.start :]))
    # The prompt's rows are in the first answer or in the last.
    if output.prompt_logprobs is not None:
        if output.finished or any(delta.start == 0 for delta in deltas):
            count += sum(len(row) for row in output.prompt_logprobs if row is not None)
    return count


class Sent:
    """How much of each sample a stream has sent."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def deltas(self, prompt: int, output: RequestOutput) -> list[SampleDelta]:
        """What is new in each sample of a prompt, which then counts as sent.

        Args:
          prompt: the index of the prompt in its request.
          output: its output so far.
        """
        new = []
        for sample in output.outputs:
            key = prompt, sample.index
            chars, tokens, is_done = self._counts.get(key, (0, 0, False))
            ends = sample.finish_reason is not None
            counts = len(sample.text), len(sample.token_ids), ends
            if is_done or counts == (chars, tokens, False):
                continue
            self._counts[key] = counts
            new.append(SampleDelta(sample, sample.text[chars:], tokens))
        return new
