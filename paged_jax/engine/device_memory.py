"""How much memory there is: of a device, and of the host, within the limits of a container."""

import os
from pathlib import Path
from typing import Any, NamedTuple

_OWN_CGROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class DeviceMemory(NamedTuple):
    """Memory of a device.

    Attributes:
      total: bytes that the device has.
      in_use: bytes that are taken; 0 where the device does not say.
    """

    total: int
    in_use: int


def device_memory(device: Any) -> DeviceMemory | None:
    """The memory of a `jax.Device`, which for a CPU is the host's; None if it does not say."""
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return DeviceMemory(statistics["bytes_limit"], statistics["bytes_in_use"])
    total = host_memory() if device.platform == "cpu" else None
    return None if total is None else DeviceMemory(total, 0)


def host_memory() -> int | None:
    """Bytes that this process may take: the machine's, or fewer in a container; None if unknown."""
    if not hasattr(os, "sysconf"):
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """The limits of the process's control groups and of all groups around them."""
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
        if controllers:  # version 1
            root, name = _CGROUPS / "memory", "memory.limit_in_bytes"
        path = root / group.lstrip("/")
        limits += [_read_limit(folder / name) for folder in (path, *path.parents)]
    return [limit for limit in limits if limit is not None]


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
