"""Prefill in plain JAX: a chunk of queries for each sequence, a tile of one chunk at a time.

The inner loop has dynamic bounds, so that the cost follows the tokens::

    for every QUERIES-row tile of every chunk:
        while tiles are left:   1 sequence x TILE tokens     up to the diagonal

The function is jitted here, so that a model with many layers traces and lowers it once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.backend import AttentionArgs, Options
from paged_jax.kernels.xla.tiles import (
    TILE,
    blocks_in_tile,
    ceil_div,
    finish,
    fold,
    gather,
    start_softmax,
)

# Most query tokens of a chunk in a tile.
QUERIES = 128


@functools.partial(jax.jit, static_argnames="options")
def prefill(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Attend with a chunk of queries for each sequence, causally."""
    q, pools, _, context_lens, query_lens, _, _ = args
    assert query_lens is not None
    B, T, H, D = q.shape
    K = pools.num_kv_heads
    G = H // K
    queries = min(T, QUERIES)
    num_query_tiles = ceil_div(T, queries)
    padded = num_query_tiles * queries
    q_BKTGD = (
        (q.astype(jnp.float32) * options.scale).reshape(B, T, K, G, D).transpose(0, 2, 1, 3, 4)
    )
    q_BKTGD = jnp.pad(q_BKTGD, ((0, 0), (0, 0), (0, padded - T), (0, 0), (0, 0)))

    def query_tile(index):
        b, first = index // num_query_tiles, index % num_query_tiles * queries
        start = context_lens[b] - query_lens[b] + first  # position of the tile's first query
        num_queries = jnp.clip(query_lens[b] - first, 0, queries)
        offsets = jnp.arange(queries, dtype=jnp.int32)
        query_positions = jnp.where(offsets < num_queries, start + offsets, -1)
        zero = jnp.zeros_like(b)  # a Python integer would be 64 bits wide under jax_enable_x64
        q_KRD = lax.dynamic_slice(
            q_BKTGD, (b, zero, first, zero, zero), (1, K, queries, G, D)
        ).reshape(K, queries * G, D)
        out, lse = attend_to_tile(args, options, b, q_KRD, query_positions, start, num_queries)
        lse = jnp.where(
            (offsets < num_queries)[None, :, None], lse.reshape(K, queries, G), -jnp.inf
        )
        return out.reshape(K, queries, G, D), lse

    out, lse = lax.map(query_tile, jnp.arange(B * num_query_tiles, dtype=jnp.int32))
    out = out.reshape(B, num_query_tiles, K, queries, G, D).transpose(0, 1, 3, 2, 4, 5)
    lse = lse.reshape(B, num_query_tiles, K, queries, G).transpose(0, 1, 3, 2, 4)
    out, lse = out.reshape(B, padded, H, D), lse.reshape(B, padded, H)
    return out[:, :T].astype(q.dtype), lse[:, :T]


def attend_to_tile(
    args: AttentionArgs,
    options: Options,
    b: jax.Array,
    q_KRD: jax.Array,
    query_positions: jax.Array,
    start: jax.Array,
    num_queries: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one tile of queries.

    Args:
      args, options: the call.
      b: i32 ``[]``, the sequence.
      q_KRD: the tile, f32, scaled: a row for each token and head of the group.
      query_positions: i32 ``[T]``, positions of the queries in the sequence, -1 in padding.
      start: i32 ``[]``, position of the first.
      num_queries: i32 ``[]``, queries of the tile that are no padding.

    Returns:
      ``(out, lse)``: f32 ``[K, R, D]`` and ``[K, R]``.
    """
    K, R, D = q_KRD.shape
    queries, C = query_positions.size, args.pools.block_size
    G = R // queries
    tile_blocks = blocks_in_tile(TILE, C, args.block_tables.shape[1])
    tile = tile_blocks * C

    def step(key_tile, softmax):
        positions = key_tile * tile + jnp.arange(tile, dtype=jnp.int32)
        seen = positions[None] <= query_positions[:, None]
        valid = positions < start + num_queries
        if options.sliding_window is not None:
            seen &= positions[None] > query_positions[:, None] - options.sliding_window
            valid &= positions > start - options.sliding_window
        columns = key_tile * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)
        blocks = jnp.take(args.block_tables[b], columns, mode="clip")
        return fold(
            softmax,
            q_KRD,
            *gather(args.pools, args.layer, blocks, D),
            jnp.repeat(seen, G, axis=0)[None],
            valid[None],
            options.soft_cap,
        )

    end = jnp.where(num_queries > 0, start + num_queries, 0)
    begin = 0
    if options.sliding_window is not None:
        begin = jnp.maximum(start - options.sliding_window + 1, 0)
    sinks_KR = None
    if args.sinks is not None:
        sinks_KR = jnp.tile(args.sinks.reshape(K, G), (1, queries))
    empty = start_softmax(q_KRD, sinks_KR)
    softmax = lax.fori_loop(begin // tile, ceil_div(end, tile), step, empty)
    return finish(softmax, options.value_scale)
