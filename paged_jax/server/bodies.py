"""Pydantic models of request bodies. `openapi` publishes them.

Fields have OpenAI's names, or vLLM's names if OpenAI has no such field.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paged_jax.arguments import suggest
from paged_jax.sampling.params import NUMBERS, Number
from paged_jax.server.limits import MAX_PROMPTS

T = TypeVar("T")

# List that stops its validation at the first error. Collecting a million errors would block the
# server for seconds.
Items = Annotated[list[T], Field(fail_fast=True)]


def _whole(value: Any) -> Any:
    """Return a float without a fraction as an integer, because JSON has one type of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
# Pydantic's error type for unknown fields.
UNKNOWN_FIELD = "extra_forbidden"

# Prefix of vLLM's former fields for structured outputs, such as guided_json.
_OLD_FORMS = "guided_"

# Unknown fields that are ignored: hints for caches, routers, logs and reasoning models, which do
# not change the response. (Chats pass the reasoning effort to the chat template.)
_IGNORED = frozenset({
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "rid",
    "safety_identifier",
    "separate_reasoning",
    "stream_reasoning",
    "verbosity",
})  # fmt: skip

# Unknown fields that are ignored if they are null or have one of these values: the defaults of
# OpenAI, vLLM and SGLang, which clients often send. Other values would change the response.
_NEUTRAL_VALUES: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_params": ({},),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "vllm_xargs": ({},),
}


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether an unknown field can be ignored without changing the response.

    Example:
      >>> _is_neutral("no_stop_trim", False), _is_neutral("no_stop_trim", True)
      (True, False)
      >>> _is_neutral("anything", None)
      True
    """
    return value is None or name in _IGNORED or value in _NEUTRAL_VALUES.get(name, ())


class Body(BaseModel):
    """A JSON object of a request. Unknown fields are errors unless they are null."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    # Function that returns whether an unknown field with a name and a value is ignored.
    ignores: ClassVar[Callable[[str, Any], bool]] = staticmethod(lambda name, value: value is None)

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if not self.ignores(name, value):
                raise PydanticCustomError(UNKNOWN_FIELD, "{rule}", self._unknown(name))
        return self

    @classmethod
    def _unknown(cls, name: str) -> dict[str, str]:
        """Return the name and the error message of an unknown field."""
        name = name[:100]
        wanted = "structured_outputs" if name.startswith(_OLD_FORMS) else name
        near = suggest(wanted, cls.model_fields)
        hint = "" if near is None else f" Did you mean {near}?"
        rule = f"{name} is not supported here"
        if (values := _NEUTRAL_VALUES.get(name)) is not None:
            allowed = " or ".join(map(json.dumps, [None, *values]))
            rule = f"{name} is supported here only as {allowed}"
        return {"name": name, "rule": f"{rule}.{hint}"}


class LenientBody(Body):
    """A JSON object within a request, such as a message. Unknown fields are accepted."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    # Accepted, because clients send back extra fields of responses. Unknown fields of messages and
    # functions reach the chat template; those of other objects are dropped.
    ignores = staticmethod(lambda name, value: True)


def _optional(number: Number) -> Any:
    """Return the type of a sampling parameter: a number within its bounds, or null."""
    bounds: dict[str, Any] = dict(number.bounds)
    if number.type is float:
        return Annotated[float | None, Field(**bounds)]
    whole: Any = Annotated[int, Field(**bounds), WHOLE]
    return whole | None


class StreamOptions(Body):
    """Options of a stream: whether its last event, or each event, has the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: whether each event has the usage of its sample."
    )
    include_obfuscation: Literal[False] | None = None


_FIELDS: dict[str, Any] = {name: (_optional(number), None) for name, number in NUMBERS.items()}
_SamplingNumbers = create_model("_SamplingNumbers", __base__=Body, **_FIELDS)


def _add_neutral(schema: dict[str, Any]) -> None:
    ignored = {name: {"description": "Accepted and ignored."} for name in sorted(_IGNORED)}
    neutral = {name: {"enum": [None, *values]} for name, values in _NEUTRAL_VALUES.items()}
    # Fields of the body itself, such as the reasoning effort of chats, are not ignored.
    schema["properties"] = ignored | neutral | schema["properties"]
    schema["additionalProperties"] = {"type": "null"}


class StructuredOutputs(Body):
    """A constraint on the text. Exactly one field must be given."""

    # The alias is needed because Pydantic's models have a method `json`.
    json_schema_: str | dict[str, Any] | None = Field(
        None, alias="json", description="A JSON schema, as an object or as a text."
    )
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="A grammar of llguidance, a variant of Lark.")
    json_object: bool | None = None


