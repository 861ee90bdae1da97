"""Reading and writing Hugging Face configs."""

import dataclasses
import json
import re

import pytest

from paged_jax.cache.retention import AllTokens, LastTokens
from paged_jax.models.config import PerLayerTable, stored_defaults
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families.registry import FAMILIES
from paged_jax.models.layer_groups import KVShape
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.paged_model import create_cache
from paged_jax.models.parts.activation import Activation, SparseGate
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.experts import Experts
from paged_jax.models.parts.latent import LatentAttention, LatentSizes
from paged_jax.models.parts.mlp import Dense
from paged_jax.models.parts.norm import Norm
from paged_jax.models.parts.residual import LaurelSublayer
from paged_jax.models.parts.state_space import Mamba2
from paged_jax.models.parts.streams import ResidualStreams
from paged_jax.models.rope import QueryScale, RopeScaling
from tests.support import DATA, family_defaults, saved_configs
from tests.support.damage import DAMAGED, damage, places
from tests.support.families import CASES
from tests.support.real_checkpoints import REAL_CHECKPOINTS, save_real_config

_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_LLAMA = {"model_type": "llama", **_SIZES}
_MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2, **_SIZES}
_QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, **_SIZES}
_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 2, **_SIZES}


# Keys without which the default of transformers is not a supported model.
_REQUIRED = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "gemma4_text": {"vocab_size_per_layer_input": 32},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_state": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    # With the default, all layers are dense, and the experts belong to no layer.
    "deepseek_v3": {"first_k_dense_replace": 1},
}


def _of_family(model_type):
    """Return a small config of a family, with defaults for all optional keys."""
    sizes = {**_SIZES, **_REQUIRED.get(model_type, {})}
    return {"model_type": model_type, "num_key_value_heads": 2, **sizes}


def _with_images(model_type, text, **changes):
    """Return the config of a multimodal model around a small model of a family."""
    part = {**_of_family(text), **changes}
    return {"model_type": model_type, "text_config": part, "vision_config": {}}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _find(config, name):
    """Return a value of the first layer's attention, of its rotary embedding, or of the config."""
    attention = config.layers[0].get(Attention)
    return next(
        getattr(place, name)
        for place in (attention, attention.rope, config)
        if hasattr(place, name)
    )


_HEAD_NORM = HeadNorm(Norm(1e-6))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "meta-llama/Llama-3.1-8B",
            {
                "theta": 500000.0,
                "scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
                "head_dim": 128,
                "dtype": "bfloat16",
                "tie_word_embeddings": False,
            },
        ),
        ("a tuned Llama 2 7B", {"num_key_value_heads": 32, "head_dim": 128, "scaling": None}),
        (
            "cognitivecomputations/Dolphin3.0-Mistral-24B",
            {"window": None, "head_dim": 128, "eos_token_ids": (2, 131072)},
        ),
        (
            "deepcogito/cogito-v1-preview-qwen-14B",
            {"qkv_bias": True, "o_bias": False, "window": None, "eos_token_ids": (151645,)},
        ),
        ("a tuned Qwen3 14B", {"norm": _HEAD_NORM, "qkv_bias": False, "theta": 1000000.0}),
        ("google/gemma-2-9b-it", {"window": 4096, "head_dim": 256}),
    ],
)
def test_from_file_reads_configs_of_real_checkpoints(tmp_path, model, expected):
    config = LlamaConfig.from_file(save_real_config(model, tmp_path))
    assert {name: _find(config, name) for name in expected} == expected


@pytest.mark.parametrize("model", REAL_CHECKPOINTS)
def test_to_dict_keeps_configs_of_real_checkpoints(tmp_path, model):
    config = LlamaConfig.from_file(save_real_config(model, tmp_path))
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("path", sorted((DATA / "configs-2026").iterdir()), ids=lambda x: x.stem)
def test_from_file_reads_configs_that_transformers_writes(path):
    stored, config = json.loads(path.read_text(encoding="utf-8")), LlamaConfig.from_file(path)
    assert config.model_type == stored["model_type"] == path.stem
    parts, sizes = config.replace(), ("vocab_size", "hidden_size", "num_attention_heads")
    assert [getattr(parts, key) for key in sizes] == [stored[key] for key in sizes]
    # With latent attention, all heads share one vector.
    is_latent = any(layer.find(LatentAttention) for layer in config.layers)
    assert parts.num_key_value_heads == (1 if is_latent else stored["num_key_value_heads"])
    num_layers = stored.get("num_hidden_layers") or len(stored["layers_block_type"])
    assert config.num_hidden_layers == num_layers
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("case", saved_configs.CASES)
def test_from_dict_reads_configs_with_the_layers_of_real_models(case):
    """Keys of layers have two digits. No entry causes a warning."""
    stored = saved_configs.read()[case]
    config = LlamaConfig.from_dict(stored["config"])
    shapes = config.kv_shapes
    is_latent = any(layer.find(LatentAttention) for layer in config.layers)
    # Layers without attention have the heads of the others in the files of transformers.
    heads = [kv and [kv.head_dim, kv.num_kv_heads] for kv in shapes]
    stored_heads = [each if kv else None for each, kv in zip(stored["heads"], shapes, strict=False)]
    assert stored_heads == ([] if is_latent else heads)
    assert len(shapes) >= 16


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("case", saved_configs.CASES)
def test_transformers_saves_the_stored_configs(case):
    pytest.importorskip("transformers")
    assert saved_configs.compute(case) == saved_configs.read()[case]


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("model", REAL_CHECKPOINTS)
def test_from_dict_reads_real_configs_that_transformers_has_saved_again(model):
    transformers = pytest.importorskip("transformers")
    original = REAL_CHECKPOINTS[model]["config"]
    theirs = transformers.AutoConfig.for_model(**original)
    config = LlamaConfig.from_dict(saved_configs.save(theirs))
    assert config == LlamaConfig.from_dict(original)


