# pyright: strict, reportUnknownMemberType=false
"""`LLM`: offline generation for lists of prompts, with the interface of vLLM's `LLM`."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jax.typing import ArrayLike

from paged_jax.arguments import ArgumentError, advise, is_int, names_arguments
from paged_jax.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from paged_jax.engine.engine import Engine
from paged_jax.engine.request_factory import Prompt, list_prompts
from paged_jax.engine.transfers import allow_host_transfers
from paged_jax.monitoring import Status
from paged_jax.rollouts import Prompts, Rollout, read_prompts
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.structured_outputs import StructuredOutputError
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request
from paged_jax.scheduler.request import Sequence as SampleSequence


class LLM(Engine):
    """Engine with blocking methods for lists of prompts. `Engine` describes the arguments.

    Each program is compiled when it is first needed, which takes seconds; a terminal shows a
    status line meanwhile. `warmup` compiles all programs beforehand.

    Example:
      >>> llm = LLM(max_num_seqs=2)
      >>> [output] = llm.generate(["It is"], SamplingParams(temperature=0, max_tokens=4))
      >>> len(output.outputs[0].token_ids)
      4
    """

    if not TYPE_CHECKING:  # type checkers report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with advice if `name` is an attribute of vLLM's `LLM`."""
            try:
                return super().__getattribute__(name)
            except AttributeError as error:
                if (advice := advise(name)) is None:
                    raise
                raise AttributeError(f"{error}. {advice}", name=name, obj=self) from None

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
        """Complete all prompts, and return their outputs when all are finished.

        Args:
          prompts: one prompt or a list of prompts. A prompt is a text, a list of token ids,
            ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. If a dict also has
            ``cache_salt``, the prompt shares cached blocks only with prompts that have the same
            salt.
          sampling_params: parameters for all prompts, or a list with an entry for each prompt;
            `get_default_sampling_params` by default.
          priority: priority of each prompt; lower values are served first.
          explain: whether each output has an `Explanation`, which says what the request waited for.
          use_tqdm: whether to show a progress bar on a terminal or in a notebook.

        Returns:
          One output for each prompt, in order.

        Raises:
          ValueError: a prompt is empty, exceeds the context or the pool, or has token ids out of
            range; or the model does not support a parameter. No prompt has been run then.
          FloatingPointError: the model returned NaN for every sample. If it returned NaN only for
            some samples, no error is raised, and they have the finish_reason ``"error"``. Samples
            also have it if their grammar of `structured_outputs` failed. The stop_reason then
            describes the error.
        """
        group = self._add(prompts, sampling_params, priority, explain)
        requests = self._finish(group, use_tqdm=use_tqdm)
        _raise_if_all_failed(requests)
        return [request.output() for request in requests]

    @names_arguments
    def rollout(
        self,
        prompt_token_ids: Prompts,
        num_tokens: ArrayLike | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        first_prompt: int = 0,
        use_tqdm: bool = False,
    ) -> Rollout:
        """Complete prompts, and return arrays, for training loops.

        In float32, it draws the same tokens as the jittable function `paged_jax.rollout`, and with
        ``numerics="exact"`` in any dtype. Unlike that function, it allocates blocks as sequences
        grow, computes and stores common prefixes once, and starts a waiting sample when another one
        stops. No text is decoded.

        Args:
          prompt_token_ids: integer [B, T], each row padded at its end; or a list of token ids for
            each prompt.
          num_tokens: integer [B], number of tokens in each prompt, 1 to T; None if the prompts are
            lists of their own lengths.
          sampling_params: parameters for all prompts, or a list with an entry for each prompt, all
            with the same `n`; `get_default_sampling_params` by default. The `n` samples of a prompt
            are consecutive rows of the result. The random numbers of row b depend on the seed and
            on b, so rows with the same prompt differ. `logprobs` and `prompt_logprobs` are ignored.
          first_prompt: index of the first of these prompts among those of all engines, if several
            engines divide a batch. Rows are counted from it, so equal prompts of different engines
            have different samples.
          use_tqdm: whether to show a progress bar on a terminal or in a notebook.

        Returns:
          A `Rollout` of NumPy arrays: tokens i32 [B * n, N], their log-probabilities f32 [B * n, N]
          under the model at temperature 1 without filters, and the number of tokens in each row
          i32 [B * n]. It names the numerics and the cache dtype of the engine. N is the largest
          `max_tokens`, or the length of the longest row if that is larger.

        Raises:
          ValueError: shapes or dtypes are wrong, or see `generate`. No prompt has been run then.
          FloatingPointError: the model returned NaN for a sample.
          StructuredOutputError: the grammar of a sample's `structured_outputs` failed.

        Example:
          >>> llm = LLM(max_num_seqs=4)
          >>> params = SamplingParams(n=2, max_tokens=5, seed=0)
          >>> drawn = llm.rollout(np.array([[5, 9, 2], [7, 3, 0]]), np.array([3, 2]), params)
          >>> drawn.token_ids.shape, drawn.logprobs.dtype, drawn.num_drawn.dtype
          ((4, 5), dtype('float32'), dtype('int32'))
        """
        with allow_host_transfers():
            arrays = read_prompts(
                "LLM.rollout", self.config.vocab_size, prompt_token_ids, num_tokens
            )
            rows, lengths = map(np.asarray, arrays)
        if not is_int(first_prompt) or first_prompt < 0:
            rule = f"must be an integer >= 0, got {first_prompt!r}. Pass an index."
            raise ArgumentError("LLM.rollout", rule, "first_prompt")
        prompts: list[Prompt] = [
            {"prompt_token_ids": row[:length]} for row, length in zip(rows, lengths, strict=True)
        ]
        params = self._list_params("LLM.rollout", sampling_params, len(prompts))
        if len(counts := {row_params.n for row_params in params}) > 1:
            raise ValueError(
                f"LLM.rollout: n must be the same for all prompts, got {sorted(counts)}."
            )
        plain_params = [_without_text(row_params) for row_params in params]
        group = self._add(prompts, plain_params, function="LLM.rollout", first_prompt=first_prompt)
        requests = self._finish(group, use_tqdm=use_tqdm)
        return _as_rollout(
            requests, self.core.options.numerics, self.core.executor.cache_dtype.name
        )

    def speed_note(self) -> Callable[[float], str]:
        """Return a function for the argument `note` of `Status.advance`.

        The function takes the seconds since this call. It returns a text with the tokens generated
        per second since then, and the fraction of the cache in use.
        """
        before = self.stats.num_generated_tokens

        def note(elapsed: float) -> str:
            num_tokens = self.stats.num_generated_tokens - before
            return f"{num_tokens / elapsed:.0f} tokens/s, cache {self.cache_use:.0%}"

        return note

    def _finish(self, group: "_RequestGroup", *, use_tqdm: bool) -> list[Request]:
        """Run steps until all requests of the group have finished. Return the requests."""
        with contextlib.closing(group):
            requests = list(group.requests.values())
            is_shown = self.core.options.show_progress if use_tqdm else False
            status, note = Status(is_shown=is_shown), self.speed_note()
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
        """Generate the next message of a conversation, or of each of several conversations.

        The prompts are rendered with the model's chat template.

        Args:
          messages: a conversation, which is a list of ``{"role": ..., "content": ...}`` dicts, or a
            list of conversations. The content is a text, or a list of parts such as
            ``{"type": "text", "text": "Hi"}``. Message objects of openai's client are accepted too.
          sampling_params: see `generate`.
          tools: functions that the model may call, in OpenAI's format. The template adds them to
            the prompt. Tool calls are not parsed: they are in the output's text as generated.
          chat_template_kwargs: variables for the template, such as ``{"enable_thinking": False}``.
          use_tqdm: see `generate`.

        Raises:
          ValueError: the model has no tokenizer or no chat template; the template does not support
            tools, or raises an error for the messages or variables; or see `generate`.
        """
        if isinstance(messages, str | Mapping):
            raise ValueError(
                "LLM.chat: messages must be a list of dicts such as "
                f'[{{"role": "user", "content": TEXT}}], got {messages!r}.'
            )
        is_one = bool(messages) and not isinstance(messages[0], list | tuple)
        conversations = cast(
            Sequence[Sequence[Mapping[str, Any]]], [messages] if is_one else messages
        )
        prompts = [
            self.chat_prompt(conversation, chat_template_kwargs, tools=tools)
            for conversation in conversations
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
        """Render a conversation with the chat template, and return it as a prompt of token ids.

        Args:
          messages: one conversation, see `chat`.
          chat_template_kwargs: see `chat`.
          tools: see `chat`.

        Raises:
          ValueError: the model has no tokenizer or no chat template; or the template does not
            support tools, or raises an error for the messages or variables.
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
        """Complete prompts like `generate`, but yield ``(index, output)`` as tokens are generated.

        `index` is the index of the prompt. Each output has the text so far, and later outputs only
        extend it. So incomplete characters and possible beginnings of stop strings are held back.
        With ``steps_per_dispatch=1``, an output is yielded for each token. Closing the iterator
        aborts the requests and frees their blocks.
        """
        return Stream(self._add(prompts, sampling_params, priority, explain))

    @names_arguments
    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Find probable continuations of prompts, see `paged_jax.engine.beam_search`.

        Args:
          prompts: see `generate`.
          params: parameters of the search, the same for all prompts.

        Returns:
          For each prompt, in order, the ``params.beam_width`` best sequences.

        Raises:
          ValueError: a prompt is empty, exceeds the context, has token ids out of range, or needs
            more slots or blocks than the engine has. No prompt has been run then.
          RuntimeError: the engine has unfinished requests.
          FloatingPointError: the model returned NaN.

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
        first_prompt: int | None = None,
    ) -> "_RequestGroup":
        """Add a request for each prompt, and return the requests. If one is invalid, add none.

        Random numbers depend on the seed and on the sample's number. Samples are numbered within
        each prompt, so equal prompts with the same seed draw the same tokens. With `first_prompt`,
        the index of the first prompt in a larger batch, the numbers continue from one prompt to the
        next, so equal prompts draw different tokens.
        """
        prompts = list_prompts(function, prompts)
        count = len(prompts)
        sampling_params = self._list_params(function, sampling_params, count)
        priority = [0] * count if priority is None else priority
        _check_count(function, "priority", priority, count)
        requests: list[Request] = []
        with self.all_or_none():
            for prompt, params, rank in zip(prompts, sampling_params, priority, strict=True):
                is_in_batch = first_prompt is not None
                offset = (first_prompt + len(requests)) * params.n if is_in_batch else 0
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
        """Return a sequence with the sampling parameters of each of `count` prompts."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, Mapping):
            raise ValueError(
                f"{function}: sampling_params must be SamplingParams, got a dict. Pass "
                "SamplingParams(**params)."
            )
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(cast(object, sampling_params), Sequence):
            raise ValueError(
                f"{function}: sampling_params must be SamplingParams, got {sampling_params!r}."
            )
        _check_count(function, "sampling_params", sampling_params, count)
        return sampling_params


class _RequestGroup:
    """Requests that were added together, as an iterator that runs the engine.

    It yields ``(index, request)`` whenever a request has new tokens, until all have finished.
    """

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
        """Abort the requests that have not finished."""
        self._arrived.clear()
        while self.requests:
            request_id = next(iter(self.requests))
            self._leave(request_id)
            self._engine.end(request_id)

    def drop(self) -> None:
        """Call `close` as soon as no step is running.

        Python may delete a `Stream`, and thus call this method, while a step is running.
        """
        self._engine.when_idle(self.close)


class Stream:
    """Iterator over ``(index, output)`` of several requests, see `LLM.stream`.

    `close` aborts unfinished requests and frees their blocks. The same happens when the last
    reference to the iterator is dropped.
    """

    def __init__(self, group: _RequestGroup):
        self._group = group
        # Use no __del__, because it would also run at interpreter exit.
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
        """Abort the requests that have not finished."""
        self._group.close()


def _check_count(function: str, name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(
            f"{function}: {name} must be one value or a list with one value per prompt "
            f"({count}), got {len(values)} values."
        )


def _without_text(params: SamplingParams) -> SamplingParams:
    """Return a copy of `params` that requests neither text nor log-probabilities.

    Tokens are still converted to text if there are stop strings.
    """
    return dataclasses.replace(
        params, logprobs=None, prompt_logprobs=None, detokenize=bool(params.stop)
    )


def _as_rollout(requests: list[Request], numerics: str, cache_dtype: str) -> Rollout:
    """Return the samples of finished requests as arrays, one row per sample.

    `numerics` and `cache_dtype` are those of the engine.

    Raises:
      FloatingPointError: the model returned NaN for a sample.
      StructuredOutputError: the grammar of a sample's `structured_outputs` failed.
    """
    samples = [sequence for request in requests for sequence in request.sequences]
    for sample in samples:
        if sample.completion.finish_reason == "error":
            error = StructuredOutputError if _has_failed_grammar(sample) else FloatingPointError
            raise error(f"LLM.rollout: {sample.completion.stop_reason}")
    num_drawn = np.array([sample.num_generated for sample in samples], np.int32)
    bounds = [request.params.max_tokens for request in requests]
    shape = len(samples), max(int(num_drawn.max()), *(bound or 0 for bound in bounds))
    token_ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        token_ids[row, : num_drawn[row]] = sample.token_ids[sample.num_prompt_tokens :]
        logprobs[row, : num_drawn[row]] = sample.completion.token_logprobs
    arrays = cast(Any, (token_ids, logprobs, num_drawn))
    return Rollout(*arrays, numerics=numerics, cache_dtype=cache_dtype)


def _raise_if_all_failed(requests: list[Request]) -> None:
    """Raise FloatingPointError if the model returned NaN for every sample."""
    samples = [sample for request in requests for sample in request.sequences]
    reasons = [
        sample.completion.stop_reason
        for sample in samples
        if sample.completion.finish_reason == "error" and not _has_failed_grammar(sample)
    ]
    if reasons and len(reasons) == len(samples):
        raise FloatingPointError(f"LLM.generate: {reasons[0]}")


def _has_failed_grammar(sample: SampleSequence) -> bool:
    """Return whether the sample ended because its grammar became too complex to follow."""
    return sample.grammar is not None and sample.grammar.failure is not None
