"""Prefill attention on NVIDIA GPUs.

Causal flash attention (Dao, 2023) over the paged pool. A row is a pair of a token of a chunk and a
query head of a group, so that groups of any size fill a tile: row r of KV head k is token
``r // G`` and query head ``k * G + r % G``. A program instance computes one tile of rows::

                    loop steps over the tokens of the sequence
                 0      1      2      3      4      5      6
    tile 2    [ all    all    all    all    all   masked masked]     masked: the diagonal, or the
    tile 1    [ all    all    all   masked masked]                   lower edge of a sliding window
    tile 0    [ all   masked masked]                                 all: every row sees every token
               context | chunk

    program instance (k, i, b): the i-th tile from the end, of KV head k of sequence b
    a loop step reads one tile of K and one of V

The last tiles of a sequence take longest and start first, so that short tiles fill the gaps at the
end. All KV heads of a tile come before the next tile, so that program instances that read the same
blocks run at the same time.

The chunks of a ragged batch are concatenated, without padding. Program instance (k, i) then
computes its tile from the lengths of all chunks. The grid has the maximum number of tiles, so the
last program instances may have no tile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels import gpu_device
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.kv_split import divide, remainder
from paged_jax.kernels.op_args import AttentionArgs, Options, RaggedArgs
from paged_jax.kernels.pools import Half
from paged_jax.kernels.ragged_chunks import Chunks
from paged_jax.kernels.triton import tiles, tuning
from paged_jax.kernels.triton.pallas import Instructions, choose_instructions, pallas_call, plgpu

# If at least this number of loop steps need no mask, a separate loop without masks computes them.
# Each additional loop waits for its first tile, which costs about as much as masking this number of
# steps (computed from instruction counts, not measured).
_MIN_UNMASKED_STEPS = 4


def prefill(
    args: AttentionArgs,
    options: Options,
    *,
    interpret: Interpret = False,
    params: tuning.PrefillParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with a chunk of queries per sequence, in one launch.

    By default, `tuning.prefill_params` chooses the launch parameters.
    """
    return _prefill(args, None, options, params or _params(args, options), interpret)


