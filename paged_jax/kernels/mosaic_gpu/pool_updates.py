"""Kernels that change the KV pools in bulk copies: writes of K and V, and copies of blocks.

`write`: a thread block writes one token. A box of all KV heads is copied to shared memory, cast to
the dtype of the pool if it has another one, and copied to the pool::

    k [N, K, D]                 shared memory               pool [L, P, K, C, D]
    k[n]         -- copy -->    [K, D], cast   -- copy -->  pool[layer, blocks[n], :, offsets[n]]

    (nothing if the layer, block or offset is out of range)

`rope_write`: a thread block reads all heads of one token, in two halves. Elements of the two halves
with the same index are a pair that is rotated. In registers, each warp has whole rows, so the sum
of squares of a head does not leave the warp::

    qkv [N, K * (G + 2), D]                          rotated, cast [K * (G + 2), D]
    first, second halves of qkv[n]  -- registers --> G rows:  q[n, heads]
    in shared memory                                 1 row:   k_pool[layer, block, head, offset]
                                                     1 row:   v_pool[layer, block, head, offset]

`copy_blocks`: thread block (i, l) copies pair i in layer l through shared memory. A block is one
contiguous range of memory, which is seen as rows.

The pools are updated in place. All other memory of the pools is neither read nor written.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import (
    CopyArgs,
    Interpret,
    Options,
    Pools,
    Problem,
    RopeWriteArgs,
    WriteArgs,
)
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.gradients import with_plain_gradients
from paged_jax.kernels.mosaic_gpu.launch import (
    MAX_BOX,
    MAX_SHARED_MEMORY,
    ROW_BYTES,
    launch,
    plgpu,
)
from paged_jax.kernels.pool_format import is_quantised, query_dtype

_FLOATING = ("bfloat16", "float16", "float32")
_THREADS = 128
_WARPS = 4
_WARP_LANES = 32

# Rows of heads that `rope_write` holds in registers at a time.
_ROW_TILE = 16

# Bytes in a row of a block and in a bulk copy of `copy_blocks`.
_COPY_ROW = 512
_COPY_BYTES = 32 * 1024


def refusal(problem: Problem) -> str | None:
    """Return why these kernels cannot write to such pools or copy their blocks, or None."""
    pool_dtype, K, C = jnp.dtype(problem.pool_dtype), problem["K"], problem["C"]
    row_bytes = problem.lanes * pool_dtype.itemsize
    if problem.op == "copy_blocks":
        sizes = {K * C * row_bytes, *({K * C * 4} if is_quantised(pool_dtype) else ())}
        odd = [size for size in sizes if size % ROW_BYTES]
        return f"it copies {ROW_BYTES} bytes at a time, and a block has {odd[0]}" if odd else None
    if pool_dtype.name not in _FLOATING or jnp.dtype(problem.q_dtype).name not in _FLOATING:
        names = ", ".join(_FLOATING)
        return f"it writes {names}, got {problem.q_dtype} for pools of {pool_dtype}"
    dims = {problem["D"], problem.value_dim, problem.lanes}
    if any(size * itemsize % ROW_BYTES for size in dims for itemsize in (2, pool_dtype.itemsize)):
        return f"it copies rows of a multiple of 8 elements, got {sorted(dims)}"
    if problem.op == "write":
        return None if K <= MAX_BOX else f"it copies up to {MAX_BOX} KV heads, got {K}"
    D, num_rows = problem["D"], problem["H"] + 2 * K
    if D % (2 * _WARP_LANES):
        return f"it rotates halves of a multiple of {_WARP_LANES} elements, got a head of {D}"
    itemsize = jnp.dtype(problem.q_dtype).itemsize
    size = pl.cdiv(num_rows, _ROW_TILE) * _ROW_TILE * D * (itemsize + pool_dtype.itemsize)
    if num_rows > MAX_BOX or D // 2 > MAX_BOX or size > MAX_SHARED_MEMORY:
        return f"the heads of a token, {num_rows} of {D} elements, do not fit shared memory"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def write(args: WriteArgs, interpret: Interpret = False) -> Pools:
    """Write K and V of N tokens, in one launch."""
    kernel = functools.partial(_write, interpret=interpret)
    return with_plain_gradients(kernel, general_backend().write)(args)


def _write(args: WriteArgs, interpret: Interpret) -> Pools:
    pools = args.pools
    new = [x for x in (args.k, args.v) if x is not None]
    updated = [x for x in (pools.k, pools.v) if x is not None]
    scratch = [plgpu.Barrier(num_arrivals=sum(len(_pieces(x.shape[2])) for x in new))]
    for x, pool in zip(new, updated, strict=True):
        for _, size in _pieces(x.shape[2]):
            # The kernel casts tiles of a multiple of 128 elements. The additional rows are unused.
            K = _round_up(x.shape[1], _THREADS // math.gcd(_THREADS, size))
            scratch += [plgpu.SMEM((K, size), dtype) for dtype in (x.dtype, pool.dtype)]
    _, written = launch(
        functools.partial(_write_kernel, num_halves=len(new)),
        "paged_write",
        grid={"token": new[0].shape[0]},
        arguments=[jnp.reshape(args.layer, 1), args.blocks, args.offsets, *new],
        updated=updated,
        scratch=scratch,
        interpret=interpret,
    )
    return pools._replace(k=written[0], v=None if pools.v is None else written[1])


def _write_kernel(layer_ref, blocks_ref, offsets_ref, *refs, num_halves):
    new_refs, pool_refs = refs[:num_halves], refs[num_halves : 2 * num_halves]
    barrier, *tiles = refs[2 * num_halves :]
    token = lax.axis_index("token")
    place = layer_ref[0], blocks_ref[token], offsets_ref[token]

    @pl.when(_is_kept(*place, pool_refs[0].shape))
    def _():
        layer, block, offset = place
        # One bulk copy per range of lanes (`_pieces`), all in flight at the same time.
        pieces = [
            (new_ref, pool_ref, pl.ds(start, size))
            for new_ref, pool_ref in zip(new_refs, pool_refs, strict=True)
            for start, size in _pieces(new_ref.shape[2])
        ]
        heads = pl.ds(0, new_refs[0].shape[1])
        for (new_ref, _, lanes), loaded in zip(pieces, tiles[::2], strict=True):
            plgpu.copy_gmem_to_smem(new_ref.at[token, :, lanes], loaded.at[heads], barrier)
        plgpu.barrier_wait(barrier)
        for loaded, cast in zip(tiles[::2], tiles[1::2], strict=True):
            if loaded.dtype != cast.dtype:
                cast[...] = loaded[...].astype(cast.dtype)
        plgpu.commit_smem()
        for (_, pool_ref, lanes), loaded, cast in zip(pieces, tiles[::2], tiles[1::2], strict=True):
            tile = loaded if loaded.dtype == cast.dtype else cast
            target = pool_ref.at[layer, block, :, offset, lanes]
            plgpu.copy_smem_to_gmem(tile.at[heads], target)
        plgpu.wait_smem_to_gmem(0)


def _is_kept(
    layer: jax.Array, block: jax.Array, offset: jax.Array, pool_shape: Sequence[int]
) -> jax.Array:
    """Return whether a place of a token is in the pool."""
    L, P, _, C, _ = pool_shape
    is_kept = (layer >= 0) & (layer < L) & (block >= 0) & (block < P)
    return is_kept & (offset >= 0) & (offset < C)


def _pieces(width: int) -> list[tuple[int, int]]:
    """Return the start and the size of the pieces of a row that bulk copies move."""
    count = pl.cdiv(width, MAX_BOX)
    size = _round_up(pl.cdiv(width, count), ROW_BYTES)
    return [(start, min(size, width - start)) for start in range(0, width, size)]


def _round_up(x: int, multiple: int) -> int:
    return pl.cdiv(x, multiple) * multiple


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def rope_write(
    args: RopeWriteArgs, options: Options, interpret: Interpret = False
) -> tuple[jax.Array, Pools]:
    """Run `paged_rope_write` in one launch: normalise, rotate, write, and return the queries."""
    kernel = functools.partial(_rope_write, options=options, interpret=interpret)
    plain = functools.partial(general_backend().rope_write, options=options)
    return with_plain_gradients(kernel, plain)(args)


def _rope_write(
    args: RopeWriteArgs, options: Options, interpret: Interpret
) -> tuple[jax.Array, Pools]:
    pools, (N, K, width, D) = args.pools, args.qkv.shape
    dtype, H = query_dtype(pools.k.dtype), K * (width - 2)
    num_rows = _round_up(K * width, _ROW_TILE)
    assert pools.v is not None
    [q], (k_pool, v_pool) = launch(
        functools.partial(
            _rope_write_kernel,
            group_size=width - 2,
            norm_eps=options.norm_eps,
            has_norms=args.norms is not None,
        ),
        "paged_rope_write",
        grid={"token": N},
        arguments=[
            jnp.reshape(args.layer, 1),
            args.blocks,
            args.offsets,
            args.qkv.reshape(N, K * width, D),
            args.cos,
            args.sin,
            *(args.norms or ()),
        ],
        updated=[pools.k, pools.v],
        outputs=[jax.ShapeDtypeStruct((N, H, D), dtype)],
        scratch=[
            plgpu.Barrier(num_arrivals=2),
            plgpu.SMEM((num_rows, D // 2), args.qkv.dtype),
            plgpu.SMEM((num_rows, D // 2), args.qkv.dtype),
            plgpu.SMEM((num_rows, D), dtype),
        ],
        interpret=interpret,
    )
    return q, pools._replace(k=k_pool, v=v_pool)


def _rope_write_kernel(
    layer_ref, blocks_ref, offsets_ref, qkv_ref, cos_ref, sin_ref, *refs,
    group_size, norm_eps, has_norms,
):  # fmt: skip
    norm_refs, refs = (refs[:2], refs[2:]) if has_norms else ((), refs)
    k_pool_ref, v_pool_ref, q_ref, barrier, first_s, second_s, out_s = refs
    (_, num_heads, D), G = qkv_ref.shape, group_size
    half, token = D // 2, lax.axis_index("token")
    layer, block, offset = layer_ref[0], blocks_ref[token], offsets_ref[token]

    for start, halves in ((0, first_s), (half, second_s)):
        source = qkv_ref.at[token, :, pl.ds(start, half)]
        plgpu.copy_gmem_to_smem(source, halves.at[pl.ds(0, num_heads)], barrier)
    layout = _row_layout(half)

    def of_lanes(ref: Any) -> jax.Array:
        """Load a row that is the same for all heads, f32 ``[_ROW_TILE, half]``."""
        row = plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(row, (_ROW_TILE, half), [1])

    cos, sin = of_lanes(cos_ref.at[token]), of_lanes(sin_ref.at[token])
    norms = [[of_lanes(ref.at[pl.ds(start, half)]) for start in (0, half)] for ref in norm_refs]
    plgpu.barrier_wait(barrier)

    @pl.loop(0, first_s.shape[0] // _ROW_TILE)
    def _(tile):
        rows = pl.ds(tile * _ROW_TILE, _ROW_TILE)
        first, second = (
            plgpu.load(halves.at[rows], layout=layout).astype(jnp.float32)
            for halves in (first_s, second_s)
        )
        row = plgpu.broadcasted_iota(jnp.int32, (_ROW_TILE, half), 0, layout=layout)
        place = lax.rem(row + tile * _ROW_TILE, jnp.int32(G + 2))
        x, y = first, second
        if norms:
            squares = jnp.sum(x * x + y * y, axis=1)
            factor = lax.rsqrt(squares * np.float32(1 / D) + np.float32(norm_eps))
            factor = lax.broadcast_in_dim(factor, x.shape, [0])
            (q_first, q_second), (k_first, k_second) = norms
            x = x * factor * jnp.where(place == G, k_first, q_first)
            y = y * factor * jnp.where(place == G, k_second, q_second)
        is_value = place == G + 1
        rotated = x * cos - y * sin, y * cos + x * sin
        for start, plain, turned in zip((0, half), (first, second), rotated, strict=True):
            result = jnp.where(is_value, plain, turned).astype(out_s.dtype)
            out_s[rows, pl.ds(start, half)] = result

    plgpu.commit_smem()
    for head in range(k_pool_ref.shape[2]):
        start = head * (G + 2)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(start, G)], q_ref.at[token, pl.ds(head * G, G)])

    @pl.when(_is_kept(layer, block, offset, k_pool_ref.shape))
    def _():
        for head in range(k_pool_ref.shape[2]):
            for row, pool_ref in ((G, k_pool_ref), (G + 1, v_pool_ref)):
                target = pool_ref.at[layer, block, head, pl.ds(offset, 1), pl.ds(0, D)]
                plgpu.copy_smem_to_gmem(out_s.at[pl.ds(head * (G + 2) + row, 1)], target)

    plgpu.wait_smem_to_gmem(0)


def _row_layout(width: int) -> Any:
    """Return a layout in which each warp has whole rows of `width` lanes."""
    vector = math.gcd(width // _WARP_LANES, 4)
    # The dimensions of a tile are: warp (row), thread, and the elements of a thread.
    tiling = plgpu.Tiling(((_WARPS, _WARP_LANES * vector), (vector,)))
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
    # No target is also a source, so the order of the thread blocks does not matter.
    source, target = sources_ref[pair], targets_ref[pair]
    is_copy = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)

    @pl.when(is_copy)
    def _():
        for pool_ref, tile in zip(pool_refs, tiles, strict=True):
            num_rows = tile.shape[0]

            @pl.loop(0, pool_ref.shape[1] // num_rows)
            def _(turn, pool_ref=pool_ref, tile=tile, num_rows=num_rows):
                rows = pl.ds(turn * num_rows, num_rows)
                place = layer * num_blocks
                plgpu.copy_gmem_to_smem(pool_ref.at[place + source, rows], tile, barrier)
                plgpu.barrier_wait(barrier)
                plgpu.copy_smem_to_gmem(tile, pool_ref.at[place + target, rows])
                plgpu.wait_smem_to_gmem(0)


def _as_rows(pool: jax.Array) -> jax.Array:
    """Reshape a pool to blocks of rows, ``[L * P, rows, elements]``."""
    L, P, *block = pool.shape
    size, itemsize = math.prod(block), pool.dtype.itemsize
    width = math.gcd(size * itemsize, min(_COPY_ROW, MAX_BOX * itemsize)) // itemsize
    return pool.reshape(L * P, size // width, width)


def _rows_at_once(view: jax.Array) -> int:
    """Return the number of rows in a bulk copy: a divisor of the rows of a block."""
    _, num_rows, width = view.shape
    most = min(_COPY_BYTES // (width * view.dtype.itemsize), MAX_BOX, num_rows)
    return max(n for n in range(1, most + 1) if num_rows % n == 0)
