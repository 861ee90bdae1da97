"""Model shapes for the benchmarks, and folders of random weights with these shapes.

Speed does not depend on the values of weights, so the benchmarks download nothing: a folder with
the right shapes and small random values replaces the real checkpoint. The folder has the Hugging
Face format, so paged_jax and its peers read the same weights.

    python -m benchmarks.common.shapes 135M models/135M --dtype bfloat16
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES: dict[str, dict[str, Any]] = {
    # The shape of stories15M: so small that overhead, not memory traffic, dominates a step.
    "15M": _COMMON
    | {
        "hidden_size": 288,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 48,
        "intermediate_size": 768,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    },
    # The shape of SmolLM2-135M: larger than CPU caches, so memory bandwidth limits decoding.
    "135M": _COMMON
    | {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "rope_theta": 100000.0,
    },
}
"""Hugging Face configurations by name: the content of `config.json`, without the dtype."""

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The weight dtypes of the benchmarks, by their names in `config.json`."""


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a tied Llama checkpoint by Hugging Face name.

    Linear weights are `[out, in]`.

    Example:
        >>> tensor_shapes(SHAPES["15M"])["model.layers.0.mlp.down_proj.weight"]
        (288, 768)
    """
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query = config["num_attention_heads"] * head
    key_value = config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (key_value, hidden),
            prefix + "self_attn.v_proj.weight": (key_value, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (mlp, hidden),
            prefix + "mlp.up_proj.weight": (mlp, hidden),
            prefix + "mlp.down_proj.weight": (hidden, mlp),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def weight_bytes(shape_name: str, dtype: str = "float32") -> int:
    """Return the bytes of all weights, which a decode step must read.

    Example:
        >>> weight_bytes("135M") // 10**6
        538
    """
    sizes = [int(np.prod(shape)) for shape in tensor_shapes(SHAPES[shape_name]).values()]
    return sum(sizes) * DTYPES[dtype].itemsize


def write_random_model(
    shape_name: str, folder: str | Path, dtype: str = "float32", seed: int = 0
) -> Path:
    """Write `config.json` and `model.safetensors` with random weights, and return the folder.

    Embeddings are normal with deviation 0.02, linear weights with deviation `in ** -0.5`, and norm
    weights are 1. (With 0.02 everywhere, the tied embeddings dominate and the model repeats its
    last token, whatever attention computes. Equal output of two engines would then prove nothing.)
    The same seed gives the same float32 values; bfloat16 weights are these values, rounded. There
    is no tokenizer.

    Args:
        shape_name: a key of `SHAPES`.
        folder: created if it is missing; existing files with the same names are replaced.
        dtype: a key of `DTYPES`.
        seed: seed of the random values.

    Raises:
        ValueError: if the shape or the dtype is unknown.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(path.name for path in write_random_model("15M", folder).iterdir())
        ['config.json', 'model.safetensors']
    """
    if shape_name not in SHAPES:
        raise ValueError(
            f"write_random_model: shape_name must be one of {', '.join(SHAPES)}, "
            f"got {shape_name!r}. Add other shapes to SHAPES."
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"write_random_model: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}. "
            "Choose one of these."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape_name]
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            values = np.ones(shape, np.float32)
        else:
            deviation = 0.02 if "embed_tokens" in name else shape[1] ** -0.5
            values = random.standard_normal(shape, np.float32) * np.float32(deviation)
        tensors[name] = values.astype(DTYPES[dtype])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Write a folder of random weights."""
    parser = argparse.ArgumentParser(description="Write a model folder with random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    write_random_model(options.shape, options.folder, options.dtype, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
