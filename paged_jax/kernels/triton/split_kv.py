"""Split-KV schedule of the decode kernel: parts of sequences, and the merge of their results.

A launch has a fixed number of program instances per KV head, but sequences of any lengths. Long
sequences are split into parts, so that all program instances read about the same number of tokens.
The maximum number of loop steps in a part is the number of steps of the batch divided by
`KVSplit.num_parts`::

    loop steps           a a a a a a a a a a a  b b  c c c c c    three sequences
    parts               |a a a|a a a|a a|a a a||b b||c c|c c c|   at most three steps each
    program instances      0     1    2    3     4    5    6     7 8 9    7 to 9 have no part

Each program instance computes its part from the lengths of the batch, in registers. No list of
parts is stored in memory, and none is computed before the launch. `find_part` is plain `jnp`, so
it also runs outside of a kernel.

If a sequence has several parts, each of their program instances stores a partial result and then
increments a counter. The program instance that increments it last merges all partial results in
their order, so the result does not depend on which one is last. No program instance waits for
another::

    part 0   reads K and V ....... stores, count is 1
    part 1   reads K and V .............. stores, count is 3: merges all, stores the result
    part 2   reads K and V ......... stores, count is 2

The last program instance sees all partial results, because the counter is an atomic addition with
acquire and release semantics on the whole GPU. One thread of a program instance executes the
addition, between two barriers: all threads have stored before the first barrier, and none reads
before the second, where Triton passes the count to all threads. (PTX ISA, Memory Consistency Model,
"Causality Order".)
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton.pallas import Instructions, plgpu

# Number of parts per resident program instance in a large batch. Parts differ in length; with
# several per instance, later parts fill the gaps that short parts leave.
_WAVES = 3

# Cost of merging the parts of a sequence: the merge takes as long as this number of loop steps of a
# program instance that runs alone on its SM.
_MERGE_STEPS = 6

# One sixth of the program instances that the GPU runs at a time saturates the memory bandwidth.
_SATURATING = 6

# A batch is always split if a sequence can have more loop steps than this. Such a sequence might
# still run when all others have ended, for longer than a few merges take.
_LONG_STEPS = 16

# Maximum batch size: each program instance holds the lengths of all sequences in registers.
MAX_SEQUENCES = 4096


class KVSplit(NamedTuple):
    """Static sizes that determine, together with the lengths, how a batch is split.

    Attributes:
      batch: number of sequences (B).
      num_parts: approximate number of parts of the batch; 0 if sequences are not split.
      step_tokens: tokens in a loop step.
      capacity: tokens that a row of the block table can hold.
      window: size of the sliding window in tokens; None for no window.
    """

    batch: int
    num_parts: int
    step_tokens: int
    capacity: int
    window: int | None = None

    @property
    def max_steps(self) -> int:
        """Number of loop steps over the longest possible sequence."""
        visible = self.capacity if self.window is None else min(self.capacity, self.window)
        return math.ceil(visible / self.step_tokens)

    @property
    def num_programs(self) -> int:
        """Number of program instances per KV head: the maximum number of parts of a batch.

        With n steps per part, a sequence has ``ceil(steps / n) < steps / n + 1`` parts. The sum of
        ``steps / n`` over the batch is at most `num_parts`, so there are at most ``num_parts +
        batch - 1`` parts.
        """
        if self.num_parts == 0:
            return self.batch
        return min(self.num_parts + self.batch - 1, self.batch * max(self.max_steps, 1))


class KVPart(NamedTuple):
    """The part of a sequence that one program instance reads, as i32 scalars.

    Attributes:
      is_there: bool, False if the program instance has no part. It then has no loop steps.
      sequence: row of the sequence in the batch.
      index: index of the part in its sequence.
      count: number of parts of the sequence.
      first: position of the first token that the query sees.
      length: length of the sequence.
      begin: first loop step of the part. Step 0 of a sequence starts at token `first`.
      end: end of the loop steps (exclusive).
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

    The kernel is memory-bound, so when a program instance ends, the others read faster. All parts
    of a small batch run at the same time. A large batch has several parts per resident program
    instance.

    Splitting costs a merge. It pays off if it saves more time than the merge takes, or if one
    sequence can be so long that it still runs when all others have ended. Splitting does not help
    if whole sequences already saturate the bandwidth.

    Args:
      batch: number of sequences (B).
      kv_heads: number of KV heads (K).
      max_steps: loop steps over the longest sequence that the block table can hold.
      resident: program instances that run at the same time on the GPU.

    Example:
      >>> choose_num_parts(1, 8, 2048, 396), choose_num_parts(256, 8, 8, 396)
      (49, 0)
    """
    at_once = resident // kv_heads
    is_small = 2 * batch <= at_once
    num_parts = at_once - batch + 1 if is_small else max(_WAVES * resident // kv_heads, 1)
    # Two lower bounds of the time, in loop steps: `least_steps` from the bandwidth, and `longest`
    # from the program instance with the most steps.
    least_steps = _SATURATING * batch * kv_heads * max_steps / resident
    longest = math.ceil(max_steps * batch / num_parts)
    saved_steps = max(max_steps, least_steps) - max(longest, least_steps)
    is_worth_it = saved_steps > _MERGE_STEPS or max_steps > _LONG_STEPS
    return num_parts if is_worth_it and batch <= MAX_SEQUENCES else 0


def load_lengths(split: KVSplit, lens_ref: Any) -> jax.Array:
    """Load the lengths of the sequences from a ref of i32 ``[B]``, for `find_part`.

    The result is i32 with B rounded up to a power of two; the additional elements are 0.
    """
    rows = jnp.arange(pl.next_power_of_2(split.batch), dtype=jnp.int32)
    return plgpu.load(lens_ref.at[rows], mask=rows < split.batch, other=0)


def find_part(split: KVSplit, lengths: jax.Array, program: jax.Array) -> KVPart:
    """Return the part of a program instance.

    Args:
      split: how the batch is split; `num_parts` is not 0.
      lengths: i32 ``[R]``, lengths of the B sequences; the other elements must be 0.
      program: i32 scalar below ``split.num_programs``.

    Example:
      >>> split = KVSplit(batch=3, num_parts=6, step_tokens=16, capacity=512)
      >>> parts = [find_part(split, jnp.array([176, 32, 80, 0]), n) for n in range(8)]
      >>> [int(part.end - part.begin) for part in parts]
      [2, 3, 3, 3, 2, 2, 3, 0]
    """
    max_steps, ends = _divide(split, lengths)
    is_before = ends <= program
    sequence = jnp.sum(is_before, dtype=jnp.int32)
    start = jnp.max(jnp.where(is_before, ends, 0))
    # If the program instance has no part, `sequence` is B. `lengths` has 0 or no element at index
    # B, so the length is 0.
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

    The parts of a sequence differ by at most one loop step.
    """
    length, first = _visible(split, length)
    num_steps = _count_steps(split, length)
    index, count = (jnp.asarray(x, jnp.int32) for x in (index, count))
    begin, end = (lax.div(num_steps * turn, count) for turn in (index, index + 1))
    return KVPart(jnp.asarray(True), sequence, index, count, first, length, begin, end)


