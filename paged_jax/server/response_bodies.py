"""Request body of ``POST /v1/responses``, and its conversion to a chat completion body.

The input is a list of items: messages, reasoning, function calls and their results. This server
does not store responses, so each request must contain the whole conversation.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from paged_jax.models.text.chat_template import ChatTemplateError
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.server import bodies
from paged_jax.server.api_error import ApiError
from paged_jax.server.chats import template_messages
from paged_jax.server.json_encoding import JsonDict
from paged_jax.server.sampling_body import (
    WHOLE,
    Body,
    Items,
    LenientBody,
    SamplingBody,
    TemplateFields,
    Text,
)

_SYSTEM = ("system", "developer")
# Types of tools that a model may call.
_CALLABLE = ("function", "custom")
# Name of the argument of a custom tool.
_INPUT = "input"
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# Types of content parts that this server does not support, in OpenAI's and Anthropic's APIs.
_MEDIA = (
    *("input_image", "input_file", "input_audio", "image", "file", "audio"),
    *("document", "search_result"),
)
_MAX_METADATA = 16
# Function names in chat completion bodies have at most `_MAX_NAME` characters, and none of the
# characters that `_NOT_IN_NAMES` matches.
_MAX_NAME, _NOT_IN_NAMES = 64, re.compile(r"[^a-zA-Z0-9_.-]")


class TextFormat(LenientBody):
    """Required format of the text: any text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text: its format. `verbosity` is accepted and ignored."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(LenientBody):
    """Options of the reasoning: its effort, and whether the response has a summary of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class InputTokensBody(TemplateFields):
    """Body of `POST /v1/responses/input_tokens`; `ResponsesBody` has these fields as well."""

    model: str | None = Field(None, description="Name of the served model.")
    input: Text | Annotated[Items[dict[str, Any]], Field(min_length=1)] = Field(
        description="A text, or a list of items: messages, reasoning, calls and their results."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    tools: Items[dict[str, Any]] | None = Field(
        None,
        description="Functions, custom tools and namespaces of them. Other types are skipped.",
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description="Whether the model may call functions, must call one, or which one it must "
        "call.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; by default true."
    )
    text: TextOptions | None = Field(None, description="The format of the text, in `format`.")
    reasoning: ReasoningOptions | None = Field(
        None, description="Options of the reasoning: `effort` and `summary`."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Ignored: input that is too long is an error."
    )
    # Fields below must be null: they refer to stored responses, and this server stores none.
    previous_response_id: None = Field(None, description="Must be null: responses are not stored.")
    conversation: None = Field(None, description="Must be null: responses are not stored.")


class ResponsesBody(InputTokensBody, SamplingBody):
    """Body of `POST /v1/responses`. Responses are not stored."""

    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Maximum number of tokens to generate, reasoning included."
    )
    n: Literal[1] | None = Field(None, description="Must be null or 1.")
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="Number of most probable tokens to report with each token."
    )
    include: Items[str] | None = Field(
        None,
        description="`message.output_text.logprobs` requests log-probabilities. Other values are "
        "ignored.",
    )
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = Field(
        None, description="Repeated in the response."
    )
    # Fields below are often sent by clients, and have no effect on this server.
    store: bool | None = Field(None, description="Ignored: responses are not stored.")
    service_tier: str | None = Field(None, description="Ignored.")
    user: str | None = Field(None, description="Ignored.")
    max_tool_calls: int | None = Field(None, description="Ignored: it limits only built-in tools.")
    stream_options: dict[str, Any] | None = Field(None, description="Ignored.")
    client_metadata: dict[str, Any] | None = Field(None, description="Ignored.")
    context_management: Items[dict[str, Any]] | None = Field(
        None, description="Ignored: input is never compacted."
    )
    # Fields below are not supported, because this server stores no prompts and no responses.
    prompt: None = Field(None, description="Must be null: prompts are not stored.")
    background: Literal[False] | None = Field(
        None, description="Must be null or false: responses are not stored."
    )

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


class ToolNames:
    """Conversion of function names with namespaces to plain names.

    In this API, a function may belong to a namespace, and clients send and receive both names. In
    the chat, which has no namespaces, the function has a single name made from both.

    Tools of the type ``custom`` take a text instead of arguments. In the chat, they are functions
    with a single argument ``input``.

    Args:
      tools: the tools of a request. Tools of unknown types are ignored.

    Raises:
      ApiError: a function has no name.

    Attributes:
      functions: a dict from names in the chat to the functions of the request.
      customs: names in the chat of the custom tools.

    Example:
      >>> inner = {"type": "function", "name": "read"}
      >>> names = ToolNames([{"type": "namespace", "name": "files", "tools": [inner]}])
      >>> names.join("files", "read"), names.split("files__read")
      ('files__read', {'name': 'read', 'namespace': 'files'})
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        self.functions: dict[str, Mapping[str, Any]] = {}
        self.customs: set[str] = set()
        self._parts: dict[str, tuple[str, str]] = {}
        for index, tool in enumerate(tools):
            is_plain = tool.get("type") in _CALLABLE
            namespace = "" if is_plain else str(tool.get("name"))
            for function in [tool] if is_plain else _inner_tools(tool):
                name = string_of(function, "name", f"tools.{index}")
                chat_name = self.join(namespace, name)
                self.functions[chat_name] = function
                if function.get("type") == "custom":
                    self.functions[chat_name] = _as_function(function)
                    self.customs.add(chat_name)
                if namespace:
                    self._parts[chat_name] = namespace, name

    @staticmethod
    def join(namespace: str | None, name: str) -> str:
        """Return the name that a function has in the chat.

        A name longer than 64 characters is truncated, and a hash is appended to keep it unique.
        """
        if not namespace:
            return name
        chat_name = _NOT_IN_NAMES.sub("_", namespace.rstrip("_") + "__" + name)
        if len(chat_name) <= _MAX_NAME:
            return chat_name
        digest = hashlib.sha256(f"{namespace}\n{name}".encode()).hexdigest()[:8]
        return f"{chat_name[: _MAX_NAME - 9]}_{digest}"

    def split(self, chat_name: str) -> JsonDict:
        """Return the JSON fields ``name`` and, if there is one, ``namespace`` of a function.

        Args:
          chat_name: name of the function in the chat, as returned by `join`.
        """
        if chat_name not in self._parts:
            return {"name": chat_name}
        namespace, name = self._parts[chat_name]
        return {"name": name, "namespace": namespace}

    def matching(self, choice: Mapping[str, Any]) -> list[str]:
        """Return the names, as used in the chat, of the functions that a tool choice selects.

        Args:
          choice: an object that names a function, with or without its namespace, or an object that
            names a namespace, which selects all functions of the namespace.

        Raises:
          ApiError: no function has this name.
        """
        name, namespace = str(choice.get("name")), choice.get("namespace")
        chat_name = self.join(namespace, name)
        if choice.get("type") == "namespace":
            matches = [candidate for candidate, parts in self._parts.items() if parts[0] == name]
        elif chat_name in self.functions:
            matches = [chat_name]
        else:
            parts = self._parts.items()
            matches = [
                candidate
                for candidate, (_, function) in parts
                if function == name and not namespace
            ]
        if not matches:
            rule = f"must name tools of the request, got {name[:100]!r}"
            raise ApiError(400, f"tool_choice {rule}.", param="tool_choice")
        return matches


