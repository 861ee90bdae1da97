"""DeepSeek V2 and V3: latent attention, and experts with shared experts beside them.

Kimi K2 is a DeepSeek V3. Other families with latent attention derive from it.
"""

from typing import Any

from paged_jax.models.config import Family, ModelConfig
from paged_jax.models.config_json import ConfigEntries, read_boolean, read_name
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.common import (
    check_only,
    pre_norm,
    read_dense,
    read_factor,
    read_model,
    write_model,
)
from paged_jax.models.families.expert_entries import (
    SIGMOID_ROUTER,
    find_experts,
    read_experts,
    read_first_dense,
    write_experts,
)
from paged_jax.models.families.latent_entries import (
    IGNORED_HEAD_KEYS,
    read_latent_rope,
    read_latent_scale,
    read_latent_sizes,
    read_num_heads,
    write_latent_rope,
    write_latent_sizes,
)
from paged_jax.models.parts.experts import Experts, Router
from paged_jax.models.parts.latent import LatentAttention
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm


class DeepseekV3(Family):
    """DeepSeek V3, V3.1 and R1, and Kimi K2."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    tensor_names = {"shared_expert": "mlp.shared_experts"}
    has_draft_layers = True
    ignored = IGNORED_HEAD_KEYS
    has_query_scale = False  # whether queries have a factor that depends on their position

    def read(self, entries: ConfigEntries) -> ModelConfig:
        """Read a ``config.json``. The first layers are dense."""
        norm, attention = Norm(read_factor(entries, "rms_norm_eps")), self.read_attention(entries)
        mlp = read_dense(entries, has_bias=self.read_mlp_bias(entries))
        experts = self.read_experts(entries)
        dense, sparse = pre_norm(attention, mlp, norm), pre_norm(attention, experts, norm)
        layers = tuple(dense if is_dense else sparse for is_dense in read_first_dense(entries))
        return read_model(self, entries, layers=layers, norm=norm)

    def read_attention(self, entries: ConfigEntries) -> LatentAttention:
        """Return the attention of all layers."""
        sizes, has_bias = read_latent_sizes(entries), read_boolean(entries, "attention_bias", False)
        rope = read_latent_rope(self, entries, sizes, has_query_scale=self.has_query_scale)
        return LatentAttention(
            num_heads=read_num_heads(entries),
            sizes=sizes,
            rope=rope,
            rope_interleaved=read_boolean(entries, "rope_interleave", True),
            latent_bias=has_bias,
            o_bias=has_bias,
            scale=read_latent_scale(self, entries, rope, sizes),
        )

    def read_mlp_bias(self, entries: ConfigEntries) -> bool:
        """Return whether dense MLPs and shared experts have biases."""
        del entries
        return False

    def read_experts(self, entries: ConfigEntries) -> Experts:
        """Return the experts of the layers that are not dense."""
        check_only(self, entries, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        renormalises = read_boolean(entries, "norm_topk_prob")
        has_bias = self.read_mlp_bias(entries)
        return read_experts(
            self, entries, SIGMOID_ROUTER, renormalises=renormalises, has_bias=has_bias
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        return {**self.write_all(config), "norm_topk_prob": find_experts(config).renormalises}

    def write_all(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries that all families with DeepSeek's layers have."""
        attention = config.layers[0].get(LatentAttention)
        return {
            **write_model(config),
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_heads,
            **write_latent_sizes(attention.sizes),
            **write_latent_rope(self, attention),
            "rope_interleave": attention.rope_interleaved,
            "attention_bias": attention.latent_bias and attention.o_bias,
            "rms_norm_eps": config.norm.eps,
            **write_experts(config),
        }


class DeepseekV2(DeepseekV3):
    """DeepSeek V2: softmax scores, optionally with groups of experts."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"

    def read_mlp_bias(self, entries: ConfigEntries) -> bool:
        """Return whether dense MLPs and shared experts have biases."""
        return read_boolean(entries, "mlp_bias", False)

    def read_experts(self, entries: ConfigEntries) -> Experts:
        """Return the experts. ``topk_method`` tells whether they are divided into groups."""
        check_only(self, entries, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
        method = read_name(entries, "topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedConfigError(
                "LlamaConfig: topk_method must be 'greedy' or 'group_limited_greedy' for "
                f"{self.architecture}, got {method!r}."
            )
        if method == "greedy":
            entries = entries.replace({"n_group": 1, "topk_group": 1})
        router, has_bias = Router(group_score="max"), self.read_mlp_bias(entries)
        return read_experts(self, entries, router, renormalises=False, has_bias=has_bias)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Write a ``config.json``."""
        experts = find_experts(config)
        mlps = [experts.shared, *(spec.find(Dense) for spec in config.layers)]
        has_groups = experts.router.num_groups > 1
        return {
            **self.write_all(config),
            "topk_method": "group_limited_greedy" if has_groups else "greedy",
            "mlp_bias": any(mlp is not None and mlp.has_bias for mlp in mlps),
        }
