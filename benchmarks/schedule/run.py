"""Simulation of decode attention with different divisions of the batch. It needs no GPU.

    python -m benchmarks.schedule                                 # three minutes
    python -m benchmarks.schedule --quick                         # seconds
    python -m benchmarks.schedule --json schedule.json --plot schedule.png

The program instances of a decode call of Llama 3 8B run on the SMs of an H200, which share the
memory bandwidth (`machine.py`; its constants are estimates). The parts come from the kernel's own
function, `paged_jax.kernels.gpu_device`, and are compared with the previous rule, which used
the width of the table. Mixes of lengths are synthetic, or drawn from traces of production services
if their folder is given or found.

A study of even batches compares vLLM's two kernels (V1 and V2 of its paged attention): when should
sequences be divided into parts of 512 tokens instead of one program instance each? Both are
simulated with the kernel of this library.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.environment import environment, write_json
from benchmarks.common.figures import add_outputs, plotter
from benchmarks.common.process import ROOT
from benchmarks.schedule import mixes, rules
from benchmarks.schedule.machine import Machine
from benchmarks.schedule.report import (
    BEFORE,
    OURS,
    PARTITIONS,
    WHOLE,
    Report,
    goal_lines,
    plot,
    record_line,
)
from benchmarks.schedule.rules import Call, Rule

_MIX_RULES: dict[str, Rule] = {BEFORE: rules.by_table, OURS: rules.by_lengths}
_STUDY_RULES: dict[str, Rule] = {
    WHOLE: rules.whole,
    PARTITIONS: rules.partitions,
    OURS: rules.by_lengths,
}

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# Bytes for K and V of 32 layers on an H200, after the weights of 8B.
_MOST_TOKENS = 900_000


def simulate(name: str, call: Call, chosen: dict[str, Rule], machine: Machine) -> dict[str, Any]:
    """Return the record of a call under some rules."""
    bound = rules.bound(call, machine)
    seconds = {rule: rules.seconds(call, divide, machine) for rule, divide in chosen.items()}
    return {
        "name": name,
        "batch": len(call.lengths),
        "is_even": bool(np.all(call.lengths == call.lengths[0])),
        "mb": round(call.num_bytes / 1e6, 1),
        "bound_us": round(1e6 * bound, 2),
        "us": {rule: round(1e6 * taken, 2) for rule, taken in seconds.items()},
        "over_bound": {rule: round(taken / bound, 4) for rule, taken in seconds.items()},
    }


def simulate_even(batch: int, context: int, machine: Machine) -> dict[str, Any]:
    """Return the record of an even batch in the study."""
    call = Call(np.full(batch, context), context)
    record = simulate(f"{batch} x {context}", call, _STUDY_RULES, machine)
    us = record["us"]
    better = min(us[WHOLE], us[PARTITIONS])
    return record | {"context": context, "over_better": round(us[OURS] / better, 4)}


def run(traces: Path, machine: Machine, num_draws: int, max_tokens: int) -> Report:
    """Simulate everything, and print the results.

    Args:
      traces: folder of recorded traces.
      machine: the simulated GPU.
      num_draws: number of draws of each trace and batch.
      max_tokens: maximum number of tokens of a batch in the study.
    """
    recorded = mixes.recorded(traces, num_draws)
    if not recorded:
        print(f"no traces in {traces}")
    report: Report = {
        **environment(),
        "accelerator": "simulated NVIDIA H200",
        "machine": machine._asdict(),
        "mixes": [],
        "study": [],
    }
    print(f"simulated: {machine}")
    for name, call in (mixes.made_up() | recorded).items():
        report["mixes"].append(simulate(name, call, _MIX_RULES, machine))
        print(record_line(report["mixes"][-1]), flush=True)
    for batch in _BATCHES:
        for context in _CONTEXTS:
            if batch * context <= max_tokens:
                report["study"].append(simulate_even(batch, context, machine))
                print(record_line(report["study"][-1]), flush=True)
    return report | {"goals": goal_lines(report)}


def _default_traces() -> Path:
    folder = os.environ.get("PAGED_JAX_TEST_DATA", ROOT.parent / "shared" / "data")
    return Path(folder) / "traces"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Simulate decode attention with different divisions of a batch."
    )
    parser.add_argument("--quick", action="store_true", help="few batches")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", default=_default_traces(),
        help="folder of recorded traces; default: traces in PAGED_JAX_TEST_DATA",
    )  # fmt: skip
    parser.add_argument("--memory-rate", type=float, default=Machine().memory_rate / 1e9,
                        metavar="GB/S", help="memory bandwidth; default: %(default)g")  # fmt: skip
    add_outputs(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Simulate, print, and optionally write JSON and a plot."""
    options = _parser().parse_args(arguments)
    machine = Machine(memory_rate=1e9 * options.memory_rate)
    num_draws, max_tokens = (1, 4096) if options.quick else (3, _MOST_TOKENS)
    report = run(options.traces, machine, num_draws, max_tokens)
    print(*report["goals"], sep="\n")
    if options.json:
        write_json(options.json, report)
    if options.plot:
        plot(plotter(), report, options.plot)
    return 0
