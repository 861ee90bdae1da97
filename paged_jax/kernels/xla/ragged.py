"""Chunks of a ragged batch in plain JAX, a tile of one chunk at a time.

A tile is a slice of the flat queries, and so is its result. It may reach beyond its chunk: what it
writes there is overwritten by the chunks that follow, since tiles are computed in order. The loop
has a dynamic bound: there are as many tiles as the chunks need.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.backend import AttentionArgs, Options, RaggedArgs
from paged_jax.kernels.ragged_batch import Chunks
from paged_jax.kernels.xla.prefill import QUERIES, attend_to_tile
from paged_jax.kernels.xla.tiles import ceil_div


@functools.partial(jax.jit, static_argnames="options")
def attend_to_chunks(
    args: RaggedArgs, chunks: Chunks, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Attend with the queries of all chunks.

    Returns:
      ``(out, lse)``: ``[N, H, D]`` and f32 ``[N, H]``. Rows outside the chunks may hold anything.
    """
    N, H, D = args.q.shape
    K = args.pages.num_kv_heads
    G, queries = H // K, min(N, QUERIES)
    whole = AttentionArgs(
        args.q, args.pages, args.block_tables, args.context_lens, chunks.lens, args.sinks, 0
    )
    num_tiles_B = ceil_div(chunks.lens, queries)
    ends_B = jnp.cumsum(num_tiles_B, dtype=jnp.int32)
    offsets = jnp.arange(queries, dtype=jnp.int32)
    padded = jnp.pad(args.q, ((0, queries), (0, 0), (0, 0)))

    def query_tile(
        index: jax.Array, results: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        b = jnp.sum(ends_B <= index, dtype=jnp.int32)
        first = (index - ends_B[b] + num_tiles_B[b]) * queries
        num_queries = jnp.minimum(chunks.lens[b] - first, queries)
        start = args.context_lens[b] - chunks.lens[b] + first
        positions = jnp.where(offsets < num_queries, start + offsets, -1)
        row = chunks.starts[b] + first
        q = lax.dynamic_slice_in_dim(padded, row, queries).astype(jnp.float32) * options.scale
        q_KRD = q.reshape(queries, K, G, D).transpose(1, 0, 2, 3).reshape(K, queries * G, D)
        tile, tile_lse = attend_to_tile(whole, options, b, q_KRD, positions, start, num_queries)
        tile = tile.reshape(K, queries, G, D).transpose(1, 0, 2, 3).reshape(queries, H, D)
        tile_lse = tile_lse.reshape(K, queries, G).transpose(1, 0, 2).reshape(queries, H)
        out, lse = results
        return (
            lax.dynamic_update_slice_in_dim(out, tile.astype(out.dtype), row, axis=0),
            lax.dynamic_update_slice_in_dim(lse, tile_lse, row, axis=0),
        )

    nothing = jnp.zeros_like(padded), jnp.zeros(padded.shape[:2], jnp.float32)
    out, lse = lax.fori_loop(0, ends_B[-1], query_tile, nothing)
    return out[:N], lse[:N]
