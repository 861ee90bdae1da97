"""Chat templates of Hugging Face tokenizers, which convert a chat to text for the model."""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from paged_jax.arguments import ArgumentError

# Names of template variables that callers must not set themselves.
_RESERVED_VARIABLES = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "documents",
        "messages", "raise_exception", "return_dict", "return_tensors", "self", "strftime_now",
        "tokenize", "tools", "bos_token", "eos_token", "unk_token", "pad_token",
    )
)  # fmt: skip
# Texts in the messages that are rendered to find out how a template works. They are so unusual that
# no template contains them.
_PROBE = "which form of content"
_ROLE_PROBE = "probed text"
# Marker that is put at the end of a message to be continued, and cut off after rendering. It
# prevents templates from trimming the end of the message.
_CUT = "\N{SNOWMAN}cut here\N{SNOWMAN}"
_USER, _ASSISTANT = ({"role": role, "content": "Probe."} for role in ("user", "assistant"))
# Length that Mistral's chat templates require for tool-call ids.
CALL_ID_LENGTH = 9
# Roles that `with_known_roles` does not check. All templates support the roles user and assistant.
# `tool_support` checks the role tool.
_PLAIN_ROLES = ("user", "assistant", "tool")


class ChatTemplateError(ArgumentError):
    """Error for a model without a chat template, or for messages that the template rejects."""


