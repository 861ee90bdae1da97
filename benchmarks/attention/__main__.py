"""Benchmark of attention over blocks: time, bytes and bandwidth, compared with other kernels.

    python -m benchmarks.attention --goals                   # the goals for this device
    python -m benchmarks.attention --quick                   # a run of seconds
    python -m benchmarks.attention --full --budget 3600 --json all.json --plot all.png

Decoding reads every K and V once and computes little, so memory bandwidth limits it. Each case
reports the bytes that must move, the achieved rate, and this rate relative to a large copy in the
same run. Arithmetic limits chunks of prompts. They are compared with a dense bfloat16 matrix
multiplication. All kernels read the same random blocks. Their results are compared before they are
timed, and their runs are interleaved. Figures are medians, and ratios are computed within the run.

A default run varies one axis at a time from a common case. `--full` measures all combinations.
Cases that do not fit into memory are skipped, and `--budget` ends the run in time; the output
reports both. Results are saved after every case. On a CPU the XLA backend runs at small sizes.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

# PyTorch's kernels need some GPU memory, and JAX would otherwise allocate all of it at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from benchmarks import harness
from benchmarks.attention.cases import Case, cpu_cases, gpu_cases, make_inputs, quick_cases
from benchmarks.attention.peers import DIVISIONS, KNOWN, Peer, make_peers, peer_of_file
from benchmarks.attention.programs import (
    JaxCall,
    TorchCall,
    drop_different,
    expected_result,
    fastest_settings,
    our_call,
    plan_calls,
    prepare_all,
    relative_error,
)
from benchmarks.common.device_time import (
    Program,
    Rates,
    device_report,
    measure_rates,
    median_seconds,
    memory_limit,
)
from benchmarks.harness import Budget, Figure, Goal, Report

OURS = "paged_jax"
Record = dict[str, Any]

_JAX_KERNEL = "jax pallas"
# Bytes of K and V above which only memory bandwidth limits a call.
_LARGE = 5 * 10**8
_QUANTISED = ("int8", "float8_e4m3fn")


def record_line(record: Record) -> str:
    """Return one line: time, bytes, rates, and the relative times of other kernels."""
    if record["op"] == "prefill":
        rate = f"{record['tflop_s']:7.2f} TFLOP/s {record['of_matmul_rate']:4.0%} of matmul"
    else:
        rate = f"{record['gb_s']:7.1f} GB/s    {record['of_memory_rate']:4.0%} of memory"
    peers = "  ".join(f"{peer} {x:.2f}x" for peer, x in record["speedup_over"].items())
    time = f"{record['us'][OURS]:9.1f} us {record['bytes'] / 1e6:9.1f} MB"
    return f"{record['name']} {time} {rate}  {peers}"


def _is_plain(record: Record) -> bool:
    """Return whether the bandwidth goals apply to a record."""
    case = record["case"]
    kind = (record["op"], case["pool_dtype"], case["head_dim"], case["block_size"])
    return kind == ("decode", "bfloat16", 128, 16)


def _is_even(record: Record) -> bool:
    case = record["case"]
    return not (case["is_ragged"] or case.get("is_skewed"))  # older reports have no skewed records


def _large_even(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and _is_even(record)
    return record["of_memory_rate"] if applies and case["batch"] > 1 else None


def _large_ragged(record: Record, _: list[Record]) -> float | None:
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and record["case"]["is_ragged"]
    return record["of_memory_rate"] if applies else None


def _large_skewed(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and record["kv_bytes"] >= _LARGE and case.get("is_skewed")
    return record["of_memory_rate"] if applies else None


def _one_long(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and (case["batch"], case["context"]) == (1, 131072)
    return record["of_memory_rate"] if applies else None


def _one_short(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = _is_plain(record) and (case["batch"], case["context"]) == (1, 1024)
    return record["us"][OURS] if applies else None


def _over_jax(record: Record, _: list[Record]) -> float | None:
    return record["speedup_over"].get(_JAX_KERNEL)


def _over_jax_alone(record: Record, _: list[Record]) -> float | None:
    """Return the speed relative to JAX's kernel for single sequences and ragged batches."""
    case = record["case"]
    applies = _is_plain(record) and (not _is_even(record) or case["batch"] == 1)
    return record["speedup_over"].get(_JAX_KERNEL) if applies else None


