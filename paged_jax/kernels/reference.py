"""Backend ``"reference"``, the definition of paged attention: gather, mask, softmax.

It is simple and slow. Tests compare the other backends with this backend, and this backend with a
float64 oracle. It needs no custom derivative rules.
"""

import functools

import jax
import jax.numpy as jnp

from paged_jax.kernels.backend import Backend, Kernel
from paged_jax.kernels.kv_dtypes import KVDtype, wider_dtype
from paged_jax.kernels.op_args import AttentionArgs, Options, RaggedArgs, RaggedOptions
from paged_jax.kernels.pools import Pages, Pools
from paged_jax.kernels.ragged_chunks import find_chunks, find_rows


@functools.partial(jax.jit, static_argnames="options")
def attend(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    """Run a decode or a prefill. A decode is a prefill with single-token chunks."""
    if args.query_lens is not None:
        return _prefill(args, options)
    out, lse = _prefill(args.as_prefill(), options)
    return out[:, 0], lse[:, 0]


@functools.partial(jax.jit, static_argnames="options")
def attend_ragged(args: RaggedArgs, options: RaggedOptions) -> tuple[jax.Array, jax.Array]:
    """Attend with each query of a ragged batch as the last token of a separate sequence."""
    chunks = find_chunks(args)
    rows = find_rows(args, chunks)
    before = args.context_lens - chunks.lens
    context_lens = jnp.where(rows.is_query, before[rows.sequence] + rows.token + 1, 0)
    tables = args.block_tables[rows.sequence]
    return rows.mask(*attend(args.as_attention(args.q, tables, context_lens), options))


def _prefill(args: AttentionArgs, options: Options) -> tuple[jax.Array, jax.Array]:
    q, pools, block_tables, context_lens, query_lens, sinks, layer = args
    assert query_lens is not None
    B, T, H, D = q.shape
    K, C = pools.num_kv_heads, pools.block_size
    dtype = wider_dtype(q.dtype, jnp.float32)
    tokens_T = jnp.arange(T, dtype=jnp.int32)
    is_query_BT = tokens_T[None] < query_lens[:, None]
    query_positions = (context_lens - query_lens)[:, None, None] + tokens_T[None, :, None]
    N = block_tables.shape[1] * C
    key_positions = jnp.arange(N, dtype=jnp.int32)[None, None]
    seen_BTN = is_query_BT[..., None] & (key_positions <= query_positions)
    if options.sliding_window is not None:
        seen_BTN &= key_positions > query_positions - options.sliding_window

    # Keys and values of tokens that no query sees may be NaN. Set them to 0, because 0 * NaN is
    # NaN, both in the output and in the gradient.
    is_seen = seen_BTN.any(axis=1)[:, :, None, None]
    U = options.output_dim(D)
    k_BNKD, v_BNKU = (
        jnp.where(is_seen, tokens[..., :size], 0)
        for tokens, size in zip(_gather(pools, layer, block_tables, dtype), (D, U), strict=True)
    )

    q_BTKGD = q.astype(dtype).reshape(B, T, K, H // K, D)
    scores = options.scale * jnp.einsum("btkgd,bnkd->btkgn", q_BTKGD, k_BNKD, precision="highest")
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores_BTHN = jnp.where(seen_BTN[:, :, None], scores.reshape(B, T, H, N), -jnp.inf)
    if sinks is None:
        sinks = jnp.full(H, -jnp.inf, dtype)
    sinks_BTH = jnp.where(is_query_BT[..., None], sinks.astype(dtype)[None, None], -jnp.inf)
    peak = jnp.maximum(jnp.max(scores_BTHN, axis=-1, initial=-jnp.inf), sinks_BTH)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    weights_BTHN = jnp.exp(scores_BTHN - peak[..., None])
    total = jnp.sum(weights_BTHN, axis=-1) + jnp.exp(sinks_BTH - peak)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    weights = (weights_BTHN / total[..., None]).reshape(B, T, K, H // K, N)
    out = jnp.einsum("btkgn,bnku->btkgu", weights, v_BNKU, precision="highest")
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total))
    return (out * options.value_scale).reshape(B, T, H, U).astype(q.dtype), lse


def _gather(
    pools: Pools | Pages, layer: int | jax.Array, tables: jax.Array, dtype
) -> tuple[jax.Array, jax.Array]:
    """Gather keys and values of each sequence, ``[B, M * C, K, D]``, as `dtype`.

    Blocks with an id out of range are NaN.
    """
    # Clip the table entries, so that they are in range. The tokens of blocks that were out of range
    # are set to NaN below, after the conversion to floats, because integers have no NaN.
    P = pools.num_blocks
    is_block = ((tables >= 0) & (tables < P))[:, :, None, None, None]
    rows = jnp.clip(tables, 0, P - 1)
    if isinstance(pools, Pages):
        pages = pools.kv[rows].astype(dtype)  # shape [B, M, C, 2 * K, D]
        starts = (0, 0) if pools.shares_values else (0, 1)
        parts = [pages[:, :, :, part::2] for part in starts]
    else:
        parts, kv = [], KVDtype.of(pools.dtype)
        keys = pools.k, pools.k_scale
        for pool, scale in (keys, keys if pools.v is None else (pools.v, pools.v_scale)):
            values, scale = pool[layer][rows], None if scale is None else scale[layer][rows]
            values = kv.dequantise(values, scale, dtype)
            parts.append(jnp.swapaxes(values, 2, 3))  # shape [B, M, C, K, D]
    k, v = (jnp.where(is_block, part, jnp.nan) for part in parts)
    return k.reshape(len(tables), -1, *k.shape[3:]), v.reshape(len(tables), -1, *v.shape[3:])


# JAX differentiates the plain code of a decode or a prefill, to any order.
_attention = Kernel(attend, is_differentiable=True)
REFERENCE = Backend({"decode": _attention, "prefill": _attention, "ragged": Kernel(attend_ragged)})
