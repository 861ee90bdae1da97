"""Sessions of agents with a server: recorded requests, loops over tools, and agent libraries.

Each session checks what must hold for any model: the loop ends, calls name a function and have the
arguments of its schema, and streams and whole answers are the same.
"""

import functools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from pydantic import TypeAdapter

from paged_jax import Engine
from paged_jax.models.loading.pretrained import bundled_folder
from tests.support.agent_requests import IN_NAMESPACE, SCHEMAS, Json, claude_like, codex_like
from tests.support.live_server import LiveServer
from tests.support.structured import HERMES_TEMPLATE, SIZES
from tests.support.tiny_model import EOS


@functools.cache
def _event_type() -> TypeAdapter[Any]:
    from openai.types import responses

    return TypeAdapter(responses.ResponseStreamEvent)


@functools.cache
def _message_event_type() -> TypeAdapter[Any]:
    from anthropic import types

    return TypeAdapter(types.RawMessageStreamEvent)


NAMESPACE = "mcp__files"


def agent_engine(folder: Path, *, ends_early: bool = False) -> Engine:
    """Return an engine with the bundled model, tools, and a context for ten turns of an agent.

    Args:
      folder: an empty folder.
      ends_early: whether a full stop ends an answer, which would else have hundreds of tokens.
    """
    shutil.copytree(bundled_folder(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    if ends_early:
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        ends = {"eos_token_id": [EOS, vocabulary["."]]}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    return Engine(folder, **{**SIZES, "num_blocks": 256})


def check_call(name: str, arguments: Any, namespace: str | None = None) -> None:
    """Check that a call names a function, and that its arguments match the schema."""
    assert namespace == (NAMESPACE if name in IN_NAMESPACE else None), name
    check_arguments(name, arguments)


def check_arguments(name: str, arguments: Any) -> None:
    """Check that the arguments of a call match the schema of the function."""
    schema = {key: value for key, value in SCHEMAS[name].items() if key != "$schema"}
    jsonschema.validate(arguments, schema)


def frames(response: httpx.Response) -> Iterator[Json]:
    """Yield the data of the events of a stream, which have the names that the data says."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert event["type"] == name
            yield event


def _ask(server: LiveServer, path: str, body: Json) -> list[Json]:
    with server.client() as client, client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise AssertionError(response.read().decode())
        return list(frames(response))


# Responses


def replay_codex(server: LiveServer, model: str, **changes: Any) -> int:
    """Send ten recorded requests, streamed and whole. Return the tokens that the cache held."""
    cached = []
    for body in codex_like(model):
        body |= changes
        response = _check_response(_ask(server, "/v1/responses", body))
        cached.append(response["usage"]["input_tokens_details"]["cached_tokens"])
        whole = server.post("/v1/responses", {**body, "stream": False}).json()
        assert _without_ids(whole) == _without_ids(response)
    assert len(cached) == 10 and cached[1:] == sorted(cached[1:])
    return sum(cached)


def _check_response(events: list[Json]) -> Json:
    """Check the events of a stream, and return the response at its end."""
    for number, event in enumerate(events):
        _event_type().validate_python(event)
        assert event["sequence_number"] == number
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert events[0]["type"] == "response.created" and response["output"] == done
    assert response["status"] in ("completed", "incomplete")
    for item in done:
        if item["type"] == "function_call" and response["status"] == "completed":
            check_call(item["name"], json.loads(item["arguments"]), item.get("namespace"))
    return response


def _without_ids(response: Mapping[str, Any]) -> Any:
    """Return the parts of a response that do not differ between two equal requests."""
    ignored = ("id", "call_id", "created_at", "completed_at", "cached_tokens")
    return _without(response, ignored)


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_without(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _without(each, names) for key, each in value.items() if key not in names}


def run_codex_loop(server: LiveServer, model: str, *, num_required: int, **changes: Any) -> int:
    """Run a loop over tools like a coding agent, and return its number of requests.

    Args:
      server: the server.
      model: name of the model.
      num_required: number of requests at the start that must be answered with calls.
      **changes: changed fields of the requests.
    """
    body = {**codex_like(model)[0], **changes}
    for number in range(10):
        choice = "required" if number < num_required else "none" if number == 9 else "auto"
        response = _check_response(_ask(server, "/v1/responses", {**body, "tool_choice": choice}))
        kinds = ("function_call", "custom_tool_call")
        calls = [item for item in response["output"] if item["type"] in kinds]
        assert calls or choice != "required"
        if not calls or response["status"] == "incomplete":
            return number + 1
        results = [
            {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "ok"}
            for call in calls
        ]
        body["input"] = [*body["input"], *response["output"], *results]
    raise AssertionError("the loop has not ended")


# Messages


def replay_claude(server: LiveServer, model: str, **changes: Any) -> int:
    """Send ten recorded requests, streamed and whole. Return the tokens that the cache held."""
    cached, sizes = 0, []
    requests = claude_like(model)
    for path, body in requests:
        if path.endswith("count_tokens"):
            # The request before it had the same content.
            assert server.post(path, body).json() == {"input_tokens": sizes[-1]}
            continue
        body |= changes
        message = _check_message(_ask(server, path, body), body)
        usage = message["usage"]
        cached += usage["cache_read_input_tokens"]
        sizes.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
        whole = server.post(path, {**body, "stream": False}).json()
        ignored = ("id", "input_tokens", "cache_read_input_tokens")
        assert _without(whole, ignored) == _without(message, ignored)
    assert len(requests) == 10 and sizes[1:8] == sorted(sizes[1:8])
    return cached


def _check_message(events: list[Json], body: Json) -> Json:
    """Check the events of a stream, and return the message that they add up to."""
    for event in events:
        _message_event_type().validate_python(event) if event["type"] != "ping" else None
    message, blocks = events[0]["message"], list[Json]()
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["json"] += delta.get("partial_json", "")
            for key in ("text", "thinking"):
                if key in delta:
                    blocks[event["index"]][key] += delta[key]
    end = next(event for event in events if event["type"] == "message_delta")
    is_whole = end["delta"]["stop_reason"] != "max_tokens"
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(arguments or "{}")
            except ValueError:
                assert not is_whole
            else:
                check_arguments(block["name"], block["input"]) if is_whole else None
    if "format" in body.get("output_config", {}) and is_whole:
        schema = body["output_config"]["format"]["schema"]
        jsonschema.validate(json.loads(blocks[-1]["text"]), schema)
    assert events[-1]["type"] == "message_stop"
    return {**message, "content": blocks, **end["delta"], "usage": end["usage"]}


def run_claude_loop(server: LiveServer, model: str, *, num_required: int, **changes: Any) -> int:
    """Run a loop over tools like a coding agent, and return its number of requests."""
    body = {**claude_like(model)[1][1], **changes}
    for number in range(10):
        kind = "any" if number < num_required else "none" if number == 9 else "auto"
        body["tool_choice"] = {"type": kind}
        message = _check_message(_ask(server, "/v1/messages", body), body)
        uses = [block for block in message["content"] if block["type"] == "tool_use"]
        assert uses or kind != "any"
        if message["stop_reason"] != "tool_use":
            return number + 1
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": "ok"} for use in uses
        ]
        told = [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": results},
        ]
        body["messages"] = [*body["messages"], *told]
    raise AssertionError("the loop has not ended")
