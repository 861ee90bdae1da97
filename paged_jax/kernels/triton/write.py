"""Writing new keys and values into the pools, and copying blocks: Pallas through Triton.

A token's K and V of one head are a row of the pool seen as ``[L * P * K * C, D]``. One program
writes `_TILE` numbers of K and as many of V, a few rows of each, in one launch for both::

    k, v [N * K, D]              pools [L * P * K * C, D]

    row 0  token 0, head 0  -->  row ((layer * P + blocks[0]) * K + 0) * C + offsets[0]
    row 1  token 0, head 1  -->  row ((layer * P + blocks[0]) * K + 1) * C + offsets[0]
    ...                          ...
    `---- program 0 ----'        (nothing, where the block, the offset or the layer is none)

In a quantised pool the program also finds the scale of each row. A block is contiguous in each
layer, so that copying one is copying ``K * C * D`` numbers; program (i, l) copies pair i in layer
l, and most often finds that there is no pair i. The pools are aliased: donated, nothing else of
them is read, written or copied.

`paged_jax.kernels.triton.rope_write` writes rows in the same way, straight from a projection.

64-bit addresses. Pallas computes addresses in 32 bits, signed, unless the array exceeds 2**32 bytes
(jax 0.10.2 to 0.12, `_compute_offsets_from_indices` in `jax/_src/pallas/triton/lowering.py`). That
is enough for wider types, and wrong for an array of 2 to 4 GiB of single bytes. So pools of bytes
are seen as words of 16 bits here, pairs of neighbours: for XLA that is another name of the same
memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import CopyArgs, Interpret, Pools, Problem, WriteArgs
from paged_jax.kernels.dispatch import general_backend
from paged_jax.kernels.pool_format import QUANTISED, scale_of_peak
from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton.pallas import pallas_call, plgpu

# Numbers of K, and as many of V, in a program: 16 rows of 128. A decode step of 128 sequences with
# 8 heads is then 64 programs, each with 4 loads of 16 bytes in flight per thread.
_TILE = 2048
_WRITE_WARPS = 4
# Words of 32 bits that a program of the copy moves at a time: a block of 16 tokens, 8 heads of 128
# bfloat16 numbers, and 32 words for each thread to hold.
_COPY_TILE = 8192
_COPY_WARPS = 8


def refusal(problem: Problem) -> str | None:
    """Why these kernels cannot write to, or copy blocks of, such pools; None if they can."""
    itemsize = jnp.dtype(problem.pool_dtype).itemsize
    block_bytes = problem["K"] * problem["C"] * problem.lanes * itemsize
    if problem.op == "copy_blocks" and block_bytes % 4:
        return f"it copies words of 4 bytes, and a block has {block_bytes} bytes"
    if problem.op == "rope_write" and itemsize == 1 and problem["D"] % 4:
        return f"it writes halves of heads in pairs of bytes, and a head has {problem['D']}"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def write(args: WriteArgs, interpret: Interpret = False) -> Pools:
    """Write K and V of N tokens, in one launch."""
    return _write(interpret, args)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write(interpret: Interpret, args: WriteArgs) -> Pools:
    pools, k, v, blocks, offsets, layer = args
    N, K, D = k.shape
    lanes = pl.next_power_of_2(D)
    rows = max(min(_TILE // lanes, pl.next_power_of_2(N * K)), 1)
    kernel = functools.partial(
        _write_kernel, pool_shape=pools.k.shape, pool_dtype=pools.k.dtype, rows=rows, lanes=lanes
    )
    written = call_in_place(
        kernel,
        "paged_write",
        jax.tree.map(as_rows, pools),
        (jnp.reshape(layer, 1), blocks, offsets, k.reshape(N * K, D), v.reshape(N * K, D)),
        grid=(pl.cdiv(N * K, rows),),
        num_warps=_WRITE_WARPS,
        interpret=interpret,
    )
    return jax.tree.map(from_words, written, pools)


@_write.defjvp
def _write_jvp(interpret, primals, tangents):
    # A write is a scatter, and so is its derivative.
    _, out_dot = jax.jvp(general_backend().write, primals, tangents)
    return _write(interpret, *primals), out_dot


def _write_kernel(layer_ref, blocks_ref, offsets_ref, k_ref, v_ref, *pool_refs, pool_shape,
                  pool_dtype, rows, lanes):  # fmt: skip
    num_new, D = k_ref.shape
    k_pool_ref, v_pool_ref, *scale_refs = pool_refs[len(pool_refs) // 2 :]  # the outputs
    k_scale_ref, v_scale_ref = scale_refs or (None, None)

    new = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    token, head = tiles.divide(new, pool_shape[2]), tiles.remainder(new, pool_shape[2])
    is_new = new < num_new
    row, is_kept = find_rows(layer_ref, blocks_ref, offsets_ref, token, head, is_new, pool_shape)

    lane = jnp.arange(lanes, dtype=jnp.int32)[None]
    mask = is_new[:, None] & (lane < D)
    # Both are read before either is written, so that the loads wait together.
    k, v = (plgpu.load(ref.at[new[:, None], lane], mask=mask, other=0.0) for ref in (k_ref, v_ref))
    store_rows(k_pool_ref, k_scale_ref, row, is_kept, [k], D, pool_dtype)
    store_rows(v_pool_ref, v_scale_ref, row, is_kept, [v], D, pool_dtype)


def find_rows(
    layer_ref: Any,
    blocks_ref: Any,
    offsets_ref: Any,
    token: jax.Array,
    head: jax.Array,
    is_new: jax.Array,
    pool_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Inside a kernel: the rows of the pool that new K and V go to, and whether they go anywhere.

    Args:
      layer_ref, blocks_ref, offsets_ref: i32 ``[1]``, ``[N]`` and ``[N]``, as in `WriteArgs`.
      token, head: i32 ``[R]``, or a scalar, the token and the KV head of each row.
      is_new: bool ``[R]``; other rows have no token, and go nowhere.
      pool_shape: L, P, K, C, D.

    Returns:
      i32 ``[R]`` and bool ``[R]``.
    """
    L, P, K, C, _ = pool_shape
    layer = layer_ref[0]
    block = plgpu.load(blocks_ref.at[token], mask=is_new, other=-1)
    offset = plgpu.load(offsets_ref.at[token], mask=is_new, other=-1)
    is_kept = (block >= 0) & (block < P) & (offset >= 0) & (offset < C)
    is_kept &= (layer >= 0) & (layer < L)
    # A row that is dropped must not name another's place: the interpreter writes back there what
    # it read before.
    row = jnp.where(is_kept, ((layer * P + block) * K + head) * C + offset, L * P * K * C)
    return row, is_kept


