"""Conversion of 8-bit keys and values to half precision, for the prefill kernel.

The prefill kernel (`paged_jax.kernels.mosaic_gpu.flash_prefill`) multiplies by `wgmma`
instructions, which read keys and values from shared memory in half precision. If the pools are
8-bit, the warpgroup that copies keys and values therefore also converts them. Bulk copies fill a
ring buffer of pieces ahead of the conversion. A piece has the tokens of a loop step, and some of
their lanes (elements of a head). The warpgroup converts a piece in registers, and stores the result
in a tile::

    pools [L, P, K, C, D]      ring of pieces       rings of tiles [stages, T, D]
                               [staged, T, size]
    keys of step 0    --copy-->  piece 0  --convert-->  k[0, :, :size]
                      --copy-->  piece 1  --convert-->  k[0, :, size:]
    values of step 0  --copy-->  piece 2  --convert-->  v[0, :, :size]
                      ...

The scales of the tokens are copied to two other ring buffers, together with the first piece of the
keys or of the values. The computing warpgroups multiply the scores by the scales of the keys, and
the softmax weights by the scales of the values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.mosaic_gpu.launch import plgpu, widen
from paged_jax.kernels.mosaic_gpu.query_tiles import ROWS, PrefillCopies

_WARPS = 4


def start_first(copies: PrefillCopies) -> None:
    """Start the copies of the first pieces, which fill the ring buffer."""
    turns = 2 * len(copies.sizes.pieces)
    for unit in range(copies.sizes.num_staged):
        step = jnp.int32(unit // turns)
        _start(copies, step, unit % turns, jnp.int32(unit), copies.load_blocks(step))


def convert_step(step: jax.Array, _: None, *, copies: PrefillCopies) -> None:
    """Convert the keys and values of a loop step, and start the copies of later pieces.

    Each later piece replaces a converted piece in the ring buffer. `_` is the unused carry of
    `jax.lax.fori_loop`.
    """
    shared, sizes = copies.shared, copies.sizes
    slot, turns = lax.rem(step, jnp.int32(sizes.num_stages)), 2 * len(sizes.pieces)
    start = copies.tile.origin + step * sizes.step_tokens
    is_partial = (start < copies.tile.seen) | (start + sizes.step_tokens > copies.tile.end)
    for turn in range(turns):
        is_value, piece = divmod(turn, turns // 2)
        tile, full, free, scaled = (
            (shared.v, shared.v_full, shared.v_free, shared.v_scaled)
            if is_value
            else (shared.k, shared.k_full, shared.k_free, shared.k_scaled)
        )
        ahead, later = divmod(turn + sizes.num_staged, turns)
        blocks = copies.load_blocks(step + ahead)
        unit = step * turns + turn
        source = lax.rem(unit, jnp.int32(sizes.num_staged))
        plgpu.barrier_wait(shared.is_staged.at[source])
        if piece == 0:
            if scaled is not None:
                plgpu.barrier_wait(scaled.at[lax.rem(step, jnp.int32(sizes.num_scaled))])

            @pl.when(step >= sizes.num_stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[slot])

        target = tile.at[slot, :, pl.ds(*sizes.pieces[piece])]
        if is_value:

            @pl.when(jnp.logical_not(is_partial))
            def _(source=source, target=target):
                _convert(copies, shared.staged.at[source], target, None)

            @pl.when(is_partial)
            def _(source=source, target=target):
                _convert(copies, shared.staged.at[source], target, start)

        else:
            _convert(copies, shared.staged.at[source], target, None)
        plgpu.commit_smem()
        if piece == len(sizes.pieces) - 1:
            plgpu.barrier_arrive(full.at[slot])
        # All threads have converted the piece, so its buffer can be overwritten by the next copy.
        _start(copies, step + ahead, later, unit + sizes.num_staged, blocks)


def _convert(copies: PrefillCopies, piece_ref: Any, tile_ref: Any, start: jax.Array | None) -> None:
    """Convert a piece to the dtype of `tile_ref`, and store it there.

    `start` is the position of the first token. If it is not None, tokens that no query sees become
    0, because unused tokens of a block may be NaN, and 0 * NaN is NaN.
    """

    # The loop is not unrolled, because the unrolled code would spill registers.
    @pl.loop(0, copies.sizes.step_tokens // ROWS)
    def _(turn):
        row = pl.multiple_of(turn * ROWS, ROWS)
        rows, layout = pl.ds(row, ROWS), plgpu.Layout.WGMMA_UPCAST_2X
        x = plgpu.load(piece_ref.at[rows], layout=layout, optimized=False)
        x = widen(x, tile_ref.dtype)
        if start is not None:
            token = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout) + (start + row)
            is_seen = (token >= copies.tile.seen) & (token < copies.tile.end)
            x = jnp.where(is_seen, x, jnp.zeros_like(x))
        tile_ref[rows] = x


def _start(
    copies: PrefillCopies, step: jax.Array, turn: int, unit: jax.Array, blocks: list[jax.Array]
) -> None:
    """Start the bulk copies of a piece; do nothing if its step is after the last loop step.

    Args:
      copies: bulk copies of the query tile.
      step: loop step that reads the piece.
      turn: index of the piece in its step: first the pieces of the key, then of the value.
      unit: index of the piece among the pieces of all steps.
      blocks: block ids of the step, one for each bulk copy.
    """
    shared, sizes, pools = copies.shared, copies.sizes, copies.inputs.pools
    is_value, piece = divmod(turn, len(sizes.pieces))
    slot = lax.rem(unit, jnp.int32(sizes.num_staged))
    scale_slot = lax.rem(step, jnp.int32(sizes.num_scaled))
    scale_pool, scale, scaled = (
        (pools.v_scale, shared.v_scale, shared.v_scaled)
        if is_value
        else (pools.k_scale, shared.k_scale, shared.k_scaled)
    )
    lanes, num_rows = pl.ds(*sizes.pieces[piece]), sizes.copy_rows

    def start_block(index: int, place: tuple[Any, Any, Any, Any]) -> None:
        rows = pl.ds(index * num_rows, num_rows)
        pool, source = pools.place("v" if is_value else "k", *place)
        plgpu.copy_gmem_to_smem(
            pool.at[(*source, lanes)], shared.staged.at[slot, rows], shared.is_staged.at[slot]
        )
        if scale_pool is not None and piece == 0:
            plgpu.copy_gmem_to_smem(
                scale_pool.at[place],
                scale.at[scale_slot, rows],
                scaled.at[scale_slot],
                # Promise that the copy is in bounds. Otherwise, the target would have to be aligned
                # to 128 bytes.
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    places = [
        copies.place(token, block) for token, block in zip(copies.tokens(step), blocks, strict=True)
    ]

    @pl.when(step < copies.tile.num_steps)
    def _():
        # Each warp starts some of the copies.
        @plgpu.warp_map
        def _(warp):
            for first in range(min(_WARPS, len(places))):

                @pl.when(warp == first)
                def _(first=first):
                    for index in range(first, len(places), _WARPS):
                        start_block(index, places[index])
