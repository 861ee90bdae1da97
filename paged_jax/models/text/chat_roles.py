"""Check that a chat template writes the role of each message; many leave out other roles."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_jax.models.text.chat_template import ChatTemplateError

_TEXT = "probed text"
_USER, _ASSISTANT = ({"role": role, "content": "Probe."} for role in ("user", "assistant"))
# Roles that are not checked: templates write them, or the server checks tools separately.
_PLAIN = ("user", "assistant", "tool")


class ChatRoles:
    """Roles that a chat template writes, found by rendering a known chat.

    Args:
      render: see `ChatTemplate.render`.

    Example:
      >>> roles = ChatRoles(lambda messages: messages[-1]["content"])
      >>> roles.checked([{"role": "user", "content": "Hi"}])
      [{'role': 'user', 'content': 'Hi'}]
    """

    def __init__(self, render: Callable[..., str]):
        self._render = render
        self._writes = functools.lru_cache(maxsize=32)(self._find)

    def checked(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages of a chat, none of which the template leaves out.

        OpenAI's role "developer" becomes "system" if the template does not know it.

        Args:
          messages: see `ChatTemplate.render`.

        Raises:
          ChatTemplateError: the template leaves out messages of a role.
        """
        return [self._checked(index, message) for index, message in enumerate(messages)]

    def _checked(self, index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role in _PLAIN:
            return message
        is_first = index == 0
        written = self._writes(role, is_first)
        if role == "developer" and not written and self._writes("system", is_first):
            return {**message, "role": "system"}
        if written is False:
            advice = "Use another role." if is_first else "Make it the first one, or use user."
            raise ChatTemplateError(
                "encode_chat",
                f"must be one that the model's chat template writes there, got {role[:100]!r}. "
                f"{advice}",
                f"messages.{index}.role",
            )
        return message

    def _find(self, role: str, is_first: bool) -> bool | None:
        """Return whether the template writes a message; None if it refuses the chat."""
        before = [] if is_first else [_USER, _ASSISTANT]
        try:
            text = self._render([*before, {"role": role, "content": _TEXT}, _USER])
        except ValueError:
            return None
        return _TEXT in text
