"""Kernel of `paged_rope_write`: normalise, rotate and write the heads of each token.

A thread block processes all heads of a token. It copies each head in two halves, because element i
of the first half is rotated together with element i of the second half. A bulk copy moves the keys,
the values, or one query of each KV head. If a KV head has more queries than there are KV heads, a
bulk copy moves all queries of a KV head instead::

    qkv [N, K, G + 2, D]                      shared memory, registers      results
    qkv[n, :, g] or qkv[n, k, :G]  --copy-->  rotated, cast      --copy-->  q[n, :, g] or q[n, k]
    qkv[n, :, G]                   --copy-->  rotated, cast      --copy-->  a row of the key pool
    qkv[n, :, G + 1]               --copy-->  cast               --copy-->  a row of the value pool

In registers, each warp holds whole heads, so it computes the sum of squares of a head without the
other warps. `pool_updates` describes how rows are rounded for quantised pools.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.kv_dtypes import KVDtype
from paged_jax.kernels.mosaic_gpu import pool_updates
from paged_jax.kernels.mosaic_gpu.launch import MAX_BOX, MAX_SHARED_MEMORY, launch, plgpu
from paged_jax.kernels.mosaic_gpu.pool_updates import (
    WARP_LANES,
    does_not_fit,
    is_in_range,
    load_rows,
    padded_rows,
    row_layout,
    rows_in_registers,
    store_rows,
    store_scales,
)
from paged_jax.kernels.op_args import Options, RopeWriteArgs
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem


def refusal(problem: Problem) -> str | None:
    """Return why this kernel does not support the write `problem`, or None if it does."""
    if (reason := pool_updates.refusal(problem)) is not None:
        return reason
    K, D = problem["K"], problem["D"]
    q_dtype, pool_dtype = jnp.dtype(problem.q_dtype), jnp.dtype(problem.pool_dtype)
    if D % (2 * WARP_LANES):
        return f"half a head must have a multiple of {WARP_LANES} elements, got a head of {D}"
    boxes = _QueryBoxes(K, problem["H"] // K)
    size = boxes.count * padded_rows(boxes.num_heads, D)
    size *= q_dtype.itemsize + problem.kv.query_dtype.itemsize
    size += 2 * padded_rows(K, D) * (q_dtype.itemsize + pool_dtype.itemsize)
    if boxes.num_heads > MAX_BOX or D // 2 > MAX_BOX or size * D > MAX_SHARED_MEMORY:
        return does_not_fit(problem["H"] + 2 * K, D)
    return None


class _QueryBoxes(NamedTuple):
    """Division of the queries of a token into boxes. A bulk copy moves one box.

    A box contains one query of each KV head. If a KV head has more queries than there are KV heads,
    a box instead contains all queries of one KV head.
    """

    num_kv_heads: int
    group_size: int

    @property
    def count(self) -> int:
        """Number of boxes."""
        return min(self)

    @property
    def num_queries(self) -> int:
        """Number of queries in a box."""
        return max(self)

    @property
    def num_heads(self) -> int:
        """Number of heads that the bulk copy of a box reads."""
        # A box that holds all queries of a KV head also holds its key and value, because the
        # compiler can only tile a box that spans whole dimensions of ``[K, G + 2, D]``.
        return self.num_queries + 2 * (self.group_size > self.num_kv_heads)

    def place(self, box: int) -> tuple[Any, Any]:
        """Return the index of a box in an array ``[K, G, D]`` or ``[K, G + 2, D]``."""
        if self.group_size > self.num_kv_heads:
            return box, slice(None)
        return slice(None), box


class _RopeTiles(NamedTuple):
    """Shared memory of `rope_write`. Heads that are stored as two halves are pairs of arrays.

    Attributes:
      queries: pair of ``[boxes, rows, D / 2]``, the queries as they were copied.
      rotated: rotated queries ``[boxes, rows, size]`` for each piece of a head, see `_pieces`.
      keys: pair of ``[rows, D / 2]``, the keys as they were copied.
      values: pair of ``[rows, D / 2]``, the values as they were copied.
      cast: pair of keys and values in the dtype of the pools, ``[rows, size]`` for each piece.
      scales: pair of the scales of keys and of values, f32 ``[rows]``; a pair of None if the pools
        have no scales.
      is_loaded: barrier, completed when `queries`, `keys` and `values` have been copied.
    """

    queries: Any
    rotated: Any
    keys: Any
    values: Any
    cast: Any
    scales: Any
    is_loaded: Any

    @classmethod
    def of(cls, boxes: _QueryBoxes, qkv: jax.Array, pools: Pools) -> "_RopeTiles":
        """Describe the arrays and the barrier in shared memory, for `launch`."""
        K, D = boxes.num_kv_heads, qkv.shape[3]
        query_rows, rows = padded_rows(boxes.num_heads, D), padded_rows(K, D)
        queries = plgpu.SMEM((boxes.count, query_rows, D // 2), qkv.dtype)
        heads = plgpu.SMEM((rows, D // 2), qkv.dtype)
        scale = plgpu.SMEM((rows,), jnp.float32) if pools.is_quantised else None
        return cls(
            queries=(queries, queries),
            rotated=tuple(
                plgpu.SMEM((boxes.count, query_rows, size), KVDtype.of(pools.dtype).query_dtype)
                for _, size in _pieces(D)
            ),
            keys=(heads, heads),
            values=(heads, heads),
            cast=(tuple(plgpu.SMEM((rows, size), pools.dtype) for _, size in _pieces(D)),) * 2,
            scales=(scale, scale),
            is_loaded=plgpu.Barrier(num_arrivals=2 * (boxes.count + 2)),
        )


def _pieces(head_dim: int) -> list[tuple[int, int]]:
    """Return the start and size of each piece of a stored head: the whole head, or its halves."""
    half = head_dim // 2
    return [(0, head_dim)] if head_dim <= MAX_BOX else [(0, half), (half, half)]


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def rope_write(
    args: RopeWriteArgs, options: Options, interpret: Interpret = False
) -> tuple[jax.Array, Pools]:
    """Run `paged_rope_write` in one launch; return the rotated queries and the new pools."""
    pools, (N, K, width, D) = args.pools, args.qkv.shape
    boxes = _QueryBoxes(K, width - 2)
    updated, treedef = jax.tree.flatten(pools)
    [q], written = launch(
        functools.partial(
            _rope_write_kernel,
            boxes=boxes,
            norm_eps=options.norm_eps,
            has_norms=args.norms is not None,
        ),
        "paged_rope_write",
        grid={"token": N},
        arguments=[
            jnp.reshape(args.layer, 1),
            args.blocks,
            args.offsets,
            args.qkv,
            args.cos,
            args.sin,
            *(args.norms or ()),
        ],
        updated=updated,
        outputs=[jax.ShapeDtypeStruct((N, K, width - 2, D), KVDtype.of(pools.dtype).query_dtype)],
        scratch=[_RopeTiles.of(boxes, args.qkv, pools)],
        interpret=interpret,
    )
    return q.reshape(N, -1, D), jax.tree.unflatten(treedef, written)


def _rope_write_kernel(
    layer_ref, blocks_ref, offsets_ref, qkv_ref, cos_ref, sin_ref, *refs,
    boxes, norm_eps, has_norms,
):  # fmt: skip
    norm_refs, refs = (refs[:2], refs[2:]) if has_norms else ((None, None), refs)
    *pool_refs, q_ref, shared = refs
    D, token = qkv_ref.shape[3], lax.axis_index("token")
    place = layer_ref[0], blocks_ref[token], offsets_ref[token]
    _load_heads(qkv_ref.at[token], boxes, shared)
    rotations = [_load_lanes(ref.at[token]) for ref in (cos_ref, sin_ref)]
    q_norm, k_norm = (
        None if ref is None else [_load_lanes(ref.at[pl.ds(x, D // 2)]) for x in (0, D // 2)]
        for ref in norm_refs
    )
    plgpu.barrier_wait(shared.is_loaded)

    def convert(loaded: Any, stored: Any, scale: Any, norm: Any, *, is_rotated: bool) -> None:
        """Normalise, rotate and cast some heads, and store them.

        `loaded` is a pair of refs of the two halves. `stored` has a ref for each piece of a head.
        """
        halves = [load_rows(half) for half in loaded]
        if is_rotated:
            halves = _rotated(halves, rotations, norm, norm_eps)
        if len(stored) == 1:
            stored = [stored[0].at[:, pl.ds(start, D // 2)] for start in (0, D // 2)]
        store_rows(halves, stored, scale)

    num_rows, query_rows = shared.keys[0].shape[0], shared.queries[0].shape[1]
    query_tile, tile = (rows_in_registers(n, D) for n in (query_rows, num_rows))
    per_box = query_rows // query_tile

    @pl.loop(0, boxes.count * per_box)
    def _(turn):
        box, start = (f(turn, jnp.int32(per_box)) for f in (lax.div, lax.rem))
        rows = box, pl.ds(start * query_tile, query_tile)
        loaded = [half.at[rows] for half in shared.queries]
        convert(loaded, [x.at[rows] for x in shared.rotated], None, q_norm, is_rotated=True)

    @pl.loop(0, num_rows // tile)
    def _(turn):
        rows = pl.ds(turn * tile, tile)
        heads = (shared.keys, k_norm, True), (shared.values, None, False)
        for (half, norm, is_rotated), cast, scale in zip(
            heads, shared.cast, shared.scales, strict=True
        ):
            scale = None if scale is None else scale.at[rows]
            loaded, stored = ([x.at[rows] for x in refs] for refs in (half, cast))
            convert(loaded, stored, scale, norm, is_rotated=is_rotated)

    plgpu.commit_smem()
    _store_heads(q_ref.at[token], pool_refs, place, boxes, shared)


def _load_heads(qkv_ref: Any, boxes: _QueryBoxes, shared: _RopeTiles) -> None:
    """Start the bulk copies of all heads of a token from `qkv_ref`, ``[K, G + 2, D]``."""
    half, G, K = qkv_ref.shape[2] // 2, boxes.group_size, boxes.num_kv_heads
    for turn in range(2):
        lanes = pl.ds(turn * half, half)
        copies = [
            (boxes.place(box), shared.queries[turn].at[box, pl.ds(0, boxes.num_heads)])
            for box in range(boxes.count)
        ]
        copies += [
            ((slice(None), G + i), heads[turn].at[pl.ds(0, K)])
            for i, heads in enumerate((shared.keys, shared.values))
        ]
        for place, target in copies:
            plgpu.copy_gmem_to_smem(qkv_ref.at[(*place, lanes)], target, shared.is_loaded)


def _store_heads(
    q_ref: Any, pool_refs: list[Any], place: tuple[jax.Array, ...], boxes: _QueryBoxes,
    shared: _RopeTiles,
) -> None:  # fmt: skip
    """Copy the queries to `q_ref`, ``[K, G, D]``, and the keys and values to the pools.

    `place` is the layer, block and offset of the token. If they are out of range, its keys and
    values are dropped.
    """
    (layer, block, offset), K = place, boxes.num_kv_heads
    pieces = _pieces(q_ref.shape[2])
    for box in range(boxes.count):
        for lanes, piece in zip(pieces, shared.rotated, strict=True):
            target = q_ref.at[(*boxes.place(box), pl.ds(*lanes))]
            plgpu.copy_smem_to_gmem(piece.at[box, pl.ds(0, boxes.num_queries)], target)

    @pl.when(is_in_range(layer, block, offset, pool_refs[0].shape))
    def _():
        for cast, pool_ref in zip(shared.cast, pool_refs[:2], strict=True):
            for lanes, piece in zip(pieces, cast, strict=True):
                target = pool_ref.at[layer, block, :, offset, pl.ds(*lanes)]
                plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, K)], target)
        store_scales(pool_refs[2:], shared.scales, place, K)

    plgpu.wait_smem_to_gmem(0)


def _load_lanes(ref: Any) -> jax.Array:
    """Load a vector with a number for each lane from GPU memory, as f32 ``[D / 2]``."""
    layout = row_layout(ref.shape[0]).reduce(0)
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _rotated(
    halves: list[jax.Array], rotations: list[jax.Array], norm: list[jax.Array] | None, eps: float
) -> list[jax.Array]:
    """Normalise heads if `norm` is not None, and rotate them.

    `halves` are the first and the second half of the elements of each head, ``[rows, D / 2]``.
    """
    (first, second), shape = halves, halves[0].shape
    if norm is not None:
        squares = jnp.sum(first * first + second * second, axis=1)
        factor = lax.rsqrt(squares * np.float32(1 / (2 * shape[1])) + np.float32(eps))
        factor = lax.broadcast_in_dim(factor, shape, [0])
        first, second = (
            x * factor * lax.broadcast_in_dim(weight, shape, [1])
            for x, weight in zip((first, second), norm, strict=True)
        )
    cos, sin = (lax.broadcast_in_dim(x, shape, [1]) for x in rotations)
    return [first * cos - second * sin, second * cos + first * sin]
