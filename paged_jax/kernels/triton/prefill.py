"""Attention of prompt chunks on NVIDIA GPUs: Pallas through the Triton backend.

Causal flash attention (Dao, 2023) over the paged pool. The tokens of a chunk and the query heads
of a group are flattened into rows, so that any group fills a tile: row r of KV head k is token
``r // G`` and query head ``k * G + r % G``. One program attends with one tile of rows::

                    steps over the tokens of the sequence
                 0      1      2      3      4      5      6
    tile 2    [ all    all    all    all    all   masked masked]     masked: the diagonal, or the
    tile 1    [ all    all    all   masked masked]                   lower edge of a sliding window
    tile 0    [ all   masked masked]                                 all: every row sees every token
               context | chunk

    program (k, i, b): the i-th last tile of KV head k of sequence b, one tile of K and V a step

The last tiles take longest and start first, so that the short ones fill the gaps at the end. All
heads of a tile come before the next tile: programs that read the same blocks run side by side.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import AttentionArgs, Interpret, Options
from paged_jax.kernels.quantisation import is_quantised
from paged_jax.kernels.triton import tiles, tuning
from paged_jax.kernels.triton.instructions import Instructions, choose_instructions
from paged_jax.kernels.triton.pallas import pallas_call, plgpu

# Steps that all rows see are worth a loop of their own, without masks, from this many on: a loop
# waits for its first tile, which costs about as much as the masks of that many steps save (from
# instruction counts, not measured).
_FEWEST_UNMASKED = 4


def prefill(
    args: AttentionArgs,
    options: Options,
    *,
    interpret: Interpret = False,
    params: tuning.PrefillParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A chunk of queries for each sequence, in one launch.

    Args:
      args, options: the call, as `paged_jax.kernels.backend` says.
      interpret: how to interpret the kernel, if at all.
      params: launch parameters; those of `tuning` for this device and shape if None.
    """
    q, pools = args[:2]
    if params is None:
        K, C = pools.k.shape[2:4]
        params = tuning.prefill_params(
            tuning.device().kind,
            head_dim=q.shape[-1],
            group=q.shape[-2] // K,
            block_size=C,
            q_dtype=q.dtype,
            pool_dtype=pools.k.dtype,
        )
    return _prefill(args, options, params, interpret)


