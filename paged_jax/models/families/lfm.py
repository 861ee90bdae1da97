"""LFM2, without and with experts: most layers are gated short convolutions, not attention."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.arguments import check_positive
from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_integer, read_number
from paged_jax.models.families.common import (
    find_part,
    pre_norm,
    read_activation,
    read_dense,
    read_heads,
    read_layer_indices,
    read_model,
    read_num_layers,
    read_rope,
    read_size,
    use_other_names,
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.expert_entries import (
    find_experts,
    name_experts,
    read_dense_layers,
    read_expert_sizes,
    write_expert_sizes,
    write_mlps,
)
from paged_jax.models.families.gguf_entries import read_recurrent_layers
from paged_jax.models.families.recurrent_entries import read_layer_types, write_layer_types
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.layer_groups import DENSE, RECURRENT, SPARSE
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.convolution import ShortConvolution
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import Part


class Lfm2(Family):
    """LFM2 and LFM2.5, without experts."""

    model_type = "lfm2"
    architecture = "Lfm2ForCausalLM"
    tensor_names = {
        "norm": "model.embedding_norm.weight",
        "input_norm": "operator_norm.weight",
        "post_attention_norm": "ffn_norm.weight",
        "q_norm": "self_attn.q_layernorm.weight",
        "k_norm": "self_attn.k_layernorm.weight",
        "o_proj": "self_attn.out_proj.weight",
        "gate_proj": "feed_forward.w1.weight",
        "up_proj": "feed_forward.w3.weight",
        "down_proj": "feed_forward.w2.weight",
        "mixer_in_proj.*": "conv.in_proj.weight",
        "mixer_in_bias.*": "conv.in_proj.bias",
        "mixer_out_proj": "conv.out_proj.weight",
        "mixer_out_bias": "conv.out_proj.bias",
        "mixer_conv": "conv.conv.weight",
        "mixer_conv_bias": "conv.conv.bias",
    }
    ignored = ("theta",)  # repeats `rope_theta`
    gguf = GgufLayout(
        "lfm2",
        own_keys=("attention.head_count_kv",),
        tensor_names={"norm": "token_embd_norm.weight"},
    )

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. Norms of queries and keys are those of each head."""
        entries = use_other_names(entries, {"tie_embedding": "tie_word_embeddings"})
        norm, heads = Norm(read_number(entries, "norm_eps")), read_heads(entries)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            norm=HeadNorm(norm),
            eps=norm.eps,
        )
        has_bias = read_boolean(entries, "conv_bias", False)
        convolution = ShortConvolution(
            num_channels=read_size(entries, "hidden_size"),
            conv_width=read_size(entries, "conv_L_cache"),
            conv_bias=has_bias,
            in_bias=has_bias,
            out_bias=has_bias,
        )
        tokens = [
            convolution if is_convolution else attention
            for is_convolution in self._read_types(entries)
        ]

        @functools.cache
        def layer(tokens: Part, mlp: Part) -> LayerSpec:
            return pre_norm(tokens, mlp, norm)

        layers = tuple(map(layer, tokens, self.read_mlps(entries)))
        return read_model(self, entries, layers=layers, norm=norm)

    def _read_types(self, entries: ConfigEntries) -> Sequence[bool]:
        """Return whether each layer is a convolution. Old files list the attention layers."""
        attention_layers = read_layer_indices(entries, "full_attn_idxs")
        types = read_layer_types(entries, recurrent=("conv", RECURRENT))
        if types is not None:
            return types
        num_layers = read_num_layers(entries)
        if attention_layers is None:
            return [False] * num_layers
        return [layer not in attention_layers for layer in range(num_layers)]

    def read_mlps(self, entries: ConfigEntries) -> Sequence[Part]:
        """Return the MLP of each layer. Its size in the file may have to be adjusted."""
        entries = use_other_names(entries, {"block_ff_dim": "intermediate_size"})
        if read_boolean(entries, "block_auto_adjust_ff_dim", True):
            size = int(2 * read_integer(entries, "intermediate_size") / 3)
            size = int(read_number(entries, "block_ffn_dim_multiplier", 1.0) * size)
            unit = read_integer(entries, "block_multiple_of", 256)
            check_positive("LlamaConfig", block_multiple_of=unit)
            entries = entries.replace({"intermediate_size": unit * -(-size // unit)})
        return [read_dense(entries)] * read_num_layers(entries)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        convolution: dict[str, Any] = {}
        if (mixer := find_part(config, ShortConvolution)) is not None:
            convolution = {"conv_L_cache": mixer.conv_width, "conv_bias": mixer.conv_bias}
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, next(filter(None, config.ropes), None)),
            **write_layer_types(config, "conv"),
            **convolution,
            **self.write_mlps(config),
            "norm_eps": config.norm.eps,
        }

    def write_mlps(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries for `read_mlps`."""
        mlp = config.layers[0].get(Dense)
        return {**write_dense(mlp), "block_auto_adjust_ff_dim": False}

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, in which the size of the MLP is adjusted."""
        return {
            **read_recurrent_layers(metadata, "conv"),
            "conv_L_cache": metadata.integer("shortconv.l_cache"),
            "conv_bias": metadata.has_tensor("shortconv.conv.bias"),
            "block_auto_adjust_ff_dim": False,
            "norm_eps": entries["rms_norm_eps"],
            "rms_norm_eps": None,
        }


class Lfm2Experts(Lfm2):
    """LFM2 with experts after the first layers, chosen by a sigmoid of each logit."""

    model_type = "lfm2_moe"
    architecture = "Lfm2MoeForCausalLM"
    tensor_names = {
        **Lfm2.tensor_names,
        "router": "feed_forward.gate.weight",
        "router_correction_bias": "feed_forward.expert_bias",
        **name_experts("feed_forward.experts"),
    }
    gguf = GgufLayout(
        "lfm2moe",
        own_keys=("attention.head_count_kv",),
        tensor_names={"norm": "token_embd_norm.weight"},
    )

    def read_mlps(self, entries: ConfigEntries) -> Sequence[Part]:
        """Return the MLP of each layer: a dense MLP in the first layers, then experts."""
        experts = Experts(
            **read_expert_sizes(self, entries),
            router=Router(
                "sigmoid",
                has_correction_bias=read_boolean(entries, "use_expert_bias"),
                epsilon=1e-6,
                factor=read_number(entries, "routed_scaling_factor"),
            ),
            renormalises=read_boolean(entries, "norm_topk_prob"),
            activation=Activation(read_activation(entries)),
        )
        dense, num_dense = read_dense(entries), read_integer(entries, "num_dense_layers")
        is_dense = read_dense_layers(entries, lambda layer: layer < num_dense)
        return [dense if is_dense_layer else experts for is_dense_layer in is_dense]

    def write_mlps(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries for `read_mlps`."""
        experts = find_experts(config)
        kinds = [DENSE if spec.experts is None else SPARSE for spec in config.layers]
        return {
            **write_mlps(config),
            **write_expert_sizes(experts),
            "use_expert_bias": experts.router.has_correction_bias,
            "routed_scaling_factor": experts.router.factor,
            "norm_topk_prob": experts.renormalises,
            "num_dense_layers": kinds.index(SPARSE),
            "mlp_layer_types": kinds,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        metadata.check("expert_gating_func", 2)  # sigmoid
        config_entries = {**super().read_gguf(metadata, entries), "block_auto_adjust_ff_dim": None}
        return {
            **config_entries,
            "use_expert_bias": metadata.has_tensor("exp_probs_b.bias"),
            "norm_topk_prob": True,
            "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
            "num_dense_layers": metadata.integer("leading_dense_block_count", 0),
        }
