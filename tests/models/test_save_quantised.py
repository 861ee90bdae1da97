"""Saving of quantised models as compressed-tensors, and as MXFP4 for gpt-oss."""

import dataclasses
import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from paged_jax.kernels.weight_formats import WeightArrays, WeightFormat, dequantise
from paged_jax.kernels.weight_packing import pack
from paged_jax.models.codecs.compressed_tensors import (
    CompressedPackedFormat,
    CompressedTensorsCodec,
)
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import SaveError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.huggingface import load_weights
from paged_jax.models.loading.parameters import named_arrays
from paged_jax.models.matrix_formats import MatrixFormats
from tests.support import DATA
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG
from tests.support.weights import FORMATS, random_arrays

CONFIG = dataclasses.replace(CONFIG, tie_word_embeddings=False)
# Fixtures that compressed-tensors can represent.
REPRESENTABLE = (
    "awq-gemm", "bnb-int8", "ct-fp8-block", "ct-fp8-channel", "ct-fp8-tensor", "ct-mxfp4a16",
    "ct-nvfp4a16", "ct-w4a16-actorder", "ct-w4a16-channel", "ct-w4a16-group-asym",
    "ct-w4a16-group-sym", "ct-w8a16-pack", "ct-w8a8-int8", "fp8-block", "fp8-tensor",
    "gptq-v1-asym", "gptq-v2",
)  # fmt: skip
REFUSED = {
    "bnb-nf4": "does not support the format nf4",
    "gptq-v1-actorder": "does not support matrices with reordered inputs",
    "mlx-q4": "stores minima as zero points",
}


def assert_same(first: Decoder, second: Decoder) -> None:
    assert first.formats == second.formats and first.config == second.config
    expected, got = named_arrays(first), named_arrays(second)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name, strict=True)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4-symmetric"])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_save_pretrained_and_load_give_the_same_model(dtype, is_stacked, tmp_path) -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    random_llama(config, dtype="bfloat16").save_pretrained(tmp_path / "floats")
    model = Decoder.from_pretrained(tmp_path / "floats", dtype=dtype, scan_layers=is_stacked)
    model.save_pretrained(tmp_path / "saved")
    loaded = Decoder.from_pretrained(tmp_path / "saved", scan_layers=is_stacked)
    # The output head is written as floats.
    head = dict(model.formats.others).get("lm_head", model.formats.default)
    assert head.is_quantised and not loaded.formats["lm_head"].is_quantised
    arrays, saved = named_arrays(model), named_arrays(loaded)
    w = dequantise(WeightArrays(arrays.pop("lm_head"), arrays.pop("lm_head_scale")), head.code)
    np.testing.assert_array_equal(saved.pop("lm_head"), w.astype("bfloat16"))
    assert arrays.keys() == saved.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(saved[name], array, err_msg=name, strict=True)
    entry = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "compressed-tensors" and "lm_head" in entry["ignore"]
    groups = entry["config_groups"].values()
    assert all(group["input_activations"] is None for group in groups)
    # The rows of down_proj have 48 inputs, so they are int8 in a model of int4.
    targets = [group["targets"] for group in groups]
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in range(config.num_hidden_layers)]
    assert (targets == [["Linear"]]) if dtype != "int4-symmetric" else (down in targets)


def test_save_pretrained_widens_scales_of_two_levels(tmp_path) -> None:
    config = dataclasses.replace(CONFIG, hidden_size=256)
    format, floats = WeightFormat("int4", 16, "int8"), WeightFormat("float32")
    others = {"layers.down_proj": floats, "layers.o_proj": floats, "lm_head": floats}
    formats = MatrixFormats(format, tuple(sorted({**others, "embed_tokens": floats}.items())))
    random_llama(config).save_pretrained(tmp_path / "floats")
    model = load_weights(Decoder, tmp_path / "floats", config, formats=formats)
    model.save_pretrained(tmp_path / "saved")
    loaded = Decoder.from_pretrained(tmp_path / "saved", scan_layers=False)
    name, arrays, saved = "layers.0.qkv_proj", named_arrays(model), named_arrays(loaded)
    assert arrays[f"{name}_scale"].dtype == jnp.int8
    assert loaded.formats[name] == dataclasses.replace(format, scale_dtype="float32")
    pairs = [WeightArrays(each[name], each[f"{name}_scale"]) for each in (arrays, saved)]
    np.testing.assert_array_equal(*(dequantise(each, "int4") for each in pairs))


def test_save_pretrained_writes_values_of_5_bits_as_int8(tmp_path) -> None:
    random_llama(CONFIG).save_pretrained(tmp_path / "floats")
    int5 = WeightFormat("int5", 32, "float16")
    floats = WeightFormat("float32")
    others = {"layers.down_proj": floats, "embed_tokens": floats, "lm_head": floats}
    formats = MatrixFormats(int5, tuple(sorted(others.items())))
    model = load_weights(Decoder, tmp_path / "floats", CONFIG, formats=formats)
    model.save_pretrained(tmp_path / "saved")
    loaded = Decoder.from_pretrained(tmp_path / "saved", scan_layers=False)
    arrays, saved = named_arrays(model), named_arrays(loaded)
    for name in ("layers.0.qkv_proj", "layers.1.gate_up_proj"):
        pairs = [WeightArrays(each[name], each[f"{name}_scale"]) for each in (arrays, saved)]
        assert loaded.formats[name].code == "int8"
        assert pairs[0].values.nbytes * 8 == pairs[1].values.nbytes * 5
        np.testing.assert_array_equal(dequantise(pairs[0], "int5"), dequantise(pairs[1], "int8"))


