"""Continuous batching: requests join and leave a running batch at every step.

A step is `schedule -> run -> postprocess`:

    schedule       who runs: `paged_jax.scheduler`, which drives the cache as it decides
    run            chunks of prompts, forks of samples, some steps of decoding: `paged_jax.runner`
    postprocess    tokens to samples: text, stop strings, log-probabilities; who is done leaves

The tokens of requests on the host are the truth, and what the device holds can be computed from
them again. So a step that is cut short, by Ctrl-C or for lack of memory, loses no request.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from paged_jax.cache.blocks import num_blocks_needed
from paged_jax.cache.digests import PrefixChain, root_digest
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.checks import ArgumentError
from paged_jax.engine.arguments import check_arguments, program_sizes
from paged_jax.engine.footprint import footprint, resolve_kv_dtype
from paged_jax.engine.inputs import Inputs, Prompt
from paged_jax.engine.ngram import NgramIndex
from paged_jax.engine.pool_size import choose_num_blocks
from paged_jax.engine.postprocess import Postprocessor
from paged_jax.kernels import backend_over_devices, check_backend_runs_on
from paged_jax.models.llama import Llama
from paged_jax.models.loading.pretrained import bundled_folder
from paged_jax.models.text.tokenizer import Tokenizer
from paged_jax.runner import MAX_NUM_BATCHED_TOKENS, Draw, ModelRunner, StepTokens
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.history import History, describe_match
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request, Sample
from paged_jax.scheduler.scheduler import Plan, Preemption, PreemptionCosts, Scheduler
from paged_jax.scheduler.sequence import Sequence

# Between host and device, until the first swap is measured.
HOST_BYTES_PER_SECOND = 1e10


@dataclasses.dataclass
class EngineStats:
    """Totals of an engine. Rates are made of times in seconds that leave compilation out.

    Attributes:
      num_steps: of the engine; each may decode several tokens of a sequence.
      num_prompt_tokens: of prompts, computed; those found in the prefix cache come on top.
      num_generated_tokens: drawn.
      num_decode_tokens: drawn in dispatches that did not compile.
      prefill_seconds: in programs that prefill.
      decode_seconds: in programs that decode, until their tokens were on the host.
      host_seconds: of steps, outside of those programs; of which
      schedule_seconds: planning, with what the plan asks of the cache, and
      postprocess_seconds: tokens to text, ends of requests.
      compile_seconds: spent in compiling (first calls of programs).
      first_token_seconds: from the arrival of the first request to its first token, with the
        compilation that it waited for.
      peak_num_blocks: most blocks held at once at the end of a step.
      num_preemptions: times that a sequence lost its blocks to others.
      num_swap_preemptions: of these, times that they were copied to host memory.
      num_recomputed_tokens: computed again after that.
      num_queried_tokens: looked up in the prefix cache.
      num_cached_tokens: found there.
      num_draft_tokens: guessed by speculation.
      num_accepted_tokens: of these, right.
      sharing: of the blocks that all sequences would hold without sharing any, the fraction that
        sharing saved, over all steps (Kwon et al., 2023, section 6.3).
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    schedule_seconds: float = 0.0
    postprocess_seconds: float = 0.0
    compile_seconds: float = 0.0
    first_token_seconds: float = 0.0
    peak_num_blocks: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    sharing: float = 0.0


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
        self.tokenizer = _load_tokenizer(model, tokenizer)
        if not isinstance(model, Llama):
            model = Llama.from_pretrained(model, dtype=dtype, sharding=sharding)
        self.config = model.config
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.enable_prefix_caching = enable_prefix_caching
        self._num_drafts = num_speculative_tokens
        eos_token_ids = {
            *self.config.eos_token_ids,
            *(self.tokenizer.eos_token_ids if self.tokenizer else ()),
        }
        # A tokenizer may have tokens that the model does not.
        self._eos_token_ids = frozenset(
            token_id for token_id in eos_token_ids if 0 <= token_id < self.config.vocab_size
        )
        weights = jax.tree.leaves(nnx.state(model))
        self._device = next(iter(weights[0].devices()))
        check_backend_runs_on("Engine", backend, self._device.platform)
        if len(weights[0].sharding.device_set) > 1:
            backend = backend_over_devices("Engine", backend, self._device.platform)
        cache_dtype = resolve_kv_dtype(kv_dtype, weights[0].dtype, self._device.platform)
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
        taken = footprint(
            self.config,
            sizes,
            weights=_bytes_on(self._device, weights),
            dtype=weights[0].dtype,
            kv_dtype=cache_dtype,
            platform=self._device.platform,
        )
        self.num_blocks = choose_num_blocks(
            self._device, sizes, taken, num_blocks=num_blocks, memory_fraction=memory_fraction
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
            cascade=self._choose_cascade(cascade_attention),
            backend=backend,
            eos_token_ids=self._eos_token_ids,
            draw_of=_draw_of,
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
        self._postprocessor = Postprocessor(self.tokenizer, self._eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._ngrams: dict[Sequence, NgramIndex] = {}
        self._num_requests = 0
        self._weights_version = 0
        # Requests that ended in a step that was cut short, to be told of in the next.
        self._ended: list[Request] = []
        # Whether a change of state goes on, and whether one was begun and not finished.
        self._is_changing = self._is_broken = False
        self._stats = EngineStats()
        # Tokens that took the prefill_seconds of the stats.
        self._num_prefilled = 0
        # Blocks that sharing saved, and blocks without sharing, summed over steps.
        self._num_saved = 0
        self._num_unshared = 0

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
        scheduled = self._scheduler.stats
        return dataclasses.replace(
            self._stats,
            compile_seconds=self._runner.compile_seconds,
            num_preemptions=scheduled.num_preemptions,
            num_swap_preemptions=scheduled.num_swap_preemptions,
            num_recomputed_tokens=scheduled.num_recomputed_tokens,
            num_queried_tokens=scheduled.num_queried_tokens,
            num_cached_tokens=scheduled.num_cached_tokens,
            sharing=self._num_saved / max(1, self._num_unshared),
        )

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
        """Whether any request waits or runs."""
        return bool(self._requests or self._ended)

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
        number = self._num_requests
        if request_id is None:
            request_id = next(
                name for i in itertools.count(number) if (name := str(i)) not in self._requests
            )
        elif not isinstance(request_id, str):
            raise ArgumentError("request", f"must be a text, got {request_id!r}.", "request_id")
        request = self._inputs.request(
            request_id,
            number,
            prompt,
            params,
            priority=priority,
            arrival_time=time.perf_counter() if arrival_time is None else arrival_time,
            timeout=timeout,
        )
        if explain:
            request.history = History(request.metrics.arrival_time)
        self._scheduler.add(self._sequences_of(request))
        self._requests[request_id] = request
        self._num_requests += 1
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request where it stands, and free its blocks.

        Returns:
          What it has, with finish_reason ``"abort"``; None if no such request is unfinished.
        """
        request = self.end(request_id)
        return None if request is None else request.output()

    def end(self, request_id: str) -> Request | None:
        """As `abort`, without making an output."""
        request = self._requests.get(request_id)
        if request is None:
            ended = [request for request in self._ended if request.request_id == request_id]
            self._ended = [request for request in self._ended if request not in ended]
            return ended[0] if ended else None
        with self._changing():
            self._drop(request, "abort")
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

        An output holds everything so far. Nothing to do returns nothing.
        """
        return [request.output() for request in self.advance()]

    def advance(self) -> list[Request]:
        """As `step`, without making outputs."""
        stats = self._stats
        with self._changing():
            with _Timer(self._runner) as scheduling:
                plan = self._scheduler.schedule(self._runner.slots, time.perf_counter())
            busy = stats.prefill_seconds + stats.decode_seconds
            with _Timer(self._runner) as running:
                tokens = self._run(plan)
            busy = stats.prefill_seconds + stats.decode_seconds - busy
            with _Timer(self._runner) as postprocessing:
                touched = self._postprocess(plan, tokens)
        stats.num_steps += 1
        stats.schedule_seconds += scheduling.seconds
        stats.postprocess_seconds += postprocessing.seconds
        if not running.has_compiled:
            stats.host_seconds += running.seconds - busy
        stats.host_seconds += scheduling.seconds + postprocessing.seconds
        return touched

    def _run(self, plan: Plan) -> StepTokens | None:
        self._note_start(plan)
        waited = self._runner.wait_seconds
        with _Timer(self._runner) as prefilling:
            self._prefill(plan)
            self._runner.slots.fork(plan.forks)
        with _Timer(self._runner) as decoding:
            tokens = self._decode(plan) if plan.decodes else None
            self._runner.check()
        # What decoding is queued behind is waited for only then, and is not its own time.
        waited = self._runner.wait_seconds - waited
        has_compiled = prefilling.has_compiled or decoding.has_compiled
        if plan.chunks:
            self._stats.prefill_seconds += 0.0 if has_compiled else prefilling.seconds + waited
            self._update_costs(0 if has_compiled else sum(n for _, n in plan.chunks))
        # The time of the first tokens is not known apart from that of compiling.
        if tokens is not None and not decoding.has_compiled:
            self._stats.decode_seconds += decoding.seconds - waited
            self._stats.num_decode_tokens += int(tokens.num_new.sum())
        return tokens

    def _update_costs(self, num_tokens: int) -> None:
        """Tell the scheduler what preemption costs here, from all that was measured so far."""
        costs, slots = self._scheduler.costs, self._runner.slots
        self._num_prefilled += num_tokens
        if self._num_prefilled:
            costs.seconds_per_token = self._stats.prefill_seconds / self._num_prefilled
        if slots.num_swapped_blocks:
            costs.seconds_per_block = slots.swap_seconds / slots.num_swapped_blocks

    def _note_start(self, plan: Plan) -> None:
        now = time.perf_counter()
        for sequence in [*(sequence for sequence, _ in plan.chunks), *plan.decodes]:
            request = _request_of(sequence)
            if request.metrics.first_scheduled_time is None:
                request.mark(first_scheduled_time=now)
                request.num_cached_tokens = sequence.num_computed
                if request.history is not None:
                    request.history.prefix_match = self._describe_match(request)

    def _describe_match(self, request: Request) -> str:
        if not self.enable_prefix_caching:
            return "nothing was looked up: the engine runs without prefix caching"
        if request.prompt_logprobs is not None:
            return "nothing was looked up: log-probabilities of a prompt need all of it computed"
        return describe_match(
            len(request.prompt_token_ids), request.num_cached_tokens, self.block_size
        )

    def _prefill(self, plan: Plan) -> None:
        scored = [chunk for chunk in plan.chunks if _is_scored(chunk[0])]
        self._runner.prefill([chunk for chunk in plan.chunks if not _is_scored(chunk[0])])
        for sequence, count in scored:
            scores = self._runner.score(sequence, count)
            self._postprocessor.append_prompt_logprobs(
                _request_of(sequence), scores, start=sequence.num_computed, count=count
            )
        for sequence, count in plan.chunks:
            sequence.advance(count)
            self._runner.slots.publish(sequence)

    def _decode(self, plan: Plan) -> StepTokens:
        with_top = any(_request_of(s).params.logprobs is not None for s in plan.decodes)
        if self._num_drafts:
            drafts = [self._draft(sequence) for sequence in plan.decodes]
            num_drafts = sum(map(len, drafts))
            num_others = sum(count for _, count in plan.chunks) + len(drafts)
            is_in_budget = num_drafts + num_others <= self._scheduler.max_num_batched_tokens
            # Fewer guesses than rows are not worth giving up several steps in one dispatch.
            if is_in_budget and num_drafts >= len(drafts):
                tokens = self._runner.verify(plan.decodes, drafts, with_top=with_top)
                if tokens.ok:
                    self._stats.num_draft_tokens += num_drafts
                    self._stats.num_accepted_tokens += int(np.maximum(tokens.num_new - 1, 0).sum())
                    return tokens
        tokens = self._runner.decode(
            plan.decodes, plan.num_steps, leave_on_stop=plan.leave_on_stop, with_top=with_top
        )
        if not tokens.num_steps:
            raise RuntimeError("Engine: the scheduler must leave blocks for a step, got none.")
        return tokens

    def _draft(self, sequence: Sequence) -> list[int]:
        index = self._ngrams.setdefault(sequence, NgramIndex())
        index.extend(sequence.token_ids)
        return index.guess(self._num_drafts)

    # What a step has drawn

    def _postprocess(self, plan: Plan, tokens: StepTokens | None) -> list[Request]:
        touched = dict.fromkeys(self._ended)
        for sequence in plan.expired:
            _sample_of(sequence).end("abort", "deadline")
            self._ngrams.pop(sequence, None)
            touched[_request_of(sequence)] = None
        self._note_blocks(plan, tokens)
        if tokens is not None:
            now = time.perf_counter()
            for row, sequence in enumerate(plan.decodes):
                self._take(sequence, tokens, row, now)
                touched[_request_of(sequence)] = None
        for request in touched:
            if request.is_finished:
                self._forget(request)
        self._ended.clear()
        return list(touched)

    def _take(self, sequence: Sequence, tokens: StepTokens, row: int, now: float) -> None:
        """Give a sample the tokens of its row, up to the one that stops it."""
        request, sample = _request_of(sequence), _sample_of(sequence)
        if sample.finish_reason is not None:
            return  # another row of its request has just ended all of them
        try:
            taken = self._postprocessor.append_tokens(request, sample, tokens, row)
        except FloatingPointError as error:
            self._drop(request, "error", str(error))
            return
        if not taken:
            return
        sequence.append(taken)
        self._stats.num_generated_tokens += len(taken)
        if request.metrics.first_token_time is None:
            request.mark(first_token_time=now)
            self._stats.num_prompt_tokens += sequence.num_prompt_tokens - request.num_cached_tokens
            if not self._stats.first_token_seconds:
                self._stats.first_token_seconds = now - request.metrics.arrival_time
        if sample.finish_reason is not None:
            self._scheduler.finish(self._runner.slots, sequence)
            self._ngrams.pop(sequence, None)

    def _note_blocks(self, plan: Plan, tokens: StepTokens | None) -> None:
        lengths = {sequence: sequence.num_computed for sequence in self._scheduler.residents}
        if tokens is not None:
            for sequence, num_new in zip(plan.decodes, tokens.num_new, strict=False):
                lengths[sequence] += int(num_new)
        self._count_blocks(sum(num_blocks_needed(n, self.block_size) for n in lengths.values()))

    def _count_blocks(self, num_unshared: int) -> None:
        """Count the blocks that are held, and those that would be if none were shared."""
        num_held = self.num_blocks - self._runner.slots.num_free
        self._stats.peak_num_blocks = max(self._stats.peak_num_blocks, num_held)
        self._num_saved += num_unshared - num_held
        self._num_unshared += num_unshared

    # The ends of requests

    def _drop(self, request: Request, finish_reason: str, stop_reason: str | None = None) -> None:
        """End a request that has not finished by itself."""
        for sequence in self._scheduler.abort(self._runner.slots, request):
            self._ngrams.pop(sequence, None)
        for sample in request.samples:
            sample.end(finish_reason, stop_reason)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.mark(finished_time=time.perf_counter())
        self._requests.pop(request.request_id, None)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Around changes of state. One that is cut short, by Ctrl-C for example, is made good by
        beginning anew: at once, or, should that be cut short too, before the next change."""
        if self._is_changing:
            raise RuntimeError("Engine: a call must end before the next begins, got one within it.")
        try:
            self._is_changing = True
            if self._is_broken:
                self._recover()
            self._is_broken = True
            try:
                yield
            except BaseException:
                self._recover()
                raise
            self._is_broken = False
        finally:
            self._is_changing = False

    def _recover(self) -> None:
        """Empty the device, and let every request wait again that has not finished."""
        self._is_broken = True
        for request in list(self._requests.values()):
            if request.is_finished:
                self._ended.append(request)
                self._forget(request)
        self._runner.reset()
        self._ngrams.clear()
        self._scheduler.restart(
            [
                sequence
                for request in self._requests.values()
                for sequence in self._sequences_of(request)
            ]
        )
        self._is_broken = False

    def _sequences_of(self, request: Request) -> list[Sequence]:
        """What the scheduler sees of the samples of a request that have not finished."""
        # Log-probabilities of a prompt need all of it computed.
        is_cached = self.enable_prefix_caching and request.prompt_logprobs is None
        sequences = []
        for sample in request.samples:
            if sample.finish_reason is None:
                sequence = Sequence(
                    request,
                    sample.index,
                    [*request.prompt_token_ids, *sample.token_ids],
                    len(request.prompt_token_ids) + request.max_tokens,
                    self._chain_of(request) if is_cached else None,
                    request.history,
                )
                sequence.num_prompt_tokens = len(request.prompt_token_ids)
                sequences.append(sequence)
        return sequences

    def _chain_of(self, request: Request) -> PrefixChain:
        # Neither yesterday's weights nor another tenant's prompts are found.
        root = root_digest(self._weights_version.to_bytes(8, "little"), request.cache_salt)
        return PrefixChain(root, self.block_size)

    # Before and between

    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program that requests may need, so that none of them waits for it.

        Args:
          report: called with the number of programs done, how many there are, and the name of one
            that is done; by default a bar on stderr says so, on a terminal.

        Raises:
          RuntimeError: a request is unfinished.
        """
        self._check_idle("warmup")
        if report is not None:
            self._runner.warmup(report)
            return
        with tqdm(desc="compiling", unit="program", disable=None) as bar:

            def show(done: int, total: int, name: str) -> None:
                bar.total = total
                bar.set_postfix_str(name, refresh=False)
                bar.update(done - bar.n)

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
        if isinstance(params, Llama):
            params = nnx.state(params)
        if isinstance(params, nnx.State):
            names, own = (_names_of(state) for state in (params, nnx.state(self.model)))
            if names != own:
                differing = sorted(set(names) ^ set(own))[:3]
                raise ValueError(
                    "update_params: params must have the names of the model's, got others: "
                    f"{', '.join(differing)}."
                )
        elif not isinstance(params, list | tuple):
            raise ValueError(
                "update_params: params must be a Llama, its nnx.state, or a list of its leaves, "
                f"got {type(params).__name__}."
            )
        new, old = jax.tree.leaves(params), self._runner.weights
        shapes = [jnp.shape(x) for x in new], [x.shape for x in old]
        if shapes[0] != shapes[1]:
            differing = next(
                (pair for pair in zip(*shapes, strict=False) if pair[0] != pair[1]), None
            )
            raise ValueError(
                f"update_params: params must be {len(old)} arrays of the model's shapes, got "
                f"{len(new)}" + (f", and {differing[0]} for {differing[1]}." if differing else ".")
            )
        self._runner.replace_weights(
            [
                jax.device_put(jnp.asarray(x, y.dtype), y.sharding, may_alias=False)
                for x, y in zip(new, old, strict=True)
            ]
        )
        self._weights_version += 1
        for request in self._requests.values():
            if request.prompt_logprobs is not None:
                request.prompt_logprobs = [None]  # not half of them from either
        if self._requests:
            self._recover()
        else:
            self._runner.slots.reset_prefix_cache()

    def _check_idle(self, function: str) -> None:
        if self._requests:
            raise RuntimeError(
                f"{function}: no request may be unfinished, got {len(self._requests)}. "
                "Finish or abort them."
            )

    # Sizes

    def _choose_cascade(self, cascade_attention: bool | None) -> bool:
        has_window = self.config.sliding_window is not None
        if cascade_attention and has_window:
            raise ValueError(
                "Engine: cascade_attention must be False for a model with a sliding window."
            )
        if cascade_attention is None:
            on_cpu = self._device.platform == "cpu"
            return on_cpu and self.enable_prefix_caching and not has_window
        return cascade_attention


class _Timer:
    """Seconds of a `with` block in which the runner did not compile."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.seconds = 0.0
        self.has_compiled = False

    def __enter__(self) -> "_Timer":
        self._start, self._compiled = time.perf_counter(), self._runner.compile_seconds
        return self

    def __exit__(self, *exception: object) -> None:
        compiled = self._runner.compile_seconds - self._compiled
        self.has_compiled = compiled > 0
        self.seconds = 0.0 if compiled else time.perf_counter() - self._start


def _names_of(state: Any) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in paths]


def _request_of(sequence: Sequence) -> Request:
    return cast(Request, sequence.request)


def _sample_of(sequence: Sequence) -> Sample:
    return _request_of(sequence).samples[sequence.index]


def _draw_of(sequence: Sequence) -> Draw:
    request = _request_of(sequence)
    return Draw(request.params, request.seed, sequence.index)


def _is_scored(sequence: Sequence) -> bool:
    """Whether the log-probabilities of its prompt are asked for: of the first sample only."""
    return _request_of(sequence).prompt_logprobs is not None and sequence.index == 0


def _load_tokenizer(
    model: str | Path | Llama | None, tokenizer: str | Path | Tokenizer | None
) -> Tokenizer | None:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is not None:
        return Tokenizer.from_folder(tokenizer)
    if isinstance(model, Llama):
        return None
    folder = bundled_folder() if model is None else Path(model)
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None


def _bytes_on(device: Any, arrays: list[jax.Array]) -> int:
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)
