"""Checks of the fields of a `LlamaConfig`.

The config imports this module, so the functions take any object with its fields.
"""

import math
from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.family import UnsupportedConfigError

# Allowed values of fields that select one of several options by name.
_CHOICES = {
    "qk_norm_scope": ("head", "projection"),
    "norm_placement": ("pre", "sandwich", "post", "parallel"),
    "norm_type": ("rms", "layer"),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu2"),
    "dtype": ("float32", "bfloat16", "float16"),
}
_FACTORS = (
    "rms_norm_eps", "rope_theta", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "logit_scale", "attn_logit_softcapping", "final_logit_softcapping",
    "swiglu_alpha", "swiglu_limit",
)  # fmt: skip
_OPTIONAL = (
    "attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit",
)  # fmt: skip
# Far above any real model: a mistyped size fails here, before it exhausts the memory.
_MAX_HEAD_DIM = 1 << 16
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


def check_sizes(config: Any) -> None:
    """Check the sizes and factors of a config.

    Raises:
      ValueError: a number is out of range, or numbers do not fit together.
    """
    check_positive("LlamaConfig", **{name: getattr(config, name) for name in _SIZES})
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        num_kv_heads = getattr(config, name)
        if num_kv_heads < 0 or num_kv_heads and config.num_attention_heads % num_kv_heads:
            raise ValueError(
                f"LlamaConfig: num_attention_heads must be a multiple of {name}, got "
                f"{config.num_attention_heads} and {num_kv_heads}."
            )
    if not 0 <= config.num_kv_shared_layers <= config.num_hidden_layers:
        raise ValueError(
            "LlamaConfig: num_kv_shared_layers must be 0 to num_hidden_layers, got "
            f"{config.num_kv_shared_layers}."
        )
    if config.hidden_size_per_layer_input < 0:
        raise ValueError(
            "LlamaConfig: hidden_size_per_layer_input must be 0 or more, got "
            f"{config.hidden_size_per_layer_input}."
        )
    for name in ("head_dim", "global_head_dim"):
        if (size := getattr(config, name)) % 2 or not 0 <= size <= _MAX_HEAD_DIM:
            raise ValueError(
                f"LlamaConfig: {name} must be even and at most {_MAX_HEAD_DIM}, got {size}."
            )
    sizes = config.intermediate_sizes
    if sizes and (min(sizes) < 1 or max(sizes) != config.intermediate_size):
        raise ValueError(
            "LlamaConfig: intermediate_sizes must be positive, and intermediate_size the largest "
            f"of them, got {list(sizes)} and {config.intermediate_size}."
        )
    if not all(0 <= sparsity < 1 for sparsity in config.activation_sparsity):
        raise ValueError(
            "LlamaConfig: activation_sparsity must be at least 0 and less than 1, got "
            f"{list(config.activation_sparsity)}."
        )
    streams = config.residual_streams
    if streams is not None and not (streams.count > 1 and 0 <= streams.active < streams.count):
        raise ValueError(
            "LlamaConfig: residual_streams must have at least 2 streams, and one of them active, "
            f"got {streams}."
        )
    if config.latent is not None:
        heads = config.num_attention_heads, config.num_key_value_heads
        config.latent.check(config.head_dim, *heads)
    for field in _FACTORS:
        value = getattr(config, field)
        if value is None and field in _OPTIONAL:
            continue
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"LlamaConfig: {field} must be positive, got {value!r}.")
    for field in ("sliding_window", "attention_chunk_size"):
        if (window := getattr(config, field)) is not None and window < 1:
            raise ValueError(f"LlamaConfig: {field} must be positive or null, got {window}.")


def check_choices(config: Any) -> None:
    """Check the fields that select one of several options.

    Raises:
      UnsupportedConfigError: an option is unknown.
      ValueError: a list has another number of layers.
    """
    for field, choices in _CHOICES.items():
        if getattr(config, field) not in choices:
            raise UnsupportedConfigError(
                f"LlamaConfig: {field} must be one of {', '.join(choices)}, got "
                f"{getattr(config, field)!r}."
            )
    placements = config.norm_placements
    lists = ("norm_placements", "qk_norm_layers", "activation_sparsity", "intermediate_sizes")
    for field in lists:
        if (count := len(getattr(config, field))) not in (0, config.num_hidden_layers):
            raise ValueError(
                f"LlamaConfig: {field} must name {config.num_hidden_layers} layers, got {count}."
            )
    if others := {*placements} - {*_CHOICES["norm_placement"]}:
        raise UnsupportedConfigError(
            "LlamaConfig: norm_placements must only contain "
            f"{', '.join(_CHOICES['norm_placement'])}, got {min(others)!r}."
        )


def check_experts(config: Any) -> None:
    """Check the sizes of experts, see `check_sizes`."""
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    if any(getattr(config, name) for name in sizes):
        check_positive("LlamaConfig", **{name: getattr(config, name) for name in sizes})
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            "LlamaConfig: num_experts_per_tok must be at most num_experts, got "
            f"{config.num_experts_per_tok} and {config.num_experts}."
        )
    if config.num_experts % config.router.num_groups:
        raise ValueError(
            "LlamaConfig: num_experts must be a multiple of the router's num_groups, got "
            f"{config.num_experts} and {config.router.num_groups}."
        )
    if config.separate_expert_norms and config.num_experts:
        check_positive(
            "LlamaConfig", shared_expert_intermediate_size=config.shared_expert_intermediate_size
        )
        if config.norm_placement != "sandwich":
            raise ValueError(
                "LlamaConfig: norm_placement must be 'sandwich' with separate_expert_norms, "
                f"got {config.norm_placement!r}."
            )
    if config.shared_expert_intermediate_size < 0:
        raise ValueError(
            "LlamaConfig: shared_expert_intermediate_size must be 0 or more, got "
            f"{config.shared_expert_intermediate_size}."
        )
