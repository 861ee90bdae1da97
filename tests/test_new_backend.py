"""Tests of examples/new_backend.py: a backend of the user, against float64 and in an engine."""

import dataclasses

import numpy as np
import pytest

from examples.new_backend import LOOP, decode, refusal
from paged_jax import LLM, SamplingParams
from paged_jax.kernels import BACKENDS, backend_for, op
from paged_jax.kernels.backend import Backend, Kernel
from paged_jax.kernels.op import add_backend
from tests.support.paged_batch import PagedBatch, queries
from tests.support.tiny_model import SIZES

LENGTHS, QUERY_LENS = [0, 1, 8, 9, 41], [0, 1, 3, 0, 7]


@pytest.fixture
def loop(monkeypatch) -> dict:
    monkeypatch.setattr(op, "_ADDED", {})
    add_backend("loop", LOOP)
    return {"backend": "loop"}


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}])
def test_loop_over_blocks_matches_float64(loop, options) -> None:
    """Unused blocks and places are NaN."""
    batch = PagedBatch.random(LENGTHS)
    q = queries((len(LENGTHS), max(QUERY_LENS), 6, 16))
    got = batch.attend(q, QUERY_LENS, **loop, **options)
    want = batch.expected(q, QUERY_LENS, **options)
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("pools", "options", "reason"),
    [
        ({}, {"sliding_window": 5}, "no windows"),
        ({}, {"soft_cap": 2.0}, "no windows"),
        ({}, {"sinks": np.zeros(6, np.float32)}, "no windows"),
        ({"dtype": "int8"}, {}, "not quantised"),
    ],
)
def test_calls_that_the_backend_refuses_raise_an_error(loop, pools, options, reason) -> None:
    batch = PagedBatch.random(LENGTHS, **pools)
    with pytest.raises(NotImplementedError, match=f"loop does not support the call: .*{reason}"):
        batch.decode(queries((len(LENGTHS), 6, 16)), **loop, **options)


def test_ops_without_a_kernel_of_the_backend_name_the_others(loop) -> None:
    names = [name for name in BACKENDS if backend_for("write", name)]
    assert "loop" not in names and "xla" in names
    assert backend_for("ragged", "loop") is None
    assert backend_for("decode", "loop") == "loop"


def test_interpret_reaches_a_kernel_that_can_be_interpreted(loop) -> None:
    seen = []

    def run(args, options, interpret=False):
        seen.append(interpret)
        return decode(args, options)

    def refuse(problem, interpret=False):
        return refusal(problem)

    batch, q = PagedBatch.random(LENGTHS), queries((len(LENGTHS), 6, 16))
    with pytest.raises(ValueError, match="interpret needs a backend .* got backend='loop'"):
        batch.decode(q, **loop, interpret=True)
    add_backend("pallas_loop", Backend({"decode": Kernel(run, refuse, can_interpret=True)}))
    for interpret in (False, True):
        batch.decode(q, backend="pallas_loop", interpret=interpret)
    assert seen == [False, True]


def test_engine_runs_on_the_backend(loop, tiny_folder) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    found, expected = (
        LLM(tiny_folder, **SIZES, backend=backend).generate(["the cat sat", "ab"], params)
        for backend in ("loop", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_add_backend_checks_the_name_and_the_platform(loop) -> None:
    assert "loop" in BACKENDS and list(BACKENDS)[-1] == "loop" and len(BACKENDS) == len([*BACKENDS])
    with pytest.raises(ValueError, match="name must not be one of cpu, .*, got xla"):
        add_backend("xla", LOOP)
    with pytest.raises(ValueError, match="backend.platform must be None, got 'cpu'"):
        add_backend("other", dataclasses.replace(LOOP, platform="cpu"))
