"""`EngineCore`: the step of continuous batching, and the objects that it uses.

    schedule       `paged_jax.scheduler` chooses the sequences of the step, and allocates blocks
    run            `paged_jax.runner` prefills chunks, forks samples and decodes
    postprocess    `Postprocessor` appends tokens to samples, and finishes complete samples

Each step queues the programs of the next step before it reads its own tokens. So the device decodes
while the host converts tokens to text. If the scheduler needs the tokens to plan the next step, the
step queues nothing.

    device   | step 1 | step 2 | step 3 |
    host     queue 2, read 1 | text of 1, queue 3, read 2 | text of 2, ...

The requests on the host contain all data that is needed to recompute the state on the device. So no
request is lost if a step is interrupted by Ctrl-C or by a lack of memory.
"""

import functools
import time
from typing import NamedTuple

import jax

from paged_jax.arguments import ArgumentError
from paged_jax.cache.blocks.state_tables import state_interval
from paged_jax.engine.block_meter import BlockMeter, GroupUse
from paged_jax.engine.change_guard import ChangeGuard
from paged_jax.engine.config import EngineConfig
from paged_jax.engine.device_memory import device_memory
from paged_jax.engine.drafts import Drafter
from paged_jax.engine.footprint import Footprint, footprint
from paged_jax.engine.loaded_model import LoadedModel
from paged_jax.engine.mask_clock import MaskClock
from paged_jax.engine.numerics import uses_cascade
from paged_jax.engine.pool_size import PoolSize, choose_pool_size, resolve_kv_dtype
from paged_jax.engine.postprocess import Postprocessor
from paged_jax.engine.request_factory import RequestFactory
from paged_jax.engine.request_table import RequestTable
from paged_jax.engine.sleep import Sleep
from paged_jax.engine.step_clock import StepClock
from paged_jax.engine.transfers import allow_host_transfers
from paged_jax.engine.weight_swap import NewWeights, WeightSwap
from paged_jax.kernels import check_backend_runs_on
from paged_jax.models.text.grammar import GrammarCompiler
from paged_jax.runner.decoding import StepTokens
from paged_jax.runner.executor import Executor, QueuedResult
from paged_jax.runner.processes import (
    Channel,
    LeadingExecutor,
    channel_between,
    minimum_of_processes,
)
from paged_jax.runner.runner import ModelRunner
from paged_jax.runner.stored_programs import FirstPrograms
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.request import Request, Sequence
from paged_jax.scheduler.scheduler import Preemption, PreemptionCosts, Scheduler
from paged_jax.scheduler.step_plan import StepPlan

# Assumed speed of copies between host and device, used until the first swap has been measured.
HOST_BYTES_PER_SECOND = 1e10


class PendingStep(NamedTuple):
    """A step that is queued on the device, before the host has read its tokens.

    Attributes:
      plan: the plan of the step.
      result: the sampled tokens: a `QueuedResult` on the device. If the step verified draft tokens,
        it is a `StepTokens` that is already on the host. None if no sequence decodes.
    """

    plan: StepPlan
    result: QueuedResult | StepTokens | None


