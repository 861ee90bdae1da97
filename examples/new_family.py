"""Add a model family that the library does not support: VaultGemma.

    python examples/new_family.py ~/models/vaultgemma-1b "Why is the sky blue?"

A family is an entry of a table: the name of its class in transformers, the defaults of its
config.json, and values for switches of `LlamaConfig`. VaultGemma differs from Gemma 2 in its norms:
it has norms before attention and the MLP, but not after. Loading, saving, the cache, the engine and
tensor parallelism need no changes.

`docs/new-models.md` lists all switches and explains how to test an entry.
"""

import argparse

from paged_jax import LLM, SamplingParams
from paged_jax.models.families import FAMILIES
from paged_jax.models.family import Family, Scale

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


def add_vault_gemma() -> None:
    """Register the family, so that this process can load its checkpoints."""
    FAMILIES["vaultgemma"] = VAULT_GEMMA


def main() -> None:
    """Generate text after a prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="a Hugging Face folder of VaultGemma")
    parser.add_argument("prompt")
    args = parser.parse_args()
    add_vault_gemma()
    (output,) = LLM(args.folder).generate([args.prompt], SamplingParams(max_tokens=64))
    print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
