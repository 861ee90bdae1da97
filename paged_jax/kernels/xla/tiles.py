"""What decode and prefill in plain JAX share: tiles of the pools, and a softmax in progress.

A tile of keys and values is gathered from the pool, small enough to still lie in the cache when
the two products read it, and folded into a running softmax (Milakov and Gimelshein, 2018).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.backend import Pages, Pools
from paged_jax.kernels.rows import take_rows

# Most tokens of a sequence in a loop step. Longer tiles waste more on short contexts.
TILE = 128

# Finite, so that a row without any token yet gives exp(0) and not NaN; its weights are masked.
_LOWEST = float(np.finfo(np.float32).min)


class Softmax(NamedTuple):
    """A softmax-weighted sum in progress, over the tokens folded in so far."""

    peak: jax.Array  # f32 [..., K, R], largest score; R query rows share a KV head
    total: jax.Array  # f32 [..., K, R], sum of exp(score - peak)
    out: jax.Array  # f32 [..., K, R, D], sum of exp(score - peak) * value


def blocks_in_tile(tile: int, block_size: int, table_width: int) -> int:
    """Blocks of a tile of about as many tokens, one at least."""
    return min(max(tile // block_size, 1), table_width)


def ceil_div(a, b):
    """``a / b``, rounded up."""
    return -(-a // b)


def gather(
    pools: Pools | Pages, layer: int | jax.Array, blocks: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Copy the blocks ``i32 [..., M]`` out of the pools: K and V, float32 ``[..., K, M * C, D]``.

    Ids out of range are clipped; the caller masks them.
    """
    if isinstance(pools, Pages):
        return _gather_pages(pools, blocks)
    return _gather_blocks(pools, layer, blocks, head_dim)


def _gather_pages(pages: Pages, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A page, of all its heads, is a row of the matrix."""
    P, C, K2, D = pages.kv.shape
    rows = jnp.clip(blocks, 0, P - 1)
    tokens = take_rows(pages.kv.reshape(P, -1), rows).astype(jnp.float32)
    tokens = tokens.reshape(*blocks.shape[:-1], blocks.shape[-1] * C, K2 // 2, 2, D)
    k, v = (jnp.swapaxes(tokens[..., part, :], -3, -2) for part in range(2))
    return k, v


def _gather_blocks(
    pools: Pools, layer: int | jax.Array, blocks: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """As `gather`.

    One head of one block is a row of the pool seen as a matrix: gathering rows needs no transpose,
    of the pool or of the result, and XLA copies a row at a time.
    """
    L, P, K = pools.k.shape[:3]
    heads = jnp.arange(K, dtype=blocks.dtype).reshape((1,) * (blocks.ndim - 1) + (K, 1))
    rows = (layer * P + jnp.clip(blocks, 0, P - 1))[..., None, :] * K + heads  # [..., K, M]

    def take(pool: jax.Array) -> jax.Array:
        gathered = take_rows(pool.reshape(L * P * K, -1), rows)
        return gathered.reshape(*rows.shape[:-1], -1, *pool.shape[4:])

    k, v = (take(pool)[..., :head_dim].astype(jnp.float32) for pool in (pools.k, pools.v))
    if pools.k_scale is not None and pools.v_scale is not None:
        k, v = k * take(pools.k_scale)[..., None], v * take(pools.v_scale)[..., None]
    return k, v


def start_softmax(q: jax.Array, sinks: jax.Array | None) -> Softmax:
    """A softmax over nothing but the sinks, if any, broadcast to the rows of ``q [..., D]``."""
    rows, out = q.shape[:-1], jnp.zeros(q.shape, jnp.float32)
    if sinks is None:
        peak = jnp.full(rows, _LOWEST, jnp.float32)
        return Softmax(peak, jnp.zeros(rows, jnp.float32), out)
    peak = jnp.broadcast_to(jnp.maximum(sinks.astype(jnp.float32), _LOWEST), rows)
    # A sink of -inf has weight 0.
    return Softmax(peak, jnp.broadcast_to((sinks > -jnp.inf).astype(jnp.float32), rows), out)


def fold(
    softmax: Softmax,
    q: jax.Array,  # f32 [..., K, R, D], scaled
    k: jax.Array,  # f32 [..., K, N, D]
    v: jax.Array,  # f32 [..., K, N, D]
    seen: jax.Array,  # bool [..., 1, R or 1, N], does the query see the token?
    valid: jax.Array,  # bool [..., 1, N], does any query see the token? Its value is finite then.
    soft_cap: float | None,
) -> Softmax:
    """Fold a tile of N tokens into a softmax."""
    scores = jnp.einsum("...rd,...nd->...rn", q, k, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, _LOWEST)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
    rescale = jnp.exp(softmax.peak - peak)
    # A weight of zero would not remove a NaN that lies beyond the sequence's tokens.
    v = jnp.where(valid[..., None], v, 0.0)
    return Softmax(
        peak,
        softmax.total * rescale + jnp.sum(weights, axis=-1),
        softmax.out * rescale[..., None]
        + jnp.einsum("...rn,...nd->...rd", weights, v, precision="highest"),
    )


def finish(softmax: Softmax, value_scale: float) -> tuple[jax.Array, jax.Array]:
    """Result and log-sum-exp; 0 and -inf of no token."""
    is_empty = softmax.total == 0
    total = jnp.where(is_empty, 1.0, softmax.total)
    lse = jnp.where(is_empty, -jnp.inf, softmax.peak + jnp.log(total))
    return softmax.out * value_scale / total[..., None], lse