def store_rows(
    pool_ref: Any,
    scale_ref: Any,
    row: jax.Array,
    is_kept: jax.Array,
    parts: Sequence[jax.Array],
    head_dim: int,
    pool_dtype: Any,
) -> None:
    """Inside a kernel: write rows to the pool, rounded to its type.

    Args:
      pool_ref: a pool as `as_rows` gives it.
      scale_ref: f32 ``[L * P * K * C]``, or None where the pool is not quantised.
      row, is_kept: what `find_rows` returns.
      parts: the rows, floating point ``[R, lanes]``: one array, or several with as many of the D
        numbers in their first lanes each, and 0 in the others.
      head_dim: D.
      pool_dtype: type of the numbers in the pool, of which a word may hold two.
    """
    part_dim, lanes = head_dim // len(parts), parts[0].shape[1]
    if scale_ref is not None:
        parts, scale = _quantise(parts, pool_dtype)
        plgpu.store(scale_ref.at[row], scale, mask=is_kept)
        parts = [_as_pairs(part) for part in parts]
    for i, part in enumerate(parts):
        width = part.shape[1]  # half of the lanes where they were paired
        num_words = part_dim * width // lanes
        word = jnp.arange(width, dtype=jnp.int32)[None]
        mask = is_kept[:, None] & (word < num_words)
        place = pool_ref.at[row[:, None], i * num_words + word]
        plgpu.store(place, part.astype(pool_ref.dtype), mask=mask)


def _quantise(parts: Sequence[jax.Array], dtype: Any) -> tuple[list[jax.Array], jax.Array]:
    """As `paged_jax.kernels.quantise`, without `jnp.round`, which does not lower."""
    largest = QUANTISED[jnp.dtype(dtype)]
    parts = [part.astype(jnp.float32) for part in parts]
    peaks = [jnp.max(jnp.abs(part), axis=1) for part in parts]
    scale = scale_of_peak(functools.reduce(jnp.maximum, peaks), dtype)

    def rounded(part: jax.Array) -> jax.Array:
        scaled = jnp.minimum(jnp.maximum(part / scale[:, None], -largest), largest)
        if jnp.issubdtype(dtype, jnp.integer):
            scaled = _round_half_to_even(scaled)
        return scaled.astype(dtype)

    return [rounded(part) for part in parts], scale


