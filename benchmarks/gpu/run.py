"""Half an hour on a lent GPU: everything that only a GPU can tell, in stages.

    python -m benchmarks.gpu --out results                  # all stages, one after another
    python -m benchmarks.gpu --stage tune --out results     # one; `make gpu-tune` does the same
    python -m benchmarks.gpu --peer prototype.py            # with a kernel of one's own
    python -m benchmarks.gpu --dry-run                      # what would run
    python -m benchmarks.gpu --quick --out /tmp/results     # all of it at small sizes, on a CPU

It runs from the sources, with the Python that starts it: no environment is made, nothing is
installed or fetched, and no git is needed (PAGED_JAX_COMMIT may say which commit this is). Besides
JAX with its plugin for CUDA that Python needs flax, orbax, safetensors, tokenizers, jinja2, tqdm,
hypothesis and pytest; PyTorch is timed where it is installed, and pictures want matplotlib.

Every stage is over in nine minutes, and what it has found by then is kept in the folder of `--out`:
results as JSON, what was printed as logs, and a summary in `stages.json`. The table that the stage
"tune" writes there is what later stages run with; copy it to `paged_jax/kernels/triton/tuning.json`
to keep it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common.environment import write_json
from benchmarks.common.process import ROOT
from benchmarks.gpu.stages import STAGES, Command, Stage, peer_stage

SUMMARY = "stages.json"
# See `paged_jax.kernels.triton.tuning`, which imports JAX: this process must not hold the GPU.
TABLE_VARIABLE = "PAGED_JAX_TUNING"


def run_stage(name: str, stage: Stage, out: Path, *, is_quick: bool = False) -> dict[str, Any]:
    """Run a stage; returns and keeps its summary: statuses, seconds, and counts of tests.

    Args:
      name: its name in the summary.
      stage: what to run.
      out: folder of results, of this stage and of those before.
      is_quick: whether to run it at small sizes, on a CPU.
    """
    commands = stage.commands(out, is_quick)
    print(f"\n== {name}: {stage.text}", flush=True)
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    environment = _environment(stage, out, is_quick)
    running = [_start(command, out, environment) for command in commands]
    shown = [0] * len(running)
    while any(process.poll() is None for process in running):
        if time.monotonic() - start > stage.seconds:
            for process in running:
                process.kill()
        _show(commands, out, shown)
        time.sleep(0.1)
    _show(commands, out, shown)
    statuses = [process.returncode for process in running]
    seconds = round(time.monotonic() - start, 1)
    summary = {
        "seconds": seconds,
        "is_late": seconds > stage.seconds,
        "statuses": {c.log: status for c, status in zip(commands, statuses, strict=True)},
        "tests": read_tests(out) if name == "tests" else {},
    }
    print(f"== {name}: {seconds:.0f} s, statuses {statuses}", flush=True)
    _keep(out / SUMMARY, name, summary)
    return summary


def _environment(stage: Stage, out: Path, is_quick: bool) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    # Callbacks of JAX want the CPU, too.
    ours["JAX_PLATFORMS"] = "cpu" if is_quick else "cuda,cpu"
    table = out / "tuning.json"
    if stage.is_tuned and table.exists():
        ours[TABLE_VARIABLE] = str(table)
    return {**os.environ, **ours, **stage.environment}


def _start(command: Command, out: Path, environment: dict[str, str]) -> subprocess.Popen:
    with (out / command.log).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command.arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _show(commands: list[Command], out: Path, shown: list[int]) -> None:
    """Print the lines that have come into the logs; `shown` counts the bytes printed of each."""
    for index, command in enumerate(commands):
        with (out / command.log).open("rb") as log:
            log.seek(shown[index])
            new = log.read()
        lines = new[: new.rfind(b"\n") + 1]
        shown[index] += len(lines)
        print(lines.decode(errors="replace"), end="", flush=True)


def read_tests(out: Path) -> dict[str, Any]:
    """Counts and failures of each file of tests, from the reports that pytest has written."""
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
    return found


def _first_line(failure: ElementTree.Element) -> str:
    return (failure.get("message") or "").partition("\n")[0]


def _keep(path: Path, name: str, summary: dict[str, Any]) -> None:
    kept = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, kept | {name: summary})


def _print_stages(stages: dict[str, Stage], out: Path, is_quick: bool) -> None:
    for name, stage in stages.items():
        print(f"{name}: {stage.text}; {stage.seconds:.0f} s at most")
        for variable, value in stage.environment.items():
            print(f"    {variable}={value}")
        for command in stage.commands(out, is_quick):
            print("    python", *(repr(a) if " " in a else a for a in command.arguments))


def main(arguments: list[str] | None = None) -> int:
    """Run stages, or say what they would run."""
    parser = argparse.ArgumentParser(description="Half an hour on a lent GPU, in stages.")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES), metavar="NAME",
                        help=f"only these, of: {', '.join(STAGES)}")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results", metavar="FOLDER")
    parser.add_argument(
        "--peer", type=Path, metavar="FILE", help="one more stage, with a kernel of your own"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args(arguments)
    # The processes run elsewhere than where this was started.
    out = options.out.resolve()
    # To draw needs no device; all else does, and is not begun without.
    is_drawing = options.stage == ["pictures"]
    names = options.stage if options.quick or is_drawing else ["device", *options.stage]
    stages = {name: STAGES[name] for name in names}
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
                break  # there is none
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {out}", file=sys.stderr)
    return 1 if failed else 0
