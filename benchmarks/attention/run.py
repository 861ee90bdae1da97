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
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

# PyTorch's kernels need some GPU memory, and JAX would otherwise allocate all of it at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from benchmarks.attention.cases import Case, cpu_cases, gpu_cases, make_inputs, quick_cases
from benchmarks.attention.divisions import DIVISIONS
from benchmarks.attention.peers import KNOWN, Peer, make_peers, peer_of_file
from benchmarks.attention.programs import (
    TOLERANCE,
    JaxCall,
    Prepared,
    TorchCall,
    expected_result,
    fastest_settings,
    our_call,
    plan_calls,
    prepare_all,
    reason,
    relative_error,
)
from benchmarks.attention.report import OURS, goal_lines, plot, record_line
from benchmarks.common.device_time import Program, Rates, measure_rates, memory_limit, take_turns
from benchmarks.common.environment import environment
from benchmarks.common.figures import add_outputs, plotter


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
    failures |= _drop_different(prepared, expected_result(inputs))
    left_out |= {name: why for (name, _), why in failures.items()}

    settings = fastest_settings(prepared)
    seconds = take_turns(
        {name: prepared[name, setting].program for name, setting in settings.items()}, num_rounds
    )
    single = take_turns({OURS: Program(prepared[OURS, ""].once, 1)}, 20)[OURS]
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


def _drop_different(
    prepared: dict[tuple[str, str], Prepared], expected: jax.Array
) -> dict[tuple[str, str], str]:
    """Drop the kernels with a different result, and print the difference.

    Raises:
      RuntimeError: the kernel of paged_jax is among them.
    """
    errors = {key: relative_error(ready.once(), expected) for key, ready in prepared.items()}
    different = {key: error for key, error in errors.items() if not error <= TOLERANCE}
    if (OURS, "") in different:
        raise RuntimeError(
            f"the result of paged_jax has a relative error of {different[OURS, '']:.3g}"
        )
    for key in different:
        del prepared[key]
    return {
        key: f"the result has a relative error of {error:.3g}" for key, error in different.items()
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
    start = time.monotonic()
    device = jax.devices()[0]
    is_cpu = device.platform == "cpu"
    rates = measure_rates()
    report = {
        **environment(),
        "accelerator": None if is_cpu else device.device_kind,
        "memory_gb_s": rates.memory,
        "memory_gb_s_is": "all cores reading" if is_cpu else "a large copy",
        "matmul_bfloat16_tflop_s": rates.matmul,
        "results": [],
    }
    print(report["accelerator"] or report["device"], report["versions"], rates, sep="\n")
    skipped: dict[str, list[str]] = {
        "do not fit into memory": [],
        "not reached in time": [],
        "failed": [],
    }
    for case in cases:
        if 2 * case.num_layers * case.layer_bytes > memory_limit():
            skipped["do not fit into memory"].append(str(case))
        elif time.monotonic() - start > budget:
            skipped["not reached in time"].append(str(case))
        else:
            try:
                record = measure(case, rates, **options)
            except RuntimeError as error:  # an error of XLA or a kernel; keep the results so far
                skipped["failed"].append(f"{case}: {reason(error)}")
                continue
            report["results"].append(record)
            print(record_line(record), flush=True)
            save(report)
    for why, names in skipped.items():
        if names:
            print(f"{len(names)} cases {why}, the first is {names[0]}")
    at_end = measure_rates()._asdict()
    report |= {"skipped": skipped, "goals": goal_lines(report), "rates_at_the_end": at_end}
    save(report)
    return report


def _save_to(path: Path | None) -> Callable[[dict[str, Any]], None]:
    def save(report: dict[str, Any]) -> None:
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(path)

    return save


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
    parser = argparse.ArgumentParser(
        description="Time attention over blocks, compared with other kernels."
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--quick", action="store_true", help="a few small cases")
    sweep.add_argument("--full", action="store_true", help="all combinations of sizes")
    parser.add_argument("--models", nargs="+", help="measure only these")
    parser.add_argument("--batches", nargs="+", type=int, help="measure only these")
    parser.add_argument("--contexts", nargs="+", type=int, help="measure only these")
    parser.add_argument("--dtypes", nargs="+", help="measure only pools of these dtypes")
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS", help="default: 240")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kernel; default: 5")
    parser.add_argument("--no-peers", action="store_true", help="time only the kernel of paged_jax")
    parser.add_argument(
        "--divisions",
        action="store_true",
        help="also time our GPU kernel with other divisions of a batch",
    )
    parser.add_argument(
        "--peer", type=Path, metavar="FILE", help="also time the kernel of this file, see peers.py"
    )
    parser.add_argument("--goals", action="store_true", help="report which goals are met")
    add_outputs(parser)
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
        save=_save_to(options.json),
        num_rounds=options.rounds,
        turn_seconds=0.02 if is_cpu else 0.01,
        peers=_chosen_peers(options),
    )
    if options.goals:
        print(*report["goals"], sep="\n")
    if options.plot:
        plot(plotter(), report, options.plot)
    return 1 if report["skipped"]["failed"] else 0