class EngineCore:
    """The internal state of an `Engine`: model, scheduler, runner, requests and statistics.

    Attributes:
      options: the options of the engine.
      loaded: the model with its tokenizer.
      executor: holds the weights, the compiled programs and the state on the device.
      runner: runs the programs of the executor on sequences.
      scheduler: chooses the sequences of each step.
      num_blocks: P, number of blocks in the pool of the first group of layers.
      pool_limit: what decided `num_blocks`, as a text.
      max_length: maximum number of tokens of a sequence, limited by the context and the pool.
      channel: sends messages to the other processes; None if this process has all devices.
      is_leader: whether this process schedules; the other processes run the programs it sends.
      grammars: compiler of the grammars of structured outputs, usable from other threads.
      request_factory: creates requests from prompts.
      requests: the unfinished requests.
      guard: allows one state change at a time, and restarts the engine if one is interrupted.
      stats: totals since the engine was created, without `compile_seconds`.
      clock: measures the phases of a step.
      mask_clock: measures how long the host takes to compute the token masks of grammars.
      block_meter: counts used blocks after each step.
      postprocessor: appends tokens to samples.
      drafter: drafts tokens for speculative decoding.
      weight_swap: replaces the weights.
      sleep: frees the device memory from `Engine.sleep` until `Engine.wake_up`.
    """

    @classmethod
    @allow_host_transfers()
    def build(cls, options: EngineConfig) -> "EngineCore":
        """Load a model, and create an engine core with its scheduler and the state on the device.

        Raises:
          ValueError: an option is not possible with the model, its devices or their memory.
          OSError: files of the model are missing or cannot be read.
        """
        first_programs = FirstPrograms(vars(options))
        loaded = LoadedModel.load(options)
        weights, model = loaded.weights, loaded.weights.layout_model
        sizes = options.program_sizes(
            "Engine",
            loaded.config,
            platform=weights.device.platform,
            num_eos_token_ids=len(loaded.eos_token_ids),
            num_token_biases=len(loaded.token_bias.all_ids),
        )
        device = weights.device
        check_backend_runs_on("Engine", options.backend, device.platform)
        cache_dtype = resolve_kv_dtype(options.kv_dtype, model.float_dtype, device.platform)
        memory = footprint(
            loaded.config,
            sizes,
            weights=weights.bytes_on(device),
            formats=model.matrix_formats,
            kv_dtype=cache_dtype,
            platform=device.platform,
            shard=weights.device_config,
        )
        pool = choose_pool_size(
            device.platform,
            device_memory(device),
            sizes,
            memory,
            num_blocks=options.num_blocks,
            memory_fraction=options.memory_fraction,
        )
        channel = channel_between(weights.arrays[0].devices())
        if channel is not None:
            min_blocks = minimum_of_processes(pool.num_blocks)
            if min_blocks < pool.num_blocks:
                pool = PoolSize(min_blocks, "the limit of another process")
        make = Executor
        if channel is not None and jax.process_index() == 0:
            make = functools.partial(LeadingExecutor, channel=channel)
        executor = make(
            weights,
            sizes,
            pool.num_blocks,
            cache_dtype=cache_dtype,
            cascade=uses_cascade(options, loaded.config, device.platform),
            backend=options.backend,
            on_compile=options.on_compile,
            first_programs=first_programs,
        )
        return cls(options, loaded, executor, memory, channel, pool.limit)

    def __init__(
        self,
        options: EngineConfig,
        loaded: LoadedModel,
        executor: Executor,
        memory: Footprint,
        channel: Channel | None,
        pool_limit: str,
    ):
        self.options = options
        self.loaded = loaded
        self.executor = executor
        has_snapshots = any(group.has_snapshots for group in loaded.config.cache_groups)
        interval = state_interval(executor.sizes.block_size) if has_snapshots else None
        self.runner = runner = ModelRunner(
            executor, loaded.eos_token_ids, loaded.token_bias, interval
        )
        self.num_blocks = executor.num_blocks
        self.pool_limit = pool_limit
        self.channel = channel
        self.is_leader = channel is None or jax.process_index() == 0
        self.stats = EngineStats()
        self.scheduler = scheduler = self._make_scheduler(memory, interval)
        max_model_len = executor.sizes.max_model_len
        self.max_length = min(max_model_len, scheduler.block_budget.max_length or max_model_len)
        backend = None if loaded.tokenizer is None else loaded.tokenizer.backend
        self.grammars = GrammarCompiler(backend, loaded.config.vocab_size, loaded.eos_token_ids)
        self.request_factory = RequestFactory(
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.config.vocab_size,
            max_model_len=max_model_len,
            max_length=self.max_length,
            seed=options.seed,
            grammars=self.grammars,
        )
        self.drafter = Drafter(options.num_speculative_tokens, self.stats, interval)
        self.requests = RequestTable(scheduler, runner)
        self.guard = ChangeGuard(self.restart)
        self.clock = StepClock(self.stats, runner)
        self.mask_clock = MaskClock(scheduler.lookahead, scheduler.max_steps)
        self.block_meter = BlockMeter(self.stats, scheduler, runner)
        self.postprocessor = Postprocessor(
            loaded.tokenizer, loaded.eos_token_ids, self.requests, self.stats
        )
        self.weight_swap = WeightSwap(executor, are_shared=loaded.is_shared)
        self.sleep = Sleep(executor)
        self._ahead: PendingStep | None = None

    def _make_scheduler(self, memory: Footprint, state_interval: int | None) -> Scheduler:
        options, executor, config = self.options, self.executor, self.loaded.config
        return Scheduler(
            options.max_num_seqs,
            executor.num_blocks,
            executor.sizes.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_chunk=executor.sizes.max_chunk,
            max_steps=options.steps_per_dispatch,
            has_drafts=options.num_speculative_tokens > 0,
            enable_prefix_caching=options.enable_prefix_caching,
            preemption=_preemption_mode(options, is_over_processes=self.channel is not None),
            costs=PreemptionCosts(
                seconds_per_block=memory.block / HOST_BYTES_PER_SECOND,
                max_swapped_blocks=int(options.swap_space * 2**30) // memory.block,
            ),
            groups=config.cache_groups,
            state_interval=state_interval,
            stats=self.stats,
        )

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is queued already, so it was planned without the latest tokens."""
        return self._ahead is not None

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has requests to run, or ended requests that it has not returned yet.

        The second case occurs if a step was interrupted after a request had ended.
        """
        return bool(self.requests.unfinished or self.requests.ended)

    def step(self) -> list[Request]:
        """Run one step, and return the requests that got tokens or ended.

        Raises:
          EngineAsleepError: the engine sleeps.
          RuntimeError: another call is changing the state of the engine at the moment.
        """
        self.sleep.check_awake("step")
        trace = jax.profiler.StepTraceAnnotation("engine step", step_num=self.stats.num_steps)
        with self.guard.change(), trace:
            try:
                updated = self._run_step()
            except Exception:
                self.stats.num_failed_steps += 1
                raise
        self.clock.update_costs(self.scheduler)
        ended_requests = self.requests.ended
        try:
            self.requests.ended = []
            return updated
        except BaseException:
            self.requests.ended = ended_requests
            raise

    def _run_step(self) -> list[Request]:
        """Run one step, and return the requests that got tokens or ended in it."""
        clock = self.clock
        clock.start_step()
        pending, self._ahead = self._ahead, None
        if pending is None:
            pending = self._schedule()
        plan = pending.plan
        with clock.scheduling:
            next_plan = self.scheduler.lookahead.next_plan(plan, time.perf_counter())
        with clock.running:
            if next_plan is not None:
                self._ahead = self._queue(next_plan)
            tokens = self._read(pending)
        if tokens is not None:
            self.mask_clock.note_read(plan, int(tokens.num_steps))
        if tokens is not None and not tokens.ok:
            # The step needed more free blocks than there were. Plan no step ahead, so that the
            # scheduler can preempt sequences.
            self.scheduler.lookahead.close()
        with clock.postprocessing:
            self.block_meter.count_step(plan, tokens)
            updated = self.postprocessor.postprocess(plan, tokens)
        clock.count_step(plan, tokens, is_ahead=self.is_ahead)
        self._drop_ended()
        return updated

    def _schedule(self) -> PendingStep:
        """Plan the next step after the tokens of all earlier steps are known, and queue it."""
        with self.clock.scheduling:
            plan = self.scheduler.schedule(self.runner, time.perf_counter())
        self.requests.note_start(plan)
        with self.clock.running:
            return self._queue(plan)

    def _queue(self, plan: StepPlan) -> PendingStep:
        """Queue the programs of a plan on the device: prefill, fork and decode."""
        with self.clock.prefilling:
            self._prefill(plan.chunks)
            self.runner.fork(plan.forks)
        with self.clock.decoding:
            return PendingStep(plan, self._decode(plan) if plan.decodes else None)

    def _prefill(self, chunks: list[tuple[Sequence, int]]) -> None:
        self.runner.prefill([chunk for chunk in chunks if not _is_scored(chunk[0])])
        for sequence, count in chunks:
            if _is_scored(sequence):
                scores = self.runner.score(sequence, count)
                self.postprocessor.append_prompt_logprobs(sequence, scores)
            sequence.advance(count)
            self.runner.publish(sequence)

    def _decode(self, plan: StepPlan) -> QueuedResult | StepTokens:
        # A step that was planned ahead gets no draft tokens, because the host does not know the
        # latest tokens yet, which it needs to draft the next ones.
        if not plan.is_ahead:
            num_planned = sum(count for _, count in plan.chunks) + len(plan.decodes)
            max_tokens = self.scheduler.max_num_batched_tokens - num_planned
            drafts = self.drafter.drafts(plan.decodes, max_tokens)
            if drafts is not None:
                tokens = self.runner.verify(plan, drafts)
                if tokens.ok:
                    self.drafter.count(drafts, tokens.num_new)
                    return tokens
        return self.runner.decode(plan)

    def _read(self, pending: PendingStep) -> StepTokens | None:
        """Wait for the sampled tokens of a step and return them; None if no sequence decodes.

        Raises:
          RuntimeError: a plan that was not made ahead had too few free blocks for even one token
            per sequence.
        """
        plan, result = pending
        with self.clock.decoding:
            self.executor.check()
            tokens = self.executor.read(result) if isinstance(result, QueuedResult) else result
        if tokens is not None and not tokens.num_steps and not plan.is_ahead:
            raise RuntimeError(
                "Engine: the scheduler must leave enough free blocks for one token per sequence."
            )
        return tokens

    def _drop_ended(self) -> None:
        """Ignore the result of the step that is queued ahead if all its sequences have ended."""
        pending = self._ahead
        if pending is not None and all(sequence.slot is None for sequence in pending.plan.decodes):
            self._ahead = None

    def restart(self) -> None:
        """Discard the state on the device, and queue all unfinished requests again.

        The requests keep their tokens. The K and V of these tokens are computed again.
        """
        self._ahead = None
        self.sleep.notice_lost_weights()
        self.requests.restart()

    def add(self, request: Request) -> None:
        """Add a request to the queue of the scheduler.

        Raises:
          ValueError: the request needs more blocks or slots than the engine has, or its id is
              taken.
        """
        self.scheduler.check(request.sequences)
        with self.guard.change():
            self.requests.add(request)

    def end(self, request_id: str) -> Request | None:
        """Abort a request, free its blocks and return it; None if its id is unknown.

        The request keeps the tokens that it has generated so far.
        """
        request = self.requests.unfinished.get(request_id)
        if request is None:
            return self.requests.take_ended(request_id)
        with self.guard.change():
            self.requests.end(request, "abort")
            self._drop_ended()
        return request

    @allow_host_transfers()
    def group_use(self) -> list[GroupUse]:
        """Return the number of used blocks per group of layers, without waiting for the device.

        If the model has recurrent layers, the last entry counts their used states.
        """
        source = self.block_meter if self.is_ahead else self.runner
        groups = self.loaded.config.cache_groups
        group_uses: list[GroupUse] = []
        for group, size, free in zip(
            groups, self.executor.pool_sizes, source.free_blocks, strict=True
        ):
            rule = group.retention
            group_uses.append(GroupUse(rule.label, rule.text, group.num_layers, size, size - free))
        return group_uses

    def replace_weights(self, new: NewWeights) -> None:
        """Replace the weights by `new`, the result of `weight_swap.prepare`.

        Unfinished requests are restarted, and the prefix cache is emptied.
        """
        with self.guard.change():
            # Call `note_new_weights` before the weights are replaced. After this call, digests
            # depend on the new weights, so the prefix cache finds no blocks of the old weights.
            has_unfinished = self.requests.note_new_weights()
            self.weight_swap.replace(new)
            self.sleep.weights_replaced()
            if has_unfinished or self.sleep.level:
                self.restart()
            else:
                self.runner.reset_prefix_cache()

    def check_idle(self, function: str) -> None:
        """Check that the engine is awake and has no unfinished request.

        Raises:
          EngineAsleepError: the engine sleeps.
          RuntimeError: a request is unfinished.
        """
        self.sleep.check_awake(function)
        self.requests.check_idle(function)

    def check_leads(self, function: str) -> None:
        """Check that this process is process 0, which runs the scheduler.

        Raises:
          RuntimeError: this process is not process 0.
        """
        if not self.is_leader:
            raise RuntimeError(
                f"Engine.{function}: the caller must be process 0, which schedules, got another "
                "process. Call Engine.follow in this process."
            )

    def check_one_process(self, function: str) -> None:
        """Check that all devices of the engine belong to this process.

        Raises:
          RuntimeError: some devices of the engine belong to other processes.
        """
        if self.channel is not None:
            raise RuntimeError(
                f"Engine.{function}: all devices of the engine must belong to this process, got "
                "devices of several processes. Make a new engine in each process."
            )


def _preemption_mode(options: EngineConfig, *, is_over_processes: bool) -> Preemption:
    """Return ``options.preemption``, or ``"recompute"`` with several processes.

    Raises:
      ValueError: the option is ``"swap"`` with several processes. Swapping is not possible there,
        because each process has only a part of each block.
    """
    if not is_over_processes:
        return options.preemption
    if options.preemption == "swap":
        raise ArgumentError(
            "Engine",
            "must be 'recompute' or 'auto' over several processes, got 'swap'.",
            "preemption",
        )
    return "recompute"


def _is_scored(sequence: Sequence) -> bool:
    """Return whether the log-probabilities of the prompt are computed during its prefill.

    Only the first sequence of a request with `prompt_logprobs` computes them.
    """
    return sequence.request.prompt_logprobs is not None and sequence.index == 0
