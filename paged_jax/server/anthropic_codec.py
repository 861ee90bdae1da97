"""Codec of ``POST /v1/messages``, the endpoint of Anthropic's API."""

import json
from collections.abc import Sequence
from typing import Any

from paged_jax.scheduler.outputs import CompletionOutput, RequestOutput
from paged_jax.server.answer_blocks import Block, BlockChange, BlockWriter, read_blocks
from paged_jax.server.anthropic_bodies import MessagesBody, chat_of_messages
from paged_jax.server.api_error import ApiError, anthropic_error
from paged_jax.server.generation_request import (
    GenerationRequest,
    schema_constraint,
    stop_strings,
)
from paged_jax.server.json_encoding import JsonDict, encode_named_event
from paged_jax.server.sample_deltas import SampleDelta, whole_samples
from paged_jax.server.service import Service
from paged_jax.server.writer import explanation, usage


def read_message(service: Service, body: MessagesBody) -> GenerationRequest:
    """Read the body of ``POST /v1/messages``."""
    format, sequences = body.format, body.stop_sequences
    fields: dict[str, Any] = {}
    if sequences is not None:
        fields = {"stop_field": "stop_sequences", "stop": [*stop_strings(body), *sequences]}
    return read_blocks(
        service,
        body,
        chat_of_messages(body, service.tokenizer),
        format_field="output_config.format",
        format=None if format is None else lambda: schema_constraint(format.schema_, False),
        params={} if sequences is None else {"stop": fields["stop"]},
        id_prefix="msg",
        prompt_field="messages",
        **fields,
    )


class MessagesWriter(BlockWriter):
    """Writer for ``POST /v1/messages``."""

    body: MessagesBody

    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the JSON of the response, given the finished output."""
        [output] = outputs
        [delta] = whole_samples(output)
        self.tracker.push(self.chat.parts(delta, is_complete=True), is_last=True)
        content = [self._content(block) for block in self.tracker.blocks]
        message = self._message(content, self._usage(output))
        return message | self._end(output.outputs[0]) | self._explanations(output)

    # Stream

    def encode(self, event: JsonDict) -> bytes:
        """Return the bytes of a stream's event."""
        return encode_named_event(event["type"], event)

    def ping(self) -> bytes:
        """Return an event that keeps a stream's connection open, and that clients ignore."""
        return self.encode({"type": "ping"})

    def failure(self, error: ApiError) -> bytes:
        """Return the bytes of the event that ends a stream after an error."""
        return encode_named_event("error", anthropic_error(error, self.request_id))

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return the stream events for new text and tokens."""
        events: list[JsonDict] = []
        for delta in deltas:
            if delta.start == 0:
                message = self._message([], self._usage(output) | {"output_tokens": 0})
                events += [{"type": "message_start", "message": message}, {"type": "ping"}]
            is_last = delta.sample.finish_reason is not None
            for change in self.tracker.push(self.chat.parts(delta), is_last=is_last):
                events += self._events_of(change)
        return events

    def closing(self, outputs: Sequence[RequestOutput]) -> list[JsonDict]:
        """Return the last events of a stream, with the stop reason and the token counts."""
        [output] = outputs
        delta = {"type": "message_delta", "delta": self._end(output.outputs[0])}
        delta |= {"usage": self._usage(output), **self._explanations(output)}
        return [delta, {"type": "message_stop"}]

    # Objects

    def _message(self, content: list[JsonDict], counts: JsonDict) -> JsonDict:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.settings.model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
        }

    def _usage(self, output: RequestOutput) -> JsonDict:
        """Return the token counts. ``input_tokens`` excludes tokens found in the prefix cache."""
        total = usage([output])
        num_cached = total.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": total.prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": total.completion_tokens,
            "output_tokens_details": {
                "thinking_tokens": self.chat.num_reasoning_tokens(output.outputs[0])
            },
        }

    def _explanations(self, output: RequestOutput) -> JsonDict:
        return {"explanations": [explanation(output)]} if self.request.explain else {}

    def _end(self, sample: CompletionOutput) -> JsonDict:
        """Return the fields ``stop_reason`` and ``stop_sequence``: why the answer ended."""
        if sample.finish_reason != "stop":
            # Report "max_tokens" even if the `timeout` has expired: Anthropic's API has no other
            # reason for an answer that is incomplete.
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(block.kind == "call" for block in self.tracker.blocks):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(sample.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    # Blocks

    @property
    def _hides_thinking(self) -> bool:
        """Whether the client asked to leave out the text of the reasoning."""
        return self.body.thinking is not None and self.body.thinking.display == "omitted"

    def _events_of(self, change: BlockChange) -> list[JsonDict]:
        block, index = change.block, {"index": change.block.index}
        if change.action == "open":
            empty_block = Block(block.index, block.kind, block.name, id=block.id)
            return [
                {
                    "type": "content_block_start",
                    **index,
                    "content_block": self._content(empty_block),
                }
            ]
        if change.action == "extend":
            if block.kind == "reasoning" and self._hides_thinking:
                return []
            kind, key = {
                "reasoning": ("thinking_delta", "thinking"),
                "content": ("text_delta", "text"),
                "call": ("input_json_delta", "partial_json"),
            }[block.kind]
            delta = {"type": kind, key: change.text}
            return [{"type": "content_block_delta", **index, "delta": delta}]
        stop = [{"type": "content_block_stop", **index}]
        if block.kind != "reasoning":
            return stop
        signature = {"type": "signature_delta", "signature": ""}
        return [{"type": "content_block_delta", **index, "delta": signature}, *stop]

    def _content(self, block: Block) -> JsonDict:
        """Return the JSON of a block in Anthropic's format."""
        if block.kind == "reasoning":
            text = "" if self._hides_thinking else block.text
            return {"type": "thinking", "thinking": text, "signature": ""}
        if block.kind == "content":
            return {"type": "text", "text": block.text}
        try:
            arguments = json.loads(block.text or "{}")
        except ValueError:
            arguments = {}  # generation ended before the JSON was complete
        call = {"name": block.name, "input": arguments}
        return {"type": "tool_use", "id": f"toolu_{block.id}", **call}
