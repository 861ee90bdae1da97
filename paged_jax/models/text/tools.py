"""Tool calls in the text of chat models: formats, grammars, and a parser.

Two formats are known, which many models use:

    Hermes, Qwen    text, then one call or several:
                    <tool_call>
                    {"name": "weather", "arguments": {"city": "Oslo"}}
                    </tool_call>
    Llama 3         text, or one call:
                    {"name": "weather", "parameters": {"city": "Oslo"}}

The format of a model is detected by rendering a known call with its chat template.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar import GrammarCompiler
from paged_jax.models.text.grammar_source import LAYOUT, close, without_annotations
from paged_jax.sampling.params import StructuredOutputsParams

Tool = Mapping[str, Any]

# The beginning of a call in the layout that the grammar enforces.
_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": ')
# Number of sets of tools whose forms are kept, because a chat sends its tools with each request.
_NUM_KEPT = 32
# Maximum number of schemas compiled separately to find unsupported schemas. Each takes
# milliseconds.
_MAX_CHECKS = 512
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# Keys of a schema with definitions that its arguments may refer to.
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls in the text of a model.

    Attributes:
      opening: text before each call. If empty, an answer is either text or a single call.
      before: text between the opening and the JSON of the call.
      after: text after the JSON.
      arguments: key of the arguments in the JSON.
    """

    opening: str
    before: str
    after: str
    arguments: str

    def grammar(self, tools: Sequence[Tool], choice: str, *, is_parallel: bool = True) -> str:
        """Return llguidance's grammar of an answer.

        Args:
          tools: the functions, as OpenAI describes them.
          choice: ``"auto"`` if the answer may contain calls, ``"required"`` if it must, or the name
            of the function to call once.
          is_parallel: whether the answer may contain several calls, if the format supports that.
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
        # A schema is a hint unless it is strict: in lenient mode llguidance ignores unsupported
        # parts.
        options = {**LAYOUT, "lenient": not function.get("strict")}
        schema = {**close(schema), "x-guidance": options}
        return f'{name}: {_quoted(head)} %json {json.dumps(schema)} "}}"'


HERMES = ToolFormat("<tool_call>", "\n", "\n</tool_call>", "arguments")
LLAMA3 = ToolFormat("", "", "", "parameters")
# Format used to check the schema of a single tool. Any format would do.
_BARE = ToolFormat("", "", "", "arguments")


@dataclass(frozen=True)
class ToolSupport:
    """Support for tools in a chat template.

    Attributes:
      shows_tools: whether the model sees the functions that it may call.
      writes_calls: whether the model sees its earlier calls.
      format: format of the calls; None if it is unknown.
    """

    shows_tools: bool = False
    writes_calls: bool = False
    format: ToolFormat | None = None


# A known chat, with texts that can be found in the rendered chat. Some templates need a description
# of everything, and ids of nine letters or digits.
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
            return None  # counts as supported: a real chat then gets the template's own error

    asked = rendered()
    text = rendered({"role": "assistant", "content": _TEXT})
    called = rendered({"role": "assistant", "content": "", "tool_calls": [_CALL]})
    return ToolSupport(
        shows_tools=asked is None or _NAME in asked,
        writes_calls=called is None or _VALUE in called,
        format=None if text is None or called is None else _recognise(called, text),
    )


def _recognise(called: str, text: str) -> ToolFormat | None:
    """Return the format of a call; None if it is unknown.

    Args:
      called: a rendered chat that ends with a call.
      text: the same chat with `_TEXT` instead, which shows where the call begins.
    """
    found = _WRITTEN.search(called)
    if found is None:
        return None
    head, tail = called[: found.start()].rstrip(), called[found.end() :].lstrip()
    # Apart from the call and the text, both chats must be equal.
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
    """New part of an answer: text, the start of a call, or arguments of a call.

    Attributes:
      kind: ``"content"`` for text outside of calls, ``"call"`` or ``"arguments"``.
      text: the text, the name of the function, or a part of the JSON of the arguments.
    """

    kind: Literal["content", "call", "arguments"]
    text: str


class ToolReader:
    """Incremental parser of answers with tool calls.

    Args:
      format: format of the calls.

    Example:
      >>> reader = ToolReader(LLAMA3)
      >>> [*reader.push('{"name": "f", "parameters": {"a"'), *reader.push(": 1}}", is_last=True)]
      [ToolDelta(kind='call', text='f'), ToolDelta(kind='arguments', text='{"a"'),
       ToolDelta(kind='arguments', text=': 1}')]
    """

    def __init__(self, format: ToolFormat):
        self._format = format
        self._buffer = ""
        # Position: in text, before the name of a call, or in the arguments.
        self._place: Literal["text", "head", "arguments"] = "text"
        self._is_start = True
        self._skips_space = False  # white space between two calls is not text
        self._arguments = ""

    def push(self, text: str, *, is_last: bool = False) -> list[ToolDelta]:
        """Read more text of the answer, and return the parts that are complete enough to report.

        Args:
          text: the new text.
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
        held = 0 if is_last else overlap(self._buffer, opening)
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
        # The answer was cut short, so the beginning of a call counts as text.
        return [ToolDelta("content", text)]

    def _read_arguments(self, is_last: bool) -> list[ToolDelta]:
        closing = "}" + self._format.after
        at = self._buffer.find(closing) if self._format.after else self._find_end(is_last)
        if at >= 0:
            rest, self._place, self._skips_space = at + len(closing), "text", True
        elif is_last:
            at = rest = len(self._buffer)  # the answer was cut short
        else:
            at = rest = len(self._buffer) - overlap(self._buffer, closing)
        text, self._buffer = self._buffer[:at], self._buffer[rest:]
        self._arguments += text
        return [ToolDelta("arguments", text)]

    def _find_end(self, is_last: bool) -> int:
        """Return the index in the buffer at which arguments end, for formats without closing text.

        It is -1 if the arguments are incomplete.
        """
        if not (is_last and self._buffer.endswith("}")):
            return -1
        try:
            json.loads(self._arguments + self._buffer[:-1])
        except ValueError:
            return -1
        return len(self._buffer) - 1


