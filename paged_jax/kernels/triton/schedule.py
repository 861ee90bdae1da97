"""Which part of which sequence each program of the decode kernel reads.

A call has a fixed number of programs for each KV head, and its sequences have any lengths. They are
divided so that all programs read about as much: the steps of the whole batch over the parts that
the device wants are the most that a part has, and a sequence has as many parts as that takes::

    loop steps    a a a a a a a a a a a  b b  c c c c c     of three sequences
    parts        |a a a|a a a|a a|a a a||b b||c c|c c c|    three steps each at most
    programs        0     1    2    3     4    5    6     7 8 9     the last ones find no part

A program finds its part by itself, from one load of the lengths of the batch: no list of parts lies
in memory, and none has to be made before the launch. All of this is plain `jnp` on vectors, so that
it runs inside a kernel as well as outside of one.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton.pallas import plgpu

# Of a large batch: parts differ in length, and those that start later fill the gaps.
_WAVES = 3

# What counting and merging cost, in loop steps of a program that has its multiprocessor for itself.
_MERGE_STEPS = 6

# Of the programs that a device has room for, one in so many takes all of its bandwidth.
_SATURATING = 6

# Of a sequence that may keep the device waiting while all others are over: a few merges.
_LONG_STEPS = 16

# Lengths that a program holds in registers.
MOST_SEQUENCES = 4096


class Schedule(NamedTuple):
    """What the parts of a batch follow from besides its lengths.

    Attributes:
      batch: B.
      num_parts: parts that a batch is divided into, about; 0: each sequence is one part.
      step_tokens: tokens of a loop step.
      capacity: tokens that a row of the block table holds.
      window: tokens that a query sees at most; None: all of its sequence.
    """

    batch: int
    num_parts: int
    step_tokens: int
    capacity: int
    window: int | None = None

    @property
    def max_steps(self) -> int:
        """Loop steps over the longest sequence."""
        visible = self.capacity if self.window is None else min(self.capacity, self.window)
        return math.ceil(visible / self.step_tokens)

    @property
    def num_programs(self) -> int:
        """Programs of each KV head: parts of a batch at most.

        ``ceil(steps / n)`` is less than ``steps / n + 1``, of which the first terms of all
        sequences add up to `num_parts` at most.
        """
        if self.num_parts == 0:
            return self.batch
        return min(self.num_parts + self.batch - 1, self.batch * max(self.max_steps, 1))


class Part(NamedTuple):
    """What one program reads, as i32 scalars.

    Attributes:
      is_there: bool, whether the program finds a part; the steps are none else.
      sequence: its row.
      index: the number of the part in its sequence.
      count: parts of its sequence.
      first, length: the first token that the query sees, and the end of the sequence.
      begin, end: loop steps, counted from `first`; none if there is no part.
    """

    is_there: jax.Array
    sequence: jax.Array
    index: jax.Array
    count: jax.Array
    first: jax.Array
    length: jax.Array
    begin: jax.Array
    end: jax.Array


def choose_num_parts(batch: int, kv_heads: int, max_steps: int, resident: int) -> int:
    """How many parts to divide a batch into, or 0 not to divide its sequences.

    The kernel is limited by the bytes that it reads, and programs that still have work get the
    bandwidth of those that are done. All parts of a small batch run at the same time, so that none
    waits for another to end; a large batch has several parts for each program that runs.

    Where sequences may be divided, their parts are to be merged. A batch is worth that if it is
    over so much sooner, which whole sequences that take all bandwidth are not; and any batch is if
    one sequence may be so long that all others are over before.

    Args:
      batch, kv_heads: B and K.
      max_steps: loop steps over the longest sequence that the table holds.
      resident: programs that run at the same time on the device.

    Example:
      >>> choose_num_parts(1, 8, 2048, 396), choose_num_parts(256, 8, 8, 396)
      (49, 0)
    """
    at_once = resident // kv_heads
    is_small = 2 * batch <= at_once
    num_parts = at_once - batch + 1 if is_small else max(_WAVES * resident // kv_heads, 1)
    # By the bandwidth, then by the longest program.
    least_steps = _SATURATING * batch * kv_heads * max_steps / resident
    longest = math.ceil(max_steps * batch / num_parts)
    saved_steps = max(max_steps, least_steps) - max(longest, least_steps)
    is_worth_it = saved_steps > _MERGE_STEPS or max_steps > _LONG_STEPS
    return num_parts if is_worth_it and batch <= MOST_SEQUENCES else 0


def load_lengths(schedule: Schedule, lens_ref: Any) -> jax.Array:
    """The lengths that `find_part` takes, from a ref of i32 ``[B]``."""
    rows = jnp.arange(pl.next_power_of_2(schedule.batch), dtype=jnp.int32)
    return plgpu.load(lens_ref.at[rows], mask=rows < schedule.batch, other=0)


def find_part(schedule: Schedule, lengths: jax.Array, program: jax.Array) -> Part:
    """The part of a program.

    Args:
      schedule: of the batch, whose sequences are to be divided.
      lengths: i32 ``[R]``, of the sequences, and anything in elements from B on.
      program: i32 scalar, below ``schedule.num_programs``.

    Example:
      >>> schedule = Schedule(batch=3, num_parts=6, step_tokens=16, capacity=512)
      >>> parts = [find_part(schedule, jnp.array([176, 32, 80, 0]), n) for n in range(8)]
      >>> [int(part.end - part.begin) for part in parts]
      [2, 3, 3, 3, 2, 2, 3, 0]
    """
    most_steps, ends = _divide(schedule, lengths)
    is_before = ends <= program
    sequence = jnp.sum(is_before, dtype=jnp.int32)
    start = jnp.max(jnp.where(is_before, ends, 0))
    # 0 where there is no part: then `sequence` is R.
    rows = jnp.arange(lengths.size, dtype=jnp.int32)
    length = jnp.sum(jnp.where(rows == sequence, lengths, 0), dtype=jnp.int32)
    count = _count_parts(_count_steps(schedule, length), most_steps)
    part = cut(schedule, sequence, program - start, count, length)
    return part._replace(is_there=sequence < schedule.batch)


def cut(
    schedule: Schedule,
    sequence: jax.Array,
    index: jax.Array | int,
    count: jax.Array | int,
    length: jax.Array,
) -> Part:
    """One of `count` parts of a sequence of `length` tokens, which differ by a step at most."""
    length, first = _see(schedule, length)
    num_steps = _count_steps(schedule, length)
    index, count = (jnp.asarray(x, jnp.int32) for x in (index, count))
    begin, end = (lax.div(num_steps * turn, count) for turn in (index, index + 1))
    return Part(jnp.asarray(True), sequence, index, count, first, length, begin, end)


def _divide(schedule: Schedule, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most steps of a part, and where the parts of each sequence end among all."""
    is_sequence = jnp.arange(lengths.size, dtype=jnp.int32) < schedule.batch
    steps = jnp.where(is_sequence, _count_steps(schedule, lengths), 0)
    total = jnp.sum(steps, dtype=jnp.int32)
    most_steps = tiles.divide(total + schedule.num_parts - 1, schedule.num_parts)
    most_steps = jnp.maximum(most_steps, 1)
    counts = jnp.where(is_sequence, _count_parts(steps, most_steps), 0)
    return most_steps, jnp.cumsum(counts, dtype=jnp.int32)


def _count_parts(steps: jax.Array, most_steps: jax.Array) -> jax.Array:
    """One at least: a sequence without tokens has a result, too."""
    return jnp.maximum(lax.div(steps + most_steps - 1, jnp.full_like(steps, most_steps)), 1)


def _count_steps(schedule: Schedule, length: jax.Array) -> jax.Array:
    length, first = _see(schedule, length)
    return tiles.divide(length - first + schedule.step_tokens - 1, schedule.step_tokens)


def _see(schedule: Schedule, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The end of a sequence, and the first token of it that the query sees."""
    # Bounded by the table: an address past an array is no error on a GPU.
    length = jnp.clip(length, 0, schedule.capacity)
    if schedule.window is None:
        return length, jnp.zeros_like(length)
    return length, jnp.maximum(length - schedule.window, 0)