def _round_half_to_even(x: jax.Array) -> jax.Array:
    """As `jnp.round`, exactly, for numbers that int32 holds; i32 of the shape of `x`.

    Adding 1.5 * 2**23 and taking it off again would do it too, if compilers did not cancel them.
    """
    whole = jnp.abs(x).astype(jnp.int32)
    rest = jnp.abs(x) - whole.astype(x.dtype)  # exact
    is_up = (rest > 0.5) | ((rest == 0.5) & (whole & 1 == 1))
    rounded = whole + is_up.astype(jnp.int32)
    return jnp.where(x < 0, -rounded, rounded)


def _as_pairs(values: jax.Array) -> jax.Array:
    """Bytes ``[R, lanes]`` as words of 16 bits, ``[R, lanes // 2]``, the first in the low half."""
    rows, lanes = values.shape
    bits = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.int32)
    bits = bits.reshape(rows, lanes // 2, 2)
    weight = jnp.where(lax.broadcasted_iota(jnp.int32, bits.shape, 2) == 0, 1, 256)
    return jnp.sum(bits * weight, axis=2).astype(jnp.uint16)


def as_rows(pool: jax.Array) -> jax.Array:
    """A pool as ``[L * P * K * C, D]``, of 16-bit words if it is one of bytes; scales flat."""
    rows = pool.reshape(-1, *pool.shape[4:])
    return rows if pool.dtype.itemsize > 1 else tiles.to_words(rows, jnp.uint16)


@functools.partial(jax.jit, static_argnames="interpret")
def copy_blocks(args: CopyArgs, interpret: Interpret = False) -> Pools:
    """Copy blocks in all layers and pools, in one launch."""
    pools, sources, targets = args
    L, P = pools.k.shape[:2]
    views = jax.tree.map(lambda pool: tiles.to_words(pool.reshape(L * P, -1), jnp.uint32), pools)
    copied = call_in_place(
        functools.partial(_copy_kernel, num_blocks=P),
        "copy_blocks",
        views,
        (sources, targets),
        grid=(*sources.shape, L),
        num_warps=_COPY_WARPS,
        interpret=interpret,
    )
    return jax.tree.map(from_words, copied, pools)


def _copy_kernel(sources_ref, targets_ref, *pool_refs, num_blocks):
    pair, layer = pl.program_id(0), pl.program_id(1)
    # No target is a source, so it does not matter which program comes first.
    source, target = sources_ref[pair], targets_ref[pair]
    is_copy = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)

    @pl.when(is_copy)
    def _():
        for ref in pool_refs[len(pool_refs) // 2 :]:  # the outputs
            _copy_row(ref, layer * num_blocks + source, layer * num_blocks + target)


def _copy_row(ref, source, target):
    num_words = ref.shape[1]
    tile = min(_COPY_TILE, pl.next_power_of_2(num_words))

    def copy_tile(i, carry):
        word = i * tile + jnp.arange(tile, dtype=jnp.int32)
        mask = word < num_words
        words = plgpu.load(ref.at[source, word], mask=mask, other=0)
        plgpu.store(ref.at[target, word], words, mask=mask)
        return carry

    lax.fori_loop(0, pl.cdiv(num_words, tile), copy_tile, None)


def call_in_place(
    kernel: Callable[..., None],
    name: str,
    views: Pools,
    arguments: Sequence[jax.Array],
    *,
    grid: tuple[int, ...],
    num_warps: int,
    interpret: Interpret,
    out: Any = None,
) -> Any:
    """Run a kernel on `arguments` and on the pools, which are its outputs too, in place.

    Args:
      kernel: takes references to the arguments, the pools as inputs, `out` and the pools as
        outputs.
      name: name of the kernel.
      views: the pools, in any shape.
      arguments: other arrays.
      grid, num_warps, interpret: see `pl.pallas_call`.
      out: None, or a `jax.ShapeDtypeStruct` of one more output.

    Returns:
      The new `views`; with `out`, a pair of that output and the views.
    """
    leaves, treedef = jax.tree.flatten(views)
    others = [] if out is None else [out]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    results = pallas_call(
        kernel,
        out_shape=[*others, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)],
        grid=grid,
        in_specs=[whole] * (len(arguments) + len(leaves)),
        out_specs=[whole] * (len(others) + len(leaves)),
        input_output_aliases={len(arguments) + i: len(others) + i for i in range(len(leaves))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arguments, *leaves)
    pools = jax.tree.unflatten(treedef, results[len(others) :])
    return pools if out is None else (results[0], pools)


def from_words(words: jax.Array, pool: jax.Array) -> jax.Array:
    """Back to the type and shape of a pool."""
    return lax.bitcast_convert_type(words, pool.dtype).reshape(pool.shape)
