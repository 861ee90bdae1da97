"""Gemma 3n: Gemma 3 with several residual streams, and embeddings of each token in each layer."""

import functools
from typing import Any

from paged_jax.arguments import check_positive, is_int, is_real
from paged_jax.models.config import Family, ModelConfig, PerLayerTable
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_integer, read_number
from paged_jax.models.families.common import (
    read_activation,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_ropes,
    write_heads,
    write_model,
    write_ropes,
)
from paged_jax.models.families.gemma import (
    SANDWICH_TENSORS,
    read_per_layer_size,
    read_soft_cap,
    read_sources,
    write_sources,
)
from paged_jax.models.families.window_entries import read_pattern_windows, write_windows
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Activation, SparseGate
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.residual import LaurelSublayer, PerLayerEmbedding, Sublayer
from paged_jax.models.parts.streams import ResidualStreams, Streams

# Sizes that are missing in files of models with images if they equal the defaults of transformers.
_SIZES = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
}
# Without an entry `activation_sparsity_pattern`, the first 10 layers have a sparsity of 0.95.
_NUM_SPARSE, _SPARSITY = 10, 0.95


class Gemma3n(Family):
    """Gemma 3n, the text model.

    Attention and MLP run on one of the residual streams. A low-rank branch runs beside attention.
    The MLPs of some layers set most gates to 0. The last layers read the keys and values of others.
    """

    model_type = "gemma3n_text"
    architecture = "Gemma3nForCausalLM"
    tensor_names = SANDWICH_TENSORS

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every fifth layer has no window."""
        entries = entries.complete(_SIZES)
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        rope, local_rope = read_ropes(self, entries, heads["head_dim"])
        has_bias = read_boolean(entries, "attention_bias", False)
        name = read_activation(entries, "hidden_activation")
        rank = read_integer(entries, "laurel_rank")
        check_positive("LlamaConfig", laurel_rank=rank)
        streams, table = _read_streams(entries), _read_table(entries)
        embedding = table and PerLayerEmbedding(size=table.size, activation=name, norm=norm)
        deviation = read_number(entries, "initializer_range", 0.02)

        @functools.cache
        def layer(
            window: int | None, source: int | None, features: int, sparsity: float
        ) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope if window is None else local_rope,
                norm=HeadNorm(norm),
                normalises_values=True,
                eps=norm.eps,
                window=window,
                source=source,
                qkv_bias=has_bias,
                o_bias=has_bias,
                scale=1.0,
            )
            activation = SparseGate(name, sparsity) if sparsity else Activation(name)
            steps = (
                LaurelSublayer(
                    part=attention,
                    rank=rank,
                    norm=norm,
                    input_norm="input_norm",
                    output_norm="attention_out_norm",
                ),
                Sublayer(
                    part=Dense(features=features, activation=activation),
                    norm=norm,
                    input_norm="post_attention_norm",
                    output_norm="mlp_out_norm",
                ),
            )
            step = Streams(
                streams=streams, steps=steps, norm=norm, embedding=embedding, deviation=deviation
            )
            return LayerSpec((step,))

        windows = read_pattern_windows(entries, 5)
        sources = read_sources(entries, windows)
        sizes, sparsities = _read_sizes(entries), _read_sparsities(entries)
        return read_model(
            self,
            entries,
            layers=tuple(map(layer, windows, sources, sizes, sparsities)),
            norm=norm,
            streams=streams,
            per_layer=table,
            embedding_multiplier=read_factor(entries, "hidden_size") ** 0.5,
            final_logit_softcapping=read_soft_cap(entries, "final_logit_softcapping"),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, mlps = config.layers[0].get(Attention), [x.get(Dense) for x in config.layers]
        gates = [mlp.activation for mlp in mlps]
        laurel = config.layers[0].find(LaurelSublayer)
        table, streams = config.per_layer or PerLayerTable(0), config.streams or ResidualStreams(1)
        return {
            **write_model(config),
            **write_heads(config),
            **write_ropes(config),
            **write_windows(config),
            **write_sources(config),
            "intermediate_size": [mlp.features for mlp in mlps],
            "hidden_activation": gates[0].name,
            "activation_sparsity_pattern": [
                gate.sparsity if isinstance(gate, SparseGate) else 0.0 for gate in gates
            ],
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "laurel_rank": 0 if laurel is None else laurel.rank,
            "altup_num_inputs": streams.count,
            "altup_active_idx": streams.active,
            "altup_correct_scale": streams.scales_active,
            "hidden_size_per_layer_input": table.size,
            "vocab_size_per_layer_input": table.vocab_size or config.vocab_size,
            "final_logit_softcapping": config.final_logit_softcapping,
        }


def _read_streams(entries: ConfigEntries) -> ResidualStreams:
    """Return the number of residual streams, and the index of the stream that layers compute."""
    count = read_integer(entries, "altup_num_inputs")
    active = read_integer(entries, "altup_active_idx")
    if not (count > 1 and 0 <= active < count):
        raise ValueError(
            "LlamaConfig: altup_num_inputs must be at least 2, and altup_active_idx at least 0 and "
            f"less than altup_num_inputs, got altup_num_inputs {count} and altup_active_idx "
            f"{active}."
        )
    return ResidualStreams(count, active, read_boolean(entries, "altup_correct_scale", True))


def _read_table(entries: ConfigEntries) -> PerLayerTable | None:
    """Return the sizes of the embeddings of each layer, which only the first tokens may have."""
    if not (size := read_per_layer_size(entries)):
        return None
    vocab_size = read_integer(entries, "vocab_size")
    table_size = read_integer(entries, "vocab_size_per_layer_input", vocab_size)
    return PerLayerTable(size, 0 if table_size == vocab_size else table_size)


def _read_sizes(entries: ConfigEntries) -> list[int]:
    """Return the number of features of each layer's MLP."""
    sizes, num_layers = entries["intermediate_size"], read_num_layers(entries)
    if not isinstance(sizes, list):
        return [read_integer(entries, "intermediate_size")] * num_layers
    if len(sizes) != num_layers or not all(is_int(size) and size > 0 for size in sizes):
        raise ValueError(
            f"LlamaConfig: intermediate_size must be a positive integer, or a list of {num_layers} "
            f"of them, one for each layer, got {sizes!r}."
        )
    return sizes


def _read_sparsities(entries: ConfigEntries) -> list[float]:
    """Return the fraction of the gates that each layer's MLP sets to 0."""
    sparsities, num_layers = entries.get("activation_sparsity_pattern"), read_num_layers(entries)
    if sparsities is None:
        num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        return [_SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    if (
        not isinstance(sparsities, list)
        or len(sparsities) != num_layers
        or not all(is_real(sparsity) and 0 <= sparsity < 1 for sparsity in sparsities)
    ):
        raise ValueError(
            f"LlamaConfig: activation_sparsity_pattern must be a list of {num_layers} numbers, one "
            f"for each layer, of at least 0 and less than 1, got {sparsities!r}."
        )
    return [*map(float, sparsities)]
