"""Small files of quantised matrices, packed from integers by the specification of each format.

Each function returns a `Matrix`: the entry for ``config.json``, the tensors of the file, and the
matrix that they stand for, computed in NumPy from the same integers and scales. Nothing here uses
the readers of the package.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

MODULE = "model.layers.0.mlp.down_proj"
# Names of dtypes in safetensors files. The library does not write all of them.
DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "uint32": "U32", "int8": "I8",
    "uint8": "U8",
}  # fmt: skip
# E2M1 numbers of the OCP Microscaling Formats 1.0, section 5.3.3. The upper half is negative.
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])
# Tables that bitsandbytes 0.50.2 writes.
NF4 = np.float32([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = np.float32([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
FP4 = np.concatenate([FP4, -FP4])
# Nibble k of a word of AWQ is the column with this number among the word's eight columns.
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]

Rng = np.random.Generator


class Matrix(NamedTuple):
    """A quantised matrix: config, tensors by the ends of their names, and float32 values."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    want: np.ndarray


def write_tensors(
    folder: Path, tensors: Mapping[str, np.ndarray], module: str = f"{MODULE}."
) -> None:
    """Write a safetensors file. The names of the tensors are given without `module`."""
    header, content = {}, b""
    for name, array in tensors.items():
        end = len(content) + array.nbytes
        header[module + name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [len(content), end],
        }
        content += array.tobytes()
    text = json.dumps(header).encode()
    size = len(text).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + text + content)