def test_from_dict_reads_values_of_single_layers():
    """As transformers: values that equal the model's own, and empty lists, have no effect."""
    given = {**_QWEN2, "num_hidden_layers": 12}
    same = {"07": {"num_key_value_heads": 2, "skip": []}, "11": {}}
    config = LlamaConfig.from_dict({**given, "per_layer_config": same})
    assert config == LlamaConfig.from_dict(given)
    glm, gemma = ({**_of_family(name), "num_hidden_layers": 12} for name in ("glm", "gemma4_text"))
    head_dim = LlamaConfig.from_dict(gemma).head_dim
    assert [kv.head_dim for kv in LlamaConfig.from_dict(gemma).kv_shapes[4:6]] == [head_dim, 512]
    for nothing in (None, {}):
        config = LlamaConfig.from_dict({**gemma, "per_layer_config": nothing})
        assert {kv.head_dim for kv in config.kv_shapes} == {head_dim}
    for base, layers, message in (
        (given, {"03": {"intermediate_size": 40}}, "single layers for Qwen2.* for layer 3"),
        (glm, {"03": {"intermediate_size": 40}}, "single layers for Glm.* for layer 3"),
        (given, {"9": {"skip": ["mlp"]}}, "single layers .* for layer 9"),
        (given, {"9": {"unheard_of": 2}}, "single layers .* for layer 9"),
        (given, {"12": {}}, "numbers of layers below 12, got '12'"),
        (given, {"-1": {}}, "numbers of layers below 12, got '-1'"),
        (gemma, {"05": {"head_dim": 64}}, "the same values to all layers without a sliding"),
        (gemma, {"04": {"head_dim": 64}}, "no values to other layers"),
        (gemma, {"05": {"v_dim": 1}, "11": {"v_dim": 1}}, "head_dim and num_key.*, got v_dim"),
    ):
        with pytest.raises(ValueError, match=f"LlamaConfig: .*per_layer_config.*{message}"):
            LlamaConfig.from_dict({**base, "per_layer_config": layers})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_from_dict_names_entries_that_it_does_not_read(model_type):
    given = {**_of_family(model_type), "logits_mup_width_multiplier": 0.5, "use_value_bias": True}
    with pytest.warns(UserWarning) as warned:
        config = LlamaConfig.from_dict(given)
    [message] = [str(each.message) for each in warned]
    assert message == (
        "LlamaConfig: config.json must only contain known entries, got "
        "logits_mup_width_multiplier, use_value_bias. They are ignored: check that "
        f"{FAMILIES[model_type].architecture} works without them."
    )
    assert config == LlamaConfig.from_dict(_of_family(model_type))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**_LLAMA, "temperature": 0.6, "top_p": 1.0}, "config.json .* got temperature. They"),
        ({**_LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}}, "got alpha"),
        (
            {**_of_family("kimi_linear"), "linear_attn_config": {"num_heads": 4, "gate_bound": 1}},
            "linear_attn_config .* got gate_bound",
        ),
        ({"model_type": "gemma3", "text_config": {**_of_family("gemma3_text"), "x": 1}}, "got x"),
        (
            {**_of_family("minimax_m2"), "attn_type_list": [1, 0, 1], "use_mtp": True},
            "got attn_type_list. They",
        ),
    ],
)
def test_from_dict_names_entries_of_objects_and_unusual_values(config, named):
    with pytest.warns(UserWarning, match=named):
        LlamaConfig.from_dict(config)


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("lfm2", {"block_norm_eps": 1e-5, "theta": 1e6, "use_pos_enc": True, "conv_dim": 16}),
        ("nemotron_h", {"norm_eps": 1e-5, "n_shared_experts": 1, "expand": 2}),
        ("kimi_linear", {"moe_layer_freq": 1, "use_grouped_topk": True}),
        ("minimax_m2", {"attn_type_list": [1, 1, 1], "num_mtp_modules": 3}),
        ("qwen2", {"use_mrope": False, "unsloth_version": "2025.1", "top_k": 50, "max_length": 20}),
    ],
)
def test_from_dict_knows_harmless_entries_of_published_files(model_type, entries):
    """They cause no warning, and change nothing."""
    config = _of_family(model_type)
    assert LlamaConfig.from_dict({**config, **entries}) == LlamaConfig.from_dict(config)


def test_from_dict_reads_the_other_names_of_entries():
    """transformers maps these names to the names in the files of the family."""
    kimi = {"num_experts_per_tok": 4, "n_group": 2, "n_shared_experts": 3, "norm_topk_prob": False}
    config = LlamaConfig.from_dict({**_of_family("kimi_linear"), **kimi})
    experts = config.layers[-1].get(Experts)
    assert (experts.num_chosen, experts.router.num_groups) == (4, 2)
    assert experts.shared is not None and experts.shared.features == 3 * experts.features
    assert not experts.renormalises
    names = ["mamba", "attention", "mamba"]
    granite = _of_family("granitemoehybrid")
    config = LlamaConfig.from_dict({**granite, "layers_block_type": names})
    assert config == LlamaConfig.from_dict({**granite, "layer_types": names})
    changes = {"layer_types": ["mamba", "mlp"], "time_step_limit": [0.01, 0.1]}
    nemotron = LlamaConfig.from_dict({**_of_family("nemotron_h"), **changes})
    assert nemotron.num_hidden_layers == 2
    assert nemotron.layers[0].get(Mamba2).time_limits == (0.01, 0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-2-7b-hf", {"num_key_value_heads": 32, "dtype": "float16", "head_dim": 128}),
        (
            "Llama-3.1-8B",
            {"theta": 500000.0, "scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)},
        ),
        ("Llama-3.2-1B", {"tie_word_embeddings": True, "head_dim": 64}),
        ("Meta-Llama-3-8B-Instruct", {"eos_token_ids": (128009,), "scaling": None}),
        ("Mistral-7B-v0.1", {"window": 4096, "model_type": "mistral"}),
        ("Qwen2.5-0.5B-Instruct", {"qkv_bias": True, "o_bias": False, "window": None}),
        ("Qwen3-0.6B", {"norm": _HEAD_NORM, "qkv_bias": False, "head_dim": 128}),
        ("SmolLM2-135M", {"initializer_range": 0.041666666666666664, "theta": 100000.0}),
        ("TinyLlama-1.1B-Chat-v1.0", {"dtype": "float32", "num_key_value_heads": 4}),
    ],
)
@pytest.mark.slow
def test_from_file_reads_real_configs(data_dir, name, expected):
    config = LlamaConfig.from_file(data_dir / "configs" / name)
    assert {name: _find(config, name) for name in expected} == expected


