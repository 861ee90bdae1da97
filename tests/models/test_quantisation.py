"""Quantisation configs: published variants, and entries that must be rejected by name."""

import json
import re
import time

import pytest

from paged_jax.models.codecs.awq import AwqFormat
from paged_jax.models.codecs.bitsandbytes import BitsandbytesFormat, BitsandbytesInt8Format
from paged_jax.models.codecs.compressed_tensors import (
    CompressedInt8Format,
    CompressedPackedFormat,
)
from paged_jax.models.codecs.fp8 import Fp8Format
from paged_jax.models.codecs.gptq import GptqFormat
from paged_jax.models.codecs.mlx import MlxFormat
from paged_jax.models.codecs.nvfp4 import ModelOptNvfp4Format
from paged_jax.models.codecs.quantisation import find_quantisation, read_quantisation
from paged_jax.models.errors import UnsupportedConfigError

PROJECTION = "model.layers.3.mlp.down_proj"
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}


def compressed(format="pack-quantized", *, group=None, **weights):
    """Return a config of compressed-tensors as llm-compressor writes it, with some changes."""
    targets = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {
            "group_0": {
                **targets,
                "weights": {**WEIGHTS, "dynamic": False, "observer": "minmax", **weights},
                **(group or {}),
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.89,
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "targets": []},
        "version": "0.9.1",
    }


def find(config, **options):
    found = find_quantisation({"quantization_config": config}, **options)
    assert found is not None
    return found


# Configs of published checkpoints, and the format of a projection.
PUBLISHED = {
    "Qwen3-FP8": ({**FP8, "fmt": "e4m3"}, Fp8Format((128, 128))),
    "DeepSeek-V3.1": (
        {**FP8, "fmt": "e4m3", "scale_fmt": "ue8m0"},
        Fp8Format((128, 128), has_exponents=True),
    ),
    "MiniMax": (
        {**FP8, "fmt": "float8_e4m3fn", "ignored_layers": ["lm_head"]},
        Fp8Format((128, 128)),
    ),
    "AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["re:.*lm_head"]},
        Fp8Format((None, None)),
    ),
    "Llama-3.1-405B-FP8": (
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head", "model.layers.0"],
        },
        Fp8Format(),
    ),
    "RedHatAI W4A16": (compressed(), CompressedPackedFormat(4, (1, 128), has_zeros=False)),
    "RedHatAI W8A8": (
        compressed(
            "int-quantized",
            num_bits=8,
            strategy="channel",
            group_size=None,
            group={"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}},
        ),
        CompressedInt8Format((1, None)),
    ),
    "RedHatAI FP8-dynamic": (
        compressed("naive-quantized", num_bits=8, type="float", strategy="channel"),
        Fp8Format(),
    ),
    "old act order": (
        compressed(actorder="group", symmetric=False),
        CompressedPackedFormat(4, (1, 128), has_zeros=True),
    ),
    "mixed-precision": (
        compressed("mixed-precision", group={"format": "pack-quantized"}),
        CompressedPackedFormat(4, (1, 128), has_zeros=False),
    ),
    "Qwen2.5-AWQ": (
        {**AWQ, "modules_to_not_convert": None},
        AwqFormat(128),
    ),
    "old AWQ": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
        AwqFormat(64),
    ),
    "Qwen2.5-GPTQ-Int4": (
        {
            **GPTQ, "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True,
            "damp_percent": 0.01, "dataset": None, "exllama_config": {"version": 1},
            "max_input_length": None, "model_seqlen": None, "pad_token_id": None,
            "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False,
            "use_exllama": True,
        },
        GptqFormat(4, 128, is_symmetric=True, version=1),
    ),
    "GPTQ v2, 8 bits": (
        {**GPTQ, "bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
        GptqFormat(8, None, is_symmetric=False, version=2),
    ),
    "unsloth-bnb-4bit": (
        {
            **BITSANDBYTES, "_load_in_4bit": True, "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
            "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": ["lm_head", "merger", "model.layers.1.mlp"],
            "llm_int8_threshold": 6.0,
        },
        BitsandbytesFormat(),
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        BitsandbytesInt8Format(),
    ),
    "ModelOpt FP8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        Fp8Format((None, None)),
    ),
    "ModelOpt NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
         "exclude_modules": ["*lm_head*", "model.layers.0*"]},
        ModelOptNvfp4Format(16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_find_quantisation_reads_published_configs(name) -> None:
    config, format = PUBLISHED[name]
    quantisation = find(config)
    assert quantisation.format_of(PROJECTION) == format
    assert quantisation.excluding(PROJECTION) is None


def test_find_quantisation_reads_gpt_oss_and_mlx() -> None:
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    experts = find({"quant_method": "mxfp4", "modules_to_not_convert": skipped}, has_mxfp4=True)
    assert experts.format_of("model.layers.0.mlp.experts.down_proj") is not None
    assert experts.excluding("model.layers.11.self_attn.q_proj") == skipped[0]
    assert experts.excluding("model.layers.0.mlp.experts.down_proj") is None
    entry = {
        "group_size": 64, "bits": 4, PROJECTION: {"group_size": 32, "bits": 8}, "lm_head": False,
        "model.embed_tokens": True,
    }  # fmt: skip
    mlx = find_quantisation({"quantization": entry, "quantization_config": entry})
    assert mlx is not None
    assert mlx.format_of(PROJECTION) == MlxFormat(8, 32)
    assert mlx.format_of("model.embed_tokens") == MlxFormat(4, 64)
    assert mlx.excluding("lm_head") == "lm_head" and mlx.excluding(PROJECTION) is None
    # The defaults of `mlx.nn.quantize`.
    mlx = find_quantisation({"quantization": {"bits": 4}})
    assert mlx is not None
    assert mlx.format_of(PROJECTION) == MlxFormat(4, 64)


@pytest.mark.parametrize(
    ("config", "ignored", "kept"),
    [
        ({**FP8, "modules_to_not_convert": ["mlp.gate"]}, "layers.0.mlp.gate", "l.mlp.gate_proj"),
        ({**FP8, "modules_to_not_convert": ["layers.1"]}, "layers.1.q_proj", "layers.11.q_proj"),
        ({**FP8, "ignored_layers": ["re:.*lm_head"]}, "lm_head", "head"),
        (compressed(), "lm_head", "model.lm_head"),
        ({**compressed(), "ignore": ["re:.*gate$"]}, "layers.0.gate", "layers.0.gate_proj"),
        ({**AWQ, "modules_to_not_convert": ["visual"]}, "model.visual.0.fc", "model.visuals"),
        ({**BITSANDBYTES, "llm_int8_skip_modules": ["mlp"]}, "layers.1.mlp.up", "layers.1.mlps"),
        ({**GPTQ, "dynamic": {r"-:.*\.layers\.2\..*": {}}}, "model.layers.2.q", "model.layers.3.q"),
        (PUBLISHED["ModelOpt NVFP4"][0], "model.lm_head.x", "model.head"),
    ],
)
def test_excluding_matches_whole_parts_of_names(config, ignored, kept) -> None:
    quantisation = find(config)
    assert quantisation.excluding(ignored) is not None
    assert quantisation.excluding(kept) is None


def test_groups_and_dynamic_entries_change_the_format_of_some_modules() -> None:
    config = {**GPTQ, "dynamic": {r"+:.*\.3\..*": {"bits": 8, "group_size": 64}}}
    assert find(config).format_of(PROJECTION) == GptqFormat(8, 64, is_symmetric=True, version=1)
    config = compressed()
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj"],
        "weights": {**WEIGHTS, "num_bits": 8, "strategy": "channel"},
    }
    quantisation = find(config)
    assert quantisation.format_of(PROJECTION) == CompressedPackedFormat(
        8, (1, None), has_zeros=False
    )
    assert quantisation.format_of("model.layers.3.mlp.up_proj") == CompressedPackedFormat(
        4, (1, 128), has_zeros=False
    )


