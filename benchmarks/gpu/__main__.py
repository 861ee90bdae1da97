"""Tests and benchmarks for a rented GPU, in stages.

    python -m benchmarks.gpu --out results                  # the first stages, in nine minutes
    python -m benchmarks.gpu --total 300 --out results      # in five minutes
    python -m benchmarks.gpu --more --out results           # all other stages, half an hour
    python -m benchmarks.gpu --stage tune --out results     # one stage, like `make gpu-tune`
    python -m benchmarks.gpu --peer prototype.py            # with another kernel
    python -m benchmarks.gpu --budget 60                    # at most about a minute for each stage
    python -m benchmarks.gpu --dry-run                      # list the commands of all stages
    python -m benchmarks.gpu --more --quick --out /tmp/results    # at small sizes, on a CPU

It runs from the sources, with the Python that starts it. It creates no environment, installs and
downloads nothing, and does not need git (PAGED_JAX_COMMIT may name the commit). That Python needs
JAX with its CUDA plugin, flax, orbax, safetensors, tokenizers, jinja2, tqdm, hypothesis and pytest.
PyTorch is timed if it is installed, and plots need matplotlib.

The first stages are in the order of the worth of their answers. When the time of `--total` is over,
no stage starts, and the last one ends early; its results so far are kept. A stage that fails does
not stop the next one.

A stage and the check of the device before it take less than 570 s, and write at most 8 files to the
folder of `--out`: results as JSON, the output of all its processes in ``STAGE.log``, and a summary
in `stages.json`. Later stages use the tables that the stages "tune" and "defaults" write there. To
keep them, copy them to `paged_jax/kernels/triton/tuning.json` and
`paged_jax/kernels/gpu_defaults.json`.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from xml.etree import ElementTree

from benchmarks.harness import ROOT, write_json

# The stages: their commands, order and time limits.

# Seconds of the first stages together, with the check of the device.
TOTAL_SECONDS = 540
# A stage starts only if it has this much time, and its measurements end this long before its end.
_LEAST_SECONDS, _END_SECONDS = 45, 30

# Rented GPUs often stop a command after ten minutes. So a stage and the device check before it may
# take at most 570 s together.
DEVICE_SECONDS, LIMIT_SECONDS = 60.0, 500.0

# Tables in the folder of results, which later stages use.
TUNING_FILE, DEFAULTS_FILE = "tuning.json", "gpu-defaults.json"

# Seconds after which a stage starts no new measurement. The stages "tests" and "text" and the start
# of each stage take the rest of half an hour.
_BUDGETS = {
    "prompts": 120,
    "tune-first": 90,
    "batch-1": 120,
    "batch-64": 120,
    "tune": 280,
    "goals": 290,
    "mosaic": 120,
    "mosaic-updates": 60,
    "step": 270,
    "weights": 120,
    "divisions": 90,
    "loops": 90,
}

# pytest prints the stacks of all threads if a test runs for longer than this.
_STACKS_AFTER_SECONDS = 120

_RECURRENT_TESTS = {"tests/kernels/test_state_rows.py": ("-k", "triton")}
# These tests compile the kernels on a GPU and interpret them elsewhere. Each file runs in a
# separate process, so that all of them run at the same time. Long files use several processes if
# pytest-xdist is installed.
_KERNEL_TESTS = {
    "tests/kernels/test_triton_decode.py": (),
    "tests/kernels/test_triton_prefill.py": (),
    "tests/kernels/test_triton_write.py": (),
    "tests/kernels/test_triton_quantised.py": (),
    # One suite for all backends.
    "tests/kernels/test_attention.py": ("-k", "triton"),
    "tests/kernels/test_ragged.py": ("-k", "triton"),
    "tests/kernels/test_latent.py": ("-k", "triton"),
    "tests/kernels/test_writing.py": ("-k", "triton"),
    "tests/kernels/test_rope_write.py": ("-k", "triton"),
    "tests/kernels/test_linear.py": ("-k", "triton"),
    **_RECURRENT_TESTS,
}
_NUM_PROCESSES = {
    "tests/kernels/test_triton_decode.py": 3,
    "tests/kernels/test_triton_quantised.py": 6,
}


class Command(NamedTuple):
    """One process.

    Attributes:
      arguments: arguments of Python.
      name: name of the process in the log and the summary.
      wrapper: a program that runs Python, with its own arguments; empty for none.
    """

    arguments: tuple[str, ...]
    name: str
    wrapper: tuple[str, ...] = ()

    def within(self, seconds: int) -> "Command":
        """Return the command with a budget of at most `seconds`, if it has a budget."""
        pairs = itertools.pairwise(("", *self.arguments))
        arguments = [
            str(min(int(value), seconds)) if option == "--budget" else value
            for option, value in pairs
        ]
        return self._replace(arguments=tuple(arguments))


class Stage(NamedTuple):
    """Processes that run at the same time.

    Attributes:
      text: purpose of the stage.
      commands: function that returns the processes. It takes the folder of results and whether the
        run is a quick run.
      seconds: time limit of the stage.
      environment: environment variables of the processes.
      is_tuned: whether the ops use the launch parameters and default backends that the stages
        "tune" and "defaults" found.
    """

    text: str
    commands: Callable[[Path, bool], list[Command]]
    seconds: float = LIMIT_SECONDS
    environment: dict[str, str] = {}
    is_tuned: bool = True


def _module(module: str, *arguments: str | Path) -> tuple[str, ...]:
    return ("-m", module, *map(str, arguments))


def _budget(stage: str) -> tuple[str, ...]:
    return ("--budget", str(_BUDGETS[stage]))


def _device(out: Path, is_quick: bool) -> list[Command]:
    program = (
        "import jax; from pathlib import Path; "
        "from benchmarks.harness import environment, write_json; "
        "d = jax.devices()[0]; about = {**environment(), 'accelerator': d.device_kind, "
        "'num_devices': jax.device_count(), 'memory': d.memory_stats()}; "
        f"write_json(Path({str(out / 'device.json')!r}), about); print(about); "
    )
    # Without a GPU, JAX falls back to the CPU.
    program += "" if is_quick else "assert d.platform == 'gpu', 'JAX has no GPU here'"
    return [Command(("-c", program), "device")]


def _tests(out: Path, is_quick: bool) -> list[Command]:
    return _test_files(out, is_quick, _KERNEL_TESTS)


def _recurrent(out: Path, is_quick: bool) -> list[Command]:
    return _test_files(out, is_quick, _RECURRENT_TESTS)


def _test_files(out: Path, is_quick: bool, files: Mapping[str, tuple[str, ...]]) -> list[Command]:
    """Return a process for each test file, which is given with arguments of pytest."""
    commands = []
    for file, selection in files.items():
        name = Path(file).stem
        chosen = ("-m", "not slow", *selection) if is_quick else selection
        if importlib.util.find_spec("xdist") is not None and file in _NUM_PROCESSES:
            chosen = (*chosen, "-n", str(_NUM_PROCESSES[file]))
        junit = f"--junitxml={out / name}.xml"
        commands.append(Command((*_pytest(file), junit, *chosen), name))
    return commands


def _pytest(file: str) -> tuple[str, ...]:
    # With -v the log names a test that hangs. With -W default, warnings do not fail a test.
    stacks = f"faulthandler_timeout={_STACKS_AFTER_SECONDS}"
    options = ("-v", "-W", "default", "-p", "no:cacheprovider", "-o", stacks)
    return ("-m", "pytest", *options, file)


def _memcheck(out: Path, is_quick: bool) -> list[Command]:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or is_quick:
        return []  # it is part of the CUDA toolkit, which JAX does not need
    wrapper = (sanitizer, "--tool", "memcheck", "--error-exitcode", "86")
    selection = ("-k", "any_shape or quantised_pools", "-x")
    arguments = (*_pytest("tests/kernels/test_triton_decode.py"), *selection)
    return [Command(arguments, "memcheck", wrapper)]


def _tune(out: Path, is_quick: bool) -> list[Command]:
    return _tune_models(out, is_quick, "tune", "Llama-3 8B", "TinyLlama")


def _tune_first(out: Path, is_quick: bool) -> list[Command]:
    return _tune_models(out, is_quick, "tune-first", "Llama-3 8B")


def _tune_models(out: Path, is_quick: bool, stage: str, *models: str) -> list[Command]:
    """Return the process that tunes the shapes of models, with blocks of 16 tokens.

    Other shapes use the entry of the nearest of these.
    """
    table, times = out / TUNING_FILE, out / f"{stage}.json"
    extra = ("--dry-run",) if is_quick else _budget(stage)
    shapes = ("--models", *models, "--block-sizes", "16")
    arguments = (*shapes, "--table", table, "--json", times, *extra)
    return [Command(_module("benchmarks.attention.tune", *arguments), stage)]


def _goals(out: Path, is_quick: bool) -> list[Command]:
    extra = ("--quick", "--rounds", "1") if is_quick else _budget("goals")
    arguments = ("--goals", "--json", out / "decode-attention-gpu.json", *extra)
    return [Command(_module("benchmarks.attention", *arguments), "goals")]


def _prompts(out: Path, is_quick: bool) -> list[Command]:
    return _compare(out, is_quick, "prompts", "prefill")


def _mosaic(out: Path, is_quick: bool) -> list[Command]:
    return _compare(out, is_quick, "mosaic", "decode", "prefill", "ragged")


def _mosaic_updates(out: Path, is_quick: bool) -> list[Command]:
    return _compare(out, is_quick, "mosaic-updates", "write", "rope_write", "copy_blocks")


def _compare(out: Path, is_quick: bool, stage: str, *ops: str) -> list[Command]:
    """Return the process that times ops on all backends."""
    extra = ("--quick", "--rounds", "1") if is_quick else _budget(stage)
    results = out / f"backends-{stage}.json"
    arguments = ("--ops", *ops, "--json", results, *extra)
    return [Command(_module("benchmarks.gpu.backends", *arguments), stage)]


def _defaults(out: Path, is_quick: bool) -> list[Command]:
    files = sorted(out.glob("backends-*.json"))
    if not files or is_quick:
        return []  # results of a CPU have no defaults
    arguments = (*files, "--table", out / DEFAULTS_FILE)
    return [Command(_module("benchmarks.gpu.defaults", *arguments), "defaults")]


def _divisions(out: Path, is_quick: bool) -> list[Command]:
    chosen = ("--models", "Llama-3 8B", "--dtypes", "bfloat16", *_budget("divisions"))
    extra = ("--quick", "--rounds", "1") if is_quick else chosen
    results = out / "decode-attention-divisions.json"
    arguments = ("--divisions", "--no-peers", "--json", results, *extra)
    return [Command(_module("benchmarks.attention", *arguments), "divisions")]


def _step(out: Path, is_quick: bool) -> list[Command]:
    return _time_steps(out, is_quick, "step", "step-gpu.json", "--goals")


def _batch_1(out: Path, is_quick: bool) -> list[Command]:
    cases = ("--models", "135M", "8B", "--batches", "1", "--variants", "engine", "bare step")
    profile = ("--profile", out / "profile-batch-1")
    return _time_steps(out, is_quick, "batch-1", "step-batch-1.json", *cases, *profile)


def _batch_64(out: Path, is_quick: bool) -> list[Command]:
    variants = ("engine", "matmuls by cuBLAS", "matmuls tuned over all tiles", "bare step")
    cases = ("--models", "8B", "--batches", "64", "--variants", *variants)
    return _time_steps(out, is_quick, "batch-64", "step-batch-64.json", *cases)


def _time_steps(
    out: Path, is_quick: bool, stage: str, file: str, *arguments: str | Path
) -> list[Command]:
    """Return the process that times whole steps."""
    quick = ("--quick", "--variants", "bare step")
    extra = quick if is_quick else (*arguments, *_budget(stage))
    return [Command(_module("benchmarks.step", "--json", out / file, *extra), stage)]


def _weights(out: Path, is_quick: bool) -> list[Command]:
    small = ("--size", "256", "--rows", "1", "8", "--weights", "2", "--rounds", "1")
    extra = small if is_quick else _budget("weights")
    results = out / "weight-formats-gpu.json"
    arguments = ("--json", results, *extra)
    return [Command(_module("benchmarks.weight_formats_time", *arguments), "weights")]


def _loops(out: Path, is_quick: bool) -> list[Command]:
    chosen = ("--quick",) if is_quick else ("--models", "135M", "--batches", "1", *_budget("loops"))
    variant = ("--variants", "loops in command buffers")
    arguments = (*chosen, *variant, "--json", out / "step-loops-gpu.json")
    return [Command(_module("benchmarks.step", *arguments), "loops")]


def _text(out: Path, is_quick: bool) -> list[Command]:
    prompt = "It is a truth universally acknowledged"
    count = "8" if is_quick else "100"
    arguments = ("--prompt", prompt, "--max-tokens", count, "--temperature", "0")
    return [Command(_module("paged_jax.generate", *arguments), "text")]


def _pictures(out: Path, is_quick: bool) -> list[Command]:
    files = sorted([*out.glob("decode-attention-*.json"), *out.glob("step-*.json")])
    if not files or importlib.util.find_spec("matplotlib") is None:
        return []  # plots may be drawn on another machine
    return [Command(_module("benchmarks.plots", *files, "--out", out), "pictures")]


def peer_stage(file: Path) -> Stage:
    """Return a stage that times another kernel, see `benchmarks.attention.peers.peer_of_file`."""

    def commands(out: Path, is_quick: bool) -> list[Command]:
        chosen = ("--models", "Llama-3 8B", "--dtypes", "bfloat16", "--batches", "1", "64")
        sizes = (*chosen, "--contexts", "8192", "131072", "--budget", "200")
        extra = ("--quick", "--rounds", "1") if is_quick else sizes
        results = out / "decode-attention-peer.json"
        arguments = ("--peer", file.resolve(), "--json", results, *extra)
        return [Command(_module("benchmarks.attention", *arguments), "peer")]

    return Stage("another kernel, over the same pools", commands, 300)


# Several processes share the memory of the GPU.
_SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# One allocation for each array, so that memcheck detects accesses past its end.
_SINGLE_ALLOCATIONS = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# JAX takes three quarters of the memory by default.
_ALL_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}

_DEVICE = {"device": Stage("the device, its memory, and versions", _device, DEVICE_SECONDS)}

FIRST: dict[str, Stage] = {
    "prompts": Stage("prompts on mosaic_gpu, compared with Triton and JAX's kernel", _prompts, 180),
    "tune-first": Stage(
        f"launch parameters of Llama 3 8B, into {TUNING_FILE}", _tune_first, 150, is_tuned=False
    ),
    "batch-1": Stage(
        "decode steps of one sequence, with a profile", _batch_1, 180, environment=_ALL_MEMORY
    ),
    "batch-64": Stage(
        "decode steps of 64 sequences, in variants", _batch_64, 180, environment=_ALL_MEMORY
    ),
    "recurrent": Stage("the results of the recurrent kernels, compiled", _recurrent, 90),
}
"""Stages whose answers are worth most, the most valuable first."""

MORE: dict[str, Stage] = {
    "tests": Stage("the results of the compiled kernels", _tests, environment=_SHARED_MEMORY),
    "memcheck": Stage(
        "memory accesses of decode kernels, if compute-sanitizer is installed",
        _memcheck,
        300,
        environment=_SINGLE_ALLOCATIONS,
    ),
    "tune": Stage(
        f"launch parameters of the usual shapes, into {TUNING_FILE}", _tune, is_tuned=False
    ),
    "goals": Stage(
        "attention and its goals, compared with JAX's kernel, cuDNN and PyTorch", _goals
    ),
    "mosaic": Stage(
        "decode, prompts and ragged batches on mosaic_gpu, compared with Triton and JAX's kernel",
        _mosaic,
        240,
    ),
    "mosaic-updates": Stage(
        "writes and copies of blocks on mosaic_gpu, compared with Triton", _mosaic_updates, 180
    ),
    "defaults": Stage(
        f"the default backends by the times of both, into {DEFAULTS_FILE}", _defaults, 60
    ),
    "step": Stage("whole decode steps and prompt chunks", _step, environment=_ALL_MEMORY),
    "weights": Stage("matmuls with quantised weights: results, and times in all formats", _weights),
    "divisions": Stage(
        "decode with batches divided in other ways, by batch and context", _divisions
    ),
    "text": Stage("text of the bundled model, through the whole engine", _text, 240),
    # This may hang the GPU, so it runs after all other measurements.
    "loops": Stage(
        "decode steps with loops in command buffers", _loops, 240, environment=_ALL_MEMORY
    ),
    "pictures": Stage("the results as pictures, if matplotlib is installed", _pictures, 120),
}
"""All other stages, in order."""

STAGES = _DEVICE | FIRST | MORE


# The run.

SUMMARY = "stages.json"
# Environment variables with the paths of tables. The modules that read them import JAX, and this
# process must not use the GPU.
TABLE_VARIABLES = {"PAGED_JAX_TUNING": TUNING_FILE, "PAGED_JAX_GPU_DEFAULTS": DEFAULTS_FILE}
# Stages that need no device. All other stages do not start without a device.
_WITHOUT_DEVICE = {"defaults", "pictures"}


def run_stage(name: str, stage: Stage, out: Path, *, is_quick: bool = False) -> dict[str, Any]:
    """Run a stage, save its summary and return it: statuses, seconds and counts of tests.

    Args:
      name: name of the stage in the summary, and of its log.
      stage: the stage.
      out: folder of results, which may contain those of earlier stages.
      is_quick: whether to run it at small sizes, on a CPU.
    """
    commands = stage.commands(out, is_quick)
    print(f"\n== {name}: {stage.text}", flush=True)
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    environment = _environment(stage, out, is_quick)
    with (out / f"{name}.log").open("wb") as log:
        running = [_start(command, environment) for command in commands]
        try:
            while any(each.process.poll() is None for each in running):
                if time.monotonic() - start > stage.seconds:
                    _kill(running)
                _show(running, log)
                time.sleep(0.1)
            _show(running, log, is_over=True)
        finally:  # Ctrl-C does not reach the processes, which run in their own process groups
            _kill(running)
            for each in running:
                each.output.close()
    statuses = [each.process.returncode for each in running]
    seconds = round(time.monotonic() - start, 1)
    summary = {
        "seconds": seconds,
        "is_late": seconds > stage.seconds,
        "statuses": {c.name: status for c, status in zip(commands, statuses, strict=True)},
        "tests": read_tests(out),
    }
    print(f"== {name}: {seconds:.0f} s, statuses {statuses}", flush=True)
    _keep(out / SUMMARY, name, summary)
    return summary


def _environment(stage: Stage, out: Path, is_quick: bool) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    # JAX's callbacks need the CPU as well.
    ours["JAX_PLATFORMS"] = "cpu" if is_quick else "cuda,cpu"
    for variable, name in TABLE_VARIABLES.items():
        if stage.is_tuned and (out / name).exists():
            ours[variable] = str(out / name)
    return {**os.environ, **ours, **stage.environment}


@dataclasses.dataclass
class _Running:
    """A process of a stage.

    Attributes:
      name: name of the process in the log.
      process: the process.
      output: temporary file with the output of the process.
      num_shown: number of bytes of the file that have been printed.
    """

    name: str
    process: subprocess.Popen
    output: Any
    num_shown: int = 0


def _start(command: Command, environment: dict[str, str]) -> _Running:
    output = tempfile.TemporaryFile()
    process = subprocess.Popen(
        [*command.wrapper, sys.executable, *command.arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return _Running(command.name, process, output)


def _kill(running: list[_Running]) -> None:
    """Kill the processes that still run, and their children (a wrapper starts Python)."""
    for each in running:
        if each.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)


def _show(running: list[_Running], log: BinaryIO, *, is_over: bool = False) -> None:
    """Print the new whole lines of all processes, and write them to the log of the stage.

    Args:
      running: the processes. If there are several, each line starts with the name of its process.
      log: the log of the stage.
      is_over: whether the processes have ended; then an incomplete last line is printed as well.
    """
    for each in running:
        size = os.fstat(each.output.fileno()).st_size
        # `pread`, because `read` would move the position at which the process writes.
        new = os.pread(each.output.fileno(), size - each.num_shown, each.num_shown)
        if is_over and new and not new.endswith(b"\n"):
            new += b"\n"
        lines = new[: new.rfind(b"\n") + 1]
        each.num_shown += len(lines)
        prefix = f"[{each.name}] ".encode() if len(running) > 1 else b""
        lines = b"".join(prefix + line for line in lines.splitlines(keepends=True))
        log.write(lines)
        log.flush()
        print(lines.decode(errors="replace"), end="", flush=True)


def read_tests(out: Path) -> dict[str, Any]:
    """Return counts and failures of each test file, and delete pytest's XML reports."""
    found = {}
    for path in sorted(out.glob("test_*.xml")):
        suite = ElementTree.parse(path).getroot().find("testsuite")
        if suite is None:
            continue
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failed = [
            f"{case.get('name')}: {_first_line(case[0])}"
            for case in suite.findall("testcase")
            if len(case) and case[0].tag in ("failure", "error")
        ]
        found[path.stem] = {**counts, "seconds": float(suite.get("time", 0)), "failed": failed}
        path.unlink()
    return found


