"""Kimi Linear: Kimi Delta Attention in three of four layers, latent attention in the others.

Attention does not rotate. Experts are as in DeepSeek V3.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import (
    ConfigEntries,
    read_boolean,
    read_integer,
    read_number,
    read_object,
    warn_of_unknown,
)
from paged_jax.models.families.common import (
    check_only,
    find_part,
    pre_norm,
    read_activation,
    read_dense,
    read_layer_indices,
    read_model,
    read_num_layers,
    read_size,
    use_other_names,
    write_model,
)
from paged_jax.models.families.expert_entries import (
    SIGMOID_ROUTER,
    ExpertKeys,
    find_experts,
    name_experts,
    read_expert_sizes,
    read_first_dense,
    read_shared_expert,
    write_expert_sizes,
    write_first_dense,
    write_mlps,
)
from paged_jax.models.families.latent_entries import (
    IGNORED_HEAD_KEYS,
    read_latent_sizes,
    read_num_heads,
    write_latent_sizes,
)
from paged_jax.models.families.recurrent_entries import (
    read_interval,
    read_layer_types,
    write_layer_types,
)
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.kimi_delta import KimiDelta
from paged_jax.models.parts.latent import LatentAttention
from paged_jax.models.parts.norm import Norm

# Keys of DeepSeek in some files, and the keys of Kimi for the same entries.
_OTHER_NAMES = {
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
_EXPERT_KEYS = ExpertKeys(num_chosen="num_experts_per_token")
# Keys in the object `linear_attn_config`, and the keys of newer files for the same entries.
_NEWER_KEYS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


class KimiLinear(Family):
    """Kimi Linear."""

    model_type = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    tensor_names = {
        "mixer_in_proj.*": "self_attn.*_proj.weight",
        "mixer_conv.*": "self_attn.*_conv1d.weight",
        "mixer_rank_proj.decay": "self_attn.f_a_proj.weight",
        "mixer_rank_proj.gate": "self_attn.g_a_proj.weight",
        "mixer_decay_proj": "self_attn.f_b_proj.weight",
        "mixer_gate_proj": "self_attn.g_b_proj.weight",
        "mixer_gates_proj": "self_attn.b_proj.weight",
        "mixer_out_proj": "self_attn.o_proj.weight",
        "mixer_decay": "self_attn.A_log",
        "mixer_time": "self_attn.dt_bias",
        "mixer_norm": "self_attn.o_norm.weight",
        "router": "block_sparse_moe.gate.weight",
        "router_correction_bias": "block_sparse_moe.gate.e_score_correction_bias",
        "shared_expert": "block_sparse_moe.shared_experts",
        **name_experts("block_sparse_moe.experts"),
    }
    in_memory = {
        "block_sparse_moe.": "mlp.",
        "self_attn.*_conv1d.": "self_attn.conv1d.",
        "self_attn.f_a_proj.": "self_attn.forget_gate.f_a_proj.",
        "self_attn.f_b_proj.": "self_attn.forget_gate.f_b_proj.",
        "self_attn.A_log": "self_attn.forget_gate.A_log",
        "self_attn.dt_bias": "self_attn.forget_gate.dt_bias",
    }
    # transformers writes the dense MLP under the name of the experts.
    renamed = {
        "block_sparse_moe.gate_proj": "mlp.gate_proj",
        "block_sparse_moe.up_proj": "mlp.up_proj",
        "block_sparse_moe.down_proj": "mlp.down_proj",
    }
    ignored = (*IGNORED_HEAD_KEYS, "rope_interleave")

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. The first layers have a dense MLP."""
        entries = use_other_names(entries, _OTHER_NAMES)
        if "max_position_embeddings" not in entries:
            entries = use_other_names(entries, {"model_max_length": "max_position_embeddings"})
        check_only(self, entries, mla_use_nope=True, moe_router_activation_func="sigmoid")
        nested = read_object(entries, "linear_attn_config")
        unknown = {*nested} - {*_NEWER_KEYS, "full_attn_layers", "kda_layers"}
        warn_of_unknown("linear_attn_config", unknown, self.architecture)
        norm = Norm(read_number(entries, "rms_norm_eps"))
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = LatentAttention(
            num_heads=read_num_heads(entries),
            sizes=read_latent_sizes(entries),
            rope=None,
            latent_bias=has_bias,
            o_bias=has_bias,
        )
        newer = {name: nested[key] for key, name in _NEWER_KEYS.items() if key in nested}
        mixer = self._read_mixer(entries.replace(newer), norm)
        dense, experts = read_dense(entries), self._read_experts(entries)

        @functools.cache
        def layer(is_recurrent: bool, is_dense: bool) -> LayerSpec:
            tokens = mixer if is_recurrent else attention
            return pre_norm(tokens, dense if is_dense else experts, norm)

        types = self._read_types(entries, nested)
        layers = tuple(map(layer, types, read_first_dense(entries, 1)))
        return read_model(self, entries, layers=layers, norm=norm)

    def _read_types(self, entries: ConfigEntries, nested: Mapping[str, Any]) -> Sequence[bool]:
        """Return whether each layer is recurrent. Old files count the attention layers from 1."""
        attention_layers = read_layer_indices(nested, "full_attn_layers")
        types = read_layer_types(entries)
        if types is not None:
            return types
        if attention_layers is None:
            return read_interval(entries)
        num_layers = read_num_layers(entries)
        return [layer + 1 not in attention_layers for layer in range(num_layers)]

    def _read_mixer(self, entries: ConfigEntries, norm: Norm) -> KimiDelta:
        return KimiDelta(
            num_heads=read_size(entries, "linear_num_heads"),
            head_dim=read_size(entries, "linear_head_dim"),
            conv_width=read_size(entries, "linear_conv_kernel_dim"),
            conv_act=read_activation(entries),
            norm_eps=norm.eps,
        )

    def _read_experts(self, entries: ConfigEntries) -> Experts:
        sizes = read_expert_sizes(self, entries, _EXPERT_KEYS)
        num_shared = read_integer(entries, "num_shared_experts", 0)
        if num_shared < 0:
            raise ValueError(
                f"LlamaConfig: num_shared_experts must be 0 or more, got {num_shared}."
            )
        router = dataclasses.replace(
            SIGMOID_ROUTER,
            num_groups=read_integer(entries, "num_expert_group"),
            num_chosen_groups=read_integer(entries, "topk_group"),
            factor=read_number(entries, "routed_scaling_factor"),
        )
        return Experts(
            **sizes,
            router=router,
            renormalises=read_boolean(entries, "moe_renormalize"),
            activation=Activation(read_activation(entries)),
            shared=read_shared_expert(entries, num_shared * sizes["features"]),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        return {
            **write_model(config),
            **write_layer_types(config),
            **self._write_tokens(config),
            **write_mlps(config),
            **write_first_dense(config),
            **self._write_experts(find_experts(config)),
            "rms_norm_eps": config.norm.eps,
        }

    def _write_tokens(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries of attention and the mixer, of which a model may lack one."""
        written: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}
        if (attention := find_part(config, LatentAttention)) is not None:
            heads = ("num_attention_heads", "num_key_value_heads")
            written |= dict.fromkeys(heads, attention.num_heads)
            written |= write_latent_sizes(attention.sizes)
            written["attention_bias"] = attention.latent_bias and attention.o_bias
        if (mixer := find_part(config, KimiDelta)) is not None:
            written |= {
                "linear_num_heads": mixer.num_heads,
                "linear_head_dim": mixer.head_dim,
                "linear_conv_kernel_dim": mixer.conv_width,
            }
        return written

    def _write_experts(self, experts: Experts) -> dict[str, Any]:
        size, router = 0 if experts.shared is None else experts.shared.features, experts.router
        return {
            **write_expert_sizes(experts, _EXPERT_KEYS),
            "num_expert_group": router.num_groups,
            "topk_group": router.num_chosen_groups,
            "routed_scaling_factor": router.factor,
            "num_shared_experts": size // experts.features,
            "moe_renormalize": experts.renormalises,
        }
