"""Tests of the benchmark that times all ops on each backend for GPUs."""

import dataclasses
import itertools
import json
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.attention import cases as attention_cases
from benchmarks.attention.cases import POOL_DTYPES, Heads
from benchmarks.attention.programs import JaxCall
from benchmarks.common.device_time import Rates
from benchmarks.gpu import backends, defaults
from benchmarks.gpu.backends import OpCase, make_op_inputs
from paged_jax.kernels import op as kernel_op
from paged_jax.kernels.call_table import CallShape
from paged_jax.kernels.mosaic_gpu import launch
from paged_jax.kernels.problem import PoolOp
from tests.benchmarks.test_attention import random_numbers
from tests.support.kernel_cases import lower

RATES = Rates(memory=1000.0, matmul=1.0)
CASES = [*backends.attention_cases(), *backends.update_cases()]


@pytest.fixture(autouse=True)
def tiny(monkeypatch) -> None:
    """Replace a model by a small one, with random values that compile nothing."""
    monkeypatch.setattr(attention_cases, "_ROTATED_BYTES", 1)
    for module in (attention_cases, backends):
        monkeypatch.setattr(module, "random_values", random_numbers)
    monkeypatch.setitem(attention_cases.MODELS, "TinyLlama", Heads(4, 2, 64))


def small_cases() -> list[OpCase]:
    return backends.quick_op_cases(CASES)


def test_cases_hold_every_op_and_dtype() -> None:
    everything = set(itertools.product(get_args(PoolOp), POOL_DTYPES))
    for some in (CASES, small_cases()):
        assert {(case.op, case.pool_dtype) for case in some} == everything
    for make in (backends.attention_cases, backends.update_cases):
        # One of each comes first, so that a short run measures all of them.
        kinds = [(case.op, case.pool_dtype) for case in make()]
        assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))
    names = [(case.op, case.key, str(case)) for case in CASES]
    assert len(set(names)) == len(names)


def test_case_counts_bytes_and_flops() -> None:
    chunks = OpCase("ragged", 32, 1024, 100)
    assert chunks.query_lens.tolist() == ([100] + [1] * 15) * 2
    # Query i of a chunk sees 925 + i tokens.
    pairs = 2 * sum(range(925, 1025)) + 30 * 1024
    assert chunks.flops == 4 * 32 * 128 * pairs
    assert chunks.num_bytes == 32 * 1024 * 2 * 8 * 128 * 2 + 2 * 230 * 32 * 128 * 2
    write = OpCase("write", 64, 128, pool_dtype="int8")
    assert write.num_bytes == 64 * 2 * 8 * (128 * 4 + 128 + 4) and write.flops == 0
    rope = OpCase("rope_write", 1, 64, 64)
    assert rope.num_bytes == 64 * (16 * 128 * 2 + 48 * 128 * 4)
    latent = OpCase("prefill", 1, 256, 128, model="DeepSeek-V2-Lite")
    # Keys of 576 elements, and outputs of 512; query i sees 129 + i tokens.
    assert latent.flops == 2 * 16 * (576 + 512) * sum(range(129, 257))
    assert latent.num_bytes == 256 * 576 * 2 + 128 * 16 * (576 + 512) * 2
    latent = dataclasses.replace(latent, op="ragged", batch=16)
    assert latent.num_bytes == 16 * 256 * 576 * 2 + (128 + 15) * 16 * (576 + 512) * 2
    copy = OpCase("copy_blocks", 8, 32)
    assert copy.num_bytes == 2 * 8 * copy.num_layers * 16 * 16 * 128 * 2


@pytest.mark.skipif(
    launch.refusal(interpret=True) is not None, reason="this jax is too old for Mosaic GPU"
)
@pytest.mark.parametrize("case", small_cases(), ids=lambda case: f"{case.op}-{case.key}")
def test_both_backends_are_lowered_for_a_gpu_with_the_same_inputs(case) -> None:
    inputs = make_op_inputs(case)
    for backend, text in (("triton", "gpu.triton"), ("mosaic_gpu", "mosaic_gpu")):
        call = inputs.call(backend)
        program = lower(
            lambda start, arrays, op=call.op: op(start, 0, arrays), inputs.start, call.arrays,
            platform="cuda",
        ).as_text()  # fmt: skip
        assert text in program, backend


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: f"{case.op}-{case.key}")
def test_key_of_a_case_is_the_key_of_its_call(case, monkeypatch) -> None:
    problems, describe = [], kernel_op.Op.problem

    def note(self, args, options):
        problems.append(describe(self, args, options))
        return problems[-1]

    monkeypatch.setattr(kernel_op.Op, "problem", note)
    inputs = make_op_inputs(case)
    call = inputs.call("xla")
    jax.eval_shape(lambda start, arrays: call.op(start, 0, arrays), inputs.start, call.arrays)
    assert {(problem.op, CallShape.of(problem)) for problem in problems} == {(case.op, case.key)}


