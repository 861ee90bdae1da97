"""Tests of `log_probs` and `score_tokens` against float64, and of their bits in a training loop."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from paged_jax import LlamaConfig, Rollout, log_probs, score_tokens
from paged_jax.models.decoder import Decoder
from tests.support.random_model import random_llama
from tests.support.tiny_model import CONFIG

pytest_plugins = ["tests.support.devices"]

PROMPTS = [[5, 6, 7, 8], [20], [9, 30]]
# Two samples for each prompt.
DRAWN = [[3, 17, 8, 40, 2], [12, 11], [5], [33, 34, 35, 36, 37], [], [4, 4, 30]]
TEMPERATURE = np.array([1.0, 0.7, 1.6])
N = 5


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_llama(dataclasses.replace(CONFIG, num_hidden_layers=1), scale=0.3)


def padded(rows: list[list[int]], width: int) -> np.ndarray:
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)


ARRAYS = (
    padded(PROMPTS, 4),
    np.array([len(row) for row in PROMPTS], np.int32),
    padded(DRAWN, N),
    np.array([len(row) for row in DRAWN], np.int32),
)


def arguments_of(arrays: tuple, **options: Any) -> dict[str, Any]:
    names = "prompt_token_ids", "num_tokens", "token_ids", "num_drawn"
    return dict(zip(names, arrays, strict=True)) | options


# The float64 computation


def norm(x, weight, eps: float):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def logits_of(weights: dict, config: LlamaConfig, tokens: list[int]):
    """Return the logits [T, V] of a Llama in float64."""
    x, T = weights["embed_tokens"][np.array(tokens)], len(tokens)
    half = config.head_dim // 2
    angles = np.arange(T)[:, None] / 10_000.0 ** (np.arange(half) / half)
    turns = jnp.exp(1j * angles)[:, None, None]
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in weights["layers"].values():
        heads = norm(x, layer["input_norm"], config.rms_norm_eps)
        heads = jnp.einsum("te,kgde->tkgd", heads, layer["qkv_proj"])
        q_and_k, v = heads[:, :, : group + 1], heads[:, :, group + 1]
        turned = (q_and_k[..., :half] + 1j * q_and_k[..., half:]) * turns
        q_and_k = jnp.concatenate([turned.real, turned.imag], axis=-1)
        scores = jnp.einsum("tkgd,skd->kgts", q_and_k[:, :, :group], q_and_k[:, :, group])
        scores = jnp.where(np.tril(np.ones((T, T), bool)), scores * config.head_dim**-0.5, -jnp.inf)
        out = jnp.einsum("kgts,skd->tkgd", jax.nn.softmax(scores), v)
        x = x + out.reshape(T, -1) @ layer["o_proj"].T
        normed = norm(x, layer["post_attention_norm"], config.rms_norm_eps)
        gate, up = jnp.einsum("te,nfe->ntf", normed, layer["gate_up_proj"])
        x = x + (jax.nn.silu(gate) * up) @ layer["down_proj"].T
    return norm(x, weights["norm"], config.rms_norm_eps) @ weights["lm_head"].T


def expected_scores(weights: dict, config: LlamaConfig) -> list:
    """Return the log-softmax [n, V] at each generated token, for each row of `DRAWN`."""
    rows = []
    for row, drawn in enumerate(DRAWN):
        prompt, factor = PROMPTS[row // 2], TEMPERATURE[row // 2]
        logits = logits_of(weights, config, prompt + drawn)[len(prompt) - 1 : -1]
        rows.append(jax.nn.log_softmax(logits[: len(drawn)] / factor))
    return rows


@pytest.fixture(scope="module")
def expected(model) -> tuple[list[np.ndarray], Any]:
    """Return the log-softmax of each row, and the gradient of `loss`, in float64."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        state = nnx.to_pure_dict(nnx.state(model))
        weights = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), state)

        def loss(weights):
            rows = expected_scores(weights, model.config)
            chosen = [row[np.arange(len(ids)), ids] for row, ids in zip(rows, DRAWN, strict=True)]
            return sum(factor * jnp.sum(x) for factor, x in zip(FACTORS, chosen, strict=True)), rows

        gradients, rows = jax.jit(jax.grad(loss, has_aux=True))(weights)
        return jax.tree.map(np.asarray, rows), jax.tree.map(np.asarray, gradients)


