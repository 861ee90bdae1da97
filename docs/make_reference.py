"""Write the API reference and the tables of options, endpoints and fields from the source.

    python docs/make_reference.py             # writes docs/api/*.md and tables in docs/*.md

Signatures are taken from the source, so they do not depend on the version of Python.
"""

import argparse
import ast
import functools
import importlib
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import BaseModel

from paged_jax.engine.config import EngineConfig, option_specs
from paged_jax.server import bodies
from paged_jax.server.anthropic_bodies import MessagesBody
from paged_jax.server.openapi import ENDPOINTS
from paged_jax.server.response_items import ResponsesBody
from paged_jax.server.sampling_body import IGNORED, NEUTRAL_VALUES, SamplingBody

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "api"
# Tables stand between these lines of docs/*.md.
_TABLE = re.compile(r"<!-- (.+): written by make docs -->\n.*?<!-- end of \1 -->", re.DOTALL)


class Page(NamedTuple):
    """A page of the reference.

    Attributes:
      title: the heading of the page.
      names: the documented functions and classes, with the module to import them from.
    """

    title: str
    names: tuple[str, ...]


def _of(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names.split())


PAGES = {
    "ops": Page(
        "Ops over blocks",
        _of(
            "paged_jax",
            "paged_attention paged_prefill_attention ragged_paged_attention cascade_attention "
            "merge_attention "
            "paged_rope_write paged_write write_kv_pages copy_blocks",
        )
        + _of(
            "paged_jax.kernels",
            "Pools quantise num_shared_blocks padded_head_dim choose_backend check_backend_runs_on "
            "backend_for grouped_linear load_cpu_kernels",
        ),
    ),
    "blocks": Page(
        "The block allocator",
        _of("paged_jax", "BlockTables BlockPool")
        + _of(
            "paged_jax.cache.blocks",
            "BlockCopies reserve restore slide fork reorder release truncate attach publish forget "
            "num_blocks_needed check_invariants",
        ),
    ),
    "cache": Page(
        "The paged cache",
        _of("paged_jax", "PagedCache CacheGroup")
        + _of(
            "paged_jax.cache",
            "reserve restore locate fork reorder release truncate attach publish forget "
            "read_blocks write_blocks gather",
        ),
    ),
    "models": Page(
        "Model, weights and tokenizer",
        _of("paged_jax", "Llama LlamaConfig PagedModel Heads Tokenizer")
        + _of("paged_jax.models.paged_model", "create_cache")
        + _of("paged_jax.models.loading.orbax", "save_checkpoint"),
    ),
    "engine": Page(
        "Engine and LLM",
        _of("paged_jax", "LLM Engine")
        + _of("paged_jax.engine.config", "EngineConfig")
        + _of("paged_jax", "AsyncEngine EngineStats SamplingParams")
        + _of("paged_jax", "StructuredOutputsParams StructuredOutputError RequestOutput")
        + _of(
            "paged_jax", "CompletionOutput Logprob RequestMetrics Explanation Wait PreemptionNote"
        )
        + _of("paged_jax.distributed", "initialize is_leader"),
    ),
    "memory": Page(
        "What lies in memory",
        _of("paged_jax.cache_map", "snapshot changes block_text CacheMap RunningSample")
        + _of("paged_jax.cache_map", "WaitingSample BlockText CacheEvent")
        + _of(
            "paged_jax.engine.footprint", "footprint Footprint weight_bytes block_bytes state_bytes"
        )
        + _of("paged_jax.models.tensor_parallel", "shard_config widen_config")
        + _of(
            "paged_jax.engine.memory_plan",
            "step_bound collectives StepBound Collectives DeviceSpec",
        ),
    ),
    "server": Page(
        "The server",
        _of("paged_jax.server", "create_app Service Settings Limits"),
    ),
    "generation": Page(
        "Rollouts and beam search",
        _of("paged_jax", "rollout Rollout BeamSearchParams BeamSearchOutput BeamSearchSequence"),
    ),
}

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example)( \(.*\))?:")
_LISTED = ("Args", "Attributes", "Raises")
_CODE_SPAN = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)


