"""`ToolUse`: the tools of a chat's request, and the calls in its answer."""

import secrets
from collections.abc import Sequence
from typing import Any

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tool_grammars import ToolGrammars
from paged_jax.models.text.tools import ToolReader
from paged_jax.sampling.params import StructuredOutputsParams
from paged_jax.server import bodies, schemas
from paged_jax.server.deltas import SampleDelta
from paged_jax.server.errors import ApiError


class ToolUse:
    """What a request says of tools, and how its answer uses them.

    Args:
      body: the request's body, which has tools.
      tokenizer: the model's, whose chat template says how it calls functions.

    Attributes:
      tools: the tools, as the chat template takes them.

    Raises:
      ApiError: the model has no tools of a known format, or the choice is none of them.
    """

    def __init__(self, body: bodies.ChatBody, tokenizer: Tokenizer):
        self.tools = as_tools(body.tools or (), tokenizer)
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
        self._readers: dict[int, _Reader] = {}

    def form(self, grammars: ToolGrammars) -> StructuredOutputsParams:
        """Return the form of an answer that can be read.

        Raises:
          ArgumentError: see `ToolGrammars.form`.
        """
        return grammars.form(self._format, self.tools, self._choice, is_parallel=self._is_parallel)

    def message(self, delta: SampleDelta) -> schemas.ChatMessage:
        """The message of a whole sample."""
        content, calls = "", []
        for each in ToolReader(self._format).push(delta.text, is_last=True):
            if each.kind == "content":
                content += each.text
            elif each.kind == "call":
                function = schemas.CalledFunction(name=each.text, arguments="")
                calls.append(schemas.ToolCall(id=_new_id(), function=function))
            else:
                calls[-1].function.arguments += each.text
        return schemas.ChatMessage(content=content or None, tool_calls=calls or None)

    def delta(self, delta: SampleDelta) -> schemas.ChatDelta:
        """What is new in the message of a sample; empty where nothing is certain yet."""
        reader = self._readers.setdefault(delta.sample.index, _Reader(ToolReader(self._format)))
        return reader.read(delta)

    def finish_reason(self, delta: SampleDelta, has_calls: bool) -> str | None:
        """OpenAI's reason: an answer that calls what it was to choose ends with its calls."""
        reason = delta.sample.finish_reason
        return "tool_calls" if reason == "stop" and has_calls and not self._is_named else reason

    def has_called(self, delta: SampleDelta) -> bool:
        """Whether the stream of a sample has had a call."""
        return self._readers[delta.sample.index].num_calls > 0


class _Reader:
    """What was read of one sample's stream."""

    def __init__(self, reader: ToolReader):
        self._reader = reader
        self.num_calls = 0

    def read(self, delta: SampleDelta) -> schemas.ChatDelta:
        is_last = delta.sample.finish_reason is not None
        found = self._reader.push(delta.text, is_last=is_last)
        content = "".join(each.text for each in found if each.kind == "content")
        calls: list[schemas.ToolCallDelta] = []
        for each in found:
            if each.kind == "call":
                calls.append(self._begin(each.text))
            elif each.kind == "arguments" and calls:
                calls[-1].function.arguments += each.text  # one entry of a list for each call
            elif each.kind == "arguments":
                function = schemas.CalledFunction(arguments=each.text)
                calls.append(schemas.ToolCallDelta(index=self.num_calls - 1, function=function))
        return schemas.ChatDelta(content=content or None, tool_calls=calls or None)

    def _begin(self, name: str) -> schemas.ToolCallDelta:
        self.num_calls += 1
        function = schemas.CalledFunction(name=name, arguments="")
        return schemas.ToolCallDelta(
            index=self.num_calls - 1, id=_new_id(), type="function", function=function
        )


def as_tools(tools: Sequence[bodies.Tool], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Tools as `Tokenizer.encode_chat` takes them.

    Raises:
      ApiError: the model's chat template has no tools, or calls in a format that is not known.
    """
    if tools and tokenizer.tool_format is None:
        shows = tokenizer.tool_support.shows_tools
        reason = "tool format is not supported" if shows else "chat template has no tools"
        raise ApiError(400, f"tools must be null or empty, as the model's {reason}.", param="tools")
    return [tool.model_dump(exclude_none=True, include={"type", "function"}) for tool in tools]


def check_calls(messages: Sequence[bodies.Message], tokenizer: Tokenizer) -> None:
    """Check that the model sees the calls in a chat.

    Raises:
      ApiError: there are calls, and the model's chat template leaves them out.
    """
    for index, message in enumerate(messages):
        if message.tool_calls and not tokenizer.tool_support.writes_calls:
            param = f"messages.{index}.tool_calls"
            reason = "as the model's chat template leaves calls out"
            raise ApiError(400, f"{param} must be null or empty, {reason}.", param=param)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
