r"""Paged attention on TPUs, in Pallas, compiled by Mosaic.

A single kernel computes decode and prefill: a decode is a prefill with single-token chunks. Each
grid step computes a tile of queries. It loops over the tiles of keys that these queries see. The
grid steps run in order. While a tile of keys is computed, the next tile is copied. The last tile of
a grid step is computed while the first tile of the next grid step is copied::

    grid step    0 (sequence 0)    1 (sequence 1)             2 ...
    computes     tile 0   tile 1   tile 0   tile 1   tile 2   tile 0
    fetches      tile 1   tile 0   tile 1   tile 2   tile 0   ...
                          of 1                       of 2

    one layer of the pool, in HBM      buffer in VMEM, two slots
    +----------+                       slot [K, N, lanes]
    | block  7 | --- copy [K, C, lanes] --> tokens 0..C-1    \
    | block 31 | --- copy [K, C, lanes] --> tokens C..2C-1    >  scores [R, N] with q [R, D],
    |   ...    |                              ...            /   one KV head after the other
    +----------+
      block ids from the block table, in scalar memory

A copy moves a block with all of its heads, which are contiguous in the pool. The R rows of a query
tile are pairs of a token and a head of the group. The query heads of a group therefore share one
matmul, and a group may have any size. The online softmax (Milakov and Gimelshein, 2018) is float32.

The kernel gets the whole pool and the index of the layer. The last dimension of the pool must be a
multiple of 128 lanes. Otherwise, XLA gives the pool a layout with blocks as the innermost
dimension, and copies the whole pool before every call (compilers for v5e and v6e of jax 0.10.2 and
0.12.0). XLA gathers the scales of quantised pools before it calls the kernel. It may copy all
scales of the layer for this.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.mosaic_tpu.device import device_refusal
from paged_jax.kernels.mosaic_tpu.kernel import (
    MAX_SCALARS,
    VMEM_BYTES,
    AttentionTiling,
    PoolRefs,
    SoftmaxRefs,
    attention_kernel,
    choose_tiling,
    div,
    dtype_refusal,
)
from paged_jax.kernels.op_args import AttentionArgs, Options
from paged_jax.kernels.opaque_call import only_on
from paged_jax.kernels.padding import LANES, round_up_to_lanes
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem


def refusal(problem: Problem, interpret: Interpret = False) -> str | None:
    """Return why the kernels do not support `problem`, or None if they do."""
    if not interpret and (reason := device_refusal()) is not None:
        return reason
    C, M, lanes = problem["C"], problem["M"], problem.lanes
    if (reason := problem.separate_values_refusal) is not None:
        return reason
    if lanes % LANES:
        return (
            f"XLA would copy pools with a last dimension of {lanes} at every call; create the "
            f"cache with a last dimension of {round_up_to_lanes(lanes)}, a multiple of {LANES}"
        )
    if C < 8 or C & (C - 1):
        return f"the block size must be a power of two of at least 8, got {C}"
    if M > MAX_SCALARS:
        return (
            f"a row of the block table must fit scalar memory, {MAX_SCALARS} entries, got "
            f"{M}; use larger blocks"
        )
    return dtype_refusal(problem, "int8", "float8_e4m3fn")


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def attend(
    args: AttentionArgs, options: Options, interpret: Interpret = False
) -> tuple[jax.Array, jax.Array]:
    """Run a decode or a prefill. A decode is a prefill with single-token chunks."""
    if args.query_lens is not None:
        return _prefill(args, options, interpret)
    out, lse = _prefill(args.as_prefill(), options, interpret)
    return out[:, 0], lse[:, 0]


def _prefill(
    args: AttentionArgs, options: Options, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel.

    If the block tables do not fit scalar memory, the kernel is called once for each of several
    parts of the batch.
    """
    B, M = args.block_tables.shape
    # scalar memory also holds two lengths of each sequence, hence the 2
    step = max(MAX_SCALARS // (M + 2), 1)
    if B <= step:
        return _call_kernel(args, options, interpret)
    parts = []
    for b in range(0, B, step):
        rows = {
            name: getattr(args, name)[b : b + step]
            for name in ("q", "block_tables", "context_lens", "query_lens")
        }
        parts.append(_call_kernel(args._replace(**rows), options, interpret))
    outs, lses = zip(*parts, strict=True)
    return jnp.concatenate(outs), jnp.concatenate(lses)


def _call_kernel(
    args: AttentionArgs, options: Options, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    q, pools, block_tables, context_lens, query_lens, sinks, layer = args
    assert isinstance(pools, Pools)
    B, T, H, D = q.shape
    U = options.output_dim(D)
    *_, K, C, lanes = pools.k.shape
    tiling = choose_tiling(T, H // K, block_tables.shape[1], pools.k)
    Q, R, N = tiling.num_query_tiles, tiling.rows, tiling.keys

    sources = PoolRefs(*pools)
    if pools.is_quantised:
        gather = functools.partial(_gather_scales, block_tables, layer, tiling)
        sources = PoolRefs(*pools[:2], *jax.tree.map(gather, pools[2:]))
    column = pltpu.VMEM((K, R, 1), jnp.float32)

    call = pl.pallas_call(
        functools.partial(attention_kernel, tiling=tiling, options=options),
        out_shape=(
            jax.ShapeDtypeStruct((B, Q, K, R, U), q.dtype),
            jax.ShapeDtypeStruct((B, Q, K, R), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B * Q,),
            in_specs=(
                _query_tile(Q, K, R, D),
                None if sinks is None else pl.BlockSpec((K, R, 1), lambda *_: (0, 0, 0)),
                jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), sources),
            ),
            out_specs=(_query_tile(Q, K, R, U), _query_tile(Q, K, R)),
            scratch_shapes=(
                _buffers(pools, K, N, lanes),
                pltpu.SemaphoreType.DMA((2, len(PoolRefs._fields))),
                pltpu.SMEM((1,), jnp.int32),
                SoftmaxRefs(column, column, pltpu.VMEM((K, R, U), jnp.float32)),
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            # Run the grid steps in order ("arbitrary"), because each grid step starts to copy the
            # first tile of the next one.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_BYTES,
            # The ids of blocks and layers are in range. With checks, issuing the copies of a block
            # would take twice as many instructions.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_attention",
    )
    out, lse = (call if interpret else functools.partial(only_on, "tpu", call))(
        jnp.asarray(layer, jnp.int32).reshape(1),
        block_tables.reshape(-1),
        context_lens,
        query_lens,
        _to_rows(q, K, tiling),
        None if sinks is None else _sink_rows(sinks, K, tiling),
        sources,
    )
    return _from_rows(out, T, tiling), _from_rows(lse, T, tiling)


def _buffers(pools: Pools, K: int, N: int, lanes: int) -> PoolRefs:
    """Return the VMEM buffers: two tiles of N tokens for each array of the pools."""
    values = pltpu.VMEM((2, K, N, lanes), pools.k.dtype)
    scales = pltpu.VMEM((2, K, N), jnp.float32)
    buffers = PoolRefs(values, values, scales, scales)
    return PoolRefs(*(None if x is None else y for x, y in zip(pools, buffers, strict=True)))


def _query_tile(num_query_tiles: int, *shape: int) -> pl.BlockSpec:
    """Return a block spec: each grid step gets its tile of an array ``[B, Q, *shape]``."""

    def query_tile_index_map(grid_step, *_):
        b = div(grid_step, num_query_tiles)
        return (b, grid_step - b * num_query_tiles, *(0 for _ in shape))

    return pl.BlockSpec((None, None, *shape), query_tile_index_map)


def _to_rows(q: jax.Array, K: int, tiling: AttentionTiling) -> jax.Array:
    """Cut ``[B, T, H, D]`` into tiles of queries, ``[B, Q, K, R, D]``."""
    B, T, _, D = q.shape
    num_tiles, queries, G = tiling.num_query_tiles, tiling.queries, tiling.G
    q = jnp.pad(q, ((0, 0), (0, num_tiles * queries - T), (0, 0), (0, 0)))
    q = q.reshape(B, num_tiles, queries, K, G, D).transpose(0, 1, 3, 2, 4, 5)
    return q.reshape(B, num_tiles, K, tiling.rows, D)


def _from_rows(x: jax.Array, T: int, tiling: AttentionTiling) -> jax.Array:
    """Undo `_to_rows` for an array ``[B, Q, K, R, ...]``; return ``[B, T, H, ...]``."""
    B, num_tiles, K, _, *D = x.shape
    x = jnp.moveaxis(x.reshape(B, num_tiles, K, tiling.queries, tiling.G, *D), 2, 3)
    return x.reshape(B, num_tiles * tiling.queries, K * tiling.G, *D)[:, :T]


def _sink_rows(sinks: jax.Array, K: int, tiling: AttentionTiling) -> jax.Array:
    """Return the sink of the query head of each row, f32 ``[K, R, 1]``."""
    shape = K, tiling.queries, tiling.G
    rows = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, 1, tiling.G), shape)
    return rows.reshape(K, tiling.rows, 1)


def _gather_scales(
    block_tables: jax.Array, layer: int | jax.Array, tiling: AttentionTiling, scale: jax.Array
) -> jax.Array:
    """Gather the scales of each sequence, f32 ``[B, K, M * C]``, before the kernel runs.

    The last dimension is padded to a multiple of a key tile. The kernel cannot gather the scales
    itself. It would copy the scales of each block to the lanes of the block's tokens. But a copy
    must start at a multiple of 128 lanes, and a block usually has fewer than 128 tokens.
    """
    _, P, K, C = scale.shape
    B, M = block_tables.shape
    # Slice the layer out before the reshape to one row per block. XLA changes the layout for this
    # reshape, and then copies only the scales of this layer.
    layer_scales = lax.dynamic_index_in_dim(scale, layer, keepdims=False).reshape(P, K * C)
    rows = jnp.clip(block_tables, 0, P - 1)
    gathered = layer_scales.at[rows].get(mode="promise_in_bounds")
    gathered = gathered.reshape(B, M, K, C).transpose(0, 2, 1, 3).reshape(B, K, M * C)
    return jnp.pad(gathered, ((0, 0), (0, 0), (0, -M * C % tiling.keys)))
