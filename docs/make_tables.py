"""Write the tables of options, endpoints and fields in the pages.

    python docs/make_tables.py             # writes tables in docs/*.md

The tables are derived from the source of the engine and of the server.
"""

import argparse
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paged_jax.engine.config import EngineConfig
from paged_jax.options import options_of
from paged_jax.server import bodies
from paged_jax.server.anthropic_bodies import MessagesBody
from paged_jax.server.openapi import ENDPOINTS
from paged_jax.server.response_bodies import ResponsesBody
from paged_jax.server.sampling_body import IGNORED, NEUTRAL_VALUES, SamplingBody

DOCS = Path(__file__).resolve().parent
# Tables stand between these lines of docs/*.md.
_TABLE = re.compile(r"<!-- (.+): written by make docs -->\n.*?<!-- end of \1 -->", re.DOTALL)
_CODE_SPAN = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)


def options_table() -> str:
    """Return the table of engine options."""
    rows = ["| option | meaning | default | flag | vLLM |", "|---|---|---|---|---|"]
    for each in options_of(EngineConfig):
        flag, vllm = (f"`{name}`" if name else "" for name in (each.flag, each.vllm))
        meaning, default = (_escape(text) for text in (each.help, each.default_help))
        rows.append(f"| `{each.name}` | {meaning} | {default} | {flag} | {vllm} |")
    return "\n".join(rows)


def endpoints_table() -> str:
    """Return the table of HTTP endpoints."""
    rows = ["| endpoint | meaning |", "|---|---|"]
    rows += [f"| `{each.method} {each.path}` | {each.summary} |" for each in ENDPOINTS]
    return "\n".join(rows)


def fields_table(body: type[BaseModel]) -> str:
    """Return the table of the fields that a body has in addition to its base of sampling fields."""
    rows = ["| field | type | meaning |", "|---|---|---|"]
    schema = body.model_json_schema()
    bases = [base for base in body.__bases__ if issubclass(base, SamplingBody)]
    inherited = bases[0].model_fields if bases else {}
    for name, field in body.model_fields.items():
        if name not in inherited or field.description != inherited[name].description:
            kind = _type(schema["properties"][name], schema.get("$defs", {}))
            assert field.description, f"{body.__name__}.{name} must have a description"
            rows.append(f"| `{name}` | {kind} | {_escape(field.description.rstrip('.'))} |")
    return "\n".join(rows)


def neutral_table() -> str:
    """Return the table of fields that are accepted and change nothing."""
    rows = ["| field | accepted values |", "|---|---|"]
    ignored = ", ".join(f"`{name}`" for name in sorted(IGNORED))
    rows.append(f"| {ignored} | any |")
    for name, values in sorted(NEUTRAL_VALUES.items()):
        rows.append(f"| `{name}` | {', '.join(f'`{json.dumps(value)}`' for value in values)} |")
    return "\n".join(rows)


_TYPES = {"string": "text", "boolean": "bool", "object": "object", "array": "list"}


def _type(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the type of a JSON schema in words."""
    if "$ref" in schema:
        return _type(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "anyOf" in schema:
        kinds = [_type(each, definitions) for each in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) or "null"
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        item = _type(schema["items"], definitions).partition(" >=")[0]
        return "list" if item == "any" else "list of " + re.sub("^[a-z]+", r"\g<0>s", item)
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {schema[name]:g}"
        for name, sign in signs.items()
        if abs(schema.get(name, 2**31)) < 2**31 - 1
    ]
    return " ".join([_TYPES.get(kind, kind), " and ".join(bounds)]).strip()


TABLES: dict[str, Callable[[], str]] = {
    "options": options_table,
    "endpoints": endpoints_table,
    "fields of all endpoints": functools.partial(fields_table, SamplingBody),
    "fields of completions and chats": functools.partial(fields_table, bodies.OpenAiBody),
    "fields of completions": functools.partial(fields_table, bodies.CompletionBody),
    "fields of chats": functools.partial(fields_table, bodies.ChatBody),
    "fields of generate": functools.partial(fields_table, bodies.GenerateBody),
    "fields of tokenize": functools.partial(fields_table, bodies.TokenizeBody),
    "fields of detokenize": functools.partial(fields_table, bodies.DetokenizeBody),
    "fields of responses": functools.partial(fields_table, ResponsesBody),
    "fields of messages": functools.partial(fields_table, MessagesBody),
    "accepted fields": neutral_table,
}
"""Tables of the pages, by the name in their first line."""


def with_tables(page: str) -> str:
    """Return the text of a page with its tables as they should be."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        start, end = f"<!-- {name}: written by make docs -->", f"<!-- end of {name} -->"
        return f"{start}\n\n{TABLES[name]()}\n\n{end}"

    return _TABLE.sub(table, page)


def _escape(text: str) -> str:
    """Escape characters outside of code that Markdown would interpret."""
    parts = _CODE_SPAN.split(text)
    parts[::2] = [re.sub(r"([*<|])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def main() -> int:
    argparse.ArgumentParser(description="Write the tables of docs/*.md.").parse_args()
    for page in DOCS.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
