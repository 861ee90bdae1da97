"""The messages of a chat, as clients send them, for the model's chat template."""

import json
from collections.abc import Sequence
from typing import Any

from paged_jax.server import bodies


def as_messages(messages: Sequence[bodies.Message]) -> list[dict[str, Any]]:
    """The messages as `Tokenizer.encode_chat` takes them."""
    return [_as_message(message) for message in messages]


def num_chars(messages: Sequence[bodies.Message]) -> int:
    """Characters of all messages together."""
    return sum(map(_num_chars, messages))


def _as_message(message: bodies.Message) -> dict[str, Any]:
    # A template may ask whether there is a name, or a call.
    calls = [_as_call(call) for call in message.tool_calls or ()]
    fields: dict[str, Any] = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return message.model_dump(include={"role", "content"}) | given


def _as_call(call: bodies.ToolCall) -> dict[str, Any]:
    """A call as templates expect it, with its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = call.function.arguments  # cut short, as the model has written them
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _num_chars(message: bodies.Message) -> int:
    content = message.content or ""
    called = sum(len(call.function.arguments) for call in message.tool_calls or ())
    if isinstance(content, str):
        return called + len(content)
    return called + sum(len(part.text) for part in content)
