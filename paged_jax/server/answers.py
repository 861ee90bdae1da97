"""`Answer`: how an endpoint reads a request's body and writes its answer, whole or as a stream."""

import dataclasses
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.deltas import SampleDelta
from paged_jax.server.errors import ApiError
from paged_jax.server.service import Service

# The log-probability that OpenAI reports for a token that cannot come: JSON has no infinity.
_LOWEST = -9999.0
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
      salt: the cache salt of the client's API key; empty without keys.

    Attributes:
      prefix: the beginning of the answer's id.
      unrecommended: fields of `SamplingParams` for a model whose authors recommend none.
    """

    prefix = "cmpl"
    unrecommended: dict[str, Any] = {}

    def __init__(self, service: Service, body: bodies.SamplingBody, salt: str):
        self.service = service
        self.body = body
        self.salt = salt
        self.id = f"{self.prefix}-{secrets.token_hex(8)}"
        self.created = int(time.time())

    @abstractmethod
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids. It may take a while, so it is called in a thread."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """Characters of the longest prompt's text, before a template adds to it."""

    def params(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the body gives."""
        given = {name: getattr(self.body, name) for name in _PARAMS}
        if self.body.seed is not None and self.body.seed != -1:
            given["seed"] = self.body.seed % 2**63  # OpenAI allows negative seeds
        if self.body.logit_bias is not None:
            given["logit_bias"] = _as_token_ids(self.body.logit_bias)
        return {name: value for name, value in given.items() if value is not None}

    @abstractmethod
    def answer(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """The whole answer, from the finished outputs of all prompts."""

    def opening(self) -> list[BaseModel]:
        """The first events of a stream, before any text."""
        return []

    @abstractmethod
    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[BaseModel]:
        """The events of a stream that hold new text.

        Args:
          prompt: the index of the prompt in its request.
          output: its output so far.
          deltas: what is new in its samples.
        """

    def closing(self, outputs: Sequence[RequestOutput]) -> list[BaseModel]:
        """The last events of a stream, after all text."""
        del outputs
        return []


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LOWEST)


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


def _as_token_ids(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise ApiError(
            400, "logit_bias must have token ids for keys.", param="logit_bias"
        ) from None
