"""The two public ops that change the pools, whatever the backend: writing tokens, copying blocks.

Both return new pools. Donated, the pools are updated in place, and nothing of their size is copied
or held for a while; pass them around whole, since slicing a layer out would copy it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from paged_jax import dims
from paged_jax.kernels.backend import CopyArgs, Options, Pools, Problem, WriteArgs
from paged_jax.kernels.checks import as_int32, check_pools, check_sharding, pool_letters
from paged_jax.kernels.dispatch import Dispatch, check_arrays_are_on_its_device

# Rows of the pool are counted in int32, and so are those past its end that stand for "no row".
_MAX_ROWS = 2**31 - 1


def paged_write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: jax.Array,
    offsets: jax.Array,
    *,
    layer: int | jax.Array = 0,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    interpret: Any = False,
) -> Pools:
    """Write one layer's K and V of N tokens to their places; in place if the pools are donated.

    Args:
      k_pool: ``[L, P, K, C, D]``, keys. Floating point, or int8 or float8_e4m3fn with scales. `D`
        may be padded to a multiple of 128; what is then in the padding is not defined.
      v_pool: the values, as the keys.
      k: ``[N, K, D]`` floating point, cast to the dtype of the pool, or rounded to it with a scale
        for each token and head, see `quantise`.
      v: the values, as the keys.
      blocks: integer ``[N]``. Tokens whose block is no block, such as P, are dropped.
      offsets: integer ``[N]``, the token's place in its block, below C. No two tokens that are
        written share a place.
      layer: which layer of the pools to write; a Python int or a traced scalar. Where a traced one
        is no layer, nothing is written.
      k_scale, v_scale: f32 ``[L, P, K, C]``, the scales of quantised pools; None for others.
      backend: ``"triton"`` (GPU), ``"xla"``, or None for the best one of the platform that the
        program is lowered for (static).
      interpret: run the Pallas kernel of `backend` in its interpreter, on any platform (static).

    Returns:
      The `Pools`. Differentiable in pools and new values, unless the pools are quantised: then a
      gradient is refused with NotImplementedError.

    Raises:
      ValueError: shapes or dtypes do not fit together, scales are missing or superfluous, the pool
        has more rows than int32 counts, arrays are on a mesh with explicit axes, or the backend's
        name is unknown or it does not run on the device of the arrays.
      NotImplementedError: the backend that was asked for cannot do this; it says why.

    Example:
      >>> k_pool, v_pool = jnp.zeros((2, 2, 4, 1, 8, 16))
      >>> new, blocks, offsets = jnp.ones((2, 1, 16)), jnp.array([3, 4]), jnp.array([7, 0])
      >>> pools = paged_write(k_pool, v_pool, new, new, blocks, offsets, layer=1)
      >>> float(pools.k.sum()), float(pools.k[1, 3, 0, 7].sum())
      (16.0, 16.0)
    """
    k, v, blocks, offsets = map(jnp.asarray, (k, v, blocks, offsets))
    new = {"k": (k, "NKD"), "v": (v, "NKD"), "blocks": (blocks, "N"), "offsets": (offsets, "N")}
    pools = jax.tree.map(jnp.asarray, Pools(k_pool, v_pool, k_scale, v_scale))
    shapes = pool_letters(pools, k.shape[-1] if k.ndim else 0)
    sizes = dims.bind("paged_write", **shapes, **new)
    check_pools("paged_write", pools, layer)
    for name, array in {"k": k, "v": v}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"paged_write: {name} must be floating point, got {array.dtype}.")
    check_sharding("paged_write", (pools, k, v, blocks, offsets))
    check_num_rows("paged_write", pools.k.shape, num_new=sizes["N"] * sizes["K"])
    blocks, offsets = as_int32("paged_write", blocks=blocks, offsets=offsets)
    if pools.is_quantised:
        k, v = _without_gradient(k), _without_gradient(v)

    problem = Problem.of("write", sizes, k.dtype, pools, Options())
    ops = Dispatch("paged_write", problem, backend, interpret)
    if not interpret:
        check_arrays_are_on_its_device("paged_write", backend, pools.k)
    if not sizes["N"]:
        return pools
    return ops.write(WriteArgs(pools, k, v, blocks, offsets, jnp.asarray(layer, jnp.int32)))


def copy_blocks(
    k_pool: jax.Array,
    v_pool: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    interpret: Any = False,
) -> Pools:
    """Copy blocks to other blocks, in all layers; in place if the pools are donated.

    Args:
      k_pool, v_pool, k_scale, v_scale, backend, interpret: see `paged_write`.
      sources: integer ``[N]``, the blocks to copy.
      targets: integer ``[N]``, where to: distinct blocks, none of which is also a source. Pairs
        of which either is no block, such as P, are left out.

    Returns:
      The `Pools`. Costs reading and writing each block that is copied.

    Raises:
      ValueError, NotImplementedError: as for `paged_write`.

    Example:
      >>> k_pool = v_pool = jnp.arange(4.0).reshape(1, 4, 1, 1, 1)
      >>> pools = copy_blocks(k_pool, v_pool, jnp.array([3, 4]), jnp.array([0, 1]))
      >>> pools.k.ravel().tolist()
      [3.0, 1.0, 2.0, 3.0]
    """
    sources, targets = map(jnp.asarray, (sources, targets))
    pairs = {"sources": (sources, "N"), "targets": (targets, "N")}
    pools = jax.tree.map(jnp.asarray, Pools(k_pool, v_pool, k_scale, v_scale))
    shapes = pool_letters(pools, pools.k.shape[-1] if pools.k.ndim else 0)
    sizes = dims.bind("copy_blocks", **shapes, **pairs)
    check_pools("copy_blocks", pools, 0)
    check_sharding("copy_blocks", (pools, sources, targets))
    check_num_rows("copy_blocks", pools.k.shape)
    sources, targets = as_int32("copy_blocks", sources=sources, targets=targets)

    problem = Problem.of("copy_blocks", sizes, pools.k.dtype, pools, Options())
    ops = Dispatch("copy_blocks", problem, backend, interpret)
    if not interpret:
        check_arrays_are_on_its_device("copy_blocks", backend, pools.k)
    if not sizes["N"]:
        return pools
    return ops.copy_blocks(CopyArgs(pools, sources, targets))


@jax.custom_jvp
def _without_gradient(new: jax.Array) -> jax.Array:
    """Keys or values on their way into a quantised pool."""
    return new


def _refuse_gradient(primals, tangents):
    # Rounding has no useful derivative, and a silent zero would look like one.
    if not isinstance(tangents[0], SymbolicZero):
        raise NotImplementedError(
            "paged_write: a quantised pool passes no gradient to what is written. Train with a "
            "floating-point pool, or stop the gradient with jax.lax.stop_gradient."
        )
    return primals[0], tangents[0]


_without_gradient.defjvp(_refuse_gradient, symbolic_zeros=True)


def check_num_rows(function: str, shape: tuple[int, ...], num_new: int = 0) -> None:
    """Refuse a pool with more rows, a token and head each, than int32 can count.

    Args:
      function: the name of the caller, for the message.
      shape: shape of the pool, L, P, K, C, D.
      num_new: rows past the end of the pool that must be counted too.

    Raises:
      ValueError: the pool has too many.
    """
    L, P, K, C, _ = shape
    num_rows = L * P * K * C
    if num_rows + num_new > _MAX_ROWS:
        raise ValueError(
            f"{function}: the pool must have at most {_MAX_ROWS - num_new} rows L * P * K * C, got "
            f"{num_rows}. Use fewer blocks, or shard the KV heads over devices."
        )
