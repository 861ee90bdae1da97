# pyright: strict, reportUnknownMemberType=false
"""KV pools and their format: dtypes, int8 and fp8 quantisation, padding of the last dimension."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

# Keys or values.
Half = Literal["k", "v"]

# Maps the dtypes of quantised pools to the largest magnitude that each dtype represents.
QUANTISED: dict[Any, float] = {
    jnp.dtype(jnp.int8): 127.0,
    jnp.dtype(jnp.float8_e4m3fn): 448.0,
}

# Number of lanes of a TPU register. A TPU moves this number of elements of the last dimension at a
# time.
LANES = 128
# Number of sublanes of a TPU register. A sublane is a row of 128 lanes with 32 bits each.
SUBLANES = 8


class Pages(NamedTuple):
    """Keys and values of a layer in a single array, with the layout of JAX's ragged TPU kernel.

    Attributes:
      kv: ``[P, C, 2 * K, D]``, floating point or int8. Each token has the key of head 0, its value,
        the key of head 1, its value, and so on. Pages ``[P, C, 1, D]`` have the keys of a single KV
        head. Each value vector is then the beginning of its key vector.
    """

    kv: jax.Array

    # Pages have no scales per token. Instead, `ragged_paged_attention` has one factor for all keys,
    # and one factor for all values.
    k_scale = None
    v_scale = None
    is_quantised = False

    @property
    def dtype(self) -> Any:
        """Dtype of keys and values."""
        return self.kv.dtype

    @property
    def num_blocks(self) -> int:
        """Number of pages (P)."""
        return self.kv.shape[0]

    @property
    def shares_values(self) -> bool:
        """Whether each value vector is the beginning of its key vector (latent attention)."""
        return self.kv.shape[2] == 1

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads (K)."""
        return max(self.kv.shape[2] // 2, 1)

    @property
    def block_size(self) -> int:
        """Number of tokens in a page (C)."""
        return self.kv.shape[1]

    def map(self, function: Callable[[Any], Any]) -> "Pages":
        """Return new pages with a function applied to `kv`."""
        return Pages(function(self.kv))

    def place(self, half: Half, layer: Any, block: Any, head: Any, offset: Any) -> tuple[Any, Any]:
        """Return `kv`, and the index in `kv` at which the keys or values of tokens are stored.

        `half` is ``"k"`` or ``"v"``. `offset` is an offset in the page, or a range of offsets.
        """
        del layer  # pages have a single layer
        if self.shares_values:
            return self.kv, (block, offset, head)
        return self.kv, (block, offset, 2 * head + (1 if half == "v" else 0))


def is_quantised(dtype: DTypeLike) -> bool:
    """Return whether a pool of this dtype has scales."""
    return jnp.dtype(dtype) in QUANTISED


def check_pool_dtype(function: str, name: str, dtype: DTypeLike) -> None:
    """Check that a pool may have this dtype.

    `function` and `name` are the function and its argument, for the error message.

    Raises:
      ValueError: the dtype is neither floating point nor in `QUANTISED`.
    """
    try:
        given = jnp.dtype(dtype).name
    except TypeError:  # such as "fp8"
        given = None
    if given is None or not (jnp.issubdtype(dtype, jnp.floating) or is_quantised(dtype)):
        raise ValueError(
            f"{function}: {name} must be floating point, int8 or float8_e4m3fn, "
            f"got {given or repr(dtype)}."
        )


def matmul_dtype(q_dtype: DTypeLike, pool_dtype: DTypeLike) -> Any:
    """Return the dtype for the matmul of queries and keys.

    It is the wider dtype of both. For a quantised pool it is `q_dtype`, because bfloat16 and
    float16 represent int8 and e4m3 values exactly.
    """
    if is_quantised(pool_dtype):
        return jnp.dtype(q_dtype)
    return wider_dtype(q_dtype, pool_dtype)


def query_dtype(pool_dtype: DTypeLike) -> Any:
    """Return the dtype of the queries that a model passes to the attention ops.

    It is the dtype of the pool, or bfloat16 for a quantised pool. Models compute in float32, but
    tensor cores and matrix units multiply float32 slowly or not at all.

    Example:
      >>> [query_dtype(dtype).name for dtype in ("float32", "float16", "int8")]
      ['float32', 'float16', 'bfloat16']
    """
    return cast(Any, jnp.dtype(jnp.bfloat16 if is_quantised(pool_dtype) else pool_dtype))


def wider_dtype(a: DTypeLike, b: DTypeLike) -> Any:
    """Return the dtype that two dtypes promote to, even if strict dtype promotion is enabled."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def scale_of_peak(peak: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the f32 scale for quantising each row; 1 for rows of zeros.

    The peak is multiplied by the float32 number nearest to ``1 / 127`` or ``1 / 448``. A division
    would give different bits in different compilers: XLA replaces it by this multiplication, and
    Triton by an approximate division.

    Args:
      peak: f32 of any shape, the largest magnitude of each row.
      dtype: int8 or float8_e4m3fn.
    """
    return jnp.where(peak > 0, peak * np.float32(1 / QUANTISED[jnp.dtype(dtype)]), 1.0)


def quantise(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Round each row of an array to int8 or fp8, with one scale per row.

    Args:
      x: floating point ``[..., D]``.
      dtype: int8 or float8_e4m3fn.

    Returns:
      ``(values, scale)``: `dtype` ``[..., D]`` and f32 ``[...]``. ``values * scale[..., None]``
      approximates `x`, with 255 levels for int8 and 3 bits of mantissa for fp8. The element of
      largest magnitude in each row is exact, except for rounding in float32. The scale of a row of
      zeros is 1.

    Example:
      >>> values, scale = quantise(jnp.array([1.0, -2.0, 0.5]), jnp.int8)
      >>> values.tolist(), round(float(scale), 5)
      ([64, -127, 32], 0.01575)
    """
    dtype = jnp.dtype(dtype)
    largest = QUANTISED[dtype]
    x = x.astype(jnp.float32)
    scale = scale_of_peak(jnp.max(jnp.abs(x), axis=-1), dtype)
    # Multiply by the inverse of the scale instead of dividing by it, as in `scale_of_peak`, so that
    # all compilers give the same bits.
    scaled = jnp.clip(x * (1 / scale)[..., None], -largest, largest)
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scale


def quantise_parts(
    parts: Sequence[jax.Array], dtype: DTypeLike
) -> tuple[list[jax.Array], jax.Array]:
    """Quantise rows like `quantise`, with operations that Pallas supports on GPUs.

    Args:
      parts: the rows, split along the last dimension: consecutive floating point arrays ``[N, x]``.
      dtype: int8 or float8_e4m3fn.

    Returns:
      ``(parts, scale)``: the quantised parts, and the scale of each row, f32 ``[N]``.
    """
    largest = QUANTISED[jnp.dtype(dtype)]
    parts = [part.astype(jnp.float32) for part in parts]
    peaks = [jnp.max(jnp.abs(part), axis=1) for part in parts]
    scale = scale_of_peak(functools.reduce(jnp.maximum, peaks), dtype)
    inverse = 1 / scale

    def rounded(part: jax.Array) -> jax.Array:
        scaled = part * lax.broadcast_in_dim(inverse, part.shape, [0])
        scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
        if jnp.issubdtype(dtype, jnp.integer):
            scaled = round_half_to_even(scaled)
        return scaled.astype(dtype)

    return [rounded(part) for part in parts], scale


def round_half_to_even(x: jax.Array) -> jax.Array:
    """Round numbers in the range of i32 like `jnp.round`, and return them as i32.

    It is not enough to add 1.5 * 2**23 and subtract it again, because compilers remove both
    operations.
    """
    whole = jnp.abs(x).astype(jnp.int32)
    rest = jnp.abs(x) - whole.astype(x.dtype)  # exact
    is_up = (rest > 0.5) | ((rest == 0.5) & (whole & 1 == 1))
    rounded = whole + is_up.astype(jnp.int32)
    return jnp.where(x < 0, -rounded, rounded)


def round_up_to_lanes(head_dim: int) -> int:
    """Return the head dimension rounded up to a multiple of 128, the lanes of a TPU register."""
    return -(-head_dim // LANES) * LANES


def padded_head_dim(head_dim: int, platform: str) -> int:
    """Return the last dimension of a pool: the head dimension, padded on TPUs.

    On TPUs, it is a multiple of 128. The padding costs no memory there, because XLA stores arrays
    in tiles of 128 lanes. XLA may give an unpadded pool another layout, and would then copy the
    whole pool before each kernel.

    Example:
      >>> padded_head_dim(64, "cuda"), padded_head_dim(64, "tpu")
      (64, 128)
    """
    return round_up_to_lanes(head_dim) if platform == "tpu" else head_dim


def padded_state_shape(shape: tuple[int, ...], platform: str) -> tuple[int, ...]:
    """Return the shape of a recurrent state in its pool; on TPUs, matrices are padded to tiles.

    Like the padding of `padded_head_dim`, this prevents copies: for unpadded matrices, XLA may use
    different layouts in the pool and in a step, and then copies the whole pool twice. States that
    are vectors are not padded.

    Example:
      >>> padded_state_shape((30, 96, 192), "tpu"), padded_state_shape((30, 96, 192), "gpu")
      ((30, 96, 256), (30, 96, 192))
    """
    if platform != "tpu" or len(shape) < 2:
        return shape
    *first, rows, lanes = shape
    return *first, -(-rows // SUBLANES) * SUBLANES, round_up_to_lanes(lanes)
