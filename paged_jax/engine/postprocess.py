"""`Postprocessor`: appends new tokens to sequences, and finishes complete sequences."""

import math
import time
from typing import Any, NamedTuple

from paged_jax.engine.request_table import RequestTable
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.programs import Scores
from paged_jax.sampling.sample import Draws
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.outputs import Logprob
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.step_plan import StepPlan


class RowTokens(NamedTuple):
    """Tokens that one sequence got in a step of the engine.

    Attributes:
      token_ids: the tokens, one per decode step.
      logprobs: the log-probabilities of the tokens, in nats.
      index: row of the sequence in the arrays of `draws`.
      draws: the sampled tokens of all sequences. The first dimension of each array is the decode
        step, the second is the row.
    """

    token_ids: list[int]
    logprobs: list[float]
    index: int
    draws: Draws


def rows_of(tokens: StepTokens) -> list[RowTokens]:
    """Return the tokens of each row of a step, converted to Python numbers.

    The host handles Python numbers faster than NumPy scalars.
    """
    draws = tokens.draws
    parts = (draws.token_ids.T, draws.logprobs.T, tokens.num_new)
    rows = zip(*(part.tolist() for part in parts), strict=True)
    return [
        RowTokens(token_ids[:count], logprobs[:count], index, draws)
        for index, (token_ids, logprobs, count) in enumerate(rows)
    ]


