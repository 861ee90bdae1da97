"""Conversion of floating-point matrices to quantised formats.

Every format of `paged_jax.kernels.weight_formats` maps the largest element of a group to its
largest number. The exceptions are int4 and, with minima, uint4 in groups of at most 32. For these,
a search finds the scales and minima with the least squared error.

Only weights are quantised, activations are not. Functions take and return arrays of NumPy or JAX.
All backends and NumPy return equal bits for 4-bit integers, because the search uses integers. For
other formats, NumPy and CPUs return equal bits. Other devices may divide less exactly.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.weight_formats import (
    CODES,
    INT8,
    PACKED_BYTES,
    PACKED_INPUTS,
    WeightArrays,
    WeightFormat,
)
from paged_jax.models.scale_search import MAX_GROUP, search_int4, search_uint4

Array = TypeVar("Array", np.ndarray, jax.Array)

# Elements in a chunk of `quantise_on_host`.
_CHUNK = 1 << 21


def quantise(w: Array, format: WeightFormat = INT8) -> WeightArrays:
    """Round a matrix to a quantised format. The inputs keep their order.

    Args:
      w: float32 ``[*out, in]``, an array of NumPy or JAX.
      format: the format; by default int8 with one scale per row. Its groups divide `in`.

    Returns:
      Arrays of the same library.

    Example:
      >>> values, scales, *_ = quantise(np.array([[1.0, -2.54], [0.0, 0.0]], np.float32))
      >>> values.tolist(), f"{scales[0, 0]:.3f}"
      ([[50, -127], [0, 0]], '0.020')
    """
    # A compiled function is traced only once for all matrices with this shape.
    return _compiled(w, format) if isinstance(w, jax.Array) else _quantise(w, format)


def _quantise(w: Any, format: WeightFormat) -> WeightArrays:
    xp = w.__array_namespace__()
    num_inputs = w.shape[-1]
    groups = w.reshape(*w.shape[:-1], -1, format.group_size or num_inputs)
    values, scales, mins = _round_groups(groups, format)
    values = values.reshape(w.shape)
    order = xp.arange(num_inputs, dtype=np.int32) if format.has_order else None
    return WeightArrays(_pack(values) if format.is_packed else values, scales, mins, order)


def _round_groups(groups: Any, format: WeightFormat) -> tuple[Any, Any, Any]:
    """Return values that are not packed, scales, and minima or None."""
    can_search = groups.shape[-1] <= MAX_GROUP
    dtype = jnp.dtype(format.scale_dtype)
    if can_search and format.code == "int4" and format.min_dtype is None:
        codes, scales = search_int4(groups)
        return (codes + 8).astype(np.uint8), scales.astype(dtype), None
    if can_search and format.code == "uint4" and format.min_dtype is not None:
        codes, scales, mins = search_uint4(groups, dtype, format.min_dtype)
        return codes.astype(np.uint8), scales, mins
    xp = groups.__array_namespace__()
    mins = None
    if format.min_dtype is not None:
        mins = groups.min(-1, keepdims=True).astype(jnp.dtype(format.min_dtype))
        groups = groups - mins.astype(np.float32)
    # Multiply by reciprocals, as XLA does for a division, so that NumPy and JAX give equal bits.
    # The lower bound of the scales keeps the reciprocal finite.
    largest = xp.abs(groups).max(-1, keepdims=True)
    scales = largest * np.float32(1 / _largest_number(format.code))
    scales = xp.maximum(scales, jnp.finfo(dtype).tiny).astype(dtype)
    values = _nearest_values(groups * (1 / scales.astype(np.float32)), format.code)
    return values, scales[..., 0], None if mins is None else mins[..., 0]


_compiled = jax.jit(_quantise, static_argnames="format")


def _pack(values: Any) -> Any:
    """Return the result of `pack`, computed by a sum.

    XLA's CPU backend fuses the operations of `pack` with the search for scales, and then computes
    the search several times.
    """
    halves = values.reshape(*values.shape[:-1], -1, 2, PACKED_BYTES)
    factors = np.array([1, 16], np.uint8).reshape(*(1,) * (halves.ndim - 2), 2, 1)
    packed = (halves * factors).sum(-2, dtype=np.uint8)
    return packed.reshape(*values.shape[:-1], -1)


def _largest_number(code: str) -> float:
    if code in CODES:
        return float(CODES[code].max())
    return 127 if code == "int8" else float(jnp.finfo(code).max)


def _nearest_values(numbers: Array, code: str) -> Array:
    """Return the values, not packed, with the nearest numbers of a code."""
    xp = numbers.__array_namespace__()
    if code == "int8":
        return xp.clip(xp.rint(numbers), -127, 127).astype(np.int8)
    if code not in CODES:
        largest = _largest_number(code)
        return xp.clip(numbers, -largest, largest).astype(jnp.dtype(code))
    order = np.argsort(CODES[code], kind="stable").astype(np.uint8)
    ascending = CODES[code][order]
    middles = (ascending[1:] + ascending[:-1]) / 2
    return xp.asarray(order)[xp.searchsorted(xp.asarray(middles), numbers)]


def quantise_on_host(w: np.ndarray, format: WeightFormat) -> WeightArrays:
    """Return the same arrays as `quantise`, computed by a compiled program on the host.

    Args:
      w: float32 ``[*out, in]``.
      format: the format.

    Returns:
      NumPy arrays.
    """
    size = format.group_size
    has_whole_groups = size is not None and size % PACKED_INPUTS == 0 and not format.has_order
    # All chunks have the same shape, so that a program is compiled only once. The last chunk has
    # unused rows at its end. If each group can be a row, all matrices share the program; otherwise,
    # all matrices with the same number of inputs share it.
    width = size if size is not None and has_whole_groups else w.shape[-1]
    rows = w.reshape(-1, width)
    out = WeightArrays(**{name: np.empty(*x) for name, x in format.shapes(rows.shape).items()})
    step = max(1, _CHUNK // width)
    chunk = np.zeros((step, width), np.float32)
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        chunk[: stop - start] = rows[start:stop]
        for whole, part in zip(out, _on_host(chunk, format), strict=True):
            if whole is not None and whole.ndim == 2:
                whole[start:stop] = np.asarray(part)[: stop - start]
            elif whole is not None:
                whole[...] = part
    return WeightArrays(
        *(x if x is None or x.ndim == 1 else x.reshape(*w.shape[:-1], -1) for x in out)
    )


def _on_host(chunk: np.ndarray, format: WeightFormat) -> WeightArrays:
    # The caller may forbid implicit transfers, and these stay on the host.
    with jax.transfer_guard("allow"), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return _compiled(chunk, format)
