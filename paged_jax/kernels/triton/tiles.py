"""What the decode and prompt-chunk kernels share: tiles of the pool, and a softmax in progress.

Everything here runs inside a kernel. Triton works on arrays whose sizes are powers of two, so the
head dimension is padded to lanes and the query heads of a group to rows; what is padding is masked
at the load and never stored. One step of a kernel's loop reads one tile of K and one of V::

    block_tables[b]   7   2   9   4  ...        i32, one entry a block
                      |   |
                      v   v                     token t: entry t // C, offset t % C
    pool[layer]    [7, head, 0:C, :]  [2, head, 0:C, :]  ...
                      \\       |       /
                    tile [step_tokens, lanes]   a gather of rows; several blocks, or a part of one

A tile may be a tuple of arrays that share its lanes between them: products with K add up, and each
array of V has its own sums. Scores are kept in units of log2, so that each weight is one `exp2`.
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

from paged_jax.kernels.backend import Half, Options, Pages, Pools, Problem
from paged_jax.kernels.pool_format import is_quantised, matmul_dtype
from paged_jax.kernels.triton.pallas import Instructions, plgpu

# A dot needs this much of the dimensions that it sums over (the k of an mma instruction).
SMALLEST_DOT = 16

# More lanes do not fit the registers and the shared memory of one program beside each other.
_MOST_LANES = 256

FLOATING = ("float32", "bfloat16", "float16")

# Finite, so that a row that has seen no token gives exp2(0) and not NaN; its weights are 0.
_LOWEST = float(np.finfo(np.float32).min)


class Softmax(NamedTuple):
    """A softmax-weighted sum in progress, over the tokens folded in so far.

    Attributes:
      peak: f32 ``[R]``, about the largest score of each query row, in log2.
      total: f32 ``[R]``, sum of ``exp2(score - peak)``.
      out: f32 ``[R, lanes]``, sum of ``exp2(score - peak) * value / unit``; or a tuple, as values.
      unit: None where values have no scales, else f32 scalar, the power of two of the largest.
    """

    peak: jax.Array
    total: jax.Array
    out: Any
    unit: jax.Array | None = None


def refusal(problem: Problem) -> str | None:
    """Why the attention kernels cannot do what is asked, or None if they can."""
    q_dtype = jnp.dtype(problem.q_dtype)
    if q_dtype.name not in FLOATING:
        return f"its queries are {', '.join(FLOATING)}, not {q_dtype}"
    if problem["D"] > _MOST_LANES:
        return f"its head dimension is {_MOST_LANES} at most, not {problem['D']}"
    return None


def num_rows(group: int) -> int:
    """Rows of a tile that hold the query heads of a group."""
    return pl.next_power_of_2(group)


def num_lanes(head_dim: int) -> int:
    """Lanes of a tile that hold one head."""
    return max(pl.next_power_of_2(head_dim), SMALLEST_DOT)


def operand_dtype(q_dtype: Any, pool_dtype: Any) -> Any:
    """The type in which queries meet keys, and weights meet values.

    As `matmul_dtype`, but float16 for quantised pools and queries of half precision. Numbers of
    both pool types are exact in it, a weight keeps 11 bits, and converting to it takes the fewest
    instructions. `fit_queries` and `fold` keep what they multiply within its range.
    """
    if is_quantised(pool_dtype) and jnp.dtype(q_dtype) != jnp.float32:
        return jnp.dtype(jnp.float16)
    return matmul_dtype(q_dtype, pool_dtype)


def as_words(pool: jax.Array) -> jax.Array:
    """View a pool of 1-byte numbers as int16 words of two; other pools are as they are.

    Outside of the kernel; the compiler makes no copy. Tensor cores take V from shared memory by an
    instruction (ldmatrix.trans) that moves 2 bytes at a time. And JAX (0.10 to 0.12) computes the
    addresses of an array of up to 4 GiB from 32-bit signed indices, which count words, not bytes.
    """
    return pool if pool.dtype.itemsize > 1 else to_words(pool, jnp.int16)


def to_words(x: jax.Array, word: Any) -> jax.Array:
    """The same memory seen as words, which are whole numbers of elements; the last axis shrinks."""
    elements = jnp.dtype(word).itemsize // x.dtype.itemsize
    if elements > 1:
        x = x.reshape(*x.shape[:-1], -1, elements)
    return lax.bitcast_convert_type(x, word)


def load_block_ids(
    tables_ref: Any, sequence: jax.Array, positions: jax.Array, is_read: jax.Array, block_size: int
) -> jax.Array:
    """Read the block of each token from a row of the table.

    Args:
      tables_ref: i32 ``[B, M]``.
      sequence: scalar, the row.
      positions: i32 ``[N]``, tokens of the sequence.
      is_read: bool ``[N]``; elsewhere the table is not read, and the id is 0.
      block_size: C.

    Returns:
      i32 ``[N]``. Load them one step ahead and carry them through the loop: a table read in the
      same step as the pool keeps Triton from pipelining the pool's loads more than two deep.
    """
    return plgpu.load(tables_ref.at[sequence, divide(positions, block_size)], mask=is_read, other=0)


def load_heads(
    pools: Pools | Pages,
    half: Half,
    layer: jax.Array,
    block_ids: jax.Array,
    head: jax.Array,
    positions: jax.Array,
    is_read: jax.Array,
    head_dim: int,
) -> jax.Array:
    """Gather one head of some tokens from a pool: a tile of K or of V.

    Args:
      pools: of refs; the lanes beyond D are padding.
      half: whether keys or values are gathered.
      layer, head: scalars.
      block_ids, positions: i32 ``[N]``, each token's block, and its place in the sequence.
      is_read: bool ``[N]``; the rows of other tokens are 0, whatever the pool holds.
      head_dim: D.

    Returns:
      ``[N, lanes]`` in the pool's type; lanes from D on are 0.
    """
    lanes = jnp.arange(num_lanes(head_dim), dtype=jnp.int32)[None]
    offsets = remainder(positions, pools.block_size)
    ref, row = pools.place(half, layer, block_ids[:, None], head, offsets[:, None])
    mask = is_read[:, None]
    if lanes.size != head_dim:
        mask = mask & (lanes < head_dim)
    return plgpu.load(ref.at[*row, lanes], mask=mask, other=jnp.zeros((), ref.dtype))


def load_scales(
    scale_ref: Any,
    layer: jax.Array,
    block_ids: jax.Array,
    head: jax.Array,
    positions: jax.Array,
    is_read: jax.Array,
) -> jax.Array | None:
    """Gather the scales of some tokens: f32 ``[N]`` from ``[L, P, K, C]``, or None from None."""
    if scale_ref is None:
        return None
    offsets = remainder(positions, scale_ref.shape[3])
    return plgpu.load(scale_ref.at[layer, block_ids, head, offsets], mask=is_read, other=0.0)


def fit_queries(q: Any, dtype: Any) -> tuple[Any, jax.Array | None]:
    """Queries in the type of the products, and the unit of each row, if it is not 1.

    The range of bfloat16 is not that of float16, so each row is multiplied by a power of two that
    takes its largest magnitude to 2**15 and more. Numbers of bfloat16 are then exact down to 2**-32
    times the largest of their row, and others off by 2**-40 of it at most.

    Args:
      q: ``[R, lanes]``, or a tuple of them, each of which holds some lanes of all rows.
      dtype: what `operand_dtype` says.

    Returns:
      ``(q, unit)``, with `q` in `dtype` and ``q * unit[:, None]`` the queries. The unit is f32
      ``[R]``, or None.
    """
    if dtype != jnp.float16 or jax.tree.leaves(q)[0].dtype == jnp.float16:
        return jax.tree.map(lambda q: q.astype(dtype), q), None
    q = jax.tree.map(lambda q: q.astype(jnp.float32), q)
    peaks = [jnp.max(jnp.abs(array), axis=1) for array in jax.tree.leaves(q)]
    unit = _power_of_two(_exponent(functools.reduce(jnp.maximum, peaks)))
    factor = _inverse(unit) * 2.0**15
    return jax.tree.map(lambda q: (q * factor[:, None]).astype(dtype), q), unit * 2.0**-15


# The exponent of a float32 number, the least power of two that `_power_of_two` gives, and the
# greatest. Zeros have one, what is computed with it does not vanish, and its inverse is normal.
_EXPONENT, _LEAST, _GREATEST = (
    int(np.float32(x).view(np.int32)) for x in (np.inf, 2.0**-100, 2.0**126)
)


def _exponent(x: jax.Array) -> jax.Array:
    """The bits of f32 numbers with only their exponent left, i32, which order as magnitudes do."""
    return lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_EXPONENT)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """The power of two that an `_exponent` is, 2**-100 at least."""
    bits = jnp.clip(exponent, jnp.int32(_LEAST), jnp.int32(_GREATEST))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _inverse(power: jax.Array) -> jax.Array:
    """1 over a power of two, which is exact, in one instruction."""
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
    """Scores of a tile of keys, and a positive factor that is left to `fold`.

    Args:
      q: ``[R, lanes]``, not scaled: scaling it would round it once more. Or a tuple.
      unit: None or f32 ``[R]``, what `fit_queries` returns beside `q`.
      k: ``[N, lanes]``, converted to the type of `q`. A tuple where `q` is.
      k_scale: None or f32 ``[N]``.
      is_seen: bool, ``[R, N]`` or ``[1, N]``.
      options: scale and soft cap.

    Returns:
      f32 ``[R, N]``, -inf where not seen; times the factor they are scores in log2. The factor is
      a number, or f32 ``[R]``.
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
) -> Softmax:
    """A softmax over no token yet.

    Args:
      rows, lanes: numbers of them; a tuple of numbers of lanes where values are a tuple.
      sinks: None, or ``[R]``, natural logits that count in the total and have no value;
        -inf for none.
      has_scales: whether values have scales.
    """
    unit = _power_of_two(jnp.int32(0)) if has_scales else None
    out = jax.tree.map(lambda n: jnp.zeros((rows, n), jnp.float32), lanes)
    if sinks is None:
        peak = jnp.full(rows, _LOWEST, jnp.float32)
        return Softmax(peak, jnp.zeros(rows, jnp.float32), out, unit)
    sinks = sinks.astype(jnp.float32)
    peak = jnp.maximum(sinks * math.log2(math.e), _LOWEST)
    return Softmax(peak, (sinks > -jnp.inf).astype(jnp.float32), out, unit)


# The largest weight of a softmax in float16, in log2. Scales exceed their unit by a factor of 2,
# and rounding in scores of up to 2**25 adds a factor of 4; float16 ends at 65504. Two numbers of
# it, a weight and its rest, are then off by 2**-23 of the weight, or by 2**-37 of the largest if
# that is more, times the largest scale so far: 131,072 of these add up to 2**-20.
_LIFT = 12.0


def fold(
    softmax: Softmax,
    scores: jax.Array,
    factor: float | jax.Array,
    v: Any,
    v_scale: jax.Array | None,
    weigh: Callable[[jax.Array, jax.Array], jax.Array],
    instructions: Instructions,
) -> Softmax:
    """Fold a tile of tokens into a softmax (Milakov and Gimelshein, 2018).

    Args:
      softmax: the softmax in progress of R rows.
      scores, factor: what `score` returns.
      v: ``[N, lanes]``, in the type of the products; or a tuple.
      v_scale: None or f32 ``[N]``.
      weigh: how the weights f32 ``[R, N]`` meet `v`: `weigh_rounded` or `weigh_exactly`.
      instructions: what the kernel computes with.
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
    return Softmax(peak, total, out, unit)


def finish(softmax: Softmax, options: Options) -> tuple[Any, jax.Array]:
    """Result f32 ``[R, lanes]`` and natural log-sum-exp f32 ``[R]``; 0 and -inf of no token."""
    is_empty = softmax.total == 0
    total = jnp.where(is_empty, 1.0, softmax.total)
    lse = softmax.peak * math.log(2) + jnp.log(total)
    factor = options.value_scale if softmax.unit is None else softmax.unit * options.value_scale
    out = jax.tree.map(lambda out: out * factor / total[:, None], softmax.out)
    return out, jnp.where(is_empty, -jnp.inf, lse)


def weigh_rounded(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Weighted sum of values with the weights rounded to their type: one dot."""
    return dot(weights.astype(v.dtype), v)


def weigh_exactly(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Weighted sum of values with float32 weights, whatever the type of the values.

    A half-precision weight keeps 8 or 11 bits of its mantissa; a second dot adds the next ones.
    """
    if v.dtype == jnp.float32:
        return dot(weights, v)
    return dot(weights.astype(v.dtype), v) + dot(_rest(weights, v.dtype).astype(v.dtype), v)


def weigh_by_copies(is_rest: jax.Array, weights: jax.Array, v: jax.Array) -> jax.Array:
    """As `weigh_exactly` in one dot, whose rows come in pairs that add up.

    Args:
      is_rest: bool ``[R]``: whether a row takes the next bits of its weights, or the first ones.
      weights: f32 ``[R, N]``, the same in both rows of a pair.
    """
    weights = jnp.where(is_rest[:, None], _rest(weights, v.dtype), weights)
    return dot(weights.astype(v.dtype), v)


def _rest(weights: jax.Array, dtype: Any) -> jax.Array:
    """What rounding to a type takes from float32 numbers."""
    return weights - weights.astype(dtype).astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of matrices of one type, in float32."""
    # Triton rounds float32 operands to TF32 (10 bits of mantissa) by default.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def divide(x: jax.Array, divisor: int) -> jax.Array:
    """``x // divisor`` of i32 numbers that are not negative; `//` would test their signs.

    The divisor is made an i32: as a Python integer it would be 64 bits wide under jax_enable_x64.
    """
    if divisor & (divisor - 1):
        return lax.div(x, jnp.full_like(x, divisor))
    return lax.shift_right_logical(x, jnp.full_like(x, divisor.bit_length() - 1))


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """``x % divisor`` of i32 numbers that are not negative, as `divide`."""
    if divisor & (divisor - 1):
        return lax.rem(x, jnp.full_like(x, divisor))
    return x & (divisor - 1)
