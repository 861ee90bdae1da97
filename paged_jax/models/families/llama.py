"""Llama 1 to 3, and the many models with the same layers."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean
from paged_jax.models.families.common import (
    pre_norm,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.gguf_entries import PAIRED_ROWS, check_no_window
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class Llama3(Family):
    """Llama 1, 2 and 3."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    gguf = GgufLayout("llama", has_experts=False, row_orders=PAIRED_ROWS)

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        mlp = read_dense(entries, has_bias=read_boolean(entries, "mlp_bias", False))
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
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "mlp_bias": mlp.has_bias,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        check_no_window(metadata, entries)
        return {}
