"""Grammar sources for llguidance, made from `StructuredOutputsParams`."""

import json
import re
from collections.abc import Sequence
from typing import Any

from paged_jax.models.text.closed_schema import close, without_annotations
from paged_jax.sampling.params import StructuredOutputsParams

MANY_LABELS = 1000
"""Number of labels above which an enum gets extra fuel."""
_LABELS = re.compile(r'"(enum|anyOf|oneOf)"\s*:\s*(?=\[)')
# The keys of a label with a description: {"const": "a", "title": "The first"}.
_LABEL_KEYS = {"const", "type", "title", "description"}
# Maximum number of times that a text is read for unions that are no lists of labels.
_MAX_WASTE = 8
# Characters that JSON escapes.
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
# Layout of JSON, unless the schema has "x-guidance": one line, as Python writes it. The names of
# properties are then forced, and a confused model cannot fill the context with white space.
_LAYOUT: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}


def form_text(form: StructuredOutputsParams) -> str:
    """Return the form as a regular expression, a Lark grammar or a JSON schema."""
    if form.choice is not None:
        # As one terminal: a rule may have no more than 2,000 that can come next.
        return f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, form.choice))}"
    if form.regex is not None or form.grammar is not None:
        return str(form.regex or form.grammar)
    return json.dumps(
        {"type": "object"} if form.json is None else close(json.loads(str(form.json)))
    )


def form_source(form: StructuredOutputsParams, text: str) -> str:
    """Return llguidance's source for a text of the form."""
    from llguidance import LLMatcher

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(text)
    if form.grammar is not None or form.choice is not None:
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_json_schema(text, defaults=_LAYOUT)


def unforced_source(source: str) -> str:
    """Return a source of llguidance that allows every token that continues a known text.

    Otherwise its masks allow only the token that the tokenizer chooses.
    """
    text = source
    if source.startswith('{"grammars"'):
        [grammar] = json.loads(source)["grammars"]
        text = grammar["lark_grammar"] or f"start: %json {json.dumps(grammar['json_schema'])}"
    return '%llguidance {"no_forcing": true}\n' + text


def without_descriptions(form: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the form with a schema that has no descriptions, which can be most of it."""
    try:
        schema = json.dumps(without_annotations(json.loads(str(form.json))))
    except RecursionError:
        return form
    return StructuredOutputsParams(json=schema)


def split_labels(form: StructuredOutputsParams, text: str) -> tuple[Sequence[Any], str]:
    """Return the labels of a form, and its text with only one label in each enum."""
    if form.choice is not None:
        return form.choice, text
    labels: list[Any] = []
    shorter, end, num_wasted = "", 0, 0
    for match in _LABELS.finditer(text):
        start = match.end()
        if start < end:  # within the labels of another enum
            continue
        # A hostile schema nests unions, and each would be read again within the outer ones.
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
    """Return enough fuel for labels. They need 13 each and 75 per escaped character (measured)."""
    if len(labels) <= MANY_LABELS:
        return 0
    num_escapes = sum(len(_ESCAPED.findall(str(label))) for label in labels)
    return 16 * len(labels) + 128 * num_escapes
