"""Chats as text: the Jinja templates that come with Hugging Face tokenizers."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from paged_jax.checks import ArgumentError

# What a caller may not set as a variable of the template.
_RESERVED_VARIABLES = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "documents",
        "messages", "raise_exception", "return_dict", "return_tensors", "self", "strftime_now",
        "tokenize", "tools", "bos_token", "eos_token", "unk_token", "pad_token",
    )
)  # fmt: skip


class ChatTemplateError(ArgumentError):
    """There is no chat template, or it refuses these messages."""


class ChatTemplate:
    """A chat template, compiled in a sandbox, as its source is not trusted.

    Args:
      source: the Jinja template.
      tool_source: the one for chats with tools, where the model has another for them.

    Attributes:
      source: the same.
      tool_source: the same, or `source`.

    Raises:
      ChatTemplateError: the template is not valid Jinja.

    Example:
      >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n"
      ...                         "{% endfor %}{% if add_generation_prompt %}bot:{% endif %}")
      >>> print(template.render([{"role": "user", "content": "Hi"}]))
      user: Hi
      bot:
    """

    def __init__(self, source: str, tool_source: str | None = None):
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
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
            self._tool_template = environment.from_string(self.tool_source)
        except jinja2.TemplateError as error:
            rule = f"must be valid Jinja: {error}."
            raise ChatTemplateError("ChatTemplate", rule, "source") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Write a chat as the text that the model was trained to continue.

        Args:
          messages: dicts with ``"role"`` and most often ``"content"``, oldest first. The content is
            a text, a list of parts such as ``{"type": "text", "text": "Hi"}``, or None for none.
          add_generation_prompt: end with what opens an answer.
          **variables: further variables of the template.

        Raises:
          ChatTemplateError: the messages are malformed, or the template refuses them.
        """
        messages = [_with_reasoning(_with_text(message)) for message in messages]
        variables = {"tools": None, "documents": None, **variables}
        template = self._tool_template if variables["tools"] else self._template
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        # Beside its own errors, a template raises whatever its expressions do.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ChatTemplateError(
                "apply_chat_template", f"the model's template refuses the messages: {reason}"
            ) from None


def read_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The chat template of a model, and the one for tools; None for what it has not.

    They lie in ``chat_template.jinja`` and ``additional_chat_templates/tool_use.jinja``, or in
    ``tokenizer_config.json``, as one or several by name, of which ``"tool_use"`` is for tools.

    Args:
      folder: the folder of the model.
      config: the content of its ``tokenizer_config.json``.
    """
    template = config.get("chat_template")
    named = {"default": template}
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, Mapping)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    files = {
        "default": "chat_template.jinja",
        "tool_use": "additional_chat_templates/tool_use.jinja",
    }
    for name, file in files.items():
        if (folder / file).is_file():
            named[name] = (folder / file).read_text(encoding="utf-8")
    default, tool_use = (
        source if isinstance(source, str) else None for source in map(named.get, files)
    )
    return default, tool_use


def check_variables(variables: Any) -> Mapping[str, Any]:
    """The variables that a caller sets, of whom some are not the caller's to set.

    Raises:
      ChatTemplateError: they are no dict, or one has a reserved name.
    """
    if variables is None:
        return {}
    function, field = "encode_chat", "chat_template_kwargs"
    if not isinstance(variables, Mapping):
        raise ChatTemplateError(function, f"must be a dict, got {variables!r}.", field)
    for name in variables:
        if not isinstance(name, str) or name in _RESERVED_VARIABLES:
            rule = f"must have names of the template's own variables, got {name!r}."
            raise ChatTemplateError(function, rule, field)
    return variables


def _with_text(message: Any) -> Mapping[str, Any]:
    """The message with one text for content, as templates of text models expect it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(
            "apply_chat_template",
            f'each message must be a dict such as {{"role": "user", "content": TEXT}}, got '
            f"{message!r}.",
        )
    content = message.get("content", "")
    if isinstance(content, str):
        return message
    parts = [] if content is None else content
    if not isinstance(parts, list | tuple):
        raise ChatTemplateError(
            "apply_chat_template",
            f"must be a text or a list of parts, got {content!r}.",
            "content",
        )
    return {**message, "content": "".join(map(_text_of, parts))}


# What models of different times call the thoughts before a message; templates read one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its thoughts, if it has any, by the names that templates have for them."""
    given = next((message[key] for key in _REASONING if message.get(key)), None)
    if given is None:
        return message
    return {"thinking": given, **message, "reasoning_content": given}


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    text = part["text"] if kind == "text" and "text" in part else None
    if not isinstance(text, str):
        raise ChatTemplateError(
            "apply_chat_template",
            'each part of content must be {"type": "text", "text": TEXT}, got '
            f"{'one without a text' if kind == 'text' else repr(kind)}.",
        )
    return text


class _Generation(ext.Extension):
    """``{% generation %}``, which marks what the model says, for training; here it is text."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML. The order of the arguments is that of transformers.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