def _first_line(failure: ElementTree.Element) -> str:
    return (failure.get("message") or "").partition("\n")[0]


def _keep(path: Path, name: str, summary: dict[str, Any]) -> None:
    kept = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, kept | {name: summary})


def _within(stage: Stage, seconds: int | None) -> Stage:
    """Return the stage with a budget of at most `seconds` for each process."""
    if seconds is None:
        return stage

    def commands(out: Path, is_quick: bool) -> list[Command]:
        return [command.within(seconds) for command in stage.commands(out, is_quick)]

    return stage._replace(commands=commands)


def _print_stages(stages: dict[str, Stage], out: Path, is_quick: bool) -> None:
    for name, stage in stages.items():
        print(f"{name}: {stage.text}; {stage.seconds:.0f} s at most")
        for variable, value in stage.environment.items():
            print(f"    {variable}={value}")
        for command in stage.commands(out, is_quick):
            words = (*command.wrapper, "python", *command.arguments)
            print("   ", *(repr(word) if " " in word else word for word in words))


def main(arguments: list[str] | None = None) -> int:
    """Run stages, or print their commands."""
    parser = argparse.ArgumentParser(description="Run tests and benchmarks on a GPU, in stages.")
    parser.add_argument(
        "--stage",
        nargs="+",
        choices=STAGES,
        metavar="NAME",
        help=f"run only these stages: {', '.join(STAGES)} (default: {', '.join(FIRST)})",
    )
    parser.add_argument("--more", action="store_true", help=f"run {', '.join(MORE)}")
    parser.add_argument(
        "--total",
        type=int,
        metavar="SECONDS",
        help="end all stages after this time (default: no limit with --stage and --more, else "
        f"{TOTAL_SECONDS})",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results", metavar="FOLDER")
    parser.add_argument(
        "--peer", type=Path, metavar="FILE", help="add a stage that times the kernel of this file"
    )
    parser.add_argument(
        "--budget",
        type=int,
        metavar="SECONDS",
        help="start no new measurement in a stage after this time (default: its own budget)",
    )
    parser.add_argument("--quick", action="store_true", help="run small sizes, on a CPU")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args(arguments)
    # The working directory of the processes is not the current directory.
    out = options.out.resolve()
    is_first = options.stage is None and not options.more
    names = options.stage or list(MORE if options.more else FIRST)
    if options.dry_run and is_first:
        names = [*FIRST, *MORE]
    if not options.quick and not _WITHOUT_DEVICE.issuperset(names):
        names = ["device", *(name for name in names if name != "device")]
    stages = {name: _within(STAGES[name], options.budget) for name in names}
    if options.peer:
        pictures = stages.pop("pictures", None)
        stages["peer"] = peer_stage(options.peer)
        stages |= {"pictures": pictures} if pictures else {}
    if options.dry_run:
        _print_stages(stages, out, options.quick)
        return 0
    total = TOTAL_SECONDS if is_first and options.total is None else options.total
    end = None if total is None else time.monotonic() + total
    failed = []
    for name, stage in stages.items():
        if end is not None:
            seconds = end - time.monotonic()
            if seconds < _LEAST_SECONDS:
                print(f"\n== {name}: no time left", flush=True)
                _keep(out / SUMMARY, name, {"is_skipped": True})
                continue
            stage = _within(stage, int(seconds) - _END_SECONDS)
            stage = stage._replace(seconds=min(stage.seconds, seconds))
        summary = run_stage(name, stage, out, is_quick=options.quick)
        if any(summary["statuses"].values()):
            failed.append(name)
            if name == "device":
                break  # the device was not detected
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
