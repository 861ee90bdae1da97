"""From a request's body to a job for the engine, and from its outputs to each endpoint's answer."""

import dataclasses
import functools
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server import schemas
from paged_jax.server.errors import ApiError
from paged_jax.server.service import Service

_REQUEST_ID = re.compile(r"request ((?:gen|cmpl|chatcmpl)-[0-9a-f]+-\d+)")
# Begins a message of those that refuse: a function's or a class's name, which no client knows.
_WHO = re.compile(r"^(?:request|SamplingParams|encode_chat|apply_chat_template): ")
# JSON has no infinity; OpenAI answers this for a token that cannot come.
_LOWEST = -9999.0
# Fields of a body that are SamplingParams' own.
_PARAMS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """What the engine is asked for.

    Attributes:
      prompts: token ids of each.
      params: of all of them.
      cache_salt: of the client, with what its key adds.
      options: of `AsyncEngine.generate`.
    """

    prompts: list[list[int]]
    params: SamplingParams
    cache_salt: str
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class News:
    """What a sample has got since the last time: all of it, where nothing was sent before."""

    sample: CompletionOutput
    text: str
    start: int  # of its new tokens

    @property
    def token_ids(self) -> list[int]:
        return self.sample.token_ids[self.start :]

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        logprobs = self.sample.logprobs
        return None if logprobs is None else logprobs[self.start :]


def size(output: RequestOutput, news: Sequence[News]) -> int:
    """Tokens and log-probabilities that an answer with these news tells of: its cost."""
    rows = [row for each in news for row in each.logprobs or ()]
    # Those of the prompt come with the first news or with the last.
    if output.finished or any(each.start == 0 for each in news):
        rows += [row for row in output.prompt_logprobs or () if row is not None]
    return sum(map(len, rows)) + sum(len(each.token_ids) for each in news)


def whole(output: RequestOutput) -> list[News]:
    """All that the samples have."""
    return [News(sample, sample.text, 0) for sample in output.outputs]