@pytest.mark.slow
def test_from_file_reads_every_real_config(data_dir):
    folders = sorted(path.parent for path in (data_dir / "configs").glob("*/config.json"))
    assert len(folders) >= 9
    for folder in folders:
        config = LlamaConfig.from_file(folder / "config.json")
        assert LlamaConfig.from_dict(config.to_dict()) == config


def test_from_dict_fills_in_the_defaults_of_transformers():
    config = LlamaConfig.from_dict(_LLAMA)
    assert (
        config
        == LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=4,
            max_position_embeddings=2048,
            rms_norm_eps=1e-6,
            bos_token_id=1,
            eos_token_ids=(2,),
        ).replace()
    )
    mistral = LlamaConfig.from_dict(_MISTRAL)
    assert mistral.sliding_windows == (4096,) * 3
    assert mistral.max_position_embeddings == 131072
    whole = LlamaConfig.from_dict({**_MISTRAL, "sliding_window": None})
    assert whole.sliding_windows == (None,) * 3
    assert LlamaConfig.from_dict(_QWEN2).eos_token_ids == ()
    assert LlamaConfig.from_dict(_QWEN3).head_dim == 128


@pytest.mark.peers
# Importing transformers takes seconds.
@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_from_dict_defaults_equal_those_of_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    config = _of_family(model_type)
    theirs = transformers.AutoConfig.for_model(**config).to_dict()
    assert LlamaConfig.from_dict(theirs) == LlamaConfig.from_dict(config)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("model_type", family_defaults.MODEL_TYPES)
def test_stored_defaults_are_those_of_transformers(model_type):
    assert stored_defaults(model_type) == family_defaults.compute(model_type)


