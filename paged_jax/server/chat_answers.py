"""Responses of ``POST /v1/chat/completions``, with chat templates and tool calls."""

import functools
import secrets
from collections.abc import Sequence
from typing import Any

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tools import ToolGrammars, ToolReader
from paged_jax.sampling.params import StructuredOutputsParams
from paged_jax.scheduler.outputs import Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.answers import OpenAiAnswer, SampleDelta, finite, whole_samples
from paged_jax.server.responses import ApiError, JsonDict, to_json_dict


class ChatAnswer(OpenAiAnswer):
    """Response of ``POST /v1/chat/completions``."""

    prefix = "chatcmpl"
    body: bodies.ChatBody
    chunk_type = schemas.ChatCompletionChunk

    @functools.cached_property
    def _tool_use(self) -> "ToolUse | None":
        """Tools of the request; None if it has none."""
        body, tokenizer = self.body, self.service.tokenizer
        is_asked = body.tool_choice not in (None, "none", "auto")
        if is_asked and not body.tools:
            raise ApiError(
                400, "tool_choice must be null, none or auto without tools.", param="tool_choice"
            )
        if tokenizer is None or not body.tools or body.tool_choice == "none":
            return None
        return ToolUse(body, tokenizer)

    def prompts(self) -> list[str | list[int]]:
        """Return the messages as a prompt, rendered by the model's chat template."""
        tokenizer = self.service.tokenizer
        if tokenizer is None:
            raise ApiError(400, "Chats need a tokenizer, but the model has none.")
        check_calls(self.body.messages, tokenizer)
        return [
            tokenizer.encode_chat(
                template_messages(self.body.messages),
                template_variables(self.body),
                tools=None if self._tool_use is None else self._tool_use.tools,
                add_special_tokens=bool(self.body.add_special_tokens),
            )
        ]

    @property
    def is_constrained(self) -> bool:
        """Whether a schema or grammar constrains the text."""
        return super().is_constrained or bool(self.body.tools)

    @property
    def num_chars(self) -> int:
        """Characters of all messages together."""
        return num_chars(self.body.messages)

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens of each sample. `max_completion_tokens` overrides `max_tokens`."""
        newer = self.body.max_completion_tokens
        return self.body.max_tokens if newer is None else newer

    def params(self) -> dict[str, Any]:
        """Return the sampling parameters, with log-probabilities and the grammar of tool calls."""
        # `max_tokens` is always included: None lets a chat fill the context, unlike the default of
        # `SamplingParams`.
        body, params = self.body, {**super().params(), "max_tokens": self.max_tokens}
        if body.top_logprobs and not body.logprobs:
            raise ApiError(
                400, "top_logprobs must be null or 0 unless logprobs is true.", param="top_logprobs"
            )
        if body.logprobs:
            params["logprobs"] = body.top_logprobs or 0
        if self._tool_use is not None:
            if "structured_outputs" in params:
                raise ApiError(
                    400,
                    "tools must be null with response_format or structured_outputs.",
                    param="tools",
                )
            params["structured_outputs"] = self._tool_use.form(self.service.tool_grammars)
        return params

    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the whole response, with a message for each sample."""
        [output] = outputs
        choices = [self._choice(delta) for delta in whole_samples(output)]
        end = self.end(outputs) | self.prompt_fields(output)
        return to_json_dict(schemas.ChatCompletionResponse, **self.head, choices=choices, **end)

    def _choice(self, delta: SampleDelta) -> JsonDict:
        message = schemas.ChatMessage(content=delta.text)
        finish_reason = delta.sample.finish_reason
        if self._tool_use is not None:
            message = self._tool_use.message(delta)
            finish_reason = self._tool_use.finish_reason(delta, bool(message.tool_calls))
        return to_json_dict(
            schemas.ChatChoice,
            index=delta.sample.index,
            message=message,
            logprobs=self._logprobs(delta),
            finish_reason=finish_reason,
            stop_reason=delta.sample.stop_reason,
            token_ids=self.sample_token_ids(delta),
        )

    def opening(self) -> list[JsonDict]:
        """Return an event for each sample with the assistant's role."""
        delta = to_json_dict(schemas.ChatDelta, role="assistant", content="")
        return [self._chunk(index, delta) for index in range(self.body.n or 1)]

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return an event for each sample with new tokens or a finish reason."""
        return [self._next_chunk(output, each) for each in deltas]

    def _next_chunk(self, output: RequestOutput, delta: SampleDelta) -> JsonDict:
        message: JsonDict | schemas.ChatDelta
        message = to_json_dict(schemas.ChatDelta, content=delta.text)
        finish_reason = delta.sample.finish_reason
        if self._tool_use is not None:
            message = self._tool_use.delta(delta)
            finish_reason = self._tool_use.finish_reason(delta, self._tool_use.has_called(delta))
        return self._chunk(
            delta.sample.index,
            message,
            usage=self.usage_so_far(output, delta),
            **(self.prompt_fields(output) if delta.start == 0 else {}),
            logprobs=self._logprobs(delta),
            finish_reason=finish_reason,
            stop_reason=delta.sample.stop_reason,
            token_ids=self.sample_token_ids(delta),
        )

    def _chunk(
        self,
        index: int,
        delta: JsonDict | schemas.ChatDelta,
        *,
        usage: schemas.Usage | None = None,
        prompt_token_ids: list[int] | None = None,
        **fields: Any,
    ) -> JsonDict:
        choice = to_json_dict(schemas.ChatChunkChoice, index=index, delta=delta, **fields)
        return self.event([choice], usage=usage, prompt_token_ids=prompt_token_ids)

    def _logprobs(self, delta: SampleDelta) -> schemas.ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        rows = zip(delta.token_ids, delta.logprobs, strict=True)
        return {"content": (self._token_logprob(token_id, row) for token_id, row in rows)}

    def _token_logprob(self, token_id: int, row: dict[int, Logprob]) -> schemas.TokenLogprob:
        # The candidates always include the generated token, even if it is not among the most
        # probable.
        top = sorted(row, key=lambda each: row[each].rank)[: self.body.top_logprobs or 0]
        others = [self._top_logprob(each, row[each]) for each in top]
        return {**self._top_logprob(token_id, row[token_id]), "top_logprobs": others}

    def _top_logprob(self, token_id: int, token: Logprob) -> schemas.TopLogprob:
        assert self.service.tokenizer is not None
        return {
            "token": token.decoded_token,
            "logprob": finite(token.logprob),
            "bytes": _bytes_of(self.service.tokenizer, token_id),
        }


@functools.lru_cache(maxsize=2**14)
def _bytes_of(tokenizer: Tokenizer, token_id: int) -> list[int]:
    # Cached, because creating these lists would take longer than the rest of the response. They are
    # never modified.
    return list(tokenizer.token_bytes(token_id))


# Messages


def template_messages(messages: Sequence[bodies.MessageParam]) -> list[dict[str, Any]]:
    """Return messages as `Tokenizer.encode_chat` accepts them."""
    return [_template_message(message) for message in messages]


def template_variables(body: bodies.ChatBody | bodies.TokenizeBody) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template."""
    given = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**given, **(body.chat_template_kwargs or {})}


