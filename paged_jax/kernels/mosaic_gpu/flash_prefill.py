r"""Prefill attention with bulk copies and `wgmma` instructions, for compute capability 9.0.

Causal flash attention (Dao, 2023) over the paged pool. A thread block has three warpgroups: two
compute, and the third one copies data (Shah et al., 2024). The thread block attends with a tile of
128 rows. These are the same n tokens for each of several query heads of a KV head::

    row 0 .. n - 1      tokens of the first query head        warpgroup 0: rows 0 to 63
    row n .. 2 * n - 1  the same tokens of the next head      warpgroup 1: rows 64 to 127
    ...                                                       warpgroup 2: copies

Warpgroup 2 looks up blocks of K and V in the block table, and copies whole blocks to a ring buffer
of tiles. Warpgroups 0 and 1 multiply each tile. They arrive at a barrier when they have finished
reading a tile, so that warpgroup 2 can overwrite it::

    pools [L, P, K, C, D]                 ring of tiles [stages, T, D]       registers
    table: 7 2 9 4 ...
    blocks 7 2 9 4 of the KV head  --->   tokens 0 .. T - 1        --->      step 0
                                   --->   tokens T .. 2 * T - 1    --->      step 1   ...

    scores [64, T] = queries [64, D] @ K^T [D, T]
    out    [64, D] += weights [64, T] @ V [T, D]

In latent attention, each value vector is the beginning of its key vector, so one tile serves as K
and as V. Values of 512 elements, as in DeepSeek-V2, make an output of 64 x 512 float32 numbers,
which does not fit the registers of a warpgroup. A tile then has 64 rows. Both warpgroups compute
all its scores and weights, and each computes half of the output::

    scores [64, T] = queries [64, 576] @ K^T [576, T]                           both
    out[:, :256] += weights [64, T] @ K[:, :256], out[:, 256:512] += ...        one each

Computing the scores a second time takes 35% of all multiplications. In return, the warpgroups need
not exchange weights, and wait for each other only at the end. The softmax of one warpgroup can
therefore run during the matmuls of the other.

Warpgroup 2 also converts elements of 8-bit pools to half precision, which is exact, see
`converted_tiles`. Warpgroups 0 and 1 multiply the scores by the scales of the keys, and the softmax
weights by the scales of the values. Weights and converted values are then bfloat16, because weights
times scales may exceed the range of float16.

A loop step is masked only if a row of the tile does not see all tokens of the step. This happens at
the diagonal, and at the lower edge of a sliding window. Warpgroup 2 sets the values of unused
tokens of a block to 0, because they may be NaN, and a weight of 0 times NaN is NaN.

The list of all tiles of a batch is computed once per model step, for padded chunks as well as for
ragged batches. The last tiles of a sequence take longest and start first. In the arrays of queries
and outputs, each tile has its own n rows, including padding, so no tile overwrites the output of
another sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.gpu_device import device
from paged_jax.kernels.mosaic_gpu.converted_tiles import convert_step, start_first
from paged_jax.kernels.mosaic_gpu.launch import (
    TILE_LANES,
    AttentionInputs,
    GpuInstructions,
    attention_refusal,
    is_narrow,
    launch,
    plgpu,
)
from paged_jax.kernels.mosaic_gpu.prefill_softmax import (
    PrefillSoftmax,
    finish,
    is_seen_by,
    load_sinks,
    scale_scores,
    weigh,
)
from paged_jax.kernels.mosaic_gpu.query_tiles import (
    CONSUMERS,
    MAX_LANES,
    ROWS,
    PrefillCopies,
    PrefillSizes,
    PrefillTiles,
    QueryTile,
    list_tiles,
)
from paged_jax.kernels.op_args import AttentionArgs, Options, RaggedArgs
from paged_jax.kernels.pools import Pages, Pools
from paged_jax.kernels.problem import Problem
from paged_jax.kernels.ragged_chunks import Chunks, find_rows

# Each pair is the number of registers per thread of the computing warpgroups and of the copying
# warpgroup. The first pair is used if the copying warpgroup only copies, the second pair if it also
# converts elements, and the third pair if it converts the widest heads, for which the computing
# warpgroups need more registers for their outputs.
_REGISTERS, _CONVERTING_REGISTERS, _WIDE_CONVERTING_REGISTERS = (224, 64), (208, 96), (216, 80)


def gpu_refusal(interpret: Interpret = False) -> str | None:
    """Return why the GPU cannot run this kernel, or None if it can or if `interpret` is set."""
    major, minor = device().compute_capability
    if interpret or major == 9:
        return None
    return (
        f"its prefill kernel is for GPUs of compute capability 9.0, and the GPU has {major}.{minor}"
    )


def refusal(problem: Problem, interpret: Interpret) -> str | None:
    """Return why this kernel does not support a prefill or ragged batch, or None if it does."""
    if (reason := gpu_refusal(interpret) or attention_refusal(problem)) is not None:
        return reason
    if (reason := problem.separate_values_refusal) is not None:
        return reason
    D, U = problem["D"], problem.value_dim
    if problem.shares_values:
        return _latent_refusal(problem, D, U)
    if D % TILE_LANES or D > MAX_LANES:
        return (
            f"in a prefill, the head dimension must be a multiple of {TILE_LANES} up to "
            f"{MAX_LANES}, got {D}"
        )
    return None


def _latent_refusal(problem: Problem, D: int, U: int) -> str | None:
    """Return why this kernel does not support latent keys of D elements, or None if it does."""
    if is_narrow(problem.pool_dtype):
        # The additional ring buffer of 8-bit elements would not fit shared memory.
        return (
            "in a prefill of latent attention, pools must have 16-bit elements, got "
            f"{problem.pool_dtype}"
        )
    sizes = PrefillSizes.choose(1, 1, problem["C"], D, shared=U)
    unit = TILE_LANES * (CONSUMERS // sizes.num_groups)
    if D % TILE_LANES or U % unit or sizes.num_stages < 2:
        return (
            f"in a prefill of latent attention, keys must have a multiple of {TILE_LANES} elements "
            f"that fit shared memory, and values a multiple of {unit}, got {D} and {U}"
        )
    return None


def prefill(
    args: AttentionArgs, options: Options, *, interpret: Interpret = False
) -> tuple[jax.Array, jax.Array]:
    """Attend with a chunk of queries per sequence, in one launch.

    Returns:
      ``(out, lse)``: ``[B, T, H, U]`` in the dtype of the queries, and f32 ``[B, T, H]``.
    """
    sizes = _choose_sizes(args.q.shape[1], args.q, args.pools, options)
    return _prefill(args, options, sizes, interpret)


def _choose_sizes(T: int, q: jax.Array, pools: Pools | Pages, options: Options) -> PrefillSizes:
    """Choose the sizes of the kernel's tiles for chunks of about T tokens."""
    H, D = q.shape[-2:]
    shared = options.output_dim(D) if pools.shares_values else None
    return PrefillSizes.choose(
        T, H // pools.num_kv_heads, pools.block_size, D,
        is_narrow=is_narrow(pools.dtype), shared=shared,
    )  # fmt: skip


