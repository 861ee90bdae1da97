"""Cohere's Command R (``cohere``) and Command R7B (``cohere2``).

Attention and MLP run in parallel, on the output of one layer norm.
"""

import dataclasses
import functools
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_number
from paged_jax.models.families.common import (
    parallel,
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
from paged_jax.models.families.window_entries import read_pattern_windows, write_windows
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.rope import Rope


class Cohere(Family):
    """Command R and R+."""

    model_type = "cohere"
    architecture = "CohereForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. Each head of queries and keys may have a norm of its own."""
        norm = Norm(read_number(entries, "layer_norm_eps"), kind="layer")
        has_norms = read_boolean(entries, "use_qk_norm")
        attention = self.read_attention(entries, norm, HeadNorm(norm, "own") if has_norms else None)
        layer = parallel(attention, read_dense(entries), norm)
        return self.read_ends(entries, norm, (layer,) * read_num_layers(entries))

    def read_attention(
        self, entries: ConfigEntries, norm: Norm, head_norm: HeadNorm | None = None
    ) -> Attention:
        """Return the attention of layers without a window."""
        heads, has_bias = read_heads(entries), read_boolean(entries, "attention_bias")
        return Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"], is_interleaved=True),
            rope_interleaved=True,
            norm=head_norm,
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )

    def read_ends(
        self, entries: ConfigEntries, norm: Norm, layers: tuple[LayerSpec, ...]
    ) -> ModelConfig:
        """Return the config of a model with these layers."""
        scale = read_factor(entries, "logit_scale")
        return read_model(self, entries, layers=layers, norm=norm, logit_scale=scale)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        return {
            **self.write_all(config, attention.rope),
            "use_qk_norm": attention.norm is not None,
        }

    def write_all(self, config: ModelConfig, rope: Rope | None) -> dict[str, Any]:
        """Return the entries that both families have."""
        attention = config.layers[0].get(Attention)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, rope),
            **write_dense(config.layers[0].get(Dense)),
            "layer_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "logit_scale": write_factor(config.logit_scale),
        }


class Cohere2(Cohere):
    """Command R7B: layers with a window rotate queries and keys, the others do not."""

    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every fourth layer has no window."""
        norm = Norm(read_number(entries, "layer_norm_eps"), kind="layer")
        attention, mlp = self.read_attention(entries, norm), read_dense(entries)
        windows = read_pattern_windows(entries, 4)

        @functools.cache
        def layer(window: int | None) -> LayerSpec:
            rope = None if window is None else attention.rope
            layer_attention = dataclasses.replace(attention, window=window, rope=rope)
            return parallel(layer_attention, mlp, norm)

        return self.read_ends(entries, norm, tuple(map(layer, windows)))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        rope = next(filter(None, config.ropes), None)
        return {**self.write_all(config, rope), **write_windows(config)}
