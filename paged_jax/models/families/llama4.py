"""Llama 4: experts, and layers that attend to chunks of tokens."""

import functools
from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import (
    ConfigEntries,
    read_boolean,
    read_integer,
    read_names,
    read_number,
)
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.common import (
    pre_norm,
    read_activation,
    read_factor,
    read_heads,
    read_layer_indices,
    read_model,
    read_rope,
    read_rotations,
    write_heads,
    write_model,
    write_rope,
    write_rotations,
)
from paged_jax.models.families.expert_entries import (
    ExpertKeys,
    find_experts,
    read_dense_layers,
    read_expert_sizes,
    write_expert_sizes,
)
from paged_jax.models.layer_groups import CHUNKED, FULL
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.rope import QueryScale

_EXPERT_KEYS = ExpertKeys("num_local_experts", features="intermediate_size")


class Llama4(Family):
    """Llama 4, the text model.

    Most layers rotate queries and keys, normalise them, and attend to chunks of tokens. The others
    attend to all tokens without rotation, and scale queries by their position.
    """

    model_type = "llama4_text"
    architecture = "Llama4ForCausalLM"
    tensor_names = {
        "gate_proj": "feed_forward.gate_proj.weight",
        "up_proj": "feed_forward.up_proj.weight",
        "down_proj": "feed_forward.down_proj.weight",
        "router": "feed_forward.router.weight",
        "shared_expert": "feed_forward.shared_expert",
        "transposed_gate_up_proj": "feed_forward.experts.gate_up_proj",
        "transposed_down_proj": "feed_forward.experts.down_proj",
    }
    # The scale of queries may be off. Layers have chunks instead of windows.
    ignored = ("attn_scale", "floor_scale", "sliding_window")

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every fourth layer attends to all tokens."""
        # In files of models with images, sizes that equal the defaults of transformers are missing.
        entries = entries.complete({"intermediate_size": 8192})
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"], is_interleaved=True)
        head_norm = None
        if read_boolean(entries, "use_qk_norm", False):
            head_norm = HeadNorm(norm, has_weight=False)
        query_scale = _read_query_scale(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        activation = Activation(read_activation(entries))
        features = read_integer(entries, "intermediate_size_mlp")
        check_positive("LlamaConfig", intermediate_size_mlp=features)
        mlp = Dense(features=features, activation=activation)
        sizes = read_expert_sizes(self, entries, _EXPERT_KEYS)
        experts = Experts(
            **sizes,
            router=Router("sigmoid", scales_inputs=True),
            activation=activation,
            shared=Dense(
                features=sizes["features"],
                activation=activation,
                size_name="shared_expert_intermediate_size",
            ),
        )

        @functools.cache
        def layer(rotates: bool, chunk: int | None, is_dense: bool) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope if rotates else None,
                rope_interleaved=True,
                chunk=chunk,
                norm=head_norm if rotates else None,
                eps=norm.eps,
                qkv_bias=has_bias,
                o_bias=has_bias,
                query_scale=None if rotates else query_scale,
            )
            return pre_norm(attention, mlp if is_dense else experts, norm)

        rotations = read_rotations(entries)
        chunks, is_dense = _read_chunks(entries, rotations), _read_dense_layers(entries)
        layers = tuple(map(layer, rotations, chunks, is_dense))
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attentions = [spec.get(Attention) for spec in config.layers]
        chunks, experts = config.attention_chunks, find_experts(config)
        scale = next(filter(None, (attention.query_scale for attention in attentions)), None)
        mlps = (spec.find(Dense) for spec in config.layers)
        mlp = next(filter(None, mlps), None)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, next(filter(None, config.ropes), None)),
            **write_rotations(config),
            **write_expert_sizes(experts, _EXPERT_KEYS),
            # Nothing depends on this size if all layers have experts.
            "intermediate_size_mlp": experts.features if mlp is None else mlp.features,
            "hidden_act": experts.activation.name,
            "moe_layers": [
                layer for layer, spec in enumerate(config.layers) if spec.experts is not None
            ],
            "attention_chunk_size": next(filter(None, chunks), None),
            "layer_types": [FULL if chunk is None else CHUNKED for chunk in chunks],
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attentions[0].qkv_bias and attentions[0].o_bias,
            "use_qk_norm": any(attention.norm is not None for attention in attentions),
            "attn_temperature_tuning": scale is not None,
            **({} if scale is None else {"attn_scale": scale.beta, "floor_scale": scale.length}),
        }


def _read_query_scale(entries: ConfigEntries) -> QueryScale | None:
    """Return the scale of queries in layers without rotation; None for no scale."""
    # The value is a boolean in newer files, and a number in early files, where 0 means false.
    if not entries.get("attn_temperature_tuning"):
        return None
    beta, length = read_number(entries, "attn_scale"), read_number(entries, "floor_scale")
    return QueryScale(beta, int(length), offset=1, only_without_rope=True)


def _read_chunks(entries: ConfigEntries, rotations: list[bool]) -> list[int | None]:
    """Return the chunk size of each layer in tokens; None for layers that attend to all tokens.

    By default, layers that rotate queries and keys have chunks.
    """
    size = read_integer(entries, "attention_chunk_size", None)
    if size is not None and size < 1:
        raise ValueError(f"LlamaConfig: attention_chunk_size must be positive or null, got {size}.")
    names = read_names(entries, "layer_types", len(rotations))
    if names is None:
        return [size if rotates else None for rotates in rotations]
    if unsupported := {*names} - {FULL, CHUNKED}:
        raise UnsupportedConfigError(
            f"LlamaConfig: layer_types must only contain {FULL!r} and {CHUNKED!r}, got "
            f"{min(unsupported)!r}."
        )
    if CHUNKED in names and size is None:
        raise ValueError(
            f"LlamaConfig: attention_chunk_size must be an integer if layer_types contains "
            f"{CHUNKED!r}, got null."
        )
    return [None if name == FULL else size for name in names]


def _read_dense_layers(entries: ConfigEntries) -> list[bool]:
    """Return whether each layer has a dense MLP instead of experts.

    The layers in ``moe_layers`` have experts, by default every n-th, with n from
    ``interleave_moe_layer_step``.
    """
    step = read_integer(entries, "interleave_moe_layer_step", 1)
    check_positive("LlamaConfig", interleave_moe_layer_step=step)
    listed = read_layer_indices(entries, "moe_layers")
    return read_dense_layers(
        entries, lambda layer: layer not in listed if listed else (layer + 1) % step > 0
    )
