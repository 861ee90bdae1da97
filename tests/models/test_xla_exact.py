"""Exact numerics without C++ kernels: engine, `rollout` and `log_probs` give the same bits."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import LLM, SamplingParams, log_probs, rollout
from paged_jax.kernels import op
from paged_jax.models.decoder import Decoder
from paged_jax.models.llama_config import LlamaConfig
from tests.support import references
from tests.support.random_model import random_llama

LENGTHS = [3, 17, 9, 30]
NUM_TOKENS = 6
SIZES: Any = {"block_size": 8, "num_blocks": 40, "max_num_seqs": 4, "max_model_len": 48}


def _check_equal_bits(model: Decoder, kv_dtype: str = "auto") -> None:
    """Compare an engine in chunks of 16 tokens, `log_probs` of any batch, and `rollout`."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, model.config.vocab_size, length) for length in LENGTHS]
    padded = np.stack([np.pad(prompt, (0, max(LENGTHS) - prompt.size)) for prompt in prompts])
    padded, num_tokens = jnp.asarray(padded), jnp.asarray(LENGTHS)
    llm = LLM(
        model, backend="xla", numerics="exact", kv_dtype=kv_dtype,
        max_chunk=16, max_num_batched_tokens=32, **SIZES,
    )  # fmt: skip
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, logprobs=1, ignore_eos=True, seed=5
    )
    outputs = llm.generate([prompt.tolist() for prompt in prompts], params)
    tokens = np.array([output.outputs[0].token_ids for output in outputs])
    of_engine = [
        [
            step[token].logprob
            for step, token in zip(output.outputs[0].logprobs or [], row, strict=True)
        ]
        for output, row in zip(outputs, tokens.tolist(), strict=True)
    ]
    exact = llm.model
    scored = np.asarray(log_probs(exact, padded, num_tokens, jnp.asarray(tokens)))
    np.testing.assert_array_equal(scored, np.array(of_engine, np.float32))
    alone = log_probs(exact, padded[1:2, :17], num_tokens[1:2], jnp.asarray(tokens[1:2]))
    np.testing.assert_array_equal(alone[0], scored[1])
    drawn = rollout(exact, padded, num_tokens, max_tokens=NUM_TOKENS, backend="xla")
    again = log_probs(exact, padded, num_tokens, drawn.token_ids, num_drawn=drawn.num_drawn)
    np.testing.assert_array_equal(again, drawn.logprobs)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        ("qwen2", "bfloat16", "auto"),
        # Windows, sinks and experts; recurrent and latent layers, and experts.
        pytest.param("gpt_oss", "float32", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("kimi_linear", "float32", "int8", marks=pytest.mark.exhaustive),
    ],
)
def test_engine_rollout_and_log_probs_give_equal_bits(family, dtype, kv_dtype, tmp_path) -> None:
    references.write_reference(family, tmp_path)
    _check_equal_bits(Decoder.from_pretrained(tmp_path, dtype=dtype), kv_dtype)


CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def test_with_numerics_chooses_the_exact_backend(monkeypatch) -> None:
    """Plain JAX replaces C++ kernels that are not available, unless the user asks for them."""
    model = random_llama(CONFIG)
    in_jax = model.with_numerics("exact", backend="xla")
    assert in_jax.resolve_backend(None) == "xla_exact"
    assert in_jax.with_numerics(cache_dtype="bfloat16").resolve_backend(None) == "xla_exact"
    refused = dataclasses.replace(
        op.BACKENDS["cpu_exact"], unavailable_for=lambda *_: "there is no compiler"
    )
    monkeypatch.setitem(op._ADDED, "cpu_exact", refused)
    assert model.with_numerics("exact").resolve_backend(None) == "xla_exact"
    with pytest.raises(ValueError, match=r"backend='cpu', got 'exact': there is no compiler"):
        model.with_numerics("exact", backend="cpu")
    with pytest.raises(ValueError, match="must be None, 'cpu' or 'xla' for exact numerics"):
        model.with_numerics("exact", backend="triton")


def test_exact_plain_call_matches_fast_numerics() -> None:
    """The model's own call uses the backend of `with_numerics`, up to the rounding of sums."""
    model = random_llama(CONFIG)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 32, (2, 9)))
    exact = model.with_numerics("exact", backend="xla")(tokens)
    np.testing.assert_allclose(exact, model(tokens), rtol=1e-4, atol=1e-5)
