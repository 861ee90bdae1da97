"""Tests of `compare_forwards`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Llama, LlamaConfig
from paged_jax.integrations.forwards import compare_forwards
from paged_jax.models.families import common
from paged_jax.models.parts.attention import Attention
from paged_jax.models.parts.mlp import Dense
from tests.support import references
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
        jax.jit(plain_logprobs), nnx.merge(nnx.graphdef(other), nnx.state(model))
    )


def plain_logprobs(model: Llama, token_ids: jax.Array) -> jax.Array:
    """Return f32 [B, T - 1], as a trainer without a cache computes them."""
    logprobs = jax.nn.log_softmax(model(token_ids)[:, :-1])
    return jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=2)[..., 0]


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


def test_compare_forwards_varies_the_parts_of_any_family() -> None:
    config = LlamaConfig.from_dict(references.stored("smollm3").config).replace(dtype="float32")
    model, rope = random_llama(config, scale=0.4), config.ropes[0]
    assert not isinstance(config, LlamaConfig) and rope.theta == 2e6
    layers = tuple(
        spec
        if spec.get(Attention).rope is None
        else common.pre_norm(
            dataclasses.replace(spec.get(Attention), rope=dataclasses.replace(rope, theta=5e5)),
            spec.get(Dense),
            config.norm,
        )
        for spec in config.layers
    )
    other = nnx.eval_shape(lambda: Llama(config.replace(layers=layers), rngs=nnx.Rngs(0)))
    other = nnx.merge(nnx.graphdef(other), nnx.state(model))
    found = compare_forwards(model, functools.partial(plain_logprobs, other), TOKENS)
    assert "uses rope_theta = 500000, but the config has 2e+06" in found.explanation
    assert found.config == config.replace(layers=layers)


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
