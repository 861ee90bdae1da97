"""Every field of a request changes something, is an error, or is documented as ignored.

No model runs: a field may change the prompt, the parameters of the engine, or the response to a
given text. Nothing is compiled.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import to_json

from paged_jax import Tokenizer
from paged_jax.models.text.generation_config import GenerationConfig
from paged_jax.models.text.grammar import GrammarCompiler
from paged_jax.models.text.reasoning import THINK
from paged_jax.models.text.tool_grammars import ToolGrammars
from paged_jax.sampling.token_bias import TokenBias
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paged_jax.server import Limits, bodies
from paged_jax.server.anthropic_bodies import CountTokensBody, MessagesBody, chat_of_messages
from paged_jax.server.anthropic_codec import MessagesWriter, read_message
from paged_jax.server.api_error import ApiError
from paged_jax.server.chat_codec import ChatWriter, read_chat
from paged_jax.server.chats import Chat
from paged_jax.server.completion_codec import (
    CompletionWriter,
    GenerateWriter,
    read_completion,
    read_generate,
)
from paged_jax.server.generation import _make_job, check_request
from paged_jax.server.request_log import RequestRecord
from paged_jax.server.response_bodies import InputTokensBody, ResponsesBody, chat_body
from paged_jax.server.response_codec import ResponsesWriter, read_response
from paged_jax.server.sample_deltas import DeltaTracker
from paged_jax.server.sampling_body import IGNORED, NEUTRAL_VALUES, is_neutral
from paged_jax.server.service import Client
from tests.models.test_tools import HERMES_CALL, LINE, template
from tests.server.test_all_formats import backend
from tests.support.tiny_model import EOS

TEMPLATE = template(HERMES_CALL, between=LINE) + (
    "{{ reasoning_effort }}{{ word }}{% if enable_thinking is defined %}{{ enable_thinking }}"
    "{% endif %}"
)
TEXT = "<think>\nHm.</think>\n\nYes."
SCHEMA = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
WEATHER = {"role": "user", "content": "Rain?"}
ANSWERED = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "It"}]
THINKING = [
    {"thinking": {"type": kind, **extra}}
    for kind, extra in (("disabled", {}), ("enabled", {"display": "omitted"}))
]

# Codecs of the endpoints: types of their bodies, readers and writers.
CODECS: dict[str, tuple[Any, Any, Any]] = {
    "generate": (bodies.GenerateBody, read_generate, GenerateWriter),
    "completions": (bodies.CompletionBody, read_completion, CompletionWriter),
    "chats": (bodies.ChatBody, read_chat, ChatWriter),
    "responses": (ResponsesBody, read_response, ResponsesWriter),
    "messages": (MessagesBody, read_message, MessagesWriter),
}
# Bodies without optional fields.
BODIES: dict[str, dict[str, Any]] = {
    "generate": {"prompt": "Well?"},
    "completions": {"prompt": "Well?"},
    "chats": {"messages": ANSWERED[:1]},
    "responses": {"input": "Well?"},
    "messages": {"messages": ANSWERED[:1], "max_tokens": 9},
}
# Changes of a body that must have an effect, by field. Some need other fields.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "add_generation_prompt": [{"add_generation_prompt": False}],
    "add_special_tokens": [{"add_special_tokens": True}, {"add_special_tokens": False}],
    "allowed_token_ids": [{"allowed_token_ids": [5]}],
    "bad_words": [{"bad_words": ["no"]}],
    "chat_template_kwargs": [{"chat_template_kwargs": {"word": "x"}}],
    "continue_final_message": [
        {"continue_final_message": True, "add_generation_prompt": False, "messages": ANSWERED}
    ],
    "explain": [{"explain": True}],
    "include": [{"include": ["message.output_text.logprobs"]}],
    "logprobs": [{"logprobs": 2}, {"logprobs": True}],
    "max_tokens": [{"max_tokens": 3}],
    "output_config": [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_config": {"effort": "low"}},
    ],
    "output_format": [{"output_format": {"type": "json_schema", "schema": SCHEMA}}],
    "parallel_tool_calls": [{"parallel_tool_calls": False, "tools": TOOLS}],
    "reasoning": [{"reasoning": {"effort": "low"}}, {"reasoning": {"summary": "auto"}}],
    "response_format": [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},
    ],
    "stream_options": [
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_obfuscation": True}},
    ],
    "structured_outputs": [
        {"structured_outputs": {name: value}}
        for name, value in {
            "json": SCHEMA, "regex": "a", "choice": ["a"], "grammar": 'start: "a"',
            "json_object": True,
        }.items()
    ],
    "text": [
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    ],
    "thinking": THINKING,
    "tool_choice": [
        {"tool_choice": "none", "tools": TOOLS},
        {"tool_choice": "required", "tools": TOOLS},
        {"tool_choice": {"type": "none"}, "tools": TOOLS},
        {"tool_choice": {"type": "any"}, "tools": TOOLS},
    ],
    "top_logprobs": [{"top_logprobs": 1, "logprobs": True}, {"top_logprobs": 1}],
    "use_beam_search": [{"use_beam_search": True, "n": 2}],
}  # fmt: skip
# Values of fields that need no other field.
VALUES: dict[str, Any] = {
    "background": True, "best_of": 2, "cache_salt": "a", "container": "c", "conversation": "c",
    "echo": True, "frequency_penalty": 1.0, "ignore_eos": True, "include_reasoning": False,
    "include_stop_str_in_output": True, "input": "Rain?", "instructions": "Be brief.",
    "length_penalty": 2.0, "logit_bias": {"5": 1.0}, "max_completion_tokens": 3,
    "max_output_tokens": 3, "mcp_servers": [1], "messages": [WEATHER], "metadata": {"a": "b"},
    "min_p": 0.5, "min_tokens": 2, "modalities": ["audio"], "model": "other", "n": 2,
    "presence_penalty": 1.0, "previous_response_id": "r", "priority": 1, "prompt": "Rain?",
    "prompt_logprobs": 1, "prompt_token_ids": [5], "reasoning_effort": "low",
    "repetition_penalty": 2.0, "return_token_ids": True, "seed": 5, "separate_reasoning": False,
    "skip_special_tokens": False, "stop": "No", "stop_sequences": ["No"], "stop_token_ids": [5],
    "suffix": "x", "system": "Be brief.", "temperature": 0.5, "thread": {"type": "create"},
    "timeout": 5.0, "tools": TOOLS, "top_k": 5, "top_p": 0.5, "truncate_prompt_tokens": 1,
}  # fmt: skip
TOOLS_OF = {
    "chats": TOOLS,
    "responses": [{"type": "function", "name": "now"}],
    "messages": [{"name": "now", "input_schema": SCHEMA}],
}
# Fields that decide only how the response is sent.
BY_ENDPOINT = {"stream"}


@functools.cache
def service() -> Any:
    tokenizer = Tokenizer(backend(), eos_token_ids=[EOS], chat_template=TEMPLATE)
    grammars = GrammarCompiler(backend(), tokenizer.vocab_size, [EOS])
    return SimpleNamespace(
        tokenizer=tokenizer,
        reasoning_format=THINK,
        grammars=grammars,
        tool_grammars=ToolGrammars(grammars),
        settings=SimpleNamespace(model_name="m", api_keys=()),
        limits=Limits(),
        generation_config=GenerationConfig(),
        token_bias=TokenBias(),
        max_model_len=400,
        max_length=400,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset([EOS]),
        max_token_chars=tokenizer.max_token_chars,
        check_model=check_model,
    )


def check_model(name: str | None) -> None:
    if name not in (None, "m"):
        raise ApiError(404, f"no model {name}")


def output_of(job: Any) -> RequestOutput:
    """Return the output of the engine for `TEXT`, with what the parameters ask for."""
    params, tokenizer = job.params, service().tokenizer
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    row = {each: Logprob(-1.0, 1, "x") for each in token_ids}
    rows = None if params.logprobs is None else [row] * len(token_ids)
    samples = [
        CompletionOutput(index, TEXT, token_ids, 0.0, rows, "stop") for index in range(params.n)
    ]
    prompt = job.prompts[0]
    output = RequestOutput("r", None, prompt, samples, True, RequestMetrics(0.0))
    if params.prompt_logprobs is None:
        return output
    prompt_rows = [None, *({each: Logprob(-2.0, 1, "x")} for each in prompt[1:])]
    return dataclasses.replace(output, prompt_logprobs=prompt_rows)


def effect_of(route: str, body: dict[str, Any]) -> str:
    """Return everything that a body determines, or its error."""
    body_type, read, make_writer = CODECS[route]
    body = {**body, "tools": TOOLS_OF[route]} if body.get("tools") else body
    try:
        parsed = body_type.model_validate(body)
        requests = [read(service(), parsed) for _ in range(2)]
        for request in requests:
            check_request(service(), request)
            record = RequestRecord("1", False, "POST", "/")
            job = _make_job(service(), request, Client(), record)
        whole, stream = (make_writer(service(), parsed, request, "1") for request in requests)
        output = output_of(job)
        events = [*stream.opening(), *stream.chunks(0, output, DeltaTracker().deltas(0, output))]
        events += stream.closing([output])
        response = to_json([whole.response_body([output]), events]).decode()
    except (ValidationError, ApiError) as error:
        return f"error: {error}"
    params = dataclasses.asdict(job.params)  # its repr is short
    penalty = request.beam_length_penalty
    facts = (job.prompts, params, job.cache_salt, job.options, penalty)
    return f"{facts} {response}"


@pytest.fixture
def constant_ids(monkeypatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    monkeypatch.setattr("time.time", lambda: 0.0)


def changes_of(name: str) -> list[dict[str, Any]]:
    return CHANGES[name] if name in CHANGES else [{name: VALUES[name]}]


@pytest.mark.parametrize("route", BODIES)
def test_every_field_has_an_effect(route, constant_ids) -> None:
    (body_type, _, _), base = CODECS[route], BODIES[route]
    assert not effect_of(route, base).startswith("error"), effect_of(route, base)
    for name, field in body_type.model_fields.items():
        if name in BY_ENDPOINT or (field.description or "").startswith("Ignored"):
            continue
        effects = []
        for change in changes_of(name):
            if name == "tool_choice" and isinstance(change[name], dict) != (route == "messages"):
                continue
            others = {key: value for key, value in change.items() if key != name}
            others = others if others.keys() <= body_type.model_fields.keys() else {}
            without = effect_of(route, {**base, **others})
            effects.append(effect_of(route, {**base, **others, **change}) != without)
        # A default, such as add_special_tokens false in chats, has no effect.
        is_enough = (
            any(effects) if name in ("add_special_tokens", "stream_options") else all(effects)
        )
        assert is_enough, (name, effects)


@pytest.mark.parametrize("route", BODIES)
def test_hints_are_no_fields_that_change_a_response(route, constant_ids) -> None:
    """Unknown fields are errors, unless they are hints or have the value of the default."""
    (body_type, _, _), base = CODECS[route], BODIES[route]
    for name in {*IGNORED, *NEUTRAL_VALUES} - body_type.model_fields.keys():
        for value in NEUTRAL_VALUES.get(name, ("x",)):
            assert effect_of(route, {**base, name: value}) == effect_of(route, base)
        if name in NEUTRAL_VALUES:
            assert f"{name} is supported here only as" in effect_of(route, {**base, name: "x"})
    assert not is_neutral("separate_reasoning", False)


@pytest.mark.parametrize("name", ["instructions", "tools", "reasoning", "text", "input"])
def test_counted_prompts_are_the_prompts_of_responses(name) -> None:
    base = BODIES["responses"]
    change = {"tools": TOOLS_OF["responses"]} if name == "tools" else changes_of(name)[0]
    body = {**base, **change, "chat_template_kwargs": {"word": "x"}}
    chats = [
        Chat(service(), chat_body(each.model_validate(body), service().tokenizer))
        for each in (ResponsesBody, InputTokensBody)
    ]
    counted = chats[1].token_ids()
    assert chats[0].token_ids() == counted and "x" in chats[1]._prompt


@pytest.mark.parametrize("name", ["system", "tools", "thinking", "output_config", "messages"])
def test_counted_prompts_are_the_prompts_of_messages(name) -> None:
    base = BODIES["messages"]
    change = {"tools": TOOLS_OF["messages"]} if name == "tools" else changes_of(name)[0]
    body = {**base, **change, "reasoning_effort": "high", "chat_template_kwargs": {"word": "x"}}
    chats = [
        Chat(service(), chat_of_messages(each, service().tokenizer))
        for each in (
            MessagesBody.model_validate(body),
            CountTokensBody.model_validate({k: v for k, v in body.items() if k != "max_tokens"}),
        )
    ]
    counted = chats[1].token_ids()
    assert chats[0].token_ids() == counted and "x" in chats[1]._prompt
