"""Tests of scores of tokens and of their gradients, in chunks, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import token_scores
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG

# The rows and the vocabulary fill several chunks, and the last chunk only partly.
R, V, NUM_TOP = 1000, 250, 2
ROWS, WIDTH = 32, 96


def scores_in_float64(weights, config, x, targets, temperature, top_ids, round_to):
    """Return log-probabilities, entropies and the log-probabilities of `top_ids`."""
    x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
    x = x * weights["norm"]
    # The matmul rounds its input; gradients ignore this.
    x = x + jax.lax.stop_gradient(x.astype(round_to).astype(jnp.float64) - x)
    cap = config.final_logit_softcapping
    logits = cap * jnp.tanh(x @ weights["lm_head"].T * config.logit_scale / cap)
    logits = jax.nn.log_softmax(logits / temperature[:, None])
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(logits) * logits, axis=1)
    return chosen, entropy, jnp.take_along_axis(logits, top_ids, axis=1)


def is_rounded_clearly(x, norm, config):
    """Return the rows whose normalised elements are not halfway between two values of bfloat16.

    An element that is halfway may be rounded to either of them, which depends on the processor.
    """
    squares = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    normed = (x / np.sqrt(squares + config.rms_norm_eps) * norm).astype(np.float32)
    dropped = (normed.view(np.uint32) & 0xFFFF).astype(np.int32)
    return (np.abs(dropped - 0x8000) > 64).all(axis=-1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 3e-6), ("bfloat16", 2.5e-3), ("int8", 3e-6)]
)
def test_gradients_of_chunks_equal_float64(dtype, tolerance, monkeypatch) -> None:
    """The gradient of a bfloat16 weight is rounded once, and not for each chunk."""
    monkeypatch.setattr(token_scores, "_ROWS", ROWS)
    monkeypatch.setattr(token_scores, "_WIDTH", WIDTH)
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=1, vocab_size=V, final_logit_softcapping=4.0, logit_scale=0.5
    )
    model = random_llama(config, scale=0.4, dtype=dtype)
    graphdef, weights = nnx.split(model)
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(2 * R, config.hidden_size)).astype(np.float32)
    x = drawn[is_rounded_clearly(drawn, np.asarray(model.norm[...], np.float64), config)][:R]
    targets = rng.integers(0, V, R, np.int32)
    temperature = rng.uniform(0.5, 2.0, R).astype(np.float32)
    factors = [rng.normal(size=(R, *n)).astype(np.float32) for n in ((), (), (NUM_TOP,))]

    @jax.jit
    def gradients_of(weights, x, temperature):
        def loss(weights, x, temperature):
            model = nnx.merge(graphdef, weights)
            scores = token_scores.score_rows(model, x, targets, temperature, NUM_TOP)
            found = scores.logprobs, scores.entropy, scores.top_logprobs
            return sum(jnp.sum(f * y) for f, y in zip(factors, found, strict=True)), scores

        grad = jax.grad(loss, (0, 1, 2), has_aux=True, allow_int=True)
        return grad(weights, x, temperature)

    (of_weights, *found), scores = gradients_of(weights, x, temperature)
    names = ("norm",) if dtype == "int8" else ("norm", "lm_head")
    found += [nnx.to_pure_dict(of_weights)[name] for name in names]
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        state = nnx.to_pure_dict(nnx.state(model))
        state = {name: np.asarray(x, np.float64) for name, x in state.items() if name != "layers"}
        exact = {name: jnp.asarray(state[name]) for name in ("norm", "lm_head")}
        if dtype == "int8":
            exact["lm_head"] *= state["lm_head_scale"]
        arrays = exact, jnp.asarray(x, jnp.float64), jnp.asarray(temperature, jnp.float64)

        def loss(weights, x, temperature):
            rows = targets, temperature, scores.top_ids
            round_to = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
            values = scores_in_float64(weights, config, x, *rows, round_to)
            return sum(jnp.sum(f * y) for f, y in zip(factors, values, strict=True)), values

        (of_weights, *wanted), values = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
        wanted += [of_weights[name] for name in names]
    for ours, theirs in zip(
        (scores.logprobs, scores.entropy, scores.top_logprobs), values, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 if dtype == "bfloat16" else 1e-5)
    for name, ours, theirs in zip(("x", "temperature", *names), found, wanted, strict=True):
        difference = np.asarray(ours, np.float64) - np.asarray(theirs)
        assert np.linalg.norm(difference) < tolerance * np.linalg.norm(theirs), name
