"""Calls of functions in the text of chat models: how they are written, bound and read.

Two formats are known, which many models have:

    Hermes, Qwen    text, then one call or several:
                    <tool_call>
                    {"name": "weather", "arguments": {"city": "Oslo"}}
                    </tool_call>
    Llama 3         text, or one call:
                    {"name": "weather", "parameters": {"city": "Oslo"}}

A model's format is recognised from what its chat template makes of a known call.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paged_jax.models.text.closed_schema import close, without_annotations

# What the reader relies on: on one line, as Python writes it.
_LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": ')


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
      opening: text that begins a call, wherever it stands; if empty, a call is all of the text.
      before: text between that and the JSON of the call.
      after: text behind the JSON.
      arguments: the key of the arguments.
    """

    opening: str
    before: str
    after: str
    arguments: str

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], choice: str, *, is_parallel: bool = True
    ) -> str:
        """A grammar of llguidance for an answer.

        Args:
          tools: the functions, as OpenAI describes them.
          choice: ``"auto"``, where the answer may have calls, ``"required"``, or the name of the
            function that it calls once.
          is_parallel: whether it may have several calls, where the format has that.
        """
        functions = [tool["function"] for tool in tools]
        if choice not in ("auto", "required"):
            functions = [each for each in functions if each["name"] == choice]
        one = f"{_quoted(self.opening + self.before)} call {_quoted(self.after)}"
        if not self.opening:
            rules = ["start: call | text?", r"text: /[^{](.|\n)*/"]
            rules = rules if choice == "auto" else ["start: call"]
        elif choice == "auto":
            rest = f"head {_quoted(self.before)} call {_quoted(self.after)}"
            rules = [f"start: ({rest})* text" if is_parallel else f"start: {rest} | text"]
            rules += [rf"head[lazy]: /(.|\n)*{re.escape(self.opening)}/", r"text: /(.|\n)*/"]
        elif choice == "required" and is_parallel:
            rules = [f'start: {one} ("\\n" {one})*']
        else:
            rules = [f"start: {one}"]
        names = [f"call_{index}" for index in range(len(functions))]
        rules.append(f"call: {' | '.join(names)}")
        rules += map(self._rule, names, functions)
        return "\n".join(rules)

    def _rule(self, name: str, function: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(function["name"])}, "{self.arguments}": '
        schema = _arguments(function.get("parameters"))
        # A schema is a hint unless it is strict: parts that cannot be expressed are left out.
        options = {**_LAYOUT, "lenient": not function.get("strict")}
        schema = {**close(schema), "x-guidance": options}
        return f'{name}: {_quoted(head)} %json {json.dumps(schema)} "}}"'


HERMES = ToolFormat("<tool_call>", "\n", "\n</tool_call>", "arguments")
LLAMA3 = ToolFormat("", "", "", "parameters")


@dataclass(frozen=True)
class ToolSupport:
    """Support for tools in a chat template.

    Attributes:
      shows_tools: whether the model sees the functions that it may call.
      writes_calls: whether the model sees the calls that it has made before.
      format: how the model writes calls; None if it is none of the formats that are known here.
    """

    shows_tools: bool = False
    writes_calls: bool = False
    format: ToolFormat | None = None


# A chat whose parts are found again in what a template makes of it. Some templates want a
# description of everything, and ids of nine letters or digits.
_NAME, _VALUE, _TEXT = "probed_function", "probed value", "\N{SNOWMAN}"
_ARGUMENTS = {"k": _VALUE, "n": 2}
_QUESTION = {"role": "user", "content": "Probe?"}
_CALL = {
    "id": "probe1234",
    "type": "function",
    "function": {"name": _NAME, "arguments": _ARGUMENTS},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "k": {"type": "string", "description": "K."},
                "n": {"type": "integer", "description": "N."},
            },
            "required": ["k", "n"],
        },
    },
}
_WRITTEN = re.compile(
    rf"(?P<opening><tool_call>)?(?P<before>\s*)"
    rf'\{{"name": "{_NAME}", "(?P<arguments>arguments|parameters)": '
    rf"{re.escape(json.dumps(_ARGUMENTS))}\}}(?P<after>\s*</tool_call>)?"
)
# A special token may follow a call, in addition to the end of a message.
_END = re.compile(r"\s*<[^<>]+>\s*")


def find_support(render: Callable[..., str]) -> ToolSupport:
    """Find out how a chat template handles tools, by rendering a chat with a known call.

    Args:
      render: see `ChatTemplate.render`.

    Example:
      >>> find_support(lambda messages, **variables: messages[-1]["content"])
      ToolSupport(shows_tools=False, writes_calls=False, format=None)
    """

    def rendered(*answer: Mapping[str, Any]) -> str | None:
        try:
            return render([_QUESTION, *answer], tools=[_TOOL], add_generation_prompt=not answer)
        except ValueError:
            return None  # a real chat like this gets the error of the template

    asked = rendered()
    text = rendered({"role": "assistant", "content": _TEXT})
    called = rendered({"role": "assistant", "content": "", "tool_calls": [_CALL]})
    return ToolSupport(
        shows_tools=asked is None or _NAME in asked,
        writes_calls=called is None or _VALUE in called,
        format=None if text is None or called is None else _recognise(called, text),
    )


