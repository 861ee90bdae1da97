"""Tiny checkpoints of every family, in the files of transformers.

An entry of `CASES` tests a family: its logits, and the output of up to three engines. Each case
has a layer of each kind, and a window that is shorter than its sequences. All weights are random,
including norms and biases, and depend on the names of tensors alone. `tests.support.references`
has the files and what transformers computes, for tests without transformers.
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open

from paged_jax.kernels.backend import Backend, Interpret
from paged_jax.kernels.op import BACKENDS
from tests.support import references
from tests.support.references import VOCAB_SIZE, Tensor

WINDOW = 24
_SLIDING = ["sliding_attention", "full_attention"]
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of a family.

    Attributes:
      model_type: name in transformers.
      changes: config entries in addition to the common sizes.
    """

    model_type: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


# The first layer is dense. Tokens choose two of three groups of experts.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}
_GLM_EXPERTS: dict[str, Any] = {
    "head_dim": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_GEMMA3N: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": [*_SLIDING, *_SLIDING],
    "intermediate_size": [96, 96, 64, 96],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE - 10,
    "num_kv_shared_layers": 2,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0],
    "final_logit_softcapping": 3.0,
}
# Layers without a window have other heads, and their values are their keys.
_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": _SLIDING,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
# Chunks are shorter than most sequences, and the last layer does not rotate.
_LLAMA4 = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "attention_chunk_size": WINDOW,
    "intermediate_size": 40,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "floor_scale": 48,
    "attn_scale": 0.3,
}
_DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_GRANITE_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "shared_intermediate_size": 56,
}
_FALCON = {
    "head_dim": 24,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "mlp_multipliers": [1.3, 0.6],
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    # transformers clamps time steps of prompts to this value.
    "time_step_min": 1e-9,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}

