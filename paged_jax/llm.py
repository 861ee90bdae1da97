"""Completes prompts offline: `LLM`, with the names and meanings of vLLM's class."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax.typing import ArrayLike

from paged_jax.arguments import names_arguments
from paged_jax.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from paged_jax.engine.engine import Engine
from paged_jax.engine.request_factory import Prompt
from paged_jax.engine.requests import own_transfers
from paged_jax.monitoring import Status
from paged_jax.rollouts import Rollout, check_prompts
from paged_jax.sampling.params import SamplingParams, StructuredOutputError
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request
from paged_jax.scheduler.request import Sequence as SampleSequence


class LLM(Engine):
    """An engine that completes prompts while the caller waits. Arguments are those of `Engine`.

    Calls compile what they are the first to need, which takes seconds, and say so on a terminal;
    `warmup` does it beforehand.

    Example:
      >>> llm = LLM(max_num_seqs=2)
      >>> [output] = llm.generate(["It is"], SamplingParams(temperature=0, max_tokens=4))
      >>> len(output.outputs[0].token_ids)
      4
    """

    @names_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        explain: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, batched; returns when all are complete.

        Args:
          prompts: a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or several. With
            ``cache_salt`` in a dict, the prompt shares cached blocks only where that is the same.
          sampling_params: one for all prompts, or one for each; by default those of
            `get_default_sampling_params`.
          priority: rank of each prompt; lower is served first.
          explain: whether outputs carry an `Explanation` of what they waited for.
          use_tqdm: whether a bar shows the progress, on a terminal or in a notebook.

        Returns:
          One output for each prompt, in their order.

        Raises:
          ValueError: a prompt is empty, too long for the context or for the pool, or holds tokens
            out of range; a parameter does not suit the model. Nothing has been run then.
          FloatingPointError: the model gave NaN for every prompt. If it did for some only, their
            outputs have the finish_reason ``"error"``. Samples whose `structured_outputs` could
            not be followed have it too, with the reason and the text so far.
        """
        group = self._add(prompts, sampling_params, priority, explain)
        requests = self._finish(group, use_tqdm=use_tqdm)
        _raise_if_all_failed(requests)
        return [request.output() for request in requests]

    @names_arguments
    def rollout(
        self,
        prompt_token_ids: ArrayLike,
        num_tokens: ArrayLike,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> Rollout:
        """Complete prompts, arrays in and arrays out: the samples of a training step.

        What the function `rollout` does inside `jit`, and in float32 the same tokens, but blocks
        are held only as far as sequences have grown, what prompts have in common is computed and
        held once, and slots are filled again as rows stop. No text is made, and no objects for
        single tokens.

        Args:
          prompt_token_ids: integer [B, T], each row padded at its end.
          num_tokens: integer [B], tokens in each prompt, 1 to T.
          sampling_params: one for all prompts, or one for each with the same `n`; by default those
            of `get_default_sampling_params`. Their `n` samples of a prompt are rows that follow
            each other. Row b of the result is sample b of its seed, so rows with the same prompt
            differ. `logprobs` and `prompt_logprobs` are not looked at.
          use_tqdm: whether a bar shows the progress, on a terminal or in a notebook.

        Returns:
          Arrays of NumPy: the tokens i32 [B * n, N], their log-probabilities f32 [B * n, N] under
          the model at temperature 1, unfiltered, and how many there are in each row i32 [B * n]. N
          is the largest `max_tokens`, whatever was drawn; of parameters without, the longest row.

        Raises:
          ValueError: shapes or types do not fit together, or as for `generate`. Nothing has been
            run then.
          FloatingPointError: the model gave NaN.
          StructuredOutputError: `structured_outputs` could not be followed.

        Example:
          >>> llm = LLM(max_num_seqs=4)
          >>> params = SamplingParams(n=2, max_tokens=5, seed=0)
          >>> drawn = llm.rollout(np.array([[5, 9, 2], [7, 3, 0]]), np.array([3, 2]), params)
          >>> drawn.token_ids.shape, drawn.logprobs.dtype, drawn.num_tokens.dtype
          ((4, 5), dtype('float32'), dtype('int32'))
        """
        with own_transfers():
            rows, lengths = np.asarray(prompt_token_ids), np.asarray(num_tokens)
        check_prompts("LLM.rollout", self.config.vocab_size, rows, lengths)
        prompts: list[Prompt] = [
            {"prompt_token_ids": row[:length]} for row, length in zip(rows, lengths, strict=True)
        ]
        params = self._list_params("LLM.rollout", sampling_params, len(prompts))
        if len(counts := {each.n for each in params}) > 1:
            raise ValueError(
                f"LLM.rollout: n must be the same for all prompts, got {sorted(counts)}."
            )
        plain = [_of_tokens_only(each) for each in params]
        group = self._add(prompts, plain, function="LLM.rollout", shares_seeds=True)
        return _as_rollout(self._finish(group, use_tqdm=use_tqdm))

    def speed_note(self) -> Callable[[float], str]:
        """Return a function that describes the speed from now on, for `Status.advance`."""
        before = self.stats.num_generated_tokens

        def note(elapsed: float) -> str:
            num_tokens = self.stats.num_generated_tokens - before
            return f"{num_tokens / elapsed:.0f} tokens/s, cache {self.cache_use:.0%}"

        return note

    def _finish(self, group: "_RequestGroup", *, use_tqdm: bool) -> list[Request]:
        """Run the requests of a call to their ends."""
        with contextlib.closing(group):
            requests = list(group.requests.values())
            status, note = Status(is_shown=None if use_tqdm else False), self.speed_note()
            with (
                status.bar("requests", unit="req", total=len(requests)),
                self.core.executor.showing_compilation(status.say),
            ):
                for _, request in group:
                    status.advance(int(request.is_finished), note)
        return requests

    @names_arguments
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
          messages: ``{"role": ..., "content": ...}`` dicts, or a list of such conversations. The
            content is a text, or a list of parts such as ``{"type": "text", "text": "Hi"}``.
            Messages of openai's client are taken as they are, as objects or as dicts.
          tools: functions that the model may call, as OpenAI describes them. The template shows
            them to the model; calls are in the text of the output, as the model writes them.
          chat_template_kwargs: variables for the template, such as ``{"enable_thinking": False}``.
          sampling_params, use_tqdm: see `generate`.

        Raises:
          ValueError: the model has no tokenizer or no chat template, the template has no tools but
            some are given, it refuses the messages or the variables, or as for `generate`.
        """
        is_one = bool(messages) and not isinstance(messages[0], list | tuple)
        conversations = cast(
            Sequence[Sequence[Mapping[str, Any]]], [messages] if is_one else messages
        )
        prompts = [
            self.chat_prompt(each, chat_template_kwargs, tools=tools) for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    @names_arguments
    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """The prompt that asks for the next message of a conversation.

        Args:
          messages, chat_template_kwargs, tools: see `chat`; one conversation.

        Raises:
          ValueError: the model has no tokenizer or no chat template, the template has no tools but
            some are given, or it refuses the messages or the variables.
        """
        if self.tokenizer is None:
            raise ValueError(
                "LLM.chat: the model must have a tokenizer, got none. Put a tokenizer.json into "
                "its folder, or pass tokenizer=."
            )
        token_ids = self.tokenizer.encode_chat(messages, chat_template_kwargs, tools=tools)
        return {"prompt_token_ids": token_ids}

    @names_arguments
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        explain: bool = False,
    ) -> "Stream":
        """As `generate`, but yields a request's index and output whenever it has new tokens.

        What is yielded is final: text that may turn out to be part of a stop string, or half a
        character, is held back. With ``steps_per_dispatch=1`` tokens come one by one. Closing the
        iterator ends the requests and frees their blocks.
        """
        return Stream(self._add(prompts, sampling_params, priority, explain))

    @names_arguments
    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of prompts; see `paged_jax.engine.beam_search`.

        Args:
          prompts: see `generate`.
          params: parameters of the search, the same for all prompts.

        Returns:
          For each prompt, in their order, the ``params.beam_width`` best sequences.

        Raises:
          ValueError: a prompt is empty, too long or holds tokens out of range, or there can never
            be slots or blocks enough for it. Nothing has been run then.
          RuntimeError: a request is unfinished.
          FloatingPointError: the model gave NaN.

        Example:
          >>> llm = LLM(max_num_seqs=2)
          >>> [output] = llm.beam_search("It is", BeamSearchParams(beam_width=2, max_tokens=4))
          >>> best, second = output.sequences
          >>> best.cum_logprob > second.cum_logprob
          True
        """
        return beam_search(self.core, prompts, params)

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        explain: bool = False,
        *,
        function: str = "LLM.generate",
        shares_seeds: bool = False,
    ) -> "_RequestGroup":
        """Queue all prompts, or none of them.

        Samples of prompts that share a seed draw alike, unless `shares_seeds` numbers them all.
        """
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        count = len(prompts)
        sampling_params = self._list_params(function, sampling_params, count)
        priority = [0] * count if priority is None else priority
        _check_count(function, "priority", priority, count)
        requests: list[Request] = []
        with self.all_or_none():
            for prompt, params, rank in zip(prompts, sampling_params, priority, strict=True):
                offset = len(requests) * params.n if shares_seeds else 0
                try:
                    name = self.add_request(
                        prompt, params, priority=rank, explain=explain, sample_offset=offset
                    )
                except ValueError as error:
                    if count == 1:
                        raise
                    raise ValueError(f"prompts[{len(requests)}]: {error}") from None
                requests.append(self.get_request(name))
        return _RequestGroup(self, requests)

    def _list_params(
        self,
        function: str,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
    ) -> Sequence[SamplingParams]:
        """The parameters of each of so many prompts."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, Mapping):
            raise ValueError(
                f"{function}: sampling_params must be SamplingParams, got a dict. Pass "
                "SamplingParams(**params)."
            )
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        _check_count(function, "sampling_params", sampling_params, count)
        return sampling_params


class _RequestGroup:
    """The requests of one call, each whenever it has new tokens, until all have finished."""

    def __init__(self, engine: Engine, requests: list[Request]):
        self.requests = {request.request_id: request for request in requests}
        self._engine = engine
        self._indices = {request.request_id: index for index, request in enumerate(requests)}
        self._arrived: dict[str, Request] = {}
        for request_id in self.requests:
            engine.delivery.subscribe(request_id, self._receive)

    def _receive(self, request: Request) -> None:
        self._arrived[request.request_id] = request

    def __iter__(self) -> Iterator[tuple[int, Request]]:
        return self

    def __next__(self) -> tuple[int, Request]:
        while not self._arrived:
            if not self.requests:
                raise StopIteration
            self._engine.delivery.deliver(self._engine.advance())
        request_id, request = next(iter(self._arrived.items()))
        del self._arrived[request_id]
        if request.is_finished:
            self._leave(request_id)
        return self._indices[request_id], request

    def _leave(self, request_id: str) -> None:
        del self.requests[request_id]
        self._engine.delivery.unsubscribe(request_id)

    def close(self) -> None:
        """End the requests that have not finished."""
        self._arrived.clear()
        while self.requests:
            request_id = next(iter(self.requests))
            self._leave(request_id)
            self._engine.end(request_id)

    def drop(self) -> None:
        """As `close`, but later if Python asks for it in the middle of a step."""
        self._engine.when_idle(self.close)


class Stream:
    """Outputs of some requests as they come: ``(index, output)``. See `LLM.stream`.

    Closing it ends the requests that have not finished, and frees their blocks; so does dropping
    it, and leaving a ``with contextlib.closing(...)`` block.
    """

    def __init__(self, group: _RequestGroup):
        self._group = group
        # Not __del__: at the end of the process nothing is left that could be ended.
        weakref.finalize(self, group.drop).atexit = False

    def __iter__(self) -> Iterator[tuple[int, RequestOutput]]:
        return self

    def __next__(self) -> tuple[int, RequestOutput]:
        try:
            index, request = next(self._group)
        except BaseException:
            self.close()
            raise
        return index, request.output()

    def close(self) -> None:
        """End the requests that have not finished."""
        self._group.close()


def _check_count(function: str, name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(
            f"{function}: {name} must be one or as many as the {count} prompts, got {len(values)}."
        )


def _of_tokens_only(params: SamplingParams) -> SamplingParams:
    """The parameters without what makes text or objects of tokens, unless it ends a row."""
    return dataclasses.replace(
        params, logprobs=None, prompt_logprobs=None, detokenize=bool(params.stop)
    )


def _as_rollout(requests: list[Request]) -> Rollout:
    """The samples of requests that have ended, a row each.

    Raises:
      FloatingPointError, StructuredOutputError: one ended with an error.
    """
    samples = [sequence for request in requests for sequence in request.sequences]
    for sample in samples:
        if sample.completion.finish_reason == "error":
            error = StructuredOutputError if _has_lost_form(sample) else FloatingPointError
            raise error(f"LLM.rollout: {sample.completion.stop_reason}")
    num_tokens = np.array([sample.num_generated for sample in samples], np.int32)
    bounds = [request.params.max_tokens for request in requests]
    shape = len(samples), max(int(num_tokens.max()), *(bound or 0 for bound in bounds))
    token_ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        token_ids[row, : num_tokens[row]] = sample.token_ids[sample.num_prompt_tokens :]
        logprobs[row, : num_tokens[row]] = sample.completion.token_logprobs
    return Rollout(*cast(Any, (token_ids, logprobs, num_tokens)))


def _raise_if_all_failed(requests: list[Request]) -> None:
    """Raise an error if the model gave NaN for every sample."""
    samples = [sample for request in requests for sample in request.sequences]
    reasons = [
        sample.completion.stop_reason
        for sample in samples
        if sample.completion.finish_reason == "error" and not _has_lost_form(sample)
    ]
    if reasons and len(reasons) == len(samples):
        raise FloatingPointError(f"LLM.generate: {reasons[0]}")


def _has_lost_form(sample: SampleSequence) -> bool:
    """Return whether the grammar of a sample has failed."""
    return sample.grammar is not None and sample.grammar.failure is not None
