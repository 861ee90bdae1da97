"""Continuous batching: requests join and leave a running batch at every step.

A step is `schedule -> run -> postprocess`:

    schedule       who runs: `paged_jax.scheduler`, which drives the cache as it decides
    run            chunks of prompts, forks of samples, some steps of decoding: `paged_jax.runner`
    postprocess    tokens to samples: text, stop strings, log-probabilities; who is done leaves

The tokens of requests on the host are the truth, and what the device holds can be computed from
them again. So a step that is cut short, by Ctrl-C or for lack of memory, loses no request.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from paged_jax.cache.paged_cache import PagedCache
from paged_jax.checks import ArgumentError
from paged_jax.engine.arguments import check_arguments, choose_cascade, program_sizes
from paged_jax.engine.compile_bar import compile_bar
from paged_jax.engine.delivery import Delivery
from paged_jax.engine.drafts import Drafter
from paged_jax.engine.exclusive import ExclusiveUse
from paged_jax.engine.footprint import footprint, resolve_kv_dtype
from paged_jax.engine.inputs import Inputs, Prompt
from paged_jax.engine.loading import find_eos_token_ids, load_tokenizer
from paged_jax.engine.pool_size import choose_num_blocks
from paged_jax.engine.postprocess import Postprocessor, draw_of
from paged_jax.engine.recovery import ChangeGuard
from paged_jax.engine.requests import RequestTable
from paged_jax.engine.run import PlanRunner
from paged_jax.engine.stats import BlockMeter, EngineStats, StepClock, totals
from paged_jax.engine.weight_swap import place_like
from paged_jax.kernels import backend_over_devices, check_backend_runs_on
from paged_jax.models.llama import Llama
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.runner import MAX_NUM_BATCHED_TOKENS, ModelRunner
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.history import History
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request
from paged_jax.scheduler.scheduler import Preemption, PreemptionCosts, Scheduler
from paged_jax.scheduler.sequence import Sequence

# Between host and device, until the first swap is measured.
HOST_BYTES_PER_SECOND = 1e10


class Engine:
    """A model, its tokenizer and a paged KV cache, shared by requests that come and go.

    Args:
      model: folder of a checkpoint (Hugging Face or Orbax), a `Llama`, or None for the small
        bundled model.
      tokenizer: a `Tokenizer` or a folder that holds one; by default that of the model's folder.
        Without one, prompts must be token ids and outputs have no text.
      dtype: of the weights: ``"auto"`` (as saved), ``"float32"``, ``"bfloat16"``, ``"float16"``.
      kv_dtype: of the cache: ``"auto"`` (float32 on CPU, else as the weights), ``"float32"``,
        ``"bfloat16"``, ``"float16"``, or quantised ``"int8"``, ``"fp8"``.
      block_size: tokens in a block of KV memory.
      num_blocks: blocks in the pool; by default what the slots can use, within the free memory.
      memory_fraction: instead of `num_blocks`, how much of the device's memory the engine may take
        in all, weights and steps included, above 0 to 1: the pool gets what these leave, as
        ``python -m paged_jax.plan`` says beforehand, but no more than the slots can use.
      max_num_seqs: samples that run at once, each in a slot.
      max_model_len: longest sequence in tokens, prompt included; by default the model's context.
      max_chunk: most prompt tokens of a sequence that one step reads.
      max_num_batched_tokens: most tokens in a step, one for each sequence that decodes included.
      steps_per_dispatch: most tokens of a sequence that one step decodes: more keep the host out
        of the way, fewer let the tokens of a stream come more evenly.
      enable_prefix_caching: whether requests share the blocks of prompts that begin alike.
      preemption: what happens to a sequence that must leave for lack of blocks: ``"recompute"``,
        ``"swap"`` (to host memory), or ``"auto"``, what costs less.
      swap_space: host memory for that, in GiB.
      num_speculative_tokens: most tokens that are guessed from earlier text and verified in one
        pass; 0 guesses none. Outputs are the same.
      cascade_attention: whether decoding reads blocks that all running sequences begin with once
        for all of them; by default on CPUs, with prefix caching, for models without a sliding
        window.
      seed: of requests that bring none.
      backend: of the attention, see `paged_attention`.
      sharding: where the weights go, see `Llama.from_pretrained`. Over several devices (CPUs or
        TPUs) products are divided as the weights are; each device has the whole cache.
      on_compile: called with one line before a program is compiled.

    Raises:
      ValueError: a size is out of bounds, naming it.

    Example:
      >>> engine = Engine(max_num_seqs=2)
      >>> request_id = engine.add_request("It is", SamplingParams(temperature=0, max_tokens=4))
      >>> while engine.has_unfinished:
      ...     outputs = engine.step()
      >>> outputs[0].request_id == request_id, len(outputs[0].outputs[0].token_ids)
      (True, 4)
    """

    def __init__(
        self,
        model: str | Path | Llama | None = None,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float | None = None,
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        max_chunk: int = 512,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        steps_per_dispatch: int = 8,
        enable_prefix_caching: bool = True,
        preemption: Preemption = "auto",
        swap_space: float = 4.0,
        num_speculative_tokens: int = 0,
        cascade_attention: bool | None = None,
        seed: int = 0,
        backend: str | None = None,
        sharding: Any = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        check_arguments(
            "Engine",
            kv_dtype=kv_dtype,
            block_size=block_size,
            num_blocks=num_blocks,
            memory_fraction=memory_fraction,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_chunk=max_chunk,
            max_num_batched_tokens=max_num_batched_tokens,
            steps_per_dispatch=steps_per_dispatch,
            preemption=preemption,
            num_speculative_tokens=num_speculative_tokens,
        )
        self.tokenizer = load_tokenizer(model, tokenizer)
        if not isinstance(model, Llama):
            model = Llama.from_pretrained(model, dtype=dtype, sharding=sharding)
        self.config = model.config
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.enable_prefix_caching = enable_prefix_caching
        self._eos_token_ids = find_eos_token_ids(self.config, self.tokenizer)
        sizes = program_sizes(
            "Engine",
            self.config,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_chunk=max_chunk,
            max_num_batched_tokens=max_num_batched_tokens,
            steps_per_dispatch=steps_per_dispatch,
            num_speculative_tokens=num_speculative_tokens,
            num_eos_token_ids=len(self._eos_token_ids),
        )
        self.max_model_len = sizes.max_model_len
        weights = jax.tree.leaves(nnx.state(model))
        device = next(iter(weights[0].devices()))
        check_backend_runs_on("Engine", backend, device.platform)
        if len(weights[0].sharding.device_set) > 1:
            backend = backend_over_devices("Engine", backend, device.platform)
        cache_dtype = resolve_kv_dtype(kv_dtype, weights[0].dtype, device.platform)
        taken = footprint(
            self.config,
            sizes,
            weights=_bytes_on(device, weights),
            dtype=weights[0].dtype,
            kv_dtype=cache_dtype,
            platform=device.platform,
        )
        self.num_blocks = choose_num_blocks(
            device, sizes, taken, num_blocks=num_blocks, memory_fraction=memory_fraction
        )
        self._inputs = Inputs(
            tokenizer=self.tokenizer,
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            # The last token that is drawn is never written.
            max_length=min(self.max_model_len, self.num_blocks * block_size + 1),
            seed=seed,
        )
        self._runner = ModelRunner(
            model,
            sizes,
            self.num_blocks,
            cache_dtype=cache_dtype,
            cascade=choose_cascade(
                cascade_attention,
                self.config,
                device.platform,
                enable_prefix_caching=enable_prefix_caching,
            ),
            backend=backend,
            eos_token_ids=self._eos_token_ids,
            draw_of=draw_of,
            on_compile=on_compile,
        )
        self._scheduler = Scheduler(
            max_num_seqs,
            self.num_blocks,
            block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk=sizes.max_chunk,
            max_steps=steps_per_dispatch,
            enable_prefix_caching=enable_prefix_caching,
            preemption=preemption,
            costs=PreemptionCosts(
                seconds_per_block=taken.block / HOST_BYTES_PER_SECOND,
                max_swapped_blocks=int(swap_space * 2**30) // taken.block,
            ),
        )
        self._connect(Drafter(num_speculative_tokens))

    def _connect(self, drafter: Drafter) -> None:
        """Make the parts of a step, around the runner and the scheduler."""
        runner, scheduler = self._runner, self._scheduler
        self._stats = EngineStats()
        self._clock = StepClock(self._stats, runner)
        self._blocks = BlockMeter(self._stats, scheduler, runner)
        self._requests = RequestTable(scheduler, runner, drafter)
        self._guard = ChangeGuard(self._requests.restart)
        self._postprocessor = Postprocessor(
            self.tokenizer, self._eos_token_ids, self._requests, self._stats
        )
        self._plan_runner = PlanRunner(
            runner, scheduler, self._postprocessor, drafter, self._clock, self._stats
        )
        self.delivery = Delivery()

    @property
    def cache(self) -> PagedCache:
        """The paged cache as it is now. The next step donates it: copy what must be kept."""
        return self._runner.state.cache

    @property
    def model(self) -> Llama:
        """The model with its weights as they are now."""
        return self._runner.model

    @property
    def weights(self) -> list[jax.Array]:
        """The arrays of the model, in the order of the leaves of its ``nnx.state``."""
        return list(self._runner.weights)

    @property
    def stats(self) -> EngineStats:
        """Totals since the engine was built, as they are now."""
        return totals(self._stats, self._runner, self._scheduler)

    @property
    def cache_use(self) -> float:
        """The fraction of blocks that requests hold, 0 to 1; what is only cached is free."""
        return 1 - self._runner.slots.num_free / self.num_blocks

    @property
    def sequences(self) -> list[Sequence]:
        """The samples that have not finished, the most senior first, for reading only.

        Those with a ``slot`` are resident, the others wait. Valid until the next step.
        """
        return self._scheduler.sequences

    @property
    def num_cache_resets(self) -> int:
        """How often all that was cached was given up: for new weights, or after a failure."""
        return self._runner.slots.num_resets

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or `step` has something to return."""
        return bool(self._requests.unfinished or self._requests.ended or self.delivery.has_kept)

    # Requests come and go

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
    ) -> str:
        """Queue a request; it runs in the steps that follow.

        Args:
          prompt: a text, or a dict with ``prompt`` or ``prompt_token_ids``, and perhaps
            ``cache_salt``: requests share cached blocks only where their salts are the same.
          params: how tokens are chosen; by default as in `get_default_sampling_params`.
          request_id: its name; by default its number.
          priority: lower is served first, and may take the blocks of others.
          timeout: seconds after which it ends where it stands, with finish_reason ``"abort"``.
          arrival_time: of ``time.perf_counter()``; by default now.
          explain: whether its outputs carry an `Explanation` of what it waited for.

        Returns:
          The request's id.

        Raises:
          ValueError: the prompt is empty, too long for the context or for the pool, or holds tokens
            out of range; a parameter does not suit the model; the id is taken. The message names
            the field and the bound, and the engine is as before.
        """
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
        )
        if explain:
            request.history = History(request.metrics.arrival_time)
        self._requests.add(request)
        return request_id

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Around calls of `add_request`: an exception within takes all of their requests back."""
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
        """End a request where it stands, and free its blocks.

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
        if request is not None:
            self.delivery.notify(request)
        return request

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's authors recommend, from its ``generation_config.json``.

        Greedy where they recommend nothing, or not to sample.

        Args:
          **changes: fields of `SamplingParams` to set otherwise.

        Raises:
          ValueError: a field is out of bounds.
        """
        recommended = self.tokenizer.sampling_defaults if self.tokenizer else {}
        return SamplingParams(**{**(recommended or {"temperature": 0.0}), **changes})

    # One step

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of all requests that got tokens, or that ended.

        An output holds everything so far. Nothing to do returns nothing. Requests that a call of
        `LLM.generate` or `LLM.stream` waits for go to that call.
        """
        self.delivery.deliver(self.advance())
        return [request.output() for request in self.delivery.take_kept()]

    def advance(self) -> list[Request]:
        """As `step`, but returns all requests that were touched, and makes no outputs."""
        clock = self._clock
        with self._guard.change():
            with clock.scheduling:
                plan = self._scheduler.schedule(self._runner.slots, time.perf_counter())
            with clock.running:
                tokens = self._plan_runner.run(plan)
            with clock.postprocessing:
                self._blocks.count_step(plan, tokens)
                touched = self._postprocessor.postprocess(plan, tokens)
        clock.count_step(plan, tokens)
        clock.update_costs(self._scheduler)
        return touched

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call a function now or, within a step, before the next change of the engine's state."""
        self._guard.when_idle(action)

    def exclusive(self, function: str) -> ExclusiveUse:
        """Lend the engine's parts to a search that fills slots and blocks by itself.

        Args:
          function: the name of the search, for messages.

        Raises:
          RuntimeError: a request is unfinished.
        """
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

    # Before and between

    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program that requests may need, so that none of them waits for it.

        Args:
          report: called with the number of programs done, how many there are, and the name of one
            that is done; by default a bar on stderr says so, on a terminal.

        Raises:
          RuntimeError: a request is unfinished.
        """
        self._requests.check_idle("warmup")
        if report is not None:
            self._runner.warmup(report)
            return
        with compile_bar() as show:
            self._runner.warmup(show)

    def reset_prefix_cache(self) -> None:
        """Let requests to come find no block of earlier ones."""
        self._runner.slots.reset_prefix_cache()

    def update_params(self, params: Llama | Any) -> None:
        """Go on with other weights, without compiling anything again, as after a training step.

        What the prefix cache holds is not found any more. Unfinished requests keep the tokens that
        they have, and are computed again under the new weights.

        Args:
          params: a `Llama`, its ``nnx.state``, or a list of the leaves of that, in their order; of
            the same structure and shapes as the engine's. Copied, in the dtypes and to the places
            of the old weights.

        Raises:
          ValueError: structure or shapes differ; nothing has changed then.
        """
        self._runner.replace_weights(place_like(self.model, params))
        if self._requests.note_new_weights():
            self._guard.recover()
        else:
            self._runner.slots.reset_prefix_cache()


def _bytes_on(device: Any, arrays: list[jax.Array]) -> int:
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)
