"""Pydantic models of request bodies: completions, chats, `/generate` and `/tokenize`.

Their schemas are part of /openapi.json, and the tables in docs/http-fields.md are made from them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paged_jax.server.limits import MAX_PROMPTS
from paged_jax.server.sampling_body import (
    WHOLE,
    Body,
    Items,
    LenientBody,
    SamplingBody,
    StreamOptions,
    TemplateFields,
    Text,
    TokenId,
    TokenIds,
    is_neutral,
)


class GenerateBody(SamplingBody):
    """Body of `POST /generate`: `prompt` or `prompt_token_ids`, and sampling parameters."""

    prompt: Text | None = Field(None, description="The prompt, as text.")
    prompt_token_ids: TokenIds | None = Field(None, description="The prompt, as token ids.")
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Number of most probable tokens to report with each token."
    )
    prompt_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Number of most probable tokens to report at each prompt position."
    )


class NamedSchema(LenientBody):
    """A named JSON schema. Unsupported keywords are errors only if `strict` is true."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Required format of the text: any text, a JSON object, or JSON that matches a schema.

    With the type `json_object`, a schema may be given too: in `schema`, as for llama.cpp, or in
    `value`, as huggingface_hub's client does.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    value: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") is (self.json_schema is None):
            rule = "json_schema must be given if and only if type is json_schema"
            raise PydanticCustomError("response_format", rule)
        if (self.schema_, self.value) != (None, None) and self.type != "json_object":
            rule = "schema and value must be null unless type is json_object"
            raise PydanticCustomError("response_format", rule)
        if self.schema_ is not None and self.value is not None:
            rule = "only one of schema and value may be given"
            raise PydanticCustomError("response_format", rule)
        return self


class OpenAiBody(SamplingBody):
    """Fields that the bodies of `/v1/completions` and `/v1/chat/completions` have in common."""

    model: str | None = Field(
        None,
        description="Name of the model, as `/v1/models` lists it. If it is given, it must be the "
        "served model.",
    )
    prompt_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Number of most probable tokens to report at each prompt position."
    )
    use_beam_search: bool | None = Field(
        None,
        description="Whether to find the `n` most probable samples (at most 10) with beam search, "
        "while other requests continue. Sampling fields and `stop` are then errors.",
    )
    length_penalty: Annotated[float | None, Field(ge=-10, le=10)] = Field(
        None,
        description="For beam search: positive values favour long samples, negative values favour "
        "short samples.",
    )
    return_token_ids: bool | None = Field(
        None, description="Whether to return the token ids of the prompt and of each sample."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), WHOLE] | None = Field(
        None,
        description="Keep only this number of tokens at the end of each prompt; -1 keeps as many "
        "as fit into the context.",
    )
    stream_options: StreamOptions | None = Field(
        None, description="Options of the stream: `include_usage` and `continuous_usage_stats`."
    )
    user: str | None = Field(None, description="Ignored.")
    response_format: ResponseFormat | None = Field(
        None, description="Format of the text: `json_object`, or `json_schema` with a schema."
    )
    # Fields that clients often send. They are accepted, and have no effect.
    metadata: dict[str, str] | None = Field(None, description="Ignored.")
    store: bool | None = Field(None, description="Ignored: responses are not stored.")
    service_tier: str | None = Field(None, description="Ignored.")


class CompletionBody(OpenAiBody):
    """Body of `POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[Items[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[Items[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description="One or several prompts, as texts or token ids.")
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Number of most probable tokens to report with each token."
    )
    echo: bool | None = Field(
        None,
        description="Whether the text begins with the prompt. With `logprobs`, the "
        "log-probabilities then include those of the prompt.",
    )
    suffix: Literal[""] | None = Field(None, description="Must be null or empty.")
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        None,
        description="Number of samples to draw; the `n` samples with the highest mean "
        "log-probability are returned.",
    )


# Types of content parts that are text, in all APIs.
_TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")


def as_text_parts(parts: list[Any]) -> list[Any]:
    """Replace each part of a tool's result that is not text, such as an image, by a line of text.

    An error would end an agent's session: each later request contains the same result.

    Example:
      >>> as_text_parts([{"type": "image", "source": {}}])
      [{'type': 'text', 'text': '[image omitted: this model reads only text]'}]
    """
    return [
        {"type": "text", "text": f"[{part['type'][:40]} omitted: this model reads only text]"}
        if isinstance(part, Mapping)
        and isinstance(part.get("type"), str)
        and part["type"] not in _TEXT_TYPES
        else part
        for part in parts
    ]


class TextPart(LenientBody):
    """A text in the content of a message. The types of `/v1/responses` are accepted too."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(LenientBody):
    """A refusal in the content of an earlier message of the assistant."""

    type: Literal["refusal"]
    refusal: str


