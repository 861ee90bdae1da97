"""Blocks of an answer: reasoning, text and calls, one after the other, as they are generated.

`POST /v1/responses` and `POST /v1/messages` answer with such blocks. In a stream, each block is
opened, extended and closed before the next block is opened.
"""

import dataclasses
import secrets
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.sampling.params import StructuredOutputsParams
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
      kind: ``"reasoning"``, ``"content"`` or ``"call"``.
      name: name of the called function; empty for other kinds.
      text: the text, or the JSON of the arguments.
      id: 24 random hexadecimal digits.
    """

    index: int
    kind: BlockKind
    name: str = ""
    text: str = ""
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(12))


@dataclasses.dataclass(frozen=True)
class BlockChange:
    """A change of a block: it was opened, extended by a text, or closed."""

    what: Literal["open", "extend", "close"]
    block: Block
    text: str = ""


class BlockTracker:
    r"""Grouping of the parts of an answer into blocks. Text of only white space makes no block.

    Attributes:
      blocks: all blocks so far.
      is_open: whether the last block may be extended.

    Example:
      >>> tracker = BlockTracker()
      >>> parts = [AnswerDelta("content", "\n"), AnswerDelta("call", "f")]
      >>> changes = tracker.push([*parts, AnswerDelta("arguments", "{}")], is_last=True)
      >>> [change.what for change in changes], tracker.blocks[0].text
      (['open', 'extend', 'close'], '{}')
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.is_open = False
        self._space = ""  # white space that precedes a text, if one follows

    def push(self, parts: Iterable[AnswerDelta], *, is_last: bool = False) -> list[BlockChange]:
        """Add the next parts of the answer, and return the changes of its blocks.

        Args:
          parts: the new parts.
          is_last: whether the answer is complete.
        """
        changes: list[BlockChange] = []
        for kind, text in parts:
            if kind == "call":
                changes += [*self._close(), self._open("call", text)]
                continue
            wanted: BlockKind = "call" if kind == "arguments" else kind
            if not self.is_open or self.blocks[-1].kind != wanted:
                text, self._space = self._space + text, ""
                if not text.strip():
                    self._space = text
                    continue
                changes += [*self._close(), self._open(wanted)]
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
    """Common part of the responses that consist of blocks.

    Its last argument is the chat that the body describes.

    Attributes:
      format_field: name of the body field with the format of the text.
      tracker: the blocks so far.
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
        """Return the messages as a prompt, rendered by the model's chat template."""
        return [self.chat.token_ids()]

    @property
    def num_chars(self) -> int:
        """Number of characters of all messages."""
        return num_chars(self.chat.body.messages)

    @property
    @abstractmethod
    def has_format(self) -> bool:
        """Whether `format_field` constrains the text."""

    @abstractmethod
    def format_constraint(self) -> StructuredOutputsParams:
        """Return the constraint in `format_field`, if there is one."""

    @property
    def is_constrained(self) -> bool:
        """Whether a schema or grammar constrains the text."""
        return super().is_constrained or self.has_format or bool(self.chat.body.tools)

    @property
    def constraint_field(self) -> str:
        """Name of the body field that constrains the text."""
        return self.format_field if self.has_format else super().constraint_field

    def params(self) -> dict[str, Any]:
        """Return the sampling parameters, with the constraint on the whole text."""
        params = super().params()
        format = self.format_constraint() if self.has_format else None
        constraint = only_constraint(params, format, self.format_field)
        return params | self.chat.params(constraint, self.constraint_field)
