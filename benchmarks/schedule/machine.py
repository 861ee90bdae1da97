"""Simulated GPU: SMs share the memory bandwidth, and program instances only read.

The simulation advances from event to event: a program instance starts, receives its first bytes, or
has read its last byte. Between events each instance reads at a constant rate, the minimum of three
limits: its own maximum, its share of the rate of its SM, and its share of the memory bandwidth.
Instances that can read faster get a larger share of the bandwidth.
"""

from typing import NamedTuple

import numpy as np


class Machine(NamedTuple):
    """A GPU. The defaults are estimates for an H200 and the decode kernel in half precision.

    Attributes:
      num_cores: number of SMs.
      programs_per_core: maximum number of program instances on an SM.
      memory_rate: memory bandwidth in bytes per second: nine tenths of the data sheet's 4.8 TB/s.
      core_rate: maximum bytes per second of an SM: 420 instructions of four warps for 32 KB, at
        about 0.65 instructions per cycle of each scheduler and 1.85 GHz.
      program_rate: bytes per second of a program instance that is alone on an SM: two steps of 32
        KB in flight, a microsecond each.
      start: seconds from the start of an instance to its first bytes of K and V. It reads its
        length, its block ids and then K and V.
      search: seconds in which an instance finds its part, if it must.
      idle: seconds of an instance that has nothing to read.
      launch: seconds from the end of a kernel to the start of the next kernel in a CUDA graph.
      count: seconds to make a result visible to the whole device and to count the instance.
      merge_turn: seconds to read some parts in parallel and merge them.
      merge: seconds of a launch that merges up to four parts, plus a turn for each further 32
        parts.
    """

    num_cores: int = 132
    programs_per_core: int = 3
    memory_rate: float = 4.3e12
    core_rate: float = 94e9
    program_rate: float = 64e9
    start: float = 2e-6
    search: float = 0.2e-6
    idle: float = 0.8e-6
    launch: float = 1.5e-6
    count: float = 1e-6
    merge_turn: float = 0.7e-6
    merge: float = 1.5e-6

    @property
    def resident(self) -> int:
        """Number of program instances that run at the same time."""
        return self.num_cores * self.programs_per_core


def simulate(machine: Machine, num_bytes: np.ndarray) -> float:
    """Return the seconds that a launch takes.

    Args:
      machine: the GPU.
      num_bytes: ``[N]``, bytes that each program instance reads, in the order of their start.

    Example:
      >>> from dataclasses import replace
      >>> alone = Machine(launch=0.0, start=1e-6, program_rate=64e9)
      >>> round(1e6 * simulate(alone, np.array([64e3])), 3)
      2.0
    """
    waiting = np.asarray(num_bytes, np.float64)
    num_slots = min(machine.resident, len(waiting))
    core = np.arange(num_slots) % machine.num_cores  # the first instances each get a separate SM
    left, ready = np.zeros(num_slots), np.full(num_slots, np.inf)
    is_running, num_started, now = np.zeros(num_slots, bool), 0, machine.launch
    while True:
        free = np.flatnonzero(~is_running)[: len(waiting) - num_started]
        if len(free):
            left[free] = waiting[num_started : num_started + len(free)]
            ready[free] = now + np.where(left[free] > 0, machine.start, machine.idle)
            is_running[free] = True
            num_started += len(free)
        if not is_running.any():
            return now
        is_reading = is_running & (ready <= now)
        rates = _rates(machine, core, is_reading)
        ends = np.where(is_running & ~is_reading, ready, np.inf)
        ends[is_reading] = now + left[is_reading] / rates[is_reading]
        # Events within a nanosecond count as one event, because similar instances end together.
        then = ends.min() + 1e-9
        left = np.where(is_reading, np.maximum(left - rates * (then - now), 0), left)
        now = then
        is_running &= (ready > now) | (left > 0)


def _rates(machine: Machine, core: np.ndarray, is_reading: np.ndarray) -> np.ndarray:
    """Return the bytes per second of each instance; 0 for instances that do not read."""
    shared_by = np.bincount(core[is_reading], minlength=machine.num_cores)[core]
    most = np.minimum(machine.program_rate, machine.core_rate / np.maximum(shared_by, 1))
    most = np.where(is_reading, most, 0.0)
    # Instances with the lowest limits reach them; the others share the rest.
    rates, left, num_left = most.copy(), machine.memory_rate, int(is_reading.sum())
    for rate in np.unique(most[is_reading]):
        is_this = is_reading & (most == rate)
        rates[is_this] = min(rate, left / num_left)
        left -= rates[is_this].sum()
        num_left -= int(is_this.sum())
    return rates
