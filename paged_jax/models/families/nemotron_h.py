"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts.

Attention does not rotate, and MLPs and experts have no gate.
"""

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
    read_activation,
    read_heads,
    read_model,
    read_num_layers,
    read_size,
    use_other_names,
    write_heads,
    write_model,
)
from paged_jax.models.families.expert_entries import (
    ROUTED_KEYS,
    SIGMOID_ROUTER,
    read_expert_sizes,
    read_router,
    write_expert_sizes,
    write_router,
)
from paged_jax.models.families.recurrent_entries import name_mamba, read_time_limits
from paged_jax.models.layer_groups import FULL, RECURRENT
from paged_jax.models.layer_spec import LayerSpec
from paged_jax.models.parts.activation import Ungated
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.part import Part
from paged_jax.models.parts.residual import Sublayer
from paged_jax.models.parts.state_space import Mamba2

# Names of layers that are only an MLP, or only experts.
_MLP, _EXPERTS = "mlp", "moe"
# Names of layers in some files, and the names that transformers writes now.
_TYPES = {"mamba": RECURRENT, "attention": FULL}
# Layer that each character of `hybrid_override_pattern` stands for.
_PATTERN = {"M": RECURRENT, "*": FULL, "-": _MLP, "E": _EXPERTS}
# Layers of a file without a list or a pattern, as in transformers.
_DEFAULT_TYPES = (RECURRENT, _EXPERTS, FULL, _MLP)
# Sizes that a file may lack, as in transformers.
_DEFAULT_SIZES = {"num_attention_heads": 32, "intermediate_size": 21504}


class NemotronH(Family):
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3."""

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    tensor_names = {
        **name_mamba("mixer"),
        "norm": "model.norm_f.weight",
        "input_norm": "norm.weight",
        "post_attention_norm": "norm.weight",
        "q_proj": "mixer.q_proj.weight",
        "k_proj": "mixer.k_proj.weight",
        "v_proj": "mixer.v_proj.weight",
        "o_proj": "mixer.o_proj.weight",
        "o_bias": "mixer.o_proj.bias",
        "up_proj": "mixer.up_proj.weight",
        "down_proj": "mixer.down_proj.weight",
        "router": "mixer.gate.weight",
        "router_correction_bias": "mixer.gate.e_score_correction_bias",
        "shared_expert": "mixer.shared_experts",
        "moe_in_proj": "mixer.fc1_latent_proj.weight",
        "moe_out_proj": "mixer.fc2_latent_proj.weight",
        "experts_up_proj": "mixer.experts.*.up_proj.weight",
        "experts_down_proj": "mixer.experts.*.down_proj.weight",
    }
    prefixes = {
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",
        "mtp.": None,
    }
    written_prefixes = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.": "backbone.",
    }
    ignored = (
        # transformers has one shared expert of the given size, whatever their number is.
        "n_shared_experts",
        # The constant of all norms is `layer_norm_epsilon`.
        "norm_eps",
        # In models without a layer that reads them.
        "intermediate_size",
        "mlp_hidden_act",
        "mlp_bias",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "moe_latent_size",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "norm_topk_prob",
    )

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. The list of layers determines their number."""
        other_names = {
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "layer_types": "layers_block_type",
        }
        entries = use_other_names(entries, other_names).complete(_DEFAULT_SIZES)
        types = self._read_types(entries)
        entries = entries.replace({"num_hidden_layers": len(types)})
        read_num_layers(entries)  # checks their number
        norm, parts = Norm(read_number(entries, "layer_norm_epsilon")), dict[str, Part]()
        parts[RECURRENT] = self._read_mamba(entries, norm)
        parts[FULL] = self._read_attention(entries, norm)
        if _MLP in types:
            parts[_MLP] = self._read_mlp(entries)
        if _EXPERTS in types:
            parts[_EXPERTS] = self._read_experts(entries)

        @functools.cache
        def layer(name: str) -> LayerSpec:
            # Weights of the two kinds of norms have different names.
            norm_name = "input_norm" if name in (RECURRENT, FULL) else "post_attention_norm"
            return LayerSpec((Sublayer(part=parts[name], norm=norm, input_norm=norm_name),))

        layers = tuple(map(layer, types))
        return read_model(self, entries, layers=layers, norm=norm)

    def _read_types(self, entries: ConfigEntries) -> list[str]:
        """Return the type of each layer. Old files have a string with a character per layer."""
        pattern = entries.get("hybrid_override_pattern")
        names = read_names(entries, "layers_block_type")
        if names is None and pattern is not None:
            if not isinstance(pattern, str) or {*pattern} - {*_PATTERN}:
                raise ValueError(
                    "LlamaConfig: hybrid_override_pattern must be a string of the characters "
                    f"{', '.join(_PATTERN)}, got {pattern!r}."
                )
            names = [_PATTERN[character] for character in pattern]
        names = [_TYPES.get(name, name) for name in (_DEFAULT_TYPES if names is None else names)]
        if not names:
            raise ValueError("LlamaConfig: layers_block_type must name at least one layer, got [].")
        if unsupported := {*names} - {*_DEFAULT_TYPES}:
            raise UnsupportedConfigError(
                "LlamaConfig: layers_block_type must only contain "
                f"{', '.join(map(repr, _DEFAULT_TYPES))}, got {min(unsupported)!r}."
            )
        return names

    def _read_mamba(self, entries: ConfigEntries, norm: Norm) -> Mamba2:
        has_bias = read_boolean(entries, "use_bias", False)
        return Mamba2(
            num_heads=read_size(entries, "mamba_num_heads"),
            num_groups=read_size(entries, "n_groups"),
            head_dim=read_size(entries, "mamba_head_dim"),
            state_dim=read_size(entries, "ssm_state_size"),
            conv_width=read_size(entries, "conv_kernel"),
            conv_bias=read_boolean(entries, "use_conv_bias", False),
            conv_act=read_activation(entries, "mamba_hidden_act"),
            in_bias=has_bias,
            out_bias=has_bias,
            norm_eps=norm.eps,
            time_limits=read_time_limits(entries),
        )

    def _read_attention(self, entries: ConfigEntries, norm: Norm) -> Attention:
        has_bias = read_boolean(entries, "attention_bias", False)
        return Attention(
            **read_heads(entries), rope=None, eps=norm.eps, qkv_bias=has_bias, o_bias=has_bias
        )

    def _read_mlp(self, entries: ConfigEntries) -> Dense:
        return Dense(
            features=read_integer(entries, "intermediate_size"),
            activation=Ungated(read_activation(entries, "mlp_hidden_act")),
            has_bias=read_boolean(entries, "mlp_bias", False),
        )

    def _read_experts(self, entries: ConfigEntries) -> Experts:
        """Return the experts, which may read and write projections of the hidden states."""
        activation = Ungated(read_activation(entries, "mlp_hidden_act"))
        if latent_size := read_integer(entries, "moe_latent_size", 0):
            check_positive("LlamaConfig", moe_latent_size=latent_size)
        has_bias, shared = read_boolean(entries, "mlp_bias", False), None
        if size := read_integer(entries, "moe_shared_expert_intermediate_size"):
            shared = Dense(
                features=size,
                activation=activation,
                has_bias=has_bias,
                size_name="shared_expert_intermediate_size",
            )
        return Experts(
            **read_expert_sizes(self, entries, ROUTED_KEYS),
            latent_size=latent_size,
            router=read_router(entries, SIGMOID_ROUTER),
            renormalises=read_boolean(entries, "norm_topk_prob"),
            activation=activation,
            has_latent_bias=has_bias and latent_size > 0,
            shared=shared,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        parts = [spec.get(Sublayer).part for spec in config.layers]
        names = {Mamba2: RECURRENT, Attention: FULL, Dense: _MLP, Experts: _EXPERTS}
        written = {
            **write_model(config),
            **write_heads(config),
            "layers_block_type": [names.get(type(part), type(part).__name__) for part in parts],
            "layer_norm_epsilon": config.norm.eps,
            "mlp_bias": any(map(self._has_bias, parts)),
        }
        for part in dict.fromkeys(parts):
            if isinstance(part, Mamba2):
                written |= self._write_mamba(part)
            elif isinstance(part, Attention):
                written["attention_bias"] = part.qkv_bias and part.o_bias
            elif isinstance(part, Dense):
                written["intermediate_size"] = part.features
                written["mlp_hidden_act"] = part.activation.name
            elif isinstance(part, Experts):
                written |= self._write_experts(part)
        return written

    def _has_bias(self, part: Part) -> bool:
        """Return whether an MLP or experts have biases."""
        if isinstance(part, Experts):
            return part.has_latent_bias or part.shared is not None and part.shared.has_bias
        return isinstance(part, Dense) and part.has_bias

    def _write_mamba(self, mixer: Mamba2) -> dict[str, Any]:
        return {
            "mamba_num_heads": mixer.num_heads,
            "n_groups": mixer.num_groups,
            "mamba_head_dim": mixer.head_dim,
            "ssm_state_size": mixer.state_dim,
            "conv_kernel": mixer.conv_width,
            "use_conv_bias": mixer.conv_bias,
            "mamba_hidden_act": mixer.conv_act,
            "use_bias": mixer.in_bias,
            "time_step_limit": mixer.time_limits,
        }

    def _write_experts(self, experts: Experts) -> dict[str, Any]:
        shared = experts.shared
        return {
            **write_expert_sizes(experts, ROUTED_KEYS),
            **write_router(experts.router),
            "mlp_hidden_act": experts.activation.name,
            "moe_shared_expert_intermediate_size": 0 if shared is None else shared.features,
            "moe_latent_size": experts.latent_size or None,
            "norm_topk_prob": experts.renormalises,
        }