class FunctionCallParam(LenientBody):
    """Name and JSON arguments of the function in an earlier tool call."""

    name: Text
    arguments: str | dict[str, Any] | None = None


class ToolCallParam(LenientBody):
    """A tool call of an earlier response, which the client sends as part of the conversation."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCallParam


class FunctionParam(LenientBody):
    """A function that the model may call. `parameters` is the JSON schema of its arguments.

    Unsupported keywords of the schema are errors only if `strict` is true.
    """

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(LenientBody):
    """A tool that the model may call. Only functions are supported."""

    type: Literal["function"]
    function: FunctionParam

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "function") != "function":
            kind = str(value["type"])[:100]
            rule = 'type must be "function", as this server has no other tools, got {kind}'
            raise PydanticCustomError("tool_type", rule, {"kind": kind})
        return value


class FunctionName(Body):
    """The name of a function."""

    name: Text


class ToolChoice(Body):
    """The function that the model must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Functions that the model may call (mode `auto`) or must call (mode `required`)."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[ToolChoice], Field(min_length=1)]


class AllowedToolChoice(Body):
    """Restriction of tool calls to some of the request's tools.

    The prompt still contains all tools, so that requests with different restrictions have the same
    prefix, which can be cached.
    """

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class MessageParam(LenientBody):
    """A message of a chat. All fields are passed to the chat template, also unknown ones.

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
    # Reasoning that precedes the content. Some clients send it as `reasoning_content`, others as
    # `reasoning`.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # These fields are null in messages of responses, and clients send such messages back.
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _has_results_of_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("role") in ("tool", "function"):
            if isinstance(value.get("content"), list):
                return {**value, "content": as_text_parts(value["content"])}
        return value

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        extra_content = self.tool_calls or self.refusal or self.reasoning_content or self.reasoning
        if "content" not in self.model_fields_set and not extra_content:
            raise PydanticCustomError(
                "content",
                "content must be given, unless there are tool_calls, a refusal or reasoning",
            )
        return self


class TokenizeBody(TemplateFields):
    """Body of `POST /tokenize`, as in vLLM: a text in `prompt`, or a chat in `messages`."""

    model: str | None = Field(None, description="Name of the served model.")
    prompt: str | None = Field(None, description="A text; either this or `messages`.")
    messages: Annotated[Items[MessageParam] | None, Field(min_length=1)] = Field(
        None, description="A chat; either this or `prompt`."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether to append the start of the next message; by default true."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Whether the last message is continued. Requires add_generation_prompt to be "
        "false.",
    )
    tools: Items[ToolParam] | None = Field(
        None, description="Functions that the template shows to the model."
    )
    return_token_strs: bool | None = Field(
        None, description="Whether to return the text of each token too."
    )

    ignores = staticmethod(is_neutral)


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = Field(None, description="Name of the served model.")
    tokens: Items[TokenId] = Field(description="The token ids.")


class ChatBody(OpenAiBody, TemplateFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[Items[MessageParam], Field(min_length=1)] = Field(
        description="The chat. Each message has a `role` and a `content`, or tool calls."
    )
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = Field(
        None, description="The same as `max_tokens`."
    )
    logprobs: bool | None = Field(
        None, description="Whether to report log-probabilities of the generated tokens."
    )
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Number of most probable tokens to report with each token."
    )
    tools: Items[ToolParam] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolChoice | None = (
        Field(
            None,
            description="Whether the model may call functions, must call one, or must call a named "
            "function. `allowed_tools` limits the functions.",
        )
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; by default true."
    )
    modalities: list[Literal["text"]] | None = Field(
        None, description='Must be null or `["text"]`.'
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether to append the start of the next message; by default true."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Whether the answer continues the last message, which is the assistant's. "
        "Requires add_generation_prompt to be false.",
    )
    include_reasoning: bool | None = Field(
        None, description="Whether responses contain the reasoning; by default true."
    )
    separate_reasoning: bool | None = Field(
        None, description="If false, the reasoning remains a part of the content."
    )
