"""Granite 4: Granite with Mamba-2 in most layers, and experts beside an MLP.

Granite 4 Micro has attention in all layers, and no experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_integer, read_number
from paged_jax.models.families.common import (
    find_part,
    pre_norm,
    read_activation,
    read_dense,
    read_factor,
    read_heads,
    read_layer_indices,
    read_model,
    read_num_layers,
    read_rope,
    read_size,
    use_other_names,
    write_dense,
    write_factor,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.expert_entries import (
    ExpertKeys,
    check_no_dense_layers,
    read_expert_sizes,
    read_shared_expert,
    write_expert_sizes,
)
from paged_jax.models.families.gguf_entries import PAIRED_ROWS, read_recurrent_layers
from paged_jax.models.families.recurrent_entries import (
    name_mamba,
    read_layer_types,
    read_mamba,
    write_layer_types,
    write_mamba,
)
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.layer_groups import FULL, RECURRENT
from paged_jax.models.parts.activation import Activation
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.residual import Sublayer
from paged_jax.models.parts.state_space import Mamba2

_EXPERT_KEYS = ExpertKeys(num_experts="num_local_experts", features="intermediate_size")


class GraniteHybrid(Family):
    """Granite 4."""

    model_type = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    tensor_names = {
        **name_mamba("mamba"),
        "gate_up_proj": "shared_mlp.input_linear.weight",
        "down_proj": "shared_mlp.output_linear.weight",
        "router": "block_sparse_moe.router.layer.weight",
        "fused_gate_up_proj": "block_sparse_moe.input_linear.weight",
        "fused_down_proj": "block_sparse_moe.output_linear.weight",
    }
    in_memory = {
        "router.layer.": "router.",
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    }
    ignored = ("num_experts_per_tok",)  # without experts
    gguf = GgufLayout(
        "granitehybrid", own_keys=("attention.head_count_kv",), row_orders=PAIRED_ROWS
    )

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. The factors are those of Granite 3."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        has_bias = read_boolean(entries, "attention_bias", False)
        rope = read_rope(self, entries, heads["head_dim"])
        attention = Attention(
            **heads,
            rope=rope if entries.get("position_embedding_type") == "rope" else None,
            eps=norm.eps,
            qkv_bias=has_bias,
            o_bias=has_bias,
            scale=read_factor(entries, "attention_multiplier"),
        )
        expansion = read_integer(entries, "mamba_expand", 0)
        mixer = read_mamba(entries, expansion * read_integer(entries, "hidden_size"))
        mlp, multiplier = self._read_mlp(entries), read_factor(entries, "residual_multiplier")
        full = pre_norm(attention, mlp, norm, multiplier)
        recurrent = pre_norm(mixer, mlp, norm, multiplier)
        types = self._read_types(entries)
        return read_model(
            self,
            entries,
            layers=tuple(recurrent if is_recurrent else full for is_recurrent in types),
            norm=norm,
            embedding_multiplier=read_factor(entries, "embedding_multiplier"),
            logit_scale=1 / read_factor(entries, "logits_scaling"),
        )

    def _read_types(self, entries: ConfigEntries) -> Sequence[bool]:
        """Return whether each layer is recurrent. Some files list the attention layers."""
        entries = use_other_names(entries, {"layers_block_type": "layer_types"})
        attention_layers = read_layer_indices(entries, "attention_layer_indices") or ()
        types = read_layer_types(entries, (RECURRENT, "mamba"), (FULL, "attention"))
        if types is not None:
            return types
        return [layer not in attention_layers for layer in range(read_num_layers(entries))]

    def _read_mlp(self, entries: ConfigEntries) -> Dense | Experts:
        """Return the experts with an MLP beside them, which is the whole MLP without experts."""
        if read_integer(entries, "num_local_experts") == 0:
            size = read_size(entries, "shared_intermediate_size")
            return read_dense(entries.replace({"intermediate_size": size}))
        check_no_dense_layers(self, entries)
        return Experts(
            **read_expert_sizes(self, entries, _EXPERT_KEYS),
            renormalises=True,
            activation=Activation(read_activation(entries)),
            shared=read_shared_expert(entries, read_integer(entries, "shared_intermediate_size")),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        rope = next(filter(None, config.ropes), None)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, rope),
            **write_layer_types(config),
            **self._write_mlp(config),
            **self._write_tokens(config),
            "position_embedding_type": "nope" if rope is None else "rope",
            "rms_norm_eps": config.norm.eps,
            "embedding_multiplier": write_factor(config.embedding_multiplier),
            "residual_multiplier": write_factor(config.layers[0].get(Sublayer).multiplier),
            "logits_scaling": write_factor(1 / config.logit_scale),
        }

    def _write_tokens(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries of attention and Mamba-2, of which a model may lack one."""
        # Without Mamba-2, the default number of its heads might not fit the hidden size.
        written: dict[str, Any] = {"mamba_n_heads": 1}
        attention = find_part(config, Attention)
        if attention is not None:
            scale = attention.scale or attention.head_dim**-0.5
            written["attention_bias"] = attention.qkv_bias and attention.o_bias
            written["attention_multiplier"] = write_factor(scale)
        if (mixer := find_part(config, Mamba2)) is not None:
            written |= write_mamba(mixer)
        return written

    def _write_mlp(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries for `_read_mlp`."""
        experts = config.layers[0].experts
        if experts is None:
            mlp = config.layers[0].get(Dense)
            sizes = {"num_local_experts": 0, "shared_intermediate_size": mlp.features}
            return {**write_dense(mlp), **sizes}
        return {
            **write_expert_sizes(experts, _EXPERT_KEYS),
            "shared_intermediate_size": 0 if experts.shared is None else experts.shared.features,
            "hidden_act": experts.activation.name,
        }

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`.

        Its entry ``rope.scaling.finetuned`` says whether layers rotate queries and keys.
        """
        rotates = metadata.boolean("rope.scaling.finetuned", True)
        num_heads = metadata.integer("ssm.time_step_rank")
        return {
            **read_recurrent_layers(metadata),
            **self._read_gguf_mlp(metadata, entries),
            "position_embedding_type": "rope" if rotates else "nope",
            "attention_multiplier": metadata.number("attention.scale", 0.0)
            or entries["head_dim"] ** -0.5,
            "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
            "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
            "logits_scaling": metadata.number("logit_scale", 0.0) or 1.0,
            "mamba_n_heads": num_heads,
            "mamba_d_head": metadata.integer("ssm.inner_size") // max(num_heads, 1),
            "mamba_n_groups": metadata.integer("ssm.group_count"),
            "mamba_d_state": metadata.integer("ssm.state_size"),
            "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
            "mamba_conv_bias": metadata.has_tensor("ssm_conv1d.bias"),
            "mamba_proj_bias": metadata.has_tensor("ssm_in.bias"),
        }

    def _read_gguf_mlp(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> dict[str, Any]:
        size = metadata.integer("expert_shared_feed_forward_length", 0)
        if "num_experts" not in entries:
            return {
                "num_local_experts": 0,
                "shared_intermediate_size": entries["intermediate_size"],
            }
        return {
            "num_local_experts": entries["num_experts"],
            "intermediate_size": entries["moe_intermediate_size"],
            "moe_intermediate_size": None,
            "shared_intermediate_size": size,
        }
