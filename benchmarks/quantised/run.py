"""Benchmark of quantised weights on a CPU: decoding, prompts, memory and start.

    python examples/fetch_smollm2.py                      # downloads the model, 98 MB
    python -m benchmarks.quantised --json results.json
    python -m benchmarks.quantised --formats BF16 int8 Q8_0 --int8-activations --no-starts

The model is SmolLM2-135M-Instruct in Q4_1. llama.cpp writes it in other formats of GGUF. Both
engines read the same files and the same prompts, decode greedily, and run in turns, so that slow
changes of the machine affect all of them. Figures are medians, and ratios are computed within the
run. "int8", "int4" and "fp8" are weights that paged_jax quantises while it loads the file in
bfloat16. A start is a new process, see `benchmarks.quantised.starts`.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common.environment import environment, write_json
from benchmarks.common.goals import Goal, goal_line
from benchmarks.common.process import PeerUnavailable
from benchmarks.generate.llama_cpp_peer import LlamaCppPeer
from benchmarks.generate.peer import Peer, timed_steps
from benchmarks.generate.run import PagedJax
from benchmarks.quantised.files import FORMATS, SOURCE, gguf_file, source_file
from benchmarks.quantised.starts import measure_starts

BATCHES = (1, 4, 16)
PROMPT_LEN, PREFILL_LEN = 64, 512
# Consecutive steps in a turn of a batch.
TURN = 8
MAX_LEN = PREFILL_LEN + 64
OURS, LLAMA_CPP = "paged_jax", "llama.cpp"
# Dtypes that paged_jax quantises to, from the file in bfloat16.
DTYPES = ("int8", "int4", "fp8")
FILES = (*FORMATS, SOURCE)

# Goals: minimum ratios, for decoding with batches of 1, 4 and 16, and for prompts.
_OVER_LLAMA_CPP = {
    "int8": ("Q8_0", (1.25, 2.0, 1.8, 1.6)),
    "Q4_0": ("Q4_0", (1.0, 1.4, 1.5, 1.4)),
    "Q4_1": ("Q4_1", (1.4, 2.5, 3.3, 3.3)),
    "Q4_K_M": ("Q4_K_M", (1.2, 1.6, 2.0, 1.8)),
}
_OVER_BFLOAT16 = (("int8", "int4", "Q4_0", "Q4_1"), (1.8, 1.2, 1.0, 1.0))


def load_engines(
    names: Iterable[str], source: Path, folder: Path, *, int8_activations: bool = False
) -> dict[str, Peer]:
    """Return the engines of formats: paged_jax and llama.cpp for files, paged_jax for dtypes.

    With `int8_activations`, there is a second engine of paged_jax for each quantised format.
    """
    engines: dict[str, Peer] = {}
    num_steps = max(BATCHES) * -(-(PROMPT_LEN + 256) // 16)
    for name in names:
        file = gguf_file("BF16" if name in DTYPES else name, source, folder)
        dtype = name if name in DTYPES else "bfloat16"
        sizes: Any = {"batch": max(BATCHES), "max_len": MAX_LEN, "num_blocks": num_steps}
        engines[f"{OURS} {name}"] = PagedJax(file, dtype, **sizes)
        if int8_activations and name != "BF16":
            label = f"{OURS} {name}, int8 x"
            engines[label] = PagedJax(file, dtype, int8_activations=True, **sizes)
        if name in FILES:
            engines[f"{LLAMA_CPP} {name}"] = LlamaCppPeer(file)
    return engines


def measure_decode(engines: dict[str, Peer], batch: int, num_turns: int) -> dict[str, float]:
    """Return the tokens per second of each engine, measured in turns."""
    for engine in engines.values():
        engine.start(batch, PROMPT_LEN, TURN * (num_turns + 1))
        timed_steps(engine, TURN - 1)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(num_turns):
        for name, engine in engines.items():
            seconds[name] += timed_steps(engine, TURN - 1)
    return {name: round(batch / statistics.median(each), 1) for name, each in seconds.items()}


def measure_prefill(engines: dict[str, Peer], num_turns: int) -> dict[str, float]:
    """Return the prompt tokens per second of each engine, measured in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(num_turns + 1):
        for name, engine in engines.items():
            seconds[name].append(engine.prefill(PREFILL_LEN))
    # The first call compiles and warms up.
    return {n: round(PREFILL_LEN / statistics.median(s[1:]), 1) for n, s in seconds.items()}


