"""Conditional work on the logits of a batch."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


def apply_first(
    cases: Sequence[tuple[jax.Array, Callable[[jax.Array], jax.Array]]], x: jax.Array
) -> jax.Array:
    """Apply the first function with a True condition to `x`; return `x` if all are False.

    No second function is applied, so each function must include the work of all later functions. On
    GPUs, ``cases[0]`` is applied even if its condition is False, because the host would wait longer
    for the conditions than its function takes. So this function must be correct in any case.

    Args:
      cases: pairs of a condition, bool[], and a function. The function takes an array and returns
        an array of the same shape and dtype.
      x: the argument of the functions.
    """
    is_cheap = lax.platform_dependent(cuda=lambda: True, rocm=lambda: True, default=lambda: False)
    conditions, functions = zip(*cases, strict=True)
    first = jnp.int32(len(cases))
    for i in reversed(range(len(cases))):
        first = jnp.where(conditions[i], i, first)
    return lax.switch(jnp.where(is_cheap, 0, first), [*functions, lambda x: x], x)
