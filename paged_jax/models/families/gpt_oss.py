"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamp."""

import functools
from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean
from paged_jax.models.families.common import (
    pre_norm,
    read_activation,
    read_factor,
    read_heads,
    read_model,
    read_rope,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.expert_entries import (
    ExpertKeys,
    check_no_dense_layers,
    find_experts,
    read_expert_sizes,
    write_expert_sizes,
)
from paged_jax.models.families.window_entries import read_pattern_windows, write_windows
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import ClampedSwiGLU
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.norm import Norm

_KEYS = ExpertKeys(num_experts="num_local_experts", features="intermediate_size")


class GptOss(Family):
    """gpt-oss."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    tensor_names = {
        "router": "mlp.router.weight",
        "router_bias": "mlp.router.bias",
        "experts_gate_up_proj": "mlp.experts.gate_up_proj",
        "experts_gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "experts_down_proj": "mlp.experts.down_proj",
        "experts_down_bias": "mlp.experts.down_proj_bias",
    }
    is_mxfp4 = True
    gguf = GgufLayout("gpt-oss", tensor_names={"post_attention_norm": "post_attention_norm.weight"})

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. By default, every second layer has no window."""
        # The published files do not contain the dtype.
        entries = entries.complete({"torch_dtype": "bfloat16"})
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        rope = read_rope(self, entries, heads["head_dim"])
        has_bias = read_boolean(entries, "attention_bias", False)
        check_no_dense_layers(self, entries)
        experts = Experts(
            **read_expert_sizes(self, entries, _KEYS),
            renormalises=True,
            activation=ClampedSwiGLU(
                read_activation(entries),
                alpha=read_factor(entries, "swiglu_alpha"),
                limit=read_factor(entries, "swiglu_limit"),
            ),
            has_bias=True,
        )

        @functools.cache
        def layer(window: int | None) -> LayerSpec:
            attention = Attention(
                **heads,
                rope=rope,
                eps=norm.eps,
                window=window,
                has_sinks=True,
                qkv_bias=has_bias,
                o_bias=has_bias,
            )
            return pre_norm(attention, experts, norm)

        windows = read_pattern_windows(entries, 2)
        layers = tuple(map(layer, windows))
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention, experts = config.layers[0].get(Attention), find_experts(config)
        activation = experts.activation
        written = {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_windows(config),
            **write_expert_sizes(experts, _KEYS),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "hidden_act": activation.name,
        }
        if isinstance(activation, ClampedSwiGLU):
            written |= {"swiglu_alpha": activation.alpha, "swiglu_limit": activation.limit}
        return written

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        if metadata.number("rope.freq_base_swa", entries["rope_theta"]) != entries["rope_theta"]:
            raise metadata.unsupported("rope.freq_base_swa")
        scaling = entries["rope_scaling"]
        return {
            "num_local_experts": entries.get("num_experts"),
            "intermediate_size": entries.get("moe_intermediate_size", entries["intermediate_size"]),
            "moe_intermediate_size": None,
            "attention_bias": True,
            # In gpt-oss, YaRN's bounds of the interpolated pairs are not rounded to integers.
            "rope_parameters": None if scaling is None else {**scaling, "truncate": False},
            "rope_scaling": None,
            **metadata.windows(metadata.integer("attention.sliding_window"), 2),
        }
