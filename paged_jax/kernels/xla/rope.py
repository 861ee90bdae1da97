"""Rotary embeddings of a fused QKV projection in plain JAX, with XLA's order of sums.

`kernels.norm_rope` has the functions of models, whose sums of norms are an op.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op_args import Options, RopeWriteArgs, WriteArgs
from paged_jax.kernels.pools import Pools


def split(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a projection ``[..., K, G + 2, D]``: the G queries, key and value of each KV head.

    Returns:
      Queries ``[..., K * G, D]``, keys ``[..., K, D]`` and values ``[..., K, D]``.
    """
    *rows, K, width, D = qkv.shape
    G = width - 2
    return qkv[..., :G, :].reshape(*rows, K * G, D), qkv[..., G, :], qkv[..., G + 1, :]


def rotate(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    multiply: Callable[[jax.Array, jax.Array], jax.Array] = jnp.multiply,
) -> jax.Array:
    """Rotate the pairs ``(x[i], x[i + D / 2])`` of each head, see `norm_rope.rotate`.

    `multiply` computes the products.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate(
        [
            multiply(first, cos) - multiply(second, sin),
            multiply(second, cos) + multiply(first, sin),
        ],
        axis=-1,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Apply RMS norm to the heads ``[..., heads, D]``, see `norm_rope.rms_norm`."""
    scale = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


def rope_then_write(
    args: RopeWriteArgs,
    options: Options,
    write: Callable[[WriteArgs], Pools],
    norm: Callable[[jax.Array, jax.Array, float], jax.Array] = rms_norm,
) -> tuple[jax.Array, Pools]:
    """Run `paged_rope_write`: call `norm` and rotate in float32, then call `write`."""
    q, k, v = split(args.qkv.astype(jnp.float32))
    if args.norms is not None:
        q = norm(q, args.norms[0], options.norm_eps)
        k = norm(k, args.norms[1], options.norm_eps)
    q, k = (rotate(x, args.cos, args.sin) for x in (q, k))
    pools = write(WriteArgs(args.pools, k, v, args.blocks, args.offsets, args.layer))
    return q.astype(KVDtype.of(pools.dtype).query_dtype), pools
