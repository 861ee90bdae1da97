"""Tests of the step benchmark: its counts, the programs that it runs, and its report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, step
from benchmarks.common.device_time import Rates
from benchmarks.step import ENGINE, Bench, Case, KernelTime, Variant, kernel_lines, kernel_times
from paged_jax.kernels.kv_dtypes import KVDtype
from tests.support.tiny_model import CONFIG

RATES = Rates(memory=1000.0, matmul=1.0)


def test_case_counts_the_weights_that_it_reads() -> None:
    """The embedding table (of 8,030,261,248 parameters) is not read, and a chunk needs no head."""
    table = 128256 * 4096
    assert Case("8B").weight_bytes == 2 * (8030261248 - table)
    assert Case("8B", chunk=2048).weight_bytes == 2 * (8030261248 - 2 * table)
    assert Case("135M", dtype="float32").weight_bytes == 4 * 134515008


def test_case_counts_bytes_and_flops_of_attention() -> None:
    token = 2 * 32 * 8 * 128 * 2
    # The first of two steps reads 101 tokens of each sequence, the second 102.
    assert Case("8B", batch=4, context=100).kv_bytes("gpu", num_steps=2) == 4 * 101.5 * token
    int8 = 2 * 32 * 8 * (128 + 4)
    assert Case("8B", context=100, kv_dtype="int8").kv_bytes("gpu") == 101 * int8
    assert Case("8B", context=100, chunk=50).kv_bytes("gpu") == 150 * token
    head = 128256 * 4096
    layers = 8030261248 - 2 * head
    pair = 4 * 32 * 32 * 128
    assert Case("8B", batch=2, context=9).flops() == 2 * (2 * (layers + head) + 10 * pair)
    # Query i of the chunk sees 6 + i tokens.
    assert Case("8B", context=5, chunk=3).flops() == 2 * 3 * layers + pair * (6 + 7 + 8)


def record(ms: float, case: Case) -> dict:
    """Return the record of a run with the rates RATES."""
    return step.make_record(case, RATES, {ENGINE: ms / 1e3}, 1, "gpu")


def answers(*records: dict, accelerator: str | None = "NVIDIA H200") -> list[str]:
    lines = harness.goal_lines(
        step.GOALS, {"results": list(records), "accelerator": accelerator}, accelerator
    )
    return [line[:12].strip() for line in lines]


# The weights of 8B take 15.01 ms at 1000 GB/s, K and V of 129 tokens 0.0169 ms per sequence.
@pytest.mark.parametrize(
    ("goal", "case", "good", "bad"),
    [
        (0, Case("8B"), 18.7, 18.9),
        (1, Case("8B", batch=64), 18.9, 19.1),
        (2, Case("135M"), 0.45, 0.451),
        # 2 * 6979 M * 2048 operations, and 1.1 T of attention, at 1 TFLOP/s.
        (3, Case("8B", chunk=2048, context=0), 53900, 54200),
    ],
)
def test_each_goal_asks_its_own_cases(goal, case, good, bad) -> None:
    assert answers(record(good, case))[goal] == "met"
    assert answers(record(bad, case))[goal] == "NOT met"
    assert answers(record(good, case), accelerator=None)[goal] == "not measured"


def test_the_first_jobs_answer_every_goal() -> None:
    jobs = step.make_jobs(step.gpu_cases(), None, "gpu")
    first = [case for case, variants in jobs[: len(step.goal_cases())] if not variants]
    assert "not measured" not in answers(*(record(1, case) for case in first))
    varied = {case: variants for case, variants in jobs if variants}
    assert set(varied) == set(first)
    assert "rematerialised" in varied[Case("8B", batch=64)]
    assert "bare step" not in varied[Case("8B", chunk=2048, context=0)]
    assert {case for case, _ in jobs} == set(step.gpu_cases())


@pytest.fixture
def tiny(monkeypatch) -> Case:
    monkeypatch.setitem(step.MODELS, "tiny", CONFIG)
    monkeypatch.setattr(step, "MAX_MODEL_LEN", 256)
    return Case("tiny", batch=2, context=20, dtype="float32")


PROFILE = """
planes { name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_12_0" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_dot_7" } }
  event_metadata { key: 3 value { id: 3 name: "paged_decode" } }
  lines { name: "Stream #14(Compute)"
    events { metadata_id: 1 duration_ps: 6000000 } events { metadata_id: 2 duration_ps: 2000000 }
    events { metadata_id: 3 duration_ps: 3000000 } }
  lines { name: "XLA Ops" events { metadata_id: 3 duration_ps: 3000000 } } }
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 1 } } }
"""


def test_kernel_times_are_summed_by_kind(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    profile = jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    (tmp_path / "run" / "host.xplane.pb").write_bytes(profile)
    times = kernel_times(tmp_path, 2)
    assert times == [KernelTime("gemm_fusion_dot", 1.0, 4.0), KernelTime("paged_decode", 0.5, 1.5)]
    first, others = kernel_lines(times, 1)
    assert first.split() == "4.0 us 1.0 launches gemm_fusion_dot".split()
    assert others.split() == "1.5 us 0.5 launches 1 others".split()


def measure(case: Case, variants: list[str], profile=None) -> dict:
    kept: list[dict] = []
    session = step.Session(RATES, budget=600, num_rounds=1, num_dispatches=2, save=kept.append)
    session.measure(case, variants, profile)
    return kept[-1]


@pytest.mark.slow
def test_measure_times_the_programs_of_an_engine(tiny, monkeypatch) -> None:
    # A loop has room for 8 decode steps, so these are too few for a figure.
    monkeypatch.setitem(step.VARIANTS, "too few", Variant(steps_per_dispatch=16))
    names = ["one step a dispatch", "sampled, top-k and top-p", "bare step", "too few"]
    found = measure(tiny, names)
    assert list(found["ms"]) == [ENGINE, *names[:3]]
    assert list(found["failed"]) == ["too few"]
    assert "must append 16 tokens per slot, got [8, 8]" in found["failed"]["too few"]
    assert min(found["ms"].values()) > 0
    assert str(tiny) in step.record_line(found)


@pytest.mark.slow
def test_measure_times_chunks_and_writes_a_profile(tiny, tmp_path) -> None:
    found = measure(Case("tiny", context=8, chunk=24, dtype="float32"), [], tmp_path)
    assert list(found["ms"]) == [ENGINE] and found["op"] == "prefill"
    assert list(tmp_path.rglob("*.xplane.pb")) and found["kernels"] == []  # a CPU has none


@pytest.mark.slow
def test_a_bench_reads_random_numbers_in_blocks_that_lie_anywhere(tiny) -> None:
    case = Case("tiny", batch=3, context=50, dtype="float32", kv_dtype="int8")
    model = step.random_model(case)
    bench = Bench(case, model, 16)
    cache = bench._executor.state.cache
    assert cache.lengths.tolist() == [50] * 3
    ids = np.asarray(cache.block_tables)[:, :4].ravel()
    assert sorted(set(ids)) != ids.tolist() and len(set(ids)) == 12
    assert cache.k.dtype == jnp.int8 and len(np.unique(np.asarray(cache.k))) > 200
    assert cache.v_scale is not None and float(jnp.std(cache.v_scale)) > 0
    # Variants change the engine's settings: queries of int8 pools are bfloat16, and one kernel
    # rotates and writes.
    for name, has_casts, is_fused in (
        (ENGINE, True, True),
        ("float32 queries", False, True),
        ("rotation and write apart", True, False),
        (ENGINE, True, True),
    ):
        variant = step.VARIANTS[name]
        call = bench._calls(variant)[0]
        with step._traced_with(variant):
            traced = call.program.trace(
                bench._executor.weights.arrays, bench._executor.state, *call.args, **call.static
            )
        text = str(traced.jaxpr)
        assert ("bf16[" in text) == has_casts
        assert ("paged_rope_write" in text, "paged_write" in text) == (is_fused, not is_fused)
    assert KVDtype.of("int8").query_dtype == jnp.bfloat16


def test_variants_compile_with_their_options(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(jax, "jit", lambda function, **options: asked.append(options))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    class Jitted:
        __wrapped__ = staticmethod(lambda weights, state: state)

    program = step.Program("decode", Jitted())
    assert step._changed(program, step.VARIANTS[ENGINE]) is program
    names = ("rematerialised", "float32 queries", "rotation and write apart")
    for name in (*names, "without command buffers"):
        step._changed(program, step.VARIANTS[name])
    remat = {"xla_disable_hlo_passes": "rematerialization"}
    options = [each["compiler_options"] for each in asked]
    assert options == [{}, remat, remat, {**remat, "xla_gpu_enable_command_buffer": ""}]
    assert all(each["donate_argnums"] == 1 for each in asked)


def test_run_ends_in_time_and_keeps_what_fails(monkeypatch) -> None:
    class Session(step.Session):
        def measure(self, case, variants, profile=None):
            if case.model == "1B":
                raise RuntimeError("out of memory\nand a long story")
            self._save(make_record(case))
            if case.model == "135M":
                self._budget = harness.Budget(-1.0)

    def make_record(case: Case) -> dict:
        return record(1, case)

    monkeypatch.setattr(step, "Session", Session)
    monkeypatch.setattr(step, "measure_rates", lambda: RATES)
    saved: list[dict] = []
    jobs = [(Case(model), []) for model in ("8B", "1B", "135M", "quick")]
    options = {"budget": 60, "num_rounds": 1, "num_dispatches": 1}
    found = step.run(jobs, save=saved.append, **options)
    assert [each["case"]["model"] for each in found["results"]] == ["8B", "135M"]
    [failed] = found["skipped"]["failed"]
    assert failed.endswith("RuntimeError: out of memory")
    assert found["skipped"]["not reached in time"] == [str(Case("quick"))]
    assert json.loads(json.dumps(saved[-1])) == found


@pytest.mark.peers
def test_plot_draws_a_report(tmp_path) -> None:
    varied = step.make_record(Case("8B"), RATES, {ENGINE: 0.004, "bare step": 0.003}, 64, "gpu")
    found = {
        "results": [varied, record(1, Case("135M"))],
        "accelerator": "NVIDIA H200",
        "versions": {"jax": "0"},
    }
    path = tmp_path / "plot.png"
    step.plot(harness.plotter(), found).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_main_needs_a_case(capsys) -> None:
    assert step.main(["--quick", "--models", "8B"]) == 2
    assert "these options exclude all cases" in capsys.readouterr().err
