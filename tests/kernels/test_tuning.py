"""Tests of the launch parameters of the Triton kernels, and of the tuner that measures them."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

from benchmarks.attention import cases as attention_cases
from benchmarks.attention import tune as tune_kernels
from benchmarks.common.device_time import Rates
from paged_jax.kernels import gpu_device
from paged_jax.kernels.call_table import CallShape
from paged_jax.kernels.gpu_device import GpuInfo
from paged_jax.kernels.op import choose_backend
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.triton import tuning
from paged_jax.kernels.triton.tuning import DecodeParams, PrefillParams
from tests.support.gpus import GPUS

ENTRY = {"step_tokens": 32, "num_warps": 2, "num_stages": 4, "measured": "jax 0.0, commit 0"}
SHAPE = CallShape(128, 4, 16, "bfloat16", "bfloat16")


def table(entry=ENTRY, op="decode", shape=str(SHAPE)) -> str:
    return json.dumps({"NVIDIA H200": {op: {shape: entry}}})


@pytest.fixture
def measured(monkeypatch):
    """Return a function that replaces the table of measurements."""
    return lambda text: monkeypatch.setattr(tuning, "_measured", lambda: tuning.parse(text))


def decode_params(kind="NVIDIA H200", **changes) -> DecodeParams:
    return tuning.decode_params(kind, SHAPE._replace(**changes))


def test_parse_accepts_the_shipped_table() -> None:
    devices = tuning.parse(tune_kernels.TABLE.read_text())
    assert all(kind.startswith("NVIDIA") for kind in devices)


def test_params_are_measured_parameters(measured) -> None:
    measured(table())
    assert decode_params() == DecodeParams(32, 2, 4)
    measured(table(ENTRY | {"query_rows": 64}, "prefill"))
    assert tuning.prefill_params("NVIDIA H200", SHAPE) == PrefillParams(64, 32, 2, 4)


@pytest.mark.parametrize(
    "unlike",
    [{"kind": "NVIDIA H100"}, {"head_dim": 64}, {"q_dtype": "float32"}, {"pool_dtype": "int8"}],
)
def test_params_of_other_tiles_follow_the_rules(measured, unlike) -> None:
    measured("{}")
    rule = decode_params(**unlike)
    measured(table())
    assert decode_params(**unlike) == rule != DecodeParams(32, 2, 4)


def test_params_of_the_nearest_shape(measured) -> None:
    near, far = (
        CallShape(128, 8, 16, "bfloat16", "bfloat16"),
        SHAPE._replace(group=1, block_size=64),
    )
    entries = {str(near): ENTRY, str(far): ENTRY | {"num_warps": 8}}
    measured(json.dumps({"NVIDIA H200": {"decode": entries}}))
    assert decode_params().num_warps == 2
    assert decode_params(group=2, block_size=64).num_warps == 8


@pytest.mark.parametrize(
    ("head_dim", "pool_dtype"),
    list(itertools.product((8, 64, 80, 128, 256), ("float32", "bfloat16", "int8"))),
)
def test_params_by_rule_fit_shared_memory(measured, head_dim, pool_dtype) -> None:
    measured("{}")
    shape = CallShape(head_dim, 4, 16, "float32", pool_dtype)
    for choose in (tuning.decode_params, tuning.prefill_params):
        params = choose("", shape)
        staged = params.num_stages * params.step_tokens * tuning.token_bytes(shape)
        assert staged <= 227 * 1024
        assert params.step_tokens >= 16  # the minimum of a Triton matmul


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("gpu", [gpu for name, gpu in GPUS.items() if name != "t4"])
def test_prefill_rule_fits_the_shared_memory_of_each_gpu(
    measured, gpu, head_dim, dtype, is_ragged
) -> None:
    """Shared memory as the compiler counts it: the queries, and all stages except one.

    If a warp has fewer than 16 rows, warps share the softmax weights, which are counted as well.
    """
    measured("{}")
    shape = CallShape(head_dim, 4, 16, dtype, dtype)
    with gpu_device.assume(gpu.device):
        params = tuning.prefill_params(gpu.device.kind, shape, is_ragged=is_ragged)
    lanes, itemsize = 1 << (head_dim - 1).bit_length(), jnp.dtype(dtype).itemsize
    stage = 2 * params.step_tokens * lanes
    is_shared = params.query_rows < 16 * params.num_warps
    rows = params.query_rows * (lanes + params.step_tokens * is_shared)
    # Buffer for values that threads exchange.
    rest = 512
    assert ((params.num_stages - 1) * stage + rows) * itemsize + rest <= gpu.block_memory


def test_prefill_rule_of_ragged_batches_has_smaller_steps_on_ampere_and_ada(measured) -> None:
    measured("{}")
    for name, tokens in (("a100", 32), ("a10", 32), ("l4", 32), ("rtx-pro-6000", 64)):
        with gpu_device.assume(GPUS[name].device):
            plain, ragged = (
                tuning.prefill_params("", SHAPE, is_ragged=is_ragged) for is_ragged in (False, True)
            )
        assert plain == PrefillParams(128, 64, 8, 3)
        assert ragged == PrefillParams(128, tokens, 8, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "the table must be an object"),
        ('{"NVIDIA H200": 3}', "NVIDIA H200 must be an object, got 3"),
        (table(op="train"), "one of decode, prefill, got 'train'"),
        (table(shape="D128 G4"), "must look like .* got 'D128 G4'"),
        (table(shape=str(SHAPE._replace(pool_dtype="int9"))), "int9.* not understood"),
        (table({k: v for k, v in ENTRY.items() if k != "measured"}), "'measured'"),
        (table({k: v for k, v in ENTRY.items() if k != "num_warps"}), "must have .*num_warps"),
        (table(op="prefill"), "must have query_rows"),
        (table(ENTRY | {"num_warps": 3}), "num_warps must be a power of two, got 3"),
        (table(ENTRY | {"num_warps": True}), "num_warps must be a power of two, got True"),
        (table(ENTRY | {"num_stages": 9}), "num_stages must be in 1..8, got 9"),
    ],
)
def test_parse_refuses_a_malformed_table(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        tuning.parse(text)


def test_device_is_a_default_without_a_gpu() -> None:
    assert gpu_device.device() == gpu_device.DEFAULT


class Gpu:
    device_kind, core_count, compute_capability = "NVIDIA A100", 108, "8.0"


class Plugin:
    name = "xla_cuda13"


@pytest.fixture
def set_platforms():
    """Set the platforms that JAX may use, as JAX_PLATFORMS does."""
    before = jax.config.jax_platforms
    yield lambda platforms: jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(("plugins", "platforms"), [([], None), ([Plugin], "cpu")])
def test_device_asks_jax_only_if_there_may_be_a_gpu(
    monkeypatch, set_platforms, plugins, platforms
) -> None:
    monkeypatch.setattr(tuning.importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu])
    set_platforms(platforms)
    assert gpu_device._first_gpu.__wrapped__() == gpu_device.DEFAULT


@pytest.mark.parametrize("platforms", ["cuda,cpu", "gpu"])
def test_device_is_the_first_gpu(monkeypatch, set_platforms, platforms) -> None:
    set_platforms(platforms)
    monkeypatch.setattr(tuning.importlib.metadata, "entry_points", lambda group: [Plugin])
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu])
    assert gpu_device._first_gpu.__wrapped__() == GpuInfo("NVIDIA A100", 108, (8, 0))

    def no_gpu(backend):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(jax, "local_devices", no_gpu)
    assert gpu_device._first_gpu.__wrapped__() == gpu_device.DEFAULT


def test_device_is_the_assumed_one() -> None:
    with gpu_device.assume(GpuInfo("outer", 1)):
        with gpu_device.assume(GpuInfo("inner", 2)):
            assert gpu_device.device() == GpuInfo("inner", 2)
        assert gpu_device.device() == GpuInfo("outer", 1)
    assert gpu_device.device() == gpu_device.DEFAULT


def test_device_is_the_abstract_gpu() -> None:
    for cores, expected in ((114, 114), (None, gpu_device.DEFAULT.num_cores)):
        gpu = AbstractDevice("NVIDIA H100 PCIe", cores, "gpu")
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
            assert gpu_device.device() == GpuInfo("NVIDIA H100 PCIe", expected)
            assert not gpu_device.is_assumed()


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("Tesla K80", (3, 7)),
        ("Tesla M60", (5, 2)),
        ("Quadro P4000", (6, 1)),
        ("NVIDIA GeForce MX450", (7, 5)),
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("Tesla T4", (7, 5)),
        ("Quadro RTX 8000", (7, 5)),
        ("NVIDIA TITAN RTX", (7, 5)),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A100 80GB PCIe", (8, 0)),
        ("NVIDIA A30", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA A10", (8, 6)),
        ("NVIDIA RTX A6000", (8, 6)),
        ("NVIDIA GeForce RTX 3090", (8, 6)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA RTX 5000 Ada Generation", (8, 9)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H20", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB300", (10, 3)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0)),
        ("NVIDIA GB10", (12, 1)),
    ],
)
def test_capability_of_matches_nvidias_list(kind, capability) -> None:
    assert gpu_device.capability_of(kind) == capability


FP8_DECODE = Problem(
    op="decode",
    sizes=(("B", 1), ("H", 4), ("K", 2), ("C", 16), ("D", 128)),
    q_dtype=jnp.dtype(jnp.bfloat16),
    pool_dtype=jnp.dtype(jnp.float8_e4m3fn),
    has_sinks=False,
    options=Options(),
    lanes=128,
)


@pytest.mark.parametrize(
    ("kind", "first", "expected", "backend"),
    [
        ("NVIDIA A100-SXM4-80GB", gpu_device.DEFAULT, (8, 0), "xla"),
        ("NVIDIA H100 80GB HBM3", gpu_device.DEFAULT, (9, 0), "triton"),
        ("NVIDIA of Tomorrow", GpuInfo("NVIDIA of Tomorrow", 40, (8, 6)), (8, 6), "xla"),
        ("NVIDIA of Tomorrow", gpu_device.DEFAULT, (9, 0), "triton"),
    ],
)
def test_device_inside_shard_map_has_its_own_capability(
    monkeypatch, kind, first, expected, backend
) -> None:
    """JAX knows the name of the GPUs of a mesh, but not their compute capability."""
    monkeypatch.setattr(gpu_device, "_first_gpu", lambda: first)
    gpu = AbstractDevice(kind, 40, "gpu")
    mesh = AbstractMesh((2,), ("x",), abstract_device=gpu)
    seen = []

    def each(x):
        seen.append((gpu_device.device(), choose_backend(FP8_DECODE, "cuda").backend))
        return x

    spec = PartitionSpec("x")
    jax.make_jaxpr(jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.zeros(2))
    assert seen == [(GpuInfo(kind, 40, expected), backend)]


def test_is_assumed_if_jax_knows_no_gpu(monkeypatch) -> None:
    assert gpu_device.is_assumed()
    monkeypatch.setattr(gpu_device, "_first_gpu", lambda: GpuInfo("NVIDIA H200", 132))
    assert not gpu_device.is_assumed()
    with gpu_device.assume(GpuInfo("NVIDIA A100", 108)):
        assert gpu_device.is_assumed()


def test_make_candidates_begins_with_the_current_parameters() -> None:
    for op, kind in tuning.OPS.items():
        candidates = tune_kernels.make_candidates("", op, SHAPE)
        assert candidates[0] == tune_kernels.current_params("", op, SHAPE)
        assert len(candidates) == len(set(candidates)) > 10
        assert all(isinstance(params, kind) for params in candidates)


def test_make_candidates_omits_candidates_that_exceed_shared_memory() -> None:
    """Two steps of 256 bfloat16 tokens take 256 KB, which is more than 227 KB; int8 takes half."""
    wide, wider = DecodeParams(256, 8, 2), DecodeParams(256, 8, 3)
    assert tune_kernels.fits(SHAPE, wide) and not tune_kernels.fits(SHAPE, wider)
    for name in ("int8", "float8_e4m3fn"):
        candidates = tune_kernels.make_candidates("", "decode", SHAPE._replace(pool_dtype=name))
        assert {wide, wider} <= set(candidates)
    # 128 rows on 4 warps spill registers. Two steps take 128 KB, so the queries fit too.
    chunks = tune_kernels.make_candidates("", "prefill", SHAPE)
    assert PrefillParams(128, 128, 8, 2) in chunks and PrefillParams(128, 128, 4, 2) not in chunks


def test_make_jobs_has_a_short_sequence_and_a_mixed_batch_for_decode() -> None:
    [job] = tune_kernels.make_jobs(["decode"], ["Llama-3 8B"], [16], ["int8"])
    kinds = {(case.batch, case.context, case.is_ragged) for case in job.cases}
    assert {(1, 1024, False), (64, 8192, True), (1, 32768, False)} <= kinds
    assert all(case.pool_dtype == "int8" and not case.chunk for case in job.cases)


@pytest.fixture
def tiny_jobs(monkeypatch) -> list[tune_kernels.Job]:
    monkeypatch.setattr(attention_cases, "_ROTATED_BYTES", 1)
    monkeypatch.setattr(tune_kernels, "_TURN_SECONDS", 0)
    monkeypatch.setattr(tune_kernels, "CHUNK", 4)
    monkeypatch.setitem(attention_cases.MODELS, "tiny", attention_cases.Heads(2, 1, 16))
    shape = CallShape(16, 2, 8, "float32", "float32")
    case = attention_cases.Case("tiny", 2, 20, 8, "float32", is_ragged=True)
    chunk = attention_cases.Case("tiny", 1, 20, 8, "float32", chunk=4)
    return [
        tune_kernels.Job("decode", shape, (case,)),
        tune_kernels.Job("prefill", shape, (chunk,)),
    ]


@pytest.mark.slow
def test_tune_measures_candidates_with_correct_results(tiny_jobs, capsys) -> None:
    candidates = {
        "decode": [DecodeParams(16, 1, 1), DecodeParams(0, 1, 1)],
        "prefill": [PrefillParams(16, 16, 1, 1)],
    }
    for job in tiny_jobs:
        options = Options(scale=1.0)
        seconds = tune_kernels.tune(job, candidates[job.op], Rates(1.0, 1.0), options, True)
        assert list(seconds) == candidates[job.op][:1]
        assert seconds[candidates[job.op][0]] > 0
    assert "DecodeParams(step_tokens=0, num_warps=1, num_stages=1): " in capsys.readouterr().out


@pytest.mark.slow
def test_tune_drops_candidates_with_wrong_results(tiny_jobs, capsys) -> None:
    wrong = Options(scale=3.0)
    params: list[tuning.Params] = [DecodeParams(16, 1, 1)]
    assert tune_kernels.tune(tiny_jobs[0], params, Rates(1.0, 1.0), wrong, True) == {}
    assert "differs from the XLA backend" in capsys.readouterr().out


def test_run_writes_a_new_table_and_ends_in_time(tmp_path, monkeypatch, capsys) -> None:
    jobs = [tune_kernels.Job("decode", SHAPE._replace(group=group), ()) for group in (1, 2, 4, 8)]
    now, params = [0.0], DecodeParams(32, 2, 4)

    def tune_job(job, *_):
        now[0] += 30
        if job == jobs[1]:
            raise RuntimeError("out of memory")
        return {"job": str(job)}, params

    monkeypatch.setattr(tune_kernels, "tune_job", tune_job)
    monkeypatch.setattr(tune_kernels, "measure_rates", lambda: Rates(1.0, 1.0))
    monkeypatch.setattr(tune_kernels.gpu_device, "device", lambda: GpuInfo("NVIDIA H200", 132))
    monkeypatch.setattr(tune_kernels.time, "monotonic", lambda: now[0])
    path, times = tmp_path / "new" / "tuning.json", tmp_path / "times.json"
    # Three jobs take 90 seconds. A fourth job of 30 seconds would exceed the limit.
    tune_kernels.run(jobs, path, 110, times)
    found = tuning.parse(path.read_text())["NVIDIA H200"]["decode"]
    assert found == {jobs[0].shape: params, jobs[2].shape: params}
    report = json.loads(times.read_text())
    assert "out of memory" in report["results"][1]["failed"]
    assert report["not reached"] == [str(jobs[3])]
    assert "1 shapes not reached in time" in capsys.readouterr().out


def test_table_variable_replaces_the_shipped_table(tmp_path, monkeypatch) -> None:
    path = tmp_path / "own.json"
    path.write_text(table())
    monkeypatch.setenv("PAGED_JAX_TUNING", str(path))
    assert tuning._measured.__wrapped__() == tuning.parse(table())
    monkeypatch.delenv("PAGED_JAX_TUNING")
    assert tuning._measured.__wrapped__() == tuning.parse(tune_kernels.TABLE.read_text())


def test_write_entries_merges(tmp_path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(table())
    job = tune_kernels.Job("decode", SHAPE._replace(group=8), ())
    tune_kernels.write_entries(
        path, "NVIDIA H200", {job: DecodeParams(64, 4, 3)}, "jax 1, commit 2"
    )
    tune_kernels.write_entries(
        path, "NVIDIA A100", {job: DecodeParams(16, 8, 2)}, "jax 1, commit 2"
    )
    tune_kernels.write_entries(
        path, "NVIDIA A100", {job: DecodeParams(32, 8, 2)}, "jax 1, commit 2"
    )
    found = tuning.parse(path.read_text())
    assert found["NVIDIA H200"]["decode"] == {
        SHAPE: DecodeParams(32, 2, 4),
        job.shape: DecodeParams(64, 4, 3),
    }
    assert found["NVIDIA A100"]["decode"] == {job.shape: DecodeParams(32, 8, 2)}
    assert list(json.loads(path.read_text())) == ["NVIDIA A100", "NVIDIA H200"]
    assert [file.name for file in tmp_path.iterdir()] == ["tuning.json"]


def test_run_says_that_there_is_no_gpu(capsys) -> None:
    assert tune_kernels.main([]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "needs an NVIDIA GPU" in line


def test_run_with_dry_run_prints_candidates(capsys) -> None:
    arguments = ["--dry-run", "--models", "TinyLlama", "--dtypes", "int8", "--block-sizes", "16"]
    assert tune_kernels.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("decode D64 G8 C16 q:bfloat16 pool:int8") == 1
    assert "PrefillParams(" in out and "DecodeParams(" in out
