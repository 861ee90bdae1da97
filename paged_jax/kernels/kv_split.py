"""Split of a batch of sequences among the thread blocks of a GPU.

A launch has a fixed number of program instances per KV head, but the lengths of the sequences vary.
Long sequences are split into parts, so that all program instances read about the same number of
tokens. The maximum number of loop steps in a part is the number of steps of the batch divided by
`KVSplit.num_parts`, rounded up::

    loop steps           a a a a a a a a a a a  b b  c c c c c    three sequences
    parts               |a a a|a a a|a a|a a a||b b||c c|c c c|   at most three steps each
    program instances      0     1    2    3     4    5    6     7 8 9    7 to 9 have no part

`find_part` is written in plain `jnp`. The Triton kernel calls it in each program instance. For the
Mosaic GPU kernel, a list of all parts is computed once per model step.

If a sequence has several parts, each of their program instances stores a partial result and then
increments a counter. The program instance that increments the counter last merges all partial
results, in the order of the parts. The result does not depend on which program instance is last. No
program instance waits for another::

    part 0   reads K and V ....... stores, count is 1
    part 1   reads K and V .............. stores, count is 3: merges all, stores the result
    part 2   reads K and V ......... stores, count is 2
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.op_args import AttentionArgs

# A large batch has `_WAVES` parts for each program instance that the GPU can run at the same time.
# As parts have different lengths, a waiting part can then start whenever a shorter part ends.
_WAVES = 3

# Time for merging the partial results of a sequence. The unit is the time of a loop step of a
# program instance that runs alone on its SM.
_MERGE_STEPS = 6

# The memory bandwidth is saturated if ``1 / _SATURATING`` of the program instances that the GPU can
# run at the same time are running.
_SATURATING = 6

# A batch is always split if one of its sequences can need more loop steps than this number. Without
# the split, the program instance of that sequence might still run when all others have ended. This
# would cost more time than merging the partial results of a split sequence.
_LONG_STEPS = 16

# Maximum batch size. It is limited because each program instance holds the lengths of all sequences
# in registers.
MAX_SEQUENCES = 4096


class KVSplit(NamedTuple):
    """Static sizes that, with the lengths of the sequences, determine all parts of a batch.

    Attributes:
      batch: number of sequences (B).
      num_parts: approximate number of parts of the batch; 0 if sequences are not split.
      step_tokens: tokens in a loop step.
      capacity: tokens that a row of the block table can hold.
      window: size of the sliding window in tokens; None for no window.
      alignment: a divisor of `step_tokens`. The first loop step of a sequence starts at the first
        visible token, rounded down to a multiple of `alignment`.
    """

    batch: int
    num_parts: int
    step_tokens: int
    capacity: int
    window: int | None = None
    alignment: int = 1

    @property
    def max_steps(self) -> int:
        """Number of loop steps over the longest possible sequence."""
        visible = self.capacity
        if self.window is not None:
            visible = min(visible, self.window + self.alignment - 1)
        return math.ceil(visible / self.step_tokens)

    @property
    def num_programs(self) -> int:
        """Number of program instances per KV head: the maximum number of parts of a batch.

        With n steps per part, a sequence has ``ceil(steps / n) < steps / n + 1`` parts. The sum of
        ``steps / n`` over the batch is at most `num_parts`. There are therefore at most
        ``num_parts + batch - 1`` parts.
        """
        if self.num_parts == 0:
            return self.batch
        return min(self.num_parts + self.batch - 1, self.batch * max(self.max_steps, 1))


class KVPart(NamedTuple):
    """The part of a sequence that one program instance reads, as i32 scalars.

    Attributes:
      is_there: bool, False if the program instance has no part, and therefore no loop steps.
      sequence: row of the sequence in the batch.
      index: index of the part in its sequence.
      count: number of parts of the sequence.
      first: position of the first token that the query sees, rounded down to a multiple of
        `KVSplit.alignment`.
      length: length of the sequence.
      begin: first loop step of the part. Loop step 0 of a sequence starts at token `first`.
      end: end of the loop steps of the part (exclusive).
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
    """Choose the number of parts of a batch; 0 if its sequences should not be split.

    A small batch is split into as many parts as the GPU can run at the same time. A large batch is
    split into `_WAVES` times as many. The parts need not take equally long: the kernel is
    memory-bound, so when a program instance ends, the others read faster.

    Splitting is worthwhile if it saves more time than merging the partial results costs, or if one
    sequence can be so long that it still runs when all others have ended. Splitting does not help
    if program instances that read whole sequences already saturate the memory bandwidth.

    Args:
      batch: number of sequences (B).
      kv_heads: number of KV heads (K).
      max_steps: number of loop steps over the longest sequence that the block table can hold.
      resident: number of program instances that the GPU runs at the same time.

    Example:
      >>> choose_num_parts(1, 8, 2048, 396)  # 8 KV heads x 49 parts of one sequence run together
      49
      >>> choose_num_parts(256, 8, 8, 396)  # 256 short sequences need no split
      0
    """
    at_once = resident // kv_heads
    is_small = 2 * batch <= at_once
    num_parts = at_once - batch + 1 if is_small else max(_WAVES * resident // kv_heads, 1)
    # Compute two lower bounds of the time, in loop steps: `least_steps` follows from the memory
    # bandwidth, and `max_part_steps` from the program instance with the most steps.
    least_steps = _SATURATING * batch * kv_heads * max_steps / resident
    max_part_steps = math.ceil(max_steps * batch / num_parts)
    saved_steps = max(max_steps, least_steps) - max(max_part_steps, least_steps)
    is_worth_it = saved_steps > _MERGE_STEPS or max_steps > _LONG_STEPS
    return num_parts if is_worth_it and batch <= MAX_SEQUENCES else 0


def find_part(split: KVSplit, lengths: jax.Array, program: jax.Array) -> KVPart:
    """Return the part of a sequence that a program instance reads.

    Args:
      split: how the batch is split; `num_parts` is not 0.
      lengths: i32 ``[R]``, lengths of the B sequences, followed by zeros.
      program: index of the program instance, an i32 scalar below ``split.num_programs``.

    Example:
      Sequences of 11, 2 and 5 loop steps have 4, 1 and 2 parts. Program instance 7 has no part:

      >>> split = KVSplit(batch=3, num_parts=6, step_tokens=16, capacity=512)
      >>> parts = [find_part(split, jnp.array([176, 32, 80, 0]), n) for n in range(8)]
      >>> [int(part.end - part.begin) for part in parts]
      [2, 3, 3, 3, 2, 2, 3, 0]
    """
    max_steps, ends = _divide(split, lengths)
    is_before = ends <= program
    sequence = jnp.sum(is_before, dtype=jnp.int32)
    start = jnp.max(jnp.where(is_before, ends, 0))
    # If the program instance has no part, `sequence` is R, which is past the end of `lengths`. No
    # row matches it, so the length is 0.
    rows = jnp.arange(lengths.size, dtype=jnp.int32)
    length = jnp.sum(jnp.where(rows == sequence, lengths, 0), dtype=jnp.int32)
    count = _count_parts(_count_steps(split, length), max_steps)
    part = take_part(split, sequence, program - start, count, length)
    return part._replace(is_there=sequence < split.batch)


def take_part(
    split: KVSplit,
    sequence: jax.Array,
    index: jax.Array | int,
    count: jax.Array | int,
    length: jax.Array,
) -> KVPart:
    """Return part `index` of a sequence that is split into `count` parts.

    The numbers of loop steps of the parts of a sequence differ by at most one.
    """
    length, first = _visible(split, length)
    num_steps = _count_steps(split, length)
    index, count = (jnp.asarray(x, jnp.int32) for x in (index, count))
    begin, end = (lax.div(num_steps * turn, count) for turn in (index, index + 1))
    return KVPart(jnp.asarray(True), sequence, index, count, first, length, begin, end)


def _divide(split: KVSplit, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum number of steps in a part, and the cumulative number of parts.

    The second result is i32 ``[R]``. Element i is the number of parts of sequences 0 to i together.
    """
    is_sequence = jnp.arange(lengths.size, dtype=jnp.int32) < split.batch
    steps = jnp.where(is_sequence, _count_steps(split, lengths), 0)
    total = jnp.sum(steps, dtype=jnp.int32)
    max_steps = divide(total + split.num_parts - 1, split.num_parts)
    max_steps = jnp.maximum(max_steps, 1)
    counts = jnp.where(is_sequence, _count_parts(steps, max_steps), 0)
    return max_steps, jnp.cumsum(counts, dtype=jnp.int32)


def _count_parts(steps: jax.Array, max_steps: jax.Array) -> jax.Array:
    """Return the number of parts of a sequence.

    An empty sequence has one part, because a program instance must store its result.
    """
    return jnp.maximum(lax.div(steps + max_steps - 1, jnp.full_like(steps, max_steps)), 1)


def _count_steps(split: KVSplit, length: jax.Array) -> jax.Array:
    length, first = _visible(split, length)
    return divide(length - first + split.step_tokens - 1, split.step_tokens)


def _visible(split: KVSplit, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the length of a sequence, clipped to the capacity, and the first token to read."""
    # Clip the length to the block table, because on a GPU an address past the end of an array
    # raises no error.
    length = jnp.clip(length, 0, split.capacity)
    if split.window is None:
        return length, jnp.zeros_like(length)
    first = jnp.maximum(length - split.window, 0)
    return length, first - remainder(first, split.alignment)


def zero_counters(args: AttentionArgs, num_slices: int) -> jax.Array:
    """Return counters of 0 for each sequence and slice of query heads, i32 ``[B, num_slices]``.

    XLA would turn `jnp.zeros` into a constant, and copy it for each layer in a separate launch. The
    zeros are therefore computed from the layer index: lengths are compared with ``-1 - layer``,
    which they never equal. XLA computes the zeros of all layers in one kernel, because all
    comparisons read the same array. It only does so if this array has more than one element. The
    lengths of a batch of one sequence have one element, so the block tables are compared too.
    """
    marker = -1 - jnp.asarray(args.layer, jnp.int32)
    is_one = (args.context_lens == marker) & (args.block_tables[:, 0] == marker)
    return jnp.broadcast_to(is_one[:, None], (is_one.size, num_slices)).astype(jnp.int32)


def divide(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x // divisor`` of non-negative i32 numbers.

    `//` would take more instructions, because it handles signs. The divisor is converted to i32,
    because a Python integer would be 64 bits wide under jax_enable_x64.
    """
    if divisor & (divisor - 1):
        return lax.div(x, jnp.full_like(x, divisor))
    return lax.shift_right_logical(x, jnp.full_like(x, divisor.bit_length() - 1))


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x % divisor`` of non-negative i32 numbers, like `divide`."""
    if divisor & (divisor - 1):
        return lax.rem(x, jnp.full_like(x, divisor))
    return x & (divisor - 1)
