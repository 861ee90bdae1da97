"""`Answer`: base class that interprets a request body and builds the response."""

import dataclasses
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from paged_jax.arguments import ArgumentError
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.scheduler.explain import describe_preemption, describe_wait, name_request
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.api_error import ApiError, bad_request
from paged_jax.server.json_encoding import JsonDict, encode_event, to_json_dict
from paged_jax.server.request_log import RequestRecord
from paged_jax.server.sampling_body import SamplingBody
from paged_jax.server.service import Client, Service

# Reported instead of the log-probability -inf, which JSON cannot represent. OpenAI reports the same
# number.
_LOWEST = -9999.0
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
# Body fields that may contain the prompt.
_PROMPT_FIELDS = ("messages", "input", "prompt_token_ids", "prompt")
# Body fields that may contain a constraint on the text.
_CONSTRAINT_FIELDS = ("structured_outputs", "tools", "response_format")
# Body fields that are also fields of `SamplingParams`, with the same meaning.
_PARAMS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingBody.model_fields
]


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


class Answer(ABC):
    """Answer to a request for generated text. Each endpoint has a subclass.

    Args:
      service: the engine and its settings.
      body: the parsed request body.
      client: the sender of the request.
      record: the request's record for the log, which also stores the outputs.

    Attributes:
      prefix: prefix of the response's id.
      end_mark: last bytes of a stream.
      clamps_max_tokens: whether a `max_tokens` that exceeds the context is reduced. Otherwise it is
        an error.
      id: id of the response.
      name: prefix of the request ids in the engine. The index of the prompt is appended to it.
      fallback_params: defaults of `SamplingParams` fields for which the model recommends no value.
    """

    prefix = "cmpl"
    end_mark = b"data: [DONE]\n\n"
    clamps_max_tokens = False
    fallback_params: dict[str, Any] = {}

    def __init__(self, service: Service, body: SamplingBody, client: Client, record: RequestRecord):
        self.service = service
        self.body = body
        self.client = client
        self.record = record
        self.created = int(time.time())
        self.id = self.name = f"{self.prefix}-{record.request_id}"
        if record.is_given:  # make the name unique: clients may use an id for several requests
            self.name = f"{self.id}-{secrets.token_hex(4)}"

    @abstractmethod
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as text or token ids. It may be called in a tokenizing thread."""

    @property
    def prompt_field(self) -> str:
        """Name of the body field that contains the prompt."""
        return self._first_present(_PROMPT_FIELDS)

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """Number of characters of the longest prompt. Text of a chat template does not count."""

    @property
    def is_constrained(self) -> bool:
        """Whether a constraint on the text must be compiled, which takes time."""
        return self.body.structured_outputs is not None

    @property
    def constraint_field(self) -> str:
        """Name of the body field with the constraint on the text, for error messages."""
        return self._first_present(_CONSTRAINT_FIELDS)

    @property
    def num_samples(self) -> int:
        """Number of samples to draw for each prompt."""
        return self.body.n or 1

    @property
    def uses_beam_search(self) -> bool:
        """Whether to use beam search instead of sampling."""
        return False

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens of each sample; None if the body sets no limit."""
        return self.body.max_tokens

    @property
    def stop(self) -> tuple[str, list[str]]:
        """Tuple (name of the body field with the stop strings, list of stop strings)."""
        stop = self.body.stop
        return "stop", [stop] if isinstance(stop, str) else stop or []

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum prompt length in tokens: context length, minus 1 unless `max_tokens` is 0."""
        return self.service.max_model_len - (self.max_tokens != 0)

    def _first_present(self, names: Sequence[str]) -> str:
        """Return the first of `names` that the body sets. If it sets none, return the last."""
        present = (name for name in names if getattr(self.body, name, None) is not None)
        return next(present, names[-1])

    def params(self) -> dict[str, Any]:
        """Return the values of `SamplingParams` fields that the body sets."""
        params = {name: getattr(self.body, name) for name in _PARAMS}
        if self.body.seed is not None and self.body.seed != -1:
            params["seed"] = self.body.seed % 2**63  # OpenAI allows negative seeds
        if self.body.logit_bias is not None:
            params["logit_bias"] = _as_token_ids(self.body.logit_bias)
        if self.body.structured_outputs is not None:
            constraint = self.body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            try:
                params["structured_outputs"] = StructuredOutputsParams(**constraint)
            except ArgumentError as error:
                raise bad_request(error) from None
        return {name: value for name, value in params.items() if value is not None}

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


class OpenAiAnswer(Answer):
    """Base class for ``/v1/completions`` and ``/v1/chat/completions``.

    Attributes:
      chunk_type: Pydantic model of a stream's events.
    """

    body: bodies.OpenAiBody
    chunk_type: type[BaseModel]

    @property
    def uses_beam_search(self) -> bool:
        """Whether to use beam search instead of sampling."""
        return bool(self.body.use_beam_search)

    def params(self) -> dict[str, Any]:
        """Return the sampling parameters, with `prompt_logprobs` and `response_format`."""
        params, body = super().params(), self.body
        if body.prompt_logprobs is not None:
            if body.stream:
                raise ApiError(
                    400,
                    "prompt_logprobs must be null in a stream. Set stream to false.",
                    param="prompt_logprobs",
                )
            params["prompt_logprobs"] = body.prompt_logprobs
        if body.length_penalty not in (None, 1) and not self.uses_beam_search:
            raise ApiError(
                400,
                "length_penalty must be null or 1 unless use_beam_search is true.",
                param="length_penalty",
            )
        if body.response_format is not None and body.response_format.type != "text":
            format = _json_constraint(body.response_format)
            params["structured_outputs"] = only_constraint(params, format, "response_format")
        return params

    @property
    def is_constrained(self) -> bool:
        """Whether a constraint on the text must be compiled."""
        return super().is_constrained or self.body.response_format is not None

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
        if self.body.explain:
            end["explanations"] = [explanation(output) for output in outputs]
        return [self.event([], **end)] if end else []

    def event(self, choices: list[JsonDict], **fields: Any) -> JsonDict:
        """Return an event of a stream."""
        return to_json_dict(self.chunk_type, **self.head, choices=choices, **fields)

    def end(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the last fields of a response: its usage, and its explanations if requested.

        See `schemas.RequestExplanation` for the explanations.
        """
        explanations = [explanation(output) for output in outputs] if self.body.explain else None
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


