"""Small GGUF files, written with the package `gguf`, and names from its own table of names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.parts.delta_net import GatedDeltaNet
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.state_space import Mamba2
from paged_jax.models.rope import Rope

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
# Places of the float16 numbers of a block, by type; by default there is one at its start.
SCALE_PLACES: Mapping[str, tuple[int, ...]] = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "Q2_K": (80, 82), "Q3_K": (108,), "MXFP4": (),
}  # fmt: skip
# Values of a type for the writer, by the type in Python.
_ADDERS = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add entries to a file. Lists and arrays become arrays."""
    for key, value in metadata.items():
        if isinstance(value, list | np.ndarray):
            writer.add_array(key, np.asarray(value).tolist())
        else:
            getattr(writer, _ADDERS[type(value)])(key, value)


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any], **options) -> Path:
    """Write a GGUF file.

    Args:
      path: the file.
      metadata: values by key, with ``"general.architecture"``.
      tensors: an array for each tensor; or a pair of uint8 ``[..., row_bytes]`` and its type.
      options: options of `GGUFWriter`.
    """
    writer = gguf.GGUFWriter(path, metadata["general.architecture"], **options)
    add_metadata(writer, {k: v for k, v in metadata.items() if k != "general.architecture"})
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            data, kind = tensor
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_rows(kind: str, num_rows: int, num_blocks: int = 3) -> np.ndarray:
    """Return random rows of a type as bytes, uint8 ``[rows, row_bytes]``, with finite scales."""
    rng = np.random.default_rng(0)
    if kind in ("F32", "F16", "BF16"):
        values = rng.standard_normal((num_rows, 32 * num_blocks), np.float32)
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
        return values.astype(dtype).view(np.uint8)
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (num_rows, num_blocks, num_bytes), np.uint8)
    for place in SCALE_PLACES.get(kind, (0,)):
        scales = np.random.default_rng(1).uniform(-2, 2, (num_rows, num_blocks, 1))
        data[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = data[..., 0] % 16 + 120
    return data.reshape(num_rows, -1)


def metadata_of(config: ModelConfig, architecture: str, **others: Any) -> dict[str, Any]:
    """Return the entries of a model, without those that `others` maps to None."""
    experts = next((spec.experts for spec in config.layers if spec.experts), None)
    denses = (spec.find(Dense) for spec in config.layers)
    mlp = next(filter(None, denses), None) or experts
    # In layers with a window, the base of the rotary frequencies may be smaller.
    ropes = [*filter(None, config.ropes)] or [Rope(config.head_dim, config.head_dim, 1e4)]
    rope = max(ropes, key=lambda rope: rope.theta)
    entries = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": mlp.features,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm.eps,
        "rope.freq_base": rope.theta,
        "rope.dimension_count": rope.rotary_dim,
    } | others
    if experts is not None:
        entries |= {
            "expert_count": experts.num_experts,
            "expert_used_count": experts.num_chosen,
            "expert_feed_forward_length": experts.features,
        }
    metadata = {f"{architecture}.{key}": each for key, each in entries.items() if each is not None}
    return {"general.architecture": architecture, **metadata}


