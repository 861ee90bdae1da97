"""Supported model families with Mamba-2 layers, each an entry of `MAMBA_FAMILIES`."""

import math
from collections.abc import Mapping

from paged_jax.models.family import (
    BIASES,
    GRANITE_SCALES,
    GROUP_KEYS,
    SIGMOID_ROUTER,
    Family,
    MixerKeys,
    Scale,
)
from paged_jax.models.layer_groups import DENSE, FULL, HYBRID, RECURRENT, SPARSE

_MAMBA_TENSORS = {
    f"mixer_in_proj.{piece}": "mamba.in_proj.weight" for piece in ("z", "x", "b", "c", "dt")
}
_MAMBA_TENSORS |= {f"mixer_conv.{piece}": "mamba.conv1d.weight" for piece in ("x", "b", "c")}
_MAMBA_TENSORS |= {f"mixer_conv_bias.{piece}": "mamba.conv1d.bias" for piece in ("x", "b", "c")}
_MAMBA_TENSORS |= {
    "mixer_decay": "mamba.A_log",
    "mixer_time": "mamba.dt_bias",
    "mixer_skip": "mamba.D",
    "mixer_norm": "mamba.norm.weight",
    "mixer_out_proj": "mamba.out_proj.weight",
}
_GRANITE_MAMBA = MixerKeys(
    "mamba2",
    keys={
        "num_heads": "mamba_n_heads",
        "num_groups": "mamba_n_groups",
        "head_dim": "mamba_d_head",
        "state_dim": "mamba_d_state",
        "conv_width": "mamba_d_conv",
        "conv_bias": "mamba_conv_bias",
        "time_limits": "time_step_limit",
        "norm_eps": "rms_norm_eps",
    },
    layer_types={"mamba": RECURRENT, "attention": FULL},
    attention_layers="attention_layer_indices",
)
_FALCON_MAMBA = MixerKeys(
    "mamba2",
    keys={
        **_GRANITE_MAMBA.keys,
        "in_multiplier": "ssm_in_multiplier",
        "out_multiplier": "ssm_out_multiplier",
        "piece_multipliers": "ssm_multipliers",
    },
    norm_switches=("mamba_rms_norm", "mamba_norm_before_gate"),
    layer_types_key="layers_block_type",
    uniform_type=HYBRID,
)
_NEMOTRON_MAMBA = MixerKeys(
    "mamba2",
    keys={
        "num_heads": "mamba_num_heads",
        "num_groups": "n_groups",
        "head_dim": "mamba_head_dim",
        "state_dim": "ssm_state_size",
        "conv_width": "conv_kernel",
        "conv_bias": "use_conv_bias",
        "norm_eps": "layer_norm_epsilon",
    },
    layer_types_key="layers_block_type",
    layer_types={"mamba": RECURRENT, "attention": FULL},
    mlp_types={"mlp": DENSE, "moe": SPARSE},
    pattern_key="hybrid_override_pattern",
    pattern={"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
)
# Defaults of the configs of Granite 4 and Falcon-H1 in transformers.
_MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "time_step_limit": [0.0, math.inf],
}
# Keys of Falcon-H1 with a factor each.
_FALCON_FACTORS = (
    "embedding_multiplier", "lm_head_multiplier", "attention_in_multiplier", "key_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip

MAMBA_FAMILIES: Mapping[str, Family] = {
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            **_MAMBA_DEFAULTS,
            "attention_layer_indices": [],
            "rms_norm_eps": 1e-6,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed={"norm_topk_prob": True, "shared_expert_gate": False},
        rope_layers="switched",
        mixer=_GRANITE_MAMBA,
        biases=BIASES,
        experts=("shared_expert_intermediate_size",),
        only={"mamba_proj_bias": False},
        scales=GRANITE_SCALES,
        keys={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
            "shared_expert_intermediate_size": "shared_intermediate_size",
        },
        tensors={
            **_MAMBA_TENSORS,
            "gate_up_proj": "shared_mlp.input_linear.weight",
            "down_proj": "shared_mlp.output_linear.weight",
            "router": "block_sparse_moe.router.layer.weight",
            "fused_gate_up_proj": "block_sparse_moe.input_linear.weight",
            "fused_down_proj": "block_sparse_moe.output_linear.weight",
        },
        in_memory={
            "router.layer.": "router.",
            "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        },
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            **_MAMBA_DEFAULTS,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            **dict.fromkeys(_FALCON_FACTORS, 1.0),
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        mixer=_FALCON_MAMBA,
        biases=BIASES,
        only={"mamba_proj_bias": False, "projectors_bias": False, "hidden_act": "silu"},
        scales=(
            Scale("embedding_multiplier", "embedding_multiplier"),
            Scale("logit_scale", "lm_head_multiplier"),
        ),
        multipliers={
            "attention_in": ("attention_in_multiplier", None),
            "key": ("key_multiplier", None),
            "attention_out": ("attention_out_multiplier", None),
            "mlp_gate": ("mlp_multipliers", 0),
            "mlp_out": ("mlp_multipliers", 1),
        },
        tensors={
            **_MAMBA_TENSORS,
            **{
                f"{name}_proj": f"feed_forward.{name}_proj.weight"
                for name in ("gate", "up", "down")
            },
            "norm": "model.final_layernorm.weight",
            "post_attention_norm": "pre_ff_layernorm.weight",
        },
        prefixes={"final_layernorm.": "model.final_layernorm."},
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed={"shared_expert_gate": False, "gated_mlp": False},
        rope_layers="none",
        mixer=_NEMOTRON_MAMBA,
        biases=BIASES,
        experts=("norm_topk_prob", "shared_expert_intermediate_size"),
        router=SIGMOID_ROUTER,
        router_keys=GROUP_KEYS,
        only={
            "n_shared_experts": 1,
            "moe_latent_size": None,
            "use_bias": False,
            "mamba_proj_bias": False,
            "mamba_hidden_act": "silu",
        },
        aliases={
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
        },
        keys={
            "hidden_act": "mlp_hidden_act",
            "rms_norm_eps": "layer_norm_epsilon",
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        tensors={
            **{name: tensor.replace("mamba", "mixer") for name, tensor in _MAMBA_TENSORS.items()},
            "norm": "model.norm_f.weight",
            "input_norm": "norm.weight",
            "post_attention_norm": "norm.weight",
            **{f"{name}_proj": f"mixer.{name}_proj.weight" for name in ("q", "k", "v", "o")},
            "o_bias": "mixer.o_proj.bias",
            "up_proj": "mixer.up_proj.weight",
            "down_proj": "mixer.down_proj.weight",
            "router": "mixer.gate.weight",
            "router_correction_bias": "mixer.gate.e_score_correction_bias",
            "shared_expert": "mixer.shared_experts",
            "experts_up_proj": "mixer.experts.*.up_proj.weight",
            "experts_down_proj": "mixer.experts.*.down_proj.weight",
        },
        prefixes={
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.": "model.",
            "model.embeddings.": "model.embed_tokens.",
            "mtp.": None,
        },
        written_prefixes={
            "model.embed_tokens.": "backbone.embeddings.",
            "model.": "backbone.",
        },
    ),
}
