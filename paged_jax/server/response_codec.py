"""Codec of ``POST /v1/responses``, OpenAI's Responses API."""

import functools
import json
import time
from collections.abc import Sequence
from typing import Any

from paged_jax.sampling.structured_outputs import StructuredOutputsParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.server.answer_blocks import Block, BlockChange, BlockWriter, read_blocks
from paged_jax.server.api_error import ApiError
from paged_jax.server.chat_codec import chat_logprobs
from paged_jax.server.generation_request import GenerationRequest, schema_constraint
from paged_jax.server.json_encoding import JsonDict, encode_named_event
from paged_jax.server.response_bodies import (
    ResponsesBody,
    TextFormat,
    ToolNames,
    chat_body,
    custom_input,
)
from paged_jax.server.sample_deltas import SampleDelta, whole_samples
from paged_jax.server.service import Service
from paged_jax.server.writer import explanation, usage

_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc", "custom": "ctc"}
_PART_TYPES = {"reasoning": "reasoning_text", "content": "output_text"}


def read_response(service: Service, body: ResponsesBody) -> GenerationRequest:
    """Read the body of ``POST /v1/responses``."""
    max_tokens = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    params: dict[str, Any] = {"max_tokens": max_tokens}
    if body.has_logprobs:
        params["logprobs"] = body.top_logprobs or 0
    format = None if body.text is None else body.text.format
    if format is not None and format.type == "text":
        format = None
    return read_blocks(
        service,
        body,
        chat_body(body, service.tokenizer),
        format_field="text.format",
        format=None if format is None else functools.partial(_format_constraint, format),
        params=params,
        id_prefix="resp",
        prompt_field="input",
        max_tokens=max_tokens,
    )


def _format_constraint(format: TextFormat) -> StructuredOutputsParams:
    if format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if format.schema_ is None:
        raise ApiError(400, "text.format must have a schema.", param="text.format")
    return schema_constraint(format.schema_, bool(format.strict))


