# pyright: strict, reportUnknownMemberType=false
"""Operations whose bits do not depend on the program around them, for exact backends.

XLA for CPUs gives an element of a result other bits in another program in two cases. It fuses a
product and a sum into one operation, which rounds once, if both are in the same loop. And it
computes ``rsqrt``, and ``log1p`` of small numbers, by other instructions in a vector than for
single elements. Its other functions, such as ``exp``, ``log``, ``tanh`` and ``cos``, give the same
bits in both. The order of its sums depends on shapes, but the order of `add_halves` only on the
number of elements.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


@jax.custom_jvp
def round_product(x: jax.Array) -> jax.Array:
    """Round the product `x` before it is added to something."""
    # Neither XLA nor LLVM can remove this, because it replaces -0 by 0.
    return jnp.where(x == 0, jnp.zeros_like(x), x)


@round_product.defjvp
def _round_product_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return round_product(*primals), tangents[0]


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round `x` to the values of a float dtype; return float32.

    Casts do not suffice, because XLA may remove a cast to a smaller dtype and back.
    """
    limits = cast(Any, jnp.finfo(dtype))
    return lax.reduce_precision(x.astype(jnp.float32), limits.nexp, limits.nmant)


def add_halves(x: jax.Array, axis: int) -> jax.Array:
    """Sum over a dimension, whose size becomes 1, by adding its halves until one element is left.

    ::

        x0 x1 x2 | x3 x4 0        add the second half to the first
        y0 y1 | y2 0              y0 = x0 + x3, y1 = x1 + x4, y2 = x2 + 0
        z0 | z1                   z0 = y0 + y2, z1 = y1 + 0

    Round products first, see `round_product`.

    Args:
      x: float32.
      axis: the dimension, negative.
    """
    while (size := x.shape[axis]) > 1:
        half = -(-size // 2)
        first, second = jnp.split(x, [half], axis=axis)
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, half - second.shape[axis])
        x = first + jnp.pad(second, padding)
    return x
