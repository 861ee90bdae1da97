"""Benchmark of whole steps: decode steps and prompt chunks, compared with their bounds.

    python -m benchmarks.step --goals --json step.json      # the goals for this device
    python -m benchmarks.step --quick                       # a run of seconds
    python -m benchmarks.step --models 8B --batches 64 --variants "float32 queries" rematerialised

It times the programs that `LLM`, `AsyncEngine` and the server run: the decode program with its loop
over 8 steps and sampling, and the program of prompt chunks, with donated state. Weights and the
pool are random, and blocks are scattered over the pool. On a GPU or TPU the pool is as large as an
engine would make it.

Each case reports the bytes that a step must read and write, and its operations. The bound is the
time for these at the rates of a large copy and of a dense bfloat16 matrix multiplication in the
same run. The report shows the bound as a fraction of the step's time. Variants change one setting:
a compiler option, the dtype of the queries, the steps per dispatch, or the sampling. They run in
turns with the default. A variant that does not make all its steps is an error.

Cases of goals come first, then their variants, then other cases. Results are saved after every
figure, and `--budget` ends the run in time.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.attention.programs import reason
from benchmarks.common.device_time import Rates, measure_rates
from benchmarks.common.environment import environment, write_json
from benchmarks.common.figures import add_outputs, plotter
from benchmarks.step.cases import MODELS, Case, cpu_cases, goal_cases, gpu_cases, quick_cases
from benchmarks.step.kernels import kernel_times
from benchmarks.step.kernels import lines as table_lines
from benchmarks.step.programs import ENGINE, STEPS_PER_DISPATCH, VARIANTS, Bench, random_model
from benchmarks.step.report import goal_lines, plot, record_line

Report = dict[str, Any]


class Session:
    """Measures cases while the budget lasts. Keeps the weights of one model at a time.

    Args:
      rates: rates of the device.
      budget: seconds from now on.
      num_rounds: number of turns of each variant.
      num_dispatches: number of dispatches of 8 decode steps in a turn.
      save: called with each record when it changes.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        budget: float,
        num_rounds: int,
        num_dispatches: int,
        save: Callable[[dict[str, Any]], None],
    ):
        self._rates = rates
        self._end = time.monotonic() + budget
        self._num_rounds = num_rounds
        self._steps_per_turn = STEPS_PER_DISPATCH * num_dispatches
        self._save = save
        self._model: tuple[str, str, Any] | None = None

    def is_over(self) -> bool:
        """Whether no further measurement may start."""
        return time.monotonic() > self._end

    def measure(self, case: Case, variants: list[str], profile: Path | None = None) -> None:
        """Time variants of a case in turns with the default."""
        bench = Bench(case, self._weights(case), self._steps_per_turn)
        platform = jax.default_backend()
        compiled, failed, late, record = {}, {}, [], {}
        seconds: dict[str, list[float]] = {}
        for name in [ENGINE, *variants]:
            if name != ENGINE and self.is_over():
                late.append(name)
                continue
            try:
                compiled[name] = round(bench.compile(name), 1)
                # The default runs again, so that slow changes of the device affect both.
                for _ in range(self._num_rounds):
                    for each in {ENGINE: None, name: None}:
                        seconds.setdefault(each, []).append(bench.time(each))
            except RuntimeError as error:
                if name == ENGINE:
                    raise
                failed[name] = reason(error)
            medians = {each: statistics.median(times) for each, times in seconds.items()}
            record = {
                **make_record(case, self._rates, medians, self._steps_per_turn, platform),
                "compile_s": compiled,
                "failed": failed,
                "not reached": late,
            }
            self._save(record)
        if profile is not None:
            folder = profile / str(case).replace(" ", "_")
            with jax.profiler.trace(folder):
                bench.time(ENGINE)
            times = kernel_times(folder, bench.num_steps)
            print(*table_lines(times), sep="\n")
            self._save({**record, "kernels": [time._asdict() for time in times]})

    def _weights(self, case: Case) -> Any:
        kept = self._model
        if kept is None or kept[:2] != (case.model, case.dtype):
            self._model = kept = None
            gc.collect()
            self._model = kept = (case.model, case.dtype, random_model(case))
        return kept[2]


def make_record(
    case: Case, rates: Rates, seconds: dict[str, float], num_steps: int, platform: str
) -> dict[str, Any]:
    """Create the record of a case.

    Args:
      case: the case that was timed.
      rates: rates of the device.
      seconds: seconds of a step of each variant.
      num_steps: number of decode steps of a turn, during which the context grows.
      platform: platform of the device.
    """
    ours = seconds[ENGINE]
    kv_bytes, flops = case.kv_bytes(platform, num_steps), case.flops(num_steps)
    num_bytes = case.weight_bytes + kv_bytes
    reading, computing = num_bytes / rates.memory / 1e9, flops / rates.matmul / 1e12
    bound, kv_seconds = max(reading, computing), kv_bytes / rates.memory / 1e9
    weights_alone = case.weight_bytes / rates.memory / 1e9
    return {
        "name": str(case),
        "case": asdict(case),
        "op": "prefill" if case.chunk else "decode",
        "bytes": num_bytes,
        "weight_bytes": case.weight_bytes,
        "kv_bytes": kv_bytes,
        "flops": flops,
        "ms": {name: round(1e3 * taken, 4) for name, taken in seconds.items()},
        "bound_ms": round(1e3 * bound, 4),
        "bound_by": "operations" if computing > reading else "bytes",
        "of_bound": round(bound / ours, 3),
        # Without the time to read K and V at the rate of a copy. If attention takes longer, the
        # additional time counts as time of the step.
        "weights_of_memory_rate": round(weights_alone / max(ours - kv_seconds, 1e-9), 3),
        "of_matmul_rate": round(computing / ours, 3),
        "over_engine": {name: round(s / ours, 3) for name, s in seconds.items() if name != ENGINE},
    }


