"""Benchmark modules in fresh processes."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

# Root of the checkout, from which modules are imported.
ROOT = Path(__file__).resolve().parents[2]


class PeerUnavailable(RuntimeError):
    """A peer cannot run here, for example because its packages are missing. It is skipped."""


def run_module(
    module: str, *arguments: Any, python: str | Path = sys.executable, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m module``.

    Args:
      module: name, such as ``"benchmarks.common.shapes"``.
      *arguments: command line arguments.
      python: the interpreter.
      **options: options of `subprocess.run`.
    """
    command = [str(python), "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, **options)


def resident_bytes() -> tuple[int, int]:
    """Return the current (0 without Linux's /proc) and peak resident memory of this process.

    Mapped files are included: llama.cpp maps its weights.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        # Imported here, because Windows has no such module. macOS counts in bytes, other systems in
        # KiB.
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # ru_maxrss would be wrong: on Linux it includes the size of the parent process.
    fields = dict(line.split(":", 1) for line in lines)
    now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def import_peer(module: str, package: str) -> Any:
    """Import and return a module of a peer.

    Args:
      module: name of the module.
      package: package to install if the module is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailable(
            f"peers: {package} must be installed, got {error}. Run `pip install {package}`."
        ) from error
