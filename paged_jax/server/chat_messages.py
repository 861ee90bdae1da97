"""Messages and tools of a request, in the form that chat templates take."""

from collections.abc import Sequence
from typing import Any

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.server import bodies
from paged_jax.server.responses import ApiError


def template_messages(messages: Sequence[bodies.MessageParam]) -> list[dict[str, Any]]:
    """Return messages as `Tokenizer.encode_chat` accepts them."""
    return [_template_message(message) for message in messages]


def template_variables(body: bodies.ChatBody | bodies.TokenizeBody) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template."""
    given: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        given["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":
        given["enable_thinking"] = False
    return {**given, **(body.chat_template_kwargs or {})}


def num_chars(messages: Sequence[bodies.MessageParam]) -> int:
    """Return the number of characters of all messages together."""
    count = 0
    for message in messages:
        calls = [call.function.arguments for call in message.tool_calls or ()]
        content = _content(message) or message.refusal or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        count += sum(len(text) for text in (*calls, *parts) if isinstance(text, str))
    return count


def _template_message(message: bodies.MessageParam) -> dict[str, Any]:
    # All fields are kept, because a template may read any of them.
    fields: dict[str, Any] = {
        **(message.model_extra or {}),
        "role": message.role,
        "content": _content(message),
        "refusal": message.refusal,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [_template_call(call) for call in message.tool_calls or ()] or None,
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _content(message: bodies.MessageParam) -> str | list[dict[str, Any]] | None:
    """Return the content of a message. Only the text of its parts is kept."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    parts = message.content
    texts = [part.text if isinstance(part, bodies.TextPart) else part.refusal for part in parts]
    return [{"type": "text", "text": text} for text in texts]


def _template_call(call: bodies.ToolCallParam) -> dict[str, Any]:
    """Return a tool call without the extra fields that clients add."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    given = {} if call.id is None else {"id": call.id}
    return {**given, "type": call.type, "function": function}


def template_tools(tools: Sequence[bodies.ToolParam], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return tools as `Tokenizer.encode_chat` accepts them.

    Raises:
      ApiError: the model's chat template has no tools, or an unknown format of calls.
    """
    if tools and tokenizer.tool_format is None:
        shows = tokenizer.tool_support.shows_tools
        reason = "tool format is not supported" if shows else "chat template has no tools"
        raise ApiError(400, f"tools must be null or empty, as the model's {reason}.", param="tools")
    return [tool.model_dump(exclude_none=True, include={"type", "function"}) for tool in tools]


def check_calls(messages: Sequence[bodies.MessageParam], tokenizer: Tokenizer) -> None:
    """Check that the model sees the tool calls in a chat.

    Raises:
      ApiError: the chat contains calls, but the model's chat template leaves them out.
    """
    for index, message in enumerate(messages):
        if message.tool_calls and not tokenizer.tool_support.writes_calls:
            param = f"messages.{index}.tool_calls"
            reason = "as the model's chat template leaves calls out"
            raise ApiError(400, f"{param} must be null or empty, {reason}.", param=param)
