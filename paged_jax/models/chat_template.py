"""Chats as text: the Jinja templates that come with Hugging Face tokenizers."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox


class ChatTemplateError(ValueError):
    """There is no chat template, or it refuses these messages."""


class ChatTemplate:
    """A chat template, compiled in a sandbox: it comes from strangers.

    Args:
      source: the Jinja template.

    Raises:
      ChatTemplateError: the template is not valid Jinja.

    Example:
      >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n"
      ...                         "{% endfor %}{% if add_generation_prompt %}bot:{% endif %}")
      >>> print(template.render([{"role": "user", "content": "Hi"}]))
      user: Hi
      bot:
    """

    def __init__(self, source: str):
        # What a template may rely on, beside the variables: the settings and functions of
        # transformers.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"ChatTemplate: source must be valid Jinja: {error}.") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Write a chat as the text that the model was trained to continue.

        Args:
          messages: each with ``"role"`` and most often ``"content"``, oldest first.
          add_generation_prompt: end with what opens an answer.
          **variables: others that the template reads.

        Raises:
          ChatTemplateError: the messages are malformed, or the template refuses them.
        """
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ChatTemplateError(
                    f"apply_chat_template: each message must have a role, got {message!r}."
                )
        variables = {"tools": None, "documents": None, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            )
        # Beside its own errors, a template raises whatever its expressions do.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ChatTemplateError(
                f"apply_chat_template: the model's template refuses the messages: {reason}"
            ) from None


class _Generation(ext.Extension):
    """``{% generation %}``, which marks what the model says, for training; here it is text."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
