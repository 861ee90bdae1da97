"""Tools for derivatives: those of a plain function for a kernel, and errors for wrong ones."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


def with_plain_gradients(
    kernel: Callable[[Any], Any], plain: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Return `kernel` with the derivatives of `plain`, the same computation in plain JAX.

    JAX cannot differentiate kernels. Both functions take a single pytree of arrays.
    """
    # `custom_jvp` would pass default values of other parameters of `kernel` as traced arrays.
    function = jax.custom_jvp(lambda args: kernel(args))

    @function.defjvp
    def differentiate(primals: Any, tangents: Any) -> Any:
        _, out_dot = jax.jvp(plain, primals, tangents)
        return function(*primals), out_dot

    return function


def _unchanged(message: str, arrays: Any) -> Any:
    """Return `arrays`. If they are differentiated, raise `NotImplementedError` with `message`."""
    del message
    return arrays


without_derivative = jax.custom_jvp(_unchanged, nondiff_argnums=(0,))


def _refuse_derivative(message: str, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    is_zero = [isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(tangents)]
    if not all(is_zero):
        raise NotImplementedError(message)
    return primals[0], tangents[0]


without_derivative.defjvp(_refuse_derivative, symbolic_zeros=True)


def differentiable_once(function: str, values: Any) -> Any:
    """Return `values` unchanged, but raise an error if they are differentiated.

    A custom VJP applies this to the inputs of its forward and of its backward pass, so that a
    second derivative raises an error. The message begins with `function`. `values` is a tree of
    arrays. Instead of an array of zeros, a cotangent may be a `SymbolicZero`.
    """
    message = (
        f"{function}: only the first derivative is implemented, got a second one. For higher "
        'orders use paged_attention or paged_prefill_attention with backend="reference".'
    )
    leaves, treedef = jax.tree.flatten(values, is_leaf=lambda x: isinstance(x, SymbolicZero))
    indices = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    passed = without_derivative(message, [leaves[i] for i in indices])
    for i, value in zip(indices, passed, strict=True):
        leaves[i] = value
    return jax.tree.unflatten(treedef, leaves)