def _inner_tools(tool: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the functions that a tool of type ``namespace`` contains; [] for other tools.

    The description of the first function is preceded by the description of the namespace.
    """
    entries = tool.get("tools") if tool.get("type") == "namespace" else None
    functions: list[Mapping[str, Any]] = [
        entry
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, Mapping) and entry.get("type") in _CALLABLE
    ]
    if functions:
        texts = filter(None, (tool.get("description"), functions[0].get("description")))
        functions[0] = {**functions[0], "description": "\n".join(map(str, texts)) or None}
    return functions


def _as_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a custom tool to a function. The description ends with the grammar of the input."""
    format = tool.get("format")
    grammar = format.get("definition") if isinstance(format, Mapping) else None
    texts = (tool.get("description"), grammar and f"The input must match this grammar:\n{grammar}")
    parameters = {
        "type": "object",
        "properties": {_INPUT: {"type": "string"}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return {"description": "\n".join(map(str, filter(None, texts))), "parameters": parameters}


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool, given the arguments of the call in the chat as JSON.

    If the generation ended before the JSON was complete, it is returned unchanged.
    """
    try:
        return json.loads(arguments)[_INPUT]
    except (ValueError, KeyError, TypeError):
        return arguments


def chat_body(body: InputTokensBody, tokenizer: Tokenizer | None) -> bodies.ChatBody:
    """Convert a body to a body of ``POST /v1/chat/completions``.

    Args:
      body: the body.
      tokenizer: the tokenizer of the model; None if it has none.

    Raises:
      ApiError: the input has items that are not supported, or the tools are invalid.
    """
    names = ToolNames(body.tools or ())
    messages = list(_messages(body))
    tools = [_tool(name, function) for name, function in names.functions.items()]
    chat: JsonDict = {
        "messages": with_system_text(body.instructions, messages, tokenizer),
        "tools": tools or None,
        "tool_choice": _tool_choice(body.tool_choice, names),
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    effort = None if body.reasoning is None else body.reasoning.effort
    return validated_chat(chat, body, "input", effort)


def validated_chat(
    chat: JsonDict, body: TemplateFields, field: str, effort: str | None
) -> bodies.ChatBody:
    """Make a body of ``POST /v1/chat/completions`` from converted fields, and validate it.

    Args:
      chat: the converted fields, such as ``messages`` and ``tools``.
      body: the body of the request, from which the fields of `TemplateFields` are taken.
      field: name of the body field with the messages, for error messages.
      effort: the reasoning effort from a field such as ``reasoning.effort``, or None. It overrides
        the field `reasoning_effort`.

    Raises:
      ApiError: the fields are invalid, or there are no messages.
    """
    if not chat["messages"]:
        raise ApiError(400, f"{field} must contain at least one message.", param=field)
    fields = {name: getattr(body, name) for name in TemplateFields.model_fields}
    fields["skip_special_tokens"] = getattr(body, "skip_special_tokens", None)
    if effort is not None:
        fields["reasoning_effort"] = effort
    try:
        return bodies.ChatBody.model_validate({**fields, **chat})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{path}: {first['msg']}.", param=path) from None


def _messages(body: InputTokensBody) -> Iterator[JsonDict]:
    """Convert the input to chat messages.

    Consecutive items of the assistant (messages, reasoning, function calls) become one message.
    """
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    turn: JsonDict = {}
    for index, item in enumerate(body.input):
        path = f"input.{index}"
        kind = item.get("type") or ("message" if "role" in item else "")
        role = item.get("role")
        if kind == "message" and role != "assistant":
            if turn:
                yield turn
            turn = {}
            content = _text(item.get("content"), f"{path}.content")
            yield {"role": string_of(item, "role", path), "content": content}
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if turn:
                yield turn
            turn = {}
            output = result_text(item.get("output"), f"{path}.output")
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        else:
            _add_to_turn(turn, kind, item, path)
    if turn:
        yield turn


def _add_to_turn(turn: JsonDict, kind: str, item: JsonDict, path: str) -> None:
    """Add an item to the assistant's message `turn`. Items of unknown types are skipped.

    Args:
      turn: the message so far, which is changed; {} before the first item.
      kind: type of the item.
      item: the item.
      path: path of the item in the body, for error messages.

    Raises:
      ApiError: the item refers to a stored item, or is invalid.
    """
    fields: JsonDict = {}
    if kind == "message":
        fields["content"] = _text(item.get("content"), f"{path}.content")
    elif kind == "reasoning":
        thoughts = _text(item.get("content") or item.get("summary") or [], path)
        if thoughts:
            fields["reasoning_content"] = thoughts
    elif kind in ("function_call", "custom_tool_call"):
        name = ToolNames.join(item.get("namespace"), string_of(item, "name", path))
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = {_INPUT: string_of(item, "input", path)}
        function = {"name": name, "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        fields["tool_calls"] = [*turn.get("tool_calls", ()), call]
    elif kind == "item_reference" and not str(item.get("id")).startswith("rs_"):
        raise ApiError(
            400,
            f"{path} must be a complete item, because this server stores no items to refer to. "
            "Send store: false, so that clients send complete items.",
            param=path,
        )
    if not fields:
        return
    for name in ("content", "reasoning_content"):
        if name in fields and turn.get(name):
            fields[name] = turn[name] + "\n" + fields[name]
    turn |= {"role": "assistant", "content": turn.get("content", ""), **fields}


def _text(content: Any, path: str) -> str:
    """Return the text of a content, which is a text or a list of parts.

    Args:
      content: the content; None is an empty text.
      path: path of the content in the body, for error messages.

    Raises:
      ApiError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"{path} must be a text or a list of parts.", param=path)
    texts = []
    for index, part in enumerate(content):
        param = f"{path}.{index}"
        kind = kind_of(part, param)
        if kind == "refusal":
            texts.append(string_of(part, "refusal", param))
        elif kind in _TEXTS:
            texts.append(string_of(part, "text", param))
    return "".join(texts)


def result_text(content: Any, path: str) -> str:
    """Return the text of a tool's result; lines replace its images, see `bodies.as_text_parts`.

    The arguments and errors are those of `_text`.
    """
    return _text(bodies.as_text_parts(content) if isinstance(content, list) else content, path)


def kind_of(part: Any, path: str) -> Any:
    """Return the type of a content part, or of a block in Anthropic's API.

    Args:
      part: the part.
      path: path of the part in the body, for error messages.

    Raises:
      ApiError: the part is not an object, or is an image, a file, audio or a search result.
    """
    if not isinstance(part, Mapping):
        raise ApiError(400, f"{path} must be an object with a type.", param=path)
    kind = part.get("type")
    if kind in _MEDIA:
        rule = f"must be text, got {kind}: this model reads only text"
        raise ApiError(400, f"{path} {rule}.", param=path)
    return kind


def string_of(part: Mapping[str, Any], name: str, path: str) -> str:
    """Return the value of a field that must be a string.

    Args:
      part: the object with the field.
      name: name of the field.
      path: path of the object in the body, for error messages.

    Raises:
      ApiError: the field is missing, or is not a string.
    """
    text = part.get(name)
    if not isinstance(text, str):
        raise ApiError(400, f"{path}.{name} must be a text.", param=f"{path}.{name}")
    return text


def with_system_text(
    instructions: str | None, messages: Sequence[JsonDict], tokenizer: Tokenizer | None
) -> list[JsonDict]:
    """Join `instructions` and all leading system messages into one system message.

    Many chat templates accept only one system message, at the beginning. If the template raises an
    error for later system messages, they are changed to messages of the user.

    Args:
      instructions: text that precedes the system messages; None or "" for none.
      messages: the messages of the chat.
      tokenizer: the tokenizer with the chat template; None if the model has none.
    """
    num_leading = next(
        (index for index, message in enumerate(messages) if message["role"] not in _SYSTEM),
        len(messages),
    )
    texts = [instructions or "", *(message["content"] for message in messages[:num_leading])]
    system = "\n\n".join(filter(None, texts))
    tail = list(messages[num_leading:])
    head = [{"role": "system", "content": system}] if system else []
    if tokenizer is None or not any(message["role"] in _SYSTEM for message in tail):
        return head + tail
    try:
        chat = bodies.ChatBody.model_validate({"messages": head + tail})
        tokenizer.render_chat(template_messages(chat.messages))
    except (ChatTemplateError, ValueError):
        tail = [
            {**message, "role": "user"} if message["role"] in _SYSTEM else message
            for message in tail
        ]
    return head + tail


def _tool(name: str, tool: Mapping[str, Any]) -> JsonDict:
    fields = ("description", "parameters", "strict")
    return {
        "type": "function",
        "function": {"name": name, **{field: tool.get(field) for field in fields}},
    }


def _tool_choice(choice: str | Mapping[str, Any] | None, names: ToolNames) -> Any:
    """Convert `tool_choice` to the form that a chat completion body has.

    Raises:
      ApiError: the type of the choice is unknown, or the choice names no function of the tools.
    """
    if choice in (None, "none", "auto", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and kind in _CALLABLE:
        return _named(names.matching(choice)[0])
    mode = choice.get("mode") if isinstance(choice, Mapping) else None
    entries = choice.get("tools") if isinstance(choice, Mapping) else None
    if kind != "allowed_tools" or mode not in ("auto", "required") or not isinstance(entries, list):
        raise ApiError(
            400,
            'tool_choice must be "none", "auto", "required", {"type": "function" or "custom", '
            '"name": NAME} or {"type": "allowed_tools", "mode": "auto" or "required", '
            '"tools": LIST}.',
            param="tool_choice",
        )
    # Skip tools of other types, because they are skipped in `tools` too.
    allowed = [
        _named(name)
        for entry in entries
        if isinstance(entry, Mapping) and entry.get("type") in (*_CALLABLE, "namespace")
        for name in names.matching(entry)
    ]
    if not allowed and mode == "auto":
        return "none"
    if not allowed:
        raise ApiError(400, "tool_choice must allow at least one function.", param="tool_choice")
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}


def _named(name: str) -> JsonDict:
    return {"type": "function", "function": {"name": name}}
