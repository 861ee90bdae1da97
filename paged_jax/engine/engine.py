# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""`Engine`: continuous batching; requests enter and leave the batch at every step."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

import jax

from paged_jax.arguments import ArgumentError, names_arguments
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.engine.block_meter import GroupUse
from paged_jax.engine.config import EngineConfig, takes_options
from paged_jax.engine.core import EngineCore
from paged_jax.engine.delivery import Delivery
from paged_jax.engine.request_factory import Prompt
from paged_jax.engine.sleep import TAGS
from paged_jax.engine.transfers import allow_host_transfers
from paged_jax.engine.weight_swap import load_weights_for
from paged_jax.models.decoder import Decoder
from paged_jax.models.loading.conversion import NameMap
from paged_jax.models.paged_model import PagedModel
from paged_jax.monitoring import Status
from paged_jax.runner.processes import follow
from paged_jax.sampling.params import SamplingParams
from paged_jax.scheduler.engine_stats import EngineStats
from paged_jax.scheduler.explain import RequestHistory
from paged_jax.scheduler.outputs import RequestOutput
from paged_jax.scheduler.request import Request, Sequence


class Engine:
    """Engine for continuous batching: requests enter and leave the batch at every step.

    The arguments are the fields of `EngineConfig`. The engine is not thread-safe: calls that
    overlap raise RuntimeError. Use `AsyncEngine` to serve requests of many tasks.

    Attributes:
      core: the internal state of the engine; it is not a stable interface.
      delivery: passes requests with new tokens to the calls of `LLM` that wait for them.
      tokenizer: the tokenizer; None if there is none.
      config: the configuration of the model.
      generation_config: sampling defaults that come with the model, see `GenerationConfig`.
      eos_token_ids: ids of the end-of-sequence tokens.
      token_bias: biases that are added to the logits of every request.
      num_blocks: P, number of blocks in the pool of the first group of layers.
      pool_limit: what decided `num_blocks`: the slots, an option or the memory, as a text.
      block_size, max_num_seqs, enable_prefix_caching: see `EngineConfig`.
      max_model_len: maximum number of tokens in a sequence, prompt included.
      max_length: `max_model_len`, or fewer tokens if the pool has no room for them.
      grammars: compiler of the grammars of structured outputs, usable from other threads.

    Raises:
      ValueError: an option is out of bounds. The message names the option.

    Example:
      >>> engine = Engine(max_num_seqs=2)
      >>> request_id = engine.add_request("It is", SamplingParams(temperature=0, max_tokens=4))
      >>> while engine.has_unfinished:
      ...     outputs = engine.step()
      >>> outputs[0].request_id == request_id, len(outputs[0].outputs[0].token_ids)
      (True, 4)
    """

    @takes_options(EngineConfig)
    def __init__(self, config: EngineConfig):
        self.core = core = EngineCore.build(config)
        self.delivery = Delivery()
        self.tokenizer = core.loaded.tokenizer
        self.config = core.loaded.config
        self.generation_config = core.loaded.generation_config
        self.eos_token_ids = core.loaded.eos_token_ids
        self.token_bias = core.loaded.token_bias
        self.block_size = core.executor.sizes.block_size
        self.num_blocks = core.num_blocks
        self.pool_limit = core.pool_limit
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = core.executor.sizes.max_model_len
        self.max_length = core.max_length
        self.enable_prefix_caching = config.enable_prefix_caching
        self.grammars = core.grammars

    def __repr__(self) -> str:
        # Read only host state. A `repr` must neither wait for a step nor compile a program.
        num_unfinished = len(self.core.requests.unfinished)
        num_used = self.core.block_meter.num_held if num_unfinished else 0
        return (
            f"{type(self).__name__}({self.config.model_type}, {num_used} of {self.num_blocks} "
            f"blocks of {self.block_size} tokens in use, {num_unfinished} unfinished requests, "
            f"{self.max_num_seqs} slots, max_model_len={self.max_model_len}"
            f"{', asleep' if self.is_sleeping else ''})"
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running, or `step` still has an output to return."""
        return self.core.has_unfinished or bool(self.delivery.kept)

    # Requests

    @names_arguments
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        timeout: float | None = None,
        explain: bool = False,
        client: str = "",
        sample_offset: int = 0,
    ) -> str:
        """Create a request for a prompt, add it to the queue, and return the id of the request.

        Args:
          prompt: a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. With ``cache_salt``
            in a dict, the request shares cached blocks only with requests of the same salt.
          params: sampling parameters; by default `get_default_sampling_params`.
          request_id: an id that no unfinished request has; by default a number.
          priority: priority of the request; lower values are served first.
          arrival_time: time of arrival on the clock of `time.perf_counter`; now by default.
          timeout: seconds after arrival at which the request ends with its tokens so far.
          explain: whether the output has an `Explanation` of what the request waited for.
          client: name of the client. Clients of equal priority take turns for slots.
          sample_offset: index of the first sample. The index of a sample is part of its random
            seed: requests with the same prompt, seed and offset sample the same tokens.

        Raises:
          ValueError: the prompt is empty or has too many tokens or token ids out of range; a
            parameter is not possible with the model; or the id is taken. Then nothing has changed.
          EngineAsleepError: the engine sleeps.
          RuntimeError: this process follows another one, see `follow`.
        """
        core = self.core
        core.check_leads("add_request")
        core.sleep.check_awake("add_request")
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            raise ArgumentError("request", f"must be SamplingParams, got {params!r}.", "params")
        if request_id is None:
            request_id = core.requests.next_id()
        elif not isinstance(request_id, str):
            raise ArgumentError("request", f"must be a text, got {request_id!r}.", "request_id")
        request = core.request_factory.make_request(
            request_id,
            core.requests.num_added,
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
        core.add(request)
        return request_id

    @contextlib.contextmanager
    def all_or_none(self) -> Generator[None, None, None]:
        """Return a context manager that, on an exception, removes the requests added inside it."""
        requests = self.core.requests
        num_before, previous_ids = requests.num_added, set(requests.unfinished)
        try:
            yield
        except BaseException:
            for request_id in [name for name in requests.unfinished if name not in previous_ids]:
                self.end(request_id)
            requests.num_added = num_before
            raise

    def get_request(self, request_id: str) -> Request:
        """Return an unfinished request. Do not modify it.

        Raises:
          KeyError: no unfinished request has this id.
        """
        return self.core.requests.unfinished[request_id]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request and free its blocks; it keeps the tokens that it has generated so far.

        Returns:
          Its output, with finish_reason ``"abort"``; None if no unfinished request has this id.
        """
        request = self.end(request_id)
        return None if request is None else request.output()

    def end(self, request_id: str) -> Request | None:
        """Abort a request like `abort`, but return the `Request` instead of its output."""
        request = self.core.end(request_id)
        if request is not None:
            self.delivery.notify(request)
        return request

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters that the model's authors recommend.

        They come from ``generation_config.json``. Decoding is greedy unless this enables sampling.

        Args:
          **changes: values for fields of `SamplingParams` that replace the recommended values.

        Raises:
          ValueError: a field is out of bounds.
        """
        return SamplingParams(**self.generation_config.fill_in(changes, {"temperature": 0.0}))

    # Steps

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the outputs of requests that got tokens or ended.

        Each output contains all tokens so far. The list is empty if there is nothing to run.
        Outputs of requests from `LLM.generate` or `LLM.stream` are passed to the waiting call.

        Raises:
          EngineAsleepError: the engine sleeps.
        """
        updated: list[Request] = []
        pending: list[Request] = []
        try:
            updated = self.advance()
            self.delivery.deliver(updated)
            pending = self.delivery.kept
            outputs = [request.output() for request in pending]
            self.delivery.drop(pending)
            return outputs
        except BaseException:
            # The step was interrupted. The request table no longer has the requests that ended in
            # this step, so keep them in `delivery`. The next call of `step` returns them.
            self.delivery.deliver(updated)
            self.delivery.keep(pending)
            raise

    def advance(self) -> list[Request]:
        """Run one step, and return the requests that got tokens or ended, not their outputs."""
        return self.core.step()

    def when_idle(self, action: Callable[[], None]) -> None:
        """Call `action` now if no step runs, else before the next change of the engine's state."""
        self.core.guard.when_idle(action)

    def follow(self) -> None:
        """Run the programs that process 0 sends, until the engine of process 0 is closed.

        If the devices belong to several processes, each creates the engine with the same arguments.
        Process 0 accepts requests; the other processes call `follow`. See `paged_jax.distributed`.

        Raises:
          RuntimeError: this process is process 0, or has all devices of the engine.
          JaxRuntimeError: the connection to process 0 is lost.
        """
        if self.core.channel is None or self.core.is_leader:
            raise RuntimeError(
                "Engine.follow: this process must not be process 0 or the only process."
            )
        follow(self.core.executor, self.core.channel)

    @allow_host_transfers()
    def warmup(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program that requests may need, so that no request waits for compilation.

        Args:
          report: function that is called after each program with the number of compiled programs,
            the total number of programs, and the name of the program. By default, a progress bar is
            shown on a terminal or in a notebook.

        Raises:
          RuntimeError: a request is unfinished, or the engine sleeps.
        """
        self.core.check_leads("warmup")
        self.core.check_idle("warmup")
        if report is not None:
            self.core.runner.warmup(report)
            return
        status = Status(is_shown=self.core.options.show_progress)
        with status.bar("compiling", unit="program"):
            self.core.runner.warmup(status.move_to)

    # Weights and sleep

    def update_params(self, params: Decoder | Any, *, mapping: NameMap | None = None) -> None:
        """Replace the weights, for example after a training step.

        Usually, a compiled program copies the new weights into the memory of the old weights, which
        deletes the old arrays. Arrays of a `Decoder` that was passed to the constructor are not
        deleted, so their replacement needs additional memory. The prefix cache is emptied.
        Unfinished requests keep their tokens, and their K and V are computed again.

        An interruption (Ctrl-C) leaves the old or the new weights. If it comes after the deletion
        of the old arrays and before the new ones are in place, the engine sleeps without weights,
        as after ``sleep(2)``.

        Args:
          params: without `mapping`, a `Decoder` with the structure and shapes of the engine's
            model, its ``nnx.state``, or a list of the leaves of that state in order. With
            `mapping`, the parameters of another implementation of the same model: a module, its
            state, or a tree of arrays. Arrays are converted to the devices, dtypes and shardings of
            the old weights.
          mapping: maps the dotted path of each array in `params` to its Hugging Face name, such as
            ``{"layers.*.norm": "model.layers.*.input_layernorm.weight"}``. A ``*`` stands for a
            layer number; if only the Hugging Face name has a ``*``, the array contains all layers,
            stacked. With a value ``(name, axes)``, the array is transposed first. A dimension of
            the array may be split in two: ``[H, D, E]`` instead of ``[H * D, E]``. An array whose
            path is not in `mapping` must be named as in Hugging Face.

        Raises:
          ValueError: structure, names, shapes or formats differ. The old weights are unchanged.

        Example:
          >>> import jax.numpy as jnp
          >>> from paged_jax.models.parts.mlp import Dense
          >>> engine = Engine(max_num_seqs=2)
          >>> features = engine.config.layers[0].get(Dense).features
          >>> kernel = jnp.zeros((5, engine.config.hidden_size, features))
          >>> engine.update_params({"layers": {"gate": kernel}}, mapping={
          ...     "layers.gate": ("model.layers.*.mlp.gate_proj.weight", (0, 2, 1))})
          Traceback (most recent call last):
          ...
          paged_jax.models.errors.WeightsError: update_params: params must contain ...
        """
        self.core.check_one_process("update_params")
        self.core.replace_weights(self.core.weight_swap.prepare(params, mapping))

    @allow_host_transfers()
    def load_params(self, folder: str | Path) -> Decoder:
        """Load weights into host memory, for `update_params`. Any thread may call this.

        Args:
          folder: a folder (Hugging Face or Orbax) or GGUF file, with the engine's model structure.

        Raises:
          ValueError: the folder contains a different model, or its files are damaged.
          OSError: files are missing or cannot be read.
        """
        return load_weights_for(self.core.executor.weights.layout_model, folder)

    @allow_host_transfers()
    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that new requests find no blocks of earlier requests."""
        if not self.is_sleeping:  # A sleeping engine has no cache to reset.
            self.core.runner.reset_prefix_cache()

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps. Safe to read from other threads."""
        return bool(self.core.sleep.level)

    @property
    def sleep_level(self) -> int:
        """The level of the sleep, see `sleep`; 0 if awake. Safe to read from other threads."""
        return self.core.sleep.level

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of the engine until `wake_up`, for example for a training step.

        The pools are freed, including the prefix cache. Unfinished requests keep their tokens and
        continue after `wake_up`. Until then nothing runs, and new requests are rejected.

        Args:
          level: 1 keeps the weights in host memory. 2 discards them; then `update_params` must set
            new weights. Arrays of a `Decoder` that was passed to the constructor are not freed.

        Raises:
          ValueError: the level is neither 1 nor 2.

        Example:
          >>> engine = Engine(max_num_seqs=2)
          >>> engine.sleep()
          >>> engine.is_sleeping
          True
          >>> engine.wake_up()
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ArgumentError("Engine.sleep", f"must be 1 or 2, got {level!r}.", "level")
        self.core.check_one_process("sleep")
        with self.core.guard.change():
            self.core.sleep.begin(level)
            self.core.restart()

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """End a `sleep` with an empty cache; no program is compiled again.

        Args:
          tags: ``"weights"``, ``"kv_cache"`` or both (default). The engine needs both to wake up.

        Raises:
          ValueError: a tag is neither ``"weights"`` nor ``"kv_cache"``.
          RuntimeError: the weights were discarded and not replaced by `update_params`.
        """
        if isinstance(tags, str) or not set(tags or ()) <= set(TAGS):
            rule = f"must be a list with names from {' and '.join(TAGS)}, got {tags!r}."
            raise ArgumentError("Engine.wake_up", rule, "tags")
        if self.is_sleeping:
            with self.core.guard.change():
                self.core.sleep.end(tags or TAGS)
                self.core.restart()

    # State

    @property
    def cache(self) -> PagedCache:
        """The paged cache. Its arrays are valid until the next step, which donates them.

        Raises:
          EngineAsleepError: the engine sleeps and has no cache.
        """
        self.core.sleep.check_awake("cache")
        return self.core.runner.state.cache

    @property
    def model(self) -> PagedModel:
        """The model with its current weights. Their arrays are valid until `update_params`.

        Raises:
          EngineAsleepError: the engine sleeps, and its weights are not on the device.
          RuntimeError: the devices belong to several processes.
        """
        self.core.check_one_process("model")
        if not self.core.sleep.has_weights:
            self.core.sleep.check_awake("model")
        return self.core.executor.weights.model

    @property
    def weights(self) -> list[jax.Array]:
        """The arrays of the model, in the order of the leaves of its ``nnx.state``.

        They are valid until `update_params`. The list is empty if the device has no weights.

        Raises:
          RuntimeError: the devices belong to several processes.
        """
        self.core.check_one_process("weights")
        return self.core.executor.weights.originals

    @property
    def layout(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of `weights`."""
        return self.core.executor.weights.layout

    @property
    def weight_dtype(self) -> str:
        """The format of most weight matrices of the model, such as ``"bfloat16"`` or ``"int4"``."""
        return str(self.core.executor.weights.layout_model.matrix_formats)

    @property
    def stats(self) -> EngineStats:
        """Statistics since the engine was created."""
        core = self.core
        return dataclasses.replace(core.stats, compile_seconds=core.executor.compile_seconds)

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled. Safe to read from other threads."""
        return self.core.executor.is_compiling

    @property
    def cache_use(self) -> float:
        """Fraction of the blocks of the first group that requests use, 0 to 1.

        Blocks that are only cached do not count, nor do blocks that a queued step allocates.
        """
        first, *_ = self.core.group_use()
        return first.num_used / first.num_blocks

    @property
    def cache_groups(self) -> list[GroupUse]:
        """Use of the cache by each group of layers that keep the same tokens.

        The group with the most blocks is first; states of recurrent layers, if any, are last.
        """
        return self.core.group_use()

    @property
    def sequences(self) -> list[Sequence]:
        """The unfinished samples in the order of the queue: by priority, then by arrival.

        Samples with a ``slot`` run; the others wait. The list is valid until the next step.
        """
        return self.core.scheduler.sequences

    @property
    def num_cache_resets(self) -> int:
        """Number of times that the whole cache was emptied, due to new weights or a failure."""
        return self.core.runner.num_resets