def _arguments(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which must be an object."""
    if parameters is None:
        return {"type": "object", "properties": {}}
    schema = without_annotations(parameters)
    kind = schema.get("type", "object")
    if kind == "object" or isinstance(kind, list) and "object" in kind:
        return {**schema, "type": "object"}
    return {"allOf": [schema, {"type": "object"}]}  # unsatisfiable, so llguidance rejects it


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `marker`.

    Example:
      >>> overlap("a </tool", "</tool_call>")
      6
    """
    at = text.find(marker[0])
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class ToolGrammars:
    """Constraints on the text of answers that call tools, with a cache. It is thread-safe.

    The schema of a tool with ``strict: true`` is enforced completely, or rejected. Without
    ``strict`` a schema is a hint: the grammar enforces the parts that llguidance supports, and
    arguments or tools with unsupported schemas may have any value.

    Args:
      grammars: compiles the grammars.
    """

    def __init__(self, grammars: GrammarCompiler):
        self._grammars = grammars
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, StructuredOutputsParams] = OrderedDict()

    def form(
        self, format: ToolFormat, tools: Sequence[Tool], choice: str, *, is_parallel: bool = True
    ) -> StructuredOutputsParams:
        """Return the constraint on an answer. Its grammar is known to compile.

        Args:
          format: format of the calls.
          tools: the functions, as OpenAI describes them.
          choice: see `ToolFormat.grammar`.
          is_parallel: see `ToolFormat.grammar`.

        Raises:
          ArgumentError: the schema of a strict tool is not supported, or grammars are not available
            for the model.
        """
        if choice not in ("auto", "required"):
            tools = [tool for tool in tools if tool["function"]["name"] == choice]

        def write(tools: Sequence[Tool]) -> StructuredOutputsParams:
            grammar = format.grammar(tools, choice, is_parallel=is_parallel)
            return StructuredOutputsParams(grammar=grammar)

        asked = write(tools)
        with self._lock:
            form = self._kept.get(asked)
        try:
            self._grammars.check_available()
            if form is None:
                form = self._compiling(write, asked, tools)
        except ArgumentError as error:
            raise ArgumentError(error.function, error.problem, "tools") from None
        with self._lock:
            self._kept[asked] = form
            self._kept.move_to_end(asked)
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return form

    def _compiling(
        self,
        write: Callable[[Sequence[Tool]], StructuredOutputsParams],
        asked: StructuredOutputsParams,
        tools: Sequence[Tool],
    ) -> StructuredOutputsParams:
        """Return a form that compiles, with as much of the schemas as possible."""
        if _failure(self._grammars.compile, asked) is None:
            return asked
        tools = self._supported(tools)
        form = write(tools)
        # All schemas together may still be too large: drop the largest schemas first.
        hints = [i for i, tool in enumerate(tools) if not tool["function"].get("strict")]
        hints.sort(key=lambda i: -len(json.dumps(tools[i])))
        count = 1
        while (error := _failure(self._grammars.compile, form)) is not None:
            if not hints:
                raise error
            for index in hints[:count]:
                tools[index] = _with_parameters(tools[index], _ANY_OBJECT)
            hints, count = hints[count:], 2 * count
            form = write(tools)
        return form

    def _supported(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return the tools with the supported parts of their schemas.

        Raises:
          ArgumentError: the schema of a strict tool is not supported.
        """
        failing = []
        for index, tool in enumerate(tools[:_MAX_CHECKS]):
            if (error := self._tool_failure(tool)) is not None:
                failing.append(index)
                if tool["function"].get("strict"):
                    raise _strict_error(tool, error)
        found = list(tools)
        for index in failing:
            found[index] = self._loosened(tools[index], _MAX_CHECKS // len(failing))
        return found

    def _loosened(self, tool: Tool, max_checks: int) -> Tool:
        """Return a tool with the supported parts of its unsupported schema."""
        schema = tool["function"]["parameters"]
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and len(properties) <= max_checks:
            shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
            bound = {
                name: self._supported_argument(tool, name, argument, shared)
                for name, argument in properties.items()
            }
            looser = _with_parameters(tool, {**schema, "properties": bound})
            if self._tool_failure(looser) is None:
                return looser
        return _with_parameters(tool, _ANY_OBJECT)

    def _supported_argument(
        self, tool: Tool, name: str, schema: Any, shared: Mapping[str, Any]
    ) -> Any:
        """Return the schema of an argument; only its type if the schema is not supported."""
        alone = {"type": "object", "properties": {name: schema}, **shared}
        if self._tool_failure(_with_parameters(tool, alone)) is None:
            return schema
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        return {"type": kind} if kind in _TYPES else {}

    def _tool_failure(self, tool: Tool) -> ArgumentError | None:
        """Return the error for the schema of a tool; None if the schema is supported."""
        rule = _BARE.grammar([tool], "required")
        return _failure(self._grammars.check, StructuredOutputsParams(grammar=rule))


def _failure(
    compile: Callable[[StructuredOutputsParams], object], form: StructuredOutputsParams
) -> ArgumentError | None:
    try:
        compile(form)
    except ArgumentError as error:
        return error
    return None


def _strict_error(tool: Tool, error: ArgumentError) -> ArgumentError:
    # Keep llguidance's reason only, without the source of the grammar.
    reason = error.problem.rpartition("JSON schema: ")[2].partition(" 1 | ")[0].rstrip(".")
    name = tool["function"]["name"]
    return ArgumentError(
        "request",
        f"must have supported schemas if strict is true, got an unsupported schema for {name!r}: "
        f"{reason}. Without strict a schema is a hint.",
        "tools",
    )


def _with_parameters(tool: Tool, schema: Mapping[str, Any]) -> Tool:
    return {**tool, "function": {**tool["function"], "parameters": schema}}
