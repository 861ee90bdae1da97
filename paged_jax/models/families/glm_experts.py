"""GLM-4 with experts: ``glm4_moe`` (GLM-4.5 to 4.7) and ``glm4_moe_lite`` (GLM-4.7 Flash)."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean
from paged_jax.models.families.common import (
    check_only,
    pre_norm,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_rope,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.deepseek import DeepseekV3
from paged_jax.models.families.expert_entries import (
    SIGMOID_ROUTER,
    find_experts,
    read_experts,
    read_first_dense,
    write_experts,
)
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.norm import Norm


class Glm4Experts(Family):
    """GLM-4.5, 4.6 and 4.7: the experts of DeepSeek V3, and attention with heads."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    tensor_names = {"shared_expert": "mlp.shared_experts"}
    has_draft_layers = True
    gguf = GgufLayout("glm4moe", tensor_names={"post_attention_norm": "post_attention_norm.weight"})

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. The first layers are dense."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        check_only(self, entries, scoring_func="sigmoid", topk_method="noaux_tc")
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"], may_be_partial=True),
            norm=HeadNorm(norm) if read_boolean(entries, "use_qk_norm", False) else None,
            eps=norm.eps,
            qkv_bias=read_boolean(entries, "attention_bias", False),
        )
        renormalises = read_boolean(entries, "norm_topk_prob")
        experts = read_experts(self, entries, SIGMOID_ROUTER, renormalises=renormalises)
        mlp = read_dense(entries)
        dense, sparse = pre_norm(attention, mlp, norm), pre_norm(attention, experts, norm)
        layers = tuple(dense if is_dense else sparse for is_dense in read_first_dense(entries))
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, experts = config.layers[0].get(Attention), find_experts(config)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_experts(config),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias,
            "use_qk_norm": attention.norm is not None,
            "norm_topk_prob": experts.renormalises,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        del entries
        metadata.check("expert_gating_func", 0, 2)  # unset, sigmoid
        return {
            "use_qk_norm": metadata.has_tensor("attn_q_norm.weight"),
            "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
            "n_group": metadata.integer("expert_group_count", 0) or 1,
            "topk_group": metadata.integer("expert_group_used_count", 0) or 1,
            "n_shared_experts": metadata.integer("expert_shared_count", 0),
            "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        }


class Glm4LiteExperts(DeepseekV3):
    """GLM-4.7 Flash: a DeepSeek V3, with one dense layer if the file does not say how many."""

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        return super().read(entries.complete({"first_k_dense_replace": 1}))
