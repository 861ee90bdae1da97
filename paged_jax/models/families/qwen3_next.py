"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets.

Attention has an output gate, rotates a part of each head, and normalises queries and keys.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_integer, read_number
from paged_jax.models.families.common import (
    check_only,
    find_part,
    pre_norm,
    read_activation,
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
from paged_jax.models.families.expert_entries import (
    check_no_dense_layers,
    find_experts,
    read_expert_sizes,
    read_listed_dense,
    read_shared_expert,
    write_expert_sizes,
    write_listed_dense,
    write_mlps,
)
from paged_jax.models.families.recurrent_entries import (
    read_delta_net,
    read_interval,
    read_layer_types,
    write_delta_net,
    write_layer_types,
)
from paged_jax.models.gguf_layout import GgufLayout, Order
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.layer_groups import FULL, RECURRENT
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import Part

# Tensors of delta nets that all families of this file name in the same way.
_DELTA_TENSORS = {
    "mixer_decay": "linear_attn.A_log",
    "mixer_time": "linear_attn.dt_bias",
    "mixer_norm": "linear_attn.norm.weight",
    "mixer_out_proj": "linear_attn.out_proj.weight",
    "mixer_conv.*": "linear_attn.conv1d.weight",
}


def _tile_heads(spec: LayerSpec, num_first: int, head_dim: int) -> np.ndarray | None:
    """Return the row in GGUF files of each row of a parameter with the value heads.

    In Hugging Face files, the G value heads of a key head follow each other. GGUF files first have
    the first value head of each key head, then the second of each, and so on.

    Args:
      spec: the layer.
      num_first: number of rows before those of the value heads, which are not reordered.
      head_dim: number of rows of a value head.
    """
    K, G, _, _ = spec.get(GatedDeltaNet).heads
    if G == 1:
        return None
    heads = np.arange(K * G).reshape(G, K).T.reshape(-1)
    rows = heads[:, None] * head_dim + np.arange(head_dim)
    return np.concatenate([np.arange(num_first), num_first + rows.reshape(-1)])


def _tile_convolved(spec: LayerSpec) -> np.ndarray | None:
    K, _, D, U = spec.get(GatedDeltaNet).heads
    return _tile_heads(spec, 2 * K * D, U)  # all queries and keys come first


def _tile_values(spec: LayerSpec) -> np.ndarray | None:
    return _tile_heads(spec, 0, spec.get(GatedDeltaNet).value_dim)


def _tile_scalars(spec: LayerSpec) -> np.ndarray | None:
    return _tile_heads(spec, 0, 1)


def _tile_inputs(spec: LayerSpec) -> np.ndarray | None:
    """Return the input that each column of the output projection in GGUF files belongs to."""
    rows = _tile_values(spec)
    return None if rows is None else np.argsort(rows).astype(np.int32)


# How GGUF files of Qwen3.5 differ from the usual names and order.
_GGUF_NORM = {"post_attention_norm": "post_attention_norm.weight"}
_TILED_ROWS: Mapping[str, Order] = {
    "mixer_in_proj.*": _tile_convolved,
    "mixer_in_proj.z": _tile_values,
    "mixer_gates_proj.b": _tile_scalars,
    "mixer_gates_proj.a": _tile_scalars,
    "mixer_conv.*": _tile_convolved,
    "mixer_decay": _tile_scalars,
    "mixer_time": _tile_scalars,
}
_TILED_INPUTS: Mapping[str, Order] = {"mixer_out_proj": _tile_inputs}


class Qwen35(Family):
    """Qwen3.5 without experts: the text part."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    tensor_names = {
        **_DELTA_TENSORS,
        "mixer_in_proj.*": "linear_attn.in_proj_qkv.weight",
        "mixer_in_proj.z": "linear_attn.in_proj_z.weight",
        "mixer_gates_proj.*": "linear_attn.in_proj_*.weight",
    }
    prefixes = {"mtp.": None}
    gguf = GgufLayout(
        "qwen35", tensor_names=_GGUF_NORM, row_orders=_TILED_ROWS, input_orders=_TILED_INPUTS
    )

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        check_only(self, entries, attn_output_gate=True)
        norm, heads = Norm(read_number(entries, "rms_norm_eps"), offset=1.0), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"], may_be_partial=True),
            norm=HeadNorm(norm),
            eps=norm.eps,
            has_gate=True,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        mixer = read_delta_net(entries, norm.eps)
        types = read_layer_types(entries)
        types = read_interval(entries) if types is None else types
        tokens = [mixer if is_recurrent else attention for is_recurrent in types]

        @functools.cache
        def layer(tokens: Part, mlp: Part) -> LayerSpec:
            return pre_norm(tokens, mlp, norm)

        layers = tuple(map(layer, tokens, self.read_mlps(entries)))
        return read_model(self, entries, layers=layers, norm=norm)

    def read_mlps(self, entries: ConfigEntries) -> Sequence[Part]:
        """Return the MLP of each layer."""
        return [read_dense(entries)] * read_num_layers(entries)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = find_part(config, Attention)
        has_bias = attention is not None and attention.qkv_bias and attention.o_bias
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, next(filter(None, config.ropes), None)),
            **write_layer_types(config),
            **write_delta_net(find_part(config, GatedDeltaNet)),
            **self.write_mlps(config),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": has_bias,
        }

    def write_mlps(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries for `read_mlps`."""
        return write_dense(config.layers[0].get(Dense))

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        del entries
        num_heads = metadata.integer("ssm.time_step_rank")
        sizes = {
            "linear_num_key_heads": metadata.integer("ssm.group_count"),
            "linear_num_value_heads": num_heads,
            "linear_key_head_dim": metadata.integer("ssm.state_size"),
            "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(num_heads, 1),
            "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        }
        interval = metadata.integer("full_attention_interval", 4)
        is_recurrent = metadata.booleans("attention.recurrent_layers")
        if is_recurrent is None:
            return {**sizes, "full_attention_interval": interval}
        return {
            **sizes,
            "layer_types": [
                RECURRENT if is_recurrent_layer else FULL for is_recurrent_layer in is_recurrent
            ],
        }


class Qwen35Experts(Qwen35):
    """Qwen3.5 with experts in all layers, and a shared expert with a gate: the text part."""

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    ignored = ("intermediate_size",)  # no layer has a dense MLP
    gguf = GgufLayout(
        "qwen35moe", tensor_names=_GGUF_NORM, row_orders=_TILED_ROWS, input_orders=_TILED_INPUTS
    )

    def read_mlps(self, entries: ConfigEntries) -> Sequence[Part]:
        """Return the experts of each layer. Their weights are always divided by their sum."""
        check_no_dense_layers(self, entries)
        return [self.read_experts(entries, renormalises=True)] * read_num_layers(entries)

    def read_experts(self, entries: ConfigEntries, *, renormalises: bool) -> Experts:
        """Return the experts. `renormalises` says whether weights are divided by their sum."""
        size = read_integer(entries, "shared_expert_intermediate_size")
        shared = read_shared_expert(entries, size)
        return Experts(
            **read_expert_sizes(self, entries),
            renormalises=renormalises,
            activation=Activation(read_activation(entries)),
            shared=shared,
            gates_shared=shared is not None,
        )

    def write_mlps(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries for `read_mlps`."""
        experts = find_experts(config)
        shared = experts.shared
        return {
            **write_mlps(config),
            **write_expert_sizes(experts),
            "shared_expert_intermediate_size": 0 if shared is None else shared.features,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        size = metadata.integer("expert_shared_feed_forward_length", 0)
        config_entries = super().read_gguf(metadata, entries)
        return {**config_entries, "shared_expert_intermediate_size": size}


class Qwen3Next(Qwen35Experts):
    """Qwen3-Next: experts in some or all layers, and other tensors of delta nets than Qwen3.5."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    tensor_names = {
        **_DELTA_TENSORS,
        "mixer_in_proj": "linear_attn.in_proj_qkvz.weight",
        "mixer_gates_proj": "linear_attn.in_proj_ba.weight",
    }
    ignored = ()
    gguf = None

    def read_mlps(self, entries: ConfigEntries) -> Sequence[Part]:
        """Return the MLP of each layer: experts, or a dense MLP in listed layers."""
        renormalises = read_boolean(entries, "norm_topk_prob")
        experts = self.read_experts(entries, renormalises=renormalises)
        dense = read_dense(entries)
        return [dense if is_dense else experts for is_dense in read_listed_dense(entries)]

    def write_mlps(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries for `read_mlps`."""
        return {
            **super().write_mlps(config),
            **write_listed_dense(config),
            "norm_topk_prob": find_experts(config).renormalises,
        }
