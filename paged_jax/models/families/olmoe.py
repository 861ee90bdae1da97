"""OLMoE: experts in all layers, and norms of whole projections of queries and keys."""

from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean
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
    read_expert_sizes,
    write_expert_sizes,
)
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.norm import Norm

_KEYS = ExpertKeys(features="intermediate_size")


class Olmoe(Family):
    """OLMoE."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            norm=HeadNorm(norm, "projection"),
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        check_no_dense_layers(self, entries)
        experts = Experts(
            **read_expert_sizes(self, entries, _KEYS),
            renormalises=read_boolean(entries, "norm_topk_prob"),
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
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "norm_topk_prob": experts.renormalises,
            "hidden_act": experts.activation.name,
        }
