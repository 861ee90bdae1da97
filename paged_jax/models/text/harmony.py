"""Harmony, the format of gpt-oss: an answer is several messages, each in a channel.

    <|channel|>analysis<|message|>The user asks for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}

The channel ``analysis`` has the reasoning, ``final`` the answer, and ``commentary`` texts before a
call. A message to ``functions.NAME`` is a call, on any channel; its recipient may also stand before
the channel. The end of an answer is ``<|return|>`` or, after a call, ``<|call|>``: both are tokens
that end the generation. The format is described in OpenAI's guide to Harmony.
"""

import re
from collections.abc import Mapping, Sequence

from paged_jax.models.text.grammar_source import quoted
from paged_jax.models.text.tool_formats import Tool
from paged_jax.models.text.tool_grammars import arguments_rule
from paged_jax.models.text.tool_reader import AnswerDelta, overlap

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
_MESSAGE, _END, _START = "<|message|>", "<|end|>", "<|start|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.\-]+)")


def uses_harmony(template: str) -> bool:
    """Return whether a chat template writes messages in Harmony."""
    return "<|channel|>" in template and _MESSAGE in template


def harmony_grammar(
    token_ids: Mapping[str, int],
    tools: Sequence[Tool],
    *,
    is_required: bool = False,
    answer: str | None = None,
) -> str:
    """Return llguidance's grammar of an answer.

    Args:
      token_ids: id of each token in `MARKS`.
      tools: the functions that may be called.
      is_required: whether the answer must be a call.
      answer: right side of a Lark rule for the text in the channel ``final``; None for any text.
    """
    start, end, message, channel, constrain = (f"<[{token_ids[mark]}]>" for mark in MARKS)
    functions = [tool["function"] for tool in tools]
    last = ["call"] if functions else []
    if not is_required:
        last.append("final")
    rules = [
        f"start: before* ({' | '.join(last)})",
        f'before: {channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"',
        f'final: {channel} "final" {message} answer',
        f"answer: {answer or 'TEXT'}",
        r"TEXT: /(.|\n)*/",
    ]
    if not functions:
        return "\n".join(rules)
    json = f'" "? {constrain}? "json" {message}'
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}")
    for index, function in enumerate(functions):
        name = quoted(f" to=functions.{function['name']}")
        arguments = arguments_rule(function)
        rules.append(
            f'call_{index}: {channel} "commentary" {name} {json} {arguments} '
            f'| {name} {channel} "commentary" {json} {arguments}'
        )
    return "\n".join(rules)


class HarmonyReader:
    r"""Incremental parser of an answer in Harmony.

    Attributes:
      has_reasoned: whether the answer contains reasoning.
      is_inside: whether the text read so far ends inside of the reasoning.

    Example:
      >>> reader = HarmonyReader()
      >>> text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
      >>> [tuple(part) for part in reader.push(text + "<|message|>Yes", is_last=True)]
      [('reasoning', 'Hm.'), ('content', 'Yes')]
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._kind: str | None = None  # kind of the open message; None in a header
        self.has_reasoned = False

    @property
    def is_inside(self) -> bool:
        """Whether the text read so far ends inside of the reasoning."""
        return self._kind == "reasoning"

    def push(self, text: str, *, is_last: bool = False) -> list[AnswerDelta]:
        """Read more text of the answer, and return its new parts, see `AnswerReader.push`."""
        self._buffer += text
        parts: list[AnswerDelta] = []
        while True:
            before = self._kind, self._buffer
            read = self._read_header if self._kind is None else self._read_message
            parts += read(is_last)
            if before == (self._kind, self._buffer):
                return [part for part in parts if part.text]

    def _read_header(self, is_last: bool) -> list[AnswerDelta]:
        header, found, rest = self._buffer.partition(_MESSAGE)
        if not found:
            if is_last:
                self._buffer = ""  # the answer was cut short
            return []
        self._buffer = rest
        if call := _RECIPIENT.search(header):
            self._kind = "arguments"
            return [AnswerDelta("call", call[1])]
        channel = _CHANNEL.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        self._kind = "reasoning" if is_analysis else "content"
        self.has_reasoned |= is_analysis
        return []

    def _read_message(self, is_last: bool) -> list[AnswerDelta]:
        assert self._kind is not None
        kind, text = self._kind, self._buffer
        ends = [at for mark in (_END, _START) if (at := text.find(mark)) >= 0]
        if ends:
            end = min(ends)
            self._kind, self._buffer = None, text[end:].removeprefix(_END)
        else:
            held = 0 if is_last else max(overlap(text, mark) for mark in (_END, _START))
            end = len(text) - held
            self._buffer = text[end:]
        return [AnswerDelta(kind, text[:end])]  # type: ignore[arg-type]
