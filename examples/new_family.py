"""Add model families that the library does not support: VaultGemma, and Bamba, a hybrid.

    python examples/new_family.py ~/models/vaultgemma-1b "Why is the sky blue?"

A family is an entry of a table: the name of its class in transformers, the defaults of its
config.json, and values for switches of `LlamaConfig`. VaultGemma differs from Gemma 2 in its norms:
it has norms before attention and the MLP, but not after. Most layers of Bamba are Mamba-2, whose
states are in the same cache. Loading, saving, the cache, the engine and tensor parallelism need no
changes.

`docs/new-models.md` lists all switches and explains how to test an entry.
"""

import argparse

from paged_jax import LLM, SamplingParams
from paged_jax.models.families import FAMILIES
from paged_jax.models.family import BIASES, Family, MixerKeys, Scale, name_mlp

VAULT_GEMMA = Family(
    architecture="VaultGemmaForCausalLM",
    # The defaults of `VaultGemmaConfig` in transformers.
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    # Norms multiply by 1 + weight.
    fixed={"norm_offset": 1.0},
    # Every second layer has no window.
    sliding_layers="pattern",
    biases=("qkv_bias", "o_bias"),
    scales=(
        Scale("embedding_multiplier", "hidden_size", 0.5),
        Scale("attention_multiplier", "query_pre_attn_scalar", -0.5),
    ),
    caps=("attn_logit_softcapping", "final_logit_softcapping"),
    keys={"hidden_act": "hidden_activation"},
    tensors={"post_attention_norm": "pre_feedforward_layernorm.weight"},
)


BAMBA = Family(
    architecture="BambaForCausalLM",
    # The defaults of `BambaConfig` in transformers.
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attn_layer_indices": [],
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "time_step_limit": [0.0, float("inf")],
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    partial_rope=True,
    biases=BIASES,
    only={"mamba_proj_bias": False},
    # Recurrent layers: their kind, the key of each size, and the layers that have attention.
    mixer=MixerKeys(
        "mamba2",
        keys={
            "num_heads": "mamba_n_heads",
            "num_groups": "mamba_n_groups",
            "head_dim": "mamba_d_head",
            "state_dim": "mamba_d_state",
            "conv_width": "mamba_d_conv",
            "conv_bias": "mamba_conv_bias",
            "conv_act": "hidden_act",
            "time_limits": "time_step_limit",
            "norm_eps": "rms_norm_eps",
        },
        layer_types_key="",
        attention_layers="attn_layer_indices",
    ),
    tensors={
        **name_mlp("feed_forward"),
        "norm": "model.final_layernorm.weight",
        "post_attention_norm": "pre_ff_layernorm.weight",
        "mixer_in_proj.*": "mamba.in_proj.weight",
        "mixer_conv.*": "mamba.conv1d.weight",
        "mixer_conv_bias.*": "mamba.conv1d.bias",
        "mixer_decay": "mamba.A_log",
        "mixer_time": "mamba.dt_bias",
        "mixer_skip": "mamba.D",
        "mixer_norm": "mamba.norm.weight",
        "mixer_out_proj": "mamba.out_proj.weight",
    },
)


def add_families() -> None:
    """Register the families, so that this process can load their checkpoints."""
    FAMILIES["vaultgemma"] = VAULT_GEMMA
    FAMILIES["bamba"] = BAMBA


def main() -> None:
    """Generate text after a prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="a Hugging Face folder of VaultGemma or Bamba")
    parser.add_argument("prompt")
    args = parser.parse_args()
    add_families()
    (output,) = LLM(args.folder).generate([args.prompt], SamplingParams(max_tokens=64))
    print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