def attend_to_chunks(
    args: RaggedArgs,
    chunks: Chunks,
    options: Options,
    *,
    interpret: Interpret = False,
    params: tuning.PrefillParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with the chunks of all sequences of a ragged batch in one launch, see `prefill`.

    Returns:
      ``(out, lse)``: ``[N, H, U]`` and f32 ``[N, H]``. Rows outside the chunks may hold anything.
    """
    flat = args.as_attention(args.q, args.block_tables, args.context_lens, chunks.lens)
    params = params or _params(flat, options, is_ragged=True)
    return _prefill(flat, chunks.starts, options, params, interpret)


def _params(args: AttentionArgs, options: Options, is_ragged: bool = False) -> tuning.PrefillParams:
    shape = tuning.shape_of(args, options)
    return tuning.prefill_params(gpu_device.device().kind, shape, is_ragged=is_ragged)


@functools.partial(jax.jit, static_argnames=("options", "params", "interpret"))
def _prefill(
    args: AttentionArgs,
    starts: jax.Array | None,
    options: Options,
    params: tuning.PrefillParams,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel for padded chunks or for a ragged batch.

    If `starts` is None, the queries are padded chunks, ``[B, T, H, D]``. Otherwise they are the
    queries of a ragged batch, ``[N, H, D]``, and `starts`, i32 ``[B]``, is the row of the first
    query of each chunk.
    """
    q, pools, block_tables, context_lens, query_lens, sinks, layer = args
    (num_queries, H, _), B, K = q.shape[-3:], len(block_tables), pools.num_kv_heads
    G = H // K
    query_rows = min(params.query_rows, pl.next_power_of_2(num_queries * G))
    grid = (K, pl.cdiv(num_queries * G, query_rows), B)
    if starts is not None:
        # The lengths of the chunks are traced, so use the maximum number of tiles: all rows fill at
        # most ``num_queries * G // query_rows`` tiles, and each chunk may have one more tile, which
        # is only partly filled.
        grid = (K, num_queries * G // query_rows + min(B, num_queries))
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
            jax.ShapeDtypeStruct((*q.shape[:-1], options.output_dim(q.shape[-1])), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
        ),
        grid=grid,
        compiler_params=plgpu.CompilerParams(
            num_warps=params.num_warps, num_stages=params.num_stages
        ),
        interpret=interpret,
        name="paged_prefill",
    )(q, pools.map(tiles.as_words), block_tables, context_lens, query_lens, starts, sinks, layers)


class _ChunkTile(NamedTuple):
    """The tile of a program instance, as i32 scalars.

    Attributes:
      sequence: row of the sequence in the batch.
      query_len: number of queries in the chunk.
      start: row of the first query of the chunk in a ragged batch; None for padded chunks.
      first_row: first row of the tile. A chunk has G rows for each token.
      num_written: number of tokens of the chunk whose output is stored: T for padded chunks,
        including the padding, or `query_len` in ragged batches.
    """

    sequence: jax.Array
    query_len: jax.Array
    start: jax.Array | None
    first_row: jax.Array
    num_written: jax.Array | int

    def place(self, tokens: jax.Array, heads: jax.Array) -> tuple[jax.Array, ...]:
        """Return the indices of tokens and heads in the arrays of queries and outputs."""
        if self.start is None:
            return self.sequence, tokens, heads
        return self.start + tokens, heads


def _tile_of_padded(query_lens_ref: Any, T: int, query_rows: int) -> _ChunkTile:
    """Return the tile of program instance ``(k, i, b)`` of padded chunks."""
    sequence = pl.program_id(2)
    first_row = (pl.num_programs(1) - 1 - pl.program_id(1)) * query_rows
    return _ChunkTile(sequence, jnp.minimum(query_lens_ref[sequence], T), None, first_row, T)


def _tile_of_ragged(
    query_lens_ref: Any, starts_ref: Any, group: int, query_rows: int
) -> _ChunkTile:
    """Return the tile of program instance ``(k, i)`` of a ragged batch.

    If `i` is past the last tile of the batch, the returned tile has no queries.
    """
    B, program = query_lens_ref.shape[0], pl.program_id(1)
    index = jnp.arange(pl.next_power_of_2(B), dtype=jnp.int32)
    lens = plgpu.load(query_lens_ref.at[index], mask=index < B, other=0)
    counts = divide(lens * group + query_rows - 1, query_rows)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    is_before = ends <= program
    sequence = jnp.sum(is_before, dtype=jnp.int32)

    def of_sequence(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(index == sequence, x, 0), dtype=jnp.int32)

    # Compute the tiles of a sequence from the last tile to the first, because the last tiles take
    # longest.
    last = jnp.maximum(of_sequence(ends) - 1, program)
    sequence, query_len = jnp.minimum(sequence, B - 1), of_sequence(lens)
    return _ChunkTile(
        sequence, query_len, starts_ref[sequence], (last - program) * query_rows, query_len
    )


class _StepRange(NamedTuple):
    """Loop steps over the keys, from `begin` to `end` (exclusive)."""

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
    # Clip the lengths to the block table, because on a GPU, an address past the end of an array
    # raises no error.
    capacity = tables_ref.shape[1] * pools.block_size
    context_len = jnp.minimum(context_lens_ref[sequence], capacity)
    query_len = jnp.minimum(tile.query_len, context_len)
    num_rows = query_len * G

    rows = first_row + jnp.arange(query_rows, dtype=jnp.int32)
    tokens, heads = divide(rows, G), head * G + remainder(rows, G)
    U = out_ref.shape[-1]
    parts = tiles.parts_of(D, U if pools.shares_values else 0)
    lanes = [
        part.start + jnp.arange(_num_lanes(part.size, pool_dtype), dtype=jnp.int32)
        for part in parts
    ]
    place, is_query = tile.place(tokens[:, None], heads[:, None]), tokens < query_len

    def write(out: jax.Array, lse: jax.Array) -> None:
        is_row, row = tokens < tile.num_written, (*place, lanes[0][None])
        mask = is_row[:, None] & (lanes[0] < U)[None]
        plgpu.store(out_ref.at[*row], out.astype(out_ref.dtype), mask=mask)
        plgpu.store(lse_ref.at[*tile.place(tokens, heads)], lse, mask=is_row)

    @pl.when(first_row >= num_rows)
    def _():
        zeros = jnp.zeros((query_rows, lanes[0].size), jnp.float32)
        write(zeros, jnp.full(query_rows, -jnp.inf, jnp.float32))

    @pl.when(first_row < num_rows)
    def _():
        q = tuple(
            plgpu.load(
                q_ref.at[*place, lane[None]],
                mask=is_query[:, None] & (lane < part.end)[None],
                other=0,
            )
            for part, lane in zip(parts, lanes, strict=True)
        )
        sinks = None
        if sinks_ref is not None:
            sinks = plgpu.load(sinks_ref.at[heads], mask=is_query, other=-jnp.inf)
        chunk_start = context_len - query_len
        last_row = jnp.minimum(first_row + query_rows, num_rows) - 1
        softmax = _fold_keys(
            tiles.start_softmax(
                query_rows, (lanes[0].size,), sinks, has_scales=pools.k_scale is not None
            ),
            q,
            chunk_start + tokens,
            chunk_start + divide(first_row, G),
            chunk_start + divide(last_row, G),
            tiles.KVHead(pools, pool_dtype, tables_ref, sequence, layer_ref[0], head, parts),
            options,
            step_tokens,
            instructions,
        )
        (out,), lse = tiles.finish(softmax, options)
        # The results of padding rows are meaningless. Replace their outputs by 0, and their
        # log-sum-exps by -inf.
        write(jnp.where(is_query[:, None], out, 0.0), jnp.where(is_query, lse, -jnp.inf))


def _fold_keys(
    softmax: tiles.OnlineSoftmax,
    q: tuple[jax.Array, ...],
    positions: jax.Array,
    first: jax.Array,
    last: jax.Array,
    kv: tiles.KVHead,
    options: Options,
    step_tokens: int,
    instructions: Instructions,
) -> tiles.OnlineSoftmax:
    """Add the tokens that the R rows of a query tile see to the softmax of the tile.

    `q` has an array ``[R, lanes]`` for each part of a key, and has not been multiplied by
    ``options.scale``. `positions`, i32 ``[R]``, has the position of each row's query in its
    sequence. `first` and `last` are the smallest and the largest of these positions, without
    padding.
    """
    dtype = tiles.operand_dtype(q[0].dtype, kv.pool_dtype)
    q, unit = tiles.fit_queries(q, dtype)
    window = options.sliding_window
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0)

    def tokens_of(step):
        tokens = step * step_tokens + jnp.arange(step_tokens, dtype=jnp.int32)
        return tokens, (tokens >= begin) & (tokens <= last)

    def fold_step(step, carry, is_masked):
        softmax, block_ids = carry
        next_block_ids = kv.load_block_ids(*tokens_of(step + 1))
        tokens, is_read = tokens_of(step)
        is_seen = tokens[None] <= positions[:, None]
        if window is not None:
            is_seen &= tokens[None] > positions[:, None] - window
        if not is_masked:
            # Use constant masks, so that the compiler removes them.
            is_read, is_seen = jnp.full(step_tokens, True), jnp.full((1, step_tokens), True)
        place = block_ids, tokens, is_read
        k = _load_tile("k", place, kv, dtype, instructions)
        if kv.shares_values:
            v, k_scale = k[:1], kv.load_scales("k", *place)
            v_scale = k_scale
        else:
            v = _load_tile("v", place, kv, dtype, instructions)
            k_scale, v_scale = (kv.load_scales(half, *place) for half in ("k", "v"))
        scores, factor = tiles.score(q, unit, k, k_scale, is_seen, options)
        softmax = tiles.fold(softmax, scores, factor, v, v_scale, tiles.weigh_rounded, instructions)
        return softmax, next_block_ids

    ranges = _separate_masked_steps(first, last, step_tokens, window)
    carry = (softmax, kv.load_block_ids(*tokens_of(ranges[0].begin)))
    for steps in ranges:
        fold = functools.partial(fold_step, is_masked=steps.is_masked)
        carry = lax.fori_loop(steps.begin, steps.end, fold, carry)
    return carry[0]


