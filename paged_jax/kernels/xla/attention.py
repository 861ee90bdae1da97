"""Attention in plain JAX, which XLA compiles for every platform.

A tile of keys and values is gathered from the pool and added to an online softmax (Milakov and
Gimelshein, 2018). The tile is small enough to stay in a core's cache between the two matmuls that
read it. The bounds of the loops are dynamic, so that the cost depends on the number of tokens in
the batch, not on the number of columns of the block table::

    decode    while tiles are left:               a few sequences x TILE tokens, longest first
    chunks    for each tile of QUERIES queries:
                  while tiles are left:           1 sequence x TILE tokens, up to the diagonal

The chunks of a ragged batch or of a prefill are rows of one array of queries.

The result of a sequence does not depend on the other sequences, because each sequence has its own
tiles in a fixed order. The functions are jitted here, so that a model with many layers traces and
lowers them only once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.bits import take_rows
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op_args import AttentionArgs, Options, RaggedArgs, RaggedOptions
from paged_jax.kernels.opaque_call import take_or_fill
from paged_jax.kernels.pools import Pages, Pools
from paged_jax.kernels.ragged_chunks import Chunks, attend_in_parts

# Maximum number of tokens of a sequence in a loop step. Longer tiles waste more work on short
# contexts.
TILE = 128

# Maximum number of query tokens of a chunk in a tile.
QUERIES = 128

# Maximum number of elements of the queries in a tile. In practice, it limits only the tiles of
# latent attention, where the query of each head is as long as a latent vector.
_TILE_ELEMENTS = 1 << 21

# Bytes of keys that a step of the decode loop gathers. The step also gathers the values of the same
# tokens. Keys of this size fit the cache of a CPU core, and processing them takes much longer than
# the fixed cost of a step (measured on 2 cores with 1 MB of cache each).
_STEP_BYTES = 768 * 1024

# Maximum number of sequences in a step of the decode loop.
_MAX_SEQUENCES = 16

# Score of masked tokens, and initial peak (largest score so far). It is finite, because -inf -
# (-inf) would make exp(score - peak) NaN in rows without tokens. `_fold` sets the weights of masked
# tokens to 0.
LOWEST = float(np.finfo(np.float32).min)


@functools.partial(jax.jit, static_argnames="options")
def decode(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Attend with a single query for each sequence."""
    B, H, D = args.q.shape
    U = options.output_dim(D)
    K, C = args.pools.num_kv_heads, args.pools.block_size
    rows, tile = _step_sizes(B, K, D)
    tile_blocks = _blocks_in_tile(tile, C, args.block_tables.shape[1])
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
        folded = _fold(
            jax.tree.map(take, softmax),
            take(batch.q_BKGD),
            *_gather(args.pools, args.layer, blocks, (D, U)),
            seen[:, None, None],
            seen[:, None],
            options.soft_cap,
        )
        softmax = jax.tree.map(
            lambda array, update: lax.dynamic_update_slice_in_dim(array, update, row, axis=0),
            softmax,
            folded,
        )
        has_more = row + rows < padded
        has_more &= batch.num_tiles[jnp.minimum(row + rows, padded - 1)] > index
        return jnp.where(has_more, index, index + 1), jnp.where(has_more, row + rows, 0), softmax

    limit = jnp.max(batch.num_tiles)
    zero = jnp.zeros((), limit.dtype)
    sinks = None if args.sinks is None else args.sinks.reshape(1, K, H // K)
    empty = start_softmax(batch.q_BKGD.shape[:-1], U, sinks)
    *_, softmax = lax.while_loop(lambda state: state[0] < limit, step, (zero, zero, empty))
    out, lse = finish_softmax(softmax, options.value_scale)
    out, lse = out.reshape(padded, H, U), lse.reshape(padded, H)
    if B > rows:
        inverse_order = jnp.argsort(order)
        out, lse = out[inverse_order], lse[inverse_order]
    return out[:B].astype(args.q.dtype), lse[:B]


class _DecodeBatch(NamedTuple):
    """Sequences of a decode, sorted by their number of tiles, the largest first.

    Empty sequences are added, so that all loop steps have the same number of sequences.

    Attributes:
      starts: i32 ``[B]``, position of the first visible token of each sequence.
      ends: i32 ``[B]``, position after the last token of each sequence.
      num_tiles: i32 ``[B]``, number of tiles that contain visible tokens.
      tables: i32 ``[B, M]``, block tables.
      q_BKGD: f32, the queries times ``options.scale``.
    """

    starts: jax.Array
    ends: jax.Array
    num_tiles: jax.Array
    tables: jax.Array
    q_BKGD: jax.Array


def _sort_by_length(
    args: AttentionArgs, options: Options, rows: int, tile: int
) -> tuple[_DecodeBatch, jax.Array]:
    """Sort the sequences by their number of tiles, the largest first.

    The sequences that still have tiles in a loop step are then always the first rows.

    Returns:
      ``(batch, order)``: the sorted batch; and for each of its rows, the index of the sequence in
      `args`, i32. Rows that were added as padding have the index B.
    """
    B, H, D = args.q.shape
    K = args.pools.num_kv_heads
    starts = jnp.zeros_like(args.context_lens)
    if options.sliding_window is not None:
        starts = jnp.maximum(args.context_lens - options.sliding_window, 0)
    num_tiles = _ceil_div(args.context_lens, tile) - starts // tile
    padded = _ceil_div(B, rows) * rows
    order = jnp.argsort(-num_tiles) if B > rows else jnp.arange(B, dtype=jnp.int32)
    order = jnp.pad(order, (0, padded - B), constant_values=B)
    q_BKGD = (args.q.astype(jnp.float32) * options.scale).reshape(B, K, H // K, D)
    batch = _DecodeBatch(starts, args.context_lens, num_tiles, args.block_tables, q_BKGD)
    return jax.tree.map(lambda x: take_or_fill(x, order), batch), order


def _step_sizes(batch: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the numbers of sequences, and of tokens per sequence, in a step of the decode loop."""
    num_tokens = max(_STEP_BYTES // (num_kv_heads * head_dim * 4), TILE // 2)
    max_rows = min(batch, _MAX_SEQUENCES, num_tokens // (TILE // 2))
    # Divide the batch into loop steps of about equal size, which need the least padding.
    rows = _ceil_div(batch, _ceil_div(batch, max_rows))
    return rows, min(TILE, num_tokens // rows)


@functools.partial(jax.jit, static_argnames="options")
def prefill(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Attend causally with a chunk of queries for each sequence."""
    (B, T, H, D), lens = args.q.shape, args.query_lens
    assert lens is not None
    flat = args._replace(q=args.q.reshape(B * T, H, D))
    chunks = Chunks(jnp.arange(B, dtype=jnp.int32) * T, lens)
    out, lse = _attend_to_chunks(flat, chunks, options, _queries_in_tile(T, H, D))
    # The output of padding is 0 already.
    is_query_BT1 = (jnp.arange(T, dtype=jnp.int32)[None] < lens[:, None])[..., None]
    lse = jnp.where(is_query_BT1, lse.reshape(B, T, H), -jnp.inf)
    return out.reshape(B, T, H, -1), lse


@functools.partial(jax.jit, static_argnames="options")
def attend_to_chunks(
    args: RaggedArgs, chunks: Chunks, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Attend with the queries of all chunks of a ragged batch.

    Returns:
      ``(out, lse)``: ``[N, H, U]`` and f32 ``[N, H]``. Rows outside the chunks may hold anything.
    """
    flat = args.as_attention(args.q, args.block_tables, args.context_lens, chunks.lens)
    return _attend_to_chunks(flat, chunks, options, _queries_in_tile(*args.q.shape))


def _attend_to_chunks(
    args: AttentionArgs, chunks: Chunks, options: Options, queries: int
) -> tuple[jax.Array, jax.Array]:
    """Attend with the rows of the queries ``[N, H, D]`` that belong to a chunk.

    A tile may reach beyond the end of its chunk. The tiles of later chunks overwrite the rows that
    it writes there, because tiles are computed in order. The number of loop steps is the number of
    tiles of all chunks.
    """
    N, H, D = args.q.shape
    K = args.pools.num_kv_heads
    G, U = H // K, options.output_dim(D)
    num_tiles_B = _ceil_div(chunks.lens, queries)
    ends_B = jnp.cumsum(num_tiles_B, dtype=jnp.int32)
    offsets = jnp.arange(queries, dtype=jnp.int32)
    scaled = args.q.astype(jnp.float32) * options.scale
    padded = jnp.pad(scaled, ((0, queries), (0, 0), (0, 0)))

    def query_tile(
        index: jax.Array, results: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        b = jnp.sum(ends_B <= index, dtype=jnp.int32)
        first = (index - ends_B[b] + num_tiles_B[b]) * queries
        num_queries = jnp.minimum(chunks.lens[b] - first, queries)
        start = args.context_lens[b] - chunks.lens[b] + first
        positions = jnp.where(offsets < num_queries, start + offsets, -1)
        row = chunks.starts[b] + first
        q = lax.dynamic_slice_in_dim(padded, row, queries)
        q_KRD = q.reshape(queries, K, G, D).transpose(1, 0, 2, 3).reshape(K, queries * G, D)
        tile, tile_lse = _attend_to_tile(args, options, b, q_KRD, positions, start, num_queries)
        tile = tile.reshape(K, queries, G, U).transpose(1, 0, 2, 3).reshape(queries, H, U)
        tile_lse = tile_lse.reshape(K, queries, G).transpose(1, 0, 2).reshape(queries, H)
        out, lse = results
        return (
            lax.dynamic_update_slice_in_dim(out, tile, row, axis=0),
            lax.dynamic_update_slice_in_dim(lse, tile_lse, row, axis=0),
        )

    rows = padded.shape[:2]
    empty = jnp.zeros((*rows, U), jnp.float32), jnp.zeros(rows, jnp.float32)
    out, lse = lax.fori_loop(0, ends_B[-1], query_tile, empty)
    return out[:N].astype(args.q.dtype), lse[:N]


def _attend_to_tile(
    args: AttentionArgs,
    options: Options,
    b: jax.Array,
    q_KRD: jax.Array,
    query_positions: jax.Array,
    start: jax.Array,
    num_queries: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attend with a tile of queries of sequence `b` to all tokens that they see.

    Args:
      args: arrays of the batch.
      options: options of the call.
      b: index of the sequence.
      q_KRD: f32, the queries times ``options.scale``, with a row for each token and head of the
        group.
      query_positions: i32 ``[T]``, position of each query; -1 in padding.
      start: position of the first query.
      num_queries: number of queries without the padding.

    Returns:
      The output, f32 ``[K, R, U]``, and the log-sum-exp, f32 ``[K, R]``.
    """
    K, R, D = q_KRD.shape
    U = options.output_dim(D)
    queries, C = query_positions.size, args.pools.block_size
    G = R // queries
    tile_blocks = _blocks_in_tile(TILE, C, args.block_tables.shape[1])
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
        return _fold(
            softmax,
            q_KRD,
            *_gather(args.pools, args.layer, blocks, (D, U)),
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
    empty = start_softmax((K, R), U, sinks_KR)
    softmax = lax.fori_loop(begin // tile, _ceil_div(end, tile), step, empty)
    return finish_softmax(softmax, options.value_scale)


def _queries_in_tile(num_queries: int, num_heads: int, head_dim: int) -> int:
    """Return the number of queries of a chunk in a tile, limited by `_TILE_ELEMENTS`."""
    fitting = max(_TILE_ELEMENTS // (num_heads * head_dim), 1)
    return min(num_queries, QUERIES, fitting)


def _blocks_in_tile(tile: int, block_size: int, table_width: int) -> int:
    """Return the number of blocks in a tile of about `tile` tokens, at least 1."""
    return min(max(tile // block_size, 1), table_width)


def _ceil_div(a, b):
    return -(-a // b)


def _gather(
    pools: Pools | Pages, layer: int | jax.Array, blocks: jax.Array, sizes: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """Copy blocks out of the pools, as float32 keys and values ``[..., K, M * C, size]``.

    `blocks` is i32 ``[..., M]``. `sizes` are the last dimensions of keys and of values, D and U.
    Block ids out of range are clipped. The caller masks their tokens.
    """
    k, v = (
        _gather_pages(pools, blocks)
        if isinstance(pools, Pages)
        else (_gather_blocks(pools, layer, blocks, sizes))
    )
    return k, k[..., : sizes[1]] if v is None else v


def _gather_pages(pages: Pages, blocks: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Gather pages as float32 keys and values; see `_gather`.

    A page with all its heads is gathered as a row of a matrix.
    """
    P, C, K2, D = pages.kv.shape
    rows = jnp.clip(blocks, 0, P - 1)
    tokens = take_rows(pages.kv.reshape(P, -1), rows).astype(jnp.float32)
    if pages.shares_values:
        k = tokens.reshape(*blocks.shape[:-1], 1, blocks.shape[-1] * C, D)
        return k, None
    tokens = tokens.reshape(*blocks.shape[:-1], blocks.shape[-1] * C, K2 // 2, 2, D)
    k, v = (jnp.swapaxes(tokens[..., part, :], -3, -2) for part in range(2))
    return k, v


def _gather_blocks(
    pools: Pools, layer: int | jax.Array, blocks: jax.Array, sizes: tuple[int, int]
) -> tuple[jax.Array, jax.Array | None]:
    """Gather blocks as float32 keys and values; see `_gather`.

    A head of a block is gathered as a row of a matrix. In this way, neither the pool nor the result
    is transposed, and XLA copies whole rows.
    """
    L, P, K = pools.k.shape[:3]
    heads = jnp.arange(K, dtype=blocks.dtype).reshape((1,) * (blocks.ndim - 1) + (K, 1))
    rows = (layer * P + jnp.clip(blocks, 0, P - 1))[..., None, :] * K + heads  # [..., K, M]

    def take(pool: jax.Array) -> jax.Array:
        gathered = take_rows(pool.reshape(L * P * K, -1), rows)
        return gathered.reshape(*rows.shape[:-1], -1, *pool.shape[4:])

    def take_scaled(pool: jax.Array, scale: jax.Array | None, size: int) -> jax.Array:
        values, scale = take(pool)[..., :size], None if scale is None else take(scale)
        return KVDtype.of(pool.dtype).dequantise(values, scale)

    k = take_scaled(pools.k, pools.k_scale, sizes[0])
    return k, None if pools.v is None else take_scaled(pools.v, pools.v_scale, sizes[1])


class RunningSoftmax(NamedTuple):
    """State of the online softmax over the tokens so far. R query rows read each KV head.

    Attributes:
      peak: f32 ``[..., K, R]``, the largest score.
      total: f32 ``[..., K, R]``, sum of ``exp(score - peak)``.
      out: f32 ``[..., K, R, U]``, sum of ``exp(score - peak) * value``.
    """

    peak: jax.Array
    total: jax.Array
    out: jax.Array


def start_softmax(rows: tuple[int, ...], value_dim: int, sinks: jax.Array | None) -> RunningSoftmax:
    """Return the state before the first token. `rows` is the shape ``[..., K, R]``."""
    out = jnp.zeros((*rows, value_dim), jnp.float32)
    if sinks is None:
        peak = jnp.full(rows, LOWEST, jnp.float32)
        return RunningSoftmax(peak, jnp.zeros(rows, jnp.float32), out)
    peak = jnp.broadcast_to(jnp.maximum(sinks.astype(jnp.float32), LOWEST), rows)
    total = (sinks > -jnp.inf).astype(jnp.float32)  # a sink of -inf has a weight of 0
    return RunningSoftmax(peak, jnp.broadcast_to(total, rows), out)


def _fold(
    softmax: RunningSoftmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    valid: jax.Array,
    soft_cap: float | None,
) -> RunningSoftmax:
    """Add a tile of N tokens to a softmax.

    Args:
      softmax: state before these tokens.
      q: f32 ``[..., K, R, D]``, the queries times ``options.scale``.
      k: f32 ``[..., K, N, D]``, keys.
      v: f32 ``[..., K, N, U]``, values.
      seen: bool ``[..., 1, R, N]`` or ``[..., 1, 1, N]``, whether each query sees each token.
      valid: bool ``[..., 1, N]``, whether any query sees the token. If not, its value may be NaN.
      soft_cap: see `Options`.
    """
    scores = jnp.einsum("...rd,...nd->...rn", q, k, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, LOWEST)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
    rescale = jnp.exp(softmax.peak - peak)
    # Values of tokens that are not valid may be NaN. Set them to 0, because 0 * NaN is NaN.
    v = jnp.where(valid[..., None], v, 0.0)
    return RunningSoftmax(
        peak,
        softmax.total * rescale + jnp.sum(weights, axis=-1),
        softmax.out * rescale[..., None]
        + jnp.einsum("...rn,...nd->...rd", weights, v, precision="highest"),
    )


def finish_softmax(softmax: RunningSoftmax, value_scale: float) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sum-exp, which are 0 and -inf in rows without tokens."""
    is_empty = softmax.total == 0
    total = jnp.where(is_empty, 1.0, softmax.total)
    lse = jnp.where(is_empty, -jnp.inf, softmax.peak + jnp.log(total))
    return softmax.out * value_scale / total[..., None], lse


def attend(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Run a decode or a prefill."""
    return (decode if args.query_lens is None else prefill)(args, options)


def attend_ragged(args: RaggedArgs, options: RaggedOptions) -> tuple[jax.Array, jax.Array]:
    """Attend with the chunks of all sequences of a ragged batch."""
    return attend_in_parts(decode, attend_to_chunks, args, options)
