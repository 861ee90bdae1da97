"""Times of short calls on a device, and the rates that bound them.

A call of a few microseconds is shorter than what the host needs to start it. So it is made many
times in one program, each call waiting for the one before, and the program is timed. Programs that
are compared take turns, so that a device that drifts drifts for all.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.common.bandwidth import read_bandwidth


class Program(NamedTuple):
    """Something to time: `run` makes `num_calls` calls and waits for them."""

    run: Callable[[], Any]
    num_calls: int


class Rates(NamedTuple):
    """What bounds attention on a device, as measured.

    Attributes:
      memory: GB/s (10**9 bytes), see `memory_rate`.
      matmul: TFLOP/s of a dense bfloat16 product.
    """

    memory: float
    matmul: float


def measure_rates() -> Rates:
    """Measure the rates of the first device."""
    return Rates(round(memory_rate(), 1), round(matmul_rate(), 3))


def chained(op: Callable, num_calls: int, num_layers: int, unroll: int) -> Callable:
    """A function of ``(q, arrays)`` that calls ``q = op(q, layer, arrays)`` over and over.

    Every result is the next call's query, so none can be left out or overlap another; the layers
    take turns, so that the cache does not hold what a call reads. The body of the loop has
    `unroll` calls, which divides `num_calls`. Where `num_layers` divides it, the layers are Python
    numbers: to compute one would cost a launch of its own.
    """

    def run(q, arrays):
        def body(i, q):
            for j in range(unroll):
                layer = (i * unroll + j if unroll % num_layers else j) % num_layers
                q = op(q, layer, arrays)
            return q

        return lax.fori_loop(0, num_calls // unroll, body, q)

    return run


def take_turns(programs: Mapping[str, Program], num_rounds: int) -> dict[str, float]:
    """Median seconds of a call of each program, over rounds in which each has its turn."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(num_rounds):
        for name, program in programs.items():
            seconds[name].append(time_once(program))
    return {name: statistics.median(times) for name, times in seconds.items()}


def time_once(program: Program) -> float:
    """Seconds of a call, in one run of the program."""
    start = time.perf_counter()
    program.run()
    return (time.perf_counter() - start) / program.num_calls


def memory_limit() -> int:
    """Bytes of arrays that the first device can hold."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    # A CPU shares its memory with everything else.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def memory_rate(num_rounds: int = 7) -> float:
    """The rate in GB/s (10**9 bytes) that bounds decoding.

    On a GPU or TPU that of a copy of one large array to another, bytes read and written both
    counted. On a CPU what all cores can read: they write slower, and decoding hardly writes.
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
    seconds = take_turns({"copy": Program(run, num_copies)}, num_rounds)["copy"]
    return 2 * nbytes / seconds / 1e9


def matmul_rate(num_rounds: int = 7) -> float:
    """The rate in TFLOP/s of a dense bfloat16 product of square random matrices."""
    is_cpu = jax.devices()[0].platform == "cpu"
    size, num_calls = (1024, 2) if is_cpu else (8192, 16)
    left, right = (
        jax.random.normal(key, (size, size), jnp.bfloat16) * jnp.bfloat16(size**-0.5)
        for key in jax.random.split(jax.random.key(0))
    )
    multiply = jax.jit(chained(lambda x, _, y: x @ y, num_calls, 1, unroll=2))
    program = Program(lambda: multiply(left, right).block_until_ready(), num_calls)
    program.run()
    return 2 * size**3 / take_turns({"matmul": program}, num_rounds)["matmul"] / 1e12
