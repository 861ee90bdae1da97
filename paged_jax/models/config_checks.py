"""Checks of the fields of a `LlamaConfig`.

The functions take any object that has the fields of a `LlamaConfig`, because `config` imports this
module and not the reverse. They raise the errors that `check_config` documents.
"""

import math
from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.family import UnsupportedConfigError
from paged_jax.models.layer_groups import (
    CHUNKED,
    HYBRID,
    LAYER_TYPES,
    MLP_TYPES,
    RECURRENT,
    RECURRENT_TYPES,
    SLIDING,
    SPARSE,
)

# Allowed values of the fields of `LlamaConfig` that select an option by name.
_CHOICES = {
    "qk_norm_scope": ("head", "own", "projection"),
    "norm_placement": ("pre", "sandwich", "post", "parallel"),
    "norm_type": ("rms", "layer"),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2"),
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
# Limits far above any real model. They reject a mistyped size before it exhausts the memory.
_MAX_HEAD_DIM, _MAX_LAYERS = 1 << 16, 10_000
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


# Fields with one value for each layer. They are empty if all layers have the same value.
_OF_LAYERS = (
    "layer_types", "mlp_layer_types", "norm_placements", "qk_norm_layers", "activation_sparsity",
    "intermediate_sizes", "rope_layers",
)  # fmt: skip


def check_config(config: Any) -> None:
    """Check the fields of a config, except those of the rotary embedding, which `Rope` checks.

    Raises:
      UnsupportedConfigError: the name of an option or the type of a layer is unknown.
      ValueError: a number is out of range, or fields do not fit together.
    """
    _check_sizes(config)
    check_num_layers(config.num_hidden_layers)
    _check_experts(config)
    for field in _OF_LAYERS:
        if (count := len(getattr(config, field))) not in (0, config.num_hidden_layers):
            raise ValueError(
                f"LlamaConfig: {field} must have one value for each of the "
                f"{config.num_hidden_layers} layers, got {count} values."
            )
    _check_layer_types(config)
    _check_choices(config)


def check_num_layers(num_layers: int) -> None:
    """Check that the number of layers is plausible, before lists of this length are made.

    Raises:
      ValueError: the number is not positive, or exceeds `_MAX_LAYERS`.
    """
    check_positive("LlamaConfig", num_hidden_layers=num_layers)
    if num_layers > _MAX_LAYERS:
        raise ValueError(
            f"LlamaConfig: num_hidden_layers must be at most {_MAX_LAYERS}, got {num_layers}."
        )


def _check_sizes(config: Any) -> None:
    check_positive("LlamaConfig", **{name: getattr(config, name) for name in _SIZES})
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        num_kv_heads = getattr(config, name)
        if num_kv_heads < 0 or num_kv_heads and config.num_attention_heads % num_kv_heads:
            raise ValueError(
                f"LlamaConfig: num_attention_heads must be a multiple of {name}, got "
                f"num_attention_heads {config.num_attention_heads} and {name} {num_kv_heads}."
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
            "LlamaConfig: intermediate_sizes must be positive, and the largest of them must be "
            f"intermediate_size, got {list(sizes)} and intermediate_size "
            f"{config.intermediate_size}."
        )
    if not all(0 <= sparsity < 1 for sparsity in config.activation_sparsity):
        raise ValueError(
            "LlamaConfig: activation_sparsity must be at least 0 and less than 1, got "
            f"{list(config.activation_sparsity)}."
        )
    streams = config.residual_streams
    if streams is not None and not (streams.count > 1 and 0 <= streams.active < streams.count):
        raise ValueError(
            "LlamaConfig: residual_streams.count must be at least 2, and residual_streams.active "
            f"must be less than count, got {streams}."
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


def _check_layer_types(config: Any) -> None:
    kinds, mlp_kinds, chunk = (
        config.layer_types,
        config.mlp_layer_types,
        config.attention_chunk_size,
    )
    if (config.mixer is not None) != bool({*RECURRENT_TYPES} & {*kinds}):
        raise UnsupportedConfigError(
            f"LlamaConfig: mixer must be set if and only if layer_types contains {RECURRENT!r} or "
            f"{HYBRID!r}, got mixer {config.mixer} and layer_types {list(kinds)}."
        )
    if others := set(kinds) - set(LAYER_TYPES):
        raise UnsupportedConfigError(
            f"LlamaConfig: layer_types must only contain {', '.join(map(repr, LAYER_TYPES))}, got "
            f"{min(others)!r}."
        )
    if SLIDING in kinds and config.sliding_window is None:
        raise ValueError(
            f"LlamaConfig: sliding_window must be an integer if layer_types contains {SLIDING!r}, "
            "got null."
        )
    if (CHUNKED in kinds) != (chunk is not None):
        raise UnsupportedConfigError(
            "LlamaConfig: attention_chunk_size must be an integer if layer_types contains "
            f"{CHUNKED!r}, otherwise null, got {chunk} and layer_types {list(kinds)}."
        )
    if others := set(mlp_kinds) - set(MLP_TYPES):
        raise ValueError(
            f"LlamaConfig: mlp_layer_types must have {' or '.join(map(repr, MLP_TYPES))} for each "
            f"layer, got {min(others)!r}."
        )
    if mlp_kinds and (SPARSE in mlp_kinds) != bool(config.num_experts):
        raise ValueError(
            f"LlamaConfig: mlp_layer_types must contain {SPARSE!r} if and only if num_experts is "
            f"positive, got {list(mlp_kinds)} and num_experts {config.num_experts}."
        )
    layers = zip(config.layer_kinds, config.shares_kv, strict=True)
    own = [kind for kind, shares in layers if not shares]
    if own and (others := set(config.layer_kinds) - set(own)):
        raise ValueError(
            "LlamaConfig: num_kv_shared_layers must leave at least one layer of type "
            f"{min(others)!r} that computes keys and values, got {config.num_kv_shared_layers}."
        )


def _check_choices(config: Any) -> None:
    activation = "silu" if config.mixer is None else config.mixer.conv_act
    if activation not in _CHOICES["hidden_act"]:
        raise UnsupportedConfigError(
            "LlamaConfig: the activation of convolutions must be one of "
            f"{', '.join(_CHOICES['hidden_act'])}, got {activation!r}."
        )
    for field, choices in _CHOICES.items():
        if getattr(config, field) not in choices:
            raise UnsupportedConfigError(
                f"LlamaConfig: {field} must be one of {', '.join(choices)}, got "
                f"{getattr(config, field)!r}."
            )
    if others := {*config.norm_placements} - {*_CHOICES["norm_placement"]}:
        raise UnsupportedConfigError(
            "LlamaConfig: norm_placements must only contain "
            f"{', '.join(_CHOICES['norm_placement'])}, got {min(others)!r}."
        )


def _check_experts(config: Any) -> None:
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    if any(getattr(config, name) for name in sizes):
        check_positive("LlamaConfig", **{name: getattr(config, name) for name in sizes})
    if config.moe_latent_size and (config.moe_latent_size < 0 or config.expert_bias):
        raise ValueError(
            "LlamaConfig: moe_latent_size must be at least 0, and 0 if experts have biases, got "
            f"{config.moe_latent_size}."
        )
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            "LlamaConfig: num_experts_per_tok must be at most num_experts, got num_experts_per_tok "
            f"{config.num_experts_per_tok} and num_experts {config.num_experts}."
        )
    if config.num_experts % config.router.num_groups:
        raise ValueError(
            "LlamaConfig: num_experts must be a multiple of the router's num_groups, got "
            f"num_experts {config.num_experts} and num_groups {config.router.num_groups}."
        )
    if config.separate_expert_norms and config.num_experts:
        check_positive(
            "LlamaConfig", shared_expert_intermediate_size=config.shared_expert_intermediate_size
        )
        if config.norm_placement != "sandwich":
            raise ValueError(
                "LlamaConfig: norm_placement must be 'sandwich' if separate_expert_norms is true, "
                f"got {config.norm_placement!r}."
            )
    if config.shared_expert_intermediate_size < 0:
        raise ValueError(
            "LlamaConfig: shared_expert_intermediate_size must be 0 or more, got "
            f"{config.shared_expert_intermediate_size}."
        )