# The advantage of each row.
FACTORS = np.array([1.0, -2.0, 0.5, 1.5, 1.0, -1.0])


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_log_probs_and_gradients_equal_float64(model, expected, numerics) -> None:
    graphdef, weights = nnx.split(model)

    @jax.jit
    def value_and_grad(weights, arrays, temperature):
        def loss(weights):
            scores = log_probs(
                nnx.merge(graphdef, weights),
                **arguments_of(arrays, temperature=temperature, numerics=numerics),
            )
            return jnp.sum(scores * FACTORS.astype(np.float32)[:, None]), scores

        return jax.grad(loss, has_aux=True)(weights)

    gradients, scores = value_and_grad(weights, ARRAYS, TEMPERATURE.astype(np.float32))
    rows, expected_gradients = expected
    for row, ids in enumerate(DRAWN):
        chosen = rows[row][np.arange(len(ids)), ids]
        np.testing.assert_allclose(scores[row, : len(ids)], chosen, atol=3e-6)
        assert not scores[row, len(ids) :].any()
    for ours, theirs in zip(
        *map(jax.tree.leaves, (nnx.to_pure_dict(gradients), expected_gradients)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=3e-6 * np.abs(theirs).max())
    # Lengths and temperatures are values, so they compile nothing.
    shorter = [np.minimum(x, 1) if x.ndim == 1 else x for x in ARRAYS]
    value_and_grad(weights, tuple(shorter), np.ones(3, np.float32))
    assert value_and_grad._cache_size() == 1


def test_score_tokens_equals_a_float64_log_softmax(model, expected) -> None:
    run = jax.jit(score_tokens, static_argnames="num_top")
    scores = run(model, *ARRAYS[:3], num_drawn=ARRAYS[3], temperature=TEMPERATURE, num_top=3)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (6, N, 3)
    for row, (logprobs, ids) in enumerate(zip(expected[0], DRAWN, strict=True)):
        n = len(ids)
        entropy = -np.sum(np.exp(logprobs) * logprobs, axis=1)
        np.testing.assert_allclose(scores.logprobs[row, :n], logprobs[range(n), ids], atol=3e-6)
        np.testing.assert_allclose(scores.entropy[row, :n], entropy, atol=1e-5)
        top = np.argsort(-logprobs)[:, :3]
        np.testing.assert_array_equal(scores.top_ids[row, :n], top)
        top_logprobs = np.take_along_axis(logprobs, top, axis=1)
        np.testing.assert_allclose(scores.top_logprobs[row, :n], top_logprobs, atol=3e-6)
        assert not any(x[row, n:].any() for x in scores)


def test_log_probs_accepts_lists(model) -> None:
    def lowered(*rows, **options):
        return jax.make_jaxpr(lambda: log_probs(model, *rows, temperature=TEMPERATURE, **options))()

    of_lists = lowered(PROMPTS, None, DRAWN)
    of_arrays = lowered(*ARRAYS[:3], num_drawn=ARRAYS[3])
    assert str(of_lists) == str(of_arrays)
    for ours, theirs in zip(of_lists.consts, of_arrays.consts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# Memory


@pytest.mark.optimised
def test_memory_grows_by_a_chunk_with_the_vocabulary() -> None:
    """Neither values nor gradients have an array of all logits, or more than their own weights."""
    B, T, N = 8, 16, 112

    def score(weights, graphdef, *arrays):
        return jnp.sum(log_probs(nnx.merge(graphdef, weights), *arrays))

    def temporary_bytes(function, vocab_size: int) -> int:
        config = dataclasses.replace(
            CONFIG, num_hidden_layers=1, vocab_size=vocab_size, max_position_embeddings=256
        )
        graphdef, weights = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
        prompts, drawn = (jax.ShapeDtypeStruct((B, width), jnp.int32) for width in (T, N))
        arrays = prompts, jax.ShapeDtypeStruct((B,), jnp.int32), drawn
        run = jax.jit(function, static_argnums=1)
        memory = run.lower(weights, graphdef, *arrays).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    few, many = 1024, 131_072
    for function in (score, jax.grad(score)):
        growth = temporary_bytes(function, many) - temporary_bytes(function, few)
        # The logits of a chunk, and their exponentials.
        assert growth < 2.1 * (16 << 20) < 0.1 * B * N * many * 4


# A training loop


class Loop:
    """Ways to compute exact log-probabilities of eight rows in a training loop.

    Each method takes the weights, which it may donate, and returns f32 [8, N].
    """

    def __init__(self, model: Decoder, devices: list[jax.Device]):
        rng = np.random.default_rng(0)
        self.graphdef, self.weights = nnx.split(model.with_numerics("exact", jnp.bfloat16))
        self.num_drawn = rng.integers(1, 8, 8, np.int32)
        prompts, drawn = (
            rng.integers(0, 43, (8, 9), np.int32),
            rng.integers(0, 43, (8, 7), np.int32),
        )
        self.arrays = prompts, rng.integers(1, 10, 8, np.int32), drawn, self.num_drawn
        self.mesh = Mesh(np.array(devices[:2]), "data")

    def plain(self, weights, arrays=None):
        arrays = self.arrays if arrays is None else arrays
        return log_probs(nnx.merge(self.graphdef, weights), **arguments_of(arrays))

    def in_gradient(self, weights, arrays=None, scores_of=None):
        def loss(weights):
            scores = (scores_of or self.plain)(weights, arrays)
            return jnp.sum(scores), scores

        (_, scores), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        return scores, jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients)

    def gradient(self, weights):
        return jax.jit(self.in_gradient)(weights)[0]

    def donated(self, weights):
        return jax.jit(self.in_gradient, donate_argnums=0)(weights)[0]

    def checkpoint(self, weights):
        run = functools.partial(self.in_gradient, scores_of=jax.checkpoint(self.plain))
        return jax.jit(run)(weights, self.arrays)[0]

    def micro_batches(self, weights):
        parts = jax.tree.map(lambda x: jnp.asarray(x).reshape(4, 2, *x.shape[1:]), self.arrays)

        def run(weights):
            def step(total, part):
                scores, updated = self.in_gradient(weights, part)
                return jax.tree.map(jnp.add, total, updated), scores

            return jax.lax.scan(step, weights, parts)

        return jax.jit(run)(weights)[1].reshape(8, -1)

    def shard_map(self, weights):
        spec = PartitionSpec("data")
        sharded = jax.shard_map(
            self.plain,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), spec),
            out_specs=spec,
            check_vma=False,
        )
        run = functools.partial(self.in_gradient, scores_of=sharded)
        return jax.jit(run)(weights, self.arrays)[0]

    def padded(self, weights):
        prompts, *others = self.arrays
        return jax.jit(self.plain)(weights, (np.pad(prompts, ((0, 0), (0, 11))), *others))

    def one_by_one(self, weights):
        rows = [tuple(x[row : row + 1] for x in self.arrays) for row in range(8)]
        return np.concatenate([np.asarray(self.plain(weights, row)) for row in rows])


