"""Conversion of a Hugging Face Llama folder to a GGUF file for llama.cpp."""

from pathlib import Path

import numpy as np
from safetensors import safe_open

from benchmarks.common.process import import_peer
from benchmarks.common.shapes import DTYPES
from benchmarks.generate.peer import read_config


def _rope_pairs_adjacent(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a Q or K projection, [heads * D, E], to rotate adjacent pairs.

    Hugging Face rotates row i of a head with row i + D/2; llama.cpp's "llama" architecture rotates
    row 2i with 2i + 1.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(folder: str | Path, path: str | Path, dtype: str) -> None:
    """Convert a Hugging Face Llama folder into a GGUF file without vocabulary.

    Only one tensor at a time is in memory, so that the conversion does not increase the peak memory
    of the process. Norm weights are float32, as llama.cpp requires.

    Raises:
        PeerUnavailable: if gguf is missing.
        ValueError: if the folder contains a tensor that plain Llama does not have.
    """
    gguf = import_peer("gguf", "gguf")
    folder = Path(folder)
    config = read_config(folder)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # The benchmark passes token ids and reads logits, and never tokenizes text.
    writer.add_tokenizer_model("none")
    matrix_type = {
        "float32": gguf.GGMLQuantizationType.F32,
        "bfloat16": gguf.GGMLQuantizationType.BF16,
    }[dtype]
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", "np") as tensors:
        names = list(tensors.keys())
        for name in names:
            target = name_map.get_name(name, try_suffixes=(".weight",))
            if target is None:
                raise ValueError(
                    f"write_gguf: tensors must belong to a plain Llama, got {name}. "
                    "Remove it or use another model."
                )
            shape = tensors.get_slice(name).get_shape()
            is_norm = len(shape) == 1
            numpy_dtype = DTYPES["float32" if is_norm else dtype]
            writer.add_tensor_info(
                target,
                shape,
                numpy_dtype,
                int(np.prod(shape)) * numpy_dtype.itemsize,
                gguf.GGMLQuantizationType.F32 if is_norm else matrix_type,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in names:
            tensor = tensors.get_tensor(name)
            tensor = tensor.astype(DTYPES["float32" if tensor.ndim == 1 else dtype])
            if "q_proj" in name:
                tensor = _rope_pairs_adjacent(tensor, heads)
            elif "k_proj" in name:
                tensor = _rope_pairs_adjacent(tensor, kv_heads)
            writer.write_tensor_data(tensor)
    writer.close()
