"""Llama of transformers with the weights of a GGUF file, dequantised by the package gguf.

It shares no code with paged_jax: names of tensors, order of rows and values come from the
definition of the format.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Names of the tensors in a GGUF file and in transformers, without their endings.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_reference(path: Path) -> Any:
    """Return the LlamaForCausalLM in float32 of a file with tied embeddings."""
    gguf = pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads = {
        "attn_q": field("attention.head_count"),
        "attn_k": field("attention.head_count_kv"),
    }
    config = transformers.LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=field("rope.freq_base"),
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        *layer, name, _ = tensor.name.split(".")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name in heads:
            # llama.cpp rotates adjacent pairs of rows, transformers the halves of a head.
            pairs = weight.reshape(heads[name], -1, 2, weight.shape[-1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{_NAMES[name]}.weight"] = torch.tensor(weight.astype(np.float32))
    # With empty weights, so that nothing is initialised that is overwritten afterwards.
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not any(each.is_meta for each in model.state_dict().values())
    return model.eval()


def best_tokens(model: Any, prompt: list[int], answer: list[int]) -> tuple[list[int], float]:
    """Return the most probable tokens after the prompt and after each token of an answer.

    An answer is greedy if it equals these tokens.

    Returns:
      The tokens, and the smallest gap between the best two logits.
    """
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    gaps = best.values[:, 0] - best.values[:, 1]
    return best.indices[:, 0].tolist(), float(gaps.min())
