"""Codecs of ``POST /generate`` and ``POST /v1/completions``."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from paged_jax.scheduler.outputs import CompletionOutput, Logprob, RequestOutput
from paged_jax.server import bodies, schemas
from paged_jax.server.api_error import ApiError
from paged_jax.server.generation_request import (
    GenerationRequest,
    read_common,
    read_openai,
    read_openai_params,
    read_params,
)
from paged_jax.server.json_encoding import JsonDict, to_json_dict
from paged_jax.server.sample_deltas import SampleDelta, whole_samples
from paged_jax.server.service import Service
from paged_jax.server.token_texts import TokenTexts, prompt_texts
from paged_jax.server.writer import (
    OpenAiWriter,
    Writer,
    by_token_id,
    explanation,
    finite,
    keep_top,
    usage,
)


def read_generate(service: Service, body: bodies.GenerateBody) -> GenerationRequest:
    """Read the body of ``POST /generate``."""

    def read_prompts() -> list[str | list[int]]:
        text, token_ids = body.prompt, body.prompt_token_ids
        if (text is None) == (token_ids is None):
            raise ApiError(400, "Exactly one of prompt and prompt_token_ids must be given.")
        return [text if text is not None else token_ids or []]

    counts = {name: getattr(body, name) for name in ("logprobs", "prompt_logprobs")}
    counts = {name: count for name, count in counts.items() if count is not None}
    return read_common(
        body,
        id_prefix="gen",
        prompts=read_prompts,
        num_chars=len(body.prompt or ""),
        prompt_field="prompt" if body.prompt_token_ids is None else "prompt_token_ids",
        params=lambda: read_params(body) | counts,
        fallback_params={"temperature": 0.0},
    )


class GenerateWriter(Writer):
    """Writer for ``POST /generate``, an endpoint that only this server has."""

    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the JSON of the response, given the finished output."""
        [output] = outputs
        return self._json(output, whole_samples(output))

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return a single event with the new text and tokens of all samples, in a list."""
        return [self._json(output, deltas)] if deltas else []

    def _json(self, output: RequestOutput, deltas: list[SampleDelta]) -> JsonDict:
        end: dict[str, Any] = {}
        if output.finished:
            end = {
                "usage": usage([output]),
                "prompt_token_ids": output.prompt_token_ids,
                "prompt_logprobs": by_token_id(output.prompt_logprobs),
                "explanation": explanation(output),
            }
        return to_json_dict(
            schemas.GenerateResponse,
            request_id=self.id,
            text=[delta.text for delta in deltas],
            outputs=[_generated_sample(delta) for delta in deltas],
            finished=output.finished,
            **end,
        )


def _generated_sample(delta: SampleDelta) -> schemas.GeneratedSample:
    sample: schemas.GeneratedSample = {
        "index": delta.sample.index,
        "text": delta.text,
        "token_ids": delta.token_ids,
        "cumulative_logprob": finite(delta.sample.cumulative_logprob),
        "logprobs": by_token_id(delta.logprobs),
        "finish_reason": delta.sample.finish_reason,
    }
    if delta.sample.stop_reason is not None:
        sample["stop_reason"] = delta.sample.stop_reason
    return sample


def read_completion(service: Service, body: bodies.CompletionBody) -> GenerationRequest:
    """Read the body of ``POST /v1/completions``."""
    prompts = _prompts(body)
    return read_openai(
        body,
        id_prefix="cmpl",
        prompts=lambda: prompts,
        num_prompts=len(prompts),
        num_chars=max(len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts),
        prompt_field="prompt",
        params=functools.partial(_completion_params, body),
        num_samples=body.best_of or body.n or 1,
    )


def _prompts(body: bodies.CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


def _completion_params(body: bodies.CompletionBody) -> dict[str, Any]:
    """Read the sampling parameters: `best_of` replaces `n`, and `logprobs` is added.

    If the body sets both `echo` and `logprobs`, `prompt_logprobs` is at least `logprobs`.

    Raises:
      ApiError: `best_of` is less than `n`, or is given for a stream.
    """
    params = read_openai_params(body)
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise ApiError(400, "best_of must be at least n.", param="best_of")
        if body.stream and body.best_of > (body.n or 1):
            raise ApiError(400, "best_of must be null in a stream.", param="best_of")
        params["n"] = body.best_of
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return params


class CompletionWriter(OpenAiWriter):
    """Writer for ``POST /v1/completions``."""

    body: bodies.CompletionBody
    chunk_type = schemas.CompletionResponse

    def __init__(
        self,
        service: Service,
        body: bodies.CompletionBody,
        request: GenerationRequest,
        request_id: str,
    ):
        super().__init__(service, body, request, request_id)
        # The keys of both dicts are (index of the prompt, index of the sample). `_offsets` has the
        # position of the next token in the sample's text, in characters. `_texts` divides the text
        # into tokens. Entries are added when the first event of a sample is built.
        self._offsets: dict[tuple[int, int], int] = {}
        self._texts: dict[tuple[int, int], TokenTexts] = {}

    def response_body(self, outputs: Sequence[RequestOutput]) -> JsonDict:
        """Return the JSON of the response, with the samples in the order of the prompts."""
        best = [_best_samples(output, self.request.n) for output in outputs]
        choices = [
            self._choice(prompt, output, delta)
            for prompt, output in enumerate(best)
            for delta in whole_samples(output)
        ]
        end = self.end(outputs)
        return to_json_dict(schemas.CompletionResponse, **self.head, choices=choices, **end)

    def chunks(
        self, prompt: int, output: RequestOutput, deltas: list[SampleDelta]
    ) -> list[JsonDict]:
        """Return an event for each sample that has new tokens or has finished."""
        return [
            self.event(
                [self._choice(prompt, output, delta)], usage=self.usage_so_far(output, delta)
            )
            for delta in deltas
        ]

    def _choice(self, prompt: int, output: RequestOutput, delta: SampleDelta) -> JsonDict:
        key = prompt, delta.sample.index
        is_first = key not in self._offsets
        echoed_text = self._prompt_text(prompt, output) if self.body.echo and is_first else ""
        return to_json_dict(
            schemas.CompletionChoice,
            index=prompt * len(output.outputs) + delta.sample.index,
            text=echoed_text + delta.text,
            logprobs=self._logprobs(key, output, delta),
            finish_reason=delta.sample.finish_reason,
            stop_reason=delta.sample.stop_reason,
            token_ids=self.sample_token_ids(delta),
            **(self.prompt_fields(output) if is_first else {}),
        )

    def _logprobs(
        self, key: tuple[int, int], output: RequestOutput, delta: SampleDelta
    ) -> schemas.CompletionLogprobs | None:
        """Return the log-probabilities of new tokens; None if they were not requested."""
        offset, is_first = self._offsets.setdefault(key, 0), key not in self._texts
        if delta.logprobs is None:
            return None
        logprobs = schemas.CompletionLogprobs(
            tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[]
        )
        if is_first:
            self._texts[key] = self._token_texts(output)
        texts = self._texts[key]
        if self.body.echo and is_first:
            ids = output.prompt_token_ids
            prompt_logprobs = output.prompt_logprobs or [None] * len(ids)
            count = self.body.logprobs or 0
            rows = zip(self._prompt_texts(key[0], output), ids, prompt_logprobs, strict=True)
            rows = (
                (text, prompt_id, keep_top(prompt_id, row, count)) for text, prompt_id, row in rows
            )
            offset = self._add_tokens(logprobs, rows, offset)
        # An event may have less text than its tokens: text that may turn out to be the beginning of
        # a stop string is held back.
        new_texts = map(texts.push, delta.token_ids)
        rows = zip(new_texts, delta.token_ids, delta.logprobs, strict=True)
        self._offsets[key] = self._add_tokens(logprobs, rows, offset)
        if delta.sample.finish_reason is not None and logprobs["tokens"]:
            logprobs["tokens"][-1] += texts.finish()
        return logprobs

    def _prompt_text(self, prompt: int, output: RequestOutput) -> str:
        prompt_input = self.request.prompts()[prompt]
        if isinstance(prompt_input, str):
            return prompt_input
        return "".join(self._prompt_texts(prompt, output))

    def _prompt_texts(self, prompt: int, output: RequestOutput) -> list[str]:
        prompt_input = self.request.prompts()[prompt]
        return prompt_texts(
            self.service.tokenizer,
            prompt_input if isinstance(prompt_input, str) else output.prompt_token_ids,
            add_special_tokens=self.request.add_special_tokens,
            skip_special_tokens=self._skips_special,
        )

    @property
    def _skips_special(self) -> bool:
        return self.body.skip_special_tokens is not False

    def _token_texts(self, output: RequestOutput) -> "TokenTexts":
        before = output.prompt_token_ids
        return TokenTexts(self.service.tokenizer, before, skip_special_tokens=self._skips_special)

    def _add_tokens(
        self,
        logprobs: schemas.CompletionLogprobs,
        rows: Iterable[tuple[str, int, dict[int, Logprob] | None]],
        offset: int,
    ) -> int:
        """Append entries of tokens to `logprobs`. Return the text offset after the last token.

        Args:
          logprobs: the lists, which are changed.
          rows: a tuple for each token: its text, its id, and a dict from token ids to
            log-probabilities. The dict is None for the first token of a prompt.
          offset: position of the first token in the text, in characters.
        """
        for token, token_id, candidates in rows:
            top, logprob = None, None
            if candidates is not None:
                logprob = finite(candidates[token_id].logprob)
                # Several candidates may have the same text, for example tokens for single bytes.
                # Put the generated token last, so that the dict keeps its log-probability.
                alternatives = (
                    c for candidate_id, c in candidates.items() if candidate_id != token_id
                )
                top = {c.decoded_token: finite(c.logprob) for c in alternatives} | {token: logprob}
            logprobs["tokens"].append(token)
            logprobs["token_logprobs"].append(logprob)
            logprobs["top_logprobs"].append(top)
            logprobs["text_offset"].append(offset)
            offset += len(token)
        return offset


def _best_samples(output: RequestOutput, count: int) -> RequestOutput:
    """Return an output with only the `count` best samples, by mean log-probability."""
    if len(output.outputs) <= count:
        return output

    def mean_logprob(sample: CompletionOutput) -> float:
        return sample.cumulative_logprob / max(1, len(sample.token_ids))

    best = sorted(output.outputs, key=mean_logprob, reverse=True)[:count]
    samples = [dataclasses.replace(sample, index=index) for index, sample in enumerate(best)]
    return dataclasses.replace(output, outputs=samples)
