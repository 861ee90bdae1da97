"""Readers of quantised matrices: equal to the tools' own dequantisation, and safe on damaged files.

The folders of `tests/data/quantised` were written by these tools. Formats without a folder are
packed here, by code that is independent of the readers.
"""

import json
import math
import tracemalloc
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from paged_jax.kernels.weight_formats import CODES, dequantise
from paged_jax.models.codecs.quantisation import combine_quantised, find_quantisation
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import WeightsError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading import stored_matrices
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.loading.pretrained import from_pretrained, read_config
from paged_jax.models.loading.safetensors_files import (
    find_tensors,
    list_tensors,
    name_tensors,
)
from tests.support import DATA
from tests.support.quantised_files import FP4, MODULE, to_words
from tests.support.quantised_files import write_tensors as write
from tests.support.random_model import random_llama

F32 = np.dtype(np.float32)
FOLDERS = (
    "awq-gemm", "bnb-int8", "bnb-nf4", "bnb-nf4-double", "ct-fp8-block", "ct-fp8-channel",
    "ct-fp8-tensor", "ct-mxfp4a16", "ct-nvfp4a16", "ct-w4a16-actorder", "ct-w4a16-channel",
    "ct-w4a16-group-asym", "ct-w4a16-group-sym", "ct-w8a16-pack", "ct-w8a8-int8", "fp8-block",
    "fp8-tensor", "gptq-v1-actorder", "gptq-v1-asym", "gptq-v2", "mlx-mxfp4", "mlx-q4", "mlx-q8",
)  # fmt: skip
# Formats with matrices that the tool rounds more than once. The arrays of this library then differ
# in the last bit.
ROUNDED = ("bnb-int8", "mlx-q8")


def check_matrix(stored, want: np.ndarray, *, atol: float = 0) -> None:
    """Check both ways to read a matrix, whole and in parts."""
    assert stored.shape == want.shape
    np.testing.assert_array_equal(stored.read((), F32), want)
    np.testing.assert_array_equal(stored.read((slice(3, 20), slice(5, 37)), F32), want[3:20, 5:37])
    arrays, format = stored.read_arrays(slice(None)), stored.format
    expected = format.shapes(want.shape)
    found = {name: x for name, x in arrays._asdict().items() if x is not None}
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == expected
    kept = dequantise(arrays, format.code)
    np.testing.assert_allclose(kept, want, rtol=0, atol=atol)
    for start in range(0, len(want), 5):  # words of 8 rows begin and end within a part
        rows = slice(start, min(start + 5, len(want)))
        np.testing.assert_array_equal(stored.read((rows,), F32), want[rows])
        part = dequantise(stored.read_arrays(rows), format.code)
        np.testing.assert_array_equal(part, kept[rows])


@pytest.mark.parametrize("name", FOLDERS)
def test_matrices_equal_those_of_the_tool_bit_for_bit(name) -> None:
    folder = DATA / "quantised" / name
    stored = find_tensors(folder, read_config(folder))
    reference = np.load(folder / "reference.npz")
    names = [each for each in reference.files if each.endswith("weight")]
    assert len(names) >= 2
    for each in names:
        want = reference[each]
        assert stored[each].format.is_quantised
        atol = float(np.abs(want).max()) * 1e-7 if name in ROUNDED else 0
        check_matrix(stored[each], want, atol=atol)


@pytest.mark.parametrize("dequantise", [False, True], ids=["keep", "expand"])
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_equal_those_of_transformers(name, dequantise) -> None:
    folder = DATA / "quantised" / name
    model = from_pretrained(Decoder, folder, dtype="float32", dequantise=dequantise)
    is_kept = any(each.dtype.itemsize == 1 for each in named_arrays(model).values())
    assert is_kept == (not dequantise)
    reference = np.load(folder / "reference.npz")
    logits = model(jnp.asarray(reference["input_ids"])[None])[0]
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4)


