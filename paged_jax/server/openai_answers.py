"""`CompletionAnswer` and `ChatAnswer`: the answers of the endpoints that OpenAI's API has."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.sampling.params import StructuredOutputsParams
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.answers import Answer, by_token_id, finite, usage
from paged_jax.server.deltas import SampleDelta, whole
from paged_jax.server.errors import ApiError
from paged_jax.server.explanations import explanation
from paged_jax.server.messages import as_messages, num_chars, template_variables
from paged_jax.server.records import RequestRecord
from paged_jax.server.service import Client, Service
from paged_jax.server.token_texts import TokenTexts, prompt_texts
from paged_jax.server.tool_calls import ToolUse, check_calls


class OpenAiAnswer(Answer):
    """What the answers of both endpoints have in common.

    Attributes:
      chunk_type: the type of a stream's events.
    """

    body: bodies.OpenAiBody
    chunk_type: type[BaseModel]

    def params(self) -> dict[str, Any]:
        """The fields that the body gives, the prompt's log-probabilities and a response format."""
        params, body = super().params(), self.body
        if body.prompt_logprobs is not None:
            if body.stream:
                raise ApiError(
                    400,
                    "prompt_logprobs must be null in a stream. Ask for the whole answer.",
                    param="prompt_logprobs",
                )
            params["prompt_logprobs"] = body.prompt_logprobs
        if body.length_penalty not in (None, 1) and not body.use_beam_search:
            raise ApiError(
                400, "length_penalty needs use_beam_search to be true.", param="length_penalty"
            )
        if body.response_format is not None and body.response_format.type != "text":
            if "structured_outputs" in params:
                raise ApiError(
                    400,
                    "give response_format or structured_outputs, not both.",
                    param="response_format",
                )
            params["structured_outputs"] = _form(body.response_format)
        return params

    @property
    def has_form(self) -> bool:
        """Whether its text must have a form."""
        return super().has_form or self.body.response_format is not None

    @property
    def head(self) -> dict[str, Any]:
        """The fields at the top of each answer and event."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.settings.model_name,
        }

    @property
    def _has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    def _usage_so_far(self, output: RequestOutput, delta: SampleDelta) -> schemas.Usage | None:
        """The usage of one sample, for a stream that wants it in each event."""
        options = self.body.stream_options
        if not (self._has_usage and options and options.continuous_usage_stats):
            return None
        return usage([dataclasses.replace(output, outputs=[delta.sample])])

    def closing(self, outputs: Sequence[RequestOutput]) -> list[schemas.Piece]:
        """An event with the usage and the explanations, if either was asked for."""
        end: dict[str, Any] = {}
        if self._has_usage:
            end["usage"] = usage(outputs)
        if self.body.explain:
            end["explanations"] = [explanation(output) for output in outputs]
        return [self._event([], **end)] if end else []

    def _event(self, choices: list[schemas.Piece], **fields: Any) -> schemas.Piece:
        return schemas.piece(self.chunk_type, **self.head, choices=choices, **fields)

    def _end(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        explanations = [explanation(output) for output in outputs] if self.body.explain else None
        return {"usage": usage(outputs), "explanations": explanations}

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What is asked for of a prompt: its token ids and log-probabilities."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if (count := self.body.prompt_logprobs) is not None and output.prompt_logprobs is not None:
            rows = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            fields["prompt_logprobs"] = by_token_id([_top(*each, count) for each in rows])
        return fields

    def _token_ids(self, delta: SampleDelta) -> list[int] | None:
        return delta.token_ids if self.body.return_token_ids else None

    def _index(self, prompt: int, output: RequestOutput, delta: SampleDelta) -> int:
        return prompt * len(output.outputs) + delta.sample.index


class CompletionAnswer(OpenAiAnswer):
    """The answer of ``POST /v1/completions``."""

    body: bodies.CompletionBody
    chunk_type = schemas.Completion

    def __init__(
        self, service: Service, body: bodies.CompletionBody, client: Client, record: RequestRecord
    ):
        super().__init__(service, body, client, record)
        # Of each sample of which something was sent, the characters of its tokens so far.
        self._offsets: dict[tuple[int, int], int] = {}
        self._texts: dict[tuple[int, int], TokenTexts] = {}

    def prompts(self) -> list[str | list[int]]:
        """One prompt or several, each as text or as token ids."""
        prompt = self.body.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.prompts())

    @property
    def num_chars(self) -> int:
        """Characters of the longest prompt that is a text."""
        return max(len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompts())

    @property
    def num_samples(self) -> int:
        """Samples to draw of each prompt, of which the answer may have fewer."""
        return self.body.best_of or super().num_samples

    def params(self) -> dict[str, Any]:
        """The fields that the body gives; with ``echo``, the prompt's log-probabilities too."""
        params = super().params()
        if self.body.best_of is not None:
            if self.body.best_of < (self.body.n or 1):
                raise ApiError(400, "best_of must be at least n.", param="best_of")
            if self.body.stream and self.num_samples > (self.body.n or 1):
                raise ApiError(400, "best_of must be null in a stream.", param="best_of")
            params["n"] = self.num_samples
        if self.body.logprobs is not None:
            params["logprobs"] = self.body.logprobs
            if self.body.echo:
                most = max(self.body.logprobs, self.body.prompt_logprobs or 0)
                params["prompt_logprobs"] = most
        return params

    def answer(self, outputs: Sequence[RequestOutput]) -> schemas.Piece:
        """The whole answer: the samples of the first prompt, then those of the next."""
        kept = [_best(output, self.body.n or 1) for output in outputs]
        choices = [
            self._choice(prompt, output, delta)
            for prompt, output in enumerate(kept)
            for delta in whole(output)
        ]
        return schemas.piece(schemas.Completion, **self.head, choices=choices, **self._end(outputs))

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[schemas.Piece]:
        """One event for each sample that has new text."""
        return [
            self._event(
                [self._choice(prompt, output, each)], usage=self._usage_so_far(output, each)
            )
            for each in deltas
        ]

    def _choice(self, prompt: int, output: RequestOutput, delta: SampleDelta) -> schemas.Piece:
        text, key = delta.text, (prompt, delta.sample.index)
        offset, is_first = self._offsets.get(key, 0), key not in self._offsets
        echoed = self._prompt_text(prompt, output) if self.body.echo and is_first else ""
        logprobs = None
        if delta.logprobs is not None:
            logprobs = schemas.CompletionLogprobs(
                tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[]
            )
            texts = self._texts.setdefault(key, self._token_texts(output))
            if self.body.echo and is_first:
                ids = output.prompt_token_ids
                asked, count = output.prompt_logprobs or [None] * len(ids), self.body.logprobs or 0
                rows = zip(self._prompt_texts(prompt, output), ids, asked, strict=True)
                rows = ((text, each, _top(each, row, count)) for text, each, row in rows)
                offset = self._add_tokens(logprobs, rows, offset)
            # Text may be held back, as the beginning of a stop string: tokens count their own.
            pushed = map(texts.push, delta.token_ids)
            rows = zip(pushed, delta.token_ids, delta.logprobs, strict=True)
            offset = self._add_tokens(logprobs, rows, offset)
            if delta.sample.finish_reason is not None and logprobs["tokens"]:
                logprobs["tokens"][-1] += texts.finish()
        self._offsets[key] = offset
        return schemas.piece(
            schemas.CompletionChoice,
            index=self._index(prompt, output, delta),
            text=echoed + text,
            logprobs=logprobs,
            finish_reason=delta.sample.finish_reason,
            stop_reason=delta.sample.stop_reason,
            token_ids=self._token_ids(delta),
            **(self._prompt(output) if is_first else {}),
        )

    def _prompt_text(self, prompt: int, output: RequestOutput) -> str:
        given = self.prompts()[prompt]
        return given if isinstance(given, str) else "".join(self._prompt_texts(prompt, output))

    def _prompt_texts(self, prompt: int, output: RequestOutput) -> list[str]:
        given = self.prompts()[prompt]
        return prompt_texts(
            self.service.tokenizer,
            given if isinstance(given, str) else output.prompt_token_ids,
            add_special_tokens=self.body.add_special_tokens is not False,
            skip_special_tokens=self._skips_special,
        )

    @property
    def _skips_special(self) -> bool:
        return self.body.skip_special_tokens is not False

    def _token_texts(self, output: RequestOutput) -> TokenTexts:
        before = output.prompt_token_ids
        return TokenTexts(self.service.tokenizer, before, skip_special_tokens=self._skips_special)

    def _add_tokens(
        self,
        logprobs: schemas.CompletionLogprobs,
        rows: Iterable[tuple[str, int, dict[int, Logprob] | None]],
        offset: int,
    ) -> int:
        """Add tokens with their candidates, of which the first one of a prompt has none.

        Returns:
          The offset of the next token.
        """
        for token, token_id, candidates in rows:
            top, logprob = None, None
            if candidates is not None:
                logprob = finite(candidates[token_id].logprob)
                # Tokens that are parts of characters have one text: the chosen one must stay.
                others = (c for each, c in candidates.items() if each != token_id)
                top = {c.decoded_token: finite(c.logprob) for c in others} | {token: logprob}
            logprobs["tokens"].append(token)
            logprobs["token_logprobs"].append(logprob)
            logprobs["top_logprobs"].append(top)
            logprobs["text_offset"].append(offset)
            offset += len(token)
        return offset


