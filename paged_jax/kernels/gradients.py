"""Backward pass of paged attention, in plain JAX, shared by all backends.

The forward pass stores no array of size queries x tokens. The backward pass recomputes the softmax
weights of a tile from its scores and the log-sum-exp of each row (Dao et al., 2022, FlashAttention,
section 3.1). ``x_bar`` stands for the gradient with respect to ``x``. Each query row has::

    capped = soft_cap * tanh(scale * q . k / soft_cap)        weight = exp(capped - lse)
    capped_bar = weight * (out_bar . v - shift)               shift = out_bar . out - lse_bar
    sink_bar = exp(sink - lse) * -shift

A query tile has B' chunks x T' queries, at most QUERIES in total::

    for each query tile:  q, out_bar, lse  [B', T']
        while a chunk of the tile has tokens left:
            k, v  [B', TILE tokens]  gathered  ->  q_bar, carried by the loop
                                               ->  k_bar, v_bar, added to one layer of the pool

Loop bounds are dynamic, so the cost is proportional to the number of tokens. Temporary memory is
one tile, plus arrays as large as q and as one layer of the pools. Gradients with respect to the
pools are computed only if they are requested. If only the queries are differentiated, as in a
policy gradient, no array of the size of a pool is allocated.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from paged_jax.kernels.derivatives import differentiable_once
from paged_jax.kernels.kv_dtypes import KVDtype, wider_dtype
from paged_jax.kernels.op import OpCall
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.opaque_call import typed_jit, without_index_checks
from paged_jax.kernels.pools import Pages, Pools

# Maximum number of query tokens in a loop step. They belong to one long chunk or to several short
# chunks.
QUERIES = 128
# Maximum number of keys of a sequence in a loop step.
TILE = 128


class Gradients(NamedTuple):
    """Gradients with respect to the arguments of an attention op.

    Attributes:
      q: gradient with respect to the queries.
      k: ``[P, K, C, D]``, gradient with respect to one layer of the pool of keys. At least float32,
        because it is a sum over many queries. None if not requested.
      v: gradient with respect to the values, like `k`. None if the values are a part of the keys:
        `k` is then the sum of both gradients.
      sinks: gradient with respect to the sinks; None if the call has no sinks.
    """

    q: jax.Array
    k: jax.Array | None
    v: jax.Array | None
    sinks: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_differentiably(call: OpCall, args: AttentionArgs) -> tuple[jax.Array, jax.Array]:
    """Run a decode or a prefill so that `jax.grad` can differentiate it.

    `jax.grad` can differentiate ``(out, lse)`` once, with respect to `q`, `sinks` and
    floating-point pools.

    Raises:
      NotImplementedError: a gradient with respect to a quantised pool or its scales is requested.
    """
    return call.run(args)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("args", "out", "lse", "layer"),
    meta_fields=("num_layers",),
)
@dataclass(frozen=True)
class _Residuals:
    """Arrays that the forward pass keeps for the backward pass.

    Attributes:
      args: arrays of the call. If a gradient with respect to the pools is requested, the pools have
        only the layer that the call reads.
      out: output of the call.
      lse: log-sum-exp of the call.
      layer: index of the layer that the call reads, in the original pools.
      num_layers: number of layers of the original pools; None if no gradient with respect to the
        pools is requested.
    """

    args: AttentionArgs
    out: jax.Array
    lse: jax.Array
    layer: int | jax.Array
    num_layers: int | None


def _forward(call: OpCall, primals: AttentionArgs):
    has_gradient = [leaf.perturbed for leaf in jax.tree.leaves(primals.pools)]
    args: AttentionArgs = custom_vjp_primal_tree_values(primals)
    args = differentiable_once("paged attention", args)
    pools, layer = args.pools, args.layer
    assert isinstance(pools, Pools)
    out, lse = call.run(args)
    if not any(has_gradient):
        return (out, lse), _Residuals(args, out, lse, layer, None)
    if pools.is_quantised:
        raise NotImplementedError(
            f"paged attention: pools must be floating point to be differentiated, got "
            f"{pools.k.dtype}. Stop the gradient in pools and scales with jax.lax.stop_gradient."
        )
    # For the backward pass, keep only the layer that the call reads. If the whole pools were kept,
    # each layer of a model would keep its own version of them, because each layer writes to the
    # pools before it reads them.
    layer_pools = pools.map(lambda pool: lax.dynamic_index_in_dim(pool, layer, keepdims=True))
    args = args._replace(pools=layer_pools, layer=jnp.zeros_like(layer))
    return (out, lse), _Residuals(args, out, lse, layer, pools.k.shape[0])


def _backward(call: OpCall, residuals: _Residuals, bars):
    residuals, bars = differentiable_once("paged attention", (residuals, bars))
    out_bar, lse_bar = (
        jnp.zeros_like(primal) if isinstance(bar, SymbolicZero) else bar
        for primal, bar in zip((residuals.out, residuals.lse), bars, strict=True)
    )
    args, num_layers = residuals.args, residuals.num_layers
    gradients = attention_gradients(
        args, call.options, residuals.out, residuals.lse, out_bar, lse_bar,
        wants_pools=num_layers is not None,
    )  # fmt: skip
    pools_bar = None
    if num_layers is not None:
        # If the pools have no pool of values, `gradients.v` is None.
        bars_of_layer: Any = gradients.k, gradients.v
        pools_bar = Pools(
            *jax.tree.map(
                lambda pool, bar: _only_layer(pool, bar, residuals.layer, num_layers),
                args.pools[:2],
                bars_of_layer,
            )
        )
    # None means that there is no gradient: integers have none, sinks may be None, and the gradient
    # of the pools may not have been requested.
    args_bar: Any = AttentionArgs(gradients.q, pools_bar, None, None, None, gradients.sinks, None)  # type: ignore
    return (args_bar,)


def _only_layer(
    pool: jax.Array, bar: jax.Array, layer: int | jax.Array, num_layers: int
) -> jax.Array:
    """Return the gradient with respect to a pool: `bar` for layer `layer`, zeros for the others.

    The padding of the last dimension is zero too.
    """
    bar = jnp.pad(bar, ((0, 0),) * 3 + ((0, pool.shape[-1] - bar.shape[-1]),)).astype(pool.dtype)
    # Use `where` instead of updating an array of zeros. XLA would make a single array of zeros for
    # the gradients of K and V, and then copy it for each of them.
    is_layer = jnp.arange(num_layers, dtype=jnp.int32) == layer
    return jnp.where(jnp.expand_dims(is_layer, (1, 2, 3, 4)), bar[None], 0)


attend_differentiably.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(without_index_checks, static_argnums=(1,))
@functools.partial(typed_jit, static_argnames=("options", "wants_pools"))
def attention_gradients(
    args: AttentionArgs,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    out_bar: jax.Array,
    lse_bar: jax.Array,
    *,
    wants_pools: bool,
) -> Gradients:
    """Compute the gradients with respect to the arguments of a decode or prefill.

    `out` and `lse` are the results of the forward pass. `out_bar` and `lse_bar` are the gradients
    with respect to them, which are ignored in rows that see no token. `wants_pools` says whether to
    compute the gradients with respect to the pools.
    """
    if args.query_lens is not None:
        return _prefill_gradients(args, options, out, lse, out_bar, lse_bar, wants_pools)
    # An empty sequence gets no query, because its row of `q` may contain NaN.
    chunks = args.as_prefill()._replace(query_lens=jnp.minimum(args.context_lens, 1))
    out, lse, out_bar, lse_bar = (x[:, None] for x in (out, lse, out_bar, lse_bar))
    gradients = _prefill_gradients(chunks, options, out, lse, out_bar, lse_bar, wants_pools)
    return gradients._replace(q=gradients.q[:, 0])


def _prefill_gradients(
    args: AttentionArgs,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    out_bar: jax.Array,
    lse_bar: jax.Array,
    wants_pools: bool,
) -> Gradients:
    q, pools, block_tables, context_lens, query_lens, sinks, layer = args
    assert query_lens is not None
    B, T, H, D = q.shape
    P, K, C = pools.num_blocks, pools.num_kv_heads, pools.block_size
    dtype = wider_dtype(q.dtype, jnp.float32)
    # Rows that see no token have constant results, so their gradients are 0.
    is_row = lse != -jnp.inf
    shift = jnp.sum(out.astype(dtype) * out_bar.astype(dtype), axis=-1) - lse_bar
    shift_BTH = jnp.where(is_row, shift, 0)
    sinks_bar = None
    if sinks is not None:
        weights = jnp.where(is_row, jnp.exp(sinks.astype(dtype)[None, None] - lse), 0)
        sinks_bar = -jnp.sum(weights * shift_BTH, axis=(0, 1)).astype(sinks.dtype)

    zeros = v_zeros = jnp.zeros((P, K, C, D), dtype) if wants_pools else None
    if pools.shares_values:
        v_zeros = None
    elif wants_pools:
        v_zeros = jnp.zeros((P, K, C, options.output_dim(D)), dtype)
    bars = Gradients(jnp.zeros_like(q), zeros, v_zeros, sinks_bar)
    if q.size == 0:
        return bars

    # For float32 queries, compute matmuls with the highest precision. For bfloat16 queries, the
    # default is enough: keys are usually bfloat16 too, and TF32, the default precision of GPUs,
    # represents bfloat16 exactly.
    precision = "highest" if jnp.finfo(q.dtype).bits >= 32 else "default"
    dot = functools.partial(jnp.einsum, precision=precision)
    chunks, queries = _tile_sizes(B, T)
    tiles_a_chunk = -(-T // queries)
    # Sort the chunks, so that chunks of similar lengths share a tile. Pad `order` with index B,
    # which is out of range. `_read_rows` reads a length of 0 for it, that is, an empty chunk.
    order = jnp.pad(jnp.argsort(context_lens), (0, -B % chunks), constant_values=B)

    def fold_queries(index: jax.Array, bars: Gradients) -> Gradients:
        chunk_B = lax.dynamic_slice_in_dim(order, index // tiles_a_chunk * chunks, chunks)
        token_T = index % tiles_a_chunk * queries + jnp.arange(queries, dtype=jnp.int32)
        rows = _read_rows(
            chunk_B, token_T, q, out_bar, lse, shift_BTH, context_lens, query_lens, num_kv_heads=K
        )
        tables_BM = block_tables.at[chunk_B].get(mode="fill", fill_value=P)
        q_bar, k_bar, v_bar = _fold_keys(
            rows, pools, tables_BM, layer, options, dot, bars.k, bars.v
        )
        q_bar = q_bar.reshape(chunks, K, queries, H // K, D).transpose(0, 2, 1, 3, 4)
        q_bar = q_bar.reshape(chunks, queries, H, D).astype(q.dtype)
        q_bar = bars.q.at[chunk_B[:, None], token_T[None]].set(q_bar, mode="drop")
        return bars._replace(q=q_bar, k=k_bar, v=v_bar)

    return lax.fori_loop(0, order.size // chunks * tiles_a_chunk, fold_queries, bars)


def _tile_sizes(batch: int, num_queries: int) -> tuple[int, int]:
    """Return the number of chunks in a tile, and the number of queries of each chunk."""
    queries = min(num_queries, QUERIES)
    return min(batch, QUERIES // queries), queries


class _QueryTile(NamedTuple):
    """T queries of each of B chunks. All arrays of floats are float32 or wider.

    Each chunk and KV head has R = T * G rows: one for each token and query head of the group.
    """

    q: jax.Array  # the queries, [B, K, R, D]
    out_bar: jax.Array  # the gradient of the output, [B, K, R, U]
    lse: jax.Array  # the log-sum-exp, [B, K, R]
    shift: jax.Array  # `shift` in the docstring of this module, [B, K, R]
    positions: jax.Array  # the positions of the tokens, ascending, then -1 for padding, i32 [B, T]


def _read_rows(
    chunk_B: jax.Array,
    token_T: jax.Array,
    q: jax.Array,
    out_bar: jax.Array,
    lse: jax.Array,
    shift_BTH: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    num_kv_heads: int,
) -> _QueryTile:
    context_B, query_B = (
        lens.at[chunk_B].get(mode="fill", fill_value=0) for lens in (context_lens, query_lens)
    )
    is_query_BT = token_T[None] < query_B[:, None]

    def read(x: jax.Array) -> jax.Array:
        x = x.at[chunk_B[:, None], token_T[None]].get(mode="fill", fill_value=0)
        x = x.astype(wider_dtype(x.dtype, jnp.float32))
        # Padding may be NaN. Set it to 0, because sums over queries multiply it by 0, and 0 * NaN
        # is NaN.
        x = jnp.where(jnp.expand_dims(is_query_BT, range(2, x.ndim)), x, 0)
        B, T, H, *D = x.shape
        x = x.reshape(B, T, num_kv_heads, H // num_kv_heads, *D)
        return jnp.moveaxis(x, 2, 1).reshape(B, num_kv_heads, -1, *D)

    positions_BT = (context_B - query_B)[:, None] + token_T[None]
    return _QueryTile(
        q=read(q),
        out_bar=read(out_bar),
        lse=read(lse),
        shift=read(shift_BTH),
        positions=jnp.where(is_query_BT, positions_BT, -1),
    )


def _fold_keys(
    rows: _QueryTile,
    pools: Pools | Pages,
    tables_BM: jax.Array,
    layer: int | jax.Array,
    options: Options,
    dot: Callable[..., jax.Array],
    k_bar: jax.Array | None,
    v_bar: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Compute the gradients for a tile of queries, in a loop over the keys that it sees.

    Args:
      rows: the tile.
      pools: keys and values.
      tables_BM: block tables of the chunks of the tile.
      layer: the layer to read.
      options: options of the call.
      dot: `jnp.einsum` with the precision to use.
      k_bar: gradient with respect to a layer of keys so far; None if it is not requested.
      v_bar: gradient with respect to a layer of values so far, or None.

    Returns:
      ``(q_bar, k_bar, v_bar)``: the gradient with respect to ``rows.q``, and the updated `k_bar`
      and `v_bar`.
    """
    P, C = pools.num_blocks, pools.block_size
    group = rows.q.shape[2] // rows.positions.shape[1]
    tile_blocks = max(min(TILE // C, tables_BM.shape[1]), 1)
    tile = tile_blocks * C
    last_B = jnp.max(rows.positions, axis=1)
    begin_B = jnp.zeros_like(last_B)
    if options.sliding_window is not None:
        begin_B = jnp.maximum(rows.positions[:, 0] - options.sliding_window + 1, 0) // tile

    def step(index, bars):
        q_bar, k_bar, v_bar = bars
        columns_M = jnp.arange(tile_blocks, dtype=jnp.int32)
        entries_BM = ((begin_B + index) * tile_blocks)[:, None] + columns_M[None]
        blocks_BM = jnp.take_along_axis(tables_BM, entries_BM, axis=1, mode="clip")
        # Table entries past the last token may be blocks of other sequences. Replace them by P,
        # which is out of range.
        blocks_BM = jnp.where(entries_BM * C <= last_B[:, None], blocks_BM, P)
        tokens_N = jnp.arange(tile, dtype=jnp.int32)
        positions_BN = ((begin_B + index) * tile)[:, None] + tokens_N[None]
        seen_BTN = positions_BN[:, None] <= rows.positions[..., None]
        if options.sliding_window is not None:
            window = options.sliding_window
            seen_BTN &= positions_BN[:, None] > rows.positions[..., None] - window
        # Keys that no query sees may be NaN. Set them to 0, because 0 * NaN is NaN.
        is_seen = seen_BTN.any(axis=1)[:, None, :, None]
        k, v = (jnp.where(is_seen, tokens, 0) for tokens in _gather(pools, layer, blocks_BM, rows))
        seen_BRN = jnp.repeat(seen_BTN, group, axis=1)
        weights, scores_bar = _weights(rows, k, v, seen_BRN[:, None], options, dot)
        q_bar += dot("bkrn,bknd->bkrd", scores_bar, k)
        if k_bar is None:
            return q_bar, k_bar, v_bar
        keys_bar = dot("bkrn,bkrd->bknd", scores_bar, rows.q)
        values_bar = dot("bkrn,bkru->bknu", weights, rows.out_bar)
        if v_bar is None:
            padding = keys_bar.shape[-1] - values_bar.shape[-1]
            keys_bar += jnp.pad(values_bar, ((0, 0),) * 3 + ((0, padding),))
        else:
            v_bar = _add_blocks(v_bar, blocks_BM, values_bar)
        return q_bar, _add_blocks(k_bar, blocks_BM, keys_bar), v_bar

    num_steps = jnp.max(last_B // tile + 1 - begin_B)
    return lax.fori_loop(0, num_steps, step, (jnp.zeros_like(rows.q), k_bar, v_bar))


def _weights(
    rows: _QueryTile, k: jax.Array, v: jax.Array, seen: jax.Array, options: Options, dot: Callable
) -> tuple[jax.Array, jax.Array]:
    """Return softmax weights and gradients with respect to ``q . k``, each ``[B, K, R, N]``."""
    capped = options.scale * dot("bkrd,bknd->bkrn", rows.q, k)
    if options.soft_cap is not None:
        capped = options.soft_cap * jnp.tanh(capped / options.soft_cap)
    weights = jnp.where(seen, jnp.exp(capped - rows.lse[..., None]), 0)
    weights_bar = dot("bkru,bknu->bkrn", rows.out_bar, v)
    scores_bar = options.scale * weights * (weights_bar - rows.shift[..., None])
    if options.soft_cap is not None:
        scores_bar *= 1 - jnp.square(capped / options.soft_cap)
    return weights, scores_bar


def _blocks_and_heads(blocks_BM: jax.Array, num_kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return the index that gathers ``[B, K, M, ...]`` from an array ``[P, K, ...]``."""
    return blocks_BM[:, None], jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]


def _gather(
    pools: Pools | Pages,
    layer: int | jax.Array,
    blocks_BM: jax.Array,
    # The result has the dtype and the sizes D and U of `rows`.
    rows: _QueryTile,
) -> tuple[jax.Array, jax.Array]:
    """Gather blocks of keys ``[B, K, M * C, D]`` and of values ``[B, K, M * C, U]``.

    Block ids out of range are clipped.
    """
    (B, M), K, dtype = blocks_BM.shape, pools.num_kv_heads, rows.q.dtype
    D, U = rows.q.shape[-1], rows.out_bar.shape[-1]
    if isinstance(pools, Pages):
        tokens = pools.kv.at[blocks_BM].get(mode="clip").astype(dtype)
        tokens = tokens.reshape(B, M * pools.block_size, K, -1, D)
        k, v = (jnp.swapaxes(tokens[:, :, :, part], 1, 2) for part in (0, -1))
        return k, v[..., :U]
    index = (layer, *_blocks_and_heads(blocks_BM, K))

    def gather(pool: jax.Array, scale: jax.Array | None, size: int) -> jax.Array:
        tokens = pool.at[index].get(mode="clip")[..., :size]
        scale = None if scale is None else scale.at[index].get(mode="clip")
        tokens = KVDtype.of(pool.dtype).dequantise(tokens, scale, dtype)
        return tokens.reshape(B, K, -1, size)

    k = gather(pools.k, pools.k_scale, D)
    return k, k[..., :U] if pools.v is None else gather(pools.v, pools.v_scale, U)


def _add_blocks(bar: jax.Array, blocks_BM: jax.Array, tokens_BKND: jax.Array) -> jax.Array:
    """Add the gradients of tokens to `bar`, ``[P, K, C, D]``, the gradient of a layer of a pool.

    Gradients of blocks with id P are dropped.
    """
    _, K, C, D = bar.shape
    blocks = tokens_BKND.reshape(len(blocks_BM), K, -1, C, D)
    return bar.at[_blocks_and_heads(blocks_BM, K)].add(blocks, mode="drop")
