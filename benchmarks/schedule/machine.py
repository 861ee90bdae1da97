"""A GPU whose multiprocessors share the bandwidth of its memory, and programs that only read.

Time passes from event to event: a program starts, has its first bytes, or has read its last one.
Between events every program that reads does so at a rate of its own, the least of three: what it
can have on its way at once, its share of what its multiprocessor takes, and its share of the
memory, of which those get more that can take more.
"""

from typing import NamedTuple

import numpy as np


class Machine(NamedTuple):
    """A GPU. The defaults are for an H200 and the decode kernel in half precision, none measured.

    Attributes:
      num_cores: multiprocessors.
      programs_per_core: programs that a multiprocessor has room for.
      memory_rate: bytes a second of the memory: nine tenths of the data sheet's 4.8 TB/s.
      core_rate: bytes a second that a multiprocessor takes at most: 420 instructions of four warps
        for 32 KB, of which its schedulers issue about 0.65 a cycle each, at 1.85 GHz.
      program_rate: bytes a second of a program that has a multiprocessor for itself: two steps of
        32 KB on their way, a microsecond each.
      start: seconds from the start of a program to its first bytes of K and V: its length, its
        block ids and they are read one after another.
      search: seconds that a program takes to find its part, where it has to.
      idle: seconds of a program that finds nothing to read.
      launch: seconds from the end of a kernel to the start of the next one in a CUDA graph.
      count: seconds in which a program has its result seen by the whole device and counts itself.
      merge_turn: seconds to read some parts at once and merge them.
      merge: seconds of a launch that merges up to four parts; a turn more for each further 32.
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
        """Programs that run at the same time."""
        return self.num_cores * self.programs_per_core


def simulate(machine: Machine, num_bytes: np.ndarray) -> float:
    """Seconds that a launch takes.

    Args:
      machine: where it runs.
      num_bytes: ``[N]``, what each program reads, in the order in which they start; 0: nothing.

    Example:
      >>> from dataclasses import replace
      >>> alone = Machine(launch=0.0, start=1e-6, program_rate=64e9)
      >>> round(1e6 * simulate(alone, np.array([64e3])), 3)
      2.0
    """
    waiting = np.asarray(num_bytes, np.float64)
    num_slots = min(machine.resident, len(waiting))
    core = np.arange(num_slots) % machine.num_cores  # the first ones each on one of its own
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
        # What ends within a nanosecond of it ends now: alike programs are one event.
        then = ends.min() + 1e-9
        left = np.where(is_reading, np.maximum(left - rates * (then - now), 0), left)
        now = then
        is_running &= (ready > now) | (left > 0)


def _rates(machine: Machine, core: np.ndarray, is_reading: np.ndarray) -> np.ndarray:
    """Bytes a second of each program; 0 of those that do not read."""
    shared_by = np.bincount(core[is_reading], minlength=machine.num_cores)[core]
    most = np.minimum(machine.program_rate, machine.core_rate / np.maximum(shared_by, 1))
    most = np.where(is_reading, most, 0.0)
    # Those that take least have all that they take; what they leave is for the others.
    rates, left, num_left = most.copy(), machine.memory_rate, int(is_reading.sum())
    for rate in np.unique(most[is_reading]):
        is_this = is_reading & (most == rate)
        rates[is_this] = min(rate, left / num_left)
        left -= rates[is_this].sum()
        num_left -= int(is_this.sum())
    return rates
