"""Read bandwidth of all CPU cores together, which limits decoding on a CPU.

python -m benchmarks.common.bandwidth
"""

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def num_cores() -> int:
    """Return the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_bandwidth(nbytes: int = 512 << 20, repeats: int = 15) -> float:
    """Return the median rate, in GB/s (10**9 bytes), at which all cores read one array.

    Each thread reduces its own contiguous part, in one numpy call that releases the interpreter
    lock. On x86 servers this reaches the rate of sums and dot products in torch and XLA, without
    their thread pools. Use an array of the size of the weights, several times the last-level cache;
    a smaller array measures the cache.

    Raises:
        ValueError: if `nbytes` is less than 8 for each core, or `repeats` is not positive.

    Example:
        >>> read_bandwidth(1 << 20, repeats=3) > 0
        True
    """
    threads = num_cores()
    if nbytes < 8 * threads:
        raise ValueError(
            f"read_bandwidth: nbytes must be at least {8 * threads}, got {nbytes}. "
            "Use several times the last-level cache."
        )
    if repeats < 1:
        raise ValueError(
            f"read_bandwidth: repeats must be positive, got {repeats}. Use an odd number."
        )
    # Not zeros: untouched zero pages may all be the same page, which the cache serves.
    parts = np.array_split(np.ones(nbytes // 8, np.uint64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 2):
            start = time.perf_counter()
            # A bitwise "or" has no long dependency chain, so only memory limits it.
            list(pool.map(np.bitwise_or.reduce, parts))
            seconds.append(time.perf_counter() - start)
    # The first two passes warm up the threads and the page tables.
    return sum(part.nbytes for part in parts) / statistics.median(seconds[2:]) / 1e9


def main(arguments: list[str] | None = None) -> int:
    """Print the read bandwidth."""
    parser = argparse.ArgumentParser(description="Measure the memory read bandwidth of all cores.")
    parser.add_argument("--mebibytes", type=int, default=512)
    options = parser.parse_args(arguments)
    rate = read_bandwidth(options.mebibytes << 20)
    print(f"{rate:.1f} GB/s, {num_cores()} threads, {options.mebibytes} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
