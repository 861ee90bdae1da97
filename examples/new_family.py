"""Add a model family that the library does not support: the first Gemma.

    python examples/new_family.py ~/models/gemma-2b-it "Why is the sky blue?"

A family is an entry of a table: the name of its class in transformers, the defaults of its
config.json, and values for switches of `LlamaConfig`. Gemma differs from Llama in three points:
norms multiply by one plus their weight, the activation of the MLP is GELU, and embeddings are
multiplied by the square root of their size. Loading, saving, the cache, the engine and tensor
parallelism need no changes.

`docs/families.md` lists all switches and explains how to test an entry.
"""

import argparse

from paged_jax import LLM, SamplingParams
from paged_jax.models.families import FAMILIES
from paged_jax.models.family import Family, Scale

GEMMA = Family(
    architecture="GemmaForCausalLM",
    # The defaults of `GemmaConfig` in transformers.
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    fixed={"norm_offset": 1.0},
    biases=("qkv_bias", "o_bias"),
    scales=(Scale("embedding_multiplier", "hidden_size", 0.5),),
    # Old files have "gelu" as `hidden_act`, but the weights need the approximation by tanh.
    keys={"hidden_act": "hidden_activation"},
)


def add_gemma() -> None:
    """Register the family, so that this process can load its checkpoints."""
    FAMILIES["gemma"] = GEMMA


def main() -> None:
    """Generate text after a prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="a Hugging Face folder of the first Gemma")
    parser.add_argument("prompt")
    args = parser.parse_args()
    add_gemma()
    (output,) = LLM(args.folder).generate([args.prompt], SamplingParams(max_tokens=64))
    print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
