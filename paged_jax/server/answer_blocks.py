"""Answers that are sequences of blocks: reasoning, text and tool calls.

`POST /v1/responses` and `POST /v1/messages` have such answers. In a stream, each block is opened,
extended and closed before the next block is opened.
"""

import dataclasses
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Literal

from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.server import bodies
from paged_jax.server.chats import Chat, num_chars
from paged_jax.server.generation_request import (
    GenerationRequest,
    constraint_field,
    only_constraint,
    read_common,
    read_params,
)
from paged_jax.server.sampling_body import SamplingBody
from paged_jax.server.service import Service
from paged_jax.server.writer import Writer

BlockKind = Literal["reasoning", "content", "call"]


@dataclasses.dataclass
class Block:
    """A block of an answer.

    Attributes:
      index: index of the block in the answer.
      kind: ``"reasoning"``, ``"content"`` (text for the user) or ``"call"`` (a tool call).
      name: name of the called function; empty for other kinds.
      text: the text so far. For a tool call, this is the JSON of the arguments.
      id: 24 random hexadecimal digits.
    """

    index: int
    kind: BlockKind
    name: str = ""
    text: str = ""
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))


@dataclasses.dataclass(frozen=True)
class BlockChange:
    """A change of a block: it was opened, `text` was appended to it, or it was closed."""

    action: Literal["open", "extend", "close"]
    block: Block
    text: str = ""


class BlockTracker:
    r"""Collector that divides an answer into blocks while it is generated.

    Text that consists of white space only does not become a block.

    Attributes:
      blocks: all blocks so far.
      is_open: whether the last block has not been closed yet.

    In the example, the line end before the tool call is dropped.

    Example:
      >>> tracker = BlockTracker()
      >>> parts = [AnswerDelta("content", "\n"), AnswerDelta("call", "f")]
      >>> changes = tracker.push([*parts, AnswerDelta("arguments", "{}")], is_last=True)
      >>> [change.action for change in changes], tracker.blocks[0].text
      (['open', 'extend', 'close'], '{}')
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.is_open = False
        self._space = ""  # white space that becomes part of the next block if that is a text

    def push(self, parts: Iterable[AnswerDelta], *, is_last: bool = False) -> list[BlockChange]:
        """Add newly generated parts of the answer, and return the resulting changes of blocks.

        Args:
          parts: the new parts.
          is_last: whether the answer is now complete, so that its last block is closed.
        """
        changes: list[BlockChange] = []
        for kind, text in parts:
            if kind == "call":
                changes += [*self._close(), self._open("call", text)]
                continue
            block_kind: BlockKind = "call" if kind == "arguments" else kind
            if not self.is_open or self.blocks[-1].kind != block_kind:
                text, self._space = self._space + text, ""
                if not text.strip():
                    self._space = text
                    continue
                changes += [*self._close(), self._open(block_kind)]
            self.blocks[-1].text += text
            changes.append(BlockChange("extend", self.blocks[-1], text))
        return [*changes, *(self._close() if is_last else ())]

    def _open(self, kind: BlockKind, name: str = "") -> BlockChange:
        self.is_open, self._space = True, ""
        self.blocks.append(Block(len(self.blocks), kind, name))
        return BlockChange("open", self.blocks[-1])

    def _close(self) -> list[BlockChange]:
        if not self.is_open:
            return []
        self.is_open = False
        return [BlockChange("close", self.blocks[-1])]


def read_blocks(
    service: Service,
    body: SamplingBody,
    chat_body: bodies.ChatBody,
    *,
    format_field: str,
    format: Callable[[], StructuredOutputsParams] | None,
    params: dict[str, Any],
    **fields: Any,
) -> GenerationRequest:
    """Read a body whose answer consists of blocks.

    Args:
      service: the engine and its settings.
      body: the parsed request body.
      chat_body: the body, converted to a body of ``POST /v1/chat/completions``.
      format_field: name of the body field that may require a format of the text.
      format: function that returns the constraint that this field describes; None if the field
        allows any text.
      params: sampling parameters in fields that only this API has.
      **fields: the other attributes of the request.
    """
    chat = Chat(service, chat_body)
    field = constraint_field(body) if format is None else format_field

    def read_all_params() -> dict[str, Any]:
        given = read_params(body)
        constraint = only_constraint(given, None if format is None else format(), format_field)
        return given | chat.params(constraint, field) | params

    has_constraint = body.structured_outputs is not None or format is not None
    return read_common(
        body,
        prompts=lambda: [chat.token_ids()],
        num_chars=num_chars(chat_body.messages),
        params=read_all_params,
        clamps_max_tokens=True,
        is_constrained=has_constraint or bool(chat_body.tools),
        constraint_field=field,
        chat=chat,
        **fields,
    )


class BlockWriter(Writer):
    """Base class of writers for answers that consist of blocks.

    Attributes:
      chat: the chat, which divides the text into reasoning, content and tool calls.
      tracker: the blocks generated so far.
    """

    end_mark = b""

    def __init__(
        self, service: Service, body: SamplingBody, request: GenerationRequest, request_id: str
    ):
        super().__init__(service, body, request, request_id)
        assert request.chat is not None
        self.id = f"{request.id_prefix}_{request_id}"
        self.chat = request.chat
        self.tracker = BlockTracker()
