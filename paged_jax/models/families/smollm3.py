"""SmolLM3: Llama without rotation in every fourth layer."""

import functools
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_number
from paged_jax.models.families.common import (
    pre_norm,
    read_dense,
    read_heads,
    read_model,
    read_rope,
    read_rotations,
    write_dense,
    write_heads,
    write_model,
    write_rope,
    write_rotations,
)
from paged_jax.models.families.window_entries import read_windows, write_windows
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class SmolLM3(Family):
    """SmolLM3."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. Layers without rotation may have a window."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"])
        has_bias = read_boolean(entries, "attention_bias")
        mlp = read_dense(entries, has_bias=read_boolean(entries, "mlp_bias"))
        if not read_boolean(entries, "use_sliding_window"):
            entries = entries.replace({"sliding_window": None})

        @functools.cache
        def layer(rotates: bool, window: int | None) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope if rotates else None,
                eps=norm.eps,
                window=window,
                qkv_bias=has_bias,
                o_bias=has_bias,
            )
            return pre_norm(attention, mlp, norm)

        rotations = read_rotations(entries)
        windows = read_windows(entries, rotations.__getitem__)
        layers = tuple(map(layer, rotations, windows))
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, mlp = config.layers[0].get(Attention), config.layers[0].get(Dense)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, next(filter(None, config.ropes), None)),
            **write_rotations(config),
            **write_windows(config),
            **write_dense(mlp),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "mlp_bias": mlp.has_bias,
            "use_sliding_window": any(config.sliding_windows),
        }
