"""Models with different kinds of layers, from their config.json, without weights."""

from paged_jax.models.config import ModelConfig
from paged_jax.models.llama_config import LlamaConfig

GEMMA_3_27B = LlamaConfig.from_dict(
    {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    }
)
GPT_OSS_20B = LlamaConfig.from_dict(
    {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "torch_dtype": "bfloat16",
    }
)

_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
# Sizes of DeepSeek-V3: https://huggingface.co/deepseek-ai/DeepSeek-V3
DEEPSEEK_V3 = LlamaConfig.from_dict(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 163840,
        "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "torch_dtype": "bfloat16",
    }
)
# Sizes of DeepSeek-V2-Lite: https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite
DEEPSEEK_V2_LITE = LlamaConfig.from_dict(
    {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "max_position_embeddings": 163840,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "torch_dtype": "bfloat16",
    }
)

# Sizes of Kimi-Linear-48B-A3B: https://huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct
KIMI_LINEAR_48B = LlamaConfig.from_dict(
    {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        },
        "torch_dtype": "bfloat16",
    }
)

# Sizes of Qwen3.5-35B-A3B: https://huggingface.co/Qwen/Qwen3.5-35B-A3B
QWEN_3_5_35B = LlamaConfig.from_dict(
    {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "torch_dtype": "bfloat16",
    }
)


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Return the first layers of a model."""
    return config.replace(layers=config.layers[:num_layers])


def with_one_of_each(config: ModelConfig) -> ModelConfig:
    """Return a model with one layer of each kind, which has every kernel of the whole model."""
    return config.replace(layers=tuple(dict.fromkeys(config.layers)))


# The defaults of OlmoHybridConfig in transformers.
OLMO_HYBRID_7B = LlamaConfig.from_dict(
    {
        "model_type": "olmo_hybrid",
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "torch_dtype": "bfloat16",
    }
)


# Sizes of recurrent layers and heads of the published models, with one layer of each kind, few
# experts and a small vocabulary. So a single chip holds the weights, and copies of pools are
# larger than all other temporary memory.
_SMALL = {"vocab_size": 32768, "torch_dtype": "bfloat16"}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
RECURRENT: dict[str, ModelConfig] = {
    "Qwen3.5 27B": LlamaConfig.from_dict(
        {
            **_SMALL,
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        }
    ),
    "Qwen3-Next 80B": LlamaConfig.from_dict(
        {
            **_SMALL,
            **_EXPERTS,
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 16,
            "shared_expert_intermediate_size": 512,
        }
    ),
    "Kimi Linear 48B": LlamaConfig.from_dict(
        {
            **_SMALL,
            **_EXPERTS,
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 32,
        }
    ),
    "OLMo Hybrid 7B": LlamaConfig.from_dict(
        {
            **_SMALL,
            "model_type": "olmo_hybrid",
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 30,
        }
    ),
    "Nemotron 3 Nano": LlamaConfig.from_dict(
        {
            **_SMALL,
            **_EXPERTS,
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "hybrid_override_pattern": "MEM*",
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "n_routed_experts": 8,
            "mamba_num_heads": 64,
            "moe_shared_expert_intermediate_size": 3712,
        }
    ),
    "Granite 4 H Small": LlamaConfig.from_dict(
        {
            **_SMALL,
            "model_type": "granitemoehybrid",
            "hidden_size": 4096,
            "intermediate_size": 768,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_d_state": 128,
            "shared_intermediate_size": 1536,
        }
    ),
    "Falcon-H1 7B": LlamaConfig.from_dict(
        {
            **_SMALL,
            "model_type": "falcon_h1",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
        }
    ),
    "LFM2 1.2B": LlamaConfig.from_dict(
        {
            **_SMALL,
            "model_type": "lfm2",
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "num_attention_heads": 32,
        }
    ),
}
