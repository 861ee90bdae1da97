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

import ctypes
import functools
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.generate.peers import (
    PREFILL_LEN,
    TURN,
    LlamaCppPeer,
    PagedJax,
    Peer,
    prefill_rates,
    step_seconds,
    timed_steps,
)
from benchmarks.harness import Column, Goal, PeerUnavailable
from benchmarks.quantised.starts import measure_starts
from examples import fetch_smollm2

BATCHES = (1, 4, 16)
PROMPT_LEN = 64
MAX_LEN = PREFILL_LEN + 64
OURS, LLAMA_CPP = "paged_jax", "llama.cpp"
# Dtypes that paged_jax quantises to, from the file in bfloat16.
DTYPES = ("int8", "int4", "fp8")
# Number of each format in llama.cpp, `llama_ftype`.
FORMATS = {"BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}
# Format of the file that is downloaded.
SOURCE = "Q4_1"
FILES = (*FORMATS, SOURCE)

# Goals: minimum ratios, for decoding with batches of 1, 4 and 16, and for prompts.
_OVER_LLAMA_CPP = {
    "int8": ("Q8_0", (1.25, 2.0, 1.8, 1.6)),
    "Q4_0": ("Q4_0", (1.0, 1.4, 1.5, 1.4)),
    "Q4_1": ("Q4_1", (1.4, 2.5, 3.3, 3.3)),
    "Q4_K_M": ("Q4_K_M", (1.2, 1.6, 2.0, 1.8)),
}
_OVER_BFLOAT16 = (("int8", "int4", "Q4_0", "Q4_1"), (1.8, 1.2, 1.0, 1.0))


def source_file(path: Path | None = None) -> Path:
    """Return the path of the model in Q4_1.

    Args:
      path: the file; None for the download of `examples/fetch_smollm2.py`.

    Raises:
      FileNotFoundError: the model has not been downloaded.
    """
    path = path or fetch_smollm2.default_path()
    if not path.is_file():
        raise FileNotFoundError(
            f"benchmarks.quantised: there must be a model at {path}. Run `python "
            "examples/fetch_smollm2.py`, which downloads it."
        )
    return path


@functools.cache  # llama.cpp may call the function as long as the process exists
def _ignore_log(llama: Any) -> Any:
    """Return a function that ignores the messages of llama.cpp."""
    return llama.llama_log_callback(lambda level, text, data: None)


def gguf_file(name: str, source: Path, folder: Path) -> Path:
    """Return the file of the model in a format; write it if it is missing.

    Args:
      name: `SOURCE`, or a key of `FORMATS`. llama.cpp converts the weights.
      source: the model in Q4_1.
      folder: folder for the converted files.

    Raises:
      PeerUnavailable: llama-cpp-python is missing.
      RuntimeError: llama.cpp cannot convert the file.
    """
    if name == SOURCE:
        return source
    path = folder / f"{source.name.removesuffix('.gguf').removesuffix('.Q4_1')}.{name}.gguf"
    if path.is_file():
        return path
    llama: Any = harness.import_peer("llama_cpp", "llama-cpp-python")
    llama.llama_log_set(_ignore_log(llama), ctypes.c_void_p())
    parameters = llama.llama_model_quantize_default_params()
    parameters.ftype = FORMATS[name]
    parameters.allow_requantize = True
    folder.mkdir(parents=True, exist_ok=True)
    status = llama.llama_model_quantize(
        str(source).encode(), str(path).encode(), ctypes.byref(parameters)
    )
    if status:
        path.unlink(missing_ok=True)
        raise RuntimeError(
            f"benchmarks.quantised: llama.cpp could not convert {source} to {name}, status "
            f"{status}. Check the free space in {folder}."
        )
    return path


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
    seconds = step_seconds(engines, num_turns)
    return {name: round(batch / taken, 1) for name, taken in seconds.items()}


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


def result_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of the figures and the goals."""
    phases = report["tokens_per_s"]
    columns = [Column("tokens/s", -24, lambda name: name)]
    for phase, rates in phases.items():
        columns.append(Column(phase, 18, rates.get, "{:.1f}"))
    starts = [
        f"{name}, {which} start: {each}"
        for name, figures in report["starts"].items()
        for which, each in figures.items()
    ]
    names = next(iter(phases.values()), {})
    return [*harness.table(columns, names), *starts, *harness.goal_lines(make_goals(), report)]


def main() -> int:
    """Measure, print the figures and the goals, and optionally write JSON."""
    parser = harness.command_line("Time quantised weights on a CPU.")
    add = parser.add_argument
    formats = [*FILES, *DTYPES]
    add("--formats", nargs="+", choices=formats, default=formats)
    add("--batches", nargs="*", type=int, default=list(BATCHES))
    add("--turns", type=int, default=8, help="turns of each batch; default: 8")
    add("--no-prefill", action="store_true", help="do not time prompts")
    add("--no-starts", action="store_true", help="do not measure new processes")
    add("--int8-activations", action="store_true",
        help="also measure quantised formats with int8 activations; fp8 has none")  # fmt: skip
    add("--model", type=Path, help="the file in Q4_1; default: the downloaded one")
    add("--folder", type=Path, help="keep the other formats in this folder")
    options = parser.parse_args()
    header = harness.environment()
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
            figures = prefill_rates(engines, options.turns)
            report["tokens_per_s"][f"prompt of {PREFILL_LEN}"] = figures
        for engine in engines.values():
            engine.close()
    harness.finish(options, report, result_lines(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