def _separate_masked_steps(
    first: jax.Array, last: jax.Array, step_tokens: int, window: int | None
) -> list[_StepRange]:
    """Divide the loop steps over the keys into ranges with masks and ranges without masks.

    A step needs no mask if all queries of the tile see all tokens of the step. `first` and `last`
    are the positions of the first and the last query of the tile.
    """
    begin = full_begin = jnp.int32(0)
    full_end, end = divide(first + 1, step_tokens), divide(last, step_tokens) + 1
    if window is not None:
        begin = divide(jnp.maximum(first - window + 1, 0), step_tokens)
        full_begin = divide(jnp.maximum(last - window, -1) + step_tokens, step_tokens)
    is_worth_it = full_end - full_begin >= _MIN_UNMASKED_STEPS
    full_begin, full_end = (jnp.where(is_worth_it, x, begin) for x in (full_begin, full_end))
    ranges = [_StepRange(full_begin, full_end, False), _StepRange(full_end, end, True)]
    return ranges if window is None else [_StepRange(begin, full_begin, True), *ranges]


def _load_tile(
    half: Half,
    place: tuple[jax.Array, jax.Array, jax.Array],
    kv: tiles.KVHead,
    dtype: Any,
    instructions: Instructions,
) -> tuple[jax.Array, ...]:
    """Load a tile of K or V in the dtype of the matmuls, ``[N, lanes]`` for each head part."""

    def load(part: tiles.HeadPart) -> jax.Array:
        tile = kv.load_tile(half, part, *place)
        if kv.elements_per_lane == 1:
            return tile.astype(dtype)
        # Join the even and the odd lanes in registers. One matmul over all lanes needs fewer
        # registers than two matmuls over the even and over the odd lanes, which would spill
        # registers with 128 rows and D = 128.
        pairs = jnp.stack(instructions.split_words(tile, kv.pool_dtype), axis=-1)
        return pairs.reshape(tile.shape[0], -1).astype(dtype)

    return tuple(load(part) for part in kv.parts)


def _num_lanes(head_dim: int, pool_dtype: Any) -> int:
    if pool_dtype.itemsize > 1:
        return tiles.num_lanes(head_dim)
    return 2 * tiles.num_lanes(head_dim // 2)
