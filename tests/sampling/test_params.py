"""Checks of sampling parameters."""

import math

import numpy as np
import pytest

from paged_jax.sampling.params import SamplingParams

NAN, INF = math.nan, math.inf
BAD_PARAMS = {
    "n": [0, -1, 1.0, True, 2**14 + 1, 10**9],
    "temperature": [-0.1, NAN, INF, 10**400, "1", True, None],
    "top_p": [0.0, -0.5, 1.0001, NAN, 10**400, None],
    "top_k": [-2, 1.5, True, 2**31],
    "min_p": [-0.01, 1.01, NAN, 10**400],
    "presence_penalty": [-2.01, 2.01, NAN, -(10**400)],
    "frequency_penalty": [-2.01, 2.01, NAN, 10**400],
    "repetition_penalty": [0.0, -1.0, INF, NAN, 10**400],
    "seed": [-2, 2**63, 1.0, -1.0, True],
    "stop": ["", ["a", ""], [1], 5],
    "stop_token_ids": [[-1], [1.5], [True], "12", 7],
    "allowed_token_ids": [[], [-1], [1.5], [True], "12", 7, [2**31]],
    "bad_words": [[""], "word", [1], 5, [["a"]], ["a"] * 129],
    "max_tokens": [-1, -5, 1.5, True],
    "min_tokens": [-1, 17, 0.5],
    "logprobs": [-1, 21, True, 1.0],
    "logit_bias": [
        {-1: 0.0},
        {"3": 1.0},
        {1: NAN},
        {1: INF},
        {1: 10**400},
        {True: 1.0},
        [(1, 1.0)],
    ],  # fmt: skip
    "ignore_eos": [1, None],
    "skip_special_tokens": ["yes"],
    "detokenize": [None],
    "include_stop_str_in_output": [0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_PARAMS.items() for value in values]
)
def test_sampling_params_rejects(name, value):
    with pytest.raises(ValueError, match=f"^SamplingParams: {name} must .*, got .*\\. [A-Z]"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
        {"seed": 2**63 - 1, "logprobs": 20, "n": 2**14, "max_tokens": 1},
        {"seed": 0, "logprobs": 0, "max_tokens": None, "min_tokens": 10_000},
        {"min_tokens": 16, "max_tokens": 16},
        {"allowed_token_ids": (2**31 - 1,), "bad_words": tuple(map(str, range(128)))},
        {"temperature": np.float32(0.5), "top_k": np.int32(4), "seed": np.int64(3)},
    ],
)
def test_sampling_params_accepts_the_bounds(options):
    params = SamplingParams(**options)
    assert all(getattr(params, name) == value for name, value in options.items())


def test_sampling_params_normalises_and_hashes():
    bias = {1: 2.0}
    params = SamplingParams(stop="END", stop_token_ids=[3, 4], logit_bias=bias)
    assert params.stop == ("END",) and params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()
    bias[1] = NAN
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(stop=["END"], stop_token_ids=(3, 4)))
    assert params != SamplingParams(stop=["END"], stop_token_ids=(3, 4))
