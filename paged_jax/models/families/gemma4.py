"""Gemma 4: Gemma 3 with other heads and another rotation in layers without a window.

The small models have embeddings of each token in each layer, and last layers that read the keys and
values of others. The MLP of others has experts beside it.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.config import Family, ModelConfig, PerLayerTable
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_integer, read_object
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.common import (
    HeadSizes,
    check_head_dim,
    check_only,
    convert_rope,
    read_factor,
    read_heads,
    read_model,
    sandwich_norm,
    write_model,
    write_parameters,
)
from paged_jax.models.families.expert_entries import (
    ExpertKeys,
    check_no_dense_layers,
    read_expert_sizes,
    write_expert_sizes,
)
from paged_jax.models.families.gemma import (
    SANDWICH_TENSORS,
    read_mlp,
    read_per_layer_size,
    read_soft_cap,
    read_sources,
    write_mlp,
    write_sources,
)
from paged_jax.models.families.rope_entries import check_rope_keys, split_by_layer_type
from paged_jax.models.families.window_entries import read_pattern_windows, write_windows
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.known_keys import read_layer_changes
from paged_jax.models.layer_groups import FULL, SLIDING
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import Part
from paged_jax.models.parts.residual import LayerScalar, PerLayerEmbedding, SeparateExperts
from paged_jax.models.rope import Rope

# Sizes that are missing in files of models with images if they equal the defaults of transformers,
# and the head dimension of layers without a window.
_SIZES = {"vocab_size": 262144, "num_attention_heads": 8, "global_head_dim": 512}
_EXPERT_KEYS = ExpertKeys(num_chosen="top_k_experts")
# GGUF files divide the frequencies of pairs that do not rotate by 1e30.
_INFINITE_DIVISOR = 1e20


class Gemma4(Family):
    """Gemma 4, the text model. Each layer multiplies its output by a learned scalar."""

    model_type = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    tensor_names = {
        **SANDWICH_TENSORS,
        "router": "router.proj.weight",
        "router_expert_factor": "router.per_expert_scale",
        "shared_expert": "mlp",
        "fused_gate_up_proj": "experts.gate_up_proj",
        "fused_down_proj": "experts.down_proj",
    }
    gguf = GgufLayout(
        "gemma4",
        own_keys=(
            "feed_forward_length",
            "attention.head_count_kv",
            "attention.key_length_swa",
            "attention.value_length_swa",
            "rope.dimension_count_swa",
        ),
        # The shared expert has the names of a dense MLP.
        tensor_names={
            f"shared_{kind}_proj": f"ffn_{kind}.weight" for kind in ("gate", "up", "down")
        },
    )

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every sixth layer has no window; the last never."""
        entries = entries.complete(_SIZES)
        check_only(self, entries, use_bidirectional_attention="vision")
        windows = read_pattern_windows(entries, 6)
        windows[-1] = None
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        full_heads = _read_full_heads(entries, heads, windows)
        rope, local_rope = self._read_ropes(entries, heads["head_dim"], full_heads["head_dim"])
        values_are_keys = read_boolean(entries, "attention_k_eq_v", False)
        has_bias = read_boolean(entries, "attention_bias", False)
        mlp, experts = read_mlp(entries), self._read_experts(entries)
        is_wide = read_boolean(entries, "use_double_wide_mlp", False)
        table, name = _read_table(entries), mlp.activation.name

        @functools.cache
        def layer(window: int | None, source: int | None) -> LayerSpec:
            is_full = window is None
            attention = Attention(
                **(full_heads if is_full else heads),
                rope=rope if is_full else local_rope,
                norm=HeadNorm(norm),
                normalises_values=True,
                values_are_keys=values_are_keys and is_full,
                eps=norm.eps,
                window=window,
                source=source,
                qkv_bias=has_bias,
                o_bias=has_bias,
                scale=1.0,
            )
            features = mlp.features * (2 if is_wide and source is not None else 1)
            dense = Dense(features=features, activation=mlp.activation)
            steps: list[Part] = [*sandwich_norm(attention, dense, norm).steps]
            if experts is not None:
                steps[1] = SeparateExperts(
                    part=experts,
                    norm=norm,
                    input_norm="post_attention_norm",
                    output_norm="mlp_out_norm",
                )
            if table is not None:
                steps.append(PerLayerEmbedding(size=table.size, activation=name, norm=norm))
            return LayerSpec((*steps, LayerScalar()))

        return read_model(
            self,
            entries,
            layers=tuple(map(layer, windows, read_sources(entries, windows))),
            norm=norm,
            per_layer=table,
            embedding_multiplier=read_factor(entries, "hidden_size") ** 0.5,
            final_logit_softcapping=read_soft_cap(entries, "final_logit_softcapping"),
        )

    def _read_ropes(
        self, entries: ConfigEntries, head_dim: int, full_head_dim: int
    ) -> tuple[Rope, Rope]:
        """Return the rotary embeddings of layers without and with a window.

        Only layers without a window may rotate a part of each head, with "proportional" scaling.
        """
        rope_object = read_object(entries, "rope_parameters") or self.defaults["rope_parameters"]
        full, local = split_by_layer_type(rope_object)
        if not (full and local):
            raise UnsupportedConfigError(
                f"LlamaConfig: rope_parameters must have the keys {FULL!r} and {SLIDING!r} for "
                f"{self.architecture}, each with an object, got {dict(rope_object)!r}."
            )
        check_rope_keys({**full, **local}, self.architecture)
        check_only(self, entries, rope_interleaved=False, rope_scaling=None)
        is_partial = full.get("rope_type") == "proportional"
        rope = convert_rope(self, entries, full, full_head_dim, may_be_partial=is_partial)
        full_entries = entries.replace({"partial_rotary_factor": None})
        local_rope = convert_rope(self, full_entries, local, head_dim)
        if local_rope.scaling is not None:
            raise UnsupportedConfigError(
                f"LlamaConfig: rope_parameters of {SLIDING!r} must have rope_type 'default' for "
                f"{self.architecture}, got rope_type {local_rope.scaling.rope_type!r}."
            )
        return rope, local_rope

    def _read_experts(self, entries: ConfigEntries) -> Experts | None:
        """Return the experts, with the MLP as their shared expert; None without experts."""
        if not read_boolean(entries, "enable_moe_block", False):
            return None
        check_no_dense_layers(self, entries)
        mlp = read_mlp(entries)
        return Experts(
            **read_expert_sizes(self, entries, _EXPERT_KEYS),
            router=Router(has_expert_scale=True),
            renormalises=True,
            activation=mlp.activation,
            shared=Dense(
                features=mlp.features,
                activation=mlp.activation,
                size_name="shared_expert_intermediate_size",
            ),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attentions = [spec.get(Attention) for spec in config.layers]
        full = next((part for part in attentions if part.window is None), attentions[0])
        local = next((part for part in attentions if part.window is not None), full)
        table = config.per_layer or PerLayerTable(0)
        return {
            **write_model(config),
            **_write_heads(full, local),
            **_write_ropes(full.rope, local.rope),
            **write_windows(config),
            **write_sources(config),
            **_write_mlps(config),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": full.qkv_bias and full.o_bias,
            "attention_k_eq_v": full.values_are_keys,
            "hidden_size_per_layer_input": table.size,
            "vocab_size_per_layer_input": table.vocab_size or config.vocab_size,
            "final_logit_softcapping": config.final_logit_softcapping,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        windows = metadata.windows(metadata.integer("attention.sliding_window"))
        num_shared = metadata.integer("attention.shared_kv_layers", 0)
        experts: dict[str, Any] = {"enable_moe_block": False}
        if "num_experts" in entries:
            experts = {
                "enable_moe_block": True,
                "top_k_experts": entries["num_experts_per_tok"],
                "num_experts_per_tok": None,
            }
        return {
            **windows,
            **experts,
            **_read_gguf_heads(metadata, entries, windows["layer_types"], num_shared),
            **_read_gguf_sizes(metadata, num_shared),
            "num_kv_shared_layers": num_shared,
            "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": entries["vocab_size"],
            "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        }


def _read_gguf_heads(
    metadata: GgufMetadata, entries: Mapping[str, Any], types: list[str], num_shared: int
) -> dict[str, Any]:
    """Return the entries about heads and their rotation from a GGUF file.

    Keys without a suffix are about layers without a window. `types` are the types of all layers,
    and `num_shared` is the number of last layers that read the keys of others.
    """
    counts = metadata.integers(key := "attention.head_count_kv")
    num_heads = {kind: {*itertools.compress(counts, map(kind.__eq__, types))} for kind in {*types}}
    if any(len(values) > 1 for values in num_heads.values()):
        raise metadata.unsupported(key, "that differs between layers of the same type")
    head_dim = entries["head_dim"]
    local_dim = metadata.integer("attention.key_length_swa", head_dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.integer(key, local_dim) != local_dim:
            raise metadata.unsupported(key, f"other than {local_dim}")
    if entries["partial_rotary_factor"] != 1 or metadata.number("rope.scaling.factor", 1.0) != 1:
        raise metadata.unsupported("rope.dimension_count or rope.scaling.factor", "of this value")
    # Pairs that do not rotate have a divisor that makes their frequency 0.
    divisors = metadata.rope_divisors("rope_freqs.weight", head_dim // 2) or [1.0]
    num_rotated = divisors.count(1.0)
    if not num_rotated or min(divisors[num_rotated:], default=math.inf) < _INFINITE_DIVISOR:
        raise metadata.unsupported("tensor rope_freqs.weight", "with other numbers than 1 and 1e30")
    own_full = [
        layer for layer, kind in enumerate(types[: len(types) - num_shared]) if kind == FULL
    ]
    names = (f"blk.{layer}.attn_v.weight" for layer in own_full)
    values_are_keys = any(name not in metadata.file.tensors for name in names)
    if len({*counts}) > 1 and not values_are_keys:
        raise metadata.unsupported("attention.head_count_kv", "that differs between layers")
    return {
        "head_dim": local_dim,
        "global_head_dim": head_dim,
        "num_key_value_heads": max(num_heads.get(SLIDING, counts)),
        "num_global_key_value_heads": max(num_heads.get(FULL, counts)) if values_are_keys else None,
        "attention_k_eq_v": values_are_keys,
        "rope_theta": None,
        "rope_scaling": None,
        "partial_rotary_factor": None,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": entries["rope_theta"],
                "partial_rotary_factor": num_rotated / len(divisors),
            },
            SLIDING: {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", entries["rope_theta"]),
            },
        },
    }


def _read_gguf_sizes(metadata: GgufMetadata, num_shared: int) -> dict[str, Any]:
    """Return the sizes of MLPs from a GGUF file. They may be doubled in the last layers."""
    sizes = metadata.integers(key := "feed_forward_length")
    is_wide = sizes[0] != sizes[-1]
    num_first = len(sizes) - num_shared
    if sizes != [sizes[0]] * num_first + [sizes[0] * (1 + is_wide)] * num_shared:
        raise metadata.unsupported(key, f"= {sizes}"[:100])
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": is_wide}


def _read_full_heads(
    entries: ConfigEntries, heads: HeadSizes, windows: list[int | None]
) -> HeadSizes:
    """Return the heads of layers without a window.

    Early files have keys for them. transformers 5 writes the values of single layers instead.
    Values of these layers that differ from each other are not supported.
    """
    changes = read_layer_changes(entries, len(windows))
    values: Mapping[str, Any] = {"head_dim": entries.get("global_head_dim")}
    if read_boolean(entries, "attention_k_eq_v", False):
        num_kv_heads = entries.get("num_global_key_value_heads")
        values = {**values, "num_key_value_heads": num_kv_heads}
    if "per_layer_config" in entries:
        full = [layer for layer, window in enumerate(windows) if window is None]
        values = changes.get(full[0], {})
        if changes != (dict.fromkeys(full, values) if values else {}):
            raise UnsupportedConfigError(
                "LlamaConfig: per_layer_config must give the same values to all layers without a "
                f"sliding window, and give no values to other layers, got {changes!r}."
            )
        if unknown := sorted({*values} - {"head_dim", "num_key_value_heads"}):
            raise UnsupportedConfigError(
                "LlamaConfig: per_layer_config must only contain head_dim and num_key_value_heads, "
                f"got {unknown[0]}."
            )
    num_heads = heads["num_heads"]
    head_dim = read_integer(values, "head_dim", 0) or heads["head_dim"]
    num_kv_heads = read_integer(values, "num_key_value_heads", 0) or heads["num_kv_heads"]
    check_positive("LlamaConfig", global_head_dim=head_dim, num_global_key_value_heads=num_kv_heads)
    check_head_dim(global_head_dim=head_dim)
    if num_heads % num_kv_heads:
        raise ValueError(
            "LlamaConfig: num_attention_heads must be a multiple of num_global_key_value_heads, "
            f"got num_attention_heads {num_heads} and num_global_key_value_heads {num_kv_heads}."
        )
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _write_heads(full: Attention, local: Attention) -> dict[str, Any]:
    """Return the heads of layers without and with a window."""
    differs = full.num_kv_heads != local.num_kv_heads
    return {
        "num_attention_heads": local.num_heads,
        "num_key_value_heads": local.num_kv_heads,
        "head_dim": local.head_dim,
        "num_global_key_value_heads": full.num_kv_heads if differs else None,
        "global_head_dim": full.head_dim,
    }


def _write_mlps(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes of the MLP in all layers, and of the experts beside it."""
    experts = config.layers[0].experts
    if experts is not None and experts.shared is not None:
        sizes = write_expert_sizes(experts, _EXPERT_KEYS)
        return {**write_mlp(experts.shared), **sizes, "enable_moe_block": True}
    first, last = config.layers[0].get(Dense), config.layers[-1].get(Dense)
    is_wide = first.features != last.features
    return {**write_mlp(first), "use_double_wide_mlp": is_wide, "enable_moe_block": False}


def _write_ropes(rope: Rope | None, local_rope: Rope | None) -> dict[str, Any]:
    """Return the rotary embeddings of layers without and with a window."""
    if rope is None or local_rope is None:
        return {}
    factor = {"partial_rotary_factor": rope.rotary_dim / rope.head_dim}
    local = {"rope_type": "default", "rope_theta": local_rope.theta}
    return {"rope_parameters": {FULL: {**write_parameters(rope), **factor}, SLIDING: local}}


def _read_table(entries: ConfigEntries) -> PerLayerTable | None:
    """Return the sizes of the embeddings of each layer, which all tokens have."""
    if not (size := read_per_layer_size(entries)):
        return None
    vocab_size = read_integer(entries, "vocab_size")
    table_size = read_integer(entries, "vocab_size_per_layer_input", vocab_size)
    if table_size != vocab_size:
        raise UnsupportedConfigError(
            f"LlamaConfig: vocab_size_per_layer_input must equal vocab_size, got {table_size}."
        )
    return PerLayerTable(size)