class Postprocessor:
    """Appends the tokens of a step to sequences, and finishes complete sequences.

    Args:
      tokenizer: tokenizer that decodes the tokens in `Logprob`; if it is None, their texts are
        empty.
      eos_token_ids: ids of the end-of-sequence tokens.
      requests: the unfinished requests.
      stats: statistics of the engine, which are updated.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        requests: RequestTable,
        stats: EngineStats,
    ):
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._requests = requests
        self._stats = stats

    def postprocess(self, plan: StepPlan, tokens: StepTokens | None) -> list[Request]:
        """Append the tokens of a step to its sequences.

        Args:
          plan: the plan of the step.
          tokens: tokens of the step, one row per decoding sequence; None if no sequence decodes.

        Returns:
          The requests that got tokens or ended. The ended requests are also stored in
          `RequestTable.ended`.
        """
        updated = dict.fromkeys(self._requests.ended)
        for sequence in plan.expired:
            # The scheduler has already removed the expired sequence.
            updated[sequence.request] = None
            sequence.completion.end("abort", "deadline")
            self._requests.finish(sequence)
        for sequence in plan.computed:
            updated[sequence.request] = None
            self._stats.num_prompt_tokens += _num_computed(sequence)
            sequence.completion.end("length")
            self._requests.finish(sequence)
        if tokens is not None:
            now = time.perf_counter()
            for row, sequence in zip(rows_of(tokens), plan.decodes, strict=False):
                # Skip a sequence that ended in the previous step, after this step was queued.
                if sequence.slot is None or not row.token_ids:
                    continue
                updated[sequence.request] = None
                self.take_row(sequence, row, now)
        # Set `ended` before the requests are removed from the table, so that no request is lost if
        # an interrupt occurs in between.
        self._requests.ended = [request for request in updated if request.is_finished]
        for request in self._requests.ended:
            self._requests.remove(request)
        return list(updated)

    def take_row(self, sequence: Sequence, row: RowTokens, now: float) -> None:
        """Append the tokens of a row to a sequence, and finish the sequence if it is complete.

        `now` is the time on the clock of `time.perf_counter`.
        """
        request = sequence.request
        if sequence.is_finished:
            return  # The whole request was ended, because another sample got NaN.
        if sequence.grammar is not None and sequence.grammar.failure is not None:
            # The grammar of this sample failed, so end only this sample. The other samples of the
            # request continue.
            sequence.completion.end("error", sequence.grammar.failure)
            self._requests.finish(sequence)
            return
        try:
            num_tokens = self.append_tokens(sequence, row)
        except FloatingPointError as error:
            self._requests.end(request, "error", str(error))
            return
        if not num_tokens:
            return
        sequence.advance(num_tokens)
        self._stats.num_generated_tokens += num_tokens
        if request.metrics.first_token_time is None:
            request.mark(first_token_time=now)
            self._stats.num_prompt_tokens += _num_computed(sequence)
            if not self._stats.first_token_seconds:
                self._stats.first_token_seconds = now - request.metrics.arrival_time
        if sequence.is_finished:
            self._requests.finish(sequence)

    def append_tokens(self, sequence: Sequence, row: RowTokens) -> int:
        """Append the tokens of a row to a sequence, up to the token that completes it.

        Returns:
          The number of appended tokens.

        Raises:
          FloatingPointError: a log-probability is NaN. The tokens before it have been appended.
        """
        has_nan = math.isnan(sum(row.logprobs))
        if not has_nan and sequence.extend(
            row.token_ids, row.logprobs, eos_token_ids=self._eos_token_ids
        ):
            return len(row.token_ids)
        request, num_appended = sequence.request, 0
        for step, (token_id, logprob) in enumerate(zip(row.token_ids, row.logprobs, strict=True)):
            if math.isnan(logprob):
                num_tokens = len(sequence.token_ids)
                raise FloatingPointError(
                    f"the model gave NaN for request {request.request_id} after {num_tokens} "
                    "tokens. Its weights may be damaged, or its activations may overflow in their "
                    "dtype."
                )
            candidates = None
            if request.params.logprobs is not None:
                candidates = self._candidates(
                    (token_id, logprob, int(row.draws.ranks[step, row.index])),
                    row.draws.top_ids[step, row.index],
                    row.draws.top_logprobs[step, row.index],
                    request.params.logprobs,
                )
            sequence.append(
                token_id, logprob, eos_token_ids=self._eos_token_ids, candidates=candidates
            )
            num_appended += 1
            if sequence.is_finished:
                break
        return num_appended

    def append_prompt_logprobs(self, sequence: Sequence, scores: Scores) -> None:
        """Append log-probabilities of prompt tokens, after a prompt chunk was computed.

        Args:
          sequence: a sequence of a request with `prompt_logprobs`. Its `num_computed` does not
            include the chunk yet.
          scores: the log-probabilities and the most probable tokens, one row per token of the
              chunk. Row i is for the token that follows token i of the chunk.
        """
        request = sequence.request
        assert request.prompt_logprobs is not None and request.params.prompt_logprobs is not None
        for row in range(len(scores.logprobs)):
            position = sequence.num_computed + row + 1
            # After a preemption, chunks contain prompt tokens that were scored before, and
            # generated tokens. Skip both.
            if position == len(request.prompt_logprobs) < len(request.prompt_token_ids):
                token_id = request.prompt_token_ids[position]
                request.prompt_logprobs.append(
                    self._candidates(
                        (token_id, scores.logprobs[row], scores.ranks[row]),
                        scores.top_ids[row],
                        scores.top_logprobs[row],
                        request.params.prompt_logprobs,
                    )
                )

    def _candidates(
        self, chosen: tuple[int, Any, Any], top_ids: Any, top_logprobs: Any, count: int
    ) -> dict[int, Logprob]:
        """Return the `Logprob` of the chosen token and of the `count` most probable tokens.

        `chosen` has the id, the log-probability and the rank of the chosen token. The result maps
        token ids to `Logprob`.
        """
        top = zip(top_ids, top_logprobs, range(1, count + 1), strict=False)
        return {
            int(token_id): Logprob(float(logprob), int(rank), self._decode_token(int(token_id)))
            for token_id, logprob, rank in (chosen, *top)
        }

    def _decode_token(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([token_id], skip_special_tokens=False, continues_text=True)


def _num_computed(sequence: Sequence) -> int:
    """Return the number of prompt tokens that were not in the prefix cache."""
    return sequence.num_prompt_tokens - sequence.request.num_cached_tokens
