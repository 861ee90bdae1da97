"""`Chat`: a chat's prompt, with its special tokens, and parsing of its answer, for all endpoints.

Functions at the end of this file convert messages and tools to the form that chat templates take.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.chat_template import CALL_ID_LENGTH
from paged_jax.models.text.grammar_source import constraint_rule
from paged_jax.models.text.reasoning import (
    HARMONY,
    HARMONY_MARKS,
    AnswerReader,
    HarmonyReader,
    ReasoningFormat,
    Start,
    harmony_grammar,
)
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tool_formats import Tool, ToolFormat
from paged_jax.models.text.tool_grammars import tool_grammar
from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.scheduler.outputs import CompletionOutput
from paged_jax.server import bodies
from paged_jax.server.api_error import ApiError
from paged_jax.server.sample_deltas import SampleDelta
from paged_jax.server.service import Service


class Chat:
    """A chat for which the model generates the next message.

    It renders the prompt, constrains the answer to tool calls and schemas, and divides the
    generated text into reasoning, content and tool calls.

    Args:
      service: the engine and its settings.
      body: the parsed request body.
    """

    def __init__(self, service: Service, body: bodies.ChatBody):
        self.service = service
        self.body = body
        self._readers: dict[int, AnswerReader | HarmonyReader] = {}
        self._content_tokens: dict[int, ContentTokens] = {}

    @property
    def tools(self) -> list[Tool]:
        """Tools that the answer may call; [] if `tool_choice` is "none". See `_allowed_tools`."""
        return [] if self.body.tool_choice == "none" else self._shown_tools

    @functools.cached_property
    def _shown_tools(self) -> list[Tool]:
        """Tools that the prompt describes.

        They do not depend on `tool_choice`: all requests of a chat then have the same prefix, which
        can be cached.
        """
        body, tokenizer = self.body, self.service.tokenizer
        requires_call = body.tool_choice not in (None, "none", "auto")
        if requires_call and not body.tools:
            raise ApiError(
                400,
                "tool_choice must be null, none or auto if there are no tools.",
                param="tool_choice",
            )
        if tokenizer is None or not body.tools:
            return []
        if body.tool_choice == "none" and tokenizer.tool_format is None:
            return []  # other requests of the chat cannot have tools
        return [*template_tools(body.tools, tokenizer)]

    @property
    def _allowed_tools(self) -> list[Tool]:
        """Tools that `tool_choice` allows the model to call."""
        choice = self.body.tool_choice
        if isinstance(choice, bodies.ToolChoice):
            allowed = [choice]
        elif isinstance(choice, bodies.AllowedToolChoice):
            allowed = choice.allowed_tools.tools
        else:
            return self.tools
        names = [tool.function.name for tool in allowed]
        tools_by_name = {tool["function"]["name"]: tool for tool in self.tools}
        if unknown_name := next((name for name in names if name not in tools_by_name), None):
            rule = f"must name tools of the request, got {unknown_name!r}"
            raise ApiError(400, f"tool_choice {rule}.", param="tool_choice")
        return [tool for name, tool in tools_by_name.items() if name in names]

    @property
    def _must_call(self) -> bool:
        """Whether the answer must be a tool call, because of `tool_choice`."""
        choice = self.body.tool_choice
        if isinstance(choice, bodies.AllowedToolChoice):
            choice = choice.allowed_tools.mode
        return self._names_tool or choice == "required"

    @property
    def _names_tool(self) -> bool:
        """Whether `tool_choice` names a function, which the model must then call exactly once."""
        return isinstance(self.body.tool_choice, bodies.ToolChoice)

    @property
    def _tool_format(self) -> ToolFormat | None:
        assert self.service.tokenizer is not None
        return self.service.tokenizer.tool_format if self.tools else None

    @property
    def _is_harmony(self) -> bool:
        """Whether the model answers in OpenAI's Harmony format: messages in channels."""
        format = self._tool_format
        return self.reasoning is HARMONY or (format is not None and format.kind == "harmony")

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """Format of the reasoning in the text; None to leave the reasoning in the content."""
        return None if self.body.separate_reasoning is False else self.service.reasoning_format

    @functools.cached_property
    def _prompt(self) -> str:
        """Text of the prompt, rendered by the chat template."""
        tokenizer = self.service.tokenizer
        if tokenizer is None:
            raise ApiError(400, "Chats need a tokenizer, but the model has none.")
        check_calls(self.body.messages, tokenizer)
        return tokenizer.render_chat(
            template_messages(self.body.messages),
            template_variables(self.body),
            tools=self._shown_tools or None,
            add_generation_prompt=self.body.add_generation_prompt is not False,
            continue_final_message=bool(self.body.continue_final_message),
        )

    @functools.cached_property
    def _start(self) -> Start:
        """Place where the generated text begins: "reasoning", "answer" or "either", see `Start`."""
        if self.reasoning is None or self.body.continue_final_message:
            return "answer"
        return self.reasoning.start(self._prompt)

    def token_ids(self) -> list[int]:
        """Return the token ids of the prompt."""
        prompt, tokenizer = self._prompt, self.service.tokenizer
        assert tokenizer is not None
        return tokenizer.encode(prompt, add_special_tokens=bool(self.body.add_special_tokens))

    def params(self, constraint: StructuredOutputsParams | None, field: str) -> dict[str, Any]:
        """Return the sampling parameters that the chat sets.

        These are ``structured_outputs``, if the text must follow a grammar, and
        ``skip_special_tokens``, if special tokens must remain in the text so that it can be parsed.

        Args:
          constraint: constraint on the content of the answer; None for any text. It does not apply
            to reasoning and tool calls.
          field: name of the body field with this constraint, for error messages.
        """
        params: dict[str, Any] = {}
        if (constraint := self._constrain(constraint, field)) is not None:
            params["structured_outputs"] = constraint
        if self._has_special_marks:
            params["skip_special_tokens"] = False
        return params

    def _constrain(
        self, constraint: StructuredOutputsParams | None, field: str
    ) -> StructuredOutputsParams | None:
        """Extend the constraint on the content to a constraint on the whole generated text.

        The whole text may also have reasoning and tool calls. Returns None if any text is allowed.
        """
        format, reasoning = self._tool_format, self.reasoning
        if constraint is None and format is None:
            return None
        answer = None
        if constraint is not None and (format is not None or self._is_harmony):
            answer = self._answer_rule(constraint, field)
        if self._is_harmony:
            return self._bind(lambda tools: self._harmony_grammar(tools, answer))
        if format is not None:
            mark = reasoning.opening if reasoning and self._start == "either" else None
            constraint = self._bind(
                lambda tools: tool_grammar(
                    format,
                    tools,
                    is_required=self._must_call,
                    is_parallel=self.body.parallel_tool_calls is not False and not self._names_tool,
                    answer=answer,
                    not_first=mark,
                )
            )
        if constraint is None or reasoning is None:
            return constraint
        full_constraint = reasoning.constrain(constraint, self._start)
        try:
            self.service.grammars.compile(full_constraint)
        except ArgumentError:
            # If the constraint alone is invalid too, raise the error of `_check`. It is clearer,
            # because it does not mention the grammar rules that `constrain` added.
            self._check(constraint, field)
            raise
        return full_constraint

    def _bind(self, write_grammar: Callable[[Sequence[Tool]], str]) -> StructuredOutputsParams:
        return self.service.tool_grammars.constraint(write_grammar, self._allowed_tools)

    def _harmony_grammar(self, tools: Sequence[Tool], answer: str | None) -> str:
        assert self.service.tokenizer is not None
        find = self.service.tokenizer.backend.token_to_id
        token_ids = {
            mark: token_id for mark in HARMONY_MARKS if (token_id := find(mark)) is not None
        }
        return harmony_grammar(token_ids, tools, is_required=self._must_call, answer=answer)

    def _answer_rule(self, constraint: StructuredOutputsParams, field: str) -> str:
        # Check the constraint before it becomes part of a larger grammar, because errors of that
        # grammar would mention rules that the client did not write.
        self._check(constraint, field)
        return constraint_rule(constraint)

    def _check(self, constraint: StructuredOutputsParams, field: str) -> None:
        try:
            self.service.grammars.check(constraint)
        except ArgumentError as error:
            raise ArgumentError(error.function, error.problem, field) from None

    @property
    def _has_special_marks(self) -> bool:
        """Whether special tokens mark reasoning or tool calls. The text then must include them."""
        tokenizer, reasoning = self.service.tokenizer, self.reasoning
        if tokenizer is None:
            return False
        if self._is_harmony:
            return True
        marks = () if reasoning is None else (reasoning.opening, reasoning.closing)
        is_special = any(map(tokenizer.is_special_text, marks))
        return is_special or bool(self._tool_format and self._tool_format.special_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether all generated text is content, without reasoning and tool calls to parse."""
        return self.reasoning is None and not self.tools

    def parts(self, delta: SampleDelta, *, is_complete: bool = False) -> list[AnswerDelta]:
        """Parse the new text of a sample into reasoning, content and tool calls.

        Args:
          delta: the new text of a sample. In a stream, call this for each delta in order.
          is_complete: whether `delta` has the whole sample, because the response is not a stream.
        """
        if self.is_plain:
            return [AnswerDelta("content", delta.text)]
        index = delta.sample.index
        if is_complete or index not in self._readers:
            self._readers[index] = (
                HarmonyReader()
                if self._is_harmony
                else AnswerReader(self.reasoning, self._start, self._tool_format, self.tools)
            )
        is_last = is_complete or delta.sample.finish_reason is not None
        parts = self._readers[index].push(delta.text, is_last=is_last)
        # `HarmonyReader` always separates the reasoning from the content. Undo this if the
        # reasoning should stay in the content.
        if self.reasoning is None:
            return [
                AnswerDelta("content", part.text) if part.kind == "reasoning" else part
                for part in parts
            ]
        return parts

    def content_tokens(self, delta: SampleDelta, parts: Sequence[AnswerDelta]) -> list[list[int]]:
        """Return for each part the indices of its tokens; [] for parts that are not content.

        An index is a position in `delta.sample.token_ids`. Reasoning and tool calls are not
        content.

        Args:
          delta: the new tokens of a sample.
          parts: the parts that `parts` returned for `delta`.
        """
        if self.is_plain:
            return [list(range(delta.start, len(delta.sample.token_ids)))]
        tokenizer = self.service.tokenizer
        assert tokenizer is not None
        shows_special = self._has_special_marks or self.body.skip_special_tokens is False
        index = delta.sample.index
        if delta.start == 0:
            self._content_tokens[index] = ContentTokens(tokenizer, shows_special)
        return self._content_tokens[index].push(delta.token_ids, parts)

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """Return the number of tokens up to the end of the reasoning; 0 without reasoning."""
        reader, tokenizer = self._readers.get(sample.index), self.service.tokenizer
        if reader is None or not reader.has_reasoned or tokenizer is None or not self.reasoning:
            return 0
        low, high = 0, len(sample.token_ids)
        if reader.is_inside:
            return high
        # Binary search for the smallest number of leading tokens that contain the end tag.
        while low < high:
            middle = (low + high) // 2
            text = tokenizer.decode(sample.token_ids[:middle], skip_special_tokens=False)
            low, high = (low, middle) if self.reasoning.closing in text else (middle + 1, high)
        return low

    def call_id(self, digits: str) -> str:
        """Make a tool-call id from random hexadecimal digits, as the chat template requires."""
        has_short = self._tool_format is not None and self._tool_format.has_short_ids
        return digits[:CALL_ID_LENGTH] if has_short else f"call_{digits}"

    def finish_reason(self, sample: CompletionOutput, has_calls: bool) -> str | None:
        """Return OpenAI's finish reason of a sample.

        It is ``"tool_calls"`` if the model chose to call tools. If `tool_choice` named the function
        to call, it is ``"stop"``, as in OpenAI's API.
        """
        reason = sample.finish_reason
        calls_tool = reason == "stop" and has_calls and not self._names_tool
        return "tool_calls" if calls_tool else reason


class ContentTokens:
    """Search for the tokens that encode the content of an answer.

    The text of all tokens contains the parts of the answer in order, with tags such as ``</think>``
    between them.

    Args:
      tokenizer: the tokenizer of the model.
      shows_special: whether the text includes special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, shows_special: bool):
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._num_tokens = 0
        # The generated text after the end of the last part that was pushed, as bytes.
        self._text = b""
        # Position of `_text` in the text of all tokens, in bytes.
        self._offset = 0
        # (index, start, end) of each token that begins in `_text`. Its start and end are positions
        # in the text of all tokens, in bytes, like `_offset`.
        self._tokens: collections.deque[tuple[int, int, int]] = collections.deque()

    def push(self, token_ids: Sequence[int], parts: Sequence[AnswerDelta]) -> list[list[int]]:
        """Return for each new part the indices of its tokens; [] for parts that are not content.

        Args:
          token_ids: the new tokens. The part that contains their text may follow in a later call.
          parts: the new parts.
        """
        for token_id in token_ids:
            is_hidden = not self._shows_special and self._tokenizer.is_special(token_id)
            data = b"" if is_hidden else self._tokenizer.token_bytes(token_id)
            start = self._offset + len(self._text)
            self._tokens.append((self._num_tokens, start, start + len(data)))
            self._text += data
            self._num_tokens += 1
        return [self._take(part) for part in parts]

    def _take(self, part: AnswerDelta) -> list[int]:
        """Return the indices of the tokens of `part`; [] if it is not content.

        Remove `part` and the text before it from `_text`.
        """
        data = part.text.encode("utf-8", "replace")
        position = self._text.find(data)
        # The text of a tool call may differ from the generated text: for example, the parser may
        # have converted its arguments to JSON. The next part removes the generated text.
        if position < 0 and part.kind in ("call", "arguments"):
            return []
        # Content may also be missing in `_text`, which still has the invalid bytes that content
        # replaces by U+FFFD. In this case, assume that the content is at the start of `_text`.
        position = max(position, 0)
        start, end = self._offset + position, self._offset + position + len(data)
        indices = []
        while self._tokens and self._tokens[0][1] < end:
            index, _, token_end = self._tokens.popleft()
            if token_end > start and part.kind == "content":
                indices.append(index)
        self._text, self._offset = self._text[position + len(data) :], end
        return indices