def _recognise(called: str, text: str) -> ToolFormat | None:
    """Return the format of a call. The same chat with a text shows where the call begins.

    Args:
      called: a chat that ends with a call.
      text: the same chat with `_TEXT` instead.
    """
    found = _WRITTEN.search(called)
    if found is None:
        return None
    head, tail = called[: found.start()].rstrip(), called[found.end() :].lstrip()
    # Nothing but the call may stand where the text stands.
    if not text.startswith(head) or not (text.endswith(tail) or _END.fullmatch(tail)):
        return None
    opening, after = found["opening"] or "", found["after"] or ""
    if bool(opening) is not bool(after):
        return None
    if not opening:
        is_alone = text[len(head) :].lstrip().startswith(_TEXT)
        return ToolFormat("", "", "", found["arguments"]) if is_alone else None
    return ToolFormat(opening, found["before"], after, found["arguments"])


class ToolDelta(NamedTuple):
    """What is new in a text: text outside of calls, the beginning of a call, or more of its
    arguments.

    Attributes:
      kind: which of the three.
      text: the text, the name of the function, or the JSON of the arguments.
    """

    kind: Literal["content", "call", "arguments"]
    text: str


class ToolReader:
    """Reads text and calls from an answer as it comes.

    Args:
      format: how the model writes calls.

    Example:
      >>> reader = ToolReader(LLAMA3)
      >>> [*reader.push('{"name": "f", "parameters": {"a"'), *reader.push(": 1}}", is_last=True)]
      [ToolDelta(kind='call', text='f'), ToolDelta(kind='arguments', text='{"a"'),
       ToolDelta(kind='arguments', text=': 1}')]
    """

    def __init__(self, format: ToolFormat):
        self._format = format
        self._buffer = ""
        # Where it is: in text, in front of a call's name, or in the arguments.
        self._place: Literal["text", "head", "arguments"] = "text"
        self._is_start = True
        self._skips_space = False  # that between two calls is no text
        self._arguments = ""

    def push(self, text: str, *, is_last: bool = False) -> list[ToolDelta]:
        """Take more of the answer, and return what is certain of it.

        Args:
          text: what is new.
          is_last: whether the answer is complete.
        """
        self._buffer += text
        deltas: list[ToolDelta] = []
        while True:
            place, rest = self._place, self._buffer
            deltas += getattr(self, f"_read_{place}")(is_last)
            if (place, rest) == (self._place, self._buffer):
                return [delta for delta in deltas if delta.text]

    def _read_text(self, is_last: bool) -> list[ToolDelta]:
        opening = self._format.opening
        if not opening:
            if self._is_start and self._buffer.startswith("{"):
                self._place = "head"
                return []
            return self._content(self._buffer, "")
        before, found, after = self._buffer.partition(opening)
        if found:
            self._place = "head"
            return self._content(before, after)
        held = 0 if is_last else _num_begun(opening, self._buffer)
        end = len(self._buffer) - held
        return self._content(self._buffer[:end], self._buffer[end:])

    def _content(self, text: str, rest: str) -> list[ToolDelta]:
        self._buffer = rest
        text = text.lstrip() if self._skips_space else text
        self._skips_space &= not text
        self._is_start &= not text
        return [ToolDelta("content", text)]

    def _read_head(self, is_last: bool) -> list[ToolDelta]:
        if found := _HEAD.match(self._buffer):
            self._place, self._buffer = "arguments", self._buffer[found.end() :]
            self._arguments = ""
            return [ToolDelta("call", json.loads(found[1]))]
        if not is_last:
            return []
        text, self._buffer, self._place = self._format.opening + self._buffer, "", "text"
        return [ToolDelta("content", text)]  # cut short

    def _read_arguments(self, is_last: bool) -> list[ToolDelta]:
        closing = "}" + self._format.after
        at = self._buffer.find(closing) if self._format.after else self._find_end(is_last)
        if at >= 0:
            rest, self._place, self._skips_space = at + len(closing), "text", True
        elif is_last:
            at = rest = len(self._buffer)  # cut short
        else:
            at = rest = len(self._buffer) - _num_begun(closing, self._buffer)
        text, self._buffer = self._buffer[:at], self._buffer[rest:]
        self._arguments += text
        return [ToolDelta("arguments", text)]

    def _find_end(self, is_last: bool) -> int:
        """Where the arguments end that only the end of the text closes; -1 if they go on."""
        if not (is_last and self._buffer.endswith("}")):
            return -1
        try:
            json.loads(self._arguments + self._buffer[:-1])
        except ValueError:
            return -1
        return len(self._buffer) - 1


def _arguments(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are always an object."""
    if parameters is None:
        return {"type": "object", "properties": {}}
    schema = without_annotations(parameters)
    kind = schema.get("type", "object")
    if kind == "object" or isinstance(kind, list) and "object" in kind:
        return {**schema, "type": "object"}
    return {"allOf": [schema, {"type": "object"}]}  # an error, as nothing is both


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _num_begun(text: str, buffer: str) -> int:
    """How many characters at the end of a buffer are the beginning of a text."""
    longest = min(len(text), len(buffer))
    return next((n for n in range(longest, 0, -1) if buffer.endswith(text[:n])), 0)
