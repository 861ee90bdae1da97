"""Kernels for recurrent layers on NVIDIA GPUs: a token per row, with the states in a pool.

A program instance loads a tile of the state of a head into registers, and advances it::

    gated delta rule, state [D, U]              Mamba-2, state [U, D]

          tile of U                                   all of D
         +---------+---------+- -                +-------------------+
    all  |         |         |           tile    |                   |  instance 0
    of D |    0    |    1    |           of U    +-------------------+
         |         |         |                   |                   |  instance 1
         +---------+---------+- -                +-------------------+

The elements of a value do not depend on each other. For a convolution, a tile is a range of
channels.

If several rows read the same entry, the program instance of the first of them advances all of them,
from the same registers. The other program instances end immediately. A shared state is therefore
read only once, and a row may write the entry that other rows read. The pool is aliased with the
output. If the pool is donated, its other entries are not read, written or copied.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paged_jax.kernels.backend import Interpret
from paged_jax.kernels.state_rows import ConvolutionStep, RecurrentStep, StateStep
from paged_jax.kernels.triton import pallas, tiles
from paged_jax.kernels.triton.pallas import plgpu
from paged_jax.kernels.triton.write import call_in_place

# A program instance advances `_TILE` elements of a state, and has `_NUM_WARPS` warps. These numbers
# were not tuned by measurements.
_TILE, _NUM_WARPS = 4096, 4
# Number of channels of a convolution that a program instance computes.
_CHANNELS = 512
# Maximum number of elements of a key. With more elements, a tile would not fit the registers.
_MAX_KEY_DIM = 512
# Maximum number of rows. It is limited because each program instance searches the sources of all
# rows for rows that read the same entry.
_MAX_ROWS = 4096


def refusal(step: StateStep, interpret: Interpret = False) -> str | None:
    """Return why these kernels do not support a step, or None if they do."""
    reason = pallas.refusal() or (None if interpret else pallas.gpu_refusal())
    if reason is not None:
        return reason
    dtype = step.rows.pool.dtype
    if dtype.name not in (tiles.FLOATING if isinstance(step, ConvolutionStep) else ("float32",)):
        return f"states must be float32, or any float dtype for convolutions, got {dtype}"
    if step.rows.pool.shape[2:] != step.state_shape:
        return "states must not be padded"
    if step.rows.num_rows > _MAX_ROWS:
        return f"a batch must have at most {_MAX_ROWS} rows, got {step.rows.num_rows}"
    if isinstance(step, RecurrentStep) and step.k.shape[-1] > _MAX_KEY_DIM:
        return f"keys must have at most {_MAX_KEY_DIM} elements, got {step.k.shape[-1]}"
    return None


@functools.partial(jax.jit, static_argnames="interpret")
def advance_rows(step: StateStep, interpret: Interpret = False) -> tuple[jax.Array, jax.Array]:
    """Run a step in one launch; return the output of each row, float32, and the new pool."""
    rows, pool = step.rows, step.rows.pool
    (L, P, *shape), B = pool.shape, rows.num_rows
    if isinstance(step, ConvolutionStep):
        F = step.x.shape[1]
        filters = (step.weight,) if step.bias is None else (step.weight, step.bias)
        arrays: tuple[jax.Array, ...] = (step.num_tokens, step.x, *filters)
        channels = min(_CHANNELS, pl.next_power_of_2(F))
        kernel = functools.partial(_convolution_kernel, channels=channels)
        name, out_shape, view_shape = "recurrent_convolution", (B, F), (L * P, *shape)
        grid = B, pl.cdiv(F, channels)
    else:
        arrays = tuple(x for x in step[1:] if x is not None)
        out_shape, U = step.v.shape, step.v.shape[-1]
        lanes = pl.next_power_of_2(step.k.shape[-1])
        tile = max(min(_TILE // lanes, pl.next_power_of_2(U)), 1)
        kernel = functools.partial(
            _recurrent_kernel, key_axis=step.key_axis, lanes=lanes, tile=tile
        )
        name = "recurrent_delta" if step.beta is not None else "recurrent_state_space"
        view_shape, grid = (L * P * shape[0], *shape[1:]), (B * shape[0], pl.cdiv(U, tile))
    layer = jnp.asarray(rows.layer, jnp.int32).reshape(1)
    out, [new] = call_in_place(
        functools.partial(kernel, num_entries=P),
        name,
        [pool.reshape(view_shape)],
        (layer, rows.sources, rows.entries, *arrays),
        grid=grid,
        num_warps=_NUM_WARPS,
        interpret=interpret,
        out=jax.ShapeDtypeStruct(out_shape, jnp.float32),
    )
    return out, new.reshape(pool.shape)


def _for_sharers(
    sources_ref: Any, row: jax.Array, num_entries: int, advance: Callable[[jax.Array], None]
) -> None:
    """Call `advance` for `row`, and then for each later row that reads the same entry.

    If an earlier row also reads this entry, do nothing.
    """
    B = sources_ref.shape[0]
    index = jnp.arange(pl.next_power_of_2(B), dtype=jnp.int32)
    sources = plgpu.load(sources_ref.at[index], mask=index < B, other=-1)
    source = sources_ref[row]
    is_entry = (source >= 0) & (source < num_entries)
    is_same = (sources == source) & is_entry
    num_before = jnp.sum((is_same & (index < row)).astype(jnp.int32))
    num_after = jnp.sum((is_same & (index > row)).astype(jnp.int32))

    @pl.when(num_before == 0)
    def _():
        def step(_: jax.Array, row: jax.Array) -> jax.Array:
            advance(row)
            return jnp.min(jnp.where(is_same & (index > row), index, B)).astype(jnp.int32)

        lax.fori_loop(0, 1 + num_after, step, row)


def _locate(layer_ref: Any, ids_ref: Any, row: jax.Array, num_entries: int) -> tuple[Any, Any]:
    """Return the index of the entry of a row, and whether the entry exists.

    `ids_ref`, i32 ``[B]``, has the index of each row's entry in the layer. The result is the index
    in the pool of all layers, ``[L * P, ...]``.
    """
    entry = ids_ref[row]
    is_entry = (entry >= 0) & (entry < num_entries)
    return layer_ref[0] * num_entries + jnp.where(is_entry, entry, 0), is_entry


def _load(ref: Any, mask: jax.Array) -> jax.Array:
    return plgpu.load(ref, mask=mask, other=0.0)


def _recurrent_kernel(
    layer_ref, sources_ref, entries_ref, q_ref, k_ref, v_ref, log_decay_ref, *refs,
    num_entries, key_axis, lanes, tile,
):  # fmt: skip
    *beta_refs, _, out_ref, pool_ref = refs
    (_, K, G, U), D = v_ref.shape, k_ref.shape[-1]
    first, head, group = _split_heads(pl.program_id(0), K, G)
    d, u = jnp.arange(lanes, dtype=jnp.int32), jnp.arange(tile, dtype=jnp.int32)
    u += pl.program_id(1) * tile
    # Turn vectors of D or U elements into rows or columns of the state.
    as_key = functools.partial(jnp.expand_dims, axis=1 - key_axis)
    as_value = functools.partial(jnp.expand_dims, axis=key_axis)
    mask = as_key(d < D) & as_value(u < U)

    def place(entry: jax.Array) -> tuple[Any, ...]:
        in_head = (u[:, None], d[None]) if key_axis else (d[:, None], u[None])
        return (entry * K + head) * G + group, *in_head

    entry, is_entry = _locate(layer_ref, sources_ref, first, num_entries)
    state = _load(pool_ref.at[place(entry)], mask & is_entry)

    def advance(row: jax.Array) -> None:
        q_D, k_D = (_load(ref.at[row, head, d], d < D) for ref in (q_ref, k_ref))
        if log_decay_ref.shape[-1] == 1:
            decay = jnp.exp(log_decay_ref[row, head, group, 0])
        else:
            decay = as_key(jnp.exp(_load(log_decay_ref.at[row, head, group, d], d < D)))
        decayed = decay * state

        def add(change_U: jax.Array) -> jax.Array:
            return decayed + as_key(k_D) * as_value(change_U)

        def read(x_D: jax.Array, state: jax.Array) -> jax.Array:
            return jnp.sum(as_key(x_D) * state, axis=key_axis)

        # The order of these sums determines the number of registers. If Mamba-2 also read its
        # output from the old state, it would need 123 instead of 96 registers (H200).
        if beta_refs:
            predicted_U, kept_U = read(k_D, decayed), read(q_D, decayed)
            value_U = _load(v_ref.at[row, head, group, u], u < U)
            change_U = beta_refs[0][row, head, group] * (value_U - predicted_U)
            out_U = kept_U + jnp.sum(q_D * k_D) * change_U
        else:
            change_U = _load(v_ref.at[row, head, group, u], u < U)
            out_U = read(q_D, add(change_U))
        plgpu.store(out_ref.at[row, head, group, u], out_U, mask=u < U)
        entry, is_kept = _locate(layer_ref, entries_ref, row, num_entries)
        plgpu.store(pool_ref.at[place(entry)], add(change_U), mask=mask & is_kept)

    _for_sharers(sources_ref, first, num_entries, advance)


def _split_heads(index: jax.Array, K: int, G: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the row of a head, its key head, and its index among the heads of this key head.

    `index` is the index of the head among the B * K * G heads of all rows: K key heads per row, and
    G heads per key head.
    """
    row, head = lax.div(index, jnp.int32(K * G)), lax.rem(index, jnp.int32(K * G))
    return row, lax.div(head, jnp.int32(G)), lax.rem(head, jnp.int32(G))


