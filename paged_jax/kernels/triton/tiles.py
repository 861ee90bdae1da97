r"""Tiles of the pool and the online softmax, shared by the decode and prefill kernels.

Except for `refusal` and `as_words`, everything here runs inside a kernel. Triton's arrays have
sizes that are powers of two, so the head dimension is padded to lanes, and the query heads of a
group to rows. Padding is masked when it is loaded, and never stored. A loop step reads a tile of K
and of V::

    block_tables[b]   7   2   9   4  ...        i32, one entry per block
                      |   |
                      v   v                     token t: entry t // C, offset t % C
    pool[layer]    [7, head, 0:C, :]  [2, head, 0:C, :]  ...
                      \       |       /
                    tile [step_tokens, lanes]   a gather of rows from several blocks

A tile may be a tuple of two arrays with the even and the odd lanes. Their products with the queries
are added, and each array of V has its own sums. Scores are in units of log2, so that a weight is
one `exp2`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Half, Options, Problem
from paged_jax.kernels.pool_format import is_quantised, matmul_dtype
from paged_jax.kernels.triton.pallas import Instructions, plgpu

# Minimum size of the dimension that a matmul sums over (k of an mma instruction).
SMALLEST_DOT = 16

# Maximum head dimension. Larger tiles do not fit the registers and the shared memory.
_MAX_LANES = 256

FLOATING = ("float32", "bfloat16", "float16")

# Finite, so that a row that has seen no token gives exp2(0), not NaN. Its weights are 0.
_LOWEST = float(np.finfo(np.float32).min)


class OnlineSoftmax(NamedTuple):
    """State of the online softmax, over the tokens seen so far.

    Attributes:
      peak: f32 ``[R]``, about the largest score of each query row, in log2.
      total: f32 ``[R]``, sum of ``exp2(score - peak)``.
      out: f32 ``[R, lanes]``, sum of ``exp2(score - peak) * value / unit``; or a tuple, as values.
      unit: f32 scalar, the largest scale of a value rounded down to a power of two; None if values
        have no scales.
    """

    peak: jax.Array
    total: jax.Array
    out: Any
    unit: jax.Array | None = None


def refusal(problem: Problem) -> str | None:
    """Return why the attention kernels cannot solve a problem, or None if they can."""
    q_dtype = jnp.dtype(problem.q_dtype)
    if q_dtype.name not in FLOATING:
        return f"its queries are {', '.join(FLOATING)}, not {q_dtype}"
    if problem["D"] > _MAX_LANES:
        return f"its head dimension is {_MAX_LANES} at most, not {problem['D']}"
    return None


def num_rows(group: int) -> int:
    """Return the number of rows of a tile for the query heads of a group."""
    return pl.next_power_of_2(group)


def num_lanes(head_dim: int) -> int:
    """Return the number of lanes of a tile for one head."""
    return max(pl.next_power_of_2(head_dim), SMALLEST_DOT)


def operand_dtype(q_dtype: Any, pool_dtype: Any) -> Any:
    """Return the dtype of the operands of the matmuls.

    It is `matmul_dtype`, except that it is float16 for quantised pools with queries of half
    precision. float16 represents int8 and e4m3 exactly, keeps 11 bits of a weight, and the
    conversion takes the fewest instructions. `fit_queries` and `fold` keep operands in its range.
    """
    if is_quantised(pool_dtype) and jnp.dtype(q_dtype) != jnp.float32:
        return jnp.dtype(jnp.float16)
    return matmul_dtype(q_dtype, pool_dtype)


def as_words(pool: jax.Array) -> jax.Array:
    """Bitcast a pool of 1-byte elements to int16 words of two; return other pools unchanged.

    Called outside of the kernel; the compiler makes no copy. There are two reasons. Tensor cores
    read V from shared memory with an instruction (ldmatrix.trans) that moves 2 bytes at a time. And
    JAX (0.10 to 0.12) indexes arrays of up to 4 GiB with signed 32-bit integers, which overflow if
    elements have 1 byte.
    """
    return pool if pool.dtype.itemsize > 1 else to_words(pool, jnp.int16)


def to_words(x: jax.Array, word: Any) -> jax.Array:
    """Bitcast groups of elements of the last dimension to words, which makes it shorter."""
    elements = jnp.dtype(word).itemsize // x.dtype.itemsize
    if elements > 1:
        x = x.reshape(*x.shape[:-1], -1, elements)
    return lax.bitcast_convert_type(x, word)


class KVHead(NamedTuple):
    """Keys and values of one KV head of one sequence. Methods gather N of its tokens.

    Attributes:
      pools: refs of the pools, as returned by `as_words`.
      pool_dtype: dtype of the elements; a word holds two of 1 byte.
      tables_ref: i32 ``[B, M]``, ref of the block tables.
      sequence: scalar, row of the sequence.
      layer: scalar, layer of the pools.
      head: scalar, the KV head.
      head_dim: head dimension (D).
    """

    pools: Any
    pool_dtype: Any
    tables_ref: Any
    sequence: jax.Array
    layer: jax.Array
    head: jax.Array
    head_dim: int

    def load_block_ids(self, positions: jax.Array, is_read: jax.Array) -> jax.Array:
        """Load the block id of each token, i32 ``[N]``.

        Load them one loop step ahead. If the block table is read in the same step as the pool,
        Triton pipelines at most two loads of the pool.

        Args:
          positions: i32 ``[N]``, positions of the tokens in the sequence.
          is_read: bool ``[N]``; the id of other tokens is 0.
        """
        place = self.sequence, divide(positions, self.pools.block_size)
        return plgpu.load(self.tables_ref.at[place], mask=is_read, other=0)

    def load_tile(
        self, half: Half, block_ids: jax.Array, positions: jax.Array, is_read: jax.Array
    ) -> jax.Array:
        """Load a tile of K or V: ``[N, lanes]`` elements, or words of a pool of words.

        Args:
          half: whether to load keys or values.
          block_ids: i32 ``[N]``, from `load_block_ids`.
          positions: i32 ``[N]``, positions of the tokens in the sequence.
          is_read: bool ``[N]``; rows of other tokens are 0. Lanes that are padding are 0 too.
        """
        width = self.head_dim // 2 if self.pool_dtype.itemsize == 1 else self.head_dim
        lanes = jnp.arange(num_lanes(width), dtype=jnp.int32)[None]
        offsets = remainder(positions, self.pools.block_size)
        ref, row = self.pools.place(
            half, self.layer, block_ids[:, None], self.head, offsets[:, None]
        )
        mask = is_read[:, None]
        if lanes.size != width:
            mask = mask & (lanes < width)
        return plgpu.load(ref.at[*row, lanes], mask=mask, other=jnp.zeros((), ref.dtype))

    def load_scales(
        self, half: Half, block_ids: jax.Array, positions: jax.Array, is_read: jax.Array
    ) -> jax.Array | None:
        """Load the scales of a tile, f32 ``[N]``, or return None if the pool has none."""
        scale_ref = self.pools.k_scale if half == "k" else self.pools.v_scale
        if scale_ref is None:
            return None
        offsets = remainder(positions, self.pools.block_size)
        place = self.layer, block_ids, self.head, offsets
        return plgpu.load(scale_ref.at[place], mask=is_read, other=0.0)


def fit_queries(q: Any, dtype: Any) -> tuple[Any, jax.Array | None]:
    """Convert queries to the dtype of the matmuls, scaled by a power of two per row if necessary.

    bfloat16 has a larger range than float16. Each row is therefore multiplied by a power of two, so
    that its largest magnitude is at least 2**15. bfloat16 elements are then exact if they are at
    least 2**-32 times the largest of their row. Others have an error of at most 2**-40 times it.

    Args:
      q: ``[R, lanes]``, or a tuple of arrays that each have some of the lanes.
      dtype: result of `operand_dtype`.

    Returns:
      ``(q, unit)``: `q` in `dtype`, such that ``q * unit[:, None]`` are the queries. The unit is
      f32 ``[R]``, or None if it is 1.
    """
    if dtype != jnp.float16 or jax.tree.leaves(q)[0].dtype == jnp.float16:
        return jax.tree.map(lambda q: q.astype(dtype), q), None
    q = jax.tree.map(lambda q: q.astype(jnp.float32), q)
    peaks = [jnp.max(jnp.abs(array), axis=1) for array in jax.tree.leaves(q)]
    unit = _power_of_two(_exponent(functools.reduce(jnp.maximum, peaks)))
    factor = _inverse(unit) * 2.0**15
    return jax.tree.map(lambda q: (q * factor[:, None]).astype(dtype), q), unit * 2.0**-15


# The exponent bits of a float32, and the bits of the smallest and the largest power of two that
# `_power_of_two` returns. It returns the smallest for zero. Results do not underflow with it, and
# the inverses of both are normal numbers.
_EXPONENT, _LEAST, _GREATEST = (
    int(np.float32(x).view(np.int32)) for x in (np.inf, 2.0**-100, 2.0**126)
)


def _exponent(x: jax.Array) -> jax.Array:
    """Return the exponent bits of f32 numbers, as i32, which compare like the magnitudes."""
    return lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_EXPONENT)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return the f32 power of two with these exponent bits, at least 2**-100."""
    bits = jnp.clip(exponent, jnp.int32(_LEAST), jnp.int32(_GREATEST))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _inverse(power: jax.Array) -> jax.Array:
    """Return the exact inverse of a power of two, in one instruction."""
    one = int(np.float32(1).view(np.int32))
    bits = jnp.int32(2 * one) - lax.bitcast_convert_type(power, jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def score(
    q: Any,
    unit: jax.Array | None,
    k: Any,
    k_scale: jax.Array | None,
    is_seen: jax.Array,
    options: Options,
) -> tuple[jax.Array, float | jax.Array]:
    """Compute the scores of a tile of keys, without a positive factor that `fold` multiplies in.

    Args:
      q: ``[R, lanes]``, or a tuple. Not scaled, because scaling would round it again.
      unit: f32 ``[R]`` or None, from `fit_queries`.
      k: ``[N, lanes]``, or a tuple if `q` is a tuple. It is converted to the dtype of `q`.
      k_scale: f32 ``[N]`` or None.
      is_seen: bool ``[R, N]`` or ``[1, N]``.
      options: scale and soft cap.

    Returns:
      ``(scores, factor)``: f32 ``[R, N]``, -inf if not seen; and a number or f32 ``[R]``.
      ``scores * factor`` are the scores in log2.
    """
    products = jax.tree.map(lambda q, k: dot(q, k.astype(q.dtype).T), q, k)
    scores = functools.reduce(jnp.add, jax.tree.leaves(products))
    if k_scale is not None:
        scores = scores * k_scale[None]
    factor = options.scale * math.log2(math.e)
    if options.soft_cap is not None:
        cap = options.scale / options.soft_cap
        scores = jnp.tanh(scores * (cap if unit is None else (unit * cap)[:, None]))
        return jnp.where(is_seen, scores, -jnp.inf), options.soft_cap * math.log2(math.e)
    if factor <= 0:
        scores, factor = scores * factor, 1.0
    scores = jnp.where(is_seen, scores, -jnp.inf)
    return scores, factor if unit is None else unit * factor


def start_softmax(
    rows: int, lanes: Any, sinks: jax.Array | None = None, *, has_scales: bool = False
) -> OnlineSoftmax:
    """Return the state of a softmax over no tokens.

    Args:
      rows: number of rows (R).
      lanes: number of lanes; a tuple if values are a tuple.
      sinks: ``[R]`` or None, natural logits that count in the total and have no value; -inf for a
        row without a sink.
      has_scales: whether values have scales.
    """
    unit = _power_of_two(jnp.int32(0)) if has_scales else None
    out = jax.tree.map(lambda n: jnp.zeros((rows, n), jnp.float32), lanes)
    if sinks is None:
        peak = jnp.full(rows, _LOWEST, jnp.float32)
        return OnlineSoftmax(peak, jnp.zeros(rows, jnp.float32), out, unit)
    sinks = sinks.astype(jnp.float32)
    peak = jnp.maximum(sinks * math.log2(math.e), _LOWEST)
    return OnlineSoftmax(peak, (sinks > -jnp.inf).astype(jnp.float32), out, unit)


# log2 of the largest softmax weight in float16, which ends at 65504. A scale is up to 2 times
# its unit, and rounding errors of scores up to 2**25 add a factor of 4. A weight that is the sum of
# two float16 numbers has an error of 2**-23 of its value, or 2**-37 of the largest weight if that
# is more, times the largest scale so far. 131,072 such errors add up to 2**-20.
_LIFT = 12.0


def fold(
    softmax: OnlineSoftmax,
    scores: jax.Array,
    factor: float | jax.Array,
    v: Any,
    v_scale: jax.Array | None,
    weigh: Callable[[jax.Array, jax.Array], jax.Array],
    instructions: Instructions,
) -> OnlineSoftmax:
    """Fold a tile of tokens into a softmax (Milakov and Gimelshein, 2018).

    Args:
      softmax: state of R rows.
      scores: from `score`.
      factor: from `score`.
      v: ``[N, lanes]`` in the dtype of the matmuls, or a tuple.
      v_scale: f32 ``[N]`` or None.
      weigh: multiplies weights f32 ``[R, N]`` by `v`, such as `weigh_rounded` or `weigh_exactly`.
      instructions: instructions of the kernel.
    """
    lift = _LIFT if jax.tree.leaves(v)[0].dtype == jnp.float16 else 0.0
    exp2 = instructions.exp2
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=1) * factor - lift)
    decay = exp2(softmax.peak, 1.0, peak)
    row_factor = factor[:, None] if isinstance(factor, jax.Array) else factor
    weights = exp2(scores, row_factor, peak[:, None])
    total = softmax.total * decay + jnp.sum(weights, axis=1)
    unit = softmax.unit
    if softmax.unit is not None and v_scale is not None:
        unit = jnp.maximum(softmax.unit, _power_of_two(jnp.max(_exponent(v_scale))))
        inverse = _inverse(unit)
        weights = weights * (v_scale * inverse)[None]
        decay = decay * (softmax.unit * inverse)
    out = jax.tree.map(lambda out, v: out * decay[:, None] + weigh(weights, v), softmax.out, v)
    return OnlineSoftmax(peak, total, out, unit)


def finish(softmax: OnlineSoftmax, options: Options) -> tuple[Any, jax.Array]:
    """Return output f32 ``[R, lanes]`` and log-sum-exp f32 ``[R]``; 0 and -inf if no token."""
    is_empty = softmax.total == 0
    total = jnp.where(is_empty, 1.0, softmax.total)
    lse = softmax.peak * math.log(2) + jnp.log(total)
    factor = options.value_scale if softmax.unit is None else softmax.unit * options.value_scale
    out = jax.tree.map(lambda out: out * factor / total[:, None], softmax.out)
    return out, jnp.where(is_empty, -jnp.inf, lse)


def weigh_rounded(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply weights by values in one matmul, with the weights rounded to the values' dtype."""
    return dot(weights.astype(v.dtype), v)


def weigh_exactly(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply float32 weights by values of any dtype.

    Rounding to half precision keeps 8 or 11 bits of a weight. A second matmul adds the next bits.
    """
    if v.dtype == jnp.float32:
        return dot(weights, v)
    return dot(weights.astype(v.dtype), v) + dot(_rest(weights, v.dtype).astype(v.dtype), v)


def weigh_by_copies(is_rest: jax.Array, weights: jax.Array, v: jax.Array) -> jax.Array:
    """Compute `weigh_exactly` in one matmul with pairs of rows; the caller adds their results.

    Args:
      is_rest: bool ``[R]``: whether the row uses the next bits of its weights, not the first bits.
      weights: f32 ``[R, N]``, the same in both rows of a pair.
      v: ``[N, lanes]``, values.
    """
    weights = jnp.where(is_rest[:, None], _rest(weights, v.dtype), weights)
    return dot(weights.astype(v.dtype), v)


def _rest(weights: jax.Array, dtype: Any) -> jax.Array:
    """Return the error of rounding float32 numbers to a dtype."""
    return weights - weights.astype(dtype).astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply matrices of the same dtype, with a float32 result."""
    # By default Triton rounds float32 operands to TF32 (10 bits of mantissa).
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def divide(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x // divisor`` of i32 numbers that are not negative; `//` would test their signs.

    The divisor is i32, because a Python integer would be 64 bits wide under jax_enable_x64.
    """
    if divisor & (divisor - 1):
        return lax.div(x, jnp.full_like(x, divisor))
    return lax.shift_right_logical(x, jnp.full_like(x, divisor.bit_length() - 1))


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x % divisor`` of i32 numbers that are not negative, like `divide`."""
    if divisor & (divisor - 1):
        return lax.rem(x, jnp.full_like(x, divisor))
    return x & (divisor - 1)
