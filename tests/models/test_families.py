"""Each family of models against Hugging Face transformers, on small random weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.models.config import LlamaConfig
from paged_jax.models.llama import Llama
from paged_jax.models.loading.huggingface import load_weights, save_weights

# Importing torch and transformers takes seconds.
pytestmark = pytest.mark.slow

_SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_FAMILIES = {
    "llama with a head a query": ("llama", {"num_key_value_heads": 4}),
    "llama tied, with llama3 rope": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama with linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "llama with wide heads": ("llama", {"head_dim": 12}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "qwen2 with windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied, with biases": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
_TOKENS = np.random.default_rng(0).integers(0, _SIZES["vocab_size"], (2, 24), dtype=np.int32)


# Imported by the tests that need them, and not where tests are only collected: that takes seconds.
def _torch():
    return pytest.importorskip("torch")


def _transformers():
    return pytest.importorskip("transformers")


def _reference(model_type, changes):
    """A transformers model in which every weight is random, norms and biases too."""
    torch, transformers = _torch(), _transformers()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, attn_implementation="eager", **{**_SIZES, **changes}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def _logits(model):
    with _torch().no_grad():
        return model(_torch().from_numpy(_TOKENS).long()).logits.numpy()


def _load(folder, **options):
    auto = _transformers().AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation="eager", **options).eval()


@nnx.jit
def _forward(model, token_ids):
    return model(token_ids)


@pytest.mark.parametrize("family", _FAMILIES)
def test_llama_computes_what_transformers_computes(tmp_path, family):
    reference = _reference(*_FAMILIES[family])
    expected = _logits(reference)
    assert np.std(expected) > 0.1  # a model whose logits vanish would agree with anything
    reference.save_pretrained(tmp_path / "theirs")
    config = LlamaConfig.from_file(tmp_path / "theirs")
    model = load_weights(Llama, tmp_path / "theirs", config)
    np.testing.assert_allclose(_forward(model, jnp.asarray(_TOKENS)), expected, rtol=0, atol=1e-4)

    save_weights(model, tmp_path / "ours")
    np.testing.assert_array_equal(_logits(_load(tmp_path / "ours")), expected)


def test_llama_computes_what_transformers_computes_with_stacked_layers(tmp_path):
    reference = _reference("qwen3", {"attention_bias": True, "head_dim": 16})
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model = Llama.from_pretrained(tmp_path / "theirs", scan_layers=True)
    expected = _logits(reference)
    np.testing.assert_allclose(_forward(model, jnp.asarray(_TOKENS)), expected, rtol=0, atol=1e-4)

    save_weights(model, tmp_path / "ours", max_file_bytes=20_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    np.testing.assert_array_equal(_logits(_load(tmp_path / "ours")), expected)


def test_llama_reads_the_bfloat16_weights_of_transformers(tmp_path):
    _reference("llama", {}).to(_torch().bfloat16).save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path)
    assert model.config.dtype == "bfloat16"
    assert model.embed_tokens[...].dtype == jnp.bfloat16
    widened = Llama.from_pretrained(tmp_path, dtype="float32")
    expected = _logits(_load(tmp_path, dtype=_torch().float32))
    np.testing.assert_allclose(_forward(widened, jnp.asarray(_TOKENS)), expected, rtol=0, atol=1e-4)