@pytest.mark.parametrize("name", REPRESENTABLE)
def test_save_pretrained_keeps_the_formats_of_other_tools(name, tmp_path) -> None:
    model = Decoder.from_pretrained(DATA / "quantised" / name, scan_layers=False)
    model.save_pretrained(tmp_path)
    assert_same(model, Decoder.from_pretrained(tmp_path, scan_layers=False))


@pytest.mark.parametrize("name", REFUSED)
def test_save_pretrained_refuses_what_it_cannot_represent(name, tmp_path) -> None:
    model = Decoder.from_pretrained(DATA / "quantised" / name, scan_layers=False)
    with pytest.raises(SaveError, match=REFUSED[name]) as error:
        model.save_pretrained(tmp_path / "saved")
    assert "save_checkpoint" in str(error.value) and not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "name", ["ct-w4a16-group-asym", "ct-w8a16-pack", "ct-mxfp4a16", "ct-fp8-channel", "ct-nvfp4a16"]
)
def test_save_pretrained_writes_the_tensors_of_compressed_tensors(name, tmp_path) -> None:
    """The files of llm-compressor and of this library have the same tensors."""
    source = DATA / "quantised" / name
    Decoder.from_pretrained(source).save_pretrained(tmp_path)
    with (
        safe_open(source / "model.safetensors", "numpy") as expected,
        safe_open(tmp_path / "model.safetensors", "numpy") as got,
    ):
        assert {n for n in expected.keys() if not n.endswith("input_scale")} == {*got.keys()}
        for tensor in got.keys():
            theirs, ours = expected.get_slice(tensor), got.get_slice(tensor)
            dtype = ours.get_dtype()
            assert dtype == theirs.get_dtype() and ours.get_shape() == theirs.get_shape(), tensor
            # NumPy has no fp8. The factor of NVFP4 scales is derived, and may be another one.
            if dtype != "F8_E4M3" and not tensor.endswith("global_scale"):
                np.testing.assert_array_equal(ours[:], theirs[:], err_msg=tensor)


def test_encode_packs_bits_in_the_documented_order() -> None:
    rng = np.random.default_rng(0)
    unsigned = rng.integers(0, 16, (11, 64)).astype(np.uint8)
    scales = rng.uniform(0.5, 1, (11, 2)).astype(np.float16)
    zeros = rng.integers(0, 16, (11, 2))
    mins = (8 - zeros).astype(np.float32) * scales
    format = WeightFormat("int4", 32, "float16", "float32")
    arrays = WeightArrays(pack(unsigned), scales, mins)
    module = CompressedTensorsCodec().encode("m", arrays, format)
    words, stored = module.tensors[".weight_packed"], module.tensors[".weight_zero_point"]
    assert module.format == CompressedPackedFormat(4, (1, 32), has_zeros=True)
    assert words.shape == (11, 8) and stored.shape == (2, 2)
    for row, column in ((0, 0), (3, 17), (10, 63)):
        nibble = int(words[row, column // 8]) >> 4 * (column % 8) & 15
        assert nibble == unsigned[row, column]
        group = column // 32
        assert int(stored[row // 8, group]) >> 4 * (row % 8) & 15 == zeros[row, group]


def test_encode_refuses_formats_by_name() -> None:
    rng = np.random.default_rng(0)
    for name in ("nf4", "fp8 in groups", "q4_1", "q5_1"):
        format = FORMATS[name]
        with pytest.raises(SaveError, match="layers.7.up_proj"):
            arrays = random_arrays(format, (40, 64), rng)
            CompressedTensorsCodec().encode("layers.7.up_proj", arrays, format)


def test_save_pretrained_writes_experts_in_mxfp4(tmp_path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    config = LlamaConfig.from_dict({"model_type": "gpt_oss", **sizes, **heads, **experts})
    mxfp4, floats = WeightFormat("e2m1", 32, "bfloat16"), WeightFormat("bfloat16")
    kinds = ("experts_gate_up_proj", "experts_down_proj")
    formats = MatrixFormats(floats, tuple((f"layers.{kind}", mxfp4) for kind in sorted(kinds)))
    random_llama(config, dtype="bfloat16").save_pretrained(tmp_path / "floats")
    model = load_weights(Decoder, tmp_path / "floats", config, formats=formats)
    for layer in model.layers:
        for kind in kinds:
            scales = getattr(layer, f"{kind}_scale")
            exponents = jnp.floor(jnp.log2(scales[...].astype(jnp.float32)))
            scales[...] = jnp.exp2(exponents).astype(scales.dtype)
    model.save_pretrained(tmp_path / "saved")
    assert_same(model, Decoder.from_pretrained(tmp_path / "saved", scan_layers=model.scan_layers))


@pytest.mark.peers
@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed_tensors is missing"
)
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4-symmetric"])
def test_transformers_reads_saved_models(dtype, tmp_path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    random_llama(CONFIG).save_pretrained(tmp_path / "floats")
    model = Decoder.from_pretrained(tmp_path / "floats", dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    ours = Decoder.from_pretrained(tmp_path / "saved")
    token_ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 20)).astype(np.int32)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    with torch.no_grad():
        expected = theirs(torch.tensor(token_ids, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(ours(token_ids), expected, atol=2e-5 * float(expected.std()) + 1e-5)
