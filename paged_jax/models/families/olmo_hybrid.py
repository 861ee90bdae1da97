"""OLMo Hybrid: OLMo 2 with gated delta nets in three of four layers.

Recurrent layers have norms before their parts, layers with attention have norms after them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import (
    ConfigEntries,
    read_boolean,
    read_integer,
    read_number,
    read_object,
)
from paged_jax.models.families.common import (
    find_part,
    post_norm,
    pre_norm,
    read_dense,
    read_heads,
    read_model,
    read_rope,
    read_size,
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.recurrent_entries import (
    read_delta_net,
    read_interval,
    read_layer_types,
    write_delta_net,
    write_layer_types,
)
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.rope import Rope

# Constant in the norms of delta nets, which files do not contain.
_DELTA_NORM_EPS = 1e-5


class OlmoHybrid(Family):
    """OLMo Hybrid."""

    model_type = "olmo_hybrid"
    architecture = "OlmoHybridForCausalLM"
    tensor_names = {
        "mixer_in_proj.*": "linear_attn.*_proj.weight",
        "mixer_in_proj.z": "linear_attn.g_proj.weight",
        "mixer_gates_proj.*": "linear_attn.*_proj.weight",
        "mixer_conv.*": "linear_attn.*_conv1d.weight",
        "mixer_out_proj": "linear_attn.o_proj.weight",
        "mixer_decay": "linear_attn.A_log",
        "mixer_time": "linear_attn.dt_bias",
        "mixer_norm": "linear_attn.o_norm.weight",
        "attention_out_norm": "post_attention_layernorm.weight",
        "mlp_out_norm": "post_feedforward_layernorm.weight",
    }
    in_memory = {"linear_attn.*_conv1d.": "linear_attn.conv1d."}
    # Norms of recurrent layers have other names in some files than in transformers.
    renamed = {
        "attention_layer_norm.": "input_layernorm.",
        "feedforward_layer_norm.": "post_attention_layernorm.",
    }
    prefixes = {"mtp.": None}

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        attention = Attention(
            **heads,
            rope=self._read_rope(entries, heads["head_dim"]),
            norm=HeadNorm(norm, "projection"),
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
        mlp = read_dense(entries)
        full = post_norm(attention, mlp, norm)
        recurrent = pre_norm(self._read_mixer(entries), mlp, norm)
        types = self._read_types(entries)
        layers = tuple(recurrent if is_recurrent else full for is_recurrent in types)
        return read_model(self, entries, layers=layers, norm=norm)

    def _read_rope(self, entries: ConfigEntries, head_dim: int) -> Rope | None:
        """Return the rotary embedding; None if its base is null."""
        parameters = read_object(entries, "rope_parameters")
        rope = read_rope(self, entries, head_dim)
        is_null = parameters.get("rope_theta", entries.get("rope_theta")) is None
        return None if is_null else rope

    def _read_mixer(self, entries: ConfigEntries) -> GatedDeltaNet:
        """Return the delta net. Sizes that are missing follow from the sizes of attention."""
        num_heads = read_integer(entries, "num_attention_heads")
        for key in ("linear_num_key_heads", "linear_num_value_heads"):
            if entries.get(key) is None:
                entries = entries.replace({key: num_heads})
        if entries.get("linear_key_head_dim") is None:
            num_key_heads = read_size(entries, "linear_num_key_heads")
            key_dim = int(0.75 * read_integer(entries, "hidden_size") / num_key_heads)
            entries = entries.replace({"linear_key_head_dim": key_dim})
        if entries.get("linear_value_head_dim") is None:
            key_dim = read_integer(entries, "linear_key_head_dim")
            entries = entries.replace({"linear_value_head_dim": 2 * key_dim})
        return dataclasses.replace(
            read_delta_net(entries, _DELTA_NORM_EPS),
            has_negative_eigenvalues=read_boolean(entries, "linear_allow_neg_eigval"),
        )

    def _read_types(self, entries: ConfigEntries) -> Sequence[bool]:
        """Return whether each layer is recurrent. By default, there is a layer with attention."""
        types = read_layer_types(entries)
        if types is None:
            types = read_interval(entries)
            if all(types):
                types[-1] = False
        return types

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = find_part(config, Attention)
        mixer = find_part(config, GatedDeltaNet)
        rope = next(filter(None, config.ropes), None)
        written = {
            **write_model(config),
            **write_heads(config),
            **({"rope_theta": None} if rope is None else write_rope(self, rope)),
            **write_layer_types(config),
            **write_dense(config.layers[0].get(Dense)),
            **write_delta_net(mixer),
            "rms_norm_eps": config.norm.eps,
        }
        if attention is not None:
            written["attention_bias"] = attention.qkv_bias and attention.o_bias
        if mixer is not None:
            written["linear_allow_neg_eigval"] = mixer.has_negative_eigenvalues
        return written
