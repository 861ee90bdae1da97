"""Seed-OSS: Llama with biases in the input projections of attention."""

from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_number
from paged_jax.models.families.common import (
    pre_norm,
    read_dense,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class SeedOss(Family):
    """Seed-OSS."""

    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            eps=norm.eps,
            qkv_bias=read_boolean(entries, "attention_bias"),
            o_bias=read_boolean(entries, "attention_out_bias"),
        )
        mlp = read_dense(entries, has_bias=read_boolean(entries, "mlp_bias"))
        layers = (pre_norm(attention, mlp, norm),) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, mlp = config.layers[0].get(Attention), config.layers[0].get(Dense)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_dense(mlp),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias,
            "attention_out_bias": attention.o_bias,
            "mlp_bias": mlp.has_bias,
        }
