"""Mixed checkpoints of ModelOpt: an encoder by its formulas, and their values in float64.

The encoder shares no code with the readers of the package. All weights of the formulas are exact in
float32, because the second scales have few bits.
"""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from paged_jax.models.codecs.fp8 import Fp8Format
from paged_jax.models.codecs.nvfp4 import ModelOptNvfp4Format
from paged_jax.models.codecs.quantisation import find_quantisation
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import UnsupportedConfigError, WeightsError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.pretrained import read_config, read_formats
from paged_jax.models.loading.safetensors_files import find_tensors
from tests.support.quantised_files import E2M1, write_tensors
from tests.support.random_model import random_llama

CONFIG = LlamaConfig(
    vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
)  # fmt: skip
FP8, NVFP4 = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 16}
W4A16 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
LAYERS = {
    **{f"model.layers.0.self_attn.{each}_proj": FP8 for each in "qkvo"},
    "model.layers.0.mlp": NVFP4,  # a module that contains others
    "model.layers.1.mlp": NVFP4,
    "model.layers.1.mlp.down_proj": FP8,
    "lm_head": W4A16,
}
MIXED = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS,
    "config_groups": {}, "ignore": ["model.layers.1.self_attn*"],
    "producer": {"name": "modelopt", "version": "0.46.0"},
}  # fmt: skip


def encode_fp8(w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a module, and the float64 matrix that they stand for."""
    scale = np.float32(np.abs(w).max() / 448).astype(ml_dtypes.bfloat16).astype(np.float32)
    values = np.clip(w / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": np.float32(0.5)}
    return tensors, values.astype(np.float64) * float(scale)


def encode_nvfp4(w: np.ndarray, *, has_input_scale: bool = True):
    """Do the same as `encode_fp8`, for NVFP4: E2M1 * F8_E4M3 of 16 inputs * F32."""
    groups = w.astype(np.float64).reshape(len(w), -1, 16)
    largest = np.abs(groups).max(-1)
    factor = np.float32(largest.max() / (6 * 448)).astype(ml_dtypes.bfloat16).astype(np.float32)
    scales = np.clip(largest / (6 * float(factor)), 0, 448).astype(ml_dtypes.float8_e4m3fn)
    exact = scales.astype(np.float64) * float(factor)
    numbers = E2M1.astype(np.float64)
    quotients = groups / np.where(exact == 0, 1, exact)[..., None]
    values = np.abs(quotients[..., None] - numbers).argmin(-1)
    want = (numbers[values] * exact[..., None]).reshape(w.shape)
    values = values.reshape(w.shape).astype(np.uint8)
    tensors = {
        "weight": values[:, ::2] | values[:, 1::2] << 4, "weight_scale": scales,
        "weight_scale_2": factor,
    }  # fmt: skip
    if has_input_scale:
        tensors["input_scale"] = np.float32(0.25)
    return tensors, want


def encode(module: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray] | None:
    """Quantise the matrix of a module; None if `LAYERS` does not list it."""
    if module == "lm_head":
        return encode_nvfp4(w, has_input_scale=False)
    if module in LAYERS:
        return encode_fp8(w)
    return encode_nvfp4(w) if ".mlp." in module else None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a folder, and the float64 matrices of its quantised modules."""
    folder = tmp_path_factory.mktemp("modelopt")
    random_llama(CONFIG).save_pretrained(folder)
    tensors, want = {}, {}
    for name, array in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        encoded = encode(module, array) if array.ndim == 2 else None
        if encoded is None:
            tensors[name] = array
        else:
            tensors |= {f"{module}.{end}": np.asarray(x) for end, x in encoded[0].items()}
            want[name] = encoded[1]
    write_tensors(folder, tensors, "")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MIXED}))
    return folder, want


def test_matrices_of_a_mix_equal_the_formulas(checkpoint) -> None:
    folder, want = checkpoint
    stored = find_tensors(folder, read_config(folder))
    assert len(want) == 4 + 3 + 3 + 1
    for name, matrix in want.items():
        assert stored[name].format.is_quantised
        found = stored[name].read((), np.dtype(np.float32))
        np.testing.assert_array_equal(found.astype(np.float64), matrix, err_msg=name)
    assert not stored["model.layers.1.self_attn.q_proj.weight"].format.is_quantised


def test_logits_of_a_mix_equal_those_of_the_expanded_weights(checkpoint, tmp_path) -> None:
    folder, want = checkpoint
    stored = find_tensors(folder, read_config(folder))
    expanded = {
        name: want.get(name, tensor.read((), np.dtype(np.float32))).astype(np.float32)
        for name, tensor in stored.items()
    }
    write_tensors(tmp_path, expanded, "")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    token_ids = jnp.arange(24, dtype=jnp.int32)[None] % CONFIG.vocab_size
    logits, expected = (
        np.asarray(Decoder.from_pretrained(path, scan_layers=False)(token_ids))
        for path in (folder, tmp_path)
    )
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_plan_of_a_mix_has_the_formats_of_the_weights(checkpoint, tmp_path) -> None:
    folder, _ = checkpoint
    shutil.copy(folder / "config.json", tmp_path)
    loaded = read_formats(Decoder, folder, read_config(folder))
    assert loaded is not None and loaded["lm_head"].code == "e2m1"
    assert loaded["layers.1.down_proj"].code == "float8_e4m3fn"
    assert read_formats(Decoder, tmp_path, read_config(tmp_path)) == loaded


def test_a_mix_gives_each_module_its_own_format() -> None:
    quantisation = find_quantisation({"quantization_config": MIXED})
    assert quantisation is not None
    fp8, nvfp4 = Fp8Format((None, None)), ModelOptNvfp4Format(16)
    assert quantisation.format_of("model.layers.0.self_attn.q_proj") == fp8
    assert quantisation.format_of("model.layers.1.mlp.up_proj") == nvfp4
    assert quantisation.format_of("model.layers.1.mlp.down_proj") == fp8  # the longer name applies
    assert quantisation.format_of("model.layers.11.mlp.up_proj") is None
    assert quantisation.excluding("model.layers.1.self_attn.q_proj") == MIXED["ignore"][0]
    uniform = find_quantisation({"quantization_config": {"quant_method": "modelopt", **W4A16}})
    assert uniform is not None and uniform.format_of("model.layers.7.mlp.up_proj") == nvfp4


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"quant_algo": "MXFP8"}, r"m\.quant_algo must be fp8, nvfp4, w4a16_nvfp4, got 'mxfp8'"),
        ({**NVFP4, "pre_quant_scale": True}, r"m\.pre_quant_scale is not supported"),
        ({"group_size": 16}, r"m\.quant_algo must be .* got None"),
        ("FP8", r"quantized_layers\.m must be a JSON object"),
    ],
)
def test_layers_of_a_mix_are_rejected_by_name(layer, message) -> None:
    config = {**MIXED, "quantized_layers": {"m": layer}}
    with pytest.raises(UnsupportedConfigError, match=message):
        find_quantisation({"quantization_config": config})


def test_a_quantised_module_that_the_mix_omits_is_an_error(checkpoint, tmp_path) -> None:
    folder, _ = checkpoint
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    layers = {name: layer for name, layer in LAYERS.items() if name != "lm_head"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**MIXED, "quantized_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="lm_head.* no entry of .* applies to lm_head"):
        Decoder.from_pretrained(tmp_path)