def _divide(split: KVSplit, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum steps in a part, and the cumulative number of parts of the sequences."""
    is_sequence = jnp.arange(lengths.size, dtype=jnp.int32) < split.batch
    steps = jnp.where(is_sequence, _count_steps(split, lengths), 0)
    total = jnp.sum(steps, dtype=jnp.int32)
    max_steps = tiles.divide(total + split.num_parts - 1, split.num_parts)
    max_steps = jnp.maximum(max_steps, 1)
    counts = jnp.where(is_sequence, _count_parts(steps, max_steps), 0)
    return max_steps, jnp.cumsum(counts, dtype=jnp.int32)


def _count_parts(steps: jax.Array, max_steps: jax.Array) -> jax.Array:
    """Return the number of parts: at least 1, because an empty sequence has a result too."""
    return jnp.maximum(lax.div(steps + max_steps - 1, jnp.full_like(steps, max_steps)), 1)


def _count_steps(split: KVSplit, length: jax.Array) -> jax.Array:
    length, first = _visible(split, length)
    return tiles.divide(length - first + split.step_tokens - 1, split.step_tokens)


def _visible(split: KVSplit, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the length of a sequence, and the position of the first token that its query sees."""
    # The length is clipped to the table: on a GPU an address past the end of an array raises no
    # error.
    length = jnp.clip(length, 0, split.capacity)
    if split.window is None:
        return length, jnp.zeros_like(length)
    return length, jnp.maximum(length - split.window, 0)


# Elements of partial outputs that a merge loads at a time: 64 for each of 128 threads, which are 16
# parts of 4 heads of 128 lanes. For heads wider than 128 lanes, and for float32, a merge loads half
# as many, because the sums take more registers. With more elements only two program instances, not
# three, would fit an SM.
_MERGE_TILE = 8192
_WIDE = 128

# Initial peak of a merge. With -inf, exp(peak - new_peak) would be NaN if no part has tokens.
_LOWEST = float(np.finfo(np.float32).min)


def is_last_part(
    counts_ref: Any,
    place: tuple[jax.Array, ...],
    count: jax.Array,
    instructions: Instructions,
) -> jax.Array:
    """Increment the counter of a sequence; return whether this part is the last.

    The program instance must have stored its partial result.

    Args:
      counts_ref: i32 counters, zero when the kernel starts; updated.
      place: scalar indices of the counter: the sequence, and the slice of query heads.
      count: number of parts of the sequence.
      instructions: instructions of the kernel.
    """
    instructions.barrier()
    return plgpu.atomic_add(counts_ref, place, jnp.int32(1)) == count - 1


def merge_parts(
    partial_refs: Any,
    heads: jax.Array,
    is_row: jax.Array,
    start: jax.Array,
    count: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Merge the partial results of a sequence.

    Args:
      partial_refs: refs of f32 ``[N, H, D]`` and ``[N, H]``, the output and the log-sum-exp that
        each program instance has stored.
      heads: i32 ``[R]``, the query head of each row.
      is_row: bool ``[R]``, False for rows without a query head.
      start: i32 scalar, the first program instance of the sequence.
      count: i32 scalar, number of parts of the sequence.
      dtype: dtype of the operands of the kernel's matmuls.

    Returns:
      f32 ``[R, lanes]`` output, and f32 ``[R]`` log-sum-exp.
    """
    out_ref, lse_ref = partial_refs
    D = out_ref.shape[2]
    lanes = jnp.arange(tiles.num_lanes(D), dtype=jnp.int32)
    R = heads.size
    is_large = lanes.size > _WIDE or dtype == jnp.float32
    num_at_once = max((_MERGE_TILE // 2 if is_large else _MERGE_TILE) // (R * lanes.size), 1)
    turns = jnp.arange(num_at_once, dtype=jnp.int32)

    def fold(turn, carry):
        peak, total, out = carry
        index = turn * num_at_once + turns
        programs, is_read = start + index, (index < count)[:, None] & is_row[None]
        lse = plgpu.load(lse_ref.at[programs[:, None], heads[None]], mask=is_read, other=-jnp.inf)
        partial = plgpu.load(
            out_ref.at[programs[:, None, None], heads[None, :, None], lanes[None, None]],
            mask=is_read[:, :, None] & (lanes < D)[None, None],
            other=0.0,
        )
        new_peak = jnp.maximum(peak, jnp.max(lse, axis=0))
        decay, weights = jnp.exp(peak - new_peak), jnp.exp(lse - new_peak[None])
        out = out * decay[:, None] + jnp.sum(partial * weights[:, :, None], axis=0)
        return new_peak, total * decay + jnp.sum(weights, axis=0), out

    nothing = jnp.zeros((R,), jnp.float32)
    carry = (nothing + _LOWEST, nothing, jnp.zeros((R, lanes.size), jnp.float32))
    num_turns = tiles.divide(count + num_at_once - 1, num_at_once)
    peak, total, out = lax.fori_loop(0, num_turns, fold, carry)
    is_empty = total == 0
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return out / jnp.where(is_empty, 1.0, total)[:, None], lse
