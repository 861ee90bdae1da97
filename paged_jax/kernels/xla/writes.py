"""Writes and copies of blocks in plain JAX, in place if the pools are donated.

Every write is a scatter into the pool, viewed as rows ``[L * P * K * C, D]``. If the pool is
donated, XLA does such a scatter in place on CPUs, GPUs and TPUs. With `dynamic_update_slice`, XLA
for TPUs would copy the pool to another layout. The ops get whole pools and a layer index, because
slicing out a layer would copy it.

XLA's CPU backend cannot update arrays of bfloat16 or 8-bit floats in place. `rows.set_rows` uses a
C++ kernel that can. On CPUs without this kernel, prefer pools of float32, float16 or integers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op_args import CopyArgs, WriteArgs
from paged_jax.kernels.opaque_call import without_index_checks
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.rows import set_rows


@jax.jit
def write(args: WriteArgs) -> Pools:
    """Write K and V of N tokens into a layer."""
    pools, k, v, blocks, offsets, layer = args
    L, P, _, C, _ = pools.k.shape
    is_kept = (blocks >= 0) & (blocks < P) & (offsets >= 0) & (offsets < C)
    is_kept &= (layer >= 0) & (layer < L)
    layer = jnp.where((layer >= 0) & (layer < L), layer, 0)
    index = _token_rows(pools.k.shape, blocks, offsets, layer, is_kept)

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(-1, new.shape[-1])
        new = jnp.pad(new, ((0, 0), (0, pool.shape[-1] - new.shape[-1])))
        return _set_pool_rows(pool, index, new)

    @without_index_checks
    def put_scale(scale: jax.Array, new: jax.Array) -> jax.Array:
        # Do not flatten the scales like the pools. On TPUs, the innermost dimension of their layout
        # is P, so flattening would change the layout. Each dropped token gets a different index
        # past the end, because the indices must be unique.
        past = P + jnp.arange(blocks.size, dtype=jnp.int32)
        target = scale.at[layer, jnp.where(is_kept, blocks, past), :, offsets]
        return target.set(new, mode="drop", unique_indices=True)

    new: Any = k, v
    kv = KVDtype.of(pools.dtype)
    rounded = [(None, None) if x is None else kv.quantise(x) for x in new]
    values, scales = zip(*rounded, strict=True)
    return Pools(*jax.tree.map(put, pools[:2], values), *jax.tree.map(put_scale, pools[2:], scales))


@jax.jit
def copy_blocks(args: CopyArgs) -> Pools:
    """Copy blocks in all layers, one pair at a time, with small temporary arrays.

    The loop runs once for each valid pair. A single scatter would write a block for each pair in
    every decode step, even if the pair is not valid. Most steps copy no block.
    """
    pools, sources, targets = args
    L, P, K, C, _ = pools.k.shape
    is_copy = (sources >= 0) & (sources < P) & (targets >= 0) & (targets < P)
    (order,) = jnp.nonzero(is_copy, size=sources.size, fill_value=0)
    layers_L1 = jnp.arange(L, dtype=jnp.int32)[:, None] * P
    in_block = jnp.arange(K * C, dtype=jnp.int32)

    def rows_of(block: jax.Array) -> jax.Array:
        return ((layers_L1 + block) * (K * C) + in_block[None, :]).reshape(-1)

    def copy(i: jax.Array, state: Pools) -> Pools:
        source, target = sources[order[i]], targets[order[i]]
        copied = state.map(
            lambda pool: _set_pool_rows(pool, rows_of(target), _as_rows(pool)[rows_of(source)])
        )
        scales = jax.tree.map(lambda x: x.at[:, target].set(x[:, source]), state[2:])
        return Pools(copied.k, copied.v, *scales)

    num_copies = jnp.sum(is_copy, dtype=jnp.int32)
    return lax.fori_loop(jnp.int32(0), num_copies, copy, pools)


def _as_rows(pool: jax.Array) -> jax.Array:
    """View a pool ``[L, P, K, C, D]`` as rows ``[L * P * K * C, D]``."""
    return pool.reshape(-1, pool.shape[-1])


def _set_pool_rows(pool: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """Set rows of a pool. `index` has indices of the rows ``[L * P * K * C, D]``."""

    def flat(pool: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
        return set_rows(pool, index, new)

    def whole(pool: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
        P, _, C, _ = pool.shape[1:]
        place = index // (P * C), index // C % P, jnp.zeros_like(index), index % C
        return set_rows(pool, place, new)

    if pool.shape[2] > 1:
        return flat(pool, index, new)
    # Do not flatten a pool with a single KV head on CPUs: XLA would copy the updated rows back to
    # an array of the shape of the pool.
    return lax.platform_dependent(pool, index, new, cpu=whole, default=flat)


def _token_rows(
    shape: tuple[int, ...],
    blocks: jax.Array,
    offsets: jax.Array,
    layer: jax.Array,
    is_kept: jax.Array,
) -> jax.Array:
    """Return the row of the pool for each token and KV head, i32 ``[N * K]``.

    Dropped tokens get rows past the end of the pool.
    """
    L, P, K, C, _ = shape
    heads = jnp.arange(K, dtype=jnp.int32)
    first_heads = (layer * P + jnp.where(is_kept, blocks, 0)) * K
    rows_NK = (first_heads[:, None] + heads[None, :]) * C + offsets[:, None]
    # Dropped rows get indices past the end of the whole pool, because index P of a layer would be a
    # row of the next layer. The indices are distinct, because JAX only differentiates a scatter
    # with unique indices.
    past_NK = L * P * K * C + jnp.arange(rows_NK.size, dtype=jnp.int32).reshape(rows_NK.shape)
    return jnp.where(is_kept[:, None], rows_NK, past_NK).reshape(-1)