@pytest.fixture(scope="module")
def loop(model, devices) -> tuple[Loop, np.ndarray]:
    loop = Loop(model, devices)
    plain = np.asarray(loop.plain(loop.weights))
    assert np.count_nonzero(plain) == loop.num_drawn.sum()
    return loop, plain


# In the core, the programs are not optimised.
WAYS = ["checkpoint", "micro_batches", "shard_map"]
FULL = [pytest.mark.slow, pytest.mark.optimised]
ALL_WAYS = [*WAYS, "gradient", "donated", "padded", "one_by_one"]


@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=FULL, id=f"{way}-optimised") for way in ALL_WAYS)]
)
def test_log_probs_have_the_bits_of_the_plain_call(loop, devices, way) -> None:
    loop, plain = loop
    scores = getattr(loop, way)(jax.tree.map(jnp.copy, loop.weights))
    np.testing.assert_array_equal(np.asarray(scores), plain)


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": None}, "num_tokens must be given if prompt_token_ids is an array"),
        ({"num_tokens": np.array([4, 0, 2])}, r"num_tokens must be in 1\.\.4, .* got 0"),
        ({"num_drawn": np.array([1, 2, 3, 4, 5, 6])}, r"num_drawn must be in 0\.\.5, .* got 6"),
        ({"num_drawn": np.ones(3, np.int32)}, r"num_drawn must have B .* = 6"),
        ({"num_drawn": np.ones(6)}, "num_drawn must be an integer array, got float64"),
        (
            {"token_ids": np.maximum(ARRAYS[2], 3) + 40},
            r"token_ids must be in 0\.\.42, the vocabulary, got 43",
        ),
        ({"token_ids": ARRAYS[2] * 1.0}, "token_ids must be an integer array, got float64"),
        (
            {"token_ids": ARRAYS[2][:4], "num_drawn": None},
            "must have the same number of rows for each of the 3 prompts, got 4 rows",
        ),
        (
            {"token_ids": ARRAYS[2][:, :0], "num_drawn": None},
            r"token_ids must have at least one row and one column, got shape \[6, 0\]",
        ),
        ({"temperature": 0.0}, "temperature must be finite and > 0, got 0.0"),
        ({"temperature": TEMPERATURE[:2]}, r"temperature must be one value or have shape \[3\]"),
        ({"numerics": "exakt"}, "numerics must be 'fast' or 'exact', got 'exakt'"),
    ],
)
def test_log_probs_rejects_invalid_arguments(model, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: log_probs(model, **arguments_of(ARRAYS) | changes))


@pytest.mark.parametrize("num_top", [-1, 44, 1.5])
def test_score_tokens_rejects_invalid_numbers_of_top_tokens(model, num_top) -> None:
    with pytest.raises(ValueError, match=r"score_tokens: num_top must be in 0\.\.43, .* got"):
        score_tokens(model, **arguments_of(ARRAYS, num_top=num_top))


def test_traced_values_are_not_checked(model) -> None:
    shapes = jax.eval_shape(functools.partial(log_probs, model), *ARRAYS[:3])
    assert shapes.shape == (6, N) and shapes.dtype == jnp.float32
    drawn = Rollout(jnp.asarray(ARRAYS[2]), jnp.zeros((6, N)), jnp.asarray(ARRAYS[3]))
    run = jax.jit(lambda drawn: drawn.sequences(*ARRAYS[:2]).token_ids)
    assert jax.eval_shape(run, drawn).shape == (6, 4 + N)
