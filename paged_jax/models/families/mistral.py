"""Mistral (``mistral``) and Ministral 3 (``ministral3``): Llama with one window for all layers.

Files of Mistral's models with images contain such a model.
"""

from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries
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
    write_query_scale,
    write_rope,
)
from paged_jax.models.families.rope_entries import choose_object, read_query_scale
from paged_jax.models.families.window_entries import read_window
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class Mistral(Family):
    """Mistral 7B, Nemo, Small and Large."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm = Norm(read_factor(entries, "rms_norm_eps"))
        attention = self.read_attention(entries, norm)
        layers = (pre_norm(attention, read_dense(entries), norm),) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def read_attention(self, entries: ConfigEntries, norm: Norm) -> Attention:
        """Return the attention of all layers."""
        heads = read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"])
        return Attention(**heads, rope=rope, eps=norm.eps, window=read_window(entries))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_dense(config.layers[0].get(Dense)),
            "rms_norm_eps": config.norm.eps,
            "sliding_window": attention.window,
        }


class Ministral3(Mistral):
    """Ministral 3: the queries have a factor that grows with their position."""

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"

    def read_attention(self, entries: ConfigEntries, norm: Norm) -> Attention:
        """Return the attention of all layers."""
        heads = read_heads(entries)
        return Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"], has_query_scale=True),
            eps=norm.eps,
            window=read_window(entries),
            query_scale=read_query_scale(entries, choose_object(entries, self)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        written, scale = super().write(config), config.layers[0].get(Attention).query_scale
        return written if scale is None else write_query_scale(written, scale)
