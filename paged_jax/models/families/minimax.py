"""MiniMax M2: experts in all layers, norms of whole projections, and heads that rotate partly."""

from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_number
from paged_jax.models.families.common import (
    check_only,
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
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.norm import Norm
from paged_jax.models.rope import Rope

_KEYS = ExpertKeys(num_experts="num_local_experts", features="intermediate_size")


class MiniMaxM2(Family):
    """MiniMax M2."""

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    tensor_names = {
        "router": "block_sparse_moe.gate.weight",
        "router_correction_bias": "block_sparse_moe.e_score_correction_bias",
        **name_experts("block_sparse_moe.experts"),
    }

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        check_only(self, entries, use_qk_norm=True, qk_norm_type="per_layer")
        check_only(self, entries, scoring_func="sigmoid", use_routing_bias=True)
        check_only(self, entries, shared_intermediate_size=0)
        check_no_dense_layers(self, entries)
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        attention = Attention(
            **heads,
            rope=self.read_rope(entries, heads["head_dim"]),
            norm=HeadNorm(norm, "projection"),
            eps=norm.eps,
        )
        experts = Experts(
            **read_expert_sizes(self, entries, _KEYS),
            router=Router("sigmoid", has_correction_bias=True),
            renormalises=True,
            activation=Activation(read_activation(entries)),
        )
        layers = (pre_norm(attention, experts, norm),) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def read_rope(self, entries: ConfigEntries, head_dim: int) -> Rope:
        """Return the rotary embedding. Early files have the number of rotated elements."""
        if entries.get("partial_rotary_factor") is None and entries.get("rotary_dim") is not None:
            check_positive("LlamaConfig", head_dim=head_dim)
            factor = read_number(entries, "rotary_dim") / head_dim
            entries = entries.replace({"partial_rotary_factor": factor})
        return read_rope(self, entries, head_dim, may_be_partial=True)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        experts = find_experts(config)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, config.ropes[0]),
            **write_expert_sizes(experts, _KEYS),
            "rms_norm_eps": config.norm.eps,
            "hidden_act": experts.activation.name,
        }
