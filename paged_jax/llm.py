"""Text in, text out, offline: `LLM`, with the names and meanings of vLLM's class."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

from paged_jax.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from paged_jax.engine import Engine
from paged_jax.inputs import Prompt
from paged_jax.outputs import RequestOutput
from paged_jax.progress import Progress
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams


class LLM(Engine):
    """An engine that completes prompts while the caller waits. Arguments are those of `Engine`.

    Example:
      >>> llm = LLM(max_num_seqs=2)
      >>> [output] = llm.generate(["It is"], SamplingParams(temperature=0, max_tokens=4))
      >>> len(output.outputs[0].token_ids)
      4
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # By request, what a call of `generate` or `stream` waits for: None, or the request when a
        # step has brought something for it, be it the step of another call.
        self._awaited: dict[str, Request | None] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, batched; returns when all are complete.

        Args:
          prompts: a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, or several. With
            ``cache_salt`` in a dict, the prompt shares cached blocks only where that is the same.
          sampling_params: for all prompts, or one for each; by default those of
            `get_default_sampling_params`.
          priority: of each prompt; lower is served first.
          use_tqdm: show progress on stderr if that is a terminal.

        Returns:
          One output for each prompt, in their order.

        Raises:
          ValueError: a prompt is empty, too long for the context or for the pool, or holds tokens
            out of range; a parameter does not suit the model. Nothing has been run then.
          FloatingPointError: the model gave NaN.
        """
        requests = self._add(prompts, sampling_params, priority)
        # disable=None: on a terminal only.
        with (
            Progress(self, len(requests), disable=None if use_tqdm else True) as progress,
            contextlib.closing(self._drive(requests)) as running,
        ):
            for request in running:
                progress.update(request.is_finished)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
          messages: ``{"role": ..., "content": ...}`` dicts, or a list of such conversations.
          sampling_params, use_tqdm: as for `generate`.

        Raises:
          ValueError: the model has no tokenizer or no chat template, or as for `generate`.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(
            Sequence[Sequence[Mapping[str, str]]], [messages] if is_one else messages
        )
        prompts = [self.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """The prompt that asks for the next message of a conversation.

        Raises:
          ValueError: the model has no tokenizer or no chat template.
        """
        if self.tokenizer is None:
            raise ValueError("LLM.chat: the model must have a tokenizer, got none.")
        text = self.tokenizer.apply_chat_template(messages)
        # The template writes the special tokens itself.
        return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """As `generate`, but yields a request's index and output whenever it has new tokens.

        What is yielded is final: text that may turn out to be part of a stop string, or half a
        character, is held back. With ``steps_per_dispatch=1`` tokens come one by one. Closing the
        iterator ends the requests and frees their blocks.
        """
        # Not a generator itself: mistakes are raised here rather than when it is first read.
        requests = self._add(prompts, sampling_params, priority)
        return self._stream(requests)

    def _stream(self, requests: list[Request]) -> Generator[tuple[int, RequestOutput], None, None]:
        indices = {request.request_id: index for index, request in enumerate(requests)}
        with contextlib.closing(self._drive(requests)) as running:
            for request in running:
                yield indices[request.request_id], request.output()

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of prompts; see `paged_jax.beam_search`.

        Args:
          prompts: as for `generate`.
          params: for all prompts.

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

    def step(self) -> list[RequestOutput]:
        """As `Engine.step`. Calls of `generate` and `stream` that are under way lose nothing."""
        return [request.output() for request in self._advance_all()]

    def _advance_all(self) -> list[Request]:
        """Run a step; keep what it brings for calls under way, and return the rest."""
        others = []
        for request in self.advance():
            if request.request_id in self._awaited:
                self._awaited[request.request_id] = request
            else:
                others.append(request)
        return others

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[Request]:
        """Queue all prompts, or none of them."""
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        count = len(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * count
        priority = [0] * count if priority is None else priority
        for name, values in (("sampling_params", sampling_params), ("priority", priority)):
            if len(values) != count:
                raise ValueError(
                    f"LLM.generate: {name} must be one or as many as the {count} prompts, got "
                    f"{len(values)}."
                )
        num_before, request_ids = self._num_requests, []
        try:
            for prompt, params, rank in zip(prompts, sampling_params, priority, strict=True):
                request_ids.append(self.add_request(prompt, params, priority=rank))
        except BaseException:
            for request_id in request_ids:
                self.abort(request_id)
            self._num_requests = num_before
            raise
        return [self._requests[request_id] for request_id in request_ids]

    def _drive(self, requests: list[Request]) -> Generator[Request, None, None]:
        """Yield a request whenever it has new tokens, until all are finished."""
        running = {request.request_id: request for request in requests}
        self._awaited.update(dict.fromkeys(running))
        try:
            while running:
                arrived = [r for r in running.values() if self._awaited[r.request_id] is r]
                if not arrived:
                    self._advance_all()
                for request in arrived:
                    self._awaited[request.request_id] = None
                    if request.is_finished:
                        del running[request.request_id]
                    _raise_error(request)
                    yield request
        finally:
            for request in requests:
                self._awaited.pop(request.request_id, None)
                self.abort(request.request_id)


def _raise_error(request: Request) -> None:
    for sample in request.samples:
        if sample.finish_reason == "error":
            raise FloatingPointError(f"LLM.generate: {sample.stop_reason}")
