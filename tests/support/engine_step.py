"""Programs of an engine for described devices, made from shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from paged_jax import Llama
from paged_jax.engine.memory_plan import MemoryPlan
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.paged_model import create_cache
from paged_jax.models.tensor_parallel import TensorParallel, widen_config
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.programs import Call, ProgramKey, list_programs
from paged_jax.runner.sizes import Sizes
from paged_jax.runner.weights import Division
from paged_jax.sampling.params import MAX_LOGPROBS
from tests.support.kernel_cases import lowering_for


@dataclasses.dataclass(frozen=True)
class EngineStep:
    """A program that an engine runs on one or several devices, with its compiler options.

    Attributes:
      config: configuration of the whole model.
      pool_gigabytes: approximate size of K and V on each device.
      block_size: C.
      batch: S, number of slots, all of which decode.
      max_model_len: maximum number of tokens of a slot.
      scan_layers: whether layers are stacked.
      dtype: dtype of the weights.
      pool_dtype: dtype of K and V.
      num_devices: N.
      topology: XLA's name of the topology.
      num_states: number of entries for states of recurrent layers; None for one per slot.
      program: ``"decode"`` of all slots, or ``"prefill"`` of one chunk.
      backend: backend of the ops on a single device; None for the best available backend.
    """

    config: LlamaConfig
    pool_gigabytes: float
    block_size: int = 16
    batch: int = 64
    max_model_len: int = 8192
    scan_layers: bool = False
    dtype: str = "bfloat16"
    pool_dtype: str = "bfloat16"
    num_devices: int = 1
    topology: str = "1x1x1"
    num_states: int | None = None
    program: str = "decode"
    backend: str | None = None

    @classmethod
    def of_plan(cls, plan: MemoryPlan, **changes: Any) -> "EngineStep":
        """Return the program of the planned engine, with the planned number of blocks."""
        return cls(
            plan.config,
            # A hundred bytes more, to allow for rounding.
            (plan.footprint.pool_bytes(plan.num_engine_blocks) + 100) / 1e9,
            block_size=plan.sizes.block_size,
            batch=plan.sizes.num_slots,
            max_model_len=plan.sizes.max_model_len,
            scan_layers=plan.platform == "tpu",  # as in an engine on these devices
            dtype=plan.dtype,
            pool_dtype=plan.kv_dtype,
            num_devices=plan.num_devices,
            **changes,
        )

    @property
    def sizes(self) -> Sizes:
        """Sizes that determine the program, besides the number of blocks."""
        return Sizes(
            block_size=self.block_size,
            num_slots=self.batch,
            max_model_len=self.max_model_len,
            max_chunk=512,
            max_steps=8,
            num_drafts=0,
            max_logit_bias=32,
            max_stop_ids=16,
        )

    @property
    def wide(self) -> LlamaConfig:
        """Configuration with at least as many KV heads as devices."""
        return widen_config(self.config, self.num_devices)

    def lower(self, platform: str, devices: Any) -> jax.stages.Lowered:
        """Lower the program for ``"cuda"`` or ``"tpu"``, with its state donated."""
        devices, state = list(devices), self._state(platform)
        assert len(devices) == self.num_devices, len(devices)
        options = "gpu" if platform == "cuda" else platform
        if self.num_devices == 1:
            weights, treedef, graphdef = _split(self._model(self.config))
            place = SingleDeviceSharding(devices[0])
            key = ProgramKey(graphdef, treedef, False, self.backend, platform=options)
            places = place, place, place
        else:
            parallel = TensorParallel.create(
                "EngineStep", Mesh(np.asarray(devices), "x"), self.config
            )
            weights, key = self._divided(parallel, options)
            assert key.division is not None
            places = (
                [NamedSharding(parallel.mesh, spec) for spec in key.division.weights],
                key.division.shardings(state),
                NamedSharding(parallel.mesh, PartitionSpec()),
            )
        call = self._call(key)
        shapes = map(_placed, (weights, state, call.args), places)
        weights, state, args = shapes
        with lowering_for(platform):
            traced = call.program.trace(weights, state, *args, **call.static)
            return traced.lower(lowering_platforms=(platform,))

    def num_blocks(self, platform: str) -> int:
        """P, the number of blocks of pools with this size on each device."""
        low, high = 1, 2
        while self._pool_bytes(high, platform) <= self.pool_gigabytes * 10**9:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._pool_bytes(middle, platform) <= self.pool_gigabytes * 10**9
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _pool_bytes(self, num_blocks: int, platform: str) -> int:
        pools = self._cache(num_blocks, platform).group_pools
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools)) // self.num_devices

    def _cache(self, num_blocks: int, platform: str) -> Any:
        return jax.eval_shape(
            lambda: create_cache(
                self.wide,
                num_slots=self.batch,
                max_length=self.max_model_len,
                num_blocks=num_blocks,
                block_size=self.block_size,
                max_tokens=self.sizes.max_step_tokens,
                dtype=self.pool_dtype,
                num_states=self.num_states,
                platform="gpu" if platform == "cuda" else platform,
            )
        )

    def _state(self, platform: str) -> DecodeState:
        cache, sizes = self._cache(self.num_blocks(platform), platform), self.sizes
        create = functools.partial(
            DecodeState.create,
            vocab_size=self.config.vocab_size,
            max_logit_bias=sizes.max_logit_bias,
            max_stop_ids=sizes.max_stop_ids,
            max_forced=sizes.max_forced,
        )
        return jax.eval_shape(create, cache)

    def _model(self, config: LlamaConfig) -> Llama:
        make = functools.partial(
            Llama, config, dtype=self.dtype, scan_layers=self.scan_layers and config.can_scan_layers
        )
        return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))

    def _divided(self, parallel: TensorParallel, platform: str) -> tuple[list[Any], ProgramKey]:
        """Return the weights of all devices, as programs read them, and their key."""
        padded = parallel.device_config.vocab_size * self.num_devices
        whole = self._model(dataclasses.replace(parallel.wide_config, vocab_size=padded))
        weights, treedef, _ = _split(whole)
        names = list(named_arrays(nnx.state(whole)))
        specs = tuple(
            parallel.program_spec(name, x.shape) for name, x in zip(names, weights, strict=True)
        )
        graphdef = nnx.graphdef(self._model(self.config).make_shard(parallel))
        division = Division(parallel.mesh, specs)
        return weights, ProgramKey(graphdef, treedef, False, None, division, platform)

    def _call(self, key: ProgramKey) -> Call:
        programs, sizes = list_programs(key, self.sizes, MAX_LOGPROBS), self.sizes
        slots = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        if self.program == "decode":
            flag = jax.ShapeDtypeStruct((), jnp.bool_)
            num_steps = jax.ShapeDtypeStruct((), jnp.int32)
            return programs.decode.call(slots, num_steps, flag, flag)
        token_ids = jax.ShapeDtypeStruct((1, sizes.max_chunk), jnp.int32)
        row = jax.ShapeDtypeStruct((1,), jnp.int32)
        return programs.prefill.call(token_ids, row, row)


def _split(model: Llama) -> tuple[list[Any], Any, Any]:
    graphdef, state = nnx.split(model)
    return *jax.tree.flatten(state), graphdef


def _placed(shapes: Any, places: Any) -> Any:
    if isinstance(places, jax.sharding.Sharding):
        places = jax.tree.map(lambda _: places, shapes)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
    )
