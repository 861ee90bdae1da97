"""Products of rows with weights of which each group of rows has its own, as experts are."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels import cpu
from paged_jax.kernels.backend import Interpret, PallasBackend
from paged_jax.kernels.dispatch import BACKENDS
from paged_jax.kernels.gradients import differentiable_once
from paged_jax.kernels.mosaic_tpu import grouped_linear as mosaic_tpu
from paged_jax.kernels.triton import grouped_linear as triton
from paged_jax.kernels.xla import grouped_linear as xla

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


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
    if isinstance(own := BACKENDS.get(backend or ""), PallasBackend):
        interpret = interpret or own.interpret
    return _grouped_linear(_Choice(backend, interpret), x, w, group_sizes.astype(jnp.int32), stack)


@dataclass(frozen=True)
class _Choice:
    backend: str | None
    interpret: Interpret

    def takes(self, name: str) -> bool:
        return self.backend in (None, name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_linear(
    choice: _Choice, x: jax.Array, w: jax.Array, group_sizes: jax.Array, stack: Any
) -> jax.Array:
    if choice.interpret:
        op = {"triton": triton, "mosaic_tpu": mosaic_tpu}[str(choice.backend)].grouped_linear
        return op(x, w, group_sizes, interpret=choice.interpret)
    branches = {}
    if choice.takes("triton") and triton.refusal(x, w) is None:
        branches["cuda"] = _triton
    if choice.takes("mosaic_tpu") and mosaic_tpu.refusal(x, w) is None:
        branches["tpu"] = _mosaic_tpu
    if choice.takes("cpu"):
        branches["cpu"] = _cpu
    return lax.platform_dependent(x, w, group_sizes, stack, default=_xla, **branches)


def _forward(
    choice: _Choice, x: jax.Array, w: jax.Array, group_sizes: jax.Array, stack: Any
) -> tuple[jax.Array, Any]:
    x, w = differentiable_once("grouped_linear", (x, w))
    return _grouped_linear(choice, x, w, group_sizes, stack), (x, w, group_sizes)


def _backward(choice: _Choice, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    del choice
    saved, cotangent = differentiable_once("grouped_linear", (saved, cotangent))
    gradients = lax.platform_dependent(
        *saved, cotangent, tpu=_ragged_gradients, default=xla.grouped_gradients
    )
    return *gradients, None, None


_grouped_linear.defvjp(_forward, _backward)


def _ragged_gradients(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `xla.grouped_gradients`, where XLA's grouped product multiplies by no other weights."""
    plain = functools.partial(_ragged_dot, group_sizes=group_sizes)
    _, transpose = jax.vjp(plain, x, w)
    return transpose(_without_others(group_sizes, cotangent))


def _ragged_dot(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return lax.ragged_dot_general(
        x.astype(w.dtype),
        w,
        group_sizes,
        numbers,
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _triton(x: jax.Array, w: jax.Array, group_sizes: jax.Array, stack: Any) -> jax.Array:
    del stack
    return triton.grouped_linear(x, w, group_sizes)


def _mosaic_tpu(x: jax.Array, w: jax.Array, group_sizes: jax.Array, stack: Any) -> jax.Array:
    del stack
    return mosaic_tpu.grouped_linear(x, w, group_sizes)


def _cpu(x: jax.Array, w: jax.Array, group_sizes: jax.Array, stack: Any) -> jax.Array:
    return cpu.grouped_linear(xla.grouped_linear, x, w, group_sizes, stack)


def _xla(x: jax.Array, w: jax.Array, group_sizes: jax.Array, stack: Any) -> jax.Array:
    del stack
    return xla.grouped_linear(x, w, group_sizes)


def _without_others(group_sizes: jax.Array, out: jax.Array) -> jax.Array:
    """0 in rows of no group."""
    rows = jnp.arange(out.shape[0], dtype=jnp.int32)
    return jnp.where((rows < jnp.sum(group_sizes))[:, None], out, 0)
