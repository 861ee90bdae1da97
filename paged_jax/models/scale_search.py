"""Search for the scales of 4-bit integers with the least squared error.

    int4     codes u in -8 .. 7     w = u * scale
    uint4    codes u in  0 .. 15    w = u * scale + min

The search rounds a group to the codes of several scales. For given codes, the best scale is a ratio
of two sums, and so is the error that it saves compared with a scale of 0::

    int4     scale = A / B    A = w . u                       B = u . u
    uint4    scale = A / B    A = n w . u - sum(w) sum(u)     B = n u . u - sum(u)**2
             saved = A * A / B                                (uint4: divided by n, the group size)

The search chooses the codes with the largest `saved`. Then the group is rounded again with the best
scale for these codes.

All backends and NumPy return equal bits, because the search computes with integers: a group is
multiplied by a power of two and rounded to 15 bits, so that all sums are exact in int32. The
remaining float operations are single multiplications, which are rounded everywhere alike.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

# Largest group that the search supports. The sums of larger groups need more than 32 bits.
MAX_GROUP = 32
# Bits of the integers that stand for the elements of a group.
_BITS = 15
# Smallest exponent of a group with scales other than 0.
_MIN_EXPONENT = -100
# Fractional bits of the scales of int4 and uint4, in units of these integers.
_INT4_FRACTION, _UINT4_FRACTION = 7, 1
# Quotients of the largest element of a group and a scale that the search for int4 tries, with both
# signs. The codes -8 .. 7 are not symmetric, so a negative scale represents some groups better.
_QUOTIENTS = np.linspace(5.6, 8.6, 8, dtype=np.float32)
# Parts of the range of a group, in 1/1024, that the search for uint4 cuts off at either end before
# it maps the rest to the codes 0 .. 15. More parts would lower the error by 2%.
_CUTS = tuple(cuts for cuts in itertools.product((0, 61, 123, 184), repeat=2) if sum(cuts) < 300)
# Number of times that the search for uint4 rounds a group again with the best scale.
_UINT4_ROUNDS = 2


class _Candidate(NamedTuple):
    """Candidate codes of each group, represented by the offset and scale that produce them.

    Attributes:
      offset: int32, the number of the code 0.
      inverse: float32, the inverse of the scale.
      projection: int32, the sum A.
      norm: int32, the sum B.
    """

    offset: Any
    inverse: Any
    projection: Any
    norm: Any


def search_int4(groups: Any) -> tuple[Any, Any]:
    """Return the codes of groups in -8 .. 7, and their scales.

    Args:
      groups: float32 ``[..., n]``, an array of NumPy or JAX.

    Returns:
      Codes int32 ``[..., n]`` and scales float32 ``[...]``. A scale may be negative.
    """
    xp = groups.__array_namespace__()
    integers, exponents = _as_integers(groups)
    largest = xp.maximum(xp.abs(integers).max(-1), 1)
    inverse, zero = _reciprocal(largest, 2 * _BITS - 2), xp.zeros_like(largest)
    best = functools.reduce(
        _better,
        (_fit_int4(integers, zero, inverse * each) for each in (*_QUOTIENTS, *-_QUOTIENTS)),
    )
    scales = _scales(best, _INT4_FRACTION)
    best = _better(best, _fit_int4(integers, zero, _inverse(scales, _INT4_FRACTION)))
    unit = _power_of_two(exponents - (_BITS + _INT4_FRACTION))
    codes = _round(integers, best.offset, best.inverse, -8, 7)
    return codes, _scales(best, _INT4_FRACTION).astype(np.float32) * unit


def search_uint4(groups: Any, scale_dtype: DTypeLike, min_dtype: DTypeLike) -> tuple[Any, Any, Any]:
    """Return the codes of groups in 0 .. 15, their scales and their minima.

    Args:
      groups: float32 ``[..., n]``, an array of NumPy or JAX.
      scale_dtype: dtype of the scales.
      min_dtype: dtype of the minima.

    Returns:
      Codes int32 ``[..., n]``, scales and minima ``[...]``.
    """
    size = groups.shape[-1]
    integers, exponents = _as_integers(groups)
    total = integers.sum(-1)
    best = functools.reduce(_better, (_fit_uint4(integers, *each) for each in _ranges(integers)))
    for _ in range(_UINT4_ROUNDS):
        scales = _scales(best, _UINT4_FRACTION)
        codes = _round(integers, best.offset, best.inverse, 0, 15)
        offset = (total - (scales * codes.sum(-1) >> _UINT4_FRACTION)) // size
        again = _fit_uint4(integers, offset, _inverse(scales, _UINT4_FRACTION))
        best = _better(best, again)
    codes = _round(integers, best.offset, best.inverse, 0, 15)
    unit = _power_of_two(exponents - (_BITS + _UINT4_FRACTION))
    scales = (_scales(best, _UINT4_FRACTION).astype(np.float32) * unit).astype(
        jnp.dtype(scale_dtype)
    )
    # Compute the minimum for the rounded scale. The products are exact in float32.
    total = total.astype(np.float32) * _power_of_two(exponents - _BITS)
    mins = total - codes.sum(-1).astype(np.float32) * scales.astype(np.float32)
    return codes, scales, (mins * np.float32(1 / size)).astype(jnp.dtype(min_dtype))


def _ranges(integers: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the offset and the inverse scale that map a part of the range of a group to 0 .. 15."""
    xp = integers.__array_namespace__()
    low, high = integers.min(-1), integers.max(-1)
    inverse = _reciprocal(xp.maximum(high - low, 1), 30)
    for first, last in _CUTS:
        offset = low + ((high - low) * first >> 10)
        yield offset, inverse * np.float32(15 * 1024 / (1024 - first - last))