def measure_all_starts(names: Iterable[str], source: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of `measure_starts` for each engine."""
    figures = {}
    for name in names:
        file = gguf_file("BF16" if name in DTYPES else name, source, folder)
        dtype = name if name in DTYPES else "bfloat16"
        figures[f"{OURS} {name}"] = measure_starts(OURS, file, dtype)
        if name in FILES:
            figures[f"{LLAMA_CPP} {name}"] = measure_starts(LLAMA_CPP, file)
    return figures


def _ratio(report: dict[str, Any], phase: str, name: str, other: str) -> float | None:
    rates = report["tokens_per_s"].get(phase, {})
    if f"{OURS} {name}" not in rates or other not in rates:
        return None
    return rates[f"{OURS} {name}"] / rates[other]


def _speed_goal(phase: str, name: str, other: str, low: float) -> Goal:
    return Goal(
        f"{phase}: {name} over {other}, at least {low}",
        lambda report: _ratio(report, phase, name, other),
        low=low,
    )


def _memory(report: dict[str, Any]) -> dict[str, float]:
    return {
        name: figures["second"]["peak_over_weights_and_pool"]
        for name, figures in report["starts"].items()
        if name.startswith(OURS) and name != f"{OURS} BF16"
    }


def _start_ratio(report: dict[str, Any]) -> float | None:
    names = [f"{engine} {SOURCE}" for engine in (OURS, LLAMA_CPP)]
    if not set(names) <= set(report["starts"]):
        return None
    ours, peers = (report["starts"][name]["second"]["first_token_s"] for name in names)
    return ours / peers


def make_goals() -> list[Goal]:
    """Return all goals of the report."""
    phases = [*(f"decode, batch {batch}" for batch in BATCHES), f"prompt of {PREFILL_LEN}"]
    goals = [
        _speed_goal(phase, name, f"{LLAMA_CPP} {file}", low)
        for name, (file, lows) in _OVER_LLAMA_CPP.items()
        for phase, low in zip(phases, lows, strict=True)
    ]
    names, lows = _OVER_BFLOAT16
    goals += [
        _speed_goal(phase, name, f"{OURS} BF16", low)
        for name in names
        for phase, low in zip(phases, lows, strict=True)
    ]
    return [
        *goals,
        Goal("peak memory over weights and pool, second start, at most 1.6", _memory, high=1.6),
        Goal(f"first token of {SOURCE} over llama.cpp, at most 2", _start_ratio, high=2.0),
    ]


def show(report: dict[str, Any]) -> None:
    """Print the figures and the goals."""
    phases = report["tokens_per_s"]
    print(f"{'tokens/s':24s}" + "".join(f"{phase:>18s}" for phase in phases))
    for name in next(iter(phases.values()), {}):
        print(f"{name:24s}" + "".join(f"{rates[name]:18.1f}" for rates in phases.values()))
    for name, figures in report["starts"].items():
        for which, each in figures.items():
            print(f"{name}, {which} start: {each}")
    for goal in make_goals():
        print(goal_line(goal, report))


def main() -> int:
    """Measure, print the figures and the goals, and optionally write JSON."""
    parser = argparse.ArgumentParser(description="Time quantised weights on a CPU.")
    formats = [*FILES, *DTYPES]
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats)
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--turns", type=int, default=8, help="turns of each batch; default: 8")
    parser.add_argument("--no-prefill", action="store_true", help="do not time prompts")
    parser.add_argument("--no-starts", action="store_true", help="do not measure new processes")
    parser.add_argument(
        "--int8-activations",
        action="store_true",
        help="also measure quantised formats with int8 activations; fp8 has none",
    )
    parser.add_argument("--model", type=Path, help="the file in Q4_1; default: the downloaded one")
    parser.add_argument("--folder", type=Path, help="keep the other formats in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    header = environment()
    print(header["device"], header["versions"], sep="\n")
    report: dict[str, Any] = {**header, "tokens_per_s": {}, "starts": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        try:
            source = source_file(options.model)
            if not options.no_starts:
                report["starts"] = measure_all_starts(options.formats, source, folder)
            engines = load_engines(
                options.formats, source, folder, int8_activations=options.int8_activations
            )
        except (PeerUnavailable, FileNotFoundError) as error:
            print(error, file=sys.stderr)
            return 1
        for batch in options.batches:
            figures = measure_decode(engines, batch, options.turns)
            report["tokens_per_s"][f"decode, batch {batch}"] = figures
        if not options.no_prefill:
            figures = measure_prefill(engines, options.turns)
            report["tokens_per_s"][f"prompt of {PREFILL_LEN}"] = figures
        for engine in engines.values():
            engine.close()
    show(report)
    if options.json:
        write_json(options.json, report)
    return 0