REJECTED = {
    "method": ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported .* fp8, .* awq, gptq"),
    "torchao": ({"quant_method": "torchao", "quant_type": "int4"}, "'torchao' is not supported"),
    "no method": ({"bits": 4}, "quant_method None"),
    "an object": ("gptq", "must be a JSON object, got 'gptq'"),
    "bits": ({**GPTQ, "bits": 3}, r"bits must be 4, 8, got 3"),
    "bits as text": ({**GPTQ, "bits": "4"}, r"bits must be 4, 8, got '4'"),
    "format": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq, gptq_v2"),
    "marlin": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is not supported"),
    "rotation": ({**GPTQ, "rotation": "hadamard"}, "rotation is not supported"),
    "dynamic": ({**GPTQ, "dynamic": {"+:.*": {"bits": 2}}}, r"dynamic.*bits must be 4, 8, got 2"),
    "expression": ({**GPTQ, "dynamic": {"-:(": {}}}, "must be a valid regular expression"),
    "group": ({**GPTQ, "group_size": 0}, "group_size must be a positive integer or -1, got 0"),
    "huge group": ({**GPTQ, "group_size": 1 << 70}, "group_size must be a positive integer"),
    "gemv": ({**AWQ, "version": "gemv"}, "version must be gemm, got 'gemv'"),
    "no zero point": ({**AWQ, "zero_point": False}, "zero_point must be True, got False"),
    "unknown key": ({**AWQ, "smoothing": [1, 2]}, r"smoothing is not supported and must be null"),
    "fp8 format": ({**FP8, "fmt": "e5m2"}, "fmt must be e4m3, float8_e4m3fn, got 'e5m2'"),
    "fp4 experts": ({**FP8, "expert_dtype": "fp4"}, "expert_dtype must be fp8, got 'fp4'"),
    "block": ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size must be two positive"),
    "activations": ({**FP8, "activation_scheme": "none"}, "activation_scheme must be dynamic"),
    "names": ({**FP8, "ignored_layers": "lm_head"}, "ignored_layers must be a list of names"),
    "storage": (
        {**BITSANDBYTES, "bnb_4bit_quant_storage": "bfloat16"},
        "bnb_4bit_quant_storage must be uint8, torch.uint8, got 'bfloat16'",
    ),
    "fp16 weights": ({**BITSANDBYTES, "llm_int8_has_fp16_weight": True}, "has_fp16_weight"),
    "neither": ({"quant_method": "bitsandbytes"}, "load_in_4bit must differ from load_in_8bit"),
    "sparse": ({**compressed(), "format": "marlin-24"}, "format must be float-quantized.*marlin"),
    "mxfp6": (compressed("mxfp6-pack-quantized"), "got 'mxfp6-pack-quantized'"),
    "sparsity": (
        {**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format must be dense, got 'sparse-24-bitmask'",
    ),
    "transforms": (
        {**compressed(), "transform_config": {"config_groups": {"R1": {}}}},
        "transform_config is not supported",
    ),
    "3 bits": (compressed(num_bits=3), "group_0.weights.num_bits must be 4, 8, got 3"),
    "strategy": (compressed(strategy="token"), "weights.strategy must be tensor.*got 'token'"),
    "no group": (compressed(group_size=None), "weights.group_size must be positive"),
    "type": (compressed(type="float"), "weights.type must fit the format pack-quantized"),
    "order": (compressed(actorder="random"), "actorder must be"),
    "mixed": (compressed("mixed-precision"), "format must be .* got 'mixed-precision'"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo must be fp8"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_find_quantisation_names_what_it_rejects(name) -> None:
    config, message = REJECTED[name]
    with pytest.raises(UnsupportedConfigError, match=message) as raised:
        find(config)
    assert str(raised.value).startswith("LlamaConfig: quantization_config")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq"),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "fp8",
        ),
    ],
)
def test_read_quantisation_reads_files_of_older_tools(tmp_path, file, content, name) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_quantisation(tmp_path) is None
    (tmp_path / file).write_text(json.dumps(content))
    quantisation = read_quantisation(tmp_path)
    assert quantisation is not None
    format = quantisation.format_of(PROJECTION)
    assert format is not None and format.name == name
    # The config of the model takes precedence.
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    quantisation = read_quantisation(tmp_path)
    assert quantisation is not None
    assert quantisation.format_of(PROJECTION) == Fp8Format((128, 128))
    (tmp_path / "config.json").unlink()
    (tmp_path / file).write_text(json.dumps({**content, "quantization": {}, "bits": 5, "w_bit": 5}))
    with pytest.raises(UnsupportedConfigError, match=file):
        read_quantisation(tmp_path)


