r"""Formats of tool calls that chat models write, detected from their chat templates.

A tool call consists of the name of the function and its arguments, with fixed texts around them::

    Hermes, Qwen     <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>
                     `-------before_name-----'       `after_name--'                `after_arguments'

`opening` and `closing` are the texts before the first and after the last call of an answer, and
`between` is the text between two calls. The arguments are written as a JSON object, as keys and
values in tags ("xml"), or as the arguments of a Python call ("python"). To detect the format of a
model, its chat template is applied to chats with known calls::

    Llama 3          {"name": "weather", "parameters": {"city": "Oslo"}}
    Qwen 3 Coder     <tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n...
    Mistral          [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}
    Llama 4          [weather(city="Oslo")]
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Tool = Mapping[str, Any]
Kind = Literal["json", "xml", "python", "harmony"]

# Placeholders in the texts around a call, for the id and for the index of the call.
ID, NUMBER = "\ue000", "\ue001"


@dataclass(frozen=True)
class ToolFormat:
    """Format of the tool calls that a model writes.

    Attributes:
      before_name: text before the name of the function.
      after_name: text between the name and the arguments.
      after_arguments: text after the arguments.
      kind: notation of the arguments: ``"json"``, ``"xml"`` or ``"python"``. In the kind
        ``"harmony"``, a call is a message to a function, see `reasoning`.
      opening: text before the first call.
      between: text between two calls; None if an answer can contain only one call.
      closing: text after the last call.
      before_key: text before a key (only for ``"xml"``).
      after_key: text between a key and its value (only for ``"xml"``).
      after_value: text after a value (only for ``"xml"``).
      separators: in JSON, the text between two items, and the text after a key.
      special_tokens: names and ids of the special tokens that occur in these texts.
      has_short_ids: whether the chat template requires tool-call ids of nine letters or digits.
    """

    before_name: str
    after_name: str
    after_arguments: str
    kind: Kind = "json"
    opening: str = ""
    between: str | None = None
    closing: str = ""
    before_key: str = ""
    after_key: str = ""
    after_value: str = ""
    separators: tuple[str, str] = (", ", ": ")
    special_tokens: tuple[tuple[str, int], ...] = ()
    has_short_ids: bool = False

    @property
    def mark(self) -> str:
        """Tag or special token with which the first call begins.

        If it is empty, calls are recognised only at the start of an answer.
        """
        match = _MARK.match(self.opening + self.before_name)
        return match[0] if match else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All fixed texts of the format."""
        return (
            self.opening, self.before_name, self.after_name, self.before_key, self.after_key,
            self.after_value, self.after_arguments, self.between or "", self.closing,
        )  # fmt: skip


HERMES = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")
HARMONY = ToolFormat(" to=functions.", "<|channel|>commentary", "<|call|>", "harmony")
LLAMA3 = ToolFormat('{"name": "', '", "parameters": ', "}")


@dataclass(frozen=True)
class ToolSupport:
    """Description of how a chat template supports tools.

    Attributes:
      shows_tools: whether the template writes the functions that may be called.
      writes_calls: whether the template writes the calls in earlier messages.
      format: format of tool calls; None if it is not known.
    """

    shows_tools: bool = False
    writes_calls: bool = False
    format: ToolFormat | None = None

    def with_special_tokens(self, token_ids: Mapping[str, int]) -> "ToolSupport":
        """Return a copy in which `ToolFormat.special_tokens` is set.

        `token_ids` are the ids of all special tokens by name. The format gets the special tokens
        that occur in its texts.
        """
        if self.format is None:
            return self
        text = "\n".join(self.format.texts)
        special_tokens = tuple(
            sorted((name, token_id) for name, token_id in token_ids.items() if name in text)
        )
        return replace(self, format=replace(self.format, special_tokens=special_tokens))


# Contents of the chat that is rendered to detect the format. They are unusual texts, so that they
# can be found in the rendered chat. Some templates require descriptions of all functions and
# arguments, and tool-call ids of nine letters or digits.
_NAMES = ("probed_function", "other_function")
_KEYS = ("key_a", "key_b")
_VALUE, _NUMBER, _TEXT = "probed value", 27182, "\N{SNOWMAN}"
_ARGUMENTS = {_KEYS[0]: _VALUE, _KEYS[1]: _NUMBER}
_PROBE_ID, _LONG_ID = "probe1234", "call_of_a_probe"
_QUESTION = {"role": "user", "content": "Probe?"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    _KEYS[0]: {"type": "string", "description": "A."},
                    _KEYS[1]: {"type": "integer", "description": "B."},
                },
                "required": list(_KEYS),
            },
        },
    }
    for name in _NAMES
]
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
# A special token that may follow a call instead of the usual end of a message.
_END = re.compile(r"\s*<[^<>]+>\s*")
_JSON = re.compile(rf'\{{\s*"{_KEYS[0]}"(:\s*)"{_VALUE}"(,\s*)"{_KEYS[1]}":\s*{_NUMBER}\s*\}}')


