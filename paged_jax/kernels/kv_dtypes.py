# pyright: strict, reportUnknownMemberType=false
"""The dtypes in which a cache stores keys and values: names, rounding, scales and bytes.

`KV_DTYPES` is the table of these dtypes, and all that depends on the dtype of a cache is asked from
its `KVDtype`. The backends ``"xla"`` and ``"reference"`` support every dtype of the table. Other
backends have kernels for some of the dtypes; `Backend.refusal` says for which.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from paged_jax.formatting import listed


@dataclass(frozen=True)
class KVDtype:
    """A dtype of keys and values, with the rules for storing them in it.

    If `largest` is None, keys and values are cast. Otherwise they are quantised: each row (the key
    or the value of a token and KV head) is divided by a float32 scale, so that its largest element
    becomes `largest`, and then rounded.

    Attributes:
      name: name in the option `kv_dtype` of engines.
      values: dtype of the pools.
      largest: magnitude that the largest element of a row is scaled to, at most the largest number
        of `values`; None for dtypes without scales.
    """

    name: str
    values: Any
    largest: float | None = None

    @classmethod
    def of(cls, dtype: DTypeLike) -> "KVDtype":
        """Return the record for the dtype of pools or pages.

        Floating-point dtypes that are not in `KV_DTYPES`, such as float64, have no scales.

        Raises:
          ValueError: keys and values cannot be stored in this dtype.
        """
        return check_pool_dtype("KVDtype.of", "dtype", dtype)

    @property
    def has_scales(self) -> bool:
        """Whether each row has a scale."""
        return self.largest is not None

    @property
    def query_dtype(self) -> Any:
        """Dtype of the queries that a model passes to the attention ops.

        It is the dtype of the pools, or bfloat16 for quantised pools, which bfloat16 represents
        exactly. Models compute in float32, but tensor cores and matrix units multiply float32
        slowly or not at all.

        Example:
          >>> [KVDtype.of(dtype).query_dtype.name for dtype in ("float32", "float16", "int8")]
          ['float32', 'float16', 'bfloat16']
        """
        return cast(Any, jnp.dtype(jnp.bfloat16)) if self.has_scales else self.values

    def matmul_dtype(self, q_dtype: DTypeLike) -> Any:
        """Return the dtype for the matmul of queries of a dtype and keys.

        It is the wider dtype of both. For quantised pools it is `q_dtype`, because bfloat16 and
        float16 represent their values exactly.
        """
        return jnp.dtype(q_dtype) if self.has_scales else wider_dtype(q_dtype, self.values)

    def row_bytes(self, num_elements: int) -> int:
        """Return the bytes of a key or value with this number of elements, including its scale.

        Example:
          >>> [KVDtype.of(dtype).row_bytes(128) for dtype in ("float32", "bfloat16", "int8")]
          [512, 256, 132]
        """
        return num_elements * self.values.itemsize + self.scale_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of a row; 0 if rows have no scales."""
        return SCALE_DTYPE.itemsize if self.has_scales else 0

    def quantise(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Round rows to this dtype; see `dequantise` for the inverse.

        Args:
          x: floating point ``[..., D]``.

        Returns:
          ``(values, scale)``: the rounded rows ``[..., D]``, and the scales, f32 ``[...]``, or None
          for dtypes without scales. The scale of a row of zeros is 1.
        """
        if self.largest is None:
            return x.astype(self.values), None
        x = x.astype(jnp.float32)
        scale = self._scale_of_peak(jnp.max(jnp.abs(x), axis=-1))
        # Multiply by the inverse of the scale instead of dividing by it, as in `_scale_of_peak`, so
        # that all compilers give the same bits.
        scaled = jnp.clip(x * (1 / scale)[..., None], -self.largest, self.largest)
        return self._round(scaled, jnp.round), scale

    def quantise_parts(self, parts: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """Quantise rows like `quantise`, with operations that Pallas supports on GPUs.

        Args:
          parts: the rows, split along the last dimension: consecutive floating point arrays
            ``[N, x]``.

        Returns:
          ``(parts, scale)``: the quantised parts, and the scale of each row, f32 ``[N]``.
        """
        assert self.largest is not None
        largest, parts = self.largest, [part.astype(jnp.float32) for part in parts]
        peaks = [jnp.max(jnp.abs(part), axis=1) for part in parts]
        scale = self._scale_of_peak(functools.reduce(jnp.maximum, peaks))
        inverse = 1 / scale

        def rounded(part: jax.Array) -> jax.Array:
            scaled = part * lax.broadcast_in_dim(inverse, part.shape, [0])
            scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
            return self._round(scaled, round_half_to_even)

        return [rounded(part) for part in parts], scale

    def dequantise(
        self, values: jax.Array, scale: jax.Array | None, dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        """Compute keys or values in a floating-point dtype from stored rows and their scales.

        Args:
          values: ``[..., D]``, rows of a pool or of pages.
          scale: f32 ``[...]``, the scale of each row; None if there are no scales.
          dtype: dtype of the result.
        """
        values = values.astype(dtype)
        return values if scale is None else values * scale.astype(dtype)[..., None]

    def saturate(self, x: jax.Array) -> jax.Array:
        """Round numbers to this dtype without a scale, and clip them to its range."""
        is_integer = jnp.issubdtype(self.values, jnp.integer)
        limits = cast(Any, (jnp.iinfo if is_integer else jnp.finfo)(self.values))
        return self._round(jnp.clip(x, float(limits.min), float(limits.max)), jnp.round)

    def _round(self, x: jax.Array, round: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Cast numbers that are in the range of the dtype; `round` rounds them to integers."""
        return (round(x) if jnp.issubdtype(self.values, jnp.integer) else x).astype(self.values)

    def _scale_of_peak(self, peak: jax.Array) -> jax.Array:
        """Return the f32 scale of each row; 1 for rows of zeros.

        The peak is multiplied by the float32 number nearest to ``1 / largest``. A division would
        give different bits in different compilers: XLA replaces it by this multiplication, and
        Triton by an approximate division.

        Args:
          peak: f32 of any shape, the largest magnitude of each row.
        """
        assert self.largest is not None
        return jnp.where(peak > 0, peak * np.float32(1 / self.largest), 1.0)


# Dtype of the scales of quantised pools.
SCALE_DTYPE = np.dtype(np.float32)

# The dtypes that a cache may have, by their names in options.
KV_DTYPES: Mapping[str, KVDtype] = {
    kv.name: kv
    for kv in (
        KVDtype("float32", jnp.dtype(jnp.float32)),
        KVDtype("bfloat16", jnp.dtype(jnp.bfloat16)),
        KVDtype("float16", jnp.dtype(jnp.float16)),
        KVDtype("int8", jnp.dtype(jnp.int8), largest=127.0),
        KVDtype("fp8", jnp.dtype(jnp.float8_e4m3fn), largest=448.0),
    )
}
# The dtypes of quantised pools.
QUANTISED = tuple(kv.values for kv in KV_DTYPES.values() if kv.has_scales)


@functools.cache
def _find(dtype: Any) -> KVDtype | None:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    float_dtypes = [KVDtype(dtype.name, dtype)] if is_float else []
    return next((kv for kv in (*KV_DTYPES.values(), *float_dtypes) if kv.values == dtype), None)


def check_pool_dtype(function: str, name: str, dtype: DTypeLike) -> KVDtype:
    """Check that pools or pages may have this dtype, and return its record.

    `function` and `name` are the function and its argument, for the error message.

    Raises:
      ValueError: the dtype is neither floating point nor in `KV_DTYPES`.
    """
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:  # such as "fp8"
        parsed = None
    kv = None if parsed is None else _find(parsed)
    if kv is None:
        supported = listed("floating point", *(kv_dtype.name for kv_dtype in QUANTISED))
        got = repr(dtype) if parsed is None else parsed.name
        raise ValueError(f"{function}: {name} must be {supported}, got {got}.")
    return kv


def wider_dtype(a: DTypeLike, b: DTypeLike) -> Any:
    """Return the dtype that two dtypes promote to, even if strict dtype promotion is enabled."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def quantise(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Round each row of an array to the dtype of a quantised pool, with one scale per row.

    Args:
      x: floating point ``[..., D]``.
      dtype: int8 or float8_e4m3fn.

    Returns:
      ``(values, scale)``: `dtype` ``[..., D]`` and f32 ``[...]``. ``values * scale[..., None]``
      approximates `x`, with 255 levels for int8 and 3 bits of mantissa for fp8. The element of
      largest magnitude in each row is exact, except for rounding in float32. The scale of a row of
      zeros is 1.

    Raises:
      ValueError: pools of this dtype have no scales.

    Example:
      >>> values, scale = quantise(jnp.array([1.0, -2.0, 0.5]), jnp.int8)
      >>> values.tolist(), round(float(scale), 5)
      ([64, -127, 32], 0.01575)
    """
    values, scale = check_pool_dtype("quantise", "dtype", dtype).quantise(x)
    if scale is None:
        names = listed(*(kv_dtype.name for kv_dtype in QUANTISED))
        raise ValueError(f"quantise: dtype must be {names}, got {values.dtype}.")
    return values, scale


def round_half_to_even(x: jax.Array) -> jax.Array:
    """Round numbers in the range of i32 like `jnp.round`, and return them as i32.

    It is not enough to add 1.5 * 2**23 and subtract it again, because compilers remove both
    operations.
    """
    integer = jnp.abs(x).astype(jnp.int32)
    fraction = jnp.abs(x) - integer.astype(x.dtype)  # exact
    is_up = (fraction > 0.5) | ((fraction == 0.5) & (integer & 1 == 1))
    rounded = integer + is_up.astype(jnp.int32)
    return jnp.where(x < 0, -rounded, rounded)
