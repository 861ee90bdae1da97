"""Matrix multiplication by the kernels of `source/linear.cc` and `source/grouped_linear.cc`."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paged_jax.kernels.backend import GroupedArgs, Stack, Weight
from paged_jax.kernels.cpu.calls import call
from paged_jax.kernels.cpu.library import Kernel, load
from paged_jax.kernels.dispatch import general_backend

# Maximum rows for float32 and bfloat16. XLA is up to a tenth faster if all rows are tokens, but a
# fourth of the rows in a batch of prompts is padding, which the kernel skips.
_MAX_ROWS = 256

# Weight types that the kernel multiplies by any number of rows: XLA would convert all of the weight
# to float32 first.
_ANY_ROWS = (jnp.float16, jnp.int8)
_FEW_ROWS = (jnp.float32, jnp.bfloat16)

Arrays = tuple[jax.Array, ...]


def copies_weights(dtype: DTypeLike) -> bool:
    """Return whether programs for this machine convert all weights of a type to float32 first."""
    dtype = jnp.dtype(dtype)
    return dtype in _ANY_ROWS and load(Kernel("linear", dtype)).target is None


def is_available() -> bool:
    """Return whether this machine has the kernel, or a compiler for it."""
    return load(Kernel("linear", jnp.dtype(jnp.float32))).target is not None


def linear(x: jax.Array, w: Weight) -> jax.Array:
    """Multiply the last dimension of `x` by a weight; see `paged_jax.kernels.linear.linear`.

    The result of a row does not depend on the number of rows. A row of zeros, such as padding,
    costs nothing and gives zeros for any weight.
    """
    if not _has_kernel_for(math.prod(x.shape[:-1]), w):
        return general_backend().linear(x, w)
    stack = w.stack or Stack(w.values[None], None if w.scales is None else w.scales[None], 0)
    L, num_inputs = stack.values.shape[0], stack.values.shape[-1]
    weight: Arrays = (w.values.reshape(-1, num_inputs),)
    stacked = stack.values.reshape(L, -1, num_inputs), jnp.asarray(stack.layer, jnp.int32)
    if w.scales is not None and stack.scales is not None:
        weight += (w.scales.reshape(-1),)
        stacked += (stack.scales.reshape(L, -1),)
    y = _multiply(_PlainLinear(w.dtype), x, weight, stacked)
    return y.reshape(*x.shape[:-1], *w.values.shape[:-1])


def _has_kernel_for(num_rows: int, w: Weight) -> bool:
    dtype = w.values.dtype
    if w.values.size == 0 or num_rows == 0 or dtype not in _ANY_ROWS + _FEW_ROWS:
        return False
    # XLA converts a whole stack of bfloat16 weights to float32.
    is_copied = dtype in _ANY_ROWS or (dtype == jnp.bfloat16 and w.stack is not None)
    return is_copied or num_rows <= _MAX_ROWS


def sum_rows(x: jax.Array) -> jax.Array:
    """Sum over the last dimension, by multiplying with ones; one thread sums each row.

    The order of summation does not depend on the other dimensions. Differentiable.

    Args:
      x: float32 ``[..., N]``.
    """
    ones = jnp.ones((1, x.shape[-1]), jnp.float32)
    return _multiply(_PlainSum(), x, (ones,), (ones[None], jnp.int32(0)))


@dataclass(frozen=True)
class _PlainLinear:
    """The matmul in plain JAX. Equal objects share compiled programs."""

    dtype: Any

    def __call__(
        self, x: jax.Array, values: jax.Array, scales: jax.Array | None = None
    ) -> jax.Array:
        return general_backend().linear(x, Weight(values, scales, None, self.dtype))


@dataclass(frozen=True)
class _PlainSum:
    """The sum in plain JAX."""

    def __call__(self, x: jax.Array, ones: jax.Array) -> jax.Array:
        del ones
        return general_backend().sum_rows(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _multiply(
    plain: Callable[..., jax.Array], x: jax.Array, weight: Arrays, stacked: Arrays
) -> jax.Array:
    """Call the kernel, or `plain` where there is none. Differentiable as `plain`.

    Args:
      plain: the same as a hashable function of `x` and the arrays of `weight`.
      x: floating point ``[..., in]``, rounded to bfloat16 if the weights are.
      weight: values ``[out, in]``, and float32 scales ``[out]`` if they are int8.
      stacked: what the kernel reads instead of `weight`: values ``[L, out, in]``, i32 ``[]`` layer,
        and float32 scales ``[L, out]`` if they are int8.

    Returns:
      float32 ``[..., out]``.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return _call(plain, rows, weight, stacked).reshape(*x.shape[:-1], weight[0].shape[0])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _call(
    plain: Callable[..., jax.Array], rows: jax.Array, weight: Arrays, stacked: Arrays
) -> jax.Array:
    kernel = Kernel("linear", stacked[0].dtype)
    [out] = call(kernel, _Plain(plain), (rows, *stacked), plain_operands=(rows, *weight))
    return out


@_multiply.defjvp
def _multiply_jvp(plain, primals, tangents):
    (x, weight, _), (dx, dweight, _) = primals, tangents
    tangent = jax.jvp(plain, (x, *weight), (dx, *dweight))[1]
    return _multiply(plain, *primals), tangent


def copies_expert_weights(dtype: DTypeLike) -> bool:
    """Return whether programs for this machine convert all weights of experts to float32 first."""
    dtype = jnp.dtype(dtype)
    return dtype == jnp.bfloat16 and load(Kernel("grouped_linear", dtype)).target is None


def grouped_linear(args: GroupedArgs) -> jax.Array:
    """Multiply rows by the weights of their groups; see `paged_jax.kernels.grouped_linear`.

    A row's result does not depend on the other rows.
    """
    values, layer = args.stack
    x, layer = args.x.astype(jnp.float32), jnp.asarray(layer, jnp.int32)
    kernel = Kernel("grouped_linear", values.dtype)
    operands = (x, values, args.group_sizes, layer)
    plain_operands = (x, args.w, args.group_sizes)
    [out] = call(kernel, _plain_grouped_linear, operands, plain_operands=plain_operands)
    return out


def _plain_grouped_linear(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> list[jax.Array]:
    args = GroupedArgs(x, w, group_sizes, (w[None], jnp.int32(0)))
    return [general_backend().grouped_linear(args)]


@dataclass(frozen=True)
class _Plain:
    """A product as a list of results."""

    product: Callable[..., jax.Array]

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        return [self.product(*operands)]
