"""Grammars that enforce the format of tool calls and the schemas of their arguments."""

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar import GrammarCompiler
from paged_jax.models.text.grammar_source import LAYOUT, quoted
from paged_jax.models.text.json_schemas import (
    DEFINITIONS,
    close,
    is_text,
    merged,
    resolve,
    without_annotations,
)
from paged_jax.models.text.tool_formats import HERMES, ID, NUMBER, Tool, ToolFormat
from paged_jax.sampling.structured_outputs import StructuredOutputsParams

# Number of lists of tools for which the constraint is cached. The cache helps because every request
# of a chat contains the same tools.
_NUM_KEPT = 32
# Maximum number of schemas that are compiled separately to find out which of them are not
# supported. Each takes milliseconds.
_MAX_CHECKS = 512
# Largest ``maxLength`` that grammars enforce for strings without quotes. A larger bound would
# require a large lexer.
_MAX_LENGTH = 256
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# Grammar rules for the parts of a tool call's surrounding text that vary: the call's id and its
# index.
_HOLES = {ID: "call_id", NUMBER: "call_number"}
_HOLE_RULES = {"call_id": "/[a-zA-Z0-9]{9}/", "call_number": "/[0-9]{1,3}/"}


def tool_grammar(
    format: ToolFormat,
    tools: Sequence[Tool],
    *,
    is_required: bool = False,
    is_parallel: bool = True,
    answer: str | None = None,
    not_first: str | None = None,
) -> str:
    """Return a Lark grammar of llguidance for answers that may call tools.

    Args:
      format: format of the tool calls.
      tools: the functions that may be called, in OpenAI's format.
      is_required: whether the answer must consist of calls.
      is_parallel: whether the answer may contain several calls, if the format allows it.
      answer: right side of a Lark rule for answers without calls; None to allow any text. It is not
        used if a call is required.
      not_first: text with which the answer must not begin, such as an opening marker of reasoning.
    """
    writer = _Writer(format)
    rules, mark = writer.start(is_required, is_parallel, answer), format.mark
    if not is_required and answer is None:
        exclusion = "" if not_first is None else rf" & ~/{_escaped(not_first)}(.|\n)*/"
        first = "" if mark else f"[^{re.escape((format.opening + format.before_name)[0])}]"
        rules.append(rf"TEXT: /{first}(.|\n)*/{exclusion}")
        if mark in writer.special:
            rules.append(f"head: TEXT {writer.literal(mark)}")
        elif mark:
            rules.append(rf"head[lazy]: /(.|\n)*{_escaped(mark)}/{exclusion}")
    elif answer is not None:
        rules.append(f"answer: {answer}")
    rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")
    for index, tool in enumerate(tools):
        rules += writer.call(f"call_{index}", tool["function"])
    text = "\n".join(rules)
    holes = [f"{name}: {pattern}" for name, pattern in _HOLE_RULES.items() if name in text]
    return "\n".join([text, *holes])


