"""Conversion of constraints and JSON schemas to the grammar sources of llguidance.

A *label* is one of several alternative constants: an item of ``choice``, an item of a schema's
``enum``, or a ``const`` in a union such as ``anyOf``. *Fuel* is llguidance's unit for the work to
build a lexer. llguidance rejects a grammar that needs more fuel than the given limit.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.text.json_schemas import close, without_annotations
from paged_jax.sampling.structured_outputs import StructuredOutputsParams

MANY_LABELS = 1000
"""Number of labels above which llguidance may work longer on a constraint, see `label_fuel`."""
_LABELS = re.compile(r'"(enum|anyOf|oneOf)"\s*:\s*(?=\[)')
# Keys that are allowed in a label of a union, as in {"const": "a", "title": "The first"}.
_LABEL_KEYS = {"const", "type", "title", "description"}
# Limit on the work that is wasted on unions without labels: the number of characters parsed in such
# unions, as a multiple of the length of the text.
_MAX_WASTE = 8
# Characters that JSON escapes.
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
LAYOUT: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
"""Layout of JSON unless the schema has "x-guidance": on one line, as ``json.dumps`` writes it.

The names of properties are then forced, and a model cannot fill the context with white space.
"""


def constraint_text(constraint: StructuredOutputsParams) -> str:
    """Return a constraint as a regular expression, a Lark grammar, or a JSON schema."""
    if constraint.choice is not None:
        # Use one terminal for all items, because llguidance allows at most 2,000 alternatives in a
        # rule.
        return f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, constraint.choice))}"
    if constraint.regex is not None or constraint.grammar is not None:
        return str(constraint.regex or constraint.grammar)
    return json.dumps(
        {"type": "object"} if constraint.json is None else close(json.loads(str(constraint.json)))
    )


def constraint_rule(constraint: StructuredOutputsParams) -> str:
    r"""Convert a constraint to the right side of a rule in a Lark grammar.

    The rule accepts the same texts as the constraint.

    Example:
      >>> constraint_rule(StructuredOutputsParams(regex=r"a/b\/c"))
      '/a\\/b\\/c/'
    """
    text = constraint_text(constraint)
    if constraint.regex is not None:
        escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], text)
        return f"/{escaped}/".replace("\n", "\\n")
    if constraint.grammar is not None or constraint.choice is not None:
        return f"%lark {{\n{text}\n}}"
    schema = json.loads(text)
    guidance = schema.get("x-guidance")
    layout = guidance if isinstance(guidance, Mapping) else {}
    return "%json " + json.dumps({**schema, "x-guidance": {**LAYOUT, **layout}})


def quoted(text: str) -> str:
    """Return a text as a quoted string for a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def constraint_source(constraint: StructuredOutputsParams, text: str) -> str:
    """Convert a constraint to a grammar source of llguidance.

    `text` is the result of `constraint_text` for the constraint.
    """
    from llguidance import LLMatcher

    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(text)
    if constraint.grammar is not None or constraint.choice is not None:
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_json_schema(text, defaults=LAYOUT)


def unforced_source(source: str) -> str:
    """Return a grammar source with which llguidance does not force tokens.

    By default, if only one text can come next, llguidance's masks allow only the token that the
    tokenizer would choose. With this source, they allow every token that is a prefix of this text.
    """
    text = source
    if source.startswith('{"grammars"'):
        [grammar] = json.loads(source)["grammars"]
        text = grammar["lark_grammar"] or f"start: %json {json.dumps(grammar['json_schema'])}"
    return '%llguidance {"no_forcing": true}\n' + text


def without_descriptions(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """Remove the annotations, such as descriptions, from the schema of a JSON constraint."""
    try:
        schema = json.dumps(without_annotations(json.loads(str(constraint.json))))
    except RecursionError:
        return constraint
    return StructuredOutputsParams(json=schema)


def split_labels(constraint: StructuredOutputsParams, text: str) -> tuple[Sequence[Any], str]:
    """Find the labels of a constraint, which the module docstring defines.

    Returns:
      The labels, and the text with only the first label of each enum or union. For a ``choice``,
      the text is unchanged.
    """
    if constraint.choice is not None:
        return constraint.choice, text
    labels: list[Any] = []
    shorter, end, num_wasted = "", 0, 0
    for match in _LABELS.finditer(text):
        start = match.end()
        if start < end:  # the match is inside an enum or union that was already parsed
            continue
        # Stop reading unions after a while: in a hostile schema with nested unions, each outer
        # union would read the inner unions again.
        if match[1] != "enum" and num_wasted > _MAX_WASTE * len(text):
            continue
        try:
            values, stop = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        if match[1] == "enum":
            labels += values
        elif all(isinstance(x, dict) and "const" in x and x.keys() <= _LABEL_KEYS for x in values):
            labels += [x["const"] for x in values]
        else:
            num_wasted += stop - start
            continue
        shorter += text[end:start] + json.dumps(values[:1])
        end = stop
    return labels, shorter + text[end:]


def label_fuel(labels: Sequence[Any]) -> int:
    """Return the additional fuel that a constraint gets because of its labels.

    In measurements, a label needed a fuel of 13, plus 75 for each escaped character. The result is
    slightly larger. It is 0 for at most `MANY_LABELS` labels.
    """
    if len(labels) <= MANY_LABELS:
        return 0
    num_escapes = sum(len(_ESCAPED.findall(str(label))) for label in labels)
    return 16 * len(labels) + 128 * num_escapes
