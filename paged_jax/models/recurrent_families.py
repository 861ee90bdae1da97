"""Supported model families with recurrent layers, each an entry of `RECURRENT_FAMILIES`.

Families with Mamba-2 are in `mamba_families`.
"""

from collections.abc import Mapping

from paged_jax.models.family import (
    BIASES,
    GROUP_KEYS,
    SIGMOID_ROUTER,
    Family,
    MixerKeys,
    Router,
)

_SHORT_CONVOLUTION = MixerKeys(
    "short_convolution",
    keys={"num_channels": "hidden_size", "conv_width": "conv_L_cache"},
    recurrent_type="conv",
    attention_layers="full_attn_idxs",
)
_LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LFM2_TENSORS = {
    "norm": "model.embedding_norm.weight",
    "input_norm": "operator_norm.weight",
    "post_attention_norm": "ffn_norm.weight",
    "q_norm": "self_attn.q_layernorm.weight",
    "k_norm": "self_attn.k_layernorm.weight",
    "o_proj": "self_attn.out_proj.weight",
    "gate_proj": "feed_forward.w1.weight",
    "up_proj": "feed_forward.w3.weight",
    "down_proj": "feed_forward.w2.weight",
    "mixer_in_proj.b": "conv.in_proj.weight",
    "mixer_in_proj.c": "conv.in_proj.weight",
    "mixer_in_proj.x": "conv.in_proj.weight",
    "mixer_out_proj": "conv.out_proj.weight",
    "mixer_conv": "conv.conv.weight",
}
_DELTA_KEYS = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
_DELTA_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_OLMO_DELTA = MixerKeys(
    "gated_delta_net",
    keys={**_DELTA_KEYS, "has_negative_eigenvalues": "linear_allow_neg_eigval"},
    fixed={"norm_eps": 1e-5},
    has_attention=True,
    ratios={
        "linear_num_key_heads": ("num_attention_heads", None, 1),
        "linear_num_value_heads": ("num_attention_heads", None, 1),
        "linear_key_head_dim": ("hidden_size", "linear_num_key_heads", 0.75),
        "linear_value_head_dim": ("linear_key_head_dim", None, 2),
    },
)
_OLMO_TENSORS = {
    **{f"mixer_in_proj.{piece}": f"linear_attn.{piece}_proj.weight" for piece in ("q", "k", "v")},
    **{f"mixer_conv.{piece}": f"linear_attn.{piece}_conv1d.weight" for piece in ("q", "k", "v")},
    "mixer_in_proj.z": "linear_attn.g_proj.weight",
    "mixer_gates_proj.b": "linear_attn.b_proj.weight",
    "mixer_gates_proj.a": "linear_attn.a_proj.weight",
    "mixer_out_proj": "linear_attn.o_proj.weight",
    "mixer_decay": "linear_attn.A_log",
    "mixer_time": "linear_attn.dt_bias",
    "mixer_norm": "linear_attn.o_norm.weight",
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_QWEN_DELTA = MixerKeys("gated_delta_net", keys={**_DELTA_KEYS, "norm_eps": "rms_norm_eps"})
_QWEN3_5_DEFAULTS = {
    **_DELTA_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
}
_QWEN3_5_FIXED = {"qk_norm": True, "norm_offset": 1.0, "attention_gate": True}
_DELTA_TENSORS = {
    "mixer_decay": "linear_attn.A_log",
    "mixer_time": "linear_attn.dt_bias",
    "mixer_norm": "linear_attn.norm.weight",
    "mixer_out_proj": "linear_attn.out_proj.weight",
    "mixer_conv.q": "linear_attn.conv1d.weight",
    "mixer_conv.k": "linear_attn.conv1d.weight",
    "mixer_conv.v": "linear_attn.conv1d.weight",
}
_QWEN3_5_TENSORS = {
    **_DELTA_TENSORS,
    "mixer_in_proj.q": "linear_attn.in_proj_qkv.weight",
    "mixer_in_proj.k": "linear_attn.in_proj_qkv.weight",
    "mixer_in_proj.v": "linear_attn.in_proj_qkv.weight",
    "mixer_in_proj.z": "linear_attn.in_proj_z.weight",
    "mixer_gates_proj.b": "linear_attn.in_proj_b.weight",
    "mixer_gates_proj.a": "linear_attn.in_proj_a.weight",
}
_QWEN3_5_PREFIXES = {
    "model.language_model.": "model.",
    "model.visual.": None,
    "mtp.": None,
}
_KIMI_DELTA = MixerKeys(
    "kimi_delta",
    keys={
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "conv_width": "linear_conv_kernel_dim",
        "norm_eps": "rms_norm_eps",
    },
    nested=(
        "linear_attn_config",
        {
            "num_heads": "linear_num_heads",
            "head_dim": "linear_head_dim",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
        },
    ),
)
_KIMI_TENSORS = {
    f"{name}.{piece}": f"self_attn.{piece}_{suffix}.weight"
    for name, suffix in (("mixer_in_proj", "proj"), ("mixer_conv", "conv1d"))
    for piece in ("q", "k", "v")
}
_KIMI_TENSORS |= {
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
    "experts_gate_proj": "block_sparse_moe.experts.*.w1.weight",
    "experts_up_proj": "block_sparse_moe.experts.*.w3.weight",
    "experts_down_proj": "block_sparse_moe.experts.*.w2.weight",
}

RECURRENT_FAMILIES: Mapping[str, Family] = {
    "lfm2": Family(
        "Lfm2ForCausalLM",
        _LFM2_DEFAULTS,
        fixed={"qk_norm": True},
        mixer=_SHORT_CONVOLUTION,
        has_adjusted_mlp=True,
        only={"conv_bias": False},
        aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
        keys={"rms_norm_eps": "norm_eps"},
        tensors=_LFM2_TENSORS,
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        {
            **_LFM2_DEFAULTS,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
        fixed={"qk_norm": True},
        mixer=_SHORT_CONVOLUTION,
        experts=("norm_topk_prob",),
        router=Router("sigmoid", epsilon=1e-6),
        router_keys={"has_correction_bias": "use_expert_bias", "factor": "routed_scaling_factor"},
        dense_layers="first",
        only={"conv_bias": False},
        aliases={"tie_embedding": "tie_word_embeddings"},
        keys={"rms_norm_eps": "norm_eps", "first_k_dense_replace": "num_dense_layers"},
        tensors={
            **_LFM2_TENSORS,
            "router": "feed_forward.gate.weight",
            "router_correction_bias": "feed_forward.expert_bias",
            "experts_gate_proj": "feed_forward.experts.*.w1.weight",
            "experts_up_proj": "feed_forward.experts.*.w3.weight",
            "experts_down_proj": "feed_forward.experts.*.w2.weight",
        },
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _QWEN3_5_DEFAULTS,
        fixed=_QWEN3_5_FIXED,
        partial_rope=True,
        mixer=_QWEN_DELTA,
        biases=BIASES,
        only={"attn_output_gate": True},
        tensors=_QWEN3_5_TENSORS,
        prefixes=_QWEN3_5_PREFIXES,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        {
            **_QWEN3_5_DEFAULTS,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "intermediate_size": 512,  # no layer has a dense MLP
        },
        fixed={**_QWEN3_5_FIXED, "norm_topk_prob": True},
        partial_rope=True,
        mixer=_QWEN_DELTA,
        biases=BIASES,
        only={"attn_output_gate": True},
        experts=("shared_expert_intermediate_size",),
        tensors=_QWEN3_5_TENSORS,
        prefixes=_QWEN3_5_PREFIXES,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        {
            **_QWEN3_5_DEFAULTS,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
        fixed=_QWEN3_5_FIXED,
        partial_rope=True,
        mixer=_QWEN_DELTA,
        biases=BIASES,
        only={"attn_output_gate": True},
        experts=("norm_topk_prob", "shared_expert_intermediate_size"),
        dense_layers="listed",
        tensors={
            **_DELTA_TENSORS,
            "mixer_in_proj": "linear_attn.in_proj_qkvz.weight",
            "mixer_gates_proj": "linear_attn.in_proj_ba.weight",
        },
        prefixes={"mtp.": None},
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        {
            "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "full_attention_interval": 4,
            "eos_token_id": 100257,
        },
        fixed={"norm_placement": "post", "qk_norm": True, "qk_norm_scope": "projection"},
        rope_layers="with a base",
        mixer=_OLMO_DELTA,
        recurrent_norm_placement="pre",
        biases=BIASES,
        only={"hidden_act": "silu"},
        tensors=_OLMO_TENSORS,
        in_memory={f"linear_attn.{piece}_conv1d.": "linear_attn.conv1d." for piece in "qkv"},
        # Names of the norms of recurrent layers. transformers uses the second for all layers.
        renamed={
            "attention_layer_norm.": "input_layernorm.",
            "feedforward_layer_norm.": "post_attention_layernorm.",
        },
        prefixes={"mtp.": None},
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_renormalize": True,
            "routed_scaling_factor": 2.446,
            "num_expert_group": 1,
            "topk_group": 1,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
        },
        fixed={"shared_expert_gate": False},
        has_latent=True,
        rope_layers="none",
        mixer=_KIMI_DELTA,
        only={"mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
        experts=("norm_topk_prob",),
        router=SIGMOID_ROUTER,
        router_keys={**GROUP_KEYS, "num_groups": "num_expert_group"},
        shared_experts="num_shared_experts",
        dense_layers="first",
        aliases={"model_max_length": "max_position_embeddings"},
        keys={"num_experts_per_tok": "num_experts_per_token", "norm_topk_prob": "moe_renormalize"},
        tensors=_KIMI_TENSORS,
        in_memory={
            "block_sparse_moe.": "mlp.",
            **{f"self_attn.{piece}_conv1d.": "self_attn.conv1d." for piece in ("q", "k", "v")},
            **{
                f"self_attn.{name}": f"self_attn.forget_gate.{name}"
                for name in ("f_a_proj.", "f_b_proj.", "A_log", "dt_bias")
            },
        },
        # transformers writes the dense MLP under the name of the experts.
        renamed={
            f"block_sparse_moe.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")
        },
    ),
}