def to_words(values: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack unsigned values into words of 32 bits along an axis, the first in the lowest bits."""
    values = np.moveaxis(values, axis, -1).astype(np.uint64)
    per_word = 32 // bits
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per_word)])
    values = values.reshape(*values.shape[:-1], -1, per_word)
    words = (values << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))).sum(-1)
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def to_pairs(values: np.ndarray) -> np.ndarray:
    """Pack values of 4 bits into bytes along the last axis, the first in the low bits."""
    return (values[..., ::2] | values[..., 1::2] << 4).astype(np.uint8)


def spread(scales: np.ndarray, shape: Sequence[int], block: Sequence[int]) -> np.ndarray:
    """Repeat the scales ``[rows, columns]`` of blocks. Blocks at the edges may be smaller."""
    scales = np.repeat(np.repeat(scales.astype(np.float32), block[0], 0), block[1], 1)
    return scales[: shape[0], : shape[1]]


def num_blocks(shape: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows and columns of blocks."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _scales(rng: Rng, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    return rng.uniform(0.01, 0.1, tuple(shape)).astype(dtype)


def _powers(exponents: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def fp8(rng: Rng, shape=(21, 64), block=None, scale_shape=None, exponents=False) -> Matrix:
    """Floats of 8 bits with a scale for the matrix (default), or for each row, or each block."""
    w = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": block}
    stored = scales = _scales(rng, scale_shape or (num_blocks(shape, block) if block else ()))
    if exponents:
        stored = rng.integers(100, 140, scales.shape, np.uint8)
        scales, stored = _powers(stored), stored.view(ml_dtypes.float8_e8m0fnu)
        config["scale_fmt"] = "ue8m0"
    full = spread(scales, shape, block) if block else scales.reshape(-1, 1)
    return Matrix(config, {"weight": w, "weight_scale_inv": stored}, w.astype(np.float32) * full)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors with one group of modules."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def int8(rng: Rng, strategy="channel", shape=(21, 64), block=(1, 64), zeros=False) -> Matrix:
    """Int8 of compressed-tensors. Scales of bfloat16 make the result exact in float32."""
    values = rng.integers(-128, 128, shape, np.int8)
    sizes = (1, 1) if strategy == "tensor" else num_blocks(shape, block)
    scales = _scales(rng, sizes, ml_dtypes.bfloat16)
    tensors = {"weight": values, "weight_scale": scales}
    zero = np.zeros(sizes, np.int8)
    if zeros:
        tensors["weight_zero_point"] = zero = rng.integers(-128, 128, sizes, np.int8)
    blocks = shape if strategy == "tensor" else block
    want = values.astype(np.float32) - spread(zero, shape, blocks)
    config = compressed(
        "int-quantized", strategy=strategy, symmetric=not zeros,
        group_size=block[1] if strategy == "group" else None,
        block_structure=[*block] if strategy == "block" else None,
    )  # fmt: skip
    return Matrix(config, tensors, want * spread(scales, shape, blocks))


def packed(
    rng: Rng, bits=4, strategy="group", shape=(21, 64), group=32, zeros=None, shuffled=False
) -> Matrix:
    """Words of compressed-tensors: `zeros` is None, ``"packed"`` or ``"int8"``."""
    sizes = {"tensor": (1, 1), "channel": (shape[0], 1)}.get(
        strategy, (shape[0], shape[1] // group)
    )
    centre = 1 << (bits - 1)
    values, zero = rng.integers(0, 1 << bits, shape), np.full(sizes, centre)
    scales = _scales(rng, sizes, np.float16)
    tensors = {
        "weight_packed": to_words(values, bits, 1), "weight_scale": scales,
        "weight_shape": np.int64(shape),
    }  # fmt: skip
    if zeros:
        zero = rng.integers(0, 1 << bits, sizes)
        stored = to_words(zero, bits, 0) if zeros == "packed" else (zero - centre).astype(np.int8)
        tensors["weight_zero_point"] = stored
    index = np.arange(shape[1]) // (shape[1] // sizes[1])
    if shuffled:
        index = rng.permutation(index)
        tensors["weight_g_idx"] = index.astype(np.int32)
    want = (values - zero[:, index]) * scales.astype(np.float32)[:, index]
    config = compressed(
        "pack-quantized", num_bits=bits, strategy=strategy, symmetric=not zeros,
        group_size=group if strategy == "group" else None,
    )  # fmt: skip
    return Matrix(config, tensors, want.astype(np.float32))


def nvfp4(rng: Rng, shape=(21, 64), modelopt=False) -> Matrix:
    """NVFP4: the second scale divides in compressed-tensors, and multiplies in ModelOpt."""
    values = rng.integers(0, 16, shape)
    scales = rng.uniform(1, 9, (shape[0], shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(0.013 if modelopt else 13)
    full = scales.astype(np.float32)
    full = full * factor if modelopt else full / factor
    want = E2M1[values] * np.repeat(full, 16, 1)
    if modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        names = "weight", "weight_scale", "weight_scale_2"
    else:
        config = compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        )
        names, factor = ("weight_packed", "weight_scale", "weight_global_scale"), factor.reshape(1)
    arrays = to_pairs(values), scales, factor
    return Matrix(config, dict(zip(names, arrays, strict=True)), want)


def mxfp4(rng: Rng, shape=(21, 64), dtype: Any = np.uint8) -> Matrix:
    """MXFP4 of compressed-tensors. The scales are exponents, U8 or F8_E8M0."""
    values = rng.integers(0, 16, shape)
    exponents = rng.integers(110, 140, (shape[0], shape[1] // 32), np.uint8)
    config = compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    )
    tensors = {"weight_packed": to_pairs(values), "weight_scale": exponents.view(dtype)}
    return Matrix(config, tensors, E2M1[values] * np.repeat(_powers(exponents), 32, 1))


def mxfp4_experts(rng: Rng, shape=(7, 6, 64)) -> Matrix:
    """Matrices of experts of gpt-oss. The result is ``[experts, in, out]``."""
    values = rng.integers(0, 16, shape)
    exponents = rng.integers(110, 140, (*shape[:2], shape[2] // 32), np.uint8)
    tensors = {"_blocks": to_pairs(values).reshape(*exponents.shape, 16), "_scales": exponents}
    want = E2M1[values] * np.repeat(_powers(exponents), 32, 2)
    return Matrix({"quant_method": "mxfp4"}, tensors, want.swapaxes(1, 2))


def mlx(rng: Rng, bits=4, shape=(21, 128), group=64) -> Matrix:
    """Words of MLX with scales and biases."""
    values, sizes = rng.integers(0, 1 << bits, shape), (shape[0], shape[1] // group)
    scales = _scales(rng, sizes, ml_dtypes.bfloat16)
    biases = rng.normal(size=sizes).astype(ml_dtypes.bfloat16)
    tensors = {
        "weight": to_words(values, bits, 1).view(np.uint32), "scales": scales, "biases": biases,
    }  # fmt: skip
    full, added = (spread(each, shape, (1, group)) for each in (scales, biases))
    want = (values.astype(np.float32) * full + added).astype(np.float32)
    return Matrix({"group_size": group, "bits": bits}, tensors, want)


def mlx_mxfp4(rng: Rng, shape=(21, 64)) -> Matrix:
    """Words of MLX with exponents as scales."""
    values = rng.integers(0, 16, shape)
    exponents = rng.integers(110, 140, (shape[0], shape[1] // 32), np.uint8)
    tensors = {"weight": to_words(values, 4, 1).view(np.uint32), "scales": exponents}
    config = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return Matrix(config, tensors, E2M1[values] * np.repeat(_powers(exponents), 32, 1))


def awq(rng: Rng, shape=(24, 64), group=32) -> Matrix:
    """AWQ: a word holds 8 outputs, in an order of its own."""
    groups = shape[1] // group
    values, zeros = (rng.integers(0, 16, (n, shape[0])) for n in (shape[1], groups))
    scales = _scales(rng, (groups, shape[0]), np.float16)

    def pack(each: np.ndarray) -> np.ndarray:
        ordered = each.reshape(len(each), -1, 8)[..., AWQ_COLUMNS].reshape(each.shape)
        return to_words(ordered, 4, 1)

    index = np.arange(shape[1]) // group
    want = (values - zeros[index]) * scales.astype(np.float32)[index]
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    tensors = {"qweight": pack(values), "qzeros": pack(zeros), "scales": scales}
    return Matrix(config, tensors, want.astype(np.float32).T)


def gptq(
    rng: Rng, bits=4, version=2, shape=(24, 64), group=32, stored=None, sym=False, shuffled=False
) -> Matrix:
    """GPTQ: zero points are `stored` everywhere, or random. Version 1 adds 1 to them."""
    groups = -(-shape[1] // group)
    values = rng.integers(0, 1 << bits, (shape[1], shape[0]))
    zeros = rng.integers(0, 1 << bits, (groups, shape[0]))
    if stored is not None:
        zeros = np.full_like(zeros, stored)
    scales = _scales(rng, (groups, shape[0]), np.float16)
    tensors = {
        "qweight": to_words(values, bits, 0), "qzeros": to_words(zeros, bits, 1), "scales": scales,
    }  # fmt: skip
    index = np.arange(shape[1]) // group
    if shuffled:
        index = rng.permutation(index)
        tensors["g_idx"] = index.astype(np.int32)
    zeros = (zeros + (version == 1)) % (1 << bits)
    want = (values - zeros[index]) * scales.astype(np.float32)[index]
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": shuffled,
        "sym": sym, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return Matrix(config, tensors, want.astype(np.float32).T)


def bitsandbytes(
    rng: Rng, kind="nf4", shape=(22, 64), block=64, nested=None, flat=False, table=None
) -> Matrix:
    """Values of 4 bits with a scale for each block of the flat matrix.

    With `nested`, a scale is an index into a table of 256 numbers. The number is multiplied by the
    scale of a block of `nested` scales, and an offset is added.
    """
    size = shape[0] * shape[1]
    values, count = rng.integers(0, 16, size, np.uint8), -(-size // block)
    if table is None:
        table = NF4 if kind == "nf4" else FP4
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [*shape]}
    scales = _scales(rng, (count,))
    tensors = {"weight.absmax": scales}
    if nested is not None:
        index = rng.integers(0, 256, count, np.uint8)
        numbers, factors = _scales(rng, (256,)), _scales(rng, (-(-count // nested),))
        state |= {"nested_blocksize": nested, "nested_offset": 0.625, "nested_dtype": "float32"}
        scales = numbers[index] * np.repeat(factors, nested)[:count] + np.float32(0.625)
        tensors = {
            "weight.absmax": index, "weight.nested_absmax": factors,
            "weight.nested_quant_map": numbers,
        }  # fmt: skip
    pairs = values[::2] << 4 | values[1::2]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors |= {
        "weight": pairs[None] if flat else pairs[:, None],
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": text,
    }
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    want = (table[values] * np.repeat(scales, block)[:size]).reshape(shape)
    return Matrix(config, tensors, want)


def bitsandbytes_int8(rng: Rng, shape=(21, 64)) -> Matrix:
    """Int8 with the largest absolute value of each row, which stands for 127."""
    values, largest = rng.integers(-127, 128, shape, np.int8), _scales(rng, shape[:1])
    tensors = {"weight": values, "SCB": largest, "weight_format": np.uint8([0])}
    want = values.astype(np.float32) * largest[:, None] * np.float32(1 / 127)
    return Matrix({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, want)


# A function for each variant of each format, by `ModuleFormat.name` and a description.
FORMATS: Mapping[tuple[str, str], Callable[[Rng], Matrix]] = {
    ("fp8", "a scale"): fp8,
    ("fp8", "a scale per row"): lambda rng: fp8(rng, scale_shape=(21, 1)),
    ("fp8", "a flat scale per row"): lambda rng: fp8(rng, scale_shape=(21,)),
    ("fp8", "blocks of 5 rows"): lambda rng: fp8(rng, block=[5, 48]),
    ("fp8", "exponents"): lambda rng: fp8(rng, block=[4, 32], exponents=True),
    ("int8", "a scale"): lambda rng: int8(rng, "tensor"),
    ("int8", "a scale per row"): int8,
    ("int8", "zero points"): lambda rng: int8(rng, zeros=True),
    ("int8", "groups"): lambda rng: int8(rng, "group", block=(1, 32), zeros=True),
    ("int8", "blocks of 5 rows"): lambda rng: int8(rng, "block", block=(5, 32), zeros=True),
    ("packed", "groups"): packed,
    ("packed", "a scale"): lambda rng: packed(rng, strategy="tensor"),
    ("packed", "a scale per row"): lambda rng: packed(rng, strategy="channel"),
    ("packed", "zero points"): lambda rng: packed(rng, zeros="packed"),
    ("packed", "zero points of int8"): lambda rng: packed(rng, zeros="int8"),
    ("packed", "8 bits"): lambda rng: packed(rng, 8, zeros="packed"),
    ("packed", "a group per input"): lambda rng: packed(rng, zeros="packed", shuffled=True),
    ("packed", "36 inputs"): lambda rng: packed(rng, shape=(21, 36), group=36, zeros="packed"),
    ("nvfp4", "groups"): nvfp4,
    ("modelopt-nvfp4", "groups"): lambda rng: nvfp4(rng, modelopt=True),
    ("mxfp4", "U8"): mxfp4,
    ("mxfp4", "F8_E8M0"): lambda rng: mxfp4(rng, dtype=ml_dtypes.float8_e8m0fnu),
    ("mxfp4", "16 more inputs"): lambda rng: mxfp4(rng, (21, 96)),
    ("mxfp4-experts", "experts"): mxfp4_experts,
    ("mlx", "4 bits"): mlx,
    ("mlx", "8 bits"): lambda rng: mlx(rng, 8),
    ("mlx-mxfp4", "groups"): mlx_mxfp4,
    ("awq", "groups"): awq,
    ("gptq", "4 bits"): gptq,
    ("gptq", "8 bits"): lambda rng: gptq(rng, 8),
    ("gptq", "version 1"): lambda rng: gptq(rng, version=1),
    ("gptq", "version 1, 8 bits"): lambda rng: gptq(rng, 8, version=1),
    ("gptq", "version 1, zero points of 8"): lambda rng: gptq(rng, version=1, stored=7),
    ("gptq", "version 1, zero points of 9"): lambda rng: gptq(rng, version=1, stored=8),
    ("gptq", "version 1, zero points of 129"): lambda rng: gptq(rng, 8, version=1, stored=128),
    ("gptq", "version 1, zero points of 0"): lambda rng: gptq(rng, version=1, stored=15),
    ("gptq", "version 1, symmetric"): lambda rng: gptq(rng, version=1, stored=7, sym=True),
    ("gptq", "version 2, symmetric"): lambda rng: gptq(rng, stored=8, sym=True),
    ("gptq", "a group per input"): lambda rng: gptq(rng, version=1, shuffled=True),
    ("gptq", "a short group"): lambda rng: gptq(rng, group=48, shuffled=True),
    ("bitsandbytes-4", "nf4"): bitsandbytes,
    ("bitsandbytes-4", "fp4"): lambda rng: bitsandbytes(rng, "fp4"),
    ("bitsandbytes-4", "a flat tensor"): lambda rng: bitsandbytes(rng, flat=True),
    ("bitsandbytes-4", "blocks of two rows"): lambda rng: bitsandbytes(rng, shape=(22, 96)),
    ("bitsandbytes-4", "odd rows"): lambda rng: bitsandbytes(rng, shape=(22, 33)),
    ("bitsandbytes-4", "rows of 30"): lambda rng: bitsandbytes(rng, shape=(21, 30)),
    ("bitsandbytes-4", "nested scales"): lambda rng: bitsandbytes(rng, nested=4),
    ("bitsandbytes-4", "nested scales of odd rows"): lambda rng: bitsandbytes(
        rng, shape=(22, 33), nested=3
    ),
    ("bitsandbytes-4", "nested scales of two rows"): lambda rng: bitsandbytes(
        rng, shape=(22, 96), nested=5
    ),
    ("bitsandbytes-4", "another table"): lambda rng: bitsandbytes(
        rng, table=rng.normal(size=16).astype(np.float32)
    ),
    ("bitsandbytes-8", "a scale per row"): bitsandbytes_int8,
}
