"""Incremental parser of answers with tool calls in any format."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from paged_jax.models.text.json_schemas import argument_schemas, is_text
from paged_jax.models.text.tool_formats import ID, NUMBER, Tool, ToolFormat

# Maximum number of characters between the beginning of a call and its arguments. If a text is
# longer, it is not a call.
_MAX_HEAD = 512
_NAME = r"(?P<name>[a-zA-Z0-9_.\-]+)"
_HOLES = {ID: r"[a-zA-Z0-9_\-]+", NUMBER: r"\d+"}


class AnswerDelta(NamedTuple):
    """New part of an answer: reasoning, text, the start of a call, or a piece of arguments.

    Attributes:
      kind: ``"reasoning"``, ``"content"`` (text outside of calls), ``"call"`` (start of a call) or
        ``"arguments"``.
      text: the reasoning or text; the name of the called function; or a piece of the arguments as
        JSON text.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str


class ToolReader:
    """Incremental parser of answers with tool calls.

    Args:
      format: format of the tool calls.
      tools: functions that may be called. In formats that write strings without quotes, their
        schemas tell whether an argument is a string.

    Example:
      >>> from paged_jax.models.text.tool_formats import LLAMA3
      >>> reader = ToolReader(LLAMA3)
      >>> found = [*reader.push('{"name": "f", "parameters": {"a"'), *reader.push(": 1}}")]
      >>> [tuple(delta) for delta in found]
      [('call', 'f'), ('arguments', '{"a"'), ('arguments', ': 1}')]
    """

    def __init__(self, format: ToolFormat, tools: Sequence[Tool] = ()):
        self._format = format
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._schemas: dict[str, dict[str, Any]] = {}  # schemas of arguments, by function name
        self._buffer = ""
        # State of the parser: in text, before the name of a call, in arguments, or after
        # arguments.
        self._state: Literal["text", "head", "json", "xml", "python", "after"] = "text"
        self._is_start = True
        self._skips_space = False  # white space between calls is ignored
        self._name = ""
        self._num_pairs = 0
        self._is_in_text = False  # whether inside a string in tags, which is returned in pieces
        self._json = _json_scanner()
        mark = format.mark
        self._start = mark or (format.opening + format.before_name)[:1]
        opening = (format.opening + format.before_name).removeprefix(mark)
        self._first = re.compile(rf"\s*{_pattern(opening)}{_NAME}{_pattern(format.after_name)}")
        following = _pattern((format.between or "") + format.before_name)
        self._next = re.compile(rf"\s*{following}{_NAME}{_pattern(format.after_name)}")
        self._head = self._first
        # Opening text that was removed from `_buffer` when a tool call began.
        self._opened = ""
        self._end = re.compile(rf"\s*{_pattern(format.after_arguments)}")

    def push(self, text: str, *, is_last: bool = False) -> list[AnswerDelta]:
        """Read the next piece of the answer, and return all new parts that are certain.

        Text that may be the beginning of a tool call is held back until the next `push`.

        Args:
          text: the next piece of the answer.
          is_last: whether this is the last piece.
        """
        self._buffer += text
        deltas: list[AnswerDelta] = []
        while True:
            before = self._state, self._buffer
            deltas += getattr(self, f"_read_{self._state}")(is_last)
            if before == (self._state, self._buffer):
                return [delta for delta in deltas if delta.text]

    def _read_text(self, is_last: bool) -> list[AnswerDelta]:
        start = self._start
        if not self._format.mark:
            if self._is_start and self._buffer.startswith(start):
                self._state, self._head, self._opened = "head", self._first, ""
                return []
            return self._content(self._buffer, "")
        before, mark, after = self._buffer.partition(start)
        if mark:
            self._state, self._head, self._opened = "head", self._first, start
            return self._content(before, after)
        num_held = 0 if is_last else overlap(self._buffer, start)
        end = len(self._buffer) - num_held
        return self._content(self._buffer[:end], self._buffer[end:])

    def _content(self, text: str, remainder: str) -> list[AnswerDelta]:
        self._buffer = remainder
        text = text.lstrip() if self._skips_space else text
        self._skips_space &= not text
        self._is_start &= not text
        return [AnswerDelta("content", text)]

    def _read_head(self, is_last: bool) -> list[AnswerDelta]:
        if self._format.kind == "python":
            self._state = "python"
            return []
        match = self._head.match(self._buffer)
        # The name is complete if the match includes the text after a name, or if another character
        # follows. Otherwise more characters of the name may follow, or the answer was cut short
        # within the name, which could be the name of another function.
        if match and (match.end() < len(self._buffer) or self._format.after_name):
            self._buffer = self._buffer[match.end() :]
            return self._begin(match["name"])
        if not is_last and len(self._buffer) <= _MAX_HEAD:
            return []
        # The answer was cut short, or this is not a call. So treat the beginning of the call as
        # text.
        text, self._buffer, self._state = self._opened + self._buffer, "", "text"
        self._is_start = False
        return [AnswerDelta("content", text)]

    def _begin(self, name: str) -> list[AnswerDelta]:
        self._state = "xml" if self._format.kind == "xml" else "json"
        self._name, self._num_pairs, self._json = name, 0, _json_scanner()
        self._is_in_text = False
        return [AnswerDelta("call", name)]

    def _read_json(self, is_last: bool) -> list[AnswerDelta]:
        if not self._json.has_begun:
            self._buffer = self._buffer.lstrip()
        end = self._json.push(self._buffer)
        text = self._buffer if end < 0 else self._buffer[:end]
        self._buffer = self._buffer[len(text) :]
        if end >= 0:
            self._state = "after"
        return [AnswerDelta("arguments", text)]

    def _read_xml(self, is_last: bool) -> list[AnswerDelta]:
        if self._is_in_text:
            return self._read_text_value(is_last)
        format, text = self._format, self._buffer
        body = text.lstrip()
        if body.startswith(format.before_key.strip()):
            key, separator, value = body[len(format.before_key.strip()) :].partition(
                format.after_key
            )
            if separator and self._is_text(key):
                self._buffer, self._is_in_text = value, True
                return [AnswerDelta("arguments", f'{self._pair_start(key)}"')]
            value, ended, body = value.partition(format.after_value.rstrip())
            if separator and ended:
                self._buffer = body
                return [AnswerDelta("arguments", self._pair_start(key) + _as_json(value))]
        elif self._end.match(text):
            self._state = "after"
            return [AnswerDelta("arguments", "}" if self._num_pairs else "{}")]
        elif len(body) > _MAX_HEAD:
            self._state = "text"
        if is_last:
            self._buffer = ""  # drop the last argument, which was cut short
        return []

    def _read_text_value(self, is_last: bool) -> list[AnswerDelta]:
        """Read a piece of a string in tags, and return it without waiting for the closing tag."""
        after = self._format.after_value.rstrip()
        text, ended, remainder = self._buffer.partition(after)
        num_held = 0 if ended else overlap(text, after)
        self._buffer = remainder if ended else text[len(text) - num_held :]
        self._is_in_text = not ended
        if is_last and not ended:
            self._buffer = ""  # drop the closing tag, which was cut short
        piece = json.dumps(text[: len(text) - num_held], ensure_ascii=False)[1:-1]
        return [AnswerDelta("arguments", piece + ('"' if ended else ""))]

    def _is_text(self, key: str) -> bool:
        """Return whether an argument is a string according to the schema of the function."""
        if self._name not in self._schemas:
            parameters = self._functions.get(self._name, {}).get("parameters") or {}
            self._schemas[self._name] = argument_schemas(parameters)
        return is_text(self._schemas[self._name].get(key))

    def _pair_start(self, key: str) -> str:
        """Return the JSON text before a value: an opening brace or a comma, and the key."""
        self._num_pairs += 1
        return f"{'{' if self._num_pairs == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: "

    def _read_after(self, is_last: bool) -> list[AnswerDelta]:
        """Skip the text after arguments, up to the next call or the end of all calls."""
        format, text = self._format, self._buffer
        ended = self._end.match(text)
        if ended is None:
            return self._leave(is_last, _pattern(format.after_arguments))
        remainder = text[ended.end() :]
        if not (format.closing or format.opening):
            self._buffer = remainder
            return self._leave(True, "")
        if format.between is not None and (match := self._next.match(remainder)):
            self._buffer = remainder[match.end() :]
            return self._begin(match["name"])
        closed = re.match(rf"\s*{_pattern(format.closing)}", remainder)
        if closed and (format.closing or is_last):
            self._buffer = remainder[closed.end() :]
            return self._leave(True, "")
        if is_last or len(remainder) > _MAX_HEAD:
            self._buffer = remainder
            return self._leave(True, "")
        return []

    def _leave(self, is_over: bool, expected: str) -> list[AnswerDelta]:
        """Return to the state "text" if no calls follow (`is_over`), otherwise wait for more text.

        `expected` is a regular expression for text that must follow the arguments, but has not
        arrived completely; empty if nothing is missing.
        """
        if is_over:
            self._state, self._skips_space = "text", True
            if expected:
                self._buffer = ""  # the answer was cut short within `expected`: drop the rest
        return []

    def _read_python(self, is_last: bool) -> list[AnswerDelta]:
        """Read a list of Python calls once it is complete; Python's parser needs all of it."""
        closing = self._format.closing.removeprefix("]")
        end = _BracketScanner("()[]{}", "\"'").push(self._buffer)
        after = self._buffer[end:]
        if not is_last and (end < 0 or closing != after and closing.startswith(after)):
            return []
        source = self._buffer[:end] if end >= 0 else ""
        calls = _python_calls(source)
        if calls is None:
            text, self._buffer, self._state = self._opened + self._buffer, "", "text"
            self._is_start = False
            return [AnswerDelta("content", text)]
        self._buffer = after.removeprefix(closing)
        self._state, self._skips_space, self._is_start = "text", True, False
        return [delta for call in calls for delta in call]


