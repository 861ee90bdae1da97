"""Kernels that change the KV pools in bulk copies: writes of K and V, and copies of blocks.

`write`: a thread block writes one token. A bulk copy moves K (or V) of all KV heads of the token to
shared memory. If the pool has another dtype, the rows are cast there. Another bulk copy moves them
to the pool::

    k [N, K, D]                 shared memory               pool [L, P, K, C, D]
    k[n]         -- copy -->    [K, D], cast   -- copy -->  pool[layer, blocks[n], :, offsets[n]]

    (nothing if the layer, block or offset is out of range)

For a quantised pool, the thread block rounds the rows in registers. A row is one head of the token.
Each warp holds whole rows, so it finds the largest magnitude of a head without the other warps.
Each scale is stored separately, because a bulk copy moves at least 16 bytes.

`copy_blocks`: thread block (i, l) copies the i-th pair of a source and a target block in layer l,
through shared memory. A block is contiguous in memory. The kernel views it as rows of equal size.

The pools are updated in place. The kernels neither read nor write other parts of the pools.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.formatting import listed
from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.mosaic_gpu.launch import (
    MAX_BOX,
    MAX_SHARED_MEMORY,
    ROW_BYTES,
    WIDER,
    is_narrow,
    launch,
    plgpu,
)
from paged_jax.kernels.op_args import CopyArgs, WriteArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem

_FLOATING = ("bfloat16", "float16", "float32")
_THREADS = 128
_WARPS = 4
WARP_LANES = 32

# The kernels hold at most `_ROW_TILE` rows (heads) in registers at a time. If `_ROW_TILE` rows have
# more than `_TILE_ELEMENTS` elements in total, the kernels hold one row per warp instead.
_ROW_TILE, _TILE_ELEMENTS = 16, 4096

# In `copy_blocks`, a row of a block has at most `_COPY_ROW` bytes, and a bulk copy at most
# `_COPY_BYTES` bytes.
_COPY_ROW = 512
_COPY_BYTES = 32 * 1024


def refusal(problem: Problem) -> str | None:
    """Return why these kernels do not support a write or copy, or None if they do."""
    pool_dtype, K, C = jnp.dtype(problem.pool_dtype), problem["K"], problem["C"]
    row_bytes = problem.lanes * pool_dtype.itemsize
    if problem.op == "copy_blocks":
        sizes = {K * C * row_bytes, K * C * problem.kv.scale_bytes}
        odd = [size for size in sizes if size % ROW_BYTES]
        return f"blocks must have a multiple of {ROW_BYTES} bytes, got {odd[0]}" if odd else None
    q_dtype = jnp.dtype(problem.q_dtype)
    if pool_dtype.name not in (*_FLOATING, *WIDER) or q_dtype.name not in _FLOATING:
        names = ", ".join(_FLOATING)
        return (
            f"keys and values must be {names}, and pools {listed('one of these', *WIDER)}, got "
            f"{q_dtype} and {pool_dtype}"
        )
    D, U = problem["D"], problem.value_dim
    if is_narrow(pool_dtype) and (D % WARP_LANES or U % WARP_LANES):
        return f"rows to quantise must have a multiple of {WARP_LANES} elements, got {D} and {U}"
    sizes = {size * x for size in (D, U, problem.lanes) for x in (2, pool_dtype.itemsize)}
    if any(size % ROW_BYTES for size in sizes):
        return f"rows must have a multiple of {ROW_BYTES} bytes, got {sorted(sizes)}"
    if K > MAX_BOX:
        return f"pools must have at most {MAX_BOX} KV heads, got {K}"
    if problem.op == "write":
        rows = _round_up(K, max(rows_in_registers(K, D), _THREADS // math.gcd(_THREADS, D)))
        size = rows * (D if problem.shares_values else D + U)
        size *= q_dtype.itemsize + pool_dtype.itemsize
        return None if size <= MAX_SHARED_MEMORY else does_not_fit(K, D)
    return None


def does_not_fit(num_heads: int, head_dim: int) -> str:
    """Return the reason why kernels reject tokens whose heads do not fit the shared memory."""
    return f"the heads of a token, {num_heads} of {head_dim} elements, do not fit shared memory"


@functools.partial(jax.jit, static_argnames="interpret")
def write(args: WriteArgs, interpret: Interpret = False) -> Pools:
    """Write K and V of N tokens to one layer, in one launch; return the new pools."""
    pools = args.pools
    new = [x for x in (args.k, args.v) if x is not None]
    updated, treedef = jax.tree.flatten(pools)
    halves = []
    for x, pool in zip(new, updated, strict=False):
        pieces = []
        for _, size in _pieces(x.shape[2]):
            # The kernel casts a multiple of 128 elements at a time, so the arrays may need
            # additional, unused rows.
            rows = _THREADS // math.gcd(_THREADS, size)
            if pools.is_quantised:
                rows = rows_in_registers(*x.shape[1:])
            rows = _round_up(x.shape[1], rows)
            pieces.append([plgpu.SMEM((rows, size), dtype) for dtype in (x.dtype, pool.dtype)])
        loaded, cast = zip(*pieces, strict=True)
        scale = plgpu.SMEM((rows,), jnp.float32) if pools.is_quantised else None
        halves.append(_NewRows(loaded, cast, scale))
    _, written = launch(
        functools.partial(_write_kernel, num_halves=len(new)),
        "paged_write",
        grid={"token": new[0].shape[0]},
        arguments=[jnp.reshape(args.layer, 1), args.blocks, args.offsets, *new],
        updated=updated,
        scratch=[plgpu.Barrier(num_arrivals=sum(len(half.loaded) for half in halves)), halves],
        interpret=interpret,
    )
    return jax.tree.unflatten(treedef, written)


class _NewRows(NamedTuple):
    """Shared memory for the keys or the values of a token: one row per KV head.

    Attributes:
      loaded: ``[rows, size]`` for each piece of a row, in the dtype of the new keys or values.
      cast: ``[rows, size]`` for each piece of a row, in the dtype of the pool.
      scale: f32 ``[rows]``, scale of each row; None if the pool has no scales.
    """

    loaded: Any
    cast: Any
    scale: Any

    @property
    def stored(self) -> list[Any]:
        """Pieces to copy to the pool: `loaded` if it has the dtype of the pool, else `cast`."""
        pairs = zip(self.loaded, self.cast, strict=True)
        return [loaded if loaded.dtype == cast.dtype else cast for loaded, cast in pairs]

    def cast_rows(self, head_dim: int) -> None:
        """Store `loaded` in `cast`, in the dtype of the pool; set `scale` if there is one."""
        if self.scale is None:
            for loaded, cast in zip(self.loaded, self.cast, strict=True):
                if loaded.dtype != cast.dtype:
                    cast[...] = loaded[...].astype(cast.dtype)
            return
        num_rows = rows_in_registers(self.scale.shape[0], head_dim)

        @pl.loop(0, self.scale.shape[0] // num_rows)
        def _(turn):
            rows = pl.ds(turn * num_rows, num_rows)
            pieces = [load_rows(ref.at[rows]) for ref in self.loaded]
            store_rows(pieces, [ref.at[rows] for ref in self.cast], self.scale.at[rows])


def load_rows(ref: Any) -> jax.Array:
    """Load rows from shared memory as f32, with `row_layout`: each warp holds whole rows."""
    return plgpu.load(ref, layout=row_layout(ref.shape[1])).astype(jnp.float32)


def store_rows(parts: Sequence[jax.Array], refs: Sequence[Any], scale_ref: Any) -> None:
    """Store rows, rounded to the dtype of `refs`. Quantise them if `scale_ref` is given.

    Args:
      parts: f32 ``[rows, x]`` arrays, consecutive parts of the rows.
      refs: refs to store the parts in, with the same shapes.
      scale_ref: f32 ``[rows]``, ref to store the scales of the rows in; None to store no scales.
    """
    if scale_ref is not None:
        parts, scale = KVDtype.of(refs[0].dtype).quantise_parts(parts)
        scale_ref[...] = scale
    for part, ref in zip(parts, refs, strict=True):
        ref[...] = part.astype(ref.dtype)


def store_scales(
    pool_refs: Sequence[Any], scales: Sequence[Any], place: tuple[jax.Array, ...], num_heads: int
) -> None:
    """Copy the scales of the heads of a token from shared memory to the pools of scales.

    `place` is the layer, block and offset of the token. If `pool_refs` is empty, nothing is stored.
    """
    layer, block, offset = place
    if pool_refs:

        @pl.loop(0, num_heads)
        def _(head):
            for pool_ref, scale in zip(pool_refs, scales, strict=True):
                pool_ref[layer, block, head, offset] = scale[head]


def _write_kernel(layer_ref, blocks_ref, offsets_ref, *refs, num_halves):
    *refs, barrier, halves = refs
    new_refs, pool_refs, scale_refs = (
        refs[num_halves * i : num_halves * (i + 1)] for i in range(3)
    )
    token, num_heads = lax.axis_index("token"), new_refs[0].shape[1]
    place = layer, block, offset = layer_ref[0], blocks_ref[token], offsets_ref[token]
    heads = pl.ds(0, num_heads)

    @pl.when(is_in_range(*place, pool_refs[0].shape))
    def _():
        # Start the bulk copies of all ranges of lanes (`_pieces`) before waiting for the first one.
        for new_ref, half in zip(new_refs, halves, strict=True):
            for lanes, loaded in zip(_pieces(new_ref.shape[2]), half.loaded, strict=True):
                source = new_ref.at[token, :, pl.ds(*lanes)]
                plgpu.copy_gmem_to_smem(source, loaded.at[heads], barrier)
        plgpu.barrier_wait(barrier)
        for new_ref, half in zip(new_refs, halves, strict=True):
            half.cast_rows(new_ref.shape[2])
        plgpu.commit_smem()
        for new_ref, pool_ref, half in zip(new_refs, pool_refs, halves, strict=True):
            for lanes, stored in zip(_pieces(new_ref.shape[2]), half.stored, strict=True):
                target = pool_ref.at[layer, block, :, offset, pl.ds(*lanes)]
                plgpu.copy_smem_to_gmem(stored.at[heads], target)
        store_scales(scale_refs, [half.scale for half in halves], place, num_heads)
        plgpu.wait_smem_to_gmem(0)


def is_in_range(
    layer: jax.Array, block: jax.Array, offset: jax.Array, pool_shape: Sequence[int]
) -> jax.Array:
    """Return whether the layer, block and offset of a token are in the range of the pool."""
    L, P, _, C, _ = pool_shape
    is_block = (layer >= 0) & (layer < L) & (block >= 0) & (block < P)
    return is_block & (offset >= 0) & (offset < C)


def _pieces(width: int) -> list[tuple[int, int]]:
    """Cut a row into pieces that a bulk copy can move; return the start and size of each."""
    count = pl.cdiv(width, MAX_BOX)
    size = _round_up(pl.cdiv(width, count), WARP_LANES)
    return [(start, min(size, width - start)) for start in range(0, width, size)]


def _round_up(x: int, multiple: int) -> int:
    return pl.cdiv(x, multiple) * multiple


def rows_in_registers(num_rows: int, width: int) -> int:
    """Return the number of rows that the kernels hold in registers at a time."""
    num_rows = min(_round_up(num_rows, _WARPS), _ROW_TILE)
    return num_rows if num_rows * width <= _TILE_ELEMENTS else _WARPS


def padded_rows(num_rows: int, width: int) -> int:
    """Return `num_rows`, rounded up to a multiple of `rows_in_registers`."""
    return _round_up(num_rows, rows_in_registers(num_rows, width))


def row_layout(width: int) -> Any:
    """Return a register layout for rows of `width` elements: each warp holds whole rows."""
    vector = math.gcd(width // WARP_LANES, 4)
    # A tile of the layout has three dimensions: rows (one per warp), threads, and elements per
    # thread.
    tiling = plgpu.Tiling(((_WARPS, WARP_LANES * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


@functools.partial(jax.jit, static_argnames="interpret")
def copy_blocks(args: CopyArgs, interpret: Interpret = False) -> Pools:
    """Copy blocks in all layers and pools, in one launch."""
    pools, sources, targets = args
    leaves, treedef = jax.tree.flatten(pools)
    L, P = pools.k.shape[:2]
    views = [_as_rows(leaf) for leaf in leaves]
    tiles = [(_rows_at_once(view), view.shape[2]) for view in views]
    _, copied = launch(
        functools.partial(_copy_kernel, num_layers=L, num_blocks=P),
        "copy_blocks",
        grid={"copy": sources.size * L},
        arguments=[sources, targets],
        updated=views,
        scratch=[
            plgpu.Barrier(),
            *(plgpu.SMEM(tile, view.dtype) for tile, view in zip(tiles, views, strict=True)),
        ],
        interpret=interpret,
    )
    copied = [new.reshape(leaf.shape) for new, leaf in zip(copied, leaves, strict=True)]
    return jax.tree.unflatten(treedef, copied)


def _copy_kernel(sources_ref, targets_ref, *refs, num_layers, num_blocks):
    pool_refs, barrier, tiles = (
        refs[: len(refs) // 2],
        refs[len(refs) // 2],
        refs[-(len(refs) // 2) :],
    )
    pair, layer = (f(lax.axis_index("copy"), jnp.int32(num_layers)) for f in (lax.div, lax.rem))
    # No target block is also a source block, so the order of the thread blocks does not matter.
    source, target = sources_ref[pair], targets_ref[pair]
    is_copy = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)

    @pl.when(is_copy)
    def _():
        for pool_ref, tile in zip(pool_refs, tiles, strict=True):
            num_rows = tile.shape[0]

            @pl.loop(0, pool_ref.shape[1] // num_rows)
            def _(turn, pool_ref=pool_ref, tile=tile, num_rows=num_rows):
                rows = pl.ds(turn * num_rows, num_rows)
                layer_start = layer * num_blocks
                plgpu.copy_gmem_to_smem(pool_ref.at[layer_start + source, rows], tile, barrier)
                plgpu.barrier_wait(barrier)
                plgpu.copy_smem_to_gmem(tile, pool_ref.at[layer_start + target, rows])
                plgpu.wait_smem_to_gmem(0)


def _as_rows(pool: jax.Array) -> jax.Array:
    """Reshape a pool to ``[L * P, rows, elements]``: divide blocks into rows of equal size."""
    L, P, *block = pool.shape
    size, itemsize = math.prod(block), pool.dtype.itemsize
    width = math.gcd(size * itemsize, min(_COPY_ROW, MAX_BOX * itemsize)) // itemsize
    return pool.reshape(L * P, size // width, width)


def _rows_at_once(view: jax.Array) -> int:
    """Return the number of rows that a bulk copy moves, a divisor of the rows of a block."""
    _, num_rows, width = view.shape
    max_rows = min(_COPY_BYTES // (width * view.dtype.itemsize), MAX_BOX, num_rows)
    return max(n for n in range(1, max_rows + 1) if num_rows % n == 0)
