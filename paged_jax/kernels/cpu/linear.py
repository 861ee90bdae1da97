"""Products of a few rows by the kernel of `source/linear.cc`."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from paged_jax.kernels.cpu.calls import call
from paged_jax.kernels.cpu.library import Kernel

# With more rows a product is bound by arithmetic, which XLA's is better at.
MAX_ROWS = 64

_DTYPES = (jnp.float32, jnp.bfloat16)

Product = Callable[[jax.Array, jax.Array], jax.Array]


def takes(x: jax.Array, w: jax.Array) -> bool:
    """Whether the kernel multiplies as many rows by weights of this type."""
    return is_few(math.prod(x.shape[:-1])) and w.size > 0 and w.dtype in _DTYPES


def is_few(num_rows: int) -> bool:
    """Whether so many rows are the kernel's, whose results do not depend on their number."""
    return 0 < num_rows <= MAX_ROWS


def sum_rows(x: jax.Array) -> jax.Array:
    """Sums over the last axis, which stays, in an order that does not depend on the other axes.

    XLA has an order for each shape. Differentiable.

    Args:
      x: float32 ``[..., N]``. It need not be few rows, but one thread adds all of them.

    Returns:
      float32 ``[..., 1]``.
    """
    return linear(_sum_rows, x, jnp.ones((1, x.shape[-1]), jnp.float32))


def _sum_rows(x: jax.Array, ones: jax.Array) -> jax.Array:
    del ones
    return jnp.sum(x, axis=-1, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def linear(plain: Product, x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w.T`` where a CPU has the kernel, and `plain` where not; differentiable as `plain`.

    A row's result does not depend on how many others there are.

    Args:
      plain: a function of `x` and `w` that means the same; a module's own, so that it is hashable.
      x: floating point ``[..., in]``, rounded to the type of the weights.
      w: ``[out, in]``, as `takes` has it.

    Returns:
      float32 ``[..., out]``.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _call(plain, rows, w).reshape(*x.shape[:-1], w.shape[0])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _call(plain: Product, rows: jax.Array, w: jax.Array) -> jax.Array:
    [out] = call(Kernel("linear", w.dtype), _Plain(plain), (rows, w))
    return out


@linear.defjvp
def _linear_jvp(plain, primals, tangents):
    return linear(plain, *primals), jax.jvp(plain, primals, tangents)[1]


@dataclass(frozen=True)
class _Plain:
    """A product as a list of results."""

    product: Product

    def __call__(self, x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [self.product(x, w)]
