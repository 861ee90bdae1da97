"""Tests of the attention benchmark: its counts, its comparisons, and its report."""

import contextlib
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness
from benchmarks.attention import __main__ as decode_attention
from benchmarks.attention import cases as attention_cases
from benchmarks.attention import peers as attention_peers
from benchmarks.attention import programs
from benchmarks.attention.cases import Case, Heads, make_inputs
from benchmarks.attention.programs import TorchCall, expected_result, our_call
from benchmarks.common.device_time import Program, Rates, chained, median_seconds
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.mosaic_gpu import launch as mosaic_launch
from paged_jax.kernels.triton import decode
from tests.support.kernel_cases import lower

RATES = Rates(memory=1000.0, matmul=1.0)


@pytest.fixture
def tiny(monkeypatch) -> str:
    """Return the name of a small model, with random values that compile nothing."""
    monkeypatch.setattr(attention_cases, "_ROTATED_BYTES", 1)
    monkeypatch.setattr(attention_cases, "random_values", random_numbers)
    monkeypatch.setitem(attention_cases.MODELS, "tiny", Heads(4, 2, 16))
    return "tiny"


def random_numbers(key: jax.Array, shape, dtype: str, scale: float = 1.0) -> jax.Array:
    """Return random values like the benchmark's, from NumPy."""
    if KVDtype.of(dtype).has_scales:
        scale = KVDtype.of(dtype).largest
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray((scale * rng.uniform(-1, 1, shape)).astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_random_numbers_are_those_of_the_benchmark_but_for_their_digits(dtype) -> None:
    for make in (attention_cases.random_values, random_numbers):
        numbers = make(jax.random.key(0), (2, 500), dtype)
        assert numbers.dtype == dtype and numbers.shape == (2, 500)
        largest = KVDtype.of(dtype).largest or 1
        values = np.asarray(numbers, np.float64) / largest
        assert -1 <= values.min() < -0.9 and 0.9 < values.max() <= 1
        assert len(np.unique(values)) > 200


def test_case_counts_bytes_and_flops() -> None:
    case = Case("Llama-3 8B", batch=1, context=131072)
    assert case.kv_bytes == 131072 * 2 * 8 * 128 * 2
    assert case.num_bytes == case.kv_bytes + 2 * 32 * 128 * 2
    assert case.flops == 4 * 32 * 128 * 131072
    int8 = Case("Llama-3 8B", batch=2, context=64, pool_dtype="int8")
    assert int8.kv_bytes == 2 * 64 * 2 * 8 * (128 + 4)
    # Query i of the chunk sees 6 + i tokens.
    chunk = Case("TinyLlama", batch=1, context=8, chunk=3)
    assert chunk.flops == 4 * 32 * 64 * (6 + 7 + 8)


def test_case_ragged_lengths_are_ten_to_one() -> None:
    lengths = Case("TinyLlama", batch=10, context=1000, is_ragged=True).lengths
    assert (lengths.max(), lengths.min()) == (1000, 100)
    assert lengths.tolist() != sorted(lengths, reverse=True)


def test_case_skewed_lengths_are_of_one_long_sequence_and_held_without_waste(tiny) -> None:
    case = Case(tiny, batch=4, context=2048, block_size=16, is_skewed=True)
    assert sorted(case.lengths.tolist()) == [16, 16, 16, 2048]
    inputs = make_inputs(case)
    assert inputs.pools.k.shape[1] == 3 + 128
    tables = np.asarray(inputs.block_tables)
    used = [row[: -(-n // 16)] for row, n in zip(tables, case.lengths, strict=True)]
    assert sorted(np.concatenate(used)) == list(range(3 + 128))
    assert case.gathered_bytes == 4 * 2048 * 2 * 2 * 16 * 2


def test_case_pools_are_larger_than_caches() -> None:
    for case in attention_cases.gpu_cases(is_full=False):
        assert case.num_layers * case.layer_bytes >= 128 << 20


@pytest.mark.parametrize("is_full", [False, True])
def test_sweeps_hold_every_axis(is_full) -> None:
    cases = attention_cases.gpu_cases(is_full)
    assert len(cases) == len(set(cases))
    for name, values in {
        "model": attention_cases.MODELS,
        "batch": attention_cases.BATCHES,
        "context": attention_cases.CONTEXTS,
        "block_size": attention_cases.BLOCK_SIZES,
        "pool_dtype": attention_cases.POOL_DTYPES,
        "is_ragged": (False, True),
        "chunk": (0, attention_cases.CHUNK),
    }.items():
        assert {getattr(case, name) for case in cases} >= set(values)


@pytest.mark.slow
@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("chunk", [0, 24])
def test_peers_compute_the_same(tiny, pool_dtype, chunk) -> None:
    case = Case(tiny, 2, 24, 8, pool_dtype, is_ragged=not chunk, chunk=chunk)
    inputs = make_inputs(case)
    assert jnp.isfinite(inputs.pools.k.astype(jnp.float32)).all()
    peers, left_out = attention_peers.make_peers(case, inputs, free_bytes=10**9)
    assert list(peers) == ["gather + xla"] and not left_out
    [peer] = peers["gather + xla"].values()
    ours = our_call(inputs)
    tolerance = 1e-5 if pool_dtype == "float32" else 0.02
    assert _error(peer.op(inputs.q, 0, peer.arrays), ours.op(inputs.q, 0, inputs)) < tolerance


def _error(actual, expected) -> float:
    return programs.relative_error(actual, expected)


def test_peers_that_need_too_much_memory_are_left_out(tiny) -> None:
    case = Case(tiny, 2, 24, 8, "float32")
    peers, left_out = attention_peers.make_peers(case, make_inputs(case), free_bytes=100)
    assert peers == {} and "not free" in left_out["gather + xla"]


@pytest.mark.slow
def test_divisions_compute_the_same(tiny, monkeypatch) -> None:
    """The interpreted GPU kernel, with one program instance per sequence and with parts."""
    monkeypatch.setattr(decode, "decode", functools.partial(decode.decode, interpret=True))
    case = Case(tiny, 2, 2048, 16, "float32", is_skewed=True)
    inputs = make_inputs(case)
    for name, peer in attention_peers.DIVISIONS.items():
        [call] = peer.make(case, inputs).values()
        assert _error(call.op(inputs.q, 0, call.arrays), expected_result(inputs)) < 1e-5, name
    assert attention_peers._count_partitions(case) == 4


def test_divisions_are_of_decode(tiny) -> None:
    case = Case(tiny, 2, 24, 8, "float32", chunk=24)
    peers, left_out = attention_peers.make_peers(
        case, make_inputs(case), 0, attention_peers.DIVISIONS
    )
    assert peers == {} and left_out == {}  # the parts are not computed for a real GPU here
    for peer in attention_peers.DIVISIONS.values():
        with pytest.raises(attention_peers.PeerUnavailable, match="not divided"):
            peer.make(case, make_inputs(case))


@pytest.mark.skipif(
    mosaic_launch.refusal(interpret=True) is not None, reason="this jax is too old for Mosaic GPU"
)
@pytest.mark.parametrize("pool_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("chunk", "kernel"), [(0, "paged_decode"), (24, "paged_prefill")])
def test_mosaic_gpu_is_timed_beside_triton(tiny, monkeypatch, chunk, kernel, pool_dtype) -> None:
    """Both are lowered for a GPU with the same arrays."""
    monkeypatch.setitem(attention_cases.MODELS, tiny, Heads(4, 2, 64))
    case = Case(tiny, 2, 24, 8, pool_dtype, chunk=chunk)
    inputs = make_inputs(case)
    [call] = attention_peers.KNOWN["mosaic_gpu"].make(case, inputs).values()
    for each, backend in ((call, "mosaic_gpu"), (our_call(inputs), "triton")):
        text = lower(each.op, inputs.q, jnp.int32(0), each.arrays, platform="cuda").as_text()
        assert backend in text and kernel in text


@pytest.mark.slow
@pytest.mark.parametrize("pool_dtype", ["bfloat16", "int8"])
def test_jax_kernel_computes_the_same(tiny, pool_dtype) -> None:
    """JAX's interpreted GPU kernel, with its own layout."""
    theirs = attention_peers.jax_kernel()
    case = Case(tiny, 2, 64, 16, pool_dtype, is_ragged=True)
    inputs = make_inputs(case)
    variants = attention_peers._jax_pallas(case, inputs)
    assert list(variants) == ["k_splits=1", "k_splits=4"]
    peer = variants["k_splits=4"]
    expected = our_call(inputs).op(inputs.q, 0, inputs)
    interpreted = theirs.paged_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            theirs, "paged_attention", lambda *a, **k: interpreted(*a, **k, interpret=True)
        )
        assert _error(peer.op(inputs.q, 0, peer.arrays), expected) < programs.TOLERANCE


class Torch:
    """The interface of PyTorch that recording a call needs; records its use."""

    def __init__(self) -> None:
        self.cuda, self.modes, self.num_replays = self, [], 0

    def synchronize(self) -> None:
        pass

    def CUDAGraph(self) -> "Torch":
        return self

    def replay(self) -> None:
        self.num_replays += 1

    def graph(self, graph: "Torch", capture_error_mode: str = "global"):
        self.modes.append(capture_error_mode)
        return contextlib.nullcontext()


def test_graphs_of_torch_are_recorded_while_threads_of_jax_live(monkeypatch) -> None:
    torch, layers = Torch(), []
    monkeypatch.setattr(programs, "torch_on_gpu", lambda: torch)
    case = Case("Llama-3 8B", batch=64, context=8192)
    prepared = TorchCall(layers.append).prepare(case, jnp.zeros(1), programs.Plan(16, 8))
    assert torch.modes == ["thread_local"]
    prepared.program.run()
    calls_recorded = len(layers) - 3
    assert torch.num_replays * calls_recorded == prepared.program.num_calls >= 16


def test_chained_takes_layers_in_turns() -> None:
    def append(q, layer, arrays):
        return 10 * q + layer

    for unroll in (1, 2, 3, 6):
        run = jax.jit(chained(append, 6, 3, unroll))
        assert int(run(jnp.int32(0), ())) == 12012


def test_median_seconds_are_seconds_of_a_call() -> None:
    calls = []
    programs = {name: Program(lambda name=name: calls.append(name), 10) for name in "ab"}
    seconds = median_seconds(programs, 3)
    assert calls == ["a", "b"] * 3
    assert all(0 < taken < 0.1 for taken in seconds.values())


def measure(case: Case, peers=attention_peers.KNOWN) -> dict:
    return decode_attention.measure(case, RATES, num_rounds=1, turn_seconds=0.0, peers=peers)


@pytest.mark.parametrize("chunk", [0, 24])
def test_measure_records_a_case(tiny, chunk) -> None:
    case = Case(tiny, 2, 24, 8, "float32", chunk=chunk)
    record = measure(case)
    assert record["us"].keys() == {"paged_jax", "gather + xla"}
    ours = record["us"]["paged_jax"]
    assert record["gb_s"] == pytest.approx(case.num_bytes / ours / 1e3, abs=0.1)
    speedup = record["us"]["gather + xla"] / ours
    assert record["speedup_over"] == {"gather + xla": pytest.approx(speedup, abs=0.01)}
    assert str(case) in decode_attention.record_line(record)


def test_measure_drops_kernels_with_other_results(tiny) -> None:
    def wrong(case, inputs):
        return {"": attention_peers.JaxCall(lambda q, layer, arrays: 2 * q, ())}

    def fails(case, inputs):
        raise attention_peers.PeerUnavailable("no such thing")

    peers = {
        "wrong": attention_peers.Peer(("cpu",), lambda case: 0, wrong),
        "fails": attention_peers.Peer(("cpu",), lambda case: 0, fails),
    }
    record = measure(Case(tiny, 2, 24, 8, "float32"), peers)
    assert list(record["us"]) == ["paged_jax"]
    assert record["left_out"]["fails"] == "no such thing"
    assert record["left_out"]["wrong"].startswith("the result has a relative error of")


PROTOTYPE = """
import beside
from paged_jax import paged_attention

def make(case, inputs):
    if case.chunk:
        raise NotImplementedError("it decodes only")

    def op(q, layer, arrays):
        pools, tables, lens = arrays
        return paged_attention(q, pools.k, pools.v, tables, lens, layer=layer, scale=beside.SCALE)

    return {"a setting": op}
"""


def test_a_kernel_of_ones_own_is_timed_beside_ours(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("SCALE = 1.0")
    file = tmp_path / "prototype.py"
    file.write_text(PROTOTYPE)
    others = {"prototype": attention_peers.peer_of_file(file)}
    decoded = measure(Case(tiny, 2, 24, 8, "float32"), others)
    assert decoded["us"].keys() == {"paged_jax", "prototype"}
    assert decoded["settings"] == {"prototype": "a setting"}
    _, left_out = attention_peers.make_peers(
        Case(tiny, 2, 24, 8, "float32", chunk=24), make_inputs(Case(tiny, 2, 24, 8)), 0, others
    )
    assert left_out == {"prototype": "NotImplementedError: it decodes only"}
    file.write_text("")
    with pytest.raises(ValueError, match=r"prototype.py must define make\(case, inputs\)"):
        attention_peers.peer_of_file(file)


DECODE_ALONE = """
from paged_jax import paged_attention

def decode(q, k_pool, v_pool, block_tables, context_lens, *, num_splits, layer, scale=1.0):
    assert num_splits < 32, "the sequence is too short"
    return paged_attention(q, k_pool, v_pool, block_tables, context_lens, layer=layer, scale=scale)
"""


def test_a_function_that_decodes_is_timed_with_several_numbers_of_parts(
    tiny, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "prototype.py"
    file.write_text(DECODE_ALONE)
    others = {"prototype": attention_peers.peer_of_file(file)}
    decoded = measure(Case(tiny, 2, 24, 8, "float32"), others)
    assert decoded["us"].keys() == {"paged_jax", "prototype"}
    assert decoded["settings"]["prototype"] in {"num_splits=1", "num_splits=2", "num_splits=4"}
    for case in (Case(tiny, 2, 24, 8, "float32", chunk=24), Case(tiny, 2, 24, 8, "int8")):
        _, left_out = attention_peers.make_peers(case, make_inputs(case), 0, others)
        assert left_out == {"prototype": "only decoding over unquantised pools is measured"}


def test_measure_refuses_a_wrong_result_of_ours(tiny, monkeypatch) -> None:
    expected = expected_result
    monkeypatch.setattr(decode_attention, "expected_result", lambda inputs: 2 * expected(inputs))
    with pytest.raises(RuntimeError, match="paged_jax: the result has a relative error of 0.5"):
        measure(Case(tiny, 2, 24, 8, "float32"))


@pytest.mark.slow
def test_run_saves_and_says_what_it_left_out(tiny, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(decode_attention, "measure_rates", lambda: RATES)
    path = tmp_path / "new" / "results.json"
    cases = [Case(tiny, 1, 24, 8, "float32"), Case("Llama-3 70B", 10**4, 131072)]
    options = {"num_rounds": 1, "turn_seconds": 0.0, "peers": {}}
    save = functools.partial(harness.write_json, path)
    report = decode_attention.run(cases, budget=60, save=save, **options)
    assert json.loads(path.read_text()) == report
    assert [record["name"] for record in report["results"]] == [str(cases[0])]
    assert report["skipped"]["do not fit into memory"] == [str(cases[1])]
    late = decode_attention.run(cases[:1], budget=-1, save=save, **options)
    assert late["skipped"]["not reached in time"] == [str(cases[0])]
    assert "1 cases not reached in time" in capsys.readouterr().out


def test_run_goes_on_after_a_failure(tiny, monkeypatch) -> None:
    def fail(case, rates):
        raise RuntimeError("out of memory\nand a long story")

    monkeypatch.setattr(decode_attention, "measure_rates", lambda: RATES)
    monkeypatch.setattr(decode_attention, "measure", fail)
    case = Case(tiny, 1, 24, 8, "float32")
    report = decode_attention.run([case], budget=60, save=lambda report: None)
    assert report["skipped"]["failed"] == [f"{case}: RuntimeError: out of memory"]


def record(us: float, jax_us: float | None = None, **case) -> dict:
    """Return the record that `measure` would make with the rates RATES."""
    made = Case(**({"model": "Llama-3 8B", "batch": 16, "context": 8192} | case))
    seconds = {"paged_jax": us / 1e6} | ({"jax pallas": jax_us / 1e6} if jax_us else {})
    return {
        "name": str(made),
        "case": dataclasses.asdict(made) | made.heads._asdict(),
        "op": "prefill" if made.chunk else "decode",
        "kv_bytes": made.kv_bytes,
        "bytes": made.num_bytes,
        "us": {name: 1e6 * taken for name, taken in seconds.items()},
        **decode_attention._ratios(made, RATES, seconds),
    }


def answers(*records: dict, accelerator: str | None = "NVIDIA H200") -> list[str]:
    lines = harness.goal_lines(
        decode_attention.GOALS, {"results": list(records), "accelerator": accelerator}, accelerator
    )
    return [line[:12].strip() for line in lines]


def test_goals_are_met_missed_or_not_measured() -> None:
    unmeasured = ["not measured"] * len(decode_attention.GOALS)
    assert answers() == unmeasured
    # 0.537 GB at 1000 GB/s take 537 us.
    assert answers(record(580)) == ["met", *unmeasured[1:]]
    assert answers(record(590)) == ["NOT met", *unmeasured[1:]]
    assert answers(record(580), record(590)) == ["NOT met", *unmeasured[1:]]
    assert answers(record(580), accelerator=None) == unmeasured


@pytest.mark.parametrize(
    ("goal", "good", "bad"),
    [
        (1, [record(667, batch=32, is_ragged=True)], [record(677, batch=32, is_ragged=True)]),
        (2, [record(631, batch=1, context=131072)], [record(633, batch=1, context=131072)]),
        (3, [record(9.9, batch=1, context=1024)], [record(10.1, batch=1, context=1024)]),
        (4, [record(100, 100)], [record(100, 99)]),
        (5, [record(100, 130, batch=1)], [record(100, 129, batch=1)]),
        (5, [record(100, 130, is_ragged=True)], [record(100, 129, is_ragged=True)]),
        (6, [record(100, 200, pool_dtype="int8")], [record(100, 199, pool_dtype="int8")]),
        (7, [record(175), record(100, pool_dtype="int8")],
         [record(174), record(100, pool_dtype="int8")]),
        # 4 * 32 * 128 operations for each of 2048 * 2049 / 2 pairs: 34376 us at 1 TFLOP/s.
        (8, [record(62400, batch=1, context=2048, chunk=2048)],
         [record(62600, batch=1, context=2048, chunk=2048)]),
        # (128 + 63) * 1024 tokens of 4 KB.
        (9, [record(940, batch=64, context=131072, is_skewed=True)],
         [record(945, batch=64, context=131072, is_skewed=True)]),
    ],
)  # fmt: skip
def test_each_goal_asks_its_own_cases(goal, good, bad) -> None:
    assert answers(*good)[goal] == "met"
    assert answers(*bad)[goal] == "NOT met"


@pytest.mark.parametrize("is_full", [False, True])
def test_the_first_cases_answer_every_goal(is_full) -> None:
    """The first cases cover every goal, in case there is no time for others."""
    first = attention_cases.goal_cases()
    assert attention_cases.gpu_cases(is_full)[: len(first)] == first
    records = [record(9, 0 if case.chunk else 27, **dataclasses.asdict(case)) for case in first]
    assert "not measured" not in answers(*records)


@pytest.mark.peers
def test_plot_draws_a_report(tmp_path) -> None:
    report = {
        "results": [record(580, 700), record(300, pool_dtype="int8"), record(9, is_ragged=True)],
        "accelerator": "NVIDIA H200",
        "memory_gb_s": RATES.memory,
        "memory_gb_s_is": "a large copy",
        "versions": {"jax": "0"},
    }
    path = tmp_path / "plot.png"
    decode_attention.plot(harness.plotter(), report).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_main_needs_a_case(capsys) -> None:
    assert decode_attention.main(["--quick", "--models", "none"]) == 2
    assert "these options exclude all cases" in capsys.readouterr().err
