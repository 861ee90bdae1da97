"""Tests and benchmarks for half an hour on a rented GPU, in stages.

    python -m benchmarks.gpu --out results                  # all stages in order
    python -m benchmarks.gpu --stage tune --out results     # one stage, like `make gpu-tune`
    python -m benchmarks.gpu --peer prototype.py            # with another kernel
    python -m benchmarks.gpu --budget 60                    # at most about a minute for each stage
    python -m benchmarks.gpu --dry-run                      # list the commands
    python -m benchmarks.gpu --quick --out /tmp/results     # all stages at small sizes, on a CPU

It runs from the sources, with the Python that starts it. It creates no environment, installs and
downloads nothing, and does not need git (PAGED_JAX_COMMIT may name the commit). That Python needs
JAX with its CUDA plugin, flax, orbax, safetensors, tokenizers, jinja2, tqdm, hypothesis and pytest.
PyTorch is timed if it is installed, and plots need matplotlib.

A stage and the check of the device before it take less than 570 s, and write at most 8 files to the
folder of `--out`: results as JSON, the output of all its processes in ``STAGE.log``, and a summary
in `stages.json`. Later stages use the tables that the stages "tune" and "defaults" write there. To
keep them, copy them to `paged_jax/kernels/triton/tuning.json` and
`paged_jax/kernels/gpu_defaults.json`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from benchmarks.common.environment import write_json
from benchmarks.common.process import ROOT
from benchmarks.gpu.stages import (
    DEFAULTS_FILE,
    STAGES,
    TUNING_FILE,
    Command,
    Stage,
    peer_stage,
)

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
        "tests": read_tests(out) if name == "tests" else {},
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
    parser = argparse.ArgumentParser(
        description="Run tests and benchmarks for half an hour on a GPU, in stages."
    )
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES), metavar="NAME",
                        help=f"run only these stages: {', '.join(STAGES)}")  # fmt: skip
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
    needs_device = not options.quick and not _WITHOUT_DEVICE.issuperset(options.stage)
    names = ["device", *options.stage] if needs_device else options.stage
    stages = {name: _within(STAGES[name], options.budget) for name in names}
    if options.peer:
        pictures = stages.pop("pictures", None)
        stages["peer"] = peer_stage(options.peer)
        stages |= {"pictures": pictures} if pictures else {}
    if options.dry_run:
        _print_stages(stages, out, options.quick)
        return 0
    failed = []
    for name, stage in stages.items():
        summary = run_stage(name, stage, out, is_quick=options.quick)
        if any(summary["statuses"].values()):
            failed.append(name)
            if name == "device":
                break  # the device was not detected
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {out}", file=sys.stderr)
    return 1 if failed else 0
