"""`GenerateAnswer`: the answer of ``POST /generate``, this server's own endpoint."""

from collections.abc import Sequence
from typing import Any

from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.answers import Answer, by_token_id, finite, usage
from paged_jax.server.deltas import SampleDelta, whole
from paged_jax.server.errors import ApiError
from paged_jax.server.explanations import explanation


class GenerateAnswer(Answer):
    """The answer of ``POST /generate``."""

    prefix = "gen"
    unrecommended = {"temperature": 0.0}
    body: bodies.GenerateBody

    def prompts(self) -> list[str | list[int]]:
        """The one prompt, given as text or as token ids."""
        text, token_ids = self.body.prompt, self.body.prompt_token_ids
        if (text is None) == (token_ids is None):
            raise ApiError(400, "prompt or prompt_token_ids must be given, and not both.")
        return [text if text is not None else token_ids or []]

    @property
    def num_chars(self) -> int:
        """Characters of the prompt, if it is a text."""
        return len(self.body.prompt or "")

    def params(self) -> dict[str, Any]:
        """The fields that the body gives, which has two for log-probabilities."""
        asked = {name: getattr(self.body, name) for name in ("logprobs", "prompt_logprobs")}
        return super().params() | {k: v for k, v in asked.items() if v is not None}

    def answer(self, outputs: Sequence[RequestOutput]) -> schemas.Piece:
        """The whole answer, from the output of the one prompt."""
        [output] = outputs
        return self._generated(output, whole(output))

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[schemas.Piece]:
        """One event that holds what is new in all samples."""
        return [self._generated(output, deltas)] if deltas else []

    def _generated(self, output: RequestOutput, deltas: list[SampleDelta]) -> schemas.Piece:
        end: dict[str, Any] = {}
        if output.finished:
            end = {
                "usage": usage([output]),
                "prompt_token_ids": output.prompt_token_ids,
                "prompt_logprobs": by_token_id(output.prompt_logprobs),
                "explanation": explanation(output),
            }
        return schemas.piece(
            schemas.Generated,
            request_id=self.id,
            text=[each.text for each in deltas],
            outputs=[_sample(each) for each in deltas],
            finished=output.finished,
            **end,
        )


def _sample(delta: SampleDelta) -> schemas.GeneratedSample:
    sample: schemas.GeneratedSample = {
        "index": delta.sample.index,
        "text": delta.text,
        "token_ids": delta.token_ids,
        "cumulative_logprob": finite(delta.sample.cumulative_logprob),
        "logprobs": by_token_id(delta.logprobs),
        "finish_reason": delta.sample.finish_reason,
    }
    if delta.sample.stop_reason is not None:
        sample["stop_reason"] = delta.sample.stop_reason
    return sample