class _Writer:
    """Writer of Lark rules for tool calls in one format."""

    def __init__(self, format: ToolFormat):
        self._format = format
        self.special = dict(format.special_tokens)
        self._names = itertools.count()

    def start(self, is_required: bool, is_parallel: bool, answer: str | None) -> list[str]:
        """Return two rules: ``start`` for an answer, ``block`` for its calls after the mark."""
        format, mark = self._format, self._format.mark
        opening = (format.opening + format.before_name).removeprefix(mark)
        calls = "call"
        if is_parallel and format.between is not None:
            calls = f"call ({self.literal(format.between + format.before_name)} call)*"
        block = f"{self.literal(opening)} {calls} {self.literal(format.closing)}"
        marked_block = f"{self.literal(mark)} block"
        if is_required:
            start = marked_block
        elif answer is not None:
            start = f"{marked_block} | answer"
        elif not mark:
            start = "block | TEXT?"
        else:
            start = "(head block)* TEXT" if is_parallel else "head block | TEXT"
        return [f"start: {start}", f"block: {block}"]

    def literal(self, text: str) -> str:
        """Return a Lark expression for a text of the format.

        Each special token in the text, and each placeholder for an id or an index, becomes a symbol
        of its own.
        """
        names = sorted(self.special, key=len, reverse=True)
        splitter = "|".join(map(re.escape, (*names, *_HOLES)))
        parts = []
        for part in re.split(f"({splitter})", text):
            if part in self.special:
                parts.append(f"<[{self.special[part]}]>")
            elif part:
                parts.append(_HOLES.get(part) or quoted(part))
        return " ".join(parts) or '""'

    def call(self, rule: str, function: Mapping[str, Any]) -> list[str]:
        """Return the rules for a call of a function, from its name to the text after arguments."""
        format = self._format
        schema, options = _schema(function, format.separators)
        head = self.literal(function["name"] + format.after_name)
        end = self.literal(format.after_arguments)
        if format.kind == "json":
            return [f"{rule}: {head} {_json(schema, options)} {end}"]
        pairs, rules = self._pairs(rule, schema, options)
        return [f"{rule}: {head} {pairs} {end}", *rules]

    def _pairs(
        self, rule: str, schema: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[str, list[str]]:
        """Return a Lark expression for arguments of the kind "xml" or "python", and its rules."""
        shared = {name: schema[name] for name in DEFINITIONS if name in schema}
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        parts: list[tuple[str, bool]] = []
        rules: list[str] = []
        for index, (name, inner) in enumerate(properties.items()):
            inner = resolve(inner, schema)
            inner = {**inner, **shared} if isinstance(inner, Mapping) else {}
            value = f"{rule}_value_{index}"
            rules.append(self._value(value, inner, options))
            pair = f"{rule}_pair_{index}"
            rules.append(f"{pair}: {self._key(name)} {value}")
            parts.append((pair, name in required))
        if self._format.kind == "python":
            return _listed(parts, '", "'), rules
        return " ".join(pair if is_required else f"{pair}?" for pair, is_required in parts), rules

    def _key(self, name: str) -> str:
        format = self._format
        if format.kind == "python":
            return quoted(name + "=")
        return self.literal(format.before_key + name + format.after_key)

    def _value(self, rule: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Return the Lark rule for an argument's value and the text that follows it."""
        if self._format.kind == "python":
            return f"{rule}: {_python(schema, options)}"
        after = self._format.after_value
        if is_text(schema) and "enum" not in schema and "const" not in schema:
            max_length = schema.get("maxLength")
            count = (
                f"{{0,{max_length}}}"
                if isinstance(max_length, int) and 0 <= max_length <= _MAX_LENGTH
                else "*"
            )
            return rf"{rule}[lazy]: /(.|\n){count}{_escaped(after)}/"
        labels = schema.get("enum") if is_text(schema) else None
        if isinstance(labels, list) and all(isinstance(label, str) for label in labels):
            return f"{rule}: ({' | '.join(map(quoted, labels))}) {self.literal(after)}"
        return f"{rule}: {_json(schema, options)} {self.literal(after)}"


def arguments_rule(function: Mapping[str, Any]) -> str:
    """Return a Lark expression for the arguments of a function, written as JSON."""
    return _json(*_schema(function, HERMES.separators))


def _schema(
    function: Mapping[str, Any], separators: tuple[str, str]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schema of a function's arguments, and llguidance's options for it."""
    item, key = separators
    # Unless a schema is strict, it is only a hint. llguidance then ignores its unsupported parts
    # ("lenient").
    options = {
        **LAYOUT,
        "item_separator": item,
        "key_separator": key,
        "lenient": not function.get("strict"),
    }
    return close(_arguments(function.get("parameters"))), options


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _python(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return a Lark expression for the Python literals that match a schema."""
    kind = schema.get("type")
    if kind == "boolean":
        return '"True" | "False"'
    if kind == "null":
        return '"None"'
    if kind in ("string", "integer", "number"):
        return _json(schema, options)  # JSON and Python write strings and numbers alike
    # JSON values are also Python literals if they do not contain true, false or null. So allow only
    # values without them.
    scalar = {"type": ["string", "number"]}
    inner = {"anyOf": [scalar, {"type": "array", "items": scalar}]}
    if kind == "array":
        return _json({"type": "array", "items": inner}, options)
    if kind == "object":
        return _json({"type": "object", "additionalProperties": inner}, options)
    return f'"True" | "False" | "None" | {_json(inner, options)}'


def _listed(parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return an expression for a list of items in a fixed order, with separators.

    Each of `parts` is a pair: the expression of an item, and whether the item is required.
    """
    expression, is_optional = "", True
    for item, is_required in reversed(parts):
        if not expression:
            expression, is_optional = item, not is_required
            continue
        tail = f"({separator} {expression})" + ("?" if is_optional else "")
        if is_required:
            expression, is_optional = f"{item} {tail}", False
        elif is_optional:
            expression = f"({item} {tail} | {expression})"
        else:
            expression = f"({item} {separator})? {expression}"
    return f"({expression})?" if expression and is_optional else expression


def _escaped(text: str) -> str:
    """Escape a text for a regular expression in a Lark grammar."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _arguments(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Convert the `parameters` of a function to the schema of an object with its arguments."""
    if parameters is None:
        return {"type": "object", "properties": {}}
    schema = without_annotations(parameters)
    kind = schema.get("type", "object")
    if kind == "object" or isinstance(kind, list) and "object" in kind:
        return {**schema, "type": "object"}
    return {"allOf": [schema, {"type": "object"}]}  # unsatisfiable, so llguidance rejects it


class ToolGrammars:
    """Thread-safe cache of the constraints on answers that may call tools.

    If a tool has ``strict: true``, its schema is enforced completely, or rejected. Otherwise, the
    schema is only a hint: the grammar enforces the parts that llguidance supports. If the schema of
    an argument or of a tool is not supported, any value is allowed for it.

    Args:
      grammars: compiler of the grammars.
    """

    def __init__(self, grammars: GrammarCompiler):
        self._grammars = grammars
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, StructuredOutputsParams] = OrderedDict()

    def constraint(
        self, write_grammar: Callable[[Sequence[Tool]], str], tools: Sequence[Tool]
    ) -> StructuredOutputsParams:
        """Return a constraint for an answer, with a grammar that can be compiled.

        Args:
          write_grammar: function that returns the grammar for a list of tools, such as
            `tool_grammar`. It is called with changed schemas if some are not supported.
          tools: the functions that may be called, in OpenAI's format.

        Raises:
          ArgumentError: the schema of a strict tool is not supported, or grammars cannot be used
            with the model.
        """

        def write(tools: Sequence[Tool]) -> StructuredOutputsParams:
            return StructuredOutputsParams(grammar=write_grammar(tools))

        requested = write(tools)
        with self._lock:
            constraint = self._kept.get(requested)
        try:
            self._grammars.check_available()
            if constraint is None:
                constraint = self._compiling(write, requested, tools)
        except ArgumentError as error:
            raise ArgumentError(error.function, error.problem, "tools") from None
        with self._lock:
            self._kept[requested] = constraint
            self._kept.move_to_end(requested)
            if len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return constraint

    def _compiling(
        self,
        write: Callable[[Sequence[Tool]], StructuredOutputsParams],
        requested: StructuredOutputsParams,
        tools: Sequence[Tool],
    ) -> StructuredOutputsParams:
        """Return `requested`, or a weaker constraint if `requested` cannot be compiled.

        `requested` enforces all schemas. For the weaker constraint, as few schemas as possible are
        simplified or dropped. ``write(tools)`` returns the constraint that enforces the schemas in
        `tools`.
        """
        if _failure(self._grammars.compile, requested) is None:
            return requested
        tools = self._supported(tools)
        constraint = write(tools)
        # All schemas together may still be too large. In this case, drop the schemas of the largest
        # tools first.
        hints = [i for i, tool in enumerate(tools) if not tool["function"].get("strict")]
        hints.sort(key=lambda i: -len(json.dumps(tools[i])))
        count = 1
        while (error := _failure(self._grammars.compile, constraint)) is not None:
            if not hints:
                raise error
            for index in hints[:count]:
                tools[index] = _with_parameters(tools[index], _ANY_OBJECT)
            hints, count = hints[count:], 2 * count
            constraint = write(tools)
        return constraint

    def _supported(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return the tools, with unsupported parts of their schemas removed.

        Raises:
          ArgumentError: the schema of a strict tool is not supported.
        """
        failing_indices = []
        for index, tool in enumerate(tools[:_MAX_CHECKS]):
            if (error := self._tool_failure(tool)) is not None:
                failing_indices.append(index)
                if tool["function"].get("strict"):
                    raise _strict_error(tool, error)
        supported = list(tools)
        for index in failing_indices:
            supported[index] = self._loosened(tools[index], _MAX_CHECKS // len(failing_indices))
        return supported

    def _loosened(self, tool: Tool, max_checks: int) -> Tool:
        """Remove unsupported parts from a tool's schema, with at most `max_checks` checks."""
        schema = merged(tool["function"]["parameters"])
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and len(properties) <= max_checks:
            shared = {name: schema[name] for name in DEFINITIONS if name in schema}
            bound = {
                name: self._supported_argument(tool, name, argument, shared)
                for name, argument in properties.items()
            }
            loosened_tool = _with_parameters(tool, {**schema, "properties": bound})
            if self._tool_failure(loosened_tool) is None:
                return loosened_tool
        return _with_parameters(tool, _ANY_OBJECT)

    def _supported_argument(
        self, tool: Tool, name: str, schema: Any, shared: Mapping[str, Any]
    ) -> Any:
        """Return the schema of an argument; only its type if the whole schema is not supported."""
        single_property = {"type": "object", "properties": {name: schema}, **shared}
        if self._tool_failure(_with_parameters(tool, single_property)) is None:
            return schema
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        return {"type": kind} if kind in _TYPES else {}

    def _tool_failure(self, tool: Tool) -> ArgumentError | None:
        """Return the error for a tool's schema that is not supported; None if it is supported."""
        rule = tool_grammar(HERMES, [tool], is_required=True)
        return _failure(self._grammars.check, StructuredOutputsParams(grammar=rule))


def _failure(
    compile: Callable[[StructuredOutputsParams], object], constraint: StructuredOutputsParams
) -> ArgumentError | None:
    try:
        compile(constraint)
    except ArgumentError as error:
        return error
    return None


def _strict_error(tool: Tool, error: ArgumentError) -> ArgumentError:
    # Keep llguidance's reason only, without the source of the grammar.
    reason = error.problem.rpartition("JSON schema: ")[2]
    reason = re.split(r" \d+ \| ", reason)[0].rstrip(".")
    name = tool["function"]["name"]
    return ArgumentError(
        "request",
        f"must have supported schemas if strict is true, got an unsupported schema for {name!r}: "
        f"{reason}. Without strict a schema is a hint.",
        "tools",
    )


def _with_parameters(tool: Tool, schema: Mapping[str, Any]) -> Tool:
    return {**tool, "function": {**tool["function"], "parameters": schema}}