class Sent:
    """How much of each sample has been sent."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def news(self, prompt: int, output: RequestOutput) -> Iterator[News]:
        """What is new in the samples of a prompt; it counts as sent from now on."""
        for sample in output.outputs:
            key = prompt, sample.index
            chars, tokens, is_done = self._counts.get(key, (0, 0, False))
            ends = sample.finish_reason is not None
            counts = len(sample.text), len(sample.token_ids), ends
            if is_done or counts == (chars, tokens, False):
                continue
            self._counts[key] = counts
            yield News(sample, sample.text[chars:], tokens)


class Answer(ABC):
    """One endpoint's way to read a body and to tell what the engine made of it."""

    prefix = "cmpl"
    # Where the model's authors recommend nothing; what is not here is SamplingParams' own default.
    unrecommended: dict[str, Any] = {}

    def __init__(self, service: Service, body: schemas.SamplingBody, salt: str):
        self.service = service
        self.body = body
        self.salt = salt
        self.id = f"{self.prefix}-{secrets.token_hex(8)}"
        self.created = int(time.time())

    @property
    def head(self) -> dict[str, Any]:
        """The fields that every answer of OpenAI's has."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.settings.model_name,
        }

    @abstractmethod
    def prompts(self) -> list[str | list[int]]:
        """What to complete. May take a while: called in a thread."""

    def params(self) -> dict[str, Any]:
        """Fields of `SamplingParams`, those only that were given."""
        given = {name: getattr(self.body, name) for name in _PARAMS}
        if self.body.seed is not None and self.body.seed != -1:
            given["seed"] = self.body.seed % 2**63  # OpenAI's may be negative
        if self.body.logit_bias is not None:
            given["logit_bias"] = _as_token_ids(self.body.logit_bias)
        return {name: value for name, value in given.items() if value is not None}

    @abstractmethod
    def answer(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        """Everything at once."""

    def opening(self) -> list[BaseModel]:
        """What a stream begins with."""
        return []

    @abstractmethod
    def chunks(self, prompt: int, output: RequestOutput, news: list[News]) -> list[BaseModel]:
        """What is new in the samples of a prompt."""

    def closing(self, outputs: Sequence[RequestOutput]) -> list[BaseModel]:
        """What a stream ends with."""
        del outputs
        return []

    # In a thread, as tokenizing a long prompt takes a while

    def job(self) -> Job:
        """Check the body, and make a job of it.

        Raises:
          ApiError: it asks for what cannot be had, or exceeds a limit.
        """
        body, limits = self.body, self.service.limits
        limits.check("max_n", body.n, param="n")
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        limits.check("max_stop", len(stop), param="the number of stop strings")
        longest = max(map(len, stop), default=0)
        limits.check("max_stop_chars", longest, param="the length of a stop string")
        try:
            params = self._sampling_params()
            prompts = self.prompts()
            limits.check("max_prompts", len(prompts), param="the number of prompts")
            prompts = [self._encode(prompt) for prompt in prompts]
            params = self._bounded(params, prompts)
        except ValueError as error:
            raise bad_request(error) from None
        options: dict[str, Any] = {"explain": body.explain}
        if body.priority is not None:
            options["priority"] = self._priority(body.priority)
        if body.timeout is not None:
            options["timeout"] = body.timeout
        return Job(prompts, params, self._cache_salt(), options)

    def _sampling_params(self) -> SamplingParams:
        params = self.params()
        for name in ("logprobs", "prompt_logprobs"):
            self.service.limits.check("max_logprobs", params.get(name), param=name)
        tokenizer = self.service.tokenizer
        recommended = tokenizer.sampling_defaults if tokenizer else {}
        return SamplingParams(**{**(recommended or self.unrecommended), **params})

    def _bounded(self, params: SamplingParams, prompts: list[list[int]]) -> SamplingParams:
        """The parameters; where nobody says how many tokens, as many as an answer may tell of."""
        service, limits = self.service, self.service.limits
        context = min(service.max_model_len, service.num_blocks * service.block_size + 1)
        room = [max(1, context - len(prompt)) for prompt in prompts]
        per_token = params.n * _num_candidates(params.logprobs)
        count = params.n * _num_candidates(params.prompt_logprobs) * sum(map(len, prompts))
        if per_token:
            most = params.max_tokens
            if most is None:
                most = max(1, min(*room, (limits.max_answer_logprobs - count) // per_token))
                params = dataclasses.replace(params, max_tokens=most)
            count += per_token * sum(min(most, each) for each in room)
        product = "n times the tokens times the log-probabilities of each"
        limits.check("max_answer_logprobs", count, param=product)
        return params

    def _encode(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self.service.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("request: the model has no tokenizer. Send token ids.")
            prompt = tokenizer.encode(prompt)
        limits = self.service.limits
        limits.check("max_prompt_tokens", len(prompt), param="the number of prompt tokens")
        most = self.service.max_model_len - 1
        if len(prompt) > most:
            raise ApiError(
                400,
                f"The prompt must have at most {most} tokens, to leave room in the model's context "
                f"of {most + 1}, got {len(prompt)}.",
                param="prompt",
                code="context_length_exceeded",
            )
        return prompt

    def _priority(self, priority: int) -> int:
        if priority < 0 and self.service.settings.api_keys:
            raise ApiError(
                400,
                "priority must be at least 0, as there are other tenants, whose requests a lower "
                f"one would hold up, got {priority}.",
                param="priority",
            )
        return priority

    def _cache_salt(self) -> str:
        own = self.body.cache_salt or ""
        # No two pairs of a key's salt and a client's may become the same.
        return f"{self.salt}:{own}" if self.salt else own


class GenerateAnswer(Answer):
    """Of ``POST /generate``."""

    prefix = "gen"
    unrecommended = {"temperature": 0.0}
    body: schemas.GenerateBody

    def prompts(self) -> list[str | list[int]]:
        text, token_ids = self.body.prompt, self.body.prompt_token_ids
        if (text is None) == (token_ids is None):
            raise ApiError(400, "prompt or prompt_token_ids must be given, and not both.")
        return [text if text is not None else token_ids or []]

    def params(self) -> dict[str, Any]:
        asked = {name: getattr(self.body, name) for name in ("logprobs", "prompt_logprobs")}
        return super().params() | {k: v for k, v in asked.items() if v is not None}

    def answer(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        [output] = outputs
        return self._generated(output, whole(output))

    def chunks(self, prompt: int, output: RequestOutput, news: list[News]) -> list[BaseModel]:
        return [self._generated(output, news)] if news else []

    def _generated(self, output: RequestOutput, news: list[News]) -> schemas.Generated:
        is_end = output.finished
        return schemas.Generated.model_construct(
            request_id=self.id,
            text=[each.text for each in news],
            outputs=[
                schemas.GeneratedSample.model_construct(
                    index=each.sample.index,
                    text=each.text,
                    token_ids=each.token_ids,
                    cumulative_logprob=max(each.sample.cumulative_logprob, _LOWEST),
                    logprobs=_candidates(each.logprobs),
                    finish_reason=each.sample.finish_reason,
                    stop_reason=each.sample.stop_reason,
                )
                for each in news
            ],
            finished=is_end,
            usage=usage([output]) if is_end else None,
            prompt_token_ids=output.prompt_token_ids if is_end else None,
            prompt_logprobs=_candidates(output.prompt_logprobs) if is_end else None,
            explanation=explanation(output) if is_end else None,
        )


class OpenAiAnswer(Answer):
    """What both of OpenAI's endpoints have in common."""

    body: schemas.OpenAiBody
    chunk_type: type[BaseModel]

    def closing(self, outputs: Sequence[RequestOutput]) -> list[BaseModel]:
        end: dict[str, Any] = {}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            end["usage"] = usage(outputs)
        if self.body.explain:
            end["explanations"] = [explanation(output) for output in outputs]
        return [self.chunk_type(**self.head, choices=[], **end)] if end else []

    def _end(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        explanations = [explanation(output) for output in outputs] if self.body.explain else None
        return {"usage": usage(outputs), "explanations": explanations}

    def _index(self, prompt: int, output: RequestOutput, news: News) -> int:
        return prompt * len(output.outputs) + news.sample.index


class CompletionAnswer(OpenAiAnswer):
    """Of ``POST /v1/completions``."""

    body: schemas.CompletionBody
    chunk_type = schemas.Completion

    def __init__(self, service: Service, body: schemas.CompletionBody, salt: str):
        super().__init__(service, body, salt)
        # Where the text of each sample begins in what was sent of it.
        self._offsets: dict[tuple[int, int], int] = {}

    def prompts(self) -> list[str | list[int]]:
        prompt = self.body.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]

    def params(self) -> dict[str, Any]:
        params = super().params()
        if self.body.logprobs is not None:
            params["logprobs"] = self.body.logprobs
            if self.body.echo:
                params["prompt_logprobs"] = self.body.logprobs
        return params

    def answer(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        choices = [
            self._choice(prompt, output, news)
            for prompt, output in enumerate(outputs)
            for news in whole(output)
        ]
        return schemas.Completion(**self.head, choices=choices, **self._end(outputs))

    def chunks(self, prompt: int, output: RequestOutput, news: list[News]) -> list[BaseModel]:
        choices = [self._choice(prompt, output, each) for each in news]
        return [schemas.Completion(**self.head, choices=[choice]) for choice in choices]

    def _choice(self, prompt: int, output: RequestOutput, news: News) -> schemas.CompletionChoice:
        text, logprobs, token_ids = news.text, news.logprobs, news.token_ids
        key = prompt, news.sample.index
        offset = self._offsets.get(key, 0)
        rows: list[tuple[int, dict[int, Logprob] | None]] = []
        if self.body.echo and key not in self._offsets:
            text = self._prompt_text(prompt, output) + text
            if logprobs is not None:
                asked = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
                rows += zip(output.prompt_token_ids, asked, strict=True)
        if logprobs is not None:
            rows += zip(token_ids, logprobs, strict=True)
        self._offsets[key] = offset + len(text)
        return schemas.CompletionChoice.model_construct(
            index=self._index(prompt, output, news),
            text=text,
            logprobs=None if logprobs is None else self._logprobs(rows, offset),
            finish_reason=news.sample.finish_reason,
            stop_reason=news.sample.stop_reason,
        )

    def _prompt_text(self, prompt: int, output: RequestOutput) -> str:
        given, tokenizer = self.prompts()[prompt], self.service.tokenizer
        if isinstance(given, str):
            return given
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)

    def _logprobs(
        self, rows: list[tuple[int, dict[int, Logprob] | None]], offset: int
    ) -> schemas.CompletionLogprobs:
        tokens, token_logprobs, top, offsets = [], [], [], []
        tokenizer = self.service.tokenizer
        for token_id, candidates in rows:
            if candidates is None:  # of the first token of a prompt nothing is known
                token = "" if tokenizer is None else tokenizer.decode([token_id])
                token_logprobs.append(None)
                top.append(None)
            else:
                token = candidates[token_id].decoded_token
                token_logprobs.append(max(candidates[token_id].logprob, _LOWEST))
                # Pieces of characters look alike; the chosen token is not to be lost among them.
                others = (c for each, c in candidates.items() if each != token_id)
                rest = {c.decoded_token: max(c.logprob, _LOWEST) for c in others}
                top.append(rest | {token: token_logprobs[-1]})
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
        return schemas.CompletionLogprobs(
            tokens=tokens, token_logprobs=token_logprobs, top_logprobs=top, text_offset=offsets
        )