@functools.partial(jax.jit, static_argnames=("options", "params", "interpret"))
def _prefill(
    args: AttentionArgs, options: Options, params: tuning.PrefillParams, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    q, pools, block_tables, context_lens, query_lens, sinks, layer = args
    B, T, H, D = q.shape
    K = pools.k.shape[2]
    G = H // K
    words = pools._replace(k=tiles.as_words(pools.k), v=tiles.as_words(pools.v))
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    query_rows = min(params.query_rows, pl.next_power_of_2(T * G))
    return pallas_call(
        functools.partial(
            _attend_kernel,
            options=options,
            pool_dtype=pools.k.dtype,
            query_rows=query_rows,
            step_tokens=params.step_tokens,
            instructions=choose_instructions(interpret),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((B, T, H, D), q.dtype),
            jax.ShapeDtypeStruct((B, T, H), jnp.float32),
        ),
        grid=(K, pl.cdiv(T * G, query_rows), B),
        compiler_params=plgpu.CompilerParams(
            num_warps=params.num_warps, num_stages=params.num_stages
        ),
        interpret=interpret,
        name="paged_prefill",
    )(q, words, block_tables, context_lens, query_lens, sinks, layers)


class _Keys(NamedTuple):
    """Where the keys and values of one KV head of one sequence are.

    Attributes:
      pools: refs, as `tiles.as_words` has made them.
      pool_dtype: type of the numbers in their words.
      tables_ref: i32 ``[B, M]``.
      sequence, layer, head: scalars.
      head_dim: D.
    """

    pools: Any
    pool_dtype: Any
    tables_ref: Any
    sequence: jax.Array
    layer: jax.Array
    head: jax.Array
    head_dim: int


class _Run(NamedTuple):
    """Consecutive steps over the keys, from `begin` to before `end`."""

    begin: jax.Array
    end: jax.Array
    is_masked: bool


def _attend_kernel(
    q_ref: Any,
    pools: Any,
    tables_ref: Any,
    context_lens_ref: Any,
    query_lens_ref: Any,
    sinks_ref: Any,
    layer_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    options: Options,
    pool_dtype: Any,
    query_rows: int,
    step_tokens: int,
    instructions: Instructions,
) -> None:
    T, H, D = q_ref.shape[1:]
    G = H // pools.k.shape[2]
    head, sequence = pl.program_id(0), pl.program_id(2)
    # Lengths are bounded by what holds them: an address past an array is no error on a GPU.
    capacity = tables_ref.shape[1] * pools.k.shape[3]
    context_len = jnp.minimum(context_lens_ref[sequence], capacity)
    query_len = jnp.minimum(query_lens_ref[sequence], jnp.minimum(context_len, T))
    num_rows = query_len * G
    first_row = (pl.num_programs(1) - 1 - pl.program_id(1)) * query_rows

    rows = first_row + jnp.arange(query_rows, dtype=jnp.int32)
    tokens, heads = tiles.divide(rows, G), head * G + tiles.remainder(rows, G)
    lanes = jnp.arange(_num_lanes(D, pool_dtype), dtype=jnp.int32)
    place = (sequence, tokens[:, None], heads[:, None], lanes[None])
    is_query, is_lane = tokens < query_len, (lanes < D)[None]

    def write(out: jax.Array, lse: jax.Array) -> None:
        is_row = tokens < T
        plgpu.store(out_ref.at[*place], out.astype(out_ref.dtype), mask=is_row[:, None] & is_lane)
        plgpu.store(lse_ref.at[sequence, tokens, heads], lse, mask=is_row)

    @pl.when(first_row >= num_rows)
    def _():
        nothing = jnp.zeros((query_rows, lanes.size), jnp.float32)
        write(nothing, jnp.full(query_rows, -jnp.inf, jnp.float32))

    @pl.when(first_row < num_rows)
    def _():
        q = plgpu.load(q_ref.at[*place], mask=is_query[:, None] & is_lane, other=0)
        sinks = None
        if sinks_ref is not None:
            sinks = plgpu.load(sinks_ref.at[heads], mask=is_query, other=-jnp.inf)
        chunk_start = context_len - query_len
        last_row = jnp.minimum(first_row + query_rows, num_rows) - 1
        softmax = _fold_keys(
            tiles.start_softmax(query_rows, lanes.size, sinks, has_scales=is_quantised(pool_dtype)),
            q,
            chunk_start + tokens,
            chunk_start + tiles.divide(first_row, G),
            chunk_start + tiles.divide(last_row, G),
            _Keys(pools, pool_dtype, tables_ref, sequence, layer_ref[0], head, D),
            options,
            step_tokens,
            instructions,
        )
        out, lse = tiles.finish(softmax)
        # The chunk's padding has seen tokens as its queries have.
        write(jnp.where(is_query[:, None], out, 0.0), jnp.where(is_query, lse, -jnp.inf))


def _fold_keys(
    softmax: tiles.Softmax,
    q: jax.Array,
    positions: jax.Array,
    first: jax.Array,
    last: jax.Array,
    keys: _Keys,
    options: Options,
    step_tokens: int,
    instructions: Instructions,
) -> tiles.Softmax:
    """Fold the tokens that a tile of R rows sees into its softmax.

    Args:
      softmax: the softmax in progress of R rows.
      q: ``[R, lanes]``, as they are.
      positions: i32 ``[R]``, places of the queries in their sequence.
      first, last: the least and the greatest of them, padding left out.
    """
    dtype = tiles.operand_dtype(q.dtype, keys.pool_dtype)
    q, unit = tiles.fit_queries(q, dtype)
    window = options.sliding_window
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0)

    def tokens_of(step):
        tokens = step * step_tokens + jnp.arange(step_tokens, dtype=jnp.int32)
        return tokens, (tokens >= begin) & (tokens <= last)

    def block_ids_of(step):
        C = keys.pools.k.shape[3]
        return tiles.load_block_ids(keys.tables_ref, keys.sequence, *tokens_of(step), C)

    def fold_step(step, carry, is_masked):
        softmax, block_ids = carry
        next_block_ids = block_ids_of(step + 1)
        tokens, is_read = tokens_of(step)
        is_seen = tokens[None] <= positions[:, None]
        if window is not None:
            is_seen &= tokens[None] > positions[:, None] - window
        if not is_masked:
            # Constants, with which the compiler leaves the masks out.
            is_read, is_seen = jnp.full(step_tokens, True), jnp.full((1, step_tokens), True)
        place = (keys.layer, block_ids, keys.head, tokens, is_read)
        k, v = (
            _load_heads(pool_ref, place, keys, dtype, instructions)
            for pool_ref in (keys.pools.k, keys.pools.v)
        )
        k_scale = tiles.load_scales(keys.pools.k_scale, *place)
        v_scale = tiles.load_scales(keys.pools.v_scale, *place)
        scores, factor = tiles.score(q, unit, k, k_scale, is_seen, options)
        softmax = tiles.fold(softmax, scores, factor, v, v_scale, tiles.weigh_rounded, instructions)
        return softmax, next_block_ids

    runs = _cut_into_runs(first, last, step_tokens, window)
    carry = (softmax, block_ids_of(runs[0].begin))
    for run in runs:
        fold = functools.partial(fold_step, is_masked=run.is_masked)
        carry = lax.fori_loop(run.begin, run.end, fold, carry)
    return carry[0]


