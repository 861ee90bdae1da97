"""What the figures of a benchmark depend on, to be kept beside them.

The commit is what git says, or, where a copy of the sources is not a repository or git is not
installed, what PAGED_JAX_COMMIT says.
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
    """Device, commit, versions and command of this process, for JSON.

    Example:
      >>> sorted(environment())
      ['command', 'commit', 'device', 'python', 'versions']
    """
    return {
        "device": f"{_cpu()}, {num_cores()} cores",
        "commit": _commit() or os.environ.get("PAGED_JAX_COMMIT"),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "command": " ".join(["python", "-m", _module(Path(sys.argv[0])), *sys.argv[1:]]),
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, in a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _commit() -> str | None:
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return done.stdout.strip() or None


def _module(script: Path) -> str:
    """What ``python -m`` was given for a script to run."""
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