def _convolution_kernel(
    layer_ref, sources_ref, entries_ref, num_tokens_ref, x_ref, weight_ref, *refs,
    num_entries, channels,
):  # fmt: skip
    *bias_refs, _, out_ref, pool_ref = refs
    first, (F, width) = pl.program_id(0), weight_ref.shape
    f = pl.program_id(1) * channels + jnp.arange(channels, dtype=jnp.int32)
    mask = f < F
    entry, is_entry = _locate(layer_ref, sources_ref, first, num_entries)
    filters = [_load(weight_ref.at[f, i], mask).astype(jnp.float32) for i in range(width)]
    biases = [_load(ref.at[f], mask).astype(jnp.float32) for ref in bias_refs]
    # For lanes past the last channel, use a place past the end of the entry too, so that no lane
    # writes the element of another lane.
    indices = [jnp.where(mask, i * F + f, (width - 1) * F) for i in range(width - 1)]
    old_values = [_load(pool_ref.at[entry, index], mask & is_entry) for index in indices]

    def advance(row: jax.Array) -> None:
        added = _load(x_ref.at[row, f], mask).astype(pool_ref.dtype)
        inputs = [*old_values, added]
        products = (x.astype(jnp.float32) * w for x, w in zip(inputs, filters, strict=True))
        plgpu.store(out_ref.at[row, f], sum(biases, sum(products)), mask=mask)
        entry, is_kept = _locate(layer_ref, entries_ref, row, num_entries)
        has_token = num_tokens_ref[row] > 0
        for index, old_value, new_value in zip(indices, old_values, inputs[1:], strict=True):
            new_value = jnp.where(has_token, new_value, old_value)
            plgpu.store(pool_ref.at[entry, index], new_value, mask=mask & is_kept)

    _for_sharers(sources_ref, first, num_entries, advance)
