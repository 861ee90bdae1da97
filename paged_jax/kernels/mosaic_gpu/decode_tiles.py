"""Shared-memory tiles of the decode kernel, and the bulk copies that fill them.

`paged_jax.kernels.mosaic_gpu.flash_decode` contains the kernel and a drawing of the tiles.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.kv_split import KVPart, KVSplit
from paged_jax.kernels.mosaic_gpu.launch import (
    MAX_SHARED_MEMORY,
    TILE_LANES,
    AttentionInputs,
    is_narrow,
    plgpu,
    swizzled,
    widen,
)
from paged_jax.kernels.pools import Pages, Pools

# Number of columns of an `mma` instruction, and the total number of rows of the `mma` instructions
# that the four warps of a thread block execute at the same time.
MMA_COLUMNS, MMA_ROWS = 8, 64

# Warps of a thread block.
_WARPS = 4

# Maximum number of query heads of a thread block.
_MAX_SLICE = 2 * MMA_COLUMNS
# Minimum number of query heads of a thread block, unless a KV head has fewer. With fewer heads,
# most columns of the `mma` instructions would be padding.
MIN_SLICE = 4

# Keys and values are copied in pieces of at most `_PIECE` lanes (elements of a head). Larger pieces
# would spill registers for wide heads. If a head has more than `WIDE` lanes, the queries do not fit
# the registers.
_PIECE, WIDE = 128, 256

# A loop step reads at most `_STEP_BYTES` bytes of K and V, or `MMA_ROWS` tokens if these have more
# bytes. The ring buffer holds `_NUM_STAGES` steps. Two thread blocks then fit an SM.
_STEP_BYTES = 32 * 1024
_NUM_STAGES = 3

# Sizes for 8-bit pools, in order of preference. Each pair is the number of tokens in a loop step
# and the number of loop steps in the ring buffer.
_NARROW_STEPS = ((128, 3), (128, 2), (64, 4), (64, 3), (64, 2))

# `_SM_MEMORY` is the number of bytes of shared memory of an SM. A thread block takes
# `_BLOCK_MEMORY` bytes of it in addition to `DecodeSizes.shared_memory`.
_SM_MEMORY, _BLOCK_MEMORY = 228 * 1024, 4 * 1024


class DecodeSizes(NamedTuple):
    """Static sizes of a launch of the decode kernel.

    Attributes:
      split: how the sequences are split into parts for the thread blocks.
      block_size: tokens in a block (C).
      head_dim: elements of a key (D).
      value_dim: elements of a value (U).
      shares_values: whether each value vector is the beginning of its key vector.
      num_stages: number of loop steps whose tiles the ring buffer holds.
      slice_size: number of query heads of a thread block, a divisor of the query heads per KV head.
      is_narrow: whether the elements of the pools or pages have 8 bits.
    """

    split: KVSplit
    block_size: int
    head_dim: int
    value_dim: int
    shares_values: bool
    num_stages: int
    slice_size: int
    is_narrow: bool

    @classmethod
    def choose(
        cls, B: int, M: int, G: int, C: int, D: int, U: int, shares_values: bool,
        window: int | None, is_narrow: bool,
    ) -> "DecodeSizes":  # fmt: skip
        """Choose the sizes for a call. The batch is not split: `split.num_parts` is 0.

        `B` to `U` are sizes of dimensions, see `paged_jax.dims`. `window` is the size of the
        sliding window in tokens, or None.
        """
        max_slice = MMA_COLUMNS if max(D, U) > WIDE else _MAX_SLICE
        slice_size = max(size for size in range(1, min(G, max_slice) + 1) if G % size == 0)

        def sized(step_tokens: int, stages: int) -> "DecodeSizes":
            split = KVSplit(B, 0, step_tokens, M * C, window, min(C, step_tokens))
            return cls(split, C, D, U, shares_values, stages, slice_size, is_narrow)

        if is_narrow:
            steps = [sized(*step) for step in _NARROW_STEPS]
            fitting = [sizes for sizes in steps if sizes.num_resident > 1]
            # If two thread blocks do not fit an SM, choose the longest ring buffer that fits.
            fitting += [sizes for sizes in steps[2:] if sizes.num_resident]
            return (fitting or steps)[0]
        token_bytes = 2 * (D if shares_values else D + U)
        fitting = 1 << ((_STEP_BYTES // token_bytes).bit_length() - 1)
        # The tokens of a step are the rows of the first matmul, which has at least `MMA_ROWS` rows.
        step_tokens = max(fitting, MMA_ROWS)
        stages = _NUM_STAGES if step_tokens * token_bytes <= _STEP_BYTES else 2
        return sized(step_tokens, stages)

    @property
    def value_lanes(self) -> list[tuple[int, int]]:
        """Start and size of each piece of a value. Pieces are copied and multiplied separately."""
        return cut_lanes(0, self.value_dim)

    @property
    def key_lanes(self) -> list[tuple[int, int]]:
        """Start and size of each piece of a key. Pieces that are also values come first."""
        if self.shares_values:
            return self.value_lanes + cut_lanes(self.value_dim, self.head_dim)
        return cut_lanes(0, self.head_dim)

    @property
    def step_tokens(self) -> int:
        """Tokens in a loop step (T)."""
        return self.split.step_tokens

    @property
    def copy_rows(self) -> int:
        """Number of tokens in a bulk copy: a block, or one loop step if blocks are longer."""
        return self.split.alignment

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a thread block uses."""
        columns, T = pl.cdiv(self.slice_size, MMA_COLUMNS) * MMA_COLUMNS, self.step_tokens
        halves = 1 if self.shares_values else 2
        tile = T * (self.head_dim + (halves - 1) * self.value_dim)
        if self.is_narrow:
            ring = self.num_stages * (tile + 4 * halves * T) + 2 * T * self.value_dim
        else:
            ring = 2 * self.num_stages * tile
        queries = 2 * columns * (self.head_dim + 2 * T)
        return ring + queries + 4 * columns * (self.value_dim + 1)

    @property
    def num_resident(self) -> int:
        """Number of thread blocks that fit the shared memory of an SM at the same time."""
        if self.shared_memory > MAX_SHARED_MEMORY:
            return 0
        return _SM_MEMORY // (self.shared_memory + _BLOCK_MEMORY)


