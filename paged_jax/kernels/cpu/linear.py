"""Products of a few rows by the kernel of `source/linear.cc`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.cpu.calls import call
from paged_jax.kernels.cpu.library import Kernel, load

# Rows of a decode step, whose results do not depend on how many they are.
MAX_ROWS = 64

# With more rows XLA's products, which are up to a tenth faster where all rows are tokens, win over
# what the kernel spares of the padding of a batch of prompts, which is a fourth of its rows.
_MOST_ROWS = 256

# Types of weights of which the kernel takes any number of rows: XLA's products would convert all of
# the weight first.
_ANY_ROWS = (jnp.float16, jnp.int8)
_FEW_ROWS = (jnp.float32, jnp.bfloat16)

# A product of x with a weight: ``(x, w)`` or ``(x, w, scales)``.
Product = Callable[..., jax.Array]
Arrays = tuple[jax.Array, ...]


def takes(num_rows: int, w: jax.Array, stack: Any = None) -> bool:
    """Whether the kernel multiplies as many rows by weights of this type.

    Args:
      num_rows: rows of x.
      w: the weight.
      stack: what XLA would copy the weight out of, if anything. Of bfloat16 it would make float32
        of all of that.
    """
    if w.size == 0 or num_rows == 0 or w.dtype not in _ANY_ROWS + _FEW_ROWS:
        return False
    is_copied = w.dtype in _ANY_ROWS or (w.dtype == jnp.bfloat16 and stack is not None)
    return is_copied or num_rows <= _MOST_ROWS


def copies_weights(dtype: DTypeLike) -> bool:
    """Whether programs for this machine's CPU multiply by copies in float32 of such weights."""
    dtype = jnp.dtype(dtype)
    return dtype in _ANY_ROWS and load(Kernel("linear", dtype)).target is None


def is_available() -> bool:
    """Whether this machine has the kernel, or a compiler for it."""
    return load(Kernel("linear", jnp.dtype(jnp.float32))).target is not None


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
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    return linear(_sum_rows, x, (ones,), (ones[None], jnp.int32(0)))


def _sum_rows(x: jax.Array, ones: jax.Array) -> jax.Array:
    del ones
    return jnp.sum(x, axis=-1, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def linear(plain: Product, x: jax.Array, weight: Arrays, stack: Arrays) -> jax.Array:
    """``x @ w.T`` where a CPU has the kernel, and `plain` where not; differentiable as `plain`.

    A row's result does not depend on how many others there are. A row of zeros, as padding is,
    costs nothing and gives zeros, whatever the weights.

    Args:
      plain: a function of `x` and the arrays of `weight` that means the same; a module's own, so
        that it is hashable.
      x: floating point ``[..., in]``, rounded to bfloat16 if the weights are.
      weight: ``w [out, in]``, as `takes` has it, and float32 ``[out]`` if it is int8, by which the
        results are multiplied.
      stack: the same where the kernel reads it, and where there is then no other: ``[L, out, in]``,
        i32 ``[]``, the layer of it that is `w`, and float32 ``[L, out]`` if it is int8.

    Returns:
      float32 ``[..., out]``.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _call(plain, rows, weight, stack).reshape(*x.shape[:-1], weight[0].shape[0])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _call(plain: Product, rows: jax.Array, weight: Arrays, stack: Arrays) -> jax.Array:
    kernel = Kernel("linear", stack[0].dtype)
    [out] = call(kernel, _Plain(plain), (rows, *stack), plain_operands=(rows, *weight))
    return out


@linear.defjvp
def _linear_jvp(plain, primals, tangents):
    (x, weight, _), (dx, dweight, _) = primals, tangents
    tangent = jax.jvp(plain, (x, *weight), (dx, *dweight))[1]
    return linear(plain, *primals), tangent


@dataclass(frozen=True)
class _Plain:
    """A product as a list of results."""

    product: Product

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        return [self.product(*operands)]