class ChatAnswer(OpenAiAnswer):
    """Of ``POST /v1/chat/completions``."""

    prefix = "chatcmpl"
    body: schemas.ChatBody
    chunk_type = schemas.ChatCompletionChunk

    def prompts(self) -> list[str | list[int]]:
        tokenizer = self.service.tokenizer
        if tokenizer is None:
            raise ValueError("request: the model has no tokenizer, which chats need.")
        messages = [_as_message(message) for message in self.body.messages]
        return [tokenizer.encode_chat(messages, self.body.chat_template_kwargs)]

    def params(self) -> dict[str, Any]:
        # As long as the context allows, if nobody says.
        body, params = self.body, {"max_tokens": None, **super().params()}
        if body.max_completion_tokens is not None:
            params["max_tokens"] = body.max_completion_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        if body.logprobs:
            params["logprobs"] = body.top_logprobs or 0
        return params

    def answer(self, outputs: Sequence[RequestOutput]) -> BaseModel:
        [output] = outputs
        choices = [
            schemas.ChatChoice.model_construct(
                index=news.sample.index,
                message=schemas.ChatMessage(content=news.text),
                logprobs=_chat_logprobs(news, self.body.top_logprobs or 0),
                finish_reason=news.sample.finish_reason,
                stop_reason=news.sample.stop_reason,
            )
            for news in whole(output)
        ]
        return schemas.ChatCompletion(**self.head, choices=choices, **self._end(outputs))

    def opening(self) -> list[BaseModel]:
        delta = schemas.ChatDelta(role="assistant", content="")
        return [self._chunk(index, delta) for index in range(self.body.n or 1)]

    def chunks(self, prompt: int, output: RequestOutput, news: list[News]) -> list[BaseModel]:
        return [
            self._chunk(
                each.sample.index,
                schemas.ChatDelta(content=each.text),
                logprobs=_chat_logprobs(each, self.body.top_logprobs or 0),
                finish_reason=each.sample.finish_reason,
                stop_reason=each.sample.stop_reason,
            )
            for each in news
        ]

    def _chunk(self, index: int, delta: schemas.ChatDelta, **fields: Any) -> BaseModel:
        choice = schemas.ChatChunkChoice.model_construct(index=index, delta=delta, **fields)
        return schemas.ChatCompletionChunk(**self.head, choices=[choice])