def _over_jax_quantised(record: Record, _: list[Record]) -> float | None:
    is_quantised = record["case"]["pool_dtype"] in _QUANTISED
    return record["speedup_over"].get(_JAX_KERNEL) if is_quantised else None


def _quantised(record: Record, records: list[Record]) -> float | None:
    """Return the speed relative to the same case over bfloat16 pools, for large pools."""
    case = record["case"]
    if record["op"] != "decode" or case["pool_dtype"] not in _QUANTISED:
        return None
    for other in records:
        is_same = other["case"] == case | {"pool_dtype": "bfloat16"}
        if is_same and other["kv_bytes"] >= _LARGE:
            return other["us"][OURS] / record["us"][OURS]
    return None


def _chunks(record: Record, _: list[Record]) -> float | None:
    case = record["case"]
    applies = (case["chunk"], case["pool_dtype"]) == (2048, "bfloat16")
    return record["of_matmul_rate"] if applies else None


def _in_cases(figure: Callable[[Record, list[Record]], float | None]) -> Callable[..., Figure]:
    """Return the figure of every record to which a goal applies; empty for reports of a CPU."""

    def figures(report: dict[str, Any]) -> Figure:
        records = report["results"] if report["accelerator"] else []
        found = {record["name"]: figure(record, records) for record in records}
        return {name: value for name, value in found.items() if value is not None}

    return figures


GOALS = (
    Goal(
        "decode, K and V of 0.5 GB or more: 92% of the copy rate", _in_cases(_large_even), low=0.92
    ),
    Goal(
        "the same, ragged batches (10:1): 88% of the copy rate", _in_cases(_large_ragged), low=0.88
    ),
    Goal("batch 1 at 128K tokens: 85% of the copy rate", _in_cases(_one_long), low=0.85),
    Goal("batch 1 at 1K tokens: at most 10 us", _in_cases(_one_short), high=10.0),
    Goal("never slower than JAX's own kernel at its best setting", _in_cases(_over_jax), low=1.0),
    Goal("1.3x JAX's own kernel, batch 1 or ragged", _in_cases(_over_jax_alone), low=1.3),
    Goal("2x JAX's own kernel, int8 and fp8 pools", _in_cases(_over_jax_quantised), low=2.0),
    Goal("int8 and fp8 pools: 1.75x bfloat16 of 0.5 GB or more", _in_cases(_quantised), low=1.75),
    Goal("chunks of 2K tokens: 55% of the matmul rate", _in_cases(_chunks), low=0.55),
    Goal(
        "one sequence of 128K among 63 of 1K: 85% of the copy rate",
        _in_cases(_large_skewed),
        low=0.85,
    ),
)
"""Goals for a data-centre GPU; bandwidths are for bfloat16, D 128 and C 16."""


