"""Matrix multiplication with the weights of a model, and sums over rows.

On GPUs and TPUs both are plain JAX. On CPUs a few rows are the work of C++ kernels, which read
weights where they are stored. With these kernels a row's result does not depend on the other rows.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paged_jax.kernels.backend import GroupedArgs, Interpret, Stack, Weight
from paged_jax.kernels.dispatch import (
    compiled_backend,
    general_backend,
    linear_backend,
    run_grouped_linear,
)
from paged_jax.kernels.gradients import differentiable_once

__all__ = [
    "Stack",
    "Weight",
    "copies_weights",
    "grouped_linear",
    "linear",
    "reads_stacked_weights",
    "sum_rows",
]

# Maximum rows of a decode step. XLA's order of summation depends on the number of rows, the order
# of the kernel for CPUs does not. For more rows XLA is faster.
_MAX_DECODE_ROWS = 64

# Types of grouped weights.
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def linear(x: jax.Array, w: jax.Array | Weight, *, backend: str | None = None) -> jax.Array:
    """Multiply the last dimension of `x` by a weight: ``x @ w.T``.

    Args:
      x: floating point ``[..., in]``.
      w: ``[*out, in]``, float32, bfloat16 or float16, or a `Weight`, which may be int8; `x` may
        be rounded to the type of the floats.
      backend: the backend of attention, see `paged_attention`: None or ``"cpu"`` take the C++
        kernels on a CPU that has them, for few rows, or for any number of rows if XLA would copy
        the weights first.

    Returns:
      float32 ``[..., *out]``, accumulated in float32.
    """
    if not isinstance(w, Weight):
        w = Weight(w)
    return linear_backend(backend).linear(x, w)


def sum_rows(x: jax.Array, *, rows_per_token: int = 1) -> jax.Array:
    """Sum float32 ``[..., N]`` over the last dimension, to ``[..., 1]``.

    XLA's order of summation depends on the shape. On CPUs the rows of at most 64 tokens are summed
    by a kernel whose order does not, so that a row's sum is the same in batches of any size.

    Args:
      x: float32 ``[..., N]``.
      rows_per_token: number of rows of `x` that belong to one token.
    """
    num_tokens = math.prod(x.shape[:-1]) // rows_per_token
    is_decode = 0 < num_tokens <= _MAX_DECODE_ROWS
    return (linear_backend(None) if is_decode else general_backend()).sum_rows(x)


def copies_weights(platform: str, dtype: DTypeLike, *, has_experts: bool) -> bool:
    """Return whether programs for a platform multiply by copies of all weights, in float32.

    Args:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; a CPU is the one of this machine.
      dtype: type of the weights.
      has_experts: whether the model has experts.
    """
    backend = compiled_backend(platform)
    if backend is None:
        return False
    return backend.copies_weights(dtype) or (has_experts and backend.copies_expert_weights(dtype))


def reads_stacked_weights(platform: str) -> bool:
    """Return whether kernels for a platform read a layer's weights in the stack of all layers."""
    backend = compiled_backend(platform)
    return backend is not None and backend.is_available()


def grouped_linear(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    stack: tuple[jax.Array, jax.Array] | None = None,
    backend: str | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Multiply rows, sorted by group, by the weights of their groups.

    Weights of groups without rows are not read, but for gradients; none are copied by the kernels
    for CPUs (C++), NVIDIA GPUs (Triton) and TPUs (JAX's megablox). Elsewhere XLA copies the weights
    of one group after the other. On a CPU with the kernel a row's result does not depend on others.

    Args:
      x: floating point ``[R, in]``, at least one row; rounded to the type of the weights. The first
        ``group_sizes[0]`` rows are of group 0, those of group 1 follow, and so on.
      w: float32, bfloat16 or float16 ``[X, out, in]``.
      group_sizes: i32 ``[X]``, rows of each group, R together at most.
      stack: None, or where a kernel for CPUs reads `w`, which is then not computed if it is a slice
        of that: ``[L, X, out, in]``, and i32 ``[]``, the part of it (static).
      backend: None for the best one of the platform, or the name of one: ``"cpu"``, ``"triton"`` or
        ``"mosaic_tpu"``; others stand for XLA's (static).
      interpret: run the Pallas kernel of `backend` in its interpreter, on any platform (static). So
        it is run, too, where the backend of that name is one whose kernels are interpreted.

    Returns:
      float32 ``[R, out]``, accumulated in float32; 0 in rows of no group.

    Differentiable in `x` and `w`, in reverse mode: each weight meets the rows of its own group
    there as well.

    Raises:
      ValueError: shapes do not fit together, or the weights are of another type.

    Example:
      >>> w = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 2, 4))
      >>> grouped_linear(jnp.ones((5, 4)), w, jnp.array([1, 0, 3])).tolist()
      [[0.0, 0.0], [8.0, 8.0], [8.0, 8.0], [8.0, 8.0], [0.0, 0.0]]
    """
    if w.ndim != 3 or x.ndim != 2 or x.shape[1] != w.shape[2] or not x.size:
        raise ValueError(
            "grouped_linear: x must be [R, in] with R > 0 and w [X, out, in], got "
            f"{x.shape} and {w.shape}."
        )
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(
            f"grouped_linear: group_sizes must have shape {w.shape[:1]}, got {group_sizes.shape}."
        )
    if w.dtype not in _DTYPES:
        raise ValueError(
            f"grouped_linear: w must be float32, bfloat16 or float16, got {w.dtype}. Int8 weights "
            "of groups are not supported."
        )
    if stack is None:
        stack = w[None], jnp.int32(0)
    stack = lax.stop_gradient(stack)
    args = GroupedArgs(x, w, group_sizes.astype(jnp.int32), stack)
    return _grouped_linear(backend, interpret, args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_linear(backend: str | None, interpret: Interpret, args: GroupedArgs) -> jax.Array:
    return run_grouped_linear(args, backend, interpret)


def _forward(
    backend: str | None, interpret: Interpret, args: GroupedArgs
) -> tuple[Any, tuple[jax.Array, ...]]:
    x, w = differentiable_once("grouped_linear", (args.x, args.w))
    out = _grouped_linear(backend, interpret, args._replace(x=x, w=w))
    return out, (x, w, args.group_sizes)


def _backward(
    backend: str | None, interpret: Interpret, saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[Any]:
    del backend, interpret
    (x, w, group_sizes), cotangent = differentiable_once("grouped_linear", (saved, cotangent))
    x_bar, w_bar = general_backend().grouped_gradients(x, w, group_sizes, cotangent)
    return (GroupedArgs(x_bar, w_bar, None, None),)  # type: ignore[arg-type]


_grouped_linear.defvjp(_forward, _backward)