class ChatAnswer(OpenAiAnswer):
    """The answer of ``POST /v1/chat/completions``."""

    prefix = "chatcmpl"
    body: bodies.ChatBody
    chunk_type = schemas.ChatCompletionChunk

    @functools.cached_property
    def _tool_use(self) -> ToolUse | None:
        """Its tools; None without any."""
        body, tokenizer = self.body, self.service.tokenizer
        is_asked = body.tool_choice not in (None, "none", "auto")
        if is_asked and not body.tools:
            raise ApiError(400, "tool_choice needs tools.", param="tool_choice")
        if tokenizer is None or not body.tools or body.tool_choice == "none":
            return None
        return ToolUse(body, tokenizer)

    def prompts(self) -> list[str | list[int]]:
        """The messages as one prompt, by the model's chat template."""
        tokenizer = self.service.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer, which chats need.")
        check_calls(self.body.messages, tokenizer)
        return [
            tokenizer.encode_chat(
                as_messages(self.body.messages),
                template_variables(self.body),
                tools=None if self._tool_use is None else self._tool_use.tools,
                add_special_tokens=bool(self.body.add_special_tokens),
            )
        ]

    @property
    def has_form(self) -> bool:
        """Whether its text must have a form."""
        return super().has_form or bool(self.body.tools)

    @property
    def num_chars(self) -> int:
        """Characters of all messages together."""
        return num_chars(self.body.messages)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of each sample, by the newer of two names where both are given."""
        newer = self.body.max_completion_tokens
        return self.body.max_tokens if newer is None else newer

    def params(self) -> dict[str, Any]:
        """The fields that the body gives, under the names that chats have."""
        # By default a chat may fill the context.
        body, params = self.body, {**super().params(), "max_tokens": self.max_tokens}
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        if body.logprobs:
            params["logprobs"] = body.top_logprobs or 0
        if self._tool_use is not None:
            if "structured_outputs" in params:
                raise ApiError(400, "give tools or another form, not both.", param="tools")
            params["structured_outputs"] = self._tool_use.form(self.service.tool_grammars)
        return params

    def answer(self, outputs: Sequence[RequestOutput]) -> schemas.Piece:
        """The whole answer: one message for each sample."""
        [output] = outputs
        choices = [self._choice(delta) for delta in whole(output)]
        end = self._end(outputs) | self._prompt(output)
        return schemas.piece(schemas.ChatCompletion, **self.head, choices=choices, **end)

    def _choice(self, delta: SampleDelta) -> schemas.Piece:
        message = schemas.ChatMessage(content=delta.text)
        finish_reason = delta.sample.finish_reason
        if self._tool_use is not None:
            message = self._tool_use.message(delta)
            finish_reason = self._tool_use.finish_reason(delta, bool(message.tool_calls))
        return schemas.piece(
            schemas.ChatChoice,
            index=delta.sample.index,
            message=message,
            logprobs=self._logprobs(delta),
            finish_reason=finish_reason,
            stop_reason=delta.sample.stop_reason,
            token_ids=self._token_ids(delta),
        )

    def opening(self) -> list[schemas.Piece]:
        """One event for each sample, which says that the assistant speaks."""
        delta = schemas.piece(schemas.ChatDelta, role="assistant", content="")
        return [self._chunk(index, delta) for index in range(self.body.n or 1)]

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[schemas.Piece]:
        """One event for each sample that has new text."""
        return [self._next(output, each) for each in deltas]

    def _logprobs(self, delta: SampleDelta) -> schemas.ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        rows = zip(delta.token_ids, delta.logprobs, strict=True)
        return {"content": (self._chosen(token_id, row) for token_id, row in rows)}

    def _chosen(self, token_id: int, row: dict[int, Logprob]) -> schemas.TokenLogprob:
        # The row also holds the chosen token, which may not be among the most probable ones.
        top = sorted(row, key=lambda each: row[each].rank)[: self.body.top_logprobs or 0]
        others = [self._token(each, row[each]) for each in top]
        return {**self._token(token_id, row[token_id]), "top_logprobs": others}

    def _token(self, token_id: int, token: Logprob) -> schemas.TopLogprob:
        assert self.service.tokenizer is not None
        return {
            "token": token.decoded_token,
            "logprob": finite(token.logprob),
            "bytes": _bytes_of(self.service.tokenizer, token_id),
        }

    def _next(self, output: RequestOutput, each: SampleDelta) -> schemas.Piece:
        delta: schemas.Piece | schemas.ChatDelta
        delta = schemas.piece(schemas.ChatDelta, content=each.text)
        finish_reason = each.sample.finish_reason
        if self._tool_use is not None:
            delta = self._tool_use.delta(each)
            finish_reason = self._tool_use.finish_reason(each, self._tool_use.has_called(each))
        return self._chunk(
            each.sample.index,
            delta,
            usage=self._usage_so_far(output, each),
            **(self._prompt(output) if each.start == 0 else {}),
            logprobs=self._logprobs(each),
            finish_reason=finish_reason,
            stop_reason=each.sample.stop_reason,
            token_ids=self._token_ids(each),
        )

    def _chunk(
        self,
        index: int,
        delta: schemas.Piece | schemas.ChatDelta,
        *,
        usage: schemas.Usage | None = None,
        prompt_token_ids: list[int] | None = None,
        **fields: Any,
    ) -> schemas.Piece:
        choice = schemas.piece(schemas.ChatChunkChoice, index=index, delta=delta, **fields)
        return self._event([choice], usage=usage, prompt_token_ids=prompt_token_ids)


def _best(output: RequestOutput, count: int) -> RequestOutput:
    """An output with the samples whose tokens are most probable in the mean, the best first."""
    if len(output.outputs) <= count:
        return output

    def mean_logprob(sample: CompletionOutput) -> float:
        return sample.cumulative_logprob / max(1, len(sample.token_ids))

    best = sorted(output.outputs, key=mean_logprob, reverse=True)[:count]
    samples = [dataclasses.replace(sample, index=index) for index, sample in enumerate(best)]
    return dataclasses.replace(output, outputs=samples)


def _top(token_id: int, row: dict[int, Logprob] | None, count: int) -> dict[int, Logprob] | None:
    """A token with the `count` most probable ones, of a row that may have more of these."""
    if row is None:
        return None
    return {other: each for other, each in row.items() if each.rank <= count or other == token_id}


def _form(asked: bodies.ResponseFormat) -> StructuredOutputsParams:
    if asked.json_schema is None:
        return StructuredOutputsParams(json_object=True)
    schema, is_strict = asked.json_schema.schema_, asked.json_schema.strict
    guidance = schema.get("x-guidance", {})
    if not is_strict and isinstance(guidance, dict):
        # A schema is a hint unless it is strict: parts that cannot be expressed are left out.
        schema = {**schema, "x-guidance": {"lenient": True, **guidance}}
    return StructuredOutputsParams(json=schema)


@functools.lru_cache(maxsize=2**14)
def _bytes_of(tokenizer: Tokenizer, token_id: int) -> list[int]:
    # Cached, as making these lists takes longer than all the rest; they are never changed.
    return list(tokenizer.token_bytes(token_id))
