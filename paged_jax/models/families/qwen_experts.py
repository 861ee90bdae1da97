"""Qwen with experts in some or all layers: ``qwen2_moe`` and ``qwen3_moe``."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_integer
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.common import (
    pre_norm,
    read_activation,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_rope,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.expert_entries import (
    find_experts,
    read_expert_sizes,
    read_listed_dense,
    read_shared_expert,
    write_expert_sizes,
    write_listed_dense,
    write_mlps,
)
from paged_jax.models.families.window_entries import read_windows
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.norm import Norm


class Qwen2Experts(Family):
    """Qwen1.5-MoE and Qwen2 with experts: also a shared expert with a gate."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    ignored = ("attention_bias",)  # `qkv_bias` sets the biases

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            eps=norm.eps,
            qkv_bias=read_boolean(entries, "qkv_bias", False),
        )
        shared = read_shared_expert(
            entries, read_integer(entries, "shared_expert_intermediate_size")
        )
        experts = Experts(
            **read_expert_sizes(self, entries),
            renormalises=read_boolean(entries, "norm_topk_prob"),
            activation=Activation(read_activation(entries)),
            shared=shared,
            gates_shared=shared is not None,
        )
        return _read_layers(self, entries, attention, experts, norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, shared = config.layers[0].get(Attention), find_experts(config).shared
        return {
            **_write_layers(self, config),
            "qkv_bias": attention.qkv_bias,
            "shared_expert_intermediate_size": 0 if shared is None else shared.features,
        }


class Qwen3Experts(Family):
    """Qwen3 with experts: norms of queries and keys, and no shared expert."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    gguf = GgufLayout("qwen3moe")

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            norm=HeadNorm(norm),
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        experts = Experts(
            **read_expert_sizes(self, entries),
            renormalises=read_boolean(entries, "norm_topk_prob"),
            activation=Activation(read_activation(entries)),
        )
        return _read_layers(self, entries, attention, experts, norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        has_bias = attention.qkv_bias and attention.o_bias
        return {**_write_layers(self, config), "attention_bias": has_bias}

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, which does not contain ``norm_topk_prob``."""
        del metadata, entries
        return {"norm_topk_prob": True}


def _read_layers(
    family: Family, entries: ConfigEntries, attention: Attention, experts: Experts, norm: Norm
) -> ModelConfig:
    """Return the config of a model with these experts, except in its dense layers."""
    _check_no_window(family, entries)
    mlp = read_dense(entries)
    dense, sparse = pre_norm(attention, mlp, norm), pre_norm(attention, experts, norm)
    layers = tuple(dense if is_dense else sparse for is_dense in read_listed_dense(entries))
    return read_model(family, entries, layers=layers, norm=norm)


def _check_no_window(family: Family, entries: ConfigEntries) -> None:
    """Check that the entries about windows, which the files contain, turn on no window."""
    if read_boolean(entries, "use_sliding_window", False):
        raise UnsupportedConfigError(
            f"LlamaConfig: use_sliding_window must be false for {family.architecture}, got true."
        )
    read_windows(entries.replace({"sliding_window": None}), lambda layer: True)


def _write_layers(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the entries that both families have."""
    experts = find_experts(config)
    return {
        **write_model(config),
        **write_heads(config),
        **write_rope(family, config.ropes[0]),
        **write_mlps(config),
        **write_listed_dense(config),
        **write_expert_sizes(experts),
        "rms_norm_eps": config.norm.eps,
        "norm_topk_prob": experts.renormalises,
    }
