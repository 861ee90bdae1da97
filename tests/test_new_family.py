"""Tests of examples/new_family.py: VaultGemma, against transformers."""

import importlib.util
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, LlamaConfig, SamplingParams
from paged_jax.models import families
from paged_jax.models.family import UnsupportedConfigError
from paged_jax.models.llama import Llama
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


@pytest.fixture
def example(monkeypatch):
    """Load the example, and remove its family after the test."""
    spec = importlib.util.spec_from_file_location("new_family", ROOT / "examples/new_family.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(families.FAMILIES, "vaultgemma", module.VAULT_GEMMA)
    monkeypatch.delitem(families.FAMILIES, "vaultgemma")
    return module


def test_added_family_is_read_and_written(example):
    with pytest.raises(UnsupportedConfigError, match="'VaultGemmaForCausalLM' is not supported"):
        LlamaConfig.from_dict(_VAULT_GEMMA_1B)
    example.add_vault_gemma()
    config = LlamaConfig.from_dict(_VAULT_GEMMA_1B)
    assert (config.norm_offset, config.hidden_act) == (1.0, "gelu_pytorch_tanh")
    assert config.embedding_multiplier == math.sqrt(1152)
    assert config.sliding_windows[:3] == (512, None, 512)
    assert config.tie_word_embeddings
    assert LlamaConfig.from_dict(config.to_dict()) == config


@pytest.mark.slow  # importing torch and transformers takes seconds
def test_added_family_computes_the_same_as_transformers(example, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    example.add_vault_gemma()
    sizes = dict(
        vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=64, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.VaultGemmaForCausalLM(
        transformers.VaultGemmaConfig(**sizes, attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    model = Llama.from_pretrained(tmp_path / "theirs")
    token_ids = np.random.default_rng(0).integers(2, 48, (2, 24), np.int32)
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

    llm = LLM(model=model, block_size=4, num_blocks=32, max_num_seqs=2)
    prompt = [2, 9, 27, 31]
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    )
    with torch.no_grad():
        greedy = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
    assert list(output.outputs[0].token_ids) == greedy[0, len(prompt) :].tolist()
