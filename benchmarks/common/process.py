"""A benchmark's module in a process of its own, which has done nothing else."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

# Of the checkout: modules are found from there.
ROOT = Path(__file__).resolve().parents[2]


class PeerUnavailable(RuntimeError):
    """A peer cannot run here, such as for lack of its packages: skip it, and say so."""


def run_module(module: str, *arguments: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m module``.

    Args:
      module: such as ``"benchmarks.common.shapes"``.
      *arguments: of its command line.
      **options: of `subprocess.run`.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, **options)


def resident_bytes() -> tuple[int, int]:
    """Returns the resident memory of this process, now (0 without Linux's /proc) and at its peak.

    Mapped files count: llama.cpp maps its weights.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        # Not at the top: Windows has no such module. macOS counts in bytes, other systems in KiB.
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # Not ru_maxrss: Linux carries over into it the size of the process that started this one.
    fields = dict(line.split(":", 1) for line in lines)
    now, peak = (int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def import_peer(module: str, package: str) -> Any:
    """A module of a peer.

    Args:
      module: its name.
      package: what to install where it is missing.

    Raises:
      PeerUnavailable: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailable(
            f"peers: {package} must be installed, got {error}. Run `pip install {package}`."
        ) from error
