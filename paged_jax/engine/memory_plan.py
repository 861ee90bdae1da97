"""Plans the memory of an engine before anything is loaded: how many blocks and sequences fit.

The arithmetic is that of `paged_jax.engine.footprint`, by which an engine with ``memory_fraction``
chooses the size of its pool.
"""

import dataclasses
from typing import Any

from paged_jax.arguments import refuse_unknown
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.engine.config import (
    VLLM_NAMES,
    EngineConfig,
    check_options,
    option_specs,
    resolve_kv_dtype,
)
from paged_jax.engine.footprint import (
    Footprint,
    footprint,
    num_parameters,
    weight_bytes,
)
from paged_jax.models.config import LlamaConfig
from paged_jax.models.loading.parameters import resolve_dtype
from paged_jax.models.matrices import float_type
from paged_jax.models.tensor_parallel import shard_config
from paged_jax.runner.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What an engine takes of each of its devices, and what fits beside it.

    Attributes:
      config: the configuration of the model.
      num_devices: N, devices that compute the model together.
      shard: the configuration of what one of them computes.
      dtype: the type of the weights.
      kv_dtype: the type of K and V.
      platform: the platform that the engine runs on: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      sizes: sizes of the engine's programs.
      num_blocks: blocks that fit, of the first group of layers.
      memory: bytes that the engine may take of each device.
      footprint: bytes that it takes of each device.
    """

    config: LlamaConfig
    num_devices: int
    shard: LlamaConfig
    dtype: str
    kv_dtype: str
    platform: str
    sizes: Sizes
    num_blocks: int
    memory: int
    footprint: Footprint

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied ones count once."""
        return num_parameters(self.config)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in all layers, on each device."""
        return self.footprint.block // self.sizes.block_size

    @property
    def num_contiguous(self) -> int:
        """Sequences that the same bytes would hold if each got `max_model_len` tokens at once."""
        footprint, sizes = self.footprint, self.sizes
        return (self.memory - footprint.fixed) // (sizes.max_model_len * self.token_bytes)

    @property
    def num_engine_blocks(self) -> int:
        """Blocks of an engine's pool: no more than all of its slots at full length can use."""
        return min(self.num_blocks, self.footprint.most_blocks)

    @property
    def has_windows(self) -> bool:
        """Whether some layers keep no more than a window."""
        return any(group.window is not None for group in self.footprint.groups)

    def sequence_bytes(self, length: int) -> int:
        """Bytes of K and V of a sequence of so many tokens, on each device, when it holds most."""
        footprint, block_size = self.footprint, self.sizes.block_size
        return sum(g.block * g.num_held(length, block_size) for g in footprint.groups)

    def uniform_bytes(self, length: int) -> int:
        """What `sequence_bytes` would be if all layers kept all tokens."""
        return self.footprint.block * num_blocks_needed(length, self.sizes.block_size)

    def read_bytes(self, length: int) -> int:
        """Bytes of K and V that a token of a sequence attends to, with so many tokens in it."""
        windows = [length if g.window is None else g.window for g in self.footprint.groups]
        sizes = zip(self.footprint.groups, windows, strict=True)
        total = sum(group.block * min(length, window) for group, window in sizes)
        return total // self.sizes.block_size

    @property
    def num_copies(self) -> int:
        """Devices that have the same KV heads: more than one where there are too few heads."""
        return self.num_devices * self.shard.num_key_value_heads // self.config.num_key_value_heads

    def num_paged(self, length: int) -> int:
        """Sequences of so many tokens for whose blocks there is memory while none shares a block.

        If there are as many slots: pools of layers with a window are no larger than slots can use.
        """
        footprint, block_size = self.footprint, self.sizes.block_size
        taken = sum(
            (group.block + group.overhead) * group.num_held(length, block_size)
            for group in footprint.groups
        )
        return (self.memory - footprint.fixed) // taken

    def num_running(self, length: int) -> int:
        """Sequences of so many tokens that an engine runs at once."""
        footprint, block_size = self.footprint, self.sizes.block_size
        pools = zip(footprint.groups, footprint.group_sizes(self.num_blocks), strict=True)
        held = (size // group.num_held(length, block_size) for group, size in pools)
        return min(self.sizes.num_slots, *held)


def make_plan(
    config: LlamaConfig,
    memory_bytes: int,
    platform: str,
    **options: Any,
) -> MemoryPlan:
    """Compute what fits in so many bytes.

    Args:
      config: the configuration of the model.
      memory_bytes: bytes that the engine may take in all, of each device.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      **options: fields of `EngineConfig` that decide how much memory an engine takes.

    Raises:
      ValueError: an argument is out of bounds, the model cannot be divided so, or not even one
        block fits.

    Example:
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=172,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> plan = make_plan(config, 512 << 20, "cpu")
      >>> plan.num_parameters, plan.token_bytes, plan.num_blocks > 20_000
      (292800, 1280, True)
    """
    known = [each.name for each in option_specs() if each.decides_memory]
    unknown = [name for name in options if name not in known]
    refuse_unknown("plan", known, unknown, VLLM_NAMES)
    check_options("plan", options)
    num_slots = options.get("max_num_seqs", EngineConfig.max_num_seqs)
    # The plan is the same for any max_num_batched_tokens; this one suits all numbers of slots.
    options["max_num_batched_tokens"] = max(num_slots, EngineConfig.max_num_batched_tokens)
    engine = EngineConfig(**options)
    weights_dtype = resolve_dtype("plan", engine.dtype, config)
    pool_dtype = resolve_kv_dtype(engine.kv_dtype, float_type(weights_dtype, config), platform)
    sizes = engine.program_sizes("plan", config, num_eos_token_ids=len(config.eos_token_ids))
    shard = shard_config("plan", config, engine.tensor_parallel_size)
    taken = footprint(
        config,
        sizes,
        weights=weight_bytes(shard, weights_dtype, engine.tensor_parallel_size),
        dtype=weights_dtype,
        kv_dtype=pool_dtype,
        platform=platform,
        shard=shard,
    )
    taken.check_fits("plan: memory", memory_bytes)
    return MemoryPlan(
        config=config,
        num_devices=engine.tensor_parallel_size,
        shard=shard,
        dtype=weights_dtype.name,
        kv_dtype=pool_dtype.name,
        platform=platform,
        sizes=sizes,
        num_blocks=taken.num_blocks(memory_bytes),
        memory=memory_bytes,
        footprint=taken,
    )