class ChatTemplate:
    r"""A chat template, compiled in a sandbox because its source is not trusted.

    Args:
      source: the Jinja template.
      tool_source: the template for chats with tools; by default `source`.
      special_tokens: special tokens by name, which templates use as variables.

    Attributes:
      source: the Jinja template.
      tool_source: the template for chats with tools.

    Raises:
      ChatTemplateError: the template is not valid Jinja.

    Example:
      >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
      ...                         "{% endfor %}{% if add_generation_prompt %}bot:{% endif %}")
      >>> print(template.render([{"role": "user", "content": "Hi"}]))
      user: Hi
      bot:
    """

    def __init__(
        self,
        source: str,
        tool_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._special_tokens = special_tokens or {}
        self._writes_role = functools.lru_cache(maxsize=32)(self._find_role)
        # Set up Jinja as transformers does, because templates rely on these settings and functions.
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
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """Convert a chat to text, in the format on which the model was trained.

        Args:
          messages: messages of the chat, oldest first. Each is a dict with ``"role"`` and usually
            ``"content"``, or a pydantic object, such as a message from the openai client. The
            content is a string, or a list of parts such as ``{"type": "text", "text": "Hi"}``.
            Fields that are None are omitted. The arguments of a tool call may be an object or JSON
            text.
          add_generation_prompt: whether to end the text with the beginning of an assistant message.
          continue_final_message: whether to end the text with the content of the last message, so
            that the model continues it. The last message must have the role assistant.
          **variables: other variables of the template, such as `tools`. In tools, fields that are
            None are omitted.

        Raises:
          ChatTemplateError: the messages are malformed, or the template rejects them.
        """
        chat = [_as_templates_expect(message, self._takes_parts) for message in messages]
        if continue_final_message:
            _check_continuation(chat, add_generation_prompt)
            chat[-1] = _with_mark(chat[-1])
            text = self.render(
                chat, add_generation_prompt=False, continue_final_message=False, **variables
            )
            before, mark, _ = text.rpartition(_CUT)
            if not mark:
                rule = "the model's template does not write the content of the last message"
                raise ChatTemplateError("apply_chat_template", rule)
            return before
        tools = [_without_nulls(tool) for tool in as_data(variables.get("tools") or ())] or None
        variables = {"documents": None, **self._special_tokens, **variables, "tools": tools}
        variables["add_generation_prompt"] = add_generation_prompt
        template = self._tool_template if tools else self._template
        try:
            return template.render(messages=chat, **variables)
        # Expressions in templates may raise any type of exception, so catch all of them.
        except Exception as error:
            reason = " ".join(str(error).split())
        # Try again with changes that some templates need. Some templates concatenate the content of
        # every message, so no content must be missing. Others require tool-call ids of exactly nine
        # letters or digits.
        for change in (_with_contents, _with_short_ids):
            changed = change(chat)
            if changed != chat:
                chat = changed
                with contextlib.suppress(Exception):
                    return template.render(messages=chat, **variables)
        rule = f"the model's template rejects the messages: {reason}"
        raise ChatTemplateError("apply_chat_template", rule)

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template requires a message's content to be a list of parts."""
        return not self._writes(_PROBE) and self._writes([{"type": "text", "text": _PROBE}])

    def _writes(self, content: object) -> bool:
        messages = [{"role": "user", "content": content}]
        with contextlib.suppress(Exception):
            text = self._template.render(messages=messages, add_generation_prompt=True)
            return _PROBE in text.lower()
        return False

    def with_known_roles(
        self, messages: Sequence[Mapping[str, object]]
    ) -> list[Mapping[str, object]]:
        """Check that the template supports the role of each message, and return the messages.

        Many templates silently omit messages with unknown roles. If the template does not know
        OpenAI's role "developer", the role is changed to "system".

        Args:
          messages: see `render`.

        Raises:
          ChatTemplateError: the template would omit a message because of its role.

        Example:
          >>> template = ChatTemplate("{{ messages[-1].content }}")
          >>> template.with_known_roles([{"role": "user", "content": "Hi"}])
          [{'role': 'user', 'content': 'Hi'}]
        """
        return [self._with_known_role(index, message) for index, message in enumerate(messages)]

    def _with_known_role(self, index: int, message: Mapping[str, object]) -> Mapping[str, object]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role in _PLAIN_ROLES:
            return message
        is_first = index == 0
        written = self._writes_role(role, is_first)
        if role == "developer" and not written and self._writes_role("system", is_first):
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

    def _find_role(self, role: str, is_first: bool) -> bool | None:
        """Return whether the template writes messages with this role; None if rendering fails."""
        before = [] if is_first else [_USER, _ASSISTANT]
        try:
            text = self.render([*before, {"role": role, "content": _ROLE_PROBE}, _USER])
        except ValueError:
            return None
        return _ROLE_PROBE in text


def read_templates(folder: Path, config: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return a model's chat template, and its template for chats with tools; None if missing.

    If the files ``chat_template.jinja`` and ``additional_chat_templates/tool_use.jinja`` exist,
    they contain the templates. Otherwise, ``tokenizer_config.json`` contains a single template, or
    several templates by name. ``"tool_use"`` is the template for tools.

    Args:
      folder: the folder of the model.
      config: the content of its ``tokenizer_config.json``.
    """
    template = config.get("chat_template")
    named: dict[Any, Any] = {"default": template}
    if isinstance(template, Mapping):
        named = dict(template)
    elif isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, Mapping)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    files = {
        "default": "chat_template.jinja",
        "tool_use": "additional_chat_templates/tool_use.jinja",
    }
    if (folder / files["default"]).is_file():
        named = {}  # the file replaces all templates of tokenizer_config.json
    for name, file in files.items():
        if (folder / file).is_file():
            named[name] = (folder / file).read_text(encoding="utf-8")
    default, tool_use = (
        source if isinstance(source, str) else None for source in map(named.get, files)
    )
    return default, tool_use


def check_variables(variables: object) -> Mapping[str, object]:
    """Check the template variables that a caller passes, and return them.

    Raises:
      ChatTemplateError: the variables are not a dict, or a name is reserved.
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


class _Arguments(dict[str, Any]):
    """Arguments of a tool call: a dict that becomes its JSON text when it is added to a string.

    Most templates expect an object. Other templates concatenate strings and the arguments with
    ``+``. For them, the dict is replaced by the original JSON text.
    """

    def __init__(self, arguments: Mapping[str, object], text: str):
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _as_templates_expect(original: Any, takes_parts: bool) -> dict[str, Any]:
    """Convert a message to the form that templates expect: a dict without None values.

    Its content becomes a single string, or a list of text parts if `takes_parts` is True.
    """
    message = as_data(original)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(
            "apply_chat_template",
            f'each message must be a dict such as {{"role": "user", "content": TEXT}}, got '
            f"{original!r}.",
        )
    message = {key: value for key, value in message.items() if value is not None}
    if not message.get("tool_calls", True):
        del message["tool_calls"]  # clients send an empty list if there are no calls
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    texts = _texts_of(message["content"]) if "content" in message else []
    if not any(texts) and isinstance(refusal := message.get("refusal"), str):
        texts = [refusal]
    if takes_parts and texts:
        message["content"] = [{"type": "text", "text": text} for text in texts]
    elif texts or "content" in message:
        message["content"] = "".join(texts)
    return _with_reasoning(message)


def _with_contents(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, and set missing contents to an empty string."""
    return [{"content": "", **message} for message in chat]


def _with_short_ids(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages after replacing tool-call ids by ids of nine letters or digits.

    Ids in tool results are replaced as well. An id is always replaced by the same short id, so that
    the beginning of the text does not change when the chat continues.
    """

    def shorten(item: Any, key: str) -> Any:
        if not isinstance(item, Mapping) or not isinstance(call_id := item.get(key), str):
            return item
        if len(call_id) == CALL_ID_LENGTH and call_id.isalnum() and call_id.isascii():
            return item
        digest = hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()
        return {**item, key: digest[:CALL_ID_LENGTH]}

    changed = []
    for message in chat:
        message = dict(shorten(message, "tool_call_id"))
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [shorten(call, "id") for call in calls]
        changed.append(message)
    return changed


def _check_continuation(chat: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> None:
    """Check that the last message of a chat can be continued."""
    function, field = "apply_chat_template", "continue_final_message"
    if add_generation_prompt:
        rule = "must be false unless add_generation_prompt is false."
        raise ChatTemplateError(function, rule, field)
    last = chat[-1] if chat else {}
    if last.get("role") != "assistant" or last.get("tool_calls") or not last.get("content"):
        rule = "must be false unless the last message is text of the assistant, without calls."
        raise ChatTemplateError(function, rule, field)


def _with_mark(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the marker `_CUT` at the end of its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CUT}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + _CUT}]}


def as_data(value: Any) -> Any:
    """Convert mappings, tuples, dataclasses and pydantic objects to dicts and lists.

    Example:
      >>> as_data(({"a": (1, 2)},))
      [{'a': [1, 2]}]
    """
    if callable(dump := getattr(value, "model_dump", None)):
        value = dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: as_data(entry) for key, entry in value.items()}
    return [as_data(element) for element in value] if isinstance(value, list | tuple) else value


