"""Recurrences over a state of fixed size, in plain JAX: convolution, delta rule and Mamba-2.

The input of a sequence is a single token or a chunk of any length::

    T = 1     decay the state, add an outer product, read it            all heads together
    T > 1     [ tile 0 | tile 1 | tile 2 | padding ]                    tiles of 64 tokens
                  |        |        |
              products of tokens within a tile: no state, all tiles together
                  |        |        |
              S --+--> S --+--> S --+--> S                              a scan over the tiles

The arithmetic is float32. Decay factors are exponentials of sums that are never positive, so they
cannot overflow.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.kernels.rows import set_states, take_states
from paged_jax.kernels.state_rows import ConvolutionStep, StateStep

# `_TILE` is the number of tokens in a tile. The delta rule inverts a triangular matrix with one row
# and one column per token of a tile; with tiles of 128 tokens, the inverse would be less accurate.
# `_BLOCK` is the number of tokens in the blocks into which `_invert` and `_decayed_products` divide
# a tile.
_TILE, _BLOCK = 64, 16

_einsum = functools.partial(jnp.einsum, precision="highest")
_matmul = functools.partial(jnp.matmul, precision="highest")


def advance_rows(step: StateStep) -> tuple[jax.Array, jax.Array]:
    """Run a step of one token per row, with the states in a pool.

    The states are gathered, advanced by the token, and scattered.

    Returns:
      The output of each row, float32, and the new pool.
    """
    states = take_states(step.rows, step.state_shape)
    if isinstance(step, ConvolutionStep):
        x, num_tokens = step.x[:, None], step.num_tokens
        out, new = convolve(x, states, step.weight, step.bias, num_tokens)
    else:
        arrays: Any = jax.tree.map(lambda x: x[:, None], step[1:])
        out, new = apply_recurrence(*arrays, state=states)
    return out[:, 0], set_states(step.rows, new)


def convolve(
    x: jax.Array,
    state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    num_tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Convolve chunks of tokens, see `paged_jax.kernels.recurrent.causal_convolution`."""
    B, T, F = x.shape
    width = weight.shape[1]
    inputs = jnp.concatenate([state.reshape(B, width - 1, F), x.astype(state.dtype)], axis=1)
    filters = weight.astype(jnp.float32).T[:, None, None]
    shifted = (inputs[:, i : i + T].astype(jnp.float32) for i in range(width))
    out = sum(part * filters[i] for i, part in enumerate(shifted))
    out = out if bias is None else out + bias.astype(jnp.float32)[None, None]
    if T == 1:
        last = jnp.where((num_tokens > 0)[:, None, None], inputs[:, 1:], inputs[:, :-1])
    else:
        rows = num_tokens[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
        last = jnp.take_along_axis(inputs, rows[..., None], axis=1)
    return jnp.asarray(out), last.reshape(state.shape)


def apply_recurrence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Advance states by chunks of tokens: the delta rule, or Mamba-2 if `beta` is None.

    For each head and token, with a state ``S [D, U]``::

        S = exp(log_decay) * S
        S = S + outer(k, beta * (v - k @ S))       or  S + outer(k, v)  without beta
        out = q @ S

    A token whose `log_decay`, and `beta` or else `v`, are zero does not change the state.

    Args:
      q: queries, float32 ``[B, T, K, D]``. Each of the K heads has G heads of values.
      k: keys, float32 ``[B, T, K, D]``.
      v: values, float32 ``[B, T, K, G, U]``.
      log_decay: logarithm of the decay, at most 0, float32 ``[B, T, K, G, 1]``; or
        ``[B, T, K, G, D]`` if the elements of a key decay at different rates.
      beta: step size of the update, float32 ``[B, T, K, G]``; or None, to write `v` as it is.
      state: float32 ``[B, K, G, D, U]`` or ``[B, K * G, D, U]``. Without beta, its last two
        dimensions are ``[U, D]``.

    Returns:
      The output, float32 ``[B, T, K, G, U]``, and the new state.
    """
    B, T, K, G, _ = v.shape
    before = state.reshape(B, K, G, *state.shape[-2:])
    if T == 1:
        arrays: Any = jax.tree.map(lambda x: x[:, 0], (q, k, v, log_decay, beta))
        out, new = _advance_token(*arrays, state=before)
        return out[:, None], new.reshape(state.shape)
    columns = None if beta is None else beta[..., None]
    tiles: Any = jax.tree.map(_tiles, (q, k, v, log_decay, columns))
    out, new = _advance_tiles(*tiles, state=before)
    return _join(out, T), new.reshape(state.shape)


def _advance_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Apply `apply_recurrence` to one token per row. The arrays have no dimension T.

    With beta, the output is computed from the old state, in the same pass as `predicted`.
    """
    q, k, decay = q[:, :, None], k[:, :, None], jnp.exp(log_decay)
    if beta is None:
        new_UD = decay[..., None, :] * state + v[..., None] * k[..., None, :]
        return jnp.sum(new_UD * q[..., None, :], axis=-1), new_UD
    predicted = jnp.sum((decay * k)[..., None] * state, axis=-2)
    from_state = jnp.sum((decay * q)[..., None] * state, axis=-2)
    change = beta[..., None] * (v - predicted)
    out = from_state + jnp.sum(q * k, axis=-1, keepdims=True) * change
    return out, decay[..., None] * state + k[..., None] * change[..., None, :]


def _tiles(x: jax.Array) -> jax.Array:
    """Divide ``[B, T, ..., last]`` into tiles ``[B, Q, ..., tile, last]``, padded with zeros."""
    B, T = x.shape[:2]
    tile = min(_TILE, max(_BLOCK, 1 << (T - 1).bit_length()))
    x = jnp.pad(x, ((0, 0), (0, -T % tile), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(B, -1, tile, *x.shape[2:]), 2, -2)


def _join(tiles: jax.Array, T: int) -> jax.Array:
    """Undo `_tiles`: return ``[B, T, ...]`` from tiles ``[B, Q, ..., tile, last]``."""
    B = tiles.shape[0]
    joined = jnp.moveaxis(tiles, -2, 2)
    return joined.reshape(B, -1, *joined.shape[3:])[:, :T]


def _decays(log_decay: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the decays within a tile, if all elements of a key decay equally.

    The exponents of each pair of tokens are summed separately. Differences of cumulative sums would
    be less accurate: after a large decay, they would lose the small decay between neighbours.

    Args:
      log_decay: float32 ``[..., tile, 1]``.

    Returns:
      Three arrays: the decay from each token to each later token, ``[..., tile, tile]``, 0 above
        the diagonal; the decay from the state before the tile to each token, ``[..., tile, 1]``;
        and the decay from each token to the state after the tile, ``[..., tile, 1]``.
    """
    tile = log_decay.shape[-2]
    is_after = np.tri(tile, k=-1, dtype=bool)
    sums = jnp.cumsum(jnp.where(is_after, log_decay, 0), axis=-2)
    between = jnp.exp(jnp.where(np.tri(tile, dtype=bool), sums, -jnp.inf))
    into = jnp.exp(jnp.cumsum(log_decay, axis=-2))
    return between, into, between[..., -1, :, None]


def _advance_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Apply `apply_recurrence` to tiles of tokens, see `_tiles`.

    With beta, the value that a token writes depends on the values that earlier tokens wrote. The
    values that the tokens of a tile write solve
    ``(I + beta * lower) @ values = beta * (v - old)``. `lower` contains the products of each key
    with the earlier keys, times the decay between them. `old` contains the values that the keys
    read from the state before the tile.
    """
    if log_decay.shape[-1] == 1:
        decay_TN, into, onto = _decays(log_decay)

        def multiply(x: jax.Array) -> jax.Array:
            return _einsum("bqktd,bqknd->bqktn", x, k)[:, :, :, None] * decay_TN

        lower: Any = None if beta is None else multiply(k)
        inner = multiply(q)
    else:
        lower, inner, into, onto = _decayed_products(q, k, log_decay)
    q_GTD, k_GTD = q[:, :, :, None], k[:, :, :, None]
    values, keys = v, None
    if beta is not None:
        is_earlier = np.tri(k.shape[-2], k=-1, dtype=bool)
        inverse = _invert(jnp.where(is_earlier, beta * lower, 0))
        values, keys = _matmul(inverse, beta * v), _matmul(inverse, beta * into * k_GTD)
    queries, keys_onto, decay = q_GTD * into, k_GTD * onto, into[..., -1, :]
    if beta is None:
        state = state.swapaxes(-1, -2)
    out, new = _scan_tiles(queries, keys_onto, values, keys, inner, decay, state)
    return out, new if beta is not None else new.swapaxes(-1, -2)


def _scan_tiles(
    q: jax.Array,
    k: jax.Array,
    values: jax.Array,
    keys: jax.Array | None,
    inner: jax.Array,
    decay: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Advance the state through the tiles of each row, and compute the output of each tile.

    Args:
      q: float32 ``[B, Q, K, G, tile, D]``, queries that read the state before the tile.
      k: float32 ``[B, Q, K, G, tile, D]``, keys that write into the state after the tile.
      values: float32 ``[B, Q, K, G, tile, U]``, values that `k` writes.
      keys: float32 ``[B, Q, K, G, tile, D]``, keys that read values from the state before the tile.
        The values they read are subtracted from `values`; None to subtract nothing.
      inner: float32 ``[B, Q, K, G, tile, tile]``, products of the queries and keys of a tile.
      decay: float32 ``[B, Q, K, G, D]`` or ``[B, Q, K, G, 1]``, decay of the state over the tile.
      state: float32 ``[B, K, G, D, U]``, state before the first tile.

    Returns:
      The output ``[B, Q, K, G, tile, U]`` and the new state.
    """

    def step(state: jax.Array, tile: Any) -> tuple[jax.Array, jax.Array]:
        q, k, values, keys, inner, decay = tile
        written = values if keys is None else values - _matmul(keys, state)
        out = _matmul(q, state) + _matmul(inner, written)
        return decay[..., None] * state + _matmul(k.swapaxes(-1, -2), written), out

    tiles = (q, k, values, keys, inner, decay)
    if q.shape[1] == 1:
        state, out = step(state, jax.tree.map(lambda x: x[:, 0], tiles))
        return out[:, None], state
    state, out = lax.scan(step, state, jax.tree.map(lambda x: x.swapaxes(0, 1), tiles))
    return out.swapaxes(0, 1), state


def _decayed_products(
    q: jax.Array, k: jax.Array, log_decay: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the decayed products of keys and queries, if elements of a key decay differently.

    The decay between two tokens cannot be written as a factor of one token times a factor of the
    other, because one factor would overflow. Within a block of 16 tokens, the exponent of each pair
    of tokens and each element is computed. For keys before the block, both factors are relative to
    the beginning of the block, so neither overflows::

        token j ------> beginning of the block of i ------> token i
                 to_block                       from_start

    Args:
      q: float32 ``[B, Q, K, tile, D]``.
      k: float32 ``[B, Q, K, tile, D]``.
      log_decay: float32 ``[B, Q, K, G, tile, D]``.

    Returns:
      Four arrays: the products of keys with keys, and of queries with keys,
        ``[B, Q, K, G, tile, tile]``, arbitrary above the diagonal; the decay from the state before
        the tile to each token, and from each token to the state after the tile,
        ``[B, Q, K, G, tile, D]``.
    """
    tile = log_decay.shape[-2]
    q, k = q[:, :, :, None], k[:, :, :, None]
    is_after, is_seen = (np.tri(_BLOCK, k=i, dtype=bool)[..., None] for i in (-1, 0))

    # Each block has its own arrays. If one array had the keys of all blocks, XLA for CPUs (jaxlib
    # 0.10) would compile the gradient of the keys to wrong values.
    def products_of(start: int) -> tuple[jax.Array, jax.Array]:
        """Multiply the keys of a block by all keys, and its queries by all keys.

        `start` is the first token of the block. Both results are ``[..., 16, tile]``.
        """
        block = slice(start, start + _BLOCK)
        keys, decay = k[..., block, :], log_decay[..., block, :]
        far_keys = jnp.exp(_sum_after(log_decay[..., :start, :])) * k[..., :start, :]
        from_start = jnp.exp(jnp.cumsum(decay, axis=-2))
        sums = jnp.cumsum(jnp.where(is_after, decay[..., :, None, :], 0), axis=-3)
        near_keys = jnp.exp(jnp.where(is_seen, sums, -jnp.inf)) * keys[..., None, :, :]

        def multiply(x: jax.Array) -> jax.Array:
            far = _einsum("...td,...nd->...tn", x * from_start, far_keys)
            near = jnp.sum(x[..., :, None, :] * near_keys, axis=-1)
            later = jnp.zeros((*near.shape[:-1], tile - start - _BLOCK), near.dtype)
            return jnp.concatenate([far, near, later], axis=-1)

        return multiply(keys), multiply(q[..., block, :])

    rows = zip(*map(products_of, range(0, tile, _BLOCK)), strict=True)
    lower, inner = (jnp.concatenate(blocks, axis=-2) for blocks in rows)
    into, onto = jnp.exp(jnp.cumsum(log_decay, axis=-2)), jnp.exp(_sum_after(log_decay))
    return lower, inner, into, onto


def _sum_after(x: jax.Array) -> jax.Array:
    """Return for each row of ``[..., N, D]`` the sum of all later rows."""
    later = jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)
    return lax.cumsum(later, axis=x.ndim - 2, reverse=True)


@jax.custom_jvp
def _invert(lower: jax.Array) -> jax.Array:
    """Return the inverse of ``I + lower`` for strictly lower triangular ``[..., tile, tile]``.

    Blocks of 16 rows on the diagonal are inverted by forward substitution. Pairs of inverted blocks
    are then merged, until one block is left. The product
    ``(I - lower) (I + lower^2) (I + lower^4) ...`` would be faster on some devices, but its factors
    overflow if keys are nearly equal.
    """
    tile = lower.shape[-1]
    pieces = lower.reshape(*lower.shape[:-2], tile // _BLOCK, _BLOCK, tile // _BLOCK, _BLOCK)
    indices = np.arange(tile // _BLOCK)
    diagonal = jnp.moveaxis(pieces[..., indices, :, indices, :], 0, -3)

    def substitute(row: int, inverse: jax.Array) -> jax.Array:
        factors = lax.dynamic_slice_in_dim(diagonal, row, 1, axis=-2)
        old_row = lax.dynamic_slice_in_dim(inverse, row, 1, axis=-2)
        new_row = old_row - _matmul(factors, inverse)
        return lax.dynamic_update_slice_in_dim(inverse, new_row, row, axis=-2)

    identity = jnp.broadcast_to(jnp.eye(_BLOCK, dtype=lower.dtype), diagonal.shape)
    inverse, size = lax.fori_loop(1, _BLOCK, substitute, identity), _BLOCK
    while size < tile:
        indices = np.arange(0, tile // size, 2)
        pieces = lower.reshape(*lower.shape[:-2], tile // size, size, tile // size, size)
        below = jnp.moveaxis(pieces[..., indices + 1, :, indices, :], 0, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -_matmul(_matmul(second, below), first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


@_invert.defjvp
def _invert_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = _invert(*primals)
    return inverse, -_matmul(_matmul(inverse, tangents[0]), inverse)
