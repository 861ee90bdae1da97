"""The least time that a decode step can take on devices of known figures, from sizes alone.

    seconds >= max(bytes / memory_rate, operations / operation_rate) + sent / link_rate

    bytes        read by a device: its weights, of the embedding only the rows of the batch's
                 tokens, and K and V of all tokens of all sequences, or those in the window
    operations   two for each weight and each sequence that meet
    sent         by a device to others: 2 (N - 1) / N of the bytes of an all-reduce, (N - 1) / N of
                 those of an all-gather. Devices that only send to each other cannot do with less
                 (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009); switches that add up,
                 as NVLink SHARP does, halve an all-reduce.

A step has 2 L + 1 all-reduces of `[B, E]` in float32, two a layer and one of the embedding, and an
all-gather of the logits, `[B, V]` in float32. Layers whose attention and MLP run in parallel have
one, and norms over all heads take one of two numbers a token. To begin and end each of them takes
microseconds, which are not published and not counted here.

Of X experts a token passes through k, and B tokens read X (1 - (1 - k / X)^B) of them where they
choose evenly, on each device its part. That is what is to be expected, no bound.

Letters are those of `paged_jax.dims`; E is the hidden size, N the number of devices.
"""

import dataclasses
from typing import NamedTuple

from paged_jax.engine.footprint import weight_layout
from paged_jax.engine.memory_plan import MemoryPlan
from paged_jax.models.config import LlamaConfig

# Of the residual stream and of logits.
_FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Device:
    """What is published of an accelerator.

    Attributes:
      platform: ``"gpu"`` or ``"tpu"``.
      memory: bytes, where a GB is 10^9: a little less than there are.
      memory_rate: bytes a second that it reads from its memory.
      link_rate: bytes a second that it sends to others of its kind, over all of its links.
      operation_rate: operations a second in bfloat16, without sparsity.
    """

    platform: str
    memory: int
    memory_rate: float
    link_rate: float
    operation_rate: float


# NVIDIA's data sheets of H100 (SXM) and H200: NVLink has 900 GB/s, half of them each way, and the
# rates of operations are those with sparsity, halved. Google's pages "TPU v5e" and "TPU v6e" of
# Cloud TPU: interconnect "bidirectional (per chip)" of 400 and 800 GB/s, half of them each way.
DEVICES = {
    "h100": Device("gpu", 80 * 10**9, 3.35e12, 450e9, 989e12),
    "h200": Device("gpu", 141 * 10**9, 4.8e12, 450e9, 989e12),
    "v5e": Device("tpu", 16 * 10**9, 819e9, 200e9, 197e12),
    "v6e": Device("tpu", 32 * 10**9, 1638e9, 400e9, 918e12),
}


class Collectives(NamedTuple):
    """What devices send each other in a decode step.

    Attributes:
      num_all_reduces: sums over all devices.
      num_all_gathers: arrays put together from the parts of all devices.
      sent: bytes that each device sends.
    """

    num_all_reduces: int
    num_all_gathers: int
    sent: int


class StepBound(NamedTuple):
    """The least time of a decode step, in seconds, and what it is made of."""

    reading: float
    computing: float
    sending: float

    @property
    def seconds(self) -> float:
        """Of the whole step: devices read and compute at once, but wait for each other's sums."""
        return max(self.reading, self.computing) + self.sending


def collectives(plan: MemoryPlan, batch: int) -> Collectives:
    """What a decode step of so many sequences sends.

    Example:
      >>> from paged_jax.engine.memory_plan import make_plan
      >>> from paged_jax.models.config import LlamaConfig
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4)
      >>> collectives(make_plan(config, 1 << 28, "cpu", tensor_parallel_size=2), 1)
      Collectives(num_all_reduces=11, num_all_gathers=1, sent=3840)
    """
    num_devices = plan.num_devices
    if num_devices == 1:
        return Collectives(0, 0, 0)
    of_layer = _sums_of_layer(plan.config)
    num_all_reduces = plan.config.num_hidden_layers * len(of_layer) + 1
    sums = plan.config.num_hidden_layers * sum(of_layer) + plan.config.hidden_size
    logits = num_devices * plan.shard.vocab_size
    sent = _FLOAT_BYTES * batch * (2 * sums + logits) * (num_devices - 1) // num_devices
    return Collectives(num_all_reduces, 1, sent)


def _sums_of_layer(config: LlamaConfig) -> list[int]:
    """Of each all-reduce of a layer, how many numbers of a token are added up."""
    num_outputs = 1 if config.norm_placement == "parallel" else 2
    has_norms = config.qk_norm and config.qk_norm_scope == "projection"
    return [config.hidden_size] * num_outputs + [2] * has_norms


def step_bound(plan: MemoryPlan, device: Device, batch: int, length: int) -> StepBound:
    """The least time of a decode step.

    Args:
      plan: what is planned for each device.
      device: figures of each of them.
      batch: B, sequences.
      length: tokens of each sequence.
    """
    layout = weight_layout(plan.shard, plan.dtype, plan.num_devices)
    if not plan.config.tie_word_embeddings:
        del layout["embed_tokens"]
    of_token, of_batch = _parts_of_experts(plan.config, batch)
    num_bytes, num_weights = 0.0, 0.0
    for name, x in layout.items():
        is_of_experts = name.rpartition(".")[2].startswith("experts_")
        num_bytes += x.size * x.dtype.itemsize * (of_batch if is_of_experts else 1)
        num_weights += x.size * (of_token if is_of_experts else 1)
    return StepBound(
        reading=(num_bytes + batch * plan.read_bytes(length)) / device.memory_rate,
        computing=2 * batch * num_weights / device.operation_rate,
        sending=collectives(plan, batch).sent / device.link_rate,
    )


def _parts_of_experts(config: LlamaConfig, batch: int) -> tuple[float, float]:
    """Which part of the experts a token passes through, and which part is read for a batch.

    Example:
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4,
      ...                      num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64)
      >>> [f"{part:.3f}" for part in _parts_of_experts(config, 8)]
      ['0.125', '0.656']
    """
    if not config.num_experts:
        return 1.0, 1.0
    of_token = config.num_experts_per_tok / config.num_experts
    return of_token, 1 - (1 - of_token) ** batch
