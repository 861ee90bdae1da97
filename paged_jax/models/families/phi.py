"""Phi-3 and Phi-4: Llama with fused projections, partial rotation and one window for all layers."""

from collections.abc import Mapping
from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_object
from paged_jax.models.families.common import (
    pre_norm,
    read_dense,
    read_factor,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.families.window_entries import read_window
from paged_jax.models.gguf_layout import GgufLayout
from paged_jax.models.gguf_metadata import GgufMetadata
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class Phi3(Family):
    """Phi-3, Phi-3.5 and Phi-4, without experts."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    tensor_names = {
        "qkv_proj": "self_attn.qkv_proj.weight",
        "gate_up_proj": "mlp.gate_up_proj.weight",
    }
    gguf = GgufLayout("phi3", tensor_names={"gate_up_proj": "ffn_up.weight"})

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        objects = {key: read_object(entries, key) for key in ("rope_scaling", "rope_parameters")}
        entries = entries.replace({key: _name_scaling(rope) for key, rope in objects.items()})
        norm, heads = Norm(read_factor(entries, "rms_norm_eps")), read_heads(entries)
        attention = Attention(
            **heads,
            rope=read_rope(self, entries, heads["head_dim"], may_be_partial=True),
            eps=norm.eps,
            window=read_window(entries),
        )
        layers = (pre_norm(attention, read_dense(entries), norm),) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        written = {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_dense(config.layers[0].get(Dense)),
            "rms_norm_eps": config.norm.eps,
            "sliding_window": attention.window,
        }
        scaling = None if attention.rope is None else attention.rope.scaling
        if scaling is not None:
            written["original_max_position_embeddings"] = scaling.original_max_position_embeddings
        return written

    def read_gguf(self, metadata: GgufMetadata, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the metadata of a GGUF file, see `Family.read_gguf`."""
        length = entries["max_position_embeddings"]
        return {
            "sliding_window": metadata.integer("attention.sliding_window", 0) or None,
            "original_max_position_embeddings": metadata.integer(
                "rope.scaling.original_context_length", length
            ),
        }


def _name_scaling(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the names "su" and "yarn" of "longrope" in early files."""
    is_early = rope.get("type", rope.get("rope_type")) in ("su", "yarn")
    return {**rope, "rope_type": "longrope"} if is_early else rope
