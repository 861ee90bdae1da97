"""Decode in plain JAX: one query for each sequence, a few sequences a loop step.

The loop has a dynamic bound, so that the cost follows the tokens and not the width of the table::

    while tiles are left:   a few sequences x TILE tokens     longest sequences first

No sequence's result depends on another's: rows meet in batched products only, and every row sees
its own tiles in its own order.

The function is jitted here, so that a model with many layers traces and lowers it once.
"""

import functools
from typing import NamedTuple

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
from paged_jax.opaque import take_or_fill

# Bytes of keys (and as many of values) that a loop step gathers: few enough to lie in a core's own
# cache, enough to make the fixed cost of a step small. From 2 cores with 1 MB each.
STEP_BYTES = 768 * 1024
# Most sequences that share a loop step.
ROWS = 16


@functools.partial(jax.jit, static_argnames="options")
def decode(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Attend with one query for each sequence."""
    B, H, D = args.q.shape
    K, C = args.pools.num_kv_heads, args.pools.block_size
    rows, tile = _step_sizes(B, K, D)
    tile_blocks = blocks_in_tile(tile, C, args.block_tables.shape[1])
    tile = tile_blocks * C
    batch, order = _sort_by_length(args, options, rows, tile)
    padded = order.size

    def step(state):
        index, row, softmax = state

        def take(x):
            return lax.dynamic_slice_in_dim(x, row, rows)

        first_block = (take(batch.starts) // tile + index) * tile_blocks
        positions = first_block[:, None] * C + jnp.arange(tile, dtype=jnp.int32)[None]
        seen = positions >= take(batch.starts)[:, None]
        seen &= positions < take(batch.ends)[:, None]
        columns = first_block[:, None] + jnp.arange(tile_blocks, dtype=jnp.int32)[None]
        blocks = jnp.take_along_axis(take(batch.tables), columns, axis=1, mode="clip")
        folded = fold(
            jax.tree.map(take, softmax),
            take(batch.q_BKGD),
            *gather(args.pools, args.layer, blocks, D),
            seen[:, None, None],
            seen[:, None],
            options.soft_cap,
        )
        softmax = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, row, axis=0),
            softmax,
            folded,
        )
        more = row + rows < padded
        more &= batch.num_tiles[jnp.minimum(row + rows, padded - 1)] > index
        return jnp.where(more, index, index + 1), jnp.where(more, row + rows, 0), softmax

    limit = jnp.max(batch.num_tiles)
    zero = jnp.zeros((), limit.dtype)
    sinks = None if args.sinks is None else args.sinks.reshape(1, K, H // K)
    empty = start_softmax(batch.q_BKGD, sinks)
    *_, softmax = lax.while_loop(lambda state: state[0] < limit, step, (zero, zero, empty))
    out, lse = finish(softmax, options.value_scale)
    out, lse = out.reshape(padded, H, D), lse.reshape(padded, H)
    if B > rows:
        places = jnp.argsort(order)
        out, lse = out[places], lse[places]
    return out[:B].astype(args.q.dtype), lse[:B]


class _Batch(NamedTuple):
    """The sequences of a batch, the longest first, with empty ones that fill the last loop step."""

    starts: jax.Array  # i32 [B], first token that is seen
    ends: jax.Array  # i32 [B]
    num_tiles: jax.Array  # i32 [B], tiles with tokens that are seen
    tables: jax.Array  # i32 [B, M]
    q_BKGD: jax.Array  # f32, scaled


def _sort_by_length(
    args: AttentionArgs, options: Options, rows: int, tile: int
) -> tuple[_Batch, jax.Array]:
    """The sequences in an order in which those that still have a tile are the leading ones.

    Returns:
      ``(batch, order)``: the sequence of each row is ``order``, which is B in rows of padding.
    """
    B, H, D = args.q.shape
    K = args.pools.num_kv_heads
    starts = jnp.zeros_like(args.context_lens)
    if options.sliding_window is not None:
        starts = jnp.maximum(args.context_lens - options.sliding_window, 0)
    num_tiles = ceil_div(args.context_lens, tile) - starts // tile
    padded = ceil_div(B, rows) * rows
    order = jnp.argsort(-num_tiles) if B > rows else jnp.arange(B, dtype=jnp.int32)
    order = jnp.pad(order, (0, padded - B), constant_values=B)
    q_BKGD = (args.q.astype(jnp.float32) * options.scale).reshape(B, K, H // K, D)
    batch = _Batch(starts, args.context_lens, num_tiles, args.block_tables, q_BKGD)
    return jax.tree.map(lambda x: take_or_fill(x, order), batch), order


def _step_sizes(batch: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """How many sequences, and how many tokens of each, a loop step takes."""
    num_tokens = max(STEP_BYTES // (num_kv_heads * head_dim * 4), TILE // 2)
    most = min(batch, ROWS, num_tokens // (TILE // 2))
    rows = ceil_div(batch, ceil_div(batch, most))  # equal shares, so that few rows are padding
    return rows, min(TILE, num_tokens // rows)
