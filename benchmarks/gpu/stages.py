"""The stages: what each runs, in which order, and for how long at most."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Every stage is over before this, whatever happens to it: lenders cut off after ten minutes.
LIMIT_SECONDS = 540.0

# After which no further figure of a stage is begun. The tests, the text and what it takes to start
# each stage are the rest of half an hour.
_BUDGETS = {"tune": 340, "goals": 360, "step": 400, "divisions": 180}

# The shapes that are tuned: heads of 128 and of 64 lanes, whose nearest shapes follow them.
_TUNED = ("--models", "Llama-3 8B", "TinyLlama", "--block-sizes", "16")

# Kernels' values: these run compiled where there is a GPU, and are interpreted elsewhere. Each file
# is a process of its own, and so they run at the same time.
_KERNEL_TESTS = {
    "tests/kernels/test_triton_decode.py": (),
    "tests/kernels/test_triton_prefill.py": (),
    "tests/kernels/test_triton_write.py": (),
    # One suite for all backends.
    "tests/kernels/test_attention.py": ("-k", "triton"),
    "tests/kernels/test_ragged.py": ("-k", "triton"),
    "tests/kernels/test_writing.py": ("-k", "triton"),
    "tests/kernels/test_rope_write.py": ("-k", "triton"),
    "tests/kernels/test_grouped.py": ("-k", "triton"),
}


class Command(NamedTuple):
    """One process.

    Attributes:
      arguments: of Python.
      log: name of the file of what it prints.
    """

    arguments: tuple[str, ...]
    log: str


class Stage(NamedTuple):
    """What is run together.

    Attributes:
      text: what it is for.
      commands: a function of the folder of results and of whether the run is a quick one, that
        gives processes that run at the same time.
      seconds: limit of the stage.
      environment: variables of the processes.
      is_tuned: whether the kernels run with what the stage "tune" has found.
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
    # JAX falls back to the CPU, whose figures nobody asked for.
    program += "" if is_quick else "assert d.platform == 'gpu', 'JAX has no GPU here'"
    return [Command(("-c", program), "device.log")]


def _tests(out: Path, is_quick: bool) -> list[Command]:
    commands = []
    for file, selection in _KERNEL_TESTS.items():
        name = Path(file).stem
        chosen = ("-m", "not slow", *selection) if is_quick else selection
        junit = f"--junitxml={out / name}.xml"
        # What a library warns of on another machine says nothing about the kernels.
        arguments = ("pytest", "-q", "-W", "default", "-p", "no:cacheprovider", junit, file)
        commands.append(Command(("-m", *arguments, *chosen), f"{name}.log"))
    return commands


def _tune(out: Path, is_quick: bool) -> list[Command]:
    table, times = out / "tuning.json", out / "tune.json"
    extra = ("--dry-run",) if is_quick else _budget("tune")
    arguments = (*_TUNED, "--table", table, "--json", times, *extra)
    return [Command(_module("benchmarks.attention.tune", *arguments), "tune.log")]


def _goals(out: Path, is_quick: bool) -> list[Command]:
    extra = ("--quick", "--rounds", "1") if is_quick else _budget("goals")
    arguments = ("--goals", "--json", out / "decode-attention-gpu.json", *extra)
    return [Command(_module("benchmarks.attention", *arguments), "goals.log")]


def _divisions(out: Path, is_quick: bool) -> list[Command]:
    chosen = ("--models", "Llama-3 8B", "--dtypes", "bfloat16", *_budget("divisions"))
    extra = ("--quick", "--rounds", "1") if is_quick else chosen
    results = out / "decode-attention-divisions.json"
    arguments = ("--divisions", "--no-peers", "--json", results, *extra)
    return [Command(_module("benchmarks.attention", *arguments), "divisions.log")]


def _step(out: Path, is_quick: bool) -> list[Command]:
    extra = ("--quick", "--variants", "bare step") if is_quick else _budget("step")
    arguments = ("--goals", "--json", out / "step-gpu.json", *extra)
    return [Command(_module("benchmarks.step", *arguments), "step.log")]


def _text(out: Path, is_quick: bool) -> list[Command]:
    prompt = "It is a truth universally acknowledged"
    count = "8" if is_quick else "100"
    arguments = ("--prompt", prompt, "--max-tokens", count, "--temperature", "0")
    return [Command(_module("paged_jax.generate", *arguments), "text.log")]


def _pictures(out: Path, is_quick: bool) -> list[Command]:
    files = sorted([*out.glob("decode-attention-*.json"), *out.glob("step-*.json")])
    if not files or importlib.util.find_spec("matplotlib") is None:
        return []  # to be drawn elsewhere, which is no failure here
    return [Command(_module("benchmarks.plots", *files, "--out", out), "pictures.log")]


def peer_stage(file: Path) -> Stage:
    """A kernel of one's own beside the others, see `benchmarks.attention.peers.peer_of_file`."""

    def commands(out: Path, is_quick: bool) -> list[Command]:
        chosen = ("--models", "Llama-3 8B", "--dtypes", "bfloat16", "--batches", "1", "64")
        sizes = (*chosen, "--contexts", "8192", "131072", "--budget", "200")
        extra = ("--quick", "--rounds", "1") if is_quick else sizes
        results = out / "decode-attention-peer.json"
        arguments = ("--peer", file.resolve(), "--json", results, *extra)
        return [Command(_module("benchmarks.attention", *arguments), "peer.log")]

    return Stage("a kernel of one's own, over the same pools", commands, 300)


# Other processes need memory of the GPU as well.
_SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Of a GPU of its own JAX takes three quarters otherwise.
_ALL_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}

STAGES: dict[str, Stage] = {
    "device": Stage("what there is: device, memory, versions", _device, 120),
    "tests": Stage("the kernels' values, compiled", _tests, environment=_SHARED_MEMORY),
    "tune": Stage("launch parameters of the usual shapes, into tuning.json", _tune, is_tuned=False),
    "goals": Stage("attention and its goals, beside JAX's own kernel and PyTorch's", _goals),
    "step": Stage("whole decode steps and prompt chunks", _step, environment=_ALL_MEMORY),
    "divisions": Stage(
        "decode with batches divided in other ways, by batch and context", _divisions
    ),
    "text": Stage("text of the bundled model, through the whole engine", _text, 240),
    "pictures": Stage("the results as pictures, where matplotlib is", _pictures, 120),
}
"""The stages by name, in their order."""
