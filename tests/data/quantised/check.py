"""Independent reader of the quantised fixtures, in NumPy.

    python tests/data/quantised/check.py FOLDER [FORMAT ...]

It expands the weights of each format. They must equal those in reference.npz bit for bit. It needs
NumPy and ml_dtypes, and for GGUF the package gguf, whose own dequantisation it calls. It shares no
code with the tools that wrote the other files, or with paged_jax.
"""

import json
import os
import struct
import sys

import ml_dtypes
import numpy as np

# dtypes in safetensors files.
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U32": np.uint32,
    "U8": np.uint8,
}
# Values of floats with 4 bits: a sign, two bits of exponent and one of mantissa.
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])
# Order in which AWQ stores the eight values of a word.
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_safetensors(path):
    """Return the tensors of a file by name."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        content = file.read()
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            array = np.frombuffer(content[start:end], DTYPES[entry["dtype"]])
            tensors[name] = array.reshape(entry["shape"])
    return tensors


def unpack(words, bits, axis):
    """Return the integers in words of 32 bits along an axis, the lowest bits first."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    values = (words[..., None] >> shifts) & (2**bits - 1)
    values = values.reshape(*words.shape[:-1], -1).astype(np.int32)
    return np.moveaxis(values, -1, axis)


def unpack_e2m1(array):
    """Return the floats of 4 bits in bytes along the last axis, the low half first."""
    return E2M1[np.stack([array & 15, array >> 4], -1)].reshape(len(array), -1)


def exponents(array):
    """Return the powers of two of scales that are stored as biased exponents."""
    return np.ldexp(np.float32(1), array.astype(np.int32) - 127)


def spread(array, rows, columns, shape):
    """Repeat the scales of blocks, and cut them off at the edges of a matrix."""
    return np.repeat(np.repeat(array, rows, 0), columns, 1)[: shape[0], : shape[1]]


def along(array, num_inputs):
    """Repeat the scales of groups along the inputs of a matrix."""
    return np.repeat(array, num_inputs // array.shape[1], 1)


class Module:
    """Tensors of one quantised matrix."""

    def __init__(self, tensors, weight, config):
        self.tensors, self.weight, self.config = tensors, weight, config
        self.prefix = weight.removesuffix("weight")

    def __contains__(self, name):
        return self.prefix + name in self.tensors

    def __getitem__(self, name):
        return self.tensors[self.prefix + name]

    def floats(self, name):
        return self[name].astype(np.float32)


def read_fp8(module):
    weight = module.floats("weight")
    name = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
    scale = module.floats(name)
    if scale.ndim == 0:
        scale = scale.reshape(1, 1)
    rows, columns = module.config.get("weight_block_size") or weight.shape
    return weight * spread(scale, rows, columns, weight.shape)


def read_compressed_tensors(module):
    (group,) = module.config["config_groups"].values()
    weights, layout = group["weights"], module.config["format"]
    if layout == "pack-quantized":
        return read_packed(module, weights["num_bits"])
    if layout == "nvfp4-pack-quantized":
        weight = unpack_e2m1(module["weight_packed"])
        scale = module.floats("weight_scale") / module.floats("weight_global_scale")
        return weight * along(scale, weight.shape[1])
    if layout == "mxfp4-pack-quantized":
        weight = unpack_e2m1(module["weight_packed"])
        return weight * along(exponents(module["weight_scale"]), weight.shape[1])
    assert layout in ("float-quantized", "int-quantized", "naive-quantized"), layout
    weight, scale = module.floats("weight"), module.floats("weight_scale")
    if weights["strategy"] == "block":
        return weight * spread(scale, *weights["block_structure"], weight.shape)
    return weight * scale.reshape(-1, 1)


def read_packed(module, bits):
    """Integers in words along the inputs, zero points in words along the outputs."""
    num_outputs, num_inputs = module["weight_shape"]
    centre, scale = 2 ** (bits - 1), module.floats("weight_scale")
    values = unpack(module["weight_packed"], bits, 1)[:, :num_inputs] - centre
    zero = np.zeros(scale.shape, np.int32)
    if "weight_zero_point" in module:
        zero = unpack(module["weight_zero_point"], bits, 0)[:num_outputs] - centre
    if "weight_g_idx" in module:
        index = module["weight_g_idx"]
        return (values - zero[:, index]) * scale[:, index]
    return (values - along(zero, num_inputs)) * along(scale, num_inputs)


def read_awq(module):
    def integers(name):
        words = module[name]
        values = unpack(words, 4, 1).reshape(len(words), -1, 8)
        return values[..., AWQ_ORDER].reshape(len(words), -1)

    values, zero = integers("qweight"), integers("qzeros")
    size = len(values) // len(zero)
    scale = np.repeat(module.floats("scales"), size, 0)
    return ((values - np.repeat(zero, size, 0)) * scale).T


def read_gptq(module):
    bits = module.config["bits"]
    values, zero = unpack(module["qweight"], bits, 0), unpack(module["qzeros"], bits, 1)
    # Version 1 stores zero points minus one.
    if module.config.get("checkpoint_format", "gptq") == "gptq":
        zero = zero + 1
    index = module["g_idx"]
    return ((values - zero[index]) * module.floats("scales")[index]).T


def read_bitsandbytes(module):
    if "SCB" in module:
        return module.floats("weight") * module.floats("SCB")[:, None] * np.float32(1 / 127)
    [name] = [name for name in module.tensors if name.startswith(module.weight + ".quant_state")]
    state = json.loads(module.tensors[name].tobytes())
    scale = module["weight.absmax"]
    if scale.dtype == np.uint8:
        nested = np.repeat(module["weight.nested_absmax"], state["nested_blocksize"])
        scale = module["weight.nested_quant_map"][scale] * nested[: scale.size]
        scale = scale + np.float32(state["nested_offset"])
    # The high half of a byte comes first.
    packed = module["weight"].reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)
    scales = np.repeat(scale, state["blocksize"])[: codes.size]
    return (module["weight.quant_map"][codes] * scales).reshape(state["shape"])


