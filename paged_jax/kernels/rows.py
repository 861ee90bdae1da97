"""Gather and scatter of rows without copies of the whole array."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paged_jax.kernels.bits import as_bits, bits_of, from_bits, take_rows
from paged_jax.kernels.native.kernels import ELEMENTS, NativeKernel
from paged_jax.kernels.native.library import call
from paged_jax.kernels.opaque_call import without_index_checks
from paged_jax.kernels.state_rows import StateRows

# Minimum size in bytes of the arrays that the kernel for CPUs fills with zeros. For smaller arrays,
# it is not worth compiling the kernel.
_LARGE_BYTES = 1 << 22

# The type of row indices, see `set_rows`.
_Index = jax.Array | tuple[jax.Array, ...]
_State = TypeVar("_State")


@jax.custom_jvp
def set_rows(rows: jax.Array, index: _Index, new: jax.Array) -> jax.Array:
    """Return an array with new rows. Rows with an index past the end are dropped.

    This function avoids a conversion of the whole array. For each scatter or
    `dynamic_update_slice`, XLA's CPU backend converts bfloat16 arrays to float32 and back, and
    8-bit floats to float16 and back. Remove this function when XLA scatters these dtypes in place.

    On CPUs, a C++ kernel sets the rows in place. Without this kernel, the array is cast to integers
    with the same bits, the rows are scattered, and the array is cast back. Each cast is a pass over
    the array, but XLA removes the casts between two writes in a program.

    Args:
      rows: the array. Unless `index` is a tuple, its leading dimensions are merged, so that its
        shape is ``[R, ...]``. Do not merge them before the call, because XLA would then copy the
        array for the kernel.
      index: i32 ``[N]``, the indices of the rows, which must be distinct. Or a tuple of such
        arrays, one per leading dimension; then only the first index may be past the end.
      new: ``[N, ...]``, the new rows.
    """
    if bits_of(rows.dtype) is None:
        return _set_rows_as_is(rows, index, new)
    # Other platforms scatter these dtypes in place. Casting them to integers and back would
    # add copies there.
    return lax.platform_dependent(rows, index, new, cpu=_set_rows_on_cpu, default=_set_rows_as_is)


def _set_rows_on_cpu(rows: jax.Array, index: _Index, new: jax.Array) -> jax.Array:
    if isinstance(index, tuple):
        sizes, flat = rows.shape[1 : len(index)], index[0]
        for size, axis_index in zip(sizes, index[1:], strict=True):
            flat = flat * size + axis_index
        index = flat
    arrays = rows, index, new
    if rows.dtype not in ELEMENTS:
        return _set_rows_as_bits(*arrays)
    kernel = NativeKernel("set_rows", rows.dtype)
    [out] = call(kernel, arrays, _set_rows_as_bits, arrays, is_in_place=True)
    return out


@without_index_checks
def _set_rows_as_is(rows: jax.Array, index: _Index, new: jax.Array) -> jax.Array:
    if isinstance(index, tuple):
        return rows.at[index].set(new, mode="drop", unique_indices=True)
    out = rows.reshape(-1, *new.shape[1:]).at[index].set(new, mode="drop", unique_indices=True)
    return out.reshape(rows.shape)


def _set_rows_as_bits(rows: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    dtype = bits_of(rows.dtype)
    bits = lax.bitcast_convert_type(rows, dtype)
    bits = _set_rows_as_is(bits, index, lax.bitcast_convert_type(new, dtype))
    return lax.bitcast_convert_type(bits, rows.dtype)


@set_rows.defjvp
def _set_rows_jvp(primals, tangents):
    # Define the derivative here. Without this rule, JAX would treat the derivative of a bitcast as
    # zero, without a warning.
    rows, index, new = primals
    rows_dot, _, new_dot = tangents
    return set_rows(rows, index, new), _set_rows_as_is(rows_dot, index, new_dot)


def pool_of_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return zeros. In jitted programs for one CPU, a large array takes no memory until it is used.

    `jax.numpy.zeros` writes all of the memory, which takes 0.15 s for a pool of 188 MB.
    """
    dtype = jnp.dtype(dtype)
    if math.prod(shape) * dtype.itemsize < _LARGE_BYTES:
        return jnp.zeros(shape, dtype)
    if dtype not in ELEMENTS:
        return jnp.zeros(shape, dtype)
    # The kernel does not touch most of the memory: Linux zeroes each page on first use.
    [zeros] = call(NativeKernel("zeros", dtype), (), functools.partial(jnp.zeros, shape, dtype), ())
    return zeros


def scan_slices(
    step: Callable[[_State, Any, jax.Array], _State], state: _State, stacked: Any
) -> _State:
    """Call ``state = step(state, slices, index)`` for each slice of stacked arrays.

    Floats of a byte are sliced as integers, because XLA's CPU backend would convert the whole
    stacks to slice them. Larger floats are not: kernels read them from the stacks.

    Args:
      step: function that returns the next state. `slices` is a tree like `stacked`, and `index` is
        i32 ``[]``.
      state: the first state, a tree of arrays.
      stacked: tree of arrays with the same first dimension.
    """

    def as_integers(array: jax.Array) -> jax.Array:
        return as_bits(array) if array.dtype.itemsize == 1 else array

    def as_original(slice: jax.Array, array: jax.Array) -> jax.Array:
        return from_bits(slice, array.dtype)

    def body(state: _State, bits_and_index: Any) -> tuple[_State, None]:
        bits, index = bits_and_index
        return step(state, jax.tree.map(as_original, bits, stacked), index), None

    indices = jnp.arange(len(jax.tree.leaves(stacked)[0]), dtype=jnp.int32)
    return lax.scan(body, state, (jax.tree.map(as_integers, stacked), indices))[0]


