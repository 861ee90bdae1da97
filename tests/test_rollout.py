"""A rollout is what the steps of decoding would give, as one function inside other programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.models.llama import Llama
from paged_jax.rollout import Rollout, rollout
from paged_jax.runner import DecodeState, decode_state, decode_steps
from paged_jax.sampling.params import SamplingParams
from tests.support.random_model import random_llama
from tests.support.tiny_model import BOS, CONFIG

PROMPTS = np.array([[BOS, 5, 6, 7, 8], [BOS, 20, 3, 0, 0], [BOS, 0, 0, 0, 0]], np.int32)
NUM_TOKENS = np.array([5, 3, 1], np.int32)
B, T, N = *PROMPTS.shape, 6
RUN = jax.jit(rollout, static_argnames=("max_tokens", "stop_token_ids", "block_size"))


@pytest.fixture(scope="module")
def model() -> Llama:
    """One layer: there are many programs, and what is tested is how they choose tokens."""
    return random_llama(dataclasses.replace(CONFIG, num_hidden_layers=1), scale=0.4)


# What is traced, one for each row: tests that change only these share a program.
DTYPES = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32,
    "seed": np.uint32,
}  # fmt: skip


def run(model, prompts=PROMPTS, num_tokens=NUM_TOKENS, stop_token_ids=(), **options) -> Rollout:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, **options}
    rows = {name: np.broadcast_to(value, B).astype(DTYPES[name]) for name, value in options.items()}
    return RUN(
        model,
        prompts,
        num_tokens,
        max_tokens=N,
        block_size=4,
        stop_token_ids=stop_token_ids,
        **rows,
    )


@pytest.mark.slow
def test_rollout_is_what_decode_steps_draws(model) -> None:
    ways = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=10, min_p=0.05),
    ]
    cache = model.create_cache(num_slots=B, max_length=16, num_blocks=16, block_size=4)
    slots = jnp.arange(B, dtype=jnp.int32)
    _, cache, _ = jax.jit(Llama.prefill)(model, cache, PROMPTS, slots, NUM_TOKENS - 1)
    state = DecodeState.create(cache, CONFIG.vocab_size)
    for row, params in enumerate(ways):
        state = decode_state.assign(
            state,
            row,
            params,
            token_ids=PROMPTS[row, : NUM_TOKENS[row]].tolist(),
            num_prompt_tokens=int(NUM_TOKENS[row]),
            seed=2**32 - 5,
            sample_index=row,
            max_length=99,
        )
    steps = jax.jit(decode_steps, static_argnames="max_steps")
    tokens, _ = steps(model, state, slots, N, max_steps=N + 2)

    names = ("temperature", "top_k", "top_p", "min_p")
    each = {name: [getattr(params, name) for params in ways] for name in names}
    out = run(model, seed=2**32 - 5, **each)
    np.testing.assert_array_equal(out.token_ids, tokens.token_ids[:N].T)
    np.testing.assert_allclose(out.logprobs, tokens.logprobs[:N].T, atol=1e-5)
    assert not tokens.token_ids[N:].any() and not tokens.logprobs[N:].any()
    assert out.num_tokens.tolist() == [N] * B
    assert len(set(out.token_ids[0].tolist())) > 1


@pytest.mark.slow
def test_a_prompt_may_end_with_a_stop_token(model) -> None:
    stop = int(PROMPTS[0][NUM_TOKENS[0] - 1])
    out = run(model, temperature=0.0, stop_token_ids=(stop,))
    assert out.num_tokens[0] > 0


@pytest.mark.slow
def test_rollout_ends_rows_at_their_stop_tokens(model) -> None:
    """Those that it is given, and by default the end tokens of the model."""
    whole = run(model, temperature=0.0)
    stop = int(whole.token_ids[0, 2])
    out = run(model, temperature=0.0, stop_token_ids=(stop, 99))
    for row in range(B):
        ids = whole.token_ids[row].tolist()
        n = ids.index(stop) + 1 if stop in ids else N
        assert int(out.num_tokens[row]) == n
        assert out.token_ids[row].tolist() == ids[:n] + [0] * (N - n)
        np.testing.assert_allclose(out.logprobs[row, :n], whole.logprobs[row, :n], atol=1e-5)
        assert not out.logprobs[row, n:].any()
    assert int(out.num_tokens[0]) < N

    ending = nnx.clone(model)
    ending.config = dataclasses.replace(model.config, eos_token_ids=(stop, 99))
    by_default = run(ending, temperature=0.0, stop_token_ids=None)
    assert by_default.num_tokens.tolist() == out.num_tokens.tolist()
    np.testing.assert_array_equal(by_default.token_ids, out.token_ids)
    # None but those that it is given.
    np.testing.assert_array_equal(run(ending, temperature=0.0).token_ids, whole.token_ids)


@pytest.mark.slow
def test_rollout_takes_a_key_for_each_row(model) -> None:
    """And one number for all rows, of what else it takes."""
    seed = np.array([4, 2, 2**32 - 3], np.uint32)
    keys = jax.vmap(jax.random.key)(seed)
    statics = {"max_tokens": N, "block_size": 4, "stop_token_ids": ()}
    out = RUN(model, PROMPTS, NUM_TOKENS, **statics, temperature=0.9, top_k=30, seed=keys)
    of_numbers = run(model, seed=seed, temperature=0.9, top_k=30)
    np.testing.assert_array_equal(out.token_ids, of_numbers.token_ids)


def test_rows_with_the_same_prompt_differ(model) -> None:
    prompts, num_tokens = np.repeat(PROMPTS[:1], B, axis=0), np.repeat(NUM_TOKENS[:1], B)
    out = run(model, prompts, num_tokens, seed=1)
    assert len({tuple(row) for row in out.token_ids.tolist()}) == B
    assert out.token_ids.tolist() != run(model, prompts, num_tokens, seed=2).token_ids.tolist()


@pytest.mark.slow
def test_rollout_within_a_scan_of_training_steps(model) -> None:
    """Policy gradient in one program: draw with the key of a number, score, update, and again."""
    graphdef, weights = nnx.split(model)

    def loss(weights, step):
        model = nnx.merge(graphdef, weights)
        statics = {"max_tokens": N, "block_size": 4, "stop_token_ids": ()}
        out = rollout(model, PROMPTS, NUM_TOKENS, **statics, seed=jax.random.key(step))
        positions = NUM_TOKENS[:, None] + np.arange(N)[None]
        rows = np.arange(B)[:, None]
        sequences = jnp.zeros((B, T + N), jnp.int32).at[:, :T].set(PROMPTS)
        sequences = sequences.at[rows, positions].set(out.token_ids)
        logprobs = jax.nn.log_softmax(model(sequences))
        chosen = logprobs[rows, positions - 1, out.token_ids]
        # A reward for the tokens of the lower half.
        advantage = jnp.where(out.token_ids < CONFIG.vocab_size // 2, 1.0, -1.0)
        # Of what the rollout reports too, which must pass no gradient: the loop in it has none.
        ratio = jnp.exp(chosen - out.logprobs)
        return -jnp.mean(advantage * ratio), (out, chosen, jnp.mean(advantage))

    def train(weights, step):
        (_, aux), gradients = jax.value_and_grad(loss, has_aux=True)(weights, step)
        weights = jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradients)
        return weights, (*aux, norm(gradients))

    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

    steps = jnp.arange(20, dtype=jnp.uint32)
    trained, (out, chosen, reward, norms) = jax.jit(
        lambda weights: jax.lax.scan(train, weights, steps)
    )(weights)
    assert np.isfinite(norms).all() and (norms > 0).all()
    # The cache of each step holds what that step's weights gave, and no other's.
    np.testing.assert_allclose(out.logprobs, chosen, atol=1e-3)
    assert float(reward[-5:].mean()) > float(reward[:5].mean()) + 0.2

    first = run(model, seed=0)
    np.testing.assert_array_equal(out.token_ids[0], first.token_ids)
    last = run(nnx.merge(graphdef, trained), seed=19)
    assert last.token_ids.tolist() != run(model, seed=19).token_ids.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": NUM_TOKENS[:2]}, "num_tokens must have B .* = 3"),
        ({"num_tokens": NUM_TOKENS + 3}, r"num_tokens must be in 1\.\.5, the width of prompt_tok"),
        ({"num_tokens": NUM_TOKENS * 0}, r"num_tokens must be in 1\.\.5, .* got 0"),
        (
            {"prompt_token_ids": PROMPTS + 999},
            "prompt_token_ids must be in 0..42, the vocabulary, got 999",
        ),
        ({"prompt_token_ids": PROMPTS[0]}, r"must have shape \[B, T\], got \[5\]"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer, got 0"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 0.5}, "rollout: seed must be an integer or a key, got float32"),
        ({"seed": jax.random.key(0, impl="rbg")}, r"a threefry2x32 key, got key<rbg>"),
        ({"seed": jax.random.PRNGKey(0)}, r"seed must be one value or have shape \[3\], .* \[2\]"),
        ({"top_p": np.ones((3, 1))}, r"top_p must be one value or have shape \[3\]"),
        ({"max_tokens": 60}, r"at most max_position_embeddings = 64 of the model, got 5 \+ 60\."),
        ({"prompt_token_ids": PROMPTS * 1.0}, "rollout: prompt_token_ids must be an integer array"),
        (
            {"prompt_token_ids": PROMPTS[:0], "num_tokens": NUM_TOKENS[:0]},
            r"rollout: prompt_token_ids must hold a token, got shape \[0, 5\]",
        ),
    ],
)
def test_mistakes_are_refused(model, changes, message) -> None:
    arguments = {"prompt_token_ids": PROMPTS, "num_tokens": NUM_TOKENS, "max_tokens": N}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: rollout(model, **{**arguments, **changes}))
