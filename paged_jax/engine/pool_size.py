"""Functions that choose the dtype and size of an engine's pools, and query device memory."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paged_jax.engine.footprint import Footprint
from paged_jax.kernels.rows import sets_rows_in_place
from paged_jax.runner.sizes import Sizes

# Maps each value of the option `kv_dtype`, except "auto", to a dtype.
KV_DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
}

_OWN_CGROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Bytes of memory for K and V on a device that does not report its memory.
DEFAULT_CACHE_BYTES = 1 << 30
# Fraction of the free memory that is used for K and V, after the weights are loaded. The rest is
# for the temporary memory of steps.
CACHE_FRACTION = 0.85


def resolve_kv_dtype(kv_dtype: str, weights_dtype: DTypeLike, platform: str) -> np.dtype:
    """Return the dtype of K and V in the cache for a value of the option `kv_dtype`.

    Args:
      kv_dtype: ``"auto"`` or a name in `KV_DTYPES`.
      weights_dtype: the floating-point type of the weights, used by ``"auto"``.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.

    Example:
      >>> resolve_kv_dtype("auto", "bfloat16", "gpu").name
      'bfloat16'
    """
    if kv_dtype != "auto":
        return jnp.dtype(KV_DTYPES[kv_dtype])
    dtype = jnp.dtype(weights_dtype)
    # On a CPU without the C++ kernels, use float32, because XLA would copy a whole bfloat16 pool to
    # float32 at every write.
    is_in_place = dtype == jnp.bfloat16 and sets_rows_in_place(platform, dtype)
    return dtype if platform != "cpu" or is_in_place else jnp.dtype(jnp.float32)


def choose_num_blocks(
    device: Any,
    sizes: Sizes,
    footprint: Footprint,
    *,
    num_blocks: int | None = None,
    memory_fraction: float | None = None,
) -> int:
    """Choose the number of blocks in the pool of the first group of layers.

    Args:
      device: the `jax.Device` that holds the pool or a part of it.
      sizes: sizes of the engine's programs.
      footprint: memory that the engine uses on the device.
      num_blocks: the engine's option `num_blocks`; if it is not None, it is returned.
      memory_fraction: the engine's option `memory_fraction`.

    Raises:
      ValueError: no block fits, or `num_blocks` blocks do not fit in host memory.
    """
    if num_blocks is None:
        if memory_fraction is None:
            num_fitting = _num_fitting_free_memory(device, sizes, footprint)
        else:
            num_fitting = _num_fitting_fraction(device, footprint, memory_fraction)
        num_blocks = min(footprint.max_blocks, num_fitting)
    _check_host_holds(device, footprint, num_blocks)
    return num_blocks


def _num_fitting_free_memory(device: Any, sizes: Sizes, footprint: Footprint) -> int:
    statistics = device.memory_stats()
    budget = DEFAULT_CACHE_BYTES
    if statistics and "bytes_limit" in statistics:
        free = statistics["bytes_limit"] - statistics["bytes_in_use"]
        budget = int(CACHE_FRACTION * free)
    num_blocks = footprint.num_fitting(budget - footprint.recurrent)
    if not num_blocks:
        states = f" and {footprint.recurrent} bytes of states" if footprint.recurrent else ""
        raise ValueError(
            f"Engine: a block of {sizes.block_size} tokens must fit the {budget} bytes of memory "
            f"for K and V, got {footprint.block} bytes{states}. Use a smaller block_size"
            f"{' or max_num_seqs' if states else ''}."
        )
    return num_blocks


def _num_fitting_fraction(device: Any, footprint: Footprint, memory_fraction: float) -> int:
    """Return the number of blocks that lets an engine use `memory_fraction` of the memory."""
    memory = device_memory(device)
    if memory is None:
        raise ValueError(
            "Engine: memory_fraction must be None on a device that does not report its memory, got "
            f"{memory_fraction}. Set num_blocks instead."
        )
    # Subtract the memory that is used by other programs on the device, such as a training loop.
    free = memory.total - max(0, memory.in_use - footprint.weights)
    budget = min(int(memory_fraction * memory.total), free)
    footprint.check_fits(f"Engine: memory_fraction {memory_fraction}", budget)
    return footprint.num_blocks(budget)


def _check_host_holds(device: Any, footprint: Footprint, num_blocks: int) -> None:
    """Check that the pools fit in host memory if the device is a CPU.

    Without this check, the operating system would kill the process when the pools are filled.
    """
    total = host_memory()
    num_bytes = footprint.pool_bytes(num_blocks) + footprint.recurrent
    if device.platform == "cpu" and total is not None and num_bytes > total:
        raise ValueError(
            f"Engine: num_blocks must fit the host memory of {total} bytes, got {num_blocks} "
            f"blocks, which take {num_bytes} bytes. Use a smaller num_blocks."
        )


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
    total = host_memory() if device.platform == "cpu" else None
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
