"""Requests in the style of coding agents: ten in a row, each with the whole conversation.

They have the fields, kinds of items and kinds of tools that such agents send, also those that this
server ignores. All texts are short, so that the conversations fit a small context.
"""

from typing import Any

Json = dict[str, Any]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _object(properties: Json, required: list[str], **more: Any) -> Json:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": required, **closed, **more}


# Schemas with nested objects, enums, unions, definitions and keywords for humans. Their texts are
# short, because an unsure model fills the maximum length.
_PATH = {"type": "string", "maxLength": 8}
_GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.{1,8}/"}
_SHELL = _object(
    {
        "command": {
            "type": "array",
            "description": "The command.",
            "items": {"type": "string", "maxLength": 8},
            "maxItems": 2,
        },
        "workdir": {"type": "string", "description": "The folder.", "maxLength": 8},
        "timeout_ms": {"type": "integer", "minimum": 0, "exclusiveMaximum": 600001},
    },
    ["command"],
)
_PLAN = _object(
    {
        "explanation": {"type": ["string", "null"], "maxLength": 8},
        "plan": {
            "type": "array",
            "maxItems": 2,
            "items": _object(
                {
                    "step": {"type": "string", "minLength": 1, "maxLength": 8},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                ["step", "status"],
            ),
        },
    },
    ["plan"],
)
_SEARCH = _object(
    {
        "query": {"type": "string", "pattern": "^(?!\\s*$).+", "maxLength": 8},
        "filters": {"anyOf": [{"$ref": "#/$defs/filter"}, {"type": "null"}], "default": None},
    },
    ["query"],
    **{"$schema": _DRAFT, "$defs": {"filter": _object({"path": _PATH}, ["path"])}},
)
_VIEW = _object({"path": {"format": "uri-reference", **_PATH}}, ["path"])
SCHEMAS = {"shell": _SHELL, "update_plan": _PLAN, "search": _SEARCH, "view": _VIEW}
IN_NAMESPACE = ("search", "view")


def _codex_tools() -> list[Json]:
    """Return functions, a namespace with functions, and tools of kinds that are skipped."""
    functions = {
        name: {
            "type": "function",
            "name": name,
            "description": f"Use {name}.",
            "strict": False,
            "parameters": schema,
        }
        for name, schema in SCHEMAS.items()
    }
    inner = [{**functions[name], "defer_loading": False} for name in IN_NAMESPACE]
    return [
        functions["shell"],
        functions["update_plan"],
        {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": inner},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "patch", "format": _GRAMMAR},
        {"type": "surprise", "depth": {"levels": [1, 2]}},
    ]


def _said(role: str, *texts: str, **fields: Any) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    parts: list[Json] = [{"type": kind, "text": text} for text in texts]
    for part in parts if role == "assistant" else ():
        part |= {"annotations": [], "logprobs": None}
    return {"type": "message", "role": role, "content": parts, **fields}


def _call(number: int, name: str, arguments: str, **fields: Any) -> Json:
    own = {"id": f"fc_{number}", "call_id": f"call_{number}", "status": "completed"}
    return {"type": "function_call", **own, "name": name, "arguments": arguments, **fields}


def _result(number: int, output: Any, **fields: Any) -> Json:
    return {
        "type": "function_call_output",
        "call_id": f"call_{number}",
        "output": output,
        **fields,
    }


def _reasoning(number: int, **fields: Any) -> Json:
    return {
        "type": "reasoning",
        "id": f"rs_{number}",
        "summary": [],
        "content": None,
        "encrypted_content": None,
        **fields,
    }


# New items of each later request.
_CODEX_TURNS: list[list[Json]] = [
    [
        _reasoning(1, content=[{"type": "reasoning_text", "text": "Look."}]),
        _call(1, "shell", '{"command": ["ls"]}'),
        _result(1, "a.py"),
    ],
    [
        _reasoning(2, summary=[{"type": "summary_text", "text": "Read."}]),
        _said("assistant", "I read.", id="msg_2", status="completed", phase="commentary"),
        _call(2, "view", '{"path": "a.py"}', namespace="mcp__files"),
        _call(3, "search", '{"query": "x", "filters": null}', namespace="mcp__files"),
        _result(2, [{"type": "input_text", "text": "x = 1"}]),
        _result(3, [{"type": "input_text", "text": "a.py"}, {"type": "input_text", "text": ":1"}]),
    ],
    [_call(4, "update_plan", '{"plan": []}'), _result(4, ""), _said("user", "Go on.")],
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "x"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        _said("developer", "Be brief."),
    ],
    [
        _call(5, "shell", '{"command": ["cat", "b'),  # an answer that was cut short
        _result(5, "failed to parse function arguments: EOF", success=False),
    ],
    [
        _reasoning(6, encrypted_content="gAAAA"),
        _call(6, "shell", '{"command": ["true"], "timeout_ms": 10}', internal={"a": [1]}),
        _result(6, "", status="completed"),
    ],
    [{"type": "compaction", "encrypted_content": "gBBBB"}, _said("user", "And?", "", id=None)],
    [
        {"type": "item_reference", "id": "rs_7"},
        {"type": "ghost_snapshot", "commit": {"id": "f00"}},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Why?"},
    ],
    [_call(8, "gone", "{}"), _result(8, "unsupported call: gone")],
]


def codex_like(model: str) -> list[Json]:
    """Return ten bodies of ``POST /v1/responses``, as a coding agent sends them in one session."""
    items = [
        _said("developer", "You edit files.", "Ask nothing."),
        _said("developer", "The shell is sh."),
        _said("user", "cwd: /w"),
        _said("user", "Fix a.py.", id="msg_u"),
    ]
    body = {
        "model": model,
        "tools": _codex_tools(),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto", "context": None},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-a",
        "text": {"verbosity": "low"},
        "client_metadata": {"session": "0199-a", "turn": "1"},
        "service_tier": None,
    }
    bodies = []
    for turn in [[], *_CODEX_TURNS]:
        items = [*items, *turn]
        bodies.append({**body, "input": items})
    return bodies


# Messages


_CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def _text(text: str, **fields: Any) -> Json:
    return {"type": "text", "text": text, **fields}


def _use(number: int, name: str, arguments: Json, **fields: Any) -> Json:
    return {
        "type": "tool_use",
        "id": f"toolu_{number}",
        "name": name,
        "input": arguments,
        **fields,
    }


def _used(number: int, content: Any = None, **fields: Any) -> Json:
    found = {"type": "tool_result", "tool_use_id": f"toolu_{number}", **fields}
    return found if content is None else {**found, "content": content}


def _claude_tools() -> list[Json]:
    tools: list[Json] = [
        {
            "name": name,
            "description": f"Use {name}.",
            "input_schema": {"$schema": _DRAFT, **schema},
            "eager_input_streaming": True,
        }
        for name, schema in SCHEMAS.items()
    ]
    tools[-1] |= {"type": "custom", **_CACHED}
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    return [*tools, hosted, {"type": "bash_20250124", "name": "bash"}]


# The answer of the assistant and the next message of the user, for each request after the first.
_CLAUDE_TURNS: list[list[Json]] = [
    [
        {"role": "assistant", "content": [_use(1, "shell", {"command": ["ls"]})]},
        {"role": "user", "content": [_used(1, "a.py", **_CACHED)]},
    ],
    [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": ""},
                _text("I read."),
                _use(2, "view", {"path": "a.py"}, caller={"type": "direct"}),
                _use(3, "search", {"query": "x"}),
            ],
        },
        {
            "role": "user",
            "content": [
                _used(2, [_text("x = 1")]),
                _used(3, "not found", is_error=True),
                _text("Go on.", **_CACHED),
            ],
        },
    ],
    [
        {"role": "assistant", "content": [_use(4, "update_plan", {"plan": []})]},
        {"role": "user", "content": [_used(4)]},
    ],
    [
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "gAAA"},
                {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []},
                _text("So."),
            ],
        },
        {"role": "user", "content": "And?"},
    ],
    [
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": [_text("Why?"), {"type": "tool_reference", "name": "x"}]},
    ],
    [
        {"role": "assistant", "content": [_use(5, "gone", {})]},
        {"role": "user", "content": [_used(5, [], is_error=False), _text("No.")]},
    ],
]


