"""Supported model families, each an entry of `FAMILIES`."""

from collections.abc import Mapping

from paged_jax.models.family import Family, Scale

_BIASES = ("qkv_bias", "o_bias")
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_SCALES = (
    Scale("embedding_multiplier", "hidden_size", 0.5),
    Scale("attention_multiplier", "query_pre_attn_scalar", -0.5),
)
_GEMMA_TENSORS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "post_attention_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_OLMO_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
_OLMO_FIXED = {"norm_placement": "post", "qk_norm": True, "qk_norm_scope": "projection"}
_OLMO_TENSORS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_EXPERT_SIZE_KEY = {"moe_intermediate_size": "intermediate_size"}
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}

# Families by `model_type`. Programs may add their own, see examples/new_family.py.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        biases=_BIASES,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        sliding_layers="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _QWEN_DEFAULTS, fixed={"qkv_bias": True}, sliding_layers="switched"
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN_DEFAULTS, "head_dim": 128},
        fixed={"qk_norm": True},
        sliding_layers="switched",
        biases=_BIASES,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        fixed={"norm_placement": "sandwich", "norm_offset": 1.0},
        sliding_layers="pattern",
        biases=_BIASES,
        scales=_GEMMA_SCALES,
        caps=("attn_logit_softcapping", "final_logit_softcapping"),
        keys={"hidden_act": "hidden_activation"},
        tensors=_GEMMA_TENSORS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
        fixed={"norm_placement": "sandwich", "norm_offset": 1.0, "qk_norm": True},
        sliding_layers="pattern",
        local_rope=True,
        biases=_BIASES,
        scales=_GEMMA_SCALES,
        caps=("final_logit_softcapping",),
        keys={"hidden_act": "hidden_activation"},
        tensors=_GEMMA_TENSORS,
        prefixes={
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "language_model.": "model.",
            "model.language_model.": "model.",
            "vision_tower.": None,
            "multi_modal_projector.": None,
            "model.vision_tower.": None,
            "model.multi_modal_projector.": None,
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        sliding_layers="all",
        partial_rope=True,
        tensors={
            "qkv_proj": "self_attn.qkv_proj.weight",
            "gate_up_proj": "mlp.gate_up_proj.weight",
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _OLMO_DEFAULTS,
        fixed=_OLMO_FIXED,
        biases=_BIASES,
        tensors=_OLMO_TENSORS,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {
            **_OLMO_DEFAULTS,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        fixed=_OLMO_FIXED,
        sliding_layers="pattern",
        local_rope=True,
        biases=_BIASES,
        tensors=_OLMO_TENSORS,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        sliding_layers="switched",
        rope_layers="listed",
        biases=_BIASES,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        biases=_BIASES,
        scales=(
            Scale("embedding_multiplier", "embedding_multiplier"),
            Scale("attention_multiplier", "attention_multiplier"),
            Scale("residual_multiplier", "residual_multiplier"),
            Scale("logit_scale", "logits_scaling", -1),
        ),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338],
        },
        fixed={"norm_placement": "sandwich"},
        partial_rope=True,
        rope_interleaved=True,
        biases=("qkv_bias",),
        tensors={
            "attention_out_norm": "post_self_attn_layernorm.weight",
            "mlp_out_norm": "post_mlp_layernorm.weight",
            "gate_up_proj": "mlp.gate_up_proj.weight",
        },
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 5,
            "eos_token_id": 255001,
        },
        fixed={"norm_placement": "parallel", "norm_type": "layer"},
        sliding_layers="pattern",
        rope_layers="sliding",
        rope_interleaved=True,
        biases=_BIASES,
        scales=(Scale("logit_scale", "logit_scale"),),
        keys={"rms_norm_eps": "layer_norm_eps"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fixed={"norm_topk_prob": True},
        sliding_layers="all",
        experts=(),
        keys={"num_experts": "num_local_experts", **_EXPERT_SIZE_KEY},
        tensors={
            "router": "block_sparse_moe.gate.weight",
            "experts_gate_proj": "block_sparse_moe.experts.*.w1.weight",
            "experts_up_proj": "block_sparse_moe.experts.*.w3.weight",
            "experts_down_proj": "block_sparse_moe.experts.*.w2.weight",
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 5632,
        },
        fixed={"qkv_bias": True},
        sliding_layers="unused",
        experts=("norm_topk_prob", "shared_expert_intermediate_size"),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        fixed={"qk_norm": True},
        sliding_layers="unused",
        biases=_BIASES,
        experts=("norm_topk_prob",),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "eos_token_id": 50279,
        },
        fixed={"qk_norm": True, "qk_norm_scope": "projection"},
        biases=_BIASES,
        experts=("norm_topk_prob",),
        keys=_EXPERT_SIZE_KEY,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "torch_dtype": "bfloat16",
        },
        fixed={"norm_topk_prob": True, "expert_bias": True, "attention_sinks": True},
        sliding_layers="pattern",
        biases=_BIASES,
        experts=("swiglu_alpha", "swiglu_limit"),
        is_mxfp4=True,
        keys={"num_experts": "num_local_experts", **_EXPERT_SIZE_KEY},
        tensors={
            "router": "mlp.router.weight",
            "router_bias": "mlp.router.bias",
            "experts_gate_up_proj": "mlp.experts.gate_up_proj",
            "experts_gate_up_bias": "mlp.experts.gate_up_proj_bias",
            "experts_down_proj": "mlp.experts.down_proj",
            "experts_down_bias": "mlp.experts.down_proj_bias",
        },
    ),
}

# Models with images, by `model_type`: architecture, and key of the text model's config.
PARTS: Mapping[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "text_config"),
}
