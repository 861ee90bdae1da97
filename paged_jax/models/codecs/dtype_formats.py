"""Formats of the option `dtype`, such as int4: floats that are quantised while they are loaded.

`DTYPE_FORMATS` lists the formats, and `quantise` converts a matrix to one of them, or to another
format of `paged_jax.kernels.weight_formats`. To add a format, add its entry here, and its code
there if it is new.

In most formats of `paged_jax.kernels.weight_formats`, the scale of a group maps its largest element
to the largest number of the format. So the rounding error of int8 is at most half of the scale. The
exceptions are int4, and uint4 with minima, both in groups of at most 32. For them, a search
minimises the squared error over several scales and minima::

    int4     codes u in -8 .. 7     w = u * scale
    uint4    codes u in  0 .. 15    w = u * scale + min

The search rounds a group to codes with each of several candidate scales. For given codes, there are
formulas for the best scale, and for `saved`, the squared error that it saves compared with a scale
of 0::

    int4     scale = A / B    A = w . u                       B = u . u
    uint4    scale = A / B    A = n w . u - sum(w) sum(u)     B = n u . u - sum(u)**2
             saved = A * A / B                                (uint4: divided by n, the group size)

The search keeps the codes with the largest `saved`. It then rounds the group again with the best
scale for these codes, and keeps the new codes if their `saved` is larger. For uint4, it repeats
this once.

Scales of two levels (an int8 number per group, times a float32 factor per section) are chosen as
floats first. They are then rounded, and the values are rounded again.

Only weights are quantised, not activations. The functions take and return arrays of NumPy or JAX.
For 4-bit integers, all JAX backends and NumPy return the same bits, because the search uses
integers: a group is multiplied by a power of two and rounded to 15 bits, so that all sums are exact
in int32. The other float operations are single multiplications, which every backend rounds in the
same way. For the other formats, NumPy and CPUs return the same bits, but divisions on other devices
may be less exact.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paged_jax.kernels.weight_formats import (
    CODES,
    INT8,
    WeightArrays,
    WeightFormat,
    convert,
    dequantise,
    num_bits,
)
from paged_jax.kernels.weight_packing import (
    PACKED_BYTES,
    PACKED_INPUTS,
    SECTION_INPUTS,
    pack,
    scale_floats,
    store_scales,
)

Array = TypeVar("Array", np.ndarray, jax.Array)

# Number of elements that `quantise_on_host` converts per call of its program. The temporary memory
# of the search is about ten times this number of float32 values.
_CHUNK = 1 << 18
# Largest group size that the search supports. Sums over larger groups would overflow 32 bits.
_MAX_GROUP = 32
# Number of bits of the integers to which the search scales and rounds the elements of a group.
_BITS = 15
# Lower bound of a group's exponent. With it, all powers of two in the search are normal float32
# numbers. If all elements of a group are below 2**-116, its scale becomes 0.
_MIN_EXPONENT = -100
# Number of fractional bits of the search's fixed-point scales, for int4 and for uint4. The unit of
# these scales is one step of the `_BITS`-bit integers that represent the elements.
_INT4_FRACTION, _UINT4_FRACTION = 7, 1
# The search for int4 tries these values of (largest element of the group) / scale, with both signs.
# Negative scales represent some groups better, because the codes -8 .. 7 are not symmetric.
_QUOTIENTS = np.linspace(5.6, 8.6, 8, dtype=np.float32)
# Pairs of fractions, in units of 1/1024. The search for uint4 cuts off these fractions of a group's
# range at the lower and the upper end, and maps the rest to the codes 0 .. 15. More pairs would
# lower the error by 2%.
_CUTS = tuple(cuts for cuts in itertools.product((0, 61, 123, 184), repeat=2) if sum(cuts) < 300)
# Number of times that the search for uint4 rounds a group again with the best scale found so far.
_UINT4_ROUNDS = 2


# Formats of the large matrices, by the value of the option `dtype`. The output head is always int8,
# because errors in it matter most. int8 is used instead of int4 if a matrix's number of inputs (on
# each device) is not a multiple of the group size.
DTYPE_FORMATS = {
    "int8": INT8,
    "fp8": WeightFormat("float8_e4m3fn", None, "float32"),
    "int4": WeightFormat("uint4", 32, "float16", "float16"),
    "int4-symmetric": WeightFormat("int4", 32, "bfloat16"),
}


def fits(format: WeightFormat, num_inputs: int) -> bool:
    """Return whether `num_inputs` inputs consist of whole groups, packed bytes and sections."""
    return num_inputs % format.unit == 0


def name_of(dtype: DTypeLike) -> str:
    """Return the name of a dtype or of a quantised format in `DTYPE_FORMATS`.

    Example:
      >>> name_of("int4"), name_of(jnp.float8_e4m3fn), name_of(jnp.bfloat16)
      ('int4', 'fp8', 'bfloat16')
    """
    if isinstance(dtype, str) and dtype in DTYPE_FORMATS:
        return dtype
    name = jnp.dtype(dtype).name
    return "fp8" if name == DTYPE_FORMATS["fp8"].code else name


def float_type(dtype: DTypeLike, config_dtype: DTypeLike) -> np.dtype:
    """Return `dtype`, or `config_dtype` if `dtype` is a quantised format in `DTYPE_FORMATS`."""
    return jnp.dtype(config_dtype if name_of(dtype) in DTYPE_FORMATS else dtype)


def quantise(w: Array, format: WeightFormat = DTYPE_FORMATS["int8"]) -> WeightArrays:
    """Quantise a matrix without reordering its columns.

    Args:
      w: float32 ``[*out, in]``, an array of NumPy or JAX.
      format: quantised format; by default int8 with one scale per row. `in` must be a multiple of
        `format.unit`.

    Returns:
      The arrays of the quantised matrix. They are NumPy arrays if `w` is one, otherwise JAX arrays.

    Example:
      >>> values, scales, *_ = quantise(np.array([[1.0, -2.54], [0.0, 0.0]], np.float32))
      >>> values.tolist(), f"{scales[0, 0]:.3f}"
      ([[50, -127], [0, 0]], '0.020')
    """
    # The compiled function is traced once for each shape and format.
    return _compiled(w, format) if isinstance(w, jax.Array) else _quantise(w, format)


def _quantise(w: Any, format: WeightFormat) -> WeightArrays:
    if format.has_sections:
        return _quantise_in_sections(w, format)
    xp = w.__array_namespace__()
    num_inputs = w.shape[-1]
    groups = w.reshape(*w.shape[:-1], -1, format.group_size or num_inputs)
    values, scales, mins = _round_groups(groups, format)
    values = values.reshape(w.shape)
    order = xp.arange(num_inputs, dtype=np.int32) if format.has_order else None
    return WeightArrays(_pack(values, format), scales, mins, order)


def _quantise_in_sections(w: Any, format: WeightFormat) -> WeightArrays:
    """Quantise to a format with scales or minima of two levels, see `weight_formats`.

    First choose float scales and minima, and round them to two levels. Then round the values with
    these scales and minima.
    """
    num_inputs = w.shape[-1]
    first = _quantise(w, replace(format.widened, code=format.code))
    scales = store_scales(first.scales, format.scale_dtype, num_inputs)
    mins = store_scales(first.mins, format.min_dtype, num_inputs)
    xp, own_scales = w.__array_namespace__(), scale_floats(scales, num_inputs)
    groups = w.reshape(*own_scales.shape, -1)
    if mins is not None:
        groups = groups - scale_floats(mins, num_inputs)[..., None]
    inverse = xp.where(own_scales == 0, np.float32(0), 1 / xp.where(own_scales == 0, 1, own_scales))
    values = _nearest_values(groups * inverse[..., None], format.code).reshape(w.shape)
    return first._replace(values=_pack(values, format), scales=scales, mins=mins)


def _round_groups(groups: Any, format: WeightFormat) -> tuple[Any, Any, Any]:
    """Quantise groups ``[..., n]``; return unpacked values, scales, and minima or None."""
    can_search = groups.shape[-1] <= _MAX_GROUP
    dtype = jnp.dtype(format.scale_dtype)
    if can_search and format.code == "int4" and format.min_dtype is None:
        codes, scales = _search_int4(groups)
        return (codes + 8).astype(np.uint8), scales.astype(dtype), None
    if can_search and format.code == "uint4" and format.min_dtype is not None:
        codes, scales, mins = _search_uint4(groups, dtype, format.min_dtype)
        return codes.astype(np.uint8), scales, mins
    xp = groups.__array_namespace__()
    mins = None
    if format.min_dtype is not None:
        mins = groups.min(-1, keepdims=True).astype(jnp.dtype(format.min_dtype))
        groups = groups - mins.astype(np.float32)
    # Multiply by the reciprocal instead of dividing. XLA replaces divisions in this way, so NumPy
    # would otherwise give different bits. Scales have a lower bound, so reciprocals are finite.
    largest = xp.abs(groups).max(-1, keepdims=True)
    scales = largest * np.float32(1 / _largest_number(format.code))
    scales = xp.maximum(scales, jnp.finfo(dtype).tiny).astype(dtype)
    values = _nearest_values(groups * (1 / scales.astype(np.float32)), format.code)
    return values, scales[..., 0], None if mins is None else mins[..., 0]


_compiled = jax.jit(_quantise, static_argnames="format")


def _pack(values: Any, format: WeightFormat) -> Any:
    """Pack values if the format packs them, with the same result as `weight_packing.pack`.

    4-bit values are packed with a sum. XLA's CPU backend would fuse the shifts of `pack` with the
    search for scales, and compute the search several times.
    """
    if not format.is_packed:
        return values
    if (bits := num_bits(format.code)) != 4:
        return pack(values, bits)
    halves = values.reshape(*values.shape[:-1], -1, 2, PACKED_BYTES)
    factors = np.array([1, 16], np.uint8).reshape(*(1,) * (halves.ndim - 2), 2, 1)
    packed = (halves * factors).sum(-2, dtype=np.uint8)
    return packed.reshape(*values.shape[:-1], -1)


def _largest_number(code: str) -> float:
    if code in CODES:
        return float(CODES[code].max())
    return 127 if code == "int8" else float(jnp.finfo(code).max)


def _nearest_values(weights: Array, code: str) -> Array:
    """Round each number to the nearest number that `code` represents.

    Return the stored values of these numbers, not packed.
    """
    xp = weights.__array_namespace__()
    if code == "int8":
        return xp.clip(xp.rint(weights), -127, 127).astype(np.int8)
    if code not in CODES:
        largest = _largest_number(code)
        return xp.clip(weights, -largest, largest).astype(jnp.dtype(code))
    order = np.argsort(CODES[code], kind="stable").astype(np.uint8)
    ascending = CODES[code][order]
    middles = (ascending[1:] + ascending[:-1]) / 2
    return xp.asarray(order)[xp.searchsorted(xp.asarray(middles), weights)]


def change_format(
    arrays: WeightArrays, source: WeightFormat, target: WeightFormat, *, is_stacked: bool = False
) -> WeightArrays:
    """Convert a quantised matrix to another format.

    If `target` is `source.widened`, nothing is rounded. Otherwise, the matrix is dequantised and
    quantised again. If `is_stacked` is True, the first dimension of the arrays is the layer.
    """

    def change(arrays: WeightArrays) -> WeightArrays:
        if target == source.widened:
            return convert(arrays, source, target)
        w = dequantise(arrays, source.code)
        if target.is_quantised:
            return quantise(w, target)
        return WeightArrays(w.astype(jnp.dtype(target.code)))

    return jax.vmap(change)(arrays) if is_stacked else change(arrays)


def quantise_on_host(w: np.ndarray, format: WeightFormat) -> WeightArrays:
    """Quantise a NumPy matrix like `quantise`, but with a compiled function on the host's CPU.

    Args:
      w: float32 ``[*out, in]``.
      format: quantised format.

    Returns:
      The arrays of the quantised matrix, as NumPy arrays.
    """
    size = format.group_size
    if format.has_sections:
        size = SECTION_INPUTS
    has_whole_groups = size is not None and size % PACKED_INPUTS == 0 and not format.has_order
    # All chunks of a matrix have the same shape, so that they share one compiled function. Unused
    # rows at the end of the last chunk are ignored. If the format allows it, the matrix is reshaped
    # so that each row is a group or section. The chunk's shape then depends only on the format, so
    # matrices with other numbers of inputs share the compiled function.
    width = size if size is not None and has_whole_groups else w.shape[-1]
    rows = w.reshape(-1, width)
    out = WeightArrays(**{name: np.empty(*x) for name, x in format.shapes(rows.shape).items()})
    step = max(1, _CHUNK // width)
    chunk = np.zeros((step, width), np.float32)
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        chunk[: stop - start] = rows[start:stop]
        for array, chunk_array in zip(out, _on_host(chunk, format), strict=True):
            if array is not None and array.ndim == 2:
                array[start:stop] = np.asarray(chunk_array)[: stop - start]
            elif array is not None:
                array[...] = chunk_array
    return WeightArrays(
        *(x if x is None or x.ndim == 1 else x.reshape(*w.shape[:-1], -1) for x in out)
    )


def _on_host(chunk: np.ndarray, format: WeightFormat) -> WeightArrays:
    # Allow transfers here, because the caller may have forbidden implicit transfers. They only copy
    # between NumPy and the CPU backend.
    with jax.transfer_guard("allow"), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _compiled(chunk, format)


class _Candidate(NamedTuple):
    """Candidate codes of each group, represented by the offset and scale that produce them.

    Attributes:
      offset: int32, number that the code 0 represents.
      inverse: float32, reciprocal of the scale.
      projection: int32, sum A in the formulas of this module's docstring.
      norm: int32, sum B in these formulas.
    """

    offset: Any
    inverse: Any
    projection: Any
    norm: Any


def _search_int4(groups: Any) -> tuple[Any, Any]:
    """Search int4 codes (-8 .. 7) and scales that approximate groups of weights.

    The groups are float32 ``[..., n]``. The module docstring describes the search.

    Returns:
      Codes int32 ``[..., n]`` and scales float32 ``[...]``. A scale may be negative.
    """
    xp = groups.__array_namespace__()
    integers, exponents = _as_integers(groups)
    largest = xp.maximum(xp.abs(integers).max(-1), 1)
    inverse, zero = _reciprocal(largest, 2 * _BITS - 2), xp.zeros_like(largest)
    best = functools.reduce(
        _better,
        (_fit_int4(integers, zero, inverse * quotient) for quotient in (*_QUOTIENTS, *-_QUOTIENTS)),
    )
    scales = _scales(best, _INT4_FRACTION)
    best = _better(best, _fit_int4(integers, zero, _inverse(scales, _INT4_FRACTION)))
    unit = _power_of_two(exponents - (_BITS + _INT4_FRACTION))
    codes = _round(integers, best.offset, best.inverse, -8, 7)
    return codes, _scales(best, _INT4_FRACTION).astype(np.float32) * unit


def _search_uint4(
    groups: Any, scale_dtype: DTypeLike, min_dtype: DTypeLike
) -> tuple[Any, Any, Any]:
    """Search uint4 codes (0 .. 15), scales and minima that approximate groups of weights.

    The groups are float32 ``[..., n]``. The module docstring describes the search.

    Returns:
      Codes int32 ``[..., n]``, scales ``[...]`` of `scale_dtype`, and minima ``[...]`` of
      `min_dtype`.
    """
    size = groups.shape[-1]
    integers, exponents = _as_integers(groups)
    total = integers.sum(-1)
    best = functools.reduce(
        _better, (_fit_uint4(integers, *bounds) for bounds in _ranges(integers))
    )
    for _ in range(_UINT4_ROUNDS):
        scales = _scales(best, _UINT4_FRACTION)
        codes = _round(integers, best.offset, best.inverse, 0, 15)
        offset = (total - (scales * codes.sum(-1) >> _UINT4_FRACTION)) // size
        refit = _fit_uint4(integers, offset, _inverse(scales, _UINT4_FRACTION))
        best = _better(best, refit)
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
    """Yield the offset and reciprocal scale of each candidate of the uint4 search.

    There is one candidate for each pair of fractions in `_CUTS`. The fractions are cut off the
    lower and the upper end of a group's range. The rest of the range is mapped to 0 .. 15.
    """
    xp = integers.__array_namespace__()
    low, high = integers.min(-1), integers.max(-1)
    inverse = _reciprocal(xp.maximum(high - low, 1), 30)
    for first, last in _CUTS:
        offset = low + ((high - low) * first >> 10)
        yield offset, inverse * np.float32(15 * 1024 / (1024 - first - last))


def _as_integers(groups: Any) -> tuple[Any, Any]:
    """Convert groups to int32, with an exponent for each group.

    The integers are ``groups * 2**(_BITS - exponent)``, rounded.

    Returns:
      The integers int32 ``[..., n]``, and the exponents int32 ``[...]``.
    """
    xp = groups.__array_namespace__()
    _, exponents = xp.frexp(xp.abs(groups).max(-1))
    exponents = xp.maximum(exponents.astype(np.int32), _MIN_EXPONENT)
    scaled = groups * _power_of_two(_BITS - exponents)[..., None]
    return xp.rint(scaled).astype(np.int32), exponents


def _power_of_two(exponents: Any) -> Any:
    return ((exponents + 127) << 23).astype(np.int32).view(np.float32)


def _reciprocal(integers: Any, bits: int) -> Any:
    """Return ``1 / integers`` as float32, rounded down to `bits` fractional bits.

    The division is an integer division, because NumPy and JAX may round float divisions
    differently.
    """
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
    """For each group, return the candidate with the larger `saved`, see the module docstring.

    If both are equal, return `first`.
    """
    xp = first.norm.__array_namespace__()
    (a, b), (c, d) = (
        [x.astype(np.float32) for x in candidate[2:]] for candidate in (first, second)
    )
    is_better = (c * c) * b > (a * a) * d
    return _Candidate(*(xp.where(is_better, y, x) for x, y in zip(first, second, strict=True)))


def _scales(candidate: _Candidate, fraction: int) -> Any:
    """Return the best scale of each group for its codes, as a fixed-point number.

    The scales are int32 with `fraction` fractional bits.
    """
    xp = candidate.norm.__array_namespace__()
    magnitude = (xp.abs(candidate.projection) << fraction) // xp.maximum(candidate.norm, 1)
    return xp.where(candidate.projection < 0, -magnitude, magnitude)
