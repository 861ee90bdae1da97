"""`Postprocessor`: appends the tokens of a step to sequences, and finishes complete ones."""

import math
import time
from typing import Any, NamedTuple

from paged_jax.engine.requests import RequestTable
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.programs import Scores
from paged_jax.sampling.sample import Draws
from paged_jax.scheduler.outputs import EngineStats, Logprob
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.step_plan import StepPlan


class RowTokens(NamedTuple):
    """Tokens of a sequence in a step.

    Attributes:
      token_ids: the tokens.
      logprobs: their log-probabilities, in nats.
      index: row of the sequence in `draws`.
      draws: draws of all sequences. The first dimension of each array is the decode step, the
        second is the row.
    """

    token_ids: list[int]
    logprobs: list[float]
    index: int
    draws: Draws


def rows_of(tokens: StepTokens) -> list[RowTokens]:
    """Return the rows of a step in Python numbers, which are faster than NumPy scalars."""
    draws = tokens.draws
    parts = (draws.token_ids.T, draws.logprobs.T, tokens.num_new)
    rows = zip(*(part.tolist() for part in parts), strict=True)
    return [
        RowTokens(token_ids[:count], logprobs[:count], index, draws)
        for index, (token_ids, logprobs, count) in enumerate(rows)
    ]


class Postprocessor:
    """Appends the tokens of a step to sequences, and finishes complete ones.

    Args:
      tokenizer: decodes the tokens of log-probabilities; None leaves their texts empty.
      eos_token_ids: tokens that end a sequence.
      requests: the unfinished requests.
      stats: totals of the engine.
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
          tokens: tokens of the step, one row per decoding sequence; None if nothing decodes.

        Returns:
          The requests that got tokens or ended. `RequestTable.ended` has the ended requests.
        """
        touched = dict.fromkeys(self._requests.ended)
        for sequence in plan.expired:
            touched[sequence.request] = None  # the scheduler has already dropped the request
            sequence.completion.end("abort", "deadline")
            self._requests.finish(sequence)
        for sequence in plan.computed:
            touched[sequence.request] = None
            self._stats.num_prompt_tokens += _num_computed(sequence)
            sequence.completion.end("length")
            self._requests.finish(sequence)
        if tokens is not None:
            now = time.perf_counter()
            for row, sequence in zip(rows_of(tokens), plan.decodes, strict=False):
                # If the step was queued ahead, sequences may have ended since then.
                if sequence.slot is None or not row.token_ids:
                    continue
                touched[sequence.request] = None
                self.take_row(sequence, row, now)
        # Set `ended` before the requests leave the table, so that an interrupt loses no request.
        self._requests.ended = [request for request in touched if request.is_finished]
        for request in self._requests.ended:
            self._requests.remove(request)
        return list(touched)

    def take_row(self, sequence: Sequence, row: RowTokens, now: float) -> None:
        """Append a row of tokens to a sequence, and finish the sequence if it stops."""
        request = sequence.request
        if sequence.is_finished:
            return  # NaN in another sample has ended the whole request
        if sequence.grammar is not None and sequence.grammar.failure is not None:
            # End only this sample; other samples of the request continue.
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
        """Append the tokens of a row to a sequence until it stops.

        Returns:
          The number of appended tokens.

        Raises:
          FloatingPointError: the model gave NaN. Tokens before it are kept.
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
                    "tokens. Its weights may be damaged, or overflow in their dtype."
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
        """Append the log-probabilities of the prompt tokens that follow the tokens of a chunk.

        Args:
          sequence: a sequence of a request with `prompt_logprobs`, before the chunk.
          scores: scores of the next tokens, one row per token of the chunk.
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
        """Return log-probability and rank of the chosen and the `count` most probable tokens."""
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
