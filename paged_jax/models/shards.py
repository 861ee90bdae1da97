"""What one of N devices holds of a model that they compute together, in shapes.

Tensor parallelism divides a model over its heads, its intermediate features or its experts, and its
vocabulary (Megatron-LM, arXiv 1909.08053): each device computes with a narrower model,
`shard_config`, of which the hidden states are whole. Where there are fewer KV heads than devices,
several devices have K and V of the same head: the model is widened first, see `widen_config`, to
more rows that compute the same function.
"""

import dataclasses

from paged_jax.arguments import check_positive
from paged_jax.models.config import LlamaConfig


def widen_config(config: LlamaConfig, num_devices: int) -> LlamaConfig:
    """The configuration with at least as many KV heads as devices, each of them equally often.

    Example:
      >>> config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2)
      >>> [widen_config(config, n).num_key_value_heads for n in (1, 2, 4, 8)]
      [2, 2, 4, 8]
    """
    num_heads = max(config.num_key_value_heads, num_devices)
    return dataclasses.replace(config, num_key_value_heads=num_heads)


def shard_config(function: str, config: LlamaConfig, num_devices: int) -> LlamaConfig:
    """The configuration of what one of `num_devices` computes.

    Args:
      function: the name that an error begins with.
      config: configuration of the whole model.
      num_devices: N, devices that compute it together.

    Returns:
      Heads, KV heads, intermediate features and vocabulary of one device; the vocabulary is padded
      to a multiple of N. `num_experts` is that of all, among which each device routes.

    Raises:
      ValueError: the model cannot be divided so.

    Example:
      >>> config = LlamaConfig(vocab_size=510, hidden_size=64, intermediate_size=192,
      ...                      num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2)
      >>> shard = shard_config("plan", config, 4)
      >>> shard.num_attention_heads, shard.num_key_value_heads, shard.intermediate_size
      (2, 1, 48)
      >>> shard.vocab_size
      128
    """
    check_positive(function, tensor_parallel_size=num_devices)
    _check_divides(function, config, num_devices)
    wide = widen_config(config, num_devices)
    return dataclasses.replace(
        wide,
        vocab_size=-(-wide.vocab_size // num_devices),
        # Not divided where no layer has an MLP of it.
        intermediate_size=wide.intermediate_size // (1 if config.num_experts else num_devices),
        shared_expert_intermediate_size=wide.shared_expert_intermediate_size // num_devices,
        num_attention_heads=wide.num_attention_heads // num_devices,
        num_key_value_heads=wide.num_key_value_heads // num_devices,
    )


def _check_divides(function: str, config: LlamaConfig, num_devices: int) -> None:
    mlp = ("num_experts", "shared_expert_intermediate_size")
    mlp = mlp if config.num_experts else ("intermediate_size",)
    for name in ("num_attention_heads", *mlp):
        if getattr(config, name) % num_devices:
            raise ValueError(
                f"{function}: tensor_parallel_size must divide the model's {name} of "
                f"{getattr(config, name)}, got {num_devices}."
            )
    num_heads = config.num_key_value_heads
    if num_heads % num_devices and num_devices % num_heads:
        raise ValueError(
            f"{function}: tensor_parallel_size must divide the model's num_key_value_heads of "
            f"{num_heads} or be a multiple of it, got {num_devices}."
        )
