r"""Tiles of the pool and the online softmax, shared by the decode and prefill kernels.

The sizes of Triton's arrays are powers of two. The head dimension is therefore padded to
`num_lanes`, and the query heads of a group are padded to `num_rows`. Padding is masked when it is
loaded, and is never stored. A loop step of a kernel reads a tile of K and a tile of V::

    block_tables[b]   7   2   9   4  ...        i32, one entry per block
                      |   |
                      v   v                     token t: entry t // C, offset t % C
    pool[layer]    [7, head, 0:C, :]  [2, head, 0:C, :]  ...
                      \       |       /
                    tile [step_tokens, lanes]   a gather of rows from several blocks

A tile may also be a tuple of arrays, such as the even and the odd lanes. `score` adds the products
of all arrays of K with the queries. Each array of V has its own output array.

In latent attention, each value vector is the beginning of its key vector. A key then has two parts,
and a tile of K has arrays for both parts. The arrays of the first part are also the tile of V, so
they are loaded only once::

    key     [ value, 512 elements                        | rotated, 64 ]
    tiles   [ step_tokens, 512 ], also the tile of V       [ step_tokens, 64 ]

Scores are multiplied by log2(e), so that ``exp2`` of them gives the softmax weights. This is called
"in units of log2".
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

from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.kv_split import divide, remainder
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.pools import Half
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.triton.pallas import Instructions, plgpu

# Minimum size of the dimension that a matmul sums over, which is k of an mma instruction.
SMALLEST_DOT = 16

# Maximum head dimension. Larger tiles do not fit the registers and the shared memory.
_MAX_LANES = 256

# Maximum number of elements of a key, and of a value, in latent attention. Both numbers are larger
# than `_MAX_LANES`, because the tiles of latent attention have fewer rows.
_MAX_LATENT_LANES = 640, 512

FLOATING = ("float32", "bfloat16", "float16")

# Initial peak (largest score so far) of the softmax. It is finite, because -inf - (-inf) would give
# NaN in rows that have seen no token. With this peak, all softmax weights of these rows are
# exp2(-inf) = 0.
_LOWEST = float(np.finfo(np.float32).min)


class OnlineSoftmax(NamedTuple):
    """State of the online softmax over the tokens so far. Scores are in units of log2.

    Attributes:
      peak: f32 ``[R]``, about the largest score of each query row so far, minus `_LIFT` if the
        matmuls are in float16. It is subtracted from the scores before `exp2`.
      total: f32 ``[R]``, sum of ``exp2(score - peak)``.
      out: f32 ``[R, lanes]``, sum of ``exp2(score - peak) * value / unit``; a tuple of such arrays
        if tiles are tuples.
      unit: f32 scalar, the largest scale of a value so far, rounded down to a power of two; None if
        values have no scales.
    """

    peak: jax.Array
    total: jax.Array
    out: Any
    unit: jax.Array | None = None


def refusal(problem: Problem) -> str | None:
    """Return why the attention kernels do not support `problem`, or None if they do."""
    q_dtype = jnp.dtype(problem.q_dtype)
    if q_dtype.name not in FLOATING:
        return f"queries must be {', '.join(FLOATING)}, got {q_dtype}"
    if (reason := problem.separate_values_refusal) is not None:
        return reason
    if problem.shares_values:
        sizes = problem["D"], problem.value_dim
        if any(size > limit for size, limit in zip(sizes, _MAX_LATENT_LANES, strict=True)):
            return (
                "keys and the values in them must have at most {} and {} elements, got {} and {}"
            ).format(*_MAX_LATENT_LANES, *sizes)
    elif problem["D"] > _MAX_LANES:
        return f"the head dimension must be at most {_MAX_LANES}, got {problem['D']}"
    return None


def num_rows(group: int) -> int:
    """Return the number of rows of a tile: the group size, rounded up to a power of two."""
    return pl.next_power_of_2(group)


def num_lanes(head_dim: int) -> int:
    """Return the lanes of a tile: `head_dim` rounded up to a power of two, at least 16."""
    return max(pl.next_power_of_2(head_dim), SMALLEST_DOT)


class HeadPart(NamedTuple):
    """A range of elements of a head, from `start` to `end` (exclusive)."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.start


def parts_of(head_dim: int, value_dim: int) -> tuple[HeadPart, ...]:
    """Return the parts of a key: the whole key, or the value that it contains and the rest.

    Args:
      head_dim: number of elements of a key (D).
      value_dim: number of elements of a value if it is a part of the key, else 0.

    Example:
      >>> [(part.start, part.end) for part in parts_of(576, 512)]
      [(0, 512), (512, 576)]
    """
    ends = (value_dim, head_dim) if 0 < value_dim < head_dim else (head_dim,)
    return tuple(HeadPart(*part) for part in zip((0, *ends), ends, strict=False))


def operand_dtype(q_dtype: Any, pool_dtype: Any) -> Any:
    """Return the dtype of the operands of the matmuls.

    It is `KVDtype.matmul_dtype`, with one exception: float16 for quantised pools with queries in
    half precision. float16 represents the quantised dtypes exactly, and keeps 11 bits of a softmax
    weight. The conversion to it takes the fewest instructions. `fit_queries` and `fold` keep
    operands in the range of float16.
    """
    kv = KVDtype.of(pool_dtype)
    if kv.has_scales and jnp.dtype(q_dtype) != jnp.float32:
        return jnp.dtype(jnp.float16)
    return kv.matmul_dtype(q_dtype)


def as_words(pool: jax.Array) -> jax.Array:
    """Bitcast a pool of 1-byte elements to int16 words of two; return other pools unchanged.

    Call it outside of the kernel. The compiler makes no copy. There are two reasons for the words.
    Tensor cores read V from shared memory with an instruction (ldmatrix.trans) that moves 2-byte
    elements. And JAX (0.10 to 0.12) indexes arrays of up to 4 GiB with signed 32-bit integers,
    which overflow in an array of 2 to 4 GiB with 1-byte elements.
    """
    return pool if pool.dtype.itemsize > 1 else to_words(pool, jnp.int16)


def to_words(x: jax.Array, word: Any) -> jax.Array:
    """Bitcast neighbouring elements of the last dimension to words of dtype `word`."""
    elements = jnp.dtype(word).itemsize // x.dtype.itemsize
    if elements > 1:
        x = x.reshape(*x.shape[:-1], -1, elements)
    return lax.bitcast_convert_type(x, word)


class KVHead(NamedTuple):
    """The keys and values of a KV head of a sequence. Methods gather N of its tokens.

    Attributes:
      pools: refs of `Pools` or `Pages`, in which `as_words` has bitcast keys and values.
      pool_dtype: dtype of the pool before `as_words`.
      tables_ref: ref of the block tables, i32 ``[B, M]``.
      sequence: scalar, row of the sequence in the block tables.
      layer: scalar, index of the layer.
      head: scalar, index of the KV head.
      parts: parts of a key, from `parts_of`. A value has only the first part.
    """

    pools: Any
    pool_dtype: Any
    tables_ref: Any
    sequence: jax.Array
    layer: jax.Array
    head: jax.Array
    parts: tuple[HeadPart, ...]

    @property
    def shares_values(self) -> bool:
        """Whether the tile of V is the first part of the tile of K."""
        return self.pools.shares_values

    @property
    def elements_per_lane(self) -> int:
        """Number of elements in a lane of `load_tile`: two for 8-bit elements, else one."""
        return 2 if self.pool_dtype.itemsize == 1 else 1

    @property
    def has_scales(self) -> bool:
        """Whether keys and values have scales."""
        return self.pools.k_scale is not None

    def load_block_ids(self, positions: jax.Array, is_read: jax.Array) -> jax.Array:
        """Load the block id of each token, i32 ``[N]``.

        Call it one loop step before `load_tile`. If the same loop step loaded block ids and tiles,
        Triton would pipeline at most two loads of tiles.

        Args:
          positions: i32 ``[N]``, positions of the tokens in the sequence.
          is_read: bool ``[N]``, whether to load the id of each token. The other ids are 0.
        """
        place = self.sequence, divide(positions, self.pools.block_size)
        return plgpu.load(self.tables_ref.at[place], mask=is_read, other=0)

    def load_tile(
        self,
        half: Half,
        part: HeadPart,
        block_ids: jax.Array,
        positions: jax.Array,
        is_read: jax.Array,
    ) -> jax.Array:
        """Load a tile of K or V, ``[N, lanes]``.

        A lane is an element, or an int16 word of two elements if the elements have 1 byte.

        Args:
          half: ``"k"`` to load keys, ``"v"`` to load values.
          part: the range of elements to load, one of `parts`.
          block_ids: i32 ``[N]``, from `load_block_ids`.
          positions: i32 ``[N]``, positions of the tokens in the sequence.
          is_read: bool ``[N]``, whether to load each token. The other rows are 0, and so is the
            padding of lanes.
        """
        elements = self.elements_per_lane
        width, start = part.size // elements, part.start // elements
        lanes = jnp.arange(num_lanes(width), dtype=jnp.int32)[None]
        offsets = remainder(positions, self.pools.block_size)
        ref, row = self.pools.place(
            half, self.layer, block_ids[:, None], self.head, offsets[:, None]
        )
        mask = is_read[:, None]
        if lanes.size != width:
            mask = mask & (lanes < width)
        place = lanes + start if start else lanes
        return plgpu.load(ref.at[*row, place], mask=mask, other=jnp.zeros((), ref.dtype))

    def load_scales(
        self, half: Half, block_ids: jax.Array, positions: jax.Array, is_read: jax.Array
    ) -> jax.Array | None:
        """Load the scales of keys or values, f32 ``[N]``; return None if the pool has none."""
        is_key = half == "k" or self.shares_values
        scale_ref = self.pools.k_scale if is_key else self.pools.v_scale
        if scale_ref is None:
            return None
        offsets = remainder(positions, self.pools.block_size)
        place = self.layer, block_ids, self.head, offsets
        return plgpu.load(scale_ref.at[place], mask=is_read, other=0.0)


def fit_queries(q: Any, dtype: Any) -> tuple[Any, jax.Array | None]:
    """Convert queries to the dtype of the matmuls.

    bfloat16 has a larger range than float16. If bfloat16 queries become float16, each row is
    multiplied by a power of two, so that its largest magnitude is at least 2**15. An element is
    then exact if it is at least 2**-32 times the largest magnitude of its row. Other elements have
    an error of at most 2**-40 times this magnitude.

    Args:
      q: ``[R, lanes]``, or a tuple of arrays with some of the lanes each.
      dtype: result of `operand_dtype`.

    Returns:
      ``(q, unit)``: `q` in `dtype`, such that ``q * unit[:, None]`` are the queries. `unit` is f32
      ``[R]``, or None if the queries were not multiplied.
    """
    if dtype != jnp.float16 or jax.tree.leaves(q)[0].dtype == jnp.float16:
        return jax.tree.map(lambda q: q.astype(dtype), q), None
    q = jax.tree.map(lambda q: q.astype(jnp.float32), q)
    peaks = [jnp.max(jnp.abs(array), axis=1) for array in jax.tree.leaves(q)]
    unit = _power_of_two(_exponent(functools.reduce(jnp.maximum, peaks)))
    factor = _inverse(unit) * 2.0**15
    return jax.tree.map(lambda q: (q * factor[:, None]).astype(dtype), q), unit * 2.0**-15


# The bits of three float32 numbers, as integers: the mask of the exponent bits, and the smallest
# (2**-100) and largest (2**126) result of `_power_of_two`. Its result for zero is 2**-100. Products
# with these powers do not underflow, and their inverses are normal numbers.
_EXPONENT, _LEAST, _GREATEST = (
    int(np.float32(x).view(np.int32)) for x in (np.inf, 2.0**-100, 2.0**126)
)


def _exponent(x: jax.Array) -> jax.Array:
    """Return the exponent bits of f32 numbers as i32.

    They can be compared as integers: a larger magnitude never has smaller exponent bits.
    """
    return lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_EXPONENT)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return the f32 power of two with these exponent bits, limited to 2**-100 to 2**126."""
    bits = jnp.clip(exponent, jnp.int32(_LEAST), jnp.int32(_GREATEST))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _inverse(power: jax.Array) -> jax.Array:
    """Return the exact inverse of an f32 power of two, in one instruction."""
    one_bits = int(np.float32(1).view(np.int32))
    bits = jnp.int32(2 * one_bits) - lax.bitcast_convert_type(power, jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def score(
    q: Any,
    unit: jax.Array | None,
    k: Any,
    k_scale: jax.Array | None,
    is_seen: jax.Array,
    options: Options,
) -> tuple[jax.Array, float | jax.Array]:
    """Compute the scores of a tile of keys, without a positive factor that `fold` applies.

    Args:
      q: queries ``[R, lanes]``, or a tuple, from `fit_queries`. They have not been multiplied by
        ``options.scale``, because this would round them again.
      unit: f32 ``[R]`` or None, from `fit_queries`.
      k: ``[N, lanes]``, or a tuple if `q` is a tuple. It is converted to the dtype of `q`.
      k_scale: f32 ``[N]``, scales of the keys, or None.
      is_seen: bool ``[R, N]`` or ``[1, N]``, whether each query row sees each token.
      options: options of the call, with the scale and the soft cap.

    Returns:
      ``(scores, factor)``: f32 ``[R, N]``, -inf for tokens that are not seen; and a Python float,
      or f32 ``[R]`` with a factor for each row. The scores times the factor are in units of log2.
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
    """Return the initial state of a softmax, before the first token.

    Args:
      rows: number of rows (R).
      lanes: number of lanes of a tile of V; a tuple of numbers if tiles are tuples.
      sinks: ``[R]`` or None, logits (not in units of log2) that are a part of the total but have no
        value; -inf for a row without a sink.
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


# In float16, softmax weights are multiplied by 2**_LIFT, so the largest weight of a row is 2**12.
# Each weight is then multiplied by ``v_scale / unit``, which is less than 2. For scores as large as
# 2**25, rounding errors can increase a weight by another factor of up to 4. All operands therefore
# stay below 65504, the largest float16 number.
# `weigh_exactly` splits a weight into two float16 numbers. The error of their sum is at most 2**-23
# of the weight or 2**-37 of the largest weight, whichever is larger. If values have scales, the
# first weight here includes the scale of its value, and the largest weight is multiplied by the
# largest scale so far. The sum of 131,072 errors of 2**-37 is 2**-20.
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
    """Add a tile of N tokens to a softmax (Milakov and Gimelshein, 2018).

    Args:
      softmax: state of R rows.
      scores: from `score`.
      factor: from `score`.
      v: ``[N, lanes]`` in the dtype of the matmuls, or a tuple.
      v_scale: f32 ``[N]``, scales of the values, or None.
      weigh: function that multiplies weights, f32 ``[R, N]``, by `v`, such as `weigh_rounded` or
        `weigh_exactly`.
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
    """Return the output, f32 ``[R, lanes]``, and the log-sum-exp, f32 ``[R]``.

    The log-sum-exp is natural, not in units of log2. Rows that have seen no token get 0 and -inf.
    The output is a tuple of arrays if tiles are tuples.
    """
    is_empty = softmax.total == 0
    total = jnp.where(is_empty, 1.0, softmax.total)
    lse = softmax.peak * math.log(2) + jnp.log(total)
    factor = options.value_scale if softmax.unit is None else softmax.unit * options.value_scale
    out = jax.tree.map(lambda out: out * factor / total[:, None], softmax.out)
    return out, jnp.where(is_empty, -jnp.inf, lse)


def weigh_rounded(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply weights by values in one matmul. Weights are rounded to the values' dtype."""
    return dot(weights.astype(v.dtype), v)


def weigh_exactly(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply float32 weights by values of any dtype, without rounding the weights.

    A single matmul in half precision would keep 8 bits (bfloat16) or 11 bits (float16) of a weight.
    A second matmul therefore multiplies the rounding errors of the weights by the values.
    """
    if v.dtype == jnp.float32:
        return dot(weights, v)
    return dot(weights.astype(v.dtype), v) + dot(_rest(weights, v.dtype).astype(v.dtype), v)


def weigh_by_copies(is_rest: jax.Array, weights: jax.Array, v: jax.Array) -> jax.Array:
    """Compute `weigh_exactly` in a single matmul, with two copies of each row.

    The matmul multiplies the rounded weights of one copy, and the rounding errors of the other
    copy. The caller adds the results of both copies.

    Args:
      is_rest: bool ``[R]``, True for copies that use the rounding errors.
      weights: f32 ``[R, N]``, the same in both copies of a row.
      v: values, ``[N, lanes]``.
    """
    weights = jnp.where(is_rest[:, None], _rest(weights, v.dtype), weights)
    return dot(weights.astype(v.dtype), v)


def _rest(weights: jax.Array, dtype: Any) -> jax.Array:
    """Return the rounding errors of float32 numbers when they are rounded to a dtype."""
    return weights - weights.astype(dtype).astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply matrices of the same dtype, with a float32 result."""
    # By default Triton rounds float32 operands to TF32 (10 bits of mantissa).
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
