"""Pydantic models of the bodies of requests: checked here, published by `openapi`.

Fields have OpenAI's names, or vLLM's where OpenAI has none.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paged_jax.argument_names import suggest
from paged_jax.sampling.params import NUMBERS, Number
from paged_jax.server import neutral
from paged_jax.server.limits import MAX_PROMPTS

T = TypeVar("T")

# A list is refused at its first mistake: reporting a million of them would block the server for
# seconds.
Items = Annotated[list[T], Field(fail_fast=True)]


def _whole(value: Any) -> Any:
    """Return a number without a fraction as an integer: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, lt=2**31), WHOLE]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
# The kind of error that a field is which does not exist.
UNKNOWN_FIELD = "extra_forbidden"

# How vLLM named the fields of structured outputs before they were one: guided_json and so on.
_OLD_FORMS = "guided_"


class Body(BaseModel):
    """A JSON object of a request. A field that does not exist is an error, unless it is null."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if not self.ignores(name, value):
                raise PydanticCustomError(UNKNOWN_FIELD, "{rule}", self._unknown(name))
        return self

    @classmethod
    def ignores(cls, name: str, value: Any) -> bool:
        """Whether a field that the object does not have is ignored."""
        return value is None

    @classmethod
    def _unknown(cls, name: str) -> dict[str, str]:
        """What the error of an unknown field says."""
        name = name[:100]
        wanted = "structured_outputs" if name.startswith(_OLD_FORMS) else name
        near = suggest(wanted, cls.model_fields)
        hint = "" if near is None else f" Did you mean {near}?"
        return {"name": name, "rule": f"{neutral.refusal(name)}.{hint}"}


class Part(Body):
    """A JSON object within a request, such as a message. Its unknown fields are ignored."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    @classmethod
    def ignores(cls, name: str, value: Any) -> bool:
        """Return True, because a field that no template reads cannot change the answer."""
        return True


def _optional(number: Number) -> Any:
    """Return the type of a sampling parameter: the number within its bounds, or null."""
    bounds: dict[str, Any] = dict(number.bounds)
    if number.type is float:
        return Annotated[float | None, Field(**bounds)]
    whole: Any = Annotated[int, Field(**bounds), WHOLE]
    return whole | None


class StreamOptions(Body):
    """Options of a streamed answer: whether its last event, or each one, has the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: whether each event has the usage of its sample."
    )
    include_obfuscation: Literal[False] | None = None


_FIELDS: dict[str, Any] = {name: (_optional(number), None) for name, number in NUMBERS.items()}
_SamplingNumbers = create_model("_SamplingNumbers", __base__=Body, **_FIELDS)


def _add_neutral(schema: dict[str, Any]) -> None:
    # A field that a body has itself, such as the reasoning effort of chats, is not ignored there.
    schema["properties"] = neutral.schemas() | schema["properties"]
    schema["additionalProperties"] = {"type": "null"}


class StructuredOutputs(Body):
    """The form that a text must have: exactly one of the fields."""

    # Under these names pydantic has methods.
    json_schema_: str | dict[str, Any] | None = Field(
        None, alias="json", description="A JSON schema, as an object or as a text."
    )
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="A grammar of llguidance, a variant of Lark.")
    json_object: bool | None = None


class SamplingBody(_SamplingNumbers):
    """Fields that all endpoints take; null stands for the default of the model or the endpoint."""

    model_config = ConfigDict(json_schema_extra=_add_neutral)

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    n: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = Field(
        None, description="0 scores the prompt and draws nothing."
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    stop: Text | Items[Text] | None = None
    stop_token_ids: Items[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens, such as the one that starts every "
        "text; by default to texts, and not to chats, whose template has them.",
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
        None, description="Seconds after which the request ends, with the tokens generated by then."
    )
    explain: bool = Field(
        False,
        description="Whether the answer explains why the request waited or was preempted, and "
        "where its match in the prefix cache ended.",
    )

    @classmethod
    def ignores(cls, name: str, value: Any) -> bool:
        """Whether a field that the object does not have is ignored, as it asks for nothing."""
        return neutral.asks_for_nothing(name, value)


class GenerateBody(SamplingBody):
    """The body of `POST /generate`: `prompt` or `prompt_token_ids`, and sampling parameters."""

    prompt: Text | None = None
    prompt_token_ids: TokenIds | None = None
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None


class NamedSchema(Body):
    """A JSON schema and its name. Unless strict, parts that cannot be expressed are left out."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of an answer: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") is (self.json_schema is None):
            word = "without" if self.json_schema is None else "with"
            rule = "{type} {word} a json_schema says nothing"
            raise PydanticCustomError("response_format", rule, {"type": self.type, "word": word})
        return self