def pages() -> dict[str, str]:
    """Return the Markdown of each file of the reference, by file name."""
    files = {f"{key}.md": _page(page) for key, page in PAGES.items()}
    index = ["# API reference", "", "Written by `make docs` from the docstrings.", ""]
    for key, page in PAGES.items():
        anchors = _anchors(page.names)
        links = (f"[`{_last(name)}`]({key}.md#{anchors[name]})" for name in page.names)
        index.append(f"- [{page.title}]({key}.md): {', '.join(links)}")
    files["README.md"] = "\n".join(index) + "\n"
    return files


def _page(page: Page) -> str:
    # Keep examples as in the docstrings: Markdown formatters must not change them.
    parts = ["<!-- fmt: off -->", f"# {page.title}"]
    for path in page.names:
        parts += _entry(path, _load(path), level=2)
    return "\n\n".join(parts) + "\n"


def _load(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def _last(path: str) -> str:
    return path.rsplit(".", 1)[1]


def _anchors(paths: tuple[str, ...]) -> dict[str, str]:
    """Return the anchors that GitHub gives to the headings of a page.

    Headings that differ only in case, such as `rollout` and `Rollout`, get a number.
    """
    anchors: dict[str, str] = {}
    for path in paths:
        anchor = path.replace(".", "").lower()
        count = [each.replace(".", "").lower() for each in anchors].count(anchor)
        anchors[path] = f"{anchor}-{count}" if count else anchor
    return anchors


def _entry(path: str, thing: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{path}`"
    tree = _parse(thing)
    yield f"```python\n{_signature(thing, tree)}\n```"
    yield from _prose(inspect.getdoc(thing) or "")
    if isinstance(tree, ast.ClassDef):
        for node in [node for each in _own_classes(thing) for node in _parse(each).body]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node):
                yield f"{'#' * (level + 1)} `{_last(path)}.{node.name}`"
                yield f"```python\n{_header(node)}\n```"
                yield from _prose(ast.get_docstring(node) or "")


def _own_classes(thing: type) -> list[type]:
    """Return a class and its bases in this package, up to a base that has its own entry."""
    entries = [_load(path) for page in PAGES.values() for path in page.names]
    bases = itertools.takewhile(lambda each: each not in entries, thing.__mro__[1:])
    return [thing, *(each for each in bases if each.__module__.startswith("paged_jax."))]


def _is_public(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    # Models are used through `__call__`; the constructor is in the heading of its class.
    return node.name == "__call__" or not node.name.startswith("_")


def _parse(thing: Any) -> Any:
    thing = inspect.unwrap(thing)
    module = inspect.getmodule(thing)
    assert isinstance(module, ModuleType)
    nodes = ast.parse(inspect.getsource(module)).body
    found = [node for node in nodes if getattr(node, "name", None) == thing.__name__]
    if not found:
        raise LookupError(f"{thing!r} is not defined at the top of {module.__name__}")
    return found[-1]  # after its overloads


def _signature(thing: Any, tree: Any) -> str:
    if not isinstance(tree, ast.ClassDef):
        return _header(tree)
    for each in thing.__mro__:
        for node in _parse(each).body if each.__module__.startswith("paged_jax.") else ():
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                if any("takes_options" in ast.unparse(each) for each in node.decorator_list):
                    return _join(tree.name, _option_arguments(), "")
                return _header(node, name=tree.name)
    if thing is EngineConfig:
        return _join(tree.name, _option_arguments(), "")
    lines = inspect.getsource(sys.modules[thing.__module__]).splitlines()
    fields = [
        line
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        for line in lines[node.lineno - 1 : node.end_lineno]
    ]
    bases = ", ".join(ast.unparse(base) for base in tree.bases)
    return "\n".join([f"class {tree.name}({bases}):" if bases else f"class {tree.name}:", *fields])


def _header(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str | None = None) -> str:
    """Return a signature, in a single line if it is short enough."""
    arguments = _arguments(node.args)
    returns = f" -> {_annotation(node.returns)}" if node.returns and name is None else ""
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return f"{node.name}: {returns.removeprefix(' -> ')}  # read only"
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    decorators = [f"@{name}\n" for name in names if name in ("classmethod", "staticmethod")]
    keyword = "async def " if isinstance(node, ast.AsyncFunctionDef) else ""
    return _join("".join(decorators) + keyword + (name or node.name), arguments, returns)


def _join(start: str, arguments: list[str], returns: str) -> str:
    line = f"{start}({', '.join(arguments)}){returns}"
    if len(line) <= 100:
        return line
    return f"{start}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returns}"


def _option_arguments() -> list[str]:
    """Return the fields of `EngineConfig` as arguments."""
    arguments = []
    for node in _parse(EngineConfig).body:
        if isinstance(node, ast.AnnAssign):
            if isinstance(node.value, ast.Call):
                default = ast.unparse(node.value.args[0])
                arguments.append(
                    f"{ast.unparse(node.target)}: {_annotation(node.annotation)} = {default}"
                )
            else:  # dataclasses.KW_ONLY
                arguments.append("*")
    return arguments


def options_table() -> str:
    """Return the table of engine options for docs/engine.md."""
    rows = ["| option | meaning | default | flag | vLLM |", "|---|---|---|---|---|"]
    for each in option_specs():
        flag, vllm = (f"`{name}`" if name else "" for name in (each.flag, each.vllm))
        meaning, default = (_escape(text) for text in (each.help, each.default_help))
        rows.append(f"| `{each.name}` | {meaning} | {default} | {flag} | {vllm} |")
    return "\n".join(rows)


def endpoints_table() -> str:
    """Return the table of endpoints for docs/serving.md."""
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
        return "list of " + re.sub("^[a-z]+", r"\g<0>s", item)
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


def _arguments(args: ast.arguments) -> list[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    texts = [_argument(*pair) for pair in zip(positional, defaults, strict=True)]
    if positional and positional[0].arg in ("self", "cls"):
        texts = texts[1:]
    if args.vararg:
        texts.append("*" + _argument(args.vararg, None))
    elif args.kwonlyargs:
        texts.append("*")
    texts += [_argument(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    # Never: there are none; they are taken to be refused with a hint.
    if args.kwarg and ast.unparse(args.kwarg.annotation or args.kwarg) != "Never":
        texts.append("**" + _argument(args.kwarg, None))
    return texts


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation:
        text += f": {_annotation(argument.annotation)}"
    if default is None:
        return text
    equals = " = " if argument.annotation else "="
    return f"{text}{equals}{ast.unparse(default)}"


def _annotation(node: ast.expr) -> str:
    """Return an annotation without the quotes of a forward reference."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def _prose(docstring: str) -> Iterator[str]:
    """Convert a docstring to Markdown: sections become headings, lists and code."""
    lines, plain = docstring.splitlines(), []
    while lines:
        line = lines.pop(0)
        match = _SECTION.fullmatch(line)
        if not match:
            plain.append(line)
            continue
        body: list[str] = []
        while lines and (not lines[0] or lines[0].startswith(" ")):
            body.append(lines.pop(0))
        yield from _plain(plain)
        plain = []
        yield from _section(match, textwrap.dedent("\n".join(body)).strip())
    yield from _plain(plain)


def _plain(lines: list[str]) -> Iterator[str]:
    text = "\n".join(lines).strip()
    if text:
        yield _escape(re.sub(r"::$", ":", text, flags=re.MULTILINE))


def _section(match: re.Match[str], body: str) -> Iterator[str]:
    name = match[1]
    yield f"**{name}{match[2] or ''}**"
    if name == "Example":
        yield f"```pycon\n{body}\n```"
    elif name in _LISTED:
        yield "\n".join(_items(body))
    else:
        yield _escape(body)


def _items(body: str) -> Iterator[str]:
    """Yield list items from entries ``names: text``, whose further lines are indented."""
    for entry in re.split(r"\n(?! )", body):
        entry = " ".join(entry.split())
        names, _, text = entry.partition(": ")
        code = ", ".join(f"`{name}`" for name in names.split(", "))
        yield f"- {code}: {_escape(text)}" if text else f"- {_escape(entry)}"


def _escape(text: str) -> str:
    """Escape characters outside of code that Markdown would interpret."""
    parts = _CODE_SPAN.split(text)
    parts[::2] = [re.sub(r"([*<|])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def main() -> int:
    argparse.ArgumentParser(
        description="Write docs/api/*.md and the tables of docs/*.md."
    ).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    for page in DOCS.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