def plot(pyplot: Any, report: Report) -> Any:
    """Draw rate over bytes: this kernel and others on the left, dtypes of the pool on the right."""
    decode = [record for record in report["results"] if record["op"] == "decode"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), sharex=True, sharey=True)
    names = dict.fromkeys(name for record in decode for name in record["us"])
    for name in names:
        timed = [r for r in decode if name in r["us"]]
        rates = [r["bytes"] / r["us"][name] / 1e3 for r in timed]
        left.plot([r["bytes"] for r in timed], rates, "o", alpha=0.7, label=name)
    kinds = dict.fromkeys((r["case"]["pool_dtype"], r["case"]["is_ragged"]) for r in decode)
    for dtype, is_ragged in kinds:
        ours = [
            r
            for r in decode
            if (r["case"]["pool_dtype"], r["case"]["is_ragged"]) == (dtype, is_ragged)
        ]
        marker, label = ("^", f"{dtype}, ragged") if is_ragged else ("o", dtype)
        right.plot(
            [r["bytes"] for r in ours], [r["gb_s"] for r in ours], marker, alpha=0.7, label=label
        )
    for axes, title in ((left, "Kernels, all cases"), (right, f"{OURS}, by type of the pool")):
        axes.axhline(report["memory_gb_s"], color="black", linewidth=1, linestyle="--")
        axes.set(xscale="log", yscale="log", title=title, xlabel="bytes that a call must move")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    left.set_ylabel("GB/s (10⁹ bytes)")
    device = report["accelerator"] or report["device"]
    figure.suptitle(
        f"Decode attention on {device}, jax {report['versions']['jax']}; "
        f"dashed: {report['memory_gb_s_is']}"
    )
    figure.tight_layout()
    return figure


def measure(
    case: Case,
    rates: Rates,
    *,
    num_rounds: int,
    turn_seconds: float,
    peers: Mapping[str, Peer],
) -> dict[str, Any]:
    """Time one case with all kernels, interleaved, and return its record.

    Args:
      case: the call to time.
      rates: rates of the device.
      num_rounds: number of turns of each kernel.
      turn_seconds: seconds of a turn, if the kernel reaches the rates of the device.
      peers: other kernels to time.
    """
    inputs = make_inputs(case)
    # Leave a tenth for the needs of kernels and compilers besides their arguments.
    free_bytes = int(0.9 * memory_limit()) - case.num_layers * case.layer_bytes
    variants, left_out = make_peers(case, inputs, free_bytes, peers)
    calls: dict[tuple[str, str], JaxCall | TorchCall] = {(OURS, ""): our_call(inputs)}
    calls |= {(name, s): call for name, made in variants.items() for s, call in made.items()}
    prepared, failures = prepare_all(calls, case, inputs.q, plan_calls(case, rates, turn_seconds))
    if (OURS, "") in failures:
        raise RuntimeError(failures[OURS, ""])
    expected = expected_result(inputs)
    failures |= drop_different(prepared, lambda result: relative_error(result, expected))
    if (OURS, "") in failures:
        raise RuntimeError(f"{OURS}: {failures[OURS, '']}")
    left_out |= {name: why for (name, _), why in failures.items()}

    settings = fastest_settings(prepared)
    seconds = median_seconds(
        {name: prepared[name, setting].program for name, setting in settings.items()}, num_rounds
    )
    single = median_seconds({OURS: Program(prepared[OURS, ""].once, 1)}, 20)[OURS]
    return {
        "name": str(case),
        "case": asdict(case) | case.heads._asdict(),
        "op": "prefill" if case.chunk else "decode",
        "kv_bytes": case.kv_bytes,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "us": {name: round(1e6 * s, 2) for name, s in seconds.items()},
        "single_call_us": round(1e6 * single, 2),
        **_ratios(case, rates, seconds),
        "settings": {name: setting for name, setting in settings.items() if setting},
        "left_out": {name: why for name, why in left_out.items() if name not in settings},
    }


def _ratios(case: Case, rates: Rates, seconds: dict[str, float]) -> dict[str, Any]:
    gb_s = case.num_bytes / seconds[OURS] / 1e9
    tflop_s = case.flops / seconds[OURS] / 1e12
    others = {name: s for name, s in seconds.items() if name != OURS}
    return {
        "gb_s": round(gb_s, 1),
        "of_memory_rate": round(gb_s / rates.memory, 3),
        "tflop_s": round(tflop_s, 3),
        "of_matmul_rate": round(tflop_s / rates.matmul, 3),
        "speedup_over": {name: round(s / seconds[OURS], 2) for name, s in others.items()},
    }


