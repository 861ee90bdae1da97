"""Memory and speed of an engine, computed without loading a model.

Memory is computed as for an engine with ``memory_fraction``, see `paged_jax.engine.footprint`. A
lower bound for the time of a decode step follows from the sizes of the model and from published
properties of the device::

    seconds >= max(bytes / memory_rate, operations / operation_rate) + sent / link_rate

    bytes        bytes that a device reads: its weights (except for an embedding that is not also
                 the head), and K and V of all tokens that the sequences attend to. States of
                 recurrent layers count twice, because they are read and written.
    operations   2 per weight and sequence
    sent         bytes that each of N devices sends: 2 (N - 1) / N of the bytes of an all-reduce,
                 and (N - 1) / N of the bytes of an all-gather. This is optimal if the devices only
                 send to each other (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).
                 With network switches that compute sums, such as NVLink SHARP, a device sends half
                 as much in an all-reduce.

A step has 2 L + 1 all-reduces of ``[B, E]`` in float32 (two per layer and one for the embedding)
and an all-gather of the logits ``[B, V]``. A layer that runs attention and MLP in parallel, or has
only one of them, has only one all-reduce. A layer that normalises q and k over all heads together
has an additional all-reduce of two values per token, and so has a layer with sparse activations. If
the model has embeddings for each layer, they have one all-reduce in total. The latency of
collectives, a few microseconds each, is not published and not counted.

If each token uses k of X experts and the router chooses uniformly, a step with B tokens reads
``X (1 - (1 - k / X)^B)`` experts. This is an expected value, not a bound.

`paged_jax.dims` defines the letters. E is the hidden size, N the number of devices.
"""

import dataclasses
from typing import Any, NamedTuple

from paged_jax.arguments import refuse_unknown
from paged_jax.cache.retention import AllTokens
from paged_jax.cache.sequence_blocks import num_blocks_needed
from paged_jax.engine.config import VLLM_NAMES, EngineConfig
from paged_jax.engine.device_memory import DeviceMemory
from paged_jax.engine.footprint import (
    Footprint,
    footprint,
    num_parameters,
    weight_bytes,
    weight_layout,
)
from paged_jax.engine.pool_size import PoolSize, choose_pool_size, resolve_kv_dtype
from paged_jax.models.codecs.dtype_formats import float_type
from paged_jax.models.config import ModelConfig
from paged_jax.models.loading.parameters import resolve_dtype
from paged_jax.models.matrix_formats import MatrixFormats
from paged_jax.models.tensor_parallel import shard_config
from paged_jax.options import check_options, options_of
from paged_jax.runner.sizes import Sizes