def usage(outputs: Sequence[RequestOutput]) -> schemas.Usage:
    """Tokens read, generated, and found in the prefix cache."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return schemas.Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_new,
        total_tokens=num_prompt + num_new,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=cached),
    )


def explanation(output: RequestOutput) -> dict[str, Any] | None:
    """Why the request waited, was preempted, and was cached as far as it was.

    Names of other requests are none of the client's business.
    """
    if output.explanation is None:
        return None
    told = dataclasses.asdict(output.explanation)
    for entry in (*told["waits"], *told["preemptions"]):
        entry["detail"] = _REQUEST_ID.sub(
            lambda match: match[0] if match[1] == output.request_id else "another request",
            entry["detail"],
        )
    return told


def bad_request(error: ValueError) -> ApiError:
    """What the engine refuses, or the tokenizer: "WHO: FIELD must ..."."""
    message = _WHO.sub("", str(error))
    param, must, _ = message.partition(" must ")
    return ApiError(400, message, param=param if must and " " not in param else None)


def _num_candidates(asked: int | None) -> int:
    """Log-probabilities of each token, its own included."""
    return 0 if asked is None else asked + 1


def _as_token_ids(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise ApiError(
            400, "logit_bias must have token ids for keys.", param="logit_bias"
        ) from None


def _as_message(message: schemas.Message) -> dict[str, Any]:
    # A template may ask whether there is a name.
    named = {} if message.name is None else {"name": message.name}
    return message.model_dump(include={"role", "content"}) | named


def _candidates(rows: Sequence[dict[int, Logprob] | None] | None) -> Any:
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            token_id: {
                "logprob": max(each.logprob, _LOWEST),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token_id, each in row.items()
        }
        for row in rows
    ]


def _chat_logprobs(news: News, num_top: int) -> schemas.ChatLogprobs | None:
    if news.logprobs is None:
        return None
    rows = zip(news.token_ids, news.logprobs, strict=True)
    return {"content": (_chosen(row[token_id], row, num_top) for token_id, row in rows)}


def _chosen(token: Logprob, row: dict[int, Logprob], num_top: int) -> schemas.TokenLogprob:
    # The chosen token is in the row even if it is not among the most probable ones.
    top = sorted(row.values(), key=lambda each: each.rank)[:num_top]
    return {**_token(token), "top_logprobs": [_token(each) for each in top]}


def _token(each: Logprob) -> schemas.TopLogprob:
    text = each.decoded_token
    return {"token": text, "logprob": max(each.logprob, _LOWEST), "bytes": _bytes_of(text)}


@functools.lru_cache(maxsize=2**14)
def _bytes_of(text: str) -> list[int] | None:
    # Made once for each token: they take longer than all the rest, and nobody changes them.
    # Of a piece of a character the text does not tell the bytes.
    return None if "\ufffd" in text else list(text.encode())
