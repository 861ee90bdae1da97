"""Supported model families, each an entry of `FAMILIES`."""

from collections.abc import Mapping

from paged_jax.models.expert_families import EXPERT_FAMILIES
from paged_jax.models.family import BIASES, GRANITE_SCALES, Family, InnerTextModel, Router, Scale
from paged_jax.models.layer_groups import FULL, SLIDING
from paged_jax.models.mamba_families import MAMBA_FAMILIES
from paged_jax.models.recurrent_families import RECURRENT_FAMILIES

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
_GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
# Names of the text model in checkpoints of models with images. Other tensors belong to images.
_IMAGE_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.language_model.": "model.",
    "vision_tower.": None,
    "multi_modal_projector.": None,
    "model.vision_tower.": None,
    "model.multi_modal_projector.": None,
    "visual.": None,
    "model.visual.": None,
    "model.embed_vision.": None,
    "model.audio_tower.": None,
    "model.embed_audio.": None,
}
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
        biases=BIASES,
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
        prefixes=_IMAGE_PREFIXES,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        sliding_layers="all",
        query_scale="rope_parameters",
        prefixes=_IMAGE_PREFIXES,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _QWEN_DEFAULTS, fixed={"qkv_bias": True}, sliding_layers="switched"
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN_DEFAULTS, "head_dim": 128},
        fixed={"qk_norm": True},
        sliding_layers="switched",
        biases=BIASES,
        prefixes=_IMAGE_PREFIXES,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        biases=("qkv_bias",),
        switches={"o_bias": "attention_out_bias"},
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={"use_bias": False},
        rope_interleaved=True,
    ),
    "cwm": Family(
        "CwmForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_parameters": {
                "rope_theta": 1e6,
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 8192,
            "sliding_window_pattern": 4,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
        },
        sliding_layers="pattern from the first",
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        fixed={"norm_offset": 1.0},
        replacements={"hidden_act": {"gelu": "gelu_pytorch_tanh"}},
        biases=BIASES,
        scales=_GEMMA_SCALES[:1],
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
        biases=BIASES,
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
        biases=BIASES,
        scales=_GEMMA_SCALES,
        caps=("final_logit_softcapping",),
        keys={"hidden_act": "hidden_activation"},
        tensors=_GEMMA_TENSORS,
        prefixes=_IMAGE_PREFIXES,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        {
            **_GEMMA_DEFAULTS,
            "vocab_size": 262144,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
            "query_pre_attn_scalar": None,
            "global_head_dim": 512,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        fixed={
            "norm_placement": "sandwich",
            "qk_norm": True,
            "value_norm": True,
            "attention_multiplier": 1.0,
            "layer_scalar": True,
            "norm_topk_prob": True,
            "shared_expert_gate": False,
            "separate_expert_norms": True,
        },
        only={
            "use_bidirectional_attention": "vision",
        },
        sliding_layers="pattern and the last",
        local_rope=True,
        partial_rope=True,
        global_heads=True,
        biases=BIASES,
        sizes=("hidden_size_per_layer_input", "num_kv_shared_layers"),
        switches={
            "attention_k_eq_v": "attention_k_eq_v",
            "use_double_wide_mlp": "use_double_wide_mlp",
        },
        experts=("shared_expert_intermediate_size",),
        experts_switch="enable_moe_block",
        router=Router(has_expert_scale=True),
        scales=_GEMMA_SCALES[:1],
        caps=("final_logit_softcapping",),
        keys={
            "hidden_act": "hidden_activation",
            "num_experts_per_tok": "top_k_experts",
            "shared_expert_intermediate_size": "intermediate_size",
        },
        tensors={
            **_GEMMA_TENSORS,
            "router": "router.proj.weight",
            "router_expert_factor": "router.per_expert_scale",
            "shared_expert": "mlp",
            "fused_gate_up_proj": "experts.gate_up_proj",
            "fused_down_proj": "experts.down_proj",
        },
        prefixes=_IMAGE_PREFIXES,
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
        biases=BIASES,
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
        biases=BIASES,
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
        biases=BIASES,
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
        biases=BIASES,
        scales=GRANITE_SCALES,
    ),
    "glm": Family(
        "GlmForCausalLM",
        _GLM_DEFAULTS,
        partial_rope=True,
        rope_interleaved=True,
        biases=("qkv_bias",),
        tensors={"gate_up_proj": "mlp.gate_up_proj.weight"},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        _GLM_DEFAULTS,
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
    "cohere": Family(
        "CohereForCausalLM",
        {
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "bos_token_id": 5,
            "eos_token_id": 255001,
        },
        fixed={"norm_placement": "parallel", "norm_type": "layer"},
        rope_interleaved=True,
        biases=BIASES,
        scales=(Scale("logit_scale", "logit_scale"),),
        keys={"rms_norm_eps": "layer_norm_eps"},
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
        biases=BIASES,
        scales=(Scale("logit_scale", "logit_scale"),),
        keys={"rms_norm_eps": "layer_norm_eps"},
    ),
    **EXPERT_FAMILIES,
    **MAMBA_FAMILIES,
    **RECURRENT_FAMILIES,
}

# Names of families in files of models that have no family of their own.
ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}

# Models with images, by `model_type`.
PARTS: Mapping[str, InnerTextModel] = {
    "gemma3": InnerTextModel("Gemma3ForConditionalGeneration", has_cap=False),
    "gemma4": InnerTextModel("Gemma4ForConditionalGeneration"),
    "llama4": InnerTextModel("Llama4ForConditionalGeneration", is_tied=False),
    "mistral3": InnerTextModel(
        "Mistral3ForConditionalGeneration", defaults={"model_type": "mistral"}
    ),
    # The text model of Qwen3-VL is Qwen3. It rotates by three positions, which are equal for text.
    "qwen3_vl": InnerTextModel(
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        {"max_position_embeddings": 128000, "rope_theta": 5e5},
        is_tied=False,
    ),
    # Rotates by three positions, which are equal for text.
    "qwen3_5": InnerTextModel("Qwen3_5ForConditionalGeneration", is_tied=False),
    "qwen3_5_moe": InnerTextModel("Qwen3_5MoeForConditionalGeneration", is_tied=False),
}