def _as_json(value: str) -> str:
    """Convert the text of an XML value to JSON. Text that is not JSON becomes a string."""
    try:
        data = json.loads(value, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        data = value
    return json.dumps(data, ensure_ascii=False)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _BracketScanner:
    """Scanner that finds the end of an object or a list in a text that arrives in pieces.

    Args:
      brackets: pairs of an opening and a closing bracket, such as ``"{}[]"``.
      quotes: characters that begin and end a string.
    """

    def __init__(self, brackets: str, quotes: str):
        self._opening, self._closing, self._quotes = brackets[::2], brackets[1::2], quotes
        self._depth = 0
        self._quote = ""  # the quote that begins the current text
        self._is_escaped = False
        self.has_begun = False

    def push(self, text: str) -> int:
        """Scan the next piece of the text.

        Returns:
          The index in `text` after the end of the object or list; -1 if the piece does not contain
          the end.
        """
        self.has_begun |= bool(text)
        for index, char in enumerate(text):
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in self._opening:
                self._depth += 1
            elif char in self._closing:
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return -1


def _json_scanner() -> _BracketScanner:
    return _BracketScanner("{}[]", '"')


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


def _pattern(text: str) -> str:
    """Return a regular expression for a text of a format. White space may vary."""
    parts = []
    for part in re.split(rf"(\s+|{ID}|{NUMBER})", text):
        if part in _HOLES:
            parts.append(_HOLES[part])
        elif part.isspace():
            parts.append(r"\s+" if part == text else r"\s*")
        else:
            parts.append(re.escape(part))
    return "".join(parts)


def _python_calls(source: str) -> list[list[AnswerDelta]] | None:
    """Parse a list of Python calls; None if `source` is not such a list."""
    try:
        [statement] = ast.parse(source.strip()).body
        assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.List)
        calls = []
        for call in statement.value.elts:
            assert isinstance(call, ast.Call) and not call.args
            arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            text = json.dumps(arguments, ensure_ascii=False)
            calls.append(
                [AnswerDelta("call", ast.unparse(call.func)), AnswerDelta("arguments", text)]
            )
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
        return None
    return calls or None