def find_support(render: Callable[..., str]) -> ToolSupport:
    """Find out how a chat template supports tools, by applying it to chats with known calls.

    Args:
      render: function that converts a chat to text, see `ChatTemplate.render`.

    Example:
      >>> find_support(lambda messages, **variables: messages[-1]["content"])
      ToolSupport(shows_tools=False, writes_calls=False, format=None)
    """

    def rendered(*answer: Mapping[str, Any]) -> str | None:
        try:
            return render([_QUESTION, *answer], tools=_TOOLS, add_generation_prompt=not answer)
        except ValueError:
            # Tools then count as supported (see the result below), so a user's chat with tools is
            # rendered, and the user gets the template's error.
            return None

    prompt = rendered()
    text = rendered({"role": "assistant", "content": _TEXT})
    one_call = rendered(_calling(1))
    tool_format = None
    if one_call is not None and f"{HARMONY.before_name}{_NAMES[0]}" in one_call:
        tool_format = HARMONY
    elif text is not None and one_call is not None:
        tool_format = _find_format(text, one_call, rendered(_calling(2)))
        if tool_format is not None and _PROBE_ID in one_call:
            # If a template rejects an id, `ChatTemplate` replaces the id.
            long_call = rendered(_calling(1, _LONG_ID))
            tool_format = replace(
                tool_format, has_short_ids=long_call is None or _LONG_ID not in long_call
            )
    return ToolSupport(
        shows_tools=prompt is None or _NAMES[0] in prompt,
        writes_calls=one_call is None or _VALUE in one_call,
        format=tool_format,
    )


def _calling(count: int, call_id: str = _PROBE_ID) -> dict[str, Any]:
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": _ARGUMENTS},
        }
        for name in _NAMES[:count]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class _Call(NamedTuple):
    """Rendered message with one tool call, split around the function name and the arguments."""

    before: str
    after_name: str
    arguments: str
    after: str


def _find_format(text: str, one_call: str, two_calls: str | None) -> ToolFormat | None:
    """Derive the format of tool calls from rendered chats; None if it cannot be recognised.

    Args:
      text: a rendered chat that ends with a message with the content `_TEXT`.
      one_call: the same chat with one call instead of the content.
      two_calls: the same chat with two calls; None if the template rejects two calls.
    """
    head, _, tail = text.rpartition(_TEXT)
    if _TEXT not in text or not one_call.startswith(head.rstrip()):
        return None
    call = _divide(one_call[len(head.rstrip()) :], _NAMES[0])
    if call is None:
        return None
    after = call.after.removesuffix(tail)
    if after == call.after and tail.strip():
        # `tail` is the text after a message without calls. The message with the call does not end
        # with it, but may end with a special token instead.
        after = re.sub(r"\s*<[^<>]+>\s*$", "", call.after)
        end = call.after[len(after) :]
        if not _END.fullmatch(end):
            return None
    tool_format = _with_arguments(call._replace(after=after))
    if tool_format is None:
        return None
    return _with_affixes(tool_format, _gap(one_call, two_calls, head), call.before)


def _divide(written: str, name: str) -> _Call | None:
    """Split a message with a tool call, see `_Call`; None if the call is not found.

    `name` is the name of the called function.
    """
    before, separator, after = written.partition(name)
    if not separator:
        return None
    if match := _JSON.search(after):
        start, end = match.span()
    else:
        start, end = after.find(_KEYS[0]), after.find(str(_NUMBER)) + len(str(_NUMBER))
        if start < 0 or end <= start:
            return None
    return _Call(before, after[:start], after[start:end], after[end:])


