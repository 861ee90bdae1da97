"""From one projection to queries, keys and values: RMS norm of each head, rotary embedding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.backend import Options, Pools, RopeWriteArgs, WriteArgs
from paged_jax.kernels.linear import sum_rows
from paged_jax.kernels.pool_format import query_dtype


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, num_heads: int = 1) -> jax.Array:
    """Scale float32 ``x [..., E]`` to unit root mean square (Zhang and Sennrich, 2019).

    Args:
      x: float32 ``[..., E]``.
      weight: floating point ``[E]``.
      eps: added to the mean square.
      num_heads: rows of `x` that belong to one token. Those of few tokens are summed on CPUs as
        `sum_rows` does.
    """
    return scale_by(x, mean_square(x, num_heads=num_heads), weight, eps)


def mean_square(x: jax.Array, *, num_heads: int = 1) -> jax.Array:
    """Of float32 ``x [..., E]``, float32 ``[..., 1]``; see `rms_norm`."""
    return sum_rows(jnp.square(x), rows_per_token=num_heads) / x.shape[-1]


def scale_by(x: jax.Array, mean_square: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The norm of ``x`` whose mean square is known ``[..., 1]``; see `rms_norm`."""
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return x * lax.rsqrt(mean_square + eps) * weight


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs ``(x[i], x[i + D/2])`` of float32 ``x [..., heads, D]``.

    This pairing of the two halves is that of Hugging Face checkpoints; Meta's own files
    interleave the pairs (RoFormer, section 3.2.2).

    Args:
      x: float32 ``[..., heads, D]``.
      cos, sin: f32 ``[..., D / 2]``, of the angle of each pair.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def split_and_rotate(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None,
    *,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, normed and rotated, and values, from one projection.

    Args:
      qkv: float32 ``[..., K, G + 2, D]``: for each KV head its G queries, its key, its value.
      cos, sin: f32 ``[..., D / 2]``, of the angle of each pair.
      norms: None, or the weights ``[D]`` of the RMS norms of queries and of keys.
      norm_eps: added to the mean square of a head.

    Returns:
      q ``[..., H, D]``, k and v ``[..., K, D]``, float32.
    """
    *rows, K, _, D = qkv.shape
    G = qkv.shape[-2] - 2
    H = K * G
    q = qkv[..., :G, :].reshape(*rows, H, D)
    k, v = qkv[..., G, :], qkv[..., G + 1, :]
    if norms is not None:
        q = rms_norm(q, norms[0], norm_eps, num_heads=H)
        k = rms_norm(k, norms[1], norm_eps, num_heads=K)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rope_then_write(
    write: Callable[[WriteArgs], Pools], args: RopeWriteArgs, options: Options
) -> tuple[jax.Array, Pools]:
    """What the op means: split, norm and rotate in float32, then write."""
    pools = args.pools
    q, k, v = split_and_rotate(
        args.qkv.astype(jnp.float32),
        args.cos,
        args.sin,
        args.norms,
        norm_eps=options.norm_eps,
    )
    pools = write(WriteArgs(pools, k, v, args.blocks, args.offsets, args.layer))
    return q.astype(query_dtype(pools.k.dtype)), pools
