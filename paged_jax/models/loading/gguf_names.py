"""Tensors of a model in a GGUF file, by the names of Hugging Face checkpoints."""

import re
from collections.abc import Iterator, Mapping

from paged_jax.models.config import LlamaConfig
from paged_jax.models.gguf_config import ROPE_TENSORS
from paged_jax.models.gguf_file import GgufFile, TensorEntry
from paged_jax.models.loading.gguf_tensors import GgufTensor
from paged_jax.models.loading.parameters import WeightsError
from paged_jax.models.loading.tensor_map import EMBEDDINGS, HEAD

_MODEL = {
    "token_embd.weight": EMBEDDINGS,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
# Names of a layer, without ``blk.N.`` and ``model.layers.N.``, and without the suffix.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    # One tensor for all experts. The * stands for the number of an expert.
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Names that differ, by the `model_type` of the config.
_OTHER: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    },
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
}
# Names with their suffixes that do not follow from the table.
_SINKS = "attn_sinks.weight", "self_attn.sinks"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")
# In these models, llama.cpp reorders the rows of queries and keys.
_REORDERED = ("llama", "mixtral")


def find_gguf_tensors(file: GgufFile, config: LlamaConfig) -> dict[str, GgufTensor]:
    """Return the tensors of a model by their standard names, see `tensor_map`.

    A tensor without a standard name keeps its name.

    Raises:
      WeightsError: the type of a tensor is not supported, or two tensors have the same name.
    """
    tensors: dict[str, GgufTensor] = {}
    for entry in file.tensors.values():
        if entry.name in ROPE_TENSORS:  # part of the config
            continue
        for name, tensor in _name(entry, config):
            if name in tensors:
                raise WeightsError(
                    f"{entry.path}: {tensors[name].name} and {tensor.name} must not both be {name}."
                )
            tensors[name] = tensor
    return tensors


def _name(entry: TensorEntry, config: LlamaConfig) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the standard name of a tensor, or of each expert in it."""
    match = _LAYER_NAME.fullmatch(entry.name)
    names = {**_LAYER, **_OTHER.get(config.model_type, {})}
    is_norm = entry.name.endswith("norm.weight")
    if match is None or match[2] not in (*names, "attn_sinks"):
        is_one_added = is_norm and config.norm_offset == 1
        name = _MODEL.get(entry.name, entry.name)
        yield name, GgufTensor.of(entry, is_one_added=is_one_added)
        return
    layer, kind, expert, suffix = match.groups()
    prefix = f"model.layers.{layer}."
    if f"{kind}.{suffix}" == _SINKS[0]:
        yield prefix + _SINKS[1], GgufTensor.of(entry)
        return
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    is_reordered = config.model_type in _REORDERED
    tensor = GgufTensor.of(
        entry,
        num_rotated_heads=heads.get(kind, 0) if is_reordered else 0,
        is_one_added=is_norm and config.norm_offset == 1,
    )
    # Older files have a tensor for each expert.
    name = names[f"{kind}_exps" if expert else kind]
    if expert:
        yield f"{prefix}{name.replace('*', expert)}.{suffix}", tensor
    elif "*" not in name:
        yield f"{prefix}{name}.{suffix}", tensor
    else:
        for index in range(tensor.shape[0]):
            yield f"{prefix}{name.replace('*', str(index))}.{suffix}", tensor.part(index)
