"""ERNIE 4.5: Llama whose rotated pairs are neighbours, optionally with biases everywhere."""

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


class Ernie45(Family):
    """ERNIE 4.5, without experts."""

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"

    ignored = ("attention_bias",)  # `use_bias` sets all biases

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. One entry sets all biases."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "use_bias")
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"], is_interleaved=True),
            rope_interleaved=True,
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        mlp = read_dense(entries, has_bias=has_bias)
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
            "use_bias": attention.qkv_bias,
        }
