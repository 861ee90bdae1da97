"""Engine sizes for structured outputs, and JSON schemas with short texts."""

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st

Schema = dict[str, Any]

# Sizes of engines with the bundled model, which can write JSON. Tests share them, and so the
# compiled programs.
SIZES = {"block_size": 8, "num_blocks": 20, "max_num_seqs": 4, "max_chunk": 16}
PERSON: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "is_old": {"type": "boolean"}},
    "required": ["name", "is_old"],
    "additionalProperties": False,
}

_NAMES = st.sampled_from(["a", "name", "colour_of_it", "n 1", "é", 'q"', "x\n"])
_VALUES = st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from(["", "red", "ñ"])


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    low = draw(st.integers(-200, 200))
    schema = {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(10, 500))}
    return schema | draw(st.sampled_from([{}, {"multipleOf": 5}]))


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["length", "pattern", "format"]))
    if kind == "length":
        low = draw(st.integers(0, 3))
        return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(["^[a-c]{2,4}$", "^(x|yz)\\d$"]))}
    return {"type": "string", "format": "ipv4"}


_LEAVES = (
    _integers()
    | _strings()
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])
    | st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=3))
    | st.builds(lambda value: {"const": value}, _VALUES)
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    if draw(st.booleans()):
        items = draw(st.lists(inner, min_size=1, max_size=2))
        count = len(items)
        return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
    low = draw(st.integers(0, 1))
    # Only leaves, because arrays of arrays soon exceed the context.
    return {"type": "array", "items": draw(_LEAVES), "minItems": low, "maxItems": low + 1}


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    either = st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2))
    return _objects(inner) | _arrays(inner) | either


def _named(schema: Schema) -> Schema:
    """Return a pair of a name and its schema."""
    reference = {"$ref": "#/$defs/it"}
    return {
        "type": "array",
        "prefixItems": [reference, reference],
        "minItems": 2,
        "maxItems": 2,
    } | {"$defs": {"it": schema}}


def schemas() -> st.SearchStrategy[Schema]:
    """Schemas of a few kinds, nested in each other."""
    return st.recursive(_LEAVES, _nested, max_leaves=4) | st.builds(_named, _LEAVES)


# Tools, and chat templates with tools like those of two families.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of the next days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
_MESSAGES = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL{% endfor %}\n{% endfor %}a:"
)
HERMES_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }},{% endfor %}{% endif %}"
    + _MESSAGES.replace(
        "CALL",
        '<tool_call>\n{"name": "{{ call.function.name }}", '
        '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>',
    )
)
LLAMA3_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }},{% endfor %}{% endif %}"
    + _MESSAGES.replace(
        "CALL",
        '{"name": "{{ call.function.name }}", '
        '"parameters": {{ call.function.arguments | tojson }}}',
    )
)


def ask_pydantic_ai(url: str, output_type: Any, question: str) -> Any:
    """Run an agent of Pydantic AI with the bundled model of a server, and return its result."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    import openai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            model = OpenAIChatModel("bundled", provider=OpenAIProvider(openai_client=client))
            return (await pydantic_ai.Agent(model, output_type=output_type).run(question)).output

    return asyncio.run(run())
