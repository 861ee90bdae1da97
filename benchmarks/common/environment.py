"""Description of the machine and software of a benchmark, to store with its figures.

The commit comes from the environment variable PAGED_JAX_COMMIT, otherwise from git. Set the
variable if the sources were copied without their repository.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.bandwidth import num_cores
from benchmarks.common.process import ROOT

_PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "llama-cpp-python")


def environment() -> dict[str, Any]:
    """Return device, commit, versions and command of this process, for JSON.

    Example:
      >>> sorted(environment())
      ['command', 'commit', 'device', 'python', 'versions']
    """
    return {
        "device": f"{_cpu()}, {num_cores()} cores",
        "commit": os.environ.get("PAGED_JAX_COMMIT") or _commit(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "command": " ".join(["python", "-m", _module(Path(sys.argv[0])), *sys.argv[1:]]),
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _commit() -> str | None:
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def _module(script: Path) -> str:
    """Return the module name that was passed to ``python -m``."""
    path = script.resolve().with_suffix("")
    names = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else path.parts[-1:]
    return ".".join(name for name in names if name != "__main__")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