# Maximum number of states that `_take_slices` reads in an iteration of its loop.
_SLICES = 8
# Number of lanes of a TPU vector register.
_TPU_LANES = 128


def _take_slices(pool: jax.Array, layer: jax.Array, entries: jax.Array) -> jax.Array:
    """Do the same as `_take_entries`, with one `dynamic_slice` per entry, for TPUs.

    For a gather of vectors, XLA would first copy half of a layer. The reshape of the pool to
    ``L * P`` vectors would copy the whole pool, unless P is a multiple of the number of rows of a
    TPU tile. For a gather of states with more than 128 lanes, XLA would first split the pool along
    its lanes.
    """
    B, shape = entries.shape[0], pool.shape[2:]
    count = min(B, _SLICES)
    index = jnp.pad(entries, (0, -B % count)).reshape(-1, count)

    def take(entry_ids: jax.Array) -> jax.Array:
        slices = [
            lax.dynamic_slice(pool, (layer, entry_ids[i], *[0] * len(shape)), (1, 1, *shape))
            for i in range(count)
        ]
        return jnp.concatenate(slices, axis=1)[0]

    return lax.map(take, index).reshape(-1, *shape)[:B]


def _take_entries(pool: jax.Array, layer: jax.Array, entries: jax.Array) -> jax.Array:
    """Return the states ``[B, ...]`` of some entries of a layer of a pool ``[L, P, ...]``."""
    L, P, *shape = pool.shape
    return take_rows(pool.reshape(L * P, *shape), layer * P + entries)


@without_index_checks
def _set_slices(pool: jax.Array, layer: jax.Array, entries: jax.Array, new: jax.Array) -> jax.Array:
    """Do the same as `_set_entries` without a reshape of the pool, for TPUs."""
    return pool.at[layer, entries].set(new, mode="drop", unique_indices=True)


def _set_entries(
    pool: jax.Array, layer: jax.Array, entries: jax.Array, new: jax.Array
) -> jax.Array:
    """Return a pool with new states in some entries of a layer.

    States for entries past the end of the layer are dropped.
    """
    L, P = pool.shape[:2]
    # Move entries past the end of a layer to the end of the pool. Otherwise, entry P of a layer
    # would be entry 0 of the next layer.
    index = jnp.where(entries < P, layer * P, (L - 1) * P) + entries
    return set_rows(pool, index, new)


def take_states(rows: StateRows, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Return the recurrent states of a batch, ``[B, ...]``, from their pool.

    Rows with a source out of range get a state of zeros.

    Args:
      rows: the rows, and their pool.
      shape: shape of a state; None for its shape in the pool, which may be larger.
    """
    P, *padded = rows.pool.shape[1:]
    is_held = (rows.sources >= 0) & (rows.sources < P)
    take = _by_platform(_take_entries, _take_slices, rows.pool)
    states = take(rows.pool, jnp.asarray(rows.layer), jnp.where(is_held, rows.sources, 0))
    if shape is not None and shape != tuple(padded):
        # Without the barrier, XLA would copy the pool without its padding, and gather from this
        # copy.
        states = lax.optimization_barrier(states)[:, *map(slice, shape)]
    return jnp.where(is_held.reshape(-1, *[1] * len(padded)), states, 0)


def set_states(rows: StateRows, states: jax.Array) -> jax.Array:
    """Return the pool with the new recurrent states of a batch, ``[B, ...]``.

    If the entry of a row is out of range, the new state of this row is dropped. States that are
    smaller than the entries of the pool are padded with zeros.
    """
    P, *padded = rows.pool.shape[1:]
    if states.shape[1:] != tuple(padded):
        padding = [(0, size - old) for size, old in zip(padded, states.shape[1:], strict=True)]
        states = jnp.pad(states, ((0, 0), *padding))
    is_kept = (rows.entries >= 0) & (rows.entries < P)
    # The indices must be distinct, so each dropped row gets its own index past the end.
    index = P + jnp.arange(rows.num_rows, dtype=jnp.int32)
    index = jnp.where(is_kept, rows.entries, index)
    put = _by_platform(_set_entries, _set_slices, rows.pool)
    return put(rows.pool, jnp.asarray(rows.layer), index, states.astype(rows.pool.dtype))


def _by_platform(
    general: Callable[..., jax.Array], of_slices: Callable[..., jax.Array], pool: jax.Array
) -> Callable[..., jax.Array]:
    """Return a function that calls `of_slices` on TPUs, and `general` on other platforms.

    If states are matrices with at most 128 lanes, it also calls `general` on TPUs.
    """
    if pool.ndim > 3 and pool.shape[-1] <= _TPU_LANES:
        return general

    def choose(*args: jax.Array) -> jax.Array:
        return lax.platform_dependent(*args, tpu=of_slices, default=general)

    return choose
