"""Query tiles of the prefill kernel: their sizes, their list, and their bulk copies.

See `paged_jax.kernels.mosaic_gpu.flash_prefill`. The 128 rows of a tile are the same n tokens for
each of several query heads of a KV head. Each head has n consecutive rows, which may belong to both
computing warpgroups::

    5 heads of 24 tokens    | 0 - 23 | 24 - 47 | 48 - 63 : 64 - 71 | 72 - 95 | 96 - 119 | unused |
                                         warpgroup 0     :     warpgroup 1

If values have more than 256 elements, a tile has 64 rows. Both warpgroups then have the same rows,
and each computes one half of the elements of the output.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.mosaic_gpu.launch import (
    MAX_SHARED_MEMORY,
    TILE_LANES,
    TILE_ROWS,
    AttentionInputs,
    plgpu,
    swizzled,
)
from paged_jax.kernels.op_args import Options
from paged_jax.kernels.pools import Pages, Pools

# A `wgmma` instruction has `ROWS` rows. There are `CONSUMERS` warpgroups that compute. The output
# of a warpgroup has at most `MAX_LANES` elements in each row, because it must fit the registers.
ROWS = 64
CONSUMERS = 2
MAX_LANES = 256

_MAX_STAGES = 4

# For 8-bit pools, the ring buffers of converted tiles hold `_CONVERTED_STAGES` loop steps. The ring
# buffer of pieces that are not converted yet holds at most `_MAX_STAGED` pieces.
_CONVERTED_STAGES, _MAX_STAGED = 2, 6


class PrefillSizes(NamedTuple):
    """Static sizes of a launch of the prefill kernel.

    Attributes:
      slice_size: number of query heads of a tile, a divisor of the query heads per KV head.
      tile_tokens: number of tokens of a tile (n).
      step_tokens: tokens in a loop step (T).
      num_stages: number of loop steps whose tiles the ring buffers hold.
      num_staged: number of pieces in the ring buffer of unconverted pieces; 0 if the pools are not
        8-bit.
      block_size: tokens in a block (C).
      head_dim: elements of a key (D).
      value_dim: elements of a value (U).
      shares_values: whether each value vector is the beginning of its key vector.
    """

    slice_size: int
    tile_tokens: int
    step_tokens: int
    num_stages: int
    num_staged: int
    block_size: int
    head_dim: int
    value_dim: int
    shares_values: bool

    @classmethod
    def choose(
        cls, T: int, G: int, C: int, D: int, *, is_narrow: bool = False, shared: int | None = None
    ) -> "PrefillSizes":
        """Choose the sizes for a batch with chunks of about T tokens.

        `G`, `C` and `D` are sizes of dimensions, see `paged_jax.dims`. `is_narrow` says whether the
        pools are 8-bit. `shared` is the number of elements of a value (U) if each value vector is
        the beginning of its key vector; otherwise None. If a tile does not fit shared memory, the
        ring buffers of the result have fewer than two loop steps.
        """
        U = shared or D
        rows = ROWS if U > MAX_LANES else CONSUMERS * ROWS

        def count_tokens(heads: int) -> int:
            """Return the number of tokens that fit a tile, a multiple of 8."""
            return rows // heads // TILE_ROWS * TILE_ROWS

        def num_tiles(heads: int) -> int:
            return pl.cdiv(T, count_tokens(heads)) * (G // heads)

        divisors = [size for size in range(1, rows // TILE_ROWS + 1) if G % size == 0]
        # Choose the number of heads that gives the fewest tiles. If several numbers do, take the
        # largest of them: a tile then has fewer tokens, so that fewer loop steps are masked.
        heads = min(divisors, key=lambda size: (num_tiles(size), -size))
        step_tokens = 128 if D <= 128 else 64
        halves, free = 2 if shared is None else 1, MAX_SHARED_MEMORY - rows * D * 2
        stage = halves * step_tokens * D * 2
        stages, staged = min(free // stage, _MAX_STAGES), 0
        if is_narrow:
            stages = _CONVERTED_STAGES
            # Compute the bytes that a piece takes: its elements, and an upper bound of its share of
            # the two ring buffers of scales.
            piece = step_tokens * (_piece_size(D) + 2 * 4 * stages)
            staged = min((free - stages * stage) // piece, _MAX_STAGED)
        return cls(
            heads, count_tokens(heads), step_tokens, stages, staged, C, D, U, shared is not None
        )

    @property
    def num_groups(self) -> int:
        """Number of groups of 64 rows in a tile; 1 if both computing warpgroups share one group."""
        return 1 if self.value_dim > MAX_LANES else CONSUMERS

    def share(self, warpgroup: jax.Array) -> tuple[Any, Any]:
        """Return the group of rows of a computing warpgroup, and its range of output elements."""
        if self.num_groups == CONSUMERS:
            return warpgroup, pl.ds(0, self.value_dim)
        size = self.value_dim // CONSUMERS
        return 0, pl.ds(pl.multiple_of(warpgroup * size, size), size)

    @property
    def copy_rows(self) -> int:
        """Number of tokens in a bulk copy: a block, or one loop step if blocks are longer."""
        return min(self.block_size, self.step_tokens)

    @property
    def num_copies(self) -> int:
        """Number of bulk copies that fill a tile of keys or values."""
        return self.step_tokens // self.copy_rows

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Start and size of each piece of an 8-bit key or value. Pieces are copied separately."""
        size = _piece_size(self.head_dim)
        return [(start, size) for start in range(0, self.head_dim, size)]

    @property
    def num_scaled(self) -> int:
        """Number of loop steps for which a ring buffer must hold the scales.

        With fewer steps, a copy would overwrite scales that are still in use.
        """
        turns = 2 * len(self.pieces)
        return self.num_stages + 1 + (turns - 1 + self.num_staged) // turns

    @property
    def boxes(self) -> list[tuple[int, int, int, int, int]]:
        """Bulk copies of the queries of a tile.

        Each tuple has the index of the head in the slice, the first token, the group of 64 rows,
        the first row within this group, and the number of rows.
        """
        n, boxes = self.tile_tokens, []
        for head in range(self.slice_size):
            row, end = head * n, (head + 1) * n
            while row < end:
                stop = min(end, (row // ROWS + 1) * ROWS)
                if self.value_dim < self.head_dim:
                    # The output is stored in the first lanes of the rows of the queries. A bulk
                    # copy of only some lanes of swizzled rows must have `TILE_ROWS` rows.
                    stop = row + TILE_ROWS
                boxes.append((head, row - head * n, row // ROWS, row % ROWS, stop - row))
                row = stop
        return boxes


def _piece_size(head_dim: int) -> int:
    """Return the number of lanes (elements) of a piece of an 8-bit key or value."""
    # For wide heads, converting larger pieces would spill registers.
    is_wide = head_dim > 2 * TILE_LANES
    return TILE_LANES if is_wide or head_dim % (2 * TILE_LANES) else 2 * TILE_LANES


class QueryTile(NamedTuple):
    """Query tile of a thread block, as i32 scalars.

    Attributes:
      is_there: 0 if the thread block has no tile.
      sequence: row of the sequence in the batch.
      index: index of the tile in the arrays of queries and outputs, which have n rows for each
        tile.
      first: position of the first token of the tile in its sequence.
      num_queries: number of queries. The first `num_queries` of the n tokens are queries, the rest
        is padding.
      seen: position of the first token that any query of the tile sees.
      origin: position at which loop step 0 starts: `seen`, rounded down to a multiple of
        `copy_rows`.
      full_begin: first loop step that needs no mask, because every query sees every token.
      full_end: end of the loop steps without a mask (exclusive).
      num_steps: number of loop steps.
    """

    is_there: Any
    sequence: Any
    index: Any
    first: Any
    num_queries: Any
    seen: Any
    origin: Any
    full_begin: Any
    full_end: Any
    num_steps: Any

    @property
    def end(self) -> Any:
        """Position after the last token that a query sees."""
        return self.first + self.num_queries


def list_tiles(
    sizes: PrefillSizes, options: Options, sequence: jax.Array, turn: jax.Array,
    context_lens: jax.Array, query_lens: jax.Array, *,
    index: jax.Array, is_there: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Return the fields of the `QueryTile` of each thread block, i32 ``[tiles, fields]``.

    Thread block i computes tile ``turn[i]`` of sequence ``sequence[i]``. All layers of a model step
    have the same sequence lengths, so XLA computes the list once per step.
    """
    n, T, window = sizes.tile_tokens, sizes.step_tokens, options.sliding_window
    length, query_len = context_lens[sequence], query_lens[sequence]
    num_queries = jnp.clip(query_len - turn * n, 0, n)
    first = length - query_len + turn * n
    last = first + num_queries - 1
    seen = jnp.zeros_like(first) if window is None else jnp.maximum(first - window + 1, 0)
    origin = seen - lax.rem(seen, jnp.full_like(seen, sizes.copy_rows))

    def steps(tokens: jax.Array) -> jax.Array:
        return lax.div(jnp.maximum(tokens, 0), jnp.full_like(tokens, T))

    num_steps = jnp.where(num_queries > 0, steps(last - origin) + 1, 0)
    full_begin = jnp.zeros_like(first)
    if window is not None:
        full_begin = jnp.minimum(steps(last - window + 1 - origin + T - 1), num_steps)
    full_end = jnp.clip(steps(first + 1 - origin), full_begin, num_steps)
    fields = QueryTile(
        jnp.ones_like(sequence) if is_there is None else is_there, sequence, index,
        first, num_queries, seen, origin, full_begin, full_end, num_steps,
    )  # fmt: skip
    return jnp.stack([field.astype(jnp.int32) for field in fields], axis=1)


class PrefillTiles(NamedTuple):
    """Arrays and barriers in the shared memory of a thread block.

    Attributes:
      q: ``[groups, 64, D]``, the queries of each group of rows. The output is later stored in their
        place.
      k: ``[stages, T, D]``, ring buffer of tiles of keys, converted if the pools are 8-bit.
      v: ``[stages, T, D]``, ring buffer of tiles of values, converted if the pools are 8-bit; None
        if the keys contain the values.
      staged: ``[staged, T, size]``, ring buffer of unconverted pieces of 8-bit keys and values, or
        None.
      k_scale: f32 ``[scaled, T]``, ring buffer of the scales of the keys, or None.
      v_scale: f32 ``[scaled, T]``, ring buffer of the scales of the values, or None.
      lse: f32 ``[groups, 64]``, log-sum-exp of each row.
      is_loaded: barrier, completed when the queries have been copied.
      k_full: barriers of the tiles of keys, completed when a tile can be read.
      v_full: barriers of the tiles of values, completed when a tile can be read; None if the keys
        contain the values.
      k_free: barriers of the tiles of keys, completed when both computing warpgroups have read a
        tile.
      v_free: barriers of the tiles of values, completed when both computing warpgroups have read a
        tile; None if the keys contain the values.
      is_partial: barrier of a tile of values that contains tokens that no query sees, completed
        when it has been copied; None if the pools are 8-bit.
      is_staged: barriers of the unconverted pieces, completed when a piece has been copied, or
        None.
      k_scaled: barriers of the scales of the keys, or None.
      v_scaled: barriers of the scales of the values, or None.
      are_read: barrier, completed when both computing warpgroups have read the queries that they
        share; None if each has its own rows.
      is_done: barrier, completed when both computing warpgroups have stored their output.
    """

    q: Any
    k: Any
    v: Any
    staged: Any
    k_scale: Any
    v_scale: Any
    lse: Any
    is_loaded: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    is_partial: Any
    is_staged: Any
    k_scaled: Any
    v_scaled: Any
    are_read: Any
    is_done: Any

    @classmethod
    def of(cls, sizes: PrefillSizes, dtype: Any, pools: Pools | Pages) -> "PrefillTiles":
        """Describe the arrays and barriers in shared memory, for `launch`."""
        stages, T, D = sizes.num_stages, sizes.step_tokens, sizes.head_dim
        groups, has_values = sizes.num_groups, not sizes.shares_values
        copied = functools.partial(plgpu.Barrier, num_arrivals=sizes.num_copies)
        free = functools.partial(plgpu.Barrier, num_arrivals=CONSUMERS)
        full, value_dtype, scale = copied, dtype, None
        staged = is_staged = is_scaled = None
        if is_narrow := sizes.num_staged > 0:
            # The copying warpgroup arrives at the barrier once per tile, after it has converted the
            # tile.
            full = functools.partial(plgpu.Barrier, num_arrivals=1)
            # Use bfloat16, because the products of softmax weights and scales may exceed the range
            # of float16.
            value_dtype, size = jnp.bfloat16, sizes.pieces[0][1]
            staged = swizzled((sizes.num_staged, T, size), pools.dtype, size)
            is_staged = copied(num_barriers=sizes.num_staged)
        if pools.is_quantised:
            scale = plgpu.SMEM((sizes.num_scaled, T), jnp.float32)
            is_scaled = copied(num_barriers=sizes.num_scaled)
        return cls(
            q=swizzled((groups, ROWS, D), dtype),
            k=swizzled((stages, T, D), dtype),
            v=swizzled((stages, T, D), value_dtype) if has_values else None,
            staged=staged,
            k_scale=scale,
            v_scale=scale,
            lse=plgpu.SMEM((groups, ROWS), jnp.float32),
            is_loaded=plgpu.Barrier(num_arrivals=len(sizes.boxes)),
            k_full=full(num_barriers=stages),
            v_full=full(num_barriers=stages) if has_values else None,
            k_free=free(num_barriers=stages),
            v_free=free(num_barriers=stages) if has_values else None,
            is_partial=None if is_narrow else copied(),
            is_staged=is_staged,
            k_scaled=is_scaled,
            v_scaled=is_scaled,
            are_read=free() if groups < CONSUMERS else None,
            is_done=free(),
        )

    @property
    def values(self) -> tuple[Any, Any, Any]:
        """The ring buffer that contains the values; its `full` barriers; its `free` barriers."""
        if self.v is None:
            return self.k, self.k_full, self.k_free
        return self.v, self.v_full, self.v_free


class PrefillCopies(NamedTuple):
    """Bulk copies of the data of a query tile. The copying warpgroup starts all of them."""

    inputs: AttentionInputs
    shared: PrefillTiles
    tile: QueryTile
    sizes: PrefillSizes

    @property
    def first_head(self) -> jax.Array:
        """The first query head of the tile."""
        return lax.axis_index("place") * self.sizes.slice_size

    def load_queries(self) -> None:
        """Start the copies of the queries."""
        shared = self.shared
        for head, token, group, row, num_rows in self.sizes.boxes:
            plgpu.copy_gmem_to_smem(
                self.inputs.q.at[self._rows(token, num_rows), self.first_head + head],
                shared.q.at[group, pl.ds(row, num_rows)],
                shared.is_loaded,
            )

    def load_step(self, step: jax.Array, _: None) -> None:
        """Start the copies of a loop step's keys and values, as soon as their tiles are free."""
        shared, stages = self.shared, self.sizes.num_stages
        values, values_full, values_free = shared.values
        slot, blocks = lax.rem(step, jnp.int32(stages)), self.load_blocks(step)
        start = self.tile.origin + step * self.sizes.step_tokens
        is_partial = (start < self.tile.seen) | (start + self.sizes.step_tokens > self.tile.end)

        if not self.sizes.shares_values:

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(shared.k_free.at[slot])

            self._load("k", shared.k.at[slot], shared.k_full.at[slot], step, blocks)

        @pl.when(step >= stages)
        def _():
            plgpu.barrier_wait(values_free.at[slot])

        @pl.when(jnp.logical_not(is_partial))
        def _():
            self._load("v", values.at[slot], values_full.at[slot], step, blocks)

        @pl.when(is_partial)
        def _():
            self._load("v", values.at[slot], shared.is_partial, step, blocks)
            plgpu.barrier_wait(shared.is_partial)
            self._clear(values.at[slot], start)
            plgpu.commit_smem()
            for _ in range(self.sizes.num_copies):
                plgpu.barrier_arrive(values_full.at[slot])

    def wait_for_step(self, step: jax.Array, _: None) -> None:
        """Wait until both computing warpgroups have read the keys and values of a loop step."""
        slot = lax.rem(step, jnp.int32(self.sizes.num_stages))
        for free in (self.shared.k_free, self.shared.v_free):
            if free is not None:
                plgpu.barrier_wait(free.at[slot])

    def store(self, out_ref: Any, lse_ref: Any) -> None:
        """Copy the output to GPU memory, as soon as both computing warpgroups have stored it."""
        shared, index, lanes = self.shared, self.tile.index, pl.ds(0, self.sizes.value_dim)
        plgpu.barrier_wait(shared.is_done)
        for head, token, group, row, num_rows in self.sizes.boxes:
            plgpu.copy_smem_to_gmem(
                shared.q.at[group, pl.ds(row, num_rows), lanes],
                out_ref.at[self._rows(token, num_rows), self.first_head + head],
            )
        plgpu.copy_smem_to_gmem(shared.lse, lse_ref.at[index, lax.axis_index("place")])
        plgpu.wait_smem_to_gmem(0)

    def _rows(self, token: int, num_rows: int) -> Any:
        """Return a range of rows of the arrays of queries and outputs, which have a row per token.

        The range starts at the row of token `token` of the tile, and has `num_rows` rows.
        """
        start = self.tile.index * self.sizes.tile_tokens + token
        return pl.ds(pl.multiple_of(start, TILE_ROWS), num_rows)

    def tokens(self, step: jax.Array) -> list[jax.Array]:
        """Return, for each bulk copy of loop step `step`, the position of its first token."""
        rows, first = self.sizes.copy_rows, self.tile.origin + step * self.sizes.step_tokens
        return [first + turn * rows for turn in range(self.sizes.num_copies)]

    def load_blocks(self, step: jax.Array) -> list[jax.Array]:
        """Return the block id of each bulk copy of a step; 0 after the last visible token."""
        tables, blocks = self.inputs.block_tables, []
        for token in self.tokens(step):
            entry = lax.div(token, jnp.int32(self.sizes.block_size))
            block = tables[self.tile.sequence, jnp.minimum(entry, tables.shape[1] - 1)]
            blocks.append(jnp.where(token < self.tile.end, block, 0))
        return blocks

    def _load(
        self, half: Any, tile_ref: Any, barrier: Any, step: jax.Array, blocks: list[jax.Array]
    ) -> None:
        """Start the copies of the keys or the values of a loop step to `tile_ref`."""
        rows, lanes = self.sizes.copy_rows, pl.ds(0, self.sizes.head_dim)
        for turn, (token, block) in enumerate(zip(self.tokens(step), blocks, strict=True)):
            pool, place = self.inputs.pools.place(half, *self.place(token, block))
            target = tile_ref.at[pl.ds(turn * rows, rows)]
            plgpu.copy_gmem_to_smem(pool.at[(*place, lanes)], target, barrier)

    def place(self, token: jax.Array, block: jax.Array) -> tuple[Any, Any, Any, Any]:
        """Return the layer, block, KV head and range of offsets that a bulk copy reads.

        `token` is the position of the first token of the copy, in block `block`.
        """
        rows, inputs = self.sizes.copy_rows, self.inputs
        head = lax.div(self.first_head, jnp.int32(inputs.q.shape[1] // inputs.pools.num_kv_heads))
        offset: Any = 0
        if rows < self.sizes.block_size:
            offset = lax.rem(token, jnp.int32(self.sizes.block_size))
            offset = pl.multiple_of(offset, rows)
        return inputs.layer[0], block, head, pl.ds(offset, rows)

    def _clear(self, tile_ref: Any, start: jax.Array) -> None:
        """Set the values of tokens that no query sees to 0. `start` is the first token's position.

        Unused tokens of a block may be NaN, and 0 * NaN is NaN.
        """
        for row in range(0, self.sizes.step_tokens, ROWS):
            first = start + row

            @pl.when((first < self.tile.seen) | (first + ROWS > self.tile.end))
            def _(row=row, first=first):
                for lane in range(0, self.sizes.value_dim, TILE_LANES):
                    place = pl.ds(row, ROWS), pl.ds(lane, TILE_LANES)
                    values = tile_ref[place]
                    token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0) + first
                    is_seen = (token >= self.tile.seen) & (token < self.tile.end)
                    tile_ref[place] = jnp.where(is_seen, values, jnp.zeros_like(values))
