"""Granite 3: Llama with factors of embeddings, scores, outputs and logits."""

from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_number
from paged_jax.models.families.common import (
    pre_norm,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    write_dense,
    write_factor,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.residual import Sublayer


class Granite(Family):
    """Granite 3, dense models."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias")
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
            scale=read_factor(entries, "attention_multiplier"),
        )
        mlp = read_dense(entries, has_bias=read_boolean(entries, "mlp_bias"))
        layer = pre_norm(attention, mlp, norm, read_factor(entries, "residual_multiplier"))
        return read_model(
            self,
            entries,
            layers=(layer,) * read_num_layers(entries),
            norm=norm,
            embedding_multiplier=read_factor(entries, "embedding_multiplier"),
            logit_scale=1 / read_factor(entries, "logits_scaling"),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        step, attention = config.layers[0].get(Sublayer), config.layers[0].get(Attention)
        mlp, scale = config.layers[0].get(Dense), attention.scale or attention.head_dim**-0.5
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_dense(mlp),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "mlp_bias": mlp.has_bias,
            "embedding_multiplier": write_factor(config.embedding_multiplier),
            "attention_multiplier": write_factor(scale),
            "residual_multiplier": write_factor(step.multiplier),
            "logits_scaling": write_factor(1 / config.logit_scale),
        }