class ResponsesWriter(BlockWriter):
    """Writer for ``POST /v1/responses``."""

    body: ResponsesBody

    def __init__(
        self, service: Service, body: ResponsesBody, request: GenerationRequest, request_id: str
    ):
        super().__init__(service, body, request, request_id)
        self._names = ToolNames(body.tools or ())
        # The last block, if generation ended before the block was complete.
        self._cut_block: Block | None = None
        self._num_events = 0
        self._echoed = _echo(body)
        # Maps the index of each text block to the log-probabilities of its tokens.
        self._logprobs: dict[int, list[JsonDict]] = {}
        # Log-probabilities of content tokens with text that `tracker` has not added to a block yet.
        self._next_logprobs: list[JsonDict] = []

    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the JSON of the response, given the finished output."""
        [output] = outputs
        [delta] = whole_samples(output)
        self._changes(delta, is_complete=True)
        return self._response(output)

    # Stream

    def encode(self, event: JsonDict) -> bytes:
        """Add the next sequence number to an event, and return its bytes."""
        event = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return encode_named_event(event["type"], event)

    def failure(self, error: ApiError) -> bytes:
        """Return the bytes of the event that ends a stream after an error."""
        response = self._response(None)
        # Clients read the code: Codex, for example, shortens the chat if it is
        # "context_length_exceeded".
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        reason = {"code": error.code or code, "message": str(error)}
        return self.encode(
            {
                "type": "response.failed",
                "response": {**response, "status": "failed", "error": reason},
            }
        )

    def opening(self) -> list[JsonDict]:
        """Return the first events of a stream, ``created`` and ``in_progress``."""
        return [self._progress("created"), self._progress("in_progress")]

    def ping(self) -> bytes:
        """Return another event ``in_progress``: Codex gives up after 300 seconds without events."""
        return self.encode(self._progress("in_progress"))

    def _progress(self, name: str) -> JsonDict:
        return {"type": f"response.{name}", "response": self._response(None)}

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return the stream events for new text and tokens."""
        return [
            event
            for delta in deltas
            for change, logprobs in self._changes(delta)
            for event in self._events_of(change, logprobs)
        ]

    def closing(self, outputs: Sequence[RequestOutput]) -> list[JsonDict]:
        """Return the last event of a stream, which contains the whole response."""
        response = self._response(outputs[0])
        return [{"type": f"response.{response['status']}", "response": response}]

    def _events_of(self, change: BlockChange, logprobs: list[JsonDict]) -> list[JsonDict]:
        block = change.block
        location: JsonDict = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            location["content_index"] = 0
        empty_block = Block(block.index, block.kind, block.name, id=block.id)
        if change.action == "open":
            added_event = {
                "type": "response.output_item.added",
                "output_index": block.index,
                "item": self._item(empty_block, status="in_progress"),
            }
            return [added_event, *self._part_events(empty_block, location, "added")]
        if self._is_custom(block):
            return self._custom_events(change, location)
        name = _text_event(block)
        if change.action == "extend":
            extra = {"logprobs": logprobs} if block.kind == "content" else {}
            event = {"type": f"{name}.delta", **location, "delta": change.text, **extra}
            return [
                event,
                *_summary_events(self._wants_summary, block, location, "delta", delta=change.text),
            ]
        key = "arguments" if block.kind == "call" else "text"
        text = _arguments(block) if block.kind == "call" else block.text
        extra = {"logprobs": self._logprobs_of(block)} if block.kind == "content" else {}
        name_field = {"name": self._names.split(block.name)["name"]} if block.kind == "call" else {}
        is_missing = block.kind == "call" and not block.text
        return [
            *([{"type": f"{name}.delta", **location, "delta": text}] if is_missing else ()),
            {"type": f"{name}.done", **location, key: text, **extra, **name_field},
            *self._part_events(block, location, "done"),
            {
                "type": "response.output_item.done",
                "output_index": block.index,
                "item": self._item(block),
            },
        ]

    def _custom_events(self, change: BlockChange, location: JsonDict) -> list[JsonDict]:
        """Return the events for new text or the end of a custom tool's call.

        The input is sent at the end: until then, it is an incomplete JSON text.
        """
        if change.action == "extend":
            return []
        name, text = "response.custom_tool_call_input", custom_input(change.block.text)
        item = {"output_index": change.block.index, "item": self._item(change.block)}
        return [
            {"type": f"{name}.delta", **location, "delta": text},
            {"type": f"{name}.done", **location, "input": text},
            {"type": "response.output_item.done", **item},
        ]

    def _part_events(self, block: Block, location: JsonDict, action: str) -> list[JsonDict]:
        """Return the events for the start or end of a block's content part; [] for tool calls.

        `location` has the fields that identify the part, and `action` is ``"added"`` or ``"done"``.
        """
        if block.kind == "call":
            return []
        events = [
            {"type": f"response.content_part.{action}", **location, "part": self._part(block)}
        ]
        if action == "done":
            events += _summary_events(self._wants_summary, block, location, "done", text=block.text)
        part = {"type": "summary_text", "text": block.text}
        return events + _summary_events(self._wants_summary, block, location, action, part=part)

    # Objects

    @property
    def _wants_summary(self) -> bool:
        options = self.body.reasoning
        return options is not None and bool(options.summary or options.generate_summary)

    def _part(self, block: Block) -> JsonDict:
        part: JsonDict = {"type": _PART_TYPES[block.kind], "text": block.text}
        if block.kind == "content":
            part |= {"annotations": [], "logprobs": self._logprobs_of(block)}
        return part

    def _item(self, block: Block, status: str | None = None) -> JsonDict:
        """Convert a block to an item of the response's ``output``.

        The default of `status` is ``"completed"``, or ``"incomplete"`` for `_cut_block`.
        """
        status = status or ("incomplete" if block is self._cut_block else "completed")
        item: JsonDict = {"id": self._item_id(block), "status": status}
        content = [self._part(block)] if block.text and block.kind != "call" else []
        if block.kind == "reasoning":
            summary_parts = [{"type": "summary_text", "text": block.text}]
            summary = summary_parts if block.text and self._wants_summary else []
            return {"type": "reasoning", **item, "summary": summary, "content": content}
        if block.kind == "content":
            return {"type": "message", **item, "role": "assistant", "content": content}
        call = {"call_id": self.chat.call_id(block.id), **self._names.split(block.name)}
        if self._is_custom(block):
            text = "" if status == "in_progress" else custom_input(block.text)
            return {"type": "custom_tool_call", **item, **call, "input": text}
        arguments = "" if status == "in_progress" else _arguments(block)
        return {"type": "function_call", **item, **call, "arguments": arguments}

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and block.name in self._names.customs

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES['custom' if self._is_custom(block) else block.kind]}_{block.id}"

    def _response(self, output: RequestOutput | None) -> JsonDict:
        """Return the JSON of the response. `output` is None while it is in progress."""
        status, details, counts = "in_progress", None, None
        items: list[JsonDict] = []
        if output is not None:
            [sample] = output.outputs
            status = "completed" if sample.finish_reason == "stop" else "incomplete"
            if sample.finish_reason == "length":
                details = {"reason": "max_output_tokens"}
            elif status == "incomplete":  # OpenAI has no reason for the end of `timeout`
                details = {"reason": sample.stop_reason or sample.finish_reason}
            counts = _usage(output, self.chat.num_reasoning_tokens(sample))
            items = [self._item(block) for block in self.tracker.blocks]
        explanations: JsonDict = {}
        if output is not None and self.request.explain:
            explanations["explanations"] = [explanation(output)]
        return {
            **explanations,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if output is not None else None,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": self.service.settings.model_name,
            "output": items,
            "usage": counts,
            **self._echoed,
        }

    def _changes(
        self, delta: SampleDelta, *, is_complete: bool = False
    ) -> list[tuple[BlockChange, list[JsonDict]]]:
        """Add new text to the blocks. Return the changes of blocks, with log-probabilities.

        Each change is paired with the log-probabilities of the tokens that it adds. They are []
        unless the block is text and log-probabilities were requested.

        Args:
          delta: the new text and tokens of the sample.
          is_complete: whether `delta` has the whole sample, because the response is not a stream.
        """
        parts = self.chat.parts(delta, is_complete=is_complete)
        has_logprobs = delta.logprobs is not None
        tokens = self.chat.content_tokens(delta, parts) if has_logprobs else [[]] * len(parts)
        changes: list[tuple[BlockChange, list[JsonDict]]] = []
        for part, indices in zip(parts, tokens, strict=True):
            if indices:
                tokenizer, count = self.service.tokenizer, self.body.top_logprobs or 0
                assert tokenizer is not None
                new_logprobs = chat_logprobs(tokenizer, delta.sample, indices, count)
                self._next_logprobs += [dict(logprob) for logprob in new_logprobs]
            for change in self.tracker.push([part]):
                block_logprobs: list[JsonDict] = []
                if change.action == "extend" and change.block.kind == "content":
                    block_logprobs, self._next_logprobs = self._next_logprobs, []
                    self._logprobs.setdefault(change.block.index, []).extend(block_logprobs)
                changes.append((change, block_logprobs))
        is_last = is_complete or delta.sample.finish_reason is not None
        if is_last and delta.sample.finish_reason != "stop" and self.tracker.is_open:
            self._cut_block = self.tracker.blocks[-1]
        return [*changes, *((change, []) for change in self.tracker.push([], is_last=is_last))]

    def _logprobs_of(self, block: Block) -> list[JsonDict]:
        """Return the log-probabilities of a block's tokens; [] if it has no text."""
        return self._logprobs.get(block.index, []) if block.text else []


