"""Tests of the measured default backends of GPUs, from result files to the choice of a backend."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from benchmarks.gpu import defaults
from paged_jax.kernels import gpu_defaults, gpu_device
from paged_jax.kernels.call_table import CallShape
from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.mosaic_gpu import launch
from paged_jax.kernels.op import choose_backend
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.problem import ATTENTION, PoolOp, Problem
from tests.kernels.test_triton_write import problem as problem_of_write
from tests.support.kernel_cases import Case

needs_mosaic_gpu = pytest.mark.skipif(
    launch.refusal(interpret=True) is not None, reason="this jax is too old for Mosaic GPU"
)

H200, H100 = GpuInfo("NVIDIA H200", 132), GpuInfo("NVIDIA H100 80GB HBM3", 132)
KEY = "D128 G4 C16 q:bfloat16 pool:bfloat16"
SHAPE = CallShape.parse(KEY)
ENTRY = {"backend": "triton", "measured": "now"}


def problem(op: PoolOp = "decode", pool_dtype="bfloat16", **changes) -> Problem:
    sizes = {"B": 2, "K": 2, "H": 8, "C": 16, "D": 128, "M": 4, "N": 64} | changes
    return Problem(
        op=op, sizes=tuple(sizes.items()), q_dtype=jnp.dtype("bfloat16"),
        pool_dtype=jnp.dtype(pool_dtype), has_sinks=False, options=Options(), lanes=sizes["D"],
    )  # fmt: skip


def record(op, key=KEY, name="64 x 8192", **us: float) -> dict:
    return {"op": op, "key": key, "name": name, "us": us}


def report(*records: dict, kind: str | None = H200.kind) -> dict:
    about = {"accelerator": kind, "versions": {"jax": "0.12.0"}, "commit": "0123abc"}
    return about | {"results": list(records)}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Return a function that generates a table from reports, which is then used."""

    def use(*reports: dict) -> None:
        files = [tmp_path / f"results-{i}.json" for i in range(len(reports))]
        for file, each in zip(files, reports, strict=True):
            file.write_text(json.dumps(each))
        table = tmp_path / "table.json"
        assert defaults.main([*map(str, files), "--table", str(table)]) == 0
        monkeypatch.setenv(gpu_defaults.DEFAULTS_VARIABLE, str(table))
        gpu_defaults._measured.cache_clear()

    yield use
    gpu_defaults._measured.cache_clear()


def chosen(problem: Problem, gpu: GpuInfo = H200) -> tuple[str, str]:
    with gpu_device.assume(gpu):
        return choose_backend(problem, "cuda")


def test_the_shipped_table_is_empty() -> None:
    """No device has been measured, so that Triton is preferred everywhere."""
    assert gpu_defaults.parse(defaults.TABLE.read_text()) == {}
    assert chosen(problem()) == ("triton", "these are the kernels for cuda")


@needs_mosaic_gpu
def test_the_faster_backend_is_chosen_for_each_device_and_op(measured) -> None:
    measured(
        report(
            record("decode", mosaic_gpu=600.0, triton=640.0),
            record("decode", name="1 x 131072", mosaic_gpu=200.0, triton=200.0),
            record("prefill", mosaic_gpu=110.0, triton=109.0),
        ),
        report(record("decode", mosaic_gpu=800.0, triton=790.0), kind=H100.kind),
    )
    reason = "it was measured faster on this device, {}".format
    assert chosen(problem()) == ("mosaic_gpu", reason(H200.kind))
    assert chosen(problem("prefill")) == ("triton", reason(H200.kind))
    assert chosen(problem(), H100) == ("triton", reason(H100.kind))
    # Without a measurement, Triton is preferred.
    unmeasured = ("triton", "these are the kernels for cuda")
    assert chosen(problem("ragged")) == unmeasured
    assert chosen(problem("prefill"), H100) == unmeasured
    assert chosen(problem(), GpuInfo("", 132)) == unmeasured
    assert chosen(problem(pool_dtype="int8")) == unmeasured
    for other in (problem(D=64), problem(C=32), problem(H=16)):
        assert chosen(other) == unmeasured, other
    assert choose_backend(problem(), "cpu").backend != "mosaic_gpu"


@needs_mosaic_gpu
def test_programs_have_the_kernel_that_was_measured_faster(measured) -> None:
    case = Case("decode")

    def text() -> str:
        return case.lower("cuda", gpu=H200).as_text()

    assert "gpu.triton" in text() and "mosaic_gpu" not in text()
    measured(report(record("decode", mosaic_gpu=1.0, triton=2.0)))
    assert "mosaic_gpu" in text() and "gpu.triton" not in text()


