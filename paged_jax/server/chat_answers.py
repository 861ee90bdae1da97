"""Responses of ``POST /v1/chat/completions``, with chat templates, reasoning and tool calls."""

import functools
import secrets
from collections.abc import Sequence
from typing import Any

from paged_jax.models.text.grammar_source import form_rule
from paged_jax.models.text.reasoning import AnswerReader, ReasoningFormat, Start
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.models.text.tool_formats import Tool, ToolFormat
from paged_jax.models.text.tool_reader import AnswerDelta
from paged_jax.sampling.params import StructuredOutputsParams
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.answers import OpenAiAnswer, SampleDelta, finite, usage, whole_samples
from paged_jax.server.chat_messages import (
    check_calls,
    num_chars,
    template_messages,
    template_tools,
    template_variables,
)
from paged_jax.server.responses import ApiError, JsonDict, to_json_dict


class ChatRequest(OpenAiAnswer):
    """Answer to a chat: its prompt, its grammar, and readers of its text.

    Subclasses write the answer in the format of an endpoint.
    """

    body: bodies.ChatBody

    @functools.cached_property
    def tools(self) -> list[Tool]:
        """Tools that the model may call."""
        body, tokenizer = self.body, self.service.tokenizer
        is_asked = body.tool_choice not in (None, "none", "auto")
        if is_asked and not body.tools:
            raise ApiError(
                400, "tool_choice must be null, none or auto without tools.", param="tool_choice"
            )
        if tokenizer is None or not body.tools or body.tool_choice == "none":
            return []
        tools: list[Tool] = [*template_tools(body.tools, tokenizer)]
        if isinstance(body.tool_choice, bodies.ToolChoice):
            if self.tool_choice not in [tool["function"]["name"] for tool in tools]:
                raise ApiError(400, "tool_choice must name one of the tools.", param="tool_choice")
        return tools

    @property
    def tool_choice(self) -> str:
        """``"auto"``, ``"required"`` or the name of the function to call."""
        choice = self.body.tool_choice or "auto"
        return choice.function.name if isinstance(choice, bodies.ToolChoice) else choice

    @property
    def _tool_format(self) -> ToolFormat | None:
        assert self.service.tokenizer is not None
        return self.service.tokenizer.tool_format if self.tools else None

    @property
    def _reasoning(self) -> ReasoningFormat | None:
        return None if self.body.separate_reasoning is False else self.service.reasoning_format

    @functools.cached_property
    def _prompt(self) -> str:
        """The prompt as text, rendered by the chat template."""
        tokenizer = self.service.tokenizer
        if tokenizer is None:
            raise ApiError(400, "Chats need a tokenizer, but the model has none.")
        check_calls(self.body.messages, tokenizer)
        return tokenizer.render_chat(
            template_messages(self.body.messages),
            template_variables(self.body),
            tools=self.tools or None,
        )

    @functools.cached_property
    def _start(self) -> Start:
        """Where the answer begins: inside of the reasoning, after it, or either."""
        return "answer" if self._reasoning is None else self._reasoning.start(self._prompt)

    def prompts(self) -> list[str | list[int]]:
        """Return the messages as a prompt, rendered by the model's chat template."""
        prompt, tokenizer = self._prompt, self.service.tokenizer
        assert tokenizer is not None
        adds = bool(self.body.add_special_tokens)
        return [tokenizer.encode(prompt, add_special_tokens=adds)]

    @property
    def is_constrained(self) -> bool:
        """Whether a schema or grammar constrains the text."""
        return super().is_constrained or bool(self.body.tools)

    @property
    def num_chars(self) -> int:
        """Characters of all messages together."""
        return num_chars(self.body.messages)

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens of each sample. `max_completion_tokens` overrides `max_tokens`."""
        newer = self.body.max_completion_tokens
        return self.body.max_tokens if newer is None else newer

    def params(self) -> dict[str, Any]:
        """Return the sampling parameters, with log-probabilities and the grammar of tool calls."""
        # `max_tokens` is always included: None lets a chat fill the context, unlike the default of
        # `SamplingParams`.
        body, params = self.body, {**super().params(), "max_tokens": self.max_tokens}
        if body.top_logprobs and not body.logprobs:
            raise ApiError(
                400, "top_logprobs must be null or 0 unless logprobs is true.", param="top_logprobs"
            )
        if body.logprobs:
            params["logprobs"] = body.top_logprobs or 0
        form = self._form(params.get("structured_outputs"))
        if form is not None:
            params["structured_outputs"] = form
        if self._has_special_marks:
            params["skip_special_tokens"] = False
        return params

    def _form(self, form: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the constraint on the whole text, given the constraint on the answer."""
        if (format := self._tool_format) is not None:
            mark = self._reasoning.opening if self._reasoning and self._start == "either" else None
            form = self.service.tool_grammars.form(
                format,
                self.tools,
                self.tool_choice,
                is_parallel=self.body.parallel_tool_calls is not False,
                answer=None if form is None else self._answer_rule(form),
                not_first=mark,
            )
        if form is None or self._reasoning is None:
            return form
        return self._reasoning.constrain(form, self._start)

    def _answer_rule(self, form: StructuredOutputsParams) -> str:
        self.service.grammars.check(form)  # its error names the form, not the tools
        return form_rule(form)

    @property
    def _has_special_marks(self) -> bool:
        """Whether marks in the text are special tokens, which texts leave out by default."""
        tokenizer, reasoning = self.service.tokenizer, self._reasoning
        if tokenizer is None:
            return False
        marks = () if reasoning is None else (reasoning.opening, reasoning.closing)
        is_special = any(map(tokenizer.is_special_text, marks))
        return is_special or bool(self._tool_format and self._tool_format.special_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether the text of a sample is its content, without reasoning and calls."""
        return self._reasoning is None and not self.tools

    @functools.cached_property
    def _readers(self) -> dict[int, AnswerReader]:
        return {}

    def parts(self, delta: SampleDelta, *, is_whole: bool = False) -> list[AnswerDelta]:
        """Return the new parts of a sample: reasoning, content and calls.

        Args:
          delta: new part of a sample, or the whole sample.
          is_whole: whether `delta` is the whole sample, not a part of a stream.
        """
        if self.is_plain:
            return [AnswerDelta("content", delta.text)]
        index = delta.sample.index
        if is_whole or index not in self._readers:
            self._readers[index] = AnswerReader(
                self._reasoning, self._start, self._tool_format, self.tools
            )
        is_last = is_whole or delta.sample.finish_reason is not None
        return self._readers[index].push(delta.text, is_last=is_last)

    def num_reasoning_tokens(self, sample: CompletionOutput) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        reader, tokenizer = self._readers.get(sample.index), self.service.tokenizer
        if reader is None or not reader.has_reasoned or tokenizer is None:
            return 0
        assert self._reasoning is not None
        low, high = 0, len(sample.token_ids)
        if reader.is_inside:
            return high
        while low < high:  # the smallest number of tokens that contain the closing mark
            middle = (low + high) // 2
            text = tokenizer.decode(sample.token_ids[:middle], skip_special_tokens=False)
            low, high = (low, middle) if self._reasoning.closing in text else (middle + 1, high)
        return low

    def finish_reason(self, sample: CompletionOutput, has_calls: bool) -> str | None:
        """Return OpenAI's finish reason: ``"tool_calls"`` if the model chose to call a tool.

        If the request names the function to call, OpenAI's reason is ``"stop"``.
        """
        is_named = isinstance(self.body.tool_choice, bodies.ToolChoice)
        reason = sample.finish_reason
        return "tool_calls" if reason == "stop" and has_calls and not is_named else reason


class ChatAnswer(ChatRequest):
    """Response of ``POST /v1/chat/completions``."""

    prefix = "chatcmpl"
    chunk_type = schemas.ChatCompletionChunk

    @functools.cached_property
    def _num_calls(self) -> dict[int, int]:
        """Number of calls in the stream of each sample so far."""
        return {}

    def usage(self, outputs: Sequence[RequestOutput]) -> schemas.Usage:
        """Return the usage, with the number of tokens of the reasoning."""
        total = usage(outputs)
        if self._reasoning is not None:
            samples = [sample for output in outputs for sample in output.outputs]
            count = sum(map(self.num_reasoning_tokens, samples))
            total.completion_tokens_details = schemas.CompletionTokensDetails(
                reasoning_tokens=count
            )
        return total

    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the whole response, with a message for each sample."""
        [output] = outputs
        choices = [self._choice(delta) for delta in whole_samples(output)]
        end = self.end(outputs) | self.prompt_fields(output)
        return to_json_dict(schemas.ChatCompletionResponse, **self.head, choices=choices, **end)

    def _choice(self, delta: SampleDelta) -> JsonDict:
        found = self._delta(delta, is_whole=True)
        calls = [
            schemas.ToolCall(id=call.id or "", function=call.function)
            for call in found.tool_calls or ()
        ]
        message = schemas.ChatMessage(
            content=delta.text if self.is_plain else found.content,
            reasoning=found.reasoning,
            reasoning_content=found.reasoning_content,
            tool_calls=calls or None,
        )
        return to_json_dict(
            schemas.ChatChoice,
            index=delta.sample.index,
            message=message,
            logprobs=self._logprobs(delta),
            finish_reason=self.finish_reason(delta.sample, bool(calls)),
            stop_reason=delta.sample.stop_reason,
            token_ids=self.sample_token_ids(delta),
        )

    def _delta(self, delta: SampleDelta, *, is_whole: bool = False) -> schemas.ChatDelta:
        """Return the new parts of a message; empty while a text may still become a call."""
        texts = {"reasoning": "", "content": ""}
        index, calls = delta.sample.index, list[schemas.ToolCallDelta]()
        for kind, text in self.parts(delta, is_whole=is_whole):
            if kind == "call":
                calls.append(self._begin_call(index, text))
            elif kind == "arguments" and calls:
                # an event has at most one entry for each call
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
        new_id = f"call_{secrets.token_hex(12)}"
        return schemas.ToolCallDelta(index=index, id=new_id, type="function", function=function)

    def opening(self) -> list[JsonDict]:
        """Return an event for each sample with the assistant's role."""
        delta = to_json_dict(schemas.ChatDelta, role="assistant", content="")
        return [self._chunk(index, delta) for index in range(self.body.n or 1)]

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return an event for each sample with new tokens or a finish reason."""
        return [self._next_chunk(output, each) for each in deltas]

    def _next_chunk(self, output: RequestOutput, delta: SampleDelta) -> JsonDict:
        message: JsonDict | schemas.ChatDelta
        if self.is_plain:
            message = to_json_dict(schemas.ChatDelta, content=delta.text)
        else:
            message = self._delta(delta)
        has_calls = self._num_calls.get(delta.sample.index, 0) > 0
        return self._chunk(
            delta.sample.index,
            message,
            usage=self.usage_so_far(output, delta),
            **(self.prompt_fields(output) if delta.start == 0 else {}),
            logprobs=self._logprobs(delta),
            finish_reason=self.finish_reason(delta.sample, has_calls),
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

    def _logprobs(self, delta: SampleDelta) -> schemas.ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        rows = zip(delta.token_ids, delta.logprobs, strict=True)
        return {"content": (self._token_logprob(token_id, row) for token_id, row in rows)}

    def _token_logprob(self, token_id: int, row: dict[int, Logprob]) -> schemas.TokenLogprob:
        # The candidates always include the generated token, even if it is not among the most
        # probable.
        top = sorted(row, key=lambda each: row[each].rank)[: self.body.top_logprobs or 0]
        others = [self._top_logprob(each, row[each]) for each in top]
        return {**self._top_logprob(token_id, row[token_id]), "top_logprobs": others}

    def _top_logprob(self, token_id: int, token: Logprob) -> schemas.TopLogprob:
        assert self.service.tokenizer is not None
        return {
            "token": token.decoded_token,
            "logprob": finite(token.logprob),
            "bytes": _bytes_of(self.service.tokenizer, token_id),
        }


@functools.lru_cache(maxsize=2**14)
def _bytes_of(tokenizer: Tokenizer, token_id: int) -> list[int]:
    # Cached, because creating these lists would take longer than the rest of the response. They are
    # never modified.
    return list(tokenizer.token_bytes(token_id))
