r"""Writes of new keys and values on TPUs, in Pallas, compiled by Mosaic.

XLA's scatter waits for the pool's memory once in 16 rows. This kernel has all copies of a grid step
in flight at once. A copy moves a tile: 8 tokens of a block, with all heads. A token is a row of its
tile, so the kernel reads the tile, replaces the row, and writes the tile back::

    grid step of 4 tokens    a0 a1 b0 c5        tokens of the blocks a, b and c
    reads                    a[0:8]   b[0:8] c[0:8]         one copy for each tile and pool
    replaces rows            a 0, 1   b 0    c 5
    writes                   a[0:8]   b[0:8] c[0:8]

Tokens of a grid step that share a tile share its buffer, that of the first of them, the leader. The
last of them starts the write. Grid steps run in order, and each waits for its writes, so tokens of
different grid steps may share a tile, too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.mosaic_tpu.device import device_refusal
from paged_jax.kernels.mosaic_tpu.kernel import MAX_SCALARS, VMEM_BYTES
from paged_jax.kernels.op_args import WriteArgs
from paged_jax.kernels.opaque_call import only_on
from paged_jax.kernels.padding import LANES
from paged_jax.kernels.pools import Pools
from paged_jax.kernels.problem import Problem

# Number of tokens in a tile: the sublanes of a register, at which copies begin.
_TILE = 8
# Maximum number of tokens in a grid step. With this number, the latencies of the copies take a
# small part of the time: issuing the copies of a token takes about 100 bundles of instructions.
_STEP_TOKENS = 64
# Maximum bytes of the tiles of a grid step.
_STEP_BYTES = 16 << 20
# Scalars of a token: block, offset, leader and whether it is the last token of its tile.
_TOKEN_SCALARS = 4


def refusal(problem: Problem, interpret: Interpret = False) -> str | None:
    """Return why the kernel does not support `problem`, or None if it does."""
    if not interpret and (reason := device_refusal()) is not None:
        return reason
    if (reason := problem.pool_dtype_refusal("bfloat16", "float32")) is not None:
        return reason
    if problem.lanes % LANES or (problem.value_dim != problem["D"] and not problem.shares_values):
        return (
            f"the last dimension of the pools must be a multiple of {LANES}, and the same for keys "
            f"and values, got {problem.lanes} for keys of {problem['D']} elements and values of "
            f"{problem.value_dim}"
        )
    if problem["C"] % _TILE:
        return f"the block size must be a multiple of {_TILE}, got {problem['C']}"
    if problem["N"] * _TOKEN_SCALARS > MAX_SCALARS:
        return (
            f"the places of the tokens must fit scalar memory, {MAX_SCALARS // _TOKEN_SCALARS} "
            f"tokens, got {problem['N']}"
        )
    return None


class _Places(NamedTuple):
    """Places of tokens, i32 arrays in scalar memory.

    Attributes:
      layer: ``[1]``, the layer to write.
      blocks: ``[N]``, block of each token.
      offsets: ``[N]``, position of each token in its block.
      leaders: ``[N]``, index in the grid step of the first token in the same tile; -1 for tokens
        that are dropped.
      is_last: ``[N]``, 1 for the last token of a tile in its grid step, otherwise 0.
    """

    layer: jax.Array
    blocks: jax.Array
    offsets: jax.Array
    leaders: jax.Array
    is_last: jax.Array


@functools.partial(jax.jit, static_argnames="interpret")
def write(args: WriteArgs, interpret: Interpret = False) -> Pools:
    """Write K and V of N tokens into a layer."""
    pools = args.pools
    N, K, _ = args.k.shape
    lanes, itemsize = pools.k.shape[-1], pools.dtype.itemsize
    arrays = [pool for pool in (pools.k, pools.v) if pool is not None]
    tile_bytes = len(arrays) * K * _TILE * lanes * itemsize
    num_tokens = min(N, _STEP_TOKENS, max(1, _STEP_BYTES // tile_bytes))
    num_steps = -(-N // num_tokens)
    padding = num_steps * num_tokens - N

    def padded(new: jax.Array, pool: jax.Array) -> jax.Array:
        missing = pool.shape[-1] - new.shape[-1]
        return jnp.pad(new.astype(pool.dtype), ((0, padding), (0, 0), (0, missing)))

    new = [padded(args.k, pools.k)]
    if args.v is not None and pools.v is not None:
        new.append(padded(args.v, pools.v))
    places = _find_places(args, num_tokens, padding)
    any_memory = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_kernel, num_pools=len(arrays)),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in arrays],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(places),
            grid=(num_steps,),
            in_specs=[
                *(pl.BlockSpec((num_tokens, K, x.shape[-1]), _token_index_map) for x in new),
                *(any_memory for _ in arrays),
            ],
            out_specs=[any_memory for _ in arrays],
            scratch_shapes=[
                *(pltpu.VMEM((num_tokens, K, _TILE, x.shape[-1]), x.dtype) for x in arrays),
                pltpu.SemaphoreType.DMA((2, len(arrays))),
            ],
        ),
        input_output_aliases={len(places) + len(new) + i: i for i in range(len(arrays))},
        compiler_params=pltpu.CompilerParams(
            # Run the grid steps in order, because they may write to the same tiles.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_BYTES,
            # All copies are in range: dropped tokens start none.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_write",
    )
    # Pallas cannot add a dimension to some of the arrays of such a call.
    call = jax.custom_batching.sequential_vmap(call)
    with jax.enable_x64(False):  # Pallas for TPUs has no 64-bit indices
        written = (call if interpret else functools.partial(only_on, "tpu", call))(
            *places, *new, *arrays
        )
    return Pools(written[0], written[1] if len(written) > 1 else None, None, None)


def _token_index_map(step, *_):
    return step, 0, 0


def _find_places(args: WriteArgs, num_tokens: int, padding: int) -> _Places:
    """Return the places of the tokens, for grid steps of `num_tokens` tokens."""
    L, P, _, C, _ = args.pools.k.shape
    is_kept = (args.blocks >= 0) & (args.blocks < P) & (args.offsets >= 0) & (args.offsets < C)
    is_kept &= (args.layer >= 0) & (args.layer < L)
    tiles = args.blocks * (C // _TILE) + args.offsets // _TILE
    tiles = jnp.pad(jnp.where(is_kept, tiles, -1), (0, padding), constant_values=-1)
    tiles = tiles.reshape(-1, num_tokens)
    is_same = tiles[:, :, None] == tiles[:, None, :]
    index = lax.broadcasted_iota(jnp.int32, is_same.shape, 2)
    first = jnp.min(jnp.where(is_same, index, num_tokens), axis=2)
    last = jnp.max(jnp.where(is_same, index, -1), axis=2)
    is_token = tiles >= 0
    return _Places(
        layer=jnp.asarray(args.layer, jnp.int32).reshape(1),
        blocks=jnp.pad(args.blocks, (0, padding)),
        offsets=jnp.pad(args.offsets, (0, padding)),
        leaders=jnp.where(is_token, first, -1).reshape(-1),
        is_last=(is_token & (last == index[:, 0])).astype(jnp.int32).reshape(-1),
    )


def _kernel(*refs, num_pools: int):
    places, refs = _Places(*refs[: len(_Places._fields)]), refs[len(_Places._fields) :]
    new_refs, refs = refs[:num_pools], refs[2 * num_pools :]  # the pools as inputs are not used
    pool_refs, buffers, semaphores = refs[:num_pools], refs[num_pools:-1], refs[-1]
    num_tokens = new_refs[0].shape[0]
    start = pl.program_id(0) * np.int32(num_tokens)

    def copies(token, buffer_index, is_write):
        block, offset = places.blocks[start + token], places.offsets[start + token]
        first = lax.div(offset, np.int32(_TILE)) * np.int32(_TILE)
        rows = pl.ds(pl.multiple_of(first, _TILE), _TILE)
        for i, (pool, buffer) in enumerate(zip(pool_refs, buffers, strict=True)):
            tile = pool.at[places.layer[0], block, :, rows]
            ends = (buffer.at[buffer_index], tile) if is_write else (tile, buffer.at[buffer_index])
            yield pltpu.make_async_copy(*ends, semaphores.at[int(is_write), i])

    def read(token):
        @pl.when(places.leaders[start + token] == token)
        def _():
            for copy in copies(token, token, is_write=False):
                copy.start()

    def wait(token):
        @pl.when(places.leaders[start + token] == token)
        def _():
            for copy in copies(token, token, is_write=False):
                copy.wait()

    def change(token):
        leader = places.leaders[start + token]

        @pl.when(leader >= 0)
        def _():
            row = lax.rem(places.offsets[start + token], np.int32(_TILE))
            for new, buffer in zip(new_refs, buffers, strict=True):
                tile = buffer[leader]
                is_row = lax.broadcasted_iota(jnp.int32, tile.shape, 1) == row
                rows = jnp.broadcast_to(new[token][:, None], tile.shape)
                buffer[leader] = jnp.where(is_row, rows, tile)

        @pl.when(places.is_last[start + token] == 1)
        def _():
            for copy in copies(token, leader, is_write=True):
                copy.start()

    def finish(token):
        @pl.when(places.is_last[start + token] == 1)
        def _():
            for copy in copies(token, places.leaders[start + token], is_write=True):
                copy.wait()

    # Copies may end in any order, and a wait only says that one of them has ended. So wait for all
    # of them before the first tile is changed.
    for action in (read, wait, change, finish):
        bounds = np.int32(0), np.int32(num_tokens)
        lax.fori_loop(*bounds, lambda token, _, action=action: action(token), None)