def test_modules_in_the_ignore_list_stay_unquantised() -> None:
    folder = DATA / "quantised" / "ct-w4a16-group-sym"
    stored = find_tensors(folder, read_config(folder))
    for layer, is_quantised in ((0, True), (1, False)):
        weight = stored[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert weight.format.is_quantised == is_quantised
    assert stored["model.layers.1.mlp.up_proj.weight"].format.is_quantised


# Formats without a folder, and damaged files: one module in a file.

NAME = MODULE + ".weight"
OUT, IN = 24, 64


def random(seed: int = 0) -> np.random.Generator:
    """Return a random generator."""
    return np.random.default_rng(seed)


def read(folder: Path, config: dict):
    """Return the tensors in a folder by name, with quantised matrices combined."""
    quantisation = find_quantisation({"quantization_config": config})
    assert quantisation is not None
    return {each.name: each for each in combine_quantised(list_tensors(folder), quantisation)}


def fp8_values() -> np.ndarray:
    """Return random fp8 numbers."""
    return random().normal(size=(OUT, IN)).astype(jnp.float8_e4m3fn)


def expand(scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Repeat the scales of blocks, for a matrix of OUT rows."""
    scales = np.repeat(np.repeat(scales.astype(np.float32), rows, 0), columns, 1)
    return scales[:OUT, :IN]


def fp8_with_cut_off_blocks():
    """Blocks of 128 x 48: one row of blocks, and a block of 16 inputs at the right edge."""
    w, scales = fp8_values(), np.float32([[0.5, 3.0]])
    config = {"quant_method": "fp8", "weight_block_size": [128, 48]}
    tensors = {"weight": w, "weight_scale_inv": scales}
    return config, tensors, w.astype(np.float32) * expand(scales, 128, 48)


def fp8_with_exponents():
    """Scales in E8M0, in blocks of 16 x 32."""
    w, exponents = fp8_values(), np.uint8([[120, 127], [130, 1]])
    config = {"quant_method": "fp8", "weight_block_size": [16, 32], "scale_fmt": "ue8m0"}
    tensors = {"weight": w, "weight_scale_inv": exponents.view(jnp.float8_e8m0fnu)}
    scales = 2.0 ** (exponents.astype(np.float64) - 127)
    return config, tensors, w.astype(np.float32) * expand(scales, 16, 32)


def fp8_of_autofp8():
    """One scale for the matrix, and one for the activations."""
    w, scale = fp8_values(), np.float32(0.37)
    tensors = {"weight": w, "weight_scale": scale, "input_scale": np.float32(0.1)}
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    return config, tensors, w.astype(np.float32) * scale


def fp8_of_fbgemm():
    """A scale for each row."""
    w, scales = fp8_values(), random(1).uniform(0.1, 1, (OUT, 1)).astype(np.float32)
    tensors = {"weight": w, "weight_scale": scales, "input_scale_ub": np.float32([1200])}
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    return config, tensors, w.astype(np.float32) * scales


def nvfp4_of_modelopt():
    """The second scale multiplies."""
    values = random().integers(0, 16, (OUT, IN), np.uint8)
    scales = random(1).uniform(1, 9, (OUT, IN // 16)).astype(jnp.float8_e4m3fn)
    factor = np.float32(0.013)
    tensors = {
        "weight": values[:, ::2] | values[:, 1::2] << 4, "weight_scale": scales,
        "weight_scale_2": factor, "input_scale": np.float32(0.2),
    }  # fmt: skip
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    scales = scales.astype(np.float32) * factor
    return config, tensors, CODES["e2m1"][values] * np.repeat(scales, 16, 1)


def gptq(bits=4, *, group=32, index=None, version=2, stored_zero=None, sym=False, order=True):
    """GPTQ matrices; `stored_zero` is stored for all zero points."""
    rng, groups = random(), -(-IN // group)
    values = rng.integers(0, 1 << bits, (IN, OUT))
    zeros = rng.integers(1, 1 << bits, (groups, OUT))
    scales = rng.uniform(0.01, 0.1, (groups, OUT)).astype(np.float16)
    if index is None:
        index = np.arange(IN) // group
    stored = zeros - (version == 1)
    if stored_zero is not None:
        stored = np.full_like(zeros, stored_zero)
        zeros = np.full_like(zeros, {15: 0}.get(stored_zero, stored_zero))
    tensors = {
        "qweight": to_words(values, bits, 0), "qzeros": to_words(stored, bits, 1),
        "scales": scales, "g_idx": np.asarray(index, np.int32),
    }  # fmt: skip
    if not order:
        del tensors["g_idx"]
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": sym,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    want = (values - zeros[index]) * scales.astype(np.float32)[index]
    return config, tensors, want.T.astype(np.float32)


def packed(*, bits=4, group=32, num_inputs=IN, index=None, zeros="packed", scale=np.float32):
    """Matrices of compressed-tensors with zero points."""
    rng, groups = random(), num_inputs // group
    values = rng.integers(0, 1 << bits, (OUT, num_inputs))
    zero = rng.integers(0, 1 << bits, (OUT, groups))
    scales = rng.uniform(0.01, 0.1, (OUT, groups)).astype(scale)
    centre = 1 << (bits - 1)
    tensors = {
        "weight_packed": to_words(values, bits, 1), "weight_scale": scales,
        "weight_shape": np.int64([OUT, num_inputs]),
    }  # fmt: skip
    if zeros:
        is_packed = zeros == "packed"
        stored = to_words(zero, bits, 0) if is_packed else (zero - centre).astype(np.int8)
        tensors["weight_zero_point"] = stored
    else:
        zero = np.full_like(zero, centre)
    if index is None:
        index = np.arange(num_inputs) // group
    else:
        tensors["weight_g_idx"] = index.astype(np.int32)
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group,
               "symmetric": not zeros}  # fmt: skip
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    want = (values - zero[:, index]).astype(np.float32) * scales.astype(np.float32)[:, index]
    return config, tensors, want


def bitsandbytes(shape=(OUT, IN), kind="nf4", table=None, block=64):
    """4-bit matrices of bitsandbytes, with blocks over the flat matrix."""
    rng, size = random(), shape[0] * shape[1]
    values = rng.integers(0, 16, size, np.uint8)
    scales = rng.uniform(0.5, 2, -(-size // block)).astype(np.float32)
    if table is None:
        table = CODES["nf4"] if kind == "nf4" else FP4
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [*shape]}
    tensors = {
        "weight": (values[::2] << 4 | values[1::2])[:, None],
        "weight.absmax": scales,
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    want = (table[values] * np.repeat(scales, block)[:size]).reshape(shape)
    return config, tensors, want


SHUFFLED = random(5).permutation(IN) // 32
# Groups of 48 and 16 inputs: the second is shorter, as for a group size that does not divide.
SHORT = random(6).permutation(IN) // 48
FORMATS = {
    "fp8, blocks that do not divide": fp8_with_cut_off_blocks,
    "fp8, ue8m0": fp8_with_exponents,
    "AutoFP8": fp8_of_autofp8,
    "fbgemm": fp8_of_fbgemm,
    "ModelOpt NVFP4": nvfp4_of_modelopt,
    "GPTQ of 8 bits": lambda: gptq(8),
    "GPTQ of 8 bits, version 1": lambda: gptq(8, version=1),
    "GPTQ without g_idx": lambda: gptq(order=False),
    "GPTQ with act order": lambda: gptq(index=SHUFFLED),
    "GPTQ with a short group": lambda: gptq(group=48, index=SHORT),
    "GPTQ with one group": lambda: gptq(group=IN),
    "GPTQ version 1, zero point 0": lambda: gptq(version=1, stored_zero=15),
    "compressed-tensors with g_idx": lambda: packed(index=SHUFFLED),
    "compressed-tensors, zero points of int8": lambda: packed(zeros="int8"),
    "compressed-tensors of 8 bits": lambda: packed(bits=8),
    "compressed-tensors, symmetric": lambda: packed(zeros=None, scale=jnp.bfloat16),
    "bitsandbytes fp4": lambda: bitsandbytes(kind="fp4"),
    "bitsandbytes, rows of 96": lambda: bitsandbytes((OUT, 96)),
    "bitsandbytes, large blocks": lambda: bitsandbytes(block=256),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_without_a_folder_are_exact(tmp_path, name) -> None:
    config, tensors, want = FORMATS[name]()
    write(tmp_path, tensors)
    stored = read(tmp_path, config)
    assert stored.keys() == {NAME} and stored[NAME].format.is_quantised
    # The scales of float32 and a zero point need one more rounding where they are kept.
    atol = 2e-7 * np.abs(want).max() if name.startswith("compressed-tensors") else 0
    check_matrix(stored[NAME], want, atol=atol)


@pytest.mark.parametrize(
    ("write_format", "code"),
    [
        (lambda: packed(num_inputs=40, group=40, scale=np.float16), "int8"),  # no packing
        (lambda: packed(num_inputs=72, group=8, scale=np.float16), "float32"),  # small groups
        (lambda: packed(num_inputs=48, group=48, zeros=None, scale=np.float16), "int8"),
        (lambda: bitsandbytes((OUT, 48)), "float32"),
        (lambda: bitsandbytes(table=np.linspace(-1, 1, 16, dtype=np.float32)), "float32"),
        (lambda: gptq(index=random(7).integers(0, 2, IN)), "float32"),  # groups of any size
    ],
)
def test_matrices_that_cannot_be_packed_are_widened_or_expanded(
    tmp_path, write_format, code
) -> None:
    config, tensors, want = write_format()
    write(tmp_path, tensors)
    stored = read(tmp_path, config)[NAME]
    assert stored.format.code == code
    check_matrix(stored, want)


def test_gptq_of_version_1_with_zero_points_of_version_2_warns(tmp_path) -> None:
    config, tensors, want = gptq(version=1, stored_zero=8, sym=True)
    write(tmp_path, tensors)
    with pytest.warns(UserWarning, match="all zero points are 8 as in gptq_v2"):
        check_matrix(read(tmp_path, config)[NAME], want)
    # Checkpoints that real tools write in version 1 store 7.
    config, tensors, _ = gptq(version=1, stored_zero=7, sym=True)
    write(tmp_path, tensors)
    stored = read(tmp_path, config)[NAME]
    assert stored.format.min_dtype is None
    np.testing.assert_array_equal(stored.read((), F32), want)


def test_scales_of_a_kv_cache_are_reported(tmp_path) -> None:
    config, tensors, _ = fp8_of_autofp8()
    write(tmp_path, {**tensors, "k_scale": np.float32(0.1), "output_scale": np.float32(0.1)})
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)
    # The config of many files does not mention the scales.
    for scheme in ({"kv_cache_scheme": {"num_bits": 8}}, {}):
        quantisation = find_quantisation({"quantization_config": {**config, **scheme}})
        with pytest.warns(UserWarning, match=r"scales for a quantised KV .*k_scale, are not used"):
            stored = name_tensors(list_tensors(tmp_path), llama, quantisation)
        assert stored.keys() == {NAME}


def with_(name, change):
    """Return a function that changes a tensor."""
    return lambda tensors: {**tensors, name: change(tensors[name])}


def without(name):
    """Return a function that removes a tensor."""
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def fill(value):
    """Return a function that replaces the first element of an array."""

    def change(array):
        array = array.copy()
        array.flat[0] = value
        return array

    return change


def state(**entries):
    """Return a function that changes the JSON object of bitsandbytes."""

    def change(array):
        content = {**json.loads(array.tobytes()), **entries}
        return np.frombuffer(json.dumps(content).encode(), np.uint8)

    return with_("weight.quant_state.bitsandbytes__nf4", change)


NAN = np.float32("nan")
HOSTILE = {
    "fp8: no scale": (fp8_of_autofp8, without("weight_scale"), "must have exactly one of .* got 0"),
    "fp8: two scales": (
        fp8_of_autofp8,
        lambda tensors: {**tensors, "weight_scale_inv": np.float32(1)},
        "must have exactly one of .* got 2",
    ),
    "fp8: a scale too few": (
        fp8_with_cut_off_blocks,
        with_("weight_scale_inv", lambda x: x[:, :1]),
        r"weight_scale_inv must be F32 .* \[1, 2\], got F32 \[1, 1\]",
    ),
    "fp8: integers": (
        fp8_of_fbgemm,
        with_("weight", lambda x: x.view(np.int8)),
        r"weight must be F8_E4M3 \[24, 64\], got I8",
    ),
    "fp8: exponents for floats": (
        fp8_with_cut_off_blocks,
        with_("weight_scale_inv", lambda x: x.astype(np.uint8)),
        "weight_scale_inv must be F32",
    ),
    "fp8: infinite scale": (fp8_of_fbgemm, with_("weight_scale", fill(np.inf)), "must be finite"),
    "fp8: NaN": (fp8_of_fbgemm, with_("weight", fill(NAN)), "must be finite"),
    "fp8: NaN exponent": (
        fp8_with_exponents,
        with_("weight_scale_inv", lambda x: fill(255)(x.view(np.uint8)).view(x.dtype)),
        "must be finite",
    ),
    "fp8: three dimensions": (
        fp8_of_fbgemm, with_("weight", lambda x: x[None]), "must have two dimensions"
    ),
    "gptq: no scales": (gptq, without("scales"), "scales is missing"),
    "gptq: group out of range": (
        gptq, with_("g_idx", fill(2)), r"g_idx must be in 0\.\.1, got 0 to 2"
    ),
    "gptq: negative group": (gptq, with_("g_idx", fill(-1)), "in 0..1, got -1 to 1"),
    "gptq: short g_idx": (gptq, with_("g_idx", lambda x: x[1:]), r"g_idx must be I32 \[64\]"),
    "gptq: zeros": (gptq, with_("qzeros", lambda x: x[:1]), r"qzeros must be I32 \[2, 3\]"),
    "gptq: NaN": (gptq, with_("scales", fill(np.nan)), "scales of .* must be finite"),
    "gptq: floats": (
        gptq, with_("qweight", lambda x: x.view(np.float32)), r"qweight must be I32 \[8, 24\]"
    ),
    "gptq: a plain weight too": (
        gptq,
        lambda tensors: {**tensors, "weight": np.zeros((OUT, IN), np.float32)},
        r"weight must not exist, because .* has the format gptq",
    ),
    "gptq: no values": (gptq, with_("qweight", lambda x: x[:0]), "must have two dimensions"),
    "packed: absurd shape": (
        packed,
        with_("weight_shape", lambda x: np.int64([1 << 40, 1 << 40])),
        r"4-bit values that fill words of shape \[24, 8\], got \[1099511627776",
    ),
    "packed: negative shape": (
        packed, with_("weight_shape", lambda x: -x), "weight_shape must be the shape of a matrix"
    ),
    "packed: shape of floats": (
        packed, with_("weight_shape", lambda x: x.astype(np.float32)), "must be I64"
    ),
    "packed: no zero points": (
        packed, without("weight_zero_point"), "must have a tensor weight_zero_point"
    ),
    "packed: a scale too few": (
        packed, with_("weight_scale", lambda x: x[1:]), r"weight_scale must be .* \[24, 2\]"
    ),
    "packed: NaN": (packed, with_("weight_scale", fill(NAN)), "must be finite"),
    "packed: group out of range": (
        lambda: packed(index=SHUFFLED), with_("weight_g_idx", fill(7)), "in 0..1, got 0 to 7"
    ),
    "nvfp4: half of the scales": (
        nvfp4_of_modelopt,
        with_("weight_scale", lambda x: x[:, ::2]),
        r"weight_scale must be F8_E4M3 \[24, 4\], got F8_E4M3 \[24, 2\]",
    ),
    "nvfp4: huge factor": (
        nvfp4_of_modelopt, with_("weight_scale_2", lambda x: np.float32(3e38)), "must be finite"
    ),
    "bitsandbytes: no state": (
        bitsandbytes,
        without("weight.quant_state.bitsandbytes__nf4"),
        "exactly one quant_state tensor",
    ),
    "bitsandbytes: not JSON": (
        bitsandbytes,
        with_("weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1]),
        "must contain a JSON object",
    ),
    "bitsandbytes: absurd shape": (
        bitsandbytes, state(shape=[1 << 30, 1 << 30]), r"weight must be U8 \[\d+, 1\]"
    ),
    "bitsandbytes: shape of text": (bitsandbytes, state(shape=["a", 2]), "must have a shape"),
    "bitsandbytes: blocks of 0": (bitsandbytes, state(blocksize=0), "blocksize 0"),
    "bitsandbytes: nested": (
        bitsandbytes, state(nested_blocksize=256), r"absmax must be U8 \[24\], got F32"
    ),
    "bitsandbytes: offset": (
        bitsandbytes, state(nested_offset=float("inf")), "finite nested_offset"
    ),
    "bitsandbytes: a scale too few": (
        bitsandbytes,
        with_("weight.absmax", lambda x: x[1:]),
        r"absmax must be F32 \[24\], got F32 \[23\]",
    ),
    "bitsandbytes: infinite scale": (
        bitsandbytes, with_("weight.absmax", fill(np.inf)), "must be finite"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("keep", [True, False], ids=["keep", "expand"])
def test_damaged_files_give_one_clear_line(tmp_path, name, keep) -> None:
    write_format, change, message = HOSTILE[name]
    config, tensors, _ = write_format()
    write(tmp_path, change(tensors))
    with pytest.raises(WeightsError, match=message) as raised, warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = read(tmp_path, config)[NAME]
        _ = stored.format
        stored.read_arrays(slice(None)) if keep else stored.read((), F32)
    text = str(raised.value)
    assert text.startswith("load_weights: ") and "\n" not in text and len(text) < 250
    assert MODULE in text


def test_a_group_size_that_does_not_divide_is_rejected(tmp_path) -> None:
    config, tensors, _ = packed()
    config["config_groups"]["group_0"]["weights"]["group_size"] = 48
    write(tmp_path, tensors)
    with pytest.raises(WeightsError, match="must divide its number of inputs, 64, got 48"):
        read(tmp_path, config)


def test_tensors_that_contradict_the_config_are_rejected(tmp_path) -> None:
    config, tensors, _ = fp8_of_autofp8()
    write(tmp_path, tensors)
    with pytest.raises(
        WeightsError, match=r"'down_proj' of LlamaConfig: quantization_config excludes"
    ):
        read(tmp_path, {**config, "ignored_layers": ["down_proj"]})
    other, _, _ = packed()
    other["config_groups"]["group_0"]["targets"] = ["re:.*up_proj"]
    with pytest.raises(WeightsError, match=f"no entry of .* applies to {MODULE}"):
        read(tmp_path, other)
    with pytest.raises(WeightsError, match="qweight is missing, but gptq requires it"):
        read(tmp_path, gptq()[0])
    write(tmp_path, {"weight": np.zeros((OUT, IN), np.float32)})
    with pytest.raises(WeightsError, match="describes quantised weights, but no tensor in"):
        read(tmp_path, config)


def test_a_file_that_became_shorter_is_not_read_beyond_its_end(tmp_path) -> None:
    for config, tensors, _ in (packed(), gptq(), bitsandbytes(), fp8_of_fbgemm()):
        write(tmp_path, tensors)
        stored = read(tmp_path, config)[NAME]
        path = tmp_path / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(WeightsError, match="model.safetensors: not a whole safetensors file"):
            read(tmp_path, config)
        path.write_bytes(content[: len(content) // 4])
        with pytest.raises(WeightsError, match="cannot read"):
            stored.read_arrays(slice(None))


PROJECTIONS = {
    "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256), "mlp.gate_proj": (2048, 256), "mlp.up_proj": (2048, 256),
    "mlp.down_proj": (256, 2048),
}  # fmt: skip


def fp8_in_blocks():
    """Scales of blocks of 128 x 128."""
    w, scales = fp8_values(), np.ones((OUT // 128, IN // 128), np.float32)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return config, {"weight": w, "weight_scale_inv": scales}, None


def test_a_bias_of_zeros_is_ignored(tmp_path, monkeypatch) -> None:
    """Old versions of AutoGPTQ stored a bias for each matrix."""
    write_model(tmp_path, lambda: gptq(order=False), monkeypatch, bias=0)
    from_pretrained(Decoder, tmp_path)
    write_model(tmp_path, lambda: gptq(order=False), monkeypatch, bias=1)
    with pytest.raises(WeightsError, match=r"_proj.bias and 6 others are in the files, but"):
        from_pretrained(Decoder, tmp_path)


def write_model(folder: Path, write_format, monkeypatch, bias: float | None = None) -> None:
    """Write a model of one layer. Its projections have a format, and perhaps a constant bias."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    tensors = {"model.embed_tokens.weight": np.ones((64, 256), jnp.bfloat16)}
    for norm in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"model.{norm}.weight"] = np.ones(256, jnp.bfloat16)
    content = config.to_dict()
    for name, shape in PROJECTIONS.items():
        for size, value in zip(("OUT", "IN"), shape, strict=True):
            monkeypatch.setitem(globals(), size, value)
        content["quantization_config"], parts, _ = write_format()
        if bias is not None:
            parts["bias"] = np.full(shape[0], bias, np.float16)
        tensors |= {f"model.layers.0.{name}.{end}": array for end, array in parts.items()}
    write(folder, tensors, module="")
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("dequantise", [False, True], ids=["keep", "expand"])
@pytest.mark.parametrize(
    "write_format",
    [
        lambda: gptq(index=random().permutation(IN) // 32),
        lambda: packed(num_inputs=IN, scale=np.float16),
        fp8_in_blocks,
        lambda: bitsandbytes((OUT, IN)),
    ],
    ids=["gptq", "packed", "fp8", "nf4"],
)
def test_loading_needs_little_memory_above_the_weights(
    tmp_path, monkeypatch, write_format, dequantise
) -> None:
    """Tensors of 1 MB, read in many parts, stand for the tensors of real models."""
    write_model(tmp_path, write_format, monkeypatch)
    monkeypatch.setattr(stored_matrices, "READ_ELEMENTS", 1 << 15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # orders of q, k and v differ: they are expanded
        from_pretrained(Decoder, tmp_path, dequantise=dequantise)
        tracemalloc.start()
        model = from_pretrained(Decoder, tmp_path, dequantise=dequantise)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    weights = sum(each.nbytes for each in named_arrays(model).values())
    dequantised = 2 * math.prod(PROJECTIONS["mlp.gate_proj"])
    assert peak - weights < dequantised


@pytest.mark.parametrize(
    "write_format",
    [fp8_with_cut_off_blocks, lambda: packed(scale=jnp.bfloat16), lambda: gptq()],
    ids=["fp8", "packed", "gptq"],
)
def test_experts_of_published_formats_stay_quantised(tmp_path, monkeypatch, write_format) -> None:
    """Each expert has tensors of its own. The router is not quantised."""
    config = LlamaConfig.from_dict(
        {
            "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 64,
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        }
    )  # fmt: skip
    random_llama(config).save_pretrained(tmp_path)
    tensors, content = load_file(tmp_path / "model.safetensors"), config.to_dict()
    for name in [name for name in tensors if "_proj" in name]:
        monkeypatch.setitem(globals(), "OUT", tensors[name].shape[0])
        content["quantization_config"], parts, _ = write_format()
        del tensors[name]
        tensors |= {name.removesuffix("weight") + end: array for end, array in parts.items()}
    write(tmp_path, tensors, module="")
    (tmp_path / "config.json").write_text(json.dumps(content))
    kept, expanded = (from_pretrained(Decoder, tmp_path, dequantise=each) for each in (False, True))
    experts = named_arrays(kept)
    assert any("experts_down_proj_scale" in name for name in experts)
    tokens = jnp.arange(6)[None]
    np.testing.assert_allclose(kept(tokens), expanded(tokens), rtol=0, atol=1e-4)
