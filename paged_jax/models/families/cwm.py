"""Code World Model (CWM): Llama 3 with windows in three of four layers."""

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
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.window_entries import read_pattern_windows, write_windows
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class Cwm(Family):
    """Code World Model."""

    model_type = "cwm"
    architecture = "CwmForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every fourth layer has no window."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"])
        mlp = read_dense(entries, has_bias=read_boolean(entries, "mlp_bias"))

        @functools.cache
        def layer(window: int | None) -> LayerSpec:
            attention = Attention(**heads, rope=rope, eps=norm.eps, window=window)
            return pre_norm(attention, mlp, norm)

        windows = read_pattern_windows(entries, 4, full=0)
        layers = tuple(map(layer, windows))
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, mlp = config.layers[0].get(Attention), config.layers[0].get(Dense)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_windows(config),
            **write_dense(mlp),
            "rms_norm_eps": config.norm.eps,
            "mlp_bias": mlp.has_bias,
        }
