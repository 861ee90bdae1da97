"""Products of rows with the weights of their groups, by `source/grouped_linear.cc`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.cpu.calls import call
from paged_jax.kernels.cpu.library import Kernel, load

# ``(x, w, group_sizes)`` to the products, see `paged_jax.kernels.grouped_linear`.
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def copies_groups(dtype: DTypeLike) -> bool:
    """Whether programs for this machine's CPU multiply by copies in float32 of all such weights."""
    dtype = jnp.dtype(dtype)
    return dtype == jnp.bfloat16 and load(Kernel("grouped_linear", dtype)).target is None


def grouped_linear(
    plain: GroupedProduct,
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    stack: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """The op where a CPU has the kernel, and `plain` where not. A row's result does not depend on
    other rows.

    Args:
      plain: a function that means the same; a module's own, so that it is hashable.
      x: floating point ``[R, in]``, rounded to bfloat16 if the weights are.
      w: float32, bfloat16 or float16 ``[X, out, in]``.
      group_sizes: i32 ``[X]``.
      stack: where the kernel reads `w`: ``[L, X, out, in]``, and i32 ``[]``, the layer of it.

    Returns:
      float32 ``[R, out]``, 0 in rows of no group.
    """
    values, layer = stack
    x, layer = x.astype(jnp.float32), jnp.asarray(layer, jnp.int32)
    kernel = Kernel("grouped_linear", values.dtype)
    operands = (x, values, group_sizes, layer)
    [out] = call(kernel, _Plain(plain), operands, plain_operands=(x, w, group_sizes))
    return out


@dataclass(frozen=True)
class _Plain:
    """A product as a list of results."""

    product: GroupedProduct

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        return [self.product(*operands)]
