"""Memory plans predict the formats that quantised matrices have after loading."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from paged_jax.engine.footprint import weight_bytes
from paged_jax.engine.memory_plan import make_plan
from paged_jax.kernels.weight_formats import dequantise
from paged_jax.models.decoder import Decoder
from paged_jax.models.loading.huggingface import load_weights
from paged_jax.models.loading.pretrained import read_config, read_formats
from paged_jax.models.matrices import get_matrix
from tests.support import DATA

KINDS = ("qkv_proj", "o_proj")
# gpt-oss 20B.
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "dtype": "bfloat16",
    "tie_word_embeddings": False, "attention_bias": True,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ]},
}  # fmt: skip
FOLDERS = (
    "awq-gemm", "bnb-int8", "bnb-nf4", "ct-fp8-block", "ct-mxfp4a16", "ct-nvfp4a16",
    "ct-w4a16-channel", "ct-w4a16-group-asym", "ct-w4a16-group-sym", "ct-w8a8-int8", "fp8-block",
    "gptq-v2", "mlx-q4", "mlx-q8",
)  # fmt: skip
# Folders with configs that leave out details. Their scales are bfloat16 instead of float32.
INEXACT = ("ct-fp8-block",)


@pytest.mark.parametrize(
    "name",
    [
        "gguf-q4_0/*.gguf",
        "gguf-k-quants/*.gguf",
        "gptq-v1-actorder",
        "ct-w4a16-group-asym",
        "fp8-block",
    ],
)
def test_plans_have_the_bytes_of_loaded_weights(name) -> None:
    (path,) = (DATA / "quantised").glob(name)
    config = read_config(path)
    for options in ({}, {"dtype": "int4"}, {"dequantise": True}):
        formats = read_formats(Decoder, path, config, **options)
        model = Decoder.from_pretrained(path, **options)
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
        assert formats == model.formats
        assert weight_bytes(config, config.dtype, formats=formats) == num_bytes
        plan = make_plan(config, 1 << 30, "cpu", formats, **options)
        assert plan.footprint.weights == num_bytes and str(plan.formats) == str(model.formats)


@pytest.mark.parametrize(
    ("name", "code", "scale_dtypes"),
    [("gguf-mixed", "int5", ["float16"] * 2), ("gguf-k-quants", "int8", ["int8", "float32"])],
)
@pytest.mark.filterwarnings("ignore:.*only some of its tensors are quantised:UserWarning")
def test_only_a_single_cpu_keeps_compact_formats(name, code, scale_dtypes) -> None:
    """Elsewhere, values of 5 bits become int8, and scales float32. Elements stay the same."""
    path = DATA / "quantised" / name / "model.gguf"
    config, options = read_config(path), {"dtype": "float32"}
    formats = read_formats(Decoder, path, config, platform="cpu", **options)
    for other in ({"platform": "gpu"}, {"platform": "cpu", "num_devices": 2}):
        wide = read_formats(Decoder, path, config, **options, **other)
        kinds = [[each[f"layers.{kind}"] for each in (formats, wide)] for kind in KINDS]
        assert [x.code for x in kinds[0]] == [code, "int8"]
        assert [x.code for x in kinds[1]] == ["uint5", "int8"]
        assert [x.scale_dtype for x in kinds[1]] == scale_dtypes
    models = [
        load_weights(Decoder, path, config, formats=each, **options) for each in (formats, wide)
    ]
    for layers in zip(*(model.layers for model in models), strict=True):
        for kind in KINDS:
            few, many = (get_matrix(x, kind, x.formats[kind], "float32") for x in layers)
            bits = 5 if "int5" in few.format.code else 8
            assert few.values.nbytes * 8 == many.values.nbytes * bits
            np.testing.assert_array_equal(
                *(dequantise(each.arrays, each.format.code) for each in (few, many))
            )


@pytest.mark.parametrize("name", FOLDERS)
def test_plans_of_a_config_have_the_formats_of_the_weights(name, tmp_path) -> None:
    path = DATA / "quantised" / name
    for file in path.glob("*.json"):
        shutil.copy(file, tmp_path)
    expected = read_formats(Decoder, path, read_config(path))
    formats = read_formats(Decoder, tmp_path, read_config(tmp_path))
    if name in INEXACT:
        assert [*map(str, (formats, formats.default.group_size))] == [
            *map(str, (expected, expected.default.group_size))
        ]
    else:
        assert formats == expected


def test_plan_of_gpt_oss_counts_packed_experts(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    config = read_config(tmp_path)
    formats = read_formats(Decoder, tmp_path, config)
    assert str(formats) == "mxfp4" and not formats["layers.qkv_proj"].is_quantised
    plan = make_plan(config, 80 << 30, "gpu", formats)
    assert 13.0 < plan.footprint.weights / 2**30 < 13.6
    halves = [make_plan(config, 80 << 30, "gpu", formats, tensor_parallel_size=n) for n in (1, 2)]
    assert halves[1].footprint.weights < 0.52 * halves[0].footprint.weights
    floats = make_plan(
        config, 80 << 30, "gpu", read_formats(Decoder, tmp_path, config, dequantise=True)
    )
    assert floats.footprint.weights > 38 * 2**30