def cut_lanes(start: int, end: int) -> list[tuple[int, int]]:
    """Cut a range of lanes into pieces for bulk copies; return the start and size of each."""
    return [(begin, min(_PIECE, end - begin)) for begin in range(start, end, _PIECE)]


class SharedTiles(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
      k: ``[stages, T, size]`` for each piece of a key, ring buffers of keys.
      v: ``[stages, T, size]`` for each piece of a value, ring buffers of values; empty if the keys
        contain the values.
      k_scale: f32 ``[stages, T]``, ring buffer of the scales of the keys; None without scales.
      v_scale: f32 ``[stages, T]``, ring buffer of the scales of the values; None without scales, or
        if the keys contain the values.
      values: ``[T, size]`` for each piece of a value, the 8-bit values of a loop step, converted to
        the dtype of `weights`; empty if the pool is not 8-bit.
      is_full: barriers of the steps in the ring buffers, completed when a step has been copied.
      q: ``[R, size]`` for each piece of a key, the queries. The output is later stored in their
        place.
      weights: ``[2, R, T]``, the rounded softmax weights of a step, and their rounding errors.
      sums: f32 ``[R / 8, U, 8]``, the output for each group of 8 query heads.
      rows: f32 ``[R / 8, 8]``, the sink of each query head; later its log-sum-exp.
      count: i32 ``[1]``, value of the counter of the sequence before this thread block increments
        it.
      is_loaded: barrier, completed when the queries have been copied.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    values: Any
    is_full: Any
    q: Any
    weights: Any
    sums: Any
    rows: Any
    count: Any
    is_loaded: Any


def shared_tiles(
    sizes: DecodeSizes, num_groups: int, dtype: Any, pools: Pools | Pages
) -> SharedTiles:
    """Describe the arrays and barriers in the shared memory of a thread block, for `launch`.

    `num_groups` is the number of groups of 8 query heads (R / 8). `dtype` is the dtype of the
    queries.
    """
    R = num_groups * MMA_COLUMNS
    T, U, stages = sizes.step_tokens, sizes.value_dim, sizes.num_stages
    key_lanes, value_lanes = sizes.key_lanes, [] if sizes.shares_values else sizes.value_lanes
    k_scale = v_scale = None
    rings, values = len(key_lanes + value_lanes), []
    weight_dtype, lanes = dtype, TILE_LANES
    if pools.is_quantised:
        k_scale = plgpu.SMEM((stages, T), jnp.float32)
        v_scale = None if sizes.shares_values else plgpu.SMEM((stages, T), jnp.float32)
        rings += 1 if sizes.shares_values else 2
    if sizes.is_narrow:
        # Use bfloat16, because the products of softmax weights and scales may exceed the range of
        # float16.
        values, weight_dtype = sizes.value_lanes, jnp.bfloat16
        # Rows are swizzled in units of 128 bytes if D and U (elements of a key and of a value) are
        # multiples of 128, and otherwise in units of 64 bytes.
        if not (sizes.head_dim % (2 * lanes) or U % (2 * lanes)):
            lanes *= 2
    return SharedTiles(
        k=tuple(swizzled((stages, T, size), pools.dtype, lanes) for _, size in key_lanes),
        v=tuple(swizzled((stages, T, size), pools.dtype, lanes) for _, size in value_lanes),
        k_scale=k_scale,
        v_scale=v_scale,
        values=tuple(swizzled((T, size), weight_dtype) for _, size in values),
        is_full=plgpu.Barrier(num_arrivals=T // sizes.copy_rows * rings, num_barriers=stages),
        q=tuple(plgpu.SMEM((R, size), dtype) for _, size in key_lanes),
        weights=swizzled((2, R, T), weight_dtype),
        sums=plgpu.SMEM((num_groups, U, MMA_COLUMNS), jnp.float32),
        rows=plgpu.SMEM((num_groups, MMA_COLUMNS), jnp.float32),
        count=plgpu.SMEM((1,), jnp.int32),
        is_loaded=plgpu.Barrier(num_arrivals=len(key_lanes)),
    )


class TileCopies(NamedTuple):
    """Bulk copies of the queries and of one part of a sequence to the shared memory.

    Attributes:
      inputs: arrays that the kernel reads.
      part: the part of a sequence.
      place: index of the slice of query heads, among the slices of all KV heads.
      sizes: static sizes of the launch.
      shared: the shared memory of the thread block.
    """

    inputs: AttentionInputs
    part: KVPart
    place: jax.Array
    sizes: DecodeSizes
    shared: SharedTiles

    @property
    def head(self) -> jax.Array:
        """The KV head of the thread block."""
        group = self.inputs.q.shape[1] // self.inputs.pools.num_kv_heads
        return lax.div(self.place, jnp.int32(group // self.sizes.slice_size))

    @property
    def first_query_head(self) -> jax.Array:
        """The first query head of the thread block."""
        return self.place * self.sizes.slice_size

    @property
    def query_heads(self) -> Any:
        """The query heads of the thread block."""
        return pl.ds(self.first_query_head, self.sizes.slice_size)

    def slot(self, step: jax.Array) -> jax.Array:
        """Return the index of a loop step in the ring buffers."""
        return lax.rem(step - self.part.begin, jnp.int32(self.sizes.num_stages))

    def start_first(self) -> None:
        """Start the copies of the queries, and of as many steps as the ring buffers hold."""
        rows, queries = pl.ds(0, self.sizes.slice_size), self.inputs.q
        for lanes, piece in zip(self.sizes.key_lanes, self.shared.q, strict=True):
            plgpu.copy_gmem_to_smem(
                queries.at[self.part.sequence, self.query_heads, pl.ds(*lanes)],
                piece.at[rows],
                self.shared.is_loaded,
            )
        steps = [self.part.begin + turn for turn in range(self.sizes.num_stages)]
        for step, blocks in zip(steps, [self.load_blocks(step) for step in steps], strict=True):
            self.start(step, blocks)

    def load_blocks(self, step: jax.Array) -> list[jax.Array]:
        """Return the block id of each bulk copy of a step; 0 past the end of the sequence."""
        tables = self.inputs.block_tables
        blocks = []
        for token in self._tokens(step):
            entry = lax.div(token, jnp.int32(self.sizes.block_size))
            block = tables[self.part.sequence, jnp.minimum(entry, tables.shape[1] - 1)]
            blocks.append(jnp.where(token < self.part.length, block, 0))
        return blocks

    def start_next(self, step: jax.Array, blocks: list[jax.Array]) -> list[jax.Array]:
        """Start the copies of a later loop step to the slot of the ring buffers that is now free.

        `step` is the current loop step, and `blocks` are the block ids of the later step. Returns
        the block ids for the next call.
        """
        stages = self.sizes.num_stages
        if self.sizes.is_narrow:
            # All threads have converted the tiles of this step, so the next copies can overwrite
            # these tiles.
            self.start(step + stages, blocks)
            return self.load_blocks(step + stages + 1)

        # All threads have finished the previous step, so the next copies can overwrite its tiles.
        @pl.when(step > self.part.begin)
        def _():
            self.start(step + stages - 1, blocks)

        return self.load_blocks(step + stages)

    def start(self, step: jax.Array, blocks: list[jax.Array]) -> None:
        """Start to copy the blocks of loop step `step`, unless the part has no such step."""
        slot, layer = self.slot(step), self.inputs.layer[0]
        turns = list(enumerate(zip(self._tokens(step), blocks, strict=True)))

        @pl.when(step < self.part.end)
        def _():
            if not self.sizes.is_narrow:
                for turn, (token, block) in turns:
                    self._start_block(slot, turn, layer, self._rows(token), block)
                return
            rows = [self._rows(token) for _, (token, _) in turns]

            # Pools with scales need more copies, so divide the copies among the warps.
            @plgpu.warp_map
            def _(warp):
                for first in range(min(_WARPS, len(turns))):

                    @pl.when(warp == first)
                    def _(first=first):
                        for turn, (_, block) in turns[first::_WARPS]:
                            self._start_block(slot, turn, layer, rows[turn], block)

    def _rows(self, token: jax.Array) -> Any:
        """Return the range of offsets in a block that a bulk copy reads.

        `token` is the position of its first token.
        """
        rows, offset = self.sizes.copy_rows, 0
        if rows < self.sizes.block_size:
            offset = lax.rem(token, jnp.int32(self.sizes.block_size))
            offset = pl.multiple_of(offset, rows)
        return pl.ds(offset, rows)

    def _start_block(
        self, slot: jax.Array, turn: int, layer: jax.Array, tokens: Any, block: jax.Array
    ) -> None:
        """Start the copies of the keys, values and scales of `tokens` of a block.

        `turn` is the index of the copy in its loop step.
        """
        rows = self.sizes.copy_rows
        rings = [("k", *ring) for ring in zip(self.sizes.key_lanes, self.shared.k, strict=True)]
        # If the keys contain the values, `shared.v` is empty.
        rings += [("v", *ring) for ring in zip(self.sizes.value_lanes, self.shared.v)]  # noqa: B905
        for half, lanes, ring in rings:
            pool, place = self.inputs.pools.place(half, layer, block, self.head, tokens)
            plgpu.copy_gmem_to_smem(
                pool.at[(*place, pl.ds(*lanes))],
                ring.at[slot, pl.ds(turn * rows, rows)],
                self.shared.is_full.at[slot],
            )
        self._start_scales(slot, turn, (layer, block, self.head, tokens))

    def _start_scales(self, slot: jax.Array, turn: int, place: tuple[Any, ...]) -> None:
        """Start the copies of the scales of a block's tokens, if the pools have scales."""
        pools, shared, rows = self.inputs.pools, self.shared, self.sizes.copy_rows
        for pool, ring in ((pools.k_scale, shared.k_scale), (pools.v_scale, shared.v_scale)):
            if pool is not None:
                plgpu.copy_gmem_to_smem(
                    pool.at[place],
                    ring.at[slot, pl.ds(turn * rows, rows)],
                    shared.is_full.at[slot],
                    # Promise that the copy is in bounds. Otherwise, the target would have to be
                    # aligned to 128 bytes.
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

    def _tokens(self, step: jax.Array) -> list[jax.Array]:
        """Return, for each bulk copy of loop step `step`, the position of its first token."""
        rows = self.sizes.copy_rows
        first = self.part.first + step * self.sizes.step_tokens
        return [first + turn * rows for turn in range(self.sizes.step_tokens // rows)]


def load_queries(copies: TileCopies) -> list[list[jax.Array]]:
    """Load the queries from shared memory, and transpose them.

    Returns one list for each group of 8 query heads. The list has an array ``[size, 8]`` for each
    piece of a query. Queries and keys have the same pieces.
    """
    shared = copies.shared
    return [
        [plgpu.load(rows_of(piece, columns), optimized=False) for piece in shared.q]
        for columns in range(shared.rows.shape[0])
    ]


def load_keys(tile_ref: Any, dtype: Any) -> jax.Array:
    """Load a tile of keys, and convert 8-bit elements to the dtype of the queries."""
    if is_narrow(tile_ref.dtype):
        return widen(plgpu.load(tile_ref, optimized=False), dtype)
    return tile_ref[...]


def load_scales(
    shared: SharedTiles, slot: jax.Array, is_seen: Callable[[jax.Array, int], jax.Array] | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Load the scales of a loop step's keys and values, f32 ``[T]``; None if not quantised.

    If `is_seen` is not None, the scales of values that the query does not see become 0. `is_seen`
    takes an array and the axis of its tokens, and returns a mask of the tokens that the query sees.
    """
    if shared.k_scale is None:
        return None, None
    keys = plgpu.load(shared.k_scale.at[slot], optimized=False)
    values = keys
    if shared.v_scale is not None:
        values = plgpu.load(shared.v_scale.at[slot], optimized=False)
    if is_seen is not None:
        # The scales of unused tokens may be NaN. For values, set these scales to 0, because a
        # weight of 0 times NaN is NaN. For keys, this is not necessary: scores are masked after
        # they have been multiplied by the scales.
        values = jnp.where(is_seen(values, 0), values, jnp.zeros_like(values))
    return keys, values


def load_sinks(columns: int, sinks_ref: Any, copies: TileCopies) -> jax.Array:
    """Return the sinks of 8 query heads times log2(e), f32 ``[8]``.

    They are -inf in all parts of a sequence except the first, so that a sink is counted once.
    """
    row = copies.shared.rows.at[columns]
    first = columns * MMA_COLUMNS
    for turn in range(first, min(first + MMA_COLUMNS, copies.sizes.slice_size)):
        sink = sinks_ref[copies.first_query_head + turn].astype(jnp.float32)
        is_first = copies.part.index == 0
        row[turn - first] = jnp.where(is_first, sink * np.float32(1 / math.log(2)), -jnp.inf)
    plgpu.commit_smem()
    return plgpu.load(row, optimized=False)


def widen_values(
    copies: TileCopies,
    slot: jax.Array,
    is_seen: Callable[[jax.Array, int], jax.Array] | None,
) -> None:
    """Convert the values of a loop step to the dtype of the weights, in `shared.values`.

    If `is_seen` is given, values that the query does not see become 0, see `load_scales`.
    """
    shared = copies.shared
    rings = shared.v or shared.k[: len(shared.values)]
    for tile, ring in zip(shared.values, rings, strict=True):
        layout = plgpu.Layout.WGMMA_UPCAST_2X
        values = plgpu.load(ring.at[slot], layout=layout, optimized=False)
        values = widen(values, tile.dtype)
        if is_seen is not None:
            # The values of unused tokens of a block may be NaN. Set them to 0, because 0 * NaN is
            # NaN.
            values = jnp.where(is_seen(values, 0), values, jnp.zeros_like(values))
        tile[...] = values


def rows_of(ref: Any, columns: int) -> Any:
    """Return group `columns` of 8 rows of a ref ``[R, x]``, transposed to ``[x, 8]``."""
    return ref.at[pl.ds(columns * MMA_COLUMNS, MMA_COLUMNS)].transpose((1, 0))
