"""Times of short calls on a device, and the rates that limit them.

A call of a few microseconds takes less time than its launch by the host. A program therefore makes
many calls, each of which depends on the previous call, and the program is timed. Programs that are
compared run in turns, so that slow changes of the device affect all of them.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.common.bandwidth import read_bandwidth
from benchmarks.harness import Report, elapsed, environment, medians, take_turns


class Program(NamedTuple):
    """A program to time: `run` makes `num_calls` calls and waits for them."""

    run: Callable[[], Any]
    num_calls: int


class Rates(NamedTuple):
    """Measured rates that limit attention on a device.

    Attributes:
      memory: GB/s (10**9 bytes), see `memory_rate`.
      matmul: TFLOP/s of a dense bfloat16 matrix multiplication.
    """

    memory: float
    matmul: float


def measure_rates() -> Rates:
    """Measure the rates of the first device."""
    return Rates(round(memory_rate(), 1), round(matmul_rate(), 3))


def device_report(rates: Rates) -> Report:
    """Start a report: the environment, the accelerator (None for a CPU), and its rates. Print it.

    The report has no results yet.
    """
    device = jax.devices()[0]
    is_cpu = device.platform == "cpu"
    report = {
        **environment(),
        "accelerator": None if is_cpu else device.device_kind,
        "memory_gb_s": rates.memory,
        "memory_gb_s_is": "all cores reading" if is_cpu else "a large copy",
        "matmul_bfloat16_tflop_s": rates.matmul,
        "results": [],
    }
    print(report["accelerator"] or report["device"], report["versions"], rates, sep="\n")
    return report


def chained(op: Callable, num_calls: int, num_layers: int, unroll: int) -> Callable:
    """Return a function of ``(q, arrays)`` that calls ``q = op(q, layer, arrays)`` repeatedly.

    Every result is the query of the next call, so no call can be removed or overlap another. The
    calls cycle through the layers, so that the cache does not contain the data of a call. The body
    of the loop has `unroll` calls, which must divide `num_calls`. If `num_layers` divides `unroll`,
    the layers are Python numbers, because computing a layer would need an additional launch.
    """

    def run(q, arrays):
        def body(i, q):
            for j in range(unroll):
                layer = (i * unroll + j if unroll % num_layers else j) % num_layers
                q = op(q, layer, arrays)
            return q

        return lax.fori_loop(0, num_calls // unroll, body, q)

    return run


def median_seconds(programs: Mapping[str, Program], num_rounds: int) -> dict[str, float]:
    """Return the median seconds of a call of each program, over interleaved rounds."""
    runs = {name: partial(time_once, program) for name, program in programs.items()}
    return medians(take_turns(runs, num_rounds))


def time_once(program: Program) -> float:
    """Return the seconds of a call, in one run of the program."""
    return elapsed(program.run) / program.num_calls


def memory_limit() -> int:
    """Return the maximum bytes of arrays on the first device."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    # A CPU shares its memory with all other processes.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def memory_rate(num_rounds: int = 7) -> float:
    """Return the rate in GB/s (10**9 bytes) that limits decoding.

    On a GPU or TPU this is the rate of a copy from one large array to another, counting bytes read
    and written. On a CPU it is the read rate of all cores: writes are slower, and decoding writes
    little.
    """
    if jax.devices()[0].platform == "cpu":
        return read_bandwidth(repeats=num_rounds)
    num_copies = 10
    nbytes = min(4 << 30, memory_limit() // 8)
    source = jnp.arange(nbytes // 4, dtype=jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))

    def run():
        copies = [copy(source) for _ in range(2)]
        for i in range(num_copies - 2):
            copies[i % 2] = copy(source)
        jax.block_until_ready(copies)

    run()
    seconds = median_seconds({"copy": Program(run, num_copies)}, num_rounds)["copy"]
    return 2 * nbytes / seconds / 1e9


def matmul_rate(num_rounds: int = 7) -> float:
    """Return the rate in TFLOP/s of a dense bfloat16 multiplication of square random matrices."""
    is_cpu = jax.devices()[0].platform == "cpu"
    size, num_calls = (1024, 2) if is_cpu else (8192, 16)
    left, right = (
        jax.random.normal(key, (size, size), jnp.bfloat16) * jnp.bfloat16(size**-0.5)
        for key in jax.random.split(jax.random.key(0))
    )
    multiply = jax.jit(chained(lambda x, _, y: x @ y, num_calls, 1, unroll=2))
    program = Program(lambda: multiply(left, right).block_until_ready(), num_calls)
    program.run()
    return 2 * size**3 / median_seconds({"matmul": program}, num_rounds)["matmul"] / 1e12
