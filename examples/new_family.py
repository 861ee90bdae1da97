"""A family of models that this library does not know, added by its user: the first Gemma.

    python examples/new_family.py ~/models/gemma-2b-it "Why is the sky blue?"

A family is an entry of a table: what it calls its class in transformers, what a config.json may
leave out, and which switches of `LlamaConfig` it has, always or as its config.json says. All of
Gemma that is not Llama: norms multiply by one more than their weight, the gate is a GELU, and
embeddings are multiplied by the square root of their length. Loading, the cache, the engine, saving
and several devices need no line of their own.

`docs/families.md` has the list of all switches, and how to see that an entry is right.
"""

import argparse

from paged_jax import LLM, SamplingParams
from paged_jax.models.families import FAMILIES
from paged_jax.models.family import Family, Scale

GEMMA = Family(
    architecture="GemmaForCausalLM",
    # What transformers' `GemmaConfig` takes for a key that is missing.
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
    # Old files say "gelu" for `hidden_act`, and mean its approximation by tanh.
    keys={"hidden_act": "hidden_activation"},
)


def add_gemma() -> None:
    """Let this process load the first Gemma: every config that is read from now on may be one."""
    FAMILIES["gemma"] = GEMMA


def main() -> None:
    """Continue one prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="a Hugging Face folder of the first Gemma")
    parser.add_argument("prompt")
    args = parser.parse_args()
    add_gemma()
    (output,) = LLM(args.folder).generate([args.prompt], SamplingParams(max_tokens=64))
    print(args.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