def read_mlx(module):
    weight, scale = module["weight"], module["scales"]
    if module.config.get("mode", "affine") == "mxfp4":
        return E2M1[unpack(weight, 4, 1)] * np.repeat(exponents(scale), 32, 1)
    values = unpack(weight, module.config["bits"], 1)
    scale, bias = module.floats("scales"), module.floats("biases")
    return values * along(scale, values.shape[1]) + along(bias, values.shape[1])


READERS = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "bitsandbytes": read_bitsandbytes,
    "mlx": read_mlx,
}


def expand_folder(folder, names):
    """Return the named weights of a folder with a safetensors file."""
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    tensors = read_safetensors(f"{folder}/model.safetensors")
    config = config.get("quantization_config") or config.get("quantization")
    read = READERS[config.get("quant_method", "mlx")]
    return {name: read(Module(tensors, name, config)) for name in names}


def expand_gguf(path, names):
    """Return the named weights of a GGUF file, with the rows in the order of transformers."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    fields = {"q_proj": "head_count", "k_proj": "head_count_kv"}
    others = {"model.embed_tokens.weight": "token_embd", "lm_head.weight": "output"}
    weights = {}
    for name in names:
        stored = others.get(name)
        kind = name.split(".")[-2]
        if stored is None:
            _, _, layer, block, _, _ = name.split(".")
            stored = f"blk.{layer}.{GGUF_NAMES[f'{block}.{kind}']}"
        tensor = tensors[f"{stored}.weight"]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in fields:
            # llama.cpp rotates adjacent rows, transformers the two halves of a head.
            num_heads = int(reader.fields[f"llama.attention.{fields[kind]}"].contents())
            pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        weights[name] = weight
    return weights


def is_equal(weight, reference, name):
    """Return whether a weight equals its reference in all bits."""
    rows = reference[name]
    if f"{name}:row_sums" in reference:
        # Only the first rows are stored. The sums, in any order, cover the others.
        wide = weight.astype(np.float64)
        sums, absolute = reference[f"{name}:row_sums"], reference[f"{name}:row_abs_sums"]
        if not np.allclose(wide.sum(1), sums, rtol=0, atol=1e-6):
            return False
        if not np.allclose(np.abs(wide).sum(1), absolute, rtol=1e-9, atol=0):
            return False
        weight = weight[: len(rows)]
    return np.array_equal(weight, rows)


def check(folder):
    """Return, for each weight in the reference of a folder, whether the reader finds it."""
    with np.load(f"{folder}/reference.npz") as file:
        reference = dict(file)
    names = [name for name in reference if name.endswith("weight")]
    if not names:
        return {}
    if os.path.exists(f"{folder}/model.gguf"):
        weights = expand_gguf(f"{folder}/model.gguf", names)
    else:
        weights = expand_folder(folder, names)
    return {name: is_equal(weights[name], reference, name) for name in names}


def main(root, *formats):
    is_wrong = False
    for name in sorted(formats or os.listdir(root)):
        if os.path.exists(f"{root}/{name}/reference.npz"):
            found = check(f"{root}/{name}")
            wrong = [weight for weight, is_right in found.items() if not is_right]
            is_wrong |= bool(wrong)
            print(f"{name:22} {len(found)} weights", *(["WRONG:", *wrong] if wrong else ["equal"]))
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