def tensors_of(model: Decoder, architecture: str, folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a model as llama.cpp's converter names and changes them.

    Args:
      model: the model.
      architecture: its architecture in GGUF.
      folder: folder for a temporary Hugging Face checkpoint.
    """
    model.save_pretrained(folder)
    config = model.config
    [arch] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items(), key=_by_expert):
        if architecture in ("llama", "granitehybrid"):
            tensor = _rotate_in_pairs(config, name, tensor)
        is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        if config.norm.offset and is_norm:
            tensor = tensor + np.float32(config.norm.offset)
        if ".linear_attn." in name:
            tensor = _tile_value_heads(config, name, tensor)
        if ".mamba." in name:
            tensor = _shape_mamba(config, name, tensor)
        if "conv" in name and tensor.ndim == 3:
            tensor = tensor[:, 0]
        if name.endswith(".A_log"):
            tensor = -np.exp(tensor)
        if architecture == "gpt-oss" and ".mlp.experts." in name:
            tensors |= _separate(name, tensor)
            continue
        if name.endswith("input_linear.weight"):
            tensors |= _split_gate_up(config, name, tensor)
            continue
        parts = name.split(".")
        if "experts" in parts and parts[parts.index("experts") + 1].isdigit():
            del parts[parts.index("experts") + 1]
            experts.setdefault(".".join(parts), []).append(tensor)
            continue
        # The converter drops dimensions of size 1, except those that it adds for Mamba-2.
        squeezed = tensor if ".mamba." in name or tensor.ndim == 1 else tensor.squeeze()
        tensors[_gguf_name(names, name, config)] = squeezed
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = _divisors_of_gemma4(config)
    return tensors | {
        _gguf_name(names, name, config): np.stack(all_) for name, all_ in experts.items()
    }


def _tile_value_heads(config: ModelConfig, name: str, tensor: np.ndarray) -> np.ndarray:
    """Bring value heads of a delta net into the order of llama.cpp: "tiled", not "grouped"."""
    net = next(filter(None, (spec.find(GatedDeltaNet) for spec in config.layers)))
    keys, groups = net.num_key_heads, net.num_value_heads // net.num_key_heads
    num_others = 2 * keys * net.key_dim  # rows of queries and keys

    def tile(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(keys, groups, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv." in name or "conv1d" in name:
        return np.concatenate([tensor[:num_others], tile(tensor[num_others:])])
    if "out_proj" in name:
        return tile(tensor.T).T
    return tensor if name.endswith("norm.weight") else tile(tensor)


def _shape_mamba(config: ModelConfig, name: str, tensor: np.ndarray) -> np.ndarray:
    if name.endswith((".A_log", ".D")):
        return tensor[:, None]
    if name.endswith("norm.weight"):
        mamba = next(filter(None, (spec.find(Mamba2) for spec in config.layers)))
        return tensor.reshape(mamba.num_groups, -1)
    return tensor


def _split_gate_up(config: ModelConfig, name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Return gate and up of Granite's experts, or of the MLP beside them."""
    layer = name.split(".")[2]
    suffix = "_exps" if "block_sparse_moe" in name else "_shexp" if config.num_experts else ""
    halves = np.split(tensor, 2, axis=-2)
    pairs = zip(("gate", "up"), halves, strict=True)
    return {f"blk.{layer}.ffn_{kind}{suffix}.weight": half for kind, half in pairs}


def _divisors_of_gemma4(config: ModelConfig) -> np.ndarray:
    """Return 1 for pairs that rotate in layers without a window, and 1e30 for other pairs."""
    rope = config.ropes[-1]
    divisors = np.full(rope.head_dim // 2, 1e30, np.float32)
    divisors[: rope.rotary_dim // 2] = 1
    return divisors


def _separate(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Return gate and up, or down, of the experts of gpt-oss: ``[X, in, out]`` or a bias."""
    layer, suffix = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    tensor = tensor if suffix == "bias" else tensor.swapaxes(1, 2)
    if "down_proj" in name:
        parts = {"down": tensor}
    else:
        parts = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}  # they alternate
    return {f"blk.{layer}.ffn_{kind}_exps.{suffix}": each for kind, each in parts.items()}


def _by_expert(item: tuple[str, np.ndarray]) -> tuple[int, str]:
    numbers = [int(part) for part in item[0].split(".") if part.isdigit()]
    return (numbers[1] if len(numbers) > 1 else -1), item[0]


# Names of tensors, or parts of names, that the converter changes before it looks them up.
_RENAMED = {
    ".dt_bias": ".dt_proj.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    "model.layers.": "layers.",
}


def _gguf_name(names: gguf.TensorNameMap, name: str, config: ModelConfig) -> str:
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_experts:
        return f"blk.{layer}.ffn_down.weight"
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    found = found or names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    has_suffix = name.endswith((".weight", ".bias", ".A_log", ".D"))
    return found if has_suffix else found + ".weight"  # attn_sinks


def _rotate_in_pairs(config: ModelConfig, name: str, tensor: np.ndarray) -> np.ndarray:
    for kind, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if f".{kind}." in name:
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor
