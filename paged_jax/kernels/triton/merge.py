"""The partial results of the parts of a sequence made one, by the program that is done last.

Each program of a sequence in parts writes what it has found, then counts itself. The one that finds
all others counted merges them all, its own too, in their order: who is last may differ from call to
call, the result does not. Nobody waits for anybody::

    part 0   reads K and V ....... writes, counts 1
    part 1   reads K and V .............. writes, counts 3: merges all, writes the result
    part 2   reads K and V ......... writes, counts 2

That the last one sees what all wrote is what counting promises. The count is an atomic addition
that releases to the whole device what was written before it, and acquires what those released that
counted earlier. One thread counts for its program, between two barriers: all threads have written
before the first, and none reads before the second, by which Triton gives all of them the count.
(PTX ISA, Memory Consistency Model, "Causality Order".)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton.instructions import Instructions
from paged_jax.kernels.triton.pallas import plgpu

# Numbers that a program reads at once, 64 of each of 128 threads: 16 parts of 4 heads of 128 lanes.
# Half as many beside the sums of wider heads, and of float32, whose programs would need so many
# registers for more that two of them, not three, share a multiprocessor.
_TILE = 8192
_WIDE = 128

# Finite, so that what comes before the first part gives 0 times 0, and not NaN.
_LOWEST = float(np.finfo(np.float32).min)


def is_last(
    counts_ref: Any,
    place: tuple[jax.Array, ...],
    count: jax.Array,
    instructions: Instructions,
) -> jax.Array:
    """Count this program, which has written its part; whether all others were counted before.

    Args:
      counts_ref: i32, zeros when the kernel begins; changed.
      place: scalars, where in it this sequence and head are counted.
      count: parts of the sequence.
      instructions: of a kernel that is compiled, or interpreted.
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
    """The result of a group of heads over all parts, as f32 ``[R, lanes]``, and lse ``[R]``.

    Args:
      partial_refs: f32 ``[N, H, D]`` and ``[N, H]``, results and lse by program.
      heads, is_row: i32 and bool ``[R]``, the query head of each row, and whether it is one.
      start, count: the first program of the sequence, and how many there are.
      dtype: of the operands of the kernel's products.
    """
    out_ref, lse_ref = partial_refs
    D = out_ref.shape[2]
    lanes = jnp.arange(tiles.num_lanes(D), dtype=jnp.int32)
    R = heads.size
    is_large = lanes.size > _WIDE or dtype == jnp.float32
    num_at_once = max((_TILE // 2 if is_large else _TILE) // (R * lanes.size), 1)
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
