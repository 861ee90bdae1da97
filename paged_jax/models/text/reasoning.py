r"""Formats of the reasoning of chat models, and parsers of answers with reasoning.

Most models write their reasoning before the answer, between an opening and a closing marker::

    prompt      ...<|im_start|>assistant\n
    text        <think>\nThe user asks for a sum.\n</think>\n\nIt is 5.
                        `--------- reasoning --------'            `-- answer

Some chat templates write the opening marker at the end of the prompt, so that the generated text
begins with the reasoning. Templates that can turn reasoning off write both markers there in this
case.

An answer of gpt-oss consists of several messages, each in a channel. This format is called
Harmony::

    <|channel|>analysis<|message|>The user asks for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}

The channel ``analysis`` contains the reasoning, ``final`` the answer, and ``commentary`` texts
before a tool call. A message to the recipient ``functions.NAME`` is a tool call, in any channel.
The recipient may be written before or after the channel. An answer ends with ``<|return|>`` or,
after a call, with ``<|call|>``. Both are end tokens. OpenAI's guide to Harmony describes the
format.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar_source import constraint_rule, quoted
from paged_jax.models.text.tool_formats import Tool, ToolFormat
from paged_jax.models.text.tool_grammars import arguments_rule
from paged_jax.models.text.tool_reader import AnswerDelta, ToolReader, overlap
from paged_jax.sampling.structured_outputs import StructuredOutputsParams

# Special tokens of Harmony.
HARMONY_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
_START, _END, _MESSAGE, *_ = HARMONY_MARKS
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.\-]+)")

# Place where the generated text begins: inside of the reasoning ("reasoning"), after the reasoning
# ("answer"), or before an opening marker that the model may or may not write ("either").
Start = Literal["reasoning", "answer", "either"]


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around the reasoning in the text of a model.

    Attributes:
      opening: marker before the reasoning.
      closing: marker after the reasoning.
      removed: markers around the answer, which are removed from it.
    """

    opening: str
    closing: str
    removed: tuple[str, ...] = ()

    def start(self, prompt: str) -> Start:
        """Return where the text generated after a prompt begins, see `Start`.

        Args:
          prompt: the prompt, or its end, which must include all text after the last message.

        Example:
          >>> THINK.start("<|assistant|>"), THINK.start("<|assistant|><think>")
          ('either', 'reasoning')
        """
        end = prompt.rstrip()
        if end.endswith(self.opening):
            return "reasoning"
        return "answer" if end.endswith(self.closing) else "either"

    def constrain(
        self, constraint: StructuredOutputsParams, start: Start
    ) -> StructuredOutputsParams:
        """Return a constraint that allows any reasoning before a text that matches `constraint`."""
        if start == "answer":
            return constraint
        rules = {
            "reasoning": "start: rest_of_reasoning answer",
            "either": f"start: {quoted(self.opening)} rest_of_reasoning answer | answer",
        }
        closing = re.escape(self.closing).replace("/", r"\/")
        return StructuredOutputsParams(
            grammar="\n".join(
                [
                    rules[start],
                    "rest_of_reasoning: inside_of_reasoning space_after_reasoning",
                    rf"inside_of_reasoning[lazy]: /(.|\n)*{closing}/",
                    r"space_after_reasoning: /\s{0,4}/",
                    f"answer: {constraint_rule(constraint)}",
                ]
            )
        )


THINK = ReasoningFormat("<think>", "</think>")
# Formats by the values of the option `--reasoning-format`.
FORMATS: Mapping[str, ReasoningFormat] = {
    "think": THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "cohere": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "harmony": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
}
HARMONY = FORMATS["harmony"]


def find_format(template: str) -> ReasoningFormat | None:
    """Return the reasoning format whose closing marker is in `template`; None if there is none."""
    if "<|channel|>" in template and _MESSAGE in template:
        return HARMONY
    return next((x for x in FORMATS.values() if x is not HARMONY and x.closing in template), None)


