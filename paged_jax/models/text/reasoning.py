r"""Reasoning of chat models: text before the answer, between two marks.

    prompt      ...<|im_start|>assistant\n
    text        <think>\nThe user asks for a sum.\n</think>\n\nIt is 5.
                        `--------- reasoning --------'            `-- answer

Some chat templates write the opening mark at the end of the prompt, so that the text begins with
reasoning. Templates that can switch reasoning off write both marks there.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar_source import constraint_rule, quoted
from paged_jax.models.text.harmony import uses_harmony
from paged_jax.models.text.tool_formats import Tool, ToolFormat
from paged_jax.models.text.tool_reader import AnswerDelta, ToolReader, overlap
from paged_jax.sampling.params import StructuredOutputsParams

# Where the text of an answer begins: inside of the reasoning ("reasoning"), after it ("answer"), or
# with an opening mark if the model reasons ("either").
Start = Literal["reasoning", "answer", "either"]


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks of the reasoning in the text of a model.

    Attributes:
      opening: text before the reasoning.
      closing: text after the reasoning.
      removed: marks around the answer, which are not part of it.
    """

    opening: str
    closing: str
    removed: tuple[str, ...] = ()

    def start(self, prompt: str) -> Start:
        """Return where the answer to a prompt begins.

        Args:
          prompt: the end of the prompt, at least the text after the last message.

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
        """Return a constraint that allows any reasoning, and applies `constraint` to the answer."""
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
# Formats by the names of the option `--reasoning-format`.
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
    """Return the format whose closing mark a chat template contains; None if there is none."""
    if uses_harmony(template):
        return HARMONY
    return next((x for x in FORMATS.values() if x is not HARMONY and x.closing in template), None)


def select_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return the format of a model that an option names.

    Args:
      name: ``"auto"`` to detect it from the chat template, ``"none"`` for none, or a name of
        `FORMATS`.
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
      reasoning: format of the reasoning; None if the text contains none.
      start: where the text begins.
      format: format of the tool calls; None if the request has no tools.
      tools: the functions of the request.

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
        self._skips_space = True  # white space around the reasoning belongs to the marks
        self._buffer = ""

    @property
    def is_inside(self) -> bool:
        """Whether the text read so far ends inside of the reasoning."""
        return self._place == "reasoning"

    def push(self, text: str, *, is_last: bool = False) -> list[AnswerDelta]:
        """Read more text of the answer, and return the parts that are complete enough to report.

        Args:
          text: the new text.
          is_last: whether the answer is complete.
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
        opening, found = self._reasoning.opening, self._buffer.lstrip()
        if found.startswith(opening):
            self._place, self._buffer = "reasoning", found[len(opening) :]
            self.has_reasoned = True
        elif is_last or not opening.startswith(found):
            self._place, self._skips_space = "answer", False

    def _read_reasoning(self, is_last: bool) -> list[AnswerDelta]:
        assert self._reasoning is not None
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        text, closing, rest = self._buffer.partition(self._reasoning.closing)
        if closing:
            self._place, self._skips_space, self._buffer = "answer", True, rest
            return [AnswerDelta("reasoning", text.rstrip())]
        held = 0 if is_last else overlap(text, self._reasoning.closing)
        kept = text[: len(text) - held].rstrip()
        self._buffer = text[len(kept) :]
        return [AnswerDelta("reasoning", kept)]

    def _read_answer(self, is_last: bool) -> list[AnswerDelta]:
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        text, self._buffer = self._buffer, ""
        for mark in () if self._reasoning is None else self._reasoning.removed:
            text = text.replace(mark, "")
            if not is_last and (held := overlap(text, mark)):
                text, self._buffer = text[:-held], text[-held:] + self._buffer
        if self._tools is not None:
            return self._tools.push(text, is_last=is_last)
        return [AnswerDelta("content", text)]
