"""Parts of an engine, made from its arguments, and properties that show their state.

`EngineParts.__init__` is long because it passes each argument to the part that uses it.
"""

import jax
import numpy as np

from paged_jax.arguments import ArgumentError
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.engine.config import EngineConfig, resolve_kv_dtype, takes_options
from paged_jax.engine.delivery import Delivery
from paged_jax.engine.drafts import Drafter
from paged_jax.engine.footprint import footprint
from paged_jax.engine.inputs import Inputs
from paged_jax.engine.loading import (
    find_eos_token_ids,
    find_mesh,
    load_generation_config,
    load_model,
    load_tokenizer,
)
from paged_jax.engine.pipeline import Pipeline
from paged_jax.engine.pool_size import choose_num_blocks
from paged_jax.engine.postprocess import Postprocessor
from paged_jax.engine.recovery import ChangeGuard
from paged_jax.engine.requests import RequestTable
from paged_jax.engine.run import PlanRunner
from paged_jax.engine.sleep import Sleep
from paged_jax.engine.stats import BlockMeter, EngineStats, GroupUse, StepClock, totals
from paged_jax.engine.transfers import own_transfers
from paged_jax.engine.weight_swap import WeightSwap
from paged_jax.kernels import check_backend_runs_on
from paged_jax.models.paged_model import PagedModel
from paged_jax.models.text.grammar import Grammars
from paged_jax.runner.channel import channel_between, least_of_processes
from paged_jax.runner.runner import ModelRunner
from paged_jax.scheduler.preemption import Preemption, PreemptionCosts
from paged_jax.scheduler.request import Sequence
from paged_jax.scheduler.scheduler import Scheduler

# Speed of copies between host and device, until the first swap is measured.
HOST_BYTES_PER_SECOND = 1e10


def preemption_over_processes(preemption: Preemption) -> Preemption:
    """Return the way of preemption for an engine over several processes: recomputing.

    Raises:
      ValueError: ``"swap"`` is asked for, but each process has only a part of a block.
    """
    if preemption == "swap":
        raise ArgumentError(
            "Engine",
            "must be 'recompute' or 'auto' over several processes, got 'swap'.",
            "preemption",
        )
    return "recompute"