def _gap(one_call: str, two_calls: str | None, head: str) -> str | None:
    """Return the text between the arguments of a call and the name of the next call.

    The result is None if this text is unknown.

    Args:
      one_call: a rendered chat with one call.
      two_calls: the same chat with two calls.
      head: text before the calls, which is the same in both chats.
    """
    if two_calls is None or not two_calls.startswith(head.rstrip()):
        return None
    first = _divide(two_calls[len(head.rstrip()) :], _NAMES[0])
    gap, separator, _ = ("", "", "") if first is None else first.after.partition(_NAMES[1])
    return gap if separator and one_call != two_calls else None


def _with_arguments(call: _Call) -> ToolFormat | None:
    """Derive the format of a call's arguments; None if it cannot be recognised.

    The result has no texts yet for `before_name`, `opening`, `between` and `closing`.
    """
    if match := _JSON.fullmatch(call.arguments):
        return ToolFormat("", call.after_name, call.after, separators=(match[2], match[1]))
    # Expected text of two arguments, with bars between its parts:
    # after_name + before_key | key | after_key | value | after_value +
    # before_key | key | after_key | value
    pairs = re.fullmatch(
        rf"{_KEYS[0]}(?P<after_key>.*?){_VALUE}(?P<between>.*?){_KEYS[1]}(.*?){_NUMBER}",
        call.arguments,
        re.DOTALL,
    )
    if pairs is None:
        return None
    after_key, between = pairs["after_key"], pairs["between"]
    if after_key in ('="', "='") and re.fullmatch(r"[\"'],\s*", between) and pairs[3] == "=":
        return ToolFormat("", call.after_name, call.after, "python")
    after_value = _common_prefix(between, call.after)
    before_key = _common_suffix(call.after_name, between[len(after_value) :])
    if pairs[3] != after_key or between != after_value + before_key or not after_key.strip():
        return None
    return ToolFormat(
        "",
        call.after_name.removesuffix(before_key),
        call.after[len(after_value) :],
        "xml",
        before_key=before_key,
        after_key=after_key,
        after_value=after_value,
    )


def _with_affixes(format: ToolFormat, gap: str | None, before: str) -> ToolFormat | None:
    """Set the texts before, between and after tool calls in a format.

    The result is None if calls in this format cannot be recognised.

    Args:
      format: format of the arguments. Its `after_arguments` is all text in the message after the
        arguments.
      gap: text between the arguments of a call and the function name of the next call; None if
        unknown.
      before: all text in the message before the function name of the first call.
    """
    before = before.lstrip()
    if gap is None:
        # The template writes only one call per message, so the text between calls is unknown. A
        # call can then only be recognised by a marker before it, or because an answer starts with
        # JSON.
        tool_format = replace(format, before_name=before)
    else:
        gap = gap.removeprefix(format.after_value)
        after = _common_prefix(gap, format.after_arguments)
        before_name = _common_suffix(before, gap[len(after) :])
        tool_format = replace(
            format,
            opening=before.removesuffix(before_name),
            before_name=before_name,
            after_arguments=after,
            between=gap[len(after) :].removesuffix(before_name),
            closing=format.after_arguments[len(after) :],
        )
    tool_format = _with_ids(tool_format)
    start = tool_format.opening + tool_format.before_name
    if not tool_format.mark and not start.startswith(("{", "[")):
        return None
    if not tool_format.mark and tool_format.kind == "json" and not tool_format.opening:
        tool_format = replace(tool_format, between=None)  # a second call would not be recognised
    return tool_format


def _with_ids(format: ToolFormat) -> ToolFormat:
    """Return `format` with placeholders for the id and the index of a call in its texts."""
    texts = {
        name: value.replace(_PROBE_ID, ID) for name, value in vars(format).items()
        if isinstance(value, str)
    }  # fmt: skip
    opening, between = texts["opening"], texts.get("between", "")
    if opening.endswith("0") and between.endswith("1"):
        texts |= {"opening": opening[:-1] + NUMBER, "between": between[:-1] + NUMBER}
    return replace(format, **texts)  # type: ignore[arg-type]


def _common_prefix(first: str, second: str) -> str:
    """Return the longest common prefix of two texts. Drop an incomplete tag at its end."""
    size = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    prefix = first[:size]
    start = prefix.rfind("<")
    return prefix[:start] if start > prefix.rfind(">") else prefix


def _common_suffix(first: str, second: str) -> str:
    """Return the longest common suffix of two texts. Drop an incomplete tag at its start."""
    size = 0
    while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    suffix = first[len(first) - size :]
    end, start = suffix.find(">"), suffix.find("<")
    return suffix[end + 1 :] if 0 <= end and not 0 <= start < end else suffix