# The functions below convert messages and tools of a request to the form that chat templates take.


def template_messages(messages: Sequence[bodies.MessageParam]) -> list[dict[str, Any]]:
    """Convert messages to dicts, as `Tokenizer.encode_chat` requires."""
    return [_template_message(message) for message in messages]


def template_variables(body: bodies.ChatBody | bodies.TokenizeBody) -> dict[str, Any]:
    """Return the variables of the chat template, as set by the fields of a request."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":
        variables["enable_thinking"] = False
    return {**variables, **(body.chat_template_kwargs or {})}


def num_chars(messages: Sequence[bodies.MessageParam]) -> int:
    """Return the total number of characters of all messages, including tool calls."""
    count = 0
    for message in messages:
        calls = [call.function.arguments for call in message.tool_calls or ()]
        content = _content(message) or message.refusal or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        count += sum(len(text) for text in (*calls, *parts) if isinstance(text, str))
    return count


def _template_message(message: bodies.MessageParam) -> dict[str, Any]:
    # Keep all fields, because a template may read any of them.
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
    """Return the content of a message. A list of parts is reduced to their texts."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    parts = message.content
    texts = [part.text if isinstance(part, bodies.TextPart) else part.refusal for part in parts]
    return [{"type": "text", "text": text} for text in texts]