def _as_integers(groups: Any) -> tuple[Any, Any]:
    """Return groups as int32, and the exponents of their largest elements."""
    xp = groups.__array_namespace__()
    _, exponents = xp.frexp(xp.abs(groups).max(-1))
    exponents = xp.maximum(exponents.astype(np.int32), _MIN_EXPONENT)
    scaled = groups * _power_of_two(_BITS - exponents)[..., None]
    return xp.rint(scaled).astype(np.int32), exponents


def _power_of_two(exponents: Any) -> Any:
    return ((exponents + 127) << 23).astype(np.int32).view(np.float32)


def _reciprocal(integers: Any, bits: int) -> Any:
    """Return ``1 / integers`` in float32. An integer division is the same on all backends."""
    return (2**bits // integers).astype(np.float32) * np.float32(2.0**-bits)


def _inverse(scales: Any, fraction: int) -> Any:
    xp = scales.__array_namespace__()
    inverse = _reciprocal(xp.maximum(xp.abs(scales), 1), 30) * np.float32(2**fraction)
    return xp.where(scales < 0, -inverse, inverse)


def _round(integers: Any, offset: Any, inverse: Any, low: int, high: int) -> Any:
    xp = integers.__array_namespace__()
    quotients = (integers - offset[..., None]).astype(np.float32) * inverse[..., None]
    return xp.clip(xp.rint(quotients), low, high).astype(np.int32)


def _fit_int4(integers: Any, offset: Any, inverse: Any) -> _Candidate:
    codes = _round(integers, offset, inverse, -8, 7)
    return _Candidate(offset, inverse, (integers * codes).sum(-1), (codes * codes).sum(-1))


def _fit_uint4(integers: Any, offset: Any, inverse: Any) -> _Candidate:
    codes, size = _round(integers, offset, inverse, 0, 15), integers.shape[-1]
    total = codes.sum(-1)
    projection = size * (integers * codes).sum(-1) - integers.sum(-1) * total
    return _Candidate(offset, inverse, projection, size * (codes * codes).sum(-1) - total * total)


def _better(first: _Candidate, second: _Candidate) -> _Candidate:
    """Return for each group the candidate that saves more error; the first if they are equal."""
    xp = first.norm.__array_namespace__()
    (a, b), (c, d) = ([x.astype(np.float32) for x in each[2:]] for each in (first, second))
    is_better = (c * c) * b > (a * a) * d
    return _Candidate(*(xp.where(is_better, y, x) for x, y in zip(first, second, strict=True)))


def _scales(candidate: _Candidate, fraction: int) -> Any:
    """Return the best scale for the codes of each group, int32 with fractional bits."""
    xp = candidate.norm.__array_namespace__()
    magnitude = (xp.abs(candidate.projection) << fraction) // xp.maximum(candidate.norm, 1)
    return xp.where(candidate.projection < 0, -magnitude, magnitude)
