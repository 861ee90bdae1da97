"""Norms, rotary embeddings (RoPE) of a fused QKV projection, and activation functions."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from paged_jax.kernels.exact import inverse_root, rounded
from paged_jax.kernels.linear import sum_rows
from paged_jax.kernels.op_args import Options, RopeWriteArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.xla import rope as plain
from paged_jax.kernels.xla.writes import write as plain_write

# Maps the names in ``config.json`` to activation functions.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    num_heads: int = 1,
    backend: str | None = None,
) -> jax.Array:
    """Apply RMS norm to the last dimension (Zhang and Sennrich, 2019).

    Args:
      x: float32 ``[..., E]``.
      weight: floating point ``[E]``.
      eps: constant added to the mean square.
      num_heads: number of rows of `x` per token, such as its heads. It only influences the order
        of summation, see `sum_rows`.
      backend: see `sum_rows`.
    """
    squares = mean_square(x, num_heads=num_heads, backend=backend)
    return scale_by(x, squares, weight, eps, backend)


def layer_norm(
    x: jax.Array,
    weight: jax.Array,
    eps: float,
    *,
    num_heads: int = 1,
    backend: str | None = None,
) -> jax.Array:
    """Normalise rows to mean 0 and variance 1 (Ba et al., 2016), without a bias.

    Args:
      x: float32 ``[..., E]``.
      weight: floating point ``[E]``.
      eps: constant added to the variance.
      num_heads: number of rows of `x` per token, such as its heads. It only influences the order
        of summation, see `sum_rows`.
      backend: see `sum_rows`.

    Example:
      >>> layer_norm(jnp.array([[1.0, 3.0]]), jnp.array([1.0, 2.0]), 0.0)
      Array([[-1.,  2.]], dtype=float32)
    """
    E = x.shape[-1]
    add = functools.partial(sum_rows, rows_per_token=num_heads, backend=backend)
    centred = x - rounded(add(x) / E, backend)
    variance = rounded(add(jnp.square(centred)) / E, backend)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return rounded(centred * inverse_root(variance + eps, backend) * weight, backend)


def mean_square(x: jax.Array, *, num_heads: int = 1, backend: str | None = None) -> jax.Array:
    """Return the mean of the squares of `x` over its last dimension, as in `rms_norm`.

    Args:
      x: float32 ``[..., E]``.
      num_heads: number of rows of `x` per token, such as its heads. It only influences the order
        of summation, see `sum_rows`.
      backend: see `sum_rows`.

    Returns:
      float32 ``[..., 1]``.
    """
    squares = sum_rows(jnp.square(x), rows_per_token=num_heads, backend=backend)
    return rounded(squares / x.shape[-1], backend)


def scale_by(
    x: jax.Array, mean_square: jax.Array, weight: jax.Array, eps: float, backend: str | None = None
) -> jax.Array:
    """Apply RMS norm to `x`, given its mean square ``[..., 1]``; see `rms_norm`."""
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return rounded(x * inverse_root(mean_square + eps, backend) * weight, backend)


def expand(x: jax.Array, rank: int) -> jax.Array:
    """Return `x` in float32, with additional leading dimensions of size 1 up to `rank`."""
    return x.astype(jnp.float32).reshape((1,) * (rank - x.ndim) + x.shape)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a bias to the last dimensions of float32 `x`."""
    return x + expand(bias, x.ndim)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, backend: str | None = None) -> jax.Array:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` of each head (RoFormer, section 3.2.2).

    The elements are paired as in Hugging Face checkpoints. In Meta's checkpoints, the two elements
    of a pair are neighbours.

    Args:
      x: float32 ``[..., heads, D]``.
      cos: f32 ``[..., D / 2]``, cosine of the angle of each pair.
      sin: f32 ``[..., D / 2]``, sine of the angle of each pair.
      backend: see `rounded`.
    """
    return plain.rotate(x, cos, sin, functools.partial(_multiply, backend=backend))


def _multiply(x: jax.Array, y: jax.Array, backend: str | None) -> jax.Array:
    return rounded(x * y, backend)


def split_and_rotate(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    norms: tuple[jax.Array, jax.Array] | None,
    *,
    norm_eps: float,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a QKV projection, and normalise and rotate its queries and keys.

    Args:
      qkv: float32 ``[..., K, G + 2, D]``: the G queries, the key and the value of each KV head.
      cos: f32 ``[..., D / 2]``, see `rotate`.
      sin: f32 ``[..., D / 2]``, see `rotate`.
      norms: weights ``[D]`` of the RMS norms of queries and of keys; None for no norms.
      norm_eps: constant added to the mean square of a head.
      backend: see `sum_rows`.

    Returns:
      Queries ``[..., H, D]``, keys ``[..., K, D]`` and values ``[..., K, D]``, float32.
    """
    q, k, v = plain.split(qkv)
    if norms is not None:
        q = rms_norm(q, norms[0], norm_eps, num_heads=q.shape[-2], backend=backend)
        k = rms_norm(k, norms[1], norm_eps, num_heads=k.shape[-2], backend=backend)
    return rotate(q, cos, sin, backend), rotate(k, cos, sin, backend), v


def rope_then_write(args: RopeWriteArgs, options: Options) -> tuple[jax.Array, Pools]:
    """Run `paged_rope_write` in plain JAX, with the sums of `sum_rows`."""

    def norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        return rms_norm(x, weight, eps, num_heads=x.shape[-2])

    return plain.rope_then_write(args, options, plain_write, norm)