@needs_mosaic_gpu
def test_calls_that_a_kernel_does_not_support_fall_through(measured, monkeypatch) -> None:
    key = "D128 G4 C4 q:bfloat16 pool:bfloat16"  # blocks of 4 tokens are too small for it
    measured(
        report(
            record("decode", key, mosaic_gpu=1.0, triton=2.0),
            record("prefill", mosaic_gpu=1.0, triton=2.0),
            record("write", "D128 C16 q:float64 pool:float64", mosaic_gpu=1.0, triton=2.0),
        ),
    )
    assert chosen(problem(C=4)) == ("triton", "these are the kernels for cuda")
    # Prompts need compute capability 9.0.
    assert chosen(problem("prefill"))[0] == "mosaic_gpu"
    blackwell = H200._replace(compute_capability=(10, 0))
    assert chosen(problem("prefill"), blackwell)[0] == "triton"
    backend, reason = chosen(problem_of_write("float64", D=128, C=16))
    assert backend == "xla"
    assert reason.index("mosaic_gpu does not support") < reason.index("triton does not support")
    # A future version of JAX without Triton.
    monkeypatch.setattr("paged_jax.kernels.triton.pallas.refusal", lambda: "it is missing")
    assert chosen(problem("ragged"))[0] == "mosaic_gpu"


@pytest.mark.parametrize(
    "times",
    [
        [{"triton": 2.0}],  # it failed, or its result was wrong
        [{"triton": 2.0, "mosaic_gpu": 1.0}, {}],  # not reached in time
        [{"triton": 2.0, "mosaic_gpu": 1.0}, {"mosaic_gpu": 1.0}],
        [{"triton": 2.0, "mosaic_gpu": 1.0}, {"triton": 1.0, "mosaic_gpu": 1.1}],
    ],
)
def test_derive_takes_no_backend_that_was_not_at_least_as_fast_everywhere(times) -> None:
    records = [record("decode", name=str(i), **us) for i, us in enumerate(times)]
    [entry] = defaults.derive(report(*records))[H200.kind]["decode"].values()
    assert entry["backend"] == "triton"
    assert entry["us"] == {str(i): us for i, us in enumerate(times)}
    assert entry["measured"] == "jax 0.12.0, commit 0123abc"


def test_derive_needs_times_of_triton_on_a_gpu(tmp_path, capsys) -> None:
    assert defaults.derive(report(record("decode", mosaic_gpu=1.0))) == {}
    file, table = tmp_path / "results.json", tmp_path / "table.json"
    file.write_text(json.dumps(report(record("decode", triton=1.0, mosaic_gpu=1.0), kind=None)))
    assert defaults.main([str(file), "--table", str(table)]) == 2
    assert "must have times of the backend triton on a GPU" in capsys.readouterr().err
    assert not table.exists()


def test_update_table_keeps_other_entries(tmp_path) -> None:
    path = tmp_path / "table.json"
    decode, write = (record(op, mosaic_gpu=1.0, triton=2.0) for op in ("decode", "write"))
    defaults.update_table(path, [report(decode, write), report(write, kind=H100.kind)])
    # The same call is measured again.
    defaults.update_table(path, [report(record("decode", mosaic_gpu=3.0, triton=2.0))])
    table = gpu_defaults.parse(path.read_text())
    assert table == {
        H200.kind: {"decode": {SHAPE: "triton"}, "write": {SHAPE: "mosaic_gpu"}},
        H100.kind: {"write": {SHAPE: "mosaic_gpu"}},
    }


def test_key_of_a_problem() -> None:
    ops: tuple[PoolOp, ...] = (*ATTENTION, "rope_write")
    for op in ops:
        assert str(CallShape.of(problem(op))) == KEY
    write = problem_of_write("int8", D=64)
    assert str(CallShape.of(write)) == f"D64 C{write['C']} q:int8 pool:int8"
    # Values with their own pool of another size, and values in the keys.
    assert str(CallShape.of(problem(U=64))).startswith("D128 U64 G4")
    assert str(CallShape.of(problem(U=128))).startswith("D128 G4")
    latent = dataclasses.replace(problem(U=128), shares_values=True)
    assert str(CallShape.of(latent)).startswith("D128 U128 G4")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "the table must be an object"),
        ('{"NVIDIA H200": 3}', "NVIDIA H200 must be an object, got 3"),
        ({"train": {}}, "one of decode, .*, got 'train'"),
        ({"decode": {"D128": {"measured": "now"}}}, "must look like .* got 'D128'"),
        (
            {"decode": {KEY: {"measured": "now"}}},
            "decode, D128 .*: backend must be a string, got None",
        ),
        ({"decode": {KEY: {"backend": "triton"}}}, "'measured' must say how"),
        ({"decode": {KEY.replace("G4 ", ""): ENTRY}}, "must have a group"),
    ],
)
def test_parse_refuses_a_malformed_table(table, message) -> None:
    text = table if isinstance(table, str) else json.dumps({"NVIDIA H200": table})
    with pytest.raises(ValueError, match=message):
        gpu_defaults.parse(text)