CASES = {
    "llama": Case("llama", {"head_dim": 24}),
    "mistral": Case("mistral", {"sliding_window": WINDOW}),
    "qwen2 with windows in some layers": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3 tied": Case("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma3": Case(
        "gemma3_text",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gemma2": Case(
        "gemma2",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    # All sequences are longer than the original context, so that transformers uses the long
    # factors.
    "phi3 with longrope of half a head, and a window": Case(
        "phi3",
        {
            "sliding_window": WINDOW,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.0, 2.0, 8.0, 64.0],
            },
        },
    ),
    "olmo2": Case("olmo2"),
    "olmo3 with yarn": Case(
        "olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": _SLIDING,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "smollm3": Case("smollm3", {"no_rope_layer_interval": 2, "attention_bias": True}),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
        },
    ),
    "glm4": Case("glm4", {"head_dim": 24}),
    "cohere2": Case(
        "cohere2", {"sliding_window": WINDOW, "layer_types": _SLIDING, "logit_scale": 0.7}
    ),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Case(
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": Case("olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "gpt_oss": Case(
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.8,
        },
    ),
    "glm4_moe": Case("glm4_moe", {**_GLM_EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "gemma3n": Case("gemma3n_text", _GEMMA3N),
    "gemma4": Case("gemma4_text", _GEMMA4),
    "gemma4 with embeddings per layer and shared keys": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "num_hidden_layers": 4,
            "layer_types": [*_SLIDING, *_SLIDING],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4 with experts": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
    ),
    "ministral3": Case(
        "ministral3",
        {
            "head_dim": 12,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "deepseek_v2": Case(
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": Case("deepseek_v3", {**_LATENT, "num_hidden_layers": 3, "attention_bias": True}),
    "minimax_m2": Case(
        "minimax_m2",
        {"head_dim": 24, "rotary_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "llama4": Case("llama4_text", {**_LLAMA4, "moe_layers": [1, 3]}),
    "lfm2_moe": Case(
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3_5": Case("qwen3_5_text", _DELTA),
    "qwen3_5_moe": Case("qwen3_5_moe_text", {**_DELTA, **_DELTA_EXPERTS}),
    "qwen3_next": Case("qwen3_next", {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [0]}),
    "granitemoehybrid": Case(
        "granitemoehybrid",
        {
            **_GRANITE_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
        },
    ),
    "falcon_h1": Case(
        "falcon_h1",
        {
            **_FALCON,
            "mamba_n_groups": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
        },
    ),
    "olmo_hybrid": Case("olmo_hybrid", {**_DELTA, "attention_bias": True}),
    "kimi_linear": Case(
        "kimi_linear",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "nemotron_h": Case("nemotron_h", {**_NEMOTRON, "use_bias": True, "mlp_bias": True}),
}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

# Other options of a config.json of these families.
VARIANTS = {
    "nemotron_h with experts between two projections": Case(
        "nemotron_h",
        {
            **_NEMOTRON,
            "moe_latent_size": 24,
            "layers_block_type": ["moe", "linear_attention", "full_attention"],
            "mamba_hidden_act": "gelu",
            "mlp_hidden_act": "relu",
            "mlp_bias": True,
            # transformers does not read the next two.
            "mamba_proj_bias": True,
            "n_shared_experts": 2,
        },
    ),
    "qwen3_5 with another activation": Case("qwen3_5_text", {**_DELTA, "hidden_act": "gelu"}),
    "lfm2": Case(
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "conv_bias": True,
        },
    ),
    "granitemoehybrid with rotation and a dense MLP": Case(
        "granitemoehybrid",
        {
            **_GRANITE_MAMBA,
            "mamba_n_groups": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["full_attention", "linear_attention"],
            "position_embedding_type": "rope",
            "attention_multiplier": 0.3,
            "mamba_proj_bias": True,
        },
    ),
    "lfm2 tied, with an adjusted MLP": Case(
        "lfm2",
        {
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 4,
            "intermediate_size": 100,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.5,
            "block_multiple_of": 32,
        },
    ),
    "falcon_h1 tied, with a norm after the gate": Case(
        "falcon_h1",
        {
            **_FALCON,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1 without a norm": Case(
        "falcon_h1", {**_FALCON, "mamba_conv_bias": False, "projectors_bias": True}
    ),
    "llama4 with experts in all layers, without norms": Case(
        "llama4_text",
        {
            **_LLAMA4,
            "num_hidden_layers": 2,
            "no_rope_layers": [0, 1],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "num_experts_per_tok": 1,
            "attention_bias": True,
        },
    ),
    "llama4 without chunks": Case(
        "llama4_text",
        {**_LLAMA4, "num_hidden_layers": 2, "attention_chunk_size": None, "moe_layers": [0]},
    ),
    "olmo_hybrid without rotation, with sizes by default": Case(
        "olmo_hybrid",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "llama with a KV head per query head": Case("llama", {"num_key_value_heads": 4}),
    "llama tied, with llama3 rope": Case(
        "llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}
    ),
    "llama with linear rope and biases": Case(
        "llama",
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        },
    ),
    "llama with gelu and biases of MLPs": Case("llama", {"hidden_act": "gelu", "mlp_bias": True}),
    "mistral without a window": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2"),
    "qwen2 with a window": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    ),
    "qwen3 with biases": Case("qwen3", {"head_dim": 8, "attention_bias": True}),
    "gemma2 without caps, with biases": Case(
        "gemma2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "hidden_activation": "silu",
        },
    ),
    "gemma3 with and without windows": Case(
        "gemma3_text",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": [*_SLIDING, *_SLIDING[:1]],
        },
    ),
    "gemma3n with another active stream": Case(
        "gemma3n_text",
        {
            **_GEMMA3N,
            "intermediate_size": 96,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3 untied": Case(
        "gemma3_text",
        {"head_dim": 16, "sliding_window": WINDOW, "tie_word_embeddings": False},
    ),
    "phi3 with partial rotation, without a window": Case(
        "phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    ),
    "olmo2 with a KV head per query head": Case(
        "olmo2", {"num_key_value_heads": 4, "attention_bias": True}
    ),
    "olmo3 with windows in all layers": Case("olmo3", {"sliding_window": WINDOW}),
    "smollm3 with windows": Case(
        "smollm3",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _SLIDING[::-1],
            "tie_word_embeddings": False,
            "mlp_bias": True,
            "hidden_act": "quick_gelu",
        },
    ),
    "granite tied, with biases": Case(
        "granite",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "logits_scaling": 0.9,
        },
    ),
    "mixtral with a window": Case(
        "mixtral", {"sliding_window": WINDOW, "num_local_experts": 4, "head_dim": 24}
    ),
    "qwen2_moe renormalised": Case(
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "qkv_bias": False,
        },
    ),
    "qwen3_moe with biases": Case(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "moe_intermediate_size": 40,
        },
    ),
    "olmoe renormalised": Case(
        "olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True}
    ),
    "gemma4 with values of their own": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "seed_oss": Case("seed_oss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": Case("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "cwm": Case("cwm", {"head_dim": 24, "sliding_window": WINDOW, "mlp_bias": True}),
    "gemma": Case("gemma", {"head_dim": 24}),
    "glm": Case("glm", {"head_dim": 24}),
    "cohere": Case("cohere", {"logit_scale": 0.7, "use_qk_norm": True}),
    "glm4_moe without norms of heads and groups": Case(
        "glm4_moe",
        {**_GLM_EXPERTS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "dots1": Case("dots1", {**_GLM_EXPERTS, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3_moe with dense layers": Case(
        "qwen3_moe",
        {
            "num_hidden_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss without biases": Case(
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_bias": False,
        },
    ),
    "deepseek_v2 without groups, with latent queries": Case(
        "deepseek_v2",
        {**_LATENT, "n_group": None, "topk_group": None, "topk_method": "greedy"}
        | {"norm_topk_prob": False, "rope_parameters": {"rope_type": "default"}}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        {
            **_LATENT,
            "rms_norm_eps": 1e-3,
            "mlp_layer_types": ["dense", "sparse"],
            "attention_bias": True,
        },
    ),
    "mistral4": Case(
        "mistral4",
        {**_LATENT, "rope_parameters": _LATENT["rope_parameters"] | {"llama_4_scaling_beta": 0.3}},
    ),
    "deepseek_v3 with other pairs": Case("deepseek_v3", {**_LATENT, "rope_interleave": False}),
    "glm4 without biases": Case("glm4", {"head_dim": 16, "attention_bias": False}),
    "cohere2 untied, with biases": Case(
        "cohere2",
        {
            "sliding_window": WINDOW,
            "layer_types": _SLIDING[::-1],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "logit_scale": 0.4,
        },
    ),
}


# Variants that combine parts as no case does: here, scaled queries and latent attention. Their
# answers are stored, too.
WITH_ENGINES = ("mistral4",)


# Imported by the tests that need them and not during collection, because the import takes seconds.
def torch() -> Any:
    """Return the package, or skip the test."""
    package = pytest.importorskip("torch")
    # Further threads would cost more time than they save, because the models are tiny.
    package.set_num_threads(1)
    return package


def transformers() -> Any:
    """Return the package, or skip the test."""
    return pytest.importorskip("transformers")


def changed(case: Case, **changes: Any) -> Case:
    """Return a case with other sizes or options."""
    return Case(case.model_type, {**case.changes, **changes})


def reference_config(case: Case) -> Any:
    """Return the transformers config of a case."""
    return transformers().AutoConfig.for_model(
        case.model_type, attn_implementation="eager", **{**_SIZES, **case.changes}
    )


def reference(case: Case) -> Any:
    """Return a transformers model of a case with drawn weights."""
    return drawn(_initial(case))


def _initial(case: Case) -> Any:
    """Return a transformers model of a case with its initial weights."""
    config = reference_config(case)
    return _model_class(config)._from_config(config)


def _model_class(config: Any) -> Any:
    """Return the class of a config. The automatic class does not know all families."""
    known = transformers().AutoModelForCausalLM._model_mapping
    if type(config) in known:
        return known[type(config)]
    return getattr(transformers(), type(config).__name__.replace("Config", "ForCausalLM"))


@dataclasses.dataclass(frozen=True)
class ImageModel:
    """A model with images or audio, of which we read the text model.

    Attributes:
      text: the text model in transformers.
      family: `model_type` of the model that we read.
      options: config entries of the whole model.
    """

    text: Case
    family: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
_QWEN_VISION = _VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
_QWEN3_VISION = {**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_PATCHES = {"image_size": 28, "patch_size": 14}


def _three_positions(head_dim: int, sections: list[int]) -> dict[str, Any]:
    """Return entries of Qwen's models, which rotate parts of heads by different positions."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {"head_dim": head_dim, "rope_parameters": rope}


# The first token of the vocabulary, which no prompt has, stands for images.
_IMAGE_TOKEN = {"image_token_id": 0, "video_token_id": 0}
# Models with images, by `model_type`.
IMAGE_MODELS = {
    "gemma3": ImageModel(
        Case("gemma3_text", CASES["gemma3"].changes),
        "gemma3_text",
        {
            "vision_config": {**_VISION, "image_size": 8, "patch_size": 4},
            "mm_tokens_per_image": 4,
            "image_token_index": 0,
        },
    ),
    "gemma4": ImageModel(
        # The model reads the embedding of the padding token.
        Case("gemma4_text", {**CASES["gemma4"].changes, "pad_token_id": 0}),
        "gemma4_text",
        {
            "vision_config": {
                **_VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
            },
            "audio_config": None,
            "image_token_id": 0,
        },
    ),
    "gemma4_unified": ImageModel(
        Case(
            "gemma4_unified_text",
            {
                key: value
                for key, value in {**CASES["gemma4"].changes, "pad_token_id": 0}.items()
                if "per_layer_input" not in key
            },
        ),
        "gemma4_text",
        {
            "vision_config": {
                "patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 64,
            },
            "audio_config": {"audio_embed_dim": 16},
            **_IMAGE_TOKEN,
        },
    ),
    "kimi_k25": ImageModel(
        Case("deepseek_v3", _LATENT),
        "deepseek_v3",
        {
            "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
            **_IMAGE_TOKEN,
        },
    ),
    "mistral3": ImageModel(
        Case("ministral3", CASES["ministral3"].changes),
        "ministral3",
        {
            "vision_config": {**_VISION, **_PATCHES, "head_dim": 8, "model_type": "pixtral"},
            "image_token_index": 0,
        },
    ),
    "qwen2_5_vl": ImageModel(
        Case("qwen2_5_vl_text", _three_positions(16, [1, 2, 5]) | {"head_dim": None}),
        "qwen2",
        {"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]}, **_IMAGE_TOKEN},
    ),
    "qwen3_vl": ImageModel(
        Case("qwen3_vl_text", _three_positions(24, [4, 4, 4])),
        "qwen3",
        {"vision_config": _QWEN3_VISION, "image_token_id": 0},
    ),
    "qwen3_vl_moe": ImageModel(
        Case(
            "qwen3_vl_moe_text",
            {
                **_three_positions(24, [6, 3, 3]),
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 20,
                "tie_word_embeddings": False,
            },
        ),
        "qwen3_moe",
        {"vision_config": _QWEN3_VISION, **_IMAGE_TOKEN},
    ),
}  # fmt: skip
# Others, without stored values. They contain the text model in other ways.
_MORE_VISION = {**_VISION, **_PATCHES}
_AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
}  # fmt: skip
OTHER_IMAGE_MODELS = {
    "idefics3": ImageModel(CASES["llama"], "llama", {"vision_config": _MORE_VISION}),
    "internvl": ImageModel(
        VARIANTS["qwen2"],
        "qwen2",
        {"vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "lfm2_vl": ImageModel(VARIANTS["lfm2"], "lfm2", {"vision_config": _MORE_VISION}),
    "llava": ImageModel(
        CASES["llama"],
        "llama",
        {"vision_config": {**_MORE_VISION, "model_type": "clip_vision_model"}},
    ),
    "minicpmv4_6": ImageModel(
        Case("qwen3_5_text", CASES["qwen3_5"].changes),
        "qwen3_5_text",
        {"vision_config": _MORE_VISION},
    ),
    "qwen2_vl": ImageModel(
        Case("qwen2_vl_text", _three_positions(16, [2, 2, 4]) | {"head_dim": None}),
        "qwen2",
        {
            "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64},
            **_IMAGE_TOKEN,
        },
    ),
    "voxtral": ImageModel(CASES["llama"], "llama", {"audio_config": _AUDIO}),
}


def initial_with_images(model_type: str) -> Any:
    """Return a transformers model of `IMAGE_MODELS` or `OTHER_IMAGE_MODELS`, not drawn."""
    kinds, model = transformers(), {**IMAGE_MODELS, **OTHER_IMAGE_MODELS}[model_type]
    text = {**_SIZES, "eos_token_id": [1, 5], "model_type": model.text.model_type}
    config = kinds.AutoConfig.for_model(
        model_type,
        text_config={**text, **model.text.changes},
        attn_implementation="eager",
        eos_token_id=[1, 5],
        **model.options,
    )
    for auto_class in (kinds.AutoModelForImageTextToText, kinds.AutoModelForMultimodalLM):
        if type(config) in auto_class._model_mapping:
            return auto_class._model_mapping[type(config)](config)
    raise AssertionError(f"no class of transformers generates text with {model_type}")


def initial_models() -> dict[str, Any]:
    """Return functions that make the models of `references`, with their initial weights."""
    makers = {name: (_initial, case) for name, case in {**CASES, **VARIANTS}.items()}
    makers |= {with_images(kind): (initial_with_images, kind) for kind in IMAGE_MODELS}
    return {name: functools.partial(*maker) for name, maker in makers.items()}


def with_images(model_type: str) -> str:
    """Return the name in `references` of a model for images."""
    return f"{model_type} with images"


def describe(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the ``config.json`` and the tensors that transformers writes for an initial model."""
    # transformers logs that special tokens of a family are not in this vocabulary
    transformers().logging.set_verbosity_error()
    transformers().logging.disable_progress_bar()
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                # Norms begin with 1 or, in Gemma, with 0, and scalars of layers with 1.
                module = ".".join(name.split(".")[-2:])
                has_offset = "norm" in module or "layer_scalar" in module
                offset = float(np.mean(file.get_tensor(name))) if has_offset else 0.0
                assert offset in (0, 1) or not name.endswith("norm.weight"), name
                # transformers gives all layers of Kimi K2.5 the name of those for images. In the
                # published files, those of the text model have the usual name.
                name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
                tensors[name] = Tensor(tuple(part.get_shape()), part.get_dtype(), offset)
    return config, tensors


def drawn(model: Any) -> Any:
    """Return a model of the same config with drawn weights, which transformers reads from a file.

    Args:
      model: a model with its initial weights.
    """
    return load_drawn(type(model), *describe(model))


def load_drawn(kind: Any, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Load drawn weights with a class of transformers."""
    torch()
    with tempfile.TemporaryDirectory() as folder:
        references.write_model(Path(folder), config, references.draw(tensors))
        return kind.from_pretrained(folder, attn_implementation="eager").eval()


def logits(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Return the logits of a transformers model, float32 ``[B, T, V]``, for tokens ``[B, T]``."""
    with torch().no_grad():
        tokens = torch().from_numpy(np.asarray(token_ids)).long()
        # transformers has no cache for models without attention.
        return model(tokens, use_cache=False).logits.numpy()


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the most probable next tokens by a transformers model with its cache."""
    with torch().no_grad():
        ids = torch().tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch().ones_like(ids), do_sample=False, max_new_tokens=count,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
    return found[0, len(prompt) :].tolist()


def embeddings(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Return the input of the first layer of a transformers model, float32 ``[B, T, E]``."""
    with torch().no_grad():
        rows = model.model.embed_tokens(torch().from_numpy(np.asarray(token_ids)).long())
        return rows.float().numpy()


def load(folder: Path, **options: Any) -> Any:
    """Load a folder with transformers."""
    kind = _model_class(transformers().AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, attn_implementation="eager", **options).eval()


def interpreted_triton(
    traced: list[Interpret] | None = None, op: str = "grouped_linear"
) -> Backend:
    """Return the interpreted GPU kernels as a backend for any platform.

    If `traced` is given, each traced call of the kernel of `op` adds the kernel's `interpret`.
    """
    triton = BACKENDS["triton"].interpreted(jax.default_backend() != "gpu")
    kernel = triton.kernels[op]

    def run(args: Any) -> Any:
        if traced is not None:
            traced.append(kernel.interpret)
        return kernel.run(args)

    kernels = {**triton.kernels, op: dataclasses.replace(kernel, run=run)}
    return dataclasses.replace(triton, kernels=kernels, platform=None)
