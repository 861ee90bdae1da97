"""Chat templates of Hugging Face tokenizers: they write a chat as text for the model."""

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

# Variables of a template that a caller must not set.
_RESERVED_VARIABLES = frozenset(
    (
        "add_generation_prompt", "chat_template", "continue_final_message", "documents",
        "messages", "raise_exception", "return_dict", "return_tensors", "self", "strftime_now",
        "tokenize", "tools", "bos_token", "eos_token", "unk_token", "pad_token",
    )
)  # fmt: skip
# Texts to search for in rendered chats. No template contains them.
_PROBE = "which form of content"
_ROLE_PROBE = "probed text"
# Mark at the end of a message that the model continues. It keeps templates from trimming the text.
_CUT = "\N{SNOWMAN}cut here\N{SNOWMAN}"
_USER, _ASSISTANT = ({"role": role, "content": "Probe."} for role in ("user", "assistant"))
# Length of the ids of calls that the templates of Mistral accept.
CALL_ID_LENGTH = 9
# Roles that are not checked: all templates support user and assistant, and `tool_support` checks
# tool.
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
        # Templates rely on the settings and functions of transformers.
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
        """Return a chat as text, in the format that the model was trained on.

        Args:
          messages: dicts with ``"role"`` and usually ``"content"``, oldest first, or pydantic
            objects, such as the messages that openai's client returns. The content is a text or a
            list of parts such as ``{"type": "text", "text": "Hi"}``. Fields that are None are
            omitted. The arguments of a tool call are an object or its JSON text.
          add_generation_prompt: whether the text ends with the opening of an answer.
          continue_final_message: whether the text ends with the content of the last message, which
            must be the assistant's, so that the model continues it.
          **variables: further variables of the template, such as `tools`. Fields of tools and of
            their functions that are None are omitted.

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
            before, found, _ = text.rpartition(_CUT)
            if not found:
                rule = "the model's template does not write the content of the last message"
                raise ChatTemplateError("apply_chat_template", rule)
            return before
        tools = [_without_nulls(tool) for tool in as_data(variables.get("tools") or ())] or None
        variables = {"documents": None, **self._special_tokens, **variables, "tools": tools}
        variables["add_generation_prompt"] = add_generation_prompt
        template = self._tool_template if tools else self._template
        try:
            return template.render(messages=chat, **variables)
        # Catch any exception, because expressions in templates raise errors of any type.
        except Exception as error:
            reason = " ".join(str(error).split())
        # Try again with changes that some templates need: empty contents, because they concatenate
        # the content of every message, and ids of calls of nine letters or digits.
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
        """Whether the template writes content given as parts, but not content given as text."""
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
        """Return the messages after checking that the template writes the role of each message.

        Many templates omit messages of roles that they do not know. OpenAI's role "developer"
        becomes "system" if the template does not know it.

        Args:
          messages: see `render`.

        Raises:
          ChatTemplateError: the template omits messages of a role.

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
        """Return whether the template writes a message of a role; None if it rejects the chat."""
        before = [] if is_first else [_USER, _ASSISTANT]
        try:
            text = self.render([*before, {"role": role, "content": _ROLE_PROBE}, _USER])
        except ValueError:
            return None
        return _ROLE_PROBE in text


def read_templates(folder: Path, config: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return the chat template of a model and its template for tools, each None if missing.

    The files ``chat_template.jinja`` and ``additional_chat_templates/tool_use.jinja`` contain the
    templates. Otherwise ``tokenizer_config.json`` contains a single template, or several by name,
    where ``"tool_use"`` names the template for tools.

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
    """Check the template variables of a caller and return them.

    Raises:
      ChatTemplateError: they are not a dict, or a name is reserved.
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
    """Arguments of a tool call: the parsed object, which also acts as its original JSON text.

    Most templates read an object. Other templates concatenate the arguments with text, and then get
    the original JSON text.
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


def _as_templates_expect(given: Any, takes_parts: bool) -> dict[str, Any]:
    """Return a message in the form that templates expect: a dict without None fields.

    Its content becomes a single text, or a list of text parts if the template takes parts.
    """
    message = as_data(given)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(
            "apply_chat_template",
            f'each message must be a dict such as {{"role": "user", "content": TEXT}}, got '
            f"{given!r}.",
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
    """Return messages that all have a content, which may be empty."""
    return [{"content": "", **message} for message in chat]


def _with_short_ids(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with ids of calls, and of their results, of nine letters or digits.

    An id always becomes the same short id, so that the prefix of a longer chat stays the same.
    """

    def shorten(item: Any, key: str) -> Any:
        if not isinstance(item, Mapping) or not isinstance(given := item.get(key), str):
            return item
        if len(given) == CALL_ID_LENGTH and given.isalnum() and given.isascii():
            return item
        digest = hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()
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
    """Return a message with a mark at the end of its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CUT}
    *rest, last = content
    return {**message, "content": [*rest, {**last, "text": last["text"] + _CUT}]}


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
        return {key: as_data(each) for key, each in value.items()}
    return [as_data(each) for each in value] if isinstance(value, list | tuple) else value


def _without_nulls(tool: Any) -> Any:
    """Return a tool without None fields, at the top and in its function."""
    if not isinstance(tool, dict):
        return tool
    fields = {key: value for key, value in tool.items() if value is not None}
    return (
        {**fields, "function": _without_nulls(fields["function"])}
        if "function" in fields
        else fields
    )


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object, if they can be parsed."""
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
        parsed = None  # the model's answer was cut short
    return (
        {**call, "arguments": _Arguments(parsed, arguments)} if isinstance(parsed, dict) else call
    )


# Names of the message field that contains the reasoning before the text. Each template reads one of
# them.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning, if any, under the names that templates read."""
    given = next((message[key] for key in _REASONING if message.get(key)), None)
    if given is None:
        return message
    return {"thinking": given, **message, "reasoning_content": given}


def _texts_of(content: object) -> list[str]:
    """Return the texts of a message's content."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ChatTemplateError(
            "apply_chat_template", f"must be a text or a list of parts, got {content!r}.", "content"
        )
    return [_text_of_part(part) for part in content]


# Fields with the text of each kind of part. Messages of the responses API name texts by direction.
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Beginnings of the kinds of parts that models with text alone cannot read.
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
    """Jinja block ``{% generation %}``, which marks the model's text for training.

    The block has no effect here. Variables that are set inside are unknown after the block, as in
    transformers.
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
