"""Tests of examples/new_family.py: VaultGemma and Apertus, against transformers."""

import dataclasses
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, LlamaConfig, SamplingParams
from paged_jax.models.decoder import Decoder
from paged_jax.models.errors import UnsupportedConfigError
from paged_jax.models.families import registry
from paged_jax.models.loading.orbax import save_checkpoint
from paged_jax.models.parts.attention import Attention, HeadNorm
from paged_jax.models.parts.mlp import Dense
from tests.support import ROOT

# A config.json without the keys that have the values of the defaults.
_VAULT_GEMMA_1B = {
    "architectures": ["VaultGemmaForCausalLM"],
    "model_type": "vaultgemma",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
# Sizes of Apertus 8B: https://huggingface.co/swiss-ai/Apertus-8B-2509
_APERTUS_8B = {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}


@pytest.fixture
def example(monkeypatch):
    """Load the example, and remove its families after the test."""
    spec = importlib.util.spec_from_file_location("new_family", ROOT / "examples/new_family.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for family in (module.VaultGemma, module.Apertus):
        monkeypatch.setitem(registry.FAMILIES, family.model_type, family())
        monkeypatch.delitem(registry.FAMILIES, family.model_type)
    return module


def test_added_family_is_read_and_written(example):
    with pytest.raises(UnsupportedConfigError, match="'VaultGemmaForCausalLM' is not supported"):
        LlamaConfig.from_dict(_VAULT_GEMMA_1B)
    example.add_families()
    config = LlamaConfig.from_dict(_VAULT_GEMMA_1B)
    assert config.norm.offset == 1.0
    assert config.layers[0].find(Dense).activation.name == "gelu_pytorch_tanh"
    assert config.embedding_multiplier == math.sqrt(1152)
    assert config.sliding_windows[:3] == (512, None, 512)
    assert config.tie_word_embeddings
    assert LlamaConfig.from_dict(config.to_dict()) == config


def test_added_family_has_a_part_of_its_own(example):
    example.add_families()
    config = LlamaConfig.from_dict(_APERTUS_8B)
    attention, mlp = config.layers[0].find(Attention), config.layers[0].find(Dense)
    assert attention.norm == HeadNorm(config.norm) and attention.rope.theta == 12e6
    assert mlp.activation == example.XIELU() and config.can_scan_layers
    assert config.parameter("layers.3.xielu_beta").shape == ()
    assert LlamaConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="hidden_act must be 'xielu', got 'silu'"):
        LlamaConfig.from_dict({**_APERTUS_8B, "hidden_act": "silu"})


def test_config_that_its_family_cannot_write_is_named(example):
    example.add_families()
    config = LlamaConfig.from_dict(_APERTUS_8B)
    with pytest.raises(ValueError, match="logit_scale must be 1.0 for model_type 'apertus', .* 2"):
        dataclasses.replace(config, logit_scale=2.0).to_dict()
    [layer] = {*config.layers}
    layers = (layer.map(lambda step: dataclasses.replace(step, multiplier=0.5)),) * 32
    with pytest.raises(ValueError, match=r"layers\[0\].steps\[0\].multiplier must be 1.0 for"):
        dataclasses.replace(config, layers=layers).to_dict()


_SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
# Class in transformers without its last word, and sizes in addition to `_SIZES`.
_CASES = {
    "vaultgemma": ("VaultGemma", {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 8}),
    "apertus": ("Apertus", {"num_hidden_layers": 3, "num_key_value_heads": 2}),
}


@pytest.mark.peers
@pytest.mark.slow  # importing torch and transformers takes seconds
@pytest.mark.parametrize("name", _CASES)
def test_added_family_computes_the_same_as_transformers(example, tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    example.add_families()
    prefix, sizes = _CASES[name]
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{prefix}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(**_SIZES | sizes, attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    model = Decoder.from_pretrained(tmp_path / "theirs")
    token_ids = np.random.default_rng(0).integers(2, 48, (2, 90), np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(token_ids).long()).logits.numpy()
    assert np.std(expected) > 0.1
    ours = nnx.jit(lambda model, token_ids: model(token_ids))(model, jnp.asarray(token_ids))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)

    model.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    with torch.no_grad():
        saved = again.eval()(torch.from_numpy(token_ids).long()).logits.numpy()
    np.testing.assert_array_equal(saved, expected)

    save_checkpoint(model, tmp_path / "checkpoint")
    restored = Decoder.from_pretrained(tmp_path / "checkpoint")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(restored), nnx.state(model))

    # The second prompt finds a part of the first in the prefix cache.
    llm = LLM(model=model, block_size=4, num_blocks=64, max_num_seqs=2, max_chunk=32)
    for prompt in (token_ids[0, :80].tolist(), token_ids[0, :85].tolist()):
        (output,) = llm.generate(
            [{"prompt_token_ids": prompt}],
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        )
        with torch.no_grad():
            greedy = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False
            )
        assert list(output.outputs[0].token_ids) == greedy[0, len(prompt) :].tolist()
    assert output.num_cached_tokens >= 64
    llm.update_params(nnx.state(restored))