@pytest.mark.peers
@pytest.mark.slow
def test_from_dict_defaults_of_gemma3_need_no_sizes():
    """Real files contain only these keys. They lack the numbers of heads."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    part = {**sizes, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    given = {"model_type": "gemma3", "text_config": {**part, "model_type": "gemma3_text"}}
    theirs = transformers.AutoConfig.for_model("gemma3_text", **part).to_dict()
    assert LlamaConfig.from_dict(theirs) == LlamaConfig.from_dict(given)


def test_from_dict_reads_a_model_type_from_the_architecture():
    assert LlamaConfig.from_dict({**_SIZES, "architectures": ["LlamaForCausalLM"]}) == (
        LlamaConfig.from_dict(_LLAMA)
    )


# As on the Hub, where the entries of the text model are beside those for images.
_QWEN25_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {"depth": 32, "hidden_size": 1280, "model_type": "qwen2_5_vl"},
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "vocab_size": 152064,
}


@pytest.mark.parametrize("has_text_config", [True, False])
def test_from_dict_reads_qwen25_vl_as_qwen2(has_text_config):
    outer = {"model_type": "qwen2_5_vl", "vision_config": {}, "tie_word_embeddings": False}
    inner = {**_QWEN25_VL, "model_type": "qwen2_5_vl_text", "architectures": None}
    text = {key: x for key, x in inner.items() if not re.search("image|video|vision", key)}
    config = {**outer, "text_config": text} if has_text_config else _QWEN25_VL
    expected = {**text, "model_type": "qwen2", "rope_scaling": None}
    assert LlamaConfig.from_dict(config) == LlamaConfig.from_dict(expected)


def test_from_dict_reads_kimi_k25_as_deepseek_v3():
    text = {**_of_family("deepseek_v3"), "architectures": ["DeepseekV3ForCausalLM"]}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "text_config": {**text, "model_type": "kimi_k2"},
        "vision_config": {"mm_projector_type": "patchmerger"},
    }
    assert LlamaConfig.from_dict(config) == LlamaConfig.from_dict(text)


@pytest.mark.parametrize(
    ("model_type", "text", "outer", "inner", "expected"),
    [
        ("llava", "llama", None, None, False),
        ("llava", "llama", True, False, True),
        ("llava", "llama", False, True, False),
        ("llava", "llama", None, True, True),
        ("gemma3", "gemma3_text", None, None, True),
        ("gemma3", "gemma3_text", None, False, True),
    ],
)
def test_from_dict_ties_embeddings_as_the_whole_model_says(
    model_type, text, outer, inner, expected
):
    """Without an entry of the whole model, those of the family are usual."""
    config = _with_images(model_type, text)
    if outer is not None:
        config["tie_word_embeddings"] = outer
    if inner is not None:
        config["text_config"]["tie_word_embeddings"] = inner
    assert LlamaConfig.from_dict(config).tie_word_embeddings is expected


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaModel"), ("qwen3", "Qwen3Model"), ("gemma3_text", "Gemma3TextModel")],
)
def test_from_dict_reads_architectures_without_a_head(model_type, architecture):
    config = _of_family(model_type)
    given = {**config, "architectures": [architecture]}
    assert LlamaConfig.from_dict(given) == LlamaConfig.from_dict(config)
    images = {"model_type": "gemma3", "text_config": _of_family("gemma3_text")}
    with_base = LlamaConfig.from_dict({**images, "architectures": ["Gemma3Model"]})
    assert with_base == LlamaConfig.from_dict(images)


def test_from_dict_reads_the_rope_parameters_of_transformers_5():
    old = {**_LLAMA, "rope_theta": 5e5, "rope_scaling": _LLAMA3_ROPE, "torch_dtype": "bfloat16"}
    new = {**_LLAMA, "rope_parameters": {**_LLAMA3_ROPE, "rope_theta": 5e5}, "dtype": "bfloat16"}
    config = LlamaConfig.from_dict(new)
    assert config == LlamaConfig.from_dict(old)
    assert config.ropes[0].theta == 5e5
    assert config.ropes[0].scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert config.dtype == "bfloat16"
    default = {**_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}
    [rope] = {*LlamaConfig.from_dict(default).ropes}
    assert (rope.theta, rope.scaling) == (7e3, None)


def test_from_dict_prefers_the_original_length_outside_of_the_scaling():
    """As transformers, for all families."""
    file = {**_LLAMA, "rope_scaling": _LLAMA3_ROPE, "original_max_position_embeddings": 32}
    [rope] = {*LlamaConfig.from_dict(file).ropes}
    assert rope.scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_from_dict_reads_context_lengths_that_are_floats():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    whole = {**_LLAMA, "max_position_embeddings": 2048, "rope_scaling": yarn}
    floats = {
        **whole,
        "max_position_embeddings": 2048.0,
        "rope_scaling": {**yarn, "original_max_position_embeddings": 512.0},
    }
    config = LlamaConfig.from_dict(floats)
    assert config == LlamaConfig.from_dict(whole)
    assert type(config.max_position_embeddings) is int
    with pytest.raises(ValueError, match="max_position_embeddings must be an integer, got 1024.5"):
        LlamaConfig.from_dict({**_LLAMA, "max_position_embeddings": 1024.5})


def test_from_dict_reads_the_type_key_of_old_rope_scaling():
    config = LlamaConfig.from_dict({**_LLAMA, "rope_scaling": {"type": "linear", "factor": 2}})
    assert config.ropes[0].scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(("given", "expected"), [(5, (5,)), ([5, 7], (5, 7)), (None, ()), ([], ())])
def test_from_dict_reads_one_or_several_eos_tokens(given, expected):
    config = LlamaConfig.from_dict({**_LLAMA, "eos_token_id": given})
    assert config.eos_token_ids == expected
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("base", "o_bias"), [(_LLAMA, True), (_QWEN3, True), (_QWEN2, False)])
def test_from_dict_reads_attention_bias_of_each_family(base, o_bias):
    config = LlamaConfig.from_dict({**base, "attention_bias": True})
    attention = config.layers[0].get(Attention)
    assert (attention.qkv_bias, attention.o_bias) == (True, o_bias)


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"])
def test_from_dict_reads_other_names_of_activations(name):
    for model_type in ("llama", "granitemoehybrid"):
        config = LlamaConfig.from_dict({**_of_family(model_type), "hidden_act": name})
        mlp = config.layers[0].find(Dense) or config.layers[0].get(Experts)
        assert mlp.activation.name == "gelu_pytorch_tanh"
    config = LlamaConfig.from_dict({**_LLAMA, "hidden_act": "gelu_python"})
    assert config.layers[0].get(Dense).activation.name == "gelu"


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"use_sliding_window": False}, (None, None, None)),
        ({"max_window_layers": 3}, (None, None, None)),
        ({"max_window_layers": 0}, (8, 8, 8)),
        ({"max_window_layers": 1}, (None, 8, 8)),
        ({"layer_types": ["sliding_attention"] * 3}, (8, 8, 8)),
        ({"layer_types": ["full_attention"] * 3}, (None, None, None)),
        (
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
)
def test_from_dict_reads_the_sliding_windows_of_qwen(keys, windows):
    given = {**_QWEN2, "sliding_window": 8, "use_sliding_window": True, **keys}
    config = LlamaConfig.from_dict(given)
    assert config.sliding_windows == windows
    assert config.can_scan_layers == (len(set(windows)) == 1)
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("model_type", "keys", "windows"),
    [
        ("gemma2", {}, (8, None, 8)),
        ("gemma3_text", {"sliding_window_pattern": 2}, (8, None, 8)),
        ("gemma3_text", {}, (8, 8, 8)),
        ("olmo3", {"layer_types": ["full_attention"] * 3}, (None, None, None)),
        ("cohere2", {"sliding_window_pattern": 3}, (8, 8, None)),
        ("smollm3", {"use_sliding_window": True, "no_rope_layer_interval": 2}, (None, 8, None)),
        ("smollm3", {"use_sliding_window": True, "no_rope_layers": [1, 1, 0]}, (None, None, 8)),
        ("smollm3", {}, (None, None, None)),
        ("phi3", {}, (8, 8, 8)),
    ],
)
def test_from_dict_reads_the_windows_of_each_family(model_type, keys, windows):
    config = LlamaConfig.from_dict({**_of_family(model_type), "sliding_window": 8, **keys})
    assert config.sliding_windows == windows
    assert LlamaConfig.from_dict(config.to_dict()) == config


def test_layer_groups_start_with_the_group_that_keeps_most():
    types = ("sliding_attention", "full_attention", "sliding_attention")
    config = dataclasses.replace(_SMALL, layer_types=types, sliding_window=5)
    whole, last = AllTokens(), LastTokens(5)
    [local] = set(config.kv_shapes)
    kept = local, ()
    assert config.layer_groups == ((whole, (1,), *kept), (last, (0, 2), *kept))
    assert dataclasses.replace(_SMALL, sliding_window=5).layer_groups == ((last, (0, 1, 2), *kept),)
    assert _SMALL.layer_groups == ((whole, (0, 1, 2), *kept),)
    wide = KVShape(1, 24, 24)
    config = dataclasses.replace(config, global_head_dim=24, num_global_key_value_heads=1)
    assert config.layer_groups == ((whole, (1,), wide, ()), (last, (0, 2), *kept))


def test_layers_have_their_own_sizes():
    config = dataclasses.replace(
        _SMALL, layer_types=("sliding_attention", "full_attention", "full_attention"),
        sliding_window=5, global_head_dim=24, num_global_key_value_heads=1, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=10,
        mlp_layer_types=("dense", "dense", "sparse"),
    )  # fmt: skip
    assert not config.can_scan_layers
    attention = [layer.find(Attention) for layer in config.layers]
    assert [part.head_dim for part in attention] == [_SMALL.head_dim, 24, 24]
    assert [part.num_kv_heads for part in attention] == [_SMALL.num_key_value_heads, 1, 1]
    dense, other, experts = (layer.find(Dense) or layer.find(Experts) for layer in config.layers)
    assert dense == other and dense.features == _SMALL.intermediate_size
    assert (experts.num_experts, experts.features, experts.shared.features) == (4, 6, 10)
    shared = dataclasses.replace(config, num_kv_shared_layers=1)
    assert (shared.kv_sources, shared.layers[2].find(Attention).num_kv_rows) == ((0, 1, 1), 0)
    assert [group.layers for group in shared.layer_groups] == [(1,), (0,)]
    with pytest.raises(ValueError, match="must leave at least one layer of type 'full_attention'"):
        dataclasses.replace(config, num_kv_shared_layers=2)
    assert [rope.head_dim for rope in config.ropes] == [_SMALL.head_dim, 24, 24]
    # Equal layers are the same object.
    assert _SMALL.can_scan_layers and len({*map(id, _SMALL.layers)}) == 1


def test_from_dict_reads_the_streams_and_lists_of_gemma_3n():
    given = {**_of_family("gemma3n_text"), "num_hidden_layers": 12, "num_kv_shared_layers": 0}
    config = LlamaConfig.from_dict(given)
    assert config.streams == ResidualStreams(4, 0, True)
    gates = [layer.get(Dense).activation for layer in config.layers]
    assert (
        gates
        == [SparseGate("gelu_pytorch_tanh", 0.95)] * 10 + [Activation("gelu_pytorch_tanh")] * 2
    )
    assert config.per_layer == PerLayerTable(256, 262144)
    assert config.layers[0].get(LaurelSublayer).rank == 64
    lists = {
        "intermediate_size": [24] * 11 + [40],
        "activation_sparsity_pattern": [0.0] * 12,
        "vocab_size_per_layer_input": 32,
    }
    config = LlamaConfig.from_dict({**given, **lists})
    mlps = [layer.get(Dense) for layer in config.layers]
    assert [mlp.features for mlp in mlps] == [24] * 11 + [40]
    assert {mlp.activation for mlp in mlps} == {Activation("gelu_pytorch_tanh")}
    assert config.per_layer == PerLayerTable(256, 0), "as many as the vocabulary"
    assert LlamaConfig.from_dict(config.to_dict()) == config
    for key, value, message in (
        ("intermediate_size", [1, 2], "integer, or a list of 12 of them, one for each layer"),
        ("intermediate_size", [0] * 12, "a positive integer"),
        ("activation_sparsity_pattern", [1, 2], "a list of 12 numbers"),
        ("activation_sparsity_pattern", [1.0] * 12, "of at least 0 and less than 1"),
        ("altup_num_inputs", 1, "at least 2"),
        ("altup_active_idx", 4, "at least 0 and less than altup_num_inputs"),
        ("laurel_rank", 0, "a positive integer"),
        ("num_kv_shared_layers", 13, "0 to num_hidden_layers"),
        ("num_kv_shared_layers", 8, "at least one layer of type 'full_attention'"),
    ):
        with pytest.raises(ValueError, match=f"LlamaConfig: .*{key}.* {message}"):
            LlamaConfig.from_dict({**given, key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_head_dim": 25}, "global_head_dim must be even"),
        ({"global_head_dim": -2}, "global_head_dim must be a positive integer"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_attention_heads must be a multiple of num_global_key_value_heads",
        ),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input must be 0 or more"),
        ({"vocab_size_per_layer_input": 31}, "vocab_size_per_layer_input must equal vocab_size"),
    ],
)
def test_from_dict_rejects_sizes_of_gemma_4(change, message):
    with pytest.raises(ValueError, match=f"LlamaConfig: {message}"):
        LlamaConfig.from_dict({**_of_family("gemma4_text"), **change})


def test_from_dict_reads_the_rotation_of_gemma_4():
    """Without `rope_parameters`, or with null, layers rotate as by default."""
    given = {**_of_family("gemma4_text"), "num_hidden_layers": 6}
    proportional = RopeScaling("proportional", 1.0)
    for change in ({}, {"rope_parameters": None}, {"partial_rotary_factor": 0.5}):
        *_, local, rope = LlamaConfig.from_dict({**given, **change}).ropes
        assert (rope.head_dim, rope.rotary_dim) == (512, 128)
        assert (rope.theta, rope.scaling) == (1e6, proportional)
        assert (local.rotary_dim, local.theta, local.scaling) == (local.head_dim, 1e4, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_sparsity": (1.0,) * 3}, "must be at least 0 and less than 1"),
        ({"residual_streams": ResidualStreams(2, 2)}, "count must be at least 2"),
        ({"intermediate_sizes": (64, 0, 64)}, "intermediate_size must be a positive integer"),
    ],
)
def test_config_rejects_values_of_gemma_3n(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_SMALL, **change)


def test_from_dict_reads_the_chunks_of_llama_4():
    given = {**_of_family("llama4_text"), "num_hidden_layers": 5, "head_dim": 8}
    config = LlamaConfig.from_dict({**given, "attention_chunk_size": 24, "no_rope_layers": []})
    chunked = ["chunked_attention"] * 3
    assert config.to_dict()["layer_types"] == [*chunked, "full_attention", "chunked_attention"]
    assert config.sliding_windows == config.attention_chunks == (24, 24, 24, None, 24)
    attentions = [layer.get(Attention) for layer in config.layers]
    rotates = [True, True, True, False, True]
    assert [attention.rope is not None for attention in attentions] == rotates
    assert [attention.norm is not None for attention in attentions] == rotates
    scale = QueryScale(0.1, 8192, offset=1, only_without_rope=True)
    assert [attention.query_scale for attention in attentions] == [None, None, None, scale, None]
    # Without chunks, all layers attend to all tokens.
    whole = LlamaConfig.from_dict({**given, "attention_chunk_size": None})
    assert whole.attention_chunks == (None,) * 5
    assert whole.to_dict()["layer_types"] == ["full_attention"] * 5
    other = {"interleave_moe_layer_step": 2, "attn_temperature_tuning": False}
    config = LlamaConfig.from_dict({**given, **other})
    has_experts = [layer.experts is not None for layer in config.layers]
    assert has_experts == [False, True, False, True, False]
    assert {layer.get(Attention).query_scale for layer in config.layers} == {None}
    kinds = ["chunked_attention"] * 5
    for change, message in (
        ({"layer_types": kinds, "attention_chunk_size": None}, "attention_chunk_size must be an"),
        ({"layer_types": ["sliding_attention"] * 5}, "'chunked_attention', got 'sliding_attent"),
        ({"attention_chunk_size": 0}, "attention_chunk_size must be positive"),
        ({"moe_layers": 3}, "moe_layers must be a list of layer indices"),
        ({"intermediate_size_mlp": 0}, "intermediate_size_mlp must be a positive"),
    ):
        with pytest.raises(ValueError, match=f"LlamaConfig: .*{message}"):
            LlamaConfig.from_dict({**given, **change})
    for chunk, message in (
        (None, "LlamaConfig: attention_chunk_size must be an integer if"),
        (0, "Attention: chunk must be a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(_SMALL, layer_types=tuple(kinds[:3]), attention_chunk_size=chunk)
    with pytest.raises(
        ValueError, match="block_size must divide the model's attention_chunk_size of 8192"
    ):
        create_cache(config, num_slots=1, max_length=48, block_size=24)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**_SIZES, "model_type": "gpt2"}, "gpt2"),
        ({**_LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "SequenceClass"),
        ({**_LLAMA, "hidden_act": "tanh"}, "hidden_act"),
        ({**_LLAMA, "rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({**_LLAMA, "rope_parameters": {"rope_type": "axial"}}, "axial"),
        ({**_LLAMA, "rope_parameters": {"rope_type": ["yarn"]}}, "rope_type"),
        ({**_LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "the same for"),
        ({**_LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {
                **_LLAMA,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            "rope_scaling must be null or agree with rope_parameters",
        ),
        (
            {
                **_of_family("gemma3_text"),
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                },
            },
            "rope_scaling must be null or agree with rope_parameters",
        ),
        (
            {**_of_family("gemma3_text"), "rope_parameters": {"rope_theta": 1e5}},
            "rope_parameters must have the keys",
        ),
        (
            {
                **_of_family("olmo3"),
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                },
            },
            "rope_parameters of 'sliding_attention' must have rope_type 'default', or equal",
        ),
        *[
            ({**_of_family("gemma4_text"), **change}, message)
            for change, message in (
                ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must be null"),
                ({"rope_parameters": {"rope_theta": 1e5}}, "keys of rope_parameters must be"),
                (
                    {"rope_parameters": {"full_attention": {"rope_theta": 1e5}}},
                    "rope_parameters must have the keys",
                ),
                (
                    {
                        "rope_parameters": {
                            "full_attention": {"partial_rotary_factor": 0.5},
                            "sliding_attention": {"rope_theta": 1e4},
                        }
                    },
                    "partial_rotary_factor must be 1",
                ),
                (
                    {
                        "rope_parameters": {
                            "full_attention": {"rope_theta": 1e5},
                            "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                        }
                    },
                    "rope_parameters of 'sliding_attention' must have rope_type 'default'",
                ),
            )
        ],
        ({**_LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**_LLAMA, "rope_interleaved": True}, "rope_interleaved"),
        ({**_MISTRAL, "mlp_bias": True}, "mlp_bias"),
        ({**_LLAMA, "sliding_window": 8}, "sliding_window"),
        ({**_LLAMA, "quantization_config": {"quant_method": "hqq"}}, "quantization_config.* 'hqq'"),
        ({**_LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**_LLAMA, "quantization": {"group_size": 64, "bits": 3}}, "quantization.bits"),
        ({**_LLAMA, "compression_config": {"format": "marlin-24"}}, "compression_config"),
        ({**_LLAMA, "is_causal": False}, "is_causal"),
        ({**_QWEN3, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**_MISTRAL, "add_cross_attention": True}, "add_cross_attention"),
        (
            {
                "model_type": "gemma3",
                "text_config": {**_of_family("gemma3_text"), "final_logit_softcapping": 3.0},
            },
            r"logits \(final_logit_softcapping\) must be None in the multimodal model 'gemma3'",
        ),
        (_with_images("cohere2_vision", "cohere2"), r"logits \(such as logit_scale\) must be 1.0"),
        (_with_images("paligemma", "gemma"), "'paligemma' is not supported: all tokens of a"),
        (_with_images("mllama", "mllama_text_model"), "'mllama' is not supported: its cross-atten"),
        (_with_images("glm4v", "glm4v_text"), "model_type 'glm4v_text' is not supported"),
        (
            _with_images("qwen3_vl_moe", "qwen3_vl_moe_text", norm_topk_prob=False),
            "norm_topk_prob must be true",
        ),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"]},
            "architecture 'Gemma3ForSequenceClassification'",
        ),
        ({**_LLAMA, "torch_dtype": "float8_e4m3fn"}, "float8"),
        ({**_LLAMA, "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({**_MISTRAL, "attention_bias": True}, "attention_bias"),
        *[
            ({**_of_family(model_type), key: value}, named or key)
            for model_type, key, value, named in (
                ("llama", "attention_multiplier", 0.5, None),
                ("llama", "embedding_multiplier", 2.0, None),
                ("llama", "residual_multiplier", 0.5, None),
                ("llama", "logits_scaling", 8.0, None),
                ("llama", "final_logit_softcapping", 30.0, None),
                ("mistral", "logit_scale", 0.5, None),
                ("qwen3", "query_pre_attn_scalar", 256, None),
                ("gemma2", "use_bidirectional_attention", True, None),
                ("gemma2", "hidden_activation", "tanh", "hidden_act"),
                ("gemma3_text", "attn_logit_softcapping", 50.0, None),
                ("phi3", "attention_bias", True, None),
                ("olmo2", "sliding_window", 8, None),
                ("olmo3", "layer_types", ["linear_attention"] * 3, "linear_attention"),
                ("glm4", "mlp_bias", True, None),
                ("glm4", "sliding_window", 8, None),
                ("cohere2", "use_qk_norm", True, None),
                ("cohere2", "use_parallel_block", False, None),
                ("cohere2", "use_gated_activation", False, None),
                ("cohere2", "rotary_pct", 0.25, None),
            )
        ],
    ],
)
def test_from_dict_names_unsupported_features(config, named):
    with pytest.raises(UnsupportedConfigError, match=named) as raised:
        LlamaConfig.from_dict(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *[({key: None}, f"{key} is missing") for key in _SIZES],
        ({"vocab_size": "32"}, "vocab_size must be an integer"),
        ({"hidden_size": 16.0}, "hidden_size must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"num_attention_heads": 3}, "hidden_size must be a multiple"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        *[
            (
                {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": size}},
                "original_max_position_embeddings must be an integer of at least 2",
            )
            for size in (0, 1, -8, 10**400)
        ],
        ({"model_type": "granite", "logits_scaling": 1e-320}, "logits_scaling must be positive"),
        ({"rope_scaling": {**_LLAMA3_ROPE, "low_freq_factor": 4.5}}, "low_freq_factor must be"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures must only contain classes of"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types must have one name for each of the 3 layers",
        ),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types must be a list of strings"),
        (
            {**_MISTRAL, "layer_types": ["full_attention"] * 3},
            "sliding_window must be null if layer_types contains 'full_attention', got 4096",
        ),
        ({**_MISTRAL, "sliding_window": 0}, "sliding_window must be positive or null"),
        ({"model_type": "gemma2", "sliding_window_pattern": 0}, "sliding_window_pattern must be"),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "no_rope_layers must be a list with a number for each of the 3 layers",
        ),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval must be a positive integer",
        ),
        ({"model_type": "gemma3"}, "text_config must be a JSON object"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be"),
        ({"model_type": "granite", "logits_scaling": 0.0}, "logits_scaling must be"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "attn_logit_softcapping must"),
        ({"model_type": None}, "model_type is missing"),
    ],
)
def test_from_dict_rejects_malformed_configs(change, named):
    with pytest.raises(ValueError, match=named) as raised:
        LlamaConfig.from_dict({**_LLAMA, **change})
    assert "\n" not in str(raised.value)


def test_from_file_names_an_unreadable_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        LlamaConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        LlamaConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="JSON object"):
        LlamaConfig.from_file(tmp_path)


_SMALL = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-6, bos_token_id=1,
    eos_token_ids=(2,),
)  # fmt: skip


_OF_ALL_FAMILIES = pytest.mark.parametrize(
    "config",
    [
        _SMALL,
        dataclasses.replace(_SMALL, qkv_bias=True, o_bias=True, bos_token_id=None),
        dataclasses.replace(_SMALL, rope_scaling=RopeScaling("linear", 2.0), head_dim=8),
        dataclasses.replace(_SMALL, rope_scaling=RopeScaling("llama3", 2.0), dtype="bfloat16"),
        dataclasses.replace(_SMALL, model_type="mistral", sliding_window=5),
        dataclasses.replace(_SMALL, model_type="qwen2", qkv_bias=True, sliding_window=5),
        dataclasses.replace(_SMALL, model_type="qwen3", qk_norm=True, eos_token_ids=(3, 4)),
        *[LlamaConfig.from_dict(_of_family(model_type)) for model_type in FAMILIES],
        # The family has a default scaling, which null would select.
        LlamaConfig.from_dict(_of_family("gpt_oss") | {"rope_scaling": {"rope_type": "default"}}),
    ],
)


def _same(read, config):
    """Compare configs, of which `config` may have flat fields."""
    return read.replace() == config.replace()


@_OF_ALL_FAMILIES
def test_to_dict_is_inverse_to_from_dict(config):
    assert _same(LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))), config)


@pytest.mark.peers
@pytest.mark.slow
@_OF_ALL_FAMILIES
def test_to_dict_can_be_read_by_transformers(config):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(config.to_dict())))
    assert _same(LlamaConfig.from_dict(theirs.to_dict()), config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk_norm": True}, r"part\.norm must be None for model_type 'llama'"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"sliding_window": 4}, r"part\.window must be None"),
        ({"model_type": "mistral", "qkv_bias": True, "o_bias": True}, "qkv_bias"),
        ({"model_type": "qwen2"}, "qkv_bias"),
        ({"model_type": "other"}, "model_type"),
        ({"norm_placement": "post"}, r"steps\[0\]\.input_norm must be 'input_norm'"),
        ({"norm_type": "layer"}, r"norm\.kind must be 'rms'"),
        ({"norm_offset": 1.0}, r"norm\.offset must be 0"),
        ({"embedding_multiplier": 2.0}, "embedding_multiplier must be 1.0"),
        ({"attention_multiplier": 0.5}, r"part\.scale must be None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be None"),
        (
            {"model_type": "gemma2", "attention_multiplier": 0.5, "norm_offset": 1.0},
            "output_norm must be 'attention_out_norm'",
        ),
        ({"model_type": "olmo3", "qk_norm": True}, "norm.scope must be 'projection'"),
    ],
)
def test_to_dict_rejects_switches_that_no_family_has(change, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(_SMALL, **change).to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": ["llama"]}', "model_type must be a name"),
        ('{"a":' * 200_000, "nested too deeply"),
    ],
)
def test_from_file_explains_invalid_json(tmp_path, text, message) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_file(tmp_path)


def test_from_dict_reads_latent_attention() -> None:
    """The scores of DeepSeek V3 have a factor for its long contexts; pairs are neighbours."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    file = _of_family("deepseek_v3") | {"rope_scaling": yarn | {"beta_fast": 32, "beta_slow": 1}}
    config = LlamaConfig.from_dict(file)
    attention = config.layers[0].get(LatentAttention)
    assert attention.sizes == LatentSizes(1536, 512, 128, 64, 128)
    assert config.head_dim == 64 and attention.rope_interleaved
    assert attention.scale == pytest.approx(192**-0.5 * 1.8739, rel=1e-4)
    scaling = attention.rope.scaling
    assert scaling is not None and scaling.attention_factor == 1
    [group] = config.layer_groups
    assert group.kv == KVShape(num_kv_heads=1, head_dim=576, value_dim=0)
    assert LlamaConfig.from_dict(file | {"model_type": "kimi_k2"}) == config
    file |= {"rope_interleave": False, "q_lora_rank": None}
    without = LlamaConfig.from_dict(file).layers[0].get(LatentAttention)
    assert not without.rope_interleaved and without.sizes == LatentSizes(0, 512, 128, 64, 128)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa"])