def test_schemes_of_a_kv_cache_are_accepted() -> None:
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    assert find({**compressed(), "kv_cache_scheme": scheme}) == find(compressed())
    modelopt = PUBLISHED["ModelOpt FP8"][0]
    assert find({**modelopt, "kv_cache_quant_algo": "FP8"}) == find(modelopt)
    assert find({**FP8, "kv_cache_scheme": scheme}) == find(FP8)


# For each method, a config with names of modules that stay unquantised, and the regular expression
# by which its tool compares such a name.
_EXCLUDING = {
    "compressed": (lambda names: {**compressed(), "ignore": names}, "{}$"),
    "fp8": (
        lambda names: {**FP8, "modules_to_not_convert": names},
        r"(?:.*\.)?(?:{})(?:\.|$)",
    ),
}


@pytest.mark.parametrize("method", _EXCLUDING)
def test_many_excluded_modules_are_found_fast(method) -> None:
    """The results are those of one regular expression for each name, without their cost."""
    excluding, expression = _EXCLUDING[method]
    names = [f"model.layers.{n}.mlp.{kind}" for n in range(250) for kind in ("gate", "shared_gate")]
    quantisation = find(excluding([*names, r"re:.*\.visual\."]))
    modules = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(2) for e in range(5000)]
    start = time.process_time()
    assert {quantisation.excluding(module) for module in modules} == {None}
    assert {quantisation.format_of(module) is None for module in modules} == {False}
    assert time.process_time() - start < 1, "10,000 modules times 500 names"
    regexes = {name: re.compile(expression.format(re.escape(name))) for name in names}
    for module in (
        "model.layers.7.mlp.gate", "model.layers.7.mlp.gate.bias", "model.layers.77.mlp.gates",
        "inner.model.layers.7.mlp.shared_gate", "xmodel.layers.7.mlp.gate", "layers.7.mlp.gate",
    ):  # fmt: skip
        expected = [name for name, regex in regexes.items() if regex.match(module)]
        assert quantisation.excluding(module) == next(iter(expected), None), module
    assert quantisation.excluding("model.visual.blocks.0") == r"re:.*\.visual\."
