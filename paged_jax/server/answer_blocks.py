"""Answers that are sequences of blocks: reasoning, text and tool calls.

`POST /v1/responses` and `POST /v1/messages` have such answers. In a stream, each block is opened,
extended and closed before the next block is opened.
"""

import dataclasses
import secrets
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.server import bodies
from paged_jax.server.answers import Answer, only_constraint
from paged_jax.server.chats import Chat, num_chars
from paged_jax.server.request_log import RequestRecord
from paged_jax.server.sampling_body import SamplingBody
from paged_jax.server.service import Client, Service

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


class BlockAnswer(Answer):
    """Base class of the answers that consist of blocks.

    The argument `chat` is the body, converted to a body of ``POST /v1/chat/completions``.

    Attributes:
      format_field: name of the body field that may require a format of the text.
      tracker: the blocks generated so far.
    """

    end_mark = b""
    clamps_max_tokens = True
    format_field: str

    def __init__(
        self,
        service: Service,
        body: SamplingBody,
        client: Client,
        record: RequestRecord,
        chat: bodies.ChatBody,
    ):
        super().__init__(service, body, client, record)
        self.id = self.id.replace("-", "_", 1)
        self.chat = Chat(service, chat)
        self.tracker = BlockTracker()

    def prompts(self) -> list[str | list[int]]:
        """Return a list with one prompt: the token ids of the chat, rendered by the template."""
        return [self.chat.token_ids()]

    @property
    def num_chars(self) -> int:
        """Total number of characters of all messages."""
        return num_chars(self.chat.body.messages)

    @property
    @abstractmethod
    def has_format(self) -> bool:
        """Whether the body's field `format_field` requires a format of the text."""

    @abstractmethod
    def format_constraint(self) -> StructuredOutputsParams:
        """Return the constraint that `format_field` describes. Call it only if `has_format`."""

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar must be compiled: for a constraint on the text, or for tool calls."""
        return super().is_constrained or self.has_format or bool(self.chat.body.tools)

    @property
    def constraint_field(self) -> str:
        """Name of the body field with the constraint on the text."""
        return self.format_field if self.has_format else super().constraint_field

    def params(self) -> dict[str, Any]:
        """Return the sampling parameters, with a constraint for reasoning, tool calls and text."""
        params = super().params()
        format = self.format_constraint() if self.has_format else None
        constraint = only_constraint(params, format, self.format_field)
        return params | self.chat.params(constraint, self.constraint_field)
