"""Quantised formats of checkpoints: MXFP4, and gpt-oss models in it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged_jax.kernels.weight_formats import WeightArrays, dequantise
from paged_jax.models.codecs import mxfp4
from paged_jax.models.codecs.mxfp4 import expand_mxfp4
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import WeightsError
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.safetensors_files import find_tensors
from paged_jax.models.loading.saving import save_weights
from tests.support.random_model import random_llama

CONFIG = LlamaConfig.from_dict(
    {
        "model_type": "gpt_oss",
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
)
EXPERTS = "model.layers.{}.mlp.experts."


def e2m1_value(nibble: int) -> float:
    """Return the value of four E2M1 bits, by the formulas of the specification (5.3.3)."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def test_expand_mxfp4_is_exact_for_all_bytes_and_scales() -> None:
    all_bytes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.arange(256, dtype=np.uint8)
    blocks = np.broadcast_to(all_bytes, (255, 16, 16))
    out = expand_mxfp4(blocks, np.repeat(scales[:255, None], 16, axis=1))
    assert out.dtype == np.float32
    want = np.array([[e2m1_value(byte & 15), e2m1_value(byte >> 4)] for byte in range(256)])
    want = want.reshape(1, -1) * 2.0 ** (scales[:255, None].astype(np.float64) - 127)
    is_float = np.abs(want) <= np.finfo(np.float32).max
    np.testing.assert_array_equal(out[is_float], want[is_float])
    assert np.isinf(out[~is_float]).all() and not is_float[-1].all()
    # All finite numbers are exact in bfloat16.
    np.testing.assert_array_equal(out[:254].astype(jnp.bfloat16).astype(np.float32), out[:254])
    assert np.isnan(expand_mxfp4(all_bytes, np.full(16, 255, np.uint8))).all()


@pytest.mark.peers
@pytest.mark.slow
def test_expand_mxfp4_matches_transformers() -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 5, 3, 16), np.uint8)
    scales = rng.integers(100, 150, (2, 5, 3), np.uint8)
    want = theirs.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.testing.assert_array_equal(expand_mxfp4(blocks, scales).swapaxes(1, 2), want.float().numpy())


def write_mxfp4(folder) -> dict[str, np.ndarray]:
    """Write a gpt-oss folder with MXFP4 experts, and return the experts in float32."""
    save_weights(random_llama(CONFIG, dtype="bfloat16"), folder)
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    rng = np.random.default_rng(0)
    for layer in range(CONFIG.num_hidden_layers):
        for kind in ("gate_up_proj", "down_proj"):
            name = EXPERTS.format(layer) + kind
            X, num_inputs, num_outputs = tensors.pop(name).shape
            blocks = rng.integers(0, 256, (X, num_outputs, num_inputs // 32, 16), np.uint8)
            scales = rng.integers(118, 124, blocks.shape[:3], np.uint8)
            tensors |= {name + "_blocks": blocks, name + "_scales": scales}
            numbers[name] = expand_mxfp4(blocks, scales).swapaxes(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return numbers


def test_from_pretrained_expands_mxfp4_experts_one_at_a_time(tmp_path, monkeypatch) -> None:
    numbers = write_mxfp4(tmp_path)
    expand, sizes = expand_mxfp4, []

    def recorded(blocks, scales):
        sizes.append(blocks.shape[0])
        return expand(blocks, scales)

    monkeypatch.setattr(mxfp4, "expand_mxfp4", recorded)
    model = Decoder.from_pretrained(tmp_path, dequantise=True)
    assert sizes == [1] * (CONFIG.num_hidden_layers * 2 * CONFIG.num_experts)
    layer = model.layers[1]
    gate_up = numbers[EXPERTS.format(1) + "gate_up_proj"]
    assert layer.experts_gate_up_proj.dtype == jnp.bfloat16
    for half in (0, 1):
        np.testing.assert_array_equal(
            layer.experts_gate_up_proj[...][:, half].astype(jnp.float32),
            gate_up[..., half::2].swapaxes(1, 2),
        )
    np.testing.assert_array_equal(
        layer.experts_down_proj[...].astype(jnp.float32),
        numbers[EXPERTS.format(1) + "down_proj"].swapaxes(1, 2),
    )


def test_read_arrays_keeps_mxfp4_packed(tmp_path) -> None:
    numbers = write_mxfp4(tmp_path)
    tensors = find_tensors(tmp_path, CONFIG)
    for name, want in numbers.items():
        stored = tensors[name]
        assert stored.format.num_bytes(want.shape) == want.size // 2 + want.size // 32 * 2
        for expert in range(want.shape[0]):
            arrays = stored.read_arrays(slice(expert, expert + 1))
            found = dequantise(arrays, stored.format.code)
            np.testing.assert_array_equal(found.swapaxes(1, 2), want[expert : expert + 1])


def test_from_pretrained_keeps_mxfp4_experts_packed(tmp_path) -> None:
    numbers = write_mxfp4(tmp_path)
    layer = Decoder.from_pretrained(tmp_path).layers[1]
    for kind, shape in (("gate_up_proj", (2, 32, 64)), ("down_proj", (64, 32))):
        values = getattr(layer, f"experts_{kind}")[...]
        scales = getattr(layer, f"experts_{kind}_scale")[...]
        assert values.shape == (3, *shape[:-1], shape[-1] // 2) and values.dtype == jnp.uint8
        found = np.asarray(dequantise(WeightArrays(values, scales), "e2m1"))
        want = numbers[EXPERTS.format(1) + kind].swapaxes(1, 2)  # gate and up rows alternate
        want = want.reshape(3, 32, 2, 64).swapaxes(1, 2) if kind == "gate_up_proj" else want
        np.testing.assert_array_equal(found, want)


def test_save_pretrained_is_inverse_for_gpt_oss(tmp_path) -> None:
    """Its expert tensors are stored transposed."""
    model = random_llama(CONFIG, dtype="bfloat16")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gate_up = model.layers[0].experts_gate_up_proj[...]  # [X, 2, F, E]
    for half in (0, 1):
        stored = tensors[EXPERTS.format(0) + "gate_up_proj"][..., half::2]
        np.testing.assert_array_equal(stored, gate_up[:, half].swapaxes(1, 2))
    loaded = Decoder.from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda blocks, scales: (blocks, np.full_like(scales, 255)),
            "down_proj_scales must be finite",
        ),
        (lambda blocks, scales: (blocks[:, :-1], scales), "must be U8"),
        (lambda blocks, scales: (blocks, scales.astype(np.float32)), "must be U8"),
        (lambda blocks, scales: (blocks, None), "down_proj_scales is missing"),
    ],
    ids=["not a number", "shape", "type", "no scales"],
)
def test_from_pretrained_rejects_damaged_mxfp4(tmp_path, change, message) -> None:
    write_mxfp4(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), EXPERTS.format(0) + "down_proj"
    blocks, scales = change(tensors.pop(name + "_blocks"), tensors.pop(name + "_scales"))
    tensors[name + "_blocks"] = np.ascontiguousarray(blocks)
    if scales is not None:
        tensors[name + "_scales"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        Decoder.from_pretrained(tmp_path)


def test_from_dict_accepts_mxfp4_only_for_gpt_oss() -> None:
    config = CONFIG.to_dict()
    assert CONFIG.dtype == "bfloat16"  # default of the family
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    assert CONFIG == LlamaConfig.from_dict({**config, **quantised})
    other = {
        "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
        "intermediate_size": 32, "num_attention_heads": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="quant_method 'mxfp4' is not supported for this family"):
        LlamaConfig.from_dict({**other, **quantised})
