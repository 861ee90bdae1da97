"""`GenerationRequest`: a request for generated text, and readers of the fields that APIs share.

Each API has a function that reads its body. Later steps of the request read no body.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from paged_jax.arguments import ArgumentError
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.server import bodies
from paged_jax.server.api_error import ApiError, bad_request
from paged_jax.server.chats import Chat
from paged_jax.server.sampling_body import SamplingBody

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
# Body fields that may contain a constraint on the text.
_CONSTRAINT_FIELDS = ("structured_outputs", "tools", "response_format")
# Body fields that are also fields of `SamplingParams`, with the same meaning.
_PARAMS = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingBody.model_fields
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for generated text, in the same form for all APIs.

    `params` and `prompts` are functions that may take long or raise an `ApiError`. `make_job` calls
    them in this order, in a tokenizing thread, after `check_request` has checked the limits.

    Attributes:
      id_prefix: prefix of the ids of the response and of the engine's requests.
      prompts: function that returns the prompts as text or token ids.
      num_prompts: number of prompts.
      num_chars: number of characters of the longest prompt. Text of a chat template does not count.
      prompt_field: name of the body field with the prompt, for error messages.
      params: function that returns the values of `SamplingParams` fields that the client sets.
      fallback_params: defaults of `SamplingParams` fields for which the model recommends no value.
      n: number of samples of each prompt in the response.
      num_samples: number of samples to draw for each prompt.
      max_tokens: maximum number of tokens of each sample; None if the body sets no limit.
      clamps_max_tokens: whether a `max_tokens` that exceeds the context is reduced. Otherwise it is
        an error.
      stop: the stop strings.
      stop_field: name of the body field with the stop strings.
      is_constrained: whether a constraint on the text must be compiled, which takes time.
      constraint_field: name of the body field with this constraint.
      beam_length_penalty: length penalty of beam search; None to sample instead.
      add_special_tokens: whether special tokens such as BOS are added to prompts that are text.
      truncate_prompt_tokens: number of tokens to keep at the end of each prompt; -1 to keep as many
        as fit into the context, None to keep all.
      model: name of the model; None for the served model.
      stream: whether to send the text as events while it is generated.
      explain: whether the response explains why the request waited.
      priority: priority of the request; None for the default.
      timeout: seconds after which the request ends; None for no limit.
      cache_salt: salt of the prefix cache.
      chat: the chat that the model continues; None if the prompts are no chat.
    """

    id_prefix: str
    prompts: Callable[[], list[str | list[int]]]
    num_prompts: int = 1
    num_chars: int
    prompt_field: str
    params: Callable[[], dict[str, Any]]
    fallback_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    n: int
    num_samples: int
    max_tokens: int | None
    clamps_max_tokens: bool = False
    stop: list[str]
    stop_field: str
    is_constrained: bool
    constraint_field: str
    beam_length_penalty: float | None = None
    add_special_tokens: bool
    truncate_prompt_tokens: int | None = None
    model: str | None
    stream: bool
    explain: bool
    priority: int | None
    timeout: float | None
    cache_salt: str
    chat: Chat | None = None


def read_common(body: SamplingBody, **fields: Any) -> GenerationRequest:
    """Read the body fields that all APIs have. `fields` are the other attributes of the request."""
    common: dict[str, Any] = {
        "n": body.n or 1,
        "num_samples": body.n or 1,
        "max_tokens": body.max_tokens,
        "stop": stop_strings(body),
        "stop_field": "stop",
        "is_constrained": body.structured_outputs is not None,
        "constraint_field": constraint_field(body),
        "add_special_tokens": body.add_special_tokens is not False,
        "model": getattr(body, "model", None),
        "stream": bool(body.stream),
        "explain": body.explain,
        "priority": body.priority,
        "timeout": body.timeout,
        "cache_salt": body.cache_salt or "",
    }
    return GenerationRequest(**common | fields)


def stop_strings(body: SamplingBody) -> list[str]:
    """Return the stop strings in the field `stop`."""
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def constraint_field(body: SamplingBody) -> str:
    """Return the name of the body field with the constraint on the text."""
    present = (name for name in _CONSTRAINT_FIELDS if getattr(body, name, None) is not None)
    return next(present, _CONSTRAINT_FIELDS[-1])


def read_params(body: SamplingBody) -> dict[str, Any]:
    """Read the values of `SamplingParams` fields that the bodies of all APIs may set."""
    params = {name: getattr(body, name) for name in _PARAMS}
    if body.seed is not None and body.seed != -1:
        params["seed"] = body.seed % 2**63  # OpenAI allows negative seeds
    if body.logit_bias is not None:
        params["logit_bias"] = _as_token_ids(body.logit_bias)
    if body.structured_outputs is not None:
        constraint = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        try:
            params["structured_outputs"] = StructuredOutputsParams(**constraint)
        except ArgumentError as error:
            raise bad_request(error) from None
    return {name: value for name, value in params.items() if value is not None}


def read_openai(body: bodies.OpenAiBody, **fields: Any) -> GenerationRequest:
    """Read the body fields of ``/v1/completions`` and ``/v1/chat/completions``.

    `fields` are the other attributes of the request.
    """
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    shared: dict[str, Any] = {
        "is_constrained": body.structured_outputs is not None or body.response_format is not None,
        "beam_length_penalty": penalty if body.use_beam_search else None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }
    return read_common(body, **shared | fields)


def read_openai_params(body: bodies.OpenAiBody) -> dict[str, Any]:
    """Read the sampling parameters, with `prompt_logprobs` and `response_format`."""
    params = read_params(body)
    if body.prompt_logprobs is not None:
        if body.stream:
            raise ApiError(
                400,
                "prompt_logprobs must be null in a stream. Set stream to false.",
                param="prompt_logprobs",
            )
        params["prompt_logprobs"] = body.prompt_logprobs
    if body.length_penalty not in (None, 1) and not body.use_beam_search:
        raise ApiError(
            400,
            "length_penalty must be null or 1 unless use_beam_search is true.",
            param="length_penalty",
        )
    if body.response_format is not None and body.response_format.type != "text":
        format = _json_constraint(body.response_format)
        params["structured_outputs"] = only_constraint(params, format, "response_format")
    return params


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
