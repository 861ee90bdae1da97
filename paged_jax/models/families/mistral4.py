"""Mistral 4: latent attention and experts like DeepSeek's, and queries scaled by position."""

import dataclasses
from typing import Any

from paged_jax.models.config import ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean
from paged_jax.models.families.common import write_query_scale
from paged_jax.models.families.deepseek import DeepseekV3
from paged_jax.models.families.expert_entries import read_experts
from paged_jax.models.families.rope_entries import choose_object, read_query_scale
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.latent import LatentAttention


class Mistral4(DeepseekV3):
    """Mistral 4."""

    model_type = "mistral4"
    architecture = "Mistral4ForCausalLM"
    tensor_names = {
        **DeepseekV3.tensor_names,
        "fused_gate_up_proj": "mlp.experts.gate_up_proj",
        "fused_down_proj": "mlp.experts.down_proj",
    }
    has_query_scale = True

    def read_attention(self, entries: ConfigEntries) -> LatentAttention:
        """Return the attention of all layers, with a factor of queries."""
        scale = read_query_scale(entries, choose_object(entries, self))
        return dataclasses.replace(super().read_attention(entries), query_scale=scale)

    def read_experts(self, entries: ConfigEntries) -> Experts:
        """Return the experts of the layers that are not dense, with softmax scores."""
        renormalises = read_boolean(entries, "norm_topk_prob")
        return read_experts(self, entries, Router(epsilon=1e-20), renormalises=renormalises)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        written, scale = super().write(config), config.layers[0].get(LatentAttention).query_scale
        return written if scale is None else write_query_scale(written, scale)
