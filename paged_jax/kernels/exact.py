# pyright: strict, reportUnknownMemberType=false
"""Rounding that exact backends need in the code around ops, see `rounding`."""

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.kernels.op import is_exact
from paged_jax.kernels.rounding import round_product


def rounded(x: jax.Array, backend: str | None) -> jax.Array:
    """Return the product `x`, rounded before it is added to something.

    Args:
      x: float32, a product that is an operand of a sum, or of a function that begins with a sum. A
        quotient with a constant is a product, because XLA multiplies by the inverse.
      backend: with an exact backend, see `is_exact`, the product is rounded. Others make no
        difference.
    """
    return round_product(x) if is_exact(backend) else x


def inverse_root(x: jax.Array, backend: str | None = None) -> jax.Array:
    """Return ``1 / sqrt(x)``; with an exact backend, see `is_exact`, as a rounded quotient."""
    if is_exact(backend):
        # The barrier prevents XLA from converting this to ``rsqrt``.
        return 1 / lax.optimization_barrier(jnp.sqrt(x))
    return lax.rsqrt(x)


def softplus(x: jax.Array, backend: str | None = None) -> jax.Array:
    """Return ``log(1 + exp(x))``; with an exact backend, see `is_exact`, without ``log1p``."""
    return _exact_softplus(x) if is_exact(backend) else jax.nn.softplus(x)


@jax.custom_jvp
def _exact_softplus(x: jax.Array) -> jax.Array:
    # log1p(y) is y * log(1 + y) / ((1 + y) - 1), in which the rounding of 1 + y cancels. The
    # barrier prevents XLA from simplifying it.
    y = jnp.exp(-jnp.abs(x))
    total = lax.optimization_barrier(1 + y)
    is_tiny = total == 1
    ratio = jnp.log(total) / jnp.where(is_tiny, jnp.ones_like(x), total - 1)
    return jnp.maximum(x, 0) + jnp.where(is_tiny, y, round_product(y * ratio))


@_exact_softplus.defjvp
def _exact_softplus_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _exact_softplus(*primals), tangents[0] * jax.nn.sigmoid(primals[0])
