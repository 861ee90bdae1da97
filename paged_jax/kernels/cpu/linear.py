"""Products of a few rows by the kernel of `source/linear.cc`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.cpu.calls import call
from paged_jax.kernels.cpu.library import Kernel, load

# With more rows a product is bound by arithmetic, which XLA's is better at.
MAX_ROWS = 64

# Types of weights of which the kernel takes few rows only, and those of which it takes any number:
# XLA's products would convert all of the weight first.
_FEW_ROWS = (jnp.float32, jnp.bfloat16)
_ANY_ROWS = (jnp.float16, jnp.int8)

# A product of x with the weights of one layer: ``(x, w, layer)`` or ``(x, w, layer, scales)``.
Product = Callable[..., jax.Array]


def takes(num_rows: int, w: jax.Array) -> bool:
    """Whether the kernel multiplies as many rows by weights of this type."""
    if w.size == 0 or num_rows == 0:
        return False
    return w.dtype in _ANY_ROWS or (w.dtype in _FEW_ROWS and is_few(num_rows))


def copies_weights(dtype: DTypeLike) -> bool:
    """Whether programs for this machine's CPU multiply by copies in float32 of such weights."""
    dtype = jnp.dtype(dtype)
    return dtype in _ANY_ROWS and load(Kernel("linear", dtype)).target is None


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
    return linear(_sum_rows, x, jnp.ones((1, 1, x.shape[-1]), jnp.float32), jnp.int32(0))


def _sum_rows(x: jax.Array, *ones: jax.Array) -> jax.Array:
    del ones
    return jnp.sum(x, axis=-1, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def linear(
    plain: Product, x: jax.Array, w: jax.Array, layer: jax.Array, *scales: jax.Array
) -> jax.Array:
    """``x @ w[layer].T`` where a CPU has the kernel, and `plain` where not.

    Differentiable as `plain`. A row's result does not depend on how many others there are.

    Args:
      plain: a function of the other arguments that means the same; a module's own, so that it is
        hashable.
      x: floating point ``[..., in]``, rounded to bfloat16 if the weights are.
      w: ``[L, out, in]``, as `takes` has it.
      layer: i32 ``[]``, below L.
      scales: float32 ``[L, out]``, by which the results are multiplied, if the weights are int8.

    Returns:
      float32 ``[..., out]``.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _call(plain, rows, w, layer, *scales).reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _call(plain: Product, *operands: jax.Array) -> jax.Array:
    [out] = call(Kernel("linear", operands[1].dtype), _Plain(plain), operands)
    return out


@linear.defjvp
def _linear_jvp(plain, primals, tangents):
    return linear(plain, *primals), jax.jvp(plain, primals, tangents)[1]


@dataclass(frozen=True)
class _Plain:
    """A product as a list of results."""

    product: Product

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        return [self.product(*operands)]
