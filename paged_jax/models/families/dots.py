"""dots.llm1: experts like DeepSeek V3, norms of queries and keys, and windows in later layers."""

import functools
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_integer
from paged_jax.models.families.common import (
    pre_norm,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_rope,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.expert_entries import (
    SIGMOID_ROUTER,
    find_experts,
    read_experts,
    read_first_dense,
    write_experts,
)
from paged_jax.models.families.window_entries import read_windows, write_windows
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.norm import Norm


class Dots1(Family):
    """dots.llm1."""

    model_type = "dots1"
    architecture = "Dots1ForCausalLM"
    tensor_names = {"shared_expert": "mlp.shared_experts"}

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, layers from ``max_window_layers`` on have windows."""
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"])
        has_bias = read_boolean(entries, "attention_bias", False)
        renormalises = read_boolean(entries, "norm_topk_prob")
        experts = read_experts(self, entries, SIGMOID_ROUTER, renormalises=renormalises)
        mlp = read_dense(entries)

        @functools.cache
        def layer(window: int | None, is_dense: bool) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope,
                norm=HeadNorm(norm),
                eps=norm.eps,
                window=window,
                qkv_bias=has_bias,
                o_bias=has_bias,
            )
            return pre_norm(attention, mlp if is_dense else experts, norm)

        num_full = read_integer(entries, "max_window_layers", 28)
        windows = read_windows(entries, lambda layer: layer < num_full)
        layers = tuple(map(layer, windows, read_first_dense(entries)))
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, experts = config.layers[0].get(Attention), find_experts(config)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_windows(config),
            **write_experts(config),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "norm_topk_prob": experts.renormalises,
        }
