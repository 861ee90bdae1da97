"""Memory of a device, and of the host, that this process may use."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from paged_jax.runner.devices import uses_host_memory

_OWN_CGROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class DeviceMemory(NamedTuple):
    """Size and use of a device's memory.

    Attributes:
      total: bytes of memory.
      in_use: bytes in use; 0 if they are unknown.
    """

    total: int
    in_use: int


def device_memory(device: Any) -> DeviceMemory | None:
    """Return the memory of a `jax.Device`; None if the device does not report it.

    For a CPU device, it is the host memory that this process may use.
    """
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return DeviceMemory(statistics["bytes_limit"], statistics["bytes_in_use"])
    total = host_memory() if uses_host_memory(device.platform) else None
    return None if total is None else DeviceMemory(total, 0)


def host_memory() -> int | None:
    """Return the bytes of memory that this process may use; None if they are unknown.

    This is the physical memory, or the limit of the container if it is lower.
    """
    if not hasattr(os, "sysconf"):
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """Return the memory limits in bytes of the process's control groups and their parents."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = _CGROUPS, "memory.max"
        # In version 2 of Linux control groups, the line names no controllers. Version 1 names
        # them, and stores the limit in another file.
        if controllers:
            root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        path = root / group.lstrip("/")
        limits += [_read_limit(folder / name) for folder in (path, *path.parents)]
    return [limit for limit in limits if limit is not None]


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # There is no such file, or it contains "max".
        return None
