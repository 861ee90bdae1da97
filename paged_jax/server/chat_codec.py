"""Codec of ``POST /v1/chat/completions``, with reasoning and tool calls."""

import dataclasses
import functools
import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.api_error import ApiError
from paged_jax.server.chats import Chat, num_chars
from paged_jax.server.generation_request import (
    GenerationRequest,
    read_openai,
    read_openai_params,
)
from paged_jax.server.json_encoding import JsonDict, to_json_dict
from paged_jax.server.sample_deltas import SampleDelta, whole_samples
from paged_jax.server.service import Service
from paged_jax.server.writer import OpenAiWriter, finite, usage


def read_chat(service: Service, body: bodies.ChatBody) -> GenerationRequest:
    """Read the body of ``POST /v1/chat/completions``."""
    chat, max_tokens = Chat(service, body), body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    request = read_openai(
        body,
        id_prefix="chatcmpl",
        prompts=lambda: [chat.token_ids()],
        num_chars=num_chars(body.messages),
        prompt_field="messages",
        params=functools.partial(_chat_params, body, chat, max_tokens),
        max_tokens=max_tokens,
        chat=chat,
    )
    # The grammar of tool calls must be compiled too.
    return dataclasses.replace(request, is_constrained=request.is_constrained or bool(body.tools))


def _chat_params(body: bodies.ChatBody, chat: Chat, max_tokens: int | None) -> dict[str, Any]:
    """Read the sampling parameters, with log-probabilities and the grammar of tool calls."""
    # Include `max_tokens` even if it is None. None means that the answer may fill the context, but
    # without the entry, the default of `SamplingParams` would apply.
    params = {**read_openai_params(body), "max_tokens": max_tokens}
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs must be null or 0 unless logprobs is true.", param="top_logprobs"
        )
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    has_structured_outputs = body.structured_outputs is not None
    field = "structured_outputs" if has_structured_outputs else "response_format"
    return params | chat.params(params.get("structured_outputs"), field)


