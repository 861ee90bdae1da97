"""Models in GGUF files: the fixtures of llama.cpp's tools, and tiny models of each architecture.

The tiny models are saved as a Hugging Face folder, and as a GGUF file with the names of the package
`gguf`. Both must give the same config and logits.
"""

import contextlib
import dataclasses

import gguf
import jax
import numpy as np
import pytest

from paged_jax.kernels.norm_rope import ACTIVATIONS
from paged_jax.llm import LLM
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import UnsupportedConfigError, WeightsError
from paged_jax.models.gguf_config import read_gguf_config
from paged_jax.models.gguf_file import GgufError, GgufFile
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.loading.gguf_tensors import find_gguf_tensors
from paged_jax.models.loading.pretrained import read_config
from paged_jax.plan import main as plan
from paged_jax.sampling.params import SamplingParams
from paged_jax.serve import _name_of as server_name
from tests.support import DATA
from tests.support.gguf_files import SIZES, metadata_of, random_rows, tensors_of, write
from tests.support.random_model import random_llama

# As in tests/engine/test_quantised_models.py, so that engines share their programs.
ENGINE_SIZES = {"block_size": 4, "num_blocks": 22, "max_num_seqs": 4, "max_chunk": 16}
ENGINE_SIZES["max_model_len"] = 64
FIXTURES = ("gguf-mixed", "gguf-q4_0", "gguf-k-quants")
TOKENS = np.random.default_rng(0).integers(0, 64, (1, 20), np.int32)
WINDOW = 8
_WINDOWS = {"attention.sliding_window": WINDOW}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"original_max_position_embeddings": 64, "rope_type": "yarn"}
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_DELTA_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6,
    "ssm.inner_size": 96, "full_attention_interval": 4, "rope.dimension_sections": [1, 1, 0, 0],
}  # fmt: skip
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "tie_word_embeddings": True,
}
_GEMMA4_KEYS = {
    "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
    "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    "attention.sliding_window": WINDOW, "rope.freq_base_swa": 10000.0,
    "attention.sliding_window_pattern": [True, True, False] * 2, "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
}  # fmt: skip
_CONVOLUTIONS = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
}
_CONVOLUTION_KEYS = {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}
_GRANITE = {
    "model_type": "granitemoehybrid",
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
    "max_position_embeddings": 2**20,
}
_GRANITE_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 24, "ssm.group_count": 2, "ssm.time_step_rank": 8,
    "ssm.inner_size": 128, "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False,
    "attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.7,
}  # fmt: skip
# Architecture in GGUF, entries of config.json in addition to the common ones, and entries of GGUF.
CASES = {
    "llama": ("llama", {}, {}),
    "llama with biases": ("llama", {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "llama with defaults": (
        "llama",
        {"num_key_value_heads": 4, "rope_theta": 1e4},
        dict.fromkeys(
            ("attention.head_count_kv", "attention.key_length", "attention.value_length",
             "rope.freq_base", "rope.dimension_count"),
        ),
    ),
    "linear": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.factor": 4.0},
    ),
    "mixtral": (
        "llama",
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_feed_forward_length": None},
    ),
    "qwen2": ("qwen2", {"model_type": "qwen2", "rope_scaling": _YARN}, _YARN_KEYS),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 24}, {}),
    "qwen3moe": ("qwen3moe", {"model_type": "qwen3_moe", "norm_topk_prob": True} | _EXPERTS, {}),
    "gemma2": (
        "gemma2",
        {"model_type": "gemma2", "sliding_window": WINDOW, "query_pre_attn_scalar": 24},
        _WINDOWS,
    ),
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text",
            "sliding_window": WINDOW,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 24,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        _WINDOWS | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": (
        "phi3",
        {"model_type": "phi3", "sliding_window": WINDOW, "partial_rotary_factor": 0.5},
        _WINDOWS,
    ),
    "gpt-oss": (
        "gpt-oss",
        {
            "model_type": "gpt_oss",
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": _YARN | {"truncate": False},
        },
        _WINDOWS | _YARN_KEYS,
    ),
    "qwen35": ("qwen35", {"model_type": "qwen3_5_text", **_DELTA}, _DELTA_KEYS),
    "qwen35 with equal heads": (
        "qwen35",
        {"model_type": "qwen3_5_text", **_DELTA, "linear_num_value_heads": 2},
        _DELTA_KEYS
        | {"ssm.time_step_rank": 2, "ssm.inner_size": 32}
        | {"attention.recurrent_layers": [True, True, True, False]},
    ),
    "qwen35moe": (
        "qwen35moe",
        {
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 32,
            **_DELTA,
            **_EXPERTS,
        },
        _DELTA_KEYS | {"expert_shared_feed_forward_length": 32, "feed_forward_length": None},
    ),
    "gemma4": (
        "gemma4",
        {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        _GEMMA4_KEYS | {"attention.head_count_kv": [2, 2, 1, 2, 2, 1]},
    ),
    "gemma4 with embeddings per layer and shared keys": (
        "gemma4",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "final_logit_softcapping": 20.0,
        },
        _GEMMA4_KEYS
        | {
            "attention.shared_kv_layers": 3,
            "embedding_length_per_layer_input": 8,
            "feed_forward_length": [96, 96, 96, 192, 192, 192],
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4 with experts": (
        "gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        _GEMMA4_KEYS | {"feed_forward_length": 96},
    ),
    "glm4moe": (
        "glm4moe",
        {
            "model_type": "glm4_moe",
            **_EXPERTS,
            "use_qk_norm": True,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
        },
        {
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
        },
    ),
    "lfm2": (
        "lfm2",
        {"model_type": "lfm2", **_CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
        _CONVOLUTION_KEYS,
    ),
    "lfm2moe": (
        "lfm2moe",
        {"model_type": "lfm2_moe", **_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
        _CONVOLUTION_KEYS | {"expert_gating_func": 2, "leading_dense_block_count": 1},
    ),
    "granitehybrid": (
        "granitehybrid",
        {
            **_GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
        },
        _GRANITE_KEYS | {"feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
    ),
    "granitehybrid with a dense MLP": (
        "granitehybrid",
        {**_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
        _GRANITE_KEYS | {"rope.scaling.finetuned": True, "feed_forward_length": 48},
    ),
}  # fmt: skip


def config_of(changes) -> ModelConfig:
    if changes.get("model_type") in ("gemma2", "gemma3_text"):
        changes = {"head_dim": 24, **changes}
    return LlamaConfig.from_dict({**SIZES, "model_type": "llama", "eos_token_id": [], **changes})


@pytest.fixture(scope="module")
def logits():
    return jax.jit(lambda model, tokens: model(tokens))


def save(tmp_path, case, **changes):
    """Save a case in both formats and return the paths."""
    architecture, config_json, entries = CASES[case]
    model = random_llama(config_of(config_json))
    tensors = tensors_of(model, architecture, tmp_path / "folder")
    metadata = metadata_of(model.config, architecture, **entries, **changes)
    return tmp_path / "folder", write(tmp_path / "model.gguf", metadata, tensors)


@pytest.mark.parametrize("case", CASES)
def test_gguf_and_folder_are_the_same_model(tmp_path, case):
    folder, path = save(tmp_path, case)
    expected = read_config(folder)
    ends = {"bos_token_id": expected.bos_token_id, "eos_token_ids": expected.eos_token_ids}
    assert dataclasses.replace(read_config(path), **ends) == expected
    whole = Decoder.from_pretrained(folder, scan_layers=False)
    found = Decoder.from_pretrained(path, scan_layers=False)
    # Files have norm weights plus 1, and the exponentials of A_log.
    is_changed = whole.config.norm.offset or whole.config.state_groups
    different = [
        str(name)
        for (name, x), (_, y) in zip(
            jax.tree.leaves_with_path(whole), jax.tree.leaves_with_path(found), strict=True
        )
        if not np.allclose(x, y, rtol=0, atol=3e-7 if is_changed else 0)
    ]
    assert different == []


# Gemma: llama.cpp computes gelu from a table in float16. Results near the middle of two numbers of
# the table differ. Qwen3.5: it runs the delta rule in chunks.
_ROUNDINGS = {"gemma": 0.02, "qwen35": 2e-4}


def _gelu_from_table(x):
    """Return the activation as llama.cpp does: argument and result are float16."""
    rounded = jax.nn.gelu(x.astype(np.float16).astype(np.float32), approximate=True)
    return rounded.astype(np.float16).astype(np.float32)


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_llama_cpp(tmp_path, monkeypatch, case):
    """Compare with another reader of the same file, if llama-cpp-python is installed."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="no llama-cpp-python")
    architecture, config_json, entries = CASES[case]
    if case == "phi3":  # llama.cpp ignores its windows
        config_json, entries = {**config_json, "sliding_window": None}, {}
    if case == "gpt-oss":  # llama.cpp rounds the transitions of YaRN
        config_json, entries = (
            {**config_json, "rope_parameters": {"rope_type": "default"}},
            _WINDOWS,
        )
    model = random_llama(config_of(config_json), scale=0.1)
    metadata = metadata_of(model.config, architecture, **entries, vocab_size=64)
    tensors = tensors_of(model, architecture, tmp_path / "folder")
    metadata["tokenizer.ggml.model"] = "no_vocab"
    path = write(tmp_path / "model.gguf", metadata, tensors)
    monkeypatch.setitem(ACTIVATIONS, "gelu_pytorch_tanh", _gelu_from_table)
    found = Decoder.from_pretrained(path, dtype="float32")(TOKENS)[0]
    peer = llama_cpp.Llama(
        str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0
    )  # fmt: skip
    peer.eval(TOKENS[0].tolist())
    rounding = max([each for name, each in _ROUNDINGS.items() if case.startswith(name)] or [1e-5])
    np.testing.assert_allclose(found, peer._scores, rtol=0, atol=rounding)


@pytest.mark.parametrize("name", FIXTURES)
def test_fixtures_give_the_reference_weights_and_logits(logits, name):
    path = DATA / "quantised" / name / "model.gguf"
    reference = np.load(path.with_name("reference.npz"))
    tensors = find_gguf_tensors(GgufFile.open(path), read_config(path))
    num_checked = 0
    for key, weight in reference.items():
        if key in tensors:
            rows = slice(0, len(weight))
            np.testing.assert_array_equal(tensors[key].read((rows,), np.dtype("f4")), weight)
            num_checked += 1
    assert num_checked >= 2
    # In one fixture, the gate is Q8_0 and up is BF16, and they form one matrix.
    message = "layers.0.gate_up_proj and others will be float32"
    is_mixed = name == "gguf-mixed"
    with pytest.warns(match=message) if is_mixed else contextlib.nullcontext():
        model = Decoder.from_pretrained(path, dtype="float32")
    found = np.asarray(logits(model, reference["input_ids"][None]))[0]
    scale = np.abs(reference["logits"]).max()
    assert np.abs(found - reference["logits"]).max() < 1e-4 * scale


def test_llama3_factors_divide_the_frequencies(tmp_path):
    """The tensor has the divisors that llama.cpp's converter computes from Llama 3.1's scaling."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = config_of({"rope_scaling": scaling})
    plain = config_of({})
    divisors = plain.ropes[0].frequencies() / config.ropes[0].frequencies()
    tensors = tensors_of(random_llama(plain), "llama", tmp_path / "folder")
    tensors["rope_freqs.weight"] = divisors.astype(np.float32)
    path = write(tmp_path / "m.gguf", metadata_of(plain, "llama"), tensors)
    np.testing.assert_allclose(
        read_config(path).ropes[0].frequencies(), config.ropes[0].frequencies(), rtol=1e-6
    )
    tensors["rope_freqs.weight"] = divisors[:3].astype(np.float32)
    path = write(tmp_path / "x.gguf", metadata_of(plain, "llama"), tensors)
    with pytest.raises(GgufError, match=r"rope_freqs.weight must be F32 \[8\], got F32 \[3\]"):
        read_config(path)


def test_phi3_long_factors_are_read(tmp_path):
    config = config_of({"model_type": "phi3", "original_max_position_embeddings": 64})
    tensors = tensors_of(random_llama(config), "phi3", tmp_path / "folder")
    factors = {kind: np.linspace(1, last, 8, dtype=np.float32) for kind, last in _FACTORS.items()}
    tensors |= {f"rope_factors_{kind}.weight": each for kind, each in factors.items()}
    scaling = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    path = write(tmp_path / "m.gguf", metadata_of(config, "phi3", **scaling), tensors)
    rope = read_config(path).ropes[0]
    np.testing.assert_allclose(
        rope.frequencies(), config.ropes[0].frequencies() / factors["long"], rtol=1e-6
    )
    np.testing.assert_allclose(rope.scales(), 1.25)


_FACTORS = {"short": 2, "long": 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "architecture must be one of gemma2, .*llama, .* got 'mamba'",
        ),
        ({"general.type": "adapter"}, "general.type must be 'model', got 'adapter'"),
        ({"llama.block_count": None}, "llama.block_count must be an integer, got nothing"),
        ({"llama.block_count": 10**6}, "num_hidden_layers must be at most 10000"),
        ({"llama.nextn_predict_layers": 2}, "block_count must be more than nextn_predict_layers"),
        ({"llama.embedding_length": "wide"}, "embedding_length must be an integer, got 'wide'"),
        (
            {"llama.attention.head_count": 0, "llama.attention.key_length": 0},
            "must be positive, got",
        ),
        ({"llama.attention.head_count": [4, 2]}, "attention.head_count that differs between lay"),
        ({"llama.attention.value_length": 8}, "attention.value_length other than 16 is not supp"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale = 0.5 is not supported"),
        ({"llama.attention.sliding_window": 32}, "attention.sliding_window = 32 is not supported"),
        ({"llama.rope.scaling.type": "other"}, "rope.scaling.type 'other' is not supported"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor with 'linear' is not"),
        ({"llama.ssm.state_size": 16}, "llama.ssm.state_size = 16 is not supported"),
        ({"llama.expert_shared_count": 2}, "llama.expert_shared_count = 2 is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
    ],
)
def test_read_gguf_config_names_unsupported_entries(tmp_path, changes, message):
    config = config_of({})
    metadata = {**metadata_of(config, "llama"), **changes}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensors = {"token_embd.weight": np.zeros((64, 64), np.float32)}
    file = GgufFile.open(write(tmp_path / "m.gguf", metadata, tensors))
    with pytest.raises(ValueError, match=message) as raised:
        read_gguf_config(file)
    assert "\n" not in str(raised.value)


def test_neutral_entries_are_accepted_and_foreign_entries_named(tmp_path):
    entries = {
        "vocab_size": 64, "expert_count": 0, "attention.causal": True, "rope.scaling.type": "none",
        "rope.scaling.factor": 3.0, "attention.head_count_kv": [2, 2], "tensor_data_layout": "x",
    }  # fmt: skip
    config = config_of({})
    foreign = {"qwen2.attention.scale": 0.5, "mradermacher.quantized_by": "x", "general.url": "x"}
    metadata = metadata_of(config, "llama", **entries) | foreign
    tensors = {"token_embd.weight": np.zeros((64, 64), np.float32)}
    file = GgufFile.open(write(tmp_path / "m.gguf", metadata, tensors))
    with pytest.warns(UserWarning, match=r"known entries, got qwen2.attention.scale\. They are"):
        found = read_gguf_config(file)
    assert dataclasses.replace(found, tie_word_embeddings=False, bos_token_id=1) == config


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.1.attn_q.weight", None, "self_attn.q_proj.weight is missing"),
        ("blk.1.attn_q.weight", np.zeros((8, 64), np.float32), "attn_q.weight must have 64 rows"),
        ("blk.1.attn_v.weight", np.zeros((8, 64), np.float32), "v_proj.weight must have shape"),
        ("blk.1.ffn_up.weight", (np.zeros((96, 36), np.uint8), "Q4_0"), None),
        (
            "blk.1.ffn_up.weight",
            (np.zeros((96, 80), np.uint8), "Q8_1"),
            "must be one of F32.*, got Q8_1",
        ),
        ("blk.1.attn_q_norm.weight", np.ones(16, np.float32), "self_attn.q_norm.weight is in"),
        ("blk.0.attn_q_norm.weight", np.ones(16, np.float32), "self_attn.q_norm.weight is in"),
        ("blk.0.ffn_gate.bias", np.ones(96, np.float32), "mlp.gate_proj.bias is in the files, but"),
        ("mm.0.weight", np.ones(96, np.float32), "mm.0.weight is in the files, but"),
        ("blk.0.new.weight", np.ones(96, np.float32), "_weights: blk.0.new.weight is in the files"),
        ("blk.9.attn_q.weight", np.ones(96, np.float32), "blk.9.attn_q.weight is in the files"),
        (
            "output_norm.weight",
            np.full(64, np.nan, np.float32),
            "output_norm.weight must be finite",
        ),
    ],
)
def test_loading_names_wrong_tensors(tmp_path, name, tensor, message):
    model = random_llama(config_of({}))
    tensors = tensors_of(model, "llama", tmp_path / "folder") | {name: tensor}
    tensors = {key: each for key, each in tensors.items() if each is not None}
    path = write(tmp_path / "m.gguf", metadata_of(model.config, "llama"), tensors)
    if message is None:
        with pytest.warns(match="layers.1.gate_up_proj will be float32, not quantised: only some"):
            Decoder.from_pretrained(path)
        return
    with pytest.raises((WeightsError, UnsupportedConfigError), match=message) as raised:
        Decoder.from_pretrained(path)
    assert "\n" not in str(raised.value)


def test_experts_may_have_a_tensor_each(tmp_path):
    """Files of 2023 have a tensor for each expert of Mixtral."""
    folder, path = save(tmp_path, "mixtral")
    tensors = {}
    for each in gguf.GGUFReader(path).tensors:
        if "_exps" in each.name:
            for index, matrix in enumerate(each.data):
                tensors[each.name.replace("_exps", f".{index}")] = matrix
        else:
            tensors[each.name] = each.data
    metadata = dict(GgufFile.open(path).metadata)
    old = write(tmp_path / "old.gguf", {**metadata}, tensors)
    new, old = (Decoder.from_pretrained(each, scan_layers=False) for each in (path, old))
    assert all(map(np.array_equal, jax.tree.leaves(new), jax.tree.leaves(old)))


@pytest.mark.parametrize(
    "case", ["qwen35moe", "gemma4 with experts", "glm4moe", "lfm2", "granitehybrid"]
)
def test_quantised_layers_have_the_values_of_the_package_gguf(tmp_path, logits, case):
    """Matrices are Q8_0. The outputs of delta nets, whose inputs are reordered, are Q4_K."""
    architecture, config_json, entries = CASES[case]
    if is_delta := case == "qwen35moe":
        config_json = {**config_json, "linear_num_value_heads": 4, "linear_value_head_dim": 64}
        entries = {**entries, "ssm.time_step_rank": 4, "ssm.inner_size": 256}
    model = random_llama(config_of(config_json))
    packed, floats = {}, {}
    for name, tensor in tensors_of(model, architecture, tmp_path / case).items():
        packed[name] = floats[name] = tensor
        if tensor.ndim == 1 or tensor.shape[-1] % 32 or "_inp." in name or "norm" in name:
            continue  # F32, as in llama.cpp
        if is_delta and "ssm_out" in name:
            kind, data = "Q4_K", random_rows("Q4_K", len(tensor), 1)
        else:
            kind = "Q8_0"
            data = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
        packed[name] = data, kind
        floats[name] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert packed.keys() - {name for name in packed if packed[name] is floats[name]}
    metadata = metadata_of(model.config, architecture, **entries)
    paths = (
        write(tmp_path / f"{i}.gguf", metadata, each) for i, each in enumerate((floats, packed))
    )
    options = {"dtype": "float32", "scan_layers": False}
    expected, found = (Decoder.from_pretrained(path, dequantise=True, **options) for path in paths)
    assert all(map(np.array_equal, jax.tree.leaves(expected), jax.tree.leaves(found)))
    if is_delta:
        found = logits(Decoder.from_pretrained(tmp_path / "1.gguf", **options), TOKENS)
        expected = np.asarray(logits(expected, TOKENS))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_draft_layers_and_unused_keys_are_left_out(tmp_path):
    """GLM-4.5 has a layer for drafts after the others, and some files have keys that none reads."""
    architecture, config_json, entries = CASES["glm4moe"]
    model = random_llama(config_of(config_json))
    tensors = tensors_of(model, architecture, tmp_path / "folder")
    draft = {f"blk.2.nextn.{kind}.weight": np.ones(64, np.float32) for kind in ("enorm", "hnorm")}
    metadata = metadata_of(model.config, architecture, **entries, nextn_predict_layers=1)
    metadata["glm4moe.block_count"] = 3
    path = write(tmp_path / "glm.gguf", metadata, tensors | draft)
    assert read_config(path).num_hidden_layers == 2
    assert find_gguf_tensors(GgufFile.open(path), read_config(path)).keys() == {
        *find_gguf_tensors(GgufFile.open(save(tmp_path, "glm4moe")[1]), read_config(path))
    }
    case = "gemma4 with embeddings per layer and shared keys"
    _, path = save(tmp_path, case)
    file, config = GgufFile.open(path), read_config(path)
    keys = {
        f"blk.5.{kind}.weight": dataclasses.replace(
            file.tensors["blk.2.attn_k.weight"], name=f"blk.5.{kind}.weight"
        )
        for kind in ("attn_k", "attn_v")
    }
    more = dataclasses.replace(file, tensors={**file.tensors, **keys})
    assert find_gguf_tensors(more, config).keys() == find_gguf_tensors(file, config).keys()


def test_gates_and_up_projections_may_be_one_tensor(tmp_path):
    folder, path = save(tmp_path, "qwen35moe")
    tensors = {each.name: each.data for each in gguf.GGUFReader(path).tensors}
    for layer in range(4):
        halves = [tensors.pop(f"blk.{layer}.ffn_{kind}_exps.weight") for kind in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(halves, axis=1)
    metadata = dict(GgufFile.open(path).metadata)
    fused = write(tmp_path / "fused.gguf", metadata, tensors)
    one, other = (Decoder.from_pretrained(each, scan_layers=False) for each in (path, fused))
    assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func = 1 is not supported"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "head_count_kv must be an array of 3, got 2"),
        ("lfm2", {"attention.head_count_kv": [1, 2, 0]}, "differs between layers with attention"),
        ("lfm2moe", {"expert_weights_norm": False}, "lfm2moe.expert_weights_norm = False is not"),
        ("granitehybrid", {"rope.scaling.finetuned": 1}, "finetuned must be a boolean, got 1"),
        ("gemma4", {"attention.head_count_kv": [2, 1, 1, 2, 2, 1]}, "layers of the same type is"),
        ("gemma4", {"feed_forward_length": [96, 96, 96, 96, 96, 99]}, r"forward_length = \[96, 96"),
        ("gemma4", {"rope.dimension_count_swa": 8}, "rope.dimension_count_swa other than 16"),
        ("qwen35", {"ssm.dt_b_c_rms": True}, "qwen35.ssm.dt_b_c_rms = True is not supported"),
    ],
)
def test_entries_of_new_families_are_checked(tmp_path, case, changes, message):
    architecture, config_json, entries = CASES[case]
    metadata = metadata_of(config_of(config_json), architecture, **{**entries, **changes})
    tensors = {"token_embd.weight": np.zeros((64, 64), np.float32)}
    file = GgufFile.open(write(tmp_path / "m.gguf", metadata, tensors))
    with pytest.raises(ValueError, match=message):
        read_gguf_config(file)


@pytest.mark.usefixtures("padded_rows")
def test_engines_plans_and_servers_take_the_file(capsys):
    path = DATA / "quantised" / "gguf-q4_0" / "model.gguf"
    llm = LLM(path, dtype="float32", num_speculative_tokens=3, **ENGINE_SIZES)
    params = SamplingParams(temperature=0, max_tokens=4)
    [output] = llm.chat([{"role": "user", "content": "a b"}], params)
    template = "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer is not None
    assert output.prompt_token_ids == llm.tokenizer.encode(template)
    tokens = output.outputs[0].token_ids
    assert len(tokens) == 4
    assert output.outputs[0].text == llm.tokenizer.decode(tokens, continues_text=True)
    assert plan(["--model", str(path), "--memory", "1GiB"]) == 0
    assert "69,952 parameters" in capsys.readouterr().out
    assert server_name(str(path)) == "model"