def _echo(body: ResponsesBody) -> JsonDict:
    """Return the body fields that the response repeats, with defaults for missing ones."""
    reasoning = body.reasoning
    sampling = body.model_dump(include={"temperature", "top_p"})
    format = None if body.text is None else body.text.format
    text: JsonDict = {"format": {"type": "text"}}
    if format is not None and format.type != "text":
        text["format"] = format.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "store": False,
        "temperature": sampling["temperature"],
        "text": text,
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool for tool in body.tools or () if ToolNames([tool]).functions],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling["top_p"],
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _usage(output: RequestOutput, num_reasoning_tokens: int) -> JsonDict:
    """Return the token counts of a response, with the field names of this API."""
    total = usage([output])
    return {
        "input_tokens": total.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": total.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": total.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": total.total_tokens,
    }


def _text_event(block: Block) -> str:
    """Return the type of a block's text events, without ``.delta`` or ``.done`` at its end."""
    return {
        "reasoning": "response.reasoning_text",
        "content": "response.output_text",
        "call": "response.function_call_arguments",
    }[block.kind]


def _arguments(block: Block) -> str:
    """Return the JSON arguments of a tool call; "{}" if generation ended before them."""
    return block.text or json.dumps({})


def _summary_events(
    wants_summary: bool, block: Block, location: JsonDict, action: str, **fields: Any
) -> list[JsonDict]:
    """Return a list with the event for the summary of a reasoning block, or [].

    The reasoning is not summarised: the summary has the same text as the reasoning.

    Args:
      wants_summary: whether the client requested summaries.
      block: the block; blocks of other kinds have no summary.
      location: fields of the event that identify the item.
      action: last word of the event's type: ``"added"``, ``"delta"`` or ``"done"``.
      **fields: other fields of the event.
    """
    if block.kind != "reasoning" or not wants_summary:
        return []
    summary_location = {key: value for key, value in location.items() if key != "content_index"}
    name = "response.reasoning_summary_" + ("part" if "part" in fields else "text")
    return [{"type": f"{name}.{action}", **summary_location, "summary_index": 0, **fields}]
