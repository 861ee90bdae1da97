"""`Writer`: base class that builds the response of a request, whole or as a stream."""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from paged_jax.scheduler.explain import describe_preemption, describe_wait, name_request
from paged_jax.scheduler.outputs import Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.api_error import ApiError
from paged_jax.server.generation_request import GenerationRequest
from paged_jax.server.json_encoding import JsonDict, encode_event, to_json_dict
from paged_jax.server.sample_deltas import SampleDelta
from paged_jax.server.sampling_body import SamplingBody
from paged_jax.server.service import Service

# Reported instead of the log-probability -inf, which JSON cannot represent. OpenAI reports the same
# number.
_LOWEST = -9999.0


class Writer(ABC):
    """Writer of the response to a request for generated text. Each API has a subclass.

    Args:
      service: the engine and its settings.
      body: the parsed request body, of which writers read only options of the response.
      request: the request that was read from the body.
      request_id: id of the request for the log.

    Attributes:
      end_mark: last bytes of a stream.
      id: id of the response.
    """

    end_mark = b"data: [DONE]\n\n"

    def __init__(
        self, service: Service, body: SamplingBody, request: GenerationRequest, request_id: str
    ):
        self.service = service
        self.body = body
        self.request = request
        self.request_id = request_id
        self.created = int(time.time())
        self.id = f"{request.id_prefix}-{request_id}"

    @abstractmethod
    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the JSON of the response, given the finished outputs of all prompts in order."""

    def opening(self) -> list[JsonDict]:
        """Return the events that a stream begins with, as soon as the engine has the request."""
        return []

    def ping(self) -> bytes:
        """Return bytes that keep a stream's connection open, and that clients ignore."""
        return b": ping\n\n"

    @abstractmethod
    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return stream events for new text and tokens; `prompt` is the index of the prompt."""

    def events(self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]) -> bytes:
        """Return the events of `chunks` as bytes."""
        return b"".join(map(self.encode, self.chunks(prompt, output, deltas)))

    def encode(self, event: JsonDict) -> bytes:
        """Return the bytes of an event of the stream."""
        return encode_event(event)

    def failure(self, error: ApiError) -> bytes:
        """Return the bytes of the event that ends a stream after an error."""
        return encode_event(error.body())

    def closing(self, outputs: Sequence[RequestOutput]) -> list[JsonDict]:
        """Return the events that follow all text, given the outputs of all prompts."""
        del outputs
        return []


class OpenAiWriter(Writer):
    """Base class for ``/v1/completions`` and ``/v1/chat/completions``.

    Attributes:
      chunk_type: Pydantic model of a stream's events.
    """

    body: bodies.OpenAiBody
    chunk_type: type[BaseModel]

    @property
    def head(self) -> dict[str, Any]:
        """Fields that the response and all events of a stream have in common."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.settings.model_name,
        }

    @property
    def _sends_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    def usage_so_far(self, output: RequestOutput, delta: SampleDelta) -> schemas.Usage | None:
        """Return the token counts of a sample so far; None if the client did not request them."""
        options = self.body.stream_options
        if not (self._sends_usage and options and options.continuous_usage_stats):
            return None
        return self.usage([dataclasses.replace(output, outputs=[delta.sample])])

    def usage(self, outputs: Sequence[RequestOutput]) -> schemas.Usage:
        """Return the token counts of all prompts and samples of a request."""
        return usage(outputs)

    def closing(self, outputs: Sequence[RequestOutput]) -> list[JsonDict]:
        """Return a list with one event for usage and explanations; [] if neither is requested."""
        end: dict[str, Any] = {}
        if self._sends_usage:
            end["usage"] = self.usage(outputs)
        if self.request.explain:
            end["explanations"] = [explanation(output) for output in outputs]
        return [self.event([], **end)] if end else []

    def event(self, choices: list[JsonDict], **fields: Any) -> JsonDict:
        """Return an event of a stream."""
        return to_json_dict(self.chunk_type, **self.head, choices=choices, **fields)

    def end(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the last fields of a response: its usage, and its explanations if requested.

        See `schemas.RequestExplanation` for the explanations.
        """
        explanations = [explanation(output) for output in outputs] if self.request.explain else None
        return {"usage": self.usage(outputs), "explanations": explanations}

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return the token ids and log-probabilities of a prompt, if requested, as JSON fields."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if (count := self.body.prompt_logprobs) is not None and output.prompt_logprobs is not None:
            rows = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            fields["prompt_logprobs"] = by_token_id([keep_top(*row, count) for row in rows])
        return fields

    def sample_token_ids(self, delta: SampleDelta) -> list[int] | None:
        """Return the new token ids of a sample; None if they were not requested."""
        return delta.token_ids if self.body.return_token_ids else None


def finite(logprob: float) -> float:
    """Return the larger of `logprob` and -9999, because JSON cannot represent -inf."""
    return max(logprob, _LOWEST)


def keep_top(
    token_id: int, row: dict[int, Logprob] | None, count: int
) -> dict[int, Logprob] | None:
    """Return the entries of `row` for `token_id` and for the `count` most probable tokens."""
    if row is None:
        return None
    return {
        candidate: logprob
        for candidate, logprob in row.items()
        if logprob.rank <= count or candidate == token_id
    }


def by_token_id(rows: Sequence[dict[int, Logprob] | None] | None) -> Any:
    """Convert log-probabilities to vLLM's JSON: a dict for each position, keyed by token id."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            token_id: {
                "logprob": finite(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in row.items()
        }
        for row in rows
    ]


def usage(outputs: Sequence[RequestOutput]) -> schemas.Usage:
    """Return the numbers of prompt tokens, generated tokens, and cached prompt tokens."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return schemas.Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_new,
        total_tokens=num_prompt + num_new,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=num_cached),
    )


def explanation(output: RequestOutput) -> schemas.RequestExplanation | None:
    """Return the explanation of a request as JSON; None if not requested.

    Ids of other requests are replaced by "another request", because other clients may have chosen
    them.
    """
    explanation = output.explanation
    if explanation is None:
        return None

    def name(request_id: str) -> str:
        return name_request(request_id) if request_id == output.request_id else "another request"

    return {
        "waits": [
            {
                "reason": wait.reason,
                "start": wait.start,
                "seconds": wait.seconds,
                "detail": describe_wait(wait, name),
                "sample": wait.sample,
            }
            for wait in explanation.waits
        ],
        "preemptions": [
            {
                "seconds": note.seconds,
                "kind": note.kind,
                "num_tokens": note.num_tokens,
                "detail": describe_preemption(note, name),
                "sample": note.sample,
            }
            for note in explanation.preemptions
        ],
        "num_cached_tokens": explanation.num_cached_tokens,
        "prefix_match": explanation.prefix_match,
    }
