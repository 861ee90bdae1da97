"""`Answer`: how an endpoint reads a request's body and writes its answer, whole or as a stream."""

import dataclasses
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from paged_jax.checks import ArgumentError
from paged_jax.sampling.params import SamplingParams, StructuredOutputsParams
from paged_jax.scheduler.outputs import Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.deltas import SampleDelta
from paged_jax.server.errors import ApiError, bad_request
from paged_jax.server.records import RequestRecord
from paged_jax.server.responses import encode_event
from paged_jax.server.service import Client, Service

# The log-probability that OpenAI reports for a token that cannot come: JSON has no infinity.
_LOWEST = -9999.0
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
# Fields of bodies that have a prompt, and those that ask for a form.
_PROMPTS = ("messages", "prompt_token_ids", "prompt")
_FORMS = ("structured_outputs", "tools", "response_format")
# Fields of a body that are also fields of `SamplingParams`, with the same meaning.
_PARAMS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in bodies.SamplingBody.model_fields
]


class Answer(ABC):
    """The answer to one request: an endpoint is a subclass.

    Args:
      service: the engine and how it is served.
      body: the request's body.
      client: who asks.
      record: the record of the request, which gets what is generated.

    Attributes:
      prefix: the beginning of the answer's id.
      id: the id of the answer.
      name: name of the request in the engine, where no two may have the same.
      unrecommended: fields of `SamplingParams` for a model whose authors recommend none.
    """

    prefix = "cmpl"
    unrecommended: dict[str, Any] = {}

    def __init__(
        self, service: Service, body: bodies.SamplingBody, client: Client, record: RequestRecord
    ):
        self.service = service
        self.body = body
        self.client = client
        self.record = record
        self.created = int(time.time())
        self.id = self.name = f"{self.prefix}-{record.request_id}"
        if record.is_given:  # perhaps to another request too
            self.name = f"{self.id}-{secrets.token_hex(4)}"

    @abstractmethod
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids. It may take a while, so it is called in a thread."""

    @property
    def prompt_field(self) -> str:
        """The field of the body that has the prompt."""
        return self._given(_PROMPTS)

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """Characters of the longest prompt's text, before a template adds to it."""

    @property
    def has_form(self) -> bool:
        """Whether its text must have a form, which takes time to compile as a long prompt does."""
        return self.body.structured_outputs is not None

    @property
    def form_field(self) -> str:
        """The field of the body that asks for a form, if one does."""
        return self._given(_FORMS)

    @property
    def num_samples(self) -> int:
        """Samples to draw of each prompt."""
        return self.body.n or 1

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of each sample, where the body says so."""
        return self.body.max_tokens

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: it may fill the context if no token is to follow."""
        return self.service.max_model_len - (self.max_tokens != 0)

    def _given(self, names: Sequence[str]) -> str:
        """The first of some fields that the body gives; the last if it gives none."""
        given = (name for name in names if getattr(self.body, name, None) is not None)
        return next(given, names[-1])

    def params(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the body gives."""
        given = {name: getattr(self.body, name) for name in _PARAMS}
        if self.body.seed is not None and self.body.seed != -1:
            given["seed"] = self.body.seed % 2**63  # OpenAI allows negative seeds
        if self.body.logit_bias is not None:
            given["logit_bias"] = _as_token_ids(self.body.logit_bias)
        if self.body.structured_outputs is not None:
            given["structured_outputs"] = _form(self.body.structured_outputs)
        return {name: value for name, value in given.items() if value is not None}

    @abstractmethod
    def answer(self, outputs: Sequence[RequestOutput]) -> schemas.Piece:
        """The whole answer, from the finished outputs of all prompts."""

    def opening(self) -> list[schemas.Piece]:
        """The first events of a stream, before any text."""
        return []

    @abstractmethod
    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[schemas.Piece]:
        """The events of a stream that hold new text.

        Args:
          prompt: the index of the prompt in its request.
          output: its output so far.
          deltas: what is new in its samples.
        """

    def events(self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]) -> bytes:
        """As `chunks`, ready to be sent."""
        return b"".join(map(encode_event, self.chunks(prompt, output, deltas)))

    def closing(self, outputs: Sequence[RequestOutput]) -> list[schemas.Piece]:
        """The last events of a stream, after all text."""
        del outputs
        return []


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LOWEST)


def by_token_id(rows: Sequence[dict[int, Logprob] | None] | None) -> Any:
    """Candidates at each position as `schemas.Candidate` dicts, by their token ids."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            token_id: {
                "logprob": finite(each.logprob),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token_id, each in row.items()
        }
        for row in rows
    ]


def usage(outputs: Sequence[RequestOutput]) -> schemas.Usage:
    """Numbers of prompt tokens, generated tokens, and tokens found in the prefix cache."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return schemas.Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_new,
        total_tokens=num_prompt + num_new,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=cached),
    )


def _form(asked: bodies.StructuredOutputs) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**asked.model_dump(by_alias=True, exclude_none=True))
    except ArgumentError as error:
        raise bad_request(error) from None


def _as_token_ids(bias: dict[str, float]) -> dict[int, float]:
    # int() alone would read "05", and digits of other scripts, as the id of "5" beside them.
    if not all(map(_TOKEN_ID.fullmatch, bias)):
        raise ApiError(400, "logit_bias must have token ids for keys.", param="logit_bias")
    return {int(token_id): value for token_id, value in bias.items()}
