"""Request body of ``POST /v1/messages``, and its conversion to a chat completion body."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.server import bodies
from paged_jax.server.api_error import ApiError
from paged_jax.server.json_encoding import JsonDict
from paged_jax.server.response_bodies import (
    kind_of,
    result_text,
    string_of,
    validated_chat,
    with_system_text,
)
from paged_jax.server.sampling_body import (
    WHOLE,
    Items,
    LenientBody,
    SamplingBody,
    TemplateFields,
    Text,
)

# System blocks that begin with this text are dropped: they differ in each request, so nothing after
# them could be found in the prefix cache.
_BILLING = "x-anthropic-billing-header:"


class OutputFormat(LenientBody):
    """Required format of the text: JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientBody):
    """Options of the output: the format of the text, and the reasoning effort."""

    format: OutputFormat | None = None
    effort: str | None = None


class ThinkingConfig(LenientBody):
    """Options of the reasoning: whether there is any, and whether the response has its text."""

    type: str
    display: Literal["summarized", "omitted"] | None = None


class CountTokensBody(TemplateFields):
    """Body of `POST /v1/messages/count_tokens`; `MessagesBody` has these fields as well."""

    model: str | None = Field(None, description="Name of the served model.")
    messages: Annotated[Items[dict[str, Any]], Field(min_length=1)] = Field(description="The chat.")
    system: str | Items[dict[str, Any]] | None = Field(None, description="The system message.")
    tools: Items[dict[str, Any]] | None = Field(
        None, description="Functions. Tools of other types are skipped."
    )
    tool_choice: dict[str, Any] | None = Field(
        None,
        description="Whether the model may call functions, must call one, or which one it must "
        "call.",
    )
    thinking: ThinkingConfig | None = Field(
        None, description="Whether the model reasons before it answers."
    )
    output_config: OutputConfig | None = Field(
        None, description="The format of the text, and the effort of the reasoning."
    )
    output_format: OutputFormat | None = Field(
        None, description="An older name of `output_config.format`."
    )
    # Fields below are accepted and have no effect on this server.
    cache_control: dict[str, Any] | None = Field(
        None, description="Ignored: the prefix cache needs no marks."
    )
    context_management: dict[str, Any] | None = Field(None, description="Ignored.")
    metadata: dict[str, Any] | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")
    speed: str | None = Field(None, description="Ignored.")
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Must be null or empty."
    )
    container: None = Field(None, description="Must be null.")

    @property
    def format(self) -> OutputFormat | None:
        """Required format, from `output_config.format` or else `output_format`; None if not set."""
        config = self.output_config
        return self.output_format if config is None or config.format is None else config.format


class MessagesBody(CountTokensBody, SamplingBody):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] = Field(  # type: ignore[assignment]
        description="Maximum number of tokens to generate."
    )
    stop_sequences: Items[Text] | None = Field(None, description="Texts that end the output.")
    n: Literal[1] | None = Field(None, description="Must be null or 1.")
    # Fields below are accepted and have no effect on this server.
    inference_geo: str | None = Field(None, description="Ignored.")
    diagnostics: Any = Field(None, description="Ignored.")
    thread: None = Field(None, description="Must be null: messages are not stored.")


def chat_of_messages(body: CountTokensBody, tokenizer: Tokenizer | None) -> bodies.ChatBody:
    """Convert a body to a body of ``POST /v1/chat/completions``.

    Raises:
      ApiError: a message has blocks that are not supported, such as images, or the tools are
        invalid.
    """
    messages = [
        chat_message
        for index, message in enumerate(body.messages)
        for chat_message in _messages(message, index)
    ]
    config, thinking = body.output_config, body.thinking
    variables: JsonDict = {}
    if thinking is not None:
        variables["enable_thinking"] = thinking.type != "disabled"
    choice, is_parallel = _tool_choice(body.tool_choice or {})
    last = messages[-1] if messages else {}
    is_continued = last.get("role") == "assistant" and not last.get("tool_calls")
    tools = [_tool(tool) for tool in body.tools or () if tool.get("type") in (None, "custom")]
    return validated_chat(
        {
            "messages": with_system_text(_system(body.system), _joined(messages), tokenizer),
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": is_parallel,
            "continue_final_message": is_continued,
            "add_generation_prompt": not is_continued,
            "chat_template_kwargs": {**variables, **(body.chat_template_kwargs or {})} or None,
        },
        body,
        "messages",
        None if config is None else config.effort,
    )


def _system(system: str | list[dict[str, Any]] | None) -> str | None:
    if not isinstance(system, list):
        return system
    texts = []
    for index, block in enumerate(system):
        path = f"system.{index}"
        if block.get("type") != "text":
            raise ApiError(400, f"{path}.type must be text.", param=path)
        texts.append(string_of(block, "text", path))
    return "\n".join(text for text in texts if not text.startswith(_BILLING)) or None


def _messages(message: Mapping[str, Any], index: int) -> Iterator[JsonDict]:
    """Convert a message of the request to messages of a chat completion body.

    Each tool result becomes a message with the role ``tool``. All other blocks are joined into one
    message.
    """
    role, content = message.get("role"), message.get("content")
    path = f"messages.{index}.content"
    if role not in ("user", "assistant", "system"):
        raise ApiError(
            400, f"messages.{index}.role must be user or assistant, got {role!r}.",
            param=f"messages.{index}.role",
        )  # fmt: skip
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise ApiError(400, f"{path} must be a text or a list of blocks.", param=path)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonDict] = []
    for number, block in enumerate(content):
        block_path = f"{path}.{number}"
        kind = kind_of(block, block_path)
        if kind == "text":
            texts.append(string_of(block, "text", block_path))
        elif kind == "thinking":
            thoughts.append(string_of(block, "thinking", block_path))
        elif kind == "tool_use":
            name = string_of(block, "name", block_path)
            function = {"name": name, "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _result(block, block_path),
            }
    fields: JsonDict = {"role": role, "content": "".join(texts)}
    if thoughts:
        fields["reasoning_content"] = "".join(thoughts)
    if calls:
        fields["tool_calls"] = calls
    if texts or thoughts or calls:
        yield fields


def _result(block: Mapping[str, Any], path: str) -> str:
    """Return the text of a tool result, which begins with "Error: " if the tool failed."""
    content = result_text(block.get("content"), f"{path}.content")
    return f"Error: {content}" if block.get("is_error") else content


def _joined(messages: list[JsonDict]) -> list[JsonDict]:
    """Join consecutive messages of the same role. Return the resulting messages.

    Messages with other fields, such as tool calls, are not joined.
    """
    merged: list[JsonDict] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if message.keys() == last.keys() == {"role", "content"} and last["role"] == message["role"]:
            merged[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _tool(tool: JsonDict) -> JsonDict:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: JsonDict) -> tuple[Any, bool | None]:
    """Convert `tool_choice` to OpenAI's ``tool_choice`` and ``parallel_tool_calls``.

    Raises:
      ApiError: the type of the choice is unknown.
    """
    kind = choice.get("type", "auto")
    choices: JsonDict = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if kind not in choices:
        raise ApiError(
            400, f"tool_choice must be auto, any, tool or none, got {kind!r}.", param="tool_choice"
        )
    return choices[kind], False if choice.get("disable_parallel_tool_use") else None
