"""Mixtral: Mistral with experts in all layers."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries
from paged_jax.models.families.common import (
    pre_norm,
    read_activation,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.expert_entries import (
    ExpertKeys,
    check_no_dense_layers,
    find_experts,
    name_experts,
    read_expert_sizes,
    write_expert_sizes,
)
from paged_jax.models.families.gguf_entries import PAIRED_ROWS, check_no_window
from paged_jax.models.families.window_entries import read_window
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.norm import Norm

_KEYS = ExpertKeys(num_experts="num_local_experts", features="intermediate_size")


class Mixtral(Family):
    """Mixtral 8x7B and 8x22B."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    tensor_names = {
        "router": "block_sparse_moe.gate.weight",
        **name_experts("block_sparse_moe.experts"),
    }
    gguf = GgufLayout("llama", has_experts=True, row_orders=PAIRED_ROWS)

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. All layers have the same window, or none."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            eps=norm.eps,
            window=read_window(entries),
        )
        check_no_dense_layers(self, entries)
        experts = Experts(
            **read_expert_sizes(self, entries, _KEYS),
            renormalises=True,
            activation=Activation(read_activation(entries)),
        )
        layers = (pre_norm(attention, experts, norm),) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, experts = config.layers[0].get(Attention), find_experts(config)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_expert_sizes(experts, _KEYS),
            "sliding_window": attention.window,
            "rms_norm_eps": config.norm.eps,
            "hidden_act": experts.activation.name,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        check_no_window(metadata, entries)
        return {
            "num_local_experts": entries["num_experts"],
            "intermediate_size": entries["moe_intermediate_size"],
            "moe_intermediate_size": None,
        }
