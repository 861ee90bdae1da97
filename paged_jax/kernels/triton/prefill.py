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

Chunks of a ragged batch are not padded: their queries lie one behind the other. Then program (k, i)
counts the tiles of all chunks, from their lengths, to find its own; there are as many programs as
there can be tiles, and the last ones find none.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import AttentionArgs, Half, Interpret, Options, RaggedArgs
from paged_jax.kernels.ragged import Chunks
from paged_jax.kernels.triton import tiles, tuning
from paged_jax.kernels.triton.pallas import Instructions, choose_instructions, pallas_call, plgpu

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
    return _prefill(args, None, options, params or _params(args), interpret)


def attend_to_chunks(
    args: RaggedArgs,
    chunks: Chunks,
    options: Options,
    *,
    interpret: Interpret = False,
    params: tuning.PrefillParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with the queries of all chunks in one launch.

    Args:
      args, chunks, options: the call. A chunk may have a single token.
      interpret, params: as for `prefill`.

    Returns:
      ``(out, lse)``: ``[N, H, D]`` and f32 ``[N, H]``. Rows outside the chunks may hold anything.
    """
    flat = AttentionArgs(
        q=args.q,
        pools=args.pages,
        block_tables=args.block_tables,
        context_lens=args.context_lens,
        query_lens=chunks.lens,
        sinks=args.sinks,
        layer=jnp.zeros((), jnp.int32),
    )
    params = params or _params(flat, is_ragged=True)
    return _prefill(flat, chunks.starts, options, params, interpret)


def _params(args: AttentionArgs, is_ragged: bool = False) -> tuning.PrefillParams:
    *_, H, D = args.q.shape
    return tuning.prefill_params(
        tuning.device().kind,
        head_dim=D,
        group=H // args.pools.num_kv_heads,
        block_size=args.pools.block_size,
        q_dtype=args.q.dtype,
        pool_dtype=args.pools.dtype,
        is_ragged=is_ragged,
    )


@functools.partial(jax.jit, static_argnames=("options", "params", "interpret"))
def _prefill(
    args: AttentionArgs,
    starts: jax.Array | None,
    options: Options,
    params: tuning.PrefillParams,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    """Both kinds of batches.

    Args:
      args: the call, with queries ``[B, T, H, D]`` or ``[N, H, D]``.
      starts: None, or i32 ``[B]``, the row of the first query of each chunk of a ragged batch.
    """
    q, pools, block_tables, context_lens, query_lens, sinks, layer = args
    (longest, H, _), B, K = q.shape[-3:], len(block_tables), pools.num_kv_heads
    G = H // K
    query_rows = min(params.query_rows, pl.next_power_of_2(longest * G))
    grid = (K, pl.cdiv(longest * G, query_rows), B)
    if starts is not None:
        # Each sequence may leave one tile partly empty.
        grid = (K, longest * G // query_rows + min(B, longest))
    layers = jnp.asarray(layer, jnp.int32).reshape(1)
    return pallas_call(
        functools.partial(
            _attend_kernel,
            options=options,
            pool_dtype=pools.dtype,
            query_rows=query_rows,
            step_tokens=params.step_tokens,
            instructions=choose_instructions(interpret),
        ),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
        ),
        grid=grid,
        compiler_params=plgpu.CompilerParams(
            num_warps=params.num_warps, num_stages=params.num_stages
        ),
        interpret=interpret,
        name="paged_prefill",
    )(q, pools.map(tiles.as_words), block_tables, context_lens, query_lens, starts, sinks, layers)


class _Tile(NamedTuple):
    """The queries of one program, as i32 scalars.

    Attributes:
      sequence: theirs.
      query_len: queries in its chunk.
      start: the first of them among all queries; None where each chunk has an axis of its own.
      first_row: the first row of the tile among those of the chunk, a token and a head each.
      num_written: tokens of the chunk that have a result, padding included.
    """

    sequence: jax.Array
    query_len: jax.Array
    start: jax.Array | None
    first_row: jax.Array
    num_written: jax.Array | int

    def place(self, tokens: jax.Array, heads: jax.Array) -> tuple[jax.Array, ...]:
        """Index of some tokens of the chunk, of a head each, in queries and results."""
        if self.start is None:
            return self.sequence, tokens, heads
        return self.start + tokens, heads


def _tile_of_padded(query_lens_ref: Any, T: int, query_rows: int) -> _Tile:
    """The tile of program ``(k, i, b)``, of chunks that are padded to the same length."""
    sequence = pl.program_id(2)
    first_row = (pl.num_programs(1) - 1 - pl.program_id(1)) * query_rows
    return _Tile(sequence, jnp.minimum(query_lens_ref[sequence], T), None, first_row, T)


def _tile_of_ragged(query_lens_ref: Any, starts_ref: Any, group: int, query_rows: int) -> _Tile:
    """The tile of program ``(k, i)``; it has no queries where there is none."""
    B, program = query_lens_ref.shape[0], pl.program_id(1)
    index = jnp.arange(pl.next_power_of_2(B), dtype=jnp.int32)
    lens = plgpu.load(query_lens_ref.at[index], mask=index < B, other=0)
    counts = tiles.divide(lens * group + query_rows - 1, query_rows)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    is_before = ends <= program
    sequence = jnp.sum(is_before, dtype=jnp.int32)

    def of_sequence(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(index == sequence, x, 0), dtype=jnp.int32)

    last = jnp.maximum(of_sequence(ends) - 1, program)
    sequence, query_len = jnp.minimum(sequence, B - 1), of_sequence(lens)
    return _Tile(
        sequence, query_len, starts_ref[sequence], (last - program) * query_rows, query_len
    )


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
    starts_ref: Any,
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
    T, H, D = q_ref.shape[-3:]
    head, G = pl.program_id(0), H // pools.num_kv_heads
    if starts_ref is None:
        tile = _tile_of_padded(query_lens_ref, T, query_rows)
    else:
        tile = _tile_of_ragged(query_lens_ref, starts_ref, G, query_rows)
    sequence, first_row = tile.sequence, tile.first_row
    # Lengths are bounded by what holds them: an address past an array is no error on a GPU.
    capacity = tables_ref.shape[1] * pools.block_size
    context_len = jnp.minimum(context_lens_ref[sequence], capacity)
    query_len = jnp.minimum(tile.query_len, context_len)
    num_rows = query_len * G

    rows = first_row + jnp.arange(query_rows, dtype=jnp.int32)
    tokens, heads = tiles.divide(rows, G), head * G + tiles.remainder(rows, G)
    lanes = jnp.arange(_num_lanes(D, pool_dtype), dtype=jnp.int32)
    row = (*tile.place(tokens[:, None], heads[:, None]), lanes[None])
    is_query, is_lane = tokens < query_len, (lanes < D)[None]

    def write(out: jax.Array, lse: jax.Array) -> None:
        is_row = tokens < tile.num_written
        plgpu.store(out_ref.at[*row], out.astype(out_ref.dtype), mask=is_row[:, None] & is_lane)
        plgpu.store(lse_ref.at[*tile.place(tokens, heads)], lse, mask=is_row)

    @pl.when(first_row >= num_rows)
    def _():
        nothing = jnp.zeros((query_rows, lanes.size), jnp.float32)
        write(nothing, jnp.full(query_rows, -jnp.inf, jnp.float32))

    @pl.when(first_row < num_rows)
    def _():
        q = plgpu.load(q_ref.at[*row], mask=is_query[:, None] & is_lane, other=0)
        sinks = None
        if sinks_ref is not None:
            sinks = plgpu.load(sinks_ref.at[heads], mask=is_query, other=-jnp.inf)
        chunk_start = context_len - query_len
        last_row = jnp.minimum(first_row + query_rows, num_rows) - 1
        softmax = _fold_keys(
            tiles.start_softmax(
                query_rows, lanes.size, sinks, has_scales=pools.v_scale is not None
            ),
            q,
            chunk_start + tokens,
            chunk_start + tiles.divide(first_row, G),
            chunk_start + tiles.divide(last_row, G),
            _Keys(pools, pool_dtype, tables_ref, sequence, layer_ref[0], head, D),
            options,
            step_tokens,
            instructions,
        )
        out, lse = tiles.finish(softmax, options)
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
        C = keys.pools.block_size
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
        k, v = (_load_heads(half, place, keys, dtype, instructions) for half in ("k", "v"))
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
    half: Half,
    place: tuple[Any, Any, Any, Any, Any],
    keys: _Keys,
    dtype: Any,
    instructions: Instructions,
) -> jax.Array:
    """A tile of K or of V ``[N, lanes]`` in the type of the products, as `tiles.load_heads`."""
    if keys.pool_dtype.itemsize > 1:
        return tiles.load_heads(keys.pools, half, *place, keys.head_dim).astype(dtype)
    words = tiles.load_heads(keys.pools, half, *place, keys.head_dim // 2)
    # One dot over all lanes needs fewer registers than two over the even and the odd ones, which
    # spill at 128 rows and D 128. The pairs are put together where they are, in registers.
    pairs = jnp.stack(instructions.split_words(words, keys.pool_dtype), axis=-1)
    return pairs.reshape(words.shape[0], -1).astype(dtype)


def _num_lanes(head_dim: int, pool_dtype: Any) -> int:
    if pool_dtype.itemsize > 1:
        return tiles.num_lanes(head_dim)
    return 2 * tiles.num_lanes(head_dim // 2)
