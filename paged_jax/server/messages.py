"""The messages of a chat, as clients send them, for the model's chat template."""

from collections.abc import Sequence
from typing import Any

from paged_jax.server import bodies


def as_messages(messages: Sequence[bodies.Message]) -> list[dict[str, Any]]:
    """The messages as `Tokenizer.encode_chat` takes them."""
    return [_as_message(message) for message in messages]


def template_variables(body: bodies.ChatBody | bodies.TokenizeBody) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template."""
    given = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**given, **(body.chat_template_kwargs or {})}


def num_chars(messages: Sequence[bodies.Message]) -> int:
    """Characters of all messages together."""
    return sum(map(_num_chars, messages))


def _as_message(message: bodies.Message) -> dict[str, Any]:
    # All fields, as a template may read any of them.
    fields: dict[str, Any] = {
        **(message.model_extra or {}),
        "role": message.role,
        "content": _content(message),
        "refusal": message.refusal,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [_as_call(call) for call in message.tool_calls or ()] or None,
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _content(message: bodies.Message) -> str | list[dict[str, Any]] | None:
    """Return the content; its parts keep only their text."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    parts = message.content
    texts = [part.text if isinstance(part, bodies.TextPart) else part.refusal for part in parts]
    return [{"type": "text", "text": text} for text in texts]


def _as_call(call: bodies.ToolCall) -> dict[str, Any]:
    """Return a call without the fields that clients add to it."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    given = {} if call.id is None else {"id": call.id}
    return {**given, "type": call.type, "function": function}


def _num_chars(message: bodies.Message) -> int:
    called = [call.function.arguments for call in message.tool_calls or ()]
    count = sum(len(arguments) for arguments in called if isinstance(arguments, str))
    content = _content(message) or message.refusal or ""
    if isinstance(content, str):
        return count + len(content)
    return count + sum(len(part["text"]) for part in content)
