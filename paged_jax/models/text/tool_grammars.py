"""Grammars for answers with tool calls, including tools with unsupported schemas."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_jax.arguments import ArgumentError
from paged_jax.models.text.grammar import Grammars
from paged_jax.models.text.tools import ToolFormat
from paged_jax.sampling.params import StructuredOutputsParams

Tool = Mapping[str, Any]

# Sets of tools for which the grammar is remembered, because a chat sends its tools each time.
_NUM_KEPT = 32
# Schemas that are compiled one by one to find those that cannot be expressed: milliseconds each.
_MAX_CHECKS = 512
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# The format for checks of a single tool. Any format would do.
_BARE = ToolFormat("", "", "", "arguments")
# Parts of a schema to which the schema of an argument may refer.
_DEFINITIONS = ("$defs", "definitions")


class ToolGrammars:
    """Grammars for answers that call tools. Several threads may use it.

    The schema of a tool with ``strict: true`` binds as it is, or is an error. Without it a schema
    is a hint: the grammar binds the parts that llguidance can express, and an argument or a tool
    that it cannot express may have any value.

    Args:
      grammars: compiles the grammars.
    """

    def __init__(self, grammars: Grammars):
        self._grammars = grammars
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, StructuredOutputsParams] = OrderedDict()

    def form(
        self, format: ToolFormat, tools: Sequence[Tool], choice: str, *, is_parallel: bool = True
    ) -> StructuredOutputsParams:
        """Return the form of an answer, whose grammar compiles.

        Args:
          format: how the model writes calls.
          tools: the functions, as OpenAI describes them.
          choice: see `ToolFormat.grammar`.
          is_parallel: see `ToolFormat.grammar`.

        Raises:
          ArgumentError: the schema of a strict tool cannot be expressed, or there are no grammars
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
        tools = self._expressible(tools)
        form = write(tools)
        # Together they may still be too long or too complex: the largest schemas go first.
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

    def _expressible(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return the tools with the parts of their schemas that can be expressed.

        Raises:
          ArgumentError: the schema of a strict tool cannot be expressed.
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
        """Return a tool whose schema cannot be expressed with as much of it as possible."""
        schema = tool["function"]["parameters"]
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and len(properties) <= max_checks:
            shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
            bound = {
                name: self._expressible_argument(tool, name, argument, shared)
                for name, argument in properties.items()
            }
            looser = _with_parameters(tool, {**schema, "properties": bound})
            if self._tool_failure(looser) is None:
                return looser
        return _with_parameters(tool, _ANY_OBJECT)

    def _expressible_argument(
        self, tool: Tool, name: str, schema: Any, shared: Mapping[str, Any]
    ) -> Any:
        """Return the schema of an argument, or what is left of it if it cannot be expressed."""
        alone = {"type": "object", "properties": {name: schema}, **shared}
        if self._tool_failure(_with_parameters(tool, alone)) is None:
            return schema
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        return {"type": kind} if kind in _TYPES else {}

    def _tool_failure(self, tool: Tool) -> ArgumentError | None:
        """Return why the schema of a tool cannot be expressed; None if it can be."""
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
    # llguidance's reason, without the grammar in which it found the mistake.
    reason = error.problem.rpartition("JSON schema: ")[2].partition(" 1 | ")[0].rstrip(".")
    name = tool["function"]["name"]
    return ArgumentError(
        "request",
        f"must have schemas that can be expressed if strict is true, and that of {name!r} cannot "
        f"be: {reason}. Without strict a schema is a hint.",
        "tools",
    )


def _with_parameters(tool: Tool, schema: Mapping[str, Any]) -> Tool:
    return {**tool, "function": {**tool["function"], "parameters": schema}}
