"""Filters of logits against float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling import filters
from paged_jax.sampling.filters import filter_logits
from tests.support import oracles_sampling as oracles
from tests.support.kernel_cases import lower

jit_filter = jax.jit(filter_logits)
V = 70


def random_logits(*shape, seed=0, scale=3.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 299},
    {"top_k": 300},
    {"top_k": 5000},
    {"top_p": 1e-6},
    {"top_p": 1e-60},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 1, "top_p": 0.5, "min_p": 0.5},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.05, "temperature": 0.6},
    {"top_p": 0.7, "temperature": 3.0},
    {"top_p": 0.7, "temperature": 0.05},
]


def check_filter(logits):
    """Check each filter on a row of a batch: kept tokens exactly, probabilities closely."""
    columns = {
        name: jnp.array([f.get(name, default) for f in FILTERS], dtype)
        for name, default, dtype in (
            ("temperature", 1.0, jnp.float32),
            ("min_p", 0.0, jnp.float32),
            ("top_k", 0, jnp.int32),
            ("top_p", 1.0, jnp.float32),
        )
    }
    log_weights = np.asarray(jit_filter(jnp.asarray(logits), **columns))
    for row, options in enumerate(FILTERS):
        want = oracles.kept_probabilities(logits[row], **options)
        kept = np.isfinite(log_weights[row])
        np.testing.assert_array_equal(kept, want > 0, err_msg=str(options))
        got = np.exp(log_weights[row].astype(np.float64))
        np.testing.assert_allclose(
            got / got.sum(), want, rtol=3e-6, atol=1e-12, err_msg=str(options)
        )


@pytest.mark.parametrize("seed", range(4))
def test_filter_logits_matches_the_oracle(seed):
    # With a larger scale the lowest temperature would round weights to 0 in float64.
    check_filter(random_logits(len(FILTERS), 300, seed=seed, scale=2.0))


@pytest.mark.parametrize("seed", range(4))
def test_filter_logits_breaks_ties_by_token_id(seed):
    # With multiples of 1/2, every cut of 300 tokens is at a tie, and the maximum is a tie.
    logits = np.round(random_logits(len(FILTERS), 300, seed=seed, scale=1.0) * 2) / 2
    check_filter(np.minimum(logits, 1.5))


def test_filter_logits_keeps_the_first_of_equal_logits():
    kept = jit_filter(
        jnp.zeros((3, 10)),
        temperature=jnp.ones(3),
        min_p=jnp.array([0.0, 0.0, 1.0]),
        top_k=jnp.array([3, 0, 0]),
        top_p=jnp.array([1.0, 0.5, 1.0]),
    )
    assert np.isfinite(kept).sum(axis=1).tolist() == [3, 5, 10]
    assert np.isfinite(kept)[0, :3].all() and np.isfinite(kept)[1, :5].all()


def test_filter_logits_separates_adjacent_floats():
    # Adjacent float32 values of both signs and around zero: any rounding would merge them.
    up = np.float32(np.inf)
    one = np.nextafter(np.float32(1), up)
    rows = np.array(
        [
            [1.0, one, np.nextafter(one, up), -5.0],
            [-1.0, -one, -np.nextafter(one, up), -50.0],
            [0.0, 1e-30, -1e-30, -1.0],
        ],
        np.float32,
    )
    kept = jit_filter(
        jnp.asarray(rows),
        temperature=jnp.full(3, 7.0),
        min_p=jnp.zeros(3),
        top_k=jnp.array([2, 2, 2]),
        top_p=jnp.ones(3),
    )
    assert np.isfinite(kept).tolist() == [
        [False, True, True, False],
        [True, True, False, False],
        [True, True, False, False],
    ]


def test_filter_logits_never_keeps_minus_infinity():
    logits = random_logits(2, 40)
    logits[:, 5:] = -np.inf
    kept = jit_filter(
        jnp.asarray(logits),
        temperature=jnp.full(2, 1e30),
        min_p=jnp.zeros(2),
        top_k=jnp.array([30, 0]),
        top_p=jnp.array([1.0, 0.999999]),
    )
    assert np.isfinite(kept).sum(axis=1).tolist() == [5, 5]


@pytest.mark.parametrize("num_bits", [1, 2, 4])
def test_search_cut_finds_the_same_cuts_with_any_number_of_passes(num_bits):
    """GPUs try 15 cuts in a pass, CPUs try one."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**32, (64, 40), dtype=np.uint64).astype(np.uint32).view(np.float32)
    rows[np.isnan(rows)] = -np.inf
    rows[:4] = [[-np.inf], [np.inf], [0.0], [np.finfo(np.float32).max]]
    rows[4, ::2] = -0.0
    wanted = rng.integers(0, 42, 64).astype(np.int32)

    find = jax.jit(filters.search_cut, static_argnames="num_bits")
    cuts = find(rows, wanted, num_bits=num_bits)
    weighed = find(rows, wanted / 4, np.full(rows.shape, 0.25, np.float32), num_bits=num_bits)
    np.testing.assert_array_equal(weighed, cuts)
    for row, number, cut in zip(rows, wanted, cuts, strict=True):
        # The largest float that `number` entries reach: a value of the row, or the largest float.
        ordered = np.sort(row)[::-1]
        want = np.inf if number == 0 else ordered[number - 1] if number <= 40 else -np.inf
        assert cut == min(want, np.finfo(np.float32).max)


@pytest.mark.parametrize(("platform", "num_passes"), [("cpu", 32), ("cuda", 8)])
def test_filter_logits_uses_8_passes_on_gpus(platform, num_passes):
    rows = [jax.ShapeDtypeStruct((2,), dtype) for dtype in ("float32", "float32", "int32")]
    options = dict(zip(("temperature", "min_p", "top_k"), rows, strict=True)) | {"top_p": rows[0]}
    logits = jax.ShapeDtypeStruct((2, 5000), "float32")

    def function(logits, *values):
        return filter_logits(logits, **dict(zip(options, values, strict=True)))

    text = lower(function, logits, *options.values(), platform=platform).as_text()
    loops = re.findall(r"cond \{\s*%\w+ = stablehlo.constant dense<(\d+)>", text)
    assert loops == 4 * [str(num_passes)], "for top_k, for top_p, and for both"


def test_filter_logits_rejects_wrong_shapes():
    with pytest.raises(ValueError, match="filter_logits: top_p must have S"):
        filter_logits(
            jnp.zeros((2, 3)),
            temperature=jnp.ones(2),
            min_p=jnp.zeros(2),
            top_k=jnp.zeros(2, jnp.int32),
            top_p=jnp.ones(3),
        )