class ChatWriter(OpenAiWriter):
    """Writer for ``POST /v1/chat/completions``."""

    body: bodies.ChatBody
    chunk_type = schemas.ChatCompletionChunk

    def __init__(
        self, service: Service, body: bodies.ChatBody, request: GenerationRequest, request_id: str
    ):
        super().__init__(service, body, request, request_id)
        assert request.chat is not None
        self.chat = request.chat
        self._has_begun = False  # whether the stream has events with the role
        # Number of tool calls that the stream of each sample has begun.
        self._num_calls: dict[int, int] = {}

    def usage(self, outputs: Sequence[RequestOutput]) -> schemas.Usage:
        """Return the token counts, including the number of reasoning tokens."""
        total = usage(outputs)
        if self.chat.reasoning is not None:
            samples = [sample for output in outputs for sample in output.outputs]
            count = sum(map(self.chat.num_reasoning_tokens, samples))
            total.completion_tokens_details = schemas.CompletionTokensDetails(
                reasoning_tokens=count
            )
        return total

    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the JSON of the response, with a message for each sample."""
        [output] = outputs
        choices = [self._choice(delta) for delta in whole_samples(output)]
        end = self.end(outputs) | self.prompt_fields(output)
        return to_json_dict(schemas.ChatCompletionResponse, **self.head, choices=choices, **end)

    def _choice(self, delta: SampleDelta) -> JsonDict:
        parts = self.chat.parts(delta, is_complete=True)
        chat_delta = self._delta(delta.sample.index, parts)
        calls = [
            schemas.ToolCall(id=call.id or "", function=call.function)
            for call in chat_delta.tool_calls or ()
        ]
        message = schemas.ChatMessage(
            content=delta.text if self.chat.is_plain else chat_delta.content,
            reasoning=chat_delta.reasoning,
            reasoning_content=chat_delta.reasoning_content,
            tool_calls=calls or None,
        )
        return to_json_dict(
            schemas.ChatChoice,
            index=delta.sample.index,
            message=message,
            logprobs=self._logprobs(delta, parts),
            finish_reason=self.chat.finish_reason(delta.sample, bool(calls)),
            stop_reason=delta.sample.stop_reason,
            token_ids=self.sample_token_ids(delta),
        )

    def _delta(self, index: int, parts: Sequence[AnswerDelta]) -> schemas.ChatDelta:
        """Convert new parts of an answer to the delta of a message.

        The delta may be empty: text that may turn out to be a tool call is held back.

        Args:
          index: index of the sample.
          parts: the new parts of the answer.
        """
        texts = {"reasoning": "", "content": ""}
        calls = list[schemas.ToolCallDelta]()
        for kind, text in parts:
            if kind == "call":
                calls.append(self._begin_call(index, text))
            elif kind == "arguments" and calls:
                # Extend the entry of this tool call: an event has at most one entry per tool call.
                calls[-1].function.arguments += text
            elif kind == "arguments":
                function = schemas.CalledFunction(arguments=text)
                calls.append(
                    schemas.ToolCallDelta(index=self._num_calls[index] - 1, function=function)
                )
            else:
                texts[kind] += text
        reasoning = texts["reasoning"] or None
        reasoning = None if self.body.include_reasoning is False else reasoning
        return schemas.ChatDelta(
            content=texts["content"] or None,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or None,
        )

    def _begin_call(self, sample: int, name: str) -> schemas.ToolCallDelta:
        index = self._num_calls.get(sample, 0)
        self._num_calls[sample] = index + 1
        function = schemas.CalledFunction(name=name, arguments="")
        new_id = self.chat.call_id(secrets.token_hex(12))
        return schemas.ToolCallDelta(index=index, id=new_id, type="function", function=function)

    def _roles(self) -> list[JsonDict]:
        """Return an event for each sample, with the role ``"assistant"``.

        Its content is "" if the answer is plain text. Otherwise the content is null: the answer may
        begin with reasoning or a tool call, but clients that receive "" begin to show a text.

        These events are sent with the first text, because clients measure the time to the first
        token at the first event.
        """
        content = "" if self.chat.is_plain else None
        delta = to_json_dict(schemas.ChatDelta, role="assistant", content=content)
        return [self._chunk(index, delta) for index in range(self.request.n)]

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return an event for each delta, with the new text and the finish reason, if any."""
        roles = [] if self._has_begun else self._roles()
        self._has_begun = True
        return [*roles, *(self._next_chunk(output, delta) for delta in deltas)]

    def _next_chunk(self, output: RequestOutput, delta: SampleDelta) -> JsonDict:
        message: JsonDict | schemas.ChatDelta
        parts = self.chat.parts(delta)
        if self.chat.is_plain:
            message = to_json_dict(schemas.ChatDelta, content=delta.text)
        else:
            message = self._delta(delta.sample.index, parts)
        has_calls = self._num_calls.get(delta.sample.index, 0) > 0
        return self._chunk(
            delta.sample.index,
            message,
            usage=self.usage_so_far(output, delta),
            **(self.prompt_fields(output) if delta.start == 0 else {}),
            logprobs=self._logprobs(delta, parts),
            finish_reason=self.chat.finish_reason(delta.sample, has_calls),
            stop_reason=delta.sample.stop_reason,
            token_ids=self.sample_token_ids(delta),
        )

    def _chunk(
        self,
        index: int,
        delta: JsonDict | schemas.ChatDelta,
        *,
        usage: schemas.Usage | None = None,
        prompt_token_ids: list[int] | None = None,
        **fields: Any,
    ) -> JsonDict:
        choice = to_json_dict(schemas.ChatChunkChoice, index=index, delta=delta, **fields)
        return self.event([choice], usage=usage, prompt_token_ids=prompt_token_ids)

    def _logprobs(
        self, delta: SampleDelta, parts: Sequence[AnswerDelta]
    ) -> schemas.ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        assert self.service.tokenizer is not None
        count = self.body.top_logprobs or 0
        indices = itertools.chain(*self.chat.content_tokens(delta, parts))
        return {"content": chat_logprobs(self.service.tokenizer, delta.sample, indices, count)}


def chat_logprobs(
    tokenizer: Tokenizer, sample: CompletionOutput, indices: Iterable[int], count: int
) -> Iterator[schemas.TokenLogprob]:
    """Yield log-probabilities in OpenAI's format for chats, with an entry for each token.

    Args:
      tokenizer: the tokenizer of the model.
      sample: a sample that was generated with log-probabilities.
      indices: indices of the tokens to report, as positions in ``sample.token_ids``.
      count: number of most probable tokens in each entry.
    """
    assert sample.logprobs is not None
    for index in indices:
        token_id, row = sample.token_ids[index], sample.logprobs[index]
        # Select the `count` most probable tokens. `row` may have one more entry, because it always
        # includes the generated token.
        top = sorted(row, key=lambda candidate_id: row[candidate_id].rank)[:count]
        top_logprobs = [
            _top_logprob(tokenizer, candidate_id, row[candidate_id]) for candidate_id in top
        ]
        yield {**_top_logprob(tokenizer, token_id, row[token_id]), "top_logprobs": top_logprobs}


def _top_logprob(tokenizer: Tokenizer, token_id: int, token: Logprob) -> schemas.TopLogprob:
    return {
        "token": token.decoded_token,
        "logprob": finite(token.logprob),
        "bytes": _bytes_of(tokenizer, token_id),
    }


@functools.lru_cache(maxsize=2**14)
def _bytes_of(tokenizer: Tokenizer, token_id: int) -> list[int]:
    # The lists are cached, because creating them takes longer than the rest of the response. They
    # must not be modified.
    return list(tokenizer.token_bytes(token_id))
