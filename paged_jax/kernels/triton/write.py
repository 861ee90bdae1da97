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

Rotating the keys is left to XLA, which does it where it splits them from the queries. Done here it
would save writing and reading them once more, ``2 * N * K * D`` numbers, where the projection that
made them read ``E * (H + 2 * K) * D`` weights: half a percent as much for an 8B Llama with a batch
of 64.

64-bit addresses. Pallas computes addresses in 32 bits, signed, unless the array exceeds 2**32 bytes
(jax 0.10.2 to 0.12, `_compute_offsets_from_indices` in `jax/_src/pallas/triton/lowering.py`). That
is enough for wider types, and wrong for an array of 2 to 4 GiB of single bytes. So pools of bytes
are seen as words of 16 bits here, pairs of neighbours: for XLA that is another name of the same
memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import CopyArgs, Interpret, Pools, Problem, WriteArgs
from paged_jax.kernels.quantisation import QUANTISED
from paged_jax.kernels.triton import tiles
from paged_jax.kernels.triton.pallas import pallas_call, plgpu
from paged_jax.kernels.xla import writing as scatter

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
    views = jax.tree.map(_as_rows, pools)
    kernel = functools.partial(
        _write_kernel, pool_shape=pools.k.shape, pool_dtype=pools.k.dtype, rows=rows, lanes=lanes
    )
    written = _call(
        kernel,
        "paged_write",
        views,
        (jnp.reshape(layer, 1), blocks, offsets, k.reshape(N * K, D), v.reshape(N * K, D)),
        grid=(pl.cdiv(N * K, rows),),
        num_warps=_WRITE_WARPS,
        interpret=interpret,
    )
    return jax.tree.map(_from_words, written, pools)


@_write.defjvp
def _write_jvp(interpret, primals, tangents):
    # A write is a scatter, and so is its derivative.
    _, out_dot = jax.jvp(scatter.write, primals, tangents)
    return _write(interpret, *primals), out_dot


def _write_kernel(layer_ref, blocks_ref, offsets_ref, k_ref, v_ref, *pool_refs, pool_shape,
                  pool_dtype, rows, lanes):  # fmt: skip
    L, P, K, C, _ = pool_shape
    num_new, D = k_ref.shape
    k_pool_ref, v_pool_ref, *scale_refs = pool_refs[len(pool_refs) // 2 :]  # the outputs

    new = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    token, head = tiles.divide(new, K), tiles.remainder(new, K)
    is_new = new < num_new
    layer = layer_ref[0]
    block = plgpu.load(blocks_ref.at[token], mask=is_new, other=-1)
    offset = plgpu.load(offsets_ref.at[token], mask=is_new, other=-1)
    is_kept = (block >= 0) & (block < P) & (offset >= 0) & (offset < C)
    is_kept &= (layer >= 0) & (layer < L)
    # A row that is dropped must not name another's place: the interpreter writes back there what
    # it read before.
    row = jnp.where(is_kept, ((layer * P + block) * K + head) * C + offset, L * P * K * C)

    lane = jnp.arange(lanes, dtype=jnp.int32)[None]
    mask = is_new[:, None] & (lane < D)
    # Both are read before either is written, so that the loads wait together.
    news = [plgpu.load(ref.at[new[:, None], lane], mask=mask, other=0.0) for ref in (k_ref, v_ref)]
    for i, (x, pool_ref) in enumerate(zip(news, (k_pool_ref, v_pool_ref), strict=True)):
        if scale_refs:
            values, scale = _quantise(x, pool_dtype)
            plgpu.store(scale_refs[i].at[row], scale, mask=is_kept)
            values = _as_pairs(values)
        else:
            values = x.astype(pool_dtype)
        width = values.shape[1]  # half of the lanes where they were paired
        column = jnp.arange(width, dtype=jnp.int32)[None]
        mask = is_kept[:, None] & (column < D * width // lanes)
        plgpu.store(pool_ref.at[row[:, None], column], values, mask=mask)


def _quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """As `paged_jax.kernels.quantise`, without `jnp.round`, which does not lower."""
    largest = QUANTISED[jnp.dtype(dtype)]
    x = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(x), axis=1)
    scale = jnp.where(peak > 0, peak / largest, 1.0)
    scaled = jnp.minimum(jnp.maximum(x / scale[:, None], -largest), largest)
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = _round_half_to_even(scaled)
    return scaled.astype(dtype), scale


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


def _as_rows(pool: jax.Array) -> jax.Array:
    """A pool as ``[L * P * K * C, D]``, of 16-bit words if it is one of bytes; scales flat."""
    rows = pool.reshape(-1, *pool.shape[4:])
    return rows if pool.dtype.itemsize > 1 else tiles.to_words(rows, jnp.uint16)


@functools.partial(jax.jit, static_argnames="interpret")
def copy_blocks(args: CopyArgs, interpret: Interpret = False) -> Pools:
    """Copy blocks in all layers and pools, in one launch."""
    pools, sources, targets = args
    L, P = pools.k.shape[:2]
    views = jax.tree.map(lambda pool: tiles.to_words(pool.reshape(L * P, -1), jnp.uint32), pools)
    copied = _call(
        functools.partial(_copy_kernel, num_blocks=P),
        "copy_blocks",
        views,
        (sources, targets),
        grid=(*sources.shape, L),
        num_warps=_COPY_WARPS,
        interpret=interpret,
    )
    return jax.tree.map(_from_words, copied, pools)


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


def _call(kernel, name, views, arguments, *, grid, num_warps, interpret):
    """Run a kernel on `arguments` and on the pools, which are its outputs too, in place."""
    leaves, treedef = jax.tree.flatten(views)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out = pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        grid=grid,
        in_specs=[whole] * (len(arguments) + len(leaves)),
        out_specs=[whole] * len(leaves),
        input_output_aliases={len(arguments) + i: i for i in range(len(leaves))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*arguments, *leaves)
    return jax.tree.unflatten(treedef, out)


def _from_words(words: jax.Array, pool: jax.Array) -> jax.Array:
    """Back to the type and shape of a pool."""
    return lax.bitcast_convert_type(words, pool.dtype).reshape(pool.shape)