def select_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return the reasoning format for a value of the option `--reasoning-format`.

    Args:
      name: ``"auto"`` to detect the format from the chat template, ``"none"`` for no reasoning, or
        a key of `FORMATS`.
      template: source of the chat template; None if the model has none.

    Raises:
      ArgumentError: the name is unknown.
    """
    if name == "auto":
        return None if template is None else find_format(template)
    if name != "none" and name not in FORMATS:
        names = ", ".join(("auto", "none", *FORMATS))
        raise ArgumentError(
            "Settings", f"must be one of {names}, got {name!r}.", "reasoning_format"
        )
    return FORMATS.get(name)


class AnswerReader:
    r"""Incremental parser of an answer: reasoning, then text and tool calls.

    Args:
      reasoning: format of the reasoning; None if the model writes no reasoning.
      start: whether the text begins before, inside or after the reasoning, see `Start`.
      format: format of the tool calls; None if the request has no tools.
      tools: functions in the request that may be called.

    Attributes:
      has_reasoned: whether the text read so far contains reasoning.

    Example:
      >>> reader = AnswerReader(THINK, "either", None)
      >>> [tuple(part) for part in reader.push("<think>\nHm. </think>\n\nYes", is_last=True)]
      [('reasoning', 'Hm.'), ('content', 'Yes')]
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        start: Start,
        format: ToolFormat | None,
        tools: Sequence[Tool] = (),
    ):
        self._reasoning = reasoning
        self._tools = None if format is None else ToolReader(format, tools)
        self.has_reasoned = reasoning is not None and start == "reasoning"
        self._place: Start = "answer" if reasoning is None else start
        self._skips_space = True  # white space around the reasoning belongs to the markers
        self._buffer = ""

    @property
    def is_inside(self) -> bool:
        """Whether the text read so far ends inside of the reasoning."""
        return self._place == "reasoning"

    def push(self, text: str, *, is_last: bool = False) -> list[AnswerDelta]:
        """Read the next piece of the answer, and return all new parts that are certain.

        Text that may be the beginning of a marker is held back until the next `push`.

        Args:
          text: the next piece of the answer.
          is_last: whether this is the last piece.
        """
        parts: list[AnswerDelta] = []
        self._buffer += text
        if self._place == "either":
            self._read_opening(is_last)
        if self._place == "reasoning":
            parts += self._read_reasoning(is_last)
        if self._place == "answer":
            parts += self._read_answer(is_last)
        return [part for part in parts if part.text]

    def _read_opening(self, is_last: bool) -> None:
        assert self._reasoning is not None
        opening, text = self._reasoning.opening, self._buffer.lstrip()
        if text.startswith(opening):
            self._place, self._buffer = "reasoning", text[len(opening) :]
            self.has_reasoned = True
        elif is_last or not opening.startswith(text):
            self._place, self._skips_space = "answer", False

    def _read_reasoning(self, is_last: bool) -> list[AnswerDelta]:
        assert self._reasoning is not None
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        text, closing, remainder = self._buffer.partition(self._reasoning.closing)
        if closing:
            self._place, self._skips_space, self._buffer = "answer", True, remainder
            return [AnswerDelta("reasoning", text.rstrip())]
        num_held = 0 if is_last else overlap(text, self._reasoning.closing)
        reasoning_text = text[: len(text) - num_held].rstrip()
        self._buffer = text[len(reasoning_text) :]
        return [AnswerDelta("reasoning", reasoning_text)]

    def _read_answer(self, is_last: bool) -> list[AnswerDelta]:
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        text, self._buffer = self._buffer, ""
        for mark in () if self._reasoning is None else self._reasoning.removed:
            text = text.replace(mark, "")
            if not is_last and (num_held := overlap(text, mark)):
                text, self._buffer = text[:-num_held], text[-num_held:] + self._buffer
        if self._tools is not None:
            return self._tools.push(text, is_last=is_last)
        return [AnswerDelta("content", text)]


def harmony_grammar(
    token_ids: Mapping[str, int],
    tools: Sequence[Tool],
    *,
    is_required: bool = False,
    answer: str | None = None,
) -> str:
    """Return a Lark grammar of llguidance for answers in Harmony.

    Args:
      token_ids: id of each token in `HARMONY_MARKS`.
      tools: the functions that may be called.
      is_required: whether the answer must contain a call.
      answer: right side of a Lark rule for the text in the channel ``final``; None to allow any
        text.
    """
    start, end, message, channel, constrain = (f"<[{token_ids[mark]}]>" for mark in HARMONY_MARKS)
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
    r"""Incremental parser of an answer in Harmony, with the interface of `AnswerReader`.

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
        self._kind: str | None = None  # kind of the message that is being read; None in its header
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
        header, mark, message = self._buffer.partition(_MESSAGE)
        if not mark:
            if is_last:
                self._buffer = ""  # the answer was cut short
            return []
        self._buffer = message
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
            num_held = 0 if is_last else max(overlap(text, mark) for mark in (_END, _START))
            end = len(text) - num_held
            self._buffer = text[end:]
        return [AnswerDelta(kind, text[:end])]  # type: ignore[arg-type]