class EngineParts:
    """The parts of an engine. `Engine`, which explains the arguments, makes them run.

    Attributes:
      tokenizer: the tokenizer; None if there is none.
      config: the configuration of the model.
      generation_config, token_bias: the authors' defaults, and the biases of every request.
      block_size: C, tokens in a block.
      num_blocks: P, blocks in the pool; in that of the first group, where layers differ.
      max_num_seqs: S, samples that run at once.
      max_model_len: most tokens of a sequence, prompt included.
      max_length: the same, or fewer for which the blocks suffice.
      enable_prefix_caching: whether requests share the blocks of prompts that begin alike.
      grammars: grammars of the forms that texts must have; other threads may compile some.
      delivery: hands on requests that have made progress.
    """

    @takes_options(EngineConfig)
    @own_transfers()
    def __init__(self, config: EngineConfig):
        self.tokenizer = load_tokenizer(config.model, config.tokenizer)
        generation = self.generation_config = load_generation_config(config.model, self.tokenizer)
        weights, parallel = load_model(
            config.model,
            dtype=config.dtype,
            backend=config.backend,
            mesh=find_mesh(config.mesh, config.tensor_parallel_size),
            check_replicas=config.check_replicas,
        )
        self.config = weights.layout_model.config
        self.block_size, self.max_num_seqs = config.block_size, config.max_num_seqs
        self.enable_prefix_caching = config.enable_prefix_caching
        self._eos_token_ids = find_eos_token_ids(self.config, self.tokenizer, generation)
        self.token_bias = generation.token_bias(self._eos_token_ids, self.config.vocab_size)
        sizes = config.program_sizes(
            "Engine",
            self.config,
            num_eos_token_ids=len(self._eos_token_ids),
            num_token_biases=len(self.token_bias.all_ids),
        )
        self.max_model_len = sizes.max_model_len
        device = weights.device
        check_backend_runs_on("Engine", config.backend, device.platform)
        float_dtype = weights.layout_model.float_dtype
        cache_dtype = resolve_kv_dtype(config.kv_dtype, float_dtype, device.platform)
        taken = footprint(
            self.config,
            sizes,
            weights=weights.bytes_on(device),
            dtype=weights.layout_model.weight_dtype,
            kv_dtype=cache_dtype,
            platform=device.platform,
            shard=None if parallel is None else parallel.device_config,
        )
        self.num_blocks = choose_num_blocks(
            device,
            sizes,
            taken,
            num_blocks=config.num_blocks,
            memory_fraction=config.memory_fraction,
        )
        channel = channel_between(weights.arrays[0].devices())
        self._is_over_processes = channel is not None
        self._is_leader = not self._is_over_processes or jax.process_index() == 0
        preemption = config.preemption
        if self._is_over_processes:
            preemption = preemption_over_processes(preemption)
            self.num_blocks = least_of_processes(self.num_blocks)
        self._group_sizes = taken.group_sizes(self.num_blocks)
        backend = None if self.tokenizer is None else self.tokenizer.backend
        self.grammars = Grammars(backend, self.config.vocab_size, self._eos_token_ids)
        self._runner = ModelRunner(
            weights,
            sizes,
            self.num_blocks,
            cache_dtype=cache_dtype,
            cascade=config.uses_cascade(self.config, device.platform),
            backend=config.backend,
            eos_token_ids=self._eos_token_ids,
            token_bias=self.token_bias,
            on_compile=config.on_compile,
            channel=channel,
            is_leader=self._is_leader,
        )
        self._scheduler = Scheduler(
            config.max_num_seqs,
            self.num_blocks,
            config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_chunk=sizes.max_chunk,
            max_steps=config.steps_per_dispatch,
            runs_ahead=not config.num_speculative_tokens,  # guesses are made from the tokens before
            enable_prefix_caching=config.enable_prefix_caching,
            preemption=preemption,
            costs=PreemptionCosts(
                seconds_per_block=taken.block / HOST_BYTES_PER_SECOND,
                max_swapped_blocks=int(config.swap_space * 2**30) // taken.block,
            ),
            groups=self.config.layer_groups,
        )
        in_pool = self._scheduler.block_budget.max_length
        self.max_length = min(self.max_model_len, in_pool or self.max_model_len)
        self._inputs = Inputs(
            tokenizer=self.tokenizer,
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            max_length=self.max_length,
            seed=config.seed,
            grammars=self.grammars,
        )
        is_shared = isinstance(config.model, PagedModel)
        self._connect(Drafter(config.num_speculative_tokens), are_weights_shared=is_shared)

    def _connect(self, drafter: Drafter, *, are_weights_shared: bool) -> None:
        """Make the parts of a step, around the runner and the scheduler."""
        runner, scheduler = self._runner, self._scheduler
        self._stats = EngineStats()
        self._clock = StepClock(self._stats, runner)
        self._blocks = BlockMeter(self._stats, scheduler, runner)
        self._requests = RequestTable(scheduler, runner, drafter)
        self._guard = ChangeGuard(self._restart)
        self._sleep = Sleep(runner)
        self._weight_swap = WeightSwap(runner, are_shared=are_weights_shared)
        self._postprocessor = Postprocessor(
            self.tokenizer, self._eos_token_ids, self._requests, self._stats
        )
        self._plan_runner = PlanRunner(
            runner, scheduler, self._postprocessor, drafter, self._clock, self._stats
        )
        self._pipeline = Pipeline(scheduler, runner, self._plan_runner, self._clock)
        self.delivery = Delivery()

    def _restart(self) -> None:
        """Empty the device, and begin again with the tokens that requests have."""
        self._pipeline.clear()
        self._sleep.notice_lost_weights()
        self._requests.restart()

    @property
    def cache(self) -> PagedCache:
        """The paged cache as it is now. The next step donates it: copy what must be kept.

        Raises:
          EngineAsleepError: the engine sleeps, and has none.
        """
        self._sleep.check_awake("cache")
        return self._runner.state.cache

    @property
    def model(self) -> PagedModel:
        """The model with its present weights. Copy arrays that you keep past `update_params`.

        Raises:
          EngineAsleepError: the engine sleeps, and its weights are not on the device.
          RuntimeError: its devices are those of several processes.
        """
        self._check_alone("model")
        if not self._sleep.has_weights:
            self._sleep.check_awake("model")
        return self._runner.weights.model

    @property
    def weights(self) -> list[jax.Array]:
        """The arrays of the model, in the order of the leaves of its ``nnx.state``.

        Valid until `update_params`. None while the engine sleeps without weights on the device.

        Raises:
          RuntimeError: the devices are those of several processes.
        """
        self._check_alone("weights")
        return self._runner.weights.originals

    @property
    def layout(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and places of `weights`, which may be on several devices."""
        return self._runner.weights.layout

    @property
    def weight_dtype(self) -> np.dtype:
        """The type of the weights."""
        return self._runner.weights.layout_model.weight_dtype

    @property
    def stats(self) -> EngineStats:
        """Totals since the engine was built, as they are now."""
        return totals(self._stats, self._runner, self._scheduler)

    @property
    def is_compiling(self) -> bool:
        """Whether a program is compiled at present. Other threads may ask."""
        return self._runner.is_compiling

    @property
    @own_transfers()
    def cache_use(self) -> float:
        """The fraction of blocks that requests hold, 0 to 1; what is only cached is free.

        While the device works ahead, it is that of the last step: this waits for nothing.
        """
        if self._pipeline.is_ahead:
            return self._blocks.num_held / self.num_blocks
        return 1 - self._runner.slots.num_free / self.num_blocks

    @property
    def cache_groups(self) -> list[GroupUse]:
        """Blocks of each group of layers that keep the same tokens, that of most tokens first.

        One group, the whole model, unless windows differ. As `cache_use`, it waits for nothing.
        """
        num_used = round(self.cache_use * self.num_blocks)  # first: it counts those of all groups
        counted = self._blocks if self._pipeline.is_ahead else self._runner.slots
        free = [self.num_blocks - num_used, *counted.others_free]
        groups, sizes = self.config.layer_groups, self._group_sizes
        return [
            GroupUse(group.sliding_window, len(group.layers), size, size - num_free)
            for group, size, num_free in zip(groups, sizes, free, strict=True)
        ]

    @property
    def sequences(self) -> list[Sequence]:
        """The samples that have not finished, the most senior first, for reading only.

        Those with a ``slot`` are running, the others wait. Valid until the next step.
        """
        return self._scheduler.sequences

    @property
    def num_cache_resets(self) -> int:
        """How often all that was cached was given up: for new weights, or after a failure."""
        return self._runner.slots.num_resets

    def _check_leads(self, function: str) -> None:
        if not self._is_leader:
            raise RuntimeError(
                f"Engine.{function}: this process must be the one that schedules, process 0, got "
                "one that follows. Call follow here."
            )

    def _check_alone(self, function: str) -> None:
        if self._is_over_processes:
            raise RuntimeError(
                f"Engine.{function}: all devices of the engine must be of this process, got those "
                "of several. Make a new engine in each."
            )