def _template_call(call: bodies.ToolCallParam) -> dict[str, Any]:
    """Convert a tool call to a dict, without additional fields that clients send."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    fields = {} if call.id is None else {"id": call.id}
    return {**fields, "type": call.type or "function", "function": function}


def template_tools(tools: Sequence[bodies.ToolParam], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Convert tools to dicts, as `Tokenizer.encode_chat` requires.

    Raises:
      ApiError: the model's chat template does not support tools, or its format of tool calls is not
        supported.
    """
    if tools and tokenizer.tool_format is None:
        shows_tools = tokenizer.tool_support.shows_tools
        reason = "tool format is not supported" if shows_tools else "chat template has no tools"
        rule = f"must be null or empty, because the model's {reason}"
        raise ApiError(400, f"tools {rule}.", param="tools")
    return [tool.model_dump(exclude_none=True, include={"type", "function"}) for tool in tools]


def check_calls(messages: Sequence[bodies.MessageParam], tokenizer: Tokenizer) -> None:
    """Check that the chat template includes tool calls of earlier messages in the prompt.

    Raises:
      ApiError: a message has tool calls, but the chat template omits them.
    """
    for index, message in enumerate(messages):
        if message.tool_calls and not tokenizer.tool_support.writes_calls:
            param = f"messages.{index}.tool_calls"
            reason = "because the model's chat template omits tool calls"
            raise ApiError(400, f"{param} must be null or empty, {reason}.", param=param)