def _without_nulls(tool: Any) -> Any:
    """Return a tool without the fields that are None, in the tool itself and in its function."""
    if not isinstance(tool, dict):
        return tool
    fields = {key: value for key, value in tool.items() if value is not None}
    return (
        {**fields, "function": _without_nulls(fields["function"])}
        if "function" in fields
        else fields
    )


def _with_arguments(call: Any) -> Any:
    """Parse the arguments of a tool call from JSON text, if possible, and return the call."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    if "arguments" not in call:
        return call
    arguments = call["arguments"]
    if arguments is None or arguments == "":
        return {**call, "arguments": {}}
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None  # invalid JSON, because the answer was cut short
    return (
        {**call, "arguments": _Arguments(parsed, arguments)} if isinstance(parsed, dict) else call
    )


# Fields of a message that may contain the model's reasoning, which precedes the message's text.
# Each template reads only one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning in ``thinking`` and in ``reasoning_content``.

    A message without reasoning is returned unchanged.
    """
    reasoning = next((message[key] for key in _REASONING if message.get(key)), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _texts_of(content: object) -> list[str]:
    """Return the texts in a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ChatTemplateError(
            "apply_chat_template", f"must be a text or a list of parts, got {content!r}.", "content"
        )
    return [_text_of_part(part) for part in content]


# For each type of content part, the field that contains the text. In the Responses API, the type
# depends on the direction (input or output).
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Prefixes of the types of content parts that text models cannot read.
_MEDIA = ("image", "input_image", "audio", "input_audio", "video", "file", "input_file")


def _text_of_part(part: object) -> str:
    fields = part if isinstance(part, dict) else {"type": part}
    kind = fields.get("type")
    name = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    text = fields.get(name) if name else None
    if not isinstance(text, str):
        is_media = isinstance(kind, str) and kind.startswith(_MEDIA)
        advice = " Images, audio and video are not supported." if is_media else ""
        raise ChatTemplateError(
            "apply_chat_template",
            'each part of content must be {"type": "text", "text": TEXT}, got '
            f"{'one without a text' if name else repr(kind)}.{advice}",
        )
    return text


class _Generation(ext.Extension):
    """Jinja extension for the block ``{% generation %}``, which marks text to train on.

    The block does not change the text. As in transformers, variables that are set in the block are
    not defined after it.
    """

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML. The arguments have the same order as in transformers.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
