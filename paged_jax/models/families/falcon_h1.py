"""Falcon-H1: attention and Mamba-2 run in parallel in each layer, with factors as in muP."""

import dataclasses
from typing import Any

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
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    use_other_names,
    write_dense,
    write_factor,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.recurrent_entries import (
    name_mamba,
    read_mamba,
    read_numbers,
    write_mamba,
)
from paged_jax.models.layer_groups import HYBRID
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.residual import Parallel
from paged_jax.models.parts.state_space import Mamba2


class FalconH1(Family):
    """Falcon-H1."""

    model_type = "falcon_h1"
    architecture = "FalconH1ForCausalLM"
    tensor_names = {
        **name_mamba("mamba"),
        "gate_proj": "feed_forward.gate_proj.weight",
        "up_proj": "feed_forward.up_proj.weight",
        "down_proj": "feed_forward.down_proj.weight",
        "norm": "model.final_layernorm.weight",
        "post_attention_norm": "pre_ff_layernorm.weight",
    }
    prefixes = {"final_layernorm.": "model.final_layernorm."}

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. The factors of the MLP are those of its gate and its output."""
        self._check_layers(entries)
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"]),
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
            in_multiplier=read_number(entries, "attention_in_multiplier"),
            key_multiplier=read_number(entries, "key_multiplier"),
            out_multiplier=read_number(entries, "attention_out_multiplier"),
        )
        gate, out = read_numbers(entries, "mlp_multipliers", 2)
        mlp = dataclasses.replace(
            read_dense(entries, has_bias=read_boolean(entries, "mlp_bias", False)),
            gate_multiplier=gate,
            out_multiplier=out,
        )
        layer = pre_norm(Parallel((self._read_mamba(entries), attention)), mlp, norm)
        return read_model(
            self,
            entries,
            layers=(layer,) * read_num_layers(entries),
            norm=norm,
            embedding_multiplier=read_factor(entries, "embedding_multiplier"),
            logit_scale=read_factor(entries, "lm_head_multiplier"),
        )

    def _check_layers(self, entries: ConfigEntries) -> None:
        """Check the list of layer types, which few files have: all layers are of the same type."""
        entries = use_other_names(entries, {"layer_types": "layers_block_type"})
        names = read_names(entries, "layers_block_type", read_num_layers(entries))
        if unsupported := {*(names or ())} - {HYBRID}:
            raise UnsupportedConfigError(
                f"LlamaConfig: layers_block_type must only contain {HYBRID!r}, got "
                f"{min(unsupported)!r}."
            )

    def _read_mamba(self, entries: ConfigEntries) -> Mamba2:
        expansion = read_integer(entries, "mamba_expand", 0)
        inner_size = read_integer(entries, "mamba_d_ssm", None)
        has_norm = read_boolean(entries, "mamba_rms_norm", False)
        is_before = read_boolean(entries, "mamba_norm_before_gate", False)
        norm = "before gate" if is_before else "after gate"
        gate, inputs, b, c, steps = read_numbers(entries, "ssm_multipliers", 5)
        return dataclasses.replace(
            read_mamba(entries, inner_size or expansion * read_integer(entries, "hidden_size")),
            norm=norm if has_norm else "none",
            out_bias=read_boolean(entries, "projectors_bias", False),
            in_multiplier=read_number(entries, "ssm_in_multiplier"),
            out_multiplier=read_number(entries, "ssm_out_multiplier"),
            piece_multipliers=(gate, inputs, b, c, steps),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        layer = config.layers[0]
        attention, mixer, mlp = layer.get(Attention), layer.get(Mamba2), layer.get(Dense)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_dense(mlp),
            **write_mamba(mixer),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias and attention.o_bias,
            "mlp_bias": mlp.has_bias,
            "mamba_d_ssm": mixer.num_heads * mixer.head_dim,
            "mamba_rms_norm": mixer.norm != "none",
            "mamba_norm_before_gate": mixer.norm != "after gate",
            "projectors_bias": mixer.out_bias,
            "embedding_multiplier": write_factor(config.embedding_multiplier),
            "lm_head_multiplier": write_factor(config.logit_scale),
            "attention_in_multiplier": attention.in_multiplier,
            "key_multiplier": attention.key_multiplier,
            "attention_out_multiplier": attention.out_multiplier,
            "mlp_multipliers": [mlp.gate_multiplier, mlp.out_multiplier],
            "ssm_in_multiplier": mixer.in_multiplier,
            "ssm_out_multiplier": mixer.out_multiplier,
            "ssm_multipliers": list(mixer.piece_multipliers),
        }
