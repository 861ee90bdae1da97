"""Tests of `rollout` against `decode_steps`, and of `LLM.rollout`."""

import dataclasses
import functools
import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM
from paged_jax.kernels.platforms import default_kv_dtype
from paged_jax.models.decoder import Decoder
from paged_jax.rollouts import Rollout, read_rows, rollout
from paged_jax.runner import decode_state
from paged_jax.runner.decode_state import DecodeState
from paged_jax.runner.decoding import decode_steps
from paged_jax.sampling.params import SamplingParams
from paged_jax.sampling.state import Assignment
from tests.support.random_model import random_llama
from tests.support.tiny_model import BOS, CONFIG, SIZES
from tests.support.workload import check_empty

PROMPTS = np.array([[BOS, 5, 6, 7, 8], [BOS, 20, 3, 0, 0], [BOS, 0, 0, 0, 0]], np.int32)
NUM_TOKENS = np.array([5, 3, 1], np.int32)
B, T, N = *PROMPTS.shape, 6
RUN = jax.jit(rollout, static_argnames=("max_tokens", "stop_token_ids", "block_size"))


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Return a model with a single layer, because the tests compile many programs."""
    return random_llama(dataclasses.replace(CONFIG, num_hidden_layers=1), scale=0.4)


# Traced arguments with a value for each row. Tests that change only these share a program.
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
def test_rollout_equals_decode_steps(model) -> None:
    ways = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=10, min_p=0.05),
    ]
    cache = model.create_cache(num_slots=B, max_length=16, num_blocks=16, block_size=4)
    slots = jnp.arange(B, dtype=jnp.int32)
    _, cache, _ = jax.jit(Decoder.prefill)(model, cache, PROMPTS, slots, NUM_TOKENS - 1)
    state = DecodeState.create(cache, CONFIG.vocab_size)
    for row, params in enumerate(ways):
        assignment = Assignment(
            row,
            params,
            token_ids=PROMPTS[row, : NUM_TOKENS[row]].tolist(),
            num_prompt_tokens=int(NUM_TOKENS[row]),
            seed=2**32 - 5,
            sample_index=row,
            max_length=99,
        )
        state = decode_state.assign(state, [assignment])
    steps = jax.jit(decode_steps, static_argnames="max_steps")
    tokens, _ = steps(model, state, slots, N, max_steps=N + 2)

    names = ("temperature", "top_k", "top_p", "min_p")
    each = {name: [getattr(params, name) for params in ways] for name in names}
    out = run(model, seed=2**32 - 5, **each)
    np.testing.assert_array_equal(out.token_ids, tokens.token_ids[:N].T)
    np.testing.assert_allclose(out.logprobs, tokens.draws.logprobs[:N].T, atol=1e-5)
    assert not tokens.token_ids[N:].any() and not tokens.draws.logprobs[N:].any()
    assert out.num_drawn.tolist() == [N] * B
    assert len(set(out.token_ids[0].tolist())) > 1


@pytest.mark.slow
def test_rollout_accepts_a_prompt_that_ends_with_a_stop_token(model) -> None:
    stop = int(PROMPTS[0][NUM_TOKENS[0] - 1])
    out = run(model, temperature=0.0, stop_token_ids=(stop,))
    assert out.num_drawn[0] > 0


@pytest.mark.slow
def test_rollout_ends_rows_at_their_stop_tokens(model) -> None:
    """By default, the stop tokens are the end tokens of the model."""
    whole = run(model, temperature=0.0)
    stop = int(whole.token_ids[0, 2])
    out = run(model, temperature=0.0, stop_token_ids=(stop, 99))
    for row in range(B):
        ids = whole.token_ids[row].tolist()
        n = ids.index(stop) + 1 if stop in ids else N
        assert int(out.num_drawn[row]) == n
        assert out.token_ids[row].tolist() == ids[:n] + [0] * (N - n)
        np.testing.assert_allclose(out.logprobs[row, :n], whole.logprobs[row, :n], atol=1e-5)
        assert not out.logprobs[row, n:].any()
    assert int(out.num_drawn[0]) < N

    ending = nnx.clone(model)
    ending.config = dataclasses.replace(model.config, eos_token_ids=(stop, 99))
    by_default = run(ending, temperature=0.0, stop_token_ids=None)
    assert by_default.num_drawn.tolist() == out.num_drawn.tolist()
    np.testing.assert_array_equal(by_default.token_ids, out.token_ids)
    # Only the given tokens stop a row.
    np.testing.assert_array_equal(run(ending, temperature=0.0).token_ids, whole.token_ids)


@pytest.mark.slow
def test_rollout_accepts_a_key_for_each_row(model) -> None:
    """The other arguments have a single value for all rows."""
    seed = np.array([4, 2, 2**32 - 3], np.uint32)
    keys = jax.vmap(jax.random.key)(seed)
    statics = {"max_tokens": N, "block_size": 4, "stop_token_ids": ()}
    out = RUN(model, PROMPTS, NUM_TOKENS, **statics, temperature=0.9, top_k=30, seed=keys)
    of_numbers = run(model, seed=seed, temperature=0.9, top_k=30)
    np.testing.assert_array_equal(out.token_ids, of_numbers.token_ids)


def test_rollout_draws_different_tokens_for_equal_prompts(model) -> None:
    prompts, num_tokens = np.repeat(PROMPTS[:1], B, axis=0), np.repeat(NUM_TOKENS[:1], B)
    out = run(model, prompts, num_tokens, seed=1)
    assert len({tuple(row) for row in out.token_ids.tolist()}) == B
    assert out.token_ids.tolist() != run(model, prompts, num_tokens, seed=2).token_ids.tolist()


@pytest.mark.slow
def test_rollout_runs_in_a_scan_of_training_steps(model) -> None:
    """The scan is a policy gradient: it draws samples, scores them and updates the weights."""
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
        # Tokens of the lower half of the vocabulary are rewarded.
        advantage = jnp.where(out.token_ids < CONFIG.vocab_size // 2, 1.0, -1.0)
        # The loss includes logprobs of the rollout, which must not pass gradients.
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
    # The cache of each step has K and V of the weights of that step.
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
        ({"num_tokens": PROMPTS > 0}, "If this is a mask, pass mask.sum"),
        ({"num_tokens": NUM_TOKENS + 3}, r"num_tokens must be in 1\.\.5, the number of columns"),
        ({"num_tokens": NUM_TOKENS * 0}, r"num_tokens must be in 1\.\.5, .* got 0"),
        (
            {"prompt_token_ids": PROMPTS + 999},
            "prompt_token_ids must be in 0..42, the vocabulary, got 999",
        ),
        ({"prompt_token_ids": PROMPTS[0]}, r"must have shape \[B, T\], got \[5\]"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer, got 0"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 0.5}, "rollout: seed must be an integer or a key, got float64"),
        ({"seed": jax.random.key(0, impl="rbg")}, r"a threefry2x32 key, got key<rbg>"),
        ({"seed": np.array([3, 2**32, 1])}, r"seed must be in \[0, 2\*\*32\), got 4294967296"),
        ({"seed": np.arange(2)}, r"seed must be one value or have shape \[3\], .* \[2\]"),
        ({"top_p": np.ones((3, 1))}, r"top_p must be one value or have shape \[3\]"),
        ({"temperature": -1.0}, "rollout: temperature must be finite and >= 0, got -1.0"),
        ({"temperature": None}, "rollout: temperature must be finite and >= 0, got None"),
        ({"temperature": np.array([1.0, np.inf, 0.0])}, "temperature must be finite and >= 0, got"),
        ({"top_p": 0.0}, r"rollout: top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": np.array([0.5, 1.5, 1.0])}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": 2.5}, "rollout: top_k must be an integer >= -1"),
        ({"top_k": jnp.array([3, -2, 1])}, "top_k must be an integer >= -1 and < .* got -2"),
        ({"min_p": 2}, r"rollout: min_p must be in \[0, 1\], got 2"),
        ({"stop_token_ids": (3, 1.5)}, "stop_token_ids must hold token ids >= 0 and .* got 1.5"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must hold token ids >= 0 and .* got -1"),
        ({"max_tokens": 60}, r"at most max_position_embeddings = 64 of the model, got 5 \+ 60\."),
        ({"prompt_token_ids": PROMPTS * 1.0}, "rollout: prompt_token_ids must be an integer array"),
        (
            {"prompt_token_ids": PROMPTS[:0], "num_tokens": NUM_TOKENS[:0]},
            r"rollout: prompt_token_ids must have at least one row .* got shape \[0, 5\]",
        ),
    ],
)
def test_rollout_rejects_invalid_arguments(model, changes, message) -> None:
    arguments = {"prompt_token_ids": PROMPTS, "num_tokens": NUM_TOKENS, "max_tokens": N}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: rollout(model, **{**arguments, **changes}))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("num_prompts", [1, 2, 4])
def test_rollout_rejects_a_raw_key(model, impl, num_prompts) -> None:
    """Its two or four words look like the seeds of two or four prompts."""
    key = jax.random.PRNGKey(7, impl=impl)
    prompts, num_tokens = np.resize(PROMPTS, (num_prompts, T)), np.ones(num_prompts, np.int32)

    def draw(seed):
        return rollout(model, prompts, num_tokens, max_tokens=1, seed=seed)

    for seed in (key, np.asarray(key), jnp.stack([key] * num_prompts)):
        with pytest.raises(ValueError, match="seed must not be a raw key of jax.random.PRNGKey"):
            jax.eval_shape(draw, seed)
        with pytest.raises(ValueError, match="seed must not be a raw key of jax.random.PRNGKey"):
            jax.eval_shape(lambda seed=seed: draw(seed))
    wrapped = jax.random.wrap_key_data(jax.random.PRNGKey(7))
    jax.eval_shape(draw, wrapped)
    jax.eval_shape(draw, np.arange(num_prompts))


def test_rollout_rejects_traced_sizes(model) -> None:
    with pytest.raises(ValueError, match="max_tokens must be .* got .*Name it in static_argnames"):
        jax.jit(rollout)(model, PROMPTS, NUM_TOKENS, max_tokens=4)


# Samples of a prompt


@pytest.fixture(scope="module")
def samples(model):
    """Return functions for 3 samples of a prompt with at most 8 tokens, and for equal prompts."""
    ways = {"max_tokens": N, "block_size": 4, "stop_token_ids": (), "seed": np.uint32(9)}

    def draw(prompt: np.ndarray, num_tokens: int, *, num_samples: int, times: int = 1) -> Rollout:
        prompts, lengths = np.tile(prompt, (times, 1)), np.full(times, num_tokens, np.int32)
        return SAMPLE(model, prompts, lengths, num_samples=num_samples, **ways)

    return draw


SAMPLE = jax.jit(
    rollout, static_argnames=("max_tokens", "num_samples", "stop_token_ids", "block_size")
)
PROMPT = np.array([BOS, *range(5, 12)], np.int32)


@pytest.mark.slow
def test_samples_equal_rows_with_repeated_prompts(samples) -> None:
    """All prompt lengths are tested, because the worst length decides the number of blocks."""
    for length in range(1, PROMPT.size + 1):
        out = samples(PROMPT, length, num_samples=3)
        each = samples(PROMPT, length, num_samples=1, times=3)
        np.testing.assert_array_equal(out.token_ids, each.token_ids)
        np.testing.assert_allclose(out.logprobs, each.logprobs, atol=1e-5)
        assert out.num_drawn.tolist() == [N] * 3, "blocks sufficed"
        assert len(set(map(tuple, out.token_ids.tolist()))) == 3


def test_samples_share_their_prompt(model, monkeypatch) -> None:
    prefill, computed = Decoder.prefill, []

    def note_and_prefill(model, cache, token_ids, *args, **options):
        computed.append(token_ids.shape)
        return prefill(model, cache, token_ids, *args, **options)

    monkeypatch.setattr(Decoder, "prefill", note_and_prefill)

    def num_blocks(num_samples: int, times: int) -> int:
        """Return the number of blocks in the pool for samples of two prompts."""
        prompts, num_tokens = np.tile(PROMPT, (2 * times, 8))[:, :58], np.full(2 * times, 58)
        sizes = {"max_tokens": N, "block_size": 4, "num_samples": num_samples}
        traced = jax.make_jaxpr(lambda: rollout(model, prompts, num_tokens, **sizes))()
        shapes = [out.aval.shape for eqn in traced.jaxpr.eqns for out in eqn.outvars]
        # Pools have shape [layers, blocks, heads = 2, block_size = 4, head_dim = 8].
        [blocks] = {shape[1] for shape in shapes if len(shape) == 5 and shape[2:] == (2, 4, 8)}
        return blocks

    # The longest prompt has 58 tokens: 57 are computed before the loop, and 63 are in the cache at
    # the end. A prompt of 56 tokens needs the most blocks: 13 full blocks, and 3 for each sample.
    assert num_blocks(4, 1) == 2 * (13 + 4 * 3) and num_blocks(1, 4) == 8 * 16
    assert computed == [(2, 57), (8, 57)]


def test_samples_use_the_parameters_of_their_prompt(model) -> None:
    changes = {"temperature": np.array([0.0, 1.0, 0.0])}
    with pytest.raises(ValueError, match=r"temperature must be one value or have shape \[3\]"):
        shapes = {name: np.ones(12) for name in changes}
        jax.eval_shape(lambda: rollout(model, PROMPTS, NUM_TOKENS, max_tokens=N, **shapes))
    out = jax.eval_shape(
        lambda: rollout(model, PROMPTS, NUM_TOKENS, max_tokens=N, num_samples=4, **changes)
    )
    assert out.token_ids.shape == out.logprobs.shape == (12, N) and out.num_drawn.shape == (12,)


# Rows of tokens


@pytest.mark.parametrize("as_type", [np.asarray, jnp.asarray])
def test_rollout_joins_prompts_and_samples(as_type) -> None:
    tokens, counts = as_type(np.arange(21, 33).reshape(4, 3)), as_type(np.array([3, 1, 0, 2]))
    drawn = Rollout(tokens, as_type(np.zeros((4, 3))), counts)
    prompts = as_type(np.array([[5, 6, 9], [7, 9, 9]]))
    for given in ((prompts, as_type(np.array([2, 1]))), ([[5, 6], [7]],)):
        joined = drawn.sequences(*given)
        assert joined.token_ids.tolist() == [
            [5, 6, 21, 22, 23, 0][: joined.token_ids.shape[1]],
            [5, 6, 24, 0, 0, 0][: joined.token_ids.shape[1]],
            [7, 0, 0, 0, 0, 0][: joined.token_ids.shape[1]],
            [7, 30, 31, 0, 0, 0][: joined.token_ids.shape[1]],
        ]
        assert joined.num_tokens.tolist() == [5, 3, 1, 3]
        assert [np.flatnonzero(row).tolist() for row in joined.mask] == [[2, 3, 4], [2], [], [1, 2]]
    assert drawn.mask.tolist() == [
        [True] * 3,
        [True] + [False] * 2,
        [False] * 3,
        [True] * 2 + [False],
    ]
    assert isinstance(drawn.mask, type(tokens))
    with pytest.raises(ValueError, match="each of the 3 prompts, got 4 rows"):
        drawn.sequences([[5], [6], [7]])


def test_rollout_names_how_it_was_drawn(model) -> None:
    """Its names are static, so that it leaves `jit` and `scan`."""
    half = random_llama(model.config, dtype=jnp.bfloat16)

    def draw(model, **options):
        return jax.eval_shape(lambda: rollout(model, PROMPTS, NUM_TOKENS, max_tokens=2, **options))

    def kind(drawn):
        return drawn.numerics, drawn.cache_dtype

    assert kind(draw(model)) == ("fast", "float32")
    assert kind(draw(half)) == ("fast", default_kv_dtype(jnp.bfloat16, "cpu").name)
    assert kind(draw(half, cache_dtype=jnp.float32)) == ("fast", "float32")
    assert kind(draw(model, numerics="exact", cache_dtype="int8")) == ("exact", "int8")
    assert kind(draw(model.with_numerics("exact", "bfloat16"))) == ("exact", "bfloat16")
    drawn = jax.tree.map(lambda x: x, draw(model, numerics="exact"))
    assert kind(drawn) == ("exact", "float32")


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        (PROMPTS, None, "f: counts must be given if rows is an array, got None"),
        ([[1], [2, 3]], [1, 2], "f: rows must be an array, got rows of .* or leave out counts"),
        ([1, 2], None, r"f: rows must be a list .* got an element with 0 dimensions. Pass \[row\]"),
        ([[[1]]], None, "got an element with 2 dimensions"),
    ],
)
def test_read_rows_rejects_invalid_rows(rows, counts, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows("f", "rows", rows, "counts", counts)


def test_read_rows_pads_lists() -> None:
    rows, counts = read_rows("f", "rows", [[3], np.array([4, 2, 1]), ()], "counts", None)
    assert rows.tolist() == [[3, 0, 0], [4, 2, 1], [0, 0, 0]] and counts.tolist() == [1, 3, 0]
    # Floats are not truncated: `check_prompts` rejects them.
    assert read_rows("f", "rows", [[1], [0.5]], "counts", None)[0].dtype == np.float64
    assert read_rows("f", "rows", [], "counts", None)[0].shape == (0, 0)


def test_rollout_accepts_lists(model) -> None:
    lists = [row[:n] for row, n in zip(PROMPTS.tolist(), NUM_TOKENS, strict=True)]
    sizes = {"max_tokens": N, "block_size": 4, "stop_token_ids": ()}

    def lowered(*prompts):
        return jax.make_jaxpr(lambda: rollout(model, *prompts, **sizes))()

    (of_lists, of_arrays) = (lowered(*given) for given in ((lists,), (PROMPTS, NUM_TOKENS)))
    assert str(of_lists) == str(of_arrays)
    for ours, theirs in zip(of_lists.consts, of_arrays.consts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# LLM.rollout


@pytest.fixture(scope="module")
def llm(tiny_model) -> LLM:
    return LLM(tiny_model, **SIZES)


@pytest.mark.slow
def test_llm_rollout_draws_the_same_tokens_as_rollout(tiny_model, llm) -> None:
    """The engine has blocks and slots for a few rows only, and transfers are checked."""
    sizes = {"max_tokens": N, "num_samples": 4, "block_size": 4, "stop_token_ids": ()}
    way = {"seed": np.uint32(7), "temperature": np.float32(0.9)}
    expected = SAMPLE(tiny_model, PROMPTS, NUM_TOKENS, **sizes, **way)
    params = SamplingParams(n=4, max_tokens=N, seed=7, temperature=0.9, ignore_eos=True, logprobs=3)
    with jax.transfer_guard("disallow_explicit"):
        drawn = llm.rollout(PROMPTS, NUM_TOKENS, params)
    for ours, theirs in zip(*map(jax.tree.leaves, (drawn, expected)), strict=True):
        assert isinstance(ours, np.ndarray) and ours.dtype == theirs.dtype
    np.testing.assert_array_equal(drawn.token_ids, expected.token_ids)
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(drawn.num_drawn, expected.num_drawn)
    check_empty(llm)
    # Arrays on the device and parameters for each prompt are accepted too.
    some = llm.rollout(jnp.asarray(PROMPTS), jnp.asarray(NUM_TOKENS), [params] * B)
    np.testing.assert_array_equal(some.token_ids, drawn.token_ids)


def test_llm_rollout_uses_the_parameters_of_each_row(llm) -> None:
    whole = llm.rollout(PROMPTS, NUM_TOKENS, SamplingParams(temperature=0, max_tokens=N))
    stop = int(whole.token_ids[0, 2])
    greedy = {"temperature": 0, "stop_token_ids": [stop], "ignore_eos": True}
    bounds = (N, 2, N)
    ways = [SamplingParams(**greedy, max_tokens=bound) for bound in bounds]
    out = llm.rollout(PROMPTS, NUM_TOKENS, ways)
    for row, bound in enumerate(bounds):
        ids = whole.token_ids[row].tolist()
        n = min(ids.index(stop) + 1 if stop in ids else N, bound)
        assert out.num_drawn[row] == n
        assert out.token_ids[row].tolist() == ids[:n] + [0] * (N - n)
        np.testing.assert_allclose(out.logprobs[row, :n], whole.logprobs[row, :n], atol=1e-5)
        assert not out.logprobs[row, n:].any()
    lists = [row[:n].tolist() for row, n in zip(PROMPTS, NUM_TOKENS, strict=True)]
    np.testing.assert_array_equal(llm.rollout(lists, None, ways).token_ids, out.token_ids)
    assert (out.numerics, out.cache_dtype) == ("fast", "float32")
    # Without max_tokens, the result is as wide as the longest row.
    free = llm.rollout(PROMPTS, NUM_TOKENS, SamplingParams(**greedy, max_tokens=None))
    assert free.token_ids.shape[1] == free.num_drawn.max() > 2


def test_llm_rollout_counts_rows_from_the_first_prompt(llm) -> None:
    """Engines that divide a batch draw what a single engine draws for all of it."""
    params = SamplingParams(n=2, max_tokens=N, seed=3, ignore_eos=True)
    whole = llm.rollout(np.tile(PROMPTS, (2, 1)), np.tile(NUM_TOKENS, 2), params).token_ids
    assert len(set(map(tuple, whole.tolist()))) == 4 * B
    second = llm.rollout(PROMPTS, NUM_TOKENS, params, first_prompt=B).token_ids
    np.testing.assert_array_equal(second, whole[2 * B :])


def test_engine_can_sleep_between_rollouts(llm, tiny_model) -> None:
    """Sleep frees memory, weights can be updated, and nothing is compiled again."""
    params = SamplingParams(n=2, max_tokens=N, seed=3, ignore_eos=True)
    other = jax.tree.map(lambda x: 1.5 * x, nnx.state(tiny_model))
    before = llm.rollout(PROMPTS, NUM_TOKENS, params)
    llm.update_params(other)
    changed = llm.rollout(PROMPTS, NUM_TOKENS, params)
    assert changed.token_ids.tolist() != before.token_ids.tolist()
    gc.collect()
    held, pool = live_bytes(), llm.cache.nbytes
    compiled: list[str] = []

    def listen(event: str, duration: float, **details) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with jax.transfer_guard("disallow_explicit"):
            llm.sleep(level=2)
            assert live_bytes() <= held - pool - sum(x.nbytes for x in jax.tree.leaves(other))
            llm.update_params(nnx.state(tiny_model))
            llm.wake_up()
            again = llm.rollout(PROMPTS, NUM_TOKENS, params)
            llm.sleep()
            llm.wake_up()
            llm.update_params(other)
            last = llm.rollout(PROMPTS, NUM_TOKENS, params)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    np.testing.assert_array_equal(again.token_ids, before.token_ids)
    np.testing.assert_array_equal(last.token_ids, changed.token_ids)
    llm.update_params(nnx.state(tiny_model))
    check_empty(llm)


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": NUM_TOKENS[:2]}, r"LLM\.rollout: num_tokens must have B .* = 3"),
        ({"num_tokens": PROMPTS > 0}, "If this is a mask, pass mask.sum"),
        ({"prompt_token_ids": [[1], [1, 2], [3]]}, "rows of different lengths. Pad each row at"),
        ({"num_tokens": NUM_TOKENS * 0}, r"LLM\.rollout: num_tokens must be in 1\.\.5, .* got 0"),
        ({"prompt_token_ids": PROMPTS + 999}, r"must be in 0\.\.42, the vocabulary, got 999"),
        ({"prompt_token_ids": PROMPTS * 1.0}, "must be an integer array, got float64"),
        (
            {"prompt_token_ids": PROMPTS[:0], "num_tokens": NUM_TOKENS[:0]},
            "at least one row and one column",
        ),
        ({"first_prompt": -2}, r"LLM\.rollout: first_prompt must be an integer >= 0, got -2"),
        (
            {"sampling_params": [SamplingParams()]},
            r"one value or a list with one value per prompt \(3\), got 1",
        ),
        (
            {"sampling_params": [SamplingParams(n=n) for n in (1, 2, 1)]},
            r"n must be the same for all prompts, got \[1, 2\]",
        ),
        (
            {"prompt_token_ids": np.tile(PROMPTS, (1, 14))[:, :70], "num_tokens": NUM_TOKENS + 64},
            r"prompts\[0\]: request: the prompt must have at most 63 tokens",
        ),
    ],
)
def test_llm_rollout_rejects_invalid_arguments(llm, changes, message) -> None:
    arguments = {"prompt_token_ids": PROMPTS, "num_tokens": NUM_TOKENS}
    with pytest.raises(ValueError, match=message):
        llm.rollout(**{**arguments, **changes})
    check_empty(llm)


def test_llm_rollout_raises_on_nan(tiny_model) -> None:
    bad = jax.tree.map(lambda x: x * jnp.nan, nnx.state(tiny_model))
    llm = LLM(nnx.merge(nnx.graphdef(tiny_model), bad), **SIZES)
    with pytest.raises(FloatingPointError, match=r"LLM\.rollout: the model gave NaN"):
        llm.rollout(PROMPTS, NUM_TOKENS, SamplingParams(max_tokens=N))
    check_empty(llm)


@pytest.mark.slow
def test_rollout_allocates_blocks_for_windows_only(monkeypatch) -> None:
    """The same tokens are drawn in a single pass that frees no blocks."""
    layer_types = ("sliding_attention", "full_attention")
    config = dataclasses.replace(CONFIG, sliding_window=6, layer_types=layer_types)
    model = random_llama(config, scale=0.4)
    prompts = np.random.default_rng(0).integers(5, CONFIG.vocab_size, (2, 18), np.int32)
    made = []

    def create_cache(self, **sizes):
        made.append(create(self, **sizes))
        return made[-1]

    create = Decoder.create_cache
    monkeypatch.setattr(Decoder, "create_cache", create_cache)
    outs = []
    for most in (10**6, 5):
        monkeypatch.setattr(sys.modules[Rollout.__module__], "_MAX_TOKENS_PER_PASS", most)
        run = functools.partial(
            rollout, max_tokens=13, num_samples=2, block_size=4, stop_token_ids=(4, 20)
        )
        outs.append(jax.jit(run)(model, prompts, np.array([18, 7], np.int32)))
    for got, want in zip(*map(jax.tree.leaves, outs), strict=True):
        np.testing.assert_array_equal(got, want)
    assert outs[0].num_drawn.tolist() != [13] * 4, "a row that stops before others"
    assert outs[0].num_drawn.max() == 13
    one, many = ([group.num_blocks for group in cache.groups] for cache in made)
    # In each of the 4 rows, a window of 6 tokens needs 3 blocks of 4, and 4 more tokens 1 block.
    assert many[-1] == 4 * 4 < one[-1]
    assert many[:-1] == one[:-1]
