"""OLMo 2 and 3: norms after attention and MLP, and of all queries and keys of a token together."""

import functools
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean
from paged_jax.models.families.common import (
    post_norm,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    read_ropes,
    write_dense,
    write_heads,
    write_model,
    write_rope,
    write_ropes,
)
from paged_jax.models.families.window_entries import read_pattern_windows, write_windows
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm

_TENSORS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}


class Olmo2(Family):
    """OLMo 2."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    tensor_names = _TENSORS

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
        layers = (post_norm(attention, read_dense(entries), norm),) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        return {
            **_write(config),
            **write_rope(self, config.layers[0].get(Attention).rope),
        }


class Olmo3(Family):
    """OLMo 3: layers with a window do not scale rotary frequencies, the others may do so."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    tensor_names = _TENSORS

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every fourth layer has no window."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        rope, local_rope = read_ropes(self, entries, heads["head_dim"])
        has_bias, mlp = read_boolean(entries, "attention_bias", False), read_dense(entries)

        @functools.cache
        def layer(window: int | None) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope if window is None else local_rope,
                norm=HeadNorm(norm, "projection"),
                eps=norm.eps,
                window=window,
                qkv_bias=has_bias,
                o_bias=has_bias,
            )
            return post_norm(attention, mlp, norm)

        windows = read_pattern_windows(entries, 4)
        layers = tuple(map(layer, windows))
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        return {**_write(config), **write_ropes(config), **write_windows(config)}


def _write(config: ModelConfig) -> dict[str, Any]:
    """Return the entries that both families have."""
    attention = config.layers[0].get(Attention)
    return {
        **write_model(config),
        **write_heads(config),
        **write_dense(config.layers[0].get(Dense)),
        "rms_norm_eps": config.norm.eps,
        "attention_bias": attention.qkv_bias and attention.o_bias,
    }
