"""Choice of the number of blocks in an engine's pool, and of the share of memory for it.

The dtype of K and V is the option `kv_dtype`, or else `kernels.platforms.default_kv_dtype`.
"""

from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike

from paged_jax.engine.device_memory import DeviceMemory
from paged_jax.engine.footprint import Footprint
from paged_jax.formatting import format_bytes
from paged_jax.kernels.kv_dtypes import KV_DTYPES
from paged_jax.kernels.platforms import default_kv_dtype
from paged_jax.runner.devices import uses_host_memory
from paged_jax.runner.sizes import Sizes

# Maximum bytes of memory for K and V on CPUs, and on devices that do not report their memory.
DEFAULT_CACHE_BYTES = 1 << 30
# Fraction of the free memory that is used for K and V, after the weights are loaded. The rest is
# for the temporary memory of steps.
CACHE_FRACTION = 0.85
# The rule of `choose_pool_size` without options, for the help of the command lines.
DEFAULT_RULE = (
    f"as many as the slots can use, in at most {CACHE_FRACTION:.0%} of the memory that is free "
    f"after loading the weights, and on CPUs in at most {format_bytes(DEFAULT_CACHE_BYTES)}"
)


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
        return KV_DTYPES[kv_dtype].values
    return default_kv_dtype(weights_dtype, platform)


class PoolSize(NamedTuple):
    """Number of blocks of an engine's pool, and the limit that decided it.

    Attributes:
      num_blocks: number of blocks in the pool of the first group of layers.
      limit: what decided the number, as a text for users.
    """

    num_blocks: int
    limit: str


def choose_pool_size(
    platform: str,
    memory: DeviceMemory | None,
    sizes: Sizes,
    footprint: Footprint,
    *,
    num_blocks: int | None = None,
    memory_fraction: float | None = None,
) -> PoolSize:
    """Choose the number of blocks in the pool of the first group of layers, after loading weights.

    Args:
      platform: platform of the devices that hold the pool.
      memory: memory of each of these devices; None if it is unknown.
      sizes: sizes of the engine's programs.
      footprint: memory that the engine uses on each device.
      num_blocks: the engine's option `num_blocks`; if it is not None, it is returned.
      memory_fraction: the engine's option `memory_fraction`.

    Raises:
      ValueError: no block fits, or `num_blocks` blocks do not fit in the memory of a CPU.
    """
    if num_blocks is not None:
        pool = PoolSize(num_blocks, "as num_blocks says")
    else:
        if memory_fraction is not None:
            pool = _fill_fraction(memory, footprint, memory_fraction)
        else:
            pool = _fill_default(platform, memory, sizes, footprint)
        if footprint.max_blocks <= pool.num_blocks:
            slots = f"{sizes.num_slots} slots of {sizes.max_model_len:,} tokens"
            pool = PoolSize(footprint.max_blocks, f"all that {slots} can use")
    _check_host_holds(platform, memory, footprint, pool.num_blocks)
    return pool


def _fill_default(
    platform: str, memory: DeviceMemory | None, sizes: Sizes, footprint: Footprint
) -> PoolSize:
    """Return the pool without the options `num_blocks` and `memory_fraction`."""
    is_on_host = uses_host_memory(platform)
    free = None
    if memory is not None:
        # The memory that is in use on a CPU is unknown, but the weights are loaded.
        in_use = max(memory.in_use, footprint.weights) if is_on_host else memory.in_use
        free = int(CACHE_FRACTION * (memory.total - in_use))
    if free is not None and not (is_on_host and free > DEFAULT_CACHE_BYTES):
        budget = free
        limit = f"{CACHE_FRACTION:.0%} of the memory that is free after loading the weights"
    else:
        budget = DEFAULT_CACHE_BYTES
        location = "on CPUs" if is_on_host else "on devices that do not report their memory"
        options = "num_blocks" if memory is None else "num_blocks or memory_fraction"
        limit = f"{format_bytes(budget)}, the default {location}; set {options} to change it"
    num_blocks = footprint.num_fitting(budget - footprint.recurrent)
    if not num_blocks:
        states = f" and {footprint.recurrent} bytes of states" if footprint.recurrent else ""
        raise ValueError(
            f"Engine: a block of {sizes.block_size} tokens must fit the {budget} bytes of memory "
            f"for K and V, got {footprint.block} bytes{states}. Use a smaller block_size"
            f"{' or max_num_seqs' if states else ''}."
        )
    return PoolSize(num_blocks, limit)


def _fill_fraction(
    memory: DeviceMemory | None, footprint: Footprint, memory_fraction: float
) -> PoolSize:
    """Return the pool that lets an engine use `memory_fraction` of the memory."""
    if memory is None:
        raise ValueError(
            "Engine: memory_fraction must be None on a device that does not report its memory, got "
            f"{memory_fraction}. Set num_blocks instead."
        )
    # Subtract the memory that is used by other programs on the device, such as a training loop.
    free = memory.total - max(0, memory.in_use - footprint.weights)
    budget = min(int(memory_fraction * memory.total), free)
    footprint.check_fits(f"Engine: memory_fraction {memory_fraction}", budget)
    limit = f"all that memory_fraction {memory_fraction} allows"
    return PoolSize(footprint.num_blocks(budget), limit)


def _check_host_holds(
    platform: str, memory: DeviceMemory | None, footprint: Footprint, num_blocks: int
) -> None:
    """Check that the pools fit in host memory if the device is a CPU.

    Without this check, the operating system would kill the process when the pools are filled.
    """
    num_bytes = footprint.pool_bytes(num_blocks) + footprint.recurrent
    if uses_host_memory(platform) and memory is not None and num_bytes > memory.total:
        raise ValueError(
            f"Engine: num_blocks must fit the host memory of {memory.total} bytes, got "
            f"{num_blocks} blocks, which take {num_bytes} bytes. Use a smaller num_blocks."
        )
