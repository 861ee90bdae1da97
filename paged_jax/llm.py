"""Completes prompts offline: `LLM`, with the names and meanings of vLLM's class."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from paged_jax.engine.beam_search import beam_search
from paged_jax.engine.beams import BeamSearchOutput, BeamSearchParams
from paged_jax.engine.engine import Engine
from paged_jax.engine.inputs import Prompt
from paged_jax.progress import Progress
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request


class LLM(Engine):
    """An engine that completes prompts while the caller waits. Arguments are those of `Engine`.

    Example:
      >>> llm = LLM(max_num_seqs=2)
      >>> [output] = llm.generate(["It is"], SamplingParams(temperature=0, max_tokens=4))
      >>> len(output.outputs[0].token_ids)
      4
    """

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
          use_tqdm: whether progress is shown on stderr, if that is a terminal.

        Returns:
          One output for each prompt, in their order.

        Raises:
          ValueError: a prompt is empty, too long for the context or for the pool, or holds tokens
            out of range; a parameter does not suit the model. Nothing has been run then.
          FloatingPointError: the model gave NaN for every prompt. Where it did for some only, their
            outputs have the finish_reason ``"error"``.
        """
        with contextlib.closing(self._add(prompts, sampling_params, priority, explain)) as group:
            requests = list(group.requests.values())
            # disable=None: on a terminal only.
            with Progress(self, len(requests), disable=None if use_tqdm else True) as progress:
                for _, request in group:
                    progress.update(request.is_finished)
        outputs = [request.output() for request in requests]
        _raise_if_all_failed(outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
          messages: ``{"role": ..., "content": ...}`` dicts, or a list of such conversations. The
            content is a text, or a list of parts such as ``{"type": "text", "text": "Hi"}``.
          chat_template_kwargs: variables for the template, such as ``{"enable_thinking": False}``.
          sampling_params, use_tqdm: see `generate`.

        Raises:
          ValueError: the model has no tokenizer or no chat template, the template refuses the
            messages or the variables, or as for `generate`.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(
            Sequence[Sequence[Mapping[str, Any]]], [messages] if is_one else messages
        )
        prompts = [self.chat_prompt(each, chat_template_kwargs) for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt that asks for the next message of a conversation.

        Args:
          messages, chat_template_kwargs: see `chat`; one conversation.

        Raises:
          ValueError: the model has no tokenizer or no chat template, or the template refuses the
            messages or the variables.
        """
        if self.tokenizer is None:
            raise ValueError("LLM.chat: the model must have a tokenizer, got none.")
        return {"prompt_token_ids": self.tokenizer.encode_chat(messages, chat_template_kwargs)}

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
        return beam_search(self, prompts, params)

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        explain: bool,
    ) -> "_RequestGroup":
        """Queue all prompts, or none of them."""
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        count = len(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, Mapping):
            raise ValueError(
                "LLM.generate: sampling_params must be SamplingParams, got a dict. Pass "
                "SamplingParams(**params)."
            )
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * count
        priority = [0] * count if priority is None else priority
        for name, values in (("sampling_params", sampling_params), ("priority", priority)):
            if len(values) != count:
                raise ValueError(
                    f"LLM.generate: {name} must be one or as many as the {count} prompts, got "
                    f"{len(values)}."
                )
        requests: list[Request] = []
        with self.all_or_none():
            for prompt, params, rank in zip(prompts, sampling_params, priority, strict=True):
                try:
                    name = self.add_request(prompt, params, priority=rank, explain=explain)
                except ValueError as error:
                    if count == 1:
                        raise
                    raise ValueError(f"prompts[{len(requests)}]: {error}") from None
                requests.append(self.get_request(name))
        return _RequestGroup(self, requests)


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


def _raise_if_all_failed(outputs: list[RequestOutput]) -> None:
    reasons = [c.stop_reason for o in outputs for c in o.outputs if c.finish_reason == "error"]
    if reasons and len(reasons) == sum(len(output.outputs) for output in outputs):
        raise FloatingPointError(f"LLM.generate: {reasons[0]}")
