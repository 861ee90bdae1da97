"""The stages of a run on a GPU: their commands, order and time limits."""

import importlib.util
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Rented GPUs often stop a command after ten minutes. So a stage and the device check before it may
# take at most 570 s together.
DEVICE_SECONDS, LIMIT_SECONDS = 60.0, 500.0

# Tables in the folder of results, which later stages use.
TUNING_FILE, DEFAULTS_FILE = "tuning.json", "gpu-defaults.json"

# Seconds after which a stage starts no new measurement. The stages "tests" and "text" and the start
# of each stage take the rest of half an hour.
_BUDGETS = {
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

# Shapes to tune: heads of 128 and 64. Other shapes use the entry of the nearest of these.
_TUNED = ("--models", "Llama-3 8B", "TinyLlama", "--block-sizes", "16")

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
        "from benchmarks.common.environment import environment, write_json; "
        "d = jax.devices()[0]; about = {**environment(), 'accelerator': d.device_kind, "
        "'num_devices': jax.device_count(), 'memory': d.memory_stats()}; "
        f"write_json(Path({str(out / 'device.json')!r}), about); print(about); "
    )
    # Without a GPU, JAX falls back to the CPU.
    program += "" if is_quick else "assert d.platform == 'gpu', 'JAX has no GPU here'"
    return [Command(("-c", program), "device")]


def _tests(out: Path, is_quick: bool) -> list[Command]:
    commands = []
    for file, selection in _KERNEL_TESTS.items():
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
    table, times = out / TUNING_FILE, out / "tune.json"
    extra = ("--dry-run",) if is_quick else _budget("tune")
    arguments = (*_TUNED, "--table", table, "--json", times, *extra)
    return [Command(_module("benchmarks.attention.tune", *arguments), "tune")]


def _goals(out: Path, is_quick: bool) -> list[Command]:
    extra = ("--quick", "--rounds", "1") if is_quick else _budget("goals")
    arguments = ("--goals", "--json", out / "decode-attention-gpu.json", *extra)
    return [Command(_module("benchmarks.attention", *arguments), "goals")]


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
    extra = ("--quick", "--variants", "bare step") if is_quick else _budget("step")
    arguments = ("--goals", "--json", out / "step-gpu.json", *extra)
    return [Command(_module("benchmarks.step", *arguments), "step")]


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

STAGES: dict[str, Stage] = {
    "device": Stage("the device, its memory, and versions", _device, DEVICE_SECONDS),
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
"""Stages by name, in order."""
