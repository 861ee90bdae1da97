"""Kernel for recurrent layers on TPUs: a token per row, with the states in a pool.

A grid step advances a block of heads of a row. The grid steps run in order. While a grid step
computes, Pallas copies the states of the next grid step to VMEM, and the kernel copies the new
states of earlier grid steps back to the pool, which is aliased with the output::

    grid step         0          1          2          3
    row               4          0          2          1       in the order of `_order_rows`
    reads entry       7          3          3          -       row 1 starts from zeros
    writes entry      7          5          3          2

                                 state of a head, in VMEM
    pool, in HBM              +-------------- lanes ------+
    [L, P, H, rows, lanes]    |                           |   delta rule: key x value
         |                 sublanes                       |   Mamba-2:    value x key
         +--- block of heads  |                           |
                              +---------------------------+

Rows that read the same entry follow each other, so Pallas copies this entry to VMEM only once. If
one of them also writes the entry, it is the last of them, so all of them read the old state. A
vector along lanes is turned into a vector along sublanes, and back, by a masked sum, which is
exact.

XLA computes convolutions. The state of a convolution is a single row of a few kilobytes in the
pool, but a copy in a TPU kernel moves whole tiles of 8 or 16 rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.mosaic_tpu.kernel import MAX_SCALARS, div
from paged_jax.kernels.opaque_call import only_on
from paged_jax.kernels.padding import LANES, SUBLANES
from paged_jax.kernels.state_rows import ConvolutionStep, RecurrentStep, StateRows, StateStep

# Maximum bytes of the block of states that a grid step reads or writes. VMEM holds four such
# blocks: two that are read, and two that are written. A TPU v6e copies a block in 0.7 microseconds
# (computed from 1.6 TB/s, not measured).
_BLOCK_BYTES = 1 << 20
# Maximum bytes of the state of a head.
_MAX_HEAD_BYTES = 2 << 20
# Maximum number of heads of a grid step. It is limited because the loop over the heads is unrolled.
_MAX_HEADS = 32


def refusal(step: StateStep) -> str | None:
    """Return why these kernels do not support a step on any TPU, or None if they do."""
    if isinstance(step, ConvolutionStep):
        return "XLA updates the states of convolutions"
    pool = step.rows.pool
    if pool.dtype != jnp.float32:
        return f"states must be float32, got {pool.dtype}"
    *_, sublanes, lanes = pool.shape
    if sublanes % SUBLANES or lanes < LANES:
        return (
            f"the last dimensions of states must be a multiple of {SUBLANES} and at least "
            f"{LANES}, got {sublanes} and {lanes}"
        )
    if (num_bytes := 4 * sublanes * lanes) > _MAX_HEAD_BYTES:
        return f"the state of a head must have at most {_MAX_HEAD_BYTES} bytes, got {num_bytes}"
    if 4 * step.rows.num_rows > MAX_SCALARS:
        return f"a batch must have at most {MAX_SCALARS // 4} rows, got {step.rows.num_rows}"
    return None


def heads_per_block(K: int, G: int, head_bytes: int) -> int:
    """Return the number of heads that a grid step advances.

    They are whole groups of G heads, or a part of a group.

    Args:
      K: number of key heads.
      G: number of heads per key head.
      head_bytes: bytes of the state of a head.

    Example:
      >>> heads_per_block(16, 2, 65536), heads_per_block(1, 48, 32768), heads_per_block(3, 5, 65536)
      (16, 24, 15)
    """
    max_heads = min(max(_BLOCK_BYTES // head_bytes, 1), _MAX_HEADS)
    if max_heads >= G:
        return G * _largest_divisor(K, max_heads // G)
    return _largest_divisor(G, max_heads)


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


@functools.partial(jax.jit, static_argnames="interpret")
def advance_rows(step: StateStep, interpret: Interpret = False) -> tuple[jax.Array, jax.Array]:
    """Run a step in one kernel; return the output of each row, float32, and the new pool."""
    assert not isinstance(step, ConvolutionStep)
    U, step = step.v.shape[-1], _padded(step)
    rows, pool = step.rows, step.rows.pool
    B, K, G, padded_U = step.v.shape
    P, H, *state_shape = pool.shape[1:]
    per_block = heads_per_block(K, G, 4 * state_shape[0] * state_shape[1])
    num_keys, num_blocks = max(per_block // G, 1), H // per_block
    arrays = [x.reshape(B, K // num_keys, num_keys, -1) for x in (step.q, step.k)]
    of_heads = [step.v, step.log_decay]
    if step.beta is not None:
        of_heads.append(step.beta[..., None])
    arrays += [x.reshape(B, num_blocks, per_block, x.shape[-1]) for x in of_heads]
    scalars = jnp.asarray(rows.layer, jnp.int32).reshape(1), *_order_rows(rows)
    out_shape = jax.ShapeDtypeStruct((B, num_blocks, per_block, padded_U), jnp.float32)
    in_specs, out_specs = _block_specs(arrays, out_shape, per_block, state_shape)
    call = pl.pallas_call(
        functools.partial(_kernel, key_axis=step.key_axis, num_keys=num_keys, num_entries=P),
        out_shape=(out_shape, jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_blocks, B),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=(
                pltpu.VMEM((2, per_block, *state_shape), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ),
        ),
        # Run the grid steps in order ("arbitrary"), because a row may write to an entry that the
        # rows before it read.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        input_output_aliases={len(scalars) + len(arrays): 1},
        interpret=interpret,
        name="recurrent_delta" if step.beta is not None else "recurrent_state_space",
    )
    call = call if interpret else functools.partial(only_on, "tpu", call)
    out, pool = call(*scalars, *arrays, pool)
    return out.reshape(B, K, G, padded_U)[..., :U], pool


def _padded(step: RecurrentStep) -> RecurrentStep:
    """Pad keys and values with zeros to the size of the states in the pool.

    The padding of a state then stays zero.
    """
    sizes = step.rows.pool.shape[-2:]
    D, U = sizes[step.key_axis], sizes[1 - step.key_axis]

    def padded(x: jax.Array, size: int) -> jax.Array:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, size - x.shape[-1])])

    is_by_element = step.log_decay.shape[-1] > 1
    log_decay = padded(step.log_decay, D) if is_by_element else step.log_decay
    q, k, v = padded(step.q, D), padded(step.k, D), padded(step.v, U)
    return step._replace(q=q, k=k, v=v, log_decay=log_decay)


def _block_specs(
    arrays: list[jax.Array], out: jax.ShapeDtypeStruct, per_block: int, state_shape: list[int]
) -> tuple[tuple[pl.BlockSpec, ...], tuple[pl.BlockSpec, ...]]:
    """Return the block specs of the inputs, and the block specs of the results.

    The inputs are the arrays and the pool, and the results are the output and the pool. The arrays
    and the output are ``[B, blocks, heads, ...]``. If a block has only some of the heads of a key
    head, several blocks read the same key head.
    """

    def spec(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        blocks_per_key = out.shape[1] // x.shape[1]

        def head_index_map(block, row, layer, order, *_):
            return order[row], div(block, blocks_per_key), 0, 0

        return pl.BlockSpec((None, None, *x.shape[2:]), head_index_map)

    def state_index_map(block, row, layer, order, reads, *_):
        return layer[0], reads[row], block, 0, 0

    states = pl.BlockSpec((None, None, per_block, *state_shape), state_index_map)
    return (*map(spec, arrays), states), (spec(out), pl.BlockSpec(memory_space=pl.ANY))


def _order_rows(rows: StateRows) -> tuple[jax.Array, ...]:
    """Order the rows of a batch so that rows that read the same entry are neighbours.

    If one of these rows also writes the entry, it is the last of them. Rows that read no entry come
    after all other rows.

    Returns:
      Four arrays, i32 ``[B]``, for the rows in the new order: the index of the row; the entry to
      copy to VMEM; 1 if this entry is the state of the row, 0 if the state is zeros; and the entry
      to write, or P to write nothing. Rows that read no entry repeat the entry of the row before
      them, which costs no copy.
    """
    B, P = rows.num_rows, rows.pool.shape[1]
    index = jnp.arange(B, dtype=jnp.int32)
    is_entry = (rows.sources >= 0) & (rows.sources < P)
    is_same_BB = (rows.sources[:, None] == rows.sources[None]) & is_entry[None]
    first = jnp.min(jnp.where(is_same_BB, index[None], B), axis=1)
    # `first[i]` is the first row that reads the same entry as row i, or B if row i reads no entry.
    key = 2 * first + (rows.entries == rows.sources)
    is_before_BB = (key[None] < key[:, None]) | (
        (key[None] == key[:, None]) & (index[None] < index[:, None])
    )
    rank = jnp.sum(is_before_BB, axis=1, dtype=jnp.int32)
    is_at_BB = rank[None] == index[:, None]

    def ordered(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_at_BB, x[None], 0), axis=1, dtype=jnp.int32)

    last = jnp.max(jnp.where(is_entry, rank, -1))
    sources = ordered(rows.sources)
    of_last = jnp.sum(jnp.where(index == last, sources, 0), dtype=jnp.int32)
    is_held = (index <= last).astype(jnp.int32)
    is_kept = (rows.entries >= 0) & (rows.entries < P)
    entries = ordered(jnp.where(is_kept, rows.entries, P))
    return ordered(index), jnp.where(index <= last, sources, of_last), is_held, entries


def _kernel(
    layer_ref, order_ref, reads_ref, is_held_ref, entries_ref, *refs,
    key_axis: int, num_keys: int, num_entries: int,
) -> None:  # fmt: skip
    """Advance the heads of a grid step, and start to copy their states to the pool."""
    del reads_ref
    *array_refs, state_ref, out_ref, pool_ref, buffer, semaphores = refs
    per_block, num_rows = state_ref.shape[0], np.int32(order_ref.shape[0])
    block, row = pl.program_id(0), pl.program_id(1)
    grid_step = block * num_rows + row
    slot = lax.rem(grid_step, np.int32(2))
    is_held = is_held_ref[row] > 0

    def copy(row, slot):
        entry = jnp.minimum(entries_ref[row], num_entries - 1)
        heads = pl.ds(block * per_block, per_block)
        target = pool_ref.at[layer_ref[0], entry, heads]
        return pltpu.make_async_copy(buffer.at[slot], target, semaphores.at[slot])

    def wait_for(grid_step, slot):
        """Wait until the states of an earlier grid step have been copied to the pool."""
        row = lax.rem(jnp.maximum(grid_step, 0), num_rows)

        @pl.when((grid_step >= 0) & (entries_ref[row] < num_entries))
        def _():
            copy(row, slot).wait()

    wait_for(grid_step - 2, slot)

    def advance_heads(key, _):
        per_key = per_block // num_keys
        _advance_heads(
            pl.ds(key, 1),
            [key * per_key + g for g in range(per_key)],
            *array_refs,
            load_state=lambda head: jnp.where(is_held, state_ref[head], 0),
            out_ref=out_ref,
            new_ref=buffer.at[slot],
            key_axis=key_axis,
        )

    lax.fori_loop(0, num_keys, advance_heads, None, unroll=True)

    @pl.when(entries_ref[row] < num_entries)
    def _():
        copy(row, slot).start()

    @pl.when(grid_step == pl.num_programs(0) * num_rows - 1)
    def _():
        wait_for(grid_step - 1, 1 - slot)
        wait_for(grid_step, slot)


def _advance_heads(
    key, heads, q_ref, k_ref, v_ref, log_decay_ref, *beta_refs, load_state, out_ref, new_ref,
    key_axis,
) -> None:  # fmt: skip
    """Advance the heads that share a key head. Their states are ``[D, U]`` if `key_axis` is 0."""
    as_key, as_value = (_to_column, _unchanged) if key_axis == 0 else (_unchanged, _to_column)

    def read(products: jax.Array) -> jax.Array:
        total = jnp.sum(products, axis=key_axis, keepdims=True)
        return total if key_axis == 0 else _to_row(total)

    qk = jnp.sum(q_ref[key] * k_ref[key], axis=1, keepdims=True)
    q, k = as_key(q_ref[key]), as_key(k_ref[key])
    for head in heads:
        row = pl.ds(head, 1)
        decay = jnp.exp(log_decay_ref[row])
        decayed = (decay if decay.shape[1] == 1 else as_key(decay)) * load_state(head)
        change = v_ref[row]
        if beta_refs:
            change = beta_refs[0][row] * (change - read(k * decayed))
        out_ref[row] = read(q * decayed) + qk * change
        new_ref[head] = decayed + k * as_value(change)


def _unchanged(row: jax.Array) -> jax.Array:
    return row


def _diagonal(size: int) -> jax.Array:
    rows, columns = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return rows == columns


def _to_column(row: jax.Array) -> jax.Array:
    """Transpose ``[1, N]`` to ``[N, 1]``."""
    return jnp.sum(jnp.where(_diagonal(row.shape[1]), row, 0), axis=1, keepdims=True)


def _to_row(column: jax.Array) -> jax.Array:
    """Transpose ``[N, 1]`` to ``[1, N]``."""
    return jnp.sum(jnp.where(_diagonal(column.shape[0]), column, 0), axis=0, keepdims=True)
