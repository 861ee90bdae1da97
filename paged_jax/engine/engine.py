"""Continuous batching: requests join and leave a running batch at every step.

A step is `schedule -> run -> postprocess`:

    schedule       what runs: `paged_jax.scheduler`, which drives the cache as it decides
    run            chunks of prompts, forks of samples, some steps of decoding: `run`, which drives
                   `paged_jax.runner`, and `pipeline`, which queues some before tokens are read
    postprocess    tokens to samples: text, stop strings, log-probabilities, ends: `postprocess`

The tokens of requests on the host are the truth, and what the device holds can be computed from
them again. So a step that is cut short, by Ctrl-C or for lack of memory, loses no request.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from paged_jax.arguments import ArgumentError, names_arguments
from paged_jax.engine.exclusive import ExclusiveUse
from paged_jax.engine.inputs import Prompt
from paged_jax.engine.upkeep import Upkeep
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.explain import RequestHistory
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request


class Engine(Upkeep):
    """A model, its tokenizer and a paged KV cache, shared by requests that come and go.

    It belongs to one thread at a time: calls from several refuse each other or wait for nobody.
    `AsyncEngine` takes requests from many tasks.

    Args:
      config: options, given as keyword arguments; `EngineConfig` describes them.

    Raises:
      ValueError: an argument is out of bounds; the message names it.

    Example:
      >>> engine = Engine(max_num_seqs=2)
      >>> request_id = engine.add_request("It is", SamplingParams(temperature=0, max_tokens=4))
      >>> while engine.has_unfinished:
      ...     outputs = engine.step()
      >>> outputs[0].request_id == request_id, len(outputs[0].outputs[0].token_ids)
      (True, 4)
    """

    def __repr__(self) -> str:
        # Only state on the host, so that a `repr` never waits for a step or compiles a program.
        num_unfinished = len(self._requests.unfinished)
        num_used = self._blocks.num_held if num_unfinished else 0
        return (
            f"{type(self).__name__}({self.config.model_type}, {num_used} of {self.num_blocks} "
            f"blocks of {self.block_size} tokens in use, {num_unfinished} unfinished requests, "
            f"{self.max_num_seqs} slots, max_model_len={self.max_model_len}"
            f"{', asleep' if self.is_sleeping else ''})"
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or `step` has something to return."""
        return bool(self._requests.unfinished or self._requests.ended or self.delivery.kept)

    # Requests come and go

    @names_arguments
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        arrival_time: float | None = None,
        explain: bool = False,
        client: str = "",
        sample_offset: int = 0,
    ) -> str:
        """Queue a request, which runs in the steps that follow.

        Args:
          prompt: a text, or a dict with ``prompt`` or ``prompt_token_ids``, and perhaps
            ``cache_salt``: requests share cached blocks only where their salts are the same.
          params: how tokens are chosen; by default as in `get_default_sampling_params`.
          request_id: name of the request; by default its number.
          priority: rank of the request: lower is served first, and may take the blocks of others.
          timeout: seconds after which the request ends as it stands, with finish_reason
            ``"abort"``.
          arrival_time: time of arrival, of ``time.perf_counter()``; by default now.
          explain: whether the outputs carry an `Explanation` of what it waited for.
          client: whose request it is: of equal priority, clients take turns for slots.
          sample_offset: number of its first sample among those of its seed: requests with the same
            prompt and seed draw the same tokens unless these differ.

        Returns:
          The request's id.

        Raises:
          ValueError: the prompt is empty, too long for the context or for the pool, or holds tokens
            out of range; a parameter does not suit the model; the id is taken. The message names
            the field and the bound, and the engine is as before.
          EngineAsleepError: the engine sleeps.
          RuntimeError: this process follows another one, see `follow`.
        """
        self._check_leads("add_request")
        self._sleep.check_awake("add_request")
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise ArgumentError("request", f"must be SamplingParams, got {params!r}.", "params")
        if request_id is None:
            request_id = self._requests.next_id()
        elif not isinstance(request_id, str):
            raise ArgumentError("request", f"must be a text, got {request_id!r}.", "request_id")
        request = self._inputs.make_request(
            request_id,
            self._requests.num_added,
            prompt,
            params,
            priority=priority,
            arrival_time=time.perf_counter() if arrival_time is None else arrival_time,
            timeout=timeout,
            client=client,
            sample_offset=sample_offset,
        )
        if explain:
            request.history = RequestHistory(request.metrics.arrival_time)
        self._requests.check(request)
        with self._guard.change():
            self._requests.add(request)
        return request_id

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A context for calls of `add_request`: an exception within withdraws their requests."""
        num_before, known = self._requests.num_added, set(self._requests.unfinished)
        try:
            yield
        except BaseException:
            for request_id in [name for name in self._requests.unfinished if name not in known]:
                self.end(request_id)
            self._requests.num_added = num_before
            raise

    def get_request(self, request_id: str) -> Request:
        """The unfinished request of that name, for reading only.

        Raises:
          KeyError: there is none.
        """
        return self._requests.unfinished[request_id]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request as it stands, and free its blocks.

        Returns:
          What it has, with finish_reason ``"abort"``; None if no such request is unfinished.
        """
        request = self.end(request_id)
        return None if request is None else request.output()

    def end(self, request_id: str) -> Request | None:
        """As `abort`, without making an output."""
        request = self._requests.unfinished.get(request_id)
        if request is None:
            request = self._requests.take_ended(request_id)
        else:
            with self._guard.change():
                self._requests.end(request, "abort")
                self._pipeline.drop_ended()
        if request is not None:
            self.delivery.notify(request)
        return request

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters that the model's authors recommend.

        They come from ``generation_config.json``. Decoding is greedy if the file does not mention
        sampling, or turns it off.

        Args:
          **changes: fields of `SamplingParams` that get other values.

        Raises:
          ValueError: a field is out of bounds.
        """
        return SamplingParams(**self.generation_config.fill_in(changes, {"temperature": 0.0}))

    # One step

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of all requests that got tokens, or that ended.

        An output holds everything so far. Nothing to do returns nothing. Requests that a call of
        `LLM.generate` or `LLM.stream` waits for go to that call.

        Raises:
          EngineAsleepError: the engine sleeps.
        """
        touched: list[Request] = []
        kept: list[Request] = []
        try:
            touched = self.advance()
            self.delivery.deliver(touched)
            kept = self.delivery.kept
            outputs = [request.output() for request in kept]
            self.delivery.drop(kept)
            return outputs
        except BaseException:
            # Who has ended is not in the table any more: the next step returns it.
            self.delivery.deliver(touched)
            self.delivery.keep(kept)
            raise

    def advance(self) -> list[Request]:
        """As `step`, but returns all requests that were touched, and makes no outputs."""
        self._sleep.check_awake("step")
        clock = self._clock
        step = jax.profiler.StepTraceAnnotation("engine step", step_num=self._stats.num_steps)
        with self._guard.change(), step:
            clock.start_step()
            plan, tokens = self._pipeline.run()
            with clock.postprocessing:
                self._blocks.count_step(plan, tokens)
                touched = self._postprocessor.postprocess(plan, tokens)
            clock.count_step(plan, tokens, is_ahead=self._pipeline.is_ahead)
            self._pipeline.drop_ended()
        clock.update_costs(self._scheduler)
        ended = self._requests.ended
        try:
            self._requests.ended = []
            return touched
        except BaseException:
            self._requests.ended = ended
            raise

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call a function now or, within a step, before the next change of the engine's state."""
        self._guard.when_idle(action)

    def exclusive(self, function: str) -> ExclusiveUse:
        """Lend the engine's parts to a search that fills slots and blocks by itself.

        Args:
          function: the name of the search, for messages.

        Raises:
          RuntimeError: a request is unfinished, or the engine sleeps.
        """
        self._sleep.check_awake(function)
        self._requests.check_idle(function)
        return ExclusiveUse(
            self._runner,
            self._inputs,
            self._eos_token_ids,
            requests=self._requests,
            scheduler=self._scheduler,
            blocks=self._blocks,
            stats=self._stats,
            guard=self._guard,
        )