class SamplingBody(_SamplingNumbers):
    """Fields of the bodies of all endpoints that generate text.

    Null means the default of the model or of the endpoint.
    """

    model_config = ConfigDict(json_schema_extra=_add_neutral)

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    n: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = Field(
        None, description="0 scores the prompt and generates nothing."
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    stop: Text | Items[Text] | None = None
    stop_token_ids: Items[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens such as BOS. By default true for "
        "texts, and false for chats, because the chat template adds them.",
    )
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    cache_salt: str | None = Field(
        None, description="Requests share cached blocks only if their salts are equal."
    )
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31), WHOLE] | None = Field(
        None, description="Requests with a lower value are served first."
    )
    timeout: Annotated[float | None, Field(gt=0)] = Field(
        None, description="Seconds after which the request ends with the tokens generated so far."
    )
    explain: bool = Field(
        False,
        description="Whether the response explains why the request waited or was preempted, and "
        "where its match in the prefix cache ended.",
    )

    ignores = staticmethod(_is_neutral)


class GenerateBody(SamplingBody):
    """Body of `POST /generate`: `prompt` or `prompt_token_ids`, and sampling parameters."""

    prompt: Text | None = None
    prompt_token_ids: TokenIds | None = None
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None


class NamedSchema(Body):
    """A named JSON schema. Unless it is strict, unsupported keywords are ignored."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the text: any text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") is (self.json_schema is None):
            rule = "json_schema must be given if and only if type is json_schema"
            raise PydanticCustomError("response_format", rule)
        return self


class OpenAiBody(SamplingBody):
    """Fields of both endpoints of OpenAI's API."""

    model: str | None = None
    prompt_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Number of most probable tokens to report at each prompt position."
    )
    use_beam_search: bool | None = Field(
        None, description="Whether beam search finds the `n` most probable samples."
    )
    length_penalty: Annotated[float | None, Field(ge=-10, le=10)] = Field(
        None, description="For beam search: above 0 favours long samples, below 0 short samples."
    )
    return_token_ids: bool | None = Field(
        None, description="Whether to return the token ids of the prompt and of each sample."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = Field(
        None, description="Keep only this number of tokens at the end; -1 keeps all that fit."
    )
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # Fields that clients often send. They are accepted with values that change nothing.
    metadata: dict[str, str] | None = None
    store: bool | None = Field(None, description="Ignored: responses are not stored.")
    service_tier: Literal["auto", "default"] | None = None


class CompletionBody(OpenAiBody):
    """Body of `POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[Items[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[Items[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = None
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        None, description="Number of samples to draw; the `n` most probable are returned."
    )


class TextPart(LenientBody):
    """Text as part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(LenientBody):
    """The model's refusal of an earlier request, as part of a message's content."""

    type: Literal["refusal"]
    refusal: str


class FunctionCallParam(LenientBody):
    """Name and JSON arguments of a function that the model called earlier."""

    name: Text
    arguments: str | dict[str, Any] | None = None


class ToolCallParam(LenientBody):
    """A tool call of an earlier response, sent back by the client."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallParam


class FunctionParam(LenientBody):
    """A function that the model may call. `parameters` is a JSON schema, a hint unless strict."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(LenientBody):
    """A tool that the model may use, which is a function."""

    type: Literal["function"]
    function: FunctionParam


class FunctionName(Body):
    """Name of a function."""

    name: Text


class ToolChoice(Body):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class MessageParam(LenientBody):
    """A message of a chat. All fields are passed to the chat template, which may ignore them.

    `content` may be missing if the message has tool calls, a refusal or reasoning.
    """

    model_config = ConfigDict(
        json_schema_extra={"required": ["role", "content"], "additionalProperties": True}
    )

    role: Text
    content: str | Items[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCallParam] | None = None
    tool_call_id: str | None = None
    # Reasoning that precedes the message. Clients use either name.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Fields of a response's message, which clients send back as part of the chat.
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        said = self.tool_calls or self.refusal or self.reasoning_content or self.reasoning
        if "content" not in self.model_fields_set and not said:
            raise PydanticCustomError(
                "content",
                "content must be given, unless there are tool_calls, a refusal or reasoning",
            )
        return self


class TokenizeBody(Body):
    """Body of `POST /tokenize`, as in vLLM: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[MessageParam] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = Field(
        None, description="By default true for a text and false for a chat."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether to append the start of the next message; by default true."
    )
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[ToolParam] | None = None
    return_token_strs: bool | None = None

    ignores = staticmethod(_is_neutral)


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Items[TokenId]


class ChatBody(OpenAiBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Items[MessageParam], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    reasoning_effort: str | None = Field(
        None, description="Variable for the chat template. Most templates do not read it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    tools: Items[ToolParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Whether to append the start of the next message; by default true."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Whether the answer continues the last message, which is the assistant's. "
        "Needs add_generation_prompt false.",
    )
    include_reasoning: bool | None = Field(
        None, description="Whether responses contain the reasoning; by default true."
    )
    separate_reasoning: bool | None = Field(
        None, description="If false, the reasoning remains a part of the content."
    )
