"""Times of the kernels of a step, read from a profile of JAX."""

import collections
import re
from pathlib import Path
from typing import NamedTuple

import jax

# XLA numbers kernels of the same kind: ``loop_add_fusion_7``, ``gemm_fusion_dot_12_0``.
_NUMBERS = re.compile(r"(_\d+)+(?=$|_)")


class KernelTime(NamedTuple):
    """Kernels of the same kind in a step.

    Attributes:
      name: name of the kernels without their numbers.
      launches: number of launches in a step.
      microseconds: time of all launches in a step.
    """

    name: str
    launches: float
    microseconds: float


def kernel_times(folder: Path, num_steps: int) -> list[KernelTime]:
    """Return the kernels in a profile, with the slowest first. Empty if no device was profiled.

    Args:
      folder: folder that was passed to `jax.profiler.trace`.
      num_steps: number of steps in the profile.
    """
    launches: collections.Counter[str] = collections.Counter()
    nanoseconds: collections.Counter[str] = collections.Counter()
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:"):
                continue
            # Other lines repeat the same times, by module and by operation.
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    name = _NUMBERS.sub("", event.name)
                    launches[name] += 1
                    nanoseconds[name] += event.duration_ns
    return [
        KernelTime(name, launches[name] / num_steps, taken / num_steps / 1e3)
        for name, taken in nanoseconds.most_common()
    ]


def lines(times: list[KernelTime], num_lines: int = 12) -> list[str]:
    """Return the lines of a table of the slowest kernels."""
    shown = times[:num_lines]
    rest = times[num_lines:]
    if rest:
        launches, taken = sum(x.launches for x in rest), sum(x.microseconds for x in rest)
        shown = [*shown, KernelTime(f"{len(rest)} others", launches, taken)]
    return [f"  {x.microseconds:10.1f} us {x.launches:8.1f} launches  {x.name}" for x in shown]