@pytest.mark.slow
@pytest.mark.parametrize("op", get_args(PoolOp))
def test_measure_times_the_backends_and_finds_no_error(op) -> None:
    [case] = [case for case in small_cases() if (case.op, case.pool_dtype) == (op, "int8")]
    record = backends.measure(case, RATES, num_rounds=1, turn_seconds=0.0)
    assert list(record["us"]) == backends.backends_to_time(op)
    assert not record["left_out"]
    assert (record["op"], record["key"], record["name"]) == (op, str(case.key), str(case))
    assert f"{op}, {case.key}, {case}: " in backends.record_line(record)


def test_backends_to_time_are_those_of_the_device(monkeypatch) -> None:
    assert backends.backends_to_time("decode") == ["cpu", "xla"]
    assert backends.backends_to_time("copy_blocks") == ["xla"]

    class Gpu:
        platform = "gpu"

    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    for op in get_args(PoolOp):
        assert backends.backends_to_time(op) == ["triton", "mosaic_gpu"]


def wrong_op(start, layer, arrays):
    return jax.tree.map(lambda x: x + jnp.ones_like(x), start)


@pytest.mark.parametrize("op", ["ragged", "write"])
def test_measure_drops_a_wrong_result(op, monkeypatch) -> None:
    """Also if only few elements of a pool are wrong."""
    case = next(x for x in small_cases() if (x.op, x.pool_dtype) == (op, "bfloat16"))
    inputs = make_op_inputs(case)

    def call(backend):
        return inputs.call(backend) if backend == "xla" else JaxCall(wrong_op, ())

    monkeypatch.setattr(backends, "make_op_inputs", lambda case: inputs._replace(call=call))
    monkeypatch.setattr(backends, "backends_to_time", lambda op: ["xla", "other"])
    record = backends.measure(case, RATES, num_rounds=1, turn_seconds=0.0)
    assert list(record["us"]) == ["xla"]
    assert "the result has a relative error of" in record["left_out"]["other"]


def test_result_error_is_relative_to_the_changes() -> None:
    before = np.full(10**4, 100.0, np.float32)
    expected = before.copy()
    expected[0] = 101
    assert backends.result_error(expected, expected, before) == 0
    assert backends.result_error(before, expected, before) == 1
    assert backends.result_error(before, expected, None) == pytest.approx(1e-4, rel=0.01)
    assert np.isnan(backends.result_error(np.full(3, np.nan), np.ones(3), None))


def test_run_records_cases_without_times(tmp_path, monkeypatch, capsys) -> None:
    def fail(case, rates):
        raise RuntimeError("out of memory\nand a long story")

    monkeypatch.setattr(backends, "measure_rates", lambda: RATES)
    monkeypatch.setattr(backends, "measure", fail)
    path = tmp_path / "new" / "results.json"
    for budget, why in ((60, "RuntimeError: out of memory"), (-1, "not reached in time")):
        report = backends.run(CASES[:2], path, budget)
        assert json.loads(path.read_text()) == report
        assert [record["us"] for record in report["results"]] == [{}, {}]
        assert [record["left_out"][""] for record in report["results"]] == [why, why]
        assert capsys.readouterr().out.count(why) == 2
        assert defaults.derive(report | {"accelerator": "NVIDIA H200"}) == {}


def test_only_decode_has_an_op_of_jax(monkeypatch) -> None:
    """And not for latent attention."""

    class Gpu:
        platform = "gpu"

    made = []
    peer = backends.KNOWN[backends.JAX_OP]._replace(
        make=lambda case, inputs: made.append(case) or {}
    )
    monkeypatch.setattr(backends, "KNOWN", {backends.JAX_OP: peer})
    monkeypatch.setattr(jax, "devices", lambda: [Gpu()])
    for case in small_cases():
        others = make_op_inputs(case).others
        is_known = case.op == "decode" and case.model == "TinyLlama"
        assert list(others) == ([backends.JAX_OP] if is_known else [])
    assert len(made) == len(POOL_DTYPES)


@pytest.mark.slow
def test_quick_run_measures_all_ops(tmp_path) -> None:
    path = tmp_path / "results.json"
    arguments = ["--quick", "--rounds", "1", "--dtypes", "bfloat16", "--json", str(path)]
    assert backends.main(arguments) == 0
    report = json.loads(path.read_text())
    expected = [case.op for case in small_cases() if case.pool_dtype == "bfloat16"]
    assert [record["op"] for record in report["results"]] == expected
    assert all(record["us"] for record in report["results"])
    assert report["accelerator"] is None