def test_from_dict_refuses_sparse_attention(model_type) -> None:
    message = f"model_type '{model_type}' is not supported: its sparse attention"
    with pytest.raises(UnsupportedConfigError, match=message):
        LlamaConfig.from_dict(_of_family(model_type))
    with pytest.raises(UnsupportedConfigError, match="its sparse attention"):
        LlamaConfig.from_dict({"architectures": ["DeepseekV32ForCausalLM"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, got 0"),
        ({"q_lora_rank": -1}, "q_lora_rank must be 0 or more, got -1"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
    ],
)
def test_from_dict_checks_the_sizes_of_latent_attention(changes, message) -> None:
    with pytest.raises(ValueError, match=f"LlamaConfig: {message}"):
        LlamaConfig.from_dict(_of_family("deepseek_v3") | changes)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama", "olmoe"])
def test_from_dict_refuses_scaled_queries_in_most_families(model_type) -> None:
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    message = "LlamaConfig: llama_4_scaling_beta must be null for .*, got 0.1"
    with pytest.raises(UnsupportedConfigError, match=message):
        LlamaConfig.from_dict(_of_family(model_type) | {"rope_parameters": rope})


@pytest.mark.parametrize("model_type", ["gpt_oss", "mistral4"])
def test_from_dict_refuses_contradicting_scalings(model_type) -> None:
    """Also if the file repeats the default of the family, which `rope_scaling` replaces."""
    file = _of_family(model_type) | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert LlamaConfig.from_dict(file).ropes[0].scaling == RopeScaling("linear", 2.0)
    rope = dict(FAMILIES[model_type].defaults["rope_parameters"])
    with pytest.raises(UnsupportedConfigError, match="rope_scaling must be null or agree"):
        LlamaConfig.from_dict(file | {"rope_parameters": rope})


def test_latent_attention_checks_its_sizes() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    latent = LatentSizes(0, 32, 16, 8, 12)
    config = dataclasses.replace(_SMALL, **heads, latent=latent)
    for changes, message in (
        ({"latent": latent._replace(kv_lora_rank=0)}, "LatentAttention: kv_lora_rank must be"),
        ({"latent": latent._replace(q_lora_rank=-1)}, "q_lora_rank must be 0 or more"),
        ({"head_dim": 32}, "LlamaConfig: .*head_dim must equal qk_rope_head_dim"),
        ({"num_key_value_heads": 1}, "num_key_value_heads must equal num_attention_heads"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)


@pytest.mark.filterwarnings("ignore:LlamaConfig. .* must only contain known entries")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_damaged_entries_are_value_errors(case) -> None:
    """A wrong type anywhere in the file, such as in an object of an object."""
    defaults = FAMILIES[case.model_type].defaults
    file = {"model_type": case.model_type, "num_key_value_heads": 2, **_SIZES, **defaults}
    file = json.loads(json.dumps(file | case.changes))
    for place in places(file):
        for value in DAMAGED:
            try:
                LlamaConfig.from_dict(damage(file, place, value))
            except ValueError as error:
                assert "\n" not in str(error), (place, value)


def test_from_dict_reads_the_query_scale_of_early_files_of_mistral() -> None:
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536,
        "rope_theta": 1e6,
    }  # fmt: skip
    scale = {"original_max_position_embeddings": 8192, "beta": 0.2}
    config = LlamaConfig.from_dict({"model_type": "ministral3", **sizes, "llama_4_scaling": scale})
    assert config.layers[0].get(Attention).query_scale == QueryScale(0.2, 8192)