def run(
    jobs: list[tuple[Case, list[str]]],
    *,
    save: Callable[[Report], None],
    profile: Path | None = None,
    **options: Any,
) -> Report:
    """Measure jobs (cases with their variants) while the budget lasts, and print the results."""
    device = jax.devices()[0]
    is_cpu = device.platform == "cpu"
    rates = measure_rates()
    report: Report = {
        **environment(),
        "accelerator": None if is_cpu else device.device_kind,
        "memory_gb_s": rates.memory,
        "memory_gb_s_is": "all cores reading" if is_cpu else "a large copy",
        "matmul_bfloat16_tflop_s": rates.matmul,
        "programs": "those of an engine, on its executor",
        "results": [],
        "skipped": {"not reached in time": [], "failed": []},
    }
    print(report["accelerator"] or report["device"], report["versions"], rates, sep="\n")
    records: dict[str, Any] = {}

    def keep(record: dict[str, Any]) -> None:
        # If a case is measured twice, the second time includes its variants.
        records[record["name"]] = record
        report["results"] = list(records.values())
        print(record_line(record), flush=True)
        save(report)

    session = Session(rates, save=keep, **options)
    for case, variants in jobs:
        if session.is_over():
            report["skipped"]["not reached in time"].append(str(case))
            continue
        try:
            session.measure(case, variants, profile if variants else None)
        except Exception as error:  # the other cases are still measured
            why = f"{case}: {reason(error)}"
            print(f"failed: {why}", flush=True)
            report["skipped"]["failed"].append(why)
        gc.collect()
    report |= {"goals": goal_lines(report), "rates_at_the_end": measure_rates()._asdict()}
    save(report)
    return report


def make_jobs(
    cases: list[Case], names: list[str] | None, platform: str
) -> list[tuple[Case, list[str]]]:
    """Return jobs: the cases of goals alone, then the same with variants, then other cases.

    Args:
      cases: cases in order of importance.
      names: variants to measure; None for all that are not hazardous.
      platform: platform of the device, which excludes some variants.
    """
    if names is None:
        names = [name for name, variant in VARIANTS.items() if not variant.is_hazardous]
    wanted = [name for name in VARIANTS if name != ENGINE and name in names]
    first = [case for case in goal_cases() if case in cases]
    # If no case has a goal, the first case runs with variants.
    varied = {
        case: [name for name in wanted if VARIANTS[name].is_for(case, platform)]
        for case in first or cases[:1]
    }
    alone: list[tuple[Case, list[str]]] = [(case, []) for case in first]
    others: list[tuple[Case, list[str]]] = [(case, []) for case in cases if case not in varied]
    return alone + list(varied.items()) + others


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time whole steps of an engine on the device.")
    parser.add_argument("--quick", action="store_true", help="a few small cases")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="measure only these")
    parser.add_argument(
        "--batches", nargs="+", type=int, help="measure only decode steps of these sizes"
    )
    parser.add_argument(
        "--variants", nargs="*", choices=[*VARIANTS], metavar="NAME",
        help=f"measure only these variants: {', '.join(VARIANTS)}",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=420, metavar="SECONDS", help="default: 420")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant; default: 5")
    parser.add_argument("--goals", action="store_true", help="report which goals are met")
    add_outputs(parser)
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER",
        help="write JAX profiles of cases with variants, and print the times of their kernels",
    )  # fmt: skip
    return parser


def _cases(options: argparse.Namespace, is_cpu: bool) -> Iterator[Case]:
    if options.quick:
        cases = quick_cases("float32" if is_cpu else "bfloat16")
    else:
        cases = cpu_cases() if is_cpu else gpu_cases()
    for case in cases:
        is_model = options.models is None or case.model in options.models
        is_batch = options.batches is None or not case.chunk and case.batch in options.batches
        if is_model and is_batch:
            yield case


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and optionally write JSON and a plot."""
    options = _parser().parse_args(arguments)
    platform = jax.default_backend()
    cases = list(_cases(options, platform == "cpu"))
    if not cases:
        print("benchmarks.step: these options exclude all cases.", file=sys.stderr)
        return 2

    def save(report: Report) -> None:
        if options.json:
            write_json(options.json, report)

    report = run(
        make_jobs(cases, options.variants, platform),
        save=save,
        profile=options.profile,
        budget=options.budget,
        num_rounds=2 if options.quick else options.rounds,
        num_dispatches=1 if platform == "cpu" else 8,
    )
    if options.goals:
        print(*report["goals"], sep="\n")
    if options.plot:
        plot(plotter(), report, options.plot)
    return 1 if report["skipped"]["failed"] else 0