def num_chars(messages: Sequence[bodies.MessageParam]) -> int:
    """Return the number of characters of all messages together."""
    count = 0
    for message in messages:
        calls = [call.function.arguments for call in message.tool_calls or ()]
        content = _content(message) or message.refusal or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        count += sum(len(text) for text in (*calls, *parts) if isinstance(text, str))
    return count


def _template_message(message: bodies.MessageParam) -> dict[str, Any]:
    # All fields are kept, because a template may read any of them.
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
    """Return the content of a message. Only the text of its parts is kept."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    parts = message.content
    texts = [part.text if isinstance(part, bodies.TextPart) else part.refusal for part in parts]
    return [{"type": "text", "text": text} for text in texts]


def _template_call(call: bodies.ToolCallParam) -> dict[str, Any]:
    """Return a tool call without the extra fields that clients add."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    given = {} if call.id is None else {"id": call.id}
    return {**given, "type": call.type, "function": function}


# Tools


class ToolUse:
    """Tools of a chat request, and the calls in its response.

    Args:
      body: request body with tools.
      tokenizer: the model's tokenizer; its chat template determines the format of calls.

    Attributes:
      tools: the tools as the chat template accepts them.

    Raises:
      ApiError: the model's tool format is missing or unknown, or `tool_choice` names no tool.
    """

    def __init__(self, body: bodies.ChatBody, tokenizer: Tokenizer):
        self.tools = template_tools(body.tools or (), tokenizer)
        format = tokenizer.tool_format
        assert format is not None
        self._is_named = isinstance(body.tool_choice, bodies.ToolChoice)
        choice = body.tool_choice or "auto"
        if isinstance(choice, bodies.ToolChoice):
            choice = choice.function.name
            if choice not in [tool["function"]["name"] for tool in self.tools]:
                raise ApiError(400, "tool_choice must name one of the tools.", param="tool_choice")
        self._format = format
        self._choice = str(choice)
        self._is_parallel = body.parallel_tool_calls is not False
        self._streams: dict[int, _ToolStream] = {}

    def form(self, grammars: ToolGrammars) -> StructuredOutputsParams:
        """Return a constraint on the generated text, so that tool calls in it can be parsed.

        Raises:
          ArgumentError: see `ToolGrammars.form`.
        """
        return grammars.form(self._format, self.tools, self._choice, is_parallel=self._is_parallel)

    def message(self, delta: SampleDelta) -> schemas.ChatMessage:
        """Return the message of a whole sample."""
        found = _ToolStream(ToolReader(self._format)).push(delta.text, is_last=True)
        calls = [
            schemas.ToolCall(id=call.id or "", function=call.function)
            for call in found.tool_calls or ()
        ]
        return schemas.ChatMessage(content=found.content, tool_calls=calls or None)

    def delta(self, delta: SampleDelta) -> schemas.ChatDelta:
        """Return the new part of a sample's message; empty while it may still become a call."""
        stream = self._streams.setdefault(delta.sample.index, _ToolStream(ToolReader(self._format)))
        return stream.push(delta.text, is_last=delta.sample.finish_reason is not None)

    def finish_reason(self, delta: SampleDelta, has_calls: bool) -> str | None:
        """Return OpenAI's finish reason: ``"tool_calls"`` if the model chose to call a tool.

        If the request names the function to call, OpenAI's reason is ``"stop"``.
        """
        reason = delta.sample.finish_reason
        return "tool_calls" if reason == "stop" and has_calls and not self._is_named else reason

    def has_called(self, delta: SampleDelta) -> bool:
        """Return whether the stream of a sample has contained a call."""
        return self._streams[delta.sample.index].num_calls > 0