def claude_like(model: str) -> list[tuple[str, Json]]:
    """Return ten paths and bodies, as a coding agent sends them to Anthropic's API."""
    messages: list[Json] = [
        {"role": "user", "content": [_text("cwd: /w"), _text("Fix a.py.", **_CACHED)]},
        {"role": "system", "content": "The shell is sh."},
    ]
    body = {
        "model": model,
        "stream": True,
        "max_tokens": 32000,
        "system": [
            _text("x-anthropic-billing-header: cc_version=1; cch=0f0f;"),
            _text("You edit files.", **_CACHED),
            _text("Ask nothing.", **_CACHED),
        ],
        "tools": _claude_tools(),
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"session_id": "0199-a"}'},
    }
    schema = _object({"title": {"type": "string", "maxLength": 8}}, ["title"])
    title = {
        **body,
        "messages": [{"role": "user", "content": "Fix a.py."}],
        "tools": [],
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    found = [("/v1/messages", title)]
    for turn in [[], *_CLAUDE_TURNS]:
        messages = [*messages, *turn]
        found.append(("/v1/messages", {**body, "messages": messages}))
    counted = {
        name: value for name, value in found[-1][1].items() if name not in ("stream", "max_tokens")
    }
    forced = {**found[2][1], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    return [*found, ("/v1/messages/count_tokens", counted), ("/v1/messages", forced)]