def attend_to_chunks(
    args: RaggedArgs, chunks: Chunks, options: Options, *, interpret: Interpret = False
) -> tuple[jax.Array, jax.Array]:
    """Attend with the chunks of all sequences of a ragged batch, in one launch.

    Args:
      args: arrays of the batch.
      chunks: the queries of each sequence; a sequence may have a single query.
      options: options of the call.
      interpret: whether to run in JAX's GPU simulator.

    Returns:
      ``(out, lse)``: ``[N, H, U]`` and f32 ``[N, H]``. Rows outside the chunks may hold anything.
    """
    T = pl.cdiv(args.q.shape[0], len(args.context_lens))
    sizes = _choose_sizes(T, args.q, args.pages, options)
    return _attend_to_chunks(args, chunks, options, sizes, interpret)


@functools.partial(jax.jit, static_argnames=("options", "sizes", "interpret"))
def _prefill(
    args: AttentionArgs, options: Options, sizes: PrefillSizes, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    assert args.query_lens is not None
    (B, T, H, D), n = args.q.shape, sizes.tile_tokens
    count = pl.cdiv(T, n)
    program = jnp.arange(B * count, dtype=jnp.int32)
    sequence, turn = lax.rem(program, jnp.int32(B)), count - 1 - lax.div(program, jnp.int32(B))
    query_lens = jnp.minimum(args.query_lens, T)
    tiles = list_tiles(
        sizes, options, sequence, turn, args.context_lens, query_lens,
        index=sequence * count + turn,
    )  # fmt: skip
    q = jnp.pad(args.q, ((0, 0), (0, count * n - T), (0, 0), (0, 0)))
    flat = args._replace(q=q.reshape(B * count * n, H, D), query_lens=None)
    out, lse = _attend(flat, tiles, options, sizes, interpret)
    out, lse = (x.reshape(B, count * n, *x.shape[1:])[:, :T] for x in (out, lse))
    return out, lse


@functools.partial(jax.jit, static_argnames=("options", "sizes", "interpret"))
def _attend_to_chunks(
    args: RaggedArgs, chunks: Chunks, options: Options, sizes: PrefillSizes, interpret: Interpret
) -> tuple[jax.Array, jax.Array]:
    N, B, n = args.q.shape[0], len(args.context_lens), sizes.tile_tokens
    counts = lax.div(chunks.lens + (n - 1), jnp.int32(n))
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    # The lengths of the chunks are traced, so use the maximum number of tiles: the N queries fill
    # at most N // n tiles, and each chunk may have one more tile, which is only partly filled.
    program = jnp.arange(N // n + min(B, N), dtype=jnp.int32)
    sequence = jnp.sum(ends[None] <= program[:, None], axis=1, dtype=jnp.int32)
    is_there, sequence = sequence < B, jnp.minimum(sequence, B - 1)
    turn = ends[sequence] - 1 - program
    tiles = list_tiles(
        sizes, options, sequence, turn, args.context_lens, chunks.lens,
        index=(ends - counts)[sequence] + turn, is_there=is_there,
    )  # fmt: skip
    # Copy the queries to an array in which each tile starts at a multiple of n rows. A bulk copy
    # must start at a multiple of 8 rows (`TILE_ROWS`), but a chunk may start at any row of `q`.
    row = jnp.arange(program.size * n, dtype=jnp.int32)
    tile = lax.div(row, jnp.int32(n))
    owner = jnp.minimum(jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32), B - 1)
    row = chunks.starts[owner] + row - (ends - counts)[owner] * n
    flat = AttentionArgs(
        q=args.q.at[row].get(mode="clip"),
        pools=args.pages,
        block_tables=args.block_tables,
        context_lens=args.context_lens,
        query_lens=None,
        sinks=args.sinks,
        layer=jnp.zeros((), jnp.int32),
    )
    out, lse = _attend(flat, tiles, options, sizes, interpret)
    rows = find_rows(args, chunks)
    row_index = (ends - counts)[rows.sequence] * n + rows.token
    return out.at[row_index].get(mode="clip"), lse.at[row_index].get(mode="clip")


def _attend(
    args: AttentionArgs,
    tiles: jax.Array,
    options: Options,
    sizes: PrefillSizes,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel for a list of tiles, see `list_tiles`.

    Returns:
      The output ``[tiles * n, H, U]`` and the log-sum-exp, f32 ``[tiles * n, H]``: n rows per tile.
    """
    H, num_tiles, U = args.q.shape[1], tiles.shape[0], sizes.value_dim
    n, num_places = sizes.tile_tokens, H // sizes.slice_size
    inputs = AttentionInputs(
        work=tiles,
        q=args.q,
        pools=args.pools,
        block_tables=args.block_tables,
        layer=jnp.asarray(args.layer, jnp.int32).reshape(1),
        sinks=args.sinks,
    )
    (out, lse), _ = launch(
        functools.partial(
            _attend_kernel,
            options=options,
            sizes=sizes,
            instructions=GpuInstructions(is_simulated=bool(interpret)),
        ),
        "paged_prefill",
        grid={"place": num_places, "tile": num_tiles},
        arguments=[inputs],
        outputs=[
            jax.ShapeDtypeStruct((num_tiles * n, H, U), args.q.dtype),
            jax.ShapeDtypeStruct((num_tiles, num_places, sizes.num_groups, ROWS), jnp.float32),
        ],
        scratch=[PrefillTiles.of(sizes, args.q.dtype, args.pools)],
        num_warpgroups=CONSUMERS + 1,
        interpret=interpret,
    )
    lse = lse.reshape(num_tiles, num_places, -1)[..., : sizes.slice_size * n]
    lse = lse.reshape(num_tiles, H, n).swapaxes(1, 2).reshape(num_tiles * n, H)
    return out, lse


def _attend_kernel(
    inputs: AttentionInputs,
    out_ref: Any,
    lse_ref: Any,
    shared: PrefillTiles,
    *,
    options: Options,
    sizes: PrefillSizes,
    instructions: GpuInstructions,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    num_registers = _REGISTERS
    if sizes.num_staged:
        is_wide = sizes.head_dim == MAX_LANES
        num_registers = _WIDE_CONVERTING_REGISTERS if is_wide else _CONVERTING_REGISTERS

    def compute() -> None:
        plgpu.set_max_registers(num_registers[0], action="increase")
        _compute(inputs, shared, _load_tile(inputs), options, sizes, instructions)

    def copy() -> None:
        plgpu.set_max_registers(num_registers[1], action="decrease")
        copies = PrefillCopies(inputs, shared, _load_tile(inputs), sizes)
        copies.load_queries()
        load_step = copies.load_step
        if sizes.num_staged:
            load_step = functools.partial(convert_step, copies=copies)
            start_first(copies)
        num_steps = copies.tile.num_steps
        lax.fori_loop(jnp.int32(0), num_steps, load_step, None)
        drained = jnp.maximum(num_steps - sizes.num_stages, 0)
        lax.fori_loop(drained, num_steps, copies.wait_for_step, None)
        if sizes.num_staged:
            copies = copies._replace(tile=_load_tile(inputs))
        copies.store(out_ref, lse_ref)

    # Use a single `cond` for both branches. With one `pl.when` after the other, the compiler would
    # keep registers for the second branch while the first one runs.
    @pl.when(_load_field(inputs, QueryTile._fields.index("is_there")) != 0)
    def _():
        lax.cond(warpgroup < CONSUMERS, compute, copy)


def _load_field(inputs: AttentionInputs, field: int) -> jax.Array:
    """Load the field with index `field` of the `QueryTile` of this thread block."""
    return inputs.work[lax.axis_index("tile"), field]


def _load_tile(inputs: AttentionInputs) -> QueryTile:
    """Load the `QueryTile` of this thread block.

    Each warpgroup calls this function. Fields that are loaded once for all warpgroups would take
    registers in each of them, and these registers would spill. The warpgroup that converts 8-bit
    elements cannot keep the fields in registers during its loop, so it reloads them after the loop.
    """
    return QueryTile(*(_load_field(inputs, i) for i in range(len(QueryTile._fields))))


def _compute(
    inputs: AttentionInputs,
    shared: PrefillTiles,
    tile: QueryTile,
    options: Options,
    sizes: PrefillSizes,
    instructions: GpuInstructions,
) -> None:
    """Attend with the 64 rows of this warpgroup, and store the results in shared memory."""
    warpgroup = lax.axis_index("warpgroup")
    group, lanes = sizes.share(warpgroup)
    values, values_full, values_free = shared.values
    row = (
        plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        + group * ROWS
    )
    token, head = (f(row, jnp.full_like(row, sizes.tile_tokens)) for f in (lax.rem, lax.div))
    # Compute the position of the query of each row. Rows without a query get -1, so that they see
    # no token.
    position = jnp.where(token < tile.num_queries, token + tile.first, -1)

    def fold(step, softmax, *, is_masked):
        slot = lax.rem(step, jnp.int32(sizes.num_stages))
        plgpu.barrier_wait(shared.k_full.at[slot])
        keys = shared.k.at[slot].transpose((1, 0))
        # If there is a single group, its index is 0. Compute it as the minimum of `step` and 0, so
        # that the compiler does not know it. Otherwise, the compiler would keep the addresses of
        # all parts of wide queries in registers, and these registers would spill.
        rows = jnp.minimum(step, 0) if sizes.num_groups == 1 else group
        scores = instructions.warpgroup_mma(shared.q.at[rows], keys)
        if shared.k_scale is not None:
            scores = scores * _load_scales(shared.k_scale, step, scores)
        if shared.v is not None:
            plgpu.barrier_arrive(shared.k_free.at[slot])
        scores, unit = scale_scores(scores, options)
        if is_masked:
            start = tile.origin + step * sizes.step_tokens
            scores = jnp.where(is_seen_by(scores, start, position, options), scores, -jnp.inf)
        softmax, weights = weigh(softmax, scores, unit)
        if shared.v is not None:
            plgpu.barrier_wait(values_full.at[slot])
        if shared.v_scale is not None:
            # The scales of unused tokens may be NaN. Replace them by 0, because 0 * NaN is NaN.
            scales = _load_scales(shared.v_scale, step, weights)
            weights *= jnp.where(weights == 0, 0.0, scales) if is_masked else scales
        out = instructions.warpgroup_mma_add(
            softmax.out, weights.astype(values.dtype), values.at[slot, :, lanes]
        )
        plgpu.barrier_arrive(values_free.at[slot])
        return softmax._replace(out=out)

    softmax = PrefillSoftmax.start(lanes.size)
    plgpu.barrier_wait(shared.is_loaded)
    unmasked, masked = (functools.partial(fold, is_masked=is_masked) for is_masked in (False, True))
    if options.sliding_window is not None:
        softmax = lax.fori_loop(jnp.int32(0), tile.full_begin, masked, softmax)
    softmax = lax.fori_loop(tile.full_begin, tile.full_end, unmasked, softmax)
    softmax = lax.fori_loop(tile.full_end, tile.num_steps, masked, softmax)
    sinks = load_sinks(inputs.sinks, head, sizes)
    _store(shared, sizes, *finish(softmax, sinks, position >= 0, options.value_scale))


def _store(shared: PrefillTiles, sizes: PrefillSizes, out: jax.Array, lse: jax.Array) -> None:
    """Store the output and the log-sum-exp of this warpgroup in shared memory."""
    warpgroup = lax.axis_index("warpgroup")
    group, lanes = sizes.share(warpgroup)
    if shared.are_read is not None:
        # Wait until the other warpgroup has read the queries, because the output overwrites them.
        plgpu.barrier_arrive(shared.are_read)
        plgpu.barrier_wait(shared.are_read)
    shared.q[group, :, lanes] = out.astype(shared.q.dtype)

    @pl.when(warpgroup < sizes.num_groups)
    def _():
        shared.lse[group] = lse

    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.is_done)


def _load_scales(ring_ref: Any, step: jax.Array, like: jax.Array) -> jax.Array:
    """Load the scales of the tokens of a loop step, and broadcast them to the shape of `like`."""
    slot = lax.rem(step, jnp.int32(ring_ref.shape[0]))
    layout = plgpu.Layout.WGMMA.reduce(0)
    scales = plgpu.load(ring_ref.at[slot], layout=layout, optimized=False)
    return lax.broadcast_in_dim(scales, like.shape, [1])