class OpenAiBody(SamplingBody):
    """Fields that both of OpenAI's endpoints take."""

    model: str | None = None
    prompt_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Most probable tokens to report at each position of the prompt."
    )
    use_beam_search: bool | None = Field(
        None, description="Whether the answer has the `n` most probable samples, found by beams."
    )
    length_penalty: Annotated[float | None, Field(ge=-10, le=10)] = Field(
        None, description="Of beam search: above 0 favours long samples, below 0 short ones."
    )
    return_token_ids: bool | None = Field(
        None, description="Whether the answer has the token ids of the prompt and of each sample."
    )
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # Fields that clients often send: accepted with the values that change nothing.
    metadata: dict[str, str] | None = None
    store: bool | None = Field(None, description="Ignored: answers are not stored.")
    service_tier: Literal["auto", "default"] | None = None


class CompletionBody(OpenAiBody):
    """The body of `POST /v1/completions`."""

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
        None, description="Samples to draw, of which the answer has the `n` most probable ones."
    )


class TextPart(Part):
    """A part of a message's content: a text."""

    type: Literal["text"]
    text: str


class RefusalPart(Part):
    """A part of a message's content: the model's refusal of an earlier request."""

    type: Literal["refusal"]
    refusal: str


class FunctionCall(Part):
    """A call that the model has made: the name of a function, and its arguments as JSON."""

    name: Text
    arguments: str | dict[str, Any] | None = None


class ToolCall(Part):
    """A call that the model has made, as an answer has it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(Part):
    """A function that the model may call: `parameters` is a JSON schema, a hint unless strict."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool that the model may use: a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: Text


class ToolChoice(Body):
    """The one function that the model is to call."""

    type: Literal["function"]
    function: FunctionName


class Message(Part):
    """A message of a chat; one with calls may have no content.

    The chat template gets all fields, so one that it does not read is ignored.
    """

    model_config = ConfigDict(
        json_schema_extra={"required": ["role", "content"], "additionalProperties": True}
    )

    role: Text
    content: str | Items[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    # The reasoning before the message. Clients use either name.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Fields of an answer's message, which clients send back as part of the chat.
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        said = self.tool_calls or self.refusal or self.reasoning_content or self.reasoning
        if "content" not in self.model_fields_set and not said:
            raise PydanticCustomError("content", "content or tool_calls must be given")
        return self


class TokenizeBody(Body):
    """The body of `POST /tokenize`: a text or a chat, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = Field(
        None, description="By default true for a text, and false for a chat."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether a chat ends with what opens an answer; by default true."
    )
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[Tool] | None = None
    return_token_strs: bool | None = None

    @classmethod
    def ignores(cls, name: str, value: Any) -> bool:
        """Whether a field that the object does not have is ignored, as it asks for nothing."""
        return neutral.asks_for_nothing(name, value)


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Items[TokenId]


class ChatBody(OpenAiBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    reasoning_effort: str | None = Field(
        None, description="A variable for the chat template; most templates do not read it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the model's chat template, such as enable_thinking."
    )
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
