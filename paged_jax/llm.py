"""Text in, text out, offline: `LLM`, with the names and meanings of vLLM's class."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from paged_jax.engine.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
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

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Who waits for a request: the step that brings its tokens may be that of another call.
        self._runs: dict[str, _Run] = {}
        # What nobody waits for, until `step` is called.
        self._others: dict[str, Request] = {}
        # Calls of `stream` whose iterators were dropped while the engine was at work.
        self._dropped: list[_Run] = []

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
          sampling_params: for all prompts, or one for each; by default those of
            `get_default_sampling_params`.
          priority: of each prompt; lower is served first.
          explain: whether outputs carry an `Explanation` of what they waited for.
          use_tqdm: show progress on stderr if that is a terminal.

        Returns:
          One output for each prompt, in their order.

        Raises:
          ValueError: a prompt is empty, too long for the context or for the pool, or holds tokens
            out of range; a parameter does not suit the model. Nothing has been run then.
          FloatingPointError: the model gave NaN for every prompt. Where it did for some only, their
            outputs have the finish_reason ``"error"``.
        """
        with contextlib.closing(self._add(prompts, sampling_params, priority, explain)) as run:
            requests = list(run.requests.values())
            # disable=None: on a terminal only.
            with Progress(self, len(requests), disable=None if use_tqdm else True) as progress:
                for _, request in run:
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
          sampling_params, use_tqdm: as for `generate`.

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
          messages, chat_template_kwargs: as for `chat`, of one conversation.

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
        self._advance_all()
        others, self._others = self._others, {}
        return [request.output() for request in others.values()]

    def end(self, request_id: str) -> Request | None:
        """See `Engine.end`. A call of `stream` that waits for the request gets what it has."""
        request = super().end(request_id)
        if request is not None and request_id in self._runs:
            self._runs[request_id].arrive(request)
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or `step` has something to tell."""
        return super().has_unfinished or bool(self._others)

    def _advance_all(self) -> None:
        """Run a step, and hand what it brings to the calls that wait for it, or keep it."""
        self._end_dropped()
        for request in self.advance():
            if request.request_id in self._runs:
                self._runs[request.request_id].arrive(request)
            else:
                self._others[request.request_id] = request

    def _end_dropped(self) -> None:
        while self._dropped and not self._is_changing:
            self._dropped.pop().close()

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        explain: bool,
    ) -> "_Run":
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
        num_before, request_ids = self._num_requests, []
        try:
            for prompt, params, rank in zip(prompts, sampling_params, priority, strict=True):
                request_ids.append(self.add_request(prompt, params, priority=rank, explain=explain))
        except BaseException as error:
            index = len(request_ids)
            for request_id in request_ids:
                self.abort(request_id)
            self._num_requests = num_before
            if isinstance(error, ValueError) and count > 1:
                raise ValueError(f"prompts[{index}]: {error}") from None
            raise
        return _Run(self, [self._requests[request_id] for request_id in request_ids])


class _Run:
    """The requests of one call, each whenever it has new tokens, until all have finished."""

    def __init__(self, llm: LLM, requests: list[Request]):
        self.requests = {request.request_id: request for request in requests}
        self._llm = llm
        self._indices = {request.request_id: index for index, request in enumerate(requests)}
        self._arrived: dict[str, Request] = {}
        llm._runs.update(dict.fromkeys(self.requests, self))

    def arrive(self, request: Request) -> None:
        """Take note that a request has new tokens, or has ended."""
        self._arrived[request.request_id] = request

    def __iter__(self) -> Iterator[tuple[int, Request]]:
        return self

    def __next__(self) -> tuple[int, Request]:
        while not self._arrived:
            if not self.requests:
                raise StopIteration
            self._llm._advance_all()
        request_id, request = next(iter(self._arrived.items()))
        del self._arrived[request_id]
        if request.is_finished:
            del self.requests[request_id]
            self._llm._runs.pop(request_id, None)
        return self._indices[request_id], request

    def close(self) -> None:
        """End what has not finished."""
        self._arrived.clear()
        while self.requests:
            request_id, _ = self.requests.popitem()
            self._llm._runs.pop(request_id, None)
            self._llm.end(request_id)

    def drop(self) -> None:
        """As `close`, as soon as that can be: Python may ask for this in the middle of a step."""
        self._llm._dropped.append(self)
        self._llm._end_dropped()


class Stream:
    """Outputs of some requests as they come: ``(index, output)``. See `LLM.stream`.

    Closing it ends the requests that have not finished, and frees their blocks; so does dropping
    it, and leaving a ``with contextlib.closing(...)`` block.
    """

    def __init__(self, run: _Run):
        self._run = run
        # Not __del__: at the end of the process nothing is left that could be ended.
        weakref.finalize(self, run.drop).atexit = False

    def __iter__(self) -> Iterator[tuple[int, RequestOutput]]:
        return self

    def __next__(self) -> tuple[int, RequestOutput]:
        try:
            index, request = next(self._run)
        except BaseException:
            self.close()
            raise
        return index, request.output()

    def close(self) -> None:
        """End the requests that have not finished."""
        self._run.close()


def _raise_if_all_failed(outputs: list[RequestOutput]) -> None:
    reasons = [c.stop_reason for o in outputs for c in o.outputs if c.finish_reason == "error"]
    if reasons and len(reasons) == sum(len(output.outputs) for output in outputs):
        raise FloatingPointError(f"LLM.generate: {reasons[0]}")
