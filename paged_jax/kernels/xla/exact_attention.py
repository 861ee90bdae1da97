"""Attention in plain JAX whose results do not depend on the shapes of a call.

A query reads the tokens of its sequence in tiles, in order. Tiles start at multiples of TILE tokens
from the start of the sequence. All operations are elementwise, and all sums are `add_halves`. The
result of a query therefore has the same bits in a decode and in a prefill, in any batch, chunk and
block size::

    for each tile of QUERIES queries of a sequence:
        for each tile of keys that one of them sees:    [ 0 .. 31 | 32 .. 63 | 64 .. 95 | ...
            products  [K, queries, D, TILE]   -> scores  -> online softmax
            products  [K, queries, TILE, U]   -> output

A tile that a query does not see does not change the state of this query.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.bits import take_rows
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.rounding import add_halves, round_product, round_to
from paged_jax.kernels.xla.attention import (
    LOWEST,
    RunningSoftmax,
    finish_softmax,
    start_softmax,
)

# Number of tokens in a tile of keys. The result of a query depends on it.
TILE = 32

# Maximum number of queries that read a tile together.
QUERIES = 16


@functools.partial(jax.jit, static_argnames="options")
def attend_exactly(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Run a decode or a prefill."""
    if args.query_lens is not None:
        out, lse, is_query = _attend(args, args.query_lens, options)
        return out, jnp.where(is_query[..., None], lse, -jnp.inf)
    chunks = args.as_prefill()
    out, lse, _ = _attend(chunks, jnp.minimum(args.context_lens, 1), options)
    return out[:, 0], lse[:, 0]


def _attend(
    args: AttentionArgs, query_lens: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend with chunks of queries ``[B, T, H, D]``.

    Returns:
      The output ``[B, T, H, U]``; the log-sum-exp, f32 ``[B, T, H]``; and whether each query is
      one, bool ``[B, T]``, or padding.
    """
    pools = args.pools
    assert isinstance(pools, Pools)
    (B, T, H, D), K = args.q.shape, pools.num_kv_heads
    G, U = H // K, options.output_dim(D)
    queries = min(T, QUERIES)
    steps = jnp.arange(T, dtype=jnp.int32)[None]
    is_query = steps < query_lens[:, None]
    positions = jnp.where(is_query, (args.context_lens - query_lens)[:, None] + steps, -1)

    def tiles(x: jax.Array, fill: int = 0) -> jax.Array:
        """Divide ``[B, T, ...]`` into tiles ``[B * num_tiles, queries, ...]``."""
        padding = [(0, 0), (0, -T % queries), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, padding, constant_values=fill)
        return x.reshape(-1, queries, *x.shape[2:])

    q = lax.optimization_barrier(round_to(args.q, args.q.dtype) * options.scale)
    q_KRD = jnp.moveaxis(tiles(q).reshape(-1, queries, K, G, D), 2, 1)
    q_KRD = q_KRD.reshape(-1, K, queries * G, D)
    num_tiles = q_KRD.shape[0] // B
    positions_R = jnp.repeat(tiles(positions, -1), G, axis=1)
    tables = jnp.repeat(args.block_tables, num_tiles, axis=0)
    sinks_KR = None
    if args.sinks is not None:
        sinks_KR = jnp.tile(args.sinks.reshape(K, G), (1, queries))

    def attend_tile(tile: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_KRD, positions_R, table = tile
        window = options.sliding_window

        def step(index: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
            tokens = index * TILE + jnp.arange(TILE, dtype=jnp.int32)
            seen = tokens[None] <= positions_R[:, None]
            if window is not None:
                seen &= tokens[None] > positions_R[:, None] - window
            k, v = _gather(pools, args.layer, table, tokens, (D, U))
            return _fold(softmax, q_KRD, k, v, seen[None], options.soft_cap)

        begin = jnp.zeros((), jnp.int32)
        if window is not None:
            last = jnp.iinfo(jnp.int32).max
            first = jnp.min(jnp.where(positions_R < 0, last, positions_R))
            begin = jnp.maximum(first - window + 1, 0) // TILE
        end = jnp.max(positions_R) // TILE + 1
        empty = start_softmax((K, positions_R.size), U, sinks_KR)
        return finish_softmax(lax.fori_loop(begin, end, step, empty), options.value_scale)

    out, lse = lax.map(attend_tile, (q_KRD, positions_R, tables))

    def join(x: jax.Array) -> jax.Array:
        """Undo `tiles`, and return ``[B, T, H, ...]``."""
        x = jnp.moveaxis(x.reshape(-1, K, queries, G, *x.shape[3:]), 1, 2)
        return x.reshape(B, num_tiles * queries, H, *x.shape[4:])[:, :T]

    out, lse = lax.optimization_barrier((join(out), join(lse)))
    return round_to(out, args.q.dtype).astype(args.q.dtype), lse, is_query


def _gather(
    pools: Pools,
    layer: int | jax.Array,
    table: jax.Array,
    tokens: jax.Array,
    sizes: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    """Copy tokens out of the pools, as float32 keys and values ``[K, TILE, size]``.

    `table` is i32 ``[M]``, the blocks of the sequence, and `tokens` are positions in the sequence.
    Tokens past the end of the table may have any values.
    """
    _, P, K, C, _ = pools.k.shape
    blocks = jnp.clip(jnp.take(table, tokens // C, mode="clip"), 0, P - 1)
    heads = jnp.arange(K, dtype=jnp.int32)[:, None]
    rows = ((layer * P + blocks)[None] * K + heads) * C + tokens[None] % C

    def take(pool: jax.Array, scale: jax.Array | None, size: int) -> jax.Array:
        values = take_rows(pool.reshape(-1, pool.shape[-1]), rows)[..., :size]
        if scale is None:
            return round_to(values, pool.dtype)
        return KVDtype.of(pool.dtype).dequantise(values, take_rows(scale.reshape(-1), rows))

    k = take(pools.k, pools.k_scale, sizes[0])
    return k, k[..., : sizes[1]] if pools.v is None else take(pools.v, pools.v_scale, sizes[1])


def _fold(
    softmax: RunningSoftmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    soft_cap: float | None,
) -> RunningSoftmax:
    """Add a tile of tokens to a softmax.

    Args:
      softmax: state before these tokens.
      q: f32 ``[K, R, D]``, the queries times ``options.scale``.
      k: f32 ``[K, TILE, D]``, keys.
      v: f32 ``[K, TILE, U]``, values.
      seen: bool ``[1, R, TILE]``, whether each query sees each token. Other tokens may be NaN.
      soft_cap: see `Options`.
    """
    products = q[..., None] * jnp.swapaxes(k, 1, 2)[:, None]
    scores = add_halves(round_product(products), -2)[..., 0, :]
    if soft_cap is not None:
        scores = round_product(soft_cap * jnp.tanh(scores / soft_cap))
    scores = jnp.where(seen, scores, LOWEST)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0.0)
    rescale = jnp.exp(softmax.peak - peak)
    products = jnp.where(seen[..., None], weights[..., None] * v[:, None], 0.0)
    total = add_halves(weights, -1)[..., 0]
    out = add_halves(round_product(products), -2)[..., 0, :]
    is_seen = jnp.any(seen, axis=-1)
    return RunningSoftmax(
        peak,
        jnp.where(is_seen, round_product(softmax.total * rescale) + total, softmax.total),
        jnp.where(
            is_seen[..., None],
            round_product(softmax.out * rescale[..., None]) + out,
            softmax.out,
        ),
    )