def _json_constraint(format: bodies.ResponseFormat) -> StructuredOutputsParams:
    if format.json_schema is not None:
        return schema_constraint(format.json_schema.schema_, bool(format.json_schema.strict))
    schema = format.value if format.schema_ is None else format.schema_
    if schema is not None:
        return schema_constraint(schema, is_strict=False)
    return StructuredOutputsParams(json_object=True)


def schema_constraint(schema: dict[str, Any], is_strict: bool) -> StructuredOutputsParams:
    """Return the constraint that a text is JSON and matches a schema."""
    guidance = schema.get("x-guidance", {})
    if not is_strict and isinstance(guidance, dict):
        # Ignore keywords that llguidance does not support. If `is_strict`, they are errors.
        schema = {**schema, "x-guidance": {"lenient": True, **guidance}}
    return StructuredOutputsParams(json=schema)


def only_constraint(
    params: dict[str, Any], format: StructuredOutputsParams | None, field: str
) -> StructuredOutputsParams | None:
    """Return the constraint on the text; None if the body has none.

    It comes from the field ``structured_outputs`` or from the API's own field.

    Args:
      params: sampling parameters, which may have ``structured_outputs``.
      format: the constraint in the API's own field, such as ``response_format``; None if absent.
      field: name of this field.

    Raises:
      ApiError: both constraints are given.
    """
    constraint = params.get("structured_outputs")
    if format is not None and constraint is not None:
        rule = "must be null or text if structured_outputs is given"
        raise ApiError(400, f"{field} {rule}.", param=field)
    return constraint if format is None else format


def _as_token_ids(bias: dict[str, float]) -> dict[int, float]:
    # int() alone would also accept "05" and digits of other scripts as duplicates of "5".
    if not all(map(_TOKEN_ID.fullmatch, bias)):
        raise ApiError(400, "logit_bias must have token ids as keys.", param="logit_bias")
    return {int(token_id): value for token_id, value in bias.items()}