def run(
    cases: list[Case],
    *,
    budget: float,
    save: Callable[[dict[str, Any]], None],
    **options: Any,
) -> dict[str, Any]:
    """Measure cases until `budget` seconds have passed, and print the results.

    Args:
      cases: cases in order of importance.
      budget: seconds after which no new case starts.
      save: called with the report after every case.
      **options: arguments of `measure`.
    """
    limit, rates = Budget(budget), measure_rates()
    report = device_report(rates)
    skipped: dict[str, list[str]] = {
        "do not fit into memory": [],
        "not reached in time": [],
        "failed": [],
    }
    for case in cases:
        if 2 * case.num_layers * case.layer_bytes > memory_limit():
            skipped["do not fit into memory"].append(str(case))
        elif limit.is_over():
            skipped["not reached in time"].append(str(case))
        else:
            try:
                record = measure(case, rates, **options)
            except RuntimeError as error:  # an error of XLA or a kernel; keep the results so far
                skipped["failed"].append(f"{case}: {harness.reason(error)}")
                continue
            report["results"].append(record)
            print(record_line(record), flush=True)
            save(report)
    for why, names in skipped.items():
        if names:
            print(f"{len(names)} cases {why}, the first is {names[0]}")
    at_end = measure_rates()._asdict()
    goals = harness.goal_lines(GOALS, report, report["accelerator"])
    report |= {"skipped": skipped, "goals": goals, "rates_at_the_end": at_end}
    save(report)
    return report


def _chosen(case: Case, options: argparse.Namespace) -> bool:
    chosen = [
        (case.model, options.models),
        (case.batch, options.batches),
        (case.context, options.contexts),
        (case.pool_dtype, options.dtypes),
    ]
    return all(values is None or value in values for value, values in chosen)


def _chosen_peers(options: argparse.Namespace) -> Mapping[str, Peer]:
    own = {options.peer.stem: peer_of_file(options.peer)} if options.peer else {}
    divisions = DIVISIONS if options.divisions else {}
    return {**own, **divisions, **({} if options.no_peers else KNOWN)}


def _parser() -> argparse.ArgumentParser:
    parser = harness.command_line(
        "Time attention over blocks, compared with other kernels.",
        budget=240, rounds=5, goals=True, plot=True,
    )  # fmt: skip
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="a few small cases")
    sweep.add_argument("--full", action="store_true", help="all combinations of sizes")
    add = parser.add_argument
    add("--models", nargs="+", help="measure only these")
    add("--batches", nargs="+", type=int, help="measure only these")
    add("--contexts", nargs="+", type=int, help="measure only these")
    add("--dtypes", nargs="+", help="measure only pools of these dtypes")
    add("--no-peers", action="store_true", help="time only the kernel of paged_jax")
    add("--divisions", action="store_true",
        help="also time our GPU kernel with other divisions of a batch")  # fmt: skip
    add("--peer", type=Path, metavar="FILE",
        help="also time the kernel of this file, see peers.py")  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON and a plot."""
    options = _parser().parse_args(arguments)
    is_cpu = jax.devices()[0].platform == "cpu"
    if options.quick:
        cases = quick_cases("float32" if is_cpu else "bfloat16")
    else:
        cases = (cpu_cases if is_cpu else gpu_cases)(options.full)
    cases = [case for case in cases if _chosen(case, options)]
    if not cases:
        print("benchmarks.attention: these options exclude all cases.", file=sys.stderr)
        return 2
    report = run(
        cases,
        budget=options.budget,
        save=partial(harness.write_json, options.json),
        num_rounds=options.rounds,
        turn_seconds=0.02 if is_cpu else 0.01,
        peers=_chosen_peers(options),
    )
    harness.finish(options, report, report["goals"] if options.goals else (), plot)
    return 1 if report["skipped"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