class _ToolStream:
    """Parser of the text and calls in one sample's stream."""

    def __init__(self, reader: ToolReader):
        self._reader = reader
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool) -> schemas.ChatDelta:
        found = self._reader.push(text, is_last=is_last)
        content = "".join(each.text for each in found if each.kind == "content")
        calls: list[schemas.ToolCallDelta] = []
        for each in found:
            if each.kind == "call":
                calls.append(self._begin(each.text))
            elif each.kind == "arguments" and calls:
                # an event has at most one entry for each call
                calls[-1].function.arguments += each.text
            elif each.kind == "arguments":
                function = schemas.CalledFunction(arguments=each.text)
                calls.append(schemas.ToolCallDelta(index=self.num_calls - 1, function=function))
        return schemas.ChatDelta(content=content or None, tool_calls=calls or None)

    def _begin(self, name: str) -> schemas.ToolCallDelta:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        function = schemas.CalledFunction(name=name, arguments="")
        new_id = f"call_{secrets.token_hex(12)}"
        return schemas.ToolCallDelta(index=index, id=new_id, type="function", function=function)


def template_tools(tools: Sequence[bodies.ToolParam], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return tools as `Tokenizer.encode_chat` accepts them.

    Raises:
      ApiError: the model's chat template has no tools, or an unknown format of calls.
    """
    if tools and tokenizer.tool_format is None:
        shows = tokenizer.tool_support.shows_tools
        reason = "tool format is not supported" if shows else "chat template has no tools"
        raise ApiError(400, f"tools must be null or empty, as the model's {reason}.", param="tools")
    return [tool.model_dump(exclude_none=True, include={"type", "function"}) for tool in tools]


def check_calls(messages: Sequence[bodies.MessageParam], tokenizer: Tokenizer) -> None:
    """Check that the model sees the tool calls in a chat.

    Raises:
      ApiError: the chat contains calls, but the model's chat template leaves them out.
    """
    for index, message in enumerate(messages):
        if message.tool_calls and not tokenizer.tool_support.writes_calls:
            param = f"messages.{index}.tool_calls"
            reason = "as the model's chat template leaves calls out"
            raise ApiError(400, f"{param} must be null or empty, {reason}.", param=param)
