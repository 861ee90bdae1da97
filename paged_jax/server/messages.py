"""The messages of a chat, as clients send them, for the model's chat template."""

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
    # A template may ask whether there is a name.
    named = {} if message.name is None else {"name": message.name}
    return message.model_dump(include={"role", "content"}) | named


def _num_chars(message: bodies.Message) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
