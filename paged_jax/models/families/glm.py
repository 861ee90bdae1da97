"""GLM-4 without experts: ``glm`` (9B) and ``glm4`` (GLM-4-0414).

Half of each head rotates, and rotated pairs are neighbours.
"""

from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_number
from paged_jax.models.families.common import (
    pre_norm,
    read_dense,
    read_heads,
    read_model,
    read_num_layers,
    read_rope,
    sandwich_norm,
    write_dense,
    write_heads,
    write_model,
    write_rope,
)
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class Glm(Family):
    """GLM-4 9B."""

    model_type = "glm"
    architecture = "GlmForCausalLM"
    tensor_names = {"gate_up_proj": "mlp.gate_up_proj.weight"}
    # Function that adds norms to attention and MLP.
    add_norms = staticmethod(pre_norm)

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``."""
        norm, heads = Norm(read_number(entries, "rms_norm_eps")), read_heads(entries)
        attention = Attention(
            **heads,
            rope=read_rope(
                self, entries, heads["head_dim"], may_be_partial=True, is_interleaved=True
            ),
            rope_interleaved=True,
            eps=norm.eps,
            qkv_bias=read_boolean(entries, "attention_bias"),
        )
        layer = self.add_norms(attention, read_dense(entries), norm)
        layers = (layer,) * read_num_layers(entries)
        return read_model(self, entries, layers=layers, norm=norm)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        attention = config.layers[0].get(Attention)
        return {
            **write_model(config),
            **write_heads(config),
            **write_rope(self, attention.rope),
            **write_dense(config.layers[0].get(Dense)),
            "rms_norm_eps": config.norm.eps,
            "attention_bias": attention.qkv_bias,
        }


class Glm4(Glm):
    """GLM-4-0414 and GLM-Z1: also norms after attention and the MLP."""

    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    tensor_names = {
        **Glm.tensor_names,
        "attention_out_norm": "post_self_attn_layernorm.weight",
        "mlp_out_norm": "post_mlp_layernorm.weight",
    }
    add_norms = staticmethod(sandwich_norm)
