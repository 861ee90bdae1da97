"""Tests of `compare_forwards`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Llama
from paged_jax.integrations.forwards import compare_forwards, token_logprobs
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 43, (2, 12)), jnp.int32)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama(dataclasses.replace(CONFIG, num_hidden_layers=1), scale=0.4)


def variant(model: Llama, **changes: Any) -> Any:
    """Return the forward pass with the same weights and another config."""
    config = dataclasses.replace(model.config, **changes)
    other = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return functools.partial(
        jax.jit(token_logprobs), nnx.merge(nnx.graphdef(other), nnx.state(model))
    )


def test_compare_forwards_accepts_equal_forward_passes(model) -> None:
    found = compare_forwards(model, variant(model), TOKENS)
    assert found.is_close and found.largest <= 1e-5 and found.config == model.config


@pytest.mark.parametrize(
    ("changes", "explanation"),
    [
        ({"rope_theta": 5e5}, "uses rope_theta = 500000, but the config has 10000"),
        ({"rms_norm_eps": 1e-6}, "uses rms_norm_eps = 1e-06, but the config has 1e-05"),
    ],
)
def test_compare_forwards_finds_a_value_that_is_ignored(model, changes, explanation) -> None:
    # Inputs are so small that the epsilon of a norm matters.
    small = nnx.clone(model)
    small.embed_tokens = nnx.Param(model.embed_tokens[...] * 0.01)
    found = compare_forwards(small, variant(small, **changes), TOKENS, tolerance=1e-4)
    assert not found.is_close and found.largest > 1e-4 and explanation in found.explanation
    assert found.config == dataclasses.replace(model.config, **changes)


def test_compare_forwards_reports_the_first_difference(model) -> None:
    later = compare_forwards(model, variant(model, rope_theta=77.0), TOKENS)
    assert "agree for the first 1 tokens and differ then" in later.explanation
    other = random_llama(model.config, scale=0.3)
    first = compare_forwards(model, variant(other), TOKENS)
    assert "differ from the first token on" in first.explanation
    assert later.config is None and first.config is None


def test_compare_forwards_rejects_wrong_shapes(model) -> None:
    with pytest.raises(
        ValueError,
        match=r"must return an array of shape \[B, T - 1\] .* = \[2, 12\], got shape \[2, 12\]",
    ):
        compare_forwards(model, lambda tokens: jnp.zeros(tokens.shape), TOKENS)
    with pytest.raises(ValueError, match=r"token_ids must have shape \[B, T\], got \[12\]"):
        compare_forwards(model, variant(model), TOKENS[0])
