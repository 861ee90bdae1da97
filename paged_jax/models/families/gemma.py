"""Gemma 1 to 3: embeddings are multiplied by the square root of the hidden size.

The norms multiply by 1 + weight. Gemma 3n and Gemma 4 have files of their own, and use some
functions of this file.
"""

import functools
from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, as_integer, read_boolean, read_integer
from paged_jax.models.families.common import (
    pre_norm,
    read_activation,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    read_ropes,
    sandwich_norm,
    write_dense,
    write_factor,
    write_heads,
    write_model,
    write_rope,
    write_ropes,
)
from paged_jax.models.families.window_entries import read_pattern_windows, write_windows
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.layer_groups import FULL, SLIDING
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm

# Tensor names of norms before and after both parts of a layer.
SANDWICH_TENSORS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "post_attention_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}


class Gemma(Family):
    """Gemma 1."""

    model_type = "gemma"
    architecture = "GemmaForCausalLM"

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. The first files name the exact GELU, but mean the tanh form."""
        if entries.get("hidden_act") == "gelu":
            entries = entries.replace({"hidden_act": "gelu_pytorch_tanh"})
        norm, heads = Norm(read_factor(entries, "rms_norm_eps"), offset=1.0), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        layers = (pre_norm(attention, read_dense(entries), norm),) * read_num_layers(entries)
        multiplier = read_integer(entries, "hidden_size") ** 0.5
        return read_model(self, entries, layers=layers, norm=norm, embedding_multiplier=multiplier)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_dense(config.layers[0].get(Dense)),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
        }


class Gemma2(Family):
    """Gemma 2: norms before and after both parts, soft caps, and a window in every other layer."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    tensor_names = SANDWICH_TENSORS
    gguf = GgufLayout("gemma2")

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. Layers without a window are the odd ones by default."""
        entries = entries.complete({"num_attention_heads": 8})
        norm, heads = Norm(read_factor(entries, "rms_norm_eps"), offset=1.0), read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"])
        scale = read_factor(entries, "query_pre_attn_scalar") ** -0.5
        soft_cap = read_soft_cap(entries, "attn_logit_softcapping")
        has_bias, mlp = read_boolean(entries, "attention_bias", False), read_mlp(entries)

        @functools.cache
        def layer(window: int | None) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope,
                eps=norm.eps,
                window=window,
                qkv_bias=has_bias,
                o_bias=has_bias,
                scale=scale,
                soft_cap=soft_cap,
            )
            return sandwich_norm(attention, mlp, norm)

        windows = read_pattern_windows(entries, 2)
        return read_model(
            self,
            entries,
            layers=tuple(map(layer, windows)),
            norm=norm,
            embedding_multiplier=read_factor(entries, "hidden_size") ** 0.5,
            final_logit_softcapping=read_soft_cap(entries, "final_logit_softcapping"),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_windows(config),
            **write_mlp(config.layers[0].get(Dense)),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "query_pre_attn_scalar": write_query_scalar(attention),
            "attn_logit_softcapping": attention.soft_cap,
            "final_logit_softcapping": config.final_logit_softcapping,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        if metadata.number("rope.freq_base_swa", entries["rope_theta"]) != entries["rope_theta"]:
            raise metadata.unsupported("rope.freq_base_swa")
        return {
            "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": _guess_query_scalar(entries, num_layers_of_27b=46),
            **metadata.windows(metadata.integer("attention.sliding_window", 4096), 2),
        }


class Gemma3(Family):
    """Gemma 3: as Gemma 2, with norms of queries and keys, and two rotary bases."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    tensor_names = SANDWICH_TENSORS
    gguf = GgufLayout("gemma3")

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every sixth layer has no window."""
        # In files of models with images, sizes that equal the defaults of transformers are missing.
        entries = entries.complete({"num_attention_heads": 8, "vocab_size": 262208})
        norm, heads = Norm(read_factor(entries, "rms_norm_eps"), offset=1.0), read_heads(entries)
        rope, local_rope = read_ropes(self, entries, heads["head_dim"])
        scale = read_factor(entries, "query_pre_attn_scalar") ** -0.5
        has_bias, mlp = read_boolean(entries, "attention_bias", False), read_mlp(entries)

        @functools.cache
        def layer(window: int | None) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope if window is None else local_rope,
                norm=HeadNorm(norm),
                eps=norm.eps,
                window=window,
                qkv_bias=has_bias,
                o_bias=has_bias,
                scale=scale,
            )
            return sandwich_norm(attention, mlp, norm)

        windows = read_pattern_windows(entries, 6)
        return read_model(
            self,
            entries,
            layers=tuple(map(layer, windows)),
            norm=norm,
            embedding_multiplier=read_factor(entries, "hidden_size") ** 0.5,
            final_logit_softcapping=read_soft_cap(entries, "final_logit_softcapping"),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        return {
            **write_model(config),
            **write_heads(config),
            **write_ropes(config),
            **write_windows(config),
            **write_mlp(config.layers[0].get(Dense)),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "query_pre_attn_scalar": write_query_scalar(attention),
            "final_logit_softcapping": config.final_logit_softcapping,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        return {
            "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
            "query_pre_attn_scalar": _guess_query_scalar(entries, num_layers_of_27b=62),
            "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
            **metadata.windows(metadata.integer("attention.sliding_window", 0), 6),
        }


def _guess_query_scalar(entries: Mapping[str, Any], num_layers_of_27b: int) -> int:
    # GGUF files do not contain the factor of attention scores, which is different in Gemma's 27B
    # models. As in llama.cpp, these models are recognised by their number of layers.
    if entries["num_hidden_layers"] == num_layers_of_27b:
        return entries["hidden_size"] // entries["num_attention_heads"]
    return entries["head_dim"]


def read_mlp(entries: ConfigEntries) -> Dense:
    """Return the MLP, whose activation has another key than in most families."""
    return Dense(
        features=read_integer(entries, "intermediate_size"),
        activation=Activation(read_activation(entries, "hidden_activation")),
    )


def write_mlp(mlp: Dense) -> dict[str, Any]:
    """Return the entries for `read_mlp`."""
    return {"intermediate_size": mlp.features, "hidden_activation": mlp.activation.name}


def read_soft_cap(entries: ConfigEntries, key: str) -> float | None:
    """Return a soft cap of scores or logits; None for no cap."""
    return None if entries.get(key) is None else read_factor(entries, key)


def write_query_scalar(attention: Attention) -> float:
    """Return ``query_pre_attn_scalar``; the scores are divided by its square root."""
    scale = attention.scale or attention.head_dim**-0.5
    # transformers requires an integer.
    return as_integer(write_factor(scale**-2))


def read_sources(entries: ConfigEntries, windows: list[int | None]) -> list[int | None]:
    """Return the layers whose keys and values the last layers read; None for the other layers.

    Each of the last ``num_kv_shared_layers`` layers reads those of the last layer before them that
    has the same window, of which `windows` has one for each layer.
    """
    num_layers, num_shared = len(windows), read_integer(entries, "num_kv_shared_layers", 0)
    if not 0 <= num_shared <= num_layers:
        raise ValueError(
            f"LlamaConfig: num_kv_shared_layers must be 0 to num_hidden_layers, got {num_shared}."
        )
    first = num_layers - num_shared
    last = {window: layer for layer, window in enumerate(windows[:first])}
    if missing := {*windows[first:]} - {*last}:
        kind = FULL if None in missing else SLIDING
        raise ValueError(
            f"LlamaConfig: num_kv_shared_layers must leave at least one layer of type {kind!r} "
            f"that computes keys and values, got {num_shared}."
        )
    return [None if layer < first else last[window] for layer, window in enumerate(windows)]


def write_sources(config: ModelConfig) -> dict[str, int]:
    """Return the entry for `read_sources`."""
    sources = [layer.get(Attention).source for layer in config.layers]
    return {"num_kv_shared_layers": sum(source is not None for source in sources)}


def read_per_layer_size(entries: ConfigEntries) -> int:
    """Return the size of a token's embedding in each layer; 0 without such embeddings."""
    size = read_integer(entries, "hidden_size_per_layer_input", 0)
    if size < 0:
        raise ValueError(f"LlamaConfig: hidden_size_per_layer_input must be 0 or more, got {size}.")
    return size