def _cut_into_runs(
    first: jax.Array, last: jax.Array, step_tokens: int, window: int | None
) -> list[_Run]:
    """Separate the steps whose tokens all queries of a tile see from those that need masks.

    Args:
      first, last: positions of the tile's first and last query.
    """
    begin = full_begin = jnp.int32(0)
    full_end, end = tiles.divide(first + 1, step_tokens), tiles.divide(last, step_tokens) + 1
    if window is not None:
        begin = tiles.divide(jnp.maximum(first - window + 1, 0), step_tokens)
        full_begin = tiles.divide(jnp.maximum(last - window, -1) + step_tokens, step_tokens)
    is_worth_it = full_end - full_begin >= _FEWEST_UNMASKED
    full_begin, full_end = (jnp.where(is_worth_it, x, begin) for x in (full_begin, full_end))
    runs = [_Run(full_begin, full_end, False), _Run(full_end, end, True)]
    return runs if window is None else [_Run(begin, full_begin, True), *runs]


def _load_heads(
    pool_ref: Any,
    place: tuple[Any, Any, Any, Any, Any],
    keys: _Keys,
    dtype: Any,
    instructions: Instructions,
) -> jax.Array:
    """A tile of K or of V ``[N, lanes]`` in the type of the products, as `tiles.load_heads`."""
    if keys.pool_dtype.itemsize > 1:
        return tiles.load_heads(pool_ref, *place, keys.head_dim).astype(dtype)
    words = tiles.load_heads(pool_ref, *place, keys.head_dim // 2)
    # One dot over all lanes needs fewer registers than two over the even and the odd ones, which
    # spill at 128 rows and D 128. The pairs are put together where they are, in registers.
    pairs = jnp.stack(instructions.split_words(words, keys.pool_dtype), axis=-1)
    return pairs.reshape(words.shape[0], -1).astype(dtype)


def _num_lanes(head_dim: int, pool_dtype: Any) -> int:
    if pool_dtype.itemsize > 1:
        return tiles.num_lanes(head_dim)
    return 2 * tiles.num_lanes(head_dim // 2)
