"""Qwen2 and Qwen3 without experts.

Qwen2 has biases in the input projections of attention, Qwen3 has norms of queries and keys. The
last layers may have a window. Files of Qwen3-VL contain a Qwen3.
"""

import dataclasses
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
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.window_entries import read_windows, write_windows
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class Qwen2(Family):
    """Qwen 1.5, 2 and 2.5, and QwQ."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    ignored = ("attention_bias",)  # the input projections always have biases
    gguf = GgufLayout("qwen2")

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm = Norm(read_factor(entries, "rms_norm_eps"))
        attention, mlp = self.read_attention(entries, norm), read_dense(entries)

        @functools.cache
        def layer(window: int | None) -> LayerSpec:
            return pre_norm(dataclasses.replace(attention, window=window), mlp, norm)

        windows = read_last_windows(entries)
        layers = tuple(map(layer, windows))
        return read_model(self, entries, layers=layers, norm=norm)

    def read_attention(self, entries: ConfigEntries, norm: Norm) -> Attention:
        """Return the attention of layers without a window."""
        heads = read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"])
        return Attention(**heads, rope=rope, eps=norm.eps, qkv_bias=True)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, config.ropes[0]),
            **write_last_windows(config),
            **write_dense(config.layers[0].get(Dense)),
            "rms_norm_eps": config.norm.eps,
        }


class Qwen3(Qwen2):
    """Qwen3."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    ignored = ()
    gguf = GgufLayout("qwen3")

    def read_attention(self, entries: ConfigEntries, norm: Norm) -> Attention:
        """Return the attention of layers without a window."""
        has_bias = read_boolean(entries, "attention_bias", False)
        return dataclasses.replace(
            super().read_attention(entries, norm),
            norm=HeadNorm(norm),
            qkv_bias=has_bias,
            o_bias=has_bias,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        has_bias = attention.qkv_bias and attention.o_bias
        return {**super().write(config), "attention_bias": has_bias}


def read_last_windows(entries: ConfigEntries) -> list[int | None]:
    """Return the sliding window of each layer in tokens; None for layers without a window.

    If the entry ``use_sliding_window`` is true, the layers from ``max_window_layers`` on have a
    window by default.
    """
    window = read_integer(entries.complete({"sliding_window": 4096}), "sliding_window", None)
    is_on = read_boolean(entries, "use_sliding_window", False)
    entries = entries.replace({"sliding_window": window if is_on else None})
    num_full = read_integer(entries, "max_window_layers", 28)
    return read_windows(entries, lambda layer: layer < num_full)


def write_last_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the entries for `read_last_windows`."""
    windows = config.sliding_windows
    num_full = next((layer for layer, window in enumerate(windows) if window), len(windows))
    return {
        **write_windows(config),
        "use_sliding_window": any(windows),
        "max_window_layers": num_full,
    }