# Bytes per element of the residual stream and the logits, which are float32.
_FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory that an engine uses on each device, and the number of sequences that fit.

    Attributes:
      config: configuration of the model.
      num_devices: N, number of devices that compute the model together.
      shard: configuration of the part of the model on one device.
      dtype: dtype of all parameters that are not quantised.
      formats: storage formats of the weight matrices.
      kv_dtype: dtype of K and V.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      sizes: sizes of the engine's programs.
      num_blocks: number of blocks of the first group of layers that fit.
      pool: number of blocks that an engine allocates, and what decides it.
      memory: bytes that the engine may use on each device.
      footprint: bytes that the engine uses on each device.
    """

    config: ModelConfig
    num_devices: int
    shard: ModelConfig
    dtype: str
    formats: MatrixFormats
    kv_dtype: str
    platform: str
    sizes: Sizes
    num_blocks: int
    pool: PoolSize
    memory: int
    footprint: Footprint

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model; tied parameters count once."""
        return num_parameters(self.config)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in all layers, on each device."""
        return self.footprint.block // self.sizes.block_size

    @property
    def num_contiguous(self) -> int:
        """Number of sequences that would fit without paging.

        Each sequence would then reserve memory for `max_model_len` tokens.
        """
        footprint, sizes = self.footprint, self.sizes
        return (self.memory - footprint.fixed) // (sizes.max_model_len * self.token_bytes)

    @property
    def num_engine_blocks(self) -> int:
        """Number of blocks that an engine allocates for the pool of its first group."""
        return self.pool.num_blocks

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window."""
        return any(group.retention.frees for group in self.footprint.groups)

    @property
    def keeps_less(self) -> bool:
        """Whether some layers do not keep all tokens: they have a window or are recurrent."""
        return any(group.retention != AllTokens() for group in self.footprint.groups)

    def sequence_bytes(self, length: int) -> int:
        """Return the peak bytes of cache that a sequence of `length` tokens uses on each device.

        The cache contains its K and V and its state of recurrent layers.
        """
        block_size = self.sizes.block_size
        return sum(g.block * g.num_held(length, block_size) for g in self.footprint.groups)

    def uniform_bytes(self, length: int) -> int:
        """Return the `sequence_bytes` that the model would have if all layers kept all tokens.

        A recurrent layer counts like an average attention layer.
        """
        num_blocks = num_blocks_needed(length, self.sizes.block_size)
        num_layers = max(sum(group.num_layers for group in self.footprint.token_groups), 1)
        num_fixed = sum(g.num_layers for g in self.footprint.groups if g.retention.is_fixed)
        return self.footprint.block * num_blocks * (num_layers + num_fixed) // num_layers

    def read_bytes(self, length: int) -> int:
        """Return the bytes of cache that a decode step reads and writes for one sequence.

        It reads the K and V that the last of `length` tokens attends to. It also reads the state of
        recurrent layers before this token, and writes the state after it.
        """
        groups, block_size = self.footprint.groups, self.sizes.block_size
        total = sum(g.block * g.retention.num_accessed(length, block_size) for g in groups)
        return total // block_size

    @property
    def num_copies(self) -> int:
        """Number of devices that store the same KV head.

        It is above 1 if there are more devices than KV heads.
        """
        kv, shard_kv = (config.layer_groups[0].kv for config in (self.config, self.shard))
        assert kv is not None and shard_kv is not None
        return self.num_devices * shard_kv.num_kv_heads // kv.num_kv_heads

    def num_paged(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that fit if they share no blocks.

        The result is for an engine with as many slots as the returned number. More slots would
        leave less memory, because the pools of layers with a window grow with the number of slots.
        """
        footprint, block_size = self.footprint, self.sizes.block_size
        bytes_per_sequence = sum(
            (group.block + group.overhead) * group.num_held(length, block_size)
            for group in footprint.groups
        )
        fixed_bytes = footprint.fixed - self.sizes.num_slots * footprint.sequence_state
        return (self.memory - fixed_bytes) // bytes_per_sequence

    def num_running(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that can run at the same time.

        It is limited by the pools of the engine and by its number of slots.
        """
        footprint, block_size = self.footprint, self.sizes.block_size
        group_sizes = footprint.group_sizes(self.num_engine_blocks)
        pools = zip(footprint.groups, group_sizes, strict=True)
        num_sequences = (size // group.num_held(length, block_size) for group, size in pools)
        return min(self.sizes.num_slots, *num_sequences)


def make_plan(
    config: ModelConfig,
    memory_bytes: int,
    platform: str,
    formats: MatrixFormats | None = None,
    *,
    memory_fraction: float | None = 1.0,
    share: float = 1.0,
    **options: Any,
) -> MemoryPlan:
    """Compute the number of blocks and sequences that fit in the memory of each device.

    Args:
      config: the configuration of the model.
      memory_bytes: bytes of memory of each device.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      formats: storage formats of the weight matrices in the files, see `read_formats`; None if the
        option `dtype` determines them.
      memory_fraction: the option of the engine. With None, the plan shows what fits in all of the
        memory, and the pool that an engine allocates without this option.
      share: fraction of the memory that JAX takes in the engine's process, see
        `server_memory_share`. It counts only if `memory_fraction` is None.
      **options: fields of `EngineConfig` on which the memory of an engine depends.

    Raises:
      ValueError: an argument is out of bounds, the model cannot be divided over the devices, or no
        block fits.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=172,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> plan = make_plan(config, 512 << 20, "cpu")
      >>> plan.num_parameters, plan.token_bytes, plan.num_blocks > 20_000
      (292800, 1280, True)
    """
    valid_names = [option.name for option in options_of(EngineConfig) if option.decides_memory]
    unknown = [name for name in options if name not in valid_names]
    refuse_unknown("plan", valid_names, unknown, VLLM_NAMES)
    check_options("plan", options, EngineConfig)
    num_slots = options.get("max_num_seqs", EngineConfig.max_num_seqs)
    # The plan does not depend on the option max_num_batched_tokens. The option must be at least the
    # number of slots, so set it to a valid value.
    options["max_num_batched_tokens"] = max(num_slots, EngineConfig.max_num_batched_tokens)
    engine = EngineConfig(**options)
    dtype = resolve_dtype("plan", engine.dtype, config)
    floats = float_type(dtype, config.dtype)
    pool_dtype = resolve_kv_dtype(engine.kv_dtype, floats, platform)
    sizes = engine.program_sizes(
        "plan", config, platform=platform, num_eos_token_ids=len(config.eos_token_ids)
    )
    shard = shard_config("plan", config, engine.tensor_parallel_size)
    if formats is None:
        formats = MatrixFormats.of_dtype(dtype, dataclasses.replace(shard, dtype=floats.name))
    engine_footprint = footprint(
        config,
        sizes,
        weights=weight_bytes(shard, floats, engine.tensor_parallel_size, formats),
        formats=formats,
        kv_dtype=pool_dtype,
        platform=platform,
        shard=shard,
    )
    budget = memory_bytes if memory_fraction is None else int(memory_fraction * memory_bytes)
    engine_footprint.check_fits("plan: memory", budget)
    total = int(share * memory_bytes) if memory_fraction is None else memory_bytes
    pool = choose_pool_size(
        platform,
        DeviceMemory(total, in_use=engine_footprint.weights),
        sizes,
        engine_footprint,
        memory_fraction=memory_fraction,
    )
    return MemoryPlan(
        config=config,
        num_devices=engine.tensor_parallel_size,
        shard=shard,
        dtype=floats.name,
        formats=formats,
        kv_dtype=pool_dtype.name,
        platform=platform,
        sizes=sizes,
        num_blocks=engine_footprint.num_blocks(budget),
        pool=pool,
        memory=budget,
        footprint=engine_footprint,
    )


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """Published memory size and speed of an accelerator.

    Attributes:
      platform: ``"gpu"`` or ``"tpu"``.
      memory: bytes of memory. A published GB counts as 10^9 bytes; devices have slightly more.
      memory_rate: bytes per second that the device reads from its memory.
      link_rate: bytes per second that the device sends to other devices, over all its links.
      operation_rate: dense bfloat16 operations per second.
    """

    platform: str
    memory: int
    memory_rate: float
    link_rate: float
    operation_rate: float


# The values are from NVIDIA's data sheets of the H100 (SXM) and H200, and from Google's Cloud TPU
# pages "TPU v5e" and "TPU v6e". Link rates are half of the published bidirectional rates: 900 GB/s
# for NVLink, 400 GB/s for v5e and 800 GB/s for v6e. The operation rates of the GPUs are half of the
# published rates with sparsity.
DEVICES = {
    "h100": DeviceSpec("gpu", 80 * 10**9, 3.35e12, 450e9, 989e12),
    "h200": DeviceSpec("gpu", 141 * 10**9, 4.8e12, 450e9, 989e12),
    "v5e": DeviceSpec("tpu", 16 * 10**9, 819e9, 200e9, 197e12),
    "v6e": DeviceSpec("tpu", 32 * 10**9, 1638e9, 400e9, 918e12),
}


class Collectives(NamedTuple):
    """Communication between devices in a decode step.

    Attributes:
      num_all_reduces: number of all-reduces in the step.
      num_all_gathers: number of all-gathers in the step.
      sent: bytes that each device sends in the step.
    """

    num_all_reduces: int
    num_all_gathers: int
    sent: int


class StepBound(NamedTuple):
    """Lower bounds for the time of a decode step, in seconds.

    Attributes:
      reading: seconds to read the weights and the cache from device memory.
      computing: seconds for matrix multiplications.
      sending: seconds for communication between devices.
    """

    reading: float
    computing: float
    sending: float

    @property
    def seconds(self) -> float:
        """Lower bound for the whole step, in seconds.

        It assumes that memory reads overlap with computation, and that communication overlaps with
        neither of them.
        """
        return max(self.reading, self.computing) + self.sending


def collectives(plan: MemoryPlan, batch: int) -> Collectives:
    """Return the collective operations of a decode step for `batch` sequences.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> collectives(make_plan(config, 1 << 28, "cpu", tensor_parallel_size=2), 1)
      Collectives(num_all_reduces=11, num_all_gathers=1, sent=3840)
    """
    num_devices = plan.num_devices
    if num_devices == 1:
        return Collectives(0, 0, 0)
    E = plan.config.hidden_size
    layer_sums = [size for spec in plan.config.layers for size in spec.all_reduces(E, num_devices)]
    layer_sums += _embedding_sums(plan.config)
    num_all_reduces, sums = len(layer_sums), sum(layer_sums)
    logits = num_devices * plan.shard.vocab_size
    num_bytes = _FLOAT_BYTES * batch * (2 * sums + logits) * (num_devices - 1) // num_devices
    return Collectives(num_all_reduces, 1, num_bytes)


def _embedding_sums(config: ModelConfig) -> list[int]:
    """List the all-reduces of the embeddings: the number of values per token in each."""
    if config.per_layer is None:
        return [config.hidden_size]
    return [config.hidden_size, config.num_hidden_layers * config.per_layer.size]


def step_bound(plan: MemoryPlan, device: DeviceSpec, batch: int, length: int) -> StepBound:
    """Return lower bounds for the time of a decode step.

    Args:
      plan: the memory plan of the model.
      device: speed of each device.
      batch: B, number of sequences.
      length: number of tokens in each sequence.
    """
    layouts = [
        weight_layout(plan.shard, plan.dtype, plan.num_devices, formats)
        for formats in (plan.formats, None)
    ]
    num_bytes, num_weights = (
        sum(
            fraction * x.size * (x.dtype.itemsize if counts_bytes else 1)
            for name, x in layout.items()
            for fraction in [_read_fraction(plan.config, name, experts)]
        )
        for counts_bytes, layout, experts in zip(
            (True, False), layouts, reversed(_expert_fractions(plan.config, batch)), strict=True
        )
    )
    return StepBound(
        reading=(num_bytes + batch * plan.read_bytes(length)) / device.memory_rate,
        computing=2 * batch * num_weights / device.operation_rate,
        sending=collectives(plan, batch).sent / device.link_rate,
    )


def _read_fraction(config: ModelConfig, name: str, experts: float) -> float:
    """Return the fraction of the parameter `name` that a decode step reads.

    `experts` is the fraction of the experts that the step uses. The result is `experts` for the
    weights of experts, 0 for an embedding that is not also the head, and 1 otherwise.
    """
    kind = name.rpartition(".")[2]
    is_head = config.tie_word_embeddings and not kind.startswith("embed_tokens_per_layer")
    if kind.startswith("embed_tokens") and not is_head:
        return 0
    return experts if kind.startswith("experts_") else 1


def _expert_fractions(config: ModelConfig, batch: int) -> tuple[float, float]:
    """Return the fractions of the experts that one token uses, and that a whole batch uses.

    The second fraction is an expected value, see the docstring of the module.

    In the example below, a token uses 4 of 32 experts, and 8 tokens use 21 of them on average.

    Example:
      >>> from paged_jax import LlamaConfig
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4,
      ...                      num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64)
      >>> [f"{part:.3f}" for part in _expert_fractions(config, 8)]
      ['0.125', '0.656']
    """
    experts = next((spec.experts for spec in config.layers if spec.experts is not None), None)
    if experts is None:
        return 1.0, 1.0
    per_token = experts.num_chosen / experts.num_experts
    return per_token, 1 - (1 - per_token) ** batch
